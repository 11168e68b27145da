# SPDX-License-Identifier: Apache-2.0
"""The error bounds that the docstring of `Blockwise` states."""

import pytest
import torch
from codec_cases import normal, tensors
from hypothesis import given

from ds_hybridep.codecs import make_codec
from ds_hybridep.codecs.blockwise import to_blocks

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
