# SPDX-License-Identifier: Apache-2.0
"""A user's script that fine-tunes a small random Mixtral with trl's SFTTrainer; the ds_config alone has the block."""

import json
import os

import torch
from accelerate import PartialState
from datasets import Dataset
from deepspeed.ops import __compatible_ops__
from transformers import ByT5Tokenizer, MixtralConfig, MixtralForCausalLM
from trl import SFTConfig, SFTTrainer

__compatible_ops__["deepspeed_shm_comm"] = False  # see pool_preload.py

# On CPUs; otherwise each rank would be a job of its own.
os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
PartialState(backend="gloo")
arguments = SFTConfig(
    output_dir="tuned",
    deepspeed="ds_config.json",
    max_steps=6,
    per_device_train_batch_size=4,
    learning_rate=1e-2,
    lr_scheduler_type="constant",
    max_length=32,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    bf16=False,
    gradient_checkpointing=False,
    router_aux_loss_coef=0.0,  # transformers before 5.6 makes it of probabilities, not of logits
    accelerator_config={"use_configured_state": True},
    dataloader_pin_memory=False,
    disable_tqdm=True,
)
tokenizer = ByT5Tokenizer(extra_ids=0)
torch.manual_seed(0)
model = MixtralForCausalLM(
    MixtralConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        use_cache=False,
    )
)
pairs = [{"prompt": f"{one} plus {two} is ", "completion": f"{one + two}."} for one in range(10) for two in range(10)]
trainer = SFTTrainer(model=model, args=arguments, train_dataset=Dataset.from_list(pairs), processing_class=tokenizer)
trainer.train()
trainer.save_state()
trainer.save_model()
if trainer.is_world_process_zero():
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print("losses", json.dumps(losses), flush=True)
torch.distributed.destroy_process_group()
