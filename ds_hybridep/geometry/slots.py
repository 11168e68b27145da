# SPDX-License-Identifier: Apache-2.0
"""How the ranks of a data-parallel group share tensors that all of them hold, and the matrices in each share.

Under ZeRO 1 and 2, the tensors follow each other in a flat buffer, which is cut into partitions of equal size.
Without ZeRO, the parts are about equal, and no cut is inside a row.

    a flat buffer            [ embedding 6 x 4 | norm 4 | weight 4 x 4 ]    44 elements
    two slots                  embedding, 22 elements  |  the other 22
    parts of slot 0            rows 0 to 4, a matrix 5 x 4; 2 elements of row 5
    parts of slot 1            2 elements of row 5; the norm; the weight, a matrix

A codec that works on matrices gets whole rows, and whole matrices of a stack; the rest goes as vectors.
"""

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate

from ds_hybridep.geometry.packets import Part, part_elements

MIN_MATRIX = 1024  # elements; a smaller matrix travels as a vector, because it gains nothing over one
PARTITION_ALIGNMENT = 2  # the elements of each ZeRO partition are a multiple of this

Shape = tuple[int, ...]
Slot = tuple[Part, ...]


@dataclass(frozen=True)
class Span:
    """A run of one tensor's elements.

    name: the parameter's name, which says its shape too.  start: index of the first element in the flattened tensor.
    """

    name: str
    shape: Shape = field(compare=False)
    start: int
    num_elements: int


def whole(name: str, shape: Sequence[int]) -> Span:
    return Span(name, tuple(shape), 0, math.prod(shape))


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
    spans = [whole("", shape) for shape in tensors]
    total = sum(span.num_elements for span in spans)
    if zero_stage == 0:
        slots = tuple(parts_of(slot) for slot in cut(spans, even_bounds(spans, num_ranks)))
        return Shares(slots, slots)
    alignment = PARTITION_ALIGNMENT * num_ranks
    size = -(-total // alignment) * PARTITION_ALIGNMENT
    bounds = [size * (slot + 1) for slot in range(num_ranks)]
    step = -1 if zero_stage == 2 else 1
    gradients = tuple(parts_of(slot[::step]) for slot in cut(spans, bounds))
    padding = bounds[-1] - total
    padded = [*spans, whole("", (padding,))] if padding else spans
    return Shares(gradients, tuple(parts_of(slot) for slot in cut(padded, bounds)))


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
            slot.append(replace(span, num_elements=taken))
            if taken < span.num_elements:
                rest.appendleft(replace(span, start=span.start + taken, num_elements=span.num_elements - taken))
            position += taken
        slots.append(tuple(slot))
    assert not rest, f"the last bound is {bounds[-1]}, but {sum(s.num_elements for s in rest)} elements lie behind it"
    return slots


def even_bounds(spans: Sequence[Span], num_slots: int) -> list[int]:
    """Ends of slots that are about equally large and cut no row of a matrix."""
    ends = [0, *accumulate(span.num_elements for span in spans)]
    total, at, bounds = ends[-1], 0, []
    for slot in range(1, num_slots):
        wanted = total * slot // num_slots
        while at + 1 < len(spans) and ends[at + 1] <= wanted:
            at += 1
        row = spans[at].shape[-1] if spans and len(spans[at].shape) > 1 else 1
        bounds.append(min(ends[at] + round((wanted - ends[at]) / row) * row, ends[at + 1]) if spans else 0)
    return [*bounds, total]


def parts_of(spans: Iterable[Span]) -> Slot:
    """Parts of a message that holds these spans; neighbouring vectors are one part."""
    parts: list[Part] = []
    ends_with_vector = False
    for span in spans:
        for piece in shapes_of(span.shape, span.start, span.num_elements):
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


def shapes_of(shape: Shape, start: int, count: int) -> list[Shape]:
    """Split a run of a tensor's elements into vectors, matrices of whole rows, and stacks of whole matrices."""
    cols = shape[-1] if len(shape) > 1 else 0
    rows = shape[-2] if len(shape) > 2 else 0
    for inner, outer in ((rows * cols, (rows, cols)), (cols, (cols,))):
        if not inner or math.prod(outer) < (MIN_MATRIX if len(outer) == 2 else 1):
            continue
        first, last = -(-start // inner), (start + count) // inner
        if last > first and (last - first) * inner >= MIN_MATRIX:
            before, behind = first * inner - start, start + count - last * inner
            return [*shapes_of(outer, start % inner, before), (last - first, *outer), *shapes_of(outer, 0, behind)]
    return [(count,)] if count else []


def num_elements(slot: Slot) -> int:
    return sum(map(part_elements, slot))
