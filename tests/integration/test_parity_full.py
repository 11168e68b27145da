# SPDX-License-Identifier: Apache-2.0
"""Every plan of four and eight ranks against every way of training.

World 4 (levels 2x2): for each layout, any three values of different axes meet in some case. World 8 (2x2x2) crosses
layouts, plans, ZeRO stages and types in full, and meets the other axes in turn; unusual training meets every plan
once, with the stages and types in turn.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import parity
import pytest
from combinations import each_combination
from parity import Case, assert_parity, levels_of
from process_pool import ProcessPool
from toy_model import ToyConfig

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(7200)]

ZERO_AND_TYPE = list(itertools.product((0, 1, 2), ("fp32", "bf16")))
CHECKPOINTING = (None, "reentrant", "nonreentrant")
LAYOUTS = {
    (2, 2): ((2, False), (2, True), (4, False)),  # (ep_size, data before expert)
    (2, 2, 2): ((2, False), (2, True), (4, False), (4, True), (8, False)),
}


def plans(sizes: Sequence[int], ep_size: int, data_before_expert: bool) -> list[parity.Levels]:
    choices = parity.domain_size_choices(sizes, ep_size=ep_size, data_before_expert=data_before_expert)
    return [levels_of(sizes, domain_sizes) for domain_sizes in choices]


def toy_for(dtype: str, **options: object) -> ToyConfig:
    return ToyConfig(routing="by_token" if dtype == "bf16" else "learned", **options)


@functools.cache
def settings_of(sizes: tuple[int, ...], layout: tuple[int, bool]) -> list[tuple[Any, ...]]:
    """Any three values of ZeRO stage and type, k, drops, accumulation, checkpointing and plan, in some setting."""
    axes = (ZERO_AND_TYPE, (1, 2, 3), (True, False), (1, 3), CHECKPOINTING, plans(sizes, *layout))
    return each_combination(axes, of=3)


def any_three(sizes: tuple[int, ...], layout: tuple[int, bool], zero_stage: int, dtype: str) -> Iterator[Case]:
    """Those of `settings_of` with this stage and type."""
    ep_size, data_before_expert = layout
    for zero_and_type, k, drop_tokens, accumulation, checkpointing, levels in settings_of(sizes, layout):
        if zero_and_type != (zero_stage, dtype):
            continue
        toy = toy_for(dtype, ep_size=ep_size, k=k, drop_tokens=drop_tokens, checkpointing=checkpointing)
        yield Case(
            levels=levels,
            toy=toy,
            zero_stage=zero_stage,
            dtype=dtype,
            accumulation=accumulation,
            use_data_before_expert_parallel=data_before_expert,
        )


def in_turn(sizes: Sequence[int], layout: tuple[int, bool], zero_stage: int, dtype: str) -> Iterator[Case]:
    """Every plan with another setting of the other axes; over stages, types and plans each value comes up."""
    ep_size, data_before_expert = layout
    settings = list(itertools.product((1, 2, 3), (True, False), (1, 3), CHECKPOINTING))  # 36
    first = 7 * ZERO_AND_TYPE.index((zero_stage, dtype))
    for index, levels in enumerate(plans(sizes, ep_size, data_before_expert)):
        # 11 and 7 share no factor with 36: a plan meets six settings, which hold every value.
        k, drop_tokens, accumulation, checkpointing = settings[(first + 11 * index) % len(settings)]
        toy = toy_for(dtype, ep_size=ep_size, k=k, drop_tokens=drop_tokens, checkpointing=checkpointing)
        yield Case(
            levels=levels,
            toy=toy,
            zero_stage=zero_stage,
            dtype=dtype,
            accumulation=accumulation,
            use_data_before_expert_parallel=data_before_expert,
        )


def unusual(sizes: Sequence[int], zero_stage: int, dtype: str) -> Iterator[Case]:
    """Idle experts, empty and uneven batches, evaluation, one expert a rank, other experts, clipping, SGD."""
    world_size = 2 ** len(sizes)
    # by_token needs one feature for each expert; the starved ones are those of the second rank.
    toy = toy_for(dtype, ep_size=world_size, drop_tokens=False)
    starved = tuple(range(8 // world_size, 2 * 8 // world_size))
    empty = (4, 0) + (4,) * (world_size - 2)
    uneven = tuple(2 + rank % 3 for rank in range(world_size))
    for levels in plans(sizes, world_size, data_before_expert=False):
        case = Case(levels=levels, toy=toy, zero_stage=zero_stage, dtype=dtype)
        yield replace(case, toy=replace(toy, starved_experts=starved), accumulation=3)
        for checkpointing in CHECKPOINTING:
            idle = replace(toy, checkpointing=checkpointing, starved_experts=starved)
            yield replace(case, toy=idle, batch_sizes=empty)
        yield replace(case, batch_sizes=uneven, accumulation=3)
        yield replace(case, evaluate=True, accumulation=3)
        yield replace(case, evaluate=True, prefetch_depth=0)
        yield replace(case, toy=replace(toy, num_experts=world_size, k=3))
        yield replace(case, toy=replace(toy, expert="swiglu", use_residual=True), gradient_clipping=0.5)
        yield replace(case, toy=replace(toy, num_layers=3), prefetch_depth=5, optimizer="sgd")
        for token_exchange in ("direct", "hierarchical"):
            yield replace(case, token_exchange=token_exchange)


@pytest.mark.parametrize(("zero_stage", "dtype"), ZERO_AND_TYPE)
@pytest.mark.parametrize("layout", LAYOUTS[2, 2], ids=lambda layout: f"ep{layout[0]}{'strided' * layout[1]}")
def test_four_ranks(pool4: ProcessPool, layout: tuple[int, bool], zero_stage: int, dtype: str) -> None:
    assert_parity(pool4, list(any_three((2, 2), layout, zero_stage, dtype)))


@pytest.mark.parametrize(("zero_stage", "dtype"), ZERO_AND_TYPE)
@pytest.mark.parametrize("layout", LAYOUTS[2, 2, 2], ids=lambda layout: f"ep{layout[0]}{'strided' * layout[1]}")
def test_eight_ranks(pool8: ProcessPool, layout: tuple[int, bool], zero_stage: int, dtype: str) -> None:
    assert_parity(pool8, list(in_turn((2, 2, 2), layout, zero_stage, dtype)))


@pytest.mark.parametrize(("zero_stage", "dtype"), ZERO_AND_TYPE)
def test_unusual_training_on_four_ranks(pool4: ProcessPool, zero_stage: int, dtype: str) -> None:
    assert_parity(pool4, list(unusual((2, 2), zero_stage, dtype)))


@pytest.mark.parametrize("turn", range(len(ZERO_AND_TYPE)))
def test_unusual_training_on_eight_ranks(pool8: ProcessPool, turn: int) -> None:
    cases = list(unusual((2, 2, 2), *ZERO_AND_TYPE[turn]))
    num_settings = len(cases) // len(plans((2, 2, 2), 8, data_before_expert=False))
    # Every case once over all turns, and another setting for each plan.
    in_this_turn = [
        case
        for index, case in enumerate(cases)
        if (index % num_settings + index // num_settings) % len(ZERO_AND_TYPE) == turn
    ]
    assert_parity(pool8, in_this_turn)
