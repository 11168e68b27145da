# SPDX-License-Identifier: Apache-2.0
"""What the estimator says of AutoEP's layers, before and after they are made, and what a run then holds."""

import importlib.util
from typing import Any

import pytest
import torch
from autoep_cases import case4, engine_of
from marks import slow
from parity import Case, model_of
from process_pool import ProcessPool
from training import train

import ds_hybridep
from ds_hybridep.errors import ConfigError

pytestmark = [
    pytest.mark.dist,
    pytest.mark.timeout(240),
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers: '.[hf]'"),
]

LOSSY = {"weight_codec": {"type": "low_rank", "rank": 4}, "gradient_codec": "int8"}


def held_and_estimated(case: Case, codecs: dict[str, Any]) -> tuple[int, dict[str, int]]:
    """Bytes that this rank holds for replicas after a step, and what the estimator said of them before."""
    config = case.ds_config(with_block=True)
    block = config["hybridep"]
    block["levels"][0] |= codecs
    dtype = torch.bfloat16 if case.dtype == "bf16" else torch.float32
    sizes = tuple(level["domain_size"] for level in block["levels"])
    needs = {
        "model": ds_hybridep.estimate_hybridep_mem_needs_all_live(
            model_of(case, seed=1),
            block,
            4,
            dtype=dtype,
            expert_parallel=config["expert_parallel"],
            zero_stage=case.zero_stage,
        ),
    }
    with engine_of(case, with_block=True, block=block) as engine:
        needs["engine"] = ds_hybridep.estimate_hybridep_mem_needs_all_live(
            engine.module, block, 4, zero_stage=case.zero_stage
        )
        train(engine, case, 0, 1)
        held = ds_hybridep.stats(engine)["replica_bytes"]
    return held, {name: need[sizes].after_step for name, need in needs.items()}


@pytest.mark.parametrize(
    ("case", "codecs"),
    [
        slow(case4("deepseek_v3", 2, 1, zero_stage=1), {}),
        slow(case4("qwen3_5_moe", 2, 2, zero_stage=2, dtype="bf16"), LOSSY),
        (case4("mixtral", 2, 1, zero_stage=3), {}),
        (case4("qwen3_moe", 2, 1, zero_stage=1, dtype="bf16"), {"codecs": "recommended"}),
    ],
    ids=["exact", "lossy", "zero 3", "recommended"],
)
def test_a_run_holds_what_is_estimated(pool4: ProcessPool, case: Case, codecs: dict[str, Any]) -> None:
    for held, estimated in pool4.run(held_and_estimated, case=case, codecs=codecs):
        assert held > 0
        assert estimated == dict.fromkeys(("model", "engine"), held)


def estimate(*, experts_are_frozen: bool, **options: Any) -> Any:
    case = case4("qwen3_moe", 2, 1)
    model = model_of(case, seed=1)
    for name, parameter in model.named_parameters():
        if ".experts." in name and experts_are_frozen:
            parameter.requires_grad_(False)
    block = case.ds_config(with_block=True)["hybridep"]
    return ds_hybridep.estimate_hybridep_mem_needs_all_live(model, block, 4, **options)[2, 1]


def test_frozen_experts_need_no_gradient_sums() -> None:
    frozen, trained = (
        estimate(experts_are_frozen=flag, expert_parallel={"enabled": True, "autoep_size": 4})
        for flag in (True, False)
    )
    assert frozen.replicas == trained.replicas > 0
    assert frozen.gradient_sums == 0 < trained.gradient_sums


def test_what_estimates_want_to_know() -> None:
    with pytest.raises(ConfigError, match="none of AutoEP.* give expert_parallel"):
        estimate(experts_are_frozen=False)
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.mlp: 8 experts .* autoep_size 3"):
        estimate(experts_are_frozen=False, expert_parallel={"enabled": True, "autoep_size": 3})
