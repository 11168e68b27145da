# SPDX-License-Identifier: Apache-2.0
"""A ds_config without "optimizer": the script, or the Trainer, has made one, with groups and a schedule of its own."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import starts
import torch
from autoep_cases import case2, case4
from marks import slow
from parity import Case
from process_pool import ProcessPool
from starts import Start, assert_same
from torch import nn

pytestmark = [
    pytest.mark.dist,
    pytest.mark.timeout(240),
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers: '.[hf]'"),
]


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """The first layer, and the rest with another rate and without decay; experts are in both."""
    named = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    first = [one for name, one in named if ".layers.0." in name]
    rest = [one for name, one in named if ".layers.0." not in name]
    return [
        {"params": first, "lr": 5e-3, "weight_decay": 0.1},
        {"params": rest, "lr": 2e-3, "weight_decay": 0.0, "betas": (0.8, 0.9)},
    ]


def adamw(model: nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(two_groups(model), eps=3e-3)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 1 + step])


@pytest.mark.parametrize("zero_stage", [slow(0), slow(1), pytest.param(2, marks=pytest.mark.core), slow(3)])
def test_groups_of_the_script_with_rates_and_a_schedule_train_as_without_expert_parallelism(
    pool2: ProcessPool, zero_stage: int
) -> None:
    clipping = 0.5 if zero_stage else 0.0
    case = case2("qwen3_moe", zero_stage=zero_stage, accumulation=2, gradient_clipping=clipping, steps=3)
    results = pool2.run(starts.compare, case=case, start=Start(optimizer=adamw), timeout_s=120.0)
    assert_same(results)


def test_groups_without_names_keep_their_rates_in_an_optimizer_of_the_ds_config(pool2: ProcessPool) -> None:
    case = case2("qwen3_moe", zero_stage=2, steps=3)
    results = pool2.run(starts.compare, case=case, start=Start(groups=two_groups), timeout_s=120.0)
    assert_same(results)
    for found in results:
        assert sorted({group["lr"] for group in found["groups"]}) == [2e-3, 5e-3]


def resume(case: Case, start: Start, folder: str) -> dict[str, Any]:
    """Losses with and without an interruption, and rates of the script's optimizer after the load."""
    with starts.started(case, start, with_block=True) as (engine, schedule):
        starts.train(engine, schedule, case, start, 0, 2)
        engine.save_checkpoint(folder)
        state = schedule.state_dict()
        straight = starts.train(engine, schedule, case, start, 2, 2)
        rates = [group["lr"] for group in schedule.optimizer.param_groups]
    with starts.started(case, start, with_block=True) as (engine, schedule):
        engine.load_checkpoint(folder)
        schedule.load_state_dict(state)
        loaded = [group["lr"] for group in schedule.optimizer.param_groups]
        resumed = starts.train(engine, schedule, case, start, 2, 2)
        again = [group["lr"] for group in schedule.optimizer.param_groups]
        of_engine = [group["lr"] for group in engine.optimizer.param_groups]
    return {"losses": (straight, resumed), "rates": (rates, again), "loaded": loaded, "of engine": of_engine}


def adamw_of_one_schedule(model: nn.Module) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(two_groups(model), eps=3e-3)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


@pytest.mark.parametrize("zero_stage", [1, slow(3)])
def test_a_resume_goes_on_with_the_scripts_schedule(pool2: ProcessPool, tmp_path: Path, zero_stage: int) -> None:
    case, start = case2("qwen3_moe", zero_stage=zero_stage), Start(optimizer=adamw_of_one_schedule)
    for found in pool2.run(resume, case=case, start=start, folder=str(tmp_path), timeout_s=120.0):
        straight, resumed = found["losses"]
        assert resumed == straight
        rates, again = found["rates"]
        assert rates == again == [5e-3 / 16, 2e-3 / 16]
        assert found["loaded"] == [5e-3 / 4, 2e-3 / 4]


MUON = {"type": "Muon", "params": {"lr": 1e-3, "muon_lr": 2e-3, "adam_lr": 1e-3, "weight_decay": 0.01}}


def compare_without_compilation(case: Case, start: Start) -> dict[str, Any]:
    """DeepSpeed compiles Muon's steps, for minutes on a CPU."""
    with torch.compiler.set_stance("force_eager"):
        return starts.compare(case=case, start=start)


@pytest.mark.slow
def test_muon_trains_as_without_expert_parallelism_but_for_matrices_that_autoep_divides(pool4: ProcessPool) -> None:
    case = case4("qwen3_moe", 2, 1, zero_stage=1)
    results = pool4.run(compare_without_compilation, case=case, start=Start(config={"optimizer": MUON}))
    for found in results:
        # AutoEP has gate and up of an expert as two matrices, and Muon makes each of them orthogonal by itself.
        for name in [name for name in found["distance"] if name.endswith((".w1", ".w3"))]:
            assert 1e-3 < found["distance"].pop(name) < 1e-2
    # Muon rounds to bf16: where gradients differ by 1e-7, plain DeepSpeed's weights differ by 2e-4 after three steps.
    assert_same(results, tolerance=1e-3)
