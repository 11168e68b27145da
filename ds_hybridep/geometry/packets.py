# SPDX-License-Identifier: Apache-2.0
"""Bytes of encoded messages, from the settings of a codec and the shapes of tensors, and how many are under way.

`codecs` asks this module for the sizes of packets.  `sync.messages` pads them; a test checks that both agree.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

HEADER_BYTES = 16  # of a packet
ALIGNMENT_BYTES = 16  # in a message, the packets of each part are padded to a multiple of this
SCALE_BYTES = 2
FP32_BYTES = 4
LARGEST_RANK = 256  # of a low-rank codec: with it, sums of products of factors are exact in fp32
FACTOR_BITS = 4  # of an element of a factor
ITERATIONS = 2  # of the power method, each step
BITS = {"int8": 8, "int4": 4, "int2": 2}
PATCH_PREFIX_BYTES = 24
COMPACT_BYTES = 161 * 2 / 128  # of an element of a residual in the compact form: 161 words for 128 elements
RETURNING_BYTES = 2**28  # of gradients on their way back: more than fits on a long link at a time
MOST_LEAVES = 16  # messages in which the gradients of a site leave; what leaves last is not hidden
LEAST_LEAF = 2**16  # elements of such a message: a smaller one saves less time than it takes

Part = tuple[int, int, int]  # (number of matrices, rows, columns); a vector has one row


def part_elements(part: Part) -> int:
    return math.prod(part)


@dataclass(frozen=True)
class PacketSizes:
    """Packets whose size follows from the shape."""

    def payload_bytes(self, rows: int, cols: int) -> int:
        raise NotImplementedError

    def packet_bytes(self, rows: int, cols: int) -> int:
        """Bytes of a packet, header included."""
        return HEADER_BYTES + self.payload_bytes(rows, cols)

    def message_bytes(self, parts: Iterable[Part]) -> float:
        """Bytes of one message that holds these parts."""
        return sum(round_up(number * self.packet_bytes(rows, cols), ALIGNMENT_BYTES) for number, rows, cols in parts)


@dataclass(frozen=True)
class BlockwiseSizes(PacketSizes):
    """Small integers, with a scale for each block of elements."""

    bits: int
    block: int

    def payload_bytes(self, rows: int, cols: int) -> int:
        return round_up(quantised_bytes(rows * cols, self.bits, self.block))


@dataclass(frozen=True)
class LowRankSizes(PacketSizes):
    """Two thin factors of a matrix, with a scale of a byte for each of its rows and columns."""

    ratio: float | None
    rank: int | None
    rest: PacketSizes | None

    def effective_rank(self, rows: int, cols: int) -> int:
        """Number of columns of each factor of a matrix."""
        rank = self.rank
        if rank is None:
            assert self.ratio is not None
            most_bytes = (int(rows * cols * FP32_BYTES / self.ratio) - HEADER_BYTES) // 4 * 4
            most = 8 * (most_bytes - scales_bytes(rows, cols)) // max(FACTOR_BITS * (rows + cols), 1)
            rank = min(max(most, 1), LARGEST_RANK)
        return min(rank, rows, cols)

    def is_left_to_fallback(self, rows: int, cols: int) -> bool:
        """True for vectors, and for matrices whose factors would not be shorter."""
        return min(rows, cols) <= 1 or self.factors_bytes(rows, cols) >= FALLBACK.payload_bytes(rows, cols)

    def payload_bytes(self, rows: int, cols: int) -> int:
        if self.is_left_to_fallback(rows, cols):
            return FALLBACK.payload_bytes(rows, cols)
        rest_bytes = 0 if self.rest is None else self.rest.payload_bytes(rows, cols)
        return self.factors_bytes(rows, cols) + rest_bytes

    def factors_bytes(self, rows: int, cols: int) -> int:
        """Bytes of both factors, without the rest."""
        rank = self.effective_rank(rows, cols)
        return round_up(-(-rank * (rows + cols) * FACTOR_BITS // 8) + scales_bytes(rows, cols))


@dataclass(frozen=True)
class PatchSizes:
    """Entropy-coded changes of 16-bit weights; `bits` is the average for each weight."""

    bits: float

    def message_bytes(self, parts: Iterable[Part]) -> float:
        return sum(PATCH_PREFIX_BYTES + part_elements(part) * self.bits / 8 for part in parts)


Packets = PacketSizes | PatchSizes  # that one codec makes of tensors


def packets_of(settings: Mapping[str, Any]) -> PacketSizes:
    """Packets of a codec, given all its settings as in a "hybridep" block, with all defaults.

    Patches are not allowed, because their size is not fixed: see `PatchSizes`.
    """
    kind = settings["type"]
    if kind in BITS:
        return BlockwiseSizes(BITS[kind], settings["block"])
    assert kind == "low_rank", f"{kind} has no packets of a fixed size"
    return LowRankSizes(
        ratio=settings["ratio"],
        rank=settings["rank"],
        rest=None if settings["rest"] is None else packets_of(settings["rest"]),
    )


def quantised_bytes(length: int, bits: int, block: int) -> int:
    """Bytes of the scales and codes of `length` elements."""
    return -(-length // block) * SCALE_BYTES + -(-length * bits // 8)


def scales_bytes(rows: int, cols: int) -> int:
    """Bytes of the scales of a matrix's rows and columns, and of the base of each."""
    return 4 + rows + cols


def round_up(num_bytes: int, multiple: int = 4) -> int:
    """Round up to the next multiple.  The default keeps packets aligned to 4 bytes."""
    return -(-num_bytes // multiple) * multiple


def return_depth(num_layers: int, layer_bytes: float, prefetch_depth: int) -> int:
    """Layers between the start of a gradient's return and the wait for it, if all replicas stay.

    Gradients that are on their way at the same time share one delay of the link.  Until the rank has waited for them,
    each layer needs `layer_bytes`, fp32, for the gradients that return.
    """
    return max(prefetch_depth, min(num_layers, int(RETURNING_BYTES // max(layer_bytes, 1))))


FALLBACK = BlockwiseSizes(4, 128)  # in place of low rank for small tensors
