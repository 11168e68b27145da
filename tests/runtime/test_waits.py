# SPDX-License-Identifier: Apache-2.0
"""How often a step waits for a long link: messages in any order, numbers that travel together, and counts."""

import time
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parity import Case, levels_of
from process_pool import ProcessPool
from torch import distributed as dist
from toy_model import ToyConfig

import ds_hybridep
from ds_hybridep.integration.agreements import Agreements
from ds_hybridep.plan.cluster import Cluster, Level, Link
from ds_hybridep.transport.connections import MOST_BYTES, NUM_LANES, NUM_TURNS, tag_of

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

LIMIT_S = 10.0


@given(st.sets(st.tuples(st.integers(1, NUM_LANES - 1), st.integers(0, 2**19)), min_size=1, max_size=50))
def test_tags_are_distinct_and_fit_into_31_bits(messages: set[tuple[int, int]]) -> None:
    tags = {tag_of(*message) for message in messages}
    assert len(tags) == len(messages)
    assert all(0 < tag < 2**31 for tag in tags)
    assert tag_of(0, 5) == tag_of(NUM_LANES, 5) == 0  # no lane


def exchange_in_lanes(num_rounds: int) -> dict[str, Any]:
    """Both ranks send in two lanes, one of them in another order, with two sizes in turn."""
    from moe_refs import open_transport

    from ds_hybridep.transport.channels import Purpose

    rank, wrong, ready = dist.get_rank(), [], []
    transport = open_transport(Cluster((Level("dc", 2), Level("gpu", 1))), timeout_s=LIMIT_S)
    channel = transport.channel("lanes", (0, 1), background=True)
    for step in range(num_rounds):
        size = 5 + 3 * (step % 2)
        started = []
        for lane in (1, 2) if rank == 0 else (2, 1):
            arriving = torch.empty(size)
            value = float(100 * lane + 10 * step + rank)
            sends, receives = [(1 - rank, torch.full((size,), value))], [(1 - rank, arriving)]
            started.append((channel.start(sends, receives, Purpose("dense", "test"), lane=lane), arriving, lane))
        for transfer, arriving, lane in started:
            transfer.wait()
            if not bool((arriving == 100 * lane + 10 * step + 1 - rank).all()):
                wrong.append((step, lane, arriving.tolist()))
        ready.append(sum(map(len, channel.connections._standing._waiting.values())))
    dist.barrier()  # no receive can stand ready for a rank that has closed its channels
    transport.close()
    return {"wrong": wrong, "ready": ready}


def test_messages_of_lanes_match_in_any_order_and_are_expected_from_the_second_on(pool2: ProcessPool) -> None:
    for result in pool2.run(exchange_in_lanes, num_rounds=6):
        assert result["wrong"] == []
        assert result["ready"] == [2, 4, 4, 4, 4, 4]  # one for each lane and size


def exchange_at_random(seed: int, room_bytes: int, connections: int) -> list[Any]:
    """Transfers of several messages in a few lanes, several at a time in one lane, waited for in another order.

    Returns what was wrong, and the error of a transfer whose peer has closed its channels meanwhile.
    """
    from moe_refs import open_transport

    from ds_hybridep.errors import CommunicationError
    from ds_hybridep.transport.channels import Purpose
    from ds_hybridep.transport.connections import Budget

    rank, random, wrong, error = dist.get_rank(), Random(seed), [], ""
    link = Link(None, None, connections)
    transport = open_transport(Cluster((Level("dc", 2, link), Level("gpu", 1))), timeout_s=LIMIT_S)
    transport.budget = Budget(room_bytes)
    channel, purpose = transport.channel("lanes", (0, 1), background=True), Purpose("dense", "test")
    sizes = {
        lane: [random.choice((1, 7, 300, 20_000)) for _ in range(random.randint(1, 3))] for lane in range(4)
    }  # 0: none
    for step in range(12):
        started = []
        for lane in random.choices(range(4), k=6):
            number = 100 * step + len(started)
            sends = [(1 - rank, torch.full((size,), float(number + rank))) for size in sizes[lane]]
            arriving = [torch.full((size,), -1.0) for size in sizes[lane]]
            receives = [(1 - rank, one) for one in arriving]
            started.append((channel.start(sends, receives, purpose, lane=lane), arriving, number + 1 - rank))
        random.shuffle(started)
        for transfer, arriving, number in started:
            transfer.wait()
            if not all(bool((one == number).all()) for one in arriving):
                wrong.append((step, number, arriving))
    if rank == 0:
        time.sleep(0.2)  # the other one closes with receives that stand ready, and messages on their way to it
        try:
            for _ in range(3):
                channel.start([(1, torch.ones(7))], [(1, torch.ones(7))], purpose, lane=1).wait()
        except CommunicationError as failure:
            error = str(failure)
    transport.close()
    return [wrong, error]


@pytest.mark.parametrize(
    ("seed", "room_bytes", "connections"), [(0, 2**20, 1), (1, 2**20, 3), (2, 1500, 2), (3, 0, 1)]
)
def test_lanes_bring_every_message_to_its_receiver_and_a_peer_that_closes_is_an_error(
    pool2: ProcessPool, seed: int, room_bytes: int, connections: int
) -> None:
    (wrong, error), (wrong_there, _) = pool2.run(
        exchange_at_random, seed=seed, room_bytes=room_bytes, connections=connections
    )
    assert wrong == wrong_there == []
    assert "failed" in error or "time limit" in error


