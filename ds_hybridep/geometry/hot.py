# SPDX-License-Identifier: Apache-2.0
"""Which experts of a layer are hot: every rank of their group holds a replica, and computes its own tokens with it.

The ranks of a group share the experts.  Under uneven routing all ranks wait for the fullest one.  The rows of a hot
expert stay where their tokens are, so they are shared by all ranks; in return its weights travel to all ranks in each
step, and its gradients back.

    4 ranks, loads 70 10 10 10    fullest rank 70    expert 0 hot: 17.5 + 0, + 10, + 10, + 10, fullest rank 27.5
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

LEAST_GAIN = 0.02  # share of the layer's expert time that a change must save
TIE = 0.05  # share by which times may differ and count as equal


@dataclass(frozen=True, kw_only=True)
class HotCosts:
    """What decides whether a hot expert pays, in seconds per step.

    row_s: a rank's device, for one row of an expert: forward and backward, of all micro-steps.
    copy_s: a rank's link, for the weights of one expert to one other rank, and their gradients back.
    """

    row_s: float
    copy_s: float


# A number of hot experts that a user gives is not weighed against the time of the copies.
ROWS_ONLY = HotCosts(row_s=1.0, copy_s=0.0)


def rank_loads(
    loads: Sequence[float], owners: Sequence[int], num_ranks: int, hot: Collection[int] = ()
) -> list[float]:
    """Rows that each rank of the group computes, [num_ranks]; rows of hot experts are assumed to come from all alike.

    loads: rows of each expert, [E]; owners: the rank of the group that owns it, [E].
    """
    shared, hot = sum(loads[expert] for expert in sorted(hot)) / num_ranks, frozenset(hot)
    computed = [shared] * num_ranks
    for expert, owner in enumerate(owners):
        if expert not in hot:
            computed[owner] += loads[expert]
    return computed


def step_s(
    loads: Sequence[float], owners: Sequence[int], num_ranks: int, hot: Collection[int], *, costs: HotCosts
) -> float:
    """Seconds of a layer's experts on the fullest rank, and of the copies on the busiest link."""
    owned = [0] * num_ranks
    for expert in hot:
        owned[owners[expert]] += 1
    fullest = max(rank_loads(loads, owners, num_ranks, hot))
    return fullest * costs.row_s + _num_copies(owned, len(hot)) * costs.copy_s


def choose_hot(
    loads: Sequence[float],
    owners: Sequence[int],
    num_ranks: int,
    limit: int,
    *,
    costs: HotCosts,
    current: Collection[int] = (),
) -> tuple[int, ...]:
    """The experts that pay as hot ones, at most `limit`, in ascending order: always those with the highest loads.

    The fewest whose time is within TIE of the least; none, unless they save LEAST_GAIN.  The `current` ones stay
    unless others save LEAST_GAIN beside them.  Equal on all ranks that give equal arguments.
    """
    ranked = sorted(range(len(loads)), key=lambda expert: (-loads[expert], expert))[:limit]
    computed, owned, shared = rank_loads(loads, owners, num_ranks), [0] * num_ranks, 0.0
    seconds = [max(computed) * costs.row_s]
    for count, expert in enumerate(ranked, 1):
        computed[owners[expert]] -= loads[expert]
        owned[owners[expert]] += 1
        shared += loads[expert] / num_ranks
        seconds.append((max(computed) + shared) * costs.row_s + _num_copies(owned, count) * costs.copy_s)
    least = min(seconds)
    if least > (1 - LEAST_GAIN) * seconds[0]:
        return ()
    if len(current) in range(1, limit + 1) and (
        (1 - LEAST_GAIN) * step_s(loads, owners, num_ranks, current, costs=costs) <= least
    ):
        return tuple(sorted(current))
    best = next(count for count, one in enumerate(seconds) if one <= least * (1 + TIE))
    return tuple(sorted(ranked[:best]))


def _num_copies(owned: Sequence[int], count: int) -> int:
    """Copies over the busiest link: those that an owner sends, or those that a rank receives."""
    return max(max(owned) * (len(owned) - 1), count - min(owned))
