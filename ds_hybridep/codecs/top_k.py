# SPDX-License-Identifier: Apache-2.0
"""The largest elements of each block of at most 1024, with small indices and few bits for a value.

Payload of a tensor of L elements in B = ceil(L / block) blocks, `k` kept in each:

    value_bits 1, 2, 4   the scales of ceil(B * k / 256) runs of 256 kept values as bf16,
                         then B * k codes of (index bits + value_bits) bits: value, index above it
    value_bits 16        B * k values as bf16, then B * k indices

Codes are one stream of bits, lowest first.  A block's kept elements stand in ascending order of index; of equal
magnitudes the first is kept.  Values, with a run's scale s:

    1 bit   -s, s                          s = mean magnitude of the kept
    2 bits  -1.5 s, -0.75 s, 0.75 s, 1.5 s     as above
    4 bits  as int4
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ds_hybridep.codecs.blockwise import (
    SCALE_BYTES,
    block_counts,
    dequantise,
    halving_sum,
    quantise,
    to_bf16,
    to_blocks,
)
from ds_hybridep.codecs.interface import Codec, CodecState, round_up
from ds_hybridep.kernels import Source

RUN = 256  # kept values that share a scale
LOW, HIGH, BETWEEN = 0.75, 1.5, 1.125  # of the mean magnitude, value_bits 2


@dataclass(frozen=True, kw_only=True)
class TopK(Codec):
    """The `k` largest of each `block` elements (a power of two up to 1024), values in `value_bits` bits.

    Error: with value_bits 16 the sum of squares left is at most (1 - k / block) of a full block's, bf16 rounding
    (2^-9 of a value) apart; fewer bits leave more, and never more than there was.
    """

    codec_id: ClassVar[int] = 2
    name: ClassVar[str] = "top_k"
    is_fused: ClassVar[bool] = True

    block: int = 256
    k: int = 5
    value_bits: Literal[1, 2, 4, 16] = 16

    @property
    def index_bits(self) -> int:
        """Bits of an index inside a block."""
        return self.block.bit_length() - 1

    def num_kept(self, rows: int, cols: int) -> int:
        """Values in a packet; the last block, if it is short, is filled with zeros."""
        return -(-rows * cols // self.block) * self.k

    def payload_bytes(self, rows: int, cols: int) -> int:
        """See `Codec.payload_bytes`."""
        kept = self.num_kept(rows, cols)
        if self.value_bits == 16:
            return round_up(kept * 2 + -(-kept * self.index_bits // 8))
        num_runs = -(-kept // RUN)
        return round_up(num_runs * SCALE_BYTES + -(-kept * (self.index_bits + self.value_bits) // 8))

    def header_number(self, rows: int, cols: int) -> int:
        """The kept elements."""
        return self.num_kept(rows, cols)

    def encode_fused(
        self, source: Source, a: Tensor, other: Tensor | None, state: CodecState, payload: Tensor
    ) -> Tensor | None:
        """See `Codec.encode_fused`."""
        kernels = self.compiled(a.device)
        if kernels is None:
            return None
        sizes = {"block": self.block, "k": self.k, "value_bits": self.value_bits}
        return kernels.top_k_encode(source, a, other, payload, **sizes)

    def encode_payload(self, x: Tensor, state: CodecState, payload: Tensor, is_bad: Tensor) -> Tensor:
        """See `Codec.encode_payload`."""
        is_overflow = self.encode_fused(Source.ENCODE, x, None, state, payload)
        if is_overflow is not None:
            return is_overflow.bool()
        blocks = to_blocks(x.flatten(1), self.block)  # [n, B, block]
        index = _largest(blocks, self.k)
        values = blocks.gather(-1, index).flatten(1)  # [n, kept]
        index = index.flatten(1)
        if self.value_bits == 16:
            rounded = values.to(torch.bfloat16)
            head, codes, bits = rounded, index, self.index_bits
        else:
            value_codes, head = _encode_values(values, self.value_bits)
            codes, bits = index << self.value_bits | value_codes.long(), self.index_bits + self.value_bits
        head_bytes = head.shape[1] * SCALE_BYTES
        code_bytes = -(-codes.shape[1] * bits // 8)
        payload[:, :head_bytes] = head.view(torch.uint8)
        payload[:, head_bytes : head_bytes + code_bytes] = _pack_bits(codes, bits)
        payload[:, head_bytes + code_bytes :] = 0
        return ~head.isfinite().all(dim=1)

    def decode_payload(self, payload: Tensor, out: Tensor) -> None:
        """See `Codec.decode_payload`."""
        self._decode(payload, out, is_add=False)

    def decode_add_payload(self, payload: Tensor, into: Tensor) -> None:
        """See `Codec.decode_add_payload`.  Elements that were not kept are not touched."""
        self._decode(payload, into, is_add=True)

    def _decode(self, payload: Tensor, out: Tensor, *, is_add: bool) -> None:
        kernels = self.compiled(out.device)
        if kernels is not None:
            sizes = {"block": self.block, "k": self.k, "value_bits": self.value_bits}
            kernels.top_k_decode(payload, out, **sizes, is_add=is_add)
            return
        n, rows, cols = out.shape
        index, values = self._kept(payload, rows, cols)
        # Padded, because a short last block can keep elements that are not there.
        padded = out.new_zeros(n, self.num_kept(rows, cols) // self.k * self.block)
        if is_add:
            padded[:, : rows * cols] = out.flatten(1)
            padded.scatter_add_(1, index, values)  # positions are distinct, so the order of adding does not matter
        else:
            padded.scatter_(1, index, values)
        out.copy_(padded[:, : rows * cols].view(out.shape))

    def _kept(self, payload: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
        """Positions int64 and values fp32 of the kept elements, [n, kept] each."""
        kept = self.num_kept(rows, cols)
        num_heads = kept if self.value_bits == 16 else -(-kept // RUN)
        head = payload[:, : num_heads * SCALE_BYTES].contiguous().view(torch.bfloat16)
        bits = self.index_bits + (0 if self.value_bits == 16 else self.value_bits)
        code_bytes = -(-kept * bits // 8)
        codes = _unpack_bits(payload[:, num_heads * SCALE_BYTES :][:, :code_bytes], bits, kept)
        if self.value_bits == 16:
            index, values = codes, head.float()
        else:
            index = codes >> self.value_bits
            values = _decode_values(codes & ((1 << self.value_bits) - 1), head, self.value_bits)
        base = torch.arange(kept, device=payload.device) // self.k * self.block
        return base + index, values


def _largest(blocks: Tensor, k: int) -> Tensor:
    """Indices int64 [..., k], ascending, of the largest magnitudes of blocks [..., block]; of equals the first."""
    magnitude = blocks.abs()
    if k == 1:
        return magnitude.argmax(dim=-1, keepdim=True)
    order = torch.argsort(magnitude, dim=-1, descending=True, stable=True)
    return order[..., :k].sort(dim=-1).values


def _encode_values(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Codes uint8 [n, kept] and scales bf16 [n, num_runs] of values [n, kept]."""
    if bits == 4:
        return quantise(values, 4, RUN)
    if bits == 1:
        return quantise(values, 1, RUN)
    runs = to_blocks(values, RUN)
    scales = to_bf16(halving_sum(runs.abs()) / block_counts(values.shape[1], RUN, values.device))
    is_high = runs.abs() > BETWEEN * scales.float().unsqueeze(-1)
    codes = (runs >= 0).to(torch.uint8) << 1 | is_high.to(torch.uint8)
    return codes.flatten(1)[:, : values.shape[1]], scales


