# SPDX-License-Identifier: Apache-2.0
import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hybridep.errors import PlanError
from ds_hybridep.geometry.cluster import Cluster, Level, divisors
from ds_hybridep.geometry.partition import Partition

# A slow machine is no failure, so there is no deadline per example.
properties = settings(max_examples=60)


def cluster_of(*sizes):
    names = {1: ["gpu"], 2: ["dc", "gpu"], 3: ["dc", "node", "gpu"]}[len(sizes)]
    return Cluster(tuple(Level(name, size) for name, size in zip(names, sizes, strict=True)))


def whole(sizes, domain_sizes):
    cluster = cluster_of(*sizes)
    return Partition.build(cluster, range(cluster.num_ranks), domain_sizes)


@st.composite
def partitions(draw):
    """A regular, not always consecutive group in a random order of ranks, with random domain sizes."""
    cluster = cluster_of(*draw(st.lists(st.integers(1, 5), min_size=1, max_size=3)))
    coordinates = [draw(st.sets(st.integers(0, size - 1), min_size=1)) for size in cluster.sizes]
    ranks = sorted(cluster.rank_at(place) for place in itertools.product(*coordinates))
    if draw(st.booleans()):
        ranks = draw(st.permutations(ranks))
    return Partition.build(
        cluster, ranks, [draw(st.sampled_from(divisors(len(level_coordinates)))) for level_coordinates in coordinates]
    )


def differing_levels(partition, rank_a, rank_b):
    pairs = zip(partition.position_of(rank_a), partition.position_of(rank_b), strict=True)
    return [level for level, (a, b) in enumerate(pairs) if a != b]


# ---- properties ----


@properties
@given(partitions())
def test_rank_and_position_are_a_bijection(partition):
    positions = [partition.position_of(rank) for rank in partition.group_ranks]
    assert sorted(positions) == list(itertools.product(*(range(span) for span in partition.spans)))


@properties
@given(partitions())
def test_positions_keep_the_order_of_the_places(partition):
    by_position = sorted(partition.group_ranks, key=partition.position_of)
    assert by_position == sorted(partition.group_ranks)


@properties
@given(partitions())
def test_rank_and_domain_with_offset_are_a_bijection(partition):
    pairs = sorted((partition.domain_index(rank), partition.offset_index(rank)) for rank in partition.group_ranks)
    assert pairs == list(itertools.product(range(partition.num_domains), range(partition.domain_size)))
    assert partition.num_domains * partition.domain_size == len(partition.group_ranks)


@properties
@given(partitions())
def test_domains_cut_the_group_into_disjoint_parts(partition):
    domains = {partition.domain_ranks(rank) for rank in partition.group_ranks}
    assert sorted(rank for domain in domains for rank in domain) == sorted(partition.group_ranks)
    for domain in domains:
        assert [partition.offset_index(rank) for rank in domain] == list(range(partition.domain_size))
        assert len({partition.domain_of(rank) for rank in domain}) == 1


@properties
@given(partitions())
def test_a_peer_has_the_same_offset_in_the_domain_asked_for(partition):
    for rank in partition.group_ranks:
        assert partition.peer_of(rank, partition.domain_index(rank)) == rank
        for domain_index in range(partition.num_domains):
            peer = partition.peer_of(rank, domain_index)
            assert partition.domain_index(peer) == domain_index
            assert partition.offset_of(peer) == partition.offset_of(rank)
            assert partition.peer_of(peer, partition.domain_index(rank)) == rank


@properties
@given(partitions())
def test_gather_peers_differ_in_one_offset_in_its_order(partition):
    for rank, level in itertools.product(partition.group_ranks, range(partition.num_levels)):
        peers = partition.gather_peers(rank, level)
        assert rank in peers
        assert [partition.offset_of(peer)[level] for peer in peers] == list(range(partition.domain_sizes[level]))
        for peer in peers:
            assert partition.domain_of(peer) == partition.domain_of(rank)
            assert differing_levels(partition, rank, peer) in ([], [level])
            assert partition.gather_peers(peer, level) == peers


