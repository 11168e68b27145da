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


@pytest.mark.parametrize(
    ("options", "zero_stage"),
    [
        (("--accumulation", "2"), 1),
        (("--accumulation", "2"), 3),
        (("--lora-rank", "4", "--learning-rate", "1e-2"), 0),  # DeepSpeed's ZeRO 1 and 2 want a trainable expert
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
def test_trls_trainer_learns_the_same_as_without_expert_parallelism(tmp_path: Path) -> None:
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
