# SPDX-License-Identifier: Apache-2.0
"""Patches: the exact changes between two versions of 16-bit weights.

A training step changes few bits of a bf16 or fp16 weight.  The receiver has the old weights, so a packet need only
say which changed and by how much.  How likely a change is depends on the size of the weight.  So weights are taken in
the order of their old exponents, and each class of exponents has a code of its own.

    encoder                                                decoder
    length = patch.encode(new, sent, out, sequence)        patch.decode(out[:length], held)
    sent == new                                            held == new, bit for bit

The layout is in `patch_format.py`.  The compiled kernels do the same as the code there.
"""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ds_hybridep.codecs.packet import MAGIC, VERSION, stamp_of
from ds_hybridep.codecs.patch_format import MANTISSA_BITS, SEGMENT
from ds_hybridep.codecs.patch_format import decode as decode_reference
from ds_hybridep.codecs.patch_format import encode as encode_reference
from ds_hybridep.errors import PacketError
from ds_hybridep.geometry.packets import PATCH_PREFIX_BYTES as PREFIX_BYTES
from ds_hybridep.kernels import CompiledCodecs, Mode, load_codec_kernels

MODULUS = 2**32
LENGTH_LIMIT = 2**48  # of a packet in bytes


@dataclass(frozen=True, kw_only=True)
class PatchCodec:
    """Packets that turn the weights sent last into the present ones, exactly.

    A packet starts with the header of `packet.py` and 8 bytes with the packet's length.  The header's number is a
    checksum of the new values and the sequence number.  It makes it an error to apply a packet twice, out of order, or
    after damage: when `decode` returns, `held` has the encoder's values.

    All `kernels` make the same bytes.
    """

    codec_id: ClassVar[int] = 4

    kernels: Mode = field(default="auto", compare=False, repr=False)

    def settings(self) -> str:
        """The name in the stamp; there are no options."""
        return "patch"

    def max_bytes(self, num_elements: int) -> int:
        """Return the most bytes of a packet of `num_elements`: 2 for each, 5 for each 2^20 of them, and 24."""
        return PREFIX_BYTES + 2 * num_elements + 5 * -(-num_elements // SEGMENT)  # every segment as its new values

    def encode(self, new: Tensor, sent: Tensor, out: Tensor, sequence: int) -> int:
        """Write the packet that turns `sent` into `new` to the start of `out`, and set sent to new.

        Args:
            new, sent: [n] bf16 or fp16, contiguous, of one dtype and device.
            out: uint8 [max_bytes(n)] or longer, contiguous, on that device.
            sequence: number of the packet, kept modulo 2^32.

        Returns:
            The packet's length in bytes.  Reading it is a device-to-host sync on an accelerator.
        """
        _check_weights(new=new, sent=sent)
        room = self.max_bytes(len(new))
        assert (out.dtype, out.is_contiguous()) == (torch.uint8, True), f"out: {out.dtype}, strides {out.stride()}"
        assert len(out) >= room, f"out: {len(out)} bytes, wanted {room}"
        assert out.device == new.device, f"out: on {out.device}, wanted {new.device}"
        kernels = self._compiled(new.device)
        encode = encode_reference if kernels is None else kernels.patch_encode
        num_bytes, checksum = encode(new, sent, out[PREFIX_BYTES:], mantissa_bits=MANTISSA_BITS[new.dtype])
        length = PREFIX_BYTES + num_bytes
        words = [
            MAGIC | VERSION << 8 | self.codec_id << 16,
            (checksum + sequence) % MODULUS,
            sequence % MODULUS,
            self._stamp(new),
            length % MODULUS,
            length // MODULUS,
        ]
        prefix = b"".join(word.to_bytes(4, "little") for word in words)
        out[:PREFIX_BYTES] = torch.frombuffer(bytearray(prefix), dtype=torch.uint8).to(out.device)
        return length

    def length(self, message: Tensor) -> int:
        """Return the bytes of the packet at the start of `message`, uint8 [PREFIX_BYTES] or longer.

        The rest of the packet need not be there.  Raises PacketError if no packet of a patch starts there.
        """
        return self._words(message)[4]

    def sequence(self, message: Tensor) -> int:
        """Return the sequence number of the packet at the start of `message`; otherwise like `length`."""
        return self._words(message)[2]

    def decode(self, packet: Tensor, held: Tensor) -> None:
        """Turn `held` into what the encoder's `new` was, bit for bit.

        Args:
            packet: uint8, the packet and perhaps more behind it, on the device of `held`.
            held: [n] bf16 or fp16, contiguous, with the bits that the encoder's `sent` had.

        Raises:
            PacketError: the packet is of another dtype or size, is damaged, or was made for other values than `held`
                has.  Some of `held` may have been overwritten by then: get the values again from their owner.
        """
        _check_weights(held=held)
        assert packet.device == held.device, f"packet: on {packet.device}, wanted {held.device}"
        _, number, sequence, stamp, length = self._words(packet)
        wanted = self._stamp(held)
        if stamp != wanted:
            raise PacketError(
                f"packet has stamp {stamp:#010x}, wanted {wanted:#010x} for a patch of {held.dtype} [{len(held)}]; "
                "encode and decode tensors of one dtype and size"
            )
        if length > len(packet):
            raise PacketError(f"packet has {len(packet)} bytes, wanted {length} as its header says; it was cut off")
        kernels = self._compiled(held.device)
        decode = decode_reference if kernels is None else kernels.patch_decode
        payload = packet[PREFIX_BYTES:length].contiguous()
        wrong, checksum = decode(payload, held, mantissa_bits=MANTISSA_BITS[held.dtype])
        if wrong:
            raise PacketError(f"packet {sequence} is damaged: {wrong}; get the weights anew from their owner")
        if (checksum + sequence) % MODULUS != number:
            raise PacketError(
                f"packet {sequence} gives values with checksum {(checksum + sequence) % MODULUS:#010x}, wanted "
                f"{number:#010x}: it is damaged, or was made for other values than are held; "
                "apply each packet once and in order, and get the weights anew from their owner"
            )

    def _words(self, message: Tensor) -> tuple[int, int, int, int, int]:
        """Return start, checksum, sequence, stamp and length of the packet at the start of `message`."""
        assert (message.dtype, message.dim()) == (torch.uint8, 1), f"packet: {message.dtype} {message.shape}"
        if len(message) < PREFIX_BYTES:
            raise PacketError(f"packet has {len(message)} bytes, wanted {PREFIX_BYTES} or more; it was cut off")
        prefix = bytes(message[:PREFIX_BYTES].tolist())  # device-to-host sync
        start, number, sequence, stamp = (int.from_bytes(prefix[at : at + 4], "little") for at in (0, 4, 8, 12))
        length = int.from_bytes(prefix[16:24], "little")
        wanted = MAGIC | VERSION << 8 | self.codec_id << 16
        if start != wanted:
            raise PacketError(
                f"packet starts with {start:#010x}, wanted {wanted:#010x} for a patch; encode with patch"
            )
        if not PREFIX_BYTES <= length < LENGTH_LIMIT:
            raise PacketError(f"packet says that it has {length} bytes, wanted {PREFIX_BYTES} or more; it is damaged")
        return start, number, sequence, stamp, length

    def _stamp(self, weights: Tensor) -> int:
        return stamp_of(f"{self.settings()} {weights.dtype}", 1, len(weights))

    def _compiled(self, device: torch.device) -> CompiledCodecs | None:
        return load_codec_kernels(self.kernels, device)


def _check_weights(**tensors: Tensor) -> None:
    """Flat, contiguous tensors of bf16 or fp16, of one dtype, length and device."""
    first = next(iter(tensors.values()))
    for name, one in tensors.items():
        what = f"{name}: {one.dtype} {list(one.shape)} with strides {list(one.stride())} on {one.device}"
        assert (one.dtype, one.shape, one.device) == (first.dtype, first.shape, first.device), what
        assert (one.dtype in MANTISSA_BITS, one.dim(), one.is_contiguous()) == (True, 1, True), what
