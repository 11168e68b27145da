# SPDX-License-Identifier: Apache-2.0
"""The way of a token: to the ranks that compute its experts, and back as one weighted sum per destination.

One exchange of a route looks like this (T=3 tokens, K=2, destinations A and B):

    topk_idx        token 0 -> experts of A, A      token 1 -> A, B      token 2 -> B, B
    rows sent       to A: [token 0, token 1]        to B: [token 1, token 2]
    comes back      one partial sum per row, added per token: out[1] = row (A, 1) + row (B, 1)

A token that needs several experts of one destination travels there once.  The backward sends the output gradient once
per row, and brings back one input-gradient row and K gate-weight gradients per row.

Rows that a token codec has rounded on their way have the gradient of rows that were not (straight through): the
gradients themselves, and the sums that come back, travel as they are.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ds_hybridep.kernels import Kernels, RoutePlan
from ds_hybridep.tokens.exchange import Exchange, dispatch_rows, swap


@dataclass(frozen=True)
class DispatchState:
    """What combine and the backward need to undo one exchange."""

    exchange: Exchange
    plan: RoutePlan
    send_splits: tuple[int, ...]  # rows to each destination
    recv_splits: tuple[int, ...]  # rows from each destination; the way back swaps the two

    def send(self, tensors: Sequence[Tensor], what: str) -> list[Tensor]:
        return swap(self.exchange, tensors, self.send_splits, self.recv_splits, what)

    def send_back(self, tensors: Sequence[Tensor], what: str) -> list[Tensor]:
        return swap(self.exchange, tensors, self.recv_splits, self.send_splits, what)


def dispatch(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor, exchange: Exchange
) -> tuple[Tensor, Tensor, Tensor, DispatchState]:
    """Rows that other ranks and this one send here, ordered by sender, then by the sender's token.

    Args:
        x: [T, D] tokens.
        topk_idx: [T, K] int32 global expert ids, -1 = dropped.
        topk_weights: [T, K] fp32 gate weights.

    Returns:
        rows [R, D] in x.dtype, row_topk_idx [R, K] int32 (only experts behind this rank, else -1), row_weights [R, K]
        fp32, and the state that `combine` takes.
    """
    plan = exchange.kernels.plan_routes(topk_idx, exchange.expert_to_destination, len(exchange.ranks))
    # The only device-to-host sync of the exchange: split sizes must be Python ints before it starts.
    send_splits = tuple(plan.rows_per_destination.tolist())
    with torch.no_grad():
        recv_splits, *arrived = dispatch_rows(exchange, plan, send_splits, x, topk_weights)
    state = DispatchState(exchange=exchange, plan=plan, send_splits=send_splits, recv_splits=recv_splits)
    rows, row_weights, row_topk_idx = _Dispatch.apply(x, topk_weights, arrived, state)
    return rows, row_topk_idx, row_weights, state


def combine(partial_sums: Tensor, state: DispatchState) -> Tensor:
    """Sum of each token's partial results, [R, D] -> [T, D]; accumulates in fp32, in destination order."""
    sums: Tensor = _Combine.apply(partial_sums, state)
    return sums


def permute_to_experts(rows: Tensor, plan: RoutePlan, kernels: Kernels) -> Tensor:
    """Rows ordered by expert, [R, D] -> [P, D]; a row appears once per expert that it goes to."""
    expert_rows: Tensor = _PermuteToExperts.apply(rows, plan, kernels)
    return expert_rows


def weighted_sum(expert_rows: Tensor, row_weights: Tensor, plan: RoutePlan, kernels: Kernels) -> Tensor:
    """Gate-weighted sum of each row's expert outputs, [P, D] -> [R, D]; accumulates in fp32."""
    sums: Tensor = _WeightedSum.apply(expert_rows, row_weights, plan, kernels)
    return sums


def weigh_rows(expert_rows: Tensor, row_weights: Tensor, plan: RoutePlan) -> Tensor:
    """Rows ordered by expert times the gate weights of their experts, [P, D] -> [P, D]; products in fp32."""
    num_rows = expert_rows.shape[0]
    # Slots that were not routed write to one place more, which is cut off.
    places = plan.slot_to_row.where(plan.slot_to_row >= 0, num_rows).flatten()
    weights = row_weights.new_zeros(num_rows + 1).scatter(0, places, row_weights.flatten())[:num_rows]
    return (expert_rows.float() * weights[:, None]).to(expert_rows.dtype)


class _Dispatch(Function):
    @staticmethod
    def forward(
        ctx: Any, _x: Tensor, _topk_weights: Tensor, arrived: list[Tensor], state: DispatchState
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What arrived, as a function of what was sent."""
        ctx.state = state
        metadata, rows = arrived
        row_topk_idx, row_weights = (part.contiguous() for part in metadata.chunk(2, dim=1))
        ctx.mark_non_differentiable(row_topk_idx)
        return rows, row_weights.view(torch.float32), row_topk_idx

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_rows: Tensor, grad_row_weights: Tensor, _: Tensor
    ) -> tuple[Tensor, Tensor, None, None]:
        state = ctx.state
        plan, kernels = state.plan, state.exchange.kernels
        grad_row_weights, grad_rows = state.send_back([grad_row_weights, grad_rows], "return of input gradients")
        grad_x = kernels.combine_rows(grad_rows, plan.first_slot_to_row)
        # Each slot (t, k) was served by one row; one row more takes the slots that were not routed.
        padded = torch.cat([grad_row_weights, grad_row_weights.new_zeros(1, grad_row_weights.shape[1])])
        slot_to_row = plan.slot_to_row.where(plan.slot_to_row >= 0, grad_row_weights.shape[0])
        return grad_x, padded.gather(0, slot_to_row), None, None


class _Combine(Function):
    @staticmethod
    def forward(ctx: Any, partial_sums: Tensor, state: DispatchState) -> Tensor:
        ctx.state = state
        (returned,) = state.send_back([partial_sums], "combine of rows")
        return state.exchange.kernels.combine_rows(returned, state.plan.first_slot_to_row)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        state = ctx.state
        grad_rows = state.exchange.kernels.dispatch_rows(grad.contiguous(), state.plan.row_to_token)
        (grad_partial_sums,) = state.send([grad_rows], "dispatch of output gradients")
        return grad_partial_sums, None


class _PermuteToExperts(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, plan: RoutePlan, kernels: Kernels) -> Tensor:
        ctx.plan, ctx.kernels = plan, kernels
        return kernels.dispatch_rows(rows.contiguous(), plan.row_to_token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.kernels.combine_rows(grad.contiguous(), ctx.plan.first_slot_to_row), None, None


class _WeightedSum(Function):
    @staticmethod
    def forward(ctx: Any, expert_rows: Tensor, row_weights: Tensor, plan: RoutePlan, kernels: Kernels) -> Tensor:
        # Saved whatever the row counts: non-re-entrant checkpointing counts saved tensors, and ranks must agree.
        ctx.save_for_backward(expert_rows, row_weights)
        ctx.plan, ctx.kernels = plan, kernels
        return kernels.combine_rows(expert_rows.contiguous(), plan.slot_to_row, row_weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        expert_rows, row_weights = ctx.saved_tensors
        grad_rows, grad_weights = ctx.kernels.combine_rows_backward(
            grad.contiguous(), expert_rows, ctx.plan.slot_to_row, row_weights
        )
        return grad_rows, grad_weights, None, None
