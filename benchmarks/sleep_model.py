# SPDX-License-Identifier: Apache-2.0
"""A model whose compute is sleep of known length: what is left of a step is communication and what hides it.

The shapes, the gate, the optimizer and all communication are real.  A dense sublayer sleeps a fixed time, an expert
a time per row that it is given (padding included, where a layer pads); backwards sleep twice as long.
"""

import argparse
import time
from typing import Any

import torch
from deepspeed.moe.layer import MoE
from torch import Tensor, nn
from torch.autograd import Function

VOCABULARY = 256


class _Dense(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grad, None


class _Expert(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, seconds_per_row: float, *weights: Tensor) -> Tensor:
        ctx.seconds = rows[..., 0].numel() * seconds_per_row
        ctx.weights = weights
        time.sleep(ctx.seconds)
        return rows * 0.5

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        time.sleep(2 * ctx.seconds)
        return grad * 0.5, None, *(torch.full_like(weight, 1e-6) for weight in ctx.weights)


class SleepingExpert(nn.Module):
    """The weights of a two-layer expert, and none of its arithmetic."""

    def __init__(self, hidden: int, seconds_per_row: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.seconds_per_row = seconds_per_row

    def forward(self, rows: Tensor) -> Tensor:
        return _Expert.apply(rows, self.seconds_per_row, *self.parameters())


class SleepModel(nn.Module):
    """Embedding, then layers of one sleeping dense sublayer and one MoE of sleeping experts; a loss that is real.

    Args:
        args: hidden, layers, experts, top_k, ep_size and capacity_factor as for a model that computes; dense_ms, the
            forward of a dense sublayer for one sequence, and row_us, that of an expert for one row.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, args.hidden)
        self.layers = nn.ModuleList(
            MoE(
                args.hidden,
                SleepingExpert(args.hidden, args.row_us * 1e-6),
                num_experts=args.experts,
                ep_size=args.ep_size,
                k=args.top_k,
                capacity_factor=args.capacity_factor,
                use_rts=False,
                top2_2nd_expert_sampling=False,
            )
            for _ in range(args.layers)
        )
        self.head = nn.Linear(args.hidden, VOCABULARY)
        self.dense_s = args.dense_ms * 1e-3

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and auxiliary loss of [B, S] int64 tokens and targets."""
        x = self.embedding(tokens)
        total_aux = x.new_zeros(())
        for layer in self.layers:
            y, aux, _ = layer(_Dense.apply(x, self.dense_s * tokens.shape[0]))
            x, total_aux = x + y, total_aux + aux
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), targets.flatten()), total_aux
