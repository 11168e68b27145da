# SPDX-License-Identifier: Apache-2.0
"""What the ranks send in one step of a plan: token rows, packets of experts, and DeepSpeed's own synchronisation."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

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
    """Sub-operations of one transfer, in stages; a stage begins where the one before it has arrived."""

    stages: tuple[tuple[OperationTraffic, ...], ...]


class StepTraffic:
    """Makes the transfers of a step."""

    def __init__(
        self, scenario: Scenario, ranks: Ranks, routing: Routing, classes: RankClasses, maker: TrafficMaker
    ) -> None:
        self.scenario, self.layout, self.workload = scenario, scenario.layout, scenario.workload
        self.ranks, self.maker = ranks, maker
        self.chances = tuple(chance[classes.examples] for chance in routing.chances)
        num_local = self.workload.model.num_experts // self.layout.group_size
        self.own_bytes = num_local * self.workload.expert_travel_bytes
        self.weight_bytes = self.own_bytes
        if self.layout.is_transient:  # frozen parameters too
            self.weight_bytes = num_local * self.workload.model.expert_params * self.workload.param_bytes

    # ---- token rows ----

    def exchange(self, *, is_back: bool, extra: str = "") -> StagedTransfer:
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
        """Slowest level first; what came over slower levels goes on as it came."""
        if not self.scenario.assumptions.gathers_by_level:
            return self._straight([self.weight_bytes / codecs.weight.ratio for codecs in self.layout.codecs])
        stages = []
        for level in self.layout.gather_levels:
            blocks = held_blocks(self.layout, level)
            num_bytes = sum(count / self.layout.codecs[at].weight.ratio for at, count in blocks.items())
            stages.append(self._gather(level, num_bytes * self.weight_bytes))
        return StagedTransfer(tuple(stages))

    def gradients(self) -> StagedTransfer:
        """Fastest level first: sums for the owners that a neighbour stands nearer to."""
        if not self.scenario.assumptions.gathers_by_level:
            return self._straight([self.own_bytes / codecs.gradient.ratio for codecs in self.layout.codecs])
        stages = []
        for level in reversed(self.layout.gather_levels):
            num_owners = int(np.prod(self.layout.domain_sizes[:level], dtype=np.int64))
            stages.append(self._gather(level, num_owners * self.own_bytes / self.layout.codecs[level].gradient.ratio))
        return StagedTransfer(tuple(stages))

    def _straight(self, num_bytes: Sequence[float]) -> StagedTransfer:
        """Every rank to all others of its domain, with the bytes of the level between them.  Source: paper (4)."""
        if not self.layout.gather_levels:
            return StagedTransfer(())
        straight = self.maker.between_peers(
            "domain", self.layout.gather_levels, lambda level: np.full((1, 1), num_bytes[level])
        )
        return StagedTransfer(((straight,),))

    def _gather(self, level: int, num_bytes: float) -> tuple[OperationTraffic, ...]:
        return (self.maker.between_peers(f"gather {level}", [level], always(num_bytes)),)

    # ---- DeepSpeed's own synchronisation ----

    def synchronisation(self, *, is_last: bool) -> list[tuple[str, list[OperationTraffic]]]:
        """(kind, operations in turn): gradients are summed, and after the last micro-step parameters are gathered too,
        from ZeRO 1 on.
        """
        workload, sync = self.workload, self.scenario.sync
        experts = self.own_bytes * workload.model.num_moe_layers
        dense = workload.dense_train_params * workload.param_bytes
        num_gathers = sync.reduce_passes - 1.0 + (1.0 if is_last and workload.zero_stage >= 1 else 0.0)
        result = []
        for of_holders, num_bytes in ((False, dense), (True, experts)):
            if sync.algorithm == "ring":
                found = [self._ring(of_holders=of_holders, num_bytes=sync.factor * num_bytes, passes=1 + num_gathers)]
            else:
                found = self._by_level(of_holders, sync.factor * num_bytes, num_gathers)
            result.append(("expert_sync" if of_holders else "dense_sync", found))
        return result

    def _ring(self, *, of_holders: bool, num_bytes: float, passes: float) -> OperationTraffic:
        ring_of = self.ranks.rings(of_holders=of_holders)
        size = int(np.bincount(ring_of).max())
        return self.maker.ring(ring_of, passes * (size - 1) / size * num_bytes, passes=passes)

    def _by_level(self, of_holders: bool, num_bytes: float, num_gathers: float) -> list[OperationTraffic]:
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
