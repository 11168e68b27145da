# SPDX-License-Identifier: Apache-2.0
"""Bytes, seconds of computation and memory of a layout, one function for each part."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ds_hybridep.errors import PlanError
from ds_hybridep.plan.cluster import Cluster
from ds_hybridep.plan.layout import Layout, Rates, SyncModel
from ds_hybridep.plan.replica_pool import num_gathers
from ds_hybridep.plan.token_route import expected_rows
from ds_hybridep.plan.workload import ADAM_BYTES, MASTER_BYTES, Workload

Way = Literal["weights", "gradients"]  # to the replicas, and back


def ranks_below(cluster: Cluster) -> tuple[int, ...]:
    """Ranks that share one uplink of each level."""
    return tuple(math.prod(cluster.sizes[level + 1 :]) for level in range(len(cluster.levels)))


def row_counts(layout: Layout, workload: Workload) -> tuple[float, ...]:
    """Rows that one rank sends over each level in one dispatch; DeepSpeed's layer sends each expert's capacity."""
    model = workload.model
    if layout.is_padded:
        rows_per_peer = workload.expert_capacity * model.num_experts / layout.group_size
        # A peer that differs first at level l is one of (span_l - 1) span_(l+1) span_(l+2) ...
        peers = ((span - 1) * math.prod(layout.spans[level + 1 :]) for level, span in enumerate(layout.spans))
        return tuple(count * rows_per_peer for count in peers)
    rows = expected_rows(
        layout.domain_counts, model.num_experts, model.top_k, workload.tokens_per_rank, layout.exchange
    )
    return tuple(workload.row_scale * count for count in rows)


def packet_bytes(layout: Layout, workload: Workload, way: Way) -> tuple[float, ...]:
    """Bytes of one layer's packets that one rank sends over each level.  Source: experts/replicas.py.

    Slow level first, weights go to S_l - 1 neighbours at level l: the rank's own experts, and those that came over
    slower levels j before it, (S_j - 1) S_(j+1) ... S_(l-1) times as many, in level j's codec. Gradients go the
    opposite way, summed at each level, so a level's own codec holds for all of them.
    """
    sizes = layout.domain_sizes
    expert_bytes = workload.expert_travel_bytes
    if layout.is_transient and way == "weights":
        expert_bytes = workload.model.expert_params * workload.param_bytes
    own_bytes = experts_per_rank(layout, workload) * expert_bytes
    result = []
    for level, size in enumerate(sizes):
        if way == "weights":
            held = 1.0 / layout.codecs[level].weight.ratio
            for slower in range(level):
                count = (sizes[slower] - 1) * math.prod(sizes[slower + 1 : level])
                held += count / layout.codecs[slower].weight.ratio
        else:
            held = math.prod(sizes[:level]) / layout.codecs[level].gradient.ratio
        result.append((size - 1) * held * own_bytes)
    return tuple(result)


def weight_packets(layout: Layout, workload: Workload) -> int:
    """Packets of weights in a step: one for each layer, or one for each gather of a layer."""
    layers = workload.model.num_moe_layers
    return num_gathers(layers, layout.prefetch_depth, workload.micro_steps) if layout.is_transient else layers


def experts_per_rank(layout: Layout, workload: Workload) -> int:
    """e, experts that one rank owns.  Raises PlanError where the group cannot share them evenly."""
    num_experts = workload.model.num_experts
    if num_experts % layout.group_size:
        raise PlanError(
            f"{num_experts} experts cannot be shared evenly by an expert-parallel group of {layout.group_size} ranks"
        )
    return num_experts // layout.group_size


def sync_bytes(
    cluster: Cluster, spans: Sequence[int], num_bytes: float, passes: float, sync: SyncModel
) -> tuple[float, ...]:
    """Bytes over one uplink of each level when groups that span `spans` reduce or gather `num_bytes` per rank.

    A ring of g ranks sends (g - 1) / g of the bytes for each pass over one edge that leaves each child, and as many
    rings leave a child as it has groups. Sums made inside first leave n children with (n - 1) / n of them instead.
    """
    group_size = math.prod(spans)
    result = []
    for level, span in enumerate(spans):
        num_groups = math.prod(cluster.sizes[level + 1 :]) // math.prod(spans[level + 1 :])
        share = (group_size - 1) / group_size if sync.algorithm == "ring" else (span - 1) / span
        result.append(sync.factor * passes * num_groups * share * num_bytes if span > 1 else 0.0)
    return tuple(result)


def experts_s(layout: Layout, workload: Workload, rates: Rates) -> float:
    """Forward seconds of a layer's experts; DeepSpeed's layer computes all capacity.  Source: paper (1), (2)."""
    flops_per_s = rates.expert_flops_per_s or rates.flops_per_s
    rows = workload.expert_capacity * workload.model.num_experts if layout.is_padded else workload.expert_rows
    return rows * workload.expert_flops_per_row / flops_per_s


def encode_s(layout: Layout, workload: Workload, way: Way) -> float:
    """Seconds to encode what a rank sends of a layer: weights once per distinct codec, every gradient message."""
    own_bytes, codecs = _own_bytes(layout, workload), layout.codecs
    if way == "weights":
        used = {codecs[level].weight for level in layout.gather_levels}
        return math.fsum(own_bytes / codec.encode_bytes_per_s for codec in used)
    return math.fsum(
        _gradient_messages(layout, level) * own_bytes / codecs[level].gradient.encode_bytes_per_s
        for level in layout.gather_levels
    )


def decode_s(layout: Layout, workload: Workload, way: Way) -> float:
    """Seconds to decode what arrives at one rank of one layer; a replica is decoded once, where it stays."""
    own_bytes, codecs, total = _own_bytes(layout, workload), layout.codecs, 0.0
    for level in layout.gather_levels:
        if way == "weights":
            total += _replicas_over(layout, level) * own_bytes / codecs[level].weight.decode_bytes_per_s
        else:
            total += _gradient_messages(layout, level) * own_bytes / codecs[level].gradient.decode_bytes_per_s
    return total


def _own_bytes(layout: Layout, workload: Workload) -> int:
    """Of the weights or gradients of one layer's experts that a rank owns."""
    return experts_per_rank(layout, workload) * workload.expert_travel_bytes


