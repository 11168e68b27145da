# SPDX-License-Identifier: Apache-2.0
"""The parity harness itself: the pool survives its ranks, and faults are seen."""

import os
from dataclasses import replace
from pathlib import Path

import parity
import pytest
import torch
from deepspeed import comm as dist
from marks import slow
from parity import Case, levels_of
from process_pool import ProcessPool, RemoteError
from toy_model import ToyConfig

pytestmark = pytest.mark.dist

LEVELS_2X2 = levels_of((2, 2), (1, 1))
BY_TOKEN = ToyConfig(routing="by_token")


# -- the pool ---------------------------------------------------------------------------------------------------


def sum_of_ranks(scale: int) -> float:
    value = torch.tensor([float(scale * dist.get_rank())])
    dist.all_reduce(value)
    return value.item()


def fail_on(failing_rank: int) -> None:
    print(f"output of rank {dist.get_rank()}")
    if dist.get_rank() == failing_rank:
        raise ValueError("this rank fails")
    dist.barrier()


def die_on(dying_rank: int) -> None:
    if dist.get_rank() == dying_rank:
        os._exit(7)
    dist.barrier()


def wait_for_nobody() -> None:
    if dist.get_rank() == 0:
        dist.barrier()


def environment() -> tuple[str, ...]:
    return tuple(os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "OMP_NUM_THREADS"))


def test_results_come_in_rank_order_from_workers_that_stay(pool4: ProcessPool) -> None:
    assert pool4.run(sum_of_ranks, scale=2) == [12.0] * 4
    before = pool4.pids
    assert pool4.run(environment) == [(str(rank), "4", str(rank), "4", "1") for rank in range(4)]
    assert pool4.pids == before


@pytest.mark.parametrize(
    ("function", "arguments", "limit_s", "expected"),
    [
        (fail_on, {"failing_rank": 1}, 30.0, ["ValueError: this rank fails", "output of rank 1", "barrier"]),
        (die_on, {"dying_rank": 0}, 30.0, ["died with exit code 7"]),
        slow(wait_for_nobody, {}, 1.0, ["rank 1 ---\nreturned normally", "still at work", "in wait_for_nobody"]),
    ],
)
def test_a_failed_run_shows_every_rank_and_the_next_one_gets_new_workers(
    function: object, arguments: dict, limit_s: float, expected: list[str]
) -> None:
    with ProcessPool(2) as pool:
        pool.run(sum_of_ranks, scale=1)
        before = pool.pids
        with pytest.raises(RemoteError) as caught:
            pool.run(function, timeout_s=limit_s, **arguments)
        for text in expected:
            assert text in str(caught.value)
        assert not any(Path(f"/proc/{pid}").exists() for pid in before)  # neither running nor a zombie
        assert pool.run(sum_of_ranks, scale=1) == [1.0] * 2
        assert not set(pool.pids) & set(before)
        pids, log_dir, port = pool.pids, pool._log_dir, pool._port
    # A closed pool leaves nothing.
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert not log_dir.exists()
    assert not list(Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"))


# -- tolerances -------------------------------------------------------------------------------------------------

TOLERANCE_CASES = [
    Case(levels=LEVELS_2X2, zero_stage=1),
    slow(
        Case(
            levels=LEVELS_2X2,
            toy=ToyConfig(k=1, drop_tokens=False, expert="swiglu", use_residual=True),
            optimizer="sgd",
        )
    ),
    slow(
        Case(levels=LEVELS_2X2, toy=ToyConfig(k=3, num_layers=3), zero_stage=2, accumulation=3, gradient_clipping=0.5)
    ),
    slow(Case(levels=LEVELS_2X2, toy=BY_TOKEN, dtype="bf16", zero_stage=1, optimizer="sgd")),
    slow(Case(levels=LEVELS_2X2, toy=replace(BY_TOKEN, k=3), dtype="bf16", zero_stage=2, accumulation=3)),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", TOLERANCE_CASES, ids=lambda case: case.id)
def test_another_order_of_sums_is_inside_the_tolerance_and_a_wrong_gradient_is_not(
    pool4: ProcessPool, case: Case
) -> None:
    results = pool4.run(parity.run_other_layout, case=case, ep_size=2)
    assert results[0].distance > 0.0  # the layouts do differ
    assert parity.numeric_problems(case, results) == []
    for factor in (0.5, 2.0) if case.dtype == "bf16" else (0.999, 1.001):
        results = pool4.run(parity.run_with_fault, case=case, gradient_factor=factor, where=3)
        assert parity.numeric_problems(case, results) != []
