# SPDX-License-Identifier: Apache-2.0
"""The "hybridep" block: what is accepted, and what is said about all else."""

import contextlib
import gc
import json
import math
import sys
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hybridep.config import AdvancedConfig, HybridEPConfig, LevelConfig, parse_config
from ds_hybridep.config_codecs import IDENTITY, PATCH, recommended_codecs
from ds_hybridep.config_messages import MINIMAL_BLOCK
from ds_hybridep.errors import ConfigError, PlanError
from ds_hybridep.geometry.cluster import Cluster, Level, LinkSpeed

DC = {"name": "dc", "size": 2, "bandwidth_gbps": 1.0, "latency_ms": 20, "domain_size": 2}
GPU = {"name": "gpu", "size": 4}
BLOCK = {"levels": [DC, GPU]}


def parse(block, world_size=8, **options):
    return parse_config(block, world_size=world_size, **options)


def refusal(block, world_size=8, **options):
    with pytest.raises(ConfigError) as caught:
        parse(block, world_size, **options)
    return str(caught.value)


def of_level(**keys):
    return {"levels": [DC, {**GPU, **keys}]}


def assert_says(message, *parts):
    for part in parts:
        assert part in message, message


# ---- what is accepted ----


def test_a_minimal_block_gets_the_defaults():
    config = parse(json.loads("{" + MINIMAL_BLOCK + "}")["hybridep"])
    assert config == HybridEPConfig(levels=(LevelConfig(name="dc", size=2), LevelConfig(name="gpu", size=4)))
    assert config.levels[0].all_codecs == (IDENTITY,) * 4
    assert config.levels[0].row_format is None


def test_everything_given_is_kept():
    given = {"enabled": False, "timeout_s": 1.5, "report_interval": 0, "report_file": "run.json"}
    advanced = {"prefetch_depth": 0, "verify_interval": 0, "kernels": "reference", "dispatch_sms": 8, "replan": False}
    config = parse({**BLOCK, **given, "advanced": advanced})
    assert {key: getattr(config, key) for key in given} == given
    assert config.advanced == AdvancedConfig(**advanced)
    assert config.domain_sizes == (2, 1)


def test_cluster_is_in_bytes_and_seconds():
    assert parse(BLOCK).cluster() == Cluster(
        (
            Level("dc", 2, LinkSpeed(bandwidth_bytes_per_s=1.25e8, latency_s=0.02)),
            Level("gpu", 4, LinkSpeed(None, None)),
        )
    )


@pytest.mark.parametrize(
    "same",
    [
        {**of_level(bandwidth_gbps=None, latency_ms=None), "report_file": None},
        OrderedDict(levels=[OrderedDict(DC), OrderedDict(GPU)]),
        {"levels": [{**DC, "latency_ms": 20.0, "weight_codec": {"type": "identity"}}, GPU], "timeout_s": 600},
    ],
    ids=["null is as good as left out", "any mapping", "defaults written out"],
)
def test_equal_settings_are_equal_however_they_are_written(same):
    config, canonical = parse(same), parse(BLOCK).canonical()
    assert config == parse(BLOCK)
    assert hash(config) == hash(parse(BLOCK))
    assert json.dumps(config.canonical()) == json.dumps(canonical)
    assert json.loads(json.dumps(canonical)) == canonical


@pytest.mark.parametrize(
    "other", [{"advanced": {"kernels": "compiled"}}, {"timeout_s": 5}, {"token_exchange": "direct"}], ids=str
)
def test_canonical_tells_settings_apart_that_all_ranks_must_share(other):
    assert parse({**BLOCK, **other}).canonical() != parse(BLOCK).canonical()
    assert parse({**BLOCK, "report_file": "run.json"}).canonical() == parse(BLOCK).canonical()


def test_machines_of_one_site_may_announce_addresses_of_their_own():
    sites = {"names": ["a", "b"], "meeting_point": "meet:29400", "secret_file": "secret"}
    one, other = (parse({**BLOCK, "sites": {**sites, "host": host}}) for host in ("198.51.100.1", "198.51.100.2"))
    assert one.canonical() == other.canonical()


