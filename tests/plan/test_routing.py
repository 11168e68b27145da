# SPDX-License-Identifier: Apache-2.0
"""Uneven routing and hot experts, against counts of every choice of a token."""

import dataclasses
import itertools
import math

import pytest
from plan_cases import TOY, cluster_of, plan_over, toy

from ds_hybridep.errors import PlanError
from ds_hybridep.geometry.hot import LEAST_GAIN, TIE, rank_loads
from ds_hybridep.geometry.partition import Partition
from ds_hybridep.plan.choices import shares_of, skewed_loads, skewed_weights, weights_of
from ds_hybridep.plan.costs import gradient_messages, gradient_residuals, gradients_sent, row_counts
from ds_hybridep.plan.plan import HotLimit, LevelCodecs
from ds_hybridep.plan.rates import CodecCost, Rates
from ds_hybridep.plan.routing import routing_of
from ds_hybridep.plan.stream_model import predict

TWELVE = dataclasses.replace(TOY, num_experts=12)
SPANS = (2, 3)  # two experts on each rank
RATES = Rates(flops_per_s=1e9)
PLANS = [
    ((1, 1), None, 0),
    ((1, 1), 1, 0),
    ((1, 1), 1, 2),
    ((1, 1), 0, 1),
    ((2, 1), 1, 3),
    ((1, 3), 0, 4),
    ((1, 1), 1, 6),
]


def loads_of(top_k, weights=None):
    """Every choice of experts with its chance, in proportion to the product of the weights."""
    weights = weights or tuple(1.0 / (1 + expert % 5) for expert in range(12))
    products = {
        frozenset(choice): math.prod(weights[expert] for expert in choice)
        for choice in itertools.combinations(range(12), top_k)
    }
    total = sum(products.values())
    return weights, {choice: one / total for choice, one in products.items()}


def shared(choices):
    """The share of tokens that choose each expert."""
    return tuple(sum(chance for choice, chance in choices.items() if expert in choice) for expert in range(12))


def uneven(top_k, domain_sizes, hot_level, num_hot):
    _, choices = loads_of(top_k)
    model = dataclasses.replace(TWELVE, top_k=top_k)
    plan = plan_over(SPANS, domain_sizes, hot=HotLimit(hot_level, num_hot) if num_hot else None)
    return choices, plan, toy(model=model, expert_loads=shared(choices))


# ---- loads ----


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_shares_of_experts_are_those_of_all_choices(top_k):
    weights, choices = loads_of(top_k)
    assert shares_of(weights, top_k) == pytest.approx(shared(choices))


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_weights_bring_the_loads_that_were_measured(top_k):
    _, choices = loads_of(top_k)
    loads = tuple(1000 * share for share in shared(choices))
    found = shares_of(weights_of(loads, top_k), top_k)
    assert [1000 * share for share in found] == pytest.approx(loads, rel=1e-6)


def test_loads_that_no_choice_of_experts_has_are_approached():
    """With two choices, no expert is in more than each; what is left goes to the others in proportion."""
    for loads in ((1000.0, 2.0, 1.0, 1.0), (1000.0, 900.0, 1.0, 1.0), (5.0, 5.0, 0.0, 0.0)):
        found = shares_of(weights_of(loads, 2), 2)
        assert sum(found) == pytest.approx(2.0)
        assert found[0] == pytest.approx(1.0, abs=2e-3)
        assert list(found) == sorted(found, reverse=True)
    assert shares_of(weights_of((1000.0, 2.0, 1.0, 1.0), 2), 2) == pytest.approx((1.0, 0.5, 0.25, 0.25), abs=2e-3)


def test_experts_without_rows_have_none():
    weights = weights_of((3.0, 0.0, 2.0, 5.0), 1)
    assert shares_of(weights, 1) == pytest.approx((0.3, 0.0, 0.2, 0.5))


