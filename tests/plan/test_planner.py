# SPDX-License-Identifier: Apache-2.0
import argparse
import dataclasses
import functools
import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hybridep.commands.question import add_arguments, read_question
from ds_hybridep.config import parse_config
from ds_hybridep.errors import PlanError
from ds_hybridep.geometry.cluster import Cluster, Level, LinkSpeed
from ds_hybridep.plan import planner
from ds_hybridep.plan.answer import TIE
from ds_hybridep.plan.model_sizes import model_from_mapping
from ds_hybridep.plan.models import read_model_file
from ds_hybridep.plan.paste import ds_config_of
from ds_hybridep.plan.plan import ExpertGroup, LevelCodecs
from ds_hybridep.plan.planner import price_all
from ds_hybridep.plan.question import Question, candidate_groups
from ds_hybridep.plan.rates import IDENTITY, CodecCost, Rates
from ds_hybridep.plan.workload import Workload
from ds_hybridep.simulate.comparison import scenario_of
from ds_hybridep.simulate.simulator import simulate

make_plan = functools.cache(planner.make_plan)  # several tests ask the same question
NUM_ON_RECORD = 4  # of the plans that lost
GOLDEN = Path(__file__).resolve().parents[1] / "golden"
LOW_RANK = CodecCost("low_rank", 25.0, encode_bytes_per_s=2e11, decode_bytes_per_s=4e11)


def cluster_of(sizes, gbps, latency_s=0.0):
    names = {1: ["gpu"], 2: ["dc", "gpu"], 3: ["dc", "node", "gpu"], 4: ["dc", "pod", "node", "gpu"]}[len(sizes)]
    parts = zip(names, sizes, gbps, strict=True)
    return Cluster(tuple(Level(name, size, LinkSpeed(1e9 * rate / 8, latency_s)) for name, size, rate in parts))


def question_of(name, sizes=(2, 8), gbps=(10, 800), latency_s=0.005, tokens=16384, **settings):
    workload_settings = settings.pop("workload", {})
    model = model_from_mapping(read_model_file(name), name)
    return Question(
        cluster=cluster_of(sizes, gbps, latency_s),
        workload=Workload(**{"model": model, "tokens_per_rank": tokens, "sequence_tokens": 4096, **workload_settings}),
        rates=Rates(flops_per_s=4e14),
        **settings,
    )


def asked(name, *arguments):
    """The question of a command line."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    links = ("--dcs", "2x8", "--wan", "10gbps", "--delay", "10ms", "--lan", "3200gbps")
    return read_question(parser.parse_args(["--model", name, *links, "--tokens", "8192", *arguments]))


CASES = {
    "qwen3-2x8-10gbps": question_of("Qwen3-30B-A3B"),
    "qwen3-2x8-lora": asked("Qwen3-30B-A3B", "--lora", "all", "--accumulation", "4", "--checkpointing"),
    "qwen3-2x8-recommended": asked("Qwen3-30B-A3B", "--accumulation", "4", "--checkpointing", "--memory", "80"),
    "mixtral-2x8-recommended": asked("Mixtral-8x7B", "--accumulation", "4", "--checkpointing", "--memory", "80"),
    "mixtral-2x8": question_of("Mixtral-8x7B", workload={"is_checkpointed": True}),
    "gpt-oss-2x4x4": question_of(
        "gpt-oss-120b",
        (2, 4, 4),
        (1, 100, 1000),
        tokens=65536,
        memory_bytes=2e11,
        workload={"is_checkpointed": True, "has_fused_loss": True},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_plans_are_those_on_record(name, request):
    """A change of the model that moves a plan shows here; `pytest --rewrite-golden` records the new ones."""
    answer = make_plan(CASES[name]).to_json()
    answer["others"] = answer["others"][:NUM_ON_RECORD]
    found = json.dumps(answer, indent=1) + "\n"
    path = GOLDEN / f"plan-{name}.json"
    if request.config.getoption("--rewrite-golden"):
        path.write_text(found)
    expected = json.loads(path.read_text())
    assert_close(json.loads(found), expected)


def assert_close(found, expected, where="plan"):
    """Equal, with floats to a millionth: summation may differ by machine."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_close(found[key], expected[key], f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_close(one, other, f"{where}[{index}]")
    elif isinstance(expected, float):
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-12), where
    else:
        assert found == expected, where


