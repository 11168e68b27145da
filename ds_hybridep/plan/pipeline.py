# SPDX-License-Identifier: Apache-2.0
"""A pipeline with a stage in each child of level 0: its schedule, its border and its memory.

Every stage has a share of the layers, with expert and data parallelism inside.  For the same tokens in a step of A
micro-steps, S stages run S x A micro-batches.  The schedule is 1F1B: a stage begins with some forwards, then
alternates forwards and backwards.  Three stages, four micro-batches, forwards as numbers, backwards as letters:

    stage 0    1 2 3 . . a 4 b . c . d
    stage 1    . 1 2 . a 3 b 4 c . d
    stage 2    . . 1 a 2 b 3 c 4 d

Over a slow border, a stage idles unless it begins with more forwards.  It must then keep their activations.  The
planner tries up to three times as many as 1F1B.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ds_hybridep.geometry.cluster import Cluster, known_or_assumed_bandwidths, latencies_of
from ds_hybridep.plan.activations import activations_of
from ds_hybridep.plan.memory import Memory, host_bytes, state_bytes
from ds_hybridep.plan.plan import PricedPlan
from ds_hybridep.plan.rates import Rates
from ds_hybridep.plan.routing import experts_per_rank, routing_of
from ds_hybridep.plan.stream_model import StepPrediction
from ds_hybridep.plan.workload import Workload

MOST_AHEAD = 3  # largest multiple of the forwards that 1F1B begins with


@dataclass(frozen=True)
class Pipeline:
    """One step of a pipeline.

    bubble_s: idle seconds of the first stage.  border_bytes: bytes over one uplink in one direction.
    memory: of the stage that needs most.
    """

    step_s: float
    bubble_s: float
    border_bytes: float
    memory: Memory


def pipelines(
    cluster: Cluster, inside: PricedPlan, workload: Workload, rates: Rates, *, whole: StepPrediction
) -> Iterator[Pipeline]:
    """Yield the pipelines that begin with as many forwards as 1F1B, twice and three times as many.

    inside: plan of one child of level 0.  whole: step of that child alone, with all layers.
    """
    num_stages, layers = cluster.sizes[0], workload.model.num_moe_layers
    num_batches = num_stages * workload.micro_steps
    share = -(-layers // num_stages) / layers
    terms = whole.terms_s
    # Of one micro-batch, forward and backward.
    batch_s = terms["dense_s"] + terms["experts_s"] + terms["tokens_s"] + terms["host_s"] - rates.step_s
    batch_s *= share / workload.micro_steps
    end_s = share * (terms["dense_sync_s"] + terms["expert_sync_s"]) + rates.step_s
    border_bytes = cluster.ranks_below[0] * workload.tokens_per_rank * workload.row_bytes  # of a micro-batch
    bandwidth = known_or_assumed_bandwidths(cluster)[0] / rates.wire_factor
    transfer_s, latency_s = border_bytes / bandwidth, latencies_of(cluster)[0]
    sent = num_batches * border_bytes * min(num_stages - 1, 2)
    for ahead in range(1, MOST_AHEAD + 1):
        busy_s = schedule_s(num_stages, num_batches, ahead, batch_s, transfer_s=transfer_s, latency_s=latency_s)
        yield Pipeline(
            step_s=busy_s + end_s,
            bubble_s=busy_s - num_batches * batch_s,
            border_bytes=sent,
            memory=_memory(cluster, inside, workload, ahead),
        )


def schedule_s(
    num_stages: int, num_batches: int, ahead: int, batch_s: float, *, transfer_s: float, latency_s: float
) -> float:
    """Seconds until the first stage has done its last backward.

    A stage works `batch_s` on a batch, or its uplink sets the pace.  After as many batches as the first stage begins
    with, the next one waits until the first has come back.  Exact for two stages; for more, this leaves out that a
    backward may wait for a forward.

    transfer_s, latency_s: of a batch over one border.
    """
    back_s = num_stages * batch_s + 2 * (num_stages - 1) * (transfer_s + latency_s)
    # A stage in the middle sends activations on and gradients back over the same uplink.
    pace_s = max(batch_s, min(num_stages - 1, 2) * transfer_s)
    in_flight = min(ahead * (num_stages - 1) + 1, num_batches)
    rounds, rest = divmod(num_batches - 1, in_flight)
    return back_s + rounds * max(back_s, in_flight * pace_s) + rest * pace_s


def _memory(cluster: Cluster, inside: PricedPlan, workload: Workload, ahead: int) -> Memory:
    """Memory of the stage that needs most: the first one, which runs ahead, or the last one, which has the loss."""
    model, num_stages = workload.model, cluster.sizes[0]
    num_ranks = cluster.ranks_below[0]
    share = math.ceil(model.num_moe_layers / num_stages) / model.num_moe_layers
    owned = experts_per_rank(inside, workload)
    experts = model.num_moe_layers * share * owned
    table = min(model.widths.vocabulary * model.hidden, model.dense_params // 2)  # the embedding, or the head
    dense = share * (model.dense_params - 2 * table) + (2 * table if num_stages == 1 else table)
    trained = workload.dense_train_params * dense / model.dense_params
    of_expert, num_holders = workload.expert_travel_params, num_ranks // inside.group_size
    expert_bytes = state_bytes(model.expert_params, of_expert, workload, num_holders)
    expert_host_bytes = host_bytes(of_expert, workload, num_holders)
    activations = (
        activations_of(
            workload,
            num_experts_held=owned,
            share=share,
            in_flight=min(forwards + 1, num_stages * workload.micro_steps),
            has_loss=stage == num_stages - 1,
            fullest=routing_of(inside, workload).load_after,
        )
        for stage, forwards in {0: ahead * (num_stages - 1), num_stages - 1: 0}.items()
    )
    return Memory(
        dense_bytes=state_bytes(dense, trained, workload, num_ranks),
        owned_expert_bytes=experts * expert_bytes,
        replica_bytes=0.0,
        host_bytes=host_bytes(trained, workload, num_ranks) + experts * expert_host_bytes,
        activation_bytes=max(one.total_bytes for one in activations),
    )
