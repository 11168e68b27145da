# SPDX-License-Identifier: Apache-2.0
"""Sums and gathers level by level: against torch's own, bit-equal on all ranks, and against a count of every trade."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from moe_refs import open_transport
from process_pool import Pools, ProcessPool
from torch import Tensor
from torch import distributed as dist

from ds_hybridep.geometry.cluster import Cluster, Level
from ds_hybridep.geometry.slots import whole
from ds_hybridep.sync.encoding import Encoding
from ds_hybridep.sync.group_sync import GroupSync
from ds_hybridep.sync.transaction import Transaction

pytestmark = pytest.mark.dist

SIZES = {4: ((4,), (2, 2), (1, 4), (4, 1), (2, 1, 2)), 8: ((8,), (2, 4), (4, 2), (2, 2, 2))}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}

# Against the sum in fp64.  16-bit types carry 8 and 11 significant bits and are rounded once per level, of which there
# are at most three; errors add up beside values of the size of the largest part.
ROUNDING = {"float64": 1e-14, "float32": 1e-6, "bfloat16": 3 * 2**-8, "float16": 3 * 2**-11}


@dataclass(frozen=True)
class Question:
    """One sum and one gather of `num_elements`, and a sum of slices with these owners and sizes."""

    sizes: tuple[int, ...]
    dtype: str
    num_elements: int
    slices: tuple[tuple[int, int], ...]


def input_of(question: Question, rank: int, num_elements: int) -> Tensor:
    """A function of the rank, so that every rank knows every input."""
    generator = torch.Generator().manual_seed(7919 * num_elements + rank)
    return torch.randn(num_elements, generator=generator, dtype=torch.float64).to(DTYPES[question.dtype])


def sum_of(question: Question, world_size: int, num_elements: int) -> Tensor:
    """The exact sum of what the ranks hand over."""
    zero = torch.zeros(num_elements, dtype=torch.float64)
    return sum((input_of(question, rank, num_elements).double() for rank in range(world_size)), start=zero)


def open_collectives(sizes: tuple[int, ...]) -> GroupSync:
    cluster = Cluster(tuple(Level(f"level {index}", size) for index, size in enumerate(sizes)))
    transport, exact = open_transport(cluster, timeout_s=100), (None,) * len(sizes)
    ranks = range(math.prod(sizes))
    return GroupSync(
        transport, ranks, "test", Encoding(exact, exact), transaction=Transaction(), device=torch.device("cpu")
    )


def spans_of(slices: Sequence[tuple[int, int]]) -> list[tuple[int, Any]]:
    return [(owner, whole(f"tensor {index}", (size,))) for index, (owner, size) in enumerate(slices)]


def worst(value: Tensor, exact: Tensor) -> float:
    scale = exact.abs().clamp_min(1.0)
    return ((value.double() - exact).abs() / scale).max().item() if exact.numel() else 0.0


def answer(questions: Sequence[Question]) -> list[dict[str, Any]]:
    """What this rank got for each question."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    answers, by_sizes = [], {}
    for question in questions:
        if question.sizes not in by_sizes:
            by_sizes[question.sizes] = open_collectives(question.sizes)
        collectives = by_sizes[question.sizes]
        total = input_of(question, rank, question.num_elements)
        collectives.all_reduce(total)

        own = input_of(question, rank, question.num_elements)
        gathered = torch.empty(world_size * own.numel(), dtype=own.dtype)
        collectives.start_all_gather(gathered, own)()

        sliced_size = sum(size for _, size in question.slices)
        sliced = input_of(question, rank, sliced_size)
        collectives.reduce_to_owners(sliced, spans_of(question.slices))
        exact, before = sum_of(question, world_size, sliced_size), input_of(question, rank, sliced_size)
        is_own = torch.tensor(
            [owner == rank for owner, size in question.slices for _ in range(size)], dtype=torch.bool
        )

        everyones = [input_of(question, other, question.num_elements) for other in range(world_size)]
        answers.append(
            {
                "sum": total.view(torch.uint8).numpy().tobytes() if total.numel() else b"",
                "sum error": worst(total, sum_of(question, world_size, question.num_elements)),
                "is gathered": torch.equal(gathered, torch.cat(everyones)),
                "slice error": worst(sliced[is_own], exact[is_own]),
                "others untouched": torch.equal(sliced[~is_own], before[~is_own]),
            }
        )
    dist.barrier()  # others may still be connecting
    for collectives in by_sizes.values():
        collectives.transport.close()
    return answers


@st.composite
def questions(draw: st.DrawFn, world_size: int) -> Question:
    slices = st.tuples(st.integers(0, world_size - 1), st.integers(0, 40))
    return Question(
        sizes=draw(st.sampled_from(SIZES[world_size])),
        dtype=draw(st.sampled_from(sorted(DTYPES))),
        num_elements=draw(st.one_of(st.integers(0, 2 * world_size), st.integers(0, 500))),
        slices=tuple(draw(st.lists(slices, max_size=12))),
    )


