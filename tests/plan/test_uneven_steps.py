# SPDX-License-Identifier: Apache-2.0
"""Steps, bytes and memory under a skew and with hot experts."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import TOY, cases, cluster_of, plan_over, toy

from ds_hybridep.errors import PlanError
from ds_hybridep.geometry.hot import TIE
from ds_hybridep.plan.memory import memory_of
from ds_hybridep.plan.plan import HotLimit, Plan
from ds_hybridep.plan.rates import Rates
from ds_hybridep.plan.routing import routing_of
from ds_hybridep.plan.stream_model import predict

RATES = Rates(flops_per_s=1e9)
TWO = dataclasses.replace(TOY, num_experts=2, top_k=1)
SIXTEEN = dataclasses.replace(TOY, num_experts=16)
PLAIN = plan_over((4,), (1,))
HOT = dataclasses.replace(PLAIN, hot=HotLimit(0, 2))


def step(plan, workload, **links):
    return predict(cluster_of(*plan.spans, **links), plan, workload, RATES)


@settings(max_examples=60)
@given(cases())
def test_a_skew_of_one_and_no_hot_experts_change_nothing(case):
    cluster, plan, workload, rates = case
    even = dataclasses.replace(workload, skew=1.0)
    alone = [level for level, size in enumerate(plan.domain_sizes) if size == 1 and not plan.is_padded]
    for hot in (None, *(HotLimit(level, "auto") for level in alone)):  # how many is decided while the job runs
        same = dataclasses.replace(plan, hot=hot)
        assert predict(cluster, same, even, rates) == predict(cluster, plan, workload, rates)
        assert memory_of(cluster, same, workload) == memory_of(cluster, plan, workload)


def test_even_loads_are_even_routing():
    even, given_loads = (step(PLAIN, toy(expert_loads=loads)) for loads in (None, (7.0,) * 8))
    assert given_loads.terms_s == pytest.approx(even.terms_s)


@settings(max_examples=60)
@given(cases(), st.floats(1.0, 2.0), st.floats(1.0, 2.0))
def test_a_higher_skew_never_makes_a_step_shorter_or_smaller(case, first, second):
    cluster, plan, workload, rates = case
    seconds, num_bytes = [], []
    for skew in sorted((first, second)):
        # What a group of one rank can have is 1; a group of two, 2.
        skew = min(skew, plan.group_size, min(2, workload.model.num_experts / 2))
        uneven = dataclasses.replace(workload, skew=skew)
        seconds.append(predict(cluster, plan, uneven, rates).step_s)
        num_bytes.append(memory_of(cluster, plan, uneven).total_bytes)
    if plan.domain_size == 1:
        assert seconds[0] <= seconds[1] * (1 + 1e-9)
        assert num_bytes[0] <= num_bytes[1] * (1 + 1e-9)


def test_the_fullest_rank_computes_skew_times_as_long_but_deepspeeds_layer_its_capacity():
    even, uneven = (step(PLAIN, toy(skew=skew, is_checkpointed=True)) for skew in (1.0, 1.7))
    assert uneven.terms_s["experts_s"] == pytest.approx(1.7 * even.terms_s["experts_s"])
    assert uneven.terms_s["dense_s"] == even.terms_s["dense_s"]
    padded = dataclasses.replace(PLAIN, token_exchange="deepspeed")
    assert step(padded, toy(skew=1.7)) == step(padded, toy())


def test_hot_experts_share_their_rows():
    workload = toy(model=SIXTEEN, skew=2.0)
    terms = {
        count: step(dataclasses.replace(HOT, hot=HotLimit(0, count)), workload).terms_s["experts_s"]
        for count in (0, 1, 2, 4, 8, 16)
    }
    assert list(terms.values()) == sorted(terms.values(), reverse=True)
    assert terms[0] / 2.0 <= terms[16] <= (1 + TIE) * terms[0] / 2.0  # where all share all
    assert routing_of(HOT, toy(model=SIXTEEN, skew=1.01)).hot == frozenset()  # they would save too little


def test_rows_of_hot_experts_stay():
    """One expert for each of two ranks, three of four rows for the first: its rows, those of the other, then none."""
    workload, rows = toy(model=TWO, expert_loads=(3.0, 1.0)), []
    for count in range(3):
        plan = plan_over((2,), (1,), hot=HotLimit(0, count))
        assert routing_of(plan, workload).hot == frozenset(range(count))
        rows.append(step(plan, workload).uplink_bytes[0]["tokens"] - TOY.num_moe_layers * 16)  # without row counts
    assert rows[0] == pytest.approx(3 * rows[1], rel=1e-6)
    assert rows[1] > 0
    assert rows[2] == 0


def test_copies_of_hot_experts_are_those_of_a_hand_count():
    """Four ranks with two experts each.  Experts 0, 1 and 4 are hot: 9, 8 and 7 of 29 rows."""
    workload = toy(expert_loads=(9.0, 8.0, 1.0, 1.0, 7.0, 1.0, 1.0, 1.0))
    plan = dataclasses.replace(HOT, hot=HotLimit(0, 3))
    assert routing_of(plan, workload).hot == {0, 1, 4}
    sent = step(plan, workload).uplink_bytes[0]
    # Rank 0 owns two of them, and sends both to each of three ranks; all others get at most three.
    assert sent["expert_weights"] == sent["expert_gradients"] == TOY.num_moe_layers * 2 * 3 * 33088 * 4
    one = dataclasses.replace(HOT, hot=HotLimit(0, 1))
    assert step(one, workload).uplink_bytes[0]["expert_weights"] == TOY.num_moe_layers * 3 * 33088 * 4
    # Two groups of two ranks inside each of two datacentres: each has hot experts of its own, over its own link only.
    inside = Plan(spans=(1, 2), domain_sizes=(1, 1), codecs=PLAIN.codecs * 2, hot=HotLimit(1, 1))
    sent = step_of(cluster_of(2, 2), inside, workload)
    assert [kinds["expert_weights"] for kinds in sent] == [0.0, TOY.num_moe_layers * 33088 * 4]


def step_of(cluster, plan, workload):
    return predict(cluster, plan, workload, RATES).uplink_bytes


def test_copies_wait_for_a_slow_link_and_hide_behind_computation():
    workload = toy(skew=1.7, tokens_per_rank=4096)
    alone = TOY.num_moe_layers * 3 * 33088 * 4 / 1e9
    for rates, exposed in ((RATES, 0.0), (dataclasses.replace(RATES, overlap=0.0), alone)):
        plan = dataclasses.replace(HOT, hot=HotLimit(0, 1))
        terms = predict(cluster_of(4, bandwidth=1e9), plan, workload, rates).terms_s
        assert terms["expert_weights_s"] == pytest.approx(exposed, abs=1e-3 * alone)


def test_a_domain_over_a_slow_level_and_hot_experts_inside_are_one_packet():
    """Ranks (0, j) and (1, j) hold each other's experts; hot ones go on to all j of their datacentre."""
    loads = (9.0,) + (1.0,) * 7
    plan = plan_over((2, 4), (2, 1), hot=HotLimit(1, 1))
    sent = step_of(cluster_of(2, 4), plan, toy(expert_loads=loads))
    own, layers = 33088 * 4, TOY.num_moe_layers
    # Each of four ranks below an uplink sends its expert over it; then the hot one goes to three ranks.
    assert [kinds["expert_weights"] for kinds in sent] == [4 * layers * own, 3 * layers * own]
    assert [kinds["expert_gradients"] for kinds in sent] == [4 * layers * own, 3 * layers * own]
    plain = dataclasses.replace(plan, hot=None)
    before, after = (step_of(cluster_of(2, 4), one, toy(expert_loads=loads)) for one in (plain, plan))
    assert before[0]["tokens"] == after[0]["tokens"] == 0.0
    assert after[1]["tokens"] < before[1]["tokens"]


