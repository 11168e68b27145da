# SPDX-License-Identifier: Apache-2.0
"""Training with the "hybridep" block gives what unmodified DeepSpeed gives: the cases that matter most, in minutes.

Every value of every axis is met, and the pairs that share code or state. test_parity_full.py holds the whole grid.
"""

from dataclasses import replace

import pytest
from parity import Case, assert_parity, levels_of
from process_pool import ProcessPool
from toy_model import ToyConfig

pytestmark = pytest.mark.dist

BY_TOKEN = ToyConfig(routing="by_token")


def world4(*domain_sizes: int, **options: object) -> Case:
    return Case(levels=levels_of((2, 2), domain_sizes), **options)


def world8(*domain_sizes: int, ep_size: int = 8, toy: ToyConfig | None = None, **options: object) -> Case:
    toy = replace(toy or ToyConfig(), ep_size=ep_size)
    return Case(levels=levels_of((2, 2, 2), domain_sizes), toy=toy, **options)


@pytest.mark.core
def test_every_plan_of_four_ranks(pool4: ProcessPool) -> None:
    # SGD sees the scale of a gradient at once; one plain run serves all four.
    assert_parity(pool4, [world4(a, b, optimizer="sgd", steps=3) for a in (1, 2) for b in (1, 2)])


@pytest.mark.core
def test_zero_stages_with_accumulation(pool4: ProcessPool) -> None:
    stage0 = world4(2, 1, zero_stage=0, accumulation=2, steps=2)
    stage1 = world4(2, 1, zero_stage=1, accumulation=2, gradient_clipping=0.5, steps=2)
    stage2 = world4(2, 2, zero_stage=2, accumulation=3, steps=2)
    on_host = [replace(one, offload="hybrid") for one in (stage1, stage2)]
    assert_parity(pool4, [stage0, stage1, on_host[0], stage2, on_host[1]])


@pytest.mark.slow
@pytest.mark.core
def test_optimizer_on_the_host_in_both_runs(pool4: ProcessPool) -> None:
    small = ToyConfig(ep_size=2)
    cases = [
        world4(2, 1, zero_stage=1, offload="both"),
        world4(1, 2, zero_stage=1, toy=small, gradient_clipping=0.1, offload="both"),
        world4(2, 1, zero_stage=2, accumulation=3, gradient_clipping=0.1, offload="both"),
        world4(2, 2, zero_stage=2, optimizer="sgd", dense_sync="deepspeed", offload="both"),
        world4(2, 1, zero_stage=2, toy=ToyConfig(k=2, starved_experts=(2, 3)), accumulation=2, offload="both"),
        world4(2, 2, zero_stage=1, dtype="bf16", toy=replace(BY_TOKEN, k=3), accumulation=2, offload="both"),
        world4(1, 2, zero_stage=2, dtype="bf16", toy=BY_TOKEN, optimizer="sgd", offload="both"),
    ]
    assert_parity(pool4, cases)


def test_checkpointing_repeats_no_exchange_of_experts_and_loses_no_gradient(pool4: ProcessPool) -> None:
    toy = ToyConfig(num_layers=3)
    cases = [
        world4(2, 1, toy=replace(toy, checkpointing="nonreentrant"), zero_stage=2, accumulation=2, steps=2),
        world4(1, 2, toy=replace(toy, checkpointing="reentrant"), prefetch_depth=5, evaluate=True, steps=2),
    ]
    assert_parity(pool4, cases)


@pytest.mark.slow
def test_more_checkpointing(pool4: ProcessPool) -> None:
    toy = ToyConfig(num_layers=3)
    cases = [
        world4(2, 1, toy=replace(toy, checkpointing="reentrant"), zero_stage=2, accumulation=3),
        world4(2, 2, toy=replace(toy, checkpointing="nonreentrant"), prefetch_depth=0),
    ]
    assert_parity(pool4, cases)


@pytest.mark.slow
@pytest.mark.core
def test_routing(pool4: ProcessPool) -> None:
    cases = [
        world4(2, 1, toy=ToyConfig(k=1, drop_tokens=True)),
        world4(2, 1, toy=ToyConfig(k=3, drop_tokens=True, expert="swiglu", use_residual=True)),
        # A rank whose experts get no token at all.
        world4(2, 1, toy=ToyConfig(k=2, starved_experts=(2, 3)), zero_stage=2, accumulation=2),
    ]
    assert_parity(pool4, cases)


