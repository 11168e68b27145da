# SPDX-License-Identifier: Apache-2.0
"""What people call to save a model, while it trains, writes all experts, or says what to call."""

import importlib.util
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import Job, tokens_of
from process_pool import ProcessPool
from saves import (
    ALONE_S,
    save_a_reward_model,
    save_adapters,
    save_by_a_trainer_of_its_own,
    save_classic,
    save_on_one_rank,
    save_with_accelerate,
    save_wrapped,
    train_with_new_tokens,
)
from torch import Tensor

pytestmark = [
    pytest.mark.dist,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate: '.[hf]'"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning"),  # of transformers and peft
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
]
SAYS = "call ds_hybridep.save_pretrained(engine, DIR) on all ranks"


def load(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def with_adapters(base: Any, folder: Path) -> Any:
    import peft

    return peft.PeftModel.from_pretrained(base, folder)


@torch.no_grad()
def assert_same(model: Any, job: Job, wanted: Tensor) -> None:
    """Experts are summed in another order."""
    logits = model.eval()(input_ids=tokens_of(job)).logits.float()
    torch.testing.assert_close(logits, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("zero_stage", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_what_accelerate_saves_has_all_experts(pool2: ProcessPool, tmp_path: Path, zero_stage: int) -> None:
    job = Job(folder=str(tmp_path), zero_stage=zero_stage)
    first, second = pool2.run(save_with_accelerate, job=job, timeout_s=200.0)
    assert (first["is there"], second["is there"]) == (True, False)
    for found in (first, second):
        for way in ("save_model", "recipe"):
            assert found["said"][way] == ""
        for way in ("own part", "own state"):
            assert SAYS in found["said"][way]
        assert found["later"] == first["later"], "both train on, with the same tokens"
        assert all(map(math.isfinite, found["later"]))
    assert not (tmp_path / "part").exists()
    for name in ("save_model", "recipe", "first"):
        assert_same(load(tmp_path / name), job, first["logits"])
    model = load(tmp_path / "base")
    model.load_state_dict(torch.load(tmp_path / "sixteen" / "weights.bin", weights_only=True))
    assert_same(model, job, first["logits"])
    assert [path.name for path in (tmp_path / "sixteen").iterdir()] == ["weights.bin"]


def test_adapters_of_experts_are_whole_or_refused(pool2: ProcessPool, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    job = Job(folder=str(tmp_path), zero_stage=0, adapters="experts")
    first, second = pool2.run(save_adapters, job=job, timeout_s=200.0)
    for found in (first, second):
        assert "peft's state dict would leave out adapters of experts" in found["said"]["peft's state"]
        assert SAYS in found["said"]["peft's state"]
        assert SAYS in found["said"]["one rank"]
        assert found["said"]["recipe"] == ""
    assert not (tmp_path / "one").exists()
    written = load_file(tmp_path / "live" / "adapter_model.safetensors")
    assert first["factors"] == {name: tuple(one.shape) for name, one in written.items() if ".experts." in name} != {}
    assert (first["trained"], second["trained"]) == (len(written), 0)
    for name in ("recipe", "live"):
        assert_same(with_adapters(load(tmp_path / "base"), tmp_path / name), job, first["logits"])


def test_a_save_on_one_rank_ends_with_the_cause(pool2: ProcessPool, tmp_path: Path) -> None:
    job = Job(folder=str(tmp_path))
    (tmp_path / "file").touch()
    first, second = pool2.run(save_on_one_rank, job=job, timeout_s=200.0)
    assert first["no folder"].startswith("NotADirectoryError")
    assert "rank 0 cannot start: NotADirectoryError" in second["no folder"]  # and did not wait for its limit
    for call, name in (
        ("save_pretrained", "ds_hybridep.save_pretrained"),
        ("save_16bit_model", "engine.save_16bit_model"),
    ):
        assert f"ranks [1] did not call {name} within {ALONE_S:g} s: a rank has only its own experts" in first[call]
    for found in (first, second):
        assert found["together"] == ""
        assert found["quiet"] == []
    assert [line for line in first["log"] if "holds one rank's experts" in line]
    assert not (tmp_path / "one").exists()
    load(tmp_path / "live")


def test_the_model_inside_another_module_is_written(pool2: ProcessPool, tmp_path: Path) -> None:
    job = Job(folder=str(tmp_path))
    first, _ = pool2.run(save_wrapped, job=job, timeout_s=200.0)
    assert_same(load(tmp_path / "live"), job, first["logits"])
    assert any("whatever else is outside policy is left out" in one for one in first["log"])
    state = torch.load(tmp_path / "sixteen" / "pytorch_model.bin", weights_only=True)
    model = load(tmp_path / "base")
    model.load_state_dict({name.removeprefix("policy."): one for name, one in state.items() if "policy." in name})
    assert_same(model, job, first["logits"])
    assert state["value.weight"].shape == (1, model.config.hidden_size)


def test_a_trainer_with_a_save_of_its_own(pool2: ProcessPool, tmp_path: Path) -> None:
    job = Job(folder=str(tmp_path))
    first, second = pool2.run(save_by_a_trainer_of_its_own, job=job, timeout_s=200.0)
    assert (first["OwnSave"], second["OwnSave"]) == ("", "")
    assert (tmp_path / "OwnSave" / "own").exists()
    assert_same(load(tmp_path / "OwnSave"), job, first["logits"])
    assert SAYS in first["OwnSaveModel"]


@pytest.mark.parametrize("adapters", ["experts", pytest.param("attention", marks=pytest.mark.slow)])
def test_new_tokens_load_in_peft_and_transformers(pool2: ProcessPool, tmp_path: Path, adapters: Any) -> None:
    job = Job(folder=str(tmp_path), zero_stage=0, adapters=adapters)
    first, _ = pool2.run(train_with_new_tokens, job=job, timeout_s=200.0)
    assert_same(load(tmp_path / "merged"), job, first["logits"])
    base = load(tmp_path / "base")
    base.resize_token_embeddings(job.case.toy.vocab + 3)
    assert_same(with_adapters(base, tmp_path / "adapters"), job, first["logits"])


def test_a_reward_model_loads_as_what_it_is(pool2: ProcessPool, tmp_path: Path) -> None:
    import transformers

    job = Job(folder=str(tmp_path))
    first, _ = pool2.run(save_a_reward_model, job=job, timeout_s=200.0)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "live", dtype="auto")
    assert_same(model, job, first)


def test_all_experts_of_the_classic_layer_are_saved(pool2: ProcessPool, tmp_path: Path) -> None:
    """As in the state dict of the model with ep_size=1."""
    ranks = pool2.run(save_classic, folder=str(tmp_path), timeout_s=120.0)
    saved = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    for rank in ranks:
        for name, value in rank["parameters"].items():
            torch.testing.assert_close(saved.pop(name) if name in saved else ranks[0]["parameters"][name], value)
    assert not saved
    assert [rank["is there"] for rank in ranks] == [True, False]
    assert not (tmp_path / "config.json").exists()
