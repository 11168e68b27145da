# SPDX-License-Identifier: Apache-2.0
"""ZeRO-3 and AutoEP's layers: what happens between two steps, and what is refused.  Parity is in test_autoep.py."""

import gc
import importlib.util
from dataclasses import replace
from typing import Any, Literal

import pytest
from autoep_cases import SHAPE, case4, engine_of
from parity import FP32_TOLERANCE, Case, loss_of
from process_pool import ProcessPool
from training import batch_of, train

import ds_hybridep
from ds_hybridep.errors import UnsupportedError

pytestmark = [
    pytest.mark.dist,
    pytest.mark.timeout(240),
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers: '.[hf]'"),
]

LOW_RANK = {"type": "low_rank", "rank": 4}


# -- in the workers ---------------------------------------------------------------------------------------------


def train_over_plans(case: Case, plans: list[tuple[int, int]]) -> tuple[list[float], list[float]]:
    """Losses without the block, and with it: two steps by each plan, then two without it again."""
    with engine_of(case, with_block=False) as engine:
        plain = train(engine, case, 0, 2 * len(plans) + 2)
    with engine_of(case, with_block=True) as engine:
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
        with engine_of(case, with_block=with_block) as engine:
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
    with engine_of(case, with_block=True, block={"levels": levels}) as engine:
        experts = [p for n, p in engine.module.named_parameters() if ".experts." in n]
        train(engine, case, 0, 3)
        after_step = {parameter.numel() for parameter in experts}
        engine.backward(loss_of(engine, case, *batch_of(case, 4, 0)))
        after_backward = {parameter.numel() for parameter in experts}
        return after_step, after_backward, ds_hybridep.stats(engine)["layers"][0]["codecs"]["weight_error"]


def error_of(case: Case, block: dict[str, Any], zero: dict[str, Any]) -> str:
    try:
        with engine_of(case, with_block=True, block=block, **zero):
            return ""
    except UnsupportedError as error:
        return str(error)
    finally:
        gc.collect()


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


def test_experts_hold_nothing_between_steps_and_codecs_read_masters(pool4: ProcessPool) -> None:
    case = case4("mixtral", 2, 1, zero_stage=3, dtype="bf16")
    for after_step, after_backward, error in pool4.run(sizes_of_experts, case=case):
        assert after_step == after_backward == {0}
        assert 0.0 < error < 0.2


@pytest.mark.parametrize(
    ("block", "zero", "texts"),
    [
        ({"dense_sync": "hierarchical"}, {}, ("hybridep.dense_sync", "ZeRO stage 3")),
        (
            {"levels": [{"name": "dc", "size": 2, "domain_size": "auto"}, {"name": "gpu", "size": 2}]},
            {},
            ('"auto"', "ZeRO stage 3"),
        ),
        ({}, {"leaf_module": {"classes": ["AutoEPMoELayer"]}}, ("zero_optimization.leaf_module", "mlp")),
        ({}, {"stage3_module_granularity_threshold": 10}, ("stage3_module_granularity_threshold",)),
    ],
    ids=["dense_sync", "auto", "leaf", "granularity"],
)
def test_what_is_refused(pool4: ProcessPool, block: dict[str, Any], zero: dict[str, Any], texts: Any) -> None:
    case = case4("mixtral", 2, 1, zero_stage=3, toy=replace(SHAPE, num_layers=1))
    for message in pool4.run(error_of, case=case, block=block, zero=zero):
        for text in texts:
            assert text in message
