# SPDX-License-Identifier: Apache-2.0
"""Event simulation of one training step of a plan, from two ranks to thousands of datacentres.

Every rank runs the plan's program (`plan.step`), which the stream model prices; its messages share the links of the
cluster. Ranks that are alike are simulated once (`classes`), which only saves time.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ds_hybridep.errors import PlanError
from ds_hybridep.plan.cluster import Cluster, flatten, known_or_assumed_bandwidths
from ds_hybridep.plan.program import Peers, peers_in
from ds_hybridep.plan.step import step_program
from ds_hybridep.simulate.classes import RankClasses, merge_ranks, nodes_at
from ds_hybridep.simulate.events import Change, Engine, Span
from ds_hybridep.simulate.flows import Floats, Ints
from ds_hybridep.simulate.kinds import LEAST_ERROR, rounded
from ds_hybridep.simulate.scenario import Deviation, Scenario
from ds_hybridep.simulate.schedule import schedule_of
from ds_hybridep.simulate.traffic import DOWN, UP, Ranks, Routing, TrafficMaker

MAX_FULL_RANKS = 512  # beyond, a simulation rank by rank takes too much memory
MAX_CLASSES = 64  # the number of flows grows with the square of this, and so does the time


@dataclass(frozen=True, kw_only=True)
class SimulatedStep:
    """What a simulation found.

    step_s: seconds until the last rank is done.
    terms_s: seconds by cause on the rank that is done last; they add up to the step.
    sent_bytes: per level, kind -> payload bytes that all ranks together send over it, without headers.
    num_classes: number of classes of ranks; one rank of each class was simulated.
    quantisation: largest share by which rates, speeds and loads were too large or too small, because they were rounded
        so that fewer ranks differ; 0: the simulation is exact.
    spans: spans of traced ranks.
    """

    step_s: float
    terms_s: Mapping[str, float]
    sent_bytes: tuple[Mapping[str, float], ...]
    num_classes: int
    quantisation: float
    spans: Mapping[int, Sequence[Span]]

    def uplink_bytes(self, cluster: Cluster) -> tuple[Mapping[str, float], ...]:
        """Bytes by kind over one child's uplink of each level, on average."""
        return tuple(
            {kind: num_bytes / math.prod(cluster.sizes[: level + 1]) for kind, num_bytes in kinds.items()}
            for level, kinds in enumerate(self.sent_bytes)
        )


def simulate(
    scenario: Scenario,
    *,
    is_reduced: bool = True,
    traced_ranks: Sequence[int] = (),
) -> SimulatedStep:
    """Simulate one step of the scenario.

    Args:
        scenario: cluster, plan, workload and conditions.
        is_reduced: simulate one of each class of ranks that are alike; jitter makes all of them different.
        traced_ranks: ranks whose spans are kept.

    Raises PlanError if too many ranks would be simulated one by one.
    """
    cluster = scenario.cluster
    is_reduced = is_reduced and not scenario.jitter
    if not is_reduced and cluster.num_ranks > MAX_FULL_RANKS:
        raise PlanError(
            f"{cluster.num_ranks} ranks are too many to be simulated one by one (at most {MAX_FULL_RANKS}); leave out "
            f"jitter, which makes all of them different"
        )
    ranks = Ranks.of(cluster, scenario.layout)
    program = step_program(
        cluster,
        scenario.layout,
        scenario.workload,
        scenario.rates,
        scenario.sync,
        gathers_by_level=scenario.assumptions.gathers_by_level,
    )
    patterns = {peers: ranks.groups(peers) for peers in peers_in(program) if not peers.is_ring}
    scenario, routing, classes, quantisation = _with_few_classes(scenario, ranks, patterns, is_reduced=is_reduced)
    assumed, layout, workload = scenario.assumptions, scenario.layout, scenario.workload
    maker = TrafficMaker(
        ranks,
        routing,
        classes,
        crosses_inner_links=assumed.crosses_inner_links,
        is_fair_to_flows=assumed.is_fair_to_flows,
    )
    # One peer in each domain sends its rows here.
    rows = routing.pairs[classes.examples] * math.prod(layout.domain_counts) / workload.model.top_k
    schedule = schedule_of(program, scenario, rows, maker)
    traced = {rank: int(classes.class_of[rank]) for rank in traced_ranks}
    engine = Engine(
        _capacities(scenario, classes, maker, 0.0),
        classes.num_classes,
        schedule.program,
        schedule.operations,
        slowdowns=_slowdowns(scenario, classes, 0.0),
        changes=_changes(scenario, classes, maker),
        busy_share=scenario.rates.overlap,
        traced=sorted(set(traced.values())),
    )
    outcome = engine.run()
    last = int(np.argmax(outcome.end_s))
    return SimulatedStep(
        step_s=float(outcome.end_s[last]),
        terms_s={term: float(seconds[last]) for term, seconds in outcome.seconds.items()},
        sent_bytes=schedule.sent_bytes,
        num_classes=classes.num_classes,
        quantisation=quantisation,
        spans={rank: outcome.spans[number] for rank, number in traced.items()},
    )


