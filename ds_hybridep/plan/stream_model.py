# SPDX-License-Identifier: Apache-2.0
"""Seconds of one training step for a cluster, a layout of experts and a workload, term by term.

The clock of one rank runs through the step; every second of it belongs to one term, so that the terms add up:

    weights leave -> A x (forward: layer by layer, backward: layer by layer) -> synchronisation -> optimizer

    layer, forward    compute before the experts | dispatch rows | wait for replicas | experts | combine rows
    layer, backward   return gradients of rows | experts | ... | start the return of replicas' gradients

Every level's link is a serial resource. Packets (expert weights in the first forward of a step, expert gradients in
the last backward) queue on it in order and flow while the rank computes. Token rows share it with the packets that are
in flight: x bytes wait for as many bytes of packets, if there are so many. What is not hidden is waited for:

    layer l starts at max(end of what came before, arrival of its packet)

A level's bandwidth is that of one child's uplink, each direction, shared by the ranks below it; bytes are counted at
the slowest level that they cross, as the runtime counts them. All ranks are taken to be alike.

Sources: design of the stream model; paper (5), (7) for the overlap of one layer.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal

from ds_hybridep.errors import PlanError
from ds_hybridep.plan.cluster import Cluster
from ds_hybridep.plan.costs import (
    decode_s,
    encode_s,
    expert_calls_s,
    experts_per_rank,
    experts_s,
    packet_bytes,
    pre_expert_s,
    ranks_below,
    row_counts,
    sync_bytes,
    weight_packets,
)
from ds_hybridep.plan.layout import Layout, Rates, SyncModel
from ds_hybridep.plan.replica_pool import ReplicaPool
from ds_hybridep.plan.stream_clock import Stage, StepClock
from ds_hybridep.plan.token_route import known_or_assumed_bandwidths
from ds_hybridep.plan.workload import COUNT_BYTES, Workload

Kind = Literal["tokens", "expert_weights", "expert_gradients", "dense_sync", "expert_sync"]
KINDS: tuple[Kind, ...] = ("tokens", "expert_weights", "expert_gradients", "dense_sync", "expert_sync")

# Reads and writes of one optimizer step per trained parameter: gradient, master copy, two moments, 2-byte parameter.
OPTIMIZER_TRAFFIC_BYTES = 30


@dataclass(frozen=True, kw_only=True)
class StepTerms:
    """Seconds of a step by cause; they add up to the step.

    dense_s: computation outside routed experts.  experts_s: routed experts.  codec_s: encoding and decoding.
    tokens_s: token rows on their way, packets before them in the queue included.
    expert_weights_s, expert_gradients_s: waiting for packets that computation did not hide.
    dense_sync_s, expert_sync_s: DeepSpeed's own gradient and parameter traffic, of dense parameters and of experts
        that several expert-parallel groups hold.
    host_s: calls and messages.  optimizer_s: its pass over memory.
    """

    dense_s: float = 0.0
    experts_s: float = 0.0
    codec_s: float = 0.0
    tokens_s: float = 0.0
    expert_weights_s: float = 0.0
    expert_gradients_s: float = 0.0
    dense_sync_s: float = 0.0
    expert_sync_s: float = 0.0
    host_s: float = 0.0
    optimizer_s: float = 0.0

    @property
    def total_s(self) -> float:
        """The step."""
        return math.fsum(self.as_dict().values())

    def as_dict(self) -> dict[str, float]:
        """By name, in the order above."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


@dataclass(frozen=True)
class StepPrediction:
    """One step: seconds by term, and the bytes that one child's uplink sends by level and kind.

    uplink_bytes: per level, kind -> payload bytes in one direction, without headers.
    """

    terms: StepTerms
    uplink_bytes: tuple[Mapping[Kind, float], ...]

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.terms.total_s

    def level_bytes(self, level: int) -> float:
        """Bytes of all kinds over one uplink of `level`."""
        return math.fsum(self.uplink_bytes[level].values())


TERMS = tuple(item.name for item in fields(StepTerms))


# ---- the step ----


@dataclass(frozen=True)
class _Costs:
    """What every layer of a step costs; all layers are alike."""

    pre_s: float
    experts_s: float
    calls_s: float
    round_s: float  # host time of one round of messages
    dispatch: tuple[Stage, ...]
    combine: tuple[Stage, ...]
    output_gradients: tuple[Stage, ...]
    input_gradients: tuple[Stage, ...]
    weights: tuple[float, ...]
    gradients: tuple[float, ...]
    weight_packets: int  # of a step


