# SPDX-License-Identifier: Apache-2.0
"""The example that fine-tunes with the Trainer, under the deepspeed launcher, with the block and without."""

import importlib.util
import json
import os
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from scripts import blocks_of, free_port, output_of

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = str(Path(sys.executable).with_name("deepspeed"))

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs the extra hf: '.[hf]'"),
]


def finetune(folder: Path, *options: str, with_block: bool, zero_stage: int = 1) -> dict[str, Any]:
    """The record of a short run on four ranks."""
    config = json.loads((ROOT / "ds_configs" / "hf_2x2.json").read_text())
    script = [str(ROOT / "examples" / "finetune_hf.py"), "--tiny", "--tiny-steps", "30", "--steps", "20"]
    if not with_block:
        del config["hybridep"]
        config["expert_parallel"]["moe_layer_pattern"] = r"(base_model\.model\.)?model\.layers\.\d+\.mlp"
        script = ["--no_local_rank", str(ROOT / "tests" / "support" / "plain_autoep.py"), *script]
    config["zero_optimization"] = {"stage": zero_stage, "stage3_param_persistence_threshold": 1000}
    folder.mkdir()
    (folder / "ds_config.json").write_text(json.dumps(config))
    record = folder / "record.json"
    launch(folder, 4, *script, *options, "--deepspeed", str(folder / "ds_config.json"), "--json-file", str(record))
    return json.loads(record.read_text())


def launch(folder: Path, num_ranks: int, *script: str) -> str:
    """What the ranks print."""
    launcher = [LAUNCHER, "--num_gpus", str(num_ranks), "--master_port", str(free_port())]
    return output_of([*launcher, *script], folder, 1500)


