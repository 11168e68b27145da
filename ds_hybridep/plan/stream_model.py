# SPDX-License-Identifier: Apache-2.0
"""Seconds of one training step for a cluster, a layout of experts and a workload, term by term.

The clock of one rank runs through a step of A micro-steps.  Every second belongs to one term, so the terms add up:

    weights leave -> A x (forward: layer by layer, backward: layer by layer) -> synchronisation -> optimizer

A level's link is a serial resource: the uplink of one child in one direction, shared by the ranks below it. Packets
queue on it in order and flow while the rank computes; x bytes of token rows wait for x bytes of packets in flight:

    layer l starts at max(end of what came before, arrival of its packet)

Sources: paper (5), (7) for the overlap of one layer; docs/planning.md, "How a step is predicted".
"""

import copy
import math
from collections import deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, fields
from typing import Literal

from ds_hybridep.plan.cluster import Cluster, known_or_assumed_bandwidths, latencies_of
from ds_hybridep.plan.costs import (
    Way,
    decode_s,
    encode_s,
    experts_per_rank,
    experts_s,
    host_traffic_s,
    layers_in_flight,
    packet_bytes,
    ranks_below,
    row_counts,
)
from ds_hybridep.plan.layout import Layout, Rates, SyncModel
from ds_hybridep.plan.stream_clock import MessageRound, StepClock
from ds_hybridep.plan.sync_stages import (
    Held,
    dense_parameters,
    ring_bytes,
    shared_experts,
    sync_host_traffic_s,
    sync_stages,
)
from ds_hybridep.plan.workload import COUNT_BYTES, Workload

Kind = Literal["tokens", "expert_weights", "expert_gradients", "dense_sync", "expert_sync"]

# Bytes that an optimizer step reads and writes per trained parameter: gradient, master, two moments, 2-byte parameter.
OPTIMIZER_TRAFFIC_BYTES = 30


def _term(words: str) -> float:
    return field(default=0.0, metadata={"words": words})


@dataclass(frozen=True, kw_only=True)
class StepTerms:
    """Seconds of a step by cause; they add up to the step."""

    dense_s: float = _term("computation outside the experts")
    experts_s: float = _term("expert computation")
    codec_s: float = _term("encoding, decoding and state on the host")
    tokens_s: float = _term("token exchange")
    expert_weights_s: float = _term("waiting for expert weights")
    expert_gradients_s: float = _term("waiting for expert gradients")
    dense_sync_s: float = _term("synchronising dense parameters")
    expert_sync_s: float = _term("synchronising experts that several groups hold")
    host_s: float = _term("calls and messages")
    optimizer_s: float = _term("the optimizer")

    @property
    def total_s(self) -> float:
        return math.fsum(self.as_dict().values())

    def as_dict(self) -> dict[str, float]:
        return {item.name: getattr(self, item.name) for item in fields(self)}


TERM_WORDS: dict[str, str] = {item.name: item.metadata["words"] for item in fields(StepTerms)}


@dataclass(frozen=True)
class StepPrediction:
    """One step: seconds by term; for each level, payload bytes by kind over one child's uplink in one direction, and
    how often a rank waits in a row for something that crosses the level."""

    terms: StepTerms
    uplink_bytes: tuple[Mapping[Kind, float], ...]
    waits: tuple[int, ...] = ()

    @property
    def step_s(self) -> float:
        return self.terms.total_s

    def level_bytes(self, level: int) -> float:
        """Bytes of all kinds over one uplink of `level`."""
        return math.fsum(self.uplink_bytes[level].values())


def predict(
    cluster: Cluster, layout: Layout, workload: Workload, rates: Rates, sync: SyncModel | None = None
) -> StepPrediction:
    """Seconds and bytes of one training step in the steady state.  Raises PlanError if the arguments do not fit."""
    layout.check_fits(cluster)
    step = _Step(cluster, layout, workload, rates, sync or SyncModel())
    step.run()
    dense_bytes, expert_bytes = step.synchronise()
    step.optimize()
    if layout.domain_size > 1 and rates.overlap < 1.0:
        step.expose()
    uplink_bytes = _uplink_bytes(step, dense_bytes, expert_bytes)
    return StepPrediction(StepTerms(**step.clock.seconds), uplink_bytes, tuple(step.clock.waits))


