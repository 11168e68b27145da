# SPDX-License-Identifier: Apache-2.0
"""What every rank sends to every other in one stage of a program's message, as flows between classes of ranks."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ds_hybridep.plan.cluster import Cluster, unflatten
from ds_hybridep.plan.layout import Layout
from ds_hybridep.plan.program import Peers, PlacePart, Stage
from ds_hybridep.plan.workload import MoEModel
from ds_hybridep.simulate.classes import RankClasses, nodes_at
from ds_hybridep.simulate.flows import Floats, Flows, Ints
from ds_hybridep.simulate.scenario import Assumptions

UP, DOWN = 0, 1
EQUAL_DIGITS = 14  # of chances and pairs, so that equal ones stay equal when summed in another order


@dataclass(frozen=True)
class Ranks:
    """Place of each rank in its expert-parallel group.

    places: by part, for each level, [num_ranks] coordinate of its group, of its domain, or inside its domain.
    """

    cluster: Cluster
    layout: Layout
    places: Mapping[PlacePart, tuple[Ints, ...]]

    @classmethod
    def of(cls, cluster: Cluster, layout: Layout) -> "Ranks":
        """Groups of neighbours at each level; a strided group differs only in the names of its ranks."""
        places = np.array([unflatten(rank, cluster.sizes) for rank in range(cluster.num_ranks)], dtype=np.int64)
        spans, sizes = np.array(layout.spans), np.array(layout.domain_sizes)
        inside = places % spans
        parts: dict[PlacePart, Ints] = {"group": places // spans, "domain": inside // sizes, "offset": inside % sizes}
        return cls(cluster, layout, {part: tuple(columns.T) for part, columns in parts.items()})

    def groups(self, peers: Peers) -> Ints:
        """[num_ranks] numbers: ranks with equal numbers are peers.  Source: paper, topology rule."""
        fixed = [
            coordinates
            for part, by_level in self.places.items()
            for level, coordinates in enumerate(by_level)
            if part not in peers.parts or level not in peers.levels
        ]
        return numbered(fixed) if fixed else np.zeros(self.cluster.num_ranks, dtype=np.int64)

    def of_domains(self, num_levels: int) -> Ints:
        """[num_ranks] equal numbers for domains with the same coordinates at the first levels."""
        return numbered([*self.places["group"], *self.places["domain"][:num_levels]])


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
        num_levels = len(ranks.layout.spans)
        by_owner = np.stack([_product(part) for part in factors.reshape(-1, num_local, top_k + 1)])
        chances = tuple(
            _chances(ranks.of_domains(level + 1), by_owner[owner], everything) for level in range(num_levels)
        )
        powers = (-load[:, None]) ** np.arange(top_k + 1)
        of_expert = 1.0 - powers @ everything[::-1] / everything[-1]
        of_owner = of_expert.reshape(-1, num_local).sum(axis=1)[owner]
        domain_of = ranks.of_domains(num_levels)
        of_domain: Floats = np.bincount(domain_of, of_owner).astype(np.float64)
        return cls(chances, np.round(of_domain[domain_of], EQUAL_DIGITS))


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
    parts = zip(layout.spans, layout.domain_sizes, ranks.places["domain"], ranks.places["offset"], strict=True)
    for span, size, domain, offset in parts:
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
class Traffic:
    """Flows of a stage, and the bytes that all ranks send in it over each level."""

    flows: Flows
    sent_bytes: tuple[float, ...]


class TrafficMaker:
    """Makes flows between classes of ranks.

    Args:
        classes: classes of the ranks.
        assumed: what machines differ in.
    """

    def __init__(
        self,
        ranks: Ranks,
        routing: Routing,
        classes: RankClasses,
        assumed: Assumptions,
    ) -> None:
        self._ranks, self.cluster, self.classes = ranks, ranks.cluster, classes
        self._chances = tuple(chance[classes.examples] for chance in routing.chances)
        self._assumed = assumed
        self._known: dict[Stage, Traffic] = {}

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

    def traffic_of(self, stage: Stage) -> Traffic:
        """The flows of a stage."""
        if stage not in self._known:
            self._known[stage] = self._ring(stage) if stage.peers.is_ring else self._between_peers(stage)
        return self._known[stage]

    def _between_peers(self, stage: Stage) -> Traffic:
        """Every rank sends to all of its peers."""
        classes, levels = self.classes, stage.peers.levels
        # Rows go there for the destination's experts; on the way back, they come from the sender's experts.
        chance = self._chances[levels[-1]]
        asked = np.broadcast_to(chance[:, None] if stage.is_back else chance, (classes.num_classes,) * 2)
        peers = np.stack(classes.peers[stage.peers])
        at, src, dst = np.nonzero(peers)
        size = np.array(stage.fixed_bytes)[at] + np.array(stage.row_bytes)[at] * asked[src, dst]
        kept = size > 0.0
        src, dst, at, size = src[kept], dst[kept], at[kept], size[kept]
        num_sent, num_received = peers[at, src, dst], peers[at, dst, src]
        sent = np.bincount(at, classes.sizes[src] * num_sent * size, len(self.cluster.sizes))
        weights = np.ones(len(src)) if self._assumed.is_fair_to_flows else 1.0 / peers.sum(axis=2)[at, src]
        flow, link, load = self._entries(src, dst, at, num_sent, num_received)
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
        return Traffic(flows, tuple(sent.tolist()))

    def _entries(
        self, src: Ints, dst: Ints, at: Ints, num_sent: Ints, num_received: Ints
    ) -> tuple[Ints, Ints, Floats]:
        """Links of flows: a child's uplink carries the flows of all ranks of the class below it."""
        classes, num_levels = self.classes, len(self.cluster.sizes)
        flow, link, load = [], [], []
        for level in range(num_levels):
            crossing = np.flatnonzero(at <= level if self._assumed.crosses_inner_links else at == level)
            for ends, counts, direction in ((src, num_sent, UP), (dst, num_received, DOWN)):
                child = classes.child_of[level][ends[crossing]]
                flow.append(crossing)
                link.append(self.link(level, child, direction))
                load.append(classes.ranks_below[level][child, ends[crossing]] * counts[crossing].astype(np.float64))
        return np.concatenate(flow), np.concatenate(link), np.concatenate(load)

    def _ring(self, stage: Stage) -> Traffic:
        """One ring for all ranks with the same number, in rank order; all run in step, as one flow."""
        cluster, num_levels = self.cluster, len(self.cluster.sizes)
        source, target = _ring_edges(self._ranks.groups(stage.peers))
        nodes = [nodes_at(cluster, level + 1) for level in range(num_levels)]
        at = np.full(len(source), num_levels, dtype=np.int64)
        for level in reversed(range(num_levels)):
            at[nodes[level][source] != nodes[level][target]] = level
        link, load = [], []
        for level in range(num_levels):
            crossing = at <= level if self._assumed.crosses_inner_links else at == level
            for ends, direction in ((source, UP), (target, DOWN)):
                child_class = self.classes.child_class_of[level]
                counts = np.bincount(nodes[level][ends[crossing]], minlength=len(child_class))
                busiest = np.zeros(int(child_class.max()) + 1)
                np.maximum.at(busiest, child_class, counts)
                used = np.flatnonzero(busiest)
                link.append(self.link(level, used, direction))
                load.append(busiest[used])
        links = np.concatenate(link)
        actors = np.arange(self.classes.num_classes, dtype=np.int64)
        edge_bytes = stage.fixed_bytes[0]
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
        sent = np.bincount(at, minlength=num_levels + 1)[:num_levels] * edge_bytes
        return Traffic(flows, tuple(sent.tolist()))


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
