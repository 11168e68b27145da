# SPDX-License-Identifier: Apache-2.0
"""The program of one training step of a plan, in the steady state.

gathers, weights leave -> A x (forward: layer by layer, backward: layer by layer) -> sums -> optimizer

layer, forward    before the experts | dispatch | wait for replicas | experts | combine
layer, backward   output gradients | experts | input gradients | replicas' gradients leave | all else
"""

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from ds_hybridep.plan.cluster import Cluster, latencies_of
from ds_hybridep.plan.costs import (
    Way,
    expert_parts,
    experts_per_rank,
    gradient_messages,
    host_traffic_s,
    layers_in_flight,
    padded_rows,
    ranks_below,
    replicas_over,
)
from ds_hybridep.plan.held import Held, dense_parameters, shared_experts
from ds_hybridep.plan.layout import IDENTITY, Layout, Rates, SyncModel
from ds_hybridep.plan.program import Instruction, Kind, Message, Peers, Post, Program, Repeat, Run, Stage, Wait
from ds_hybridep.plan.token_route import chance_needed
from ds_hybridep.plan.workload import COUNT_BYTES, Workload

# Bytes that an optimizer step reads and writes per trained parameter: gradient, master, two moments, 2-byte parameter.
OPTIMIZER_TRAFFIC_BYTES = 30
NORM_BYTES = 1e-9  # so few that they count for nothing, but not 0, because messages of 0 bytes are left out


def step_program(
    cluster: Cluster,
    layout: Layout,
    workload: Workload,
    rates: Rates,
    sync: SyncModel,
    *,
    gathers_by_level: bool = True,
) -> Program:
    """What every rank does in one optimizer step.

    gathers_by_level: expert packets cross a slow level once for each child; False: every rank sends to all others of
        its domain, as the paper counts it.

    Raises PlanError if the arguments do not fit each other.
    """
    layout.check_fits(cluster)
    return _Step(cluster, layout, workload, rates, sync, gathers_by_level).program()


