# SPDX-License-Identifier: Apache-2.0
"""Training with hot experts gives what unmodified DeepSpeed gives, while the hot experts change."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from checkpoints import resume_in_a_fresh_engine
from deepspeed import comm as dist
from marks import slow
from parity import FP32_TOLERANCE, Case, assert_parity, levels_of, loss_of
from process_pool import ProcessPool
from toy_model import ToyConfig
from training import batch_of, block_of, engine_of, error_of, evaluate, train

import ds_hybridep
from ds_hybridep.commands.record import format_run_record
from ds_hybridep.errors import VerificationError

pytestmark = pytest.mark.dist

FEW = ToyConfig(routing="by_token", drift=2, drop_tokens=False)  # few experts get all tokens, other ones later


# -- in the workers ---------------------------------------------------------------------------------------------


def losses_over(case: Case, blocks: list[dict[str, Any]], steps: int) -> list[float]:
    """Losses of `steps` optimizer steps under each block in turn; none: without one."""
    with engine_of(case, with_block=bool(blocks), hybridep=blocks[0] if blocks else None) as engine:
        losses = train(engine, case, 0, steps)
        for at, block in enumerate(blocks[1:], 1):
            ds_hybridep.replan(engine, block_of(case, **block))
            losses += train(engine, case, at * steps, steps)
        return losses


def with_levels(case: Case, **settings: Any) -> dict[str, Any]:
    """The block of a case, with other settings of the last level."""
    levels = case.ds_config(with_block=True)["hybridep"]["levels"]
    return {"levels": [*levels[:-1], {**levels[-1], **settings}], "advanced": {"verify_interval": 1}}


def change_a_replica(case: Case, place: int) -> str:
    """The error of a step after the first rank that has a replica of a hot expert has changed it."""
    with engine_of(case, with_block=True, hybridep=with_levels(case)) as engine:
        train(engine, case, 0, 2)
        runtime = engine.__dict__["_hybridep_attachment"].runtime
        runtime.migration.finish_shipments()
        replicas = runtime.migration.layers[place].replicas
        holders = [None] * dist.get_world_size()
        dist.all_gather_object(holders, len(replicas.hot_slots))
        assert any(holders)
        if dist.get_rank() == next(rank for rank, count in enumerate(holders) if count):
            replicas.values(replicas.hot_slots[0], trainable_only=False)[0].add_(1.0)
        try:
            train(engine, case, 2, 1)
        except VerificationError as error:
            return str(error)
        return ""


def report_and_trace(case: Case, folder: str) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    settings = {"report_interval": 1, **with_levels(case)}
    path = Path(folder) / f"trace{dist.get_rank()}.json"
    with engine_of(case, with_block=True, hybridep=settings) as engine:
        train(engine, case, 0, 2)
        with ds_hybridep.trace(engine, path):
            train(engine, case, 2, 1)
        report = engine.__dict__["_hybridep_attachment"].last_report
        counters = [event for event in json.loads(path.read_text())["traceEvents"] if event.get("ph") == "C"]
        return report, [event for event in counters if event["name"].startswith("load of ")]


def layers_after(case: Case, settings: dict[str, Any], steps: int) -> list[dict[str, Any]]:
    with engine_of(case, with_block=True, hybridep=with_levels(case, **settings)) as engine:
        train(engine, case, 0, steps)
        return ds_hybridep.stats(engine)["layers"]


def hot_by_step(case: Case) -> list[list[int]]:
    """The hot experts of the first layer after each step."""
    with engine_of(case, with_block=True) as engine:
        found = []
        for step in range(case.steps):
            train(engine, case, step, 1)
            found.append(ds_hybridep.stats(engine)["layers"][0]["hot_experts"])
        return found


def error_of_layers(case: Case, settings: dict[str, Any]) -> tuple[str, str]:
    return error_of(layers_after, case, settings, 0)


def plan_and_sent(case: Case) -> tuple[str, list[bool]]:
    """The plan in words, and of each layer whether a refresh sends the whole own slot."""
    with engine_of(case, with_block=True) as engine:
        runtime = engine.__dict__["_hybridep_attachment"].runtime
        sent = [layer.replicas.sends_own_slot(is_exact=True) for layer in runtime.migration.layers]
        return runtime.describe(), sent


def go_back(case: Case, folder: str, *, in_the_middle: bool = False) -> tuple[list[float], list[float]]:
    """Losses of two steps from a checkpoint on, and again after it was loaded by the engine that went on."""
    with engine_of(case, with_block=True, hybridep=with_levels(case)) as engine:
        train(engine, case, 0, 2)
        engine.save_checkpoint(folder)
        straight = train(engine, case, 2, 2)
        train(engine, case, 4, 1)
        if in_the_middle:
            engine.backward(loss_of(engine, case, *batch_of(case, 5)))
            engine.step()
        engine.load_checkpoint(folder)
        return straight, train(engine, case, 2, 2)


def losses_with_slow_codec(case: Case, codec: dict[str, Any]) -> list[float]:
    """Losses of steps that verify replicas, with weights encoded over the slow level."""
    block = with_levels(case)
    block["levels"][0].update(codec)
    with engine_of(case, with_block=True, hybridep=block) as engine:
        return train(engine, case, 0, case.steps)


def loads_after(case: Case, num_evaluations: int) -> list[list[float]]:
    with engine_of(case, with_block=True, hybridep=with_levels(case)) as engine:
        train(engine, case, 0, 2)
        for _ in range(num_evaluations):
            evaluate(engine, case)
        train(engine, case, 2, 1)
        return [one.loads for one in engine.__dict__["_hybridep_attachment"].runtime.hot.layers.values()]


def limits_of_plans(case: Case, gigabytes: Sequence[float]) -> list[int]:
    """The most hot experts of a layer, under one memory limit after the other."""
    found = []
    with engine_of(case, with_block=True, hybridep=with_levels(case, hot_memory_gb=gigabytes[0])) as engine:
        for at, limit in enumerate(gigabytes):
            if at:
                ds_hybridep.replan(engine, block_of(case, **with_levels(case, hot_memory_gb=limit)))
            train(engine, case, 2 * at, 2)
            found.append(engine.__dict__["_hybridep_attachment"].runtime.hot._limit_and_costs[0])
    return found


# -- the tests --------------------------------------------------------------------------------------------------


def hot4(*domain_sizes: int, **options: object) -> Case:
    options = {"hot_experts": 2, "toy": FEW, "steps": 6, **options}
    return Case(levels=levels_of((2, 2), domain_sizes), **options)


def hot2(**options: Any) -> Case:
    options = {"hot_experts": 2, "steps": 6, **options}
    toy = replace(options.pop("toy", FEW), ep_size=2)
    return Case(levels=levels_of((2,), (1,)), toy=toy, **options)


def assert_parity_and_changes(pool: ProcessPool, cases: list[Case]) -> None:
    for case, results in zip(cases, assert_parity(pool, cases), strict=True):
        layers = [layer for result in results for layer in result.stats["layers"]]
        assert any(layer["hot_changes"] > 1 for layer in layers), case.id


@pytest.mark.core
def test_zero_stages_with_accumulation_and_clipping(pool4: ProcessPool) -> None:
    # Beside domains over slower levels.
    assert_parity_and_changes(pool4, [hot4(2, 1, zero_stage=2, accumulation=2, gradient_clipping=0.5, steps=4)])


@pytest.mark.slow
@pytest.mark.core
def test_more_stages_and_16_bits(pool4: ProcessPool) -> None:
    cases = [
        hot4(1, 1, zero_stage=0, accumulation=2, optimizer="sgd"),
        hot4(1, 1, zero_stage=1, accumulation=2, gradient_clipping=0.5),
        hot4(1, 1, zero_stage=2, accumulation=3),
        hot4(2, 1, optimizer="sgd"),
        hot4(2, 1, dtype="bf16"),
    ]
    assert_parity_and_changes(pool4, cases)


def test_exchanges_and_other_levels(pool4: ProcessPool) -> None:
    cases = [
        hot4(1, 1, token_exchange="hierarchical", optimizer="sgd", steps=4),
        hot4(1, 2, hot_level=0, optimizer="sgd", steps=4),
    ]
    assert_parity_and_changes(pool4, cases)


@pytest.mark.slow
def test_more_exchanges_and_dropped_tokens(pool4: ProcessPool) -> None:
    cases = [
        hot4(1, 1, token_exchange="direct", hot_level=0, optimizer="sgd"),
        hot4(1, 1, toy=replace(FEW, drop_tokens=True), optimizer="sgd"),
    ]
    assert_parity_and_changes(pool4, cases)


@pytest.mark.slow
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpointing(pool4: ProcessPool, is_reentrant: bool) -> None:
    toy = replace(FEW, num_layers=3)
    cases = [
        hot4(1, 1, toy=replace(toy, checkpointing="nonreentrant"), zero_stage=2, accumulation=2),
        hot4(2, 1, toy=replace(toy, checkpointing="reentrant"), evaluate=True),
    ]
    assert_parity_and_changes(pool4, cases[is_reentrant:][:1])


@pytest.mark.parametrize(
    ("zero_stage", "sizes"), [slow(0, (1, 1)), slow(1, (1, 1)), (2, (2, 1)), slow(3, (1, 1))], ids=str
)
def test_models_of_autoep(pool4: ProcessPool, zero_stage: int, sizes: tuple[int, int]) -> None:
    toy = replace(FEW, routing="learned")
    case = hot4(*sizes, family="mixtral", toy=toy, zero_stage=zero_stage, accumulation=1 + zero_stage % 2, steps=4)
    assert_parity_and_changes(pool4, [case])


@pytest.mark.slow  # test_hot_codecs.py has hot experts in bf16
def test_16_bits(pool4: ProcessPool) -> None:
    assert_parity_and_changes(pool4, [hot4(1, 1, dtype="bf16", zero_stage=1)])


@pytest.mark.slow  # test_hot_codecs.py resumes with codecs too
@pytest.mark.parametrize("zero_stage", [0, 1, 2])
def test_a_resumed_run_is_equal_in_every_bit(pool4: ProcessPool, tmp_path: Path, zero_stage: int) -> None:
    case = hot4(1, 1, zero_stage=zero_stage)
    for found in pool4.run(resume_in_a_fresh_engine, case=case, folder=str(tmp_path)):
        assert found["is_loaded"]
        assert found["losses"][0] == found["losses"][1]
        assert found["different"] == []
        assert found["is_equal"]


@pytest.mark.parametrize("domain_size", [slow(1), 2])
def test_a_changed_replica_of_a_hot_expert_is_noticed(pool4: ProcessPool, domain_size: int) -> None:
    messages = pool4.run(
        change_a_replica, case=hot4(domain_size, 1, toy=replace(FEW, drift=0, starved_experts=(2, 3))), place=0
    )
    # All ranks of the expert's domain say so.
    assert sum("differ from the owner's weights" in message for message in messages) == 2 * domain_size


def test_other_plans_follow(pool2: ProcessPool) -> None:
    case = hot2()
    plans = [with_levels(case), with_levels(case, hot_experts=0), with_levels(case, hot_experts=1)]
    plain = pool2.run(losses_over, case=case, blocks=[], steps=6)
    ours = pool2.run(losses_over, case=case, blocks=plans, steps=2)
    for one, other in zip(ours, plain, strict=True):
        assert one == pytest.approx(other, rel=FP32_TOLERANCE)


def test_loads_are_in_the_report_in_show_and_in_the_trace(pool4: ProcessPool, tmp_path: Path) -> None:
    (report, counters), *_ = pool4.run(report_and_trace, case=hot4(1, 1), folder=str(tmp_path))
    for layer in report["layers"]:
        assert layer["hot_experts"]
        assert layer["load_after"] <= layer["load_before"]  # of the fullest rank of both datacentres
        rows = 4 * 3 * 8 * 2 / 4  # ranks, sequences, tokens and experts of each; on one of the ranks
        assert layer["rows_before"] == pytest.approx(layer["load_before"] * rows)
    assert "without hot experts" in format_run_record(report)
    assert sorted(event["name"] for event in counters) == [f"load of {layer['name']}" for layer in report["layers"]]
    assert counters[0]["args"].keys() == {"load_before", "load_after"}


@pytest.mark.slow  # the limits of several plans, below, would be wrong too
def test_memory_limits_the_number_of_hot_experts(pool4: ProcessPool) -> None:
    case = hot4(1, 1)
    one_expert = 2 * 4 * (16 * 32 + 32 + 32 * 16 + 16) * case.toy.num_layers  # weights and gradient sums
    for gigabytes, most in ((1.5 * one_expert / 1e9, 1), (0.5 * one_expert / 1e9, 0), (2.5 * one_expert / 1e9, 2)):
        layers = pool4.run(layers_after, case=case, settings={"hot_memory_gb": gigabytes}, steps=2)[0]
        # Each of the two datacentres has a choice of its own.
        assert [len(layer["hot_experts"]) <= 2 * most for layer in layers] == [True] * case.toy.num_layers
        assert any(layer["hot_experts"] for layer in layers) == (most > 0)


@pytest.mark.slow
def test_what_codecs_leave_out_counts_as_memory(pool4: ProcessPool) -> None:
    case = hot4(1, 1)
    one_expert = 3 * 4 * (16 * 32 + 32 + 32 * 16 + 16) * case.toy.num_layers  # weights, gradient sums, residuals
    for gigabytes, most in ((0.9 * one_expert / 1e9, 0), (1.1 * one_expert / 1e9, 1)):
        settings = {"hot_memory_gb": gigabytes, "gradient_codec": "int8"}
        layers = pool4.run(layers_after, case=case, settings=settings, steps=2)[0]
        assert any(layer["hot_experts"] for layer in layers) == (most > 0)


def test_auto_copies_nothing_that_costs_more_than_it_saves(pool4: ProcessPool) -> None:
    slow_link = {"hot_experts": "auto", "bandwidth_gbps": 1e-6}
    for layers in pool4.run(layers_after, case=hot4(1, 1), settings=slow_link, steps=3):
        assert [layer["hot_experts"] for layer in layers] == [[]] * 2
    fast_link = {"hot_experts": "auto", "bandwidth_gbps": 1e6}
    for layers in pool4.run(layers_after, case=hot4(1, 1), settings=fast_link, steps=3):
        assert all(layer["hot_experts"] for layer in layers)


def test_hot_experts_change_one_step_after_the_routing(pool4: ProcessPool) -> None:
    case = hot4(1, 1, toy=replace(FEW, drift=3), steps=9)
    for found in pool4.run(hot_by_step, case=case):
        # Each token prefers two neighbouring experts: tokens 0 and 1 the experts 0, 1, 3 and 4, and so on.
        for first, preferred in ((0, {0, 1, 3, 4}), (3, {6, 7, 1, 2}), (6, {4, 5, 7, 0})):
            for hot in found[first : first + 3]:
                assert hot
                assert set(hot) <= preferred


@pytest.mark.slow  # test_hot_codecs.py loads into an engine that went on, too
@pytest.mark.parametrize("sizes", [(1, 1), (2, 1)])
def test_an_engine_goes_back_to_its_checkpoint(pool4: ProcessPool, tmp_path: Path, sizes: tuple[int, int]) -> None:
    # Weights are still under way when the checkpoint is loaded, which has other hot experts.
    for straight, again in pool4.run(go_back, case=hot4(*sizes), folder=str(tmp_path)):
        assert again == straight


@pytest.mark.slow  # test_hot_codecs.py has the same with codecs
def test_a_checkpoint_is_loaded_in_the_middle_of_an_accumulation(pool4: ProcessPool, tmp_path: Path) -> None:
    case = hot4(1, 1, zero_stage=1, accumulation=2)
    for straight, again in pool4.run(go_back, case=case, folder=str(tmp_path), in_the_middle=True):
        assert again[0] == pytest.approx(straight[0], rel=FP32_TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_replicas_are_those_of_this_step_beside_patches(pool4: ProcessPool, zero_stage: int) -> None:
    toy = replace(FEW, routing="learned")
    case = hot4(2, 1, toy=toy, family="mixtral", dtype="bf16", zero_stage=zero_stage, steps=4)
    exact, patched = (
        pool4.run(losses_with_slow_codec, case=case, codec={"weight_codec": codec}) for codec in ("identity", "patch")
    )
    assert patched == exact


@pytest.mark.slow  # test_hot_codecs.py has exact sums beside such codecs
def test_codecs_of_slower_levels(pool4: ProcessPool) -> None:
    codec = {"weight_codec": "int8", "gradient_codec": "int8"}
    for losses in pool4.run(losses_with_slow_codec, case=hot4(2, 1), codec=codec):
        assert losses[-1] < losses[0]


def test_batches_of_an_evaluation_are_no_load(pool2: ProcessPool) -> None:
    case = hot2()
    assert pool2.run(loads_after, case=case, num_evaluations=5) == pool2.run(loads_after, case=case, num_evaluations=0)


def test_another_plan_has_its_own_memory_limit(pool2: ProcessPool) -> None:
    assert pool2.run(limits_of_plans, case=hot2(), gigabytes=(1.0, 1e-9, 1.0)) == [[2, 0, 2]] * 2


def test_auto_is_refused_under_zero_3(pool2: ProcessPool) -> None:
    case = hot2(toy=replace(FEW, routing="learned"), family="mixtral", zero_stage=3)
    for kind, message in pool2.run(error_of_layers, case=case, settings={"hot_experts": "auto"}):
        assert kind == "UnsupportedError"
        assert "numbers of hot experts" in message


def test_the_log_says_where_hot_experts_have_no_effect(pool4: ProcessPool) -> None:
    for plan, sent in pool4.run(plan_and_sent, case=hot4(1, 1)):
        assert "hot experts 2 over gpu," in f"{plan},"
        assert sent == [False, False]  # only hot experts travel, also in a refresh
    inside = hot4(1, 1, hot_level=0, toy=replace(FEW, ep_size=2))
    for plan, _ in pool4.run(plan_and_sent, case=inside):
        assert "hot experts 2 over dc (no effect: no tokens of ours cross it)" in plan
    for _, sent in pool4.run(plan_and_sent, case=hot4(2, 1)):
        assert sent == [True, True]
