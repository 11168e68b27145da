# SPDX-License-Identifier: Apache-2.0
"""The compact form against its definition: bits, errors, means, and sums of many small steps."""

import math

import pytest
import torch
from codec_cases import normal, tensors
from cuda_emulation import load_emulated_codecs
from hypothesis import given, settings

from ds_hybridep.codecs import compact as module
from ds_hybridep.codecs.compact import BLOCK, BLOCK_WORDS, compact, compact_shape, expand

pytestmark = pytest.mark.timeout(1500)  # the first test compiles the kernels where no cached build exists

KERNELS = ["reference", "compiled", "emulated", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [(2, 48, 80), (3, 1, 70), (1, 5, 7), (2, 33, 17), (1, 1, 1), (0, 8, 8), (2, 0, 5), (1, 1, 128), (1, 2, 128)]


@pytest.fixture(params=KERNELS)
def kernels(request, monkeypatch):
    if request.param == "emulated":
        monkeypatch.setattr(module, "load_codec_kernels", lambda *_: load_emulated_codecs())
        return "auto"
    return "compiled" if request.param == "cuda" else request.param


@pytest.fixture
def device(request):
    return "cuda" if "cuda" in request.node.callspec.id.split("-") else "cpu"


def through(x, seed=1, kernels="auto"):
    return expand(compact(x, seed, kernels), torch.empty_like(x), kernels)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_all_kernels_give_the_same_bits(kernels, device, shape):
    for seed, scale in enumerate((1.0, 1e-30, 1e30, 0.0)):
        x = normal(*shape, seed=seed, scale=scale)
        wanted = compact(x, seed * 12345, "reference") if kernels != "auto" else compact_by_definition(x, seed * 12345)
        words = compact(x.to(device), seed * 12345, kernels)
        assert words.shape == compact_shape(shape[0], shape[1] * shape[2])
        assert torch.equal(words.cpu(), wanted)
        found = expand(words, torch.empty_like(x, device=device), kernels)
        assert torch.equal(found.cpu(), expand(wanted, torch.empty_like(x), "reference"))


def compact_by_definition(x, seed):
    """Element by element in Python's own numbers."""
    n, num_blocks, _ = shape = compact_shape(len(x), x.shape[1:].numel())
    words = torch.zeros(shape, dtype=torch.int16)
    for tensor in range(n):
        values = x[tensor].flatten().tolist()
        for block in range(num_blocks):
            part = values[block * BLOCK : (block + 1) * BLOCK]
            part += [0.0] * (BLOCK - len(part))
            largest = max(map(abs, part))
            if largest < 2.0**-126:
                continue
            exponent = max(math.frexp(largest)[1], -107)
            exponent += largest > (2**19 - 1) * 2.0 ** (exponent - 19)
            q = []
            for at, value in enumerate(part):
                place = (tensor * num_blocks + block) * BLOCK + at
                chance = ((module.mix((place * 0x9E3779B9 & 0xFFFFFFFF) ^ seed) >> 9) + 0.5) / 2**23
                scaled = value / 2.0 ** (exponent - 19)
                q.append(math.floor(scaled) + (chance < scaled - math.floor(scaled)))
            found = [one >> 4 for one in q]
            found += [sum((q[at + 32 * j] & 15) << 4 * j for j in range(4)) for at in range(32)]
            found.append(exponent + 127)
            words[tensor, block] = torch.tensor(found, dtype=torch.int64).to(torch.int16)
    return words


def test_the_reference_is_the_definition():
    for seed, (shape, scale) in enumerate([((2, 3, 90), 1.0), ((1, 1, 5), 1e-33), ((1, 1, 300), 3e38 / 5)]):
        x = normal(*shape, seed=seed, scale=scale).clamp(-3e38, 3e38)
        assert torch.equal(compact(x, seed, "reference"), compact_by_definition(x, seed))


@settings(max_examples=50)
@given(x=tensors())
def test_an_element_moves_by_less_than_a_unit(x):
    found = through(x)
    blocks, errors = (
        torch.nn.functional.pad(one.flatten(1), (0, -one[0].numel() % BLOCK)).unflatten(1, (-1, BLOCK)).double()
        for one in (x, found - x)
    )
    unit = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(-1).clamp(min=2.0**-126))) - 19 + 1)
    assert (errors.abs().amax(-1) < unit.clamp(min=2.0**-125)).all()
    assert torch.equal(through(found, seed=99), found)  # multiples stay as they are


def test_bytes_per_element():
    assert compact(torch.zeros(1, 64, 64), 0).nbytes == 64 * 64 // BLOCK * BLOCK_WORDS * 2 == 64 * 64 * 2.515625


def test_the_mean_over_seeds_is_right():
    x = torch.cat([torch.ones(1), torch.logspace(-9, -1, 127)]).view(1, 1, 128)
    mean = sum(through(x, seed=seed).double() for seed in range(4000)) / 4000
    deviation = 2.0**-18 / 2 / math.sqrt(4000)  # of one element's mean, at most: half a unit
    assert ((mean - x.double()).abs() < 5 * deviation).all()


def test_sums_of_steps_far_below_a_unit_have_no_bias():
    """Steps of a thousandth of a unit, which rounding to the nearest would all lose."""
    step = 2.0**-18 / 1000
    x = torch.zeros(8, 1, 128)
    x[:, :, 0] = 1.0
    for at in range(2000):
        x[:, :, 1:] += step
        x = through(x, seed=module.mix(at))
    found = x[:, :, 1:].double() / (2000 * step)
    assert abs(float(found.mean()) - 1) < 0.1  # 1016 elements, each 0 to 7 units: a deviation of 0.02
