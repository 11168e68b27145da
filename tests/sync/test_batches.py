# SPDX-License-Identifier: Apache-2.0
"""Tensors of one shape that are encoded together: what arrives is what each would send alone."""

import pytest
import torch
from codec_cases import BALANCED, assert_same_bits, make_codec, normal
from hypothesis import given
from hypothesis import strategies as st

from ds_hybridep.codecs import Source
from ds_hybridep.geometry.slots import whole
from ds_hybridep.sync.home import Home
from ds_hybridep.sync.messages import MOST_ELEMENTS, MessageLayout, batches, packet_parts
from ds_hybridep.sync.mirrors import Mirror, Replica

CPU = torch.device("cpu")

SIZES = st.integers(1, 4)
TENSORS = st.lists(st.tuples(SIZES, SIZES, SIZES, st.integers(0, 1)), max_size=12)


@given(TENSORS)
def test_each_tensor_is_in_one_batch_with_its_like(tensors):
    found = batches([one[:3] for one in tensors], [one[3] for one in tensors])
    assert sorted(at for batch in found for at in batch) == list(range(len(tensors)))
    for batch in found:
        assert len({tensors[at][1:] for at in batch}) == 1
    assert [batch[0] for batch in found] == sorted(batch[0] for batch in found)
    assert len(found) == len({one[1:] for one in tensors})


def test_large_tensors_go_alone():
    half = (1, 2, MOST_ELEMENTS // 4)
    assert batches([half, half, half, (8, 2, MOST_ELEMENTS), half]) == [[0, 1], [2, 4], [3]]


@pytest.mark.parametrize("spec", ["int8", "int4", {**BALANCED, "rank": 3}, {**BALANCED, "rank": 3, "rest": "int2"}])
@pytest.mark.parametrize(
    ("source", "method"), [(Source.UPDATE, "encode_update"), (Source.RESIDUAL, "encode_with_residual")]
)
def test_a_batch_sends_what_its_tensors_would_send(spec, source, method):
    codec, counts = make_codec(spec), (1, 3, 2)
    others = [[torch.zeros(n, 40, 30) for n in counts] for _ in range(2)]
    states = [[codec.new_state(n, 40, 30) for n in counts] for _ in range(2)]
    for step in range(3):
        x = [normal(n, 40, 30, seed=10 * step + n) for n in counts]
        x[1][0, 0, 0] = float("nan") if step == 1 else 0.0
        packets = [torch.empty(n, codec.packet_bytes(40, 30), dtype=torch.uint8) for n in counts]
        codec.encode_batch(source, x, others[0], states[0], packets)
        alone = [getattr(codec, method)(*one) for one in zip(x, others[1], states[1], strict=True)]
        for one, other in zip((*packets, *others[0]), (*alone, *others[1]), strict=True):
            if spec in ("int8", "int4"):
                assert torch.equal(one.nan_to_num(), other.nan_to_num())
            elif one.dtype == torch.float32:  # products may be rounded in another way
                torch.testing.assert_close(one, other, rtol=0, atol=0.05, equal_nan=True)
    assert [state.step for state in states[0]] == [3, 3, 3]


def test_a_batch_is_decoded_to_the_bits_of_its_tensors():
    codec, counts = make_codec({**BALANCED, "rank": 3}), (1, 3, 2)
    packets = [codec.encode(normal(n, 40, 30), codec.new_state(n, 40, 30)) for n in counts]
    for factor in (1.0, 0.375):
        sums, alone = ([normal(n, 40, 30, seed=1) for n in counts] for _ in range(2))
        codec.decode_add_batch(packets, sums, factor)
        for one, other, packet in zip(sums, alone, packets, strict=True):
            assert_same_bits(one, other + codec.decode(packet, torch.empty_like(other)) * factor)


@pytest.mark.parametrize("rest", [None, "int2"])
def test_replicas_of_many_like_parts_stay_equal_to_their_mirror(rest):
    parts = packet_parts([whole(name, (48, 40)) for name in "abc"])
    layout, home = MessageLayout(make_codec({"type": "low_rank", "rank": 3, "rest": rest}), parts), Home(CPU)
    weights = [normal(1, 48, 40, seed=seed) for seed in range(3)]
    mirror, replica = Mirror(layout, home), Replica(layout, [torch.zeros(1, 48, 40) for _ in parts])
    for _ in range(4):
        replica.apply(mirror.encode(weights))
        for one, other in zip(mirror.values, replica.values, strict=True):
            assert_same_bits(one, other)
        weights = [one + 0.1 * normal(1, 48, 40, seed=9) for one in weights]
