# SPDX-License-Identifier: Apache-2.0
"""Bytes over each level, and the job's record: counters against closed forms of the plan and of what was routed."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from marks import slow
from moe_refs import (
    FFN,
    HIDDEN,
    MoeCase,
    Routing,
    build_case,
    forward_case,
    level_between,
    loss_of,
    routing_of,
    token_bytes,
    toy_engine,
    train_step,
    travel,
)
from parity import Case, levels_of
from process_pool import Pools, ProcessPool
from torch import distributed as dist
from toy_model import ToyConfig

import ds_hybridep
from ds_hybridep.tokens.layer import HybridMoE

pytestmark = pytest.mark.dist

ITEM_BYTES = {"float32": 4, "float64": 8}
UP_NUMEL = HIDDEN * FFN + FFN
DOWN_NUMEL = FFN * HIDDEN + HIDDEN
EVEN = (9, 9, 9, 9)
UNEVEN = (7, 0, 12, 5)
UNEVEN_8 = (5, 0, 9, 3, 1, 6, 0, 4)


# -- counters of the runtime ------------------------------------------------------------------------------------


def train_and_count(case: MoeCase, applied: Sequence[bool], accumulation: int = 1) -> dict[str, Any]:
    """This rank's record after one step per entry of `applied` (False: the optimizer skipped it)."""
    rank, micro_step = dist.get_rank(), 0
    runtime, _ = build_case(case, rank, lambda: micro_step == accumulation - 1)
    for was_applied in applied:
        for micro_step in range(accumulation):  # noqa: B007 (read by the boundary above)
            output, _, _ = forward_case(case, rank, runtime)
            loss_of(case, rank, output).backward()
        runtime.before_step()
        runtime.after_step(was_applied=was_applied)
    runtime.migration.finish()  # what is shipped over several levels is counted level by level, as it moves on
    record = runtime.statistics.local()
    runtime.finish()
    runtime.close()
    return record


def assert_counted(
    pool: ProcessPool, case: MoeCase, applied: Sequence[bool] = (True, True), accumulation: int = 1
) -> None:
    records = pool.run(train_and_count, case=case, applied=applied, accumulation=accumulation)
    calls = len(applied) * accumulation
    routings = [routing_of(case, layer) for layer in range(case.num_layers)]
    tokens = expected_tokens(case, routings, HIDDEN * ITEM_BYTES[case.dtype])
    for rank, record in enumerate(records):
        for level, counted in enumerate(record["levels"]):
            weights, gradients = expected_experts(case, level, sum(applied), len(applied))
            expected = {
                "tokens": calls * tokens[rank, level],
                "expert_weights": weights,
                "expert_gradients": gradients,
                "dense": None,
                "control": 0,
            }
            assert counted["sent_bytes"] == expected, (rank, level)
        assert_rows_counted(case, rank, record, routings, calls)
    for level in range(len(case.sizes)):
        for kind in ("tokens", "expert_weights", "expert_gradients"):
            sent, received = (
                [record["levels"][level][direction][kind] for record in records]
                for direction in ("sent_bytes", "received_bytes")
            )
            assert sum(sent) == sum(received)
            assert all(
                (record["levels"][level]["sent_messages"][kind] > 0) == (b > 0)
                for record, b in zip(records, sent, strict=True)
            )


def expected_tokens(case: MoeCase, routings: Sequence[Routing], row_bytes: int) -> Counter[tuple[int, int]]:
    """(rank, level) -> bytes of one forward and backward of all layers."""
    total: Counter[tuple[int, int]] = Counter()
    for routing in routings:
        for group in dict.fromkeys(case.group_of(rank) for rank in range(case.world_size)):
            total += token_bytes(case, group, routing, row_bytes=row_bytes)
    return total


