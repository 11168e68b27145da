# SPDX-License-Identifier: Apache-2.0
"""A script that trains with Transformers' Trainer, in a site or alone; its argument is a JSON object.

Sequences of even numbers have labels for all tokens, those of odd numbers for two.  A site reads one kind.
"""

import json
import os
import sys

import deepspeed
import torch
import transformers
from accelerate import PartialState
from hf_models import build_hf_model, let_plain_autoep_work
from toy_model import ToyConfig

options = json.loads(sys.argv[1])
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
torch.set_num_threads(1)
os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
let_plain_autoep_work()
os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
PartialState(backend="gloo")  # else the Trainer, without an accelerator, treats each rank as a job of its own
toy = ToyConfig(ep_size=1, hidden=32, ffn=16)
model = build_hf_model("qwen3_moe", toy, seed=1)


def sequence(number: int) -> dict[str, list[int]]:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(toy.vocab, (toy.sequence,), generator=generator).tolist()
    labels = tokens if number % 2 == 0 else [-100] * (toy.sequence - 2) + tokens[-2:]
    return {"input_ids": tokens, "labels": labels}


class InOrder(transformers.Trainer):
    def _get_train_sampler(self, *_):
        return torch.utils.data.SequentialSampler(self.train_dataset)


rows, steps = options["rows"], options["steps"]
numbers = [4 * step + place for step in range(steps) for place in options["places"]]
config = {
    "train_micro_batch_size_per_gpu": rows,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "optimizer": {"type": "SGD", "params": {"lr": 0.002}},
    "steps_per_print": 10**9,
    "expert_parallel": {"enabled": True, "autoep_size": 1},
    **({"hybridep": options["block"]} if options["block"] else {}),
}
arguments = transformers.TrainingArguments(
    output_dir=options["out"], deepspeed=config, max_steps=steps, per_device_train_batch_size=rows,
    learning_rate=0.002, lr_scheduler_type="constant", save_strategy="no", report_to=[], use_cpu=True,
    disable_tqdm=True, max_grad_norm=0.0, accelerator_config={"use_configured_state": True},
    dataloader_pin_memory=False, logging_steps=1,
)  # fmt: skip
dataset = [sequence(number) for number in numbers]
trainer = InOrder(model, arguments, train_dataset=dataset, data_collator=transformers.default_data_collator)
trainer.train()
torch.save({name: one.detach().clone() for name, one in model.named_parameters()}, f"{options['out']}.pt")
trainer.deepspeed.destroy()
torch.distributed.destroy_process_group()
