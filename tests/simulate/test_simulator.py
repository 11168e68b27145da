# SPDX-License-Identifier: Apache-2.0
import dataclasses
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import TOY, cases, cluster_of, plan_over, toy

from ds_hybridep.errors import PlanError
from ds_hybridep.geometry.cluster import Cluster, LinkSpeed
from ds_hybridep.geometry.partition import Partition
from ds_hybridep.geometry.token_route import expected_rows
from ds_hybridep.plan import routing as planned
from ds_hybridep.plan.plan import ExpertGroup
from ds_hybridep.plan.program import Peers
from ds_hybridep.plan.rates import Rates
from ds_hybridep.plan.routing import routing_of
from ds_hybridep.plan.stream_model import predict
from ds_hybridep.simulate.scenario import Deviation, Scenario
from ds_hybridep.simulate.simulator import simulate
from ds_hybridep.simulate.traffic import Ranks, SimulatedRouting

properties = settings(max_examples=40)
rates_of_toy = Rates(flops_per_s=1e9)


def scenario_of(cluster, plan, workload, rates=rates_of_toy, **settings):
    return Scenario(cluster=cluster, plan=plan, workload=workload, rates=rates, **settings)


@st.composite
def ordered_cases(draw):
    """A case of the stream model whose links get faster inwards, a thousand times quicker to answer at each level."""
    cluster, plan, workload, rates = draw(cases())
    bandwidths = sorted(level.link.bandwidth_bytes_per_s for level in cluster.levels)
    latency_s = cluster.levels[0].link.latency_s
    levels = [
        dataclasses.replace(level, link=LinkSpeed(bandwidth, latency_s / 1000**index))
        for index, (level, bandwidth) in enumerate(zip(cluster.levels, bandwidths, strict=True))
    ]
    return Cluster(tuple(levels)), plan, workload, dataclasses.replace(rates, overlap=1.0)


# ---- against the stream model ----


@properties
@given(ordered_cases(), st.sampled_from(["deepspeed", "hierarchical"]))
def test_steps_are_within_3_percent_of_the_stream_model_on_even_clusters(case, dense_sync):
    cluster, plan, workload, rates = case
    plan = dataclasses.replace(plan, dense_sync=dense_sync)
    expected = predict(cluster, plan, workload, rates)
    scenario = scenario_of(cluster, plan, workload, rates, is_fair_to_flows=False)
    found = simulate(scenario)
    assert found.step_s == pytest.approx(expected.step_s, rel=0.03)
    assert math.fsum(found.terms_s.values()) == pytest.approx(found.step_s)


@properties
@given(ordered_cases())
def test_bytes_are_those_of_the_stream_model(case):
    cluster, plan, workload, rates = case
    # Its rings count the busiest uplink; hierarchical sums use all uplinks alike.
    plan = dataclasses.replace(plan, dense_sync="hierarchical")
    expected = predict(cluster, plan, workload, rates)
    step = simulate(scenario_of(cluster, plan, workload, rates))
    found = step.uplink_bytes(cluster)
    for level, kinds in enumerate(expected.uplink_bytes):
        for kind, num_bytes in kinds.items():
            assert found[level].get(kind, 0.0) == pytest.approx(num_bytes, rel=1e-9, abs=1e-3)


def test_row_counts_travel_with_the_rows_as_they_do_in_the_runtime():
    plan, latency_s = plan_over((2,), (1,)), 0.05
    slow, quick = (cluster_of(2, bandwidth=1e9, latency_s=latency) for latency in (latency_s, 0.0))
    waits = [simulate(scenario_of(cluster, plan, toy())).terms_s["tokens_s"] for cluster in (slow, quick)]
    # Rows out, rows back, and the same in the backward: one latency each.
    assert waits[0] - waits[1] == pytest.approx(4 * TOY.num_moe_layers * latency_s, rel=1e-3)


# ---- reduced and in full ----


