# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hybridep.errors import PlanError
from ds_hybridep.geometry.cluster import Cluster, Level, divisors, flatten, unflatten

# A slow machine is no failure, so there is no deadline per example.
properties = settings(max_examples=60)

TWO_BY_THREE = Cluster((Level("dc", 2), Level("gpu", 3)))


@st.composite
def clusters(draw):
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    return Cluster(tuple(Level(f"level{index}", size) for index, size in enumerate(sizes)))


def test_ranks_are_laid_out_row_by_row():
    places = [TWO_BY_THREE.place_of(rank) for rank in range(TWO_BY_THREE.num_ranks)]
    assert places == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]


@properties
@given(clusters())
def test_rank_and_place_are_a_bijection(cluster):
    places = [cluster.place_of(rank) for rank in range(cluster.num_ranks)]
    assert len(set(places)) == cluster.num_ranks
    assert [cluster.rank_at(place) for place in places] == list(range(cluster.num_ranks))


@properties
@given(clusters())
def test_place_is_the_formula_of_the_paper(cluster):
    for rank in range(cluster.num_ranks):
        ranks_below = cluster.num_ranks
        for coordinate, size in zip(cluster.place_of(rank), cluster.sizes, strict=True):
            ranks_below //= size
            assert coordinate == rank // ranks_below % size


@properties
@given(clusters(), st.data())
def test_level_between_is_symmetric_and_the_first_difference(cluster, data):
    ranks = st.integers(0, cluster.num_ranks - 1)
    rank_a, rank_b = data.draw(ranks), data.draw(ranks)
    level = cluster.level_between(rank_a, rank_b)
    assert level == cluster.level_between(rank_b, rank_a)
    place_a, place_b = cluster.place_of(rank_a), cluster.place_of(rank_b)
    if level is None:
        assert rank_a == rank_b
    else:
        assert place_a[:level] == place_b[:level]
        assert place_a[level] != place_b[level]


def test_level_between_of_an_example():
    assert [TWO_BY_THREE.level_between(0, rank) for rank in range(6)] == [None, 1, 1, 0, 0, 0]


@properties
@given(st.lists(st.integers(1, 6), min_size=1, max_size=4), st.data())
def test_unflatten_undoes_flatten(sizes, data):
    coordinates = tuple(data.draw(st.integers(0, size - 1)) for size in sizes)
    assert unflatten(flatten(coordinates, sizes), sizes) == coordinates


@properties
@given(st.integers(1, 2000))
def test_divisors_are_all_that_divide_in_order(number):
    assert list(divisors(number)) == [candidate for candidate in range(1, number + 1) if number % candidate == 0]


@pytest.mark.parametrize("rank", [-1, 6])
def test_rank_outside_is_refused(rank):
    with pytest.raises(PlanError, match=rf"rank {rank} .*dc \(2\) x gpu \(3\).*0 \.\. 5"):
        TWO_BY_THREE.place_of(rank)


@pytest.mark.parametrize("place", [(2, 0), (0, -1), (0,), (0, 0, 0)])
def test_place_outside_is_refused(place):
    with pytest.raises(PlanError) as caught:
        TWO_BY_THREE.rank_at(place)
    assert f"no place {place}" in str(caught.value)


def test_impossible_clusters_are_refused():
    with pytest.raises(PlanError, match="at least one level"):
        Cluster(())
    with pytest.raises(PlanError, match="names must differ, but they are dc, dc"):
        Cluster((Level("dc", 2), Level("dc", 3)))
