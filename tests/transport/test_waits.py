# SPDX-License-Identifier: Apache-2.0
"""How often a step waits for a long link: messages in any order, numbers that travel together, and counts."""

import time
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from parity import Case, levels_of
from process_pool import ProcessPool
from torch import distributed as dist
from toy_model import ToyConfig

import ds_hybridep
from ds_hybridep.geometry.cluster import Cluster, Level, LinkSpeed

pytestmark = pytest.mark.dist

LIMIT_S = 100.0


def exchange_at_random(seed: int, connections: int) -> list[Any]:
    """Transfers of several messages for a few purposes, several at a time, waited for in another order.

    Returns what was wrong, and the error of a transfer whose peer has closed its channels meanwhile.
    """
    from moe_refs import open_transport

    from ds_hybridep.errors import CommunicationError
    from ds_hybridep.transport.channels import Purpose

    rank, random, wrong, error = dist.get_rank(), Random(seed), [], ""
    link = LinkSpeed(None, None, connections)
    transport = open_transport(Cluster((Level("dc", 2, link), Level("gpu", 1))), timeout_s=LIMIT_S)
    channel = transport.channel("several", (0, 1), background=True)
    sizes = {layer: [random.choice((1, 7, 300, 20_000)) for _ in range(random.randint(1, 3))] for layer in "abcd"}
    for step in range(12):
        started = []
        for layer in random.choices("abcd", k=6):
            number = 100 * step + len(started)
            sends = [(1 - rank, torch.full((size,), float(number + rank))) for size in sizes[layer]]
            arriving = [torch.full((size,), -1.0) for size in sizes[layer]]
            receives = [(1 - rank, one) for one in arriving]
            started.append(
                (channel.start(sends, receives, Purpose("dense", "test", layer)), arriving, number + 1 - rank)
            )
        random.shuffle(started)
        for transfer, arriving, number in started:
            transfer.wait()
            if not all(bool((one == number).all()) for one in arriving):
                wrong.append((step, number, arriving))
    if rank == 0:
        time.sleep(0.2)  # the other one closes with receives that stand ready, and messages on their way to it
        try:
            for _ in range(3):
                channel.start([(1, torch.ones(7))], [(1, torch.ones(7))], Purpose("dense", "test", "a")).wait()
        except CommunicationError as failure:
            error = str(failure)
    transport.close()
    return [wrong, error]


@pytest.mark.parametrize(("seed", "connections"), [(0, 1), (1, 3), (2, 2)])
def test_every_message_reaches_its_receiver_and_a_peer_that_closes_is_an_error(
    pool2: ProcessPool, seed: int, connections: int
) -> None:
    (wrong, error), (wrong_there, _) = pool2.run(exchange_at_random, seed=seed, connections=connections)
    assert wrong == wrong_there == []
    assert "failed" in error or "time limit" in error


def agree_on_numbers() -> list[list[float]]:
    from moe_refs import open_transport

    from ds_hybridep.sync.encoding import Encoding
    from ds_hybridep.sync.group_sync import GroupSync
    from ds_hybridep.sync.transaction import Transaction

    transport = open_transport(Cluster((Level("dc", 2), Level("gpu", 2))), timeout_s=LIMIT_S)
    nothing = Encoding((None, None), (None, None))
    group = GroupSync(transport, range(4), "numbers", nothing, transaction=Transaction(), device=torch.device("cpu"))
    rank, is_max = dist.get_rank(), torch.tensor([False, True, False])
    found = [
        group.reduce_numbers(torch.tensor([rank + step, rank * step, 0.1 * rank], dtype=torch.float64), is_max)
        for step in range(3)
    ]
    waits = dict(transport.traffic.waits)
    transport.close()
    return [*(numbers.tolist() for numbers in found), [waits[0], waits[1]]]


def test_sums_and_maxima_of_numbers_are_equal_on_all_ranks_for_one_wait_per_level(pool4: ProcessPool) -> None:
    results = pool4.run(agree_on_numbers)
    assert all(result == results[0] for result in results)
    for step, (total, largest, tenths) in enumerate(results[0][:3]):
        assert (total, largest, tenths) == (6 + 4 * step, 3 * step, pytest.approx(0.6))
    assert results[0][3] == [3, 3]


def waits_of_steps(cases: list[Case]) -> list[float]:
    """Waits in a row over the slow level, per step in the middle of a training."""
    from moe_refs import toy_engine, train_step

    found = []
    for case in cases:
        with toy_engine(case) as engine:
            counts = []
            for step in range(4):
                train_step(engine, case, step)
                counts.append(ds_hybridep.stats(engine)["levels"][0]["waits"])
            found.append((counts[3] - counts[1]) / 2)
            time.sleep(0.01)
    return found


@pytest.mark.slow
def test_a_step_waits_as_often_with_many_layers_as_with_few(pool4: ProcessPool) -> None:
    few = Case(levels=levels_of((2, 2), (2, 1)), toy=ToyConfig(num_layers=2), zero_stage=1)
    many = replace(few, toy=ToyConfig(num_layers=5))
    cases = [
        few,
        many,
        replace(many, toy=replace(many.toy, drop_tokens=False)),  # the gate asks nobody for its capacity
        replace(many, accumulation=2, gradient_clipping=0.5),
        replace(many, zero_stage=2),
        replace(many, zero_stage=0),
    ]
    # Gradients of experts; those of all else; norms; and new weights, all together.  ZeRO 0 gathers sums, and has no
    # norm to agree on.
    assert pool4.run(waits_of_steps, cases=cases) == [[4, 4, 4, 4, 4, 4]] * 4