def test_the_best_is_the_fastest_of_all():
    question = CASES["qwen3-2x8-10gbps"]
    answer = make_plan(question)
    assert answer.best.step_s <= min(candidate.step_s for candidate in price_all(question)) * (1 + TIE)
    assert answer.runner_up == answer.others[0]
    assert len(answer.others) + 1 == len(list(price_all(question)))
    assert all(candidate.reason for candidate in (answer.best, *answer.others))


def test_equal_questions_have_equal_plans():
    first, second = (planner.make_plan(CASES["mixtral-2x8"]) for _ in range(2))
    assert first == second


def test_every_divisor_of_every_level_is_priced():
    """Four levels and 1024 ranks, 256 experts: groups of neighbours over two pods, and strided ones over all."""
    question = question_of("DeepSeek-V3", (2, 4, 16, 8), (10, 100, 400, 3200))
    sizes = [candidate.plan.domain_sizes for candidate in price_all(question)]
    inside = set(itertools.product((1,), (1, 2), (1, 2, 4, 8, 16), (1, 2, 4, 8)))
    strided = set(itertools.product((1, 2), (1, 2, 4), (1, 2, 4, 8, 16), (1, 2)))
    assert set(sizes) == inside | strided


def skewed(skew, sizes=(1, 8), memory_bytes=1e11, **settings):
    """By default, a machine in which replicas of all experts have no room."""
    workload = {"skew": skew, "is_checkpointed": True}
    links = {"gbps": (10, 3200), "memory_bytes": memory_bytes}
    return question_of("Qwen3-30B-A3B", sizes, workload=workload, tokens=8192, **links, **settings)


def test_hot_experts_are_tried_where_they_can_be():
    question = skewed(2.6, (2, 8), codecs=(LevelCodecs(), LevelCodecs(LOW_RANK, LOW_RANK)))
    priced = list(price_all(question))
    found = {one.plan.hot_by_level: one.plan for one in priced}
    assert {max(by_level) for by_level in found} == {0, 1, 2, 4, 8, 16, 32, 64, 128}
    for one in priced:
        for size, span, count, codecs in zip(
            one.plan.domain_sizes, one.plan.spans, one.plan.hot_by_level, one.plan.codecs, strict=True
        ):
            assert not count or (size == 1 and span > 1 and codecs.weight == codecs.gradient == IDENTITY)
            assert count <= 128
    labels = [one.label for one in priced]
    assert len(set(labels)) == len(labels)
    assert not any(one.plan.num_hot for one in price_all(skewed(1.0)))


def test_hot_experts_pay_under_a_skew():
    question = skewed(2.6)
    best = make_plan(question).best
    assert best.plan.hot_by_level[1] > 0
    assert best.routing.load_before == pytest.approx(2.6)
    assert best.routing.load_after < 1.5
    plain = next(one for one in price_all(question) if one.plan == dataclasses.replace(best.plan, hot=None))
    assert plain.step_s > 1.1 * best.step_s
    assert best.memory.replica_bytes > plain.memory.replica_bytes
    # Weights and gradients travel once in a step, from an owner to 7 others, or from 7 owners to a rank.
    more_bytes = best.prediction.level_bytes(1) - plain.prediction.level_bytes(1)
    sent = best.prediction.uplink_bytes[1]
    copies = (sent["expert_weights"] + sent["expert_gradients"]) / (2 * 48 * question.workload.expert_travel_bytes)
    assert more_bytes < sent["expert_weights"] + sent["expert_gradients"]  # some rows stay where they are
    assert copies == pytest.approx(round(copies))
    assert copies >= 7