def test_the_way_to_generate_that_the_page_shows(tmp_path: Path) -> None:
    train, generate, export = blocks_of("huggingface.md", "From training to `generate()`")
    for name in ("examples", "ds_configs", "docs", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    port = f"deepspeed --master_port {free_port()}"
    scripts = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command in (train.replace("deepspeed ", f"{port} ", 1), export):
        output_of(["bash", "-c", command], tmp_path, 900, PATH=scripts)
    generate += "\nimport sys\nassert not {'deepspeed', 'ds_hybridep'} & set(sys.modules)"
    said = output_of([sys.executable, "-c", generate], tmp_path, 900, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert len(said) > len("The block ")
    from safetensors.torch import load_file

    saved, exported = (load_file(tmp_path / name / "model.safetensors") for name in ("tuned", "exported"))
    assert saved.keys() == exported.keys()
    assert all(torch.equal(value, exported[name]) for name, value in saved.items())


def changed(block: str, changes: dict[str, str]) -> str:
    """A block of the page for two datacentres of two CPU ranks, and a few steps."""
    for there, here in changes.items():
        assert there in block, there
        block = block.replace(there, here)
    return block


FOR_CPUS = {
    "bf16=True": "bf16=True, use_cpu=True, accelerator_config={'use_configured_state': True}, report_to=[], seed=1",
    "learning_rate=1e-5": "learning_rate=1e-3", "max_steps=100": "max_steps=10, logging_steps=5",
    "eval_steps=50": "eval_steps=5", "save_steps=50": "save_steps=5", "length=512": "length=64",
    "gradient_accumulation_steps=16": "gradient_accumulation_steps=1",
    "FOLDER": "tiny",
}  # fmt: skip
JOIN = """
import os
from accelerate import PartialState

os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
PartialState(backend="gloo")
"""
MAKE_TINY = f"""
import argparse, sys
sys.path.insert(0, {str(ROOT / "examples")!r})
import finetune_hf
for one in finetune_hf.build_tiny(argparse.Namespace(seed=0, seq_len=64, tiny_steps=20)):
    one.save_pretrained("tiny")
"""
FACTS = """
import json
import torch

print("losses", json.dumps([one for one in trainer.state.log_history if {"loss", "eval_loss"} & set(one)]), flush=True)
torch.distributed.destroy_process_group()
"""


@pytest.mark.parametrize("has_adapters", [False, True], ids=["whole model", "adapters"])
def test_the_whole_example_that_the_page_shows(tmp_path: Path, has_adapters: bool) -> None:
    """Training with evaluation, `generate` on all ranks, the folder that is saved, and a resume."""
    config, script, command, _ = blocks_of("huggingface.md", "A whole example")
    (generate,) = blocks_of("huggingface.md", "Evaluation and `generate()` while training")
    settings = json.loads(changed(config, {'"size": 8': '"size": 2', '"autoep_size": 8': '"autoep_size": 2'}))
    script = changed(script, FOR_CPUS)
    generate = changed(generate, {"use_cache=True": "use_cache=True, output_router_logits=False"})  # as it says
    if has_adapters:
        adapters, _ = blocks_of("huggingface.md", "Adapters (LoRA)")
        script = changed(script, {"\n\n\ndef windows": f"\n{adapters}\n\n\ndef windows"})
    (tmp_path / "ds_config.json").write_text(json.dumps(settings))
    (tmp_path / "train.py").write_text("\n".join([JOIN, script, generate, FACTS]))
    output_of([sys.executable, "-c", MAKE_TINY], tmp_path, 300)
    text = (ROOT / "docs" / "faults.md").read_text()
    (tmp_path / "train.txt").write_text(text * 3)
    (tmp_path / "valid.txt").write_text(text[:2000])
    assert command == "deepspeed --hostfile hosts train.py"
    said = launch(tmp_path, 4, "train.py")
    losses = json.loads(re.findall(r"^losses (.+)$", said, re.MULTILINE)[0])
    assert [(one["step"], "eval_loss" in one) for one in losses] == [(5, False), (5, True), (10, False), (10, True)]
    assert losses[3]["eval_loss"] < losses[1]["eval_loss"]
    assert (tmp_path / "run.json").exists()
    assert said.count("The block ") == 4, "all ranks have the same prompt"
    weights = "adapter_model.safetensors" if has_adapters else "model.safetensors"
    assert (tmp_path / "tuned" / weights).exists()
    assert any((tmp_path / "tuned").glob("tokenizer*"))
    (go_on,) = blocks_of("huggingface.md", "Go on after a failure")
    longer = changed(script, {"max_steps=10": "max_steps=15", "trainer.train()": go_on})
    (tmp_path / "train.py").write_text("\n".join([JOIN, longer, FACTS]))
    (tmp_path / "runs" / "checkpoint-12").mkdir()  # as if its saving had been interrupted
    losses = json.loads(re.findall(r"^losses (.+)$", launch(tmp_path, 4, "train.py"), re.MULTILINE)[0])
    assert [one["step"] for one in losses if "loss" in one] == [5, 10, 15]


@pytest.mark.parametrize(
    ("options", "zero_stage"),
    [
        (("--accumulation", "2"), 1),
        (("--accumulation", "2"), 3),
        (("--lora-rank", "4", "--learning-rate", "1e-2"), 0),  # under 1 and 2, AutoEP alone wants a trained expert
    ],
    ids=["zero 1", "zero 3", "adapters of attention"],
)
def test_the_trainer_learns_the_same_with_the_block(tmp_path: Path, options: tuple[str, ...], zero_stage: int) -> None:
    plain = finetune(tmp_path / "plain", *options, with_block=False, zero_stage=zero_stage)
    hybrid = finetune(tmp_path / "hybrid", *options, with_block=True, zero_stage=zero_stage)
    assert hybrid["world_size"] == plain["world_size"] == 4
    first, *_, last = (loss for _, loss in hybrid["losses"])
    assert last < first
    # Different orders of sums, carried through twenty steps of AdamW with its usual eps.
    assert hybrid["loss"] == pytest.approx(plain["loss"], rel=1e-3)
    assert hybrid["valid_loss"] == pytest.approx(plain["valid_loss"], rel=1e-3)


def test_the_trainer_trains_adapters_of_experts(tmp_path: Path) -> None:
    options = ("--lora-rank", "4", "--lora-experts")  # which AutoEP takes with the block only
    losses = [loss for _, loss in finetune(tmp_path / "hybrid", *options, with_block=True)["losses"]]
    assert losses[-1] < losses[0]


@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="needs trl: pip install trl")
@pytest.mark.parametrize("is_configured", [True, False], ids=["optimizer of the ds_config", "of the Trainer"])
def test_trls_trainer_learns_the_same_as_without_expert_parallelism(tmp_path: Path, is_configured: bool) -> None:
    losses, logits = [], []
    blocks = {
        "expert_parallel": {"enabled": True, "autoep_size": 2},
        "hybridep": {"levels": [{"name": "dc", "size": 2, "domain_size": 2}]},
    }
    for name, settings in (("dense", {}), ("hybrid", blocks)):
        folder = tmp_path / name
        folder.mkdir()
        config = {
            "train_micro_batch_size_per_gpu": "auto",
            "optimizer": {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}},
            "zero_optimization": {"stage": 1},
        }
        if not is_configured:
            del config["optimizer"]
        (folder / "ds_config.json").write_text(json.dumps(config | settings))
        said = launch(folder, 2, str(ROOT / "tests" / "support" / "sft_script.py"))
        losses.append(json.loads(re.findall(r"^losses (.+)$", said, re.MULTILINE)[0]))
        assert (folder / "tuned" / "trainer_state.json").exists()
        model = import_module("transformers").AutoModelForCausalLM.from_pretrained(folder / "tuned", dtype="auto")
        logits.append(model(torch.arange(20)[None]).logits)
    assert losses[0][-1] < losses[0][0] - 1
    # Different orders of sums, carried through six steps of AdamW.
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert (logits[1] - logits[0]).abs().max() < 1e-3
