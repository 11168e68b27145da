# SPDX-License-Identifier: Apache-2.0
"""Which experts of a layer are hot: every rank of their group holds a replica, and computes its own tokens with it.

The ranks of a group share the experts.  Under uneven routing all ranks wait for the fullest one.  The rows of a hot
expert stay where their tokens are, so they are shared by all ranks; in return its weights travel to all ranks in each
step, and its gradients back.

    4 ranks, loads 70 10 10 10    fullest rank 70    expert 0 hot: 17.5 + 0, + 10, + 10, + 10, fullest rank 27.5
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

LEAST_GAIN = 0.02  # share of the layer's expert time that hot experts must save


@dataclass(frozen=True, kw_only=True)
class HotCosts:
    """What decides whether a hot expert pays, in seconds per step.

    row_s: a rank's device, for one row of an expert: forward and backward, of all micro-steps.
    copy_s: a rank's link, for the weights of one expert to one other rank, and their gradients back.
    """

    row_s: float
    copy_s: float


def rank_loads(loads: Sequence[float], owners: Sequence[int], num_ranks: int, hot: Collection[int]) -> list[float]:
    """Rows that each rank of the group computes, [num_ranks]; rows of hot experts are assumed to come from all alike.

    loads: rows of each expert, [E]; owners: the rank of the group that owns it, [E].
    """
    shared = sum(loads[expert] for expert in sorted(hot)) / num_ranks
    computed = [shared] * num_ranks
    for expert, owner in enumerate(owners):
        if expert not in hot:
            computed[owner] += loads[expert]
    return computed


def step_s(
    loads: Sequence[float], owners: Sequence[int], num_ranks: int, hot: Collection[int], costs: HotCosts
) -> float:
    """Seconds of a layer's experts on the fullest rank, and of the copies on the busiest link."""
    owned = [0] * num_ranks
    for expert in hot:
        owned[owners[expert]] += 1
    copies = max(max(owned) * (num_ranks - 1), len(hot) - min(owned))  # sent by an owner, received by a rank
    return max(rank_loads(loads, owners, num_ranks, hot)) * costs.row_s + copies * costs.copy_s


def choose_hot(
    loads: Sequence[float], owners: Sequence[int], num_ranks: int, limit: int, costs: HotCosts
) -> tuple[int, ...]:
    """The experts that pay as hot ones, at most `limit`, in ascending order: always those with the highest loads.

    The same on all ranks that call it with the same arguments.
    """
    ranked = sorted(range(len(loads)), key=lambda expert: (-loads[expert], expert))
    options = [ranked[:count] for count in range(min(limit, len(loads)) + 1)]
    seconds = [step_s(loads, owners, num_ranks, hot, costs) for hot in options]
    best = min(range(len(options)), key=lambda count: seconds[count])
    return tuple(sorted(options[best])) if seconds[best] < (1 - LEAST_GAIN) * seconds[0] else ()