@settings(max_examples=20)
@given(ordered_cases(), st.data())
def test_one_rank_of_each_class_stands_for_all_of_them(case, data):
    cluster, plan, workload, rates = case
    places = [(dc,) for dc in range(cluster.sizes[0])]
    if len(cluster.sizes) > 1:
        places += [(dc, child) for dc in range(cluster.sizes[0]) for child in range(cluster.sizes[1])]
    deviation = st.builds(
        Deviation,
        place=st.sampled_from(places),
        bandwidth_factor=st.sampled_from([0.25, 0.5]),
        slowdown=st.sampled_from([1.0, 2.0]),
    )
    load = data.draw(st.sampled_from([None, 1.5]))
    if load is not None:
        load = tuple(1.0 if expert % 3 else load for expert in range(workload.model.num_experts))
    workload = dataclasses.replace(workload, expert_loads=load)
    assumed = {name: data.draw(st.booleans()) for name in ("is_fair_to_flows", "gathers_by_level")}
    plan = dataclasses.replace(plan, dense_sync=data.draw(st.sampled_from(["deepspeed", "hierarchical"])))
    scenario = scenario_of(
        cluster, plan, workload, dataclasses.replace(rates, overlap=data.draw(st.sampled_from([0.0, 0.3, 1.0]))),
        deviations=tuple(data.draw(st.lists(deviation, max_size=3))), **assumed,
    )  # fmt: skip
    reduced, full = simulate(scenario), simulate(scenario, is_reduced=False)
    assert full.num_classes == cluster.num_ranks
    assert reduced.step_s == pytest.approx(full.step_s, rel=1e-6)
    for mine, theirs in zip(reduced.sent_bytes, full.sent_bytes, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-9)


def test_identical_datacentres_become_one_class_whatever_their_number():
    plan = plan_over((50, 4), (5, 1))
    workload = toy(model=dataclasses.replace(TOY, num_experts=200))
    cluster = cluster_of(50, 4)
    assert simulate(scenario_of(cluster, plan, workload)).num_classes == 1
    slow = Deviation(place=(7,), bandwidth_factor=0.5)
    # Itself, its domain, those at the same offset in other domains, and all others.
    assert simulate(scenario_of(cluster, plan, workload, deviations=(slow,))).num_classes == 4


# ---- who sends what to whom ----


@pytest.mark.parametrize("ep_size", [4, 8, 16])
@pytest.mark.parametrize("domain_sizes", [(1, 1), (2, 1), (1, 2), (2, 4)])
def test_ranks_talk_to_those_that_the_partition_names(ep_size, domain_sizes):
    cluster = cluster_of(4, 4)
    spans = ExpertGroup(ep_size).spans(cluster)
    if any(span % size for span, size in zip(spans, domain_sizes, strict=True)):
        pytest.skip("such domains do not fit into this group")
    ranks = Ranks.of(cluster, plan_over(spans, domain_sizes))
    direct = ranks.groups(Peers(("domain",), (0, 1)))
    exchange = [ranks.groups(Peers(("domain",), (level,))) for level in range(2)]
    gather = [ranks.groups(Peers(("offset",), (level,))) for level in range(2)]
    for first in range(0, 16, ep_size):
        part = Partition.build(cluster, range(first, first + ep_size), domain_sizes)
        for a, b in itertools.permutations(range(first, first + ep_size), 2):
            exchanged, gathered = (any(group[a] == group[b] for group in groups) for groups in (exchange, gather))
            assert (direct[a] == direct[b]) == (part.offset_of(a) == part.offset_of(b))
            assert exchanged == any(b in part.exchange_peers(a, level) for level in range(2))
            assert gathered == any(b in part.gather_peers(a, level) for level in range(2))
    for group in (direct, *exchange, *gather):
        assert not (group[:ep_size, None] == group[None, ep_size:]).any()


def chance_needed(load, wanted, top_k):
    """Chance that a token needs one of `wanted`: every choice of experts by the product of its loads."""
    choices = {choice: math.prod(load[one] for one in choice) for choice in itertools.combinations(range(12), top_k)}
    return sum(weight for choice, weight in choices.items() if wanted & set(choice)) / sum(choices.values())


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_rows_are_those_of_the_routing_models(top_k):
    cluster, plan = cluster_of(2, 3), plan_over((2, 3), (1, 1))
    model = dataclasses.replace(TOY, num_experts=12, top_k=top_k)
    ranks = Ranks.of(cluster, plan)
    even = SimulatedRouting.of(ranks, routing_of(plan, toy(model=model)))
    direct = expected_rows((2, 3), 12, top_k, 1, exchange="direct")
    assert sum(direct) == pytest.approx(5 * even.chances[1][0])
    assert even.chances[0] * 1 == pytest.approx(expected_rows((2, 3), 12, top_k, 1, exchange="hierarchical")[0])
    assert even.pairs == pytest.approx(top_k * 2 / 12)
    load = tuple(1.0 / (1 + expert) for expert in range(12))
    uneven = SimulatedRouting.of(
        ranks,
        planned.Routing(
            spans=plan.spans,
            domain_sizes=plan.domain_sizes,
            hot_level=None,
            num_hot=0,
            num_experts=12,
            top_k=top_k,
            weights=load,
        ),
    )
    for rank in range(6):
        experts = frozenset(range(2 * rank, 2 * rank + 2))
        assert uneven.chances[1][rank] == pytest.approx(chance_needed(load, experts, top_k), rel=1e-9)
        pairs = sum(chance_needed(load, frozenset({expert}), top_k) for expert in experts)
        assert uneven.pairs[rank] == pytest.approx(pairs, rel=1e-9)
    assert uneven.pairs.sum() == pytest.approx(top_k)


