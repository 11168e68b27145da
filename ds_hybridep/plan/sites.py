# SPDX-License-Identifier: Apache-2.0
"""Sites: a job of its own in each child of level 0, and an exchange of what each rank owns between the jobs.

    every = 1     the gradients of a step, after DeepSpeed has averaged them inside the site
    every = H     local steps: in each step, how far another H-th of the parameters has come

Each rank sends its packet to its counterparts in all other sites, and decodes theirs and its own.  Then the sites
agree that all have all packets.  Source: sites/exchange.py, sites/packets.py.
"""

from dataclasses import dataclass, replace

from ds_hybridep.geometry.cluster import Cluster, known_or_assumed_bandwidths, latencies_of
from ds_hybridep.geometry.packets import MOST_LEAVES
from ds_hybridep.plan.costs import HOST_BYTES_PER_S, residual_bytes
from ds_hybridep.plan.held import Held, dense_parameters, shared_experts
from ds_hybridep.plan.memory import Memory, memory_of
from ds_hybridep.plan.plan import CodecCosts, PricedPlan
from ds_hybridep.plan.rates import IDENTITY, Rates
from ds_hybridep.plan.stream_model import StepPrediction
from ds_hybridep.plan.workload import MASTER_BYTES, Workload

OUTER_VALUES = 2  # fp32 numbers for each owned parameter with local steps: common weights and outer momentum
TRIPS = 2  # one-way latencies in an exchange: packets, and the agreement


@dataclass(frozen=True, kw_only=True)
class Sites:
    """One step of sites.

    exchange_s: seconds of the step for the exchange that are not hidden.  hidden_s: seconds that are.
    uplink_bytes: bytes over one uplink of level 0 in one direction.  ep_size: of the expert-parallel group in a site.
    """

    every: int
    ep_size: int
    step_s: float
    exchange_s: float
    hidden_s: float
    uplink_bytes: float
    memory: Memory


def sites_of(
    cluster: Cluster, alone: Cluster, inside: PricedPlan, workload: Workload,
    *, rates: Rates, codecs: CodecCosts, whole: StepPrediction, every: int,
) -> Sites:  # fmt: skip
    """Price sites.

    alone: one child of level 0.  inside: the plan of the job in it.  whole: a step of that job.
    codecs: between sites.  every: 1, or H of local steps.

    Under ZeRO 2, gradients leave while the last backward runs.
    """
    num_sites = cluster.sizes[0]
    held = dense_parameters(alone, inside, workload), shared_experts(alone, inside, workload)
    coded_bytes = codec_s = 0.0
    for one, codec in zip(held, (codecs.dense_gradient, codecs.gradient), strict=True):
        plain = one.slot_bytes(IDENTITY)
        coded_bytes += one.slot_bytes(codec)
        codec_s += plain / codec.encode_bytes_per_s + num_sites * plain / codec.decode_bytes_per_s
    uplink_bytes = (num_sites - 1) * cluster.ranks_below[0] * coded_bytes / every
    transfer_s = uplink_bytes * rates.wire_factor / known_or_assumed_bandwidths(cluster)[0]
    hidden_s = 0.0
    if every == 1 and workload.zero_stage == 2:
        terms = whole.terms_s
        computing_s = terms["dense_s"] + terms["experts_s"] + terms["tokens_s"]
        backward_s = workload.backward_share * computing_s / workload.micro_steps
        hidden_s = rates.overlap * min(transfer_s * (1 - 1 / MOST_LEAVES), backward_s)
    kept_bytes = _kept_bytes(held, workload, codecs, every)
    on_device, on_host = (0.0, kept_bytes) if inside.state == "host" else (kept_bytes, 0.0)
    codec_s += 2 * on_host / HOST_BYTES_PER_S
    exchange_s = codec_s / every + transfer_s - hidden_s + TRIPS * latencies_of(cluster)[0]
    memory = memory_of(alone, inside, workload)
    return Sites(
        every=every,
        ep_size=inside.group_size,
        step_s=whole.step_s + exchange_s,
        exchange_s=exchange_s,
        hidden_s=hidden_s,
        uplink_bytes=uplink_bytes,
        memory=replace(memory, sync_bytes=memory.sync_bytes + on_device, host_bytes=memory.host_bytes + on_host),
    )


def _kept_bytes(held: tuple[Held, Held], workload: Workload, codecs: CodecCosts, every: int) -> float:
    """Bytes of residuals, of new ones until the step is applied, and of the outer state, of what a rank owns."""
    outer = OUTER_VALUES * MASTER_BYTES if every > 1 else 0
    num_bytes = 0.0
    for one, codec in zip(held, (codecs.dense_gradient, codecs.gradient), strict=True):
        owned = one.slot_bytes(IDENTITY) / workload.param_bytes
        num_bytes += owned * ((2 * residual_bytes(workload) if codec.is_lossy else 0.0) + outer)
    return num_bytes
