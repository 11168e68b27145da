# SPDX-License-Identifier: Apache-2.0
import contextlib
import gc
import json
import math
import sys
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from ds_hybridep.config import AdvancedConfig, HybridEPConfig, LevelConfig, parse_config
from ds_hybridep.config_codecs import IDENTITY, PATCH, describe_codec, recommended_codecs
from ds_hybridep.config_messages import MINIMAL_BLOCK
from ds_hybridep.errors import ConfigError, PlanError
from ds_hybridep.plan.cluster import Cluster, Level, Link

DC = {"name": "dc", "size": 2, "bandwidth_gbps": 1.0, "latency_ms": 20, "domain_size": 2}
GPU = {"name": "gpu", "size": 4}
BLOCK = {"levels": [DC, GPU]}


def parse(block, world_size=8, **options):
    return parse_config(block, world_size=world_size, **options)


def refusal(block, world_size=8, **options):
    with pytest.raises(ConfigError) as caught:
        parse(block, world_size, **options)
    return str(caught.value)


def with_setting(key, value):
    return {**BLOCK, key: value}


def with_advanced(key, value):
    return {**BLOCK, "advanced": {key: value}}


def with_level_setting(key, value):
    return {"levels": [DC, {**GPU, key: value}]}


def assert_says(message, *parts):
    for part in parts:
        assert part in message, message


# ---- what is accepted ----


def test_a_minimal_block_gets_the_defaults():
    config = parse({"levels": [{"name": "gpu", "size": 8}]})
    assert config == HybridEPConfig(
        levels=(LevelConfig(name="gpu", size=8, bandwidth_gbps=None, latency_ms=None, domain_size=1),),
        enabled=True,
        timeout_s=600.0,
        report_interval=10,
        report_file=None,
        token_exchange="auto",
        advanced=AdvancedConfig(
            prefetch_depth=2,
            kernels="auto",
            verify_interval=100,
            dispatch_sms=None,
            replan=True,
        ),
    )
    assert {config.levels[0].weight_codec, config.levels[0].gradient_codec} == {IDENTITY}
    assert config.levels[0].token_codec.type == "identity"


def test_the_block_that_the_errors_show_is_accepted():
    parse(json.loads("{" + MINIMAL_BLOCK + "}")["hybridep"])


def test_everything_given_is_kept():
    given = {
        "levels": [{**DC, "weight_codec": "identity", "token_codec": {"type": "identity"}}, GPU],
        "enabled": False,
        "timeout_s": 1.5,
        "report_interval": 0,
        "report_file": "run.json",
        "token_exchange": "hierarchical",
    }
    advanced = {
        "prefetch_depth": 0,
        "verify_interval": 0,
        "kernels": "reference",
        "dispatch_sms": 8,
        "replan": False,
    }
    config = parse({**given, "advanced": advanced})
    for key in given.keys() - {"levels"}:
        assert getattr(config, key) == given[key]
    assert config.advanced == AdvancedConfig(**advanced)
    assert config.levels[0].token_codec.type == "identity"
    assert config.domain_sizes == (2, 1)


def test_cluster_is_in_bytes_and_seconds():
    assert parse(BLOCK).cluster() == Cluster(
        (Level("dc", 2, Link(bandwidth_bytes_per_s=1.25e8, latency_s=0.02)), Level("gpu", 4, Link(None, None)))
    )


def test_null_is_as_good_as_left_out():
    nulls = {"bandwidth_gbps": None, "latency_ms": None}
    assert parse({"levels": [DC, {**GPU, **nulls}], "report_file": None}) == parse(BLOCK)


def test_any_mapping_will_do():
    assert parse(OrderedDict(levels=[OrderedDict(DC), OrderedDict(GPU)])) == parse(BLOCK)


def test_settings_cannot_be_changed_and_can_be_hashed():
    config = parse(BLOCK)
    for part, key in ((config, "timeout_s"), (config.levels[0], "size"), (config.advanced, "prefetch_depth")):
        with pytest.raises(ValidationError, match="frozen"):
            setattr(part, key, 1)
    assert hash(config) == hash(parse(BLOCK))


def test_canonical_is_json_and_the_same_for_the_same_settings():
    canonical = parse(BLOCK).canonical()
    assert json.loads(json.dumps(canonical)) == canonical
    spelled_out = {
        "levels": [{**DC, "latency_ms": 20.0, "weight_codec": {"type": "identity"}}, {**GPU, "domain_size": 1}],
        "timeout_s": 600,
        "enabled": True,
    }
    assert json.dumps(parse(spelled_out).canonical()) == json.dumps(canonical)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("advanced", {"prefetch_depth": 3}),
        ("advanced", {"kernels": "compiled"}),
        ("timeout_s", 5),
        ("token_exchange", "direct"),
    ],
)
def test_canonical_tells_settings_apart(key, value):
    assert parse(with_setting(key, value)).canonical() != parse(BLOCK).canonical()


