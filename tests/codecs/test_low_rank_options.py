# SPDX-License-Identifier: Apache-2.0
"""`rest` of low_rank, against what it means, written with plain codecs."""

import pytest
import torch
from codec_cases import normal

from ds_hybridep.codecs import HEADER_BYTES, make_codec, non_finite

pytestmark = pytest.mark.timeout(300)

RESTS = ["int8", "int4", "int2", {"type": "int2", "block": 64}]
FACTORS = [
    {"type": "low_rank", "rank": 2, "refresh_interval": 3},
    {"type": "low_rank", "rank": 5, "factors": "log4", "weighting": "rms", "iterations": 2},
]
SHAPE = (2, 24, 40)


@pytest.fixture(params=["reference", "compiled"])
def kernels(request):
    return request.param


def assert_same_bits(actual, wanted):
    assert torch.equal(actual.view(torch.int32), wanted.view(torch.int32))


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
    codec, slow = make_codec({**factors, "rest": rest}, kernels=kernels), SlowRest(factors, rest, kernels)
    state = codec.new_state(*SHAPE)
    for step in range(5):
        x = normal(*SHAPE, seed=step)
        packets = codec.encode(x, state)
        payload, (of_factors, of_rest) = slow.encode(x)
        assert torch.equal(packets[:, HEADER_BYTES:], payload)
        assert_same_bits(codec.decode(packets, torch.empty(SHAPE)), of_factors + of_rest)
        into = normal(*SHAPE, seed=9)
        assert_same_bits(codec.decode_add(packets, into.clone()), into + of_factors + of_rest)


@pytest.mark.parametrize("factors", FACTORS, ids=["plain", "weighted"])
@pytest.mark.parametrize("rest", RESTS, ids=str)
def test_mirrors_and_residuals_take_factors_and_rest(kernels, factors, rest):
    codec = make_codec({**factors, "rest": rest}, kernels=kernels)
    weights, mirror, residual = normal(*SHAPE), torch.zeros(SHAPE), torch.zeros(SHAPE)
    update_state, residual_state = codec.new_state(*SHAPE), codec.new_state(*SHAPE)
    slow_update, slow_residual = SlowRest(factors, rest, kernels), SlowRest(factors, rest, kernels)
    for step in range(5):
        weights += 0.1 * normal(*SHAPE, seed=step)
        payload, (of_factors, of_rest) = slow_update.encode(weights - mirror)
        wanted = mirror + of_factors + of_rest
        assert torch.equal(codec.encode_update(weights, mirror, update_state)[:, HEADER_BYTES:], payload)
        assert_same_bits(mirror, wanted)

        gradient = normal(*SHAPE, seed=step + 100)
        total = gradient + residual
        payload, (of_factors, of_rest) = slow_residual.encode(gradient, residual)
        packets = codec.encode_with_residual(gradient, residual, residual_state)
        assert torch.equal(packets[:, HEADER_BYTES:], payload)
        assert_same_bits(residual, total - (of_factors + of_rest))


def test_small_tensors_go_to_the_fallback_without_a_rest():
    codec = make_codec({"type": "low_rank", "rank": 4, "rest": "int2", "fallback": "int8"})
    for rows, cols in ((1, 70), (4, 4)):
        assert codec.resolve(rows, cols).settings() == "int8(block=128)"
        assert codec.packet_bytes(rows, cols) == make_codec("int8").packet_bytes(rows, cols)


def test_the_rest_does_not_decide_what_is_small():
    rest = {"type": "low_rank", "rank": 2, "rest": "int8", "fallback": "int2"}
    codec = make_codec(rest)
    assert codec.resolve(64, 64) is codec
    assert codec.packet_bytes(64, 64) > make_codec("int8").packet_bytes(64, 64)


def test_a_rest_that_overflows_flags_the_packet(kernels):
    """Rank 1 leaves nearly all of random signs times 3e38, and 1.25 times their mean is more than bf16 holds."""
    codec = make_codec(
        {"type": "low_rank", "rank": 1, "factors": "fp32", "rest": {"type": "int2", "block": 8}}, kernels=kernels
    )
    x = torch.zeros(2, 64, 64)
    x[0] = normal(64, 64)
    x[1] = normal(64, 64).sign() * 3e38
    residual, state = torch.zeros_like(x), codec.new_state(*x.shape)
    packets = codec.encode_with_residual(x, residual, state)
    assert non_finite(packets).tolist() == [False, True]
    assert torch.equal(residual[1], torch.zeros(64, 64))
    assert residual[0].abs().max() > 0


@pytest.mark.parametrize("rest", [None, "int2"])
def test_an_element_that_is_much_larger_than_its_row_and_column_arrives(kernels, rest):
    """With weights from what waits, it would count less the more of it waits."""
    shape = (1, 32, 40)
    spec = {"type": "low_rank", "rank": 2, "weighting": "rms", "factors": "log4", "rest": rest}
    codec = make_codec(spec, kernels=kernels)
    gradient = normal(*shape) * 1e-2
    gradient[0, 18, 8] = 1.0
    residual, state = torch.zeros(shape), codec.new_state(*shape)
    for _ in range(600):
        codec.encode_with_residual(gradient, residual, state)
    assert residual.abs().max() < 150  # steps' worth
