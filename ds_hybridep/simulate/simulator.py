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
from ds_hybridep.geometry.cluster import Cluster, flatten, known_or_assumed_bandwidths
from ds_hybridep.plan.program import Kind, Peers, peers_in
from ds_hybridep.plan.routing import routing_of
from ds_hybridep.plan.step import step_program
from ds_hybridep.simulate.classes import RankClasses, merge_ranks, nodes_at
from ds_hybridep.simulate.events import Engine, TraceSpan
from ds_hybridep.simulate.flows import Floats, Ints
from ds_hybridep.simulate.scenario import Scenario
from ds_hybridep.simulate.schedule import Schedule
from ds_hybridep.simulate.traffic import DOWN, UP, Ranks, SimulatedRouting, TrafficMaker

MAX_FULL_RANKS = 512  # beyond, a simulation rank by rank takes too much memory
LEAST_ERROR, MOST_ERROR = 0.005, 10.0  # of rounded attributes, a share
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
    sent_bytes: tuple[Mapping[Kind, float], ...]
    num_classes: int
    quantisation: float
    spans: Mapping[int, Sequence[TraceSpan]]

    def uplink_bytes(self, cluster: Cluster) -> tuple[Mapping[Kind, float], ...]:
        """Bytes by kind over one child's uplink of each level, on average."""
        return tuple(
            {kind: num_bytes / math.prod(cluster.sizes[: level + 1]) for kind, num_bytes in kinds.items()}
            for level, kinds in enumerate(self.sent_bytes)
        )


def simulate(scenario: Scenario, *, is_reduced: bool = True, traced_ranks: Sequence[int] = ()) -> SimulatedStep:
    """Simulate one step of the scenario.

    is_reduced: simulate one of each class of ranks that are alike; jitter makes all of them different.
    traced_ranks: ranks whose spans are kept.

    Raises PlanError if too many ranks would be simulated one by one, or if too many ranks differ.
    """
    cluster = scenario.cluster
    is_reduced = is_reduced and not scenario.jitter
    if not is_reduced and cluster.num_ranks > MAX_FULL_RANKS:
        raise PlanError(
            f"{cluster.num_ranks} ranks are too many to be simulated one by one (at most {MAX_FULL_RANKS}); leave out "
            f"jitter, which makes all of them different"
        )
    plan, workload = scenario.plan, scenario.workload
    ranks = Ranks.of(cluster, plan)
    program = step_program(cluster, plan, workload, scenario.rates, gathers_by_level=scenario.gathers_by_level)
    patterns = {peers: ranks.groups(peers) for peers in peers_in(program) if not peers.is_ring}
    *uplinks, slowdowns = _factors(scenario)
    priced, num_levels = routing_of(plan, workload), len(uplinks)  # its fullest rank is that of the program
    routing = SimulatedRouting.of(ranks, priced)
    exact = [*uplinks, slowdowns, routing.pairs, *routing.chances, *routing.near_chances]
    found, classes, error = _with_few_classes(cluster, exact, patterns, is_reduced=is_reduced)
    slowdowns, pairs, *chances = found[num_levels:]
    maker = TrafficMaker(
        ranks,
        SimulatedRouting(tuple(chances[:num_levels]), pairs, tuple(chances[num_levels:])),
        classes,
        is_fair_to_flows=scenario.is_fair_to_flows,
    )
    # One peer in each domain sends its rows here.
    rows = pairs * math.prod(plan.domain_counts) / workload.model.top_k / priced.load_after
    schedule = Schedule(program, scenario, rows[classes.examples], slowdowns[classes.examples], maker=maker)
    traced = {rank: int(classes.class_of[rank]) for rank in traced_ranks}
    engine = Engine(
        _capacities(scenario, found[:num_levels], classes, maker),
        classes.num_classes,
        schedule.program,
        schedule.operations,
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
        quantisation=error,
        spans={rank: outcome.spans[number] for rank, number in traced.items()},
    )


def _factors(scenario: Scenario) -> list[Floats]:
    """[num_ranks] factors on the bandwidth of the child above a rank, by level; then on the seconds of computation."""
    cluster = scenario.cluster
    *uplinks, slowdowns = (np.ones(cluster.num_ranks) for _ in (*cluster.sizes, "slowdowns"))
    for one in scenario.deviations:
        below = nodes_at(cluster, len(one.place)) == flatten(one.place, cluster.sizes[: len(one.place)])
        uplinks[len(one.place) - 1][below] *= one.bandwidth_factor
        slowdowns[below] *= one.slowdown
    return [*uplinks, slowdowns]


def _with_few_classes(
    cluster: Cluster, exact: Sequence[Floats], patterns: Mapping[Peers, Ints], *, is_reduced: bool
) -> tuple[Sequence[Floats], RankClasses, float]:
    """Attributes, [num_ranks] each, classes, error; if too many ranks differ, with rounded attributes."""
    max_classes = MAX_CLASSES if is_reduced and cluster.num_ranks > MAX_CLASSES else None
    numbers = [] if is_reduced else [np.arange(cluster.num_ranks, dtype=np.float64)]
    found, error = exact, 0.0
    while True:
        classes = merge_ranks(cluster, patterns, [*numbers, *found], max_classes=max_classes)
        if classes is not None:
            return found, classes, error
        error = max(1.5 * error, LEAST_ERROR)
        if error > MOST_ERROR:
            raise PlanError(f"more than {MAX_CLASSES} ranks of {cluster} differ: too many for a simulation")
        found = [_rounded(values, error) for values in exact]


def _rounded(values: Floats, error: float) -> Floats:
    """The same, with no number more than `error`, a share, too large or too small."""
    step, result, used, mean = 2 * math.log1p(error), np.zeros_like(values), values > 0.0, float(values.mean())
    result[used] = mean * np.exp(step * np.round(np.log(values[used] / mean) / step))
    return result


def _capacities(scenario: Scenario, uplinks: Sequence[Floats], classes: RankClasses, maker: TrafficMaker) -> Floats:
    """[links] bytes/s."""
    capacities = np.zeros(maker.num_links)
    for level, bandwidth in enumerate(known_or_assumed_bandwidths(scenario.cluster)):
        of_child = uplinks[level].reshape(len(classes.child_class_of[level]), -1)[:, 0]
        for direction in (UP, DOWN):
            links = maker.link(level, classes.child_class_of[level], direction)
            capacities[links] = of_child * bandwidth / scenario.rates.wire_factor
    return capacities
