# SPDX-License-Identifier: Apache-2.0
"""A user's training script: DeepSpeed and a small MoE model, and not a word about ds_hybridep but for its logger.

Any launcher starts it, on two ranks.
"""

import argparse
import json
import logging

import deepspeed
import deepspeed.comm as dist
import torch
from toy_model import ToyConfig, batch, build_model

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # see pool_preload.py

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1, help="given by deepspeed, not by others")
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--logging", choices=("untouched", "configured", "silenced"), default="untouched")
args = deepspeed.add_config_arguments(parser).parse_args()

if args.logging == "configured":
    logging.basicConfig(format="at %(levelname)s of %(name)s: %(message)s")
elif args.logging == "silenced":
    logging.getLogger("ds_hybridep").setLevel(logging.WARNING)

torch.set_num_threads(1)
deepspeed.init_distributed("gloo")
rank, toy = dist.get_rank(), ToyConfig(ep_size=2)
model = build_model(toy, rank=rank, world_size=2, data_before_expert=False, seed=1)
engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
losses = []
for step in range(args.steps):
    loss = engine(*batch(toy, seed=1, step=step, micro_step=0, rank=rank, num_sequences=2))
    engine.backward(loss)
    engine.step()
    dist.all_reduce(total := loss.detach().clone())
    losses.append(total.item() / 2)
print(f"rank {rank} has finished")
if rank == 0:
    print("losses", json.dumps(losses), flush=True)
dist.destroy_process_group()  # else torch's threads may still run as the process ends, which then aborts
