# SPDX-License-Identifier: Apache-2.0
"""Clusters, plans and workloads for tests of predictions."""

import dataclasses
import math

from hypothesis import strategies as st

from ds_hybridep.geometry.cluster import Cluster, Level, LinkSpeed, divisors
from ds_hybridep.geometry.packets import BlockwiseSizes
from ds_hybridep.plan.plan import LevelCodecs, Plan
from ds_hybridep.plan.rates import IDENTITY, CodecCost, Rates
from ds_hybridep.plan.workload import MoEModel, Workload

TOY = MoEModel(
    name="toy", hidden=64, num_experts=8, top_k=2, num_moe_layers=4, expert_shapes=((33088,),),
    dense_shapes=((110720,),), active_dense_params=94336,
)  # fmt: skip


def cluster_of(*sizes, bandwidth=1e6, latency_s=0.0):
    names = {1: ["gpu"], 2: ["dc", "gpu"], 3: ["dc", "node", "gpu"]}[len(sizes)]
    links = [LinkSpeed(bandwidth * 1e3**level, latency_s) for level in range(len(sizes))]
    return Cluster(tuple(Level(name, size, link) for name, size, link in zip(names, sizes, links, strict=True)))


def plan_over(spans, domain_sizes, **settings):
    return Plan(spans=spans, domain_sizes=domain_sizes, codecs=(LevelCodecs(),) * len(spans), **settings)


def toy(**settings):
    return Workload(**{"model": TOY, "tokens_per_rank": 128, "param_bytes": 4, **settings})


@st.composite
def cases(draw):
    """A cluster of 1 to 3 levels with any links, a plan on it, a workload and rates."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3))
    links = [LinkSpeed(draw(st.floats(1e4, 1e10)), draw(st.sampled_from([0.0, 1e-4, 0.05]))) for _ in sizes]
    cluster = Cluster(tuple(Level(f"l{i}", n, link) for i, (n, link) in enumerate(zip(sizes, links, strict=True))))
    spans = tuple(draw(st.sampled_from(divisors(size))) for size in sizes)
    is_padded = draw(st.booleans())
    ours = tuple(draw(st.sampled_from(divisors(span))) for span in spans)
    sized = CodecCost("int4", encode_bytes_per_s=2e9, packets=BlockwiseSizes(4, 128))
    codec = st.sampled_from(
        [IDENTITY, CodecCost("small", 20.0, encode_bytes_per_s=1e9, decode_bytes_per_s=5e8), sized]
    )
    plan = Plan(
        spans=spans,
        domain_sizes=(1,) * len(spans) if is_padded else ours,
        codecs=tuple(
            LevelCodecs(*(draw(codec) for _ in range(2)), token=draw(codec), dense_weight=draw(codec)) for _ in spans
        ),
        prefetch_depth=draw(st.integers(0, 4)),
        token_exchange="deepspeed" if is_padded else draw(st.sampled_from(["direct", "hierarchical"])),
    )
    model = dataclasses.replace(TOY, num_experts=math.prod(spans) * draw(st.integers(2, 3)))
    workload = Workload(
        model=model,
        tokens_per_rank=draw(st.integers(1, 5000)),
        micro_steps=draw(st.integers(1, 5)),
        param_bytes=draw(st.sampled_from([2, 4])),
        zero_stage=draw(st.sampled_from([0, 1, 2])),
        is_checkpointed=draw(st.booleans()),
    )
    rates = Rates(
        flops_per_s=draw(st.floats(1e7, 1e12)),
        exchange_s=draw(st.sampled_from([0.0, 1e-4, 1e-2])),
        packet_s=1e-4,
        message_s=draw(st.sampled_from([0.0, 1e-3])),
        expert_call_s=1e-5,
        overlap=draw(st.sampled_from([0.0, 0.3, 1.0])),
    )
    return cluster, plan, workload, rates


SETTINGS = [
    *({"type": name, "block": block} for name in ("int8", "int4", "int2") for block in (8, 128, 1024)),
    *({"type": "low_rank", "ratio": ratio} for ratio in (2, 50, 1000)),
    {"type": "low_rank", "rank": 7},
    {"type": "low_rank", "ratio": 50, "weighting": "rms", "rest": {"type": "int2", "block": 64}},
]
