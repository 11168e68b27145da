# SPDX-License-Identifier: Apache-2.0
"""axolotl trains with the two blocks as with DeepSpeed alone: `make test-clients`.

Its recipes of a tiny MoE model and of adapters of a large one, shortened, on four ranks; transformers and peft read
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
    name="axolotl",
    without_needs="axolotl==0.19.0",
    left_out=(
        "adlfs", "antlr4-python3-runtime", "fla-core", "flash-linear-attention", "gcsfs", "gradio", "hf_transfer",
        "hf_xet", "immutabledict", "langdetect", "lm_eval", "modal", "ocifs", "openenv-core", "s3fs", "tensorboard",
        "xformers", "zstandard",
    ),
    packages=(
        "deepspeed==0.19.8",
        "accelerate==1.12.0",  # newer ones treat each CPU rank as a job of its own
        "psutil", "rich", "pybind11", "ninja", "setuptools>=77",
    ),
)  # fmt: skip

# deepspeed_configs/zero1.json and zero3.json.
COMMON = {
    "bf16": {"enabled": "auto"},
    "fp16": {
        "enabled": "auto", "auto_cast": False, "loss_scale": 0, "initial_scale_power": 32, "loss_scale_window": 1000,
        "hysteresis": 2, "min_loss_scale": 1,
    },
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": False,
}  # fmt: skip
ADAMW = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
DS_CONFIGS: dict[int, dict[str, Any]] = {
    1: COMMON | {"zero_optimization": {"stage": 1, "overlap_comm": True}, "optimizer": ADAMW},
    3: COMMON | {
        "zero_optimization": {
            "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 0,
            "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
            "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0, "stage3_gather_16bit_weights_on_model_save": True,
        },
        "gradient_clipping": "auto",
    },
}  # fmt: skip

# examples/expert_parallel/baseline_tiny_fullft.yaml and baseline_lora.yaml: what both say, and what differs.
RECIPE = {
    "datasets": [{"path": "rows.json", "ds_type": "json", "type": "alpaca"}], "val_set_size": 0.125,
    "load_in_4bit": False, "load_in_8bit": False, "sequence_len": 256, "micro_batch_size": 1,
    "gradient_accumulation_steps": 2, "max_steps": 6, "optimizer": "adamw_torch", "lr_scheduler": "cosine",
    "learning_rate": 1e-3, "tf32": False, "gradient_checkpointing": False, "logging_steps": 1, "eval_steps": 3,
    "save_steps": 3, "seed": 1, "special_tokens": {"pad_token": "<|endoftext|>"},
}  # fmt: skip
ON_CPUS = {
    "bf16": False, "fp16": False, "attn_implementation": "sdpa", "sample_packing": False,
    "max_memory": {"cpu": "8GiB"},  # otherwise it puts the model of rank n on device n
}  # fmt: skip
# axolotl draws first adapters without a seed, so both runs begin with the same folder.
LORA = {
    "adapter": "lora", "lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.05, "lora_model_dir": "adapters",
    "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
}  # fmt: skip


def train(folder: Path, name: str, ds_config: dict[str, Any], **recipe: Any) -> Path:
    """The folder that the program writes."""
    (folder / f"{name}.json").write_text(json.dumps(ds_config))
    own = {"base_model": "model", "output_dir": name, "deepspeed": f"{name}.json", "dataset_prepared_path": "prepared"}
    (folder / f"{name}.yaml").write_text(json.dumps(RECIPE | ON_CPUS | own | recipe))  # JSON is YAML
    launcher = ["--launcher", "torchrun", "--", "--nproc_per_node", NUM_RANKS]
    settings = {"AXOLOTL_DO_NOT_TRACK": "1", "WANDB_MODE": "disabled"}
    PROGRAM.run("axolotl", "train", f"{name}.yaml", *launcher, folder=folder, **settings)
    return folder / name


@pytest.mark.parametrize(("method", "zero_stage"), [("full", 3), ("lora", 1)])
def test_the_recipe_trains_and_saves_what_deepspeed_alone_does(tmp_path: Path, method: str, zero_stage: int) -> None:
    PROGRAM.make()
    PROGRAM.script("make", tmp_path)
    PROGRAM.script("adapters", tmp_path, tmp_path / "adapters")
    is_whole, ds_config = method == "full", DS_CONFIGS[zero_stage]
    recipe = {} if is_whole else LORA
    alone = train(tmp_path, "alone", ds_config, **recipe)
    with_blocks = train(tmp_path, "blocks", ds_config | BLOCKS, **recipe)
    losses = losses_of(with_blocks / "checkpoint-6")
    assert len(losses) == 9
    assert losses == pytest.approx(losses_of(alone / "checkpoint-6"), rel=1e-5)
    file = "model.safetensors" if is_whole else "adapter_model.safetensors"
    assert_same_weights(with_blocks, alone, [file], within=1e-4 if is_whole else 1e-5)
    found, expected = (
        PROGRAM.logits(one) if is_whole else PROGRAM.logits(tmp_path / "model", one) for one in (with_blocks, alone)
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_below_zero_3_the_last_save_of_a_whole_model_is_refused_and_its_checkpoint_is_whole(tmp_path: Path) -> None:
    """There, axolotl calls `save_pretrained` on rank 0 alone, which has only its own experts."""
    PROGRAM.make()
    PROGRAM.script("make", tmp_path)
    with pytest.raises(AssertionError, match="would write the experts of one rank only"):
        train(tmp_path, "blocks", DS_CONFIGS[1] | BLOCKS)
    assert not (tmp_path / "blocks" / "model.safetensors").exists()
    assert torch.isfinite(PROGRAM.logits(tmp_path / "blocks" / "checkpoint-6")).all()
