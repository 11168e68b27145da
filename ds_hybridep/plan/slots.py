# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a data-parallel group share tensors that all of them hold, and the matrices in each share.

Under ZeRO 1 and 2, the tensors follow each other in a flat buffer, which is cut into partitions of equal size.
Without ZeRO, the parts are about equal, and no cut is inside a row.  `sync.flat` does the same with tensors; a test
checks that both agree.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ds_hybridep.plan.packets import Part, part_elements

MIN_MATRIX = 1024  # elements; a smaller matrix travels as a vector
PARTITION_ALIGNMENT = 2  # the elements of each ZeRO partition are a multiple of this

Shape = tuple[int, ...]
Span = tuple[Shape, int, int]  # a tensor's shape, the first element of a run, and its length
Slot = tuple[Part, ...]


@dataclass(frozen=True)
class Shares:
    """What each rank of a group owns: the parts of its gradients, and of its parameters with padding, by slot."""

    gradients: tuple[Slot, ...]
    parameters: tuple[Slot, ...]


@lru_cache(maxsize=256)
def shares_of(tensors: tuple[Shape, ...], num_ranks: int, zero_stage: int) -> Shares:
    """The slots of `num_ranks` ranks, for tensors in the order of the model's parameters.

    Under ZeRO 2, gradients are assumed to come in the opposite order, as in the backward.
    """
    spans = [(shape, 0, math.prod(shape)) for shape in tensors]
    total = sum(count for _, _, count in spans)
    if zero_stage == 0:
        slots = tuple(parts_of(slot) for slot in cut(spans, even_bounds(spans, num_ranks)))
        return Shares(slots, slots)
    alignment = PARTITION_ALIGNMENT * num_ranks
    size = -(-total // alignment) * PARTITION_ALIGNMENT
    bounds = [size * (slot + 1) for slot in range(num_ranks)]
    step = -1 if zero_stage == 2 else 1
    gradients = tuple(parts_of(slot[::step]) for slot in cut(spans, bounds))
    padding = bounds[-1] - total
    padded = [*spans, ((padding,), 0, padding)] if padding else spans
    return Shares(gradients, tuple(parts_of(slot) for slot in cut(padded, bounds)))


def cut(spans: Sequence[Span], bounds: Sequence[int]) -> list[tuple[Span, ...]]:
    """Cut the spans of a flat buffer into slots; bounds: the end of each slot, last the end of the buffer."""
    slots: list[tuple[Span, ...]] = []
    rest, position = [span for span in reversed(spans) if span[2]], 0  # the last item is the next span
    for end in bounds:
        slot: list[Span] = []
        while rest and position < end:
            shape, start, count = rest.pop()
            taken = min(count, end - position)
            slot.append((shape, start, taken))
            if taken < count:
                rest.append((shape, start + taken, count - taken))
            position += taken
        slots.append(tuple(slot))
    return slots


def even_bounds(spans: Sequence[Span], num_slots: int) -> list[int]:
    """Ends of slots that are about equally large and cut no row of a matrix."""
    ends = [0]
    for _, _, count in spans:
        ends.append(ends[-1] + count)
    total, at, bounds = ends[-1], 0, []
    for slot in range(1, num_slots):
        wanted = total * slot // num_slots
        while at + 1 < len(spans) and ends[at + 1] <= wanted:
            at += 1
        row = spans[at][0][-1] if spans and len(spans[at][0]) > 1 else 1
        bounds.append(min(ends[at] + round((wanted - ends[at]) / row) * row, ends[at + 1]) if spans else 0)
    return [*bounds, total]


def parts_of(spans: Iterable[Span]) -> Slot:
    """Parts of a message that holds these spans; neighbouring vectors are one part."""
    parts: list[Part] = []
    ends_with_vector = False
    for shape, start, count in spans:
        for piece in _shapes(shape, start, count):
            is_vector = len(piece) == 1
            if is_vector and ends_with_vector:
                parts[-1] = (1, 1, parts[-1][2] + piece[0])
            else:
                parts.append(part_of(piece))
            ends_with_vector = is_vector
    return tuple(parts)


def part_of(shape: Shape) -> Part:
    """Part of a vector, a matrix or a stack of matrices; a tensor of more than three dimensions is one matrix."""
    number, matrix = (shape[0], shape[1:]) if len(shape) == 3 else (1, shape)
    rows = matrix[0] if len(matrix) > 1 else 1
    return number, rows, math.prod(matrix) // max(rows, 1)


def _shapes(shape: Shape, start: int, count: int) -> list[Shape]:
    """Split a run of a tensor's elements into vectors, matrices of whole rows, and stacks of whole matrices."""
    cols = shape[-1] if len(shape) > 1 else 0
    rows = shape[-2] if len(shape) > 2 else 0
    for inner, outer in ((rows * cols, (rows, cols)), (cols, (cols,))):
        if not inner or math.prod(outer) < (MIN_MATRIX if len(outer) == 2 else 1):
            continue
        first, last = -(-start // inner), (start + count) // inner
        if last > first and (last - first) * inner >= MIN_MATRIX:
            before, behind = first * inner - start, start + count - last * inner
            return [*_shapes(outer, start % inner, before), (last - first, *outer), *_shapes(outer, 0, behind)]
    return [(count,)] if count else []


def num_elements(slot: Slot) -> int:
    return sum(map(part_elements, slot))