def expected_experts(case: MoeCase, level: int, num_applied: int, num_steps: int) -> tuple[int, int]:
    """Bytes of weights and gradients that a rank sends over `level`.

    Weights go to the S_l - 1 neighbours at level l, those that came over slower levels with the own ones; gradients
    come back the same way. The first forward ships all parameters, each applied step the trainable ones.
    """
    copies = case.domain_sizes[level] - 1
    for slower in case.domain_sizes[:level]:
        copies *= slower
    num_local = case.num_experts // len(case.group_of(0))
    trainable_bytes = (UP_NUMEL + (0 if case.is_down_frozen else DOWN_NUMEL)) * ITEM_BYTES[case.dtype]
    all_bytes = (UP_NUMEL + DOWN_NUMEL) * ITEM_BYTES[case.dtype]
    weights = case.num_layers * copies * num_local * (all_bytes + num_applied * trainable_bytes)
    return weights, case.num_layers * copies * num_local * num_steps * trainable_bytes


def assert_rows_counted(case: MoeCase, rank: int, record: dict, routings: Sequence[Routing], calls: int) -> None:
    for counted, routing in zip(record["layers"], routings, strict=True):
        journey = travel(case, case.group_of(rank), routing)
        sent = sum(
            n for moved in journey.moved for (sender, receiver), n in moved.items() if sender == rank != receiver
        )
        computed = sum(expert >= 0 for row in journey.rows[rank] for expert in row.slots)
        assert (counted["calls"], counted["rows_sent"], counted["rows_computed"]) == (
            calls,
            calls * sent,
            calls * computed,
        )


def case_2x2(*domain_sizes: int, **options: Any) -> MoeCase:
    return MoeCase(sizes=(2, 2), domain_sizes=domain_sizes, **{"num_tokens": UNEVEN, **options})


CASES = [
    *(case_2x2(a, b, exchange=exchange) for a in (1, 2) for b in (1, 2) for exchange in ("direct", "hierarchical")),
    case_2x2(1, 1, exchange="hierarchical", top_k=3, num_tokens=EVEN, has_drops=False),
    case_2x2(2, 1, top_k=1, num_layers=3, prefetch_depth=1),
    case_2x2(2, 1, dtype="float64"),
    case_2x2(2, 2, is_down_frozen=True, num_layers=2),
    case_2x2(2, 1, num_tokens=(0, 0, 0, 0)),
    case_2x2(2, 1, groups=((0, 2), (1, 3))),
    MoeCase(sizes=(4,), domain_sizes=(2,), num_tokens=UNEVEN),
    MoeCase(sizes=(4,), domain_sizes=(4,), num_tokens=UNEVEN),
]


# Each plan with one of the exchanges here.
REPEATED = (1, 2, 5, 6, 10, 15)


@pytest.mark.parametrize(
    "case", [slow(one) if place in REPEATED else one for place, one in enumerate(CASES)], ids=lambda case: case.id
)
def test_bytes_over_each_level_equal_the_closed_form(pool4: ProcessPool, case: MoeCase) -> None:
    assert_counted(pool4, case)


CASES_8 = [
    MoeCase(sizes=(2, 2, 2), domain_sizes=(1, 1, 1), num_tokens=UNEVEN_8, exchange="hierarchical", top_k=3),
    MoeCase(sizes=(2, 2, 2), domain_sizes=(1, 1, 1), num_tokens=UNEVEN_8, top_k=3),
    MoeCase(sizes=(2, 2, 2), domain_sizes=(2, 1, 1), num_tokens=UNEVEN_8, exchange="hierarchical"),
    MoeCase(sizes=(2, 2, 2), domain_sizes=(2, 2, 2), num_tokens=UNEVEN_8, num_layers=2),
    MoeCase(sizes=(2, 2, 2), domain_sizes=(2, 1, 2), num_tokens=UNEVEN_8),
    MoeCase(sizes=(4, 2), domain_sizes=(2, 2), num_tokens=UNEVEN_8),
    MoeCase(sizes=(2, 2, 2), domain_sizes=(2, 1, 1), num_tokens=UNEVEN_8, groups=((0, 2, 4, 6), (1, 3, 5, 7))),
]