@pytest.mark.parametrize(
    ("skew", "num_experts", "num_ranks", "top_k"),
    [(1.0, 8, 4, 2), (1.05, 128, 16, 8), (2.6, 128, 8, 8), (5.1, 128, 16, 8), (1.5, 8, 8, 2), (7.9, 128, 8, 8)],
)
def test_the_fullest_rank_has_the_skew_and_no_row_is_lost(skew, num_experts, num_ranks, top_k):
    loads = skewed_loads(skew, num_experts, num_ranks, top_k)
    num_local = num_experts // num_ranks
    of_ranks = rank_loads(loads, [expert // num_local for expert in range(num_experts)], num_ranks)
    assert max(of_ranks) == of_ranks[0] == pytest.approx(skew * top_k / num_ranks)
    assert sum(loads) == pytest.approx(top_k)
    assert max(loads) <= 1.0
    assert skewed_loads(skew, num_experts, num_ranks, top_k) == loads
    assert list(loads[:num_local]) == sorted(loads[:num_local], reverse=True)


def test_machines_and_domains_have_about_equal_loads():
    loads = skewed_loads(3.0, 128, 16, 8)
    of_ranks = rank_loads(loads, [expert // 8 for expert in range(128)], 16)
    assert [of_ranks.index(one) for one in sorted(of_ranks, reverse=True)][:8] == [0, 9, 2, 11, 4, 13, 6, 15]
    halves = [sum(of_ranks[:8]), sum(of_ranks[8:])]
    assert max(halves) < 1.3 * min(halves)
    assert max(of_ranks[rank] + of_ranks[rank + 8] for rank in range(8)) < 2.0  # 2 * 8 / 16 would be even


def test_a_skew_of_one_is_even_routing():
    assert skewed_weights(1.0, 16, 4, 2) == (1.0,) * 16


@pytest.mark.parametrize(("skew", "most"), [(0.9, "4"), (4.1, "4")])
def test_a_skew_that_no_routing_has_is_refused(skew, most):
    with pytest.raises(PlanError, match=f"skew is {skew}, but must be between 1 and {most}, the most that 8 experts"):
        skewed_weights(skew, 8, 4, 2)


@pytest.mark.parametrize("loads", [(1.0,) * 3, (-1.0,) + (1.0,) * 7, (1.0,) + (0.0,) * 7])
def test_loads_that_cannot_be_are_refused(loads):
    with pytest.raises(PlanError, match=f"expert_loads has {len(loads)} entries"):
        toy(expert_loads=loads)


# ---- who computes what ----


class Slowly:
    """Where a rank's tokens go, choice by choice, by the partitions that the runtime has."""

    def __init__(self, choices, plan):
        cluster = cluster_of(*SPANS)
        self.choices, self.level = choices, None if plan.hot is None else plan.hot.level
        self.cold = Partition.build(cluster, range(6), plan.domain_sizes)
        sizes = list(plan.domain_sizes)
        if self.level is not None:
            sizes[self.level] = SPANS[self.level]
        self.of_hot = Partition.build(cluster, range(6), sizes)
        shares, self.hot = shared(choices), set()
        for domain in range(self.of_hot.num_domains if self.level is not None else 0):
            experts = [one for one in range(12) if self.of_hot.domain_index(one // 2) == domain]
            experts.sort(key=lambda one: (-round(shares[one], 8), one))
            self.hot.update(self.fewest(experts, plan.num_hot, shares))

    def fewest(self, experts, most, shares):
        """Of the experts with the most rows, the fewest that leave the fullest rank about the least rows."""
        fullest = []
        for count in range(most + 1):
            rows = [sum(shares[one] for one in experts[:count]) / SPANS[self.level]] * SPANS[self.level]
            for one in experts[count:]:
                rows[self.cold.position_of(one // 2)[self.level]] += shares[one]
            fullest.append(max(rows))
        if min(fullest) > (1 - LEAST_GAIN) * fullest[0]:
            return []
        return experts[: next(count for count, rows in enumerate(fullest) if rows <= (1 + TIE) * min(fullest))]

    def rank_of(self, source, expert):
        """The rank that computes a row of `source` for an expert."""
        partition = self.of_hot if expert in self.hot else self.cold
        return partition.peer_of(source, partition.domain_index(expert // 2))

    def rows(self):
        """Rows that each rank computes, if every rank has one token."""
        computed = [0.0] * 6
        for source, (choice, chance) in itertools.product(range(6), self.choices.items()):
            for expert in choice:
                computed[self.rank_of(source, expert)] += chance
        return computed

    def sent(self, exchange):
        """[level, sender, receiver]: rows, if every rank has one token."""
        sent = [[[0.0] * 6 for _ in range(6)] for _ in SPANS]
        cluster = self.cold.cluster
        for source, (choice, chance) in itertools.product(range(6), self.choices.items()):
            at = {source: set(choice)}  # where copies of the token are, and the experts that they are for
            for level in range(2) if exchange == "hierarchical" else [None]:
                moved = {}
                for here, experts in at.items():
                    for expert in experts:
                        there = self.rank_of(source, expert)
                        if level == 0:  # only as far as this level
                            there = cluster.rank_at((cluster.place_of(there)[0], cluster.place_of(here)[1]))
                        moved.setdefault((here, there), set()).add(expert)
                at = {}
                for (here, there), experts in moved.items():
                    at.setdefault(there, set()).update(experts)
                    if here != there:
                        sent[cluster.level_between(here, there)][here][there] += chance
        return sent


@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize(("domain_sizes", "hot_level", "num_hot"), PLANS)
def test_rows_of_ranks_are_those_of_all_choices(domain_sizes, hot_level, num_hot, top_k):
    choices, plan, workload = uneven(top_k, domain_sizes, hot_level, num_hot)
    routing, slowly = routing_of(plan, workload), Slowly(choices, plan)
    assert routing.hot == slowly.hot
    rows = slowly.rows()
    assert sum(rows) == pytest.approx(6 * top_k)
    assert routing.rank_rows == pytest.approx([one / top_k for one in rows])
    assert routing.load_after == pytest.approx(max(rows) / top_k)
    before = Slowly(choices, dataclasses.replace(plan, hot=None)).rows()
    assert routing.load_before == pytest.approx(max(before) / top_k)


@pytest.mark.parametrize(("domain_sizes", "hot_level", "num_hot"), PLANS)
def test_gradients_of_replicas_leave_over_one_level_each(domain_sizes, hot_level, num_hot):
    _, plan, workload = uneven(2, domain_sizes, hot_level, num_hot)
    routing = routing_of(plan, workload)
    owned = 2 * sum(gradient_messages(plan, level) for level in range(2))
    sent = sum(gradients_sent(plan, workload, level) for level in range(2))
    assert sent == pytest.approx(owned + routing.num_far)
    # Where they are encoded, each has a residual.
    half = CodecCost("half", 2.0, encode_bytes_per_s=1e6, decode_bytes_per_s=1e6)
    encoded = dataclasses.replace(plan, codecs=(LevelCodecs(gradient=half),) * 2)
    of_expert = 4 * workload.expert_travel_params
    assert gradient_residuals(plan, workload) == 0
    assert gradient_residuals(encoded, workload) == pytest.approx((owned + routing.num_far) * of_expert)
    exact, halved = (predict(cluster_of(*SPANS), one, workload, RATES) for one in (plan, encoded))
    for plain, less in zip(exact.uplink_bytes, halved.uplink_bytes, strict=True):
        assert less["expert_gradients"] == pytest.approx(plain["expert_gradients"] / 2)
        assert less["expert_weights"] == plain["expert_weights"]
    assert (halved.terms_s["codec_s"] > 0) == (owned + routing.num_far > 0)


@pytest.mark.parametrize("exchange", ["direct", "hierarchical"])
@pytest.mark.parametrize("top_k", [1, 2, 3])
@pytest.mark.parametrize(("domain_sizes", "hot_level", "num_hot"), PLANS)
def test_rows_sent_are_those_of_all_choices(domain_sizes, hot_level, num_hot, top_k, exchange):
    choices, plan, workload = uneven(top_k, domain_sizes, hot_level, num_hot)
    plan = dataclasses.replace(plan, token_exchange=exchange)
    sent = Slowly(choices, plan).sent(exchange)
    totals = [sum(map(sum, rows)) for rows in sent]
    assert row_counts(plan, dataclasses.replace(workload, tokens_per_rank=6)) == pytest.approx(totals, abs=1e-6)
    # Over the busiest uplink: of rows, and of gate weights and row counts beside them.
    cluster, message = cluster_of(*SPANS), toy()
    found = predict(cluster, plan, workload, RATES).uplink_bytes
    into = [
        max(
            sum(sent[level][a][b] for a, b in itertools.permutations(range(6), 2) if child == b // below)
            for child in range(6 // below)
        )
        for level, below in ((0, 3), (1, 1))
    ]
    row_bytes = 4 * message.row_bytes + 12 * top_k
    for level in range(2):
        rows_only = found[level]["tokens"] - counts_only(cluster, plan, workload)[level]
        tokens = TOY.num_moe_layers * workload.tokens_per_rank
        assert rows_only == pytest.approx(into[level] * row_bytes * tokens, rel=1e-6, abs=1e-3)


def counts_only(cluster, plan, workload):
    without = dataclasses.replace(workload, row_scale=0.0)
    return [kinds["tokens"] for kinds in predict(cluster, plan, without, RATES).uplink_bytes]
