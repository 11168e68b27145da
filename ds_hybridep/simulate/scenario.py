# SPDX-License-Identifier: Apache-2.0
"""What is simulated: a plan on a cluster, and deviations from the cluster's levels."""

from dataclasses import dataclass

from ds_hybridep.errors import PlanError
from ds_hybridep.geometry.cluster import Cluster
from ds_hybridep.plan.plan import PricedPlan
from ds_hybridep.plan.rates import Rates
from ds_hybridep.plan.routing import experts_per_rank
from ds_hybridep.plan.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """A deviation from the levels, below one place of the tree.

    place: coordinates from level 0 on: (3,) is the fourth DC, (3, 1) its second GPU.
    bandwidth_factor: factor on the bandwidth of that child's uplink.
    slowdown: factor on the seconds of computation and of host calls of all ranks below.
    """

    place: tuple[int, ...]
    bandwidth_factor: float = 1.0
    slowdown: float = 1.0

    def __post_init__(self) -> None:
        if not (self.bandwidth_factor > 0 and self.slowdown > 0):
            raise PlanError(
                f"the deviation at {self.place} has bandwidth_factor {self.bandwidth_factor} and slowdown "
                f"{self.slowdown}, but must have both > 0"
            )


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is simulated: one step of a plan under given conditions.

    A message between datacentres passes no link inside them: a GPU has one link to its neighbours and another one to
    the world.

    cluster, plan, workload, rates: as `stream_model.predict` takes them. `rates.overlap` is the factor on the
        rate of a flow while a rank that takes part in it computes.
    deviations: places that differ from their level.
    jitter: standard deviation of the logarithm of the seconds of each piece of computation, drawn by rank and piece.
    is_fair_to_flows: flows share a link equally; False: operations do, no matter how many flows they have.
    gathers_by_level: expert packets cross a slow level once per child; False: every rank sends directly to all others
        of its domain, as the paper counts it.
    """

    cluster: Cluster
    plan: PricedPlan
    workload: Workload
    rates: Rates
    deviations: tuple[Deviation, ...] = ()
    jitter: float = 0.0
    is_fair_to_flows: bool = True
    gathers_by_level: bool = True

    def __post_init__(self) -> None:
        self.plan.check_fits(self.cluster)
        experts_per_rank(self.plan, self.workload)  # raises where they cannot be shared evenly
        sizes = self.cluster.sizes
        for deviation in self.deviations:
            place = deviation.place
            is_inside = all(0 <= at < size for at, size in zip(place, sizes, strict=False))
            if not (1 <= len(place) <= len(sizes) and is_inside):
                raise PlanError(f"a deviation is at {place}, but the cluster {self.cluster} has no such place")