PacketOf = Callable[[int], int | None]  # the packet that a layer has to wait for, sent now if it was not before


def _no_packet(_: int) -> int | None:
    return None


def predict(
    cluster: Cluster, layout: Layout, workload: Workload, rates: Rates, sync: SyncModel | None = None
) -> StepPrediction:
    """Seconds and bytes of one training step in the steady state.

    A bandwidth that is not known is taken as `known_or_assumed_bandwidths` says, a latency as 0.

    Raises PlanError where layout and cluster, or experts and group, do not fit together.
    """
    sync = sync or SyncModel()
    if len(layout.spans) != len(cluster.levels) or any(
        size % span for span, size in zip(layout.spans, cluster.sizes, strict=True)
    ):
        raise PlanError(f"a group that spans {layout.spans} does not fit the levels {cluster}")
    bandwidths = [bandwidth / rates.wire_factor for bandwidth in known_or_assumed_bandwidths(cluster)]
    latencies = [level.link.latency_s or 0.0 for level in cluster.levels]
    clock = StepClock(bandwidths, latencies, TERMS)
    costs = _costs(cluster, layout, workload, rates, latencies)
    _run_step(clock, costs, layout, workload, rates)
    dense, experts = _synchronise(clock, cluster, layout, workload, sync, latencies)
    _optimize(clock, cluster, layout, workload, rates)
    if layout.domain_size > 1 and rates.overlap < 1.0:
        _expose(clock, costs, workload, rates, latencies)
    terms = StepTerms(**clock.seconds)
    return StepPrediction(terms, _uplink_bytes(cluster, costs, workload, dense, experts))


def _costs(cluster: Cluster, layout: Layout, workload: Workload, rates: Rates, latencies: Sequence[float]) -> _Costs:
    rows = row_counts(layout, workload)
    below = ranks_below(cluster)

    def stages(extra_bytes: float, *, is_dispatch: bool = False) -> tuple[Stage, ...]:
        return _stages(layout, workload, rows, below, latencies, extra_bytes=extra_bytes, is_dispatch=is_dispatch)

    extra = 0 if layout.is_padded else 1
    return _Costs(
        pre_s=pre_expert_s(workload, rates),
        experts_s=experts_s(layout, workload, rates),
        calls_s=rates.layer_s + expert_calls_s(layout, workload, rates),
        round_s=rates.all_to_all_s if layout.is_padded else rates.exchange_s,
        dispatch=stages(extra * workload.dispatch_extra_bytes, is_dispatch=True),
        combine=stages(0.0),
        output_gradients=stages(0.0),
        input_gradients=stages(extra * workload.return_extra_bytes),
        weights=_times(packet_bytes(layout, workload, "weights"), below),
        gradients=_times(packet_bytes(layout, workload, "gradients"), below),
        weight_packets=weight_packets(layout, workload),
    )


def _stages(
    layout: Layout,
    workload: Workload,
    rows: Sequence[float],
    below: Sequence[int],
    latencies: Sequence[float],
    *,
    extra_bytes: float,
    is_dispatch: bool,
) -> tuple[Stage, ...]:
    """Rounds of messages of one exchange: its rows, in our own dispatch encoded and with their counts.

    Direct exchanges wait for the slowest level once; level by level each level is waited for in turn. A rank's
    messages leave one after the other, so the levels' seconds add up.
    """
    used = [level for level, count in enumerate(layout.domain_counts) if count > 1]
    if layout.is_padded or layout.exchange == "direct":
        groups = [used] if used else []
    else:
        groups = [[level] for level in used]

    is_encoded = is_dispatch and not layout.is_padded

    def header(level: int) -> float:
        return COUNT_BYTES * _peers(layout, level) if is_encoded else 0.0

    def row_bytes(level: int) -> float:
        return workload.row_bytes / (layout.codecs[level].token.ratio if is_encoded else 1.0) + extra_bytes

    stages = []
    for group in groups:
        latency_s = max(latencies[level] for level in group)
        level_bytes = tuple((i, below[i] * (rows[i] * row_bytes(i) + header(i))) for i in group)
        stages.append(Stage(level_bytes, latency_s))
    return tuple(stages)