class _LayerCosts:
    """What every layer of a step costs: seconds of a forward, exchanges of rows, bytes over one uplink of a level."""

    def __init__(self, cluster: Cluster, layout: Layout, workload: Workload, rates: Rates) -> None:
        self._layout, self._row_bytes = layout, workload.row_bytes
        self._below, self._rows = ranks_below(cluster), row_counts(layout, workload)
        self.pre_s = workload.pre_expert_flops / rates.flops_per_s
        self.experts_s = experts_s(layout, workload, rates)
        self.calls_s = rates.layer_s + rates.expert_call_s * experts_per_rank(layout, workload) * layout.domain_size
        self.round_s = rates.all_to_all_s if layout.is_padded else rates.exchange_s
        extra = 0 if layout.is_padded else 1
        self.dispatch = self._rounds(extra * workload.dispatch_extra_bytes, is_dispatch=True)
        self.rows_only = self._rounds(0.0)  # for combine, and for the gradients of its output
        self.input_gradients = self._rounds(extra * workload.return_extra_bytes)
        self.weights = self._per_uplink(packet_bytes(layout, workload, "weights"))
        self.gradients = self._per_uplink(packet_bytes(layout, workload, "gradients"))

    def _per_uplink(self, per_rank: Sequence[float]) -> tuple[float, ...]:
        return tuple(num_bytes * count for num_bytes, count in zip(per_rank, self._below, strict=True))

    def _rounds(self, extra_bytes: float, *, is_dispatch: bool = False) -> tuple[MessageRound, ...]:
        """Rounds of messages of one exchange; our own dispatch encodes rows and sends their counts with them."""
        layout = self._layout
        used = [level for level, count in enumerate(layout.domain_counts) if count > 1]
        # A direct exchange waits once, for the slowest level; a hierarchical one waits for each level in turn.
        groups = [[level] for level in used]
        if used and (layout.is_padded or layout.exchange == "direct"):
            groups = [used]
        is_encoded = is_dispatch and not layout.is_padded

        def num_bytes(level: int) -> float:
            one_row = self._row_bytes / (layout.codecs[level].token.ratio if is_encoded else 1.0) + extra_bytes
            header = COUNT_BYTES * self._destinations(level) if is_encoded else 0.0
            return self._below[level] * (self._rows[level] * one_row + header)

        return tuple(MessageRound(tuple((level, num_bytes(level)) for level in group)) for group in groups)

    def _destinations(self, level: int) -> int:
        """Number of destinations of one rank whose messages count at `level`."""
        counts = self._layout.domain_counts
        beyond = math.prod(counts[level + 1 :]) if self._layout.exchange == "direct" else 1
        return (counts[level] - 1) * beyond


def _levels_after_optimizer(held: Held, workload: Workload) -> set[int]:
    return {stage.level for stage in sync_stages(held, workload) if stage.follows_optimizer}