def test_a_disabled_block_needs_no_levels_and_no_fitting_world_but_right_keys():
    assert parse({"enabled": False}).levels == ()
    assert not parse({**BLOCK, "enabled": False}, world_size=1).enabled
    assert_says(refusal({"enabled": False, "level": []}), "hybridep.level ", "levels")


# ---- keys and values ----


@pytest.mark.parametrize(
    ("block", "path", "hint"),
    [
        ({**BLOCK, "report_intervall": 2}, "hybridep.report_intervall", "report_interval"),
        ({**BLOCK, "advanced": {"prefetch_dept": 2}}, "hybridep.advanced.prefetch_dept", "prefetch_depth"),
        (of_level(bandwith_gbps=2), "hybridep.levels[1].bandwith_gbps", "bandwidth_gbps"),
        ({"levels": [DC, {"name": "gpu", "sise": 4}]}, "hybridep.levels[1].sise", "size"),
        (of_level(weight_codec={"type": "low_rank", "rnak": 4}), "hybridep.levels[1].weight_codec.rnak", "rank"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unknown_keys_are_refused_with_the_nearest_spelling(block, path, hint):
    assert_says(refusal(block), f'{path} is not a known key; did you mean "{hint}"?', "known keys: ")


@pytest.mark.parametrize("key", ["zzz", 3])
def test_unknown_keys_unlike_any_other_are_refused_with_the_known_ones(key):
    message = refusal({**BLOCK, key: 2})
    assert_says(message, f"hybridep.{key} is not a known key; remove it", "known keys: levels, enabled, state")


@pytest.mark.parametrize("block", [{}, {"levels": []}])
def test_missing_levels_are_refused_with_a_minimal_block(block):
    assert_says(refusal(block), "hybridep.levels is missing", MINIMAL_BLOCK)


@pytest.mark.parametrize("key", ["name", "size"])
def test_missing_keys_of_a_level_are_refused(key):
    level = {one: value for one, value in GPU.items() if one != key}
    assert_says(refusal({"levels": [DC, level]}), f"hybridep.levels[1].{key} is missing", MINIMAL_BLOCK)


NOT_INTEGERS = [True, "4", 4.0, [4], math.nan]
NOT_NUMBERS = [True, "4", [4], math.nan, math.inf, -math.inf, 10**400]
NOT_OBJECTS = [3, "x", ["name"]]
REFUSED = {  # key -> (part of the message, values)
    "hybridep": ("an object", [None, 3, "levels", [DC]]),
    "hybridep.levels": ("a list", [None, {}, 3, {"dc": 2}]),
    "hybridep.levels[1]": ("an object", [None, *NOT_OBJECTS]),
    "hybridep.levels[1].name": ("", ["", " ", 3, None]),
    "hybridep.levels[1].size": ("", [0, -1, None, *NOT_INTEGERS, 10**30]),
    "hybridep.levels[1].domain_size": ("", [0, -1, None, *NOT_INTEGERS]),
    "hybridep.levels[1].hot_experts": ("", [-1, None, *NOT_INTEGERS]),
    "hybridep.levels[1].hot_memory_gb": ("", [0, -1.5, *NOT_NUMBERS]),
    "hybridep.levels[1].bandwidth_gbps": ("", [0, -1.5, 1e305, *NOT_NUMBERS]),
    "hybridep.levels[1].latency_ms": ("", [-1, *NOT_NUMBERS]),
    "hybridep.levels[1].weight_codec": ("", [None, 3, True, ["identity"], {}, {"rank": 4}, {"type": 3}]),
    "hybridep.enabled": ("a valid boolean", [0, 1, "true", None]),
    "hybridep.timeout_s": ("", [0, -1.5, 1e10, None, *NOT_NUMBERS]),
    "hybridep.report_interval": ("", [-1, None, *NOT_INTEGERS]),
    "hybridep.report_file": ("", ["", 3, True]),
    "hybridep.auto_codecs": ("a list", ["int8", 3]),
    "hybridep.advanced": ("an object", [None, *NOT_OBJECTS]),
    "hybridep.advanced.prefetch_depth": ("", [-1, None, *NOT_INTEGERS]),
    "hybridep.advanced.dispatch_sms": ("", [0, -1, *NOT_INTEGERS]),
    "hybridep.advanced.kernels": ("'auto', 'compiled' or 'reference'", [None, True, 3, "zzz", ["auto"], {1, 2}]),
}


@pytest.mark.parametrize(
    ("path", "value"), [(path, value) for path, (_, values) in REFUSED.items() for value in values]
)
def test_wrong_values_are_refused_with_path_and_value(path, value):
    block, steps = {**BLOCK, "advanced": {}}, path.replace("levels[1]", "levels.1").split(".")[1:]
    block["levels"] = [DC, dict(GPU)]
    place = block
    for step in steps[:-1]:
        place = place[int(step) if step.isdigit() else step]
    if steps:
        place[int(steps[-1]) if steps[-1].isdigit() else steps[-1]] = value
    message = refusal(block if steps else value)
    said = str(value) if isinstance(value, set) else json.dumps(value)[:20]
    assert_says(message, f"{path} is {said}", "but must be", REFUSED[path][0])


@pytest.mark.parametrize(
    ("block", "path", "nearest"),
    [
        ({**BLOCK, "advanced": {"kernels": "Compiled"}}, 'advanced.kernels is "Compiled"', "compiled"),
        ({**BLOCK, "token_exchange": "hierarchial"}, 'token_exchange is "hierarchial"', "hierarchical"),
        ({**BLOCK, "dense_sync": "hierarchial"}, 'dense_sync is "hierarchial"', "hierarchical"),
        (of_level(codecs="recomended"), 'levels[1].codecs is "recomended"', "recommended"),
        ({**BLOCK, "auto_codecs": ["int8", "int9"]}, 'auto_codecs[1] is "int9"', "int8"),
        *(
            (of_level(**{key: codec}), f"levels[1].{key} is {json.dumps(codec)}", "identity")
            for key in ("weight_codec", "gradient_codec", "dense_weight_codec", "dense_gradient_codec", "token_codec")
            for codec in ("identiy",)
        ),
        (of_level(weight_codec={"type": "lowrank"}), 'levels[1].weight_codec is {"type": "lowrank"}', "low_rank"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unknown_choices_are_refused_with_the_nearest_spelling(block, path, nearest):
    assert_says(refusal(block), f"hybridep.{path}", f'did you mean "{nearest}"?')


# ---- codecs ----

CODEC_KEYS = ["weight_codec", "gradient_codec", "dense_weight_codec", "dense_gradient_codec"]


def test_a_codec_keeps_its_options():
    config = parse(of_level(weight_codec={"rank": 8, "type": "low_rank"}))
    assert config.levels[1].weight_codec.spec == {"type": "low_rank", "rank": 8}
    json.dumps(config.canonical())
    short, long = (parse(of_level(weight_codec=codec)) for codec in ("int2", {"type": "int2", "block": 128}))
    assert short == long
    assert short.levels[1].weight_codec.spec == {"type": "int2"}


@pytest.mark.parametrize(
    ("codec", "message"),
    [
        ({"type": "low_rank", "rank": {4}}, ".rank is {4}, but must be a valid integer"),
        ({"type": "low_rank", "rank": 0}, ".rank is 0, but must be greater than or equal to 1"),
        ({"type": "low_rank", "rank": 257}, ".rank is 257, but must be less than or equal to 256"),
        ({"type": "low_rank", "rest": "low_rank"}, ".rest is \"low_rank\", but must be 'int8', 'int4'"),
        ({"type": "low_rank", "rest": 3}, ".rest is 3, but must be an object"),
        ({"type": "low_rank", "ratio": 20, "rank": 4}, ".rank is 4, but ratio is 20; leave out one of them"),
        ({"type": "low_rank", "ratio": 1}, ".ratio is 1, but must be greater than 1"),
        ({"type": "low_rank", "factors": "log4"}, ".factors is no longer a key: factors are integers of 4 bits"),
        ({"type": "int8", "block": 100}, ".block is 100, but must be 8, 16"),
    ],
    ids=str,
)
def test_options_of_codecs_are_checked_with_the_block(codec, message):
    for key in CODEC_KEYS:
        assert_says(refusal(of_level(**{key: codec})), f"hybridep.levels[1].{key}{message}")
    block = {"levels": [GPU], "auto_codecs": ["int8", codec]}
    assert_says(refusal(block, world_size=4), f"hybridep.auto_codecs[1]{message}")


def test_tokens_have_codecs_of_one_byte_without_options():
    assert [level.row_format for level in parse(of_level(token_codec={"type": "fp8"})).levels] == [None, "fp8"]
    message = refusal(of_level(token_codec={"type": "int8", "block": 64}))
    assert_says(message, "hybridep.levels[1].token_codec.block is not a known key")
    assert_says(refusal(of_level(token_codec="int4")), 'token_codec is "int4", but must be')


@pytest.mark.parametrize("key", ["domain_size", "token_codec", "hot_experts"])
def test_what_deepspeed_cannot_do_with_tokens_is_refused(key):
    level = {"name": "dc", "size": 2, key: {"domain_size": 2, "token_codec": "int8", "hot_experts": 2}[key]}
    message = refusal({"levels": [level, GPU], "token_exchange": "deepspeed"})
    assert_says(message, 'hybridep.token_exchange is "deepspeed"', f"hybridep.levels[0].{key} is ", '"auto"')


@pytest.mark.parametrize("hot_experts", [2, "auto"])
def test_hot_experts_belong_to_one_level_without_codecs_of_weights_and_domains(hot_experts):
    config = parse(of_level(hot_experts=hot_experts, hot_memory_gb=1.5))
    assert (config.hot_level, config.levels[1].hot_experts) == (1, hot_experts)
    assert parse(BLOCK).hot_level is None
    for codec in ("int8", "auto"):
        assert parse(of_level(hot_experts=hot_experts, gradient_codec=codec)).levels[1].gradient_codec.type == codec
    encoded = of_level(hot_experts=hot_experts, gradient_codec="int8", dense_gradient_codec="identity")
    for dense_sync in ("deepspeed", "hierarchical"):
        assert "int8 over gpu" in " ".join(parse({**encoded, "dense_sync": dense_sync}).describe_codecs())
    for key, value in {"weight_codec": "int8", "codecs": "recommended"}.items():
        message = refusal(of_level(hot_experts=hot_experts, **{key: value}))
        assert_says(message, "hybridep.levels[1].hot_experts is", f'beside {key} "{value}"')
    assert_says(refusal(of_level(hot_experts=hot_experts, domain_size=2)), "beside domain_size 2")
    levels = [{"name": "dc", "size": 2, "hot_experts": 1}, {**GPU, "hot_experts": hot_experts}]
    assert_says(refusal({"levels": levels}), "hybridep.levels[1].hot_experts is", "levels[0] has hot experts already")
    assert_says(refusal(of_level(hot_memory_gb=1)), "hybridep.levels[1]", "hot_memory_gb stands beside hot_experts 0")
    levels = [{"name": "dc", "size": 2, "hot_experts": 1}, {**GPU, "domain_size": 2, "weight_codec": "int8"}]
    assert_says(refusal({"levels": levels}), 'hybridep.levels[1].weight_codec is "int8" inside a domain')


def test_only_weights_are_patched():
    for key in ("weight_codec", "dense_weight_codec"):
        assert getattr(parse(of_level(**{key: "patch"})).levels[1], key) == PATCH
    for key in ("gradient_codec", "dense_gradient_codec", "token_codec"):
        assert_says(refusal(of_level(**{key: "patch"})), f'hybridep.levels[1].{key} is "patch"', "'identity', 'int8'")
    assert_says(refusal({**BLOCK, "auto_codecs": ["patch"]}), 'hybridep.auto_codecs[0] is "patch"')


@pytest.mark.parametrize("key", ["weight_codec", "dense_weight_codec", "codecs"])
def test_patches_do_not_travel_over_nccl(key):
    level = {**DC, key: "recommended" if key == "codecs" else "patch"}
    with pytest.raises(ConfigError) as caught:
        parse({"levels": [{**level, "backend": "nccl"}, GPU]}).with_dtype(2)
    assert_says(str(caught.value), 'hybridep.levels[0].backend is "nccl"', '"patch"', 'set backend to "gloo"')
    for backend in ("gloo", "auto"):
        parse({"levels": [{**level, "backend": backend}, GPU]}).with_dtype(2)
    recommended = parse({"levels": [{**DC, "codecs": "recommended", "backend": "nccl"}, GPU]})
    assert recommended.with_dtype(4).levels[0].weight_codec.type == "low_rank"


def test_codecs_of_dense_parameters_are_those_of_experts_unless_given():
    level = parse(of_level(weight_codec="int8")).levels[1]
    assert [codec.type for codec in level.all_codecs] == ["int8", "identity", "int8", "identity"]
    given = {"weight_codec": "int8", "dense_weight_codec": "identity", "dense_gradient_codec": "int4"}
    level = parse(of_level(**given)).levels[1]
    assert [codec.type for codec in level.all_codecs] == ["int8", "identity", "identity", "int4"]


@pytest.mark.parametrize("key", ["weight_codec", "gradient_codec"])
@pytest.mark.parametrize("codec", ["int8", "identity"])
def test_the_recommended_set_stands_alone(key, codec):
    message = refusal({"levels": [{**DC, "codecs": "recommended", key: codec}, GPU]})
    assert_says(message, f"hybridep.levels[0].{key} stands beside codecs", '"recommended"', f"dense_{key} may stand")
    config = parse({"levels": [{**DC, "codecs": "recommended", f"dense_{key}": codec}, GPU]})
    assert getattr(config.with_dtype(4).levels[0], f"dense_{key}").type == codec


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


def test_codecs_are_described_with_one_line_for_each_kind_and_level():
    config = parse({"levels": [{**DC, "codecs": "recommended"}, {**GPU, "gradient_codec": "int8"}]}).with_dtype(2)
    gradient, dense_gradient = (recommended_codecs(2)[kind].name for kind in (1, 3))
    assert gradient == "low_rank ratio 50 weighting rms"
    assert dense_gradient == "low_rank ratio 50 rest int2 block 64 weighting rms"
    assert config.describe_codecs() == (
        "weights patch over dc",
        f"gradients {gradient} over dc",
        "gradients int8 over gpu",
        "dense weights patch over dc",
        f"dense gradients {dense_gradient} over dc",
        "dense gradients int8 over gpu",
    )
    assert parse(BLOCK).describe_codecs() == ()
    # What DeepSpeed sends has no codec: only what a domain moves is left.
    levels = [{**DC, "domain_size": 2, "gradient_codec": "int8"}, {**GPU, "gradient_codec": "int8"}]
    alone = parse({"levels": levels, "dense_sync": "deepspeed"})
    assert alone.describe_codecs() == ("gradients int8 over dc",)


@pytest.mark.parametrize("key", ["dense_weight_codec", "dense_gradient_codec"])
def test_codecs_of_what_deepspeed_sends_are_refused(key):
    message = refusal({"levels": [{**DC, key: "int8"}, GPU], "dense_sync": "deepspeed"})
    assert_says(message, f'hybridep.levels[0].{key} is "int8"', 'hybridep.dense_sync is "deepspeed"', "leave out one")
    parse({"levels": [{**DC, key: "identity"}, GPU], "dense_sync": "deepspeed"})


# ---- levels against each other and the job ----


@pytest.mark.parametrize(
    ("levels", "world_size", "said"),
    [
        ([DC, GPU], 16, "hybridep.levels: the sizes dc (2) x gpu (4) make 8 ranks, but the job has 16"),
        ([DC, GPU], 16, "their product is 16, or launch 8 ranks"),
        ([{**GPU, "domain_size": 3}], 4, "levels[0].domain_size is 3, which does not divide the level's size 4"),
        ([{**GPU, "size": 12, "domain_size": 5}], 12, "choose one of 1, 2, 3, 4, 6, 12"),
        ([DC, {**DC, "size": 4}], 8, 'hybridep.levels[1].name is "dc", which hybridep.levels[0] has already'),
    ],
)
def test_levels_that_do_not_fit_are_refused(levels, world_size, said):
    assert_says(refusal({"levels": levels}, world_size), said)


@pytest.mark.parametrize(
    "setting", [{"domain_size": "auto"}, {"weight_codec": "auto"}, {"gradient_codec": {"type": "auto"}}]
)
def test_auto_is_planned(setting):
    level = {**DC, "domain_size": 1, **setting}
    config = parse({"levels": [level, {**GPU, "domain_size": 4}], "auto_codecs": ["int8", {"type": "low_rank"}]})
    assert config.is_planned
    assert not parse(BLOCK).is_planned
    assert config.domain_sizes == (1, 4)
    assert [codec.type for codec in config.auto_codecs] == ["int8", "low_rank"]


# ---- values that are too large, too long or junk ----


def test_a_huge_size_is_refused_before_its_divisors_are_looked_for():
    for level in ({"size": 10**30, "domain_size": 2}, {"size": 10**5000}):
        for block in ({}, {"enabled": False}):
            message = refusal({**block, "levels": [{"name": "gpu", **level}]})
            assert_says(message, "hybridep.levels[0].size is ", "less than or equal to 1000000")
    message = refusal({"levels": [{"name": "gpu", "size": 10**6, "domain_size": 7}]})
    assert_says(message, "hybridep.levels[0].domain_size is 7", "size 1000000; choose one of 1, 2, 4, 5, 8")
    message = refusal({"levels": [{"name": f"level {index}", "size": 10**6} for index in range(5000)]})
    assert_says(message, "hybridep.levels: the sizes level 0 (1000000)", "but the job has 8")


MOST_CHARACTERS = 600
BALANCED = {"type": "low_rank", "rank": 4, "rest": {"type": "int2", "block": 64}}
VALID_BLOCKS = [
    {"enabled": False},
    {"levels": [{**DC, "weight_codec": "int8", "gradient_codec": BALANCED}, GPU], "report_file": "run.json"},
    {"levels": [{**DC, "domain_size": "auto", "weight_codec": "auto"}, GPU], "auto_codecs": ["int8", "low_rank"]},
    {"levels": [{**DC, "codecs": "recommended", "token_codec": {"type": "fp8"}}, {**GPU, "weight_codec": "patch"}]},
    {**BLOCK, "advanced": {"prefetch_depth": 0, "kernels": "reference"}, "link": {"ports": [1000, 2000]}},
]


def _nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


CYCLE = {"levels": []}
CYCLE["levels"].append(CYCLE)
LONG = "x" * 10_000
HUGE = {  # by name, since some cannot be shown when a test fails
    "a long string": LONG,
    "a long list": [0] * 10_000,
    "an endless dictionary": CYCLE,
    "an endless list": [CYCLE],
    "500 lists in each other": _nested(500),
    "100000 lists in each other": _nested(100_000),
}
FIELDS = [*HybridEPConfig.model_fields, *LevelConfig.model_fields, *AdvancedConfig.model_fields]
KEYS = st.sampled_from([*FIELDS, "type", "rank", "ratio", "rest", "block", LONG, "\ud800", "", 3, None, (1, 2)])
SCALARS = st.one_of(
    st.sampled_from([None, True, "auto", "identity", "low_rank", "patch", "recommended", "", "\0", "\ud800"]),
    st.sampled_from([2**63, -(10**400), 10**4000 - 1, (), b"bytes", object(), LONG]),  # parsers refuse longer integers
    st.integers(-3, 12),
    st.floats(),
    st.text(max_size=20),
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


@pytest.mark.parametrize("name", HUGE)
def test_huge_and_endless_values_are_refused_wherever_they_stand(name, monkeypatch):
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)  # pydantic tries to show what it refuses
    for valid in VALID_BLOCKS:
        for path in _places(valid):
            gc.disable()  # at the end of the stack, finalizers of what other tests have left would fail
            try:
                message = _answer(_changed(valid, path, HUGE[name], _NOT_ADDED))
            finally:
                gc.enable()
            assert message.startswith("hybridep") or path[-1:] in [("report_file",), ("name",)]  # any string will do
            assert len(message) <= MOST_CHARACTERS


# ---- cluster files ----

YAML_TEXT = """
levels:
  - {name: dc, size: 2, bandwidth_gbps: 1.0, latency_ms: 20, domain_size: 2}
  - name: gpu
    size: 4
"""


@pytest.fixture
def cluster_file(tmp_path):
    path = tmp_path / "cluster.yaml"
    path.write_text(YAML_TEXT)
    return path


@pytest.mark.parametrize(("name", "text"), [("cluster.yaml", YAML_TEXT), ("cluster.json", json.dumps(BLOCK))])
def test_a_cluster_file_equals_the_list_written_out(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    for block, base_dir in (
        ({"levels": name}, tmp_path),
        ({"levels": name}, str(tmp_path)),
        ({"levels": str(tmp_path / name)}, "."),
    ):
        assert parse(block, base_dir=base_dir) == parse(BLOCK)


def test_a_cluster_file_is_sought_beside_the_config_and_then_in_the_working_directory(tmp_path, monkeypatch):
    beside, working = tmp_path / "beside", tmp_path / "working"
    for folder in (working, beside):
        folder.mkdir()
        monkeypatch.chdir(working)
        (folder / "cluster.yaml").write_text(f"levels: [{{name: {folder.name}, size: 8}}]")
        assert parse({"levels": "cluster.yaml"}, base_dir=beside).levels[0].name == folder.name


@pytest.mark.parametrize("name", ["nowhere.yaml", "", ".", "x" * 5000, "\0"])
def test_a_missing_cluster_file_is_refused(tmp_path, name):
    message = refusal({"levels": name}, base_dir=tmp_path)
    assert_says(message, f"hybridep.levels is the path {json.dumps(name)[:80]}", "no such file", str(tmp_path))


BAD_FILES = {
    "a.yaml": ("levels: [{name: dc", "cannot be parsed"),
    "a.json": ('{"levels": [', "cannot be parsed"),
    "date.yaml": ("levels: 2024-13-45", "cannot be parsed"),
    "empty.yaml": ("", "has no key levels"),
    "list.yaml": ("- {name: dc, size: 2}", "has no key levels"),
    "level.yaml": ("name: dc", "has no key levels"),
    "more.yaml": (YAML_TEXT + "timeout_s: 3\n", '"timeout_s" is not a known key'),
    "value.yaml": (
        YAML_TEXT.replace("size: 4", "size: four"),
        'hybridep.levels[1].size is "four", but must be a valid',
    ),
    "world.yaml": (
        YAML_TEXT.replace("size: 4", "size: 2"),
        "hybridep.levels: the sizes dc (2) x gpu (2) make 4 ranks",
    ),
    "binary.yaml": ("\udcff\udcfe", "cannot be parsed"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_wrong_cluster_file_is_named(tmp_path, name):
    text, said = BAD_FILES[name]
    (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    assert_says(refusal({"levels": name}, base_dir=tmp_path), f"cluster file {tmp_path / name}", said)


def test_a_cluster_file_that_cannot_be_read_is_refused(cluster_file, monkeypatch):
    def deny(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(type(cluster_file), "read_text", deny)
    message = refusal({"levels": str(cluster_file)})
    assert_says(message, f"cluster file {cluster_file} cannot be read (Permission denied)", "hybridep.levels")


def test_a_yaml_file_without_its_parser_is_refused(cluster_file, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert_says(refusal({"levels": str(cluster_file)}), f"cluster file {cluster_file} needs PyYAML", "JSON")
