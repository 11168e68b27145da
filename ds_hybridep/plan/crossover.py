# SPDX-License-Identifier: Apache-2.0
"""At which bandwidths of the slowest level another way becomes the fastest."""

import math
from collections.abc import Sequence
from dataclasses import replace

from ds_hybridep.plan.planner import TIE, Plan
from ds_hybridep.plan.question import Question
from ds_hybridep.plan.rivals import alternatives

SWEEP_BYTES_PER_S = [10 ** (6 + step / 4) for step in range(25)]  # 8 Mbit/s to 8 Tbit/s
BISECTIONS = 8  # between two bandwidths of the sweep


def step_times(question: Question, plan: Plan, bandwidth: float) -> dict[str, float]:
    """Predicted seconds at a bandwidth of level 0, of every layout that fits and of what DeepSpeed does itself.

    The exchange of each layout is chosen afresh; depths are those of the plan.
    """
    asked = replace(question, cluster=question.cluster.with_link(0, bandwidth_bytes_per_s=bandwidth))
    fitting = [candidate for candidate in (plan.best, *plan.others) if not candidate.lacking_bytes]
    times: dict[str, float] = {}
    for candidate in fitting:
        times.setdefault(candidate.label, asked.with_best_exchange(candidate.layout)[1].step_s)
    for way in alternatives(asked):
        # De-duplicated exchange without domains is among the layouts already.
        if way.step_s is not None and way.layout and way.layout.is_padded and not way.lacking_bytes:
            times[way.name] = way.step_s
    return times


def fastest_ranges(
    question: Question, plan: Plan, bandwidths: Sequence[float] = SWEEP_BYTES_PER_S
) -> tuple[tuple[str, float, float], ...]:
    """(label, from, to) of ascending `bandwidths` of level 0, in bytes/s, and what is fastest between them.

    Ties go to the plan's best layout, then in the plan's order.
    """

    def winner(bandwidth: float) -> str:
        times = step_times(question, plan, bandwidth)
        fastest_s = min(times.values())
        return next(label for label, seconds in times.items() if seconds <= fastest_s * (1 + TIE))

    winners = [winner(bandwidth) for bandwidth in bandwidths]
    borders, labels = [bandwidths[0]], winners[:1]
    for index in range(1, len(bandwidths)):
        if winners[index] != winners[index - 1]:
            low, high = bandwidths[index - 1], bandwidths[index]
            for _ in range(BISECTIONS):
                middle = math.sqrt(low * high)
                if winner(middle) == winners[index - 1]:
                    low = middle
                else:
                    high = middle
            borders.append(high)
            labels.append(winners[index])
    return tuple(zip(labels, borders, [*borders[1:], bandwidths[-1]], strict=True))