def test_canonical_leaves_out_what_only_rank_0_uses():
    assert parse(with_setting("report_file", "run.json")).canonical() == parse(BLOCK).canonical()


# ---- switched off ----


def test_a_disabled_block_needs_no_levels_and_no_fitting_world():
    assert parse({"enabled": False}).levels == ()
    assert not parse({**BLOCK, "enabled": False}, world_size=1).enabled


def test_a_disabled_block_is_still_spelled_right():
    assert_says(refusal({"enabled": False, "level": []}), "hybridep.level ", "levels")


# ---- unknown and missing keys ----


@pytest.mark.parametrize("block", [None, 3, "levels", [DC]])
def test_a_block_that_is_no_object_is_refused(block):
    assert_says(refusal(block), "hybridep is ", json.dumps(block)[:20], "an object with keys", "levels")


def test_unknown_keys_are_refused_with_the_nearest_spelling():
    message = refusal(with_setting("report_intervall", 2))
    assert_says(message, "hybridep.report_intervall is not a known key", 'did you mean "report_interval"?')
    assert_says(
        refusal(with_setting("prefetch_dept", 2)), "hybridep.prefetch_dept is not a known key", "prefetch_depth"
    )
    message = refusal(with_advanced("prefetch_dept", 2))
    assert_says(message, "hybridep.advanced.prefetch_dept is not a known key", 'did you mean "prefetch_depth"?')
    message = refusal(with_level_setting("bandwith_gbps", 2))
    assert_says(message, "hybridep.levels[1].bandwith_gbps is not a known key", 'did you mean "bandwidth_gbps"?')


def test_unknown_keys_unlike_any_other_are_refused_with_the_known_ones():
    message = refusal(with_setting("zzz", 2))
    assert_says(message, "hybridep.zzz is not a known key; remove it", "known keys: levels, enabled, state")


def test_keys_that_are_no_strings_are_refused():
    assert_says(refusal({**BLOCK, 3: 4}), "hybridep.3 is not a known key")


def test_missing_levels_are_refused_with_a_minimal_block():
    assert_says(refusal({}), "hybridep.levels is missing", MINIMAL_BLOCK)


@pytest.mark.parametrize("key", ["name", "size"])
def test_missing_keys_of_a_level_are_refused(key):
    level = {"name": "gpu", "size": 4}
    del level[key]
    assert_says(refusal({"levels": [DC, level]}), f"hybridep.levels[1].{key} is missing", MINIMAL_BLOCK)


@pytest.mark.parametrize("levels", [None, [], {}, 3, {"dc": 2}])
def test_levels_that_are_no_list_are_refused(levels):
    message = refusal({"levels": levels})
    assert_says(message, f"hybridep.levels is {json.dumps(levels)}", "a list of at least one level", MINIMAL_BLOCK)


@pytest.mark.parametrize("level", [None, "dc", 2, [2]])
def test_levels_that_are_no_objects_are_refused(level):
    message = refusal({"levels": [DC, level]})
    assert_says(message, f"hybridep.levels[1] is {json.dumps(level)}", "an object with keys", "name, size")


# ---- values ----

NOT_INTEGERS = [True, "4", 4.0, None, [4], math.nan]
NOT_NUMBERS = [True, "4", [4], math.nan, math.inf, -math.inf, 10**400]


@pytest.mark.parametrize("value", [0, 1, "true", "false", None])
def test_values_that_are_no_boolean_are_refused(value):
    message = refusal(with_setting("enabled", value))
    assert_says(message, f"hybridep.enabled is {json.dumps(value)}", "true or false", "without quotes")


@pytest.mark.parametrize("key", ["prefetch_depth", "verify_interval", "report_interval"])
@pytest.mark.parametrize("value", [-1, *NOT_INTEGERS])
def test_values_that_are_no_count_are_refused(key, value):
    is_advanced = key in AdvancedConfig.model_fields
    message = refusal(with_advanced(key, value) if is_advanced else with_setting(key, value))
    path = f"hybridep.{'advanced.' if is_advanced else ''}{key}"
    assert_says(message, f"{path} is {json.dumps(value)}", "an integer >= 0", "for example")


@pytest.mark.parametrize("value", [0, -1, True, "8", 8.0, [8], math.nan])
def test_values_that_are_no_number_of_multiprocessors_are_refused(value):
    message = refusal(with_advanced("dispatch_sms", value))
    assert_says(message, f"hybridep.advanced.dispatch_sms is {json.dumps(value)}", "an integer >= 1", "for example 16")
    assert parse(with_advanced("dispatch_sms", None)).advanced.dispatch_sms is None


@pytest.mark.parametrize("key", ["size", "domain_size"])
@pytest.mark.parametrize("value", [0, -1, *NOT_INTEGERS])
def test_values_that_are_no_size_are_refused(key, value):
    message = refusal(with_level_setting(key, value))
    assert_says(message, f"hybridep.levels[1].{key} is {json.dumps(value)}", "an integer >= 1", "for example")


