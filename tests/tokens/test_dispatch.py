# SPDX-License-Identifier: Apache-2.0
"""The way of a token: what arrives where, how often, and that the whole layer equals a dense one in one process."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from marks import slow
from moe_refs import (
    HIDDEN,
    MoeCase,
    Routing,
    as_array,
    build_case,
    dense_results,
    domain_and_offset,
    forward_case,
    gate_weights,
    integer_tokens,
    leaves_of,
    loss_of,
    open_transport,
    relative_distance,
    routing_of,
    travel,
)
from process_pool import ProcessPool
from torch import distributed as dist

from ds_hybridep.geometry.cluster import Cluster, Level
from ds_hybridep.geometry.partition import Partition
from ds_hybridep.geometry.row_format import RowFormat, record_bytes
from ds_hybridep.geometry.token_route import TokenExchange, build_route
from ds_hybridep.kernels import load_kernels
from ds_hybridep.tokens.exchange import HEADER_BYTES, build_exchanges, combine, dispatch

pytestmark = pytest.mark.dist

EXCHANGES = ("direct", "hierarchical")
UNEVEN = (7, 0, 12, 5)  # one rank without a token
UNEVEN_8 = (5, 0, 9, 3, 1, 6, 0, 4)
PLANS_2X2 = list(itertools.product((1, 2), (1, 2)))
# Sums of a few dozen fp32 products in another order than the reference's, which is fp64: some units of 2**-24.
FP32_TOLERANCE = 1e-6
# fp64 all the way, or but for gradients that replicas sum in fp32.
FP64_TOLERANCE = 1e-13


def case_2x2(domain_sizes: tuple[int, ...], exchange: str, **options: Any) -> MoeCase:
    return MoeCase(sizes=(2, 2), domain_sizes=domain_sizes, exchange=exchange, **{"num_tokens": UNEVEN, **options})


def case_2x2x2(domain_sizes: tuple[int, ...], exchange: str, **options: Any) -> MoeCase:
    options = {"num_tokens": UNEVEN_8, "top_k": 3, **options}
    return MoeCase(sizes=(2, 2, 2), domain_sizes=domain_sizes, exchange=exchange, **options)


# -- dispatch and combine alone ---------------------------------------------------------------------------------


def carry(case: MoeCase, routing: Routing | None = None) -> dict[str, Any]:
    """Dispatches whole-numbered tokens over all stages and combines them with experts that change nothing."""
    rank, group = dist.get_rank(), case.group_of(dist.get_rank())
    cluster = Cluster(tuple(Level(f"level{i}", size) for i, size in enumerate(case.sizes)))
    partition = Partition.build(cluster, group, case.domain_sizes)
    transport = open_transport(cluster, timeout_s=100)
    stages = build_route(partition, rank, case.num_experts, case.exchange)
    kernels = load_kernels("reference", "cpu")
    exchanges = build_exchanges(stages, transport, "ep", kernels, layer="layer 0", device=torch.device("cpu"))
    topk_idx = torch.tensor((routing or routing_of(case))[rank], dtype=torch.int32).reshape(-1, case.top_k)
    rows, row_idx, row_weights = integer_tokens(case, rank), topk_idx, gate_weights(case, rank)
    states = []
    for exchange in exchanges:
        rows, row_idx, row_weights, state = dispatch(rows, row_idx, row_weights, exchange)
        states.append(state)
    sums = (row_weights * (row_idx >= 0)).sum(1, keepdim=True) * rows
    arrived = {"rows": rows.tolist(), "row_idx": row_idx.tolist(), "row_weights": row_weights.tolist()}
    for state in reversed(states):
        sums = combine(sums, state)
    splits = [dict(zip(state.exchange.ranks, state.send_splits, strict=True)) for state in states]
    transport.close()
    return {**arrived, "output": sums.tolist(), "splits": splits}


def carry_again_and_again(num_tokens: tuple[tuple[int, ...], ...], top_k: int, width: int) -> list[dict[str, Any]]:
    """One exchange of all ranks, used with each of these numbers of tokens in turn: what came of it."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    transport = open_transport(Cluster((Level("dc", world_size),)), timeout_s=100)
    partition = Partition.build(transport.cluster, range(world_size), (1,))
    stages = build_route(partition, rank, world_size, "direct")
    exchange = build_exchanges(
        stages, transport, "ep", load_kernels("auto", "cpu"), layer="layer 0", device=torch.device("cpu")
    )[0]
    results = []
    for step, counts in enumerate(num_tokens):
        count = counts[rank]
        x = torch.arange(count * width, dtype=torch.float32).view(count, width) + rank
        # Token t of rank r needs the experts t, t + 1 ... (modulo their number), one on each rank, with the weights
        # 1, 2 ...
        topk_idx = (torch.arange(count)[:, None] + torch.arange(top_k)[None]).remainder(world_size).int()
        weights = torch.arange(1.0, top_k + 1).expand(count, top_k).contiguous()
        before = dict(transport.traffic.sent_bytes), dict(transport.traffic.sent_messages)
        rows, row_idx, row_weights, state = dispatch(x, topk_idx, weights, exchange)
        after = dict(transport.traffic.sent_bytes), dict(transport.traffic.sent_messages)
        is_mine = ((row_idx == rank) | (row_idx < 0)).all().item()
        output = combine(rows * (row_weights * (row_idx >= 0)).sum(1, keepdim=True), state)
        results.append(
            {
                "is_right": torch.equal(output, x * (top_k * (top_k + 1) // 2)) and is_mine,
                "splits": state.send_splits,
                "received": state.recv_splits,
                "bytes": after[0][0, "tokens"] - before[0].get((0, "tokens"), 0),
                "messages": after[1][0, "tokens"] - before[1].get((0, "tokens"), 0),
                "step": step,
            }
        )
    received = transport.traffic.received_bytes[0, "tokens"]
    transport.close()
    return [*results, {"received": received, "sent": transport.traffic.sent_bytes[0, "tokens"]}]


def assert_counts_may_change(
    pool: ProcessPool, num_tokens: tuple[tuple[int, ...], ...], top_k: int, width: int
) -> None:
    results = pool.run(carry_again_and_again, num_tokens=num_tokens, top_k=top_k, width=width)
    *steps, totals = zip(*results, strict=True)
    for ranks in steps:
        for rank, result in enumerate(ranks):
            assert result["is_right"]
            assert [other["splits"][rank] for other in ranks] == list(result["received"])
            rows_sent = sum(result["splits"]) - result["splits"][rank]
            num_peers = pool.world_size - 1
            assert result["bytes"] == num_peers * HEADER_BYTES + rows_sent * (8 * top_k + 4 * width)
    assert sum(total["received"] for total in totals) == sum(total["sent"] for total in totals)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_tokens=st.lists(st.tuples(*[st.integers(0, 60)] * 2), min_size=2, max_size=6).map(tuple),
    top_k=st.integers(1, 2),
    width=st.sampled_from([1, 6, 64]),
)
def test_row_counts_may_change_at_will_between_dispatches(
    pool2: ProcessPool, num_tokens: tuple[tuple[int, ...], ...], top_k: int, width: int
) -> None:
    assert_counts_may_change(pool2, num_tokens, top_k, width)


@pytest.mark.parametrize(("top_k", "width"), [(2, 6), (4, 1)])
def test_row_counts_of_four_ranks_may_change_between_dispatches(pool4: ProcessPool, top_k: int, width: int) -> None:
    num_tokens = ((0,) * 4, (60,) * 4, (1,) * 4, (60, 0, 60, 0), (0, 60, 0, 60), (17, 3, 0, 41))
    assert_counts_may_change(pool4, num_tokens, top_k, width)


def test_a_dispatch_like_the_last_one_is_a_message_per_rank(pool4: ProcessPool) -> None:
    like = (40, 40, 40, 40)
    for *steps, _ in pool4.run(carry_again_and_again, num_tokens=(like, like, (44,) * 4, (8,) * 4), top_k=2, width=6):
        first, *others = [result["messages"] for result in steps]
        assert first == 3 * 3  # counts, then metadata and rows: nothing was known yet
        assert others == [3, 3, 3]


def assert_carried(pool: ProcessPool, case: MoeCase, routing: Routing) -> None:
    """Every rank got just the rows it had to, in order, and the identity came back as sum of weights times token."""
    results = pool.run(carry, case=case, routing=routing)
    tokens = [integer_tokens(case, rank).tolist() for rank in range(case.world_size)]
    weights = [gate_weights(case, rank).tolist() for rank in range(case.world_size)]
    for rank, result in enumerate(results):
        journey = travel(case, case.group_of(rank), routing)
        expected = journey.rows[rank]
        assert result["rows"] == [tokens[row.origin][row.token] for row in expected]
        assert result["row_idx"] == [list(row.slots) for row in expected]
        for row, got in zip(expected, result["row_weights"], strict=True):
            wanted = weights[row.origin][row.token]
            assert [w for w, expert in zip(got, row.slots, strict=True) if expert >= 0] == [
                w for w, expert in zip(wanted, row.slots, strict=True) if expert >= 0
            ]
        assert len(result["splits"]) == len(journey.moved)
        for splits, moved in zip(result["splits"], journey.moved, strict=True):
            assert splits == {receiver: n for (sender, receiver), n in moved.items() if sender == rank}
        # Exact: whole numbers below 2**10 times eighths.
        assert result["output"] == [
            [value * sum(w for w, expert in zip(ws, slots, strict=True) if expert >= 0) for value in token]
            for token, ws, slots in zip(tokens[rank], weights[rank], routing[rank], strict=True)
        ]


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("domain_sizes", PLANS_2X2, ids=str)
def test_every_row_arrives_once_where_its_experts_are(
    pool4: ProcessPool, domain_sizes: tuple[int, ...], exchange: str
) -> None:
    case = case_2x2(domain_sizes, exchange, top_k=3)
    assert_carried(pool4, case, routing_of(case))


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(
    "domain_sizes", [(1, 1, 1), slow((2, 1, 1)), (1, 2, 1), slow((1, 1, 2)), slow((2, 1, 2))], ids=str
)
def test_every_row_arrives_once_over_three_levels(
    pool8: ProcessPool, domain_sizes: tuple[int, ...], exchange: str
) -> None:
    case = case_2x2x2(domain_sizes, exchange)
    assert_carried(pool8, case, routing_of(case))


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("domain_sizes", [slow((1, 1, 1)), slow((2, 1, 1)), (1, 2, 1)], ids=str)
def test_strided_groups_exchange_among_themselves(
    pool8: ProcessPool, domain_sizes: tuple[int, ...], exchange: str
) -> None:
    case = case_2x2x2(domain_sizes, exchange, groups=((0, 2, 4, 6), (1, 3, 5, 7)))
    assert_carried(pool8, case, routing_of(case))


def test_direct_dispatch_sends_one_row_per_token_and_destination_domain(pool4: ProcessPool) -> None:
    """The row counts once more, without the reference's order of rows: distinct (token, domain) pairs."""
    case = case_2x2((1, 1), "direct", top_k=3, has_drops=False, num_tokens=(16, 16, 16, 16), num_experts=8)
    routing = routing_of(case)
    for rank, result in enumerate(pool4.run(carry, case=case, routing=routing)):
        pairs = {(token, expert // 2) for token, experts in enumerate(routing[rank]) for expert in experts}
        assert sum(result["splits"][0].values()) == len(pairs) < 3 * 16
    # With two domains a token that needs three experts must need two of one domain.
    case = replace(case, domain_sizes=(1, 2))
    domains = [domain_and_offset(case, case.group_of(0), owner)[0] for owner in range(4)]
    for rank, result in enumerate(pool4.run(carry, case=case, routing=routing)):
        pairs = {(token, domains[expert // 2]) for token, experts in enumerate(routing[rank]) for expert in experts}
        assert sum(result["splits"][0].values()) == len(pairs) <= 2 * 16


def test_a_level_by_level_dispatch_crosses_the_slow_level_once_per_token(pool4: ProcessPool) -> None:
    everywhere = [[[0, 3, 4, 7]] * 5] * 4  # each token needs an expert of each of the four ranks
    case = case_2x2((1, 1), "direct", top_k=4, num_tokens=(5, 5, 5, 5))
    direct = pool4.run(carry, case=case, routing=everywhere)
    by_level = pool4.run(carry, case=replace(case, exchange="hierarchical"), routing=everywhere)
    assert [result["splits"] for result in direct] == [[dict.fromkeys(range(4), 5)]] * 4
    for rank, result in enumerate(by_level):
        slow, fast = result["splits"]
        assert slow == dict.fromkeys((rank % 2, rank % 2 + 2), 5)
        assert fast == dict.fromkeys((rank // 2 * 2, rank // 2 * 2 + 1), 10)


@st.composite
def cases_and_routings(draw: st.DrawFn) -> tuple[MoeCase, Routing]:
    top_k = draw(st.integers(1, 4))
    experts = st.permutations(range(8)).map(lambda order: order[:top_k])
    is_dropped = st.lists(st.booleans(), min_size=top_k, max_size=top_k)
    token = st.tuples(experts, is_dropped).map(
        lambda pair: [-1 if dropped else expert for expert, dropped in zip(*pair, strict=True)]
    )
    routing = draw(st.lists(st.lists(token, max_size=4), min_size=4, max_size=4))
    plan, exchange = draw(st.sampled_from(PLANS_2X2)), draw(st.sampled_from(EXCHANGES))
    return case_2x2(plan, exchange, top_k=top_k, num_tokens=tuple(map(len, routing))), routing


@settings(max_examples=15)
@given(drawn=cases_and_routings())
def test_combine_of_dispatch_is_the_weighted_token_for_any_routing(
    pool4: ProcessPool, drawn: tuple[MoeCase, Routing]
) -> None:
    assert_carried(pool4, *drawn)


# -- the whole layer --------------------------------------------------------------------------------------------


def run_layers(case: MoeCase) -> dict[str, Any]:
    """One forward and backward of all layers; outputs and gradients by name."""
    rank = dist.get_rank()
    runtime, owned = build_case(case, rank)
    output, x, weights = forward_case(case, rank, runtime)
    loss_of(case, rank, output).backward()
    leaves = leaves_of(case, rank, x, weights, owned)
    runtime.finish()
    runtime.close()
    # None counts as wrong: the optimizer's collectives need a gradient of every tensor, zeros where it was idle.
    return {
        "output": as_array(output),
        **{f"{name}.grad": as_array(leaf.grad) for name, leaf in leaves.items() if leaf.grad is not None},
    }


def assert_dense(pool: ProcessPool, case: MoeCase) -> None:
    expected = dense_results(case)
    for rank, (result, reference) in enumerate(zip(pool.run(run_layers, case=case), expected, strict=True)):
        assert result.keys() == reference.keys()
        distances = {name: relative_distance(result[name], value) for name, value in reference.items()}
        assert {name: d for name, d in distances.items() if not d <= tolerance_of(case, name)} == {}, f"rank {rank}"


def tolerance_of(case: MoeCase, name: str) -> float:
    has_fp32_sums = "gate" in name or ("expert" in name and max(case.domain_sizes) > 1)
    return FP32_TOLERANCE if case.dtype == "float32" or has_fp32_sums else FP64_TOLERANCE


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("domain_sizes", PLANS_2X2, ids=str)
@pytest.mark.parametrize("top_k", [slow(1), slow(2), 3])
def test_layer_equals_the_dense_one(
    pool4: ProcessPool, domain_sizes: tuple[int, ...], exchange: str, top_k: int
) -> None:
    assert_dense(pool4, case_2x2(domain_sizes, exchange, top_k=top_k))


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize("domain_sizes", [(1, 1), (2, 1), slow((1, 2)), slow((2, 2))], ids=str)
def test_layer_equals_the_dense_one_to_fp64_accuracy(
    pool4: ProcessPool, domain_sizes: tuple[int, ...], exchange: str
) -> None:
    assert_dense(pool4, case_2x2(domain_sizes, exchange, dtype="float64", num_tokens=(4, 6, 5, 4)))


LAYER_CASES = [
    case_2x2((2, 1), "direct", num_layers=3, prefetch_depth=1),
    case_2x2((2, 2), "direct", num_layers=3, prefetch_depth=0),
    case_2x2((1, 2), "hierarchical", num_layers=2, prefetch_depth=4),
    case_2x2((2, 1), "direct", is_down_frozen=True),
    case_2x2((2, 2), "direct", is_down_frozen=True, num_layers=2),
    case_2x2((1, 1), "direct", is_down_frozen=True),
    case_2x2((2, 1), "direct", num_tokens=(0, 0, 0, 9)),
    case_2x2((2, 2), "direct", num_tokens=(0, 3, 0, 0)),
    case_2x2((1, 1), "hierarchical", num_tokens=(0, 0, 0, 0)),
    case_2x2((2, 1), "direct", num_tokens=(0, 0, 0, 0)),
    case_2x2((2, 1), "direct", num_experts=4),
    # Strided groups, and one whose group ranks are not in the order of their global ranks.
    case_2x2((2, 1), "direct", groups=((0, 2), (1, 3))),
    case_2x2((1, 1), "hierarchical", groups=((0, 2), (1, 3))),
    case_2x2((1, 2), "direct", groups=((0, 1), (2, 3))),
    case_2x2((2, 1), "direct", groups=((2, 1, 3, 0),)),
    case_2x2((1, 1), "hierarchical", groups=((2, 1, 3, 0),)),
    MoeCase(sizes=(4,), domain_sizes=(2,), num_tokens=UNEVEN),
    MoeCase(sizes=(4,), domain_sizes=(4,), num_tokens=UNEVEN),
]


REPEATED = (3, 5, 6, 8, 12, 14, 16)


@pytest.mark.parametrize(
    "case",
    [slow(one) if place in REPEATED else one for place, one in enumerate(LAYER_CASES)],
    ids=lambda case: case.id,
)
def test_layers_equal_dense_ones(pool4: ProcessPool, case: MoeCase) -> None:
    assert_dense(pool4, case)


LAYER_CASES_8 = [
    case_2x2x2((1, 1, 1), "direct"),
    case_2x2x2((1, 1, 1), "hierarchical"),
    case_2x2x2((2, 1, 1), "hierarchical"),
    case_2x2x2((2, 1, 2), "direct", num_layers=2),
    case_2x2x2((2, 2, 2), "direct", num_experts=16),
    case_2x2x2((1, 2, 1), "hierarchical", groups=((0, 2, 4, 6), (1, 3, 5, 7))),
    case_2x2x2((2, 2, 1), "direct", groups=((0, 2, 4, 6), (1, 3, 5, 7))),
    MoeCase(sizes=(4, 2), domain_sizes=(2, 1), exchange="hierarchical", num_tokens=UNEVEN_8),
    MoeCase(sizes=(4, 2), domain_sizes=(2, 2), exchange="direct", num_tokens=UNEVEN_8),
]


@pytest.mark.parametrize(
    "case",
    [one if place in (1, 3, 5) else slow(one) for place, one in enumerate(LAYER_CASES_8)],
    ids=lambda case: case.id,
)
def test_layers_equal_dense_ones_over_eight_ranks(pool8: ProcessPool, case: MoeCase) -> None:
    assert_dense(pool8, case)


def run_with_strides(case: MoeCase, has_strides: bool) -> dict[str, Any]:
    """Input, gate weights and output gradient that are views with strides, or the same values without."""
    rank = dist.get_rank()
    runtime, owned = build_case(case, rank)
    x, weights = integer_tokens(case, rank) / 64, gate_weights(case, rank)
    if has_strides:
        x, weights = x.t().contiguous().t(), torch.stack([weights, weights], dim=2)[..., 0]
    x, weights = x.requires_grad_(), weights.requires_grad_()
    topk_idx = torch.tensor(routing_of(case)[rank], dtype=torch.int32)
    output = runtime.layers["layer 0"].forward(x, topk_idx, weights)
    output.backward(torch.ones(1, 1).expand_as(output) if has_strides else torch.ones_like(output))
    runtime.finish()
    runtime.close()
    leaves = leaves_of(case, rank, x, [weights], owned)
    return {"output": as_array(output), **{name: as_array(leaf.grad) for name, leaf in leaves.items()}}


@pytest.mark.parametrize("domain_sizes", [slow((1, 1)), (2, 1), slow((2, 2))], ids=str)
def test_strides_change_nothing(pool4: ProcessPool, domain_sizes: tuple[int, ...]) -> None:
    case = case_2x2(domain_sizes, "direct", num_tokens=(7, 3, 12, 5))
    plain = pool4.run(run_with_strides, case=case, has_strides=False)
    strided = pool4.run(run_with_strides, case=case, has_strides=True)
    for one, other in zip(plain, strided, strict=True):
        assert all((one[name] == other[name]).all() for name in one)
        assert abs(one["x"]).sum() > 0


def without_gradients(case: MoeCase) -> list[list[float]]:
    rank = dist.get_rank()
    runtime, _ = build_case(case, rank)
    with torch.no_grad():
        output, _, _ = forward_case(case, rank, runtime)
    runtime.finish()
    runtime.close()
    return output.tolist()


def test_evaluation_needs_no_backward(pool4: ProcessPool) -> None:
    case = case_2x2((2, 1), "direct", num_layers=2)
    outputs = pool4.run(without_gradients, case=case)
    for output, reference in zip(outputs, dense_results(case), strict=True):
        value = torch.tensor(output, dtype=torch.float64).reshape(-1, HIDDEN).numpy()
        assert relative_distance(value, reference["output"]) <= FP32_TOLERANCE


# -- rows of one byte an element ----------------------------------------------------------------------------------

RECORD_HIDDEN = 200


def token_of(rank: int, token: int, dtype: torch.dtype) -> torch.Tensor:
    """[D], with some columns much larger than others."""
    column = torch.arange(RECORD_HIDDEN, dtype=torch.float64)
    return (torch.sin(1 + rank + 7.3 * token + 0.61 * column) * 2.0 ** (column % 5)).to(dtype)


def carry_records(exchange: TokenExchange, row_format: RowFormat, dtype: torch.dtype) -> dict[str, Any]:
    """Four ranks in two datacentres send each other a token; twice, so that rows also travel in first messages."""
    rank, kernels = dist.get_rank(), load_kernels("auto", "cpu")  # may compile, which is no wait for other ranks
    transport = open_transport(Cluster((Level("dc", 2), Level("gpu", 2))), timeout_s=100)
    partition = Partition.build(transport.cluster, range(4), (1, 1))
    exchanges = build_exchanges(
        build_route(partition, rank, 4, exchange), transport, "ep", kernels, layer="layer 0",
        device=torch.device("cpu"),
        level_formats=(row_format, None),
    )  # fmt: skip
    x = torch.stack([token_of(rank, token, dtype) for token in range(4)]).requires_grad_()
    topk_idx, weights = torch.arange(4, dtype=torch.int32)[:, None], 1.0 + 4 * rank + torch.arange(4.0)[:, None]
    for _ in range(2):
        x.grad = None
        rows, row_idx, row_weights, states = x, topk_idx, weights, []
        for one in exchanges:
            rows, row_idx, row_weights, state = dispatch(rows, row_idx, row_weights, one)
            states.append(state)
        sums = rows * 2.0
        for state in reversed(states):
            sums = combine(sums, state)
        sums.backward(x.detach())
    traffic = transport.traffic
    sent = [traffic.sent_bytes[level, "tokens"] for level in range(2)]
    received = [traffic.received_bytes[level, "tokens"] for level in range(2)]
    transport.close()
    arrived = {int(weight) - 1: row for weight, row in zip(row_weights.flatten(), rows.float().tolist(), strict=True)}
    return {
        "arrived": arrived, "output": sums.float().tolist(), "grad": x.grad.float().tolist(), "sent": sent,
        "received": received,
    }  # fmt: skip


@pytest.mark.parametrize("exchange", EXCHANGES)
@pytest.mark.parametrize(("row_format", "dtype"), [("int8", torch.bfloat16), ("fp8", torch.float32)])
def test_rows_across_the_slow_level_travel_as_records(pool4: ProcessPool, exchange, row_format, dtype):
    """What arrives is what the definition makes of a row; gradients, sums and rows inside are exact."""
    kernels = load_kernels("reference", "cpu")

    def rounded(row: torch.Tensor) -> torch.Tensor:
        records = kernels.quantise_rows(row[None], torch.tensor([[0]]), 1, row_format)
        return kernels.dequantise_rows(records, RECORD_HIDDEN, row_format, dtype)[0]

    exact = {rank: [token_of(rank, token, dtype) for token in range(4)] for rank in range(4)}
    for rank, result in enumerate(pool4.run(carry_records, exchange=exchange, row_format=row_format, dtype=dtype)):
        is_far = {other: other // 2 != rank // 2 for other in range(4)}
        wanted = {4 * s + rank: rounded(exact[s][rank]) if is_far[s] else exact[s][rank] for s in range(4)}
        assert result["arrived"] == {token: row.float().tolist() for token, row in wanted.items()}
        for token, row in enumerate(exact[rank]):
            assert result["output"][token] == (2 * (rounded(row) if is_far[token] else row)).float().tolist()
            assert result["grad"][token] == (2 * row).float().tolist()
        # Twice there and back, forward and backward: two rows over each level, straight to two ranks or to one. Level
        # by level the second stage carries a row of each datacentre.
        row_bytes, peers = RECORD_HIDDEN * dtype.itemsize, 2 if exchange == "direct" else 1
        beside = 3 * row_bytes + 8 + 4
        slow = 2 * (HEADER_BYTES * peers + 2 * (record_bytes(RECORD_HIDDEN) + beside))
        fast = 2 * (HEADER_BYTES + (1 if exchange == "direct" else 2) * (row_bytes + beside))
        assert result["sent"] == result["received"] == [slow, fast]
