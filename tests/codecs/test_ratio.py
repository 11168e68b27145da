# SPDX-License-Identifier: Apache-2.0
"""`ratio` of low_rank, against the rank that it leads to."""

import math

import pytest
import torch
from codec_cases import normal
from hypothesis import given
from hypothesis import strategies as st

from ds_hybridep.codecs import make_codec
from ds_hybridep.codecs.low_rank import LowRank
from ds_hybridep.plan.packets import LARGEST_RANK

SIDES = st.integers(2, 3000)
RATIOS = st.floats(1.5, 1000.0)
FACTORS = st.sampled_from(["fp32", "bf16", "int8", "int4", "int2", "log4"])


def by_ratio(ratio, factors="int4", **options):
    return make_codec({"type": "low_rank", "ratio": ratio, "factors": factors, **options})


def by_rank(rank, factors="int4", **options):
    return make_codec({"type": "low_rank", "rank": rank, "factors": factors, **options})


@given(SIDES, SIDES, RATIOS, FACTORS)
def test_the_rank_is_the_largest_that_meets_the_ratio(rows, cols, ratio, factors):
    codec = by_ratio(ratio, factors, fallback="identity")
    resolved = codec.resolve(rows, cols)
    if not isinstance(resolved, LowRank):  # the factors are no smaller than the matrix
        assert by_rank(1, factors).factor_bytes(rows, cols) >= 4 * rows * cols or ratio < 4
        return
    rank = resolved.effective_rank(rows, cols)
    assert codec.packet_bytes(rows, cols) == by_rank(rank, factors, fallback="identity").packet_bytes(rows, cols)
    if rank > 1:
        assert codec.ratio(rows, cols) >= ratio
    if rank < min(rows, cols, LARGEST_RANK):
        larger = by_rank(rank + 1, factors)
        assert 4 * rows * cols / (16 + larger.factor_bytes(rows, cols)) < ratio


@given(SIDES, SIDES, RATIOS, RATIOS, FACTORS)
def test_a_larger_ratio_never_sends_more(rows, cols, one, other, factors):
    small, large = (by_ratio(ratio, factors) for ratio in sorted((one, other)))
    assert large.packet_bytes(rows, cols) <= small.packet_bytes(rows, cols)
    assert large.effective_rank(rows, cols) <= small.effective_rank(rows, cols)


@given(SIDES, SIDES, st.integers(0, 500), RATIOS, FACTORS)
def test_more_rows_never_get_a_smaller_rank_than_their_share_of_the_bytes(rows, cols, more, ratio, factors):
    """Of the bytes that the ratio allows, less than one column of each factor is left."""
    codec = by_ratio(ratio, factors, fallback="identity")
    rank = codec.effective_rank(rows + more, cols)
    if 1 < rank < min(rows, cols, LARGEST_RANK):
        allowed = 4 * (rows + more) * cols / ratio
        column = by_rank(1, factors).factor_bytes(rows + more, cols)
        assert allowed - (16 + codec.factor_bytes(rows + more, cols)) < column + 8


@pytest.mark.parametrize("kernels", ["reference", "compiled"])
@pytest.mark.parametrize("shape", [(2, 64, 24), (1, 40, 100), (2, 16, 16), (2, 1, 70), (1, 5, 2)], ids=str)
@pytest.mark.parametrize("ratio", [2.5, 12, 300])
def test_it_sends_what_the_rank_sends(kernels, shape, ratio):
    """Packets, mirror, residual and state are those of a codec of that rank, stamps aside."""
    spec = {"type": "low_rank", "factors": "log4", "weighting": "rms", "iterations": 2}
    codec = make_codec({**spec, "ratio": ratio}, kernels=kernels)
    ranked = make_codec({**spec, "rank": codec.effective_rank(*shape[1:])}, kernels=kernels)
    weights, mirrors = normal(*shape), [torch.zeros(shape) for _ in range(2)]
    residuals = [torch.zeros(shape) for _ in range(2)]
    replica = torch.zeros(shape)
    states = [[one.new_state(*shape) for one in (codec, ranked)] for _ in range(2)]
    for step in range(4):
        weights += normal(*shape, seed=step)
        pairs = list(zip((codec, ranked), mirrors, residuals, *states, strict=True))
        ours, theirs = (one.encode_update(weights, mirror, state) for one, mirror, _, state, _ in pairs)
        assert ours.shape[1] == codec.packet_bytes(*shape[1:])
        assert torch.equal(ours[:, :12], theirs[:, :12])
        assert torch.equal(ours[:, 16:], theirs[:, 16:])
        codec.decode_add(ours, replica)
        assert torch.equal(replica, mirrors[0])
        assert torch.equal(mirrors[0], mirrors[1])
        for one, _, residual, _, state in pairs:
            one.encode_with_residual(weights, residual, state)
        assert torch.equal(*residuals)
    for pair in states:
        assert [tensor.shape for tensor in pair[0].tensors.values()] == [
            tensor.shape for tensor in pair[1].tensors.values()
        ]


def test_a_rank_means_another_ratio_for_each_width():
    assert [by_rank(7).ratio(256, 64), by_rank(7).ratio(1024, 256)] == pytest.approx([56.3, 229.5], rel=0.01)
    assert [by_ratio(50).effective_rank(4 * cols, cols) for cols in (64, 256, 512)] == [7, 32, 64]
    assert by_ratio(50).effective_rank(14336, 4096) == LARGEST_RANK


def test_the_smallest_packet_is_of_rank_one_or_of_the_fallback():
    codec = by_ratio(1000.0, fallback="int2")
    assert codec.resolve(64, 64).effective_rank(64, 64) == 1
    assert codec.ratio(64, 64) < 1000.0
    assert codec.resolve(3, 3).settings() == "int2(block=128)"
    assert codec.resolve(1, 4096).settings() == "int2(block=128)"


def test_exactly_one_of_rank_and_ratio_makes_a_codec():
    for given_ in ({}, {"rank": 4, "wanted_ratio": 50.0}):
        with pytest.raises(ValueError, match="got ratio .* wanted one of them"):
            LowRank(**given_)
    assert math.isclose(by_ratio(50).wanted_ratio, 50.0)
