# SPDX-License-Identifier: Apache-2.0
"""Trains the small model of train_lm.py in one of several sites; README.md in this folder says how.

What differs from a script without sites: the site's share of the data, and the step at which the loop begins.
"""

import argparse
import sys
from pathlib import Path

import deepspeed
import deepspeed.comm as dist
import torch

import ds_hybridep

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from train_lm import AUX_LOSS_WEIGHT, ByteModel, read_corpus

SEQ_LEN = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    parser.add_argument("--steps", type=int, default=100, help="train until this step; the same on all sites")
    parser.add_argument(
        "--save", type=Path, help="folder of this site for checkpoints; it goes on from the newest one"
    )
    parser.add_argument("--save-interval", type=int, default=50, help="steps between checkpoints")
    args = deepspeed.add_config_arguments(parser).parse_args()
    deepspeed.init_distributed()
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    shape = {"layers": 2, "hidden": 64, "experts": 4, "top_k": 2, "capacity_factor": 1.5, "seq_len": SEQ_LEN}
    model = ByteModel(argparse.Namespace(**shape, ep_size=world_size))
    # A site that was away joins the others in here, so the engine's counters are those of the whole training.
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())

    if args.save and args.save.is_dir():
        engine.load_checkpoint(str(args.save))  # where the others have a newer state, it keeps that one

    corpus, _ = read_corpus()
    windows = corpus[: len(corpus) // (SEQ_LEN + 1) * (SEQ_LEN + 1)].view(-1, SEQ_LEN + 1)
    start = engine.global_samples // world_size
    rows = engine.train_micro_batch_size_per_gpu()
    sampler = ds_hybridep.SiteSampler(
        windows, ds_hybridep.site(engine), rank, world_size, batch_size=rows, start=start
    )
    while engine.global_steps < args.steps:
        for window in torch.utils.data.DataLoader(windows, rows, sampler=sampler):
            batch = window.long().to(engine.device)
            loss, aux_loss = engine(batch[:, :-1], batch[:, 1:])
            engine.backward(loss + AUX_LOSS_WEIGHT * aux_loss)
            engine.step()
            if rank == 0 and engine.global_steps % 10 == 0:
                present = ", ".join(ds_hybridep.site(engine).present)
                print(f"step {engine.global_steps}  loss {loss.item():.4f}  present: {present}", flush=True)
            if args.save and engine.global_steps % args.save_interval == 0:
                engine.save_checkpoint(str(args.save))
            if engine.global_steps >= args.steps:
                break
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