class _Step:
    def __init__(self, cluster: Cluster, layout: Layout, workload: Workload, rates: Rates, sync: SyncModel) -> None:
        self.cluster, self.layout, self.workload, self.rates, self.sync = cluster, layout, workload, rates, sync
        self.costs = _LayerCosts(cluster, layout, workload, rates)
        self.layers = workload.model.num_moe_layers
        self.has_packets = layout.domain_size > 1
        self.owned_experts = experts_per_rank(layout, workload)
        self.bandwidths = [bandwidth / rates.wire_factor for bandwidth in known_or_assumed_bandwidths(cluster)]
        self.latencies = latencies_of(cluster)
        self.clock = StepClock(self.bandwidths, self.latencies, tuple(TERM_WORDS))

    def run(self) -> None:
        """Run all micro-steps.  Weights flow only in the first forward, and gradients only in the last backward."""
        if self.has_packets:  # encoded and queued right after the optimizer step, in the order of need
            waited = self._gathered_levels()
            for layer in range(self.layers):
                self._send("weights", layer, self.costs.weights, waited)
        decode_weights_s = decode_s(self.layout, self.workload, "weights") if self.has_packets else 0.0
        for layer in range(self.layers):
            self._forward(decode_weights_s, packet=layer if self.has_packets else None)
        if self.workload.micro_steps > 1:
            # Until the last backward, only token rows travel, so one layer is timed for all. No packet is queued: the
            # first forward has waited for all weights, and no gradient has left yet.
            plain = self._plain_layer()
            repeats = (self.workload.micro_steps - 1) * self.layers
            for term, seconds in plain.seconds.items():
                self.clock.seconds[term] += repeats * seconds
            self.clock.now_s += repeats * plain.now_s
            self.clock.repeat_waits([0] * len(plain.waits), plain.waits, repeats)
        self._last_backward()

    def _last_backward(self) -> None:
        """The backward in which gradients of replicas return."""
        waiting: deque[int] = deque()
        depth = layers_in_flight(self.layout, self.workload)
        for layer in reversed(range(self.layers)):
            self._backward()
            if self.has_packets:
                self._send("gradients", self.layers + layer, self.costs.gradients)
                waiting.append(self.layers + layer)
                while len(waiting) > depth:
                    self._take_gradients(waiting.popleft())
            self.clock.spend(2.0 * self.costs.pre_s, "dense_s")
        while waiting:
            self._take_gradients(waiting.popleft())

    def _send(self, way: Way, packet: int, level_bytes: tuple[float, ...], waited: Set[int] = frozenset()) -> None:
        state_s = host_traffic_s(self.layout, self.workload, self.rates, way)
        self.clock.spend(encode_s(self.layout, self.workload, way) + state_s, "codec_s")
        self.clock.spend(self.rates.packet_s, "host_s")
        self.clock.send_packet(packet, level_bytes, waited)

    def _take_gradients(self, packet: int) -> None:
        self.clock.await_packet(packet, "expert_gradients_s")
        self.clock.spend(decode_s(self.layout, self.workload, "gradients"), "codec_s")

    def _forward(self, decode_seconds: float = 0.0, *, packet: int | None = None) -> None:
        """The forward of a layer, which waits for a packet of weights if there is one."""
        clock, costs = self.clock, self.costs
        clock.spend(costs.pre_s, "dense_s")
        clock.exchange(costs.dispatch, "tokens_s", costs.round_s)
        if packet is not None:
            clock.await_packet(packet, "expert_weights_s")
            clock.spend(decode_seconds, "codec_s")
        clock.spend(costs.calls_s, "host_s")
        clock.spend(costs.experts_s, "experts_s")
        clock.exchange(costs.rows_only, "tokens_s", costs.round_s)

    def _backward(self) -> None:
        """The backward of a layer up to its input's gradient; twice the work of its forward."""
        clock, costs = self.clock, self.costs
        if self.workload.is_checkpointed:
            self._forward()
        clock.exchange(costs.rows_only, "tokens_s", costs.round_s)
        clock.spend(2.0 * costs.calls_s, "host_s")
        clock.spend(2.0 * costs.experts_s, "experts_s")
        clock.exchange(costs.input_gradients, "tokens_s", costs.round_s)

    def _plain_layer(self) -> StepClock:
        """A clock on which one layer has run forward and backward with idle links."""
        plain = copy.copy(self)
        plain.clock = StepClock(self.bandwidths, self.latencies, tuple(TERM_WORDS))
        plain._forward()
        plain._backward()
        plain.clock.spend(2.0 * self.costs.pre_s, "dense_s")
        return plain.clock

    def synchronise(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Run sums and gathers; none is hidden.  Returns bytes per uplink of (dense parameters, shared experts)."""
        dense = dense_parameters(self.cluster, self.layout, self.workload)
        experts = shared_experts(self.cluster, self.layout, self.workload)
        if self.sync.algorithm == "ring":
            return self._around(dense, "dense_sync_s"), self._around(experts, "expert_sync_s")
        if self.workload.zero_stage >= 1:
            for level in dense.levels:  # sums of gradient norms
                self.clock.waits[level] += 1
                self.clock.spend(self.latencies[level], "dense_sync_s")
        shared = _levels_after_optimizer(experts, self.workload)
        packets = {level for level, num_bytes in enumerate(self.costs.weights) if num_bytes > 0}
        return (
            self._by_level(dense, "dense_sync_s", shared, packets),
            self._by_level(experts, "expert_sync_s", set(), set()),
        )

    def _gathered_levels(self) -> Set[int]:
        """Levels where the first packets of weights travel with dense parameters, so that one wait counts for both.

        Experts that several groups hold must arrive before they leave to replicas; dense parameters travel together
        with either.
        """
        if self.sync.algorithm == "ring":
            return frozenset()
        dense = dense_parameters(self.cluster, self.layout, self.workload)
        experts = shared_experts(self.cluster, self.layout, self.workload)
        return _levels_after_optimizer(dense, self.workload) - _levels_after_optimizer(experts, self.workload)

    def _by_level(self, held: Held, term: str, shared: Set[int], packets: Set[int]) -> tuple[float, ...]:
        """Run stages one after the other, each over one level.

        Over `shared` levels, parameters travel with others: they add no wait and pay no delay.  Over levels of
        `packets`, they pay no delay either, because the packets pay it.
        """
        totals, below = [0.0] * len(self.bandwidths), ranks_below(self.cluster)
        if self.layout.state == "host":
            self.clock.spend(sync_host_traffic_s(held, self.workload, self.rates), "codec_s")
        for stage in sync_stages(held, self.workload):
            num_bytes = self.sync.factor * stage.rank_bytes * below[stage.level]
            totals[stage.level] += stage.times * num_bytes
            self.clock.spend(stage.times * (stage.encode_s + stage.decode_s), "codec_s")
            self.clock.spend(stage.times * num_bytes / self.bandwidths[stage.level], term)
            if stage.follows_optimizer and stage.level in shared:
                continue
            self.clock.waits[stage.level] += stage.times
            if not (stage.follows_optimizer and stage.level in packets):
                self.clock.spend(stage.times * self.latencies[stage.level], term)
        return tuple(totals)

    def _around(self, held: Held, term: str) -> tuple[float, ...]:
        """Run DeepSpeed's rings, which use no codec."""
        workload, sync = self.workload, self.sync
        reductions = workload.micro_steps if workload.zero_stage == 2 else 1
        passes = reductions * sync.reduce_passes + (1.0 if workload.zero_stage >= 1 else 0.0)
        num_bytes = float(sum(map(math.prod, held.tensors)) * workload.param_bytes)
        per_level = ring_bytes(self.cluster, held.spans, num_bytes, passes, sync)
        seconds = [count / self.bandwidths[level] for level, count in enumerate(per_level) if count > 0]
        # The links of a ring are busy at the same time, and the slowest one sets the pace.
        latency_s = passes * self._around_s(held) if num_bytes else 0.0
        self.clock.spend(latency_s + max(seconds, default=0.0), term)
        return per_level

    def _around_s(self, held: Held) -> float:
        """Sum of the latencies of one pass, in which a ring hands a block on from its first rank to its last."""
        latencies, used = self.latencies, held.levels
        if not used:
            return 0.0
        edges = [math.prod(held.spans[:level]) * (held.spans[level] - 1) for level in used]
        edges[0] += 1  # from the last rank back to the first
        around_s = math.fsum(count * latencies[level] for count, level in zip(edges, used, strict=True))
        return around_s - min(latencies[level] for level in used)  # the last block leaves out the nearest hop

    def optimize(self) -> None:
        """Run the optimizer's pass over its state, which ranks share from ZeRO 1 on."""
        workload = self.workload
        is_shared = workload.zero_stage >= 1
        dense = workload.dense_train_params / (self.cluster.num_ranks if is_shared else 1)
        owned = self.layers * self.owned_experts * workload.expert_travel_params
        owned_share = owned / (self.cluster.num_ranks // self.layout.group_size if is_shared else 1)
        num_bytes = (dense + owned_share) * OPTIMIZER_TRAFFIC_BYTES
        self.clock.spend(num_bytes / self.rates.memory_bytes_per_s, "optimizer_s")
        self.clock.spend(self.rates.step_s, "host_s")

    def expose(self) -> None:
        """Take back what `rates.overlap` says is not hidden: a weighted mean with a step that hides nothing.

        Both steps grow when a bandwidth falls, so their mean grows too. That would not hold if links were slower while
        the rank computes: a wait for one level would give packets of another level time to flow.
        """
        rates, plain = self.rates, self._plain_layer()
        repeats, num_packets = self.workload.micro_steps * self.layers, 2 * self.layers
        exposed = {
            "tokens_s": repeats * plain.seconds["tokens_s"],
            "host_s": repeats * plain.seconds["host_s"] + num_packets * rates.packet_s + rates.step_s,
        }
        for term, count, level_bytes in (
            ("expert_weights_s", self.layers, self.costs.weights),
            ("expert_gradients_s", self.layers, self.costs.gradients),
        ):
            exposed[term] = count * math.fsum(
                num_bytes / bandwidth + latency
                for num_bytes, bandwidth, latency in zip(level_bytes, self.bandwidths, self.latencies, strict=True)
                if num_bytes > 0
            )
        for term, seconds in exposed.items():
            self.clock.seconds[term] += (1.0 - rates.overlap) * (seconds - self.clock.seconds[term])


def _uplink_bytes(step: _Step, dense: Sequence[float], experts: Sequence[float]) -> tuple[Mapping[Kind, float], ...]:
    costs, num_levels = step.costs, len(step.cluster.levels)
    tokens = [0.0] * num_levels
    exchanges = [costs.dispatch, costs.rows_only, costs.rows_only, costs.input_gradients]
    if step.workload.is_checkpointed:
        exchanges += [costs.dispatch, costs.rows_only]
    for one in (one for rounds in exchanges for one in rounds):
        for level, num_bytes in one.level_bytes:
            tokens[level] += step.workload.micro_steps * step.layers * num_bytes
    return tuple(
        {
            "tokens": tokens[level],
            "expert_weights": step.layers * costs.weights[level],
            "expert_gradients": step.layers * costs.gradients[level],
            "dense_sync": dense[level],
            "expert_sync": experts[level],
        }
        for level in range(num_levels)
    )
