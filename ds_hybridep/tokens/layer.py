# SPDX-License-Identifier: Apache-2.0
"""The forward of one MoE layer over expert domains.

A token travels to the ranks that compute its experts, and comes back as one weighted sum per destination.

One exchange of a route looks like this (T=3 tokens, K=2, destinations A and B):

    topk_idx        token 0 -> experts of A, A      token 1 -> A, B      token 2 -> B, B
    rows sent       to A: [token 0, token 1]        to B: [token 1, token 2]
    comes back      one partial sum per row, added per token: out[1] = row (A, 1) + row (B, 1)

A token that needs several experts of one destination travels there once.  The backward sends the output gradient once
per row, and brings back one input-gradient row and K gate-weight gradients per row.

Rows that a token codec has rounded get the gradient of exact rows (straight through).  The gradients themselves, and
the sums that come back, travel unencoded.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.func import functional_call

from ds_hybridep.errors import NO_SECOND_DERIVATIVES, UnsupportedError
from ds_hybridep.experts.migration import MigrationManager
from ds_hybridep.kernels import Kernels, Routes
from ds_hybridep.sync.transaction import is_in_backward
from ds_hybridep.tokens.exchange import Exchange, combine, dispatch
from ds_hybridep.transport.channels import profiler_range

_computing = threading.local()


def computing_layer() -> str | None:
    """Return the layer whose experts run in this thread now, with replicas' weights in the graph; None if none."""
    name: str | None = getattr(_computing, "layer", None)
    return name


@dataclass
class LayerStats:
    """What one layer did on this rank since it was attached."""

    calls: int = 0
    module_calls: int = 0  # of the module that this belongs to; none of them may have come here
    rows_sent: int = 0  # to other ranks, in forward dispatches
    rows_computed: int = 0  # rows that experts processed here
    expert_rows: Counter[int] = field(default_factory=Counter)  # rows computed in training, by global expert
    plain_rows: int | Tensor = 0  # what plain EP would have sent to each rank of the group, [G] or one number for all
    was_recorded: bool = False  # the last forward that was not a recomputation built a graph


def note_call(layer: nn.Module, _inputs: Any, _output: Any) -> None:
    """Count a call of a layer's module: a hook, which also sees forwards that never come to `HybridMoE`."""
    if (hybrid := layer.__dict__.get("_hybridep")) is not None:  # else a copy of an attached layer
        hybrid.stats.module_calls += 1


def call_expert(expert: nn.Module, weights: dict[str, Tensor], rows: Tensor, _counts: Sequence[int]) -> Tensor:
    """Return the expert's output rows, [n, D] -> [n, D]; `weights` replace the module's parameters of these names."""
    # Four dimensions, as DeepSpeed calls its experts ([group, expert, capacity, hidden]).
    rows_4d = rows[None, None]
    output: Tensor | tuple[Tensor, ...] = functional_call(expert, weights, (rows_4d,)) if weights else expert(rows_4d)
    if isinstance(output, tuple):
        output = output[0]  # DeepSpeed's convention: (output, bias)
    return output.reshape(rows.shape)


@dataclass
class HeldExperts:
    """The experts that this rank computes in one layer; hot experts change it.

    by_slot: global experts, in the order of the replicas' slots.
    table: [E] int32, the place of each expert in that order, -1 for those that other ranks compute.
    """

    by_slot: Sequence[Sequence[int]]
    table: Tensor

    @classmethod
    def of(cls, by_slot: Sequence[Sequence[int]], num_experts: int, device: torch.device) -> "HeldExperts":
        table = torch.full((num_experts,), -1, dtype=torch.int32)
        experts = [expert for slot in by_slot for expert in slot]
        table[experts] = torch.arange(len(experts), dtype=torch.int32)
        return cls(by_slot, table.to(device))