def _peers(layout: Layout, level: int) -> int:
    """Destinations of one rank whose messages are counted at a level."""
    counts = layout.domain_counts
    beyond = math.prod(counts[level + 1 :]) if layout.exchange == "direct" else 1
    return (counts[level] - 1) * beyond


def _times(per_rank: Sequence[float], below: Sequence[int]) -> tuple[float, ...]:
    return tuple(num_bytes * count for num_bytes, count in zip(per_rank, below, strict=True))


def _run_step(clock: StepClock, costs: _Costs, layout: Layout, workload: Workload, rates: Rates) -> None:
    """All micro-steps.  Weights flow during the first forward only, gradients during the last backward only."""
    has_packets = layout.domain_size > 1
    layers = workload.model.num_moe_layers
    if has_packets and layout.is_transient:
        _run_transient_step(clock, costs, layout, workload, rates)
        return
    if has_packets:  # encoded and queued right after the optimizer step, in the order in which layers need them
        for layer in range(layers):
            clock.spend(encode_s(layout, workload, "weights"), "codec_s")
            clock.spend(rates.packet_s, "host_s")
            clock.send_packet(layer, costs.weights)
    decode_weights_s = decode_s(layout, workload, "weights") if has_packets else 0.0
    for layer in range(layers):
        _forward_layer(clock, costs, layer, (lambda one: one) if has_packets else _no_packet, decode_weights_s)
    if workload.micro_steps > 1:
        _plain_passes(clock, costs, layout, workload)
    _last_backward(clock, costs, layout, workload, rates, _no_packet)


def _last_backward(
    clock: StepClock, costs: _Costs, layout: Layout, workload: Workload, rates: Rates, packet_of: PacketOf
) -> None:
    """The backward in which gradients of replicas return."""
    layers = workload.model.num_moe_layers
    waiting: deque[int] = deque()
    for layer in reversed(range(layers)):
        _backward_layer(clock, costs, workload, layer, packet_of)
        if layout.domain_size > 1:
            clock.spend(encode_s(layout, workload, "gradients"), "codec_s")
            clock.spend(rates.packet_s, "host_s")
            clock.send_packet(layers + layer, costs.gradients)
            waiting.append(layers + layer)
            while len(waiting) > layout.prefetch_depth:
                _take_gradients(clock, waiting.popleft(), layout, workload)
        clock.spend(2.0 * costs.pre_s, "dense_s")
    while waiting:
        _take_gradients(clock, waiting.popleft(), layout, workload)


def _run_transient_step(clock: StepClock, costs: _Costs, layout: Layout, workload: Workload, rates: Rates) -> None:
    """All micro-steps of transient replicas: weights flow in every pass, for the layers there is no room for.

    Between the first and the last, all micro-steps find the same layers held and idle links: one is timed.
    """
    layers = workload.model.num_moe_layers
    pool = ReplicaPool(layers, layout.prefetch_depth)
    newest: dict[int, int] = {}  # packet of each layer
    num_sent = 0

    def packet_of(layer: int, *, is_backward: bool) -> int:
        nonlocal num_sent
        for other in pool.request(layer, is_backward=is_backward)[1]:
            newest[other] = 2 * layers + num_sent  # below are the packets of gradients
            num_sent += 1
            clock.spend(rates.packet_s, "host_s")
            clock.send_packet(newest[other], costs.weights)
        return newest[layer]

    def for_forward(layer: int) -> int:
        return packet_of(layer, is_backward=False)

    def for_backward(layer: int) -> int:
        return packet_of(layer, is_backward=True)

    def pass_forward() -> None:
        for layer in range(layers):
            _forward_layer(clock, costs, layer, for_forward, 0.0)

    def pass_backward() -> None:
        for layer in reversed(range(layers)):
            _backward_layer(clock, costs, workload, layer, for_backward)
            clock.spend(2.0 * costs.pre_s, "dense_s")

    for_forward(0)  # right after the optimizer step
    pass_forward()
    if workload.micro_steps > 1:
        pass_backward()
        begin_s, before = clock.now_s, dict(clock.seconds)
        if workload.micro_steps > 2:
            pass_forward()
            pass_backward()
            repeats = workload.micro_steps - 3
            for term, seconds in before.items():
                clock.seconds[term] += repeats * (clock.seconds[term] - seconds)
            clock.now_s += repeats * (clock.now_s - begin_s)
        pass_forward()
    _last_backward(clock, costs, layout, workload, rates, for_backward)