@pytest.mark.slow
def test_more_routing(pool4: ProcessPool) -> None:
    cases = [
        world4(2, 1, toy=ToyConfig(k=1, drop_tokens=False)),
        world4(1, 2, toy=ToyConfig(k=2, drop_tokens=False)),
        world4(2, 1, toy=ToyConfig(k=2, num_experts=4)),  # one expert a rank
        world4(1, 1, toy=ToyConfig(k=3, drop_tokens=False)),
        world4(2, 2, toy=ToyConfig(k=2, starved_experts=(0, 1), checkpointing="nonreentrant"), zero_stage=2),
    ]
    assert_parity(pool4, cases)


@pytest.mark.slow
def test_bf16(pool4: ProcessPool) -> None:
    cases = [
        world4(2, 2, dtype="bf16", toy=replace(BY_TOKEN, k=3), zero_stage=1, accumulation=2),
        world4(1, 2, dtype="bf16", toy=replace(BY_TOKEN, checkpointing="nonreentrant"), zero_stage=2, optimizer="sgd"),
    ]
    assert_parity(pool4, cases)


@pytest.mark.slow
def test_groups_smaller_than_the_world(pool4: ProcessPool) -> None:
    small = ToyConfig(ep_size=2)
    cases = [
        world4(1, 2, toy=small, zero_stage=1),
        world4(2, 1, toy=small, zero_stage=2, accumulation=2, use_data_before_expert_parallel=True),
    ]
    assert_parity(pool4, cases)


def test_uneven_and_empty_batches(pool4: ProcessPool) -> None:
    toy = ToyConfig(drop_tokens=False)
    cases = [
        world4(2, 1, toy=toy, batch_sizes=(4, 0, 6, 3), zero_stage=2, accumulation=2, steps=2),
        world4(1, 2, toy=replace(toy, checkpointing="nonreentrant"), batch_sizes=(0, 4, 4, 4), zero_stage=2, steps=2),
    ]
    assert_parity(pool4, cases)


@pytest.mark.slow
def test_evaluation_between_steps(pool4: ProcessPool) -> None:
    assert_parity(pool4, [world4(2, 1, zero_stage=1, accumulation=2, evaluate=True)])


@pytest.mark.slow
def test_more_stages_and_evaluation(pool4: ProcessPool) -> None:
    cases = [
        world4(2, 1, dtype="bf16", toy=BY_TOKEN, zero_stage=0),
        world4(1, 1, toy=ToyConfig(ep_size=2), use_data_before_expert_parallel=True),
        world4(2, 1, toy=ToyConfig(drop_tokens=False), batch_sizes=(4, 2, 6, 3), zero_stage=1),
        world4(2, 1, zero_stage=2, accumulation=3),
        world4(2, 2, zero_stage=2, accumulation=1, gradient_clipping=0.5),
        world4(2, 2, evaluate=True),
    ]
    assert_parity(pool4, cases)


@pytest.mark.slow
@pytest.mark.core
def test_tokens_left_to_deepspeed(pool4: ProcessPool) -> None:
    cases = [
        world4(1, 1, token_exchange="deepspeed", dense_sync=dense_sync, zero_stage=1, accumulation=2)
        for dense_sync in ("deepspeed", "hierarchical")
    ]
    as_deepspeed, by_level = assert_parity(pool4, cases)
    for result in (*as_deepspeed, *by_level):
        assert result.stats is not None
        assert result.stats["layers"] == []
    # Nothing of the arithmetic is ours where dense gradients keep DeepSpeed's way too.
    assert all(result.hybrid_losses == result.plain_losses and result.distance == 0 for result in as_deepspeed)


def test_two_ranks_and_one_level(pool2: ProcessPool) -> None:
    toy = ToyConfig(ep_size=2)
    cases = [Case(levels=levels_of((2,), (size,)), toy=toy, kernels="reference", steps=3) for size in (1, 2)]
    assert_parity(pool2, cases)


@pytest.mark.slow
def test_three_levels(pool8: ProcessPool) -> None:
    cases = [
        world8(2, 1, 1, zero_stage=2, token_exchange="hierarchical"),
        world8(2, 1, 1, zero_stage=2, token_exchange="direct"),
        world8(1, 2, 2, zero_stage=1, accumulation=3),
        world8(2, 2, 1, ep_size=4, use_data_before_expert_parallel=True),
    ]
    assert_parity(pool8, cases)