@properties
@given(partitions())
def test_exchange_peers_differ_in_one_domain_in_its_order(partition):
    for rank, level in itertools.product(partition.group_ranks, range(partition.num_levels)):
        peers = partition.exchange_peers(rank, level)
        assert rank in peers
        assert [partition.domain_of(peer)[level] for peer in peers] == list(range(partition.domain_counts[level]))
        for peer in peers:
            assert partition.offset_of(peer) == partition.offset_of(rank)
            assert differing_levels(partition, rank, peer) in ([], [level])
            assert partition.exchange_peers(peer, level) == peers


@properties
@given(partitions())
def test_gather_and_exchange_join_the_ranks_whose_positions_differ_at_one_level(partition):
    """Source: paper, topology rule of the multi-level domains."""
    for rank in partition.group_ranks:
        levels = range(partition.num_levels)
        gathered = {peer for level in levels for peer in partition.gather_peers(rank, level)} - {rank}
        exchanged = {peer for level in levels for peer in partition.exchange_peers(rank, level)} - {rank}
        assert not gathered & exchanged
        for other in set(partition.group_ranks) - {rank}:
            is_near = len(differing_levels(partition, rank, other)) == 1
            same_domain = partition.domain_of(rank) == partition.domain_of(other)
            same_offset = partition.offset_of(rank) == partition.offset_of(other)
            assert (other in gathered) == (is_near and same_domain)
            assert (other in exchanged) == (is_near and same_offset)


@properties
@given(partitions(), st.integers(1, 3))
def test_every_expert_has_one_owner_and_one_slot(partition, experts_per_rank):
    num_experts = experts_per_rank * len(partition.group_ranks)
    slots = [partition.domain_experts(domain, num_experts) for domain in range(partition.num_domains)]
    assert sorted(itertools.chain(*slots)) == list(range(num_experts))
    for domain_index, experts in enumerate(slots):
        for slot, expert in enumerate(experts):
            owner = partition.group_ranks[expert // experts_per_rank]
            assert partition.domain_index(owner) == domain_index
            assert partition.offset_index(owner) == slot // experts_per_rank
            assert slot % experts_per_rank == expert % experts_per_rank


@properties
@given(partitions())
def test_equal_partitions_are_equal_and_hash_alike(partition):
    again = Partition.build(partition.cluster, partition.group_ranks, partition.domain_sizes)
    assert partition.num_domains == again.num_domains  # a cached answer is no part of the value
    assert again == partition
    assert hash(again) == hash(partition)


# ---- known cases ----


@pytest.mark.parametrize(
    ("num_ranks", "expected"),
    [
        (8, [(56, 0), (24, 8), (8, 24), (0, 56)]),
        (16, [(240, 0), (112, 16), (48, 48), (16, 112), (0, 240)]),
        (32, [(992, 0), (480, 32), (224, 96), (96, 224), (32, 480), (0, 992)]),
    ],
)
def test_transfer_counts_are_table_vii_of_the_paper(num_ranks, expected):
    """Ordered pairs of ranks that (exchange, gather)."""
    counts = []
    for domain_size in divisors(num_ranks):
        partition = whole([num_ranks], [domain_size])
        peers = [partition.exchange_peers, partition.gather_peers]
        counts.append(tuple(sum(len(of(rank, 0)) - 1 for rank in range(num_ranks)) for of in peers))
    assert counts == expected


def test_the_example_of_the_paper_with_four_dcs_of_four_gpus():
    partition = whole([4, 4], [2, 4])
    assert partition.spans == (4, 4)
    assert (partition.num_domains, partition.domain_size) == (2, 8)
    assert partition.domain_counts == (2, 1)
    assert partition.domain_ranks(6) == tuple(range(8))
    assert partition.domain_of(14) == (1, 0)
    assert partition.offset_of(14) == (1, 2)
    assert partition.offset_index(14) == 6
    assert partition.peer_of(6, 1) == 14
    assert partition.gather_peers(6, 0) == (2, 6)
    assert partition.gather_peers(6, 1) == (4, 5, 6, 7)
    assert partition.exchange_peers(6, 0) == (6, 14)
    assert partition.exchange_peers(6, 1) == (6,)


def test_a_strided_group_spans_both_dcs():
    partition = Partition.build(cluster_of(2, 8), [1, 5, 9, 13], [2, 1])
    assert partition.coordinates == ((0, 1), (1, 5))
    assert partition.spans == (2, 2)
    assert partition.domain_ranks(5) == (5, 13)
    assert partition.exchange_peers(5, 1) == (1, 5)
    assert partition.domain_experts(0, 8) == (0, 1, 4, 5)


def test_a_consecutive_group_stays_inside_one_dc():
    partition = Partition.build(cluster_of(2, 8), range(8, 16), [1, 4])
    assert partition.spans == (1, 8)
    assert partition.domain_ranks(13) == (12, 13, 14, 15)
    assert partition.peer_of(13, 0) == 9


def test_experts_follow_the_order_of_the_group_not_of_the_ranks():
    partition = Partition.build(cluster_of(4), [2, 0, 3, 1], [2])
    assert partition.domain_experts(0, 4) == (1, 3)


def test_ten_thousand_ranks_are_quick():
    # Linear work takes a fraction of a second; work for every pair of ranks would run into the test's time limit.
    partition = whole([100, 10, 10], [10, 5, 1])
    pairs = {(partition.domain_index(rank), partition.offset_index(rank)) for rank in partition.group_ranks}
    assert len(pairs) == 10_000


# ---- refusals ----


def refusal(action, *args):
    with pytest.raises(PlanError) as caught:
        action(*args)
    return str(caught.value)


def test_an_irregular_group_is_refused_with_its_ranks_and_levels():
    message = refusal(Partition.build, cluster_of(3, 4), [0, 3, 6, 9], [1, 1])
    assert "ranks 0, 3, 6, 9" in message
    assert "dc (3) x gpu (4)" in message
    assert "dc {0, 1, 2} x gpu {0, 1, 2, 3}, which is 12 places" in message
    assert "choose an ep_size" in message


def test_a_long_irregular_group_is_not_spelled_out():
    message = refusal(Partition.build, cluster_of(2, 100), range(150), [1, 1])
    assert "ranks 0, 1, 2, 3, 4, 5, 6, 7, ... (150 in all)" in message


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [([], "no ranks"), ([0, 1, 1], "repeats a rank: 0, 1, 1"), ([7, 8], "rank 8 is outside")],
)
def test_an_impossible_group_is_refused(ranks, expected):
    assert expected in refusal(Partition.build, cluster_of(2, 4), ranks, [1, 1])


