# SPDX-License-Identifier: Apache-2.0
"""One training step of a plan as a program: what every rank computes, posts and waits for.

The order of a step with A micro-steps:

    weights of all layers are posted -> A x (forward, backward) -> synchronisation -> optimizer

    layer, forward    before the experts | dispatch | wait for replicas | experts | combine
    layer, backward   output gradients | experts | input gradients | post the replicas' gradients | before the experts

Transient replicas are posted in every pass, before the layer that needs them; backwards wait for them too.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ds_hybridep.plan.costs import Way, host_traffic_s, layers_in_flight
from ds_hybridep.plan.stream_model import OPTIMIZER_TRAFFIC_BYTES
from ds_hybridep.plan.sync_stages import dense_parameters, shared_experts, sync_host_traffic_s
from ds_hybridep.simulate.classes import RankClasses
from ds_hybridep.simulate.events import Instruction, Operation, Post, Run, Wait
from ds_hybridep.simulate.flows import Floats
from ds_hybridep.simulate.scenario import Scenario
from ds_hybridep.simulate.step_traffic import StagedTransfer, StepTraffic, SyncMove
from ds_hybridep.simulate.traffic import Ranks, Routing, TrafficMaker


@dataclass(frozen=True)
class Schedule:
    """A program with its operations, and the bytes that all ranks together send, by level and kind."""

    program: list[Instruction]
    operations: list[Operation]
    sent_bytes: tuple[dict[str, float], ...]

    @property
    def waits(self) -> tuple[int, ...]:
        """How often a rank waits in a row for something over each level, counted as in `transport.channels`."""
        waits = [0] * len(self.sent_bytes)
        before: dict[int, list[int]] = {}
        for one in self.program:
            if isinstance(one, Post):
                before[one.operation] = list(waits)
            elif isinstance(one, Wait):
                for level in self.operations[one.operation].levels:
                    waits[level] += waits[level] == before[one.operation][level]
        return tuple(waits)


def build_schedule(
    scenario: Scenario, ranks: Ranks, routing: Routing, classes: RankClasses, maker: TrafficMaker
) -> Schedule:
    """The program that the plan's ranks run in one optimizer step."""
    traffic = StepTraffic(scenario, ranks, routing, classes, maker)
    builder = _Builder(scenario, traffic, _Times(scenario, routing, classes))
    builder.build()
    return Schedule(builder.program, builder.operations, tuple(builder.sent_bytes))


class _Times:
    """Seconds of computation in a step."""

    def __init__(self, scenario: Scenario, routing: Routing, classes: RankClasses) -> None:
        self.cluster, self.layout = scenario.cluster, scenario.layout
        self.workload, self.rates = scenario.workload, scenario.rates
        self.num_classes = classes.num_classes
        self.pairs = routing.pairs[classes.examples]
        self.num_local = self.workload.model.num_experts // self.layout.group_size
        self.own_bytes = self.num_local * self.workload.expert_travel_bytes

    def pre_s(self) -> float:
        return self.workload.pre_expert_flops / self.rates.flops_per_s

    def experts_s(self) -> Floats:
        """[C] forward seconds of a layer's experts: for the full capacity, or for rows that came for the domain."""
        flops_per_s = self.rates.expert_flops_per_s or self.rates.flops_per_s
        if self.layout.is_padded:
            rows = np.full(self.num_classes, float(self.workload.expert_capacity))
            rows *= self.workload.model.num_experts
        else:  # one peer in each domain sends its rows here
            rows = self.workload.tokens_per_rank * self.pairs * np.prod(self.layout.domain_counts)
        return rows * self.workload.expert_flops_per_row / flops_per_s

    def calls_s(self) -> float:
        num_experts = self.num_local * self.layout.domain_size
        return self.rates.layer_s + self.rates.expert_call_s * num_experts

    def encode_weights_s(self) -> float:
        codecs = {self.layout.codecs[level].weight for level in self.layout.gather_levels}
        return sum(self.own_bytes / codec.encode_bytes_per_s for codec in codecs) + self.state_s("weights")

    def state_s(self, way: Way) -> float:
        """Seconds to move a layer's state from the host to the device and back."""
        return host_traffic_s(self.layout, self.workload, self.rates, way)

    def synced_state_s(self, kind: str) -> float:
        """Such seconds, once in a step, for the codec state of parameters that several ranks hold."""
        if self.layout.state == "device":
            return 0.0
        find = dense_parameters if kind == "dense_sync" else shared_experts
        return sync_host_traffic_s(find(self.cluster, self.layout, self.workload), self.workload, self.rates)

    def decode_weights_s(self) -> float:
        """Seconds to decode every replica once, with the codec of the slowest level between it and its owner."""
        sizes, total = self.layout.domain_sizes, 0.0
        for level in self.layout.gather_levels:
            num_replicas = (sizes[level] - 1) * np.prod(sizes[level + 1 :])
            total += num_replicas * self.own_bytes / self.layout.codecs[level].weight.decode_bytes_per_s
        return float(total)

    def code_gradients_s(self, rate: str) -> float:
        """Seconds to encode or decode every message of gradients once; as many leave as arrive."""
        sizes, total = self.layout.domain_sizes, 0.0
        for level in self.layout.gather_levels:
            num_messages = (sizes[level] - 1) * np.prod(sizes[:level])
            total += num_messages * self.own_bytes / getattr(self.layout.codecs[level].gradient, rate)
        return float(total)

    def optimizer_s(self) -> float:
        """Seconds of a pass over memory, which ranks with the same parameters share from ZeRO 1 on."""
        workload, cluster = self.workload, self.cluster
        is_shared = workload.zero_stage >= 1
        dense = workload.dense_train_params / (cluster.num_ranks if is_shared else 1)
        owned = workload.model.num_moe_layers * self.num_local * workload.expert_travel_params
        num_holders = cluster.num_ranks // self.layout.group_size
        owned_share = owned / (num_holders if is_shared else 1)
        num_bytes = (dense + owned_share) * OPTIMIZER_TRAFFIC_BYTES
        return num_bytes / self.rates.memory_bytes_per_s