def _decode_values(codes: Tensor, scales: Tensor, bits: int) -> Tensor:
    """The inverse: fp32 [n, kept]."""
    if bits in (1, 4):
        return dequantise(codes.to(torch.uint8), scales, bits, RUN)
    level = torch.where((codes & 1).bool(), HIGH, LOW) * torch.where(codes >= 2, 1.0, -1.0)
    return (to_blocks(level, RUN) * scales.float().unsqueeze(-1)).flatten(1)[:, : codes.shape[1]]


def _pack_bits(codes: Tensor, bits: int) -> Tensor:
    """Stream of `bits` bits from each of codes int64 [n, count]: uint8 [n, ceil(count * bits / 8)]."""
    each = (codes.unsqueeze(-1) >> torch.arange(bits, device=codes.device)) & 1
    groups = to_blocks(each.flatten(1).to(torch.uint8), 8)
    shifts = torch.arange(8, device=codes.device, dtype=torch.uint8)
    return (groups << shifts).sum(dim=-1, dtype=torch.uint8)


def _unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """The inverse: int64 [n, count]."""
    shifts = torch.arange(8, device=packed.device, dtype=torch.uint8)
    each = ((packed.unsqueeze(-1) >> shifts) & 1).flatten(1)[:, : count * bits]
    weights = 1 << torch.arange(bits, device=packed.device)
    return (each.view(len(packed), count, bits).long() * weights).sum(dim=-1)
