# SPDX-License-Identifier: Apache-2.0
"""Codecs from configs, and what is said about configs that are wrong."""

import pytest
from codec_cases import SPECS

from ds_hybridep.codecs import make_codec
from ds_hybridep.codecs.registry import TYPES
from ds_hybridep.config import EXPERT_CODECS
from ds_hybridep.errors import ConfigError


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_equal_specs_make_equal_codecs_with_equal_settings(spec):
    assert make_codec(spec) == make_codec(spec, kernels="reference")
    assert make_codec(spec).settings() == make_codec(spec, kernels="reference").settings()


def test_different_specs_make_different_settings():
    assert len({make_codec(spec).settings() for spec in SPECS.values()}) == len(SPECS)


def test_every_type_is_tested():
    used = {spec if isinstance(spec, str) else spec["type"] for spec in SPECS.values()}
    assert used == set(TYPES)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("int9", r'^k is "int9", but must be one of "identity", .*; did you mean "int8"\?'),
        (7, r'^k is 7, but must be a codec name or an object such as {"type": "int8"}; types: "identity"'),
        ({"rank": 4}, r'^k is {"rank": 4}, but must be a codec name or an object'),
        ({"type": "lowrank"}, r'^k.type is "lowrank", .* did you mean "low_rank"\?'),
        ({"type": "low_rank", "rnak": 4}, r'^k.rnak is not a known option; did you mean "rank"\? \(options of "low'),
        ({"type": "low_rank", "rank": 0}, r"^k.rank is 0, but must be an integer from 1 to 1024; write it without"),
        ({"type": "low_rank", "rank": True}, r"^k.rank is true, but must be an integer"),
        ({"type": "low_rank", "factors": "int9"}, r'^k.factors is "int9", but must be one of "fp32", .*"int8"\?'),
        ({"type": "low_rank", "fallback": "top_k"}, r'^k.fallback is "top_k", but must be one of "identity", "int8"'),
        ({"type": "int8", "block": 100}, r"^k.block is 100, but must be one of 8, 16, .*1024; choose one of these"),
        ({"type": "top_k", "block": 8, "k": 5}, r"^k.k is 5, but must be at most half of block 8; take fewer"),
        ({"type": "top_k", "value_bits": 3}, r"^k.value_bits is 3, but must be one of 1, 2, 4, 16"),
        ({"type": "identity", "dtype": "fp8"}, r'^k.dtype is "fp8", but must be one of "fp32", "bf16", "fp16"'),
        ({"type": "sum"}, r"^k.parts is missing; a sum is written"),
        ({"type": "sum", "parts": ["int8"]}, r'^k.parts is \["int8"\], but must be a list of at least two codecs'),
        ({"type": "sum", "parts": ["int8", "int7"]}, r'^k.parts\[1\] is "int7", but must be one of'),
        ({"type": "warm_up", "steps": 3}, r"^k.then is missing; a warm-up is written"),
        ({"type": "warm_up", "steps": 0, "then": "int8"}, r"^k.steps is 0, but must be an integer from 1"),
        (
            {"type": "sum", "parts": ["int8", {"type": "warm_up", "steps": 1, "then": "int8"}]},
            r"^k.parts\[1\] is .*, but must be a codec other than warm_up; put warm_up outermost",
        ),
    ],
)
def test_wrong_specs_are_refused_with_key_value_and_advice(spec, message):
    with pytest.raises(ConfigError, match=message):
        make_codec(spec, where="k")


def test_the_block_knows_every_codec():
    assert set(EXPERT_CODECS) == set(TYPES)
