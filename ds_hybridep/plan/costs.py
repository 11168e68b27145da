# SPDX-License-Identifier: Apache-2.0
"""Bytes and computing seconds of a plan, with one function for each part."""

import math
from functools import lru_cache
from typing import Any, Literal

from ds_hybridep.geometry.packets import COMPACT_BYTES, Part, return_depth
from ds_hybridep.geometry.slots import part_of
from ds_hybridep.plan.plan import Plan, PricedPlan
from ds_hybridep.plan.rates import IDENTITY
from ds_hybridep.plan.routing import experts_per_rank, routing_of
from ds_hybridep.plan.workload import MASTER_BYTES, Workload

HOST_BYTES_PER_S = 50e9  # between a GPU and the host's memory, for state that the host keeps

Way = Literal["weights", "gradients"]  # weights go to the replicas, gradients come back


def row_counts(plan: Plan[Any], workload: Workload) -> tuple[float, ...]:
    """Rows that one rank sends over each level in one dispatch of our own exchange, on average."""
    rows = routing_of(plan, workload).sent_rows("hierarchical" if plan.token_exchange == "hierarchical" else "direct")
    return tuple(workload.row_scale * workload.tokens_per_rank * count for count in rows)


def padded_rows(plan: PricedPlan, workload: Workload) -> float:
    """Rows that DeepSpeed's layer sends to each other rank in a dispatch: the capacity of its experts."""
    return workload.expert_capacity * workload.model.num_experts / plan.group_size


@lru_cache(maxsize=64)
def expert_parts(workload: Workload, num_owned: int) -> tuple[Part, ...]:
    """Parts of a message that holds `num_owned` experts of one layer."""
    return tuple(
        part_of((num_owned, *shape) if len(shape) > 1 else (num_owned, 1, *shape)) for shape in workload.expert_tensors
    )


def layers_in_flight(plan: PricedPlan, workload: Workload) -> int:
    """Layers between the start of a gradient's return and the wait for it."""
    layer_bytes = MASTER_BYTES * experts_per_rank(plan, workload) * workload.expert_travel_params
    return return_depth(workload.model.num_moe_layers, layer_bytes, plan.prefetch_depth)


def has_patches(plan: PricedPlan) -> bool:
    """True if owned weights leave as patches over some level."""
    weights = (plan.codecs[level].weight for level in plan.gather_levels)
    return any(weight != IDENTITY and not weight.is_lossy for weight in weights)


def lossy_weight_values(plan: PricedPlan, workload: Workload) -> int:
    """fp32 numbers that lossy codecs of weights keep for each trained parameter that a rank owns."""
    lossy = [level for level in plan.gather_levels if plan.codecs[level].weight.is_lossy]
    mirrors = len({plan.codecs[level].weight.name for level in lossy})
    is_narrow = workload.param_bytes < MASTER_BYTES
    return mirrors + (sum(replicas_over(plan, level) for level in lossy) if is_narrow else 0)


def gradient_residuals(plan: PricedPlan, workload: Workload) -> float:
    """Bytes of a layer's residuals."""
    num_experts = 0.0
    for level, codecs in enumerate(plan.codecs):
        if codecs.gradient.is_lossy:
            num_experts += gradients_sent(plan, workload, level)
    return residual_bytes(workload) * num_experts * workload.expert_travel_params


def gradients_sent(plan: PricedPlan, workload: Workload, level: int) -> float:
    """Experts of a layer whose gradients a rank sends over a level, the hot ones included."""
    owned, num_hot = experts_per_rank(plan, workload), 0.0
    if plan.hot is not None and level >= plan.hot.level:  # a replica's gradient leaves over one level
        others = 1 if level == plan.hot.level else plan.domain_sizes[level] - 1
        num_hot = others * routing_of(plan, workload).num_far / math.prod(plan.domain_sizes[level:])
    return owned * gradient_messages(plan, level) + num_hot


def residual_bytes(workload: Workload) -> float:
    """Bytes of one element of a residual.  Source: codecs/compact.py for 16-bit parameters, else fp32."""
    return COMPACT_BYTES if workload.param_bytes == 2 else MASTER_BYTES


def host_traffic_s(plan: PricedPlan, workload: Workload, way: Way) -> float:
    """Seconds to move a layer's state from the host to the device and back; 0 if the host does not keep it.

    The state is residuals, and the mirrors and fp32 copies of a lossy codec of weights.  No part of this time is
    assumed to be hidden.
    """
    if plan.state == "device":
        return 0.0
    if way == "gradients":
        return 2 * gradient_residuals(plan, workload) / HOST_BYTES_PER_S
    num_params = experts_per_rank(plan, workload) * workload.expert_travel_params
    return 2 * num_params * MASTER_BYTES * lossy_weight_values(plan, workload) / HOST_BYTES_PER_S


def replicas_over(plan: PricedPlan, level: int) -> int:
    """Replicas on a rank whose owner differs from it first at `level`, in units of the experts that a rank owns."""
    return (plan.domain_sizes[level] - 1) * math.prod(plan.domain_sizes[level + 1 :])


def gradient_messages(plan: PricedPlan, level: int) -> int:
    """Gradients that a rank sends over a level, in units of the experts that it owns; as many arrive."""
    return (plan.domain_sizes[level] - 1) * math.prod(plan.domain_sizes[:level])
