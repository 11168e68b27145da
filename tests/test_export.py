# SPDX-License-Identifier: Apache-2.0
"""`ds_hybridep export` and `ds_hybridep.save_pretrained`: what was trained loads in plain transformers and peft."""

import importlib.util
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import Job, run, tokens_of
from process_pool import ProcessPool
from torch import Tensor

from ds_hybridep.commands.main import main

pytestmark = [
    pytest.mark.dist,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs transformers and peft: '.[hf]'"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning"),  # of transformers and peft
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
]

LOGITS = {"rtol": 1e-5, "atol": 1e-5}  # experts are summed in another order


def exported(job: Job, *options: str, name: str = "out") -> Path:
    """The folder that the command writes."""
    folder = Path(job.folder)
    arguments = ["export", str(folder / "checkpoint"), "--model", str(folder / "base"), "--out", str(folder / name)]
    assert main([*arguments, *options]) == 0
    return folder / name


def load(folder: Path, **options: Any) -> Any:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", **options)
    return model.eval()


def loaded_adapters(job: Job, folder: Path) -> Any:
    import peft

    return peft.PeftModel.from_pretrained(load(Path(job.folder) / "base"), folder).eval()


@torch.no_grad()
def logits(model: Any, job: Job) -> Tensor:
    return model(input_ids=tokens_of(job)).logits.float()


def by_training_name(state: dict[str, Tensor], name: str, experts: list[int] | None) -> Tensor:
    """What a parameter of the training is in the model."""
    for old, new in ((".router.gate.", ".gate."), (".router.", ".gate."), (".base_layer.", ".")):
        name = name.replace(old, new)
    shared = ".shared_expert." if any(".shared_expert." in one for one in state) else ".shared_experts."
    name = name.replace(".shared_experts_gate.", ".shared_expert_gate.").replace(".shared_experts.", shared)
    if experts is None:
        return state[name]
    layer, _, weight = name.rpartition(".")
    if weight == "w2":
        return state[f"{layer}.down_proj"][experts]
    gate, up = state[f"{layer}.gate_up_proj"][experts].chunk(2, dim=1)
    return gate if weight == "w1" else up


def assert_bit_equal(model: Any, results: list[dict[str, Any]]) -> None:
    """The model's weights are the masters of all ranks, rounded."""
    state = model.state_dict()
    for found in results:
        for name, (experts, value) in found["held"].items():
            ours = by_training_name(state, name, experts)
            assert torch.equal(ours, value.to(ours.dtype)), name


def check(pool: ProcessPool, job: Job) -> None:
    """Export the whole model, and compare weights and logits."""
    results = pool.run(run, job=job, timeout_s=120.0)
    for folder in (exported(job), *([Path(job.folder) / "live"] if job.live else ())):
        model = load(folder)
        assert_bit_equal(model, results)
        tolerance = LOGITS if job.dtype == "fp32" else {"rtol": 0.1, "atol": 0.1}
        torch.testing.assert_close(logits(model, job), results[0]["logits"], **tolerance)


# -- the whole model ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero_stage", [0, 1, 3])
def test_a_trained_model_loads_in_transformers(pool2: ProcessPool, tmp_path: Path, zero_stage: int) -> None:
    check(pool2, Job(folder=str(tmp_path), zero_stage=zero_stage, live=True))


FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "qwen3_5_moe")


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_each_family(pool2: ProcessPool, tmp_path: Path, family: str, dtype: Any) -> None:
    for zero_stage in range(4):
        check(pool2, Job(folder=str(tmp_path / str(zero_stage)), family=family, dtype=dtype, zero_stage=zero_stage, live=True))


@pytest.mark.slow
@pytest.mark.parametrize(("zero_stage", "with_block"), list(itertools.product(range(4), (False, True))))
@pytest.mark.parametrize("world_size", [2, 4])
def test_any_number_of_ranks(
    request: pytest.FixtureRequest, tmp_path: Path, zero_stage: int, with_block: bool, world_size: int
) -> None:
    pool = request.getfixturevalue(f"pool{world_size}")
    for ep_size in (1, 2):
        if with_block and ep_size == 1:
            continue
        common = {"zero_stage": zero_stage, "with_block": with_block, "live": True}
        check(pool, Job(folder=str(tmp_path / str(ep_size)), world_size=world_size, ep_size=ep_size, **common))
