# SPDX-License-Identifier: Apache-2.0
import itertools
import random

import pytest

from ds_hybridep.geometry.hot import HotCosts, choose_hot, rank_loads, step_s

FREE = HotCosts(row_s=1.0, copy_s=0.0)


def test_rows_of_hot_experts_are_shared():
    assert rank_loads([70, 10, 10, 10], [0, 1, 2, 3], 4, {0}) == [17.5, 27.5, 27.5, 27.5]


def test_no_row_is_lost():
    loads = [5.0, 1.0, 9.0, 3.0]
    for hot in itertools.chain.from_iterable(itertools.combinations(range(4), n) for n in range(5)):
        assert sum(rank_loads(loads, [0, 0, 1, 1], 2, hot)) == sum(loads)


@pytest.mark.parametrize("copy_s", [0.0, 0.3, 2.0, 50.0])
def test_the_choice_is_the_best_of_all_counts(copy_s: float):
    draw = random.Random(3)
    costs = HotCosts(row_s=0.1, copy_s=copy_s)
    for _ in range(50):
        loads = [draw.expovariate(1.0) * 100 for _ in range(16)]
        owners = [expert // 4 for expert in range(16)]
        ranked = sorted(range(16), key=lambda expert: -loads[expert])
        least_s = min(step_s(loads, owners, 4, ranked[:count], costs=costs) for count in range(6))
        chosen = choose_hot(loads, owners, 4, 5, costs=costs)
        found_s = step_s(loads, owners, 4, chosen, costs=costs)
        assert found_s <= least_s * 1.05 * (1 + 1e-9) or (chosen == () and found_s <= least_s / 0.98)
        assert all(loads[one] >= loads[other] for one in chosen for other in set(range(16)) - set(chosen))


def test_a_choice_stays_until_another_one_is_better():
    owners, loads = [0, 1, 2, 3], [70.0, 10.0, 10.0, 10.0]
    assert choose_hot(loads, owners, 4, 1, costs=FREE) == (0,)
    two_each = [expert // 2 for expert in range(8)]
    assert choose_hot([40.0, 40.5, *[5.0] * 6], two_each, 4, 1, costs=FREE) == (1,)
    assert choose_hot([40.0, 40.5, *[5.0] * 6], two_each, 4, 1, costs=FREE, current=(0,)) == (0,)  # as good
    assert choose_hot([10.0, 70.0, 10.0, 10.0], owners, 4, 1, costs=FREE, current=(0,)) == (1,)
    assert choose_hot([25.0, 25.1, 25.0, 25.0], owners, 4, 1, costs=FREE, current=(0,)) == ()


def test_the_fewest_that_are_as_good_are_chosen():
    loads = [97.0] + [1.0] * 15
    owners = [expert // 4 for expert in range(16)]
    assert choose_hot(loads, owners, 4, 16, costs=FREE) == (0,)


def test_even_routing_has_no_hot_experts():
    assert choose_hot([10.0] * 8, [0, 0, 1, 1, 2, 2, 3, 3], 4, 4, costs=HotCosts(row_s=1.0, copy_s=0.1)) == ()


def test_copies_that_cost_more_than_they_save_are_not_made():
    loads, owners = [70, 10, 10, 10], [0, 1, 2, 3]
    assert choose_hot(loads, owners, 4, 4, costs=FREE) != ()
    assert choose_hot(loads, owners, 4, 4, costs=HotCosts(row_s=1.0, copy_s=20.0)) == ()
    assert choose_hot(loads, owners, 4, 0, costs=FREE) == ()
