# SPDX-License-Identifier: Apache-2.0
"""Which layers' replicas are held: never more than there is room for, and always those that are asked for."""

from hypothesis import given
from hypothesis import strategies as st

from ds_hybridep.plan.replica_pool import ReplicaPool, num_gathers

layers_and_depth = st.tuples(st.integers(1, 9), st.integers(0, 10))


@given(layers_and_depth, st.lists(st.tuples(st.integers(0, 8), st.booleans()), max_size=30))
def test_what_is_asked_for_is_held_within_the_room(sizes, requests):
    num_layers, depth = sizes
    pool, held = ReplicaPool(num_layers, depth), set()
    for position, is_backward in requests:
        position %= num_layers
        given_back, gathered = pool.request(position, is_backward=is_backward)
        assert set(given_back) <= held
        held -= set(given_back)
        assert held.isdisjoint(gathered)
        held |= set(gathered)
        ahead = [position - d if is_backward else position + d for d in range(depth + 1)]
        assert held == set(pool.held) >= {layer for layer in ahead if 0 <= layer < num_layers}
        assert len(held) <= depth + 1


@given(layers_and_depth, st.integers(1, 4))
def test_gathers_of_a_step_are_counted(sizes, micro_steps):
    num_layers, depth = sizes
    pool = ReplicaPool(num_layers, depth)
    forward = [(layer, False) for layer in range(num_layers)]
    backward = [(layer, True) for layer in reversed(range(num_layers))]
    gathers = sum(
        len(pool.request(layer, is_backward=is_backward)[1])
        for layer, is_backward in (forward + backward) * micro_steps
    )
    assert gathers == num_gathers(num_layers, depth, micro_steps)
