# SPDX-License-Identifier: Apache-2.0
import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hybridep.errors import PlanError
from ds_hybridep.plan.costs import row_counts
from ds_hybridep.plan.layout import Layout, LevelCodecs
from ds_hybridep.plan.routing import chance_needed, expected_rows_of_load
from ds_hybridep.plan.token_route import expected_rows_of
from ds_hybridep.plan.workload import MoEModel, Workload

properties = settings(deadline=None, max_examples=60)
SPANS = st.lists(st.sampled_from([1, 2, 3]), min_size=1, max_size=3)


def rows_by_hand(load, spans, domain_sizes, top_k, exchange):
    """Every choice of experts by its chance, every rank, every destination."""
    ranks = list(itertools.product(*(range(span) for span in spans)))
    per_rank = len(load) // len(ranks)
    domains = [tuple(p // s for p, s in zip(rank, domain_sizes, strict=True)) for rank in ranks]
    choices = list(itertools.combinations(range(len(load)), top_k))
    weights = [math.prod(load[expert] for expert in choice) for choice in choices]
    rows = [0.0] * len(spans)
    for own in domains:
        for choice, weight in zip(choices, weights, strict=True):
            needed = {domains[expert // per_rank] for expert in choice}
            chance = weight / sum(weights) / len(ranks)
            if exchange == "direct":
                for domain in needed:
                    first = next((i for i, (a, b) in enumerate(zip(domain, own, strict=True)) if a != b), None)
                    if first is not None:
                        rows[first] += chance
            else:
                for level in range(len(spans)):
                    # All ranks send alike, so count what leaves coordinate own[level], from whoever it came.
                    prefixes = {domain[: level + 1] for domain in needed}
                    rows[level] += chance * sum(prefix[level] != own[level] for prefix in prefixes)
    return rows


@properties
@given(SPANS, st.data())
def test_rows_of_a_load_are_those_counted_by_hand(spans, data):
    domain_sizes = [data.draw(st.sampled_from([1, span])) for span in spans]
    num_experts = math.prod(spans) * (1 if math.prod(spans) > 2 else 2)
    if num_experts > 9:
        return
    load = tuple(data.draw(st.floats(0.01, 10)) for _ in range(num_experts))
    top_k = data.draw(st.integers(1, min(3, num_experts)))
    exchange = data.draw(st.sampled_from(["direct", "hierarchical"]))
    found = expected_rows_of_load(load, spans, domain_sizes, top_k=top_k, num_tokens=1, exchange=exchange)
    assert found == pytest.approx(rows_by_hand(load, spans, domain_sizes, top_k, exchange), abs=1e-9)


@properties
@given(SPANS, st.integers(1, 4), st.sampled_from(["direct", "hierarchical"]), st.floats(1e-3, 1e3))
def test_even_loads_are_even_routing(spans, top_k, exchange, load):
    num_experts = math.prod(spans) * 4
    ones = [1] * len(spans)
    found = expected_rows_of_load((load,) * num_experts, spans, ones, top_k=top_k, num_tokens=100, exchange=exchange)
    assert found == pytest.approx(expected_rows_of(spans, num_experts, top_k, 100, exchange))


def test_chance_of_one_expert_under_top_1_is_its_share():
    assert chance_needed((1.0, 2.0, 5.0), frozenset({2}), 1) == pytest.approx(5 / 8)
    assert chance_needed((1.0, 2.0, 5.0), frozenset({0, 2}), 3) == 1.0


def test_a_workload_with_a_load_sends_other_rows():
    model = MoEModel(
        name="toy", hidden=1, num_experts=4, top_k=1, num_moe_layers=1, expert_params=1, dense_params=1,
        active_dense_params=1,
    )  # fmt: skip
    layout = Layout(spans=(2,), domain_sizes=(1,), codecs=(LevelCodecs(),))
    loaded = Workload(model=model, tokens_per_rank=10, expert_load=(4.0, 4.0, 1.0, 1.0))
    assert row_counts(layout, loaded) == pytest.approx((5.0,))  # the mean of 2 to the right and 8 to the left
    with pytest.raises(PlanError, match="expert_load has 3 entries, but the model has 4"):
        Workload(model=model, tokens_per_rank=10, expert_load=(1.0, 1.0, 1.0))


@pytest.mark.parametrize("load", [(1.0, 1.0, 1.0), (1.0, -1.0), (1.0, 0.0)])
def test_wrong_loads_are_refused(load):
    with pytest.raises(PlanError, match=f"expert_load has {len(load)} entries"):
        expected_rows_of_load(load, (2,), (1,), top_k=2, num_tokens=1, exchange="direct")
