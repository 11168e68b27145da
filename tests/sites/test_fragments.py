# SPDX-License-Identifier: Apache-2.0
"""A state that crosses in fragments, while both sides take the same steps, is equal at the end."""

import copy
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ds_hybridep.sites.fragments import JOIN_S, LEAST_BYTES, SLOWER, Fragment, Pace, StateVector, distances

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.float64]


def groups_of(sizes: list[int], seed: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        [torch.randint(-100, 100, (size,), generator=generator).to(dtype) for dtype in DTYPES[: 1 + index % 4]]
        for index, size in enumerate(sizes)
    ]


def cross(source: StateVector, target: StateVector, most_bytes: int) -> int:
    """Send everything; return the number of fragments."""
    position = count = 0
    while position < source.num_positions:
        stop, payload = source.read(position, source.num_positions, most_bytes)
        sent = Fragment(position, stop, source.num_positions, b"head" if not count else b"", payload).pack()
        got = Fragment.unpack(memoryview(sent.numpy()).cast("B"))
        assert got.head == (b"" if count else b"head")
        target.write(got.start, got.stop, got.payload)
        position, count = got.stop, count + 1
    return count


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(1, 600), st.booleans())
def test_all_bits_cross_in_fragments_of_any_size(sizes: list[int], most_bytes: int, is_elementwise: bool) -> None:
    ours, theirs = groups_of(sizes, 1), groups_of(sizes, 2)
    source, target = (StateVector(one, is_elementwise=is_elementwise) for one in (ours, theirs))
    count = cross(source, target, most_bytes)
    for mine, other in zip(ours, theirs, strict=True):
        assert all(map(torch.equal, mine, other))
    assert count <= source.num_positions
    if not is_elementwise:
        assert count <= sum(size > 0 for size in sizes), "no tensor is cut"


@given(st.integers(1, 50), st.integers(20, 3000))
def test_a_fragment_is_no_longer_than_wanted_but_for_one_position(most_elements: int, size: int) -> None:
    vector = StateVector([[torch.zeros(size), torch.zeros(size), torch.zeros(size)], [torch.zeros(size)]])
    position = 0
    while position < vector.num_positions:
        stop, payload = vector.read(position, vector.num_positions, 12 * most_elements + 3)
        assert stop > position
        assert len(payload) <= max(12 * most_elements + 3, 12)
        position = stop


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_what_has_crossed_stays_equal_while_both_take_the_same_steps(kind: type[torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    models = [nn.Linear(6, 5), nn.Linear(6, 5)]
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizers = [kind(model.parameters(), lr=0.1, **options) for model in models]  # type: ignore[call-arg]

    def step(optimizer: torch.optim.Optimizer, model: nn.Module, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()

    def vector(optimizer: torch.optim.Optimizer, model: nn.Module) -> StateVector:
        kept = (optimizer.state[parameter].values() for parameter in model.parameters())
        return StateVector([
            [parameter.data, *(one for one in values if isinstance(one, Tensor) and one.shape == parameter.shape)]
            for parameter, values in zip(model.parameters(), kept, strict=True)
        ])  # fmt: skip

    step(optimizers[0], models[0], 0)
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))  # as the head does: numbers of steps
    for kept in optimizers[1].state.values():
        for value in kept.values():
            if isinstance(value, Tensor) and value.ndim:
                value.normal_()
    position, number = 0, 0
    source = vector(optimizers[0], models[0])
    while position < source.num_positions:
        number += 1
        for optimizer, model in zip(optimizers, models, strict=True):
            step(optimizer, model, number)
        stop, payload = vector(optimizers[0], models[0]).read(position, source.num_positions, 40)
        vector(optimizers[1], models[1]).write(position, stop, payload)
        position = stop
    assert number > 5
    for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("rate", [1e5, 1e7])  # bytes that cross in a second
@pytest.mark.parametrize("step_s", [0.1, 2.0])
def test_steps_take_at_most_a_fifth_longer_or_the_join_ends_within_an_hour(rate: float, step_s: float) -> None:
    num_bytes = 2e8
    pace, left, spent, slow = Pace(int(num_bytes)), num_bytes, 0.0, 0
    num_steps = 0
    while left > 0:
        size = min(pace.next_bytes(), int(left) + 1)
        took = step_s + size / rate
        slow += took > 1.1 * SLOWER * step_s
        pace.note(size, took, size / rate)
        left, spent, num_steps = left - size, spent + took, num_steps + 1
    assert spent < 1.3 * JOIN_S
    if num_bytes / rate < 0.1 * JOIN_S:
        assert slow < 0.2 * num_steps, "unless the hour demands it"


def test_steps_that_take_longer_now_and_then_do_not_make_a_join_last() -> None:
    """Steps of 1 s, one in two of which takes 2 s for another reason: fragments may take a fifth of a step."""
    rate, num_bytes, size, draw = 1e6, 10**7, 0, random.Random(1)
    pace, left, num_steps = Pace(num_bytes), num_bytes, 0
    while left > 0:
        size = min(pace.next_bytes(), left)
        pace.note(size, draw.choice((1.0, 2.0)) + size / rate, size / rate)
        left, num_steps = left - size, num_steps + 1
    assert num_steps < 200, "at 0.2 s of each second it takes 50 steps"


def test_the_first_fragments_are_too_small_to_matter() -> None:
    pace = Pace(10**9)
    for _ in range(3):
        assert pace.next_bytes() == LEAST_BYTES
        pace.note(LEAST_BYTES, 0.5, 0.01)
    assert pace.next_bytes() > LEAST_BYTES, "an hour would not do"


@given(st.lists(st.integers(1, 400), min_size=1, max_size=5), st.integers(0, 2**20), st.booleans())
def test_the_distance_of_two_states_is_estimated_and_found_in_its_part(
    sizes: list[int], place: int, is_elementwise: bool
) -> None:
    generator = torch.Generator().manual_seed(place)
    ours = [[torch.randn(size, generator=generator), torch.zeros(size)] for size in sizes]
    theirs = [[tensor.clone() for tensor in group] for group in ours]
    source, target = (StateVector(one, is_elementwise=is_elementwise) for one in (ours, theirs))
    assert distances(source.sketch(), target.sketch()) == [0.0] * len(source.parts())
    position = place % source.num_positions
    begin = 0
    for group in theirs:
        if begin <= position < begin + len(group[0]):
            group[0][position - begin] += 1e-2
        begin += len(group[0])
    apart = distances(target.sketch(), source.sketch())
    for (start, stop), distance in zip(source.parts(), apart, strict=True):
        assert (distance > 1e-5) == (start <= position < stop)


def test_parts_of_a_state_make_up_the_whole() -> None:
    for size in (0, 1, 5, 16, 17, 1000):
        parts = StateVector([[torch.zeros(size)]] if size else [[torch.zeros(0)]]).parts()
        assert [one for start, stop in parts for one in range(start, stop)] == list(range(size))
        assert len(parts) <= 16