@pytest.mark.parametrize("value", [0, -1.5, 1e10, None, *NOT_NUMBERS])
def test_values_that_are_no_time_limit_are_refused(value):
    message = refusal(with_setting("timeout_s", value))
    assert_says(message, f"hybridep.timeout_s is {json.dumps(value)[:80]}", "a finite number > 0", "for example 600")


@pytest.mark.parametrize("value", [0, -1.5, 1e305, *NOT_NUMBERS])
def test_values_that_are_no_bandwidth_are_refused(value):
    message = refusal(with_level_setting("bandwidth_gbps", value))
    assert_says(message, f"hybridep.levels[1].bandwidth_gbps is {json.dumps(value)[:80]}", "> 0", "Gbit/s (bits")


@pytest.mark.parametrize("value", [-1, *NOT_NUMBERS])
def test_values_that_are_no_latency_are_refused(value):
    message = refusal(with_level_setting("latency_ms", value))
    assert_says(message, f"hybridep.levels[1].latency_ms is {json.dumps(value)[:80]}", ">= 0", "milliseconds")


@pytest.mark.parametrize("value", ["", " ", 3, None])
def test_values_that_are_no_name_are_refused(value):
    message = refusal(with_level_setting("name", value))
    assert_says(message, f"hybridep.levels[1].name is {json.dumps(value)}", "not empty", "own name")


@pytest.mark.parametrize("value", ["", 3, True])
def test_values_that_are_no_file_are_refused(value):
    message = refusal(with_setting("report_file", value))
    assert_says(message, f"hybridep.report_file is {json.dumps(value)}", "not empty", "path of a file")


@pytest.mark.parametrize("value", [None, 3, "x", ["prefetch_depth"]])
def test_advanced_settings_that_are_no_object_are_refused(value):
    message = refusal(with_setting("advanced", value))
    assert_says(
        message, f"hybridep.advanced is {json.dumps(value)}", "an object with keys", "known keys: prefetch_depth"
    )


@pytest.mark.parametrize("key", AdvancedConfig.model_fields)
def test_a_key_that_moved_is_refused_with_its_new_place(key):
    message = refusal(with_setting(key, 3))
    assert_says(message, f"hybridep.{key} moved to hybridep.advanced.{key}", f'write "advanced": {{"{key}": 3}}')


@pytest.mark.parametrize(
    ("block", "path", "nearest"),
    [
        (with_advanced("kernels", "Compiled"), 'advanced.kernels is "Compiled"', "compiled"),
        (with_advanced("kernels", "referense"), 'advanced.kernels is "referense"', "reference"),
        (with_setting("token_exchange", "hierarchial"), 'token_exchange is "hierarchial"', "hierarchical"),
    ],
)
def test_unknown_choices_are_refused_with_the_nearest_spelling(block, path, nearest):
    assert_says(refusal(block), f"hybridep.{path}", f'did you mean "{nearest}"?')


def test_domains_are_refused_where_tokens_are_left_to_deepspeed():
    message = refusal(with_setting("token_exchange", "deepspeed"))
    assert_says(message, 'hybridep.token_exchange is "deepspeed"', "hybridep.levels[0].domain_size is 2", '"auto"')


@pytest.mark.parametrize("value", [None, True, 3, "zzz", ["auto"]])
def test_unknown_choices_unlike_any_other_are_refused_with_all(value):
    message = refusal(with_advanced("kernels", value))
    assert_says(message, f"hybridep.advanced.kernels is {json.dumps(value)}", '"auto", "compiled", "reference"')


def test_values_that_json_cannot_hold_are_shown_all_the_same():
    assert_says(refusal(with_advanced("kernels", {1, 2})), "hybridep.advanced.kernels is {1, 2}, but must be")


def test_long_values_are_cut():
    message = refusal(with_advanced("kernels", "x" * 1000))
    assert_says(message, "x" * 50, "...")
    assert len(message) < 300


# ---- codecs ----

CODEC_KEYS = ["weight_codec", "gradient_codec", "dense_weight_codec", "dense_gradient_codec", "token_codec"]
FUTURE = [(key, "fp8") for key in CODEC_KEYS[:4]] + [("token_codec", name) for name in ("int4", "auto")]


@pytest.mark.parametrize(("key", "name"), FUTURE)
def test_future_codecs_are_refused_as_not_available_yet(key, name):
    message = refusal(with_level_setting(key, name))
    assert_says(message, f'hybridep.levels[1].{key} is "{name}"', "not available yet", '"identity"')
    # Their options are not read: which ones there will be is not settled.
    message = refusal(with_level_setting(key, {"type": name, "block": 4}))
    assert_says(message, f'hybridep.levels[1].{key}.type is "{name}"', "not available yet", '"identity"')


