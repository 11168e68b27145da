# SPDX-License-Identifier: Apache-2.0
"""What is simulated: a plan on a cluster, and what is not as the cluster's levels say."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ds_hybridep.errors import PlanError
from ds_hybridep.plan.cluster import Cluster
from ds_hybridep.plan.layout import Layout, Rates, SyncModel
from ds_hybridep.plan.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What is taken to be so where machines differ.  The defaults are the runtime as it is.

    crosses_inner_links: a message between datacentres also passes the links inside them, as in a tree of switches; not
        so where a GPU has one link for its neighbours and another one for the world.
    is_fair_to_flows: flows share a link alike; otherwise operations do, however many flows they have.
    levels_in_turn: a rank's messages over different levels leave one after the other, slowest level first; so do
        gathers of what several ranks hold, ahead of the packets of weights.
    gathers_by_level: expert packets cross a slow level once per child; otherwise every rank sends straight to all
        others of its domain, as the paper counts it.
    """

    crosses_inner_links: bool = False
    is_fair_to_flows: bool = True
    levels_in_turn: bool = False
    gathers_by_level: bool = True


STREAM_MODEL_ASSUMPTIONS = Assumptions(is_fair_to_flows=False, levels_in_turn=True)


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """Something that is not as the levels say, below one place of the tree.

    place: coordinates from level 0 on: (3,) is the fourth DC, (3, 1) its second GPU.
    bandwidth_factor: of the uplink of that child.
    slowdown: seconds of computation of all ranks below, over what they would be.
    from_s: since when; computation that has begun keeps its pace.
    """

    place: tuple[int, ...]
    bandwidth_factor: float = 1.0
    slowdown: float = 1.0
    from_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.bandwidth_factor > 0 and self.slowdown > 0 and self.from_s >= 0):
            raise PlanError(
                f"the deviation at {self.place} has bandwidth_factor {self.bandwidth_factor}, slowdown "
                f"{self.slowdown} and from_s {self.from_s}, but must have the first two > 0 and the last >= 0"
            )


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What is simulated: one step of a plan under given conditions.

    cluster, layout, workload, rates, sync: as `stream_model.predict` takes them. `rates.overlap` is the share of its
        rate at which a flow proceeds while a rank that takes part in it computes.
    expert_load: rows of each expert, in any unit; None: even routing.
    deviations: places that are not as their level says.
    jitter: standard deviation of the logarithm of each piece of computation; drawn for each rank and piece.
    seed: of what is drawn.
    measured_s: seconds of computation by name, such as "forward 3", in place of those that the rates give.
    """

    cluster: Cluster
    layout: Layout
    workload: Workload
    rates: Rates
    sync: SyncModel = SyncModel()
    expert_load: tuple[float, ...] | None = None
    deviations: tuple[Deviation, ...] = ()
    assumptions: Assumptions = Assumptions()
    jitter: float = 0.0
    seed: int = 0
    measured_s: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layout.check_fits(self.cluster)
        sizes, model, load = self.cluster.sizes, self.workload.model, self.expert_load
        if model.num_experts % self.layout.group_size:
            raise PlanError(
                f"{model.num_experts} experts cannot be shared evenly by an expert-parallel group of "
                f"{self.layout.group_size} ranks"
            )
        if load is not None:
            num_used = sum(rows > 0 for rows in load)
            if len(load) != model.num_experts or min(load) < 0 or num_used < model.top_k:
                raise PlanError(
                    f"expert_load has {len(load)} entries, {num_used} of them > 0; give one >= 0 for each of the "
                    f"{model.num_experts} experts, and at least {model.top_k} > 0"
                )
        for deviation in self.deviations:
            place = deviation.place
            if not 1 <= len(place) <= len(sizes) or not all(
                0 <= at < size for at, size in zip(place, sizes, strict=False)
            ):
                raise PlanError(f"a deviation is at {place}, but the cluster {self.cluster} has no such place")