def _replicas_over(layout: Layout, level: int) -> int:
    """Replicas on a rank, in units of its own experts, whose owner differs first at a level."""
    return (layout.domain_sizes[level] - 1) * math.prod(layout.domain_sizes[level + 1 :])


def _gradient_messages(layout: Layout, level: int) -> int:
    """Gradients that leave a rank over a level, in units of its own experts; as many arrive."""
    return (layout.domain_sizes[level] - 1) * math.prod(layout.domain_sizes[:level])


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one rank, without activations."""

    dense_bytes: float
    owned_expert_bytes: float
    replica_bytes: float

    @property
    def total_bytes(self) -> float:
        return self.dense_bytes + self.owned_expert_bytes + self.replica_bytes


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
    return Memory(
        dense_bytes=_state_bytes(model.dense_params, workload.dense_train_params, workload, world),
        owned_expert_bytes=owned
        * _state_bytes(model.expert_params, workload.expert_travel_params, workload, world // group),
        replica_bytes=owned * per_expert,
    )


def _codec_values(layout: Layout, workload: Workload) -> int:
    """fp32 numbers that lossy codecs keep for each trained parameter that a rank owns."""
    codecs = layout.codecs
    values = len({codecs[level].weight.name for level in layout.gather_levels if codecs[level].weight.is_lossy})
    for level in layout.gather_levels:
        if codecs[level].weight.is_lossy and workload.param_bytes < MASTER_BYTES:
            values += _replicas_over(layout, level)
        if codecs[level].gradient.is_lossy:
            values += 2 * _gradient_messages(layout, level)
    return values


def _state_bytes(num_params: float, num_trained: float, workload: Workload, num_holders: int) -> float:
    """Bytes of parameters of which some are trained, held alike by `num_holders` ranks."""
    master_bytes = MASTER_BYTES if workload.param_bytes < MASTER_BYTES else 0
    optimizer = num_trained * (ADAM_BYTES + master_bytes) / (num_holders if workload.zero_stage >= 1 else 1)
    gradients = num_trained * workload.param_bytes / (num_holders if workload.zero_stage >= 2 else 1)
    return num_params * workload.param_bytes + gradients + optimizer
