# SPDX-License-Identifier: Apache-2.0
"""Low rank: what it leaves, the rank of a ratio, weighting, and `rest` against what it means."""

import pytest
import torch
from codec_cases import BALANCED, assert_same_bits, make_codec, normal, ratio_of
from hypothesis import given
from hypothesis import strategies as st

from ds_hybridep.codecs.low_rank import LowRank, orthonormal
from ds_hybridep.codecs.packet import non_finite
from ds_hybridep.geometry.packets import HEADER_BYTES, LARGEST_RANK

SHAPE = (2, 24, 40)
SIDES = st.integers(2, 3000)
RATIOS = st.floats(1.5, 1000.0)


@pytest.fixture(params=["reference", "compiled"])
def kernels(request):
    return request.param


def by_ratio(ratio, **options):
    return make_codec({"type": "low_rank", "ratio": ratio, **options})


def by_rank(rank, **options):
    return make_codec({"type": "low_rank", "rank": rank, **options})


# ---- what it leaves ----


def beside_q(x, state):
    """What of x [n, rows, cols] lies outside the directions that the encoder has found."""
    q = torch.linalg.qr(state.tensors["q"].transpose(1, 2)).Q
    return x - x @ q @ q.transpose(1, 2)


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_it_finds_a_matrix_of_its_rank(rank, kernels):
    x = normal(2, 120, rank) @ normal(2, rank, 160, seed=1)
    codec = make_codec({"type": "low_rank", "rank": rank}, kernels=kernels)
    state = codec.new_state(*x.shape)
    codec.encode(x, state)
    assert beside_q(x, state).norm() <= 1e-5 * x.norm()


def test_it_comes_close_to_the_best_with_a_warm_start(kernels):
    x = normal(1, 60, 90) * torch.linspace(3, 0.1, 90)
    codec = make_codec({"type": "low_rank", "rank": 4}, kernels=kernels)
    state = codec.new_state(1, 60, 90)
    for _ in range(20):
        codec.encode(x, state)
    best = torch.linalg.svdvals(x[0])[4:].norm()
    assert best <= beside_q(x, state).norm() <= 1.02 * best


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_rows_become_orthonormal_and_span_what_they_did(scale):
    p = normal(2, 8, 30) * torch.logspace(0, -3, 8)[:, None] * scale
    found = orthonormal(p)
    assert (found @ found.transpose(1, 2) - torch.eye(8)).abs().max() < 1e-4
    q = torch.linalg.qr(p.double().transpose(1, 2)).Q
    assert (found.double() - found.double() @ q @ q.transpose(1, 2)).abs().max() < 1e-4


def test_rows_of_zeros_stay_zeros_and_dependent_ones_stay_finite():
    assert not orthonormal(torch.zeros(2, 3, 8)).any()
    p = torch.ones(2, 200, 1) @ normal(2, 1, 300)
    found = orthonormal(p)
    assert found.isfinite().all()
    assert found.norm(dim=2).max() < 1.01


@pytest.mark.parametrize("dim", [1, 2], ids=["rows", "columns"])
def test_weighting_does_not_leave_out_rows_and_columns_of_small_numbers(kernels, dim):
    sizes = torch.logspace(0, -1, 64)
    x = normal(2, 64, 64) * (sizes[:, None] if dim == 1 else sizes)
    left = {}
    for weighting in ("none", "rms"):
        codec = make_codec({"type": "low_rank", "rank": 6, "weighting": weighting}, kernels=kernels)
        packets = codec.encode(x, codec.new_state(*x.shape))
        error = x - codec.decode(packets, torch.empty_like(x))
        relative = error.square().sum(3 - dim) / x.square().sum(3 - dim)  # of each row or column
        left[weighting] = float(relative[:, -16:].mean())
    # The smallest quarter: next to nothing of it is in the 6 largest directions, a fair share in the balanced ones.
    assert left["none"] > 0.85
    assert left["rms"] < 0.8


@pytest.mark.parametrize("rest", [None, "int2"])
def test_an_element_that_is_much_larger_than_its_row_and_column_arrives(kernels, rest):
    """With weights from what waits, it would count less the more of it waits."""
    shape = (1, 32, 40)
    codec = make_codec({**BALANCED, "rank": 2, "rest": rest}, kernels=kernels)
    gradient = normal(*shape) * 1e-2
    gradient[0, 18, 8] = 1.0
    residual, state = torch.zeros(shape), codec.new_state(*shape)
    for _ in range(600 if kernels == "compiled" else 300):  # the definition takes four times as long
        codec.encode_with_residual(gradient, residual, state)
    assert residual.abs().max() < 150  # steps' worth