# ---- conditions ----


def test_one_slow_uplink_holds_up_a_flat_exchange_and_hardly_a_domain():
    cluster, workload = cluster_of(4, 2, bandwidth=3e6), toy(tokens_per_rank=4096)
    slow = (Deviation(place=(1,), bandwidth_factor=0.5),)
    flat, domain = plan_over((4, 2), (1, 1)), plan_over((4, 2), (4, 1))
    even, held_up = (
        simulate(scenario_of(cluster, flat, workload, deviations=deviations)) for deviations in ((), slow)
    )
    assert held_up.terms_s["tokens_s"] == pytest.approx(2.0 * even.terms_s["tokens_s"])
    even, held_up = (simulate(scenario_of(cluster, domain, workload, deviations=which)) for which in ((), slow))
    assert even.step_s < held_up.step_s < 1.1 * even.step_s


def test_a_straggler_makes_all_wait_for_its_computation_and_for_no_more():
    cluster, plan, workload = cluster_of(2, 2, bandwidth=1e12), plan_over((2, 2), (1, 1)), toy()
    even = simulate(scenario_of(cluster, plan, workload))
    slow = simulate(scenario_of(cluster, plan, workload, deviations=(Deviation(place=(1, 0), slowdown=3.0),)))
    assert slow.step_s == pytest.approx(3.0 * even.step_s, rel=0.01)


def test_uneven_routing_loads_the_links_and_the_ranks_of_popular_experts():
    cluster, plan = cluster_of(4, bandwidth=1e6), plan_over((4,), (1,))
    zipf = tuple(1.0 / (1 + expert) for expert in range(8))
    even = simulate(scenario_of(cluster, plan, toy()))
    uneven = simulate(scenario_of(cluster, plan, toy(expert_loads=zipf)))
    assert uneven.terms_s["tokens_s"] > even.terms_s["tokens_s"]
    assert uneven.step_s > 1.2 * even.step_s


def test_jitter_is_the_same_every_time_and_costs_time():
    cluster, plan = cluster_of(4, bandwidth=1e9), plan_over((4,), (1,))
    even = simulate(scenario_of(cluster, plan, toy())).step_s
    first, again = (simulate(scenario_of(cluster, plan, toy(), jitter=0.3)).step_s for _ in range(2))
    assert first == again > even


def test_gathering_by_level_carries_a_packet_over_a_slow_link_once():
    cluster, plan = cluster_of(2, 3), plan_over((2, 3), (2, 3))
    workload = toy(model=dataclasses.replace(TOY, num_experts=6))
    by_level = simulate(scenario_of(cluster, plan, workload)).sent_bytes
    straight = simulate(scenario_of(cluster, plan, workload, gathers_by_level=False)).sent_bytes
    for kind in ("expert_weights", "expert_gradients"):
        assert straight[0][kind] == 3 * by_level[0][kind]
        assert straight[0][kind] + straight[1][kind] == by_level[0][kind] + by_level[1][kind]  # each copy arrives once


def test_traces_hold_a_rank_s_spans():
    cluster, plan = cluster_of(2, 2), plan_over((2, 2), (2, 1))
    found = simulate(scenario_of(cluster, plan, toy()), traced_ranks=[3])
    spans = found.spans[3]
    assert {span.stream for span in spans} == {
        "compute", "tokens", "bulk over dc", "bulk over gpu",
    }  # fmt: skip
    assert max(span.end_s for span in spans) == pytest.approx(found.step_s)
    compute = sorted((span.begin_s, span.end_s) for span in spans if span.stream == "compute")
    assert all(end <= begin + 1e-12 for (_, end), (begin, _) in itertools.pairwise(compute))


