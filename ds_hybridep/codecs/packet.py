# SPDX-License-Identifier: Apache-2.0
"""The header before every payload.

A packet is a header of HEADER_BYTES bytes, then a payload whose length follows from codec, shape and step:

    byte  0     magic 0x9d
    byte  1     version of this layout
    byte  2     id of the codec that made the payload
    byte  3     flags: bit 0, the tensor held inf or nan (the payload then has no meaning)
    bytes 4-7   the codec's own number, for example the rank
    bytes 8-11  sequence number: the encoder's step, modulo 2^32
    bytes 12-15 stamp: CRC-32 of the codec's settings and of the tensor's shape

Numbers are little-endian.  The stamp makes a packet of other settings an error instead of noise.
"""

import zlib

import torch
from torch import Tensor

from ds_hybridep.errors import PacketError
from ds_hybridep.geometry.packets import HEADER_BYTES

MAGIC = 0x9D
VERSION = 1
NON_FINITE = 1  # flag
SEQUENCE_MODULUS = 2**32


def stamp_of(settings: str, rows: int, cols: int) -> int:
    """Return a number that packets share if they were made by equal settings from tensors of one shape."""
    return zlib.crc32(f"{settings} {rows} {cols}".encode())


def write_headers(packets: Tensor, *, start: int, number: int, sequence: int, stamp: int, is_bad: Tensor) -> None:
    """Fill the headers of packets [n, packet_bytes].

    `start` is their first three bytes as a number; is_bad [n] uint8 is 1 where the non-finite flag is set.
    """
    words = [start, number, sequence, stamp]
    signed = [word - 2**32 if word >= 2**31 else word for word in words]
    header = torch.tensor(signed, dtype=torch.int32, device="cpu").view(torch.uint8).to(packets.device)
    packets[:, :HEADER_BYTES] = header
    packets[:, 3] = is_bad * NON_FINITE


def non_finite(packets: Tensor) -> Tensor:
    """Return [n] bool: which packets carry the non-finite flag."""
    return (packets[:, 3] & NON_FINITE).bool()


def check_headers(packets: Tensor, *, start: int, stamp: int, what: str) -> None:
    """Raise PacketError unless packets were made by the codec `what` for this shape.

    On CUDA devices a wrong packet causes a CUDA error at the next synchronisation.  Other devices check nothing.
    """
    if packets.device.type not in ("cpu", "cuda") or not len(packets):
        return
    # Flags may differ from packet to packet, and number and sequence are not checked here.
    words = header_words(packets)
    signed = stamp - 2**32 if stamp >= 2**31 else stamp
    is_right = (((words[:, 0] & 0xFFFFFF) == start) & (words[:, 3] == signed)).all()
    wanted = f"{list(start.to_bytes(3, 'little'))} and {stamp:#010x} for {what}"
    advice = "encode and decode with equal codec settings and shapes"
    if packets.device.type == "cuda":  # no device-to-host sync
        torch._assert_async(is_right, f"packet starts otherwise or has another stamp, wanted {wanted}; {advice}")
    elif not is_right:
        found = f"{packets[0, :3].tolist()} and stamp {int(words[0, 3]) % 2**32:#010x}"
        raise PacketError(f"packet starts with {found}, wanted {wanted}; {advice}")


def header_words(packets: Tensor) -> Tensor:
    """Return headers as [n, 4] int32.  Bringing them to the host is a sync on an accelerator."""
    return packets[:, :HEADER_BYTES].contiguous().view(torch.int32)