# ---- the rank of a ratio ----


@given(SIDES, SIDES, RATIOS)
def test_the_rank_is_the_largest_that_meets_the_ratio(rows, cols, ratio):
    codec = by_ratio(ratio)
    resolved = codec.resolve(rows, cols)
    if not isinstance(resolved, LowRank):
        assert codec.packet_bytes(rows, cols) == make_codec("int4").packet_bytes(rows, cols)
        return
    rank = resolved.effective_rank(rows, cols)
    assert codec.packet_bytes(rows, cols) == by_rank(rank).packet_bytes(rows, cols)
    if rank > 1:
        assert ratio_of(codec, rows, cols) >= ratio
    if rank < min(rows, cols, LARGEST_RANK):
        assert 4 * rows * cols / (HEADER_BYTES + by_rank(rank + 1).sizes.factors_bytes(rows, cols)) < ratio


@given(SIDES, SIDES, RATIOS, RATIOS)
def test_a_larger_ratio_never_sends_more(rows, cols, one, other):
    small, large = (by_ratio(ratio) for ratio in sorted((one, other)))
    assert large.packet_bytes(rows, cols) <= small.packet_bytes(rows, cols)
    assert large.effective_rank(rows, cols) <= small.effective_rank(rows, cols)


@pytest.mark.parametrize("shape", [(2, 64, 24), (1, 40, 100), (2, 16, 16), (2, 1, 70), (1, 5, 2)], ids=str)
@pytest.mark.parametrize("ratio", [2.5, 12, 300])
def test_it_sends_what_the_rank_sends(kernels, shape, ratio):
    """Packets, mirror, residual and state are those of a codec of that rank, stamps aside."""
    codec = make_codec({**BALANCED, "ratio": ratio}, kernels=kernels)
    ranked = make_codec({**BALANCED, "rank": codec.effective_rank(*shape[1:])}, kernels=kernels)
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
    assert [ratio_of(by_rank(7), 256, 64), ratio_of(by_rank(7), 1024, 256)] == pytest.approx([44.9, 181.4], rel=0.01)
    assert [by_ratio(50).effective_rank(4 * cols, cols) for cols in (64, 256, 512)] == [6, 30, 63]
    assert by_ratio(50).effective_rank(14336, 4096) == LARGEST_RANK


@pytest.mark.parametrize("rest", [None, "int2"])
def test_small_matrices_and_vectors_go_to_int4_without_a_rest(rest):
    codec, int4 = by_ratio(1000.0, rest=rest), make_codec("int4")
    for rows, cols in ((3, 3), (1, 4096), (70, 1)):
        assert codec.resolve(rows, cols).settings() == int4.settings() == "int4(block=128)"
        assert codec.packet_bytes(rows, cols) == int4.packet_bytes(rows, cols)
    assert codec.resolve(64, 64).effective_rank(64, 64) == 1  # the smallest packet of factors
    assert ratio_of(by_ratio(1000.0), 64, 64) < 1000.0


def test_the_rest_does_not_decide_what_is_small():
    codec = by_rank(2, rest="int8")
    assert codec.resolve(64, 64) is codec
    assert codec.packet_bytes(64, 64) > make_codec("int8").packet_bytes(64, 64)


# ---- the rest ----

RESTS = ["int8", "int4", "int2", {"type": "int2", "block": 64}]
FACTORS = [{"type": "low_rank", "rank": 2}, {**BALANCED, "rank": 5}]


class SlowRest:
    """Factors of x, then the rest of x - P Q, each by a plain codec."""

    def __init__(self, factors, rest, kernels):
        self.codecs = [make_codec(spec, kernels=kernels) for spec in (factors, rest)]
        self.states = [codec.new_state(*SHAPE) for codec in self.codecs]

    def encode(self, x, residual=None):
        """Payloads of x, or of the gradient x and its residual, in their order; the values that they stand for."""
        (factors, rest), (state, rest_state) = self.codecs, self.states
        total = x if residual is None else x + residual
        if residual is None:
            first = factors.encode(x.contiguous(), state)
        else:
            first = factors.encode_with_residual(x, residual.clone(), state)
        values = [factors.decode(first, torch.empty(SHAPE))]
        second = rest.encode((total - values[0]).contiguous(), rest_state)
        values.append(rest.decode(second, torch.empty(SHAPE)))
        return torch.cat([packets[:, HEADER_BYTES:] for packets in (first, second)], dim=1), values