@pytest.mark.parametrize(
    "case", [one if place in (0, 4, 6) else slow(one) for place, one in enumerate(CASES_8)], ids=lambda case: case.id
)
def test_bytes_over_three_levels_equal_the_closed_form(pool8: ProcessPool, case: MoeCase) -> None:
    assert_counted(pool8, case)


def test_experts_travel_once_per_step_however_often_tokens_do(pool4: ProcessPool) -> None:
    assert_counted(pool4, case_2x2(2, 1, num_layers=2), applied=(True, True), accumulation=3)


def test_a_skipped_step_ships_no_weights(pool4: ProcessPool) -> None:
    assert_counted(pool4, case_2x2(2, 2), applied=(True, False, True, False))


@pytest.mark.parametrize("exchange", ["direct", slow("hierarchical")])
@pytest.mark.parametrize("domain_sizes", [(2, 1), slow((2, 2))], ids=str)
def test_no_token_crosses_the_slow_level_when_a_domain_spans_it(
    pool4: ProcessPool, domain_sizes: tuple[int, ...], exchange: str
) -> None:
    """Once more without any reference: not a byte and not a message."""
    case = case_2x2(*domain_sizes, exchange=exchange, num_tokens=EVEN)
    for record in pool4.run(train_and_count, case=case, applied=(True, True)):
        slow = record["levels"][0]
        assert [slow[name]["tokens"] for name in ("sent_bytes", "received_bytes", "sent_messages")] == [0, 0, 0]
        assert slow["sent_bytes"]["expert_weights"] > 0


