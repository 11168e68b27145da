# SPDX-License-Identifier: Apache-2.0
"""Fewer kinds of datacentres: if too many differ, each is simulated as the most similar one of a few.

Merging ranks that are alike is exact. This is not, so the result reports the largest deviation that it causes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ds_hybridep.simulate.flows import Floats, Ints
from ds_hybridep.simulate.scenario import Deviation, Scenario
from ds_hybridep.simulate.traffic import Routing

LEAST_LOAD = 1e-12  # smallest load of a rank, so that its logarithm exists


@dataclass(frozen=True)
class StandIns:
    """The children of level 0 that are simulated in place of others.

    of_child: [children of level 0] the child that stands in for each child.
    error: largest share by which a rate, a speed or a load is too large or too small.
    """

    of_child: Ints
    error: float


def choose_stand_ins(scenario: Scenario, routing: Routing, num_kinds: int, *, block: int) -> StandIns:
    """Choose at most `num_kinds` kinds of blocks of `block` neighbouring children, such as the DCs of one domain.

    Source: greedy solution of the k-center problem.  The next centre is the block farthest from all centres.  No other
    choice of as many centres is more than twice as close.
    """
    features = _features(scenario, routing)
    blocks = features.reshape(len(features) // block, -1)
    centres = [0]
    distance = np.abs(blocks - blocks[0]).max(axis=1)
    while len(centres) < num_kinds and distance.max() > 0.0:
        centres.append(int(distance.argmax()))
        distance = np.minimum(distance, np.abs(blocks - blocks[centres[-1]]).max(axis=1))
    nearest = np.stack([np.abs(blocks - blocks[centre]).max(axis=1) for centre in centres]).argmin(axis=0)
    of_block = np.array(centres, dtype=np.int64)[nearest]
    of_child = (of_block[:, None] * block + np.arange(block)).reshape(-1)
    return StandIns(of_child, math.expm1(float(distance.max())))


def with_stand_ins(scenario: Scenario, routing: Routing, stand_ins: StandIns) -> tuple[Scenario, Routing]:
    """The scenario and its routing, with every child replaced by its stand-in."""
    by_child: dict[int, list[Deviation]] = {}
    for deviation in scenario.deviations:
        by_child.setdefault(deviation.place[0], []).append(deviation)
    deviations = [
        replace(deviation, place=(child, *deviation.place[1:]))
        for child, stand_in in enumerate(stand_ins.of_child.tolist())
        for deviation in by_child.get(stand_in, [])
    ]
    num_children = scenario.cluster.sizes[0]

    def of_stand_in(values: Floats) -> Floats:
        result: Floats = values.reshape(num_children, -1)[stand_ins.of_child].reshape(-1)
        return result

    return replace(scenario, deviations=tuple(deviations)), routing.mapped(of_stand_in)


def _features(scenario: Scenario, routing: Routing) -> Floats:
    """[children of level 0, features] logarithms of all values that may differ between children."""
    num_children = scenario.cluster.sizes[0]
    columns: dict[tuple[tuple[int, ...], float], Floats] = {}
    for deviation in scenario.deviations:
        column = columns.setdefault((deviation.place[1:], deviation.from_s), np.zeros((num_children, 2)))
        column[deviation.place[0]] += math.log(deviation.bandwidth_factor), math.log(deviation.slowdown)
    loads = [np.log(np.maximum(values, LEAST_LOAD)) for values in (*routing.chances, routing.pairs)]
    parts: Sequence[Floats] = [*columns.values(), *(load.reshape(num_children, -1) for load in loads)]
    return np.concatenate(parts, axis=1)
