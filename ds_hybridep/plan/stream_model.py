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
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Literal

from ds_hybridep.errors import PlanError
from ds_hybridep.plan.cluster import Cluster
from ds_hybridep.plan.replica_pool import ReplicaPool, num_gathers
from ds_hybridep.plan.routing import expected_rows_of_load
from ds_hybridep.plan.token_route import TokenExchange, expected_rows_of, known_or_assumed_bandwidths
from ds_hybridep.plan.workload import ADAM_BYTES, COUNT_BYTES, MASTER_BYTES, Workload

Kind = Literal["tokens", "expert_weights", "expert_gradients", "dense_sync", "expert_sync"]
KINDS: tuple[Kind, ...] = ("tokens", "expert_weights", "expert_gradients", "dense_sync", "expert_sync")

# Reads and writes of one optimizer step per trained parameter: gradient, master copy, two moments, 2-byte parameter.
OPTIMIZER_TRAFFIC_BYTES = 30


# ---- what is given: rates, codecs, layouts ----


@dataclass(frozen=True)
class Codec:
    """What an encoding costs, as data.

    ratio: bytes of the payload in the type in which it would travel otherwise, over bytes on the wire. A codec that
        makes fp32 fifty times smaller has a ratio of 25 for bf16 parameters.
    encode_bytes_per_s, decode_bytes_per_s: of the payload, on the rank's own device.
    is_lossy: replicas need mirrors and fp32 copies.
    """

    name: str
    ratio: float = 1.0
    encode_bytes_per_s: float = math.inf
    decode_bytes_per_s: float = math.inf
    is_lossy: bool = True

    def __post_init__(self) -> None:
        for item in ("ratio", "encode_bytes_per_s", "decode_bytes_per_s"):
            if not getattr(self, item) > 0:
                raise PlanError(f"codec {self.name!r}: {item} is {getattr(self, item)}, but must be > 0")


IDENTITY = Codec("identity", is_lossy=False)


