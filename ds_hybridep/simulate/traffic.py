# SPDX-License-Identifier: Apache-2.0
"""What every rank sends to every other in one stage of a program's message, as flows between classes of ranks."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ds_hybridep.geometry.cluster import Cluster, unflatten
from ds_hybridep.plan import routing as planned
from ds_hybridep.plan.plan import PricedPlan
from ds_hybridep.plan.program import MessageStage, Peers, PlacePart
from ds_hybridep.simulate.classes import RankClasses
from ds_hybridep.simulate.flows import Floats, Flows, Ints

UP, DOWN = 0, 1


@dataclass(frozen=True)
class Ranks:
    """Place of each rank in its expert-parallel group.

    places: by part, for each level, [num_ranks] coordinate of its group, of its domain, or inside its domain.
    """

    cluster: Cluster
    plan: PricedPlan
    places: Mapping[PlacePart, tuple[Ints, ...]]

    @classmethod
    def of(cls, cluster: Cluster, plan: PricedPlan) -> "Ranks":
        """Groups of neighbours at each level; a strided group differs only in the names of its ranks."""
        places = np.array([unflatten(rank, cluster.sizes) for rank in range(cluster.num_ranks)], dtype=np.int64)
        spans, sizes = np.array(plan.spans), np.array(plan.domain_sizes)
        inside = places % spans
        parts: dict[PlacePart, Ints] = {"group": places // spans, "domain": inside // sizes, "offset": inside % sizes}
        return cls(cluster, plan, {part: tuple(columns.T) for part, columns in parts.items()})

    def groups(self, peers: Peers) -> Ints:
        """[num_ranks] numbers: ranks with equal numbers are peers.  Source: paper, topology rule."""
        fixed = [
            coordinates
            for part, by_level in self.places.items()
            for level, coordinates in enumerate(by_level)
            if part not in peers.parts or level not in peers.levels
        ]
        return numbered(fixed) if fixed else np.zeros(self.cluster.num_ranks, dtype=np.int64)


def numbered(columns: Sequence[Ints]) -> Ints:
    """[R] one number for each combination of values."""
    result = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        result = result * (int(column.max()) + 1) + column
    return result


@dataclass(frozen=True)
class SimulatedRouting:
    """How many rows go where.

    chances: per level, [num_ranks] chance that a token needs an expert of any domain that shares the coordinates of
        the rank's domain down to that level.
    pairs: [num_ranks] average number of experts of the rank's domain that a token needs; of hot experts, this rank's
        part.
    near_chances: the chances for tokens of ranks with the same place at the level of hot experts, which also send rows
        of these experts; empty: all are the same.
    """

    chances: tuple[Floats, ...]
    pairs: Floats
    near_chances: tuple[Floats, ...] = ()

    @classmethod
    def of(cls, ranks: Ranks, found: planned.Routing) -> "SimulatedRouting":
        """What the planner has found for the ranks of one group, for all ranks."""
        of_rank = numbered_in_group(ranks)
        pairs = [found.chances(level + 1) for level in range(len(found.spans))]
        far, near = (tuple(np.array(one)[of_rank] for one in kind) for kind in zip(*pairs, strict=True))
        rows = np.array(found.rank_rows)[of_rank] * found.top_k / math.prod(ranks.plan.domain_counts)
        return cls(far, rows, near if found.hot else ())


def numbered_in_group(ranks: Ranks) -> Ints:
    """[num_ranks] rank inside the expert-parallel group, row-major."""
    plan = ranks.plan
    result = np.zeros(ranks.cluster.num_ranks, dtype=np.int64)
    parts = zip(plan.spans, plan.domain_sizes, ranks.places["domain"], ranks.places["offset"], strict=True)
    for span, size, domain, offset in parts:
        result = result * span + domain * size + offset
    return result


@dataclass(frozen=True)
class StageTraffic:
    """Flows of a stage, and the bytes that all ranks send in it over each level."""

    flows: Flows
    sent_bytes: tuple[float, ...]


class TrafficMaker:
    """Makes flows between classes of ranks; is_fair_to_flows is that of `Scenario`."""

    def __init__(
        self, ranks: Ranks, routing: SimulatedRouting, classes: RankClasses, *, is_fair_to_flows: bool = True
    ) -> None:
        self._ranks, self.cluster, self.classes = ranks, ranks.cluster, classes
        self._far = tuple(chance[classes.examples] for chance in routing.chances)
        self._near = tuple(chance[classes.examples] for chance in routing.near_chances)
        self._is_fair_to_flows = is_fair_to_flows
        self._known: dict[MessageStage, StageTraffic] = {}

    @cached_property
    def first_link(self) -> tuple[int, ...]:
        """First link of each level, then the number of links; each class of children has one link up and one down."""
        counts = [2 * len(below) for below in self.classes.ranks_below]
        return (0, *np.cumsum(counts).tolist())

    @property
    def num_links(self) -> int:
        """Number of links of all classes of children."""
        return self.first_link[-1]

    def link(self, level: int, child_class: Ints, direction: int) -> Ints:
        """Indices of the links of classes of children."""
        return self.first_link[level] + 2 * child_class + direction

    def traffic_of(self, stage: MessageStage) -> StageTraffic:
        """The flows of a stage."""
        if stage not in self._known:
            self._known[stage] = self._ring(stage) if stage.peers.is_ring else self._between_peers(stage)
        return self._known[stage]

    def _between_peers(self, stage: MessageStage) -> StageTraffic:
        """Every rank sends to all of its peers."""
        classes, levels = self.classes, stage.peers.levels
        peers = np.stack(classes.peers[stage.peers])
        at, src, dst = np.nonzero(peers)
        # Rows go there for the destination's experts; on the way back, they come from the sender's experts.
        asked = self._chances_over(levels)[at, src if stage.is_back else dst]
        size = np.array(stage.fixed_bytes)[at] + np.array(stage.row_bytes)[at] * asked
        kept = size > 0.0
        src, dst, at, size = src[kept], dst[kept], at[kept], size[kept]
        num_sent, num_received = peers[at, src, dst], peers[at, dst, src]
        sent = np.bincount(at, classes.sizes[src] * num_sent * size, len(self.cluster.sizes))
        weights = np.ones(len(src)) if self._is_fair_to_flows else 1.0 / peers.sum(axis=2)[at, src]
        flow, link, load = self._entries(src, dst, at, num_sent, num_received=num_received)
        number = np.arange(len(src), dtype=np.int64)
        is_own = src == dst
        flows = Flows(
            num_bytes=size.astype(np.float64),
            weights=weights,
            latencies_s=np.array(stage.latencies_s)[at],
            member_flow=np.concatenate([number, number[~is_own]]),
            member_actor=np.concatenate([src, dst[~is_own]]),
            entry_flow=flow,
            entry_link=link,
            entry_load=load,
        )
        return StageTraffic(flows, tuple(sent.tolist()))

    def _chances_over(self, levels: Sequence[int]) -> Floats:
        """[levels, classes] mean chance that a token of a rank at this distance goes to a rank of each class."""
        far = self._far[levels[-1]]
        if not self._near:
            return np.tile(far, (len(self.cluster.sizes), 1))
        near, plan, result = self._near[levels[-1]], self._ranks.plan, []
        hot_level = None if plan.hot is None else plan.hot.level
        for level in range(len(self.cluster.sizes)):
            share = planned.share_of_near(hot_level, plan.domain_counts, levels, level)
            result.append(far + share * (near - far))
        return np.stack(result)

    def _entries(
        self, src: Ints, dst: Ints, at: Ints, num_sent: Ints, *, num_received: Ints
    ) -> tuple[Ints, Ints, Floats]:
        """Links of flows: a child's uplink carries the flows of all ranks of the class below it."""
        classes, num_levels = self.classes, len(self.cluster.sizes)
        flow, link, load = [], [], []
        for level in range(num_levels):
            crossing = np.flatnonzero(at == level)
            for ends, counts, direction in ((src, num_sent, UP), (dst, num_received, DOWN)):
                child = classes.child_of[level][ends[crossing]]
                flow.append(crossing)
                link.append(self.link(level, child, direction))
                load.append(classes.ranks_below[level][child, ends[crossing]] * counts[crossing].astype(np.float64))
        return np.concatenate(flow), np.concatenate(link), np.concatenate(load)

    def _ring(self, stage: MessageStage) -> StageTraffic:
        """Rings of all peers, in rank order; all run in step, as one flow.  Each ring leaves a child by one edge."""
        sizes, num_levels, edge_bytes = self.cluster.sizes, len(self.cluster.sizes), stage.fixed_bytes[0]
        spans = stage.peers.numbers(self._ranks.plan, sizes)
        used = [level for level in range(num_levels) if spans[level] > 1]
        edges = [math.prod(spans[:level]) * (spans[level] - 1) for level in range(num_levels)]
        edges[used[0]] += 1  # from the last rank back to the first
        link, load = [], []
        for level in used:
            of_level = np.arange(self.first_link[level], self.first_link[level + 1])
            link.append(of_level)
            load.append(np.full(len(of_level), math.prod(sizes[level + 1 :]) / math.prod(spans[level + 1 :])))
        links, actors = np.concatenate(link), np.arange(self.classes.num_classes, dtype=np.int64)
        flows = Flows(
            num_bytes=np.array([edge_bytes]),
            weights=np.ones(1),
            latencies_s=np.array(stage.latencies_s[:1]),
            member_flow=np.zeros(len(actors), dtype=np.int64),
            member_actor=actors,
            entry_flow=np.zeros(len(links), dtype=np.int64),
            entry_link=links,
            entry_load=np.concatenate(load),
        )
        num_rings = self.cluster.num_ranks // math.prod(spans)
        return StageTraffic(flows, tuple(num_rings * count * edge_bytes for count in edges))