def test_a_limit_of_memory_for_hot_experts_is_kept():
    question = skewed(2.6)
    of_one = question.workload.hot_expert_bytes
    assert of_one == 48 * 4718592 * (2 + 4)
    for limit, most in ((0.9, 0), (1.0, 1), (3.9, 2), (4.0, 4)):
        limited = dataclasses.replace(question, hot_bytes=limit * of_one)
        assert max(one.plan.num_hot for one in price_all(limited)) == most
    plain, four = (
        next(one for one in price_all(question) if one.plan.hot_by_level == (0, count) and one.plan.domain_size == 1)
        for count in (0, 4)
    )
    assert four.memory.replica_bytes - plain.memory.replica_bytes <= 4.1 * of_one


def test_what_deepspeed_drops_is_said_and_is_not_better():
    answer = make_plan(skewed(4.0, (2, 8), 8e10))
    padded = [way for way in answer.alternatives if way.plan is not None and way.plan.is_padded]
    assert all(0.2 < way.dropped < 0.9 for way in padded)
    assert all(way.note.startswith(f"drops {way.dropped:.0%} of the rows") for way in padded)
    assert answer.better is answer.alone  # which takes ZeRO-3, and drops nothing
    exact = next(way for way in answer.alternatives if "de-duplicated" in way.name)
    assert exact.load == pytest.approx(4.0)


def test_a_plan_with_hot_experts_is_in_the_block_and_in_json():
    question = skewed(2.6)
    answer = make_plan(question)
    count = answer.best.plan.num_hot
    levels = ds_config_of(answer)["hybridep"]["levels"]
    assert [level.get("hot_experts") for level in levels] == [None, count]
    parse_config({"levels": levels}, world_size=8)
    written = answer.to_json()
    assert written["plan"]["hot_experts"] == [0, count]
    assert written["plan"]["load_before"] == pytest.approx(2.6)
    assert written["plan"]["load_after"] < written["plan"]["load_before"]
    assert f"hot [0,{count}] ep 8" in answer.best.label
    assert "hot_experts" not in make_plan(skewed(1.0)).to_json()["plan"]


def test_fast_links_need_no_domains_over_them():
    assert make_plan(question_of("DeepSeek-V3", tokens=2048)).best.plan.domain_sizes[0] == 1


def test_many_tokens_move_experts_and_codecs_move_more_of_them():
    plain = make_plan(CASES["qwen3-2x8-10gbps"])
    assert plain.best.plan.domain_sizes[0] == 2
    small = make_plan(dataclasses.replace(CASES["qwen3-2x8-recommended"], memory_bytes=None))
    assert small.best.plan.codecs[0].weight.name == "patch"
    assert small.best.plan.domain_sizes[0] == 2


def test_data_parallel_over_the_slow_level_is_a_plan_with_codecs():
    """With groups inside each datacentre, gradients and parameters cross encoded."""
    question = CASES["qwen3-2x8-recommended"]
    answer = make_plan(question)
    best = next(one for one in answer.others if one.group == ExpertGroup(8))
    assert best.plan.domain_sizes == (1, 1)
    assert [codecs.label for codecs in best.plan.codecs] == ["recommended", "exact"]
    sent = best.prediction.uplink_bytes[0]
    assert sent["tokens"] == sent["expert_weights"] == sent["expert_gradients"] == 0
    exact = next(way for way in answer.alternatives if way.name.endswith("in each dc, exact"))
    unencoded = exact.prediction.uplink_bytes[0]
    # Patches and low rank: 16 bits become 16 / 47 and 16 / 25.
    assert unencoded["expert_sync"] / sent["expert_sync"] == pytest.approx(2 / (1 / 47 + 1 / 25), rel=0.02)
    assert exact.step_s > 10 * best.step_s
    block = ds_config_of(answer)["hybridep"]
    assert [level.get("codecs") for level in block["levels"]] == ["recommended", None]


