# SPDX-License-Identifier: Apache-2.0
"""What stands in front of every payload, and the check that a packet is applied once and in order.

A packet is HEADER_BYTES bytes, then a payload whose length follows from codec, shape and step:

    byte  0     magic 0x9d
    byte  1     version of this layout
    byte  2     id of the codec that made the payload
    byte  3     flags: bit 0, the tensor held inf or nan (the payload says nothing then)
    bytes 4-7   the codec's own number, for example the rank
    bytes 8-11  sequence number: the encoder's step, modulo 2^32
    bytes 12-15 stamp: CRC-32 of the codec's settings and of the tensor's shape

Numbers are little-endian.  The stamp makes a packet of other settings an error instead of noise.
"""

import zlib

import torch
from torch import Tensor

from ds_hybridep.errors import PacketError

HEADER_BYTES = 16
MAGIC = 0x9D
VERSION = 1
NON_FINITE = 1  # flag
SEQUENCE_MODULUS = 2**32


def stamp_of(settings: str, rows: int, cols: int) -> int:
    """Number that two packets share if they were made by equal settings from tensors of one shape."""
    return zlib.crc32(f"{settings} {rows} {cols}".encode())


def start_of(codec_id: int) -> int:
    """The first three bytes of a header as a number."""
    return MAGIC | VERSION << 8 | codec_id << 16


def write_headers(packets: Tensor, *, codec_id: int, number: int, sequence: int, stamp: int, is_bad: Tensor) -> None:
    """Fill the headers of packets [n, packet_bytes]; is_bad [n] bool sets the non-finite flag."""
    words = [start_of(codec_id), number, sequence % SEQUENCE_MODULUS, stamp]
    signed = [word - 2**32 if word >= 2**31 else word for word in words]
    header = torch.tensor(signed, dtype=torch.int32).view(torch.uint8).to(packets.device)
    packets[:, :HEADER_BYTES] = header
    packets[:, 3] = is_bad.to(torch.uint8) * NON_FINITE


def non_finite(packets: Tensor) -> Tensor:
    """[n] bool: which packets carry the non-finite flag."""
    return (packets[:, 3] & NON_FINITE).bool()


def sequence_of(packets: Tensor) -> int:
    """The sequence number that all n packets carry.  Reading it is a device-to-host sync on an accelerator.

    Raises:
        PacketError: the packets are of different steps.
    """
    numbers = set(_words(packets)[:, 2].tolist())
    if len(numbers) != 1:
        raise PacketError(
            f"packets of one tensor carry the sequence numbers {sorted(numbers)[:4]}, wanted one number; "
            "decode the packets of one step together"
        )
    return int(numbers.pop()) % SEQUENCE_MODULUS


def check_headers(packets: Tensor, *, codec_id: int, stamp: int, what: str) -> None:
    """Raise PacketError unless packets [n, packet_bytes] were made by the codec `what` for this shape.

    Skipped on an accelerator, where reading them is a device-to-host sync.
    """
    if packets.device.type != "cpu" or not len(packets):
        return
    # Flags may differ from packet to packet, and number and sequence are not checked here.
    wanted = torch.tensor([MAGIC, VERSION, codec_id], dtype=torch.uint8)
    stamps = _words(packets)[:, 3]
    signed = stamp - 2**32 if stamp >= 2**31 else stamp
    if bool((packets[:, :3] == wanted).all()) and bool((stamps == signed).all()):
        return
    raise PacketError(
        f"packet starts with {packets[0, :3].tolist()} and stamp {int(stamps[0]) % 2**32:#010x}, wanted "
        f"{wanted.tolist()} and {stamp:#010x} for {what}; encode and decode with equal codec settings and shapes"
    )


def _words(packets: Tensor) -> Tensor:
    """Headers as [n, 4] int32."""
    return packets[:, :HEADER_BYTES].contiguous().view(torch.int32)


class PacketOrder:
    """Applies each packet once: says which arriving packets are due.

        if order.accept(packets):
            codec.decode_add(packets, replica)

    One object per stream, that is for each tensor group and sender.  On an accelerator packets are taken to be due, as
    a transport brings them that loses and repeats none: reading their numbers would be a device-to-host sync.
    """

    def __init__(self, expected: int = 0) -> None:
        """Begin with the packet whose sequence number is `expected`."""
        self.expected = expected % SEQUENCE_MODULUS

    def accept(self, packets: Tensor) -> bool:
        """Whether packets [n, packet_bytes] are due.  False: they were applied before; drop them.

        Raises:
            PacketError: packets before these are missing; nothing was changed.  Have them sent again, or resync.
        """
        sequence = sequence_of(packets) if packets.device.type == "cpu" else self.expected
        ahead = (sequence - self.expected) % SEQUENCE_MODULUS
        if ahead >= SEQUENCE_MODULUS // 2:  # behind, in arithmetic that wraps
            return False
        if ahead:
            raise PacketError(
                f"packet has sequence number {sequence}, wanted {self.expected}: {ahead} packets were lost or are "
                "late; apply those first, or resync the replica from its owner"
            )
        self.expected = (self.expected + 1) % SEQUENCE_MODULUS
        return True
