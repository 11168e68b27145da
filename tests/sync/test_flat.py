# SPDX-License-Identifier: Apache-2.0
"""Flat buffers cut into slots and parts: every element in its place once, rows and matrices whole."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from ds_hybridep.geometry.slots import MIN_MATRIX, Span, cut, even_bounds, whole
from ds_hybridep.sync.memory import hash_of
from ds_hybridep.sync.messages import packet_parts, split

SHAPES = st.one_of(
    st.tuples(st.integers(0, 200)),
    st.tuples(st.integers(1, 80), st.integers(1, 80)),
    st.tuples(st.integers(1, 5), st.integers(1, 50), st.integers(1, 60)),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 50), st.integers(1, 60)),
)
BUFFERS = st.lists(SHAPES, min_size=1, max_size=6).map(
    lambda shapes: [whole(f"tensor {index}", shape) for index, shape in enumerate(shapes)]
)


def elements_of(spans: list[Span]) -> list[tuple[str, int]]:
    """(name, index) of every element, in order: slow and obvious."""
    return [(span.name, span.start + at) for span in spans for at in range(span.num_elements)]


@given(BUFFERS, st.data())
def test_a_cut_keeps_every_element_in_order(spans: list[Span], data: st.DataObject) -> None:
    total = sum(span.num_elements for span in spans)
    bounds = [*sorted(data.draw(st.lists(st.integers(0, total), max_size=4))), total]
    slots = cut(spans, bounds)
    assert [sum(span.num_elements for span in slot) for slot in slots] == [
        end - begin for begin, end in zip([0, *bounds], bounds, strict=False)
    ]
    assert [one for slot in slots for one in elements_of(list(slot))] == elements_of(spans)


@given(BUFFERS, st.integers(1, 6))
def test_even_slots_cut_no_row(spans: list[Span], num_slots: int) -> None:
    bounds = even_bounds(spans, num_slots)
    total = sum(span.num_elements for span in spans)
    assert len(bounds) == num_slots
    assert bounds == sorted(bounds)
    assert bounds[-1] == total
    widest = max((span.shape[-1] for span in spans if len(span.shape) > 1), default=1)
    for slot, (wanted, bound) in enumerate(zip(bounds, bounds[:-1], strict=False), 1):
        assert abs(bound - total * slot // num_slots) <= widest, wanted
    for slot in cut(spans, bounds):
        for span in slot:
            if len(span.shape) > 1:
                assert span.start % span.shape[-1] == 0


@given(BUFFERS, st.data())
def test_parts_cover_a_slot_with_whole_rows(spans: list[Span], data: st.DataObject) -> None:
    total = sum(span.num_elements for span in spans)
    bounds = [*sorted(data.draw(st.lists(st.integers(0, total), max_size=3))), total]
    for slot in cut(spans, bounds):
        parts = packet_parts(slot)
        size = sum(span.num_elements for span in slot)
        flat = torch.arange(size)
        views = split(flat, parts)
        assert [one for view in views for one in view.reshape(-1).tolist()] == list(range(size))
        for part in parts:
            if len(part.shape) > 1:
                assert part.num_experts * part.shape.numel() >= MIN_MATRIX
        # Where a tensor is whole, so are its matrices.
        for span in slot:
            if len(span.shape) == 3 and span.num_elements == math.prod(span.shape) >= MIN_MATRIX:
                experts = [p for p in parts if p.spans[0].name == span.name and len(p.shape) > 1]
                assert sum(p.num_experts * p.rows for p in experts) == span.shape[0] * span.shape[1]


def test_equal_spans_have_one_hash() -> None:
    one, other = whole("a", (3, 4)), whole("a", (4, 3))
    assert hash_of([[one], []]) == hash_of([(whole("a", (3, 4)),), ()])
    assert len({hash_of(slots) for slots in ([[one], []], [[], [one]], [[other], []])}) == 3