def test_tokens_have_codecs_of_one_byte_without_options():
    config = parse_config(with_level_setting("token_codec", {"type": "fp8"}), world_size=8)
    assert [level.row_format for level in config.levels] == [None, "fp8"]
    message = refusal(with_level_setting("token_codec", {"type": "int8", "block": 64}))
    assert_says(message, "hybridep.levels[1].token_codec.block is not a known option", 'write "int8"')
    levels = [{**DC, "domain_size": 1, "token_codec": "int8"}, GPU]
    message = refusal({"levels": levels, "token_exchange": "deepspeed"})
    assert_says(message, 'hybridep.token_exchange is "deepspeed"', 'hybridep.levels[0].token_codec is "int8"')


def test_a_codec_keeps_its_options():
    config = parse_config(with_level_setting("weight_codec", {"rank": 8, "type": "low_rank"}), world_size=8)
    assert config.levels[1].weight_codec.spec == {"type": "low_rank", "rank": 8}
    json.dumps(config.canonical())


def test_codecs_with_equal_settings_are_equal_however_they_are_written():
    short, long = ({"type": "low_rank", "fallback": codec} for codec in ("int2", {"type": "int2", "block": 128}))
    configs = [parse(with_level_setting("weight_codec", codec)) for codec in (short, long)]
    assert configs[0] == configs[1]
    assert configs[0].levels[1].weight_codec.spec == configs[1].levels[1].weight_codec.spec
    assert parse(with_level_setting("weight_codec", {"type": "identity", "dtype": "fp32"})) == parse(BLOCK)


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        ({"type": "low_rank", "rank": {4}}, ".rank is {4}, but must be an integer from 1 to 256"),
        ({"type": "low_rank", "rnak": 4}, '.rnak is not a known option; did you mean "rank"? (options of "low_rank"'),
        ({"type": "low_rank", "fallback": {"type": "int8", "block": 5}}, ".fallback.block is 5, but must be one of 8"),
        ({"type": "low_rank", "rest": "low_rank"}, '.rest is "low_rank", but must be one of "int8", "int4"'),
        ({"type": "low_rank", "rest": {"type": "int8", "block": 8.0}}, ".rest.block is 8.0, but must be one of 8, 16"),
        ({"type": "low_rank", "rest": 3}, ".rest is 3, but must be a codec name or an object"),
        ({"type": "low_rank", "ratio": 20, "rank": 4}, ".rank is 4, but ratio is 20; leave out one of them"),
        ({"type": "low_rank", "ratio": 1}, ".ratio is 1, but must be a number > 1"),
    ],
)
def test_options_of_codecs_are_checked_with_the_block(codec, message):
    for key in CODEC_KEYS[:4]:
        assert_says(refusal(with_level_setting(key, codec)), f"hybridep.levels[1].{key}{message}")
    block = {"levels": [GPU], "auto_codecs": ["int8", codec]}
    assert_says(refusal(block, world_size=4), f"hybridep.auto_codecs[1]{message}")


@pytest.mark.parametrize("key", CODEC_KEYS)
def test_unknown_codecs_are_refused_with_the_nearest_spelling(key):
    message = refusal(with_level_setting(key, "identiy"))
    assert_says(message, f'hybridep.levels[1].{key} is "identiy"', 'one of "identity"', 'did you mean "identity"?')
    message = refusal(with_level_setting(key, {"type": "zzz"}))
    assert_says(message, f'hybridep.levels[1].{key}.type is "zzz"', 'one of "identity"')


@pytest.mark.parametrize("value", [None, 3, True, ["identity"], {}, {"rank": 4}])
def test_values_that_are_no_codec_are_refused(value):
    message = refusal(with_level_setting("weight_codec", value))
    assert_says(message, f"hybridep.levels[1].weight_codec is {json.dumps(value)}", '{"type": "identity"}')


@pytest.mark.parametrize("name", [None, 3, ["identity"]])
def test_codec_names_that_are_no_strings_are_refused(name):
    message = refusal(with_level_setting("weight_codec", {"type": name}))
    assert_says(message, f"hybridep.levels[1].weight_codec.type is {json.dumps(name)}", 'one of "identity"')


# ---- patches, dense parameters and the recommended set ----


@pytest.mark.parametrize("key", ["weight_codec", "dense_weight_codec"])
def test_weights_may_be_patched(key):
    assert getattr(parse(with_level_setting(key, "patch")).levels[1], key) == PATCH
    message = refusal(with_level_setting(key, {"type": "patch", "block": 4096}))
    assert_says(message, f"hybridep.levels[1].{key}.block is not a known option", 'write "patch"')


@pytest.mark.parametrize("key", ["gradient_codec", "dense_gradient_codec", "token_codec"])
def test_only_weights_are_patched(key):
    for value, path in (("patch", key), ({"type": "patch"}, f"{key}.type")):
        message = refusal(with_level_setting(key, value))
        assert_says(message, f'hybridep.levels[1].{path} is "patch", which is for weights only', "step to step")
        assert_says(message, 'choose one of "identity", "int8"')
    message = refusal({**BLOCK, "auto_codecs": ["patch"]})
    assert_says(message, 'hybridep.auto_codecs[0] is "patch", which is for weights only')


