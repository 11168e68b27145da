# SPDX-License-Identifier: Apache-2.0
import itertools
import math
from collections import Counter

import pytest

from ds_hybridep.errors import PlanError
from ds_hybridep.geometry.cluster import Cluster, Level, LinkSpeed, known_or_assumed_bandwidths
from ds_hybridep.geometry.partition import Partition
from ds_hybridep.geometry.token_route import (
    RouteStage,
    build_route,
    choose_exchange,
    expected_rows,
)

EXCHANGES = ("direct", "hierarchical")


def cluster_of(*sizes, bandwidths=None, latencies=None):
    nothing = [None] * len(sizes)
    links = [LinkSpeed(b, s) for b, s in zip(bandwidths or nothing, latencies or nothing, strict=True)]
    return Cluster(
        tuple(Level(f"level{i}", size, link) for i, (size, link) in enumerate(zip(sizes, links, strict=True)))
    )


def whole(sizes, domain_sizes):
    cluster = cluster_of(*sizes)
    return Partition.build(cluster, range(cluster.num_ranks), domain_sizes)


# (partition, experts): all shapes of one to three levels that matter, small enough to try every token.
CASES = {
    "plain": (whole([4], [1]), 4),
    "one level in pairs": (whole([6], [2]), 6),
    "one domain": (whole([2, 2], [2, 2]), 4),
    "plain on two levels": (whole([2, 3], [1, 1]), 6),
    "two experts a rank": (whole([2, 2], [1, 1]), 8),
    "domains over DCs": (whole([4, 2], [2, 1]), 8),
    "domains inside DCs": (whole([2, 4], [1, 2]), 8),
    "whole DCs": (whole([4, 4], [2, 4]), 16),
    "three levels": (whole([2, 2, 2], [1, 1, 1]), 8),
    "three levels, the middle one gathered": (whole([2, 2, 2], [1, 2, 1]), 8),
    "strided": (Partition.build(cluster_of(2, 8), [1, 5, 9, 13], [1, 1]), 8),
    "inside one DC": (Partition.build(cluster_of(2, 4), range(4, 8), [1, 2]), 4),
    "group order not ascending": (Partition.build(cluster_of(2, 2), [3, 0, 2, 1], [1, 1]), 4),
}
with_each_case = pytest.mark.parametrize(("partition", "num_experts"), CASES.values(), ids=CASES.keys())
with_each_exchange = pytest.mark.parametrize("exchange", EXCHANGES)


def routes_of(partition, num_experts, exchange):
    return {rank: build_route(partition, rank, num_experts, exchange) for rank in partition.group_ranks}


def follow(routes, origin, experts):
    """Where a token of `origin` that needs `experts` ends up, {rank: experts}, and the (from, to) of its rows."""
    rows, sends = {origin: frozenset(experts)}, []
    for stage_idx in range(len(routes[origin])):
        arrived = {}
        for holder, needed in rows.items():
            stage = routes[holder][stage_idx]
            for destination, rank in enumerate(stage.ranks):
                there = frozenset(expert for expert in needed if stage.expert_to_destination[expert] == destination)
                if there:
                    assert rank not in arrived, "two rows of one token met at a rank"
                    arrived[rank] = there
                    sends.append((holder, rank))
        rows = arrived
    return rows, sends


