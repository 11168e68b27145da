# SPDX-License-Identifier: Apache-2.0
"""The program of one training step of a plan, in the steady state.

gathers, weights leave -> A x (forward: layer by layer, backward: layer by layer) -> sums

layer, forward    before the experts | dispatch | wait for replicas | experts | combine
layer, backward   output gradients | experts | input gradients | replicas' gradients leave | all else
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ds_hybridep.geometry.cluster import Cluster
from ds_hybridep.plan.costs import (
    Way,
    expert_parts,
    gradients_sent,
    host_traffic_s,
    layers_in_flight,
    padded_rows,
    replicas_over,
)
from ds_hybridep.plan.held import Held, dense_parameters, shared_experts
from ds_hybridep.plan.plan import PricedPlan
from ds_hybridep.plan.program import (
    Instruction,
    Kind,
    Message,
    MessageStage,
    Peers,
    PlacePart,
    Post,
    Program,
    Repeat,
    Run,
    Wait,
)
from ds_hybridep.plan.rates import CodecCost, Rates
from ds_hybridep.plan.routing import Routing, experts_per_rank, routing_of
from ds_hybridep.plan.synchronisation import Synchronisation
from ds_hybridep.plan.workload import COUNT_BYTES, Workload

FIND: dict[Kind, Callable[[Cluster, PricedPlan, Workload], Held]] = {
    "dense_sync": dense_parameters,
    "expert_sync": shared_experts,
}


def step_program(
    cluster: Cluster,
    plan: PricedPlan,
    workload: Workload,
    rates: Rates,
    *,
    gathers_by_level: bool = True,
) -> Program:
    """What every rank does in one optimizer step.

    gathers_by_level: expert packets cross a slow level once for each child; False: every rank sends to all others of
        its domain, as the paper counts it.

    Raises PlanError if the arguments do not fit each other.
    """
    plan.check_fits(cluster)
    return _program_of(
        _Step(
            cluster=cluster.without_bandwidths(),
            plan=plan,
            workload=workload,
            rates=rates,
            gathers_by_level=gathers_by_level,
        )
    )


@lru_cache(maxsize=512)
def _program_of(step: "_Step") -> Program:
    """The same at all bandwidths, so that many of them are priced fast."""
    return step.program()


@dataclass(frozen=True, kw_only=True)
class _Step:
    cluster: Cluster
    plan: PricedPlan
    workload: Workload
    rates: Rates
    gathers_by_level: bool

    def program(self) -> Program:
        workload, plan = self.workload, self.plan
        layers = tuple(range(workload.model.num_moe_layers))
        dense, experts = (
            Synchronisation(
                kind=kind,
                held=find(self.cluster, plan, workload),
                cluster=self.cluster,
                plan=plan,
                factor=self.rates.sync_factor,
            )
            for kind, find in FIND.items()
        )
        start_experts, finish_experts = experts.gather_parameters()
        start_dense, finish_dense = dense.gather_parameters()
        weights, gradients = self._packet("weights"), self._packet("gradients")
        exchanges = self._exchanges()
        forward, backward = self._forward(exchanges), self._backward(exchanges)
        take_weights = self._take(weights, self._decode_s("weights"))
        between = (
            Repeat(layers[::-1], (*backward, self._before_experts("backward"))),
            *(*dense.sums(is_last=False), *experts.sums(is_last=False)),
            Repeat(layers, forward),
        )
        return (
            # Experts that several groups hold must arrive before they leave to replicas.
            *(*start_experts, *start_dense, *finish_experts),
            Repeat(layers, self._send("weights", weights)),
            *finish_dense,
            Repeat(layers, self._forward(exchanges, take_weights)),
            Repeat(tuple(range(1, workload.micro_steps)), between),
            *self._last_backward(layers, backward, gradients),
            *(*dense.sums(is_last=True), *experts.sums(is_last=True)),
            Run("host_s", "step", self.rates.step_s, is_computing=False),
        )

    @cached_property
    def _routing(self) -> Routing:
        return routing_of(self.plan, self.workload)

    # ---- a layer ----

    def _before_experts(self, label: str) -> Run:
        workload = self.workload
        flops = workload.pre_expert_backward_flops if label == "backward" else workload.pre_expert_flops
        return Run("dense_s", label, flops / self.rates.flops_per_s)

    def _experts(self, label: str, *, is_backward: bool = False) -> Program:
        """Calls and computation; DeepSpeed's layer computes the full capacity.  Source: paper (1), (2)."""
        plan, workload, rates, routing = self.plan, self.workload, self.rates, self._routing
        calls_s = rates.layer_s + rates.expert_call_s * experts_per_rank(plan, workload) * plan.domain_size
        calls_s += rates.expert_call_s * routing.num_far
        rows = workload.expert_rows * routing.load_after
        if plan.is_padded:
            rows = workload.expert_capacity * workload.model.num_experts
        of_row = workload.expert_backward_flops_per_row if is_backward else workload.expert_flops_per_row
        seconds = rows * of_row / (rates.expert_flops_per_s or rates.flops_per_s)
        return (
            Run("host_s", "calls", (2.0 if is_backward else 1.0) * calls_s, is_computing=False),
            Run("experts_s", label, seconds, grows_with_rows=not plan.is_padded),
        )

    def _forward(self, exchanges: dict[str, Program], take_weights: Program = (), label: str = "forward") -> Program:
        before = self._before_experts(label)
        experts = self._experts("experts")
        return _without_pauses(before, *exchanges["dispatch"], *take_weights, *experts, *exchanges["combine"])

    def _backward(self, exchanges: dict[str, Program]) -> Program:
        """Up to the gradient of the experts' input."""
        again = self._forward(exchanges, label="recompute") if self.workload.is_checkpointed else ()
        experts = self._experts("experts, backward", is_backward=True)
        return _without_pauses(*again, *exchanges["output gradients"], *experts, *exchanges["input gradients"])

    def _last_backward(self, layers: tuple[int, ...], backward: Program, gradients: Message) -> Program:
        """The backward in which gradients of replicas return."""
        before_experts = self._before_experts("backward")
        if not gradients.stages:
            return (Repeat(layers[::-1], (*backward, before_experts)),)
        steps: list[Instruction] = []
        returning: deque[int] = deque()
        depth = layers_in_flight(self.plan, self.workload)
        take = self._take(gradients, self._decode_s("gradients"))
        layer_backward = (*backward, *self._send("gradients", gradients))
        for layer in reversed(layers):
            steps.append(Repeat((layer,), layer_backward))
            returning.append(layer)
            while len(returning) > depth:
                steps.append(Repeat((returning.popleft(),), take))
            steps.append(Repeat((layer,), (before_experts,)))
        return *steps, Repeat(tuple(returning), take)

    # ---- token rows ----

    def _exchanges(self) -> dict[str, Program]:
        workload = self.workload
        gate_gradients = 0 if self.plan.is_padded else workload.return_extra_bytes
        return {
            "dispatch": self._exchange("dispatch"),
            "combine": self._exchange("combine", is_back=True),
            "output gradients": self._exchange("output gradients"),
            "input gradients": self._exchange("input gradients", gate_gradients, is_back=True),
        }

    def _exchange(self, label: str, beside_bytes: float = 0.0, *, is_back: bool = False) -> Program:
        """Rounds of messages.  Bytes flow while the host is busy with a round.

        A direct exchange has one round for all levels, a hierarchical one has a round for each.  Our own dispatch
        encodes rows, and sends gate weights and row counts with them.
        """
        plan, workload, counts = self.plan, self.workload, self.plan.domain_counts
        ours = label == "dispatch" and not plan.is_padded
        beside = workload.dispatch_extra_bytes if ours else beside_bytes
        ratios = [codecs.token.ratio if ours else 1.0 for codecs in plan.codecs]
        row_bytes = [workload.row_bytes / ratio + beside for ratio in ratios]
        every = tuple(range(len(counts)))
        rounds: list[tuple[int, ...]] = [(level,) for level in every if counts[level] > 1]
        if rounds and plan.token_exchange != "hierarchical":
            rounds = [every]
        round_s = self.rates.all_to_all_s if plan.is_padded else self.rates.exchange_s
        program: list[Instruction] = []
        for levels in reversed(rounds) if is_back else rounds:
            fixed, by_level = [float(COUNT_BYTES * ours)] * len(counts), [0.0] * len(counts)
            chances = [0.0] * len(counts)
            if plan.is_padded:
                fixed = [padded_rows(plan, workload) * workload.row_bytes] * len(counts)
            else:  # by now, rows may have come from as many ranks as there are domains over slower levels
                rows = workload.tokens_per_rank * workload.row_scale * math.prod(counts[: levels[0]])
                chances = self._routing.busiest_chances(levels)
                by_level = [rows * num_bytes for num_bytes in row_bytes]
            stage = MessageStage.between(
                Peers(("domain",), levels),
                self.cluster,
                plan,
                fixed,
                row_bytes=by_level,
                chances=chances,
                is_back=is_back,
            )
            message = Message("tokens", label, (stage,))
            busy = Run("host_s", label, round_s, is_computing=False)
            program += [self._hand_over(message), Post(message), busy, Wait(message)]
        return tuple(program)

    def _hand_over(self, message: Message) -> Run:
        """Work of the host for what a rank sends to each of its peers, one after the other."""
        sizes = self.cluster.sizes
        num_sent = sum(
            stage.peers.count(self.plan, sizes, level) for stage in message.stages for level in stage.levels
        )
        return Run("host_s", "messages", num_sent * self.rates.message_s)

    # ---- packets of experts ----

    def _packet(self, way: Way) -> Message:
        """Weights travel slowest level first, gradients fastest level first.  Source: experts/replicas.py.

        At level l, with domain size S_l, a rank sends S_l - 1 neighbours its own experts and (S_j - 1) S_(j+1) ...
        S_(l-1) times as many that came over each slower level j, in level j's codec.  Gradients are summed at each
        level, so the codec of a level applies to all that it carries.  Weights of hot experts travel as they are.
        """
        plan, workload, routing = self.plan, self.workload, self._routing
        parts = expert_parts(workload, experts_per_rank(plan, workload))
        codecs = [one.weight if way == "weights" else one.gradient for one in plan.codecs]
        own = [codec.message_bytes(parts, workload.param_bytes) for codec in codecs]
        of_hot = [float(workload.expert_travel_bytes)] * len(codecs)
        if way == "gradients":
            of_hot = [codec.message_bytes(expert_parts(workload, 1), workload.param_bytes) for codec in codecs]
        levels, by_level = plan.gather_levels, list[tuple[int, MessageStage]]()
        if not self.gathers_by_level and levels:  # source: paper (4)
            by_level.append((levels[0], MessageStage.between(Peers(("offset",), levels), self.cluster, plan, own)))
        for level in levels if self.gathers_by_level else ():
            held = self._held_bytes(way, level, own) + routing.num_passed_on(level) * of_hot[level]
            by_level.append((level, self._among_neighbours("offset", level, held)))
        if routing.hot and plan.hot is not None:
            to_each = routing.num_copies * of_hot[plan.hot.level] / (routing.num_sharing - 1)
            by_level.append((plan.hot.level, self._among_neighbours("domain", plan.hot.level, to_each)))
        stages = tuple(stage for _, stage in sorted(by_level, key=lambda one: one[0]))
        if way == "weights":
            return Message("expert_weights", way, stages)
        return Message("expert_gradients", way, stages[::-1])

    def _held_bytes(self, way: Way, level: int, own: Sequence[float]) -> float:
        """What a rank sends to each neighbour at a level; own: bytes of its experts, by level."""
        sizes = self.plan.domain_sizes
        if way == "gradients":
            return math.prod(sizes[:level]) * own[level]
        held = own[level]
        for slower in range(level):
            held += (sizes[slower] - 1) * math.prod(sizes[slower + 1 : level]) * own[slower]
        return held

    def _among_neighbours(self, part: PlacePart, level: int, num_bytes: float) -> MessageStage:
        per_peer = [num_bytes] * len(self.cluster.sizes)
        return MessageStage.between(Peers((part,), (level,)), self.cluster, self.plan, per_peer)

    def _send(self, way: Way, message: Message) -> Program:
        """Encode and post one layer's packet; weights are queued right after the optimizer step."""
        if not message.stages:
            return ()
        seconds = self._encode_s(way)
        seconds += host_traffic_s(self.plan, self.workload, way)
        packet = Run("host_s", "packet", self.rates.packet_s, is_computing=False)
        return _without_pauses(
            Run("codec_s", f"encode {way}", seconds), packet, self._hand_over(message), Post(message)
        )

    def _take(self, message: Message, decode_s: float) -> Program:
        return (Wait(message), Run("codec_s", f"decode {message.label}", decode_s)) if message.stages else ()

    def _encode_s(self, way: Way) -> float:
        """Seconds to encode one layer's packets: weights once for each codec, every message of gradients."""
        plan, owned = self.plan, experts_per_rank(self.plan, self.workload)
        if way == "gradients":
            return math.fsum(count * self._expert_bytes / one.encode_bytes_per_s for count, one in self._gradients())
        codecs = {plan.codecs[level].weight for level in plan.gather_levels}
        return math.fsum(owned * self._expert_bytes / one.encode_bytes_per_s for one in codecs)

    def _decode_s(self, way: Way) -> float:
        """Seconds to decode one layer's packets: a replica once, where it stays, every message of gradients."""
        plan, owned = self.plan, experts_per_rank(self.plan, self.workload)
        if way == "gradients":
            return math.fsum(count * self._expert_bytes / one.decode_bytes_per_s for count, one in self._gradients())
        return math.fsum(
            owned * replicas_over(plan, level) * self._expert_bytes / plan.codecs[level].weight.decode_bytes_per_s
            for level in plan.gather_levels
        )

    @property
    def _expert_bytes(self) -> int:
        return self.workload.expert_travel_bytes

    def _gradients(self) -> Iterator[tuple[float, CodecCost]]:
        """By level, the experts whose gradients a rank sends over it, and their codec."""
        for level, codecs in enumerate(self.plan.codecs):
            yield gradients_sent(self.plan, self.workload, level), codecs.gradient


def _without_pauses(*steps: Instruction) -> Program:
    """All that takes time."""
    return tuple(one for one in steps if not isinstance(one, Run) or one.seconds > 0.0)
