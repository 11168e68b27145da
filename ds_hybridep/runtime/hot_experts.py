# SPDX-License-Identifier: Apache-2.0
"""Chooses the hot experts of a plan's layers by loads that all ranks know.

The backward of a step begins: every rank sends the rows that it has computed in the step, by expert.
The step ends: all ranks add them up and choose the same experts, whose weights leave with all others.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_hybridep.adaptive.meter import memory_left, ranks_on_host
from ds_hybridep.adaptive.probe import LinkProbe
from ds_hybridep.adaptive.rates import expert_params, measure_experts
from ds_hybridep.config import AUTO, HybridEPConfig
from ds_hybridep.experts.migration import LayerExperts
from ds_hybridep.experts.replicas import parts_of_hot
from ds_hybridep.geometry.hot import ROWS_ONLY, HotCosts, choose_hot, rank_loads
from ds_hybridep.geometry.packets import COMPACT_BYTES
from ds_hybridep.geometry.token_route import build_route
from ds_hybridep.runtime.build import PlannedLayer
from ds_hybridep.runtime.log import warn_once
from ds_hybridep.sync.messages import MessageLayout, PacketPart
from ds_hybridep.sync.stages import HotSlot
from ds_hybridep.sync.undelivered import Undelivered, collect
from ds_hybridep.tokens.layer import HeldExperts, HybridMoE
from ds_hybridep.transport.channels import Purpose, Transfer, Transport

SMOOTHING = 0.25  # share of the newest step in the smoothed loads
CHANGE = 0.05  # share of the rows that must go to other experts, beside what is chance, to forget earlier steps
MEMORY_SHARE = 1 / 8  # of the free memory, if the user gives no limit
PROBE_LIMIT_S = 1.0  # for measuring the link of the level


class HotLayer:
    """The hot experts of one layer."""

    def __init__(self, layer: HybridMoE, planned: PlannedLayer, rank: int) -> None:
        assert layer.migration is not None
        assert planned.hot_level is not None
        self.layer, self.spec, self.partition = layer, planned.spec, planned.partition
        self.experts: LayerExperts = layer.migration.layers[layer.position]
        self.loads: list[float] = []  # smoothed rows per step, by expert; empty before the first counts
        self._counted = [0] * planned.spec.num_experts
        of_hot, level = planned.of_hot, planned.hot_level
        self.num_ranks = self.partition.spans[level]
        positions = [self.partition.position_of(owner)[level] for owner in self.spec.group_ranks]
        self._owners = [position for position in positions for _ in range(self.spec.num_local)]
        domains = [of_hot.domain_index(owner) for owner in self.spec.group_ranks]
        self._domains = [
            [expert for expert in range(self.spec.num_experts) if domains[expert // self.spec.num_local] == domain]
            for domain in range(of_hot.num_domains)
        ]
        self._own_domain = of_hot.domain_index(rank)
        self.choices: list[tuple[int, ...]] = [() for _ in self._domains]
        self.num_changes = 0
        # Where rows of an expert go: by exchange, if the expert is not hot, and if it is.
        assert planned.exchange is not None
        route = {stage.level: stage for stage in build_route(of_hot, rank, self.spec.num_experts, planned.exchange)}
        self._tables: list[tuple[Tensor, Tensor]] = []
        levels = [None] if planned.exchange == "direct" else [
            at for at, count in enumerate(self.partition.domain_counts) if count > 1
        ]  # fmt: skip
        for exchange, at in zip(layer.exchanges, levels, strict=True):
            hot = [exchange.self_index] * self.spec.num_experts
            if (stage := route.get(at)) is not None:
                hot = [exchange.ranks.index(stage.ranks[to]) for to in stage.expert_to_destination]
            self._tables.append((exchange.expert_to_destination.cpu(), torch.tensor(hot, dtype=torch.int32)))

    @property
    def expert_bytes(self) -> int:
        """Bytes on the device of the replica of one expert, with its gradients and what codecs leave out of them."""
        replicas = self.experts.replicas
        layout = replicas.layout
        weights = sum(block.num_elements * block.dtype.itemsize for block in layout.blocks)
        left_out = 0 if replicas.encoding.is_on_host else sum(
            block.num_elements * (COMPACT_BYTES if block.dtype.itemsize == 2 else 4)
            for block in (layout.trainable_blocks if self._parts_of_one else ())
        )  # fmt: skip
        return weights + layout.sum_bytes // layout.num_local + math.ceil(left_out)

    @property
    def travel_bytes(self) -> int:
        """Bytes of the weights of one expert to one other rank, and of its gradients back."""
        replicas = self.experts.replicas
        assert replicas.hot_level is not None
        weights = sum(block.num_elements * block.dtype.itemsize for block in replicas.layout.trainable_blocks)
        codec = replicas.encoding.gradient_codecs[replicas.hot_level]
        return weights + (weights if codec is None else MessageLayout(codec, self._parts_of_one).num_bytes)

    @property
    def _parts_of_one(self) -> tuple[PacketPart, ...]:
        """The parts of one expert in messages of gradients; empty if these go as they are."""
        replicas = self.experts.replicas
        return parts_of_hot(replicas, replicas.expert_ids(0)[:1]).get(HotSlot(0), ())

    def take_counts(self) -> list[int]:
        """Return the rows of each expert that this rank has computed since the last call."""
        rows = self.layer.stats.expert_rows
        now = [rows[expert] for expert in range(self.spec.num_experts)]
        counts = [count - before for count, before in zip(now, self._counted, strict=True)]
        self._counted = now
        return counts

    def add_counts(self, counts: Sequence[float]) -> None:
        """Smooth the loads with the rows of a step, summed over all ranks; after a sudden change only they count."""
        total = sum(counts)
        if total == 0:
            return
        share = sum(self.loads) / total
        moved = sum(abs(load - share * count) for load, count in zip(self.loads, counts, strict=False)) / 2
        by_chance = math.sqrt(len(counts) / total)
        if not self.loads or moved > (CHANGE + by_chance) * sum(self.loads):
            self.loads = list(counts)
        else:
            pairs = zip(self.loads, counts, strict=True)
            self.loads = [(1 - SMOOTHING) * load + SMOOTHING * count for load, count in pairs]

    def choose(self, limit: int, costs: HotCosts) -> list[tuple[int, ...]]:
        """Return the choice for each domain of hot experts; equal on all ranks."""
        return [
            tuple(experts[at] for at in choose_hot(
                [self.loads[expert] / self.partition.domain_size for expert in experts],
                [self._owners[expert] for expert in experts],
                self.num_ranks, limit, costs=costs, current=[experts.index(one) for one in current],
            ))
            for experts, current in zip(self._domains, self.choices, strict=True)
        ]  # fmt: skip

    def hand_over(
        self, earlier: Sequence[Sequence[int]], later: Sequence[Sequence[int]], transport: Transport
    ) -> Callable[[], list[Undelivered]]:
        """Send what codecs left out of experts that are hot no more; as `collect`, with nothing under way."""
        replicas = self.experts.replicas
        parts = parts_of_hot(replicas, set(earlier[self._own_domain]) - set(later[self._own_domain]))
        if replicas.codecs is None or not any(parts.values()):
            return list
        return collect(replicas, replicas.domain_ranks, transport, transport.world_size, parts=parts)

    def apply(self, choices: Sequence[tuple[int, ...]]) -> None:
        """Replace the hot experts, and send rows accordingly.  Their weights must be shipped next."""
        if list(choices) == self.choices:
            return
        if choices[self._own_domain] != self.choices[self._own_domain]:
            self.experts.choose_hot(choices[self._own_domain])
            replicas, layer = self.experts.replicas, self.layer
            assert replicas.hot is not None
            by_slot: list[Sequence[int]] = [replicas.expert_ids(slot) for slot in replicas.near_slots]
            by_slot += [replicas.hot.experts_in(slot) for slot in replicas.hot.slots]
            made = HeldExperts.of(by_slot, self.spec.num_experts, replicas.device)
            layer.held.by_slot, layer.held.table = made.by_slot, made.table
        self.choices, self.num_changes = list(choices), self.num_changes + 1
        hot = [expert for choice in choices for expert in choice]
        for exchange, (cold_table, hot_table) in zip(self.layer.exchanges, self._tables, strict=True):
            table = cold_table.clone()
            table[hot] = hot_table[hot]
            exchange.expert_to_destination = table.to(exchange.expert_to_destination.device)

    def report(self) -> dict[str, Any]:
        """Return the hot experts, the changes so far, and the load of the fullest rank without and with them.

        "load_before" and "load_after" are its rows over the mean, "rows_before" and "rows_after" its rows per step, to
        which its memory of activations is proportional; all None before the first step.
        """
        hot = sorted(expert for choice in self.choices for expert in choice)
        record: dict[str, Any] = {"hot_experts": hot, "hot_changes": self.num_changes}
        mean = sum(self.loads) / (self.num_ranks * len(self._domains))
        for name, choices in (("before", [()] * len(self._domains)), ("after", self.choices)):
            rows = max(map(self._fullest, self._domains, choices)) if self.loads else None
            record[f"load_{name}"] = None if rows is None else rows / mean
            record[f"rows_{name}"] = None if rows is None else rows / self.partition.domain_size
        return record

    def _fullest(self, experts: Sequence[int], hot: Sequence[int]) -> float:
        """Return the rows of the fullest rank of a domain of hot experts."""
        loads, owners = [self.loads[one] for one in experts], [self._owners[one] for one in experts]
        return max(rank_loads(loads, owners, self.num_ranks, [experts.index(one) for one in hot]))


class HotExperts:
    """The hot experts of all layers of one plan; all ranks must make the same calls.

    layers: each as it runs and as it was planned.
    """

    def __init__(
        self, config: HybridEPConfig, transport: Transport, layers: Sequence[tuple[HybridMoE, PlannedLayer]]
    ) -> None:
        self._config, self._transport = config, transport
        self.layers = {
            layer.name: HotLayer(layer, planned, transport.rank)
            for layer, planned in layers
            if planned.hot_level is not None
        }
        self._hot = next((planned.plan.hot for _, planned in layers if planned.plan.hot is not None), None)
        self._groups: dict[tuple[int, ...], list[HotLayer]] = {}
        for one in self.layers.values():
            self._groups.setdefault(one.spec.group_ranks, []).append(one)
        self._limit_and_costs: tuple[int, HotCosts] | None = None  # measured after the first step
        self._under_way: list[tuple[Transfer, dict[int, Tensor], list[HotLayer]]] = []

    def send_counts(self) -> None:
        """Call in each step once its forwards have ended; later calls in the step do nothing.  Does not block."""
        if not self._under_way:
            for ranks, layers in self._groups.items():
                self._send(ranks, layers)

    def after_step(self, *, was_applied: bool) -> list[Undelivered]:
        """Call after each optimizer step, before weights are shipped; an applied one may change the hot experts.

        Returns what codecs left out of this rank's experts that are hot no more.
        """
        self.send_counts()
        self._take()
        if not was_applied:
            return []
        if self._limit_and_costs is None:
            self._limit_and_costs = self._measure()
        changes = [(one, one.choose(*self._limit_and_costs)) for one in self.layers.values() if one.loads]
        handed = [one.hand_over(one.choices, choices, self._transport) for one, choices in changes]
        for one, choices in changes:
            one.apply(choices)
        return [record for finish in handed for record in finish()]

    # -- loads ------------------------------------------------------------------------------------------------------

    def _channel(self, ranks: tuple[int, ...]) -> Any:
        return self._transport.channel("loads", ranks, background=True)

    def _send(self, ranks: tuple[int, ...], layers: list[HotLayer]) -> None:
        own = torch.tensor([count for one in layers for count in one.take_counts()], dtype=torch.float64)
        counts = {rank: own if rank == self._transport.rank else torch.empty_like(own) for rank in ranks}
        others = [rank for rank in ranks if rank != self._transport.rank]
        purpose = Purpose("control", "loads of experts")
        sends, receives = [(rank, own) for rank in others], [(rank, counts[rank]) for rank in others]
        self._under_way.append((self._channel(ranks).start(sends, receives, purpose), counts, layers))

    def _take(self) -> None:
        for transfer, counts, layers in self._under_way:
            transfer.wait()
            total = torch.stack([counts[rank] for rank in sorted(counts)]).sum(0).tolist()
            for one in layers:
                one.add_counts(total[: one.spec.num_experts])
                del total[: one.spec.num_experts]
        self._under_way = []

    # -- what hot experts cost --------------------------------------------------------------------------------------

    def _limit(self) -> int | None:
        """Return the most hot experts of a layer by the settings; None if the free memory is to say it."""
        assert self._hot is not None
        at, wanted = self._hot.level, self._hot.most
        gigabytes = self._config.levels[at].hot_memory_gb
        if gigabytes is None:
            return None if wanted == AUTO else int(wanted)
        fitting = math.floor(gigabytes * 1e9 / self._bytes_of_one)
        if wanted == AUTO or fitting >= int(wanted):
            return fitting if wanted == AUTO else int(wanted)
        warn_once(
            f"hybridep.levels[{at}].hot_experts is {wanted}, but hot_memory_gb {gigabytes} has room for {fitting} in "
            f"each layer ({self._bytes_of_one / 1e9:.3g} GB for one in all {len(self.layers)} layers)"
        )
        return fitting

    @property
    def _bytes_of_one(self) -> int:
        """Bytes of one hot expert in every layer."""
        return sum(one.expert_bytes for one in self.layers.values())

    def _measure(self) -> tuple[int, HotCosts]:
        """Return the most hot experts of a layer, and what decides whether they pay."""
        assert self._hot is not None
        at, limit, spec = self._hot.level, self._limit(), next(iter(self.layers.values())).spec
        if self._hot.most != AUTO:
            assert limit is not None
            return limit, ROWS_ONLY
        probe = LinkProbe(self._transport, spec.sample.device)
        cluster = probe.cluster
        if cluster.levels[at].link.bandwidth_bytes_per_s is None:
            measured = probe.measure(at, limit_s=PROBE_LIMIT_S)
            cluster = type(cluster)((*cluster.levels[:at], measured, *cluster.levels[at + 1 :]))
        rates = measure_experts(spec, probe, cluster)
        if limit is None:
            free_bytes, _ = memory_left(spec.sample.device, ranks_on_host(probe))
            left = min(row[0] for row in probe.table([free_bytes]))
            limit = math.floor(MEMORY_SHARE * left / self._bytes_of_one)
        rate = (cluster.levels[at].link.bandwidth_bytes_per_s or math.inf) / cluster.ranks_below[at]
        travels = next(iter(self.layers.values())).travel_bytes * rates.wire_factor
        return limit, HotCosts(row_s=6.0 * expert_params(spec) / rates.flops_per_s, copy_s=travels / rate)

    # -- other plans, checkpoints -----------------------------------------------------------------------------------

    def follow(self, earlier: "HotExperts") -> None:
        """Go on with what an earlier plan has measured."""
        hot, levels = self._hot, self._config.levels
        if hot is not None and hot == earlier._hot and levels[hot.level] == earlier._config.levels[hot.level]:
            self._limit_and_costs = earlier._limit_and_costs
        for name, one in self.layers.items():
            if name in earlier.layers:
                one.loads = list(earlier.layers[name].loads)
            one.take_counts()

    def state_dict(self) -> dict[str, Any]:
        """Return the choice and what it rests on, between two steps."""
        costs = self._limit_and_costs
        return {
            "costs": None if costs is None else [costs[0], costs[1].row_s, costs[1].copy_s],
            "layers": {
                name: {"loads": list(one.loads), "choices": [list(choice) for choice in one.choices]}
                for name, one in self.layers.items()
            },
        }

    def load_state_dict(self, saved: Mapping[str, Any], *, keeps_choice: bool = False) -> None:
        """Restore what `state_dict` returned under the same plan, with nothing under way and before weights leave.

        keeps_choice: keep the present hot experts.
        """
        for transfer, _, _ in self._under_way:  # counts of before the load
            transfer.wait()
        self._under_way = []
        if saved["costs"] is not None:
            limit, row_s, copy_s = saved["costs"]
            by_settings = self._limit()
            most = int(limit) if by_settings is None else by_settings
            self._limit_and_costs = most, HotCosts(row_s=row_s, copy_s=copy_s)
        for name, kept in saved["layers"].items():
            one = self.layers[name]
            one.loads = list(kept["loads"])
            one.take_counts()  # rows of before the load
            if not keeps_choice:
                one.apply([tuple(choice) for choice in kept["choices"]])

    def hand_over_others(self, saved: Mapping[str, Any]) -> list[Undelivered]:
        """Return what codecs left out of this rank's experts that were hot in `saved` and are not; all must call."""
        handed = [
            self.layers[name].hand_over(kept["choices"], self.layers[name].choices, self._transport)
            for name, kept in saved["layers"].items()
        ]
        return [record for finish in handed for record in finish()]

    def loads(self) -> dict[str, dict[str, float]]:
        """Return max over mean of the rows per rank by layer, without and with its hot experts, once it is known."""
        found = {name: one.report() for name, one in self.layers.items() if one.loads}
        return {name: {key: one[key] for key in ("load_before", "load_after")} for name, one in found.items()}

    def report(self, name: str) -> dict[str, Any]:
        """Return what `HotLayer.report` does; empty for a layer that cannot have hot experts."""
        return self.layers[name].report() if name in self.layers else {}
