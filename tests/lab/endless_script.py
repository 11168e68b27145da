# SPDX-License-Identifier: Apache-2.0
"""Trains a MoE layer over two ranks for ever: endless_script.py TIMEOUT_S FILE; the file appears after 3 steps."""

import sys
from pathlib import Path

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from torch import nn

import ds_hybridep

HIDDEN = 64
# Else DeepSpeed compiles an all-reduce over shared memory on the first use, for a minute (pool_preload.py says more).
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def main():
    deepspeed.init_distributed("gloo")
    layer = MoE(HIDDEN, nn.Linear(HIDDEN, HIDDEN), num_experts=2, ep_size=2, use_rts=False)
    config = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "SGD", "params": {"lr": 0.01}}}
    engine, *_ = deepspeed.initialize(model=layer, config=config)
    levels = [{"name": "dc", "size": 2, "domain_size": 2}]
    ds_hybridep.attach(engine, {"levels": levels, "timeout_s": float(sys.argv[1])})
    while True:
        engine.backward(engine(torch.randn(256, HIDDEN))[0].square().mean())
        engine.step()
        if engine.global_steps == 3:
            Path(sys.argv[2]).touch()


if __name__ == "__main__":
    main()
