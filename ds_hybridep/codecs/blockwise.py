# SPDX-License-Identifier: Apache-2.0
"""int8, int4 and int2: blocks of consecutive elements share a scale, elements become 8, 4 or 2 bits.

The payload of a tensor of L elements: the scales of ceil(L / block) blocks as bf16, then the codes, lowest bits first.
The last block may be short.  Values, with the block's scale s:

    bits  codes       values                     scale
    8     -127..127   code * s                   largest magnitude / 127, rounded up
    4     -7..7       code * s                   largest magnitude / 7, rounded up
    2     -2..1       (code + 0.5) * s           1.25 * mean magnitude

A scale below the smallest normal number counts as 0, so that processors which flush subnormal numbers agree.

Sums are computed by halving: x[:h] + x[h:] until one number is left.  That order is the same in every language.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from ds_hybridep.codecs.interface import Codec, CodecState, assign_or_add
from ds_hybridep.config_codecs import BlockwiseConfig
from ds_hybridep.geometry.packets import BITS, SCALE_BYTES, quantised_bytes
from ds_hybridep.kernels import Source

SMALLEST_NORMAL = 2.0**-126
INT2_STEP = 1.25  # of the mean magnitude: near the least squared error of four levels for normal numbers (1.248)
LARGEST_CODE = {8: 127.0, 4: 7.0}


def halving_sum(x: Tensor) -> Tensor:
    """Sum over the last dimension, whose size is a power of two: [..., size] -> [...]."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def to_blocks(x: Tensor, block: int) -> Tensor:
    """[..., L] -> [..., num_blocks, block], the last block filled with zeros."""
    length = x.shape[-1]
    missing = -length % block
    if missing:
        x = torch.nn.functional.pad(x, (0, missing))
    return x.reshape(*x.shape[:-1], (length + missing) // block, block)


def to_bf16(x: Tensor) -> Tensor:
    """Convert scales fp32 -> bf16; subnormal ones become 0."""
    rounded = x.to(torch.bfloat16)
    return torch.where(rounded < SMALLEST_NORMAL, 0.0, rounded)


def to_bf16_up(x: Tensor) -> Tensor:
    """Convert scales fp32 -> bf16, rounded up; subnormal ones become 0."""
    # Adding 0xFFFF carries into the kept bits unless the bits that are cut off are all zero.
    bits = (x.view(torch.int32) + 0xFFFF) & ~0xFFFF
    return to_bf16(bits.view(torch.float32))


def quantise(x: Tensor, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """Return codes and scales of x [N, L] fp32: uint8 [N, L], one code per byte, and bf16 [N, num_blocks]."""
    length = x.shape[-1]
    blocks = to_blocks(x, block)
    if bits in LARGEST_CODE:
        largest = LARGEST_CODE[bits]
        scales = to_bf16_up(blocks.abs().amax(dim=-1) / largest if x.numel() else blocks.sum(dim=-1))
        codes = torch.round(blocks / divisor(scales)).clamp_(-largest, largest) + (largest + 1)
    else:
        counts = (length - torch.arange(0, length, block, device=x.device)).clamp(max=block)
        mean = halving_sum(blocks.abs()) / counts
        scales = to_bf16(mean * INT2_STEP)
        codes = torch.floor(blocks / divisor(scales)).clamp_(-2.0, 1.0) + 2.0
    return codes.to(torch.uint8).flatten(-2)[..., :length], scales


def divisor(scales: Tensor) -> Tensor:
    """Return scales to divide by, [..., num_blocks, 1] fp32: inf in place of 0, so that quotients are 0."""
    s = scales.float()
    return torch.where(s == 0, torch.inf, s).unsqueeze(-1)


def times_scales(levels: Tensor, scales: Tensor, block: int) -> Tensor:
    """Return levels fp32 [N, L] times the scales bf16 [N, num_blocks] of their blocks."""
    scaled = to_blocks(levels, block) * scales.float().unsqueeze(-1)
    return scaled.flatten(-2)[..., : levels.shape[-1]]


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack codes uint8 [N, L], one per byte, to [N, ceil(L * bits / 8)], the first code in the lowest bits."""
    per_byte = 8 // bits
    if per_byte == 1:
        return codes
    groups = to_blocks(codes, per_byte)
    packed = groups[..., 0].clone()
    for position in range(1, per_byte):
        packed |= groups[..., position] << (bits * position)
    return packed


def unpack(packed: Tensor, bits: int, length: int) -> Tensor:
    """The inverse of `pack`: uint8 [N, length]."""
    if bits == 8:
        return packed
    mask = (1 << bits) - 1
    shifts = range(0, 8, bits)
    return torch.stack([(packed >> shift) & mask for shift in shifts], dim=-1).flatten(-2)[..., :length]


def write_quantised(x: Tensor, payload: Tensor, bits: int, block: int) -> Tensor:
    """Quantise x [N, L] fp32 into payload [N, quantised_bytes].  Returns [N] bool: True if a scale overflowed."""
    codes, scales = quantise(x, bits, block)
    write_codes(codes, scales, payload, bits)
    return ~scales.isfinite().all(dim=-1)


def write_codes(codes: Tensor, scales: Tensor, payload: Tensor, bits: int) -> None:
    """Write codes uint8 [N, L], one per byte, and scales bf16 [N, num_blocks] to payload [N, quantised_bytes]."""
    scale_bytes = scales.shape[-1] * SCALE_BYTES
    payload[:, :scale_bytes] = scales.view(torch.uint8)
    payload[:, scale_bytes:] = pack(codes, bits)


def read_codes(payload: Tensor, length: int, bits: int, block: int) -> tuple[Tensor, Tensor]:
    """The inverse of `write_codes`."""
    scale_bytes = -(-length // block) * SCALE_BYTES
    scales = payload[:, :scale_bytes].contiguous().view(torch.bfloat16)
    return unpack(payload[:, scale_bytes:], bits, length), scales


def read_quantised(payload: Tensor, length: int, bits: int, block: int) -> Tensor:
    """Return the values of payload [N, quantised_bytes], fp32 [N, length]."""
    codes, scales = read_codes(payload, length, bits, block)
    offset = LARGEST_CODE[bits] + 1 if bits in LARGEST_CODE else 1.5
    return times_scales(codes.float() - offset, scales, block)


@dataclass(frozen=True, kw_only=True)
class Blockwise(Codec):
    """Quantisation to 8, 4 or 2 bits with one scale for each `block` elements.

    Error of a block of B elements with the largest magnitude a and the scale s, bf16 rounding included:

        8 bits  at most s / 2 per element, s <= a / 127 * (1 + 2^-7)
        4 bits  at most s / 2 per element, s <= a / 7 * (1 + 2^-7)
        2 bits  sum of squares at most (1 - 0.8 / B) of the block's

    So error feedback converges with 2 bits too; of normally distributed numbers, they leave 12%.
    """

    codec_id: ClassVar[int] = 1

    config: BlockwiseConfig

    @cached_property
    def layout(self) -> dict[str, int]:
        """Return bits and block, as kernels take them."""
        return {"bits": BITS[self.config.type], "block": self.config.block}

    def header_number(self, rows: int, cols: int) -> int:
        return self.layout["bits"]

    def encode_payload(
        self, x: Tensor, state: CodecState, payload: Tensor, is_bad: Tensor, *, gradient: Tensor | None
    ) -> Tensor:
        flags = self.encode_fused(Source.ENCODE, x, None, state, payload=payload)
        if flags is not None:
            return flags.bool()
        num_bytes = quantised_bytes(x.shape[1] * x.shape[2], **self.layout)
        payload[:, num_bytes:] = 0
        return write_quantised(x.flatten(1), payload[:, :num_bytes], **self.layout)

    def encode_fused(
        self, source: Source, a: Tensor, other: Tensor | None, state: CodecState, *, payload: Tensor
    ) -> Tensor | None:
        kernels = self.compiled(a.device)
        return None if kernels is None else kernels.blockwise_encode(source, a, other, payload, **self.layout)

    def decode_payload(self, payload: Tensor, out: Tensor, *, is_add: bool) -> None:
        kernels = self.compiled(out.device)
        if kernels is not None:
            kernels.blockwise_decode(payload, out, **self.layout, is_add=is_add)
            return
        length = out.shape[1] * out.shape[2]
        values = read_quantised(payload[:, : quantised_bytes(length, **self.layout)], length, **self.layout)
        assign_or_add(out, values.view(out.shape), is_add=is_add)