def exchange_in_rooms(seed: int, connections: int, budget_bytes: int) -> dict[str, Any]:
    """Two messages to each rank in rooms that change from step to step, mostly longer than the messages."""
    from moe_refs import open_transport

    from ds_hybridep.transport.channels import Purpose
    from ds_hybridep.transport.connections import Budget

    rank, random, wrong = dist.get_rank(), Random(seed), []
    peers = [other for other in range(dist.get_world_size()) if other != rank]
    link = Link(None, None, connections)
    transport = open_transport(Cluster((Level("dc", 2, link), Level("gpu", 2))), timeout_s=LIMIT_S)
    transport.foreground_budget = budget = Budget(budget_bytes)
    channel, purpose = transport.channel("rooms", range(4)), Purpose("tokens", "test")
    num_ready = []
    for step in range(24):
        # By receiver, sender and message: the room for it, and its length.
        room = torch.tensor([random.choice((0, 7, 300, 2**17)) * random.randint(1, 3) for _ in range(32)]).view(
            4, 4, 2
        )
        length = (
            torch.tensor([random.choice((0.1, 0.8, 1.0)) for _ in range(32)]).view(4, 4, 2).mul(room).ceil().long()
        )

        def message(to: int, sender: int, index: int, step: int = step, length: torch.Tensor = length) -> torch.Tensor:
            return (torch.arange(int(length[to, sender, index])) + step + 7 * sender + index).to(torch.uint8)

        sends = [(to, message(to, rank, index)) for to in peers for index in range(2)]
        rooms = [int(room[to, rank, index]) for to in peers for index in range(2)]
        arriving = {
            (peer, index): torch.zeros(int(room[rank, peer, index]), dtype=torch.uint8)
            for peer in peers
            for index in range(2)
        }
        receives = [(peer, tensor) for (peer, _), tensor in arriving.items()]
        channel.start(sends, receives, purpose, counts_receives=False, rooms=rooms).wait()
        for (peer, index), tensor in arriving.items():
            wanted = message(rank, peer, index)
            if not torch.equal(tensor[: len(wanted)], wanted):
                wrong.append((step, peer, index))
        waiting = channel.connections._standing._waiting.values()
        ready = [place for queue in waiting for _, place in queue]
        num_ready.append(len(ready))
        assert sum(map(len, ready)) == budget_bytes - budget._left  # what is not posted is not counted
    dist.barrier()
    transport.close()
    return {"wrong": wrong, "ready": num_ready}


@pytest.mark.parametrize(
    ("seed", "connections", "budget_bytes"), [(0, 1, MOST_BYTES), (1, 3, MOST_BYTES), (2, 1, 2**18), (3, 2, 2**19)]
)
def test_messages_may_be_shorter_than_rooms_that_change(
    pool4: ProcessPool, seed: int, connections: int, budget_bytes: int
) -> None:
    for result in pool4.run(exchange_in_rooms, seed=seed, connections=connections, budget_bytes=budget_bytes):
        assert result["wrong"] == []
        assert result["ready"][-1] > 0


class _Group:
    """Of one rank: what it agrees on is its own."""

    def reduce_numbers(self, numbers: torch.Tensor, is_max: torch.Tensor) -> torch.Tensor:
        return numbers


def test_what_was_agreed_on_ahead_is_no_answer_to_another_question() -> None:
    agreements, group = Agreements(), _Group()
    agreements.prepare(lambda: agreements.ask(group, torch.tensor([3.0]), False))
    found = torch.tensor([5.0])
    agreements.ask(group, found, True)  # nobody had announced it
    assert found.item() == 5.0
    assert not agreements.is_under_way


def agree_on_numbers() -> list[list[float]]:
    from moe_refs import open_transport

    from ds_hybridep.sync.dense import GroupSync
    from ds_hybridep.sync.feedback import Encoding
    from ds_hybridep.sync.gradients import StepChanges

    transport = open_transport(Cluster((Level("dc", 2), Level("gpu", 2))), timeout_s=LIMIT_S)
    nothing = Encoding((None, None), (None, None))
    group = GroupSync(transport, range(4), "numbers", nothing, StepChanges(), torch.device("cpu"))
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


def ready_of_tokens(case: Case) -> dict[str, int]:
    """After two steps, how many receives stand ready for tokens, by the name of the channel."""
    from moe_refs import toy_engine, train_step

    with toy_engine(case) as engine:
        for step in range(2):
            train_step(engine, case, step)
        channels = engine.__dict__["_hybridep_attachment"].runtime.transport._channels.values()
        return {
            channel.name: sum(map(len, channel.connections._standing._waiting.values()))
            for channel in channels
            if "tokens" in channel.name
        }


def test_tokens_are_awaited_before_they_are_sent_over_all_but_the_fastest_level(pool4: ProcessPool) -> None:
    case = Case(levels=levels_of((2, 2), (1, 1)), toy=ToyConfig(num_layers=2), zero_stage=1)
    for ready in pool4.run(ready_of_tokens, case=case):
        slow, fast = (ready[name] for name in sorted(ready))
        assert slow >= NUM_TURNS
        assert fast == 0


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