@pytest.mark.parametrize("key", ["weight_codec", "dense_weight_codec"])
def test_patches_do_not_travel_over_nccl(key):
    message = refusal({"levels": [{**DC, key: "patch", "backend": "nccl"}, GPU]})
    assert_says(message, f'hybridep.levels[0].{key} is "patch", but backend is "nccl"', 'set backend to "gloo"')
    for backend in ("gloo", "auto"):
        parse({"levels": [{**DC, key: "patch", "backend": backend}, GPU]})


def test_codecs_of_dense_parameters_are_those_of_experts_unless_given():
    level = parse(with_level_setting("weight_codec", "int8")).levels[1]
    assert [codec.type for codec in level.all_codecs] == ["int8", "identity", "int8", "identity"]
    given = {"weight_codec": "int8", "dense_weight_codec": "identity", "dense_gradient_codec": "int4"}
    level = parse({"levels": [DC, {**GPU, **given}]}).levels[1]
    assert [codec.type for codec in level.all_codecs] == ["int8", "identity", "identity", "int4"]


@pytest.mark.parametrize("key", ["weight_codec", "gradient_codec"])
@pytest.mark.parametrize("codec", ["int8", "identity"])
def test_the_recommended_set_stands_alone(key, codec):
    message = refusal({"levels": [{**DC, "codecs": "recommended", key: codec}, GPU]})
    assert_says(message, f"hybridep.levels[0].{key} stands beside codecs", '"recommended"', f"dense_{key} may stand")
    config = parse({"levels": [{**DC, "codecs": "recommended", f"dense_{key}": codec}, GPU]})
    assert getattr(config.with_dtype(4).levels[0], f"dense_{key}").type == codec
    message = refusal(with_level_setting("codecs", "recomended"))
    assert_says(message, 'hybridep.levels[1].codecs is "recomended"', 'did you mean "recommended"?')


@pytest.mark.parametrize("itemsize", [2, 4])
def test_the_recommended_set_is_made_of_codecs_once_the_type_is_known(itemsize):
    config = parse({"levels": [{**DC, "codecs": "recommended"}, GPU]})
    known = config.with_dtype(itemsize)
    assert known.levels[0].all_codecs == recommended_codecs(itemsize)
    assert (known.levels[0].weight_codec == PATCH) == (itemsize == 2)
    assert known.levels[1] == config.levels[1]
    # As if it had been written out; and so for whoever compares what ranks have.
    keys = ("weight_codec", "gradient_codec", "dense_weight_codec", "dense_gradient_codec")
    written = dict(zip(keys, (codec.spec for codec in recommended_codecs(itemsize)), strict=True))
    assert known.canonical() == parse({"levels": [{**DC, **written}, GPU]}).canonical()
    assert known.with_dtype(itemsize) == known
    assert parse(BLOCK).with_dtype(itemsize) == parse(BLOCK)


def test_the_recommended_set_of_16_bits_does_not_travel_over_nccl():
    config = parse({"levels": [{**DC, "codecs": "recommended", "backend": "nccl"}, GPU]})
    assert config.with_dtype(4).levels[0].weight_codec.type == "low_rank"
    with pytest.raises(ConfigError) as caught:
        config.with_dtype(2)
    assert_says(str(caught.value), 'hybridep.levels[0].codecs is "recommended"', "16 bits", 'set backend to "gloo"')


def test_codecs_are_described_with_one_line_for_each_kind():
    config = parse({"levels": [{**DC, "codecs": "recommended"}, {**GPU, "gradient_codec": "int8"}]}).with_dtype(2)
    gradient, dense_gradient = (describe_codec(recommended_codecs(2)[kind]) for kind in (1, 3))
    assert gradient == "low_rank factors log4 ratio 50 weighting rms"
    assert dense_gradient == "low_rank factors log4 ratio 50 rest int2 block 64 weighting rms"
    assert config.describe_codecs() == (
        "expert weights: patch over dc",
        f"expert gradients: {gradient} over dc, int8 over gpu",
        "dense weights: patch over dc",
        f"dense gradients: {dense_gradient} over dc, int8 over gpu",
    )
    assert parse(BLOCK).describe_codecs() == ()
    # What DeepSpeed sends has no codec: only what a domain moves is left.
    levels = [{**DC, "domain_size": 2, "gradient_codec": "int8"}, {**GPU, "gradient_codec": "int8"}]
    alone = parse({"levels": levels, "dense_sync": "deepspeed"})
    assert alone.describe_codecs() == ("expert gradients: int8 over dc",)