def _plain_passes(clock: StepClock, costs: _Costs, layout: Layout, workload: Workload) -> None:
    """The forwards and backwards in which nothing but token rows travels: one of each is timed, the rest repeat it."""
    plain = _plain_layer(clock, costs, workload)
    repeats = (workload.micro_steps - 1) * workload.model.num_moe_layers
    for term, seconds in plain.seconds.items():
        clock.seconds[term] += repeats * seconds
    # Nothing is queued here: the first forward has waited for all weights, and no gradient has left yet.
    clock.now_s += repeats * plain.now_s


def _plain_layer(clock: StepClock, costs: _Costs, workload: Workload) -> StepClock:
    """A clock on which one layer has run forward and backward with idle links."""
    plain = StepClock([link.bytes_per_s for link in clock.links], [0.0] * len(clock.links), TERMS)
    _forward_layer(plain, costs, 0, _no_packet, 0.0)
    _backward_layer(plain, costs, workload, 0, _no_packet)
    plain.spend(2.0 * costs.pre_s, "dense_s")
    return plain


def _forward_layer(clock: StepClock, costs: _Costs, layer: int, packet_of: PacketOf, decode_seconds: float) -> None:
    clock.spend(costs.pre_s, "dense_s")
    packet = packet_of(layer)
    clock.exchange(costs.dispatch, "tokens_s", costs.round_s)
    if packet is not None:
        clock.await_packet(packet, "expert_weights_s")
        clock.spend(decode_seconds, "codec_s")
    clock.spend(costs.calls_s, "host_s")
    clock.spend(costs.experts_s, "experts_s")
    clock.exchange(costs.combine, "tokens_s", costs.round_s)


def _backward_layer(clock: StepClock, costs: _Costs, workload: Workload, layer: int, packet_of: PacketOf) -> None:
    """The backward of a layer up to its input's gradient; twice the work of its forward."""
    if workload.is_checkpointed:
        _forward_layer(clock, costs, layer, packet_of, 0.0)
    clock.exchange(costs.output_gradients, "tokens_s", costs.round_s)
    packet = packet_of(layer)
    if packet is not None:
        clock.await_packet(packet, "expert_weights_s")
    clock.spend(2.0 * costs.calls_s, "host_s")
    clock.spend(2.0 * costs.experts_s, "experts_s")
    clock.exchange(costs.input_gradients, "tokens_s", costs.round_s)


def _take_gradients(clock: StepClock, packet: int, layout: Layout, workload: Workload) -> None:
    clock.await_packet(packet, "expert_gradients_s")
    clock.spend(decode_s(layout, workload, "gradients"), "codec_s")


def _expose(clock: StepClock, costs: _Costs, workload: Workload, rates: Rates, latencies: Sequence[float]) -> None:
    """Take back what `rates.overlap` says is not hidden: a mean with the step in which nothing is.

    There every packet is waited for by itself, and no token row meets one. A mean of the two grows when a bandwidth
    falls, as both do. Links that are slower while the rank computes would not do so: a wait for one level would be the
    chance for packets of another.
    """
    layers = workload.model.num_moe_layers
    plain = _plain_layer(clock, costs, workload)
    repeats = workload.micro_steps * layers
    exposed = {
        "tokens_s": repeats * plain.seconds["tokens_s"],
        "host_s": repeats * plain.seconds["host_s"] + (costs.weight_packets + layers) * rates.packet_s + rates.step_s,
    }
    for term, count, level_bytes in (
        ("expert_weights_s", costs.weight_packets, costs.weights),
        ("expert_gradients_s", layers, costs.gradients),
    ):
        exposed[term] = count * math.fsum(
            num_bytes / link.bytes_per_s + latency
            for num_bytes, link, latency in zip(level_bytes, clock.links, latencies, strict=True)
            if num_bytes > 0
        )
    for term, seconds in exposed.items():
        clock.seconds[term] += (1.0 - rates.overlap) * (seconds - clock.seconds[term])


