# SPDX-License-Identifier: Apache-2.0
"""What ranks send in one step of a plan: token rows, packets of experts, and sums and gathers of shared parameters."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ds_hybridep.plan.costs import expert_parts
from ds_hybridep.plan.layout import IDENTITY
from ds_hybridep.plan.slots import Shares, Slot, shares_of
from ds_hybridep.plan.sync_stages import Held, dense_parameters, gather_codec, mean_bytes, shared_experts
from ds_hybridep.plan.workload import COUNT_BYTES
from ds_hybridep.simulate.classes import RankClasses
from ds_hybridep.simulate.flows import Floats
from ds_hybridep.simulate.scenario import Scenario
from ds_hybridep.simulate.traffic import OperationTraffic, Ranks, Routing, TrafficMaker, held_blocks


def always(num_bytes: float) -> Callable[[int], Floats]:
    """The same bytes at every level, between all classes."""
    return lambda _: np.full((1, 1), float(num_bytes))


def _with_more(bytes_between: Callable[[int], Floats], more: float, level: int) -> Floats:
    return bytes_between(level) + more


@dataclass(frozen=True)
class StagedTransfer:
    """Sub-operations of one transfer, in stages; a stage begins when the stage before it has arrived."""

    stages: tuple[tuple[OperationTraffic, ...], ...]


NORM_BYTES = 1e-9  # so small that they count for nothing, but not 0, because messages of 0 bytes are left out


@dataclass(frozen=True)
class SyncMove:
    """One operation of a sum or a gather, with the seconds that a rank encodes before it and decodes after it."""

    traffic: OperationTraffic
    encode_s: float = 0.0
    decode_s: float = 0.0
    follows_optimizer: bool = False


class StepTraffic:
    """Makes the transfers of a step."""

    def __init__(
        self, scenario: Scenario, ranks: Ranks, routing: Routing, classes: RankClasses, maker: TrafficMaker
    ) -> None:
        self.scenario, self.layout, self.workload = scenario, scenario.layout, scenario.workload
        self.ranks, self.maker = ranks, maker
        self.chances = tuple(chance[classes.examples] for chance in routing.chances)
        num_local = self.workload.model.num_experts // self.layout.group_size
        parts, element_bytes = expert_parts(self.workload, num_local), self.workload.param_bytes
        codecs = self.layout.codecs
        self.gradient_bytes = [one.gradient.message_bytes(parts, element_bytes) for one in codecs]  # of a message
        self.weight_bytes = [one.weight.message_bytes(parts, element_bytes) for one in codecs]

    # ---- token rows ----

    def exchange(self, *, is_back: bool, extra: str = "") -> StagedTransfer:
        """Rows to all destinations, or the same rows back from them."""
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
            # Rows go there for the destination's experts; on the way back, they come from the sender's experts.
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

    def _stages(self, stages: Sequence[tuple[str, list[int], Callable[[int], Floats]]], header: int) -> StagedTransfer:
        """Rounds of messages, each with a header."""
        split = (
            self._split(pattern, levels, partial(_with_more, bytes_of, header)) for pattern, levels, bytes_of in stages
        )
        return StagedTransfer(tuple(split))

    def _split(
        self, pattern: str, levels: Sequence[int], bytes_between: Callable[[int], Floats]
    ) -> tuple[OperationTraffic, ...]:
        if not self.scenario.assumptions.levels_in_turn:
            return (self.maker.between_peers(pattern, levels, bytes_between),)
        return tuple(self.maker.between_peers(pattern, [level], bytes_between) for level in levels)

    # ---- packets ----

    def weights(self) -> StagedTransfer:
        """Packets of weights, slowest level first; packets from slower levels are passed on unchanged."""
        if not self.scenario.assumptions.gathers_by_level:
            return self._straight(self.weight_bytes)
        stages = []
        for level in self.layout.gather_levels:
            blocks = held_blocks(self.layout, level)
            stages.append(self._gather(level, sum(count * self.weight_bytes[at] for at, count in blocks.items())))
        return StagedTransfer(tuple(stages))

    def gradients(self) -> StagedTransfer:
        """Packets of gradients, fastest level first; a neighbour gets the sums for owners to which it is nearer."""
        if not self.scenario.assumptions.gathers_by_level:
            return self._straight(self.gradient_bytes)
        stages = []
        for level in reversed(self.layout.gather_levels):
            num_owners = int(np.prod(self.layout.domain_sizes[:level], dtype=np.int64))
            stages.append(self._gather(level, num_owners * self.gradient_bytes[level]))
        return StagedTransfer(tuple(stages))

    def _straight(self, num_bytes: Sequence[float]) -> StagedTransfer:
        """Every rank sends to all others of its domain the bytes of the level between them.  Source: paper (4)."""
        if not self.layout.gather_levels:
            return StagedTransfer(())
        straight = self.maker.between_peers(
            "domain", self.layout.gather_levels, lambda level: np.full((1, 1), num_bytes[level])
        )
        return StagedTransfer(((straight,),))

    def _gather(self, level: int, num_bytes: float) -> tuple[OperationTraffic, ...]:
        return (self.maker.between_peers(f"gather {level}", [level], always(num_bytes)),)

    # ---- sums and gathers of parameters that several ranks hold ----

    def synchronisation(self, *, is_last: bool) -> list[tuple[str, list[SyncMove]]]:
        """(kind, moves in their order) after a micro-step."""
        cluster, layout, workload = self.scenario.cluster, self.layout, self.workload
        by_level = self.scenario.sync.algorithm == "hierarchical"
        result = []
        for kind, held in (
            ("dense_sync", dense_parameters(cluster, layout, workload)),
            ("expert_sync", shared_experts(cluster, layout, workload)),
        ):
            is_shared = held.levels and held.tensors
            moves = self._by_level(kind, held, is_last) if by_level and is_shared else []
            if not by_level and (is_last or workload.zero_stage == 2):
                moves = [SyncMove(self._ring(kind, held, is_last=is_last))]
            result.append((kind, moves))
        return result

    def _ring(self, kind: str, held: Held, *, is_last: bool) -> OperationTraffic:
        """DeepSpeed's ring: it sums gradients; from ZeRO 1 on, it gathers parameters after the last micro-step."""
        workload, sync = self.workload, self.scenario.sync
        passes = sync.reduce_passes + (1.0 if is_last and workload.zero_stage >= 1 else 0.0)
        num_bytes = sync.factor * sum(map(math.prod, held.tensors)) * workload.param_bytes
        ring_of = self.ranks.rings(of_holders=kind == "expert_sync")
        size = int(np.bincount(ring_of).max())
        return self.maker.ring(ring_of, passes * (size - 1) / size * num_bytes, passes=passes)

    def _by_level(self, kind: str, held: Held, is_last: bool) -> list[SyncMove]:
        """Ranks trade and sum blocks over the fastest level first, then over slower ones; gathers go the other way."""
        shares = shares_of(held.tensors, held.group_size, self.workload.zero_stage)
        pattern = "holders" if kind == "expert_sync" else "siblings"
        fastest = held.levels[-1]
        # If the fastest level encodes, its sums wait for the last micro-step, like the sums of other levels.
        waits = self.workload.zero_stage < 2 or held.gradients[fastest] != IDENTITY
        summed = [level for level in reversed(held.levels) if is_last or (level == fastest and not waits)]
        moves = [self._sum_over(level, pattern, held, shares.gradients) for level in summed]
        if is_last and kind == "dense_sync" and self.workload.zero_stage >= 1:
            moves += [SyncMove(self._trade(pattern, level, NORM_BYTES)) for level in reversed(held.levels)]
        return moves + (self._gather_all(pattern, held, shares) if is_last else [])

    def _sum_over(self, level: int, pattern: str, held: Held, slots: Sequence[Slot]) -> SyncMove:
        codec, whole = held.gradients[level], mean_bytes(IDENTITY, slots, self.workload)
        # Each neighbour gets the slots of all ranks that are nearer to it than to this rank.
        count = math.prod(held.spans[:level])
        coded = count * (held.spans[level] - 1) * whole
        traffic = self._trade(pattern, level, count * mean_bytes(codec, slots, self.workload))
        return SyncMove(traffic, coded / codec.encode_bytes_per_s, coded / codec.decode_bytes_per_s)

    def _gather_all(self, pattern: str, held: Held, shares: Shares) -> list[SyncMove]:
        """Gathers, slowest level first; every rank passes on all slots that it has by then."""
        is_partitioned = self.workload.zero_stage >= 1
        slots = shares.parameters if is_partitioned else shares.gradients
        codec, encoding_levels = gather_codec(held, self.workload)
        whole, encoded = (mean_bytes(one, slots, self.workload) for one in (IDENTITY, codec))
        before_s = whole / codec.encode_bytes_per_s if encoding_levels else 0.0
        if not is_partitioned and encoding_levels:
            before_s += whole / codec.decode_bytes_per_s  # a rank decodes its own sum, as the others do
        counts = {"encoded": 0, "whole": 0}  # slots of other ranks that it has
        moves = []
        for level in held.levels:
            own = "encoded" if level in encoding_levels else "whole"
            sent = {form: count + (form == own) for form, count in counts.items()}
            traffic = self._trade(pattern, level, sent["encoded"] * encoded + sent["whole"] * whole)
            others = held.spans[level] - 1
            decode_s = others * sent["encoded"] * whole / codec.decode_bytes_per_s
            moves.append(SyncMove(traffic, before_s, decode_s, follows_optimizer=is_partitioned))
            before_s = 0.0
            counts = {form: count + others * sent[form] for form, count in counts.items()}
        return moves

    def _trade(self, pattern: str, level: int, num_bytes: float) -> OperationTraffic:
        return self.maker.between_peers(f"{pattern} {level}", [level], always(self.scenario.sync.factor * num_bytes))