@pytest.mark.parametrize("key", ["dense_weight_codec", "dense_gradient_codec"])
def test_codecs_of_what_deepspeed_sends_are_refused(key):
    message = refusal({"levels": [{**DC, key: "int8"}, GPU], "dense_sync": "deepspeed"})
    assert_says(message, f'hybridep.levels[0].{key} is "int8"', 'hybridep.dense_sync is "deepspeed"', "leave out one")
    parse({"levels": [{**DC, key: "identity"}, GPU], "dense_sync": "deepspeed"})


def test_a_misspelt_choice_is_refused_with_the_nearest():
    message = refusal(with_setting("dense_sync", "hierarchial"))
    assert_says(message, 'one of "deepspeed", "hierarchical"', 'did you mean "hierarchical"?')


# ---- levels against each other and the job ----


def test_levels_that_do_not_make_the_world_are_refused():
    message = refusal(BLOCK, world_size=16)
    assert_says(message, "hybridep.levels: the sizes dc (2) x gpu (4) make 8 ranks, but the job has 16")
    assert_says(message, "their product is 16, or launch 8 ranks")


def test_domain_sizes_that_do_not_divide_are_refused_with_the_divisors():
    message = refusal({"levels": [{"name": "gpu", "size": 12, "domain_size": 5}]}, world_size=12)
    assert_says(message, "hybridep.levels[0].domain_size is 5, which does not divide the level's size 12")
    assert_says(message, "choose one of 1, 2, 3, 4, 6, 12")


def test_auto_is_planned():
    block = {
        "levels": [
            {"name": "dc", "size": 2, "domain_size": "auto", "weight_codec": "auto", "gradient_codec": "int8"},
            {"name": "gpu", "size": 4, "domain_size": 4},
        ],
        "auto_codecs": ["int8", {"type": "low_rank", "rank": 4}],
    }
    config = parse_config(block, world_size=8)
    assert config.is_planned
    assert config.levels[0].domain_size == "auto"
    assert config.domain_sizes == (1, 4)
    assert [codec.type for codec in config.auto_codecs] == ["int8", "low_rank"]


@pytest.mark.parametrize(
    "setting", [{"domain_size": "auto"}, {"weight_codec": "auto"}, {"gradient_codec": {"type": "auto"}}]
)
def test_one_auto_is_enough_to_be_planned(setting):
    levels = [{"name": "dc", "size": 2, **setting}]
    assert parse_config({"levels": levels}, world_size=2).is_planned
    assert not parse_config({"levels": [{"name": "dc", "size": 2}]}, world_size=2).is_planned


def test_codecs_to_choose_from_are_a_list_of_codecs():
    levels = [{"name": "dc", "size": 2}]
    message = refusal({"levels": levels, "auto_codecs": "int8"}, world_size=2)
    assert_says(message, 'hybridep.auto_codecs is "int8"', "a list of codecs", '["int8"]')
    message = refusal({"levels": levels, "auto_codecs": ["int8", "int9"]}, world_size=2)
    assert_says(message, 'hybridep.auto_codecs[1] is "int9"', 'did you mean "int')


def test_two_levels_of_one_name_are_refused():
    message = refusal({"levels": [DC, {"name": "dc", "size": 4}]})
    assert_says(message, 'hybridep.levels[1].name is "dc", which hybridep.levels[0] has already', "its own name")


# ---- values that are too large, too long or junk ----


def test_a_huge_size_is_refused_before_its_divisors_are_looked_for():
    for level in ({"size": 10**30}, {"size": 10**30, "domain_size": 2}, {"size": 10**5000}):
        for block in (
            {"levels": [{"name": "gpu", **level}]},
            {"enabled": False, "levels": [{"name": "gpu", **level}]},
        ):
            message = refusal(block)
            assert_says(message, "hybridep.levels[0].size is ", "an integer >= 1 and at most 1000000")
    message = refusal({"levels": [{"name": "gpu", "size": 10**6, "domain_size": 7}]})
    assert_says(message, "hybridep.levels[0].domain_size is 7", "size 1000000; choose one of 1, 2, 4, 5, 8")
    message = refusal({"levels": [{"name": f"level {index}", "size": 10**6} for index in range(5000)]})
    assert_says(message, "hybridep.levels: the sizes level 0 (1000000)", "but the job has 8")


LONG = "x" * 10_000


@pytest.mark.parametrize(
    "block",
    [
        {"levels": LONG},
        {"levels": [LONG]},
        {"levels": [{"name": LONG, "size": 2}]},
        {"levels": [{"name": LONG, "size": 8}] * 2},
        {"levels": [{"name": LONG, "size": LONG}]},
        with_level_setting("weight_codec", LONG),
        with_level_setting("weight_codec", {"type": LONG}),
        with_level_setting("weight_codec", {"type": "low_rank", LONG: 3}),
        with_level_setting("gradient_codec", {"type": "low_rank", "fallback": LONG}),
        with_level_setting("token_codec", LONG),
        with_level_setting(LONG, 2),
        with_setting(LONG, LONG),
        with_setting("token_exchange", LONG),
        with_setting("prefetch_depth", LONG),
        with_advanced("kernels", LONG),
        with_advanced(LONG, LONG),
        LONG,
    ],
    ids=str,
)
def test_long_values_and_keys_are_cut_wherever_they_stand(block):
    message = refusal(block)
    assert "x" * 50 in message
    assert "x" * 81 not in message
    assert len(message) <= MOST_CHARACTERS