def _synchronise(
    clock: StepClock,
    cluster: Cluster,
    layout: Layout,
    workload: Workload,
    sync: SyncModel,
    latencies: Sequence[float],
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """DeepSpeed's own traffic, none of it hidden; bytes per uplink of (dense parameters, experts held several times).

    Gradients once per step under ZeRO 0 and 1, once per micro-step under ZeRO 2; from ZeRO 1 on parameters are
    gathered after the step.
    """
    experts = experts_per_rank(layout, workload) * workload.model.num_moe_layers * workload.expert_travel_bytes
    holders = tuple(size // span for size, span in zip(cluster.sizes, layout.spans, strict=True))
    reductions = workload.micro_steps if workload.zero_stage == 2 else 1
    passes = reductions * sync.reduce_passes + (1.0 if workload.zero_stage >= 1 else 0.0)
    totals = []
    for spans, num_bytes, term in (
        (cluster.sizes, float(workload.dense_train_params * workload.param_bytes), "dense_sync_s"),
        (holders, float(experts), "expert_sync_s"),
    ):
        per_level = sync_bytes(cluster, spans, num_bytes, passes, sync)
        latency_s = passes * _sync_latency_s(spans, latencies, sync) if num_bytes else 0.0
        used = tuple((level, count) for level, count in enumerate(per_level) if count > 0)
        seconds = [count / clock.links[level].bytes_per_s for level, count in used]
        # The links of a ring are busy at the same time, and the slowest one sets the pace; sums go level by level.
        transfer_s = max(seconds, default=0.0) if sync.algorithm == "ring" else math.fsum(seconds)
        clock.spend(latency_s + transfer_s, term)
        totals.append(per_level)
    return totals[0], totals[1]


def _sync_latency_s(spans: Sequence[int], latencies: Sequence[float], sync: SyncModel) -> float:
    """Of one pass: a ring hands a block on from its first rank to its last, sums wait for each level once."""
    used = [level for level, span in enumerate(spans) if span > 1]
    if not used or sync.algorithm == "hierarchical":
        return math.fsum(latencies[level] for level in used)
    edges = [math.prod(spans[:level]) * (spans[level] - 1) for level in used]
    edges[0] += 1  # from the last rank back to the first
    around_s = math.fsum(count * latencies[level] for count, level in zip(edges, used, strict=True))
    return around_s - min(latencies[level] for level in used)  # the block that arrives last leaves out the nearest hop


def _optimize(clock: StepClock, cluster: Cluster, layout: Layout, workload: Workload, rates: Rates) -> None:
    """The optimizer's pass over its state, shared out from ZeRO 1 on."""
    is_shared = workload.zero_stage >= 1
    dense = workload.dense_train_params / (cluster.num_ranks if is_shared else 1)
    owned = workload.model.num_moe_layers * experts_per_rank(layout, workload) * workload.expert_travel_params
    owned_share = owned / (cluster.num_ranks // layout.group_size if is_shared else 1)
    clock.spend((dense + owned_share) * OPTIMIZER_TRAFFIC_BYTES / rates.memory_bytes_per_s, "optimizer_s")
    clock.spend(rates.step_s, "host_s")


def _uplink_bytes(
    cluster: Cluster, costs: _Costs, workload: Workload, dense: Sequence[float], experts: Sequence[float]
) -> tuple[Mapping[Kind, float], ...]:
    layers = workload.model.num_moe_layers
    tokens = [0.0] * len(cluster.levels)
    exchanges = [costs.dispatch, costs.combine, costs.output_gradients, costs.input_gradients]
    if workload.is_checkpointed:
        exchanges += [costs.dispatch, costs.combine]
    for stages in exchanges:
        for stage in stages:
            for level, num_bytes in stage.level_bytes:
                tokens[level] += workload.micro_steps * layers * num_bytes
    return tuple(
        {
            "tokens": tokens[level],
            "expert_weights": costs.weight_packets * costs.weights[level],
            "expert_gradients": layers * costs.gradients[level],
            "dense_sync": dense[level],
            "expert_sync": experts[level],
        }
        for level in range(len(cluster.levels))
    )


def with_bandwidth(cluster: Cluster, level: int, bytes_per_s: float) -> Cluster:
    """The same cluster with another bandwidth at one level."""
    levels = list(cluster.levels)
    levels[level] = replace(levels[level], link=replace(levels[level].link, bandwidth_bytes_per_s=bytes_per_s))
    return Cluster(tuple(levels))