def test_domains_beyond_the_span_are_refused_with_the_way_to_widen_it():
    message = refusal(Partition.build, cluster_of(2, 8), range(8), [2, 1])
    assert "hybridep.levels[0].domain_size is 2" in message
    assert "spans 1 of the 2 children of level 'dc'; allowed there: 1;" in message
    assert "raise ep_size" in message
    assert '"use_data_before_expert_parallelism": true' in message


@pytest.mark.parametrize("domain_size", [-1, 0, 4, 5, 12])
def test_domains_that_do_not_tile_the_span_are_refused(domain_size):
    message = refusal(Partition.build, cluster_of(2, 6), range(12), [1, domain_size])
    assert f"hybridep.levels[1].domain_size is {domain_size}, " in message
    assert "spans 6 of the 6 children of level 'gpu'; allowed there: 1, 2, 3, 6" in message
    assert "ep_size" not in message  # the group spans the level already


def test_one_domain_size_per_level_is_needed():
    assert "1 domain sizes (2,) were given for the 2 levels dc (2) x gpu (4)" in refusal(
        Partition.build, cluster_of(2, 4), range(8), [2]
    )


def test_experts_that_cannot_be_shared_evenly_are_refused():
    partition = whole([2, 3], [1, 1])
    for num_experts in (0, 8):
        message = refusal(partition.domain_experts, 0, num_experts)
        assert re.search(rf"{num_experts} experts .* 6 ranks .* ep_size", message)


def test_queries_outside_the_group_are_refused():
    partition = Partition.build(cluster_of(2, 4), range(4, 8), [1, 2])
    for query in (partition.position_of, partition.domain_of, partition.offset_index, partition.domain_ranks):
        assert "rank 3 is not in the expert-parallel group of ranks 4, 5, 6, 7" in refusal(query, 3)