def _with_few_classes(
    scenario: Scenario, ranks: Ranks, patterns: Mapping[Peers, Ints], *, is_reduced: bool
) -> tuple[Scenario, Routing, RankClasses, float]:
    """Scenario, routing, classes, error; if too many ranks differ, with rounded rates, speeds and loads."""
    cluster = scenario.cluster

    def classes_of(scenario: Scenario, routing: Routing, max_classes: int | None) -> RankClasses | None:
        attributes: list[Floats] = [*routing.chances, routing.pairs]
        attributes += _marks(cluster, scenario.deviations)
        return merge_ranks(cluster, patterns, attributes, is_reduced=is_reduced, max_classes=max_classes)

    routing = Routing.of(ranks, scenario.workload.model, scenario.expert_load)
    max_classes = MAX_CLASSES if cluster.num_ranks > MAX_CLASSES else None
    classes = classes_of(scenario, routing, max_classes)
    if classes is not None:
        return scenario, routing, classes, 0.0
    error = LEAST_ERROR
    while classes is None:
        error *= 2
        changed = rounded(scenario, routing, error)
        classes = classes_of(*changed, max_classes)
    return *changed, classes, error


# ---- what is not as the levels say ----


def _below(cluster: Cluster, place: Sequence[int]) -> Floats:
    """[num_ranks] 1 below a place, else 0."""
    node = flatten(place, cluster.sizes[: len(place)])
    return np.where(nodes_at(cluster, len(place)) == node, 1.0, 0.0)


def _marks(cluster: Cluster, deviations: Sequence[Deviation]) -> list[Floats]:
    """For each kind of deviation, [num_ranks] number of such deviations that a rank is below."""
    marks: dict[tuple[float, ...], Floats] = {}
    for deviation in deviations:
        kind = (len(deviation.place), deviation.bandwidth_factor, deviation.slowdown, deviation.from_s)
        marks[kind] = marks.get(kind, np.zeros(cluster.num_ranks)) + _below(cluster, deviation.place)
    return list(marks.values())


def _capacities(scenario: Scenario, classes: RankClasses, maker: TrafficMaker, time_s: float) -> Floats:
    """[links] bytes/s at `time_s`."""
    cluster = scenario.cluster
    capacities = np.zeros(maker.num_links)
    for level, bandwidth in enumerate(known_or_assumed_bandwidths(cluster)):
        child_class_of = classes.child_class_of[level]
        factors = np.ones(len(child_class_of))
        for deviation in scenario.deviations:
            if len(deviation.place) == level + 1 and deviation.from_s <= time_s:
                factors[flatten(deviation.place, cluster.sizes[: level + 1])] *= deviation.bandwidth_factor
        for direction in (UP, DOWN):
            links = maker.link(level, child_class_of, direction)
            capacities[links] = factors * bandwidth / scenario.rates.wire_factor
    return capacities


def _slowdowns(scenario: Scenario, classes: RankClasses, time_s: float) -> Floats:
    """[C] factors on the seconds of computation at `time_s`."""
    factors = np.ones(scenario.cluster.num_ranks)
    for deviation in scenario.deviations:
        if deviation.from_s <= time_s:
            factors = np.where(_below(scenario.cluster, deviation.place), factors * deviation.slowdown, factors)
    result: Floats = factors[classes.examples]
    return result


def _changes(scenario: Scenario, classes: RankClasses, maker: TrafficMaker) -> list[Change]:
    """Changes of links and ranks while the step runs."""
    changes = []
    for time_s in sorted({deviation.from_s for deviation in scenario.deviations} - {0.0}):
        capacities = _capacities(scenario, classes, maker, time_s)
        changes += [Change(time_s, link=link, bytes_per_s=float(rate)) for link, rate in enumerate(capacities)]
        slowdowns = _slowdowns(scenario, classes, time_s)
        changes += [Change(time_s, actor=actor, slowdown=float(factor)) for actor, factor in enumerate(slowdowns)]
    return changes