@pytest.mark.parametrize("factors", FACTORS, ids=["plain", "weighted"])
@pytest.mark.parametrize("rest", RESTS, ids=str)
def test_rest_encodes_what_the_factors_leave(kernels, factors, rest):
    codec = make_codec({**factors, "rest": rest}, kernels=kernels)
    weights, mirror, residual = normal(*SHAPE), torch.zeros(SHAPE), torch.zeros(SHAPE)
    update_state, residual_state = codec.new_state(*SHAPE), codec.new_state(*SHAPE)
    slow_update, slow_residual = SlowRest(factors, rest, kernels), SlowRest(factors, rest, kernels)
    for step in range(5):
        weights += 0.1 * normal(*SHAPE, seed=step)
        payload, (of_factors, of_rest) = slow_update.encode(weights - mirror)
        replica, wanted = mirror.clone(), mirror + (of_factors + of_rest)
        packets = codec.encode_update(weights, mirror, update_state)
        assert torch.equal(packets[:, HEADER_BYTES:], payload)
        assert_same_bits(mirror, wanted)
        assert_same_bits(codec.decode(packets, torch.empty(SHAPE)), of_factors + of_rest)
        assert_same_bits(codec.decode_add(packets, replica), wanted)

        gradient = normal(*SHAPE, seed=step + 100)
        total = gradient + residual
        payload, (of_factors, of_rest) = slow_residual.encode(gradient, residual)
        packets = codec.encode_with_residual(gradient, residual, residual_state)
        assert torch.equal(packets[:, HEADER_BYTES:], payload)
        assert_same_bits(residual, total - (of_factors + of_rest))


def test_a_rest_that_overflows_flags_the_packet(kernels):
    """Rank 1 leaves nearly all of random signs times 3e38, and 1.25 times their mean is more than bf16 holds."""
    codec = make_codec({"type": "low_rank", "rank": 1, "rest": {"type": "int2", "block": 8}}, kernels=kernels)
    x = torch.zeros(2, 64, 64)
    x[0] = normal(64, 64)
    x[1] = normal(64, 64).sign() * 3e38
    residual, state = torch.zeros_like(x), codec.new_state(*x.shape)
    packets = codec.encode_with_residual(x, residual, state)
    assert non_finite(packets).tolist() == [False, True]
    assert torch.equal(residual[1], torch.zeros(64, 64))
    assert residual[0].abs().max() > 0


@pytest.mark.parametrize("spec", [{**BALANCED, "ratio": 50}, {**BALANCED, "ratio": 50, "rest": "int2"}], ids=str)
@pytest.mark.parametrize("kind", ["one direction", "few tokens", "few rows", "few columns"])
def test_matrices_of_fewer_directions_than_the_rank_arrive(kernels, kind, spec):
    """The gradient of an expert that got few tokens: the residual must not grow, or it leaves fp32 soon."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape):
        return torch.randn(shape, generator=generator)

    def gradient():
        directions = 1 if kind == "one direction" else 3
        sizes = 10 ** (-3 * torch.rand(4, 512, 1, generator=generator)) if kind == "few tokens" else 1.0
        if kind == "few rows":
            return random(4, 512, 256) * (torch.rand(4, 512, 1, generator=generator) < 0.01)
        if kind == "few columns":
            return random(4, 512, 256) * (torch.rand(4, 1, 256, generator=generator) < 0.02)
        return random(4, 512, directions) @ random(4, directions, 256) * sizes

    gradients, residual = [gradient() for _ in range(3)], torch.zeros(4, 512, 256)
    codec = make_codec(spec, kernels=kernels)
    state = codec.new_state(4, 512, 256)
    for step in range(12):
        before = residual.flatten(1).norm(dim=1) + gradients[step % 3].flatten(1).norm(dim=1)
        codec.encode_with_residual(gradients[step % 3], residual, state)
        assert (residual.flatten(1).norm(dim=1) <= before).all()
