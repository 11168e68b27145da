# SPDX-License-Identifier: Apache-2.0
"""Memory of a plan on one rank: state, activations, and an allowance."""

import math
from dataclasses import dataclass

from ds_hybridep.geometry.cluster import Cluster
from ds_hybridep.plan.activations import activations_of
from ds_hybridep.plan.costs import gradient_residuals, has_patches, layers_in_flight, lossy_weight_values
from ds_hybridep.plan.held import dense_parameters, shared_experts
from ds_hybridep.plan.plan import PricedPlan
from ds_hybridep.plan.routing import experts_per_rank, routing_of
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
    host_bytes: float = 0.0

    @property
    def workspace_bytes(self) -> float:
        """Bytes of an allowance for the runtime and for what the allocator loses."""
        return WORKSPACE_BYTES + FRAGMENTATION * self.activation_bytes

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


def memory_of(cluster: Cluster, plan: PricedPlan, workload: Workload) -> Memory:
    """Bytes of parameters, gradients, optimizer state, copies, codec state, activations and workspace.

    A trained parameter has a gradient, 8 B of moments, and a 4 B master copy if its type is smaller.  The ranks that
    hold it share the gradient from ZeRO-2 on, and the rest from ZeRO-1 on.  For an optimizer on the host see
    `host_bytes`, for copies `_replicas`.
    """
    model = workload.model
    world, group = cluster.num_ranks, plan.group_size
    owned = experts_per_rank(plan, workload)
    all_owned = model.num_moe_layers * owned
    replica_bytes, replica_host_bytes = _replicas(plan, workload)
    held = [find(cluster, plan, workload) for find in (dense_parameters, shared_experts)]
    synced = 2 * math.fsum(one.residual_bytes for one in held)  # residuals, and new ones until the step is applied
    routing = routing_of(plan, workload)
    activations = activations_of(
        workload,
        num_experts_held=owned * plan.domain_size + routing.num_far,
        is_padded=plan.is_padded,
        fullest=routing.load_after,
    )
    is_on_host = plan.state == "host"
    expert_bytes = state_bytes(model.expert_params, workload.expert_travel_params, workload, world // group)
    optimizer_on_host = host_bytes(workload.dense_train_params, workload, world)
    optimizer_on_host += all_owned * host_bytes(workload.expert_travel_params, workload, world // group)
    return Memory(
        dense_bytes=state_bytes(model.dense_params, workload.dense_train_params, workload, world),
        owned_expert_bytes=all_owned * expert_bytes,
        replica_bytes=replica_bytes,
        sync_bytes=0.0 if is_on_host else synced,
        host_bytes=replica_host_bytes + (synced if is_on_host else 0.0) + optimizer_on_host,
        activation_bytes=max(activations.total_bytes, math.fsum(one.before_step_bytes for one in held)),
    )


def _replicas(plan: PricedPlan, workload: Workload) -> tuple[float, float]:
    """Bytes of working copies on the device, and in the host's memory.  Source: experts/replicas.py.

    Each owned parameter in a domain of M ranks has:

        copies          M - 1 of the parameter's type
        residuals       one for each lossy message of gradients, and a new one until the step is applied
        lossy weights   a 4 B mirror of the owned weights for each codec; 4 B copies if their type is smaller
        sums            M - 1 of 4 B, and one of what returns
        staging         one if owned weights leave as they are
        sent last       one if weights leave as patches

    Frozen parameters have copies only.  Replicas of hot experts have copies, sums and residuals; while they travel,
    their owner has a copy, or a sum of what returns.
    """
    num_others, element = plan.domain_size - 1, workload.param_bytes
    routing = routing_of(plan, workload)
    if not num_others and not routing.hot:
        return 0.0, 0.0
    # 1. Bytes of one layer.
    owned, of_expert = experts_per_rank(plan, workload), workload.expert_travel_params
    trained = owned * of_expert
    sends_exactly = any(not plan.codecs[level].weight.is_lossy for level in plan.gather_levels)
    copies = (owned * num_others + routing.num_far) * element * workload.model.expert_params
    residuals = gradient_residuals(plan, workload)
    kept = residuals + trained * MASTER_BYTES * lossy_weight_values(plan, workload)
    staging = (trained * sends_exactly + routing.num_near * of_expert) * element
    sent_last = trained * element * has_patches(plan)
    sums = (trained * num_others + routing.num_far * of_expert) * MASTER_BYTES
    returning = (trained + routing.num_near * of_expert) * MASTER_BYTES
    # 2. Layers that have them at the same time.
    num_layers = workload.model.num_moe_layers
    on_their_way = min(layers_in_flight(plan, workload) + 1, num_layers)
    if workload.micro_steps > 1:  # sums wait for the last; once sent, new residuals take the place of larger sums
        with_sums, with_residuals = num_layers, on_their_way
    else:
        # Sums that cross one level are in a message as soon as their return starts; others may wait for earlier ones.
        num_levels = len(plan.gather_levels) + bool(routing.hot)
        with_sums = min(plan.prefetch_depth + 1, num_layers) if num_levels == 1 else on_their_way
        with_residuals = num_layers
    is_on_host = plan.state == "host"
    lasting = num_layers * (copies + (0.0 if is_on_host else kept))
    on_return = with_sums * sums + on_their_way * returning + (0.0 if is_on_host else with_residuals * residuals)
    on_host = num_layers * (kept + residuals) if is_on_host else 0.0
    return lasting + max(num_layers * staging, num_layers * sent_last, on_return), on_host


def state_bytes(num_params: float, num_trained: float, workload: Workload, num_holders: int) -> float:
    """Bytes on the device for parameters that `num_holders` ranks hold, with the training state of `num_trained`."""
    master_bytes = MASTER_BYTES if workload.param_bytes < MASTER_BYTES else 0
    optimizer = num_trained * (ADAM_BYTES + master_bytes) / (num_holders if workload.zero_stage >= 1 else 1)
    gradients = num_trained * workload.param_bytes / (num_holders if workload.zero_stage >= 2 else 1)
    if workload.offloads_optimizer:  # ZeRO-2 moves each gradient to the host when it is reduced
        optimizer, gradients = 0.0, gradients if workload.zero_stage == 1 else 0.0
    return num_params * workload.param_bytes + gradients + optimizer


def host_bytes(num_trained: float, workload: Workload, num_holders: int) -> float:
    """Bytes on the host for the training state of `num_trained` parameters that `num_holders` ranks hold.

    For each there are 8 B of moments, a 4 B master copy, a gradient of 4 B, and room for the new parameter; under
    ZeRO-2 also the sum of earlier micro-steps.
    """
    if not workload.offloads_optimizer:
        return 0.0
    num_rooms = 1 + (workload.zero_stage == 2 and workload.micro_steps > 1)
    of_each = ADAM_BYTES + 2 * MASTER_BYTES + num_rooms * workload.param_bytes
    return num_trained * of_each / num_holders
