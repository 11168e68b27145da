# SPDX-License-Identifier: Apache-2.0
"""AutoEP's layers under ZeRO-3, with lossy codecs, with "auto", and the memory that they take.

Parity is in test_autoep.py.
"""

import gc
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
from autoep_cases import SHAPE, case2, case4
from checkpoints import checked_engine
from estimate import needs_of_model
from marks import slow
from parity import FP32_TOLERANCE, Case, loss_of
from process_pool import ProcessPool
from training import batch_of, train

import ds_hybridep
from ds_hybridep.errors import UnsupportedError

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers: '.[hf]'"),
]

LOW_RANK = {"type": "low_rank", "rank": 4}
RECOMPUTED = replace(SHAPE, checkpointing="reentrant")
LOSSY = {
    "weight_codec": {"type": "low_rank", "rank": 4}, "gradient_codec": "int8",
    "dense_weight_codec": "int8", "dense_gradient_codec": "int8",
}  # fmt: skip
LOSSY_EXPERTS = {"weight_codec": {"type": "low_rank", "rank": 4}, "gradient_codec": "int8"}


# -- in the workers ---------------------------------------------------------------------------------------------


def train_over_plans(case: Case, plans: list[tuple[int, int]]) -> tuple[list[float], list[float]]:
    """Losses without the block, and with it: two steps by each plan, then two without it again."""
    with checked_engine(case, with_block=False) as engine:
        plain = train(engine, case, 0, 2 * len(plans) + 2)
    with checked_engine(case, with_block=True) as engine:
        losses = train(engine, case, 0, 2)
        for index, sizes in enumerate(plans[1:], start=1):
            block = case4("qwen3_moe", *sizes).ds_config(with_block=True)["hybridep"]
            ds_hybridep.replan(engine, block)
            losses += train(engine, case, 2 * index, 2)
        ds_hybridep.detach(engine)
        losses += train(engine, case, 2 * len(plans), 2)
    return plain, losses


def train_and_drop(case: Case, owner: Literal["engine", "optimizer"]) -> dict[bool, list[float]]:
    """By `with_block`: losses when somebody calls zero_grad after the first of the micro-steps."""
    losses: dict[bool, list[float]] = {}
    for with_block in (False, True):
        with checked_engine(case, with_block=with_block) as engine:
            losses[with_block] = []
            for step in range(3):
                for micro_step in range(case.accumulation):
                    loss = loss_of(engine, case, *batch_of(case, step, micro_step))
                    losses[with_block].append(loss.item())
                    engine.backward(loss)
                    engine.step()
                    if (step, micro_step) == (1, 0):
                        (engine if owner == "engine" else engine.optimizer).zero_grad()
    return losses


def sizes_of_experts(case: Case) -> tuple[set[int], set[int], float]:
    """Elements that the experts' parameters hold after a step and after a backward alone; the codec's error."""
    levels = case.ds_config(with_block=True)["hybridep"]["levels"]
    levels[0] |= {"weight_codec": LOW_RANK, "gradient_codec": LOW_RANK}
    with checked_engine(case, with_block=True, block={"levels": levels}) as engine:
        experts = [p for n, p in engine.module.named_parameters() if ".experts." in n]
        train(engine, case, 0, 3)
        after_step = {parameter.numel() for parameter in experts}
        engine.backward(loss_of(engine, case, *batch_of(case, 4, 0)))
        after_backward = {parameter.numel() for parameter in experts}
        return after_step, after_backward, ds_hybridep.stats(engine)["layers"][0]["codecs"]["weight_error"]


def error_of(case: Case, block: dict[str, Any], zero: dict[str, Any]) -> str:
    try:
        with checked_engine(case, with_block=True, block=block, zero_optimization={"stage": 3, **zero}):
            return ""
    except UnsupportedError as error:
        return str(error)
    finally:
        gc.collect()


def block_of(case: Case, **settings: Any) -> dict[str, Any]:
    """The case's block with settings added to each level."""
    block = case.ds_config(with_block=True)["hybridep"]
    return {**block, "levels": [{**level, **settings} for level in block["levels"]]}


def train_planned(case: Case) -> tuple[list[float], list[float], dict[str, Any]]:
    """Losses of unmodified AutoEP, and of a planned job, whose plan is changed by hand; the planner's record."""
    with checked_engine(case, with_block=False) as engine:
        plain = train(engine, case, 0, 6)
    with checked_engine(case, with_block=True, block=block_of(case, domain_size="auto")) as engine:
        losses = train(engine, case, 0, 2)
        for step, sizes in ((2, (2, 1)), (4, (2, 2))):
            ds_hybridep.replan(engine, case4("qwen3_moe", *sizes).ds_config(with_block=True)["hybridep"])
            losses += train(engine, case, step, 2)
        return plain, losses, ds_hybridep.stats(engine)["planning"]


def train_lossy(case: Case, folder: str) -> dict[str, Any]:
    """Losses of exact and of lossy training, which goes on from a checkpoint in the same engine and in another.

    Every step proves that replicas equal their mirrors.
    """
    with checked_engine(case, with_block=False) as engine:
        exact = train(engine, case, 0, 6)
    with checked_engine(case, with_block=True, block=block_of(case, **LOSSY)) as engine:
        before = train(engine, case, 0, 3)
        engine.save_checkpoint(folder)
        straight = train(engine, case, 3, 3)
        codecs = [layer["codecs"] for layer in ds_hybridep.stats(engine)["layers"]]
    with checked_engine(case, with_block=True, block=block_of(case, **LOSSY), seed=2) as engine:
        engine.load_checkpoint(folder)
        resumed = train(engine, case, 3, 3)
    return {"exact": exact, "lossy": before + straight, "straight": straight, "resumed": resumed, "codecs": codecs}