def test_a_token_that_needs_several_experts_of_a_domain_is_sent_once(pool4: ProcessPool) -> None:
    """Less than a row for each (token, remote expert) pair, both ways, forward and backward."""
    case = case_2x2(1, 2, top_k=4, num_tokens=EVEN, has_drops=False)
    row_bytes = HIDDEN * 4
    records = pool4.run(train_and_count, case=case, applied=(True,))
    pairs = sum(
        (expert // 4 != rank // 2)
        for rank, tokens in enumerate(routing_of(case))
        for experts in tokens
        for expert in experts
    )
    sent_bytes = sum(record["levels"][0]["sent_bytes"]["tokens"] for record in records)
    num_remote = sum(
        any(expert // 4 != rank // 2 for expert in experts)
        for rank, tokens in enumerate(routing_of(case))
        for experts in tokens
    )
    assert 4 * num_remote * row_bytes <= sent_bytes < 4 * pairs * row_bytes
    # Metadata apart (a count to each of four peers; ids and gates there, gate gradients back), it is that bound.
    assert sent_bytes == num_remote * (4 * row_bytes + 12 * case.top_k) + 4 * 16


def verify_once(case: MoeCase) -> list[dict[str, int]]:
    rank = dist.get_rank()
    runtime, _ = build_case(case, rank)
    forward_case(case, rank, runtime)
    runtime.verify()
    record = runtime.statistics.local()
    runtime.finish()
    runtime.close()
    return [
        {direction: level[direction]["control"] for direction in ("sent_bytes", "received_bytes")}
        for level in record["levels"]
    ]


def test_checksums_are_counted_as_control(pool4: ProcessPool) -> None:
    table_bytes = 4 * 2 * 8  # two sums for each of the four owners in the domain
    both = {"sent_bytes": table_bytes, "received_bytes": table_bytes}
    twice = {name: 2 * num_bytes for name, num_bytes in both.items()}
    assert pool4.run(verify_once, case=case_2x2(2, 2)) == [[twice, both]] * 4


# -- stats and the job's record of an engine --------------------------------------------------------------------

TOY = ToyConfig()
TOY_EXPERT_BYTES = 4 * (TOY.hidden * TOY.ffn + TOY.ffn + TOY.ffn * TOY.hidden + TOY.hidden)
TOY_ROW_BYTES = 4 * TOY.hidden
TOY_CAPACITY = 8  # 4 sequences of 8 tokens, 2 of 8 experts each, capacity factor 1
# float64: of two levels three counts by kind, plain EP and waits; seconds waited; by layer three counts, ten numbers
# on codecs, rows of 8 experts.
REPORT_BYTES = 8 * (2 * (3 * 5 + 2) + 4 + 2 * (3 + 10 + 8))


def train_engine(case: Case, report_file: str | None, report_interval: int = 1) -> dict[str, Any]:
    """Stats after training, and the experts of every token, by call of each layer."""
    routed: dict[str, list[list[list[int]]]] = {}
    original = HybridMoE.forward

    def forward(self: HybridMoE, x: Any, topk_idx: Any, topk_weights: Any) -> Any:
        routed.setdefault(self.name, []).append(topk_idx.tolist())
        return original(self, x, topk_idx, topk_weights)

    HybridMoE.forward = forward
    try:
        with toy_engine(case, report_interval=report_interval, report_file=report_file) as engine:
            before = ds_hybridep.stats(engine)
            for step in range(case.steps):
                train_step(engine, case, step)
            after = ds_hybridep.stats(engine)
    finally:
        HybridMoE.forward = original
    return {"before": before, "after": after, "routed": routed}


def engine_case(*domain_sizes: int, toy: ToyConfig = TOY, sizes: Sequence[int] = (2, 2), **options: Any) -> Case:
    return Case(levels=levels_of(sizes, domain_sizes), toy=toy, steps=3, token_exchange="direct", **options)


def case_of_two_ranks(domain_size: int) -> Case:
    return engine_case(domain_size, toy=replace(TOY, ep_size=2), sizes=(2,))


def test_stats_and_record_of_an_engine_equal_the_closed_forms(pool4: ProcessPool, tmp_path: Path) -> None:
    case, path = engine_case(2, 1, dense_sync="deepspeed"), tmp_path / "new_folder" / "run.json"
    results = pool4.run(train_engine, case=case, report_file=str(path))
    ranks = [result["after"] for result in results]
    shape = MoeCase(sizes=(2, 2), domain_sizes=(2, 1), num_tokens=(32,) * 4)
    routings = [
        [result["routed"][layer][step] for result in results] for layer in results[0]["routed"] for step in range(3)
    ]
    assert len(routings) == 2 * 3
    tokens = expected_tokens(shape, routings, TOY_ROW_BYTES)
    experts_per_shipment = 2 * 2 * TOY_EXPERT_BYTES  # two layers, two experts, one neighbour

    for rank, record in enumerate(ranks):
        slow, fast = record["levels"]
        assert (slow["name"], fast["name"], record["rank"], record["steps"]) == ("dc", "gpu", rank, 3)
        assert slow["sent_bytes"]["tokens"] == tokens[rank, 0] == 0
        assert fast["sent_bytes"]["tokens"] == tokens[rank, 1] > 0
        # The first forward and each of three steps; gradients each step.
        assert slow["sent_bytes"]["expert_weights"] == 4 * experts_per_shipment
        assert slow["sent_bytes"]["expert_gradients"] == 3 * experts_per_shipment
        assert fast["sent_bytes"]["expert_weights"] == fast["sent_bytes"]["expert_gradients"] == 0
        # Three reports to rank 0.
        assert slow["sent_bytes"]["control"] == (3 * REPORT_BYTES if rank in (2, 3) else 0)
        assert fast["sent_bytes"]["control"] == (3 * REPORT_BYTES if rank == 1 else 0)
        assert [layer["calls"] for layer in record["layers"]] == [3, 3]
        assert record["exposed_s"].pop("dense") is None  # DeepSpeed sends it
        assert all(seconds >= 0 for seconds in record["exposed_s"].values())

    job = ranks[0]["job"]
    assert job == json.loads(path.read_text())
    assert not list(path.parent.glob("*.partial"))
    assert [record["job"] for record in ranks[1:]] == [None] * 3
    assert (job["steps"], job["world_size"]) == (3, 4)
    for level, summed in enumerate(job["levels"]):
        for kind in ("tokens", "expert_weights", "expert_gradients"):
            assert summed["sent_bytes"][kind] == sum(record["levels"][level]["sent_bytes"][kind] for record in ranks)
        # The report under way is in none of its own numbers.
        senders = {0: 2, 1: 1}[level]
        assert summed["sent_bytes"]["control"] == 2 * REPORT_BYTES * senders
    for index, layer in enumerate(job["layers"]):
        rows = [record["layers"][index]["rows_computed"] for record in ranks]
        assert layer["name"] == ranks[0]["layers"][index]["name"]
        assert layer["imbalance"] == pytest.approx(max(rows) / (sum(rows) / 4))
    assert job["exposed_s"].pop("dense") is None  # DeepSpeed sends it
    for kind, seconds in job["exposed_s"].items():
        assert seconds == pytest.approx(sum(record["exposed_s"][kind] for record in ranks) / 4, rel=1e-3)


def test_stats_before_the_first_step_are_zero(pool2: ProcessPool) -> None:
    for result in pool2.run(train_engine, case=case_of_two_ranks(2), report_file=None, report_interval=0):
        before, after = result["before"], result["after"]
        assert before["job"] is None
        assert after["job"] is None  # no report was asked for
        assert before["steps"] == 0
        assert not any(n for level in before["levels"] for n in level["sent_bytes"].values())
        assert not any(level["sent_bytes"]["control"] for level in after["levels"])


def test_reports_come_at_their_interval(pool2: ProcessPool, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    results = pool2.run(train_engine, case=case_of_two_ranks(1), report_file=str(path), report_interval=2)
    assert results[0]["after"]["steps"] == 3
    assert results[0]["after"]["job"]["steps"] == json.loads(path.read_text())["steps"] == 2


@pytest.mark.parametrize(
    ("world_size", "ep_size", "checkpointing", "num_exchanges"),
    [
        (4, 2, None, 4),
        (2, 2, "reentrant", 6),
        *(slow(*sizes, "nonreentrant", 6) for sizes in ((4, 4), (4, 2))),
        *(slow(4, 4, *options) for options in ((None, 4), ("reentrant", 6))),
    ],
    ids=str,
)
def test_bytes_of_plain_ep_are_those_of_its_padded_all_to_alls(
    pool_of: Pools, world_size: int, ep_size: int, checkpointing: Any, num_exchanges: int
) -> None:
    """Dispatch and combine, forward and backward; with checkpointing the forward runs twice."""
    sizes = (2, world_size // 2)
    case = engine_case(1, 1, toy=replace(TOY, ep_size=ep_size, checkpointing=checkpointing), sizes=sizes)
    results = pool_of(world_size).run(train_engine, case=case, report_file=None)
    num_local = TOY.num_experts // ep_size
    to_each_peer = 3 * 2 * num_exchanges * num_local * TOY_CAPACITY * TOY_ROW_BYTES
    total = [0, 0]
    for rank, result in enumerate(results):
        group = range(rank // ep_size * ep_size, (rank // ep_size + 1) * ep_size)
        expected = [0, 0]
        for peer in group:
            if peer != rank:
                expected[level_between(sizes, rank, peer)] += to_each_peer
        assert [level["plain_ep_bytes"] for level in result["after"]["levels"]] == expected
        total = [a + b for a, b in zip(total, expected, strict=True)]
    assert [level["plain_ep_bytes"] for level in results[0]["after"]["job"]["levels"]] == total


def evaluate_engine(case: Case) -> dict[str, Any]:
    with toy_engine(case) as engine, torch.no_grad():
        engine.eval()
        tokens = torch.arange(32).reshape(4, 8)
        engine(tokens, tokens)
        return ds_hybridep.stats(engine)


def test_evaluation_is_two_exchanges_of_plain_ep(pool4: ProcessPool) -> None:
    capacity = 12  # the capacity factor of evaluation is 1.5
    per_peer = 2 * 2 * 2 * capacity * TOY_ROW_BYTES  # layers, exchanges, experts
    for record in pool4.run(evaluate_engine, case=engine_case(1, 1)):
        assert [level["plain_ep_bytes"] for level in record["levels"]] == [2 * per_peer, per_peer]