@dataclass(frozen=True)
class HybridMoE:
    """Routed experts of one layer: dispatch, experts, combine."""

    name: str
    experts: tuple[nn.Module, ...]  # modules of this rank's e experts, one each or one for all
    num_local: int  # e
    exchanges: tuple[Exchange, ...]  # slowest level first; empty if all experts are in this rank's domain
    held: HeldExperts
    kernels: Kernels
    migration: MigrationManager | None = None  # None if every domain is one rank
    position: int = -1  # of this layer in `migration.layers`
    # Runs one of `experts`, with weights that replace its own, on rows ordered and counted by expert.
    call: Callable[[nn.Module, dict[str, Tensor], Tensor, Sequence[int]], Tensor] = call_expert
    weighs_inputs: bool = False  # gate weights multiply the experts' inputs instead of their outputs
    stats: LayerStats = field(default_factory=LayerStats)

    def forward(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        """Return the weighted sum of the routed experts' outputs, [T, D] -> [T, D]; arguments as for `dispatch`."""
        # Weights join the graph before the dispatch, so that the backward sends tokens first and gradients of experts
        # after them.  Their values may still be on their way.
        weights_by_slot = None if self.migration is None else self.migration.acquire(self.position)
        rows, states = x, []
        for exchange in self.exchanges:
            rows, topk_idx, topk_weights, state = dispatch(rows, topk_idx, topk_weights, exchange)
            states.append(state)
            self.stats.rows_sent += sum(state.send_splits) - state.send_splits[exchange.self_index]
        if self.migration is not None:
            self.migration.layers[self.position].finish_shipment()  # waits for the values
        partial_sums = self._compute(rows, topk_idx, topk_weights, weights_by_slot)
        for state in reversed(states):
            partial_sums = combine(partial_sums, state)
        self.stats.calls += 1
        return partial_sums

    def _compute(
        self,
        rows: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        weights_by_slot: list[list[dict[str, Tensor]]] | None,
    ) -> Tensor:
        """Run every expert of the domain on its rows, even on zero rows: all ranks must run the same operations.

        weights_by_slot: as `MigrationManager.acquire` returns them; None: the modules' own.
        """
        with profiler_range("experts", self.name):
            # 1. Order the rows by expert: each expert that is held is a destination.
            held = [expert for slot in self.held.by_slot for expert in slot]
            routes = self.kernels.plan_routes(topk_idx, self.held.table, len(held))
            splits = routes.rows_per_destination
            self.stats.rows_computed += sum(splits)
            # A re-entrant checkpoint runs its first forward without gradients.
            if not is_in_backward() and (torch.is_grad_enabled() or self.experts[0].training):
                self.stats.expert_rows.update(dict(zip(held, splits, strict=True)))
            expert_rows = permute_to_experts(rows, routes, self.kernels)
            if self.weighs_inputs:
                expert_rows = weigh_rows(expert_rows, topk_weights, routes)
                topk_weights = torch.ones_like(topk_weights)
            # 2. Split them by call.  A call is of one expert, or of all experts of a slot.  Counts, weights and rows
            #    of calls are all in the order of `by_slot`.
            is_grouped = len(self.experts) < self.num_local
            counts: list[tuple[int, ...]] = []
            for slot in self.held.by_slot:
                of_slot, splits = splits[: len(slot)], splits[len(slot) :]
                counts += [of_slot] if is_grouped else [(count,) for count in of_slot]
            if weights_by_slot is None:
                weights: list[dict[str, Tensor]] = [{} for _ in counts]
            else:
                weights = [one for slot in weights_by_slot for one in slot]
            chunks = expert_rows.split([sum(count) for count in counts])
            # 3. Compute, and add up what a row's experts return.
            outputs: list[Tensor] = []
            with self._computing_experts():
                for at, (chunk, count) in enumerate(zip(chunks, counts, strict=True)):
                    module = self.experts[at % len(self.experts)]  # its code, and for the own slot what is frozen
                    outputs.append(self.call(module, weights[at], chunk, count))
            output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)  # cat would copy a single one too
            return weighted_sum(output, topk_weights, routes, self.kernels)

    @contextmanager
    def _computing_experts(self) -> Iterator[None]:
        """Mark this thread while experts run with replicas' weights in the graph; see `computing_layer`."""
        outer = computing_layer()
        if self.migration is not None and torch.is_grad_enabled():
            _computing.layer = self.name
        try:
            yield
        finally:
            _computing.layer = outer

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """Copy or pickle this as None: a copied layer is a plain DeepSpeed layer, without channels and replicas."""
        return type(None), ()

    def count_plain_ep(self, rows: Tensor | int) -> None:
        """Count the rows to each rank, [G] or one number for all, of a dispatch of plain EP and of its combine."""
        if is_in_backward():
            # A recomputation.  A re-entrant one is the first to build a graph, so its backward is counted here.
            num_exchanges = 2 if self.stats.was_recorded else 4
        else:
            self.stats.was_recorded = torch.is_grad_enabled()
            num_exchanges = 4 if torch.is_grad_enabled() else 2
        self.stats.plain_rows = self.stats.plain_rows + num_exchanges * rows