def check(pool: ProcessPool, asked: Sequence[Question]) -> None:
    for question, answers in zip(asked, zip(*pool.run(answer, questions=asked), strict=True), strict=True):
        assert len({one["sum"] for one in answers}) == 1, question  # bit by bit
        for one in answers:
            assert one["sum error"] <= ROUNDING[question.dtype] * pool.world_size, question
            assert one["slice error"] <= ROUNDING[question.dtype] * pool.world_size, question
            assert one["is gathered"], question
            assert one["others untouched"], question


FEW = settings(max_examples=3, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FEW
@given(st.lists(questions(4), min_size=10, max_size=20))
def test_four_ranks_sum_and_gather_like_a_single_process(pool4: ProcessPool, asked: list[Question]) -> None:
    check(pool4, asked)


@pytest.mark.slow
@FEW
@given(st.lists(questions(8), min_size=10, max_size=20))
def test_eight_ranks_sum_and_gather_like_a_single_process(pool8: ProcessPool, asked: list[Question]) -> None:
    check(pool8, asked)


def test_empty_and_tiny_tensors_in_every_layout(pool4: ProcessPool) -> None:
    slices = ((3, 0), (1, 1))
    check(
        pool4,
        [
            Question(sizes, dtype, size, slices)
            for sizes in SIZES[4]
            for dtype, size in (("float32", 0), ("bfloat16", 1), ("float32", 3), ("float16", 5))
        ],
    )


def sum_twice(sizes: tuple[int, ...], num_elements: int) -> dict[str, Any]:
    """Whether a repetition gives the same bits, and the bytes of both."""
    collectives, totals = open_collectives(sizes), []
    for _ in range(2):
        totals.append(torch.sin(torch.arange(num_elements) * (dist.get_rank() + 1.0)))
        collectives.all_reduce(totals[-1])
    collectives.transport.close()
    counted = collectives.transport.traffic.sent_bytes
    return {"repeats": torch.equal(*totals), "bytes": {level: num for (level, _), num in counted.items() if num}}


@pytest.mark.parametrize("sizes", [(2, 2), pytest.param((2, 2, 2), marks=pytest.mark.slow)])
def test_sums_repeat_bit_for_bit_and_send_what_the_closed_form_says(pool_of: Pools, sizes: tuple[int, ...]) -> None:
    pool, num_elements = pool_of(math.prod(sizes)), 8 * 125
    expected = {level: 2 * 2 * num * 4 for level, num in enumerate(elements_sent(sizes, num_elements))}  # calls, ways
    assert pool.run(sum_twice, sizes=sizes, num_elements=num_elements) == [
        {"repeats": True, "bytes": expected}
    ] * math.prod(sizes)


def elements_sent(sizes: Sequence[int], num_elements: int) -> list[int]:
    """Elements that a rank sends over each level for a sum, where all blocks are of one size.

    At level l a rank holds sums for the ranks that agree with it below; all but those for its own child leave it.
    """
    world_size = math.prod(sizes)
    held = [num_elements * math.prod(sizes[: level + 1]) // world_size for level in range(len(sizes))]
    return [num * (size - 1) // size for num, size in zip(held, sizes, strict=True)]


def trade(sizes: tuple[int, ...], slices: tuple[tuple[int, int], ...]) -> dict[int, int]:
    collectives = open_collectives(sizes)
    collectives.reduce_to_owners(torch.ones(sum(size for _, size in slices)), spans_of(slices))
    collectives.transport.close()
    return {level: num for (level, _), num in collectives.transport.traffic.sent_bytes.items() if num}


@pytest.mark.parametrize(
    ("sizes", "slices"),
    [
        ((2, 2), ((0, 10), (3, 3), (2, 5), (1, 0), (2, 11))),
        pytest.param((2, 2, 2), ((0, 10), (7, 3), (2, 5), (5, 0), (6, 11)), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_sum_crosses_the_slow_level_once_per_child(
    pool_of: Pools, sizes: tuple[int, ...], slices: tuple[tuple[int, int], ...]
) -> None:
    """Each element has one owner: every other child of the slow level sends it one sum, whatever the ranks inside."""
    sent = pool_of(math.prod(sizes)).run(trade, sizes=sizes, slices=slices)
    places = list(itertools.product(*(range(size) for size in sizes)))
    for level in range(len(sizes)):
        children = math.prod(sizes[:level])
        # Of each element: one sum per parent at this level and child of it that is not the owner's.
        expected = sum(size for _, size in slices) * children * (sizes[level] - 1)
        assert sum(one.get(level, 0) for one in sent) == 4 * expected
    # And the slow level is crossed by those in the owner's column alone.
    for rank, one in enumerate(sent):
        expected = sum(size for owner, size in slices if places[owner][1:] == places[rank][1:] and owner != rank)
        assert one.get(0, 0) == 4 * expected
