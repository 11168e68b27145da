# SPDX-License-Identifier: Apache-2.0
"""What every rank sends to every other in one operation of a plan, as flows between classes of ranks.

Nothing here comes from the stream model. This module computes groups, destinations and bytes itself, from the places
of ranks and the sizes of tensors, so that the two check each other.
"""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ds_hybridep.plan.cluster import Cluster, unflatten
from ds_hybridep.plan.layout import Layout
from ds_hybridep.plan.workload import MoEModel
from ds_hybridep.simulate.classes import RankClasses, nodes_at
from ds_hybridep.simulate.flows import Floats, Flows, Ints

UP, DOWN = 0, 1
EQUAL_DIGITS = 14  # of chances and pairs, so that equal ones stay equal when summed in another order


@dataclass(frozen=True)
class Ranks:
    """Place of each rank in its expert-parallel group: [num_ranks] arrays, per level.

    group: coordinate of its group.  domain: coordinate of its domain.  offset: coordinate inside its domain.
    """

    cluster: Cluster
    layout: Layout
    group: tuple[Ints, ...]
    domain: tuple[Ints, ...]
    offset: tuple[Ints, ...]

    @classmethod
    def of(cls, cluster: Cluster, layout: Layout) -> "Ranks":
        """Groups of neighbours at each level; a strided group differs only in the names of its ranks."""
        places = np.array([unflatten(rank, cluster.sizes) for rank in range(cluster.num_ranks)], dtype=np.int64)
        group, domain, offset = [], [], []
        for level, (span, size) in enumerate(zip(layout.spans, layout.domain_sizes, strict=True)):
            group.append(places[:, level] // span)
            position = places[:, level] % span
            domain.append(position // size)
            offset.append(position % size)
        return cls(cluster, layout, tuple(group), tuple(domain), tuple(offset))

    def patterns(self, *, with_sums: bool = False, gathers_by_level: bool = True) -> dict[str, Ints]:
        """[num_ranks] numbers by name: ranks with equal numbers talk to each other.  Source: paper, topology rule."""
        num_levels = len(self.group)
        keys: dict[str, list[Ints]] = {}
        if not gathers_by_level:
            keys["domain"] = [*self.group, *self.domain]
        if self.layout.is_padded:
            keys["all_to_all"] = [*self.group]
        elif self.layout.exchange == "direct":
            keys["exchange"] = [*self.group, *self.offset]
        else:
            for level in range(num_levels):
                others = [self.domain[other] for other in range(num_levels) if other != level]
                keys[f"exchange {level}"] = [*self.group, *self.offset, *others]
        for level, size in enumerate(self.layout.domain_sizes):
            rest = [other for other in range(num_levels) if other != level]
            if size > 1:
                keys[f"gather {level}"] = [*self.group, *self.domain, *(self.offset[other] for other in rest)]
            if with_sums:
                keys[f"holders {level}"] = [*self.domain, *self.offset, *(self.group[other] for other in rest)]
                everybody = [np.zeros_like(self.group[0])]
                elsewhere = [parts[other] for parts in (self.group, self.domain, self.offset) for other in rest]
                keys[f"siblings {level}"] = everybody + elsewhere
        return {name: numbered(columns) for name, columns in keys.items()}

    def rings(self, *, of_holders: bool) -> Ints:
        """[num_ranks] the ring of each rank: one for all ranks, or one for those that hold the same experts."""
        if of_holders:
            return numbered([*self.domain, *self.offset])
        return np.zeros(self.cluster.num_ranks, dtype=np.int64)


def numbered(columns: Sequence[Ints]) -> Ints:
    """[R] one number for each combination of values."""
    result = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        result = result * (int(column.max()) + 1) + column
    return result


@dataclass(frozen=True)
class Routing:
    """How many rows go where.

    chances: per level, [num_ranks] chance that a token needs an expert of any domain that shares the coordinates of
        the rank's domain down to that level.
    pairs: [num_ranks] average number of experts of the rank's domain that a token needs.
    """

    chances: tuple[Floats, ...]
    pairs: Floats

    @classmethod
    def of(cls, ranks: Ranks, model: MoEModel, expert_load: Sequence[float] | None = None) -> "Routing":
        """Routing by a load of the experts; None: even routing.

        The probability of a choice of experts is assumed to be proportional to the product of their loads. With e(S)
        the product of (1 + load x) over S, the chance to need one of S is 1 - ([x^k] e(all) / e(S)) / ([x^k] e(all)).

        Source: conditional Poisson sampling.
        """
        num_experts, top_k = model.num_experts, model.top_k
        load = np.ones(num_experts) if expert_load is None else np.array(expert_load, dtype=float)
        load = load / load.mean()
        owner = numbered_in_group(ranks)
        num_local = num_experts // ranks.layout.group_size
        factors = np.zeros((num_experts, top_k + 1))
        factors[:, 0], factors[:, 1] = 1.0, load
        everything = _product(factors)
        num_levels = len(ranks.group)
        by_owner = np.stack([_product(part) for part in factors.reshape(-1, num_local, top_k + 1)])
        chances = tuple(
            _chances(numbered([*ranks.group, *ranks.domain[: level + 1]]), by_owner[owner], everything)
            for level in range(num_levels)
        )
        powers = (-load[:, None]) ** np.arange(top_k + 1)
        of_expert = 1.0 - powers @ everything[::-1] / everything[-1]
        of_owner = of_expert.reshape(-1, num_local).sum(axis=1)[owner]
        domain_of = numbered([*ranks.group, *ranks.domain])
        of_domain: Floats = np.bincount(domain_of, of_owner).astype(np.float64)
        return cls(chances, np.round(of_domain[domain_of], EQUAL_DIGITS))

    def mapped(self, change: Callable[[Floats], Floats]) -> "Routing":
        """The same routing, with `change` applied to every array."""
        return Routing(tuple(change(chance) for chance in self.chances), change(self.pairs))


def _chances(cell_of: Ints, polynomials: Floats, everything: Floats) -> Floats:
    """[num_ranks] chance that a token needs an expert of the rank's cell."""
    order = np.argsort(cell_of, kind="stable")
    starts = np.flatnonzero(np.diff(cell_of[order], prepend=-1))
    members = np.split(order, starts[1:])
    result = np.zeros(len(cell_of))
    known: dict[bytes, float] = {}
    for ranks in members:
        wanted = _product(polynomials[ranks])
        key = wanted.tobytes()
        if key not in known:
            known[key] = 1.0 - float(_quotient_end(everything, wanted) / everything[-1])
        result[ranks] = known[key]
    return np.round(result, EQUAL_DIGITS)


def numbered_in_group(ranks: Ranks) -> Ints:
    """[num_ranks] rank inside the expert-parallel group, row-major."""
    layout = ranks.layout
    result = np.zeros(ranks.cluster.num_ranks, dtype=np.int64)
    for span, size, domain, offset in zip(layout.spans, layout.domain_sizes, ranks.domain, ranks.offset, strict=True):
        result = result * span + domain * size + offset
    return result


def _product(polynomials: Floats) -> Floats:
    """Product of [n, degree + 1] polynomials, cut off at the degree."""
    width = polynomials.shape[1]
    while len(polynomials) > 1:  # pairwise, so that thousands of factors take a dozen rounds
        if len(polynomials) % 2:
            one = np.zeros((1, width))
            one[0, 0] = 1.0
            polynomials = np.concatenate([polynomials, one])
        left, right = polynomials[0::2], polynomials[1::2]
        product = np.zeros_like(left)
        for power in range(width):
            product[:, power:] += left[:, power : power + 1] * right[:, : width - power]
        polynomials = product
    result: Floats = polynomials[0]
    return result


def _quotient_end(dividend: Floats, divisor: Floats) -> float:
    """Last coefficient of the power series dividend / divisor; the divisor begins with 1."""
    quotient = np.zeros(len(dividend))
    for power in range(len(dividend)):
        quotient[power] = dividend[power] - quotient[:power] @ divisor[power:0:-1]
    return float(quotient[-1])


@dataclass(frozen=True)
class OperationTraffic:
    """Flows of an operation, and the bytes that ranks send in it.

    sent_bytes: by all ranks, per level.  pattern: name of its pattern.  rank_bytes: [C] by one rank of each class.
    """

    flows: Flows
    sent_bytes: tuple[float, ...]
    pattern: str
    rank_bytes: Floats

    @property
    def levels(self) -> tuple[int, ...]:
        """Levels that the operation crosses."""
        return tuple(level for level, num_bytes in enumerate(self.sent_bytes) if num_bytes)

    def without_delay(self, levels: Set[int]) -> "OperationTraffic":
        """The same operation without latency, if it crosses no other levels than these; else unchanged."""
        if not levels >= set(self.levels):
            return self
        return replace(self, flows=replace(self.flows, latencies_s=np.zeros_like(self.flows.latencies_s)))


class TrafficMaker:
    """Makes flows between classes of ranks.

    Args:
        cluster: the tree.
        classes: classes of its ranks.
        latencies_s: latency of each level.
        crosses_inner_links: a message to another child of level l also passes the uplinks of the levels below.
        is_fair_to_flows: False: all flows of a rank in one operation and level have the weight of one flow together.
    """

    def __init__(
        self,
        cluster: Cluster,
        classes: RankClasses,
        latencies_s: Sequence[float],
        *,
        crosses_inner_links: bool,
        is_fair_to_flows: bool,
    ) -> None:
        self.cluster = cluster
        self.classes = classes
        self._latencies_s = latencies_s
        self._crosses_inner_links = crosses_inner_links
        self._is_fair_to_flows = is_fair_to_flows

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

    def between_peers(
        self,
        pattern: str,
        levels: Sequence[int],
        bytes_between: Callable[[int], Floats],
        *,
        latency_count: float = 1.0,
    ) -> OperationTraffic:
        """Every rank sends to all of its peers in a pattern whose distance is one of `levels`.

        Args:
            bytes_between: for a level, [C, C] bytes from a rank of one class (row) to each peer of another (column).
            latency_count: number of latencies until the bytes of a flow have arrived.
        """
        classes = self.classes
        source, target, level_of, num_bytes = [], [], [], []
        for level in levels:
            from_class, to_class = np.nonzero(classes.peers[pattern][level])
            source.append(from_class)
            target.append(to_class)
            level_of.append(np.full(len(from_class), level, dtype=np.int64))
            matrix = np.broadcast_to(bytes_between(level), (classes.num_classes, classes.num_classes))
            num_bytes.append(matrix[from_class, to_class])
        src, dst, at = (np.concatenate(parts) for parts in (source, target, level_of))
        size = np.concatenate(num_bytes)
        kept = size > 0.0
        src, dst, at, size = src[kept], dst[kept], at[kept], size[kept]
        peers = np.stack(classes.peers[pattern])
        num_sent, num_received = peers[at, src, dst], peers[at, dst, src]
        sent = np.bincount(at, classes.sizes[src] * num_sent * size, len(self.cluster.sizes))
        weights = np.ones(len(src)) if self._is_fair_to_flows else 1.0 / peers.sum(axis=2)[at, src]
        flow, link, load = self._entries(src, dst, at, num_sent, num_received)
        number = np.arange(len(src), dtype=np.int64)
        is_own = src == dst
        flows = Flows(
            num_bytes=size.astype(np.float64),
            weights=weights,
            latencies_s=np.asarray(self._latencies_s)[at] * latency_count,
            member_flow=np.concatenate([number, number[~is_own]]),
            member_actor=np.concatenate([src, dst[~is_own]]),
            entry_flow=flow,
            entry_link=link,
            entry_load=load,
        )
        rank_bytes = np.bincount(src, num_sent * size, classes.num_classes).astype(np.float64)
        return OperationTraffic(flows, tuple(sent.tolist()), pattern, rank_bytes)

    def _entries(
        self, src: Ints, dst: Ints, at: Ints, num_sent: Ints, num_received: Ints
    ) -> tuple[Ints, Ints, Floats]:
        """Links of flows: a child's uplink carries the flows of all ranks of the class below it."""
        classes, num_levels = self.classes, len(self.cluster.sizes)
        flow, link, load = [], [], []
        for level in range(num_levels):
            crossing = np.flatnonzero(at <= level if self._crosses_inner_links else at == level)
            for ends, counts, direction in ((src, num_sent, UP), (dst, num_received, DOWN)):
                child = classes.child_of[level][ends[crossing]]
                flow.append(crossing)
                link.append(self.link(level, child, direction))
                load.append(classes.ranks_below[level][child, ends[crossing]] * counts[crossing].astype(np.float64))
        return np.concatenate(flow), np.concatenate(link), np.concatenate(load)

    def ring(self, ring_of: Ints, bytes_per_edge: float, *, passes: float) -> OperationTraffic:
        """One ring for all ranks with the same number, in rank order; all run in step, as one flow over their links.

        Args:
            ring_of: [num_ranks] number of each rank's ring.
            bytes_per_edge: bytes that each rank sends to the next in all passes.
            passes: passes around the ring; each one hands a block on from the first rank to the last.
        """
        cluster, num_levels = self.cluster, len(self.cluster.sizes)
        source, target = _ring_edges(ring_of)
        nodes = [nodes_at(cluster, level + 1) for level in range(num_levels)]
        at = np.full(len(source), num_levels, dtype=np.int64)
        for level in reversed(range(num_levels)):
            at[nodes[level][source] != nodes[level][target]] = level
        link, load = [], []
        for level in range(num_levels):
            crossing = at <= level if self._crosses_inner_links else at == level
            for ends, direction in ((source, UP), (target, DOWN)):
                child_class = self.classes.child_class_of[level]
                counts = np.bincount(nodes[level][ends[crossing]], minlength=len(child_class))
                busiest = np.zeros(int(child_class.max()) + 1)
                np.maximum.at(busiest, child_class, counts)
                used = np.flatnonzero(busiest)
                link.append(self.link(level, used, direction))
                load.append(busiest[used])
        links, loads = np.concatenate(link), np.concatenate(load)
        edge_latencies_s = np.asarray([*self._latencies_s, 0.0])[at]
        around_s = np.bincount(ring_of[source], edge_latencies_s) if len(source) else np.zeros(1)
        actors = np.arange(self.classes.num_classes, dtype=np.int64)
        has_bytes = len(source) > 0 and bytes_per_edge > 0.0
        count = 1 if has_bytes else 0
        flows = Flows(
            num_bytes=np.full(count, bytes_per_edge),
            weights=np.ones(count),
            latencies_s=np.full(count, passes * float((around_s - _nearest(ring_of, source, edge_latencies_s)).max())),
            member_flow=np.zeros(len(actors) * count, dtype=np.int64),
            member_actor=actors[: len(actors) * count],
            entry_flow=np.zeros(len(links) * count, dtype=np.int64),
            entry_link=links[: len(links) * count],
            entry_load=loads[: len(links) * count],
        )
        sent = np.bincount(at, minlength=num_levels + 1)[:num_levels] * bytes_per_edge
        return OperationTraffic(
            flows, tuple(sent.tolist()), "ring", np.full(len(actors), float(bytes_per_edge * count))
        )


def _ring_edges(ring_of: Ints) -> tuple[Ints, Ints]:
    """(source, target) of every edge; a ring of one rank has none."""
    order = np.argsort(ring_of, kind="stable")
    sizes = np.bincount(ring_of)
    ends = np.cumsum(sizes)
    following = np.arange(1, len(order) + 1)
    following[ends[sizes > 0] - 1] = (ends - sizes)[sizes > 0]
    source, target = order, order[following]
    is_edge = source != target
    return source[is_edge], target[is_edge]


def _nearest(ring_of: Ints, source: Ints, edge_latencies_s: Floats) -> Floats:
    """[rings] least latency of an edge: the block that arrives last crosses all edges but this one."""
    nearest = np.full(int(ring_of[source].max()) + 1 if len(source) else 1, np.inf if len(source) else 0.0)
    np.minimum.at(nearest, ring_of[source], edge_latencies_s)
    return nearest


def held_blocks(layout: Layout, level: int) -> Mapping[int, int]:
    """Number of packets of weights that a rank passes on at a level, by the level between their owner and the rank.

    Its own packet counts under `level`, whose codec it has.  The others came over slower levels before.
    """
    counts: dict[int, int] = {level: 1}
    sizes = layout.domain_sizes[:level]
    for number in range(1, math.prod(sizes)):  # offsets of owners relative to this rank, itself left out
        slowest = next(index for index, part in enumerate(unflatten(number, sizes)) if part)
        counts[slowest] = counts.get(slowest, 0) + 1
    return counts
