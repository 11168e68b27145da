# SPDX-License-Identifier: Apache-2.0
"""What the hot experts of a plan cost and bring: the plan beside the same plan without them."""

from dataclasses import dataclass, replace

from ds_hybridep.plan.planner import Candidate
from ds_hybridep.plan.question import Question


@dataclass(frozen=True, kw_only=True)
class HotGain:
    """Hot experts of one plan; the fields are those of its JSON.

    hot_experts: of each layer, most, in each part of the group that shares them.
    level: inside which they have replicas, by name.
    memory_bytes: of replicas and their gradient sums, most on a rank.
    uplink_bytes: of their weights and gradients in a step, over one uplink of the level in one direction.
    load_before, load_after: rows of the fullest rank over the mean.
    step_s_before, step_s_after: a step.
    """

    hot_experts: int
    level: str
    memory_bytes: float
    uplink_bytes: float
    load_before: float
    load_after: float
    step_s_before: float
    step_s_after: float


def hot_gain(question: Question, candidate: Candidate) -> HotGain | None:
    """What the hot experts of a candidate cost and bring; None if it has none."""
    layout, level = candidate.layout, candidate.layout.hot_level
    if not layout.hot_experts or level is None:
        return None
    without = replace(layout, hot_experts=0, hot_level=None)
    memory, _ = question.memory(without)
    _, before = question.with_best_exchange(without)

    before_bytes, after_bytes = (
        kinds["expert_weights"] + kinds["expert_gradients"]
        for kinds in (before.uplink_bytes[level], candidate.prediction.uplink_bytes[level])
    )
    return HotGain(
        hot_experts=layout.hot_experts,
        level=question.cluster.levels[level].name,
        memory_bytes=candidate.memory.replica_bytes - memory.replica_bytes,
        uplink_bytes=after_bytes - before_bytes,
        load_before=candidate.routing.load_before,
        load_after=candidate.routing.load_after,
        step_s_before=before.step_s,
        step_s_after=candidate.step_s,
    )