def test_codecs_of_levels_that_nothing_crosses_are_not_tried():
    question = CASES["qwen3-2x8-recommended"]
    for level, domain_size, is_tried in ((0, 1, True), (0, 2, True), (1, 1, True)):
        assert (question.codecs_over(level, domain_size) == question.codecs) == is_tried
    alone = dataclasses.replace(question, cluster=cluster_of((1, 8), (10, 800)))
    assert alone.codecs_over(0, 1) == question.codecs[:1]
    rings = dataclasses.replace(question, dense_sync="deepspeed")
    assert rings.codecs_over(0, 1) == question.codecs[:1]
    assert rings.codecs_over(0, 2) == question.codecs


def test_of_plans_as_fast_the_one_that_loses_nothing_is_taken():
    # A link so fast that nothing shows: identity without replicas.
    question = question_of(
        "Qwen3-30B-A3B", gbps=(1e9, 1e9), latency_s=0.0, codecs=(LevelCodecs(), LevelCodecs(LOW_RANK, LOW_RANK))
    )
    best = make_plan(question).best
    assert best.plan.domain_sizes == (1, 1)
    assert all(codecs.weight == IDENTITY for codecs in best.plan.codecs)


def test_experts_that_are_fewer_than_ranks_may_be_strided_over_the_slow_level():
    cluster = cluster_of((2, 8), (10, 800))
    assert candidate_groups(cluster, 8) == (ExpertGroup(8), ExpertGroup(8, True))
    assert candidate_groups(cluster, 128) == (ExpertGroup(16), ExpertGroup(8))
    # Each of the two groups in a DC would have to move all experts: data parallel across is fewer bytes, unless there
    # are so few tokens that they are fewer still.
    assert make_plan(CASES["mixtral-2x8"]).best.group == ExpertGroup(8)
    few_tokens = make_plan(question_of("Mixtral-8x7B", tokens=4096)).best
    assert (few_tokens.group, few_tokens.plan.domain_sizes[0]) == (ExpertGroup(8, True), 1)


def test_memory_excludes_replicas_and_says_what_they_lack():
    question = question_of("Qwen3-30B-A3B")
    free = make_plan(question)
    needed = free.best.memory.total_bytes
    limited = make_plan(dataclasses.replace(question, memory_bytes=needed - 1e9))
    assert limited.best.memory.total_bytes <= needed - 1e9
    lost = {candidate.label: candidate for candidate in limited.others}[free.best.label]
    assert lost.reason == "needs 1.0 GB more memory than there is"
    assert lost.lacking_bytes == pytest.approx(1e9)


def test_replicas_need_a_copy_and_sums_of_the_layers_in_flight():
    kept = make_plan(question_of("Qwen3-30B-A3B", groups=(ExpertGroup(16),))).best
    assert kept.plan.domain_sizes == (2, 1)
    owned, in_flight = 48 * 8 * 4718592, (kept.plan.prefetch_depth + 1) / 48
    # A copy in bf16, and the owned weights on their way; with one micro-step sums of the layers in flight only.
    assert kept.memory.replica_bytes == pytest.approx(owned * (2 + max((4 + 4) * in_flight, 2)))


def test_no_plan_fits_is_an_error_with_the_bytes():
    with pytest.raises(PlanError, match=r"no plan fits: the smallest, \[1,1\] ep 16, needs .* GB more than there are"):
        make_plan(question_of("DeepSeek-V3", memory_bytes=1e9))


def test_alternatives_are_priced_and_named():
    answer = make_plan(CASES["qwen3-2x8-10gbps"])
    names = [way.name for way in answer.alternatives]
    assert names == [
        "FSDP or ZeRO-3, all 16 GPUs",
        "ZeRO++ (lossy) in each dc",
        "FSDP HYBRID_SHARD in each dc",
        "DeepSpeed, EP 16 across dcs",
        "EP 16 across dcs, exchange de-duplicated",
        "DeepSpeed, EP 8 in each dc",
        "EP 8 in each dc, exact",
        "one dc alone",
        "sites, H = 1",
        "sites, H = 200 (DiLoCo-like)",
        "pipeline across dcs, EP in each",
        "local SGD, H = 200",
    ]
    assert [way.is_provided for way in answer.alternatives] == 10 * [True] + 2 * [False]
    assert answer.alternatives[3].step_s > answer.alternatives[4].step_s > answer.best.step_s
    assert answer.better is answer.alone
    assert answer.better_elsewhere in answer.alternatives[-2:]


