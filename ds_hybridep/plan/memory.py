# SPDX-License-Identifier: Apache-2.0
"""Memory of a layout on one rank: state, activations, and an allowance."""

import math
from dataclasses import dataclass

from ds_hybridep.plan.activations import Activations, activations_of
from ds_hybridep.plan.cluster import Cluster
from ds_hybridep.plan.costs import (
    experts_per_rank,
    gradient_residuals,
    has_patches,
    layers_in_flight,
    lossy_weight_values,
)
from ds_hybridep.plan.depth import leaving_depth
from ds_hybridep.plan.held import dense_parameters, shared_experts
from ds_hybridep.plan.layout import Layout
from ds_hybridep.plan.workload import ADAM_BYTES, MASTER_BYTES, Workload

# Memory beside the model's tensors: 1 GB for libraries, their buffers and what encoding takes for a moment, 2 GB for
# two of DeepSpeed's buckets.
WORKSPACE_BYTES = 3e9
FRAGMENTATION = 0.05  # share of activations that the allocator loses, because they come and go


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Largest number of bytes on one rank during a step.

    sync_bytes: state that codecs keep for dense parameters, and for experts that several groups hold.
    activation_bytes: bytes of activations, or of the optimizer's step if it needs more; both never exist together.
    host_bytes: bytes in the host's memory; the sums below leave them out.
    """

    dense_bytes: float
    owned_expert_bytes: float
    replica_bytes: float
    sync_bytes: float = 0.0
    activation_bytes: float = 0.0
    workspace_bytes: float = 0.0
    host_bytes: float = 0.0

    @property
    def copies_bytes(self) -> float:
        """Bytes in addition to what DeepSpeed holds."""
        return self.replica_bytes + self.sync_bytes

    @property
    def state_bytes(self) -> float:
        """Bytes that stay from micro-step to micro-step."""
        return self.dense_bytes + self.owned_expert_bytes + self.copies_bytes

    @property
    def total_bytes(self) -> float:
        """Bytes that a GPU must have."""
        return self.state_bytes + self.activation_bytes + self.workspace_bytes


def memory_of(cluster: Cluster, layout: Layout, workload: Workload) -> Memory:
    """Bytes of parameters, gradients, optimizer state, copies, codec state, activations and workspace.

    A trained parameter has a gradient, 8 B of moments, and a 4 B master copy if its type is smaller.  The ranks that
    hold it share the gradient from ZeRO-2 on, and the rest from ZeRO-1 on.  For copies see `_replicas`.
    """
    model = workload.model
    world, group = cluster.num_ranks, layout.group_size
    owned = experts_per_rank(layout, workload)
    all_owned = model.num_moe_layers * owned
    on_device, on_host = _replicas(layout, workload)
    held = [find(cluster, layout, workload) for find in (dense_parameters, shared_experts)]
    synced = 2 * math.fsum(one.residual_bytes for one in held)  # residuals, and new ones until the step is applied
    is_on_host = layout.state == "host"
    expert_bytes = state_bytes(model.expert_params, workload.expert_travel_params, workload, world // group)
    return Memory(
        dense_bytes=state_bytes(model.dense_params, workload.dense_train_params, workload, world),
        owned_expert_bytes=all_owned * expert_bytes,
        replica_bytes=all_owned * on_device,
        sync_bytes=0.0 if is_on_host else synced,
        host_bytes=all_owned * on_host + (synced if is_on_host else 0.0),
        **working_bytes(
            activations_of(workload, num_experts_held=owned * layout.domain_size, is_padded=layout.is_padded),
            math.fsum(one.before_step_bytes for one in held),
        ),
    )


def working_bytes(activations: Activations, in_step: float = 0.0) -> dict[str, float]:
    """Fields of `Memory` that change within a step; in_step: bytes of the optimizer's step, without activations."""
    most = max(activations.total_bytes, in_step)
    return {"activation_bytes": most, "workspace_bytes": WORKSPACE_BYTES + FRAGMENTATION * most}


def _replicas(layout: Layout, workload: Workload) -> tuple[float, float]:
    """Bytes (on the device, on the host) of working copies for one owned expert.  Source: experts/replicas.py.

    Each owned parameter in a domain of M ranks has:

        copies          M - 1 of the parameter's type
        residuals       one for each lossy message of gradients; until the step is applied, a new one takes the place
                        of sums; with one micro-step, all layers have it
        lossy weights   a 4 B mirror of the owned weights for each codec; 4 B copies if their type is smaller
        sums            M - 1 of 4 B in all layers; with one micro-step, only in layers that leave (`leaving_depth`)
        returned sums   4 B in the layers in flight
        staging         one if owned weights leave as they are; not at the same time as sums
        sent last       one if weights leave as patches, while the optimizer step is applied; not at the same time as
                        sums and new residuals

    The layers in flight are `layers_in_flight` + 1.  If the host keeps the state, it keeps residuals, mirrors and 4 B
    copies.  Frozen parameters have copies only.
    """
    size, element = layout.domain_size, workload.param_bytes
    if size == 1:
        return 0.0, 0.0
    layers, trained = workload.model.num_moe_layers, workload.expert_travel_params
    depth = layers_in_flight(layout, workload)
    leaving = leaving_depth(len(layout.gather_levels), depth, layout.prefetch_depth)
    window, sent_window = (min(one + 1, layers) / layers for one in (depth, leaving))
    copies = (size - 1) * element * workload.model.expert_params
    sent = element * has_patches(layout)
    residuals = gradient_residuals(layout, workload)
    summed, renewed = (1.0, window) if workload.micro_steps > 1 else (sent_window, 1.0)
    sums = MASTER_BYTES * ((size - 1) * summed + window)
    kept = residuals + MASTER_BYTES * lossy_weight_values(layout, workload)
    sends_exactly = any(not layout.codecs[level].weight.is_lossy for level in layout.gather_levels)
    staging = element * sends_exactly
    if layout.state == "host":
        return copies + trained * max(sums, staging, sent), trained * (kept + residuals)
    return copies + trained * (kept + max(sums + residuals * renewed, staging, sent)), 0.0


def state_bytes(num_params: float, num_trained: float, workload: Workload, num_holders: int) -> float:
    """Bytes of parameters that `num_holders` ranks hold, with the training state of `num_trained` of them."""
    master_bytes = MASTER_BYTES if workload.param_bytes < MASTER_BYTES else 0
    optimizer = num_trained * (ADAM_BYTES + master_bytes) / (num_holders if workload.zero_stage >= 1 else 1)
    gradients = num_trained * workload.param_bytes / (num_holders if workload.zero_stage >= 2 else 1)
    return num_params * workload.param_bytes + gradients + optimizer
