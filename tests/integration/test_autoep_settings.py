# SPDX-License-Identifier: Apache-2.0
"""AutoEP's layers with settings that were made for DeepSpeed's own: lossy codecs and "auto"."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from autoep_cases import SHAPE, case4, engine_of
from parity import FP32_TOLERANCE, Case
from process_pool import ProcessPool
from training import train

import ds_hybridep

pytestmark = [
    pytest.mark.dist,
    pytest.mark.timeout(240),
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers: '.[hf]'"),
]

RECOMPUTED = replace(SHAPE, checkpointing="reentrant")
LOSSY = {
    "weight_codec": {"type": "low_rank", "rank": 4}, "gradient_codec": "int8",
    "dense_weight_codec": "int8", "dense_gradient_codec": "int8",
}  # fmt: skip


# -- in the workers ---------------------------------------------------------------------------------------------


def block_of(case: Case, **settings: Any) -> dict[str, Any]:
    """The case's block with settings added to each level."""
    block = case.ds_config(with_block=True)["hybridep"]
    return {**block, "levels": [{**level, **settings} for level in block["levels"]]}


def train_planned(case: Case) -> tuple[list[float], list[float], dict[str, Any]]:
    """Losses of unmodified AutoEP, and of a planned job, whose plan is changed by hand; the planner's record."""
    with engine_of(case, with_block=False) as engine:
        plain = train(engine, case, 0, 6)
    with engine_of(case, with_block=True, block=block_of(case, domain_size="auto")) as engine:
        losses = train(engine, case, 0, 2)
        for step, sizes in ((2, (2, 1)), (4, (2, 2))):
            ds_hybridep.replan(engine, case4("qwen3_moe", *sizes).ds_config(with_block=True)["hybridep"])
            losses += train(engine, case, step, 2)
        return plain, losses, ds_hybridep.stats(engine)["planning"]


def train_lossy(case: Case, folder: str) -> dict[str, Any]:
    """Losses of exact and of lossy training, which goes on from a checkpoint in the same engine and in another.

    Every step proves that replicas equal their mirrors.
    """
    with engine_of(case, with_block=False) as engine:
        exact = train(engine, case, 0, 6)
    with engine_of(case, with_block=True, block=block_of(case, **LOSSY)) as engine:
        before = train(engine, case, 0, 3)
        engine.save_checkpoint(folder)
        straight = train(engine, case, 3, 3)
        codecs = [layer["codecs"] for layer in ds_hybridep.stats(engine)["layers"]]
    with engine_of(replace(case, seed=2), with_block=True, block=block_of(case, **LOSSY)) as engine:
        engine.load_checkpoint(folder)
        resumed = train(engine, case, 3, 3)
    return {"exact": exact, "lossy": before + straight, "straight": straight, "resumed": resumed, "codecs": codecs}


# -- tests ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_planned_job_keeps_its_losses(pool4: ProcessPool) -> None:
    for plain, losses, record in pool4.run(train_planned, case=case4("qwen3_moe", 1, 1, zero_stage=1)):
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
    for found in pool4.run(train_lossy, case=case, folder=str(tmp_path), timeout_s=120.0):
        assert found["resumed"] == found["straight"]
        assert found["lossy"] != found["exact"]
        assert found["lossy"] == pytest.approx(found["exact"], rel=0.02)
        for codecs in found["codecs"]:
            assert codecs["weight_ratio"] > 2.0
            assert codecs["gradient_ratio"] > 2.0