@dataclass(frozen=True)
class _Step:
    cluster: Cluster
    layout: Layout
    workload: Workload
    rates: Rates
    sync: SyncModel
    gathers_by_level: bool

    def program(self) -> Program:
        workload, layout = self.workload, self.layout
        layers = tuple(range(workload.model.num_moe_layers))
        dense = dense_parameters(self.cluster, layout, workload)
        experts = shared_experts(self.cluster, layout, workload)
        held: dict[Kind, Held] = {"dense_sync": dense, "expert_sync": experts}
        nothing: tuple[Program, Program] = (), ()
        is_shared = workload.zero_stage >= 1
        start_experts, finish_experts = self._gather("expert_sync", experts) if is_shared else nothing
        start_dense, finish_dense = self._gather("dense_sync", dense) if is_shared else nothing
        weights, gradients = self._packet("weights"), self._packet("gradients")
        exchanges = self._exchanges()
        forward, backward = self._forward(exchanges), self._backward(exchanges)
        take_weights = self._take(weights, self._coding_s("weights", "decode_bytes_per_s"))
        between = (
            Repeat(layers[::-1], (*backward, self._before_experts("backward"))),
            *self._sums(held, is_last=False),
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
            *self._sums(held, is_last=True),
            Run("optimizer_s", "optimizer", self._optimizer_bytes() / self.rates.memory_bytes_per_s),
            Run("host_s", "step", self.rates.step_s, is_computing=False),
        )

    # ---- a layer ----

    def _before_experts(self, label: str) -> Run:
        seconds = self.workload.pre_expert_flops / self.rates.flops_per_s
        return Run("dense_s", label, seconds if label != "backward" else 2.0 * seconds)

    def _experts(self, label: str, times: float) -> Program:
        """Calls and computation; DeepSpeed's layer computes the full capacity.  Source: paper (1), (2)."""
        layout, workload, rates = self.layout, self.workload, self.rates
        calls_s = rates.layer_s + rates.expert_call_s * experts_per_rank(layout, workload) * layout.domain_size
        rows = workload.expert_capacity * workload.model.num_experts if layout.is_padded else workload.expert_rows
        seconds = rows * workload.expert_flops_per_row / (rates.expert_flops_per_s or rates.flops_per_s)
        return (
            Run("host_s", "calls", times * calls_s, is_computing=False),
            Run("experts_s", label, times * seconds, grows_with_rows=not layout.is_padded),
        )

    def _forward(self, exchanges: dict[str, Program], take_weights: Program = (), label: str = "forward") -> Program:
        before = self._before_experts(label)
        experts = self._experts("experts", 1.0)
        return before, *exchanges["dispatch"], *take_weights, *experts, *exchanges["combine"]

    def _backward(self, exchanges: dict[str, Program]) -> Program:
        """Twice the work of a forward, up to the gradient of the experts' input."""
        again = self._forward(exchanges, label="recompute") if self.workload.is_checkpointed else ()
        experts = self._experts("experts, backward", 2.0)
        return *again, *exchanges["output gradients"], *experts, *exchanges["input gradients"]

    def _last_backward(self, layers: tuple[int, ...], backward: Program, gradients: Message) -> Program:
        """The backward in which gradients of replicas return."""
        before_experts = self._before_experts("backward")
        if not gradients.stages:
            return (Repeat(layers[::-1], (*backward, before_experts)),)
        steps: list[Instruction] = []
        returning: deque[int] = deque()
        depth = layers_in_flight(self.layout, self.workload)
        take = self._take(gradients, self._coding_s("gradients", "decode_bytes_per_s"))
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
        gate_gradients = 0 if self.layout.is_padded else workload.return_extra_bytes
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
        layout, workload, counts = self.layout, self.workload, self.layout.domain_counts
        ours = label == "dispatch" and not layout.is_padded
        beside = workload.dispatch_extra_bytes if ours else beside_bytes
        ratios = [codecs.token.ratio if ours else 1.0 for codecs in layout.codecs]
        row_bytes = [workload.row_bytes / ratio + beside for ratio in ratios]
        every = tuple(range(len(counts)))
        rounds: list[tuple[int, ...]] = [(level,) for level in every if counts[level] > 1]
        if rounds and (layout.is_padded or layout.exchange == "direct"):
            rounds = [every]
        num_experts, top_k = workload.model.num_experts, workload.model.top_k
        round_s = self.rates.all_to_all_s if layout.is_padded else self.rates.exchange_s
        program: list[Instruction] = []
        for levels in reversed(rounds) if is_back else rounds:
            peers = Peers(("domain",), levels)
            if layout.is_padded:
                stage = self._stage(peers, [padded_rows(layout, workload) * workload.row_bytes] * len(counts))
            else:  # by now, rows may have come from as many ranks as there are domains over slower levels
                rows = workload.tokens_per_rank * workload.row_scale * math.prod(counts[: levels[0]])
                chance = chance_needed(num_experts // math.prod(counts[: levels[-1] + 1]), num_experts, top_k)
                by_level = [rows * num_bytes for num_bytes in row_bytes]
                stage = self._stage(peers, [COUNT_BYTES * ours] * len(counts), by_level, chance, is_back=is_back)
            message = Message("tokens", label, (stage,))
            program += [Post(message), Run("host_s", label, round_s, is_computing=False), Wait(message)]
        return tuple(program)

    # ---- packets of experts ----

    def _packet(self, way: Way) -> Message:
        """Weights travel slowest level first, gradients fastest level first.  Source: experts/replicas.py.

        At level l, with domain size S_l, a rank sends S_l - 1 neighbours its own experts and (S_j - 1) S_(j+1) ...
        S_(l-1) times as many that came over each slower level j, in level j's codec.  Gradients are summed at each
        level, so the codec of a level applies to all that it carries.
        """
        layout, workload, levels = self.layout, self.workload, self.layout.gather_levels
        parts = expert_parts(workload, experts_per_rank(layout, workload))
        codecs = [one.weight if way == "weights" else one.gradient for one in layout.codecs]
        own = [codec.message_bytes(parts, workload.param_bytes) for codec in codecs]
        sizes = layout.domain_sizes
        stages = []
        if not self.gathers_by_level and levels:
            stages.append(self._stage(Peers(("offset",), levels), own))  # source: paper (4)
        for level in levels if self.gathers_by_level else ():
            if way == "gradients":
                held = math.prod(sizes[:level]) * own[level]
            else:
                held = own[level]
                for slower in range(level):
                    held += (sizes[slower] - 1) * math.prod(sizes[slower + 1 : level]) * own[slower]
            stages.append(self._stage(Peers(("offset",), (level,)), [held] * len(sizes)))
        if way == "weights":
            return Message("expert_weights", way, tuple(stages))
        return Message("expert_gradients", way, tuple(reversed(stages)))

    def _send(self, way: Way, message: Message) -> Program:
        """Encode and post one layer's packet; weights are queued right after the optimizer step."""
        if not message.stages:
            return ()
        seconds = self._coding_s(way, "encode_bytes_per_s")
        seconds += host_traffic_s(self.layout, self.workload, self.rates, way)
        return (
            Run("codec_s", f"encode {way}", seconds),
            Run("host_s", "packet", self.rates.packet_s, is_computing=False),
            Post(message),
        )

    def _take(self, message: Message, decode_s: float) -> Program:
        return (Wait(message), Run("codec_s", f"decode {message.label}", decode_s)) if message.stages else ()

    def _coding_s(self, way: Way, rate: str) -> float:
        """Seconds to encode or decode one layer's packets.

        Weights are encoded once for each codec, and a replica is decoded once, on the rank that keeps it.  Every
        message of gradients is encoded and decoded.
        """
        layout = self.layout
        own_bytes = experts_per_rank(layout, self.workload) * self.workload.expert_travel_bytes
        codecs = {level: layout.codecs[level] for level in layout.gather_levels}
        if way == "gradients":
            times = [(gradient_messages(layout, level), one.gradient) for level, one in codecs.items()]
        elif rate == "encode_bytes_per_s":
            times = [(1, codec) for codec in {one.weight for one in codecs.values()}]
        else:
            times = [(replicas_over(layout, level), one.weight) for level, one in codecs.items()]
        return math.fsum(count * own_bytes / getattr(codec, rate) for count, codec in times)

    # ---- parameters that several ranks hold ----

    def _sums(self, held: dict[Kind, Held], *, is_last: bool) -> Program:
        """Sums of gradients after a micro-step, over the fastest level first; without ZeRO, also their gather."""
        program: list[Instruction] = []
        for kind, one in held.items():
            if self.sync.algorithm == "ring":
                program += self._ring(kind, one, is_last=is_last)
                continue
            name = kind.replace("_", " ")
            if is_last and self.layout.state == "host":
                seconds = 2 * one.residual_bytes / self.rates.host_bytes_per_s
                program.append(Run("codec_s", f"state of {name}", seconds))
            whole = one.slot_bytes(IDENTITY)
            repeated = () if one.repeated_level is None else (one.repeated_level,)
            for level in one.levels[::-1] if is_last else repeated:
                codec = one.gradients[level]
                coded = one.messages_over(level) * whole
                # Each neighbour gets the slots of all ranks that are nearer to it than to this rank.
                num_bytes = math.prod(one.spans[:level]) * one.slot_bytes(codec)
                message = Message(kind, name, (self._trade(kind, level, num_bytes),))
                program += [
                    Run("codec_s", f"encode {name}", coded / codec.encode_bytes_per_s),
                    *(Post(message), Wait(message)),
                    Run("codec_s", f"decode {name}", coded / codec.decode_bytes_per_s),
                ]
            if is_last and kind == "dense_sync" and self.workload.zero_stage >= 1:
                norms = [Message(kind, "norms", (self._trade(kind, level, NORM_BYTES),)) for level in one.levels[::-1]]
                program += [step for norm in norms for step in (Post(norm), Wait(norm))]
            if is_last and self.workload.zero_stage == 0:
                program += [step for steps in self._gather(kind, one) for step in steps]
        return tuple(program)

    def _gather(self, kind: Kind, held: Held) -> tuple[Program, Program]:
        """Starts and finishes the gather of what was summed, slowest level first; a ring has it in its passes.

        Own slots leave encoded over levels that encode; slots that came encoded over slower levels stay encoded.
        """
        if self.sync.algorithm == "ring" or not held.levels:
            return (), ()
        codec, encoding_levels = held.gather_codec
        of_parameters = self.workload.zero_stage >= 1
        whole, encoded = (held.slot_bytes(one, of_parameters=of_parameters) for one in (IDENTITY, codec))
        encode_s, decode_s = (whole / codec.encode_bytes_per_s if encoding_levels else 0.0), 0.0
        if not of_parameters and encoding_levels:
            encode_s += whole / codec.decode_bytes_per_s  # a rank decodes its own sum, as the others do
        num_encoded = num_whole = 0  # slots of other ranks that it has by then
        stages = []
        for level in held.levels:
            others, encodes = held.spans[level] - 1, level in encoding_levels
            sent_encoded, sent_whole = num_encoded + encodes, num_whole + (not encodes)
            stages.append(self._trade(kind, level, sent_encoded * encoded + sent_whole * whole))
            decode_s += others * sent_encoded * whole / codec.decode_bytes_per_s
            num_encoded, num_whole = num_encoded + others * sent_encoded, num_whole + others * sent_whole
        name = kind.replace("_", " ")
        message = Message(kind, f"gather {name}", tuple(stages))
        start = Run("codec_s", f"encode {name}", encode_s), Post(message)
        return start, (Wait(message), Run("codec_s", f"decode {name}", decode_s))

    def _trade(self, kind: Kind, level: int, num_bytes: float) -> Stage:
        """The same bytes to every holder that is a neighbour at `level`."""
        return self._stage(_holders(kind, (level,)), [self.sync.factor * num_bytes] * len(self.cluster.sizes))

    def _ring(self, kind: Kind, held: Held, *, is_last: bool) -> Program:
        """DeepSpeed's ring, which uses no codec: it sums gradients; from ZeRO 1 on, it gathers parameters at the end.

        In each pass, a ring of g ranks sends (g - 1) / g of the bytes over the one edge by which it leaves a child,
        and hands a block on from its first rank to its last.  As many rings leave a child as there are groups in it.
        """
        stage_of = self.workload.zero_stage
        if not held.levels or not (is_last or stage_of == 2):
            return ()
        sizes, spans, latencies, used = self.cluster.sizes, held.spans, latencies_of(self.cluster), held.levels
        passes = self.sync.reduce_passes + (1.0 if is_last and stage_of >= 1 else 0.0)
        edge_bytes = self.sync.factor * passes * (held.num_holders - 1) / held.num_holders * held.num_bytes
        uplink_bytes = [
            edge_bytes * (math.prod(sizes[level + 1 :]) // math.prod(spans[level + 1 :])) * (level in used)
            for level in range(len(sizes))
        ]
        edges = [math.prod(spans[:level]) * (spans[level] - 1) for level in used]
        edges[0] += 1  # from the last rank back to the first
        around_s = math.fsum(count * latencies[level] for count, level in zip(edges, used, strict=True))
        around_s -= min(latencies[level] for level in used)  # the last block leaves out the nearest hop
        peers = _holders(kind, tuple(range(len(sizes))), is_ring=True)
        nothing, edge = (0.0,) * len(sizes), (edge_bytes,) * len(sizes)
        stage = Stage(peers, edge, nothing, tuple(uplink_bytes), (passes * around_s,) * len(sizes))
        message = Message(kind, kind.replace("_", " "), (stage,))
        return Post(message), Wait(message)

    # ---- the rest ----

    def _stage(
        self,
        peers: Peers,
        fixed_bytes: Sequence[float],
        row_bytes: Sequence[float] | None = None,
        chance: float = 0.0,
        *,
        is_back: bool = False,
    ) -> Stage:
        sizes, below = self.cluster.sizes, ranks_below(self.cluster)
        rows = [0.0] * len(sizes) if row_bytes is None else row_bytes
        uplink_bytes = [
            below[level] * peers.count(self.layout, sizes, level) * (fixed_bytes[level] + rows[level] * chance)
            for level in range(len(sizes))
        ]
        of_levels = tuple(fixed_bytes), tuple(rows), tuple(uplink_bytes), latencies_of(self.cluster)
        return Stage(peers, *of_levels, chance=chance, is_back=is_back)

    def _optimizer_bytes(self) -> float:
        """Traffic of a pass over the optimizer's state, which ranks with the same parameters share from ZeRO 1 on."""
        workload, num_ranks = self.workload, self.cluster.num_ranks
        is_shared = workload.zero_stage >= 1
        owned = workload.model.num_moe_layers * experts_per_rank(self.layout, workload) * workload.expert_travel_params
        num_params = workload.dense_train_params / (num_ranks if is_shared else 1)
        num_params += owned / (num_ranks // self.layout.group_size if is_shared else 1)
        return num_params * OPTIMIZER_TRAFFIC_BYTES


def _holders(kind: Kind, levels: tuple[int, ...], *, is_ring: bool = False) -> Peers:
    """The ranks that hold the same parameters: all, or those at the same place in other groups."""
    return Peers(("group",) if kind == "expert_sync" else ("group", "domain", "offset"), levels, is_ring)
