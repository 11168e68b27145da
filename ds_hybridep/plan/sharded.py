# SPDX-License-Identifier: Apache-2.0
"""ZeRO-3, FSDP, ZeRO++: no expert parallelism; every rank computes its own tokens with whole layers, which it gathers.

    everywhere    parameters, gradients and optimizer are divided among all ranks: ZeRO-3, FSDP
    inside        they are divided inside each child of level 0, and gradients are averaged across: FSDP's
                  HYBRID_SHARD, MiCS
    quantised     they are divided among all ranks, with a second copy of the parameters divided inside each child:
                  ZeRO++ with hpZ, qwZ and qgZ

Each micro-step gathers all parameters for the forward and again for the backward, and sums the trained ones' gradients
to their owners.  All of it is assumed to hide behind computing, and averages across behind the last backward, which
is the most that an implementation can reach.

ZeRO++ gathers for the forward over all ranks, and for the backward inside each child, both in 8 bits.  Gradients are
exchanged in 4 bits, inside each machine and then between machines.  Scales of the blocks are left out.

Sources: ZeRO++, arXiv 2306.10209, section 3; DeepSpeed's runtime/zero/partition_parameters.py (the backward gathers
from the secondary tensor) and runtime/comm/coalesced_collectives.py::all_to_all_quant_reduce.
"""

import math
from dataclasses import dataclass
from typing import Literal

from ds_hybridep.geometry.cluster import Cluster, known_or_assumed_bandwidths, latencies_of
from ds_hybridep.plan.activations import activations_of
from ds_hybridep.plan.machines import GPUS_OF_MACHINE
from ds_hybridep.plan.memory import Memory
from ds_hybridep.plan.rates import Rates
from ds_hybridep.plan.workload import ADAM_BYTES, MASTER_BYTES, Workload

GATHERS = 2  # of all parameters in a micro-step: forward and backward
LAYERS_AT_ONCE = 2  # whole layers on a rank: the one at work, and the next
RING_PASSES = 2.0  # of a ring that sums and gathers
QUANTISED_WEIGHT_BYTES = 1.0  # qwZ
QUANTISED_GRADIENT_BYTES = 0.5  # qgZ

Division = Literal["everywhere", "inside", "quantised"]


@dataclass(frozen=True, kw_only=True)
class Sharded:
    """One step.  wait_s: seconds of it that a rank waits for the network.  link_bytes: over one uplink of level 0."""

    step_s: float
    wait_s: float
    link_bytes: float
    memory: Memory


def sharded(cluster: Cluster, workload: Workload, rates: Rates, division: Division) -> Sharded:
    """Price it."""
    bandwidths = [one / rates.wire_factor for one in known_or_assumed_bandwidths(cluster)]
    # 1. A micro-step.
    forward_s, backward_s = _computing_s(workload, rates)
    passed = _passed_bytes(cluster, workload, division)
    sending_s = [num_bytes / bandwidth for num_bytes, bandwidth in zip(passed, bandwidths, strict=True)]
    micro_s = max(forward_s + backward_s, *sending_s)
    step_s = workload.micro_steps * micro_s + rates.step_s
    # 2. Across.
    link_bytes = workload.micro_steps * passed[0]
    if division == "inside" and (num_children := cluster.sizes[0]) > 1:
        link_bytes = RING_PASSES * (num_children - 1) / num_children * workload.num_train_params * workload.param_bytes
        step_s += (
            max(link_bytes / bandwidths[0] - backward_s, 0.0)
            + RING_PASSES * (num_children - 1) * latencies_of(cluster)[0]
        )
    return Sharded(
        step_s=step_s,
        wait_s=step_s - workload.micro_steps * (forward_s + backward_s),
        link_bytes=link_bytes if cluster.sizes[0] > 1 else 0.0,
        memory=_memory(cluster, workload, division),
    )


def _passed_bytes(cluster: Cluster, workload: Workload, division: Division) -> list[float]:
    """By level, bytes over one uplink in a micro-step, without averages across.

    A ring passes each link of the ranks that share, once for each gather or sum.
    """
    num_trained, num_all = workload.num_train_params, _num_params(workload)

    def of_ring(num_ranks: int, num_bytes: float) -> float:
        return (num_ranks - 1) / num_ranks * num_bytes

    if division != "quantised":
        num_bytes = float((GATHERS * num_all + num_trained) * workload.param_bytes)
        by_ring = of_ring(cluster.ranks_below[0] if division == "inside" else cluster.num_ranks, num_bytes)
        return [
            0.0 if size == 1 or (division == "inside" and level == 0) else by_ring
            for level, size in enumerate(cluster.sizes)
        ]
    forward = of_ring(cluster.num_ranks, num_all * QUANTISED_WEIGHT_BYTES)
    backward = of_ring(cluster.ranks_below[0], num_all * QUANTISED_WEIGHT_BYTES)
    gradients = num_trained * QUANTISED_GRADIENT_BYTES
    of_machine = math.gcd(cluster.sizes[-1], GPUS_OF_MACHINE)
    num_machines = cluster.num_ranks // of_machine
    result = []
    for level, size in enumerate(cluster.sizes):
        # Of each machine below, a share goes to the machines that are not below the same child.
        below = cluster.ranks_below[level]
        machines_below = below / of_machine  # less than one: its part of a machine's share
        leaving = machines_below * gradients * (num_machines - max(machines_below, 1.0)) / num_machines
        inside = of_ring(of_machine, gradients) if below < of_machine else 0.0
        result.append(0.0 if size == 1 else forward + (backward if level else 0.0) + leaving + inside)
    return result


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


def _memory(cluster: Cluster, workload: Workload, division: Division) -> Memory:
    """A share of everything, whole layers at work, and activations with all experts."""
    model = workload.model
    num_ranks = cluster.ranks_below[0] if division == "inside" else cluster.num_ranks
    all_params, trained = _num_params(workload), workload.num_train_params
    of_layer = model.num_experts * model.expert_params + model.dense_params / model.widths.num_layers
    master_bytes = MASTER_BYTES if workload.param_bytes < MASTER_BYTES else 0
    optimizer_bytes = trained * (ADAM_BYTES + master_bytes) / num_ranks
    kept_bytes = (all_params + trained) * workload.param_bytes / num_ranks
    if division == "quantised":  # hpZ's copy
        kept_bytes += all_params * workload.param_bytes / cluster.ranks_below[0]
    on_host = optimizer_bytes if workload.offloads_optimizer else 0.0
    return Memory(
        dense_bytes=kept_bytes + optimizer_bytes - on_host,
        owned_expert_bytes=0.0,
        replica_bytes=LAYERS_AT_ONCE * of_layer * workload.param_bytes,
        host_bytes=on_host,
        activation_bytes=activations_of(workload, num_experts_held=model.num_experts).total_bytes,
    )