def test_a_better_way_that_deepspeed_has_already_is_named():
    """Many trained parameters and no room for gradient sums: data parallel across beats a group over the slow link."""
    question = question_of(
        "Qwen3-30B-A3B",
        workload={"trainable_expert_shapes": ((675840,),), "trainable_dense_shapes": (), "micro_steps": 4},
        groups=(ExpertGroup(16),),
        memory_bytes=4.16e10,  # not enough for replicas that stay
        tokens=2048,
    )
    assert make_plan(question).better.name == "DeepSpeed, EP 8 in each dc"


def test_a_pipeline_of_more_stages_than_layers_does_not_exist():
    question = question_of("Mixtral-8x7B", (64,), (10,), tokens=64)
    assert not any(way.name.startswith("pipeline") for way in make_plan(question).alternatives)


@settings(max_examples=5)
@given(st.floats(0.1, 1000), st.floats(0.01, 1.0), st.integers(100, 100_000))
def test_a_slower_link_never_makes_the_best_plan_faster(gbps, factor, tokens):
    fast, slow = (question_of("Qwen3-30B-A3B", gbps=(rate, 800), tokens=tokens) for rate in (gbps, gbps * factor))
    # Within what counts as a tie.
    assert make_plan(slow).best.step_s >= make_plan(fast).best.step_s * (1 - TIE)


# ---- on two datacentres of eight GPUs of 80 GB ----

TRAINED = {
    "qwen3": ("Qwen3-30B-A3B", ()),
    "mixtral": ("Mixtral-8x7B", ()),
    "qwen3-lora": ("Qwen3-30B-A3B", ("--lora", "all")),
    "gpt-oss-lora": ("gpt-oss-120b", ("--lora", "all")),
}
MOST_S = {"qwen3": 4.2, "mixtral": 12.5}


@pytest.mark.parametrize("name", TRAINED)
def test_what_is_recommended_for_80_gb_fits_and_is_what_the_simulator_finds(name):
    model, arguments = TRAINED[name]
    question = asked(model, "--accumulation", "4", "--checkpointing", "--memory", "80", *arguments)
    answer = make_plan(question)
    best = answer.best
    assert best.memory.total_bytes <= 80e9
    assert best.memory.activation_bytes > 5e9
    assert best.step_s <= MOST_S.get(name, 4.0)
    for one in (best, next(one for one in answer.others if one.plan.state == "host")):
        step = simulate(scenario_of(question, one.plan))
        assert step.step_s == pytest.approx(one.step_s, rel=0.05), one.label
    for way in answer.alternatives:
        assert (way.lacking_bytes > 0) == (way.memory_bytes > 80e9) == ("more memory than there is" in way.note)


def test_another_program_that_does_not_fit_is_not_named_as_better():
    """Local SGD is faster for Mixtral, but each datacentre would have to hold all of it."""
    answer = make_plan(CASES["mixtral-2x8-recommended"])
    local = answer.alternatives[-1]
    assert local.step_s < answer.better_elsewhere.step_s < answer.best.step_s
    assert local.lacking_bytes > 0


def test_state_on_the_host_is_used_where_it_makes_room_and_where_the_host_has_it():
    question = CASES["mixtral-2x8-recommended"]
    best = make_plan(question).best
    assert best.label == "[1,1] host state recommended|exact ep 8"
    assert ds_config_of(make_plan(question))["hybridep"]["state"] == "host"
    without = make_plan(dataclasses.replace(question, host_memory_bytes=best.memory.host_bytes - 1e9))
    assert without.best.step_s > 5 * best.step_s
    lost = next(one for one in without.others if one.label == best.label)
    assert lost.lacking_bytes == pytest.approx(1e9)
