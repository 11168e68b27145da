# SPDX-License-Identifier: Apache-2.0
"""One training step of a plan as a program: what every rank computes, posts and waits for.

In this order:

    weights of all layers are posted -> A x (forward, backward) -> synchronisation -> optimizer

    layer, forward    before the experts | dispatch | wait for replicas | experts | combine
    layer, backward   output gradients | experts | input gradients | post the replicas' gradients | before the experts

Transient replicas are posted in every pass, ahead of the layer that needs them, and waited for in backwards too.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ds_hybridep.errors import PlanError
from ds_hybridep.plan.cluster import Cluster
from ds_hybridep.plan.layout import Layout, Rates, SyncModel
from ds_hybridep.plan.replica_pool import ReplicaPool
from ds_hybridep.plan.stream_model import OPTIMIZER_TRAFFIC_BYTES
from ds_hybridep.plan.workload import COUNT_BYTES, Workload
from ds_hybridep.simulate.classes import Floats, RankClasses
from ds_hybridep.simulate.events import Instruction, Operation, Post, Run, Wait
from ds_hybridep.simulate.traffic import Ranks, Routing, Traffic, TrafficMaker, held_blocks


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What is taken to be so where machines differ.  The defaults are the runtime as it is.

    crosses_inner_links: a message between datacentres also passes the links inside them, as in a tree of switches; not
        so where a GPU has one link for its neighbours and another one for the world.
    is_fair_to_flows: flows share a link alike; otherwise operations do, however many flows they have.
    levels_in_turn: a rank's messages over different levels leave one after the other, slowest level first.
    gathers_by_level: expert packets cross a slow level once per child; otherwise every rank sends straight to all
        others of its domain, as the paper counts it.
    """

    crosses_inner_links: bool = False
    is_fair_to_flows: bool = True
    levels_in_turn: bool = False
    gathers_by_level: bool = True


STREAM_MODEL_ASSUMPTIONS = Assumptions(is_fair_to_flows=False, levels_in_turn=True)


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """Something that is not as the levels say, below one place of the tree.

    place: coordinates from level 0 on: (3,) is the fourth DC, (3, 1) its second GPU.
    bandwidth_factor: of the uplink of that child.
    slowdown: seconds of computation of all ranks below, over what they would be.
    from_s: since when; computation that has begun keeps its pace.
    """

    place: tuple[int, ...]
    bandwidth_factor: float = 1.0
    slowdown: float = 1.0
    from_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.bandwidth_factor > 0 and self.slowdown > 0 and self.from_s >= 0):
            raise PlanError(
                f"the deviation at {self.place} has bandwidth_factor {self.bandwidth_factor}, slowdown "
                f"{self.slowdown} and from_s {self.from_s}, but must have the first two > 0 and the last >= 0"
            )


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is simulated: one step of a plan under given conditions.

    cluster, layout, workload, rates, sync: as `stream_model.predict` takes them. `rates.overlap` is the share of its
        rate at which a flow proceeds while a rank that takes part in it computes.
    deviations: places that are not as their level says.
    jitter: standard deviation of the logarithm of each piece of computation; drawn for each rank and piece.
    seed: of what is drawn.
    measured_s: seconds of computation by name, such as "forward 3", in place of those that the rates give.
    """

    cluster: Cluster
    layout: Layout
    workload: Workload
    rates: Rates
    sync: SyncModel = SyncModel()
    deviations: tuple[Deviation, ...] = ()
    assumptions: Assumptions = Assumptions()
    jitter: float = 0.0
    seed: int = 0
    measured_s: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        sizes = self.cluster.sizes
        if len(self.layout.spans) != len(sizes) or any(
            size % span for span, size in zip(self.layout.spans, sizes, strict=True)
        ):
            raise PlanError(f"a group that spans {self.layout.spans} does not fit the levels {self.cluster}")
        if self.workload.model.num_experts % self.layout.group_size:
            raise PlanError(
                f"{self.workload.model.num_experts} experts cannot be shared evenly by an expert-parallel group of "
                f"{self.layout.group_size} ranks"
            )
        if self.workload.imbalance != 1.0:
            raise PlanError("the simulator takes no imbalance; give expert_load, the rows of each expert")
        for deviation in self.deviations:
            place = deviation.place
            if not 1 <= len(place) <= len(sizes) or not all(
                0 <= at < size for at, size in zip(place, sizes, strict=False)
            ):
                raise PlanError(f"a deviation is at {place}, but the cluster {self.cluster} has no such place")


@dataclass(frozen=True)
class Schedule:
    """A program with its operations, and the bytes that all ranks together send, by level and kind."""

    program: list[Instruction]
    operations: list[Operation]
    sent_bytes: tuple[dict[str, float], ...]


def always(num_bytes: float) -> Callable[[int], Floats]:
    """The same bytes at every level, between all classes."""
    return lambda _: np.full((1, 1), float(num_bytes))


def _with_more(bytes_between: Callable[[int], Floats], more: float, level: int) -> Floats:
    return bytes_between(level) + more


@dataclass(frozen=True)
class _Sent:
    """Sub-operations of one transfer, in stages; a stage begins where the one before it has arrived."""

    stages: tuple[tuple[Traffic, ...], ...]


def build_schedule(
    scenario: Scenario, ranks: Ranks, routing: Routing, classes: RankClasses, maker: TrafficMaker
) -> Schedule:
    """The program that the plan's ranks run in one optimizer step."""
    builder = _Builder(scenario, ranks, routing, classes, maker)
    builder.build()
    return Schedule(builder.program, builder.operations, tuple(builder.sent_bytes))


