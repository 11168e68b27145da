# SPDX-License-Identifier: Apache-2.0
"""A question to the planner: a job, the open choices, and the price of each choice."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from ds_hybridep.errors import PlanError
from ds_hybridep.geometry.cluster import Cluster, divisors
from ds_hybridep.plan.adapters import Where
from ds_hybridep.plan.memory import Memory, memory_of
from ds_hybridep.plan.plan import CodecCosts, ExpertGroup, HotLimit, LevelCodecs, PricedPlan, SummedBy, is_crossed
from ds_hybridep.plan.rates import IDENTITY, Rates
from ds_hybridep.plan.stream_model import StepPrediction, predict
from ds_hybridep.plan.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question to the planner.

    dense_sync: of our own plans; DeepSpeed's layers come with its rings.
    codecs: sets of codecs to try at each level; levels that nothing crosses take the first set.
    """

    cluster: Cluster
    workload: Workload
    rates: Rates
    dense_sync: SummedBy = "hierarchical"
    groups: tuple[ExpertGroup, ...] = ()  # groups to try; empty: `candidate_groups`
    codecs: tuple[CodecCosts, ...] = (LevelCodecs(),)
    memory_bytes: float | None = None  # of one GPU; None: not limited
    host_memory_bytes: float | None = None  # of the host, for each GPU; None: not limited
    hot_bytes: float | None = None  # of one GPU, for hot experts; None: not limited
    adapters: tuple[Where, int] | None = None  # where, and their rank; the workload has them too; None: no adapters

    def codecs_over(self, level: int, domain_size: int) -> tuple[CodecCosts, ...]:
        """Codec sets that make a difference at a level; DeepSpeed's sums use no codecs."""
        has_effect = is_crossed(self.cluster.sizes[level], domain_size, self.dense_sync)
        return self.codecs if has_effect else self.codecs[:1]

    def with_hot_experts(self, plan: PricedPlan) -> Iterator[PricedPlan]:
        """The plan, and with uneven routing also with 1, 2, 4 ... hot experts inside each level that can have them.

        Their weights travel as they are, so sets with codecs of experts exclude them.
        """
        yield plan
        workload = self.workload
        for level, (span, size, codecs) in enumerate(zip(plan.spans, plan.domain_sizes, plan.codecs, strict=True)):
            is_exact = codecs.weight == codecs.gradient == IDENTITY
            if not workload.is_uneven or span == 1 or size > 1 or not is_exact:
                continue
            most = workload.model.num_experts * plan.domain_size * span // plan.group_size  # that share a part
            if self.hot_bytes is not None:
                most = min(most, math.floor(self.hot_bytes / workload.hot_expert_bytes))
            for power in range(most.bit_length()):
                yield replace(plan, hot=HotLimit(level, 2**power))

    @property
    def allows_lossy(self) -> bool:
        """True if gradients may lose something."""
        return any(codecs.is_lossy for codecs in self.codecs)

    @property
    def expert_groups(self) -> tuple[ExpertGroup, ...]:
        return self.groups or candidate_groups(self.cluster, self.workload.model.num_experts)

    def predict(self, plan: PricedPlan) -> StepPrediction:
        return predict(self.cluster, plan, self.workload, self.rates)

    def with_best_exchange(self, plan: PricedPlan) -> tuple[PricedPlan, StepPrediction]:
        """The plan with the faster token exchange, and its step; direct if both are equally fast."""
        direct, hierarchical = replace(plan, token_exchange="direct"), replace(plan, token_exchange="hierarchical")
        best = self.predict(direct)
        if sum(count > 1 for count in plan.domain_counts) < 2:
            return direct, best
        other = self.predict(hierarchical)
        return (hierarchical, other) if other.step_s < best.step_s else (direct, best)

    def memory(self, plan: PricedPlan) -> tuple[Memory, float]:
        """Memory that a plan needs, and the bytes that it lacks."""
        memory = memory_of(self.cluster, plan, self.workload)
        return memory, self.lacking_bytes(memory)

    def lacking_bytes(self, memory: Memory) -> float:
        """Bytes that a GPU and its share of the host lack together; memory without a limit lacks nothing."""
        pairs = (memory.total_bytes, self.memory_bytes), (memory.host_bytes, self.host_memory_bytes)
        return sum(max(needed - limit, 0.0) for needed, limit in pairs if limit is not None)


def candidate_groups(cluster: Cluster, num_experts: int) -> tuple[ExpertGroup, ...]:
    """The largest expert-parallel groups, neighbouring and strided, and the largest inside one child of level 0."""
    world = cluster.num_ranks
    found = [largest_group(cluster, num_experts, world), largest_group(cluster, num_experts, world, is_strided=True)]
    found.append(largest_group(cluster, num_experts, world // cluster.sizes[0]))
    # Where one group has all ranks, strided and neighbouring are the same.
    by_spans: dict[tuple[int, ...], ExpertGroup] = {}
    for group in found:
        by_spans.setdefault(group.spans(cluster), group)
    return tuple(by_spans.values())


def largest_group(cluster: Cluster, num_experts: int, limit: int, *, is_strided: bool = False) -> ExpertGroup:
    """The largest group that is a grid of the levels, shares the experts evenly, and whose size divides `limit`."""
    sizes = [size for size in divisors(num_experts) if limit % size == 0]
    return next(group for size in reversed(sizes) if _is_grid(cluster, group := ExpertGroup(size, is_strided)))


def _is_grid(cluster: Cluster, group: ExpertGroup) -> bool:
    try:
        group.spans(cluster)
    except PlanError:
        return False
    return True
