# SPDX-License-Identifier: Apache-2.0
"""The stream model's bytes are those that the runtime counts: exactly, once it is told how many rows were routed."""

import math
from dataclasses import replace

import pytest
from counted_bytes import ACCUMULATION, TOY, counted_in_one_step, counted_with_hot_experts, workload_of
from marks import slow
from parity import Case
from process_pool import ProcessPool

from ds_hybridep.geometry.cluster import Cluster, Level
from ds_hybridep.geometry.row_format import record_bytes
from ds_hybridep.plan.codec_costs import codec_cost, token_codec
from ds_hybridep.plan.costs import row_counts
from ds_hybridep.plan.plan import ExpertGroup, HotLimit, LevelCodecs, Plan
from ds_hybridep.plan.rates import IDENTITY, Rates
from ds_hybridep.plan.routing import routing_of
from ds_hybridep.plan.stream_model import predict
from ds_hybridep.plan.workload import Workload

pytestmark = pytest.mark.dist


def uplink_totals(case: Case, plan: Plan, workload: Workload, kind: str) -> list[float]:
    """Predicted bytes of a kind over all uplinks of each level together."""
    cluster = Cluster(tuple(Level(name, size) for name, size, _ in case.levels))
    per_uplink = predict(cluster, plan, workload, Rates(flops_per_s=1.0)).uplink_bytes
    return [kinds[kind] * math.prod(cluster.sizes[: level + 1]) for level, kinds in enumerate(per_uplink)]


