# SPDX-License-Identifier: Apache-2.0
"""ZeRO-3, FSDP: no expert parallelism; every rank computes its own tokens with whole layers, which it gathers.

    everywhere    parameters, gradients and optimizer are divided among all ranks: ZeRO-3, FSDP
    inside        they are divided inside each child of level 0, and gradients are averaged across: FSDP's
                  HYBRID_SHARD, MiCS; with hpZ, ZeRO++ gathers like this in the backward

Each micro-step gathers all parameters for the forward and again for the backward, and sums the trained ones' gradients
to their owners.  All of it is assumed to hide behind computing, and averages across behind the last backward, which
is the most that an implementation can reach.
"""

import math
from dataclasses import dataclass

from ds_hybridep.geometry.cluster import Cluster, known_or_assumed_bandwidths, latencies_of
from ds_hybridep.plan.activations import activations_of
from ds_hybridep.plan.memory import Memory
from ds_hybridep.plan.rates import Rates
from ds_hybridep.plan.workload import ADAM_BYTES, MASTER_BYTES, Workload

GATHERS = 2  # of all parameters in a micro-step: forward and backward
LAYERS_AT_ONCE = 2  # whole layers on a rank: the one at work, and the next
RING_PASSES = 2.0  # of a ring that sums and gathers


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """One step.  wait_s: seconds of it that a rank waits for the network.  link_bytes: over one uplink of level 0."""

    step_s: float
    wait_s: float
    link_bytes: float
    memory: Memory


def sharded(cluster: Cluster, workload: Workload, rates: Rates, *, is_inside: bool) -> Sharded:
    """Price it.  is_inside: divide inside each child of level 0 only."""
    num_ranks = cluster.ranks_below[0] if is_inside else cluster.num_ranks
    bandwidths = [one / rates.wire_factor for one in known_or_assumed_bandwidths(cluster)]
    # 1. A micro-step: a ring passes each link of the ranks that share, once for each gather or sum.
    forward_s, backward_s = _computing_s(workload, rates)
    trained_bytes = workload.num_train_params * workload.param_bytes
    all_bytes = _num_params(workload) * workload.param_bytes
    share = (num_ranks - 1) / num_ranks
    passed_bytes = share * (GATHERS * all_bytes + trained_bytes)
    crossed = [
        bandwidth
        for level, (bandwidth, size) in enumerate(zip(bandwidths, cluster.sizes, strict=True))
        if size > 1 and not (is_inside and level == 0)
    ]
    slowest = min(crossed, default=math.inf)
    micro_s = max(forward_s + backward_s, passed_bytes / slowest)
    step_s = workload.micro_steps * micro_s + rates.step_s
    # 2. Across.
    link_bytes = 0.0 if is_inside else workload.micro_steps * passed_bytes
    if is_inside and (num_children := cluster.sizes[0]) > 1:
        link_bytes = RING_PASSES * (num_children - 1) / num_children * trained_bytes
        step_s += (
            max(link_bytes / bandwidths[0] - backward_s, 0.0)
            + RING_PASSES * (num_children - 1) * latencies_of(cluster)[0]
        )
    return Sharded(
        step_s=step_s,
        wait_s=step_s - workload.micro_steps * (forward_s + backward_s),
        link_bytes=link_bytes if cluster.sizes[0] > 1 else 0.0,
        memory=_memory(workload, num_ranks),
    )


def _num_params(workload: Workload) -> int:
    """Parameters of the whole model, adapters included."""
    return workload.model.num_params + workload.model.num_adapter_params


def _computing_s(workload: Workload, rates: Rates) -> tuple[float, float]:
    """Seconds of a micro-step's forward, and of its backward, what is computed again included."""
    layers, rows = workload.model.num_moe_layers, workload.expert_rows
    experts_per_s = rates.expert_flops_per_s or rates.flops_per_s

    def seconds(dense_flops: float, flops_per_row: float) -> float:
        return layers * (dense_flops / rates.flops_per_s + rows * flops_per_row / experts_per_s)

    forward_s = seconds(workload.pre_expert_flops, workload.expert_flops_per_row)
    backward_s = seconds(workload.pre_expert_backward_flops, workload.expert_backward_flops_per_row)
    return forward_s, backward_s + (forward_s if workload.is_checkpointed else 0.0)


def _memory(workload: Workload, num_ranks: int) -> Memory:
    """A share of everything, whole layers at work, and activations with all experts."""
    model = workload.model
    all_params, trained = _num_params(workload), workload.num_train_params
    of_layer = model.num_experts * model.expert_params + model.dense_params / model.widths.num_layers
    master_bytes = MASTER_BYTES if workload.param_bytes < MASTER_BYTES else 0
    optimizer_bytes = trained * (ADAM_BYTES + master_bytes) / num_ranks
    kept_bytes = (all_params + trained) * workload.param_bytes / num_ranks
    on_host = optimizer_bytes if workload.offloads_optimizer else 0.0
    return Memory(
        dense_bytes=kept_bytes + optimizer_bytes - on_host,
        owned_expert_bytes=0.0,
        replica_bytes=LAYERS_AT_ONCE * of_layer * workload.param_bytes,
        host_bytes=on_host,
        activation_bytes=activations_of(workload, num_experts_held=model.num_experts).total_bytes,
    )
