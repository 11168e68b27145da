# SPDX-License-Identifier: Apache-2.0
"""Flat buffers of several tensors, cut into slots, and the matrices in them.

    a flat buffer            [ embedding 6 x 4 | norm 4 | weight 4 x 4 ]    44 elements
    two slots                  embedding, 22 elements  |  the other 22
    parts of slot 0            rows 0 to 4, a matrix 5 x 4; 2 elements of row 5
    parts of slot 1            2 elements of row 5; the norm; the weight, a matrix

A codec that works on matrices gets whole rows, and whole matrices of a stack; the rest goes as vectors.
"""

import hashlib
import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_hybridep.sync.messages import PacketPart, Piece

MIN_MATRIX = 1024  # elements; a smaller matrix gains nothing over a vector


@dataclass(frozen=True)
class Span:
    """A run of one tensor's elements.

    name: the parameter's name.  start: index of the first element in the flattened tensor.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    num_elements: int


def whole(name: str, shape: Sequence[int]) -> Span:
    return Span(name, tuple(shape), 0, math.prod(shape))


def cut(spans: Sequence[Span], bounds: Sequence[int]) -> list[tuple[Span, ...]]:
    """Cut spans, which follow each other in a flat buffer, into slots.

    bounds: the slots' ends, ascending; the last one is the end of the buffer.
    """
    slots: list[tuple[Span, ...]] = []
    rest, position = deque(span for span in spans if span.num_elements), 0
    for end in bounds:
        slot: list[Span] = []
        while rest and position < end:
            span = rest.popleft()
            taken = min(span.num_elements, end - position)
            slot.append(Span(span.name, span.shape, span.start, taken))
            if taken < span.num_elements:
                rest.appendleft(Span(span.name, span.shape, span.start + taken, span.num_elements - taken))
            position += taken
        slots.append(tuple(slot))
    assert not rest, f"the last bound is {bounds[-1]}, but {sum(s.num_elements for s in rest)} elements lie behind it"
    return slots


def even_bounds(spans: Sequence[Span], num_slots: int) -> list[int]:
    """Return the ends of slots that are about equally large and cut no row of a matrix."""
    total, bounds = sum(span.num_elements for span in spans), []
    ends = [0]
    for span in spans:
        ends.append(ends[-1] + span.num_elements)
    at = 0
    for slot in range(1, num_slots):
        wanted = total * slot // num_slots
        while at + 1 < len(spans) and ends[at + 1] <= wanted:
            at += 1
        row = spans[at].shape[-1] if spans and len(spans[at].shape) > 1 else 1
        bounds.append(min(ends[at] + round((wanted - ends[at]) / row) * row, ends[at + 1]) if spans else 0)
    return [*bounds, total]


def parts_of(spans: Iterable[Span], dtype: torch.dtype = torch.float32) -> tuple[PacketPart, ...]:
    """Return the parts of a slot's message, in the order of its elements; neighbouring vectors form one part."""
    parts: list[PacketPart] = []
    for span in spans:
        start = span.start
        for shape in _shapes(span.shape, span.start, span.num_elements):
            num_elements = math.prod(shape)
            pieces: tuple[tuple[Piece, int], ...] = (((span.name, start), num_elements),)
            start += num_elements
            if len(shape) == 1 and parts and len(parts[-1].shape) == 1:
                before = parts.pop()
                shape, pieces = (before.shape.numel() + num_elements,), before.pieces + pieces
            num_experts, *matrix = shape if len(shape) == 3 else (1, *shape)
            parts.append(PacketPart(torch.Size(matrix), num_experts, pieces, dtype))
    return tuple(parts)


def _shapes(shape: tuple[int, ...], start: int, num_elements: int) -> list[tuple[int, ...]]:
    """Split a run of a tensor's elements into vectors (n,), matrices (rows, cols) and stacks (e, rows, cols)."""
    cols = shape[-1] if len(shape) > 1 else 0
    rows = shape[-2] if len(shape) > 2 else 0
    for inner, outer in ((rows * cols, (rows, cols)), (cols, (cols,))):
        if not inner or math.prod(outer) < (MIN_MATRIX if len(outer) == 2 else 1):
            continue
        first, last = math.ceil(start / inner), (start + num_elements) // inner
        if last > first and (last - first) * inner >= MIN_MATRIX:
            before, behind = first * inner - start, start + num_elements - last * inner
            return [
                *_shapes(outer, start % inner, before),
                (last - first, *outer),
                *_shapes(outer, 0, behind),
            ]
    return [(num_elements,)] if num_elements else []


def split(flat: Tensor, parts: Sequence[PacketPart]) -> list[Tensor]:
    """Return views [e, *shape] of a flat slot, one for each part."""
    sizes = [part.num_experts * part.rows * part.cols for part in parts]
    pieces = zip(flat.split(sizes) if parts else (), parts, strict=True)
    return [piece.view(part.num_experts, *part.shape) for piece, part in pieces]


def hash_of(slots: Sequence[Sequence[Span]]) -> str:
    """Return a hash that is the same for the same spans in every process."""
    return hashlib.sha1(repr([tuple(slot) for slot in slots]).encode(), usedforsecurity=False).hexdigest()[:16]
