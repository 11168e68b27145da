# SPDX-License-Identifier: Apache-2.0
"""Codecs from configs, and what is said about configs that are wrong."""

from typing import get_args

import pytest
from codec_cases import SPECS

from ds_hybridep.codecs import make_codec
from ds_hybridep.codecs.blockwise import Blockwise
from ds_hybridep.codecs.identity import Identity
from ds_hybridep.codecs.low_rank import LowRank
from ds_hybridep.codecs.registry import BITS
from ds_hybridep.config import parse_codec
from ds_hybridep.config_codecs import DEFAULT_RATIO, IDENTITY, BlockwiseConfig, LowRankConfig
from ds_hybridep.config_messages import EXPERT_CODECS
from ds_hybridep.errors import ConfigError


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_equal_specs_make_equal_codecs_with_equal_settings(spec):
    assert make_codec(spec) == make_codec(spec, kernels="reference")
    assert make_codec(spec).settings() == make_codec(spec, kernels="reference").settings()


def test_different_specs_make_different_settings():
    assert len({make_codec(spec).settings() for spec in SPECS.values()}) == len(SPECS)


def test_every_type_is_tested():
    used = {spec if isinstance(spec, str) else spec["type"] for spec in SPECS.values()}
    assert used == set(EXPERT_CODECS)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("int9", r'^k is "int9", but must be one of "identity", .*; did you mean "int8"\?'),
        (7, r'^k is 7, but must be a codec name or an object such as {"type": "identity"}; types: "identity"'),
        ({"rank": 4}, r'^k is {"rank": 4}, but must be a codec name or an object'),
        ({"type": "lowrank"}, r'^k.type is "lowrank", .* did you mean "low_rank"\?'),
        ({"type": "low_rank", "rnak": 4}, r'^k.rnak is not a known option; did you mean "rank"\? \(options of "low'),
        ({"type": "low_rank", "rank": 0}, r"^k.rank is 0, but must be an integer from 1 to 256; write it without"),
        ({"type": "low_rank", "rank": 257}, r"^k.rank is 257, but must be an integer from 1 to 256; write it without"),
        ({"type": "low_rank", "rank": True}, r"^k.rank is true, but must be an integer"),
        ({"type": "low_rank", "factors": "int9"}, r'^k.factors is "int9", but must be one of "fp32", .*"int8"\?'),
        (
            {"type": "low_rank", "fallback": "low_rank"},
            r'^k.fallback is "low_rank", but must be one of "identity", "int8"',
        ),
        ({"type": "int8", "block": 100}, r"^k.block is 100, but must be one of 8, 16, .*1024; choose one of these"),
        ({"type": "identity", "dtype": "fp8"}, r'^k.dtype is "fp8", but must be one of "fp32", "bf16", "fp16"'),
        ({"type": "low_rank", "rest": "int7"}, r'^k.rest is "int7", but must be one of .*"int8"\?'),
        (
            {"type": "low_rank", "rest": "low_rank"},
            r'^k.rest is "low_rank", but must be one of "int8", "int4", "int2"',
        ),
        ({"type": "low_rank", "rest": {"type": "int2", "block": 9}}, r"^k.rest.block is 9, but must be one of 8, 16"),
        (
            {"type": "low_rank", "refresh_interval": 0},
            r"^k.refresh_interval is 0, but must be an integer from 1",
        ),
    ],
)
def test_wrong_specs_are_refused_with_key_value_and_advice(spec, message):
    with pytest.raises(ConfigError, match=message):
        make_codec(spec, where="k")


def test_every_type_of_the_settings_makes_a_codec():
    assert {parse_codec(name, where="k").type for name in EXPERT_CODECS} == set(EXPERT_CODECS)
    assert len({make_codec(name).settings() for name in EXPERT_CODECS}) == len(EXPERT_CODECS)
    assert set(BITS) == set(get_args(BlockwiseConfig.model_fields["type"].annotation))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_settings_make_the_codec_that_their_spec_makes(spec):
    settings = parse_codec(spec, where="k")
    assert make_codec(settings) == make_codec(spec) == make_codec(settings.spec)


def test_defaults_of_the_settings_are_those_of_the_codecs():
    assert make_codec(IDENTITY) == Identity()
    assert make_codec(BlockwiseConfig(type="int4")) == Blockwise(bits=4)
    assert make_codec(LowRankConfig(type="low_rank")) == LowRank(wanted_ratio=DEFAULT_RATIO)


def test_a_rest_of_null_is_none():
    assert make_codec({"type": "low_rank", "rest": None}) == make_codec("low_rank")