@dataclass(frozen=True)
class LevelCodecs:
    """Encodings of what crosses one level."""

    weight: Codec = IDENTITY
    gradient: Codec = IDENTITY
    token: Codec = IDENTITY


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Speed of one rank, and costs of the host.  What is not given costs nothing.

    flops_per_s: reached on dense products.
    expert_flops_per_s: reached by experts; None: the same.
    memory_bytes_per_s: of the optimizer's pass over its state.
    layer_s: host time of a layer in one forward; its backward takes twice that.
    expert_call_s: host time of calling one expert in one forward; its backward takes twice that.
    exchange_s: host time of one round of messages of our token exchange, during which its bytes flow already: where
        ranks share cores, the early ones' rows flow while the late ones still compute.
    all_to_all_s: the same of one all-to-all of DeepSpeed's layer.
    packet_s: host time of one packet of a layer, there and back each.
    step_s: host time of one optimizer step.
    overlap: how much of what could be hidden is: 1 is the clock above, 0 waits for every packet by itself; less than 1
        where sending takes the cores that compute.
    wire_factor: bytes on the wire for each byte handed over (headers).
    """

    flops_per_s: float
    expert_flops_per_s: float | None = None
    memory_bytes_per_s: float = math.inf
    layer_s: float = 0.0
    expert_call_s: float = 0.0
    exchange_s: float = 0.0
    all_to_all_s: float = 0.0
    packet_s: float = 0.0
    step_s: float = 0.0
    overlap: float = 1.0
    wire_factor: float = 1.0

    def __post_init__(self) -> None:
        for item in ("flops_per_s", "expert_flops_per_s", "memory_bytes_per_s"):
            value = getattr(self, item)
            if value is not None and not value > 0:
                raise PlanError(f"{item} is {value}, but must be > 0")
        for item in ("layer_s", "expert_call_s", "exchange_s", "all_to_all_s", "packet_s", "step_s"):
            if not (math.isfinite(getattr(self, item)) and getattr(self, item) >= 0):
                raise PlanError(f"{item} is {getattr(self, item)}, but must be a finite number >= 0")
        if not 0 <= self.overlap <= 1:
            raise PlanError(f"overlap is {self.overlap}, but must be between 0 and 1")
        if not self.wire_factor >= 1:
            raise PlanError(f"wire_factor is {self.wire_factor}, but must be at least 1")


@dataclass(frozen=True, kw_only=True)
class SyncModel:
    """How DeepSpeed's own synchronisation crosses the levels.

    algorithm: "ring" passes every byte over each uplink once for each pass, whatever the levels; "hierarchical" sums
        inside first, so that each byte crosses a slow link once per child.
    reduce_passes: of gradients; 2 for an all-reduce (what ZeRO-1 was seen to do over gloo), 1 for a reduce-scatter.
    factor: measured bytes over this model's.
    """

    algorithm: Literal["ring", "hierarchical"] = "ring"
    reduce_passes: float = 2.0
    factor: float = 1.0


@dataclass(frozen=True)
class ExpertGroup:
    """Which ranks share the experts: `ep_size` neighbouring ones, or as many at equal distances over the whole job.

    Source: DeepSpeed's expert-parallel groups, and `use_data_before_expert_parallelism` for strided ones.
    """

    ep_size: int
    is_strided: bool = False

    def spans(self, cluster: Cluster) -> tuple[int, ...]:
        """Positions of one group at each level.

        Raises PlanError where the group is no regular grid of the levels.
        """
        rest, spans = self.ep_size, [1] * len(cluster.levels)
        order = range(len(spans)) if self.is_strided else reversed(range(len(spans)))
        for level in order:
            size = cluster.sizes[level]
            if rest % size == 0:
                spans[level] = size
            elif size % rest == 0:
                spans[level] = rest
            else:
                break
            rest //= spans[level]
        if rest != 1 or self.ep_size < 1:
            raise PlanError(
                f"ep_size {self.ep_size} is no regular grid of the levels {cluster}; choose a divisor of one level's "
                f"size times all sizes {'above' if self.is_strided else 'below'} it"
            )
        return tuple(spans)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where experts and their copies are, and how things travel: all that a plan decides.

    spans: positions of the expert-parallel group at each level.
    domain_sizes: at each level, a divisor of the span.
    codecs: of each level.
    prefetch_depth: layers between the start of a gradient's return and the wait for it.
    exchange: how token rows travel.
    is_padded: DeepSpeed's own layer in place of ours: padded all-to-alls, no domains.
    is_transient: replicas are gathered around their use, for `prefetch_depth` + 1 layers at a time; all of an expert's
        parameters travel then, frozen ones too.
    """

    spans: tuple[int, ...]
    domain_sizes: tuple[int, ...]
    codecs: tuple[LevelCodecs, ...]
    prefetch_depth: int = 2
    exchange: TokenExchange = "direct"
    is_padded: bool = False
    is_transient: bool = False

    def __post_init__(self) -> None:
        if not len(self.spans) == len(self.domain_sizes) == len(self.codecs):
            raise PlanError(
                f"spans {self.spans}, domain sizes {self.domain_sizes} and {len(self.codecs)} codecs differ in length"
            )
        if any(size < 1 or span % size for span, size in zip(self.spans, self.domain_sizes, strict=True)):
            raise PlanError(f"domain sizes {self.domain_sizes} do not divide the group's spans {self.spans}")
        if self.prefetch_depth < 0:
            raise PlanError(f"prefetch_depth is {self.prefetch_depth}, but must be at least 0")
        if self.is_padded and self.domain_size > 1:
            raise PlanError("DeepSpeed's own layer has no domains; give domain sizes of 1")
        if self.is_transient and self.is_lossy:
            raise PlanError("transient replicas are gathered as they are; give exact codecs for weights")

    @cached_property
    def domain_counts(self) -> tuple[int, ...]:
        """Domains side by side at each level."""
        return tuple(span // size for span, size in zip(self.spans, self.domain_sizes, strict=True))

    @property
    def group_size(self) -> int:
        """G, ranks of the expert-parallel group."""
        return math.prod(self.spans)

    @property
    def domain_size(self) -> int:
        """M, ranks of a domain."""
        return math.prod(self.domain_sizes)

    @property
    def is_lossy(self) -> bool:
        """True where expert weights travel under a lossy codec."""
        pairs = zip(self.domain_sizes, self.codecs, strict=True)
        return any(size > 1 and codecs.weight.is_lossy for size, codecs in pairs)

    @property
    def has_lossy_gradients(self) -> bool:
        """True where expert gradients travel under a lossy codec."""
        pairs = zip(self.domain_sizes, self.codecs, strict=True)
        return any(size > 1 and codecs.gradient.is_lossy for size, codecs in pairs)


# ---- what comes out ----


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


# ---- bytes: one function per kind ----


def ranks_below(cluster: Cluster) -> tuple[int, ...]:
    """Ranks that share one uplink of each level."""
    return tuple(math.prod(cluster.sizes[level + 1 :]) for level in range(len(cluster.levels)))


def row_counts(layout: Layout, workload: Workload) -> tuple[float, ...]:
    """Rows that one rank sends over each level in one dispatch.

    Ours: expected number of (token, destination) pairs, each once.  Source: `token_route.expected_rows`, or
    `routing.expected_rows_of_load` where a load was measured.
    DeepSpeed's: the capacity of every expert, wherever it is, whether or not tokens came.
    """
    model = workload.model
    if layout.is_padded:
        # A peer that differs first at level l is one of (span_l - 1) span_(l+1) span_(l+2) ...
        num_peers = [
            (span - 1) * math.prod(layout.spans[level + 1 :]) for level, span in enumerate(layout.spans)
        ]  # fmt: skip
        rows_per_peer = workload.expert_capacity * model.num_experts / layout.group_size
        return tuple(count * rows_per_peer for count in num_peers)
    if workload.expert_load is None:
        rows = expected_rows_of(
            layout.domain_counts, model.num_experts, model.top_k, workload.tokens_per_rank, layout.exchange
        )
    else:
        rows = expected_rows_of_load(
            workload.expert_load, layout.spans, layout.domain_sizes, top_k=model.top_k,
            num_tokens=workload.tokens_per_rank, exchange=layout.exchange,
        )  # fmt: skip
    return tuple(workload.row_scale * count for count in rows)


def packet_bytes(layout: Layout, workload: Workload, way: Literal["weights", "gradients"]) -> tuple[float, ...]:
    """Bytes of one layer's packets that one rank sends over each level.

    Slow level first, weights go to S_l - 1 neighbours at level l: the rank's own experts, and those that came over
    slower levels j before it, (S_j - 1) S_(j+1) ... S_(l-1) times as many. The latter go on as they came, in level
    j's codec. Gradients go the opposite way, summed at each level, so a level's own codec holds for all of them.

    Source: runtime/expert_gather.py.
    """
    sizes = layout.domain_sizes
    expert_bytes = workload.expert_travel_bytes
    if layout.is_transient and way == "weights":
        expert_bytes = workload.model.expert_params * workload.param_bytes
    own_bytes = experts_per_rank(layout, workload) * expert_bytes
    result = []
    for level, size in enumerate(sizes):
        if way == "weights":
            held = 1.0 / layout.codecs[level].weight.ratio
            for slower in range(level):
                count = (sizes[slower] - 1) * math.prod(sizes[slower + 1 : level])
                held += count / layout.codecs[slower].weight.ratio
        else:
            held = math.prod(sizes[:level]) / layout.codecs[level].gradient.ratio
        result.append((size - 1) * held * own_bytes)
    return tuple(result)


def weight_packets(layout: Layout, workload: Workload) -> int:
    """Packets of weights in a step: one for each layer, or one for each gather of a layer."""
    layers = workload.model.num_moe_layers
    return num_gathers(layers, layout.prefetch_depth, workload.micro_steps) if layout.is_transient else layers


def experts_per_rank(layout: Layout, workload: Workload) -> int:
    """e, experts that one rank owns.  Raises PlanError where the group cannot share them evenly."""
    num_experts = workload.model.num_experts
    if num_experts % layout.group_size:
        raise PlanError(
            f"{num_experts} experts cannot be shared evenly by an expert-parallel group of {layout.group_size} ranks"
        )
    return num_experts // layout.group_size


def sync_bytes(
    cluster: Cluster, spans: Sequence[int], num_bytes: float, passes: float, sync: SyncModel
) -> tuple[float, ...]:
    """Bytes over one uplink of each level when groups that span `spans` reduce or gather `num_bytes` per rank.

    A ring of g ranks sends (g - 1) / g of the bytes from each rank to the next for each pass, and one of its edges
    leaves each child. As many rings leave a child as it has groups. Sums made inside first leave n children with
    (n - 1) / n of the bytes instead.

    Source: ring all-reduce and all-gather.
    """
    group_size = math.prod(spans)
    result = []
    for level, span in enumerate(spans):
        num_groups = math.prod(cluster.sizes[level + 1 :]) // math.prod(spans[level + 1 :])
        share = (group_size - 1) / group_size if sync.algorithm == "ring" else (span - 1) / span
        result.append(sync.factor * passes * num_groups * share * num_bytes if span > 1 else 0.0)
    return tuple(result)


# ---- computation: one function per part ----


def imbalance_of(layout: Layout, workload: Workload) -> float:
    """Rows of the busiest rank over the mean, with M ranks' experts on every rank of a domain.

    The spread of a mean of M of G values, drawn without repetition, is sqrt((G - M) / (M (G - 1))) of the values'.
    """
    group, domain = layout.group_size, layout.domain_size
    if group == 1:
        return 1.0
    return 1.0 + (workload.imbalance - 1.0) * math.sqrt((group - domain) / (domain * (group - 1)))


def pre_expert_s(workload: Workload, rates: Rates) -> float:
    """Forward seconds of a layer before its experts.  Source: paper (2), PE."""
    return workload.pre_expert_flops / rates.flops_per_s


def experts_s(layout: Layout, workload: Workload, rates: Rates) -> float:
    """Forward seconds of a layer's experts on the busiest rank.  Source: paper (1), (2).

    DeepSpeed's layer computes all of the capacity, so there nobody is busier than others.
    """
    flops_per_s = rates.expert_flops_per_s or rates.flops_per_s
    if layout.is_padded:
        rows: float = workload.expert_capacity * workload.model.num_experts
    else:
        rows = workload.expert_rows * imbalance_of(layout, workload)
    return rows * workload.expert_flops_per_row / flops_per_s


def expert_calls_s(layout: Layout, workload: Workload, rates: Rates) -> float:
    """Host seconds of calling every expert of the domain once, rows or no rows."""
    return rates.expert_call_s * experts_per_rank(layout, workload) * layout.domain_size


def encode_s(layout: Layout, workload: Workload, way: Literal["weights", "gradients"]) -> float:
    """Seconds to encode what one rank sends of one layer.

    Weights: the owned experts, once for each distinct lossy codec. Gradients: what leaves over a lossy level.
    """
    own_bytes = experts_per_rank(layout, workload) * workload.expert_travel_bytes
    levels = [level for level, size in enumerate(layout.domain_sizes) if size > 1]
    if way == "weights":
        return math.fsum(own_bytes / codec.encode_bytes_per_s for codec in {layout.codecs[i].weight for i in levels})
    return math.fsum(
        (layout.domain_sizes[i] - 1) * math.prod(layout.domain_sizes[:i]) * own_bytes
        / layout.codecs[i].gradient.encode_bytes_per_s
        for i in levels
    )  # fmt: skip


def decode_s(layout: Layout, workload: Workload, way: Literal["weights", "gradients"]) -> float:
    """Seconds to decode what arrives at one rank of one layer; a replica is decoded once, where it stays."""
    own_bytes = experts_per_rank(layout, workload) * workload.expert_travel_bytes
    sizes, total = layout.domain_sizes, 0.0
    for level, size in enumerate(sizes):
        if way == "weights":  # replicas whose owner differs first at this level
            num_slots = (size - 1) * math.prod(sizes[level + 1 :])
            total += num_slots * own_bytes / layout.codecs[level].weight.decode_bytes_per_s
        else:
            num_slots = (size - 1) * math.prod(sizes[:level])
            total += num_slots * own_bytes / layout.codecs[level].gradient.decode_bytes_per_s
    return total


# ---- memory ----


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one rank, without activations."""

    dense_bytes: float
    owned_expert_bytes: float
    replica_bytes: float

    @property
    def total_bytes(self) -> float:
        """All of it."""
        return self.dense_bytes + self.owned_expert_bytes + self.replica_bytes


def memory_of(cluster: Cluster, layout: Layout, workload: Workload) -> Memory:
    """Bytes of parameters, gradients, optimizer state, replicas and mirrors on one rank.

    Per trained parameter: its gradient (shared out from ZeRO-2 on), 8 B of moments and a 4 B master copy of smaller
    types (shared out from ZeRO-1 on), over the ranks that hold the same parameter. Per replica parameter: 4 B under a
    lossy codec, else its type; 4 B gradient sum where it is trained; 4 B residual under a lossy gradient codec. The
    runtime keeps a slot for the owned experts too, which is their mirror under a lossy codec.

    Transient replicas: weights of `prefetch_depth` + 1 layers; gradient sums of as many, which return `prefetch_depth`
    layers later, or of all layers where several micro-steps are added up.
    """
    model = workload.model
    world, group = cluster.num_ranks, layout.group_size
    layers = model.num_moe_layers
    owned = layers * experts_per_rank(layout, workload)
    replicas = owned * layout.domain_size if layout.domain_size > 1 else 0
    weight_bytes = MASTER_BYTES if layout.is_lossy else workload.param_bytes
    held = min(layout.prefetch_depth + 1, layers) / layers if layout.is_transient else 1.0
    summed = held if workload.micro_steps == 1 else 1.0
    residual_bytes = MASTER_BYTES if layout.has_lossy_gradients else 0
    return Memory(
        dense_bytes=_state_bytes(model.dense_params, workload.dense_train_params, workload, world),
        owned_expert_bytes=owned
        * _state_bytes(model.expert_params, workload.expert_travel_params, workload, world // group),
        replica_bytes=replicas
        * (
            (model.expert_params - workload.expert_travel_params) * held * workload.param_bytes
            + workload.expert_travel_params * (held * weight_bytes + summed * MASTER_BYTES + residual_bytes)
        ),
    )


def _state_bytes(num_params: float, num_trained: float, workload: Workload, num_holders: int) -> float:
    """Bytes of parameters of which some are trained, held alike by `num_holders` ranks."""
    master_bytes = MASTER_BYTES if workload.param_bytes < MASTER_BYTES else 0
    optimizer = num_trained * (ADAM_BYTES + master_bytes) / (num_holders if workload.zero_stage >= 1 else 1)
    gradients = num_trained * workload.param_bytes / (num_holders if workload.zero_stage >= 2 else 1)
    return num_params * workload.param_bytes + gradients + optimizer


# ---- the clock ----


@dataclass
class _Link:
    """One level's uplink: packets in order, each with the bytes that are left of it."""

    bytes_per_s: float
    queue: deque[list[float]] = field(default_factory=deque)  # [packet, bytes left]
    finish_s: dict[int, float] = field(default_factory=dict)
    backlog: float = 0.0

    def add(self, packet: int, num_bytes: float) -> None:
        self.queue.append([packet, num_bytes])
        self.backlog += num_bytes

    def serve(self, start_s: float, duration_s: float, bytes_per_s: float) -> None:
        """Let packets flow for a while."""
        capacity = duration_s * bytes_per_s
        elapsed_s = 0.0
        while self.queue and self.queue[0][1] <= capacity:
            packet, num_bytes = self.queue.popleft()
            capacity -= num_bytes
            elapsed_s += num_bytes / bytes_per_s
            self.finish_s[int(packet)] = start_s + elapsed_s
            self.backlog -= num_bytes
        if self.queue:
            self.queue[0][1] -= capacity
            self.backlog -= capacity
        else:
            self.backlog = 0.0

    def finish_of(self, packet: int, now_s: float) -> float:
        """When `packet` has left, if from now on nothing but packets flows."""
        if packet in self.finish_s:
            return self.finish_s[packet]
        ahead = 0.0
        for other, num_bytes in self.queue:
            ahead += num_bytes
            if other == packet:
                break
        return now_s + ahead / self.bytes_per_s


@dataclass(frozen=True)
class _Stage:
    """One round of messages: bytes over uplinks, by level, and the seconds until the first byte arrives."""

    level_bytes: tuple[tuple[int, float], ...]
    latency_s: float


class _Clock:
    """Time of one rank; whatever advances it says why."""

    def __init__(self, bandwidths: Sequence[float], latencies: Sequence[float]) -> None:
        self.now_s = 0.0
        self.seconds: dict[str, float] = {item.name: 0.0 for item in fields(StepTerms)}
        self.links = [_Link(bandwidth) for bandwidth in bandwidths]
        self._latencies = latencies
        self._packets: dict[int, tuple[float, ...]] = {}

    def spend(self, seconds: float, term: str) -> None:
        """Compute or wait for `seconds`; packets flow meanwhile."""
        if seconds <= 0.0:
            return
        for link in self.links:
            if link.queue:
                link.serve(self.now_s, seconds, link.bytes_per_s)
        self.now_s += seconds
        self.seconds[term] += seconds

    def exchange(self, stages: Sequence[_Stage], term: str, round_s: float) -> None:
        """Rows over the links, stage by stage and level by level; a stage takes the host `round_s` at least.

        On its level a row shares the link byte for byte with the packets in flight.
        """
        for stage in stages:
            begin_s = self.now_s
            self.spend(stage.latency_s, term)
            for level, num_bytes in stage.level_bytes:
                link = self.links[level]
                shared = min(link.backlog, num_bytes) if link.queue else 0.0
                shared_s, alone_s = 2.0 * shared / link.bytes_per_s, (num_bytes - shared) / link.bytes_per_s
                for other in self.links:
                    if other is link and shared_s:
                        other.serve(self.now_s, shared_s, other.bytes_per_s / 2.0)
                        other.serve(self.now_s + shared_s, alone_s, other.bytes_per_s)
                    elif other.queue:
                        other.serve(self.now_s, shared_s + alone_s, other.bytes_per_s)
                self.now_s += shared_s + alone_s
                self.seconds[term] += shared_s + alone_s
            self.spend(begin_s + round_s - self.now_s, "host_s")

    def send_packet(self, packet: int, level_bytes: tuple[float, ...]) -> None:
        """Queue one packet on every level that it crosses."""
        self._packets[packet] = level_bytes
        for link, num_bytes in zip(self.links, level_bytes, strict=True):
            if num_bytes > 0:
                link.add(packet, num_bytes)

    def await_packet(self, packet: int, term: str) -> None:
        """Wait until a packet has arrived over all of its levels.

        The levels pass it on one after the other and work on different packets at once, as a line of machines does:
        it has left the busiest level, and has spent its own time on the others.
        """
        level_bytes = self._packets[packet]
        own_s = [num_bytes / link.bytes_per_s for link, num_bytes in zip(self.links, level_bytes, strict=True)]
        total_s = math.fsum(own_s)
        arrival_s = 0.0
        for level, link in enumerate(self.links):
            if level_bytes[level] > 0:
                arrival_s = max(arrival_s, link.finish_of(packet, self.now_s) + total_s - own_s[level])
        arrival_s += math.fsum(self._latencies[level] for level, num_bytes in enumerate(level_bytes) if num_bytes > 0)
        self.spend(arrival_s - self.now_s, term)


# ---- the step ----


@dataclass(frozen=True)
class _Costs:
    """What every layer of a step costs; all layers are alike."""

    pre_s: float
    experts_s: float
    calls_s: float
    round_s: float  # host time of one round of messages
    dispatch: tuple[_Stage, ...]
    combine: tuple[_Stage, ...]
    output_gradients: tuple[_Stage, ...]
    input_gradients: tuple[_Stage, ...]
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
    clock = _Clock(bandwidths, latencies)
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

    def stages(extra_bytes: float, *, counts: bool = False) -> tuple[_Stage, ...]:
        return _stages(layout, workload, rows, below, latencies, extra_bytes=extra_bytes, counts=counts)

    extra = 0 if layout.is_padded else 1
    return _Costs(
        pre_s=pre_expert_s(workload, rates),
        experts_s=experts_s(layout, workload, rates),
        calls_s=rates.layer_s + expert_calls_s(layout, workload, rates),
        round_s=rates.all_to_all_s if layout.is_padded else rates.exchange_s,
        dispatch=stages(extra * workload.dispatch_extra_bytes, counts=not layout.is_padded),
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
    counts: bool,
) -> tuple[_Stage, ...]:
    """Rounds of messages of one exchange: its rows, and before them the row counts if they are not known.

    Direct exchanges wait for the slowest level once; level by level each level is waited for in turn. A rank's
    messages leave one after the other, so the levels' seconds add up.
    """
    used = [level for level, count in enumerate(layout.domain_counts) if count > 1]
    if layout.is_padded or layout.exchange == "direct":
        groups = [used] if used else []
    else:
        groups = [[level] for level in used]
    stages = []
    for group in groups:
        latency_s = max(latencies[level] for level in group)
        if counts:
            stages.append(_Stage(tuple((i, COUNT_BYTES * _peers(layout, i) * below[i]) for i in group), latency_s))
        level_bytes = tuple(
            (i, rows[i] * below[i] * (workload.row_bytes / _token_ratio(layout, i) + extra_bytes)) for i in group
        )
        stages.append(_Stage(level_bytes, latency_s))
    return tuple(stages)


def _token_ratio(layout: Layout, level: int) -> float:
    return 1.0 if layout.is_padded else layout.codecs[level].token.ratio


def _peers(layout: Layout, level: int) -> int:
    """Destinations of one rank whose messages are counted at a level."""
    counts = layout.domain_counts
    beyond = math.prod(counts[level + 1 :]) if layout.exchange == "direct" else 1
    return (counts[level] - 1) * beyond


def _times(per_rank: Sequence[float], below: Sequence[int]) -> tuple[float, ...]:
    return tuple(num_bytes * count for num_bytes, count in zip(per_rank, below, strict=True))


def _run_step(clock: _Clock, costs: _Costs, layout: Layout, workload: Workload, rates: Rates) -> None:
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
    clock: _Clock, costs: _Costs, layout: Layout, workload: Workload, rates: Rates, packet_of: PacketOf
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


def _run_transient_step(clock: _Clock, costs: _Costs, layout: Layout, workload: Workload, rates: Rates) -> None:
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


def _plain_passes(clock: _Clock, costs: _Costs, layout: Layout, workload: Workload) -> None:
    """The forwards and backwards in which nothing but token rows travels: one of each is timed, the rest repeat it."""
    plain = _plain_layer(clock, costs, workload)
    repeats = (workload.micro_steps - 1) * workload.model.num_moe_layers
    for term, seconds in plain.seconds.items():
        clock.seconds[term] += repeats * seconds
    # Nothing is queued here: the first forward has waited for all weights, and no gradient has left yet.
    clock.now_s += repeats * plain.now_s


def _plain_layer(clock: _Clock, costs: _Costs, workload: Workload) -> _Clock:
    """A clock on which one layer has run forward and backward with idle links."""
    plain = _Clock([link.bytes_per_s for link in clock.links], [0.0] * len(clock.links))
    _forward_layer(plain, costs, 0, _no_packet, 0.0)
    _backward_layer(plain, costs, workload, 0, _no_packet)
    plain.spend(2.0 * costs.pre_s, "dense_s")
    return plain


def _forward_layer(clock: _Clock, costs: _Costs, layer: int, packet_of: PacketOf, decode_seconds: float) -> None:
    clock.spend(costs.pre_s, "dense_s")
    packet = packet_of(layer)
    clock.exchange(costs.dispatch, "tokens_s", costs.round_s)
    if packet is not None:
        clock.await_packet(packet, "expert_weights_s")
        clock.spend(decode_seconds, "codec_s")
    clock.spend(costs.calls_s, "host_s")
    clock.spend(costs.experts_s, "experts_s")
    clock.exchange(costs.combine, "tokens_s", costs.round_s)


def _backward_layer(clock: _Clock, costs: _Costs, workload: Workload, layer: int, packet_of: PacketOf) -> None:
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


def _take_gradients(clock: _Clock, packet: int, layout: Layout, workload: Workload) -> None:
    clock.await_packet(packet, "expert_gradients_s")
    clock.spend(decode_s(layout, workload, "gradients"), "codec_s")


def _expose(clock: _Clock, costs: _Costs, workload: Workload, rates: Rates, latencies: Sequence[float]) -> None:
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
    clock: _Clock,
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
        latency_s = passes * math.fsum(
            (span - 1) * latency for span, latency in zip(spans, latencies, strict=True) if num_bytes
        )
        used = tuple((level, count) for level, count in enumerate(per_level) if count > 0)
        seconds = [count / clock.links[level].bytes_per_s for level, count in used]
        # The links of a ring are busy at the same time, and the slowest one sets the pace; sums go level by level.
        transfer_s = max(seconds, default=0.0) if sync.algorithm == "ring" else math.fsum(seconds)
        clock.spend(latency_s + transfer_s, term)
        totals.append(per_level)
    return totals[0], totals[1]


def _optimize(clock: _Clock, cluster: Cluster, layout: Layout, workload: Workload, rates: Rates) -> None:
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