class _Builder:
    def __init__(
        self, scenario: Scenario, ranks: Ranks, routing: Routing, classes: RankClasses, maker: TrafficMaker
    ) -> None:
        self.scenario = scenario
        self.layout, self.workload, self.rates = scenario.layout, scenario.workload, scenario.rates
        self.ranks, self.classes, self.maker = ranks, classes, maker
        self.program: list[Instruction] = []
        self.operations: list[Operation] = []
        self.sent_bytes: list[dict[str, float]] = [{} for _ in scenario.cluster.sizes]
        self.chances = tuple(chance[classes.examples] for chance in routing.chances)
        self.pairs = routing.pairs[classes.examples]
        self.own_bytes = self._num_local() * self.workload.expert_travel_bytes
        self.has_packets = self.layout.domain_size > 1
        self.weight_bytes = self.own_bytes
        if self.layout.is_transient:  # frozen parameters too
            self.weight_bytes = self._num_local() * self.workload.model.expert_params * self.workload.param_bytes
        self._pool = ReplicaPool(self.workload.model.num_moe_layers, self.layout.prefetch_depth)
        self._arriving: dict[int, list[int]] = {}  # packets of weights on their way, by layer
        self._random = np.random.default_rng(scenario.seed)
        self.names = [level.name for level in scenario.cluster.levels]

    # ---- the step ----

    def build(self) -> None:
        """Fill program and operations."""
        workload, layers = self.workload, self.workload.model.num_moe_layers
        dispatch, combine = self._exchange(is_back=False, extra="dispatch"), self._exchange(is_back=True)
        output_gradients, input_gradients = self._exchange(is_back=False), self._exchange(is_back=True, extra="return")
        weights, gradients = self._weights(), self._gradients()
        request = partial(self._request, weights)
        if self.layout.is_transient:
            request(0)
        elif self.has_packets:
            self._arriving = {layer: self._send_packets(layer, weights) for layer in range(layers)}
        for micro_step in range(workload.micro_steps):
            for layer in range(layers):
                self._forward(layer, dispatch, combine, request)
            is_last = micro_step == workload.micro_steps - 1
            returning: deque[list[int]] = deque()
            for layer in reversed(range(layers)):
                ask = partial(request, is_backward=True)
                if workload.is_checkpointed:
                    self._forward(layer, dispatch, combine, ask, "recompute")
                self._backward_experts(layer, output_gradients, input_gradients, ask)
                if self.has_packets and is_last:
                    returning.append(self._return_gradients(layer, gradients))
                    while len(returning) > self.layout.prefetch_depth:
                        self._take_gradients(returning.popleft())
                self._run("dense_s", f"backward {layer}", 2.0 * self._pre_s())
            while returning:
                self._take_gradients(returning.popleft())
            if workload.zero_stage == 2 or is_last:
                self._synchronise(is_last=is_last)
        self._optimize()

    def _forward(
        self, layer: int, dispatch: _Sent, combine: _Sent, request: Callable[[int], None], what: str = "forward"
    ) -> None:
        self._run("dense_s", f"{what} {layer}", self._pre_s())
        request(layer)
        self._swap(dispatch, f"dispatch {layer}")
        if self._take_weights(layer):
            self._run("codec_s", f"decode weights {layer}", self._decode_weights_s())
        self._run("host_s", f"calls {layer}", self._calls_s(), is_computing=False)
        self._run("experts_s", f"experts {layer}", self._experts_s())
        self._swap(combine, f"combine {layer}")

    def _backward_experts(
        self, layer: int, output_gradients: _Sent, input_gradients: _Sent, request: Callable[[int], None]
    ) -> None:
        self._swap(output_gradients, f"output gradients {layer}")
        request(layer)
        self._take_weights(layer)
        self._run("host_s", f"calls {layer}", 2.0 * self._calls_s(), is_computing=False)
        self._run("experts_s", f"experts, backward {layer}", 2.0 * self._experts_s())
        self._swap(input_gradients, f"input gradients {layer}")

    def _request(self, weights: _Sent, layer: int, *, is_backward: bool = False) -> None:
        """Post the transient replicas that a layer and those after it need and that are not held."""
        if self.has_packets and self.layout.is_transient:
            for other in self._pool.request(layer, is_backward=is_backward)[1]:
                self._arriving[other] = self._send_packets(other, weights)

    def _take_weights(self, layer: int) -> bool:
        """Wait for a layer's replicas, if some are on their way."""
        posted = self._arriving.pop(layer, None)
        if posted is not None:
            self._wait(posted, "expert_weights_s")
        return posted is not None

    def _send_packets(self, layer: int, weights: _Sent) -> list[int]:
        self._run("codec_s", f"encode weights {layer}", self._encode_weights_s())
        self._run("host_s", f"packet {layer}", self.rates.packet_s, is_computing=False)
        return self._post(weights, "expert_weights", f"weights {layer}", channel="weights")

    def _return_gradients(self, layer: int, gradients: _Sent) -> list[int]:
        self._run("codec_s", f"encode gradients {layer}", self._code_gradients_s("encode_bytes_per_s"))
        self._run("host_s", f"packet {layer}", self.rates.packet_s, is_computing=False)
        return self._post(gradients, "expert_gradients", f"gradients {layer}", channel="gradients")

    def _take_gradients(self, packet: list[int]) -> None:
        self._wait(packet, "expert_gradients_s")
        self._run("codec_s", "decode gradients", self._code_gradients_s("decode_bytes_per_s"))

    def _swap(self, sent: _Sent, label: str) -> None:
        """Rows there or back; a round of messages takes the host a while, in which bytes flow already."""
        round_s = self.rates.all_to_all_s if self.layout.is_padded else self.rates.exchange_s
        for stage in sent.stages:
            posted = self._post(_Sent((stage,)), "tokens", label, channel="tokens")
            self._run("host_s", label, round_s, is_computing=False)
            self._wait(posted, "tokens_s")

    # ---- instructions ----

    def _run(self, term: str, label: str, seconds: float | Floats, *, is_computing: bool = True) -> None:
        seconds = self.scenario.measured_s.get(label, seconds) if is_computing else seconds
        by_class = np.broadcast_to(np.asarray(seconds, dtype=np.float64), (self.classes.num_classes,))
        if self.scenario.jitter:
            by_class = by_class * np.exp(self.scenario.jitter * self._random.standard_normal(len(by_class)))
        if by_class.any():
            self.program.append(Run(term, label, by_class, is_computing))

    def _post(self, sent: _Sent, kind: str, label: str, *, channel: str) -> list[int]:
        """Post all stages at once; returns the operations to wait for."""
        posted: list[int] = []
        before: int | None = None
        for number, stage in enumerate(sent.stages):
            for traffic in stage:
                name = channel if len(sent.stages) == 1 else f"{channel} {number}"
                self.operations.append(
                    Operation(label, name, traffic.flows, before, traffic.pattern, traffic.rank_bytes)
                )
                posted.append(len(self.operations) - 1)
                self.program.append(Post(posted[-1]))
                for level, num_bytes in enumerate(traffic.sent_bytes):
                    self.sent_bytes[level][kind] = self.sent_bytes[level].get(kind, 0.0) + num_bytes
            before = posted[-1]
        return posted

    def _wait(self, posted: Sequence[int], term: str) -> None:
        self.program += [Wait(operation, term) for operation in posted]

    # ---- token rows ----

    def _exchange(self, *, is_back: bool, extra: str = "") -> _Sent:
        """Rows to all destinations, or as many back from them."""
        layout, workload = self.layout, self.workload
        num_levels = len(layout.spans)
        beside = {"dispatch": workload.dispatch_extra_bytes, "return": workload.return_extra_bytes, "": 0}[extra]
        header = COUNT_BYTES if extra == "dispatch" and not layout.is_padded else 0

        def row_bytes(level: int) -> float:
            ratio = layout.codecs[level].token.ratio if extra == "dispatch" else 1.0
            return workload.row_bytes / ratio + beside

        if layout.is_padded:
            rows = workload.expert_capacity * workload.model.num_experts / layout.group_size
            used = [level for level, span in enumerate(layout.spans) if span > 1]
            everyone = ("all_to_all", used, always(rows * workload.row_bytes))
            return self._stages([everyone] if used else [], 0)

        def bytes_between(num_tokens: float, chance: Floats) -> Callable[[int], Floats]:
            # The destination's experts are asked for; on the way back the sender is who was asked.
            asked = chance[:, None] if is_back else chance[None, :]
            return lambda level: num_tokens * asked * row_bytes(level)

        tokens = workload.tokens_per_rank * workload.row_scale
        used = [level for level, count in enumerate(layout.domain_counts) if count > 1]
        if layout.exchange == "direct":
            return self._stages([("exchange", used, bytes_between(tokens, self.chances[-1]))] if used else [], header)
        stages = []
        for level in range(num_levels):
            if layout.domain_counts[level] > 1:
                stages.append((f"exchange {level}", [level], bytes_between(tokens, self.chances[level])))
            tokens *= layout.domain_counts[level]
        if is_back:
            stages.reverse()
        return self._stages(stages, header)

    def _stages(self, stages: Sequence[tuple[str, list[int], Callable[[int], Floats]]], header: int) -> _Sent:
        """Rounds of messages, each with a header."""
        split = (
            self._split(pattern, levels, partial(_with_more, bytes_of, header)) for pattern, levels, bytes_of in stages
        )
        return _Sent(tuple(split))

    def _split(
        self, pattern: str, levels: Sequence[int], bytes_between: Callable[[int], Floats]
    ) -> tuple[Traffic, ...]:
        if not self.scenario.assumptions.levels_in_turn:
            return (self.maker.between_peers(pattern, levels, bytes_between),)
        return tuple(self.maker.between_peers(pattern, [level], bytes_between) for level in levels)

    # ---- packets ----

    def _num_local(self) -> int:
        return self.workload.model.num_experts // self.layout.group_size

    def _weights(self) -> _Sent:
        """Slowest level first; what came over slower levels goes on as it came."""
        if not self.scenario.assumptions.gathers_by_level:
            return self._straight([self.weight_bytes / codecs.weight.ratio for codecs in self.layout.codecs])
        stages = []
        for level in self._gather_levels():
            blocks = held_blocks(self.layout, level)
            num_bytes = sum(count / self.layout.codecs[at].weight.ratio for at, count in blocks.items())
            stages.append(self._gather(level, num_bytes * self.weight_bytes))
        return _Sent(tuple(stages))

    def _gradients(self) -> _Sent:
        """Fastest level first: sums for the owners that a neighbour stands nearer to."""
        if not self.scenario.assumptions.gathers_by_level:
            return self._straight([self.own_bytes / codecs.gradient.ratio for codecs in self.layout.codecs])
        stages = []
        for level in reversed(self._gather_levels()):
            num_owners = int(np.prod(self.layout.domain_sizes[:level], dtype=np.int64))
            stages.append(self._gather(level, num_owners * self.own_bytes / self.layout.codecs[level].gradient.ratio))
        return _Sent(tuple(stages))

    def _straight(self, num_bytes: Sequence[float]) -> _Sent:
        """Every rank to all others of its domain, with the bytes of the level between them.  Source: paper (4)."""
        if not self.has_packets:
            return _Sent(())
        straight = self.maker.between_peers(
            "domain", self._gather_levels(), lambda level: np.full((1, 1), num_bytes[level])
        )
        return _Sent(((straight,),))

    def _gather_levels(self) -> list[int]:
        return [level for level, size in enumerate(self.layout.domain_sizes) if size > 1]

    def _gather(self, level: int, num_bytes: float) -> tuple[Traffic, ...]:
        return (self.maker.between_peers(f"gather {level}", [level], always(num_bytes)),)

    # ---- seconds of computation ----

    def _pre_s(self) -> float:
        return self.workload.pre_expert_flops / self.rates.flops_per_s

    def _experts_s(self) -> Floats:
        """[C] forward of the experts of a layer: all capacity, or what came for the domain's experts."""
        flops_per_s = self.rates.expert_flops_per_s or self.rates.flops_per_s
        if self.layout.is_padded:
            rows = np.full(self.classes.num_classes, float(self.workload.expert_capacity))
            rows *= self.workload.model.num_experts
        else:  # one peer in each domain sends its rows here
            rows = self.workload.tokens_per_rank * self.pairs * np.prod(self.layout.domain_counts)
        return rows * self.workload.expert_flops_per_row / flops_per_s

    def _calls_s(self) -> float:
        num_experts = self._num_local() * self.layout.domain_size
        return self.rates.layer_s + self.rates.expert_call_s * num_experts

    def _encode_weights_s(self) -> float:
        codecs = {self.layout.codecs[level].weight for level in self._gather_levels()}
        return sum(self.own_bytes / codec.encode_bytes_per_s for codec in codecs)

    def _decode_weights_s(self) -> float:
        """Every replica once, by the codec of the slowest level between it and its owner."""
        sizes, total = self.layout.domain_sizes, 0.0
        for level in self._gather_levels():
            num_replicas = (sizes[level] - 1) * np.prod(sizes[level + 1 :])
            total += num_replicas * self.own_bytes / self.layout.codecs[level].weight.decode_bytes_per_s
        return float(total)

    def _code_gradients_s(self, rate: str) -> float:
        """Every message of gradients once; as many leave as arrive."""
        sizes, total = self.layout.domain_sizes, 0.0
        for level in self._gather_levels():
            num_messages = (sizes[level] - 1) * np.prod(sizes[:level])
            total += num_messages * self.own_bytes / getattr(self.layout.codecs[level].gradient, rate)
        return float(total)

    # ---- DeepSpeed's own synchronisation, and the optimizer ----

    def _synchronise(self, *, is_last: bool) -> None:
        """Gradients are summed; after the last micro-step parameters are gathered too, from ZeRO 1 on."""
        workload, sync = self.workload, self.scenario.sync
        experts = self.own_bytes * workload.model.num_moe_layers
        dense = workload.dense_train_params * workload.param_bytes
        num_gathers = sync.reduce_passes - 1.0 + (1.0 if is_last and workload.zero_stage >= 1 else 0.0)
        for of_holders, num_bytes in ((False, dense), (True, experts)):
            name = "expert_sync" if of_holders else "dense_sync"
            if sync.algorithm == "ring":
                stages = [self._ring(of_holders=of_holders, num_bytes=sync.factor * num_bytes, passes=1 + num_gathers)]
            else:
                stages = self._by_level(of_holders, sync.factor * num_bytes, num_gathers)
            for stage in stages:
                posted = self._post(_Sent(((stage,),)), name, name.replace("_", " "), channel="sync")
                self._wait(posted, f"{name}_s")

    def _ring(self, *, of_holders: bool, num_bytes: float, passes: float) -> Traffic:
        ring_of = self.ranks.rings(of_holders=of_holders)
        size = int(np.bincount(ring_of).max())
        return self.maker.ring(ring_of, passes * (size - 1) / size * num_bytes, passes=passes)

    def _by_level(self, of_holders: bool, num_bytes: float, num_gathers: float) -> list[Traffic]:
        """Blocks are traded inside first and summed, then over slower levels; gathers go back the same way."""
        sizes = self.scenario.cluster.sizes
        if of_holders:
            sizes = tuple(size // span for size, span in zip(sizes, self.layout.spans, strict=True))
        pattern = "holders" if of_holders else "siblings"
        rounds = []
        for level in reversed(range(len(sizes))):
            if sizes[level] > 1:
                rounds.append((level, num_bytes / np.prod(sizes[level:])))
        trades = [(level, block, 1.0) for level, block in rounds]
        if num_gathers:
            trades += [(level, block, num_gathers) for level, block in reversed(rounds)]
        return [
            self.maker.between_peers(f"{pattern} {level}", [level], always(count * block), latency_count=count)
            for level, block, count in trades
        ]

    def _optimize(self) -> None:
        """A pass over memory, shared out from ZeRO 1 on among the ranks that hold the same parameters."""
        workload, cluster = self.workload, self.scenario.cluster
        is_shared = workload.zero_stage >= 1
        dense = workload.dense_train_params / (cluster.num_ranks if is_shared else 1)
        owned = workload.model.num_moe_layers * self._num_local() * workload.expert_travel_params
        num_holders = cluster.num_ranks // self.layout.group_size
        owned_share = owned / (num_holders if is_shared else 1)
        num_bytes = (dense + owned_share) * OPTIMIZER_TRAFFIC_BYTES
        self._run("optimizer_s", "optimizer", num_bytes / self.rates.memory_bytes_per_s)
        self._run("host_s", "step", self.rates.step_s, is_computing=False)
