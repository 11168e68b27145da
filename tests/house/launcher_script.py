# SPDX-License-Identifier: Apache-2.0
"""A user's training script that any launcher starts.  Nothing in it knows which one, or that ds_hybridep exists."""

import argparse
import json

import deepspeed
import deepspeed.comm as dist
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from torch import nn
from torch.nn import functional as F

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # see pool_preload.py

VOCABULARY, HIDDEN, SEQUENCE = 64, 16, 8


class Model(nn.Module):
    """Tokens [B, S] -> cross entropy of the next token."""

    def __init__(self, ep_size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        expert = nn.Sequential(nn.Linear(HIDDEN, 32), nn.GELU(), nn.Linear(32, HIDDEN))
        self.moe = MoE(HIDDEN, expert, num_experts=4, ep_size=ep_size, k=2, top2_2nd_expert_sampling=False)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens[:, :-1])
        x = x + self.moe(x)[0]
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens[:, 1:].flatten())


def batch(data: torch.Generator) -> torch.Tensor:
    tokens = torch.randint(VOCABULARY, (4, SEQUENCE + 1), generator=data)
    return tokens.to(get_accelerator().current_device_name())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1, help="given by deepspeed, not by others")
    args = deepspeed.add_config_arguments(parser).parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = Model(dist.get_world_size())
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    data = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(3):
        loss = engine(batch(data))
        engine.backward(loss)
        engine.step()
        dist.all_reduce(total := loss.detach().clone())
        losses.append(total.item() / dist.get_world_size())
    if dist.get_rank() == 0:
        print("losses", json.dumps(losses), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
