# SPDX-License-Identifier: Apache-2.0
"""`ds_hybridep export` and `ds_hybridep.save_pretrained`: what was trained loads in plain transformers and peft."""

import importlib
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exporting import Job, engine_of, exported, run, run_classic, save_in_all_ways, tokens_of, train
from marks import slow
from process_pool import Pools, ProcessPool
from torch import Tensor
from toy_model import build_model
from training import world2

from ds_hybridep.commands.main import main

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs transformers and peft: '.[hf]'"),
    pytest.mark.filterwarnings("ignore:.*:UserWarning"),  # of transformers and peft
    pytest.mark.filterwarnings("ignore:.*:FutureWarning"),
]


def refusal(job: Job, capsys: pytest.CaptureFixture[str], *options: str, base: str = "base") -> str:
    """What the command says where it writes nothing."""
    folder = Path(job.folder)
    target = folder / "refused"
    arguments = ["export", str(folder / "checkpoint"), "--model", str(folder / base), "--out", str(target), *options]
    assert main(arguments) == 2
    assert not list(folder.glob("refused*"))
    return capsys.readouterr().err


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-5) -> None:
    """Experts are summed in another order."""
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


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
    results = pool.run(run, job=job)
    for folder in (exported(job), *([Path(job.folder) / "live"] if job.live else ())):
        model = load(folder)
        assert_bit_equal(model, results)
        assert_close(logits(model, job), results[0]["logits"], 1e-5 if job.dtype == "fp32" else 0.1)


# -- the whole model ------------------------------------------------------------------------------------------------


FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "qwen3_5_moe")


@pytest.mark.parametrize("zero_stage", [slow(1), 3])
def test_a_trained_model_loads_in_transformers(pool2: ProcessPool, tmp_path: Path, zero_stage: int) -> None:
    check(pool2, Job(folder=str(tmp_path), zero_stage=zero_stage, live=True))


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", range(4))
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family(pool2: ProcessPool, tmp_path: Path, family: str, dtype: Any, zero_stage: int) -> None:
    check(pool2, Job(folder=str(tmp_path), family=family, dtype=dtype, zero_stage=zero_stage, live=True))


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", range(4))
@pytest.mark.parametrize(("with_block", "ep_size"), [(False, 1), (False, 2), (True, 2)])
@pytest.mark.parametrize("world_size", [2, 4])
def test_any_number_of_ranks(
    pool_of: Pools, tmp_path: Path, zero_stage: int, with_block: bool, ep_size: int, world_size: int
) -> None:
    shape = {"world_size": world_size, "ep_size": ep_size, "zero_stage": zero_stage, "with_block": with_block}
    check(pool_of(world_size), Job(folder=str(tmp_path), live=True, **shape))


# -- adapters -------------------------------------------------------------------------------------------------------


def check_adapters(pool: ProcessPool, job: Job) -> None:
    """Export the adapters, the merged model and adapters per expert, and compare logits."""
    results = pool.run(run, job=job)
    wanted = results[0]["logits"]
    for folder in (exported(job), *([Path(job.folder) / "live"] if job.live else ())):
        assert_close(logits(loaded_adapters(job, folder), job), wanted)
        assert not (folder / "config.json").exists()
    merged = exported(job, "--merged", name="merged")
    assert_close(logits(load(merged), job), wanted)
    assert not torch.allclose(logits(load(Path(job.folder) / "base"), job), wanted, rtol=1e-2, atol=1e-2)
    check_per_expert(job, exported(job, "--per-expert", name="per_expert"))


def check_per_expert(job: Job, folder: Path) -> None:
    """Adapters per expert, one module after the other, are what merging adds to the model's files."""
    from safetensors.torch import load_file

    factors = load_file(folder / "adapter_model.safetensors")
    settings = json.loads((folder / "adapter_config.json").read_text())
    assert settings["target_parameters"] is None
    base, merged = (load_file(Path(job.folder) / name / "model.safetensors") for name in ("base", "merged"))
    changed = {name for name, value in merged.items() if not torch.equal(value, base[name])}
    modules = {name.rsplit(".lora_", 1)[0] for name in factors}
    assert {f"{name.removeprefix('base_model.model.')}.weight" for name in modules} == changed
    assert {name.rsplit(".", 1)[-1] for name in modules} == set(settings["target_modules"])
    for name in modules:
        weight = f"{name.removeprefix('base_model.model.')}.weight"
        a, b = (factors[f"{name}.lora_{which}.weight"] for which in "AB")
        rank, _ = a.shape
        assert rank == settings["r"]
        scaling = settings["lora_alpha"] / rank
        torch.testing.assert_close(base[weight] + scaling * b @ a, merged[weight], rtol=1e-6, atol=1e-6)


@pytest.mark.slow  # without the block, below, and test_vllm.py
def test_adapters_of_attention_load_in_peft(pool2: ProcessPool, tmp_path: Path) -> None:
    check_adapters(
        pool2, Job(folder=str(tmp_path), zero_stage=0, adapters="attention", without_frozen=True, live=True)
    )


