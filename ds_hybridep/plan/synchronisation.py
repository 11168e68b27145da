# SPDX-License-Identifier: Apache-2.0
"""Programs that sum the gradients of parameters that several ranks hold, and gather the parameters."""

import math
from dataclasses import dataclass

from ds_hybridep.geometry.cluster import Cluster, latencies_of
from ds_hybridep.plan.costs import HOST_BYTES_PER_S
from ds_hybridep.plan.held import Held
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
    Run,
    Wait,
)
from ds_hybridep.plan.rates import IDENTITY

ALL_REDUCE_PASSES = 2.0  # of a ring
NORM_BYTES = 1e-9  # so few that they count for nothing, but not 0, because messages of 0 bytes are left out


@dataclass(frozen=True, kw_only=True)
class Synchronisation:
    """Sums and gathers of one kind of parameters."""

    kind: Kind
    held: Held
    cluster: Cluster
    plan: PricedPlan
    factor: float  # on the bytes of messages

    @property
    def _name(self) -> str:
        return self.kind.replace("_", " ")

    @property
    def _parts(self) -> tuple[PlacePart, ...]:
        """In what the places of holders differ: all ranks hold dense parameters, other groups the same experts."""
        return ("group",) if self.kind == "expert_sync" else ("group", "domain", "offset")

    def sums(self, *, is_last: bool) -> Program:
        """Sums of gradients after a micro-step, over the fastest level first; without ZeRO, also their gather."""
        if self.plan.dense_sync == "deepspeed":
            return self._ring(is_last=is_last)
        held, name, program = self.held, self._name, list[Instruction]()
        zero_stage = held.workload.zero_stage
        if is_last and self.plan.state == "host":
            seconds = 2 * held.residual_bytes / HOST_BYTES_PER_S
            program.append(Run("codec_s", f"state of {name}", seconds))
        whole = held.slot_bytes(IDENTITY)
        repeated = () if held.repeated_level is None else (held.repeated_level,)
        for level in held.levels[::-1] if is_last else repeated:
            codec = held.gradients[level]
            coded = held.messages_over(level) * whole
            # Each neighbour gets the slots of all ranks that are nearer to it than to this rank.
            num_bytes = math.prod(held.spans[:level]) * held.slot_bytes(codec)
            message = Message(self.kind, name, (self._trade(level, num_bytes),))
            program += [
                Run("codec_s", f"encode {name}", coded / codec.encode_bytes_per_s),
                *(Post(message), Wait(message)),
                Run("codec_s", f"decode {name}", coded / codec.decode_bytes_per_s),
            ]
        if is_last and self.kind == "dense_sync" and zero_stage >= 1:
            norms = [Message(self.kind, "norms", (self._trade(level, NORM_BYTES),)) for level in held.levels[::-1]]
            program += [step for norm in norms for step in (Post(norm), Wait(norm))]
        if is_last and zero_stage == 0:
            program += [step for steps in self._gather() for step in steps]
        return tuple(program)

    def gather_parameters(self) -> tuple[Program, Program]:
        """Starts and finishes the gather after the optimizer; nothing without ZeRO, which has gathered the sums."""
        return self._gather() if self.held.workload.zero_stage >= 1 else ((), ())

    def _gather(self) -> tuple[Program, Program]:
        """Starts and finishes the gather of what was summed, slowest level first; a ring has it in its passes.

        Own slots leave encoded over levels that encode; slots that came encoded over slower levels stay encoded.
        """
        held = self.held
        if self.plan.dense_sync == "deepspeed" or not held.levels:
            return (), ()
        codec, encoding_levels = held.gather_codec
        of_parameters = held.workload.zero_stage >= 1
        whole, encoded = (held.slot_bytes(one, of_parameters=of_parameters) for one in (IDENTITY, codec))
        encode_s, decode_s = (whole / codec.encode_bytes_per_s if encoding_levels else 0.0), 0.0
        if not of_parameters and encoding_levels:
            encode_s += whole / codec.decode_bytes_per_s  # a rank decodes its own sum, as the others do
        num_encoded = num_whole = 0  # slots of other ranks that it has by then
        stages = []
        for level in held.levels:
            others, encodes = held.spans[level] - 1, level in encoding_levels
            sent_encoded, sent_whole = num_encoded + encodes, num_whole + (not encodes)
            stages.append(self._trade(level, sent_encoded * encoded + sent_whole * whole))
            decode_s += others * sent_encoded * whole / codec.decode_bytes_per_s
            num_encoded, num_whole = num_encoded + others * sent_encoded, num_whole + others * sent_whole
        name = self._name
        message = Message(self.kind, f"gather {name}", tuple(stages))
        start = Run("codec_s", f"encode {name}", encode_s), Post(message)
        return start, (Wait(message), Run("codec_s", f"decode {name}", decode_s))

    def _trade(self, level: int, num_bytes: float) -> MessageStage:
        """The same bytes to every holder that is a neighbour at `level`."""
        per_peer = [self.factor * num_bytes] * len(self.cluster.sizes)
        return MessageStage.between(Peers(self._parts, (level,)), self.cluster, self.plan, per_peer)

    def _ring(self, *, is_last: bool) -> Program:
        """DeepSpeed's ring, which uses no codec: it sums gradients; from ZeRO 1 on, it gathers parameters at the end.

        In each pass, a ring of g ranks sends (g - 1) / g of the bytes over the one edge by which it leaves a child,
        and hands a block on from its first rank to its last.  As many rings leave a child as there are groups in it.
        """
        held, stage_of = self.held, self.held.workload.zero_stage
        if not held.levels or not (is_last or stage_of == 2):
            return ()
        sizes, spans, latencies, used = self.cluster.sizes, held.spans, latencies_of(self.cluster), held.levels
        passes = ALL_REDUCE_PASSES + (1.0 if is_last and stage_of >= 1 else 0.0)
        edge_bytes = self.factor * passes * (held.num_holders - 1) / held.num_holders * held.num_bytes
        uplink_bytes = [
            edge_bytes * (math.prod(sizes[level + 1 :]) // math.prod(spans[level + 1 :])) * (level in used)
            for level in range(len(sizes))
        ]
        edges = [math.prod(spans[:level]) * (spans[level] - 1) for level in used]
        edges[0] += 1  # from the last rank back to the first
        around_s = math.fsum(count * latencies[level] for count, level in zip(edges, used, strict=True))
        around_s -= min(latencies[level] for level in used)  # the last block leaves out the nearest hop
        peers = Peers(self._parts, tuple(range(len(sizes))), is_ring=True)
        nothing, edge = (0.0,) * len(sizes), (edge_bytes,) * len(sizes)
        stage = MessageStage(
            peers=peers,
            fixed_bytes=edge,
            row_bytes=nothing,
            uplink_bytes=tuple(uplink_bytes),
            latencies_s=(passes * around_s,) * len(sizes),
        )
        message = Message(self.kind, self._name, (stage,))
        return Post(message), Wait(message)
