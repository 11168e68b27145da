# SPDX-License-Identifier: Apache-2.0
"""LLaMA-Factory trains with the two blocks as with DeepSpeed alone: `make test-clients`.

Its recipes of whole models, adapters and reward models, shortened, on four ranks; transformers and peft read the
folders.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from clients import BLOCKS, NUM_RANKS, TrainingProgram, assert_same_weights, losses_of

pytestmark = [pytest.mark.clients, pytest.mark.slow, pytest.mark.dist, pytest.mark.timeout(7200)]

PROGRAM = TrainingProgram(
    name="llamafactory",
    without_needs="llamafactory==0.9.5",
    left_out=("torchaudio", "torchvision", "gradio"),
    packages=("deepspeed==0.19.8", "transformers==5.6.0", "psutil", "rich", "pybind11", "ninja", "setuptools>=77"),
    stand_ins=("torchaudio",),  # for sound only
)

# examples/deepspeed/ds_z2_config.json of LLaMA-Factory.
DS_CONFIG = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,
    "fp16": {
        "enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "bf16": {"enabled": "auto"},
    "zero_optimization": {
        "stage": 2, "allgather_partitions": True, "allgather_bucket_size": 5e8, "overlap_comm": False,
        "reduce_scatter": True, "reduce_bucket_size": 5e8, "contiguous_gradients": True,
        "round_robin_gradients": True,
    },
}  # fmt: skip
# examples/train_full/qwen3_full_sft.yaml, examples/train_lora/qwen3_lora_sft.yaml and qwen3_lora_reward.yaml: what
# differs, and what all say.
LORA = {"finetuning_type": "lora", "lora_rank": 8, "lora_target": "all"}
METHODS: dict[str, dict[str, Any]] = {
    "full": {"stage": "sft", "dataset": "rows", "finetuning_type": "full"},
    "lora": {"stage": "sft", "dataset": "rows", **LORA},
    "reward": {"stage": "rm", "dataset": "pairs", **LORA},
    # A head alone makes tiny gradients, and with its usual epsilon Adam makes large steps of their rounding.
    "reward-full": {"stage": "rm", "dataset": "pairs", "finetuning_type": "full", "adam_epsilon": 3e-3},
}
RECIPE = {
    "do_train": True, "template": "qwen3_nothink", "cutoff_len": 128,
    "logging_steps": 1, "save_steps": 4, "overwrite_output_dir": True, "save_only_model": False, "report_to": "none",
    "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "learning_rate": 1e-3, "max_steps": 6,
    "lr_scheduler_type": "cosine", "bf16": False, "val_size": 0.125, "eval_strategy": "steps", "eval_steps": 3,
    "seed": 1,
}  # fmt: skip
DATASETS = {
    "rows": {"file_name": "rows.json"},
    "pairs": {
        "file_name": "pairs.json",
        "ranking": True,
        "columns": {"prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected"},
    },
}


def trained(folder: Path, method: str, blocks: dict[str, Any]) -> Path:
    """The folder that the program wrote."""
    out = folder / f"{method}-{'with' if blocks else 'without'}"
    out.mkdir()
    (out / "ds_config.json").write_text(json.dumps(DS_CONFIG | blocks))
    recipe = RECIPE | METHODS[method] | {
        "model_name_or_path": str(folder / "model"), "dataset_dir": str(folder), "output_dir": str(out / "saved"),
        "deepspeed": str(out / "ds_config.json"),
    }  # fmt: skip
    (out / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    own = {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(NUM_RANKS)}
    PROGRAM.run("llamafactory-cli", "train", "recipe.yaml", folder=out, **own)
    return out / "saved"


@pytest.mark.parametrize("method", sorted(METHODS))
def test_the_recipe_trains_and_saves_what_deepspeed_alone_does(tmp_path: Path, method: str) -> None:
    PROGRAM.make()
    PROGRAM.script("make", tmp_path)
    (tmp_path / "dataset_info.json").write_text(json.dumps(DATASETS))
    alone, with_blocks = trained(tmp_path, method, {}), trained(tmp_path, method, BLOCKS)
    losses = losses_of(with_blocks)
    assert len(losses) == 8
    assert losses == pytest.approx(losses_of(alone), rel=1e-5)
    is_whole, is_reward = METHODS[method]["finetuning_type"] == "full", METHODS[method]["stage"] == "rm"
    file = "model.safetensors" if is_whole else "adapter_model.safetensors"
    files = [file, "value_head.safetensors"] if is_reward else [file]
    assert_same_weights(with_blocks, alone, files, within=1e-4 if is_reward else 1e-5)
    found, expected = (
        PROGRAM.logits(one) if is_whole else PROGRAM.logits(tmp_path / "model", one) for one in (with_blocks, alone)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
