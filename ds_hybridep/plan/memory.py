# SPDX-License-Identifier: Apache-2.0
"""Memory of a layout on one rank: state, activations, and an allowance."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from ds_hybridep.plan.activations import activations_of
from ds_hybridep.plan.cluster import Cluster
from ds_hybridep.plan.costs import (
    gradient_residuals,
    has_patches,
    layers_in_flight,
    lossy_weight_values,
)
from ds_hybridep.plan.held import dense_parameters, shared_experts
from ds_hybridep.plan.layout import Layout
from ds_hybridep.plan.routing import experts_per_rank, routing_of
from ds_hybridep.plan.workload import ADAM_BYTES, MASTER_BYTES, Workload

# Memory beside the model's tensors: 1 GB for libraries, their buffers and what encoding takes for a moment, 2 GB for
# two of DeepSpeed's buckets.
WORKSPACE_BYTES = 3e9
FRAGMENTATION = 0.05  # share of activations that the allocator loses, because they come and go


@dataclass(frozen=True, kw_only=True)
class LayerNeeds:
    """Bytes of one layer on one rank.  The fields that last between steps come first.

    replicas: weights of the domain's other experts, in the type they are trained in.
    codecs, host: mirrors, fp32 values of 16-bit replicas, residuals, and encoders' state, on the device and the host.
    staging: copies of owned weights that travel unencoded, from a step to the next forward.
    sent: what patches sent last, during the optimizer step.
    sums: of replicas' gradients, fp32.
    own_sums: sums of the owned experts' gradients while they return.
    residuals: of a step, until it is applied.
    """

    replicas: float = 0
    codecs: float = 0
    host: float = 0
    staging: float = 0
    sent: float = 0
    sums: float = 0
    own_sums: float = 0
    residuals: float = 0


@dataclass(frozen=True, kw_only=True)
class MemoryNeeds:
    """Bytes on one rank beside what DeepSpeed holds, without packets and other short-lived buffers.

    replicas, codecs, staging, host: of all layers, as in `LayerNeeds`.
    gradient_sums: the most that sums of replicas' gradients take in a step.
    returns: the most that returning gradients take beside these sums, and residuals until the step is applied.
    step: what patches sent last, during the optimizer step.
    host_returns: residuals in host memory, from the return of gradients until the step is applied.
    """

    replicas: float = 0
    codecs: float = 0
    staging: float = 0
    gradient_sums: float = 0
    returns: float = 0
    step: float = 0
    host: float = 0
    host_returns: float = 0

    @property
    def after_step(self) -> float:
        """Bytes on the device while new weights travel."""
        return self.replicas + self.codecs + self.staging

    @property
    def total(self) -> float:
        """The most bytes on the device in a step."""
        return self.replicas + self.codecs + max(self.staging, self.gradient_sums + self.returns, self.step)


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


def memory_of(cluster: Cluster, layout: Layout, workload: Workload) -> Memory:
    """Bytes of parameters, gradients, optimizer state, copies, codec state, activations and workspace.

    A trained parameter has a gradient, 8 B of moments, and a 4 B master copy if its type is smaller.  The ranks that
    hold it share the gradient from ZeRO-2 on, and the rest from ZeRO-1 on.  For copies see `_replicas`.
    """
    model = workload.model
    world, group = cluster.num_ranks, layout.group_size
    owned = experts_per_rank(layout, workload)
    all_owned = model.num_moe_layers * owned
    replicas = _replicas(layout, workload)
    held = [find(cluster, layout, workload) for find in (dense_parameters, shared_experts)]
    synced = 2 * math.fsum(one.residual_bytes for one in held)  # residuals, and new ones until the step is applied
    routing = routing_of(layout, workload)
    activations = activations_of(
        workload,
        num_experts_held=owned * layout.domain_size + routing.num_far,
        is_padded=layout.is_padded,
        fullest=routing.load_after,
    )
    is_on_host = layout.state == "host"
    expert_bytes = state_bytes(model.expert_params, workload.expert_travel_params, workload, world // group)
    return Memory(
        dense_bytes=state_bytes(model.dense_params, workload.dense_train_params, workload, world),
        owned_expert_bytes=all_owned * expert_bytes,
        replica_bytes=replicas.total,
        sync_bytes=0.0 if is_on_host else synced,
        host_bytes=replicas.host + replicas.host_returns + (synced if is_on_host else 0.0),
        activation_bytes=max(activations.total_bytes, math.fsum(one.before_step_bytes for one in held)),
    )


def _replicas(layout: Layout, workload: Workload) -> MemoryNeeds:
    """Memory of working copies.  Source: experts/replicas.py.

    Each owned parameter in a domain of M ranks has:

        copies          M - 1 of the parameter's type
        residuals       one for each lossy message of gradients, and a new one until the step is applied
        lossy weights   a 4 B mirror of the owned weights for each codec; 4 B copies if their type is smaller
        sums            M - 1 of 4 B, and one of what returns
        staging         one if owned weights leave as they are
        sent last       one if weights leave as patches

    Frozen parameters have copies only.  Replicas of hot experts have copies and sums; while they travel, their owner
    has a copy, or a sum of what returns.
    """
    num_others, element = layout.domain_size - 1, workload.param_bytes
    routing = routing_of(layout, workload)
    if not num_others and not routing.hot:
        return MemoryNeeds()
    owned = experts_per_rank(layout, workload)
    trained = owned * workload.expert_travel_params
    residuals = trained * gradient_residuals(layout, workload)
    kept = residuals + trained * MASTER_BYTES * lossy_weight_values(layout, workload)
    sends_exactly = any(not layout.codecs[level].weight.is_lossy for level in layout.gather_levels)
    is_on_host = layout.state == "host"
    of_hot = workload.expert_travel_params * MASTER_BYTES
    layer = LayerNeeds(
        replicas=(owned * num_others + routing.num_far) * element * workload.model.expert_params,
        codecs=0.0 if is_on_host else kept,
        host=kept if is_on_host else 0.0,
        staging=(trained * sends_exactly + routing.num_near * workload.expert_travel_params) * element,
        sent=trained * element * has_patches(layout),
        sums=trained * MASTER_BYTES * num_others + routing.num_far * of_hot,
        own_sums=trained * MASTER_BYTES + routing.num_near * of_hot,
        residuals=residuals,
    )
    return needs_of(
        [layer] * workload.model.num_moe_layers,
        depth=layers_in_flight(layout, workload),
        prefetch_depth=layout.prefetch_depth,
        num_levels=len(layout.gather_levels) + bool(routing.hot),
        is_on_host=is_on_host,
        accumulates=workload.micro_steps > 1,
    )


def state_bytes(num_params: float, num_trained: float, workload: Workload, num_holders: int) -> float:
    """Bytes of parameters that `num_holders` ranks hold, with the training state of `num_trained` of them."""
    master_bytes = MASTER_BYTES if workload.param_bytes < MASTER_BYTES else 0
    optimizer = num_trained * (ADAM_BYTES + master_bytes) / (num_holders if workload.zero_stage >= 1 else 1)
    gradients = num_trained * workload.param_bytes / (num_holders if workload.zero_stage >= 2 else 1)
    return num_params * workload.param_bytes + gradients + optimizer


def needs_of(
    layers: Sequence[LayerNeeds],
    *,
    depth: int,
    prefetch_depth: int,
    num_levels: int,
    is_on_host: bool,
    accumulates: bool,
) -> MemoryNeeds:
    """What replicas of these layers need.

    The planner knows the bytes of a layer by formula, the estimator (`integration.estimate`) from a model.

    depth: layers between the start of a gradient's return and the wait for it; see `depth.return_depth`.
    num_levels: levels that a domain spans.
    is_on_host: the host keeps what codecs keep.
    accumulates: several micro-steps are added up, and the gradient sums of all layers wait for the last one.
    """

    def most(name: str, beside: int | None = None) -> float:
        """Of `beside` + 1 neighbouring layers; None: of all layers."""
        ends: list[float] = [0, *accumulate(getattr(layer, name) for layer in layers)]
        width = len(layers) if beside is None else min(beside + 1, len(layers))
        return max(ends[end] - ends[end - width] for end in range(width, len(ends)))

    # Once a layer's gradients are sent, new residuals take the place of its larger sums.
    in_flight = 0 if is_on_host else most("residuals", depth if accumulates else None)
    # Sums that cross one level are in a message as soon as their return starts; others may wait for earlier layers.
    leaving = None if accumulates else prefetch_depth if num_levels == 1 else depth
    return MemoryNeeds(
        replicas=most("replicas"),
        codecs=most("codecs"),
        staging=most("staging"),
        gradient_sums=most("sums", leaving),
        returns=most("own_sums", depth) + in_flight,
        step=most("sent"),
        host=most("host"),
        host_returns=most("residuals") if is_on_host else 0,
    )