class _Builder:
    def __init__(self, scenario: Scenario, traffic: StepTraffic, times: _Times) -> None:
        self.scenario, self.traffic, self.times = scenario, traffic, times
        self.layout, self.workload, self.rates = scenario.layout, scenario.workload, scenario.rates
        self.program: list[Instruction] = []
        self.operations: list[Operation] = []
        self.sent_bytes: list[dict[str, float]] = [{} for _ in scenario.cluster.sizes]
        self.has_packets = self.layout.domain_size > 1
        self._arriving: dict[int, list[int]] = {}  # packets of weights on their way, by layer
        self._random = np.random.default_rng(scenario.seed)

    # ---- the step ----

    def build(self) -> None:
        """Fill program and operations."""
        workload, layers = self.workload, self.workload.model.num_moe_layers
        depth = layers_in_flight(self.layout, workload)
        dispatch, combine = self.traffic.exchange(is_back=False, extra="dispatch"), self.traffic.exchange(is_back=True)
        output_gradients, input_gradients = (
            self.traffic.exchange(is_back=False),
            self.traffic.exchange(is_back=True, extra="return"),
        )
        weights, gradients = self.traffic.weights(), self.traffic.gradients()
        # Experts that several groups hold must arrive before they leave to replicas; dense parameters travel together
        # with either.
        moved = self.traffic.synchronisation(is_last=True)
        gathered = []
        if is_in_turn := self.scenario.assumptions.levels_in_turn:
            self._gather_in_turn(moved, weights)
        else:
            gathered = [self._start_gather(kind, moves) for kind, moves in moved]
            self._finish_gather(gathered[1])
        if self.has_packets:
            self._arriving = {layer: self._send_packets(layer, weights) for layer in range(layers)}
        if not is_in_turn:
            self._finish_gather(gathered[0])
        for micro_step in range(workload.micro_steps):
            for layer in range(layers):
                self._forward(layer, dispatch, combine)
            is_last = micro_step == workload.micro_steps - 1
            returning: deque[list[int]] = deque()
            for layer in reversed(range(layers)):
                if workload.is_checkpointed:
                    self._forward(layer, dispatch, combine, "recompute")
                self._backward_experts(layer, output_gradients, input_gradients)
                if self.has_packets and is_last:
                    returning.append(self._return_gradients(layer, gradients))
                    while len(returning) > depth:
                        self._take_gradients(returning.popleft())
                self._run("dense_s", f"backward {layer}", 2.0 * self.times.pre_s())
            while returning:
                self._take_gradients(returning.popleft())
            self._synchronise(is_last=is_last)
        self._run("optimizer_s", "optimizer", self.times.optimizer_s())
        self._run("host_s", "step", self.rates.step_s, is_computing=False)

    def _forward(
        self,
        layer: int,
        dispatch: StagedTransfer,
        combine: StagedTransfer,
        what: str = "forward",
    ) -> None:
        self._run("dense_s", f"{what} {layer}", self.times.pre_s())
        self._swap(dispatch, f"dispatch {layer}")
        if self._take_weights(layer):
            self._run("codec_s", f"decode weights {layer}", self.times.decode_weights_s())
        self._run("host_s", f"calls {layer}", self.times.calls_s(), is_computing=False)
        self._run("experts_s", f"experts {layer}", self.times.experts_s())
        self._swap(combine, f"combine {layer}")

    def _backward_experts(self, layer: int, output_gradients: StagedTransfer, input_gradients: StagedTransfer) -> None:
        self._swap(output_gradients, f"output gradients {layer}")
        self._run("host_s", f"calls {layer}", 2.0 * self.times.calls_s(), is_computing=False)
        self._run("experts_s", f"experts, backward {layer}", 2.0 * self.times.experts_s())
        self._swap(input_gradients, f"input gradients {layer}")

    def _take_weights(self, layer: int) -> bool:
        """Wait for a layer's replicas, if some are on their way."""
        posted = self._arriving.pop(layer, None)
        if posted is not None:
            self._wait(posted, "expert_weights_s")
        return posted is not None

    def _send_packets(self, layer: int, weights: StagedTransfer) -> list[int]:
        self._run("codec_s", f"encode weights {layer}", self.times.encode_weights_s())
        self._run("host_s", f"packet {layer}", self.rates.packet_s, is_computing=False)
        return self._post(weights, "expert_weights", f"weights {layer}", channel="weights")

    def _return_gradients(self, layer: int, gradients: StagedTransfer) -> list[int]:
        seconds = self.times.code_gradients_s("encode_bytes_per_s") + self.times.state_s("gradients")
        self._run("codec_s", f"encode gradients {layer}", seconds)
        self._run("host_s", f"packet {layer}", self.rates.packet_s, is_computing=False)
        return self._post(gradients, "expert_gradients", f"gradients {layer}", channel="gradients")

    def _take_gradients(self, packet: list[int]) -> None:
        self._wait(packet, "expert_gradients_s")
        self._run("codec_s", "decode gradients", self.times.code_gradients_s("decode_bytes_per_s"))

    def _swap(self, sent: StagedTransfer, label: str) -> None:
        """Send rows in one direction; a round of messages takes host time, during which bytes already flow."""
        round_s = self.rates.all_to_all_s if self.layout.is_padded else self.rates.exchange_s
        for stage in sent.stages:
            posted = self._post(StagedTransfer((stage,)), "tokens", label, channel="tokens")
            self._run("host_s", label, round_s, is_computing=False)
            self._wait(posted, "tokens_s")

    def _synchronise(self, *, is_last: bool) -> None:
        for kind, moves in self.traffic.synchronisation(is_last=is_last):
            name = kind.replace("_", " ")
            if is_last and moves:
                self._run("codec_s", f"state of {name}", self.times.synced_state_s(kind))
            for move in (one for one in moves if not one.follows_optimizer):
                self._run("codec_s", f"encode {name}", move.encode_s)
                posted = self._post(StagedTransfer(((move.traffic,),)), kind, name, channel="sync")
                self._wait(posted, f"{kind}_s")
                self._run("codec_s", f"decode {name}", move.decode_s)

    def _gather_in_turn(self, moved: Sequence[tuple[str, Sequence[SyncMove]]], weights: StagedTransfer) -> None:
        """Run one gather after the other before all packets; dense parameters take no delay that others take."""
        after = [move for move in moved[1][1] if move.follows_optimizer]
        taken = {level for move in after for level in move.traffic.levels}
        if self.has_packets:
            taken |= {level for stage in weights.stages for traffic in stage for level in traffic.levels}
        for kind, moves in moved:
            if kind == "dense_sync":
                moves = [replace(move, traffic=move.traffic.without_delay(taken)) for move in moves]
            self._finish_gather(self._start_gather(kind, moves))

    def _start_gather(self, kind: str, moves: Sequence[SyncMove]) -> tuple[str, list[int], float]:
        """Post what follows the optimizer; returns its kind, what to wait for, and seconds of decoding."""
        moves, name = [one for one in moves if one.follows_optimizer], kind.replace("_", " ")
        self._run("codec_s", f"encode {name}", sum(move.encode_s for move in moves))
        stages = StagedTransfer(tuple((move.traffic,) for move in moves))
        return kind, self._post(stages, kind, name, channel=f"gather {name}"), sum(move.decode_s for move in moves)

    def _finish_gather(self, started: tuple[str, list[int], float]) -> None:
        kind, posted, decode_s = started
        self._wait(posted, f"{kind}_s")
        self._run("codec_s", f"decode {kind.replace('_', ' ')}", decode_s)

    # ---- instructions ----

    def _run(self, term: str, label: str, seconds: float | Floats, *, is_computing: bool = True) -> None:
        seconds = self.scenario.measured_s.get(label, seconds) if is_computing else seconds
        by_class = np.broadcast_to(np.asarray(seconds, dtype=np.float64), (self.times.num_classes,))
        if self.scenario.jitter:
            by_class = by_class * np.exp(self.scenario.jitter * self._random.standard_normal(len(by_class)))
        if by_class.any():
            self.program.append(Run(term, label, by_class, is_computing))

    def _post(self, sent: StagedTransfer, kind: str, label: str, *, channel: str) -> list[int]:
        """Post all stages at once; returns the operations to wait for."""
        posted: list[int] = []
        before: int | None = None
        for number, stage in enumerate(sent.stages):
            for traffic in stage:
                name = channel if len(sent.stages) == 1 else f"{channel} {number}"
                self.operations.append(
                    Operation(
                        label,
                        name,
                        traffic.flows,
                        before,
                        traffic.pattern,
                        traffic.rank_bytes,
                        traffic.levels,
                    )  # fmt: skip
                )
                posted.append(len(self.operations) - 1)
                self.program.append(Post(posted[-1]))
                for level, num_bytes in enumerate(traffic.sent_bytes):
                    self.sent_bytes[level][kind] = self.sent_bytes[level].get(kind, 0.0) + num_bytes
            before = posted[-1]
        return posted

    def _wait(self, posted: Sequence[int], term: str) -> None:
        self.program += [Wait(operation, term) for operation in posted]