@with_each_exchange
@with_each_case
def test_every_expert_is_reached_at_the_peer_in_its_domain(partition, num_experts, exchange):
    routes = routes_of(partition, num_experts, exchange)
    for origin in partition.group_ranks:
        everything = set(range(num_experts))
        for needed in [everything, *({expert} for expert in everything), {0, num_experts - 1}]:
            expected = {}
            for expert in needed:
                owner = partition.group_ranks[expert // partition.experts_per_rank(num_experts)]
                domain_index = partition.domain_index(owner)
                expected.setdefault(partition.peer_of(origin, domain_index), set()).add(expert)
            assert follow(routes, origin, needed)[0] == expected


@with_each_exchange
@with_each_case
def test_stages_are_the_same_everywhere_and_symmetric(partition, num_experts, exchange):
    routes = routes_of(partition, num_experts, exchange)
    for rank, stages in routes.items():
        for stage_idx, stage in enumerate(stages):
            assert stage.ranks[stage.self_index] == rank
            assert len(stage.expert_to_destination) == num_experts
            for peer in stage.ranks:
                assert routes[peer][stage_idx].level == stage.level
                assert routes[peer][stage_idx].ranks == stage.ranks
                assert routes[peer][stage_idx].expert_to_destination == stage.expert_to_destination


@with_each_case
def test_hierarchical_stages_join_levels_with_several_domains_slowest_first(partition, num_experts):
    stages = build_route(partition, partition.group_ranks[0], num_experts, "hierarchical")
    assert [stage.level for stage in stages] == [
        level for level, count in enumerate(partition.domain_counts) if count > 1
    ]
    assert math.prod(len(stage.ranks) for stage in stages) == partition.num_domains


@with_each_case
def test_direct_is_one_stage_to_all_peers_or_none(partition, num_experts):
    rank = partition.group_ranks[-1]
    stages = build_route(partition, rank, num_experts, "direct")
    peers = tuple(partition.peer_of(rank, domain_index) for domain_index in range(partition.num_domains))
    assert [(stage.level, stage.ranks) for stage in stages] == ([(None, peers)] if partition.num_domains > 1 else [])


def test_the_drawn_example():
    stages = build_route(whole([2, 2], [1, 1]), 0, 4, "hierarchical")
    assert stages == (
        RouteStage(level=0, ranks=(0, 2), self_index=0, expert_to_destination=(0, 0, 1, 1)),
        RouteStage(level=1, ranks=(0, 1), self_index=0, expert_to_destination=(0, 1, 0, 1)),
    )
    assert build_route(whole([2, 2], [1, 1]), 2, 4, "direct") == (
        RouteStage(level=None, ranks=(0, 1, 2, 3), self_index=2, expert_to_destination=(0, 1, 2, 3)),
    )


@with_each_exchange
@with_each_case
@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_expected_rows_are_the_mean_over_all_tokens(partition, num_experts, exchange, top_k):
    routes = routes_of(partition, num_experts, exchange)
    choices = list(itertools.combinations(range(num_experts), top_k))
    rows = Counter()
    for origin, experts in itertools.product(partition.group_ranks, choices):
        for sender, receiver in follow(routes, origin, experts)[1]:
            rows[partition.cluster.level_between(sender, receiver)] += 1
    num_tried = len(partition.group_ranks) * len(choices)
    measured = [5 * rows[level] / num_tried for level in range(partition.num_levels)]
    # Both are ratios of small whole numbers; only the last digits of the division may differ.
    assert expected_rows(partition.domain_counts, num_experts, top_k, 5, exchange=exchange) == pytest.approx(
        measured, rel=1e-12, abs=0
    )


def test_expected_rows_of_one_level_are_the_formula_of_even_routing():
    num_tokens, num_ranks, num_experts, top_k = 128, 8, 32, 4
    missed = math.comb(num_experts - 4, top_k) / math.comb(num_experts, top_k)
    expected = num_tokens * (num_ranks - 1) * (1 - missed)
    assert expected_rows((8,), num_experts, top_k, num_tokens, exchange="direct") == pytest.approx((expected,))


def test_expected_rows_of_many_experts_keep_their_digits():
    rows = expected_rows((100, 10, 10), 10_000, 1, 1, exchange="direct")
    assert rows == pytest.approx((99 * 100 / 10_000, 9 * 10 / 10_000, 9 / 10_000), rel=1e-15)


def test_stages_send_fewer_rows_over_slow_links_and_more_over_fast_ones():
    partition = whole([2, 4], [1, 1])
    direct = expected_rows(partition.domain_counts, 8, 4, 1000, exchange="direct")
    staged = expected_rows(partition.domain_counts, 8, 4, 1000, exchange="hierarchical")
    assert staged[0] < direct[0]
    assert staged[1] > direct[1]


# ---- the choice ----


def chosen(bandwidths=None, latencies=None, *, sizes=(2, 4), domain_sizes=(1, 1), num_tokens=1000):
    links = cluster_of(*sizes, bandwidths=bandwidths, latencies=latencies)
    partition = Partition.build(links, range(links.num_ranks), domain_sizes)
    return choose_exchange(partition, num_experts=8, top_k=4, row_bytes=1024, num_tokens=num_tokens)


def test_a_slow_outer_link_is_worth_stages_and_a_slow_inner_one_is_not():
    assert chosen([1e8, 1e10]) == "hierarchical"
    assert chosen([1e10, 1e8]) == "direct"


@pytest.mark.parametrize(
    ("known", "filled"),
    [
        ([None, None, None], (1.25e9, 1e10, 8e10)),
        ([1e8, None, None], (1e8, 8e8, 6.4e9)),
        ([None, 8e8, None], (1e8, 8e8, 6.4e9)),
        ([None, None, 6.4e9], (1e8, 8e8, 6.4e9)),
        ([1e8, None, 3e9], (1e8, 8e8, 3e9)),
        ([4.0, 3.0, 2.0], (4.0, 3.0, 2.0)),
    ],
)
def test_links_that_are_not_known_count_eight_times_the_level_above(known, filled):
    assert known_or_assumed_bandwidths(cluster_of(2, 2, 2, bandwidths=known)) == filled


def test_the_choice_can_be_made_before_links_are_known():
    assert chosen() == "hierarchical"


def test_an_uplink_is_shared_by_all_ranks_below_it():
    partition = whole([2, 4], [1, 1])
    direct, staged = (expected_rows(partition.domain_counts, 8, 4, 1, exchange=exchange) for exchange in EXCHANGES)
    # Stages save rows on level 0, where 4 ranks share an uplink, and add rows on level 1, where each has its own.
    break_even = (staged[1] - direct[1]) / (4 * (direct[0] - staged[0]))
    assert chosen([1e9, 1e9 * break_even * 1.01]) == "hierarchical"
    assert chosen([1e9, 1e9 * break_even * 0.99]) == "direct"


def test_stages_lose_where_latency_outweighs_the_bytes():
    assert chosen([1e8, 1e10], [0.02, 0.02], num_tokens=100_000) == "hierarchical"
    assert chosen([1e8, 1e10], [0.02, 0.02], num_tokens=1) == "direct"


def test_a_tie_is_direct():
    assert chosen([1e8, 1e10], domain_sizes=(1, 4)) == "direct"  # one level left: both ways are the same
    assert chosen([1e8, 1e10], domain_sizes=(2, 4)) == "direct"  # nothing travels
    assert chosen([1e8, 1e10], num_tokens=0) == "direct"


def test_no_latency_is_paid_on_levels_without_rows():
    # Both ways wait 1000 s for level 1; a second wait, for level 2, which one domain covers, would decide for direct.
    latencies, sizes, domain_sizes = [0.0, 1000.0, 1000.0], (2, 2, 2), (1, 1, 2)
    assert chosen([1e8, 1e10, 1e10], latencies, sizes=sizes, domain_sizes=domain_sizes) == "hierarchical"


# ---- refusals ----


def test_impossible_arguments_are_refused():
    partition = whole([2, 2], [1, 1])
    with pytest.raises(PlanError, match="rank 4 is outside the cluster"):
        build_route(partition, 4, 4, "direct")
    with pytest.raises(PlanError, match="6 experts cannot be shared evenly by the 4 ranks"):
        build_route(partition, 0, 6, "direct")