MOST_CHARACTERS = 600
VALID_BLOCKS = [
    BLOCK,
    {"enabled": False},
    {
        "levels": [
            {**DC, "weight_codec": "int8", "gradient_codec": {"type": "low_rank", "rank": 4, "rest": "int2"}},
            GPU,
        ]
    },
    {"levels": [{**DC, "domain_size": "auto", "weight_codec": "auto"}, GPU], "auto_codecs": ["int8", "low_rank"]},
    {"levels": [{**DC, "token_codec": {"type": "fp8"}}, GPU], "dense_sync": "hierarchical"},
    {"levels": [{**DC, "codecs": "recommended", "dense_gradient_codec": "int8"}, {**GPU, "weight_codec": "patch"}]},
    {
        "levels": [DC, {**GPU, "gradient_codec": {"type": "low_rank", "fallback": {"type": "int4", "block": 64}}}],
        "report_file": "run.json",
        "advanced": {"prefetch_depth": 0, "kernels": "reference", "dispatch_sms": 8, "replan": False},
    },
]


def _nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


CYCLE = {"levels": []}
CYCLE["levels"].append(CYCLE)
UNPRINTABLE = {  # by name, since some cannot be shown when a test fails
    "an integer of 4000 digits": 10**4000 - 1,  # parsers of JSON refuse more than 4300
    "a string of 10000 characters": LONG,
    "a zero": "\0",
    "half a character": "\ud800",
    "bytes": b"bytes",
    "a tuple": (),
    "a set": {1, 2},
    "an object": object(),
    "an endless dictionary": CYCLE,
    "an endless list": [CYCLE],
    "a long list": [0] * 100_000,
    "500 lists in each other": _nested(500),
    "100000 lists in each other": _nested(100_000),
}
DEEP = ("an endless dictionary", "an endless list", "500 lists in each other", "100000 lists in each other")
WORDS = [
    "auto",
    "identity",
    "int8",
    "low_rank",
    "patch",
    "recommended",
    "top_k",
    "sum",
    "fp8",
    "deepspeed",
    "",
    "type",
    "levels",
]
KEYS = st.one_of(
    st.sampled_from([*HybridEPConfig.model_fields, *LevelConfig.model_fields, *AdvancedConfig.model_fields]),
    st.sampled_from(
        ["type", "rank", "ratio", "rest", "fallback", "block", "max_staleness", LONG, "\ud800", None, (1, 2)]
    ),
    st.text(max_size=5),
    st.integers(),
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 12),
    st.sampled_from([2**63, 10**30, -(10**400)]),
    st.floats(),
    st.sampled_from(WORDS),
    st.text(max_size=20),
    st.sampled_from([UNPRINTABLE[name] for name in UNPRINTABLE if name not in DEEP]),
)
JUNK = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3)),
    max_leaves=6,
)


def _places(value, path=()):
    """Paths of all values in a block, the block itself first."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, one in inner for place in _places(one, (*path, key)))]


def _changed(value, path, junk, key):
    """With `junk` in the place of what stands at `path`, or beside it as `key` of an object."""
    if not path:
        return junk if key is _NOT_ADDED or not isinstance(value, dict) else {**value, key: junk}
    copied = dict(value) if isinstance(value, dict) else list(value)
    copied[path[0]] = _changed(value[path[0]], path[1:], junk, key)
    return copied


_NOT_ADDED = object()


def _answer(block):
    """The message of the refusal; "" if the block is accepted."""
    try:
        json.dumps(parse(block).canonical())
    except (ConfigError, PlanError) as error:
        return str(error)
    return ""


@given(st.data())
@settings(max_examples=200)
def test_a_block_with_junk_in_it_is_accepted_or_refused_with_a_short_message_that_names_the_key(data):
    block = data.draw(st.sampled_from(VALID_BLOCKS))
    # All paths are those of the valid block, since junk may be endless.
    for path in data.draw(st.lists(st.sampled_from(_places(block)), min_size=1, max_size=3, unique=True)):
        key, junk = data.draw(st.one_of(st.just(_NOT_ADDED), KEYS)), data.draw(JUNK)
        with contextlib.suppress(LookupError, TypeError):  # what stood there is gone
            block = _changed(block, path, junk, key)
    message = _answer(block)
    assert message == "" or message.startswith("hybridep"), message
    assert len(message) <= MOST_CHARACTERS, message


@pytest.mark.parametrize("name", DEEP)
def test_values_that_have_no_end_are_refused_wherever_they_stand(name, monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # pydantic tries to show what it refuses
    for valid in VALID_BLOCKS:
        for path in _places(valid):
            gc.disable()  # at the end of the stack, finalizers of what other tests have left would fail
            try:
                message = _answer(_changed(valid, path, UNPRINTABLE[name], _NOT_ADDED))
            finally:
                gc.enable()
            assert message.startswith("hybridep")
            assert len(message) <= MOST_CHARACTERS


# ---- cluster files ----

YAML_TEXT = """
levels:
  - {name: dc, size: 2, bandwidth_gbps: 1.0, latency_ms: 20, domain_size: 2}
  - name: gpu
    size: 4
