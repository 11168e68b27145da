# SPDX-License-Identifier: Apache-2.0
"""ms-swift trains with the two blocks as with DeepSpeed alone: `make test-clients`.

Its recipe for several GPUs, shortened, for a whole model and for adapters, on four ranks; transformers and peft read
the folders.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from clients import BLOCKS, NUM_RANKS, TrainingProgram, assert_same_weights, losses_of

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.dist, pytest.mark.timeout(7200)]

PROGRAM = TrainingProgram(
    name="swift",
    without_needs="ms-swift==4.6.0",
    packages=(
        "deepspeed==0.19.8", "transformers==5.19.0", "peft==0.20.0", "trl==0.29.1",
        "accelerate==1.12.0",  # newer ones treat each CPU rank as a job of its own
        "psutil", "rich", "pybind11", "ninja", "setuptools>=77",
    ),
)  # fmt: skip

# examples/train/multi-gpu/deepspeed/train_zero2.sh.
RECIPE = [
    "--dataset", "rows.json", "--per_device_train_batch_size", "1", "--learning_rate", "1e-3",
    "--gradient_accumulation_steps", "2", "--eval_steps", "3", "--save_steps", "3", "--logging_steps", "1",
    "--split_dataset_ratio", "0.125", "--max_steps", "6", "--max_length", "128", "--seed", "1",
    "--template", "qwen3_nothinking", "--use_hf", "true", "--add_version", "false",
]  # fmt: skip
ON_CPUS = ["--torch_dtype", "float32", "--fp16", "false", "--bf16", "false", "--dataloader_num_workers", "0"]
METHODS = {
    "full": ["--tuner_type", "full"],
    "lora": ["--tuner_type", "lora", "--lora_rank", "8", "--lora_alpha", "32"],
}


def trained(folder: Path, method: str, blocks: dict[str, Any]) -> Path:
    """The last checkpoint that the program wrote."""
    name = f"{method}-{'with' if blocks else 'without'}"
    (config,) = PROGRAM.folder.glob("lib/python3*/site-packages/swift/config/zero2.json")
    (folder / f"{name}.json").write_text(json.dumps(json.loads(config.read_text()) | blocks))
    where = ["--model", str(folder / "model"), "--deepspeed", f"{name}.json", "--output_dir", name]
    own = {"NPROC_PER_NODE": str(NUM_RANKS), "MODELSCOPE_CACHE": str(folder / "modelscope")}
    PROGRAM.run("swift", "sft", *where, *RECIPE, *METHODS[method], *ON_CPUS, folder=folder, **own)
    return folder / name / "checkpoint-6"


@pytest.mark.parametrize("method", sorted(METHODS))
def test_the_recipe_trains_and_saves_what_deepspeed_alone_does(tmp_path: Path, method: str) -> None:
    PROGRAM.make()
    PROGRAM.script("make", tmp_path)
    alone, with_blocks = trained(tmp_path, method, {}), trained(tmp_path, method, BLOCKS)
    losses = losses_of(with_blocks)
    assert len(losses) == 8
    assert losses == pytest.approx(losses_of(alone), rel=1e-5)
    is_whole = method == "full"
    assert_same_weights(with_blocks, alone, ["model.safetensors" if is_whole else "adapter_model.safetensors"])
    found, expected = (
        PROGRAM.logits(one) if is_whole else PROGRAM.logits(tmp_path / "model", one) for one in (with_blocks, alone)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