@pytest.mark.parametrize("micro_steps", [1, 4])
def test_memory_of_hot_experts_is_that_of_a_hand_count(micro_steps):
    """The same three hot experts: ranks 1 and 3 have three replicas, rank 0 one and the copies that it sends."""
    workload = toy(expert_loads=(9.0, 8.0, 1.0, 1.0, 7.0, 1.0, 1.0, 1.0), micro_steps=micro_steps)
    plan, layers, params = dataclasses.replace(HOT, hot=HotLimit(0, 3)), TOY.num_moe_layers, 33088
    found = memory_of(cluster_of(4), plan, workload)
    in_flight = layers if micro_steps > 1 else 3  # sums of prefetch_depth + 1 layers, or of all
    # Owned: two experts; while gradients return, their sums, and two more for those of the hot ones.
    returning = min(5, layers) * (2 + 2) * 4 * params
    assert found.replica_bytes == layers * 3 * 4 * params + in_flight * 3 * 4 * params + returning
    assert memory_of(cluster_of(4), PLAIN, workload).replica_bytes == 0.0
    # Fewer rows on the fullest rank keep fewer activations.
    assert found.activation_bytes < memory_of(cluster_of(4), PLAIN, workload).activation_bytes


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"hot": HotLimit(2, 2)}, "2 hot experts inside level 2 do not fit"),
        ({"hot": HotLimit(0, 2)}, r"inside level 0 do not fit domain sizes \(2, 1\)"),
        (
            {"hot": HotLimit(1, 2), "token_exchange": "deepspeed"},
            r"do not fit domain sizes \(2, 1\) and padded all-to-alls",
        ),
    ],
)
def test_hot_experts_that_do_not_fit_a_plan_are_refused(plan, message):
    with pytest.raises(PlanError, match=message):
        plan_over((2, 4), (2, 1), **plan)