@pytest.mark.parametrize("zero_stage", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_adapters_of_experts_load_in_peft(pool2: ProcessPool, tmp_path: Path, zero_stage: int) -> None:
    check_adapters(pool2, Job(folder=str(tmp_path), zero_stage=zero_stage, adapters="experts", live=True))


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("adapters", ["attention", "experts"])
def test_adapters_of_each_family(pool4: ProcessPool, tmp_path: Path, family: str, adapters: Any) -> None:
    job = Job(folder=str(tmp_path), world_size=4, family=family, zero_stage=0, adapters=adapters, live=True)
    check_adapters(pool4, job)


def test_adapters_without_the_block_need_their_config(
    pool2: ProcessPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(folder=str(tmp_path), zero_stage=0, adapters="attention", with_block=False)
    results = pool2.run(run, job=job)
    assert "copy the adapter_config.json of the training there" in refusal(job, capsys)
    settings = importlib.import_module("peft").LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "o_proj"])
    settings.save_pretrained(str(tmp_path / "checkpoint" / "global_step2"))
    assert_close(logits(loaded_adapters(job, exported(job)), job), results[0]["logits"])


# -- what people call already ---------------------------------------------------------------------------------------


def test_what_people_call_already_writes_all_experts_or_says_why_not(pool2: ProcessPool, tmp_path: Path) -> None:
    job = Job(folder=str(tmp_path))
    for found in pool2.run(save_in_all_ways, job=job):
        assert "call ds_hybridep.save_pretrained(engine, DIR) on all ranks" in found["errors"]["module"]
        assert "config.json is there already" in found["errors"]["file"]
        assert found["errors"]["detached"] == "False"
        saved, kept = found["losses"]
        assert saved == kept
    assert not (tmp_path / "module").exists()
    wanted = logits(load(tmp_path / "live"), job)
    assert torch.equal(logits(load(tmp_path / "trainer"), job), wanted)
    model = load(tmp_path / "base")
    model.load_state_dict(torch.load(tmp_path / "sixteen" / "pytorch_model.bin", weights_only=True))
    assert torch.equal(logits(model, job), wanted)
    assert (tmp_path / "trainer" / "training_args.bin").exists()
    assert json.loads((tmp_path / "trainer" / "trainer_state.json").read_text())["global_step"] == job.steps


@pytest.mark.parametrize("zero_stage", [1, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (0, 2))])
def test_a_classic_model_becomes_one_state_dict(pool2: ProcessPool, tmp_path: Path, zero_stage: int) -> None:
    from safetensors.torch import load_file

    case = world2(zero_stage=zero_stage)
    results = pool2.run(run_classic, case=case, folder=str(tmp_path / "checkpoint"))
    assert main(["export", str(tmp_path / "checkpoint"), "--out", str(tmp_path / "out")]) == 0
    state = load_file(tmp_path / "out" / "model.safetensors")
    masters = results[0] | results[1]
    assert state.keys() == masters.keys()
    for name, value in masters.items():
        assert torch.equal(state[name], value), name
    toy = replace(case.toy, ep_size=1)
    assert state.keys() == build_model(toy, rank=0, world_size=1, data_before_expert=False, seed=1).state_dict().keys()


# -- training on ----------------------------------------------------------------------------------------------------


def losses_of_training_on(job: Job, folder: str) -> list[float]:
    """Losses of two steps that begin from an exported folder."""
    import peft
    import transformers

    if job.adapters:
        base = transformers.AutoModelForCausalLM.from_pretrained(Path(job.folder) / "base", dtype="auto")
        model = peft.PeftModel.from_pretrained(base, folder, is_trainable=True)
    else:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    model.train()
    with engine_of(replace(job, folder=f"{job.folder}/on"), model) as engine:
        return train(engine, job, job.steps, 2)


@pytest.mark.parametrize("adapters", [pytest.param("", marks=pytest.mark.slow), "experts"])
def test_training_goes_on_from_an_export(pool2: ProcessPool, tmp_path: Path, adapters: Any) -> None:
    """SGD remembers nothing, so the losses of going on are those of not having stopped."""
    job = Job(folder=str(tmp_path), zero_stage=0 if adapters else 1, adapters=adapters, optimizer="sgd")
    wanted = pool2.run(run, job=job)[0]["later"]
    folder = str(exported(job))
    for with_block in (True,) if adapters else (True, False):
        found = pool2.run(losses_of_training_on, job=replace(job, with_block=with_block), folder=folder)
        assert found[0] == pytest.approx(wanted, rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "ep_size"), [(4, 4), (4, 2), (4, 1), (2, 1), (1, 1)])
@pytest.mark.parametrize("adapters", ["", "attention", "experts"])
def test_training_goes_on_with_other_ranks(
    pool2: ProcessPool, tmp_path: Path, adapters: Any, world_size: int, ep_size: int
) -> None:
    job = Job(folder=str(tmp_path), zero_stage=0, adapters=adapters, optimizer="sgd")
    wanted = pool2.run(run, job=job)[0]["later"]
    other = replace(job, world_size=world_size, ep_size=ep_size, with_block=world_size > 1)
    with ProcessPool(world_size) as pool:
        found = pool.run(losses_of_training_on, job=other, folder=str(exported(job)))
    assert found[0] == pytest.approx(wanted, rel=1e-5)
