# SPDX-License-Identifier: Apache-2.0
"""The error bounds that the docstrings state."""

import pytest
import torch
from codec_cases import normal, tensors
from hypothesis import given

from ds_hybridep.codecs import make_codec
from ds_hybridep.codecs.blockwise import to_blocks
from ds_hybridep.codecs.low_rank import orthonormal, read_log4, write_log4

pytestmark = pytest.mark.timeout(300)
TINY = 1e-36  # scales below the smallest normal number count as 0


def left_over(spec, x):
    codec = make_codec(spec)
    packets = codec.encode(x, codec.new_state(*x.shape))
    return x.double() - codec.decode(packets, torch.empty_like(x)).double()


@given(x=tensors())
@pytest.mark.parametrize(("name", "largest"), [("int8", 127), ("int4", 7)])
def test_int8_and_int4_err_by_half_a_scale(name, largest, x):
    error = to_blocks(left_over(name, x).flatten(1), 128).abs().amax(dim=-1)
    scale = to_blocks(x.double().flatten(1), 128).abs().amax(dim=-1) / largest * (1 + 2.0**-7)
    assert (error <= scale / 2 * (1 + 1e-6) + 127 * TINY).all()


@given(x=tensors())
def test_int2_leaves_less_than_there_was(x):
    error = to_blocks(left_over("int2", x).flatten(1), 128).square().sum(dim=-1)
    size = to_blocks(x.double().flatten(1), 128).square().sum(dim=-1)
    assert (error <= size * (1 - 0.8 / 128) + 1e-60).all()


@pytest.mark.parametrize(("name", "left"), [("int8", 0.01), ("int4", 0.12), ("int2", 0.36)])
def test_normal_numbers_keep_the_share_of_error_that_is_stated(name, left):
    x = normal(1, 64, 512)
    assert left_over(name, x).norm() <= left * x.double().norm()


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_low_rank_finds_a_matrix_of_its_rank(rank):
    x = normal(2, 120, rank) @ normal(2, rank, 160, seed=1)
    left = left_over({"type": "low_rank", "rank": rank, "factors": "fp32"}, x)
    assert left.norm() <= 1e-5 * x.double().norm()


def test_low_rank_comes_close_to_the_best_with_a_warm_start():
    x = normal(1, 60, 90) * torch.linspace(3, 0.1, 90)
    codec = make_codec({"type": "low_rank", "rank": 4, "factors": "fp32"})
    state = codec.new_state(1, 60, 90)
    for _ in range(20):
        packets = codec.encode(x, state)
    left = (x - codec.decode(packets, torch.empty_like(x))).norm()
    best = torch.linalg.svdvals(x[0])[4:].norm()
    assert best <= left <= 1.02 * best


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1.0, 1e18])
def test_orthonormal_rows_of_dependent_ones(scale):
    p = torch.ones(2, 5, 1) @ normal(2, 1, 30) * scale
    p[:, 3] = 0
    gram = orthonormal(p) @ orthonormal(p).transpose(1, 2)
    assert (gram - torch.eye(5)).abs().max() < 1e-5


@pytest.mark.parametrize("kernels", ["compiled", "reference"])
@pytest.mark.parametrize("dim", [1, 2], ids=["rows", "columns"])
def test_weighting_does_not_leave_out_rows_and_columns_of_small_numbers(kernels, dim):
    sizes = torch.logspace(0, -2, 64)
    x = normal(2, 64, 64) * (sizes[:, None] if dim == 1 else sizes)
    left = {}
    for weighting in ("none", "rms"):
        spec = {"type": "low_rank", "rank": 6, "factors": "bf16", "iterations": 3, "weighting": weighting}
        codec = make_codec(spec, kernels=kernels)
        packets = codec.encode(x, codec.new_state(*x.shape))
        error = x - codec.decode(packets, torch.empty_like(x))
        relative = error.square().sum(3 - dim) / x.square().sum(3 - dim)  # of each row or column
        left[weighting] = float(relative[:, -16:].mean())
    # The smallest quarter: next to nothing of it is in the 6 largest directions, a fair share in the balanced ones.
    assert left["none"] > 0.85
    assert left["rms"] < 0.8


def test_log4_is_off_by_at_most_a_third_from_a_sixteenth_of_the_largest_on():
    values = torch.logspace(0, -1.2, 256).view(1, 256) * torch.tensor([1.0, -1.0]).repeat(128)
    payload = torch.empty(1, 2 + 128, dtype=torch.uint8)
    write_log4(values, payload)
    error = (read_log4(payload, 256) - values).abs() / values.abs()
    assert (error <= 1 / 3 + 2**-7).all()  # and the rounding of the scale
