# SPDX-License-Identifier: Apache-2.0
"""The forward of one MoE layer over expert domains."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ds_hybridep.experts.migration import MigrationManager
from ds_hybridep.kernels import Kernels
from ds_hybridep.tokens.dispatch import DispatchState, combine, dispatch, permute_to_experts, weigh_rows, weighted_sum
from ds_hybridep.tokens.exchange import Exchange
from ds_hybridep.transport.channels import profiler_range

_computing = threading.local()


def computing_layer() -> str | None:
    """The layer whose experts run in this thread now with weights of replicas in autograd; None for no layer."""
    name: str | None = getattr(_computing, "layer", None)
    return name


@dataclass
class LayerStats:
    """What one layer did on this rank since it was attached."""

    calls: int = 0
    rows_sent: int = 0  # to other ranks, in forward dispatches
    rows_computed: int = 0  # rows that experts processed here
    expert_rows: Counter[int] = field(default_factory=Counter)  # the same by global expert
    plain_rows: int | Tensor = 0  # that plain EP would have sent to each rank of the group, [G] or one number for all
    was_recorded: bool = False  # the last forward that was no recomputation entered autograd


def call_expert(expert: nn.Module, weights: dict[str, Tensor], rows: Tensor, _counts: Sequence[int]) -> Tensor:
    """The expert's output rows, [n, D] -> [n, D]; `weights` replace the module's own parameters of those names."""
    # Four dimensions, as DeepSpeed calls its experts ([group, expert, capacity, hidden]).
    rows_4d = rows[None, None]
    output: Tensor | tuple[Tensor, ...] = functional_call(expert, weights, (rows_4d,)) if weights else expert(rows_4d)
    if isinstance(output, tuple):
        output = output[0]  # DeepSpeed's convention: (output, bias)
    return output.reshape(rows.shape)


@dataclass(frozen=True)
class HybridMoE:
    """Routed experts of one layer: dispatch, experts, combine."""

    name: str
    experts: tuple[nn.Module, ...]  # with the e experts owned by this rank, one each or one for all
    num_local: int  # e
    exchanges: tuple[Exchange, ...]  # slowest level first; empty where all experts are in this rank's domain
    expert_to_slot: Tensor  # [E] int32, slot * e + local index of each expert of this rank's domain, else -1
    num_slots: int  # M
    kernels: Kernels
    domain_experts: tuple[int, ...] = ()  # global experts of this rank's domain, in the order of slots
    migration: MigrationManager | None = None  # None where every domain is one rank
    position: int = -1  # of this layer's store in `migration`
    # Runs one of `experts`, with weights that replace its own, on rows ordered and counted by expert.
    call: Callable[[nn.Module, dict[str, Tensor], Tensor, Sequence[int]], Tensor] = call_expert
    weighs_inputs: bool = False  # gate weights multiply the experts' inputs; otherwise their outputs
    stats: LayerStats = field(default_factory=LayerStats)

    def forward(self, x: Tensor, topk_idx: Tensor, topk_weights: Tensor) -> Tensor:
        """Weighted sum of the routed experts' outputs, [T, D] -> [T, D]; arguments as for `dispatch`."""
        # Acquired before the dispatch, so that in the backward tokens go first and expert gradients after them.
        replicas = self.migration.acquire(self.position) if self.migration is not None else None
        rows, row_idx, row_weights, states = self._dispatch(x, topk_idx, topk_weights)
        partial_sums = self._compute(rows, row_idx, row_weights, replicas)
        for state in reversed(states):
            partial_sums = combine(partial_sums, state)
        self.stats.calls += 1
        return partial_sums

    def _dispatch(
        self, rows: Tensor, row_idx: Tensor, row_weights: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, list[DispatchState]]:
        states = []
        for exchange in self.exchanges:
            rows, row_idx, row_weights, state = dispatch(rows, row_idx, row_weights, exchange)
            states.append(state)
            self.stats.rows_sent += sum(state.send_splits) - state.send_splits[exchange.self_index]
        return rows, row_idx, row_weights, states

    def _compute(
        self, rows: Tensor, row_idx: Tensor, row_weights: Tensor, replicas: list[list[dict[str, Tensor]]] | None
    ) -> Tensor:
        """Every expert of the domain on its rows, with zero rows too: all ranks must run the same operations."""
        if self.migration is not None:
            self.migration.wait_for_weights(self.position)
        with profiler_range("experts", self.name):
            plan = self.kernels.plan_routes(row_idx, self.expert_to_slot, self.num_slots * self.num_local)
            splits = plan.rows_per_destination.tolist()
            self.stats.rows_computed += sum(splits)
            self.stats.expert_rows.update(dict(zip(self.domain_experts, splits, strict=False)))
            expert_rows = permute_to_experts(rows, plan, self.kernels)
            if self.weighs_inputs:
                expert_rows = weigh_rows(expert_rows, row_weights, plan)
                row_weights = torch.ones_like(row_weights)
            # Rows of one module after the other: an expert each, or all experts of a slot.
            per_module = self.num_local // len(self.experts)
            counts = [splits[first : first + per_module] for first in range(0, len(splits), per_module)]
            chunks = expert_rows.split([sum(count) for count in counts])
            outputs: list[Tensor] = []
            with self._computing_experts():
                for slot in range(self.num_slots):
                    for module_idx, module in enumerate(self.experts):
                        weights = replicas[slot][module_idx] if replicas is not None else {}
                        outputs.append(self.call(module, weights, chunks[len(outputs)], counts[len(outputs)]))
            partial_sums = weighted_sum(torch.cat(outputs), row_weights, plan, self.kernels)
        return partial_sums if self.migration is None else self.migration.watch_backward(self.position, partial_sums)

    @contextmanager
    def _computing_experts(self) -> Iterator[None]:
        """Mark this thread where weights of replicas enter autograd; see `computing_layer`."""
        outer = computing_layer()
        if self.migration is not None and torch.is_grad_enabled():
            _computing.layer = self.name
        try:
            yield
        finally:
            _computing.layer = outer

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """A copied or pickled layer is a plain DeepSpeed layer: channels and replicas belong to this one alone."""
        return type(None), ()

    def count_plain_ep(self, rows: Tensor | int) -> None:
        """Note the rows to each rank, [G] or one number for all, of a dispatch of plain EP, and of its combine."""
        if torch._C._current_graph_task_id() != -1:  # inside a running backward
            # A recomputation; a re-entrant one is the first to enter autograd, so its backward is counted here.
            num_exchanges = 2 if self.stats.was_recorded else 4
        else:
            self.stats.was_recorded = torch.is_grad_enabled()
            num_exchanges = 4 if torch.is_grad_enabled() else 2
        self.stats.plain_rows = self.stats.plain_rows + num_exchanges * rows


def expert_to_slot(domain_experts: Sequence[int], num_experts: int, device: torch.device) -> Tensor:
    """[E] int32: index of each expert in `domain_experts`, -1 for experts of other domains."""
    table = torch.full((num_experts,), -1, dtype=torch.int32)
    table[list(domain_experts)] = torch.arange(len(domain_experts), dtype=torch.int32)
    return table.to(device)