@pytest.mark.parametrize("checkpointing", [None, pytest.param("reentrant", marks=pytest.mark.slow)])
@pytest.mark.parametrize("exchange", ["direct", pytest.param("hierarchical", marks=pytest.mark.slow)])
@pytest.mark.parametrize("domain_sizes", [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_every_byte_is_predicted(pool4: ProcessPool, domain_sizes, exchange, checkpointing):
    levels = tuple((name, 2, size) for name, size in zip(("dc", "gpu"), domain_sizes, strict=True))
    case = Case(
        levels=levels,
        toy=replace(TOY, checkpointing=checkpointing),
        accumulation=ACCUMULATION,
        token_exchange=exchange,
    )
    workload = workload_of(case)
    plan = Plan(
        spans=ExpertGroup(4).spans(Cluster((Level("dc", 2), Level("gpu", 2)))),
        domain_sizes=domain_sizes, codecs=(LevelCodecs(),) * 2, token_exchange=exchange,
    )  # fmt: skip
    records = pool4.run(counted_in_one_step, case=case)

    def counted(kind: str) -> list[int]:
        return [sum(record["levels"][level]["sent_bytes"][kind] for record in records) for level in range(2)]

    # Weights leave three times: before the first forward, after the step, and for the refresh.
    weights = uplink_totals(case, plan, workload, "expert_weights")
    assert counted("expert_weights") == [3 * count for count in weights]
    assert counted("expert_gradients") == uplink_totals(case, plan, workload, "expert_gradients")

    padded = replace(plan, domain_sizes=(1, 1), token_exchange="deepspeed")
    plain = [sum(record["levels"][level]["plain_ep_bytes"] for record in records) for level in range(2)]
    assert plain == uplink_totals(case, padded, workload, "tokens")

    # Rows are predicted on average only. With as many rows as were routed all bytes around them must come out.
    rows = sum(layer["rows_sent"] for record in records for layer in record["layers"])
    forwards = ACCUMULATION * (1 if checkpointing is None else 2)
    counts_only = sum(uplink_totals(case, plan, replace(workload, row_scale=0.0), "tokens"))
    # Dispatch and combine, forward and backward, and recomputed.
    row_bytes = (4 if checkpointing is None else 6) * workload.row_bytes + workload.return_extra_bytes
    row_bytes += (1 if checkpointing is None else 2) * workload.dispatch_extra_bytes
    assert sum(counted("tokens")) == counts_only + rows / (forwards / ACCUMULATION) * row_bytes


@pytest.mark.parametrize("checkpointing", [None, "reentrant"])
def test_bytes_of_rows_under_a_token_codec_are_predicted(pool4: ProcessPool, checkpointing):
    """Dispatches and recomputed ones carry records, all else whole rows."""
    toy = replace(TOY, checkpointing=checkpointing)
    case = Case(levels=(("dc", 2, 1), ("gpu", 2, 2)), toy=toy, accumulation=ACCUMULATION, token_codec="int8")
    codec = token_codec("int8", toy.hidden, 4)
    plan = Plan(spans=(2, 2), domain_sizes=(1, 2), codecs=(LevelCodecs(token=codec), LevelCodecs()))
    records = pool4.run(counted_in_one_step, case=case)
    rows = sum(layer["rows_sent"] for record in records for layer in record["layers"])
    workload = workload_of(case)
    forwards = ACCUMULATION * toy.num_layers * (1 if checkpointing is None else 2)
    measured = replace(workload, row_scale=rows / (len(records) * forwards * sum(row_counts(plan, workload))))
    sent = [sum(record["levels"][level]["sent_bytes"]["tokens"] for record in records) for level in range(2)]
    # As many bytes; a ratio and a scale are rounded numbers.
    assert uplink_totals(case, plan, measured, "tokens") == pytest.approx(sent, rel=1e-12)
    exact = replace(plan, codecs=(LevelCodecs(),) * 2)
    saved = forwards * len(records) * sum(row_counts(plan, measured)) * (4 * toy.hidden - record_bytes(toy.hidden))
    assert uplink_totals(case, exact, measured, "tokens")[0] - sent[0] == pytest.approx(saved, rel=1e-9)


@pytest.mark.parametrize("codec", ["identity", slow("int8")])
@pytest.mark.parametrize(("sizes", "domain_sizes"), [((4,), (1,)), ((2, 2), (2, 1)), ((2, 2), (1, 1))])
def test_copies_of_hot_experts_over_the_busiest_link_are_predicted(pool4: ProcessPool, sizes, domain_sizes, codec):
    """Two tokens need four of eight experts; of these, up to three are hot inside the last level."""
    toy = replace(TOY, num_layers=1, routing="by_token", drift=100, drop_tokens=False)
    levels = tuple(zip(("dc", "gpu")[-len(sizes) :], sizes, domain_sizes, strict=True))
    case = Case(levels=levels, toy=toy, accumulation=ACCUMULATION, hot_experts=3)
    records = pool4.run(counted_with_hot_experts, case=case, num_steps=3, gradient_codec=codec)
    hot, last = records[0][0], len(sizes) - 1
    assert hot
    assert all(found == hot for found, _ in records)
    # Loads with which these are the hot ones.
    loads = tuple(1000.0 if expert in hot else 1.0 for expert in range(toy.num_experts))
    shapes = ((toy.ffn, toy.hidden), (toy.ffn,), (toy.hidden, toy.ffn), (toy.hidden,))
    workload = workload_of(case)
    workload = replace(workload, expert_loads=loads, model=replace(workload.model, expert_shapes=shapes))
    cost = IDENTITY if codec == "identity" else codec_cost({"type": codec, "block": 128}, [(1, 1, 1024)], 4)
    codecs = (LevelCodecs(gradient=cost),) * len(sizes)
    plan = Plan(spans=sizes, domain_sizes=domain_sizes, codecs=codecs, hot=HotLimit(last, 3))
    cluster = Cluster(tuple(Level(name, size) for name, size, _ in levels))
    assert routing_of(plan, workload).hot == set(hot)
    predicted = predict(cluster, plan, workload, Rates(flops_per_s=1.0)).uplink_bytes[last]
    for kind in ("expert_weights", "expert_gradients"):
        counted = [levels[last][way][kind] for _, levels in records for way in ("sent_bytes", "received_bytes")]
        assert max(counted) == predicted[kind]
    assert codec == "identity" or predicted["expert_gradients"] < predicted["expert_weights"] / 3
