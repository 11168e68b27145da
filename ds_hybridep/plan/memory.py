# SPDX-License-Identifier: Apache-2.0
"""Memory of a layout on one rank."""

import math
from dataclasses import dataclass

from ds_hybridep.plan.cluster import Cluster
from ds_hybridep.plan.costs import experts_per_rank, gradient_messages, replicas_over
from ds_hybridep.plan.layout import Layout
from ds_hybridep.plan.sync_stages import dense_parameters, shared_experts, sync_state_bytes
from ds_hybridep.plan.workload import ADAM_BYTES, MASTER_BYTES, Workload


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one rank, without activations.

    sync_bytes: what codecs keep of dense parameters, and of experts that several groups hold.
    """

    dense_bytes: float
    owned_expert_bytes: float
    replica_bytes: float
    sync_bytes: float = 0.0

    @property
    def copies_bytes(self) -> float:
        """Beside what DeepSpeed holds."""
        return self.replica_bytes + self.sync_bytes

    @property
    def total_bytes(self) -> float:
        return self.dense_bytes + self.owned_expert_bytes + self.replica_bytes + self.sync_bytes


def memory_of(cluster: Cluster, layout: Layout, workload: Workload) -> Memory:
    """Bytes of parameters, gradients, optimizer state, replicas and mirrors on one rank.

    Per trained parameter: its gradient (shared out from ZeRO-2 on), 8 B of moments and a 4 B master copy of smaller
    types (shared out from ZeRO-1 on), over the ranks that hold it. Per parameter of each working copy, the owned among
    them: its type, and a 4 B gradient sum where it is trained. A lossy weight codec adds 4 B copies of smaller types
    and a 4 B mirror of owned weights; a lossy gradient codec two times 4 B for each message that leaves. Transient
    replicas: weights of `prefetch_depth` + 1 layers, and gradient sums of as many, or of all under accumulation.
    """
    model = workload.model
    world, group = cluster.num_ranks, layout.group_size
    layers = model.num_moe_layers
    owned = layers * experts_per_rank(layout, workload)
    held = min(layout.prefetch_depth + 1, layers) / layers if layout.is_transient else 1.0
    summed = held if workload.micro_steps == 1 else 1.0
    frozen_params, trained_params = model.expert_params - workload.expert_travel_params, workload.expert_travel_params
    per_expert = 0.0
    if layout.domain_size > 1:
        copy_bytes = held * workload.param_bytes * (frozen_params + trained_params)
        per_expert = layout.domain_size * (copy_bytes + summed * MASTER_BYTES * trained_params)
        per_expert += trained_params * MASTER_BYTES * _codec_values(layout, workload)
        if any(layout.codecs[level].weight.is_lossless_encoding for level in layout.gather_levels):
            per_expert += trained_params * workload.param_bytes
    return Memory(
        dense_bytes=_state_bytes(model.dense_params, workload.dense_train_params, workload, world),
        owned_expert_bytes=owned
        * _state_bytes(model.expert_params, workload.expert_travel_params, workload, world // group),
        replica_bytes=owned * per_expert,
        sync_bytes=math.fsum(
            sync_state_bytes(find(cluster, layout, workload), workload) for find in (dense_parameters, shared_experts)
        ),
    )


def _codec_values(layout: Layout, workload: Workload) -> int:
    """fp32 numbers that lossy codecs keep for each trained parameter that a rank owns."""
    codecs = layout.codecs
    values = len({codecs[level].weight.name for level in layout.gather_levels if codecs[level].weight.is_lossy})
    for level in layout.gather_levels:
        if codecs[level].weight.is_lossy and workload.param_bytes < MASTER_BYTES:
            values += replicas_over(layout, level)
        if codecs[level].gradient.is_lossy:
            values += 2 * gradient_messages(layout, level)
    return values


def _state_bytes(num_params: float, num_trained: float, workload: Workload, num_holders: int) -> float:
    """Bytes of parameters of which some are trained, held alike by `num_holders` ranks."""
    master_bytes = MASTER_BYTES if workload.param_bytes < MASTER_BYTES else 0
    optimizer = num_trained * (ADAM_BYTES + master_bytes) / (num_holders if workload.zero_stage >= 1 else 1)
    gradients = num_trained * workload.param_bytes / (num_holders if workload.zero_stage >= 2 else 1)
    return num_params * workload.param_bytes + gradients + optimizer
