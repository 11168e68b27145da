# SPDX-License-Identifier: Apache-2.0
"""Fewer kinds of ranks: if too many differ, rates, speeds and loads are rounded.

Merging ranks that are alike is exact. This is not, so the result reports the largest deviation that it causes.
"""

import math
from dataclasses import replace

import numpy as np

from ds_hybridep.simulate.flows import Floats
from ds_hybridep.simulate.scenario import Scenario
from ds_hybridep.simulate.traffic import Routing

LEAST_ERROR = 0.0025


def rounded(scenario: Scenario, routing: Routing, error: float) -> tuple[Scenario, Routing]:
    """The scenario and its routing, with no rate, speed or load more than `error`, a share, too large or too small."""
    step = 2 * math.log1p(error)
    deviations = []
    for one in scenario.deviations:
        factors = (math.exp(step * round(math.log(x) / step)) for x in (one.bandwidth_factor, one.slowdown))
        bandwidth_factor, slowdown = factors
        if (bandwidth_factor, slowdown) != (1.0, 1.0):
            deviations.append(replace(one, bandwidth_factor=bandwidth_factor, slowdown=slowdown))

    def of_loads(values: Floats) -> Floats:
        result = np.zeros_like(values)
        used = values > 0.0
        mean = float(values.mean())
        result[used] = mean * np.exp(step * np.round(np.log(values[used] / mean) / step))
        return result

    return replace(scenario, deviations=tuple(deviations)), routing.mapped(of_loads)