def held_and_predicted(case: Case, codecs: dict[str, Any]) -> tuple[int, int]:
    """Bytes that this rank holds for replicas after a step, and what was predicted."""
    block = case.ds_config(with_block=True)["hybridep"]
    block["levels"][0] |= codecs
    sizes = tuple(level["domain_size"] for level in block["levels"])
    with checked_engine(case, with_block=True, block=block) as engine:
        need = needs_of_model(engine.module, block, 4, zero_stage=case.zero_stage)[sizes]
        train(engine, case, 0, 1)
        return ds_hybridep.stats(engine)["replica_bytes"], need.after_step


# -- tests ------------------------------------------------------------------------------------------------------


@pytest.mark.core
@pytest.mark.slow
def test_other_plans_and_none(pool4: ProcessPool) -> None:
    case = case4("qwen3_moe", 1, 1, zero_stage=3)
    for plain, losses in pool4.run(train_over_plans, case=case, plans=[(1, 1), (2, 1), (1, 1), (2, 2)]):
        assert losses == pytest.approx(plain, rel=FP32_TOLERANCE, abs=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("owner", ["engine", pytest.param("optimizer", marks=pytest.mark.slow)])
def test_zero_grad_in_the_middle_of_an_accumulation(pool4: ProcessPool, owner: str) -> None:
    case = case4("qwen3_moe", 2, 1, zero_stage=3, accumulation=2)
    for losses in pool4.run(train_and_drop, case=case, owner=owner):
        assert losses[True] == pytest.approx(losses[False], rel=FP32_TOLERANCE, abs=0.0)


def test_experts_hold_nothing_between_steps_and_codecs_read_masters(pool2: ProcessPool) -> None:
    case = case2("mixtral", zero_stage=3, dtype="bf16")
    for after_step, after_backward, error in pool2.run(sizes_of_experts, case=case):
        assert after_step == after_backward == {0}
        assert 0.0 < error < 0.2


@pytest.mark.parametrize(
    ("block", "zero", "texts"),
    [
        ({"dense_sync": "hierarchical"}, {}, ("hybridep.dense_sync", "ZeRO stage 3")),
        ({"levels": [{"name": "dc", "size": 2, "domain_size": "auto"}]}, {}, ('"auto"', "ZeRO stage 3")),
        ({}, {"leaf_module": {"classes": ["AutoEPMoELayer"]}}, ("zero_optimization.leaf_module", "mlp")),
        ({}, {"stage3_module_granularity_threshold": 10}, ("stage3_module_granularity_threshold",)),
    ],
    ids=["dense_sync", "auto", "leaf", "granularity"],
)
def test_what_is_refused(pool2: ProcessPool, block: dict[str, Any], zero: dict[str, Any], texts: Any) -> None:
    case = case2("mixtral", zero_stage=3, toy=replace(SHAPE, num_layers=1))
    for message in pool2.run(error_of, case=case, block=block, zero=zero):
        for text in texts:
            assert text in message


@pytest.mark.slow
@pytest.mark.parametrize("offload", [None, "both"])
def test_a_planned_job_keeps_its_losses(pool4: ProcessPool, offload: Literal[None, "both"]) -> None:
    case = case4("qwen3_moe", 1, 1, zero_stage=1, offload=offload)
    for plain, losses, record in pool4.run(train_planned, case=case):
        assert losses == pytest.approx(plain, rel=FP32_TOLERANCE, abs=0.0)
        assert record["plan"].startswith("[2,2]")
        assert record["workload"]["micro_steps"] == 1


@pytest.mark.parametrize(
    "case",
    [
        case4("qwen3_moe", 2, 1, zero_stage=2, accumulation=2),
        pytest.param(case4("mixtral", 2, 2, zero_stage=1, dtype="bf16"), marks=pytest.mark.slow),
        pytest.param(case4("deepseek_v3", 2, 1, zero_stage=3), marks=pytest.mark.slow),
        pytest.param(case4("qwen3_moe", 1, 2, toy=RECOMPUTED), marks=pytest.mark.slow),
    ],
    ids=["zero 2", "bf16", "zero 3", "checkpointing"],
)
@pytest.mark.slow
def test_lossy_codecs(pool4: ProcessPool, tmp_path: Path, case: Case) -> None:
    for found in pool4.run(train_lossy, case=case, folder=str(tmp_path)):
        assert found["resumed"] == found["straight"]
        assert found["lossy"] != found["exact"]
        assert found["lossy"] == pytest.approx(found["exact"], rel=0.02)
        for codecs in found["codecs"]:
            assert codecs["weight_ratio"] > 2.0
            assert codecs["gradient_ratio"] > 2.0


@pytest.mark.parametrize(
    ("case", "codecs"),
    [
        slow(case4("deepseek_v3", 2, 1, zero_stage=1), {}),
        slow(case4("qwen3_5_moe", 2, 2, zero_stage=2, dtype="bf16"), LOSSY_EXPERTS),
        (case4("mixtral", 2, 1, zero_stage=3), {}),
        (case4("qwen3_moe", 2, 1, zero_stage=1, dtype="bf16"), {"codecs": "recommended"}),
    ],
    ids=["exact", "lossy", "zero 3", "recommended"],
)
def test_a_run_holds_what_was_predicted(pool4: ProcessPool, case: Case, codecs: dict[str, Any]) -> None:
    for held, predicted in pool4.run(held_and_predicted, case=case, codecs=codecs):
        assert held == predicted > 0
