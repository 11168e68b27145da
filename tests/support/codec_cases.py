# SPDX-License-Identifier: Apache-2.0
"""Codecs and tensors that the tests of codecs share."""

import torch
from hypothesis import strategies as st
from pydantic import TypeAdapter

from ds_hybridep import codecs
from ds_hybridep.config_codecs import WeightCodec

BALANCED = {"type": "low_rank", "weighting": "rms"}
SPECS = {
    "int8": "int8",
    "int4": "int4",
    "int4_32": {"type": "int4", "block": 32},
    "int2": "int2",
    "int2_1024": {"type": "int2", "block": 1024},
    "low_rank": "low_rank",
    "low_rank_6": {"type": "low_rank", "rank": 6},
    "low_rank_rms": {**BALANCED, "rank": 5},
    "low_rank_rest": {"type": "low_rank", "rank": 2, "rest": "int2"},
    "low_rank_rms_rest": {**BALANCED, "rank": 5, "rest": {"type": "int4", "block": 32}},
    "low_rank_ratio": {**BALANCED, "ratio": 20},
}

# Even and odd lengths, one block and many, less than a block, vectors, and nothing at all.
SHAPES = [(2, 48, 80), (3, 1, 70), (1, 5, 7), (2, 33, 17), (1, 1, 1), (2, 7, 1), (0, 8, 8), (2, 0, 5), (1, 3, 0)]


def settings_of(spec):
    """The settings that a block's text or object for a codec means."""
    return TypeAdapter(WeightCodec).validate_python(spec)


def make_codec(spec, *, kernels="auto"):
    return codecs.make_codec(settings_of(spec), kernels=kernels)


def ratio_of(codec, rows, cols, dtype=torch.float32):
    """Bytes of [rows, cols] over those of its packet, header included."""
    return rows * cols * dtype.itemsize / codec.packet_bytes(rows, cols)


def normal(*shape, seed=0, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


@st.composite
def tensors(draw, max_n=3):
    """fp32 [n, rows, cols]: normal, heavy-tailed, sparse, constant, of low rank, tiny or huge."""
    n, rows, cols = draw(st.integers(1, max_n)), draw(st.integers(1, 40)), draw(st.integers(1, 70))
    seed = draw(st.integers(0, 2**20))
    kind = draw(st.sampled_from(["normal", "cubed", "sparse", "constant", "low rank", "zero"]))
    x = normal(n, rows, cols, seed=seed)
    if kind == "cubed":
        x = x**3
    elif kind == "sparse":
        x = x * (normal(n, rows, cols, seed=seed + 1) > 1.5)
    elif kind == "constant":
        x = torch.ones_like(x)
    elif kind == "low rank":
        x = normal(n, rows, 1, seed=seed) @ normal(n, 1, cols, seed=seed + 1)
    elif kind == "zero":
        x = torch.zeros_like(x)
    return (x * 10.0 ** draw(st.integers(-12, 6))).contiguous()


def assert_same_bits(actual, wanted):
    assert torch.equal(actual.view(torch.int32), wanted.view(torch.int32))