# ---- refusals ----


def test_scenarios_that_cannot_be_are_refused():
    cluster, plan = cluster_of(2, 2), plan_over((2, 2), (1, 1))
    with pytest.raises(PlanError, match=r"spans \(2, 3\) does not fit the levels dc \(2\) x gpu \(2\)"):
        scenario_of(cluster, plan_over((2, 3), (1, 1)), toy())
    with pytest.raises(PlanError, match="6 experts cannot be shared evenly by .* 4 ranks"):
        scenario_of(cluster, plan, toy(model=dataclasses.replace(TOY, num_experts=6)))
    with pytest.raises(PlanError, match=r"deviation is at \(2,\), but the cluster .* has no such place"):
        scenario_of(cluster, plan, toy(), deviations=(Deviation(place=(2,)),))
    with pytest.raises(PlanError, match="bandwidth_factor 0 and slowdown 1.0, but must"):
        Deviation(place=(0,), bandwidth_factor=0)


def test_jitter_is_refused_where_ranks_are_too_many():
    cluster = cluster_of(1024, 8)
    plan = plan_over((1024, 8), (1, 1))
    workload = toy(model=dataclasses.replace(TOY, num_experts=8192))
    with pytest.raises(PlanError, match="8192 ranks are too many to be simulated one by one .*leave out jitter"):
        simulate(scenario_of(cluster, plan, workload, jitter=0.1))


# ---- scale ----


def thousand_dcs(**settings):
    """1000 DCs of 8 GPUs, 16 layers, one expert on each GPU; 10 Gbit/s between DCs."""
    cluster = cluster_of(1000, 8, bandwidth=1.25e9, latency_s=0.01)
    inner = dataclasses.replace(cluster.levels[1], link=LinkSpeed(1.6e10, 1e-5))
    model = dataclasses.replace(TOY, num_experts=8000, num_moe_layers=16, hidden=1024, expert_shapes=((180_000,),))
    workload = toy(model=model, tokens_per_rank=8192)
    plan = plan_over((1000, 8), (settings.pop("domain_size", 1), 1))
    rates = Rates(flops_per_s=1e14)
    return scenario_of(Cluster((cluster.levels[0], inner)), plan, workload, rates, **settings)


@pytest.mark.parametrize("domain_size", [1, 4])
def test_a_thousand_datacentres_agree_with_the_stream_model(domain_size):
    scenario = thousand_dcs(domain_size=domain_size, is_fair_to_flows=False)
    expected = predict(scenario.cluster, scenario.plan, scenario.workload, scenario.rates)
    found = simulate(scenario)
    assert (found.num_classes, found.quantisation) == (1, 0.0)
    assert found.step_s == pytest.approx(expected.step_s, rel=0.03)


def test_sixteen_kinds_of_datacentres_are_simulated_exactly_in_any_order():
    kinds = [1.0 / (1 + 0.1 * (7 * dc % 16)) for dc in range(1000)]
    slow = tuple(Deviation(place=(dc,), bandwidth_factor=factor) for dc, factor in enumerate(kinds))
    found = simulate(thousand_dcs(deviations=slow))
    assert (found.num_classes, found.quantisation) == (16, 0.0)
    assert found.step_s > 1.5 * simulate(thousand_dcs()).step_s


def test_where_every_datacentre_differs_the_error_of_merging_them_is_told():
    cluster, plan = cluster_of(70, 1, bandwidth=1e8), plan_over((70, 1), (1, 1))
    workload = toy(model=dataclasses.replace(TOY, num_experts=70, num_moe_layers=1))
    different = tuple(Deviation(place=(dc,), bandwidth_factor=0.5 + 0.5 * dc / 69) for dc in range(70))
    found = simulate(scenario_of(cluster, plan, workload, deviations=different))
    assert found.num_classes <= 64
    assert 0.0 < found.quantisation < 0.02
    full = simulate(scenario_of(cluster, plan, workload, deviations=different), is_reduced=False)
    assert full.num_classes == 70
    assert found.step_s == pytest.approx(full.step_s, rel=found.quantisation)