"""


def written(path, text):
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(("name", "text"), [("cluster.yaml", YAML_TEXT), ("cluster.json", json.dumps(BLOCK))])
def test_a_cluster_file_equals_the_list_written_out(tmp_path, name, text):
    written(tmp_path / name, text)
    assert parse({"levels": name}, base_dir=tmp_path) == parse(BLOCK)
    assert parse({"levels": name}, base_dir=str(tmp_path)).canonical() == parse(BLOCK).canonical()
    assert parse({"levels": str(tmp_path / name)}) == parse(BLOCK)


def test_a_cluster_file_is_sought_beside_the_config_and_then_in_the_working_directory(tmp_path, monkeypatch):
    beside, working = tmp_path / "beside", tmp_path / "working"
    beside.mkdir()
    working.mkdir()
    monkeypatch.chdir(working)
    written(working / "cluster.yaml", "levels: [{name: found_in_working_directory, size: 8}]")
    assert parse({"levels": "cluster.yaml"}, base_dir=beside).levels[0].name == "found_in_working_directory"
    written(beside / "cluster.yaml", "levels: [{name: found_beside, size: 8}]")
    assert parse({"levels": "cluster.yaml"}, base_dir=beside).levels[0].name == "found_beside"


@pytest.mark.parametrize("name", ["nowhere.yaml", "", ".", "x" * 5000, "\0"])
def test_a_missing_cluster_file_is_refused(tmp_path, name):
    message = refusal({"levels": name}, base_dir=tmp_path)
    assert_says(message, f"hybridep.levels is the path {json.dumps(name)[:80]}", "no such file", str(tmp_path))


@pytest.mark.parametrize(
    ("name", "text"),
    [("bad.yaml", "levels: [{name: dc"), ("bad.json", '{"levels": [}'), ("bad.yaml", "levels: 2024-13-45")],
)
def test_a_cluster_file_with_bad_syntax_is_refused(tmp_path, name, text):
    path = written(tmp_path / name, text)
    assert_says(refusal({"levels": name}, base_dir=tmp_path), f"cluster file {path} cannot be parsed", "syntax")


def test_a_cluster_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    assert_says(refusal({"levels": str(path)}), f"cluster file {path} cannot be parsed")


def test_a_cluster_file_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    path = written(tmp_path / "cluster.yaml", YAML_TEXT)

    def deny(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(path), "read_text", deny)
    message = refusal({"levels": str(path)})
    assert_says(message, f"cluster file {path} cannot be read (Permission denied)", "hybridep.levels")


def test_a_yaml_file_without_its_parser_is_refused(tmp_path, monkeypatch):
    path = written(tmp_path / "cluster.yaml", YAML_TEXT)
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert_says(refusal({"levels": str(path)}), f"cluster file {path} needs PyYAML", "JSON")


@pytest.mark.parametrize("text", ["", "- {name: dc, size: 2}", "name: dc"])
def test_a_cluster_file_without_levels_is_refused(tmp_path, text):
    path = written(tmp_path / "cluster.yaml", text)
    assert_says(refusal({"levels": str(path)}), f"cluster file {path} has no key levels")


def test_a_cluster_file_holds_levels_only(tmp_path):
    path = written(tmp_path / "cluster.yaml", YAML_TEXT + "timeout_s: 3\n")
    assert_says(
        refusal({"levels": str(path)}), f'cluster file {path}: "timeout_s" is not a known key', "hybridep block"
    )


def test_a_wrong_value_in_a_cluster_file_names_file_and_key(tmp_path):
    path = written(tmp_path / "cluster.yaml", YAML_TEXT.replace("size: 4", "size: four"))
    message = refusal({"levels": str(path)})
    assert_says(message, f'cluster file {path}: hybridep.levels[1].size is "four", but must be an integer >= 1')


def test_a_cluster_file_that_does_not_make_the_world_names_the_file(tmp_path):
    path = written(tmp_path / "cluster.yaml", YAML_TEXT)
    message = refusal({"levels": str(path)}, world_size=4)
    assert_says(message, f"cluster file {path}: hybridep.levels: the sizes", "make 8 ranks, but the job has 4")