# ---- a row among its experts ----


def permute_to_experts(rows: Tensor, routes: Routes, kernels: Kernels) -> Tensor:
    """Return rows ordered by expert, [R, D] -> [P, D]; a row appears once per expert that it goes to."""
    expert_rows: Tensor = _PermuteToExperts.apply(rows, routes, kernels)
    return expert_rows


def weighted_sum(expert_rows: Tensor, row_weights: Tensor, routes: Routes, kernels: Kernels) -> Tensor:
    """Return the gate-weighted sum of each row's expert outputs, [P, D] -> [R, D]; accumulates in fp32."""
    sums: Tensor = _WeightedSum.apply(expert_rows, row_weights, routes, kernels)
    return sums


def weigh_rows(expert_rows: Tensor, row_weights: Tensor, routes: Routes) -> Tensor:
    """Multiply rows ordered by expert by the gate weights of their experts, [P, D] -> [P, D]; products in fp32."""
    num_rows = expert_rows.shape[0]
    # Slots that were not routed write to one extra place, which is cut off.
    places = routes.slot_to_row.where(routes.slot_to_row >= 0, num_rows).flatten()
    weights = row_weights.new_zeros(num_rows + 1).scatter(0, places, row_weights.flatten())[:num_rows]
    return (expert_rows.float() * weights[:, None]).to(expert_rows.dtype)


class _PermuteToExperts(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, routes: Routes, kernels: Kernels) -> Tensor:
        ctx.routes, ctx.kernels = routes, kernels
        return kernels.dispatch_rows(rows.contiguous(), routes.first_slot_to_row, routes.num_rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():
            raise UnsupportedError(NO_SECOND_DERIVATIVES)
        return ctx.kernels.combine_rows(grad.contiguous(), ctx.routes.first_slot_to_row), None, None


class _WeightedSum(Function):
    @staticmethod
    def forward(ctx: Any, expert_rows: Tensor, row_weights: Tensor, routes: Routes, kernels: Kernels) -> Tensor:
        # Save them even with zero rows: non-re-entrant checkpointing counts saved tensors, and ranks must agree.
        ctx.save_for_backward(expert_rows, row_weights)
        ctx.routes, ctx.kernels = routes, kernels
        return kernels.combine_rows(expert_rows.contiguous(), routes.slot_to_row, row_weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        if torch.is_grad_enabled():
            raise UnsupportedError(NO_SECOND_DERIVATIVES)
        expert_rows, row_weights = ctx.saved_tensors
        grad_rows, grad_weights = ctx.kernels.combine_rows_backward(
            grad.contiguous(), expert_rows, ctx.routes.slot_to_row, row_weights
        )
        return grad_rows, grad_weights, None, None
