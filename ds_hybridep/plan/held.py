# SPDX-License-Identifier: Apache-2.0
"""Parameters that several ranks hold: dense ones, which all have, and experts that several groups have.

Under ZeRO 1 and 2, the sum of gradients goes to the rank that owns the slot; after the optimizer, this rank sends the
new parameters to all.  Without ZeRO, the sum itself goes to all.

    ZeRO    in every micro-step         once in an optimizer step
    0                                   sums, inner levels first; gather of the sums, outer levels first
    1                                   sums; gather of parameters
    2       sums at the fastest level   sums at the others; gather of parameters

If the fastest level has a gradient codec, sums cross it only once under ZeRO 2, too.  Source: sync/dense.py.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ds_hybridep.geometry.cluster import Cluster
from ds_hybridep.geometry.slots import Shape, num_elements, shares_of
from ds_hybridep.plan.codec_costs import patch_cost
from ds_hybridep.plan.costs import residual_bytes
from ds_hybridep.plan.plan import PricedPlan
from ds_hybridep.plan.rates import IDENTITY, CodecCost
from ds_hybridep.plan.routing import experts_per_rank
from ds_hybridep.plan.workload import Workload

NARROW_BYTES = 2  # parameters of this size travel as patches over every level that encodes them


@dataclass(frozen=True, kw_only=True)
class Held:
    """Parameters, and the group of ranks that hold them.

    spans: positions of the group, by level.  tensors: in the model's order.  weights, gradients: codecs, by level.
    """

    workload: Workload
    spans: tuple[int, ...]
    tensors: tuple[Shape, ...]
    weights: tuple[CodecCost, ...]
    gradients: tuple[CodecCost, ...]

    @property
    def num_holders(self) -> int:
        return math.prod(self.spans)

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """Levels that the group crosses, slowest first; none if there is nothing to synchronise."""
        return tuple(level for level, span in enumerate(self.spans) if span > 1 and self.tensors)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, uncompressed."""
        return sum(map(math.prod, self.tensors)) * self.workload.param_bytes

    @property
    def repeated_level(self) -> int | None:
        """The level over which gradients are summed in every micro-step; None if there is none."""
        if self.workload.zero_stage < 2 or not self.levels or self.gradients[self.levels[-1]] != IDENTITY:
            return None
        return self.levels[-1]

    def messages_over(self, level: int) -> int:
        """Slots that a rank sends over a level in one sum."""
        return (self.spans[level] - 1) * math.prod(self.spans[:level])

    @cached_property
    def gather_codec(self) -> tuple[CodecCost, tuple[int, ...]]:
        """The one codec of a gather, and the levels that use it."""
        is_narrow = self.workload.param_bytes == NARROW_BYTES and self.workload.zero_stage >= 1
        codecs = self.weights if self.workload.zero_stage else self.gradients
        if self.workload.zero_stage and not is_narrow:
            used = [level for level in self.levels if codecs[level].is_lossy]
        else:
            used = [level for level in self.levels if codecs[level] != IDENTITY]
        if used and is_narrow:
            lossless = (codecs[level] for level in used if not codecs[level].is_lossy)
            return next(lossless, patch_cost(self.workload.learning_rate)), tuple(used)
        return (codecs[used[0]] if used else IDENTITY), tuple(used)

    def slot_bytes(self, codec: CodecCost, *, of_parameters: bool = False) -> float:
        """Mean bytes of one slot's message of gradients, or of parameters."""
        return _mean_bytes(
            self.tensors,
            self.num_holders,
            self.workload.zero_stage,
            codec,
            element_bytes=self.workload.param_bytes,
            padded=of_parameters,
        )

    @property
    def residual_bytes(self) -> float:
        """Bytes of the residuals of gradients on a rank."""
        encoding_levels = [level for level in self.levels if self.gradients[level] != IDENTITY]
        residuals = sum(self.messages_over(level) for level in encoding_levels)
        if encoding_levels and self.workload.zero_stage == 0:
            residuals += 1  # for the sum of the own slot
        return self._slot_elements * residual_bytes(self.workload) * residuals

    @property
    def before_step_bytes(self) -> float:
        """Bytes of a copy of own parameters, which lives from before the optimizer step until the gather after it."""
        is_kept = self.workload.zero_stage >= 1 and self.gather_codec[1]
        return self._slot_elements * self.workload.param_bytes if is_kept else 0.0

    @property
    def _slot_elements(self) -> float:
        return sum(map(math.prod, self.tensors)) / self.num_holders


def dense_parameters(cluster: Cluster, plan: PricedPlan, workload: Workload) -> Held:
    """What all ranks hold."""
    weights, gradients = zip(*((one.dense_weight, one.dense_gradient) for one in plan.codecs), strict=True)
    return Held(
        workload=workload, spans=cluster.sizes, tensors=workload.dense_tensors, weights=weights, gradients=gradients
    )


def shared_experts(cluster: Cluster, plan: PricedPlan, workload: Workload) -> Held:
    """The experts of one rank, which ranks of other expert-parallel groups also hold."""
    spans = tuple(size // span for size, span in zip(cluster.sizes, plan.spans, strict=True))
    weights, gradients = zip(*((one.weight, one.gradient) for one in plan.codecs), strict=True)
    return Held(
        workload=workload,
        spans=spans,
        tensors=workload.owned_tensors(experts_per_rank(plan, workload)),
        weights=weights,
        gradients=gradients,
    )


@lru_cache(maxsize=4096)
def _mean_bytes(
    tensors: tuple[Shape, ...],
    num_holders: int,
    zero_stage: int,
    codec: CodecCost,
    *,
    element_bytes: int,
    padded: bool,
) -> float:
    shares = shares_of(tensors, num_holders, zero_stage)
    slots = shares.parameters if padded else shares.gradients
    if codec == IDENTITY:
        return sum(map(num_elements, slots)) * element_bytes / len(slots)
    return math.fsum(codec.message_bytes(slot, element_bytes) for slot in slots) / len(slots)
