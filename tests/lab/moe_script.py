# SPDX-License-Identifier: Apache-2.0
"""What the test of the counters runs on each rank: MoE layers over 2x2 ranks, and nothing else that communicates.

    moe_script.py STEPS DC_DOMAIN_SIZE ...

Prints what this rank counted as one JSON document: for each domain size its levels.
"""

import json
import sys

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.moe.layer import MoE
from torch import nn

import ds_hybridep

HIDDEN, TOKENS = 256, 1024

# Else DeepSpeed compiles an all-reduce over shared memory on the first use, for a minute (pool_preload.py says more).
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


class Residual(nn.Module):
    def __init__(self, layers):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)[0]
        return x.square().mean()


def main():
    num_steps, *domain_sizes = (int(text) for text in sys.argv[1:])
    deepspeed.init_distributed("gloo")
    print(json.dumps([levels_after(num_steps, domain_size) for domain_size in domain_sizes]))


def levels_after(num_steps, domain_size):
    torch.manual_seed(dist.get_rank())
    expert = nn.Sequential(nn.Linear(HIDDEN, 2 * HIDDEN), nn.GELU(), nn.Linear(2 * HIDDEN, HIDDEN))
    layers = [MoE(HIDDEN, expert, num_experts=4, ep_size=4, k=2, use_rts=False) for _ in range(2)]
    for layer in layers:
        layer.deepspeed_moe.gate.requires_grad_(False)  # so that DeepSpeed has no gradient to sum
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.01}}}
    engine, *_ = deepspeed.initialize(model=Residual(layers), config=config)
    levels = [{"name": "dc", "size": 2, "domain_size": domain_size}, {"name": "gpu", "size": 2, "domain_size": 1}]
    ds_hybridep.attach(engine, {"levels": levels, "advanced": {"verify_interval": 0}, "report_interval": 0})
    for _ in range(num_steps):
        engine.backward(engine(torch.randn(TOKENS, HIDDEN)))
        engine.step()
    with torch.no_grad():
        engine(torch.randn(TOKENS, HIDDEN))  # takes what the last step has sent: it counts when it is taken
    dist.barrier()
    return ds_hybridep.stats(engine)["levels"]


if __name__ == "__main__":
    main()
