# SPDX-License-Identifier: Apache-2.0
"""Sizes that the planner works out without tensors are those of the codecs and of flat buffers with tensors."""

import math

import pytest
from codec_cases import settings_of
from hypothesis import given
from hypothesis import strategies as st
from plan_cases import SETTINGS

from ds_hybridep.codecs import make_codec
from ds_hybridep.errors import PlanError
from ds_hybridep.geometry.packets import packets_of
from ds_hybridep.geometry.slots import cut, even_bounds, parts_of, shares_of, whole
from ds_hybridep.plan.codec_costs import PATCH_RATIOS, codec_cost, patch_cost, patch_ratio
from ds_hybridep.sync.messages import MessageLayout, packet_parts

shapes = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 3000)),
        st.tuples(st.integers(1, 90), st.integers(1, 90)),
        st.tuples(st.integers(1, 5), st.integers(1, 60), st.integers(1, 60)),
        st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 40), st.integers(1, 40)),
    ),
    max_size=6,
)


@given(st.sampled_from(SETTINGS), st.integers(1, 3000), st.integers(1, 3000))
def test_packets_have_the_size_of_the_codecs(spec, rows, cols):
    config = settings_of(spec)
    codec = make_codec(config)
    assert packets_of(config.model_dump()).packet_bytes(rows, cols) == codec.packet_bytes(rows, cols)


@given(shapes, st.integers(1, 7), st.sampled_from(SETTINGS), st.data())
def test_parts_and_bytes_of_messages_are_those_of_flat_buffers(tensors, num_slots, spec, data):
    """Wherever the buffer is cut."""
    spans = [whole(str(index), shape) for index, shape in enumerate(tensors)]
    total = sum(span.num_elements for span in spans)
    bounds = sorted(data.draw(st.lists(st.integers(0, total), min_size=num_slots - 1, max_size=num_slots - 1)))
    config = settings_of(spec)
    for slot in (*cut(spans, [*bounds, total]), *cut(spans, even_bounds(spans, num_slots))):
        parts = packet_parts(slot)
        assert parts_of(slot) == tuple((part.num_experts, part.rows, part.cols) for part in parts)
        num_bytes = packets_of(config.model_dump()).message_bytes(parts_of(slot))
        assert num_bytes == MessageLayout(make_codec(config), parts).num_bytes


@given(shapes, st.integers(1, 7), st.sampled_from([1, 2]))
def test_partitions_hold_every_gradient_once_and_are_equally_large(tensors, num_ranks, zero_stage):
    shares = shares_of(tuple(tensors), num_ranks, zero_stage)
    total = sum(map(math.prod, tensors))
    assert sum(math.prod(part) for slot in shares.gradients for part in slot) == total
    sizes = {sum(math.prod(part) for part in slot) for slot in shares.parameters}
    assert sizes == {-(-total // (2 * num_ranks)) * 2}


def test_patches_by_learning_rate():
    for rate, ratio in PATCH_RATIOS:
        assert patch_ratio(rate) == pytest.approx(ratio)
    assert patch_ratio(math.sqrt(1e-6 * 1e-5)) == pytest.approx(math.sqrt(202 * 47))
    assert patch_ratio(1e-9) == 202
    assert 1 <= patch_ratio(1.0) < patch_ratio(1e-2) < 4.7
    patch = patch_cost(1e-5)
    assert not patch.is_lossy
    assert patch.message_bytes([(1, 1, 47_000_000)], 2) == pytest.approx(2e6, rel=1e-4)
    with pytest.raises(PlanError, match="learning_rate is 0, but must be a finite number > 0"):
        patch_ratio(0)


def test_codecs_of_higher_rank_are_taken_to_be_slower():
    """Memory bounds blocks and decoding; products bound the encoding of a high rank."""
    parts = [(8, 2048, 768)]
    block, few, many = (
        codec_cost(settings_of(spec).model_dump(), parts, 2)
        for spec in ("int4", {"type": "low_rank", "ratio": 1000}, {"type": "low_rank", "ratio": 10})
    )
    assert block.encode_bytes_per_s > few.encode_bytes_per_s > many.encode_bytes_per_s
    assert block.decode_bytes_per_s > few.decode_bytes_per_s >= many.decode_bytes_per_s
