# SPDX-License-Identifier: Apache-2.0
"""Fine-tunes the small model of finetune_hf.py in one of several sites, with accelerate; README.md says how."""

import argparse
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DummyOptim
from deepspeed.accelerator import get_accelerator
from torch.utils.data import DataLoader
from transformers import default_data_collator

import ds_hybridep

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from finetune_hf import build_tiny, examples_of, join_ranks_on_cpus, read_text, windows_of

SEQ_LEN = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="train until this step; the same on all sites")
    args = parser.parse_args()
    if get_accelerator().device_name() == "cpu":
        join_ranks_on_cpus()
    accelerator = Accelerator()
    model, tokenizer = build_tiny(argparse.Namespace(seed=0, seq_len=SEQ_LEN, tiny_steps=30))
    # A site that was away joins the others in here, so the engine's counters are those of the whole training.
    engine, optimizer = accelerator.prepare(model, DummyOptim(model.parameters()))

    dataset = examples_of(windows_of(read_text(None), tokenizer, SEQ_LEN))
    rank, world_size = accelerator.process_index, accelerator.num_processes
    start = engine.global_samples // world_size
    site, rows = ds_hybridep.site(engine), engine.train_micro_batch_size_per_gpu()
    sampler = ds_hybridep.SiteSampler(dataset, site, rank, world_size, batch_size=rows, start=start)
    loader = DataLoader(dataset, rows, sampler=sampler, collate_fn=default_data_collator)
    while engine.global_steps < args.steps:
        for batch in loader:
            loss = engine(**{name: values.to(engine.device) for name, values in batch.items()}).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if engine.global_steps % 10 == 0:
                accelerator.print(f"step {engine.global_steps}  loss {loss.item():.4f}", flush=True)
            if engine.global_steps >= args.steps:
                break
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
