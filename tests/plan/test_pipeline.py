# SPDX-License-Identifier: Apache-2.0
"""The pipeline's schedule against what can be said of it beforehand, and its memory."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import TOY, toy

from ds_hybridep.geometry.cluster import Cluster, Level, LinkSpeed
from ds_hybridep.plan.pipeline import pipelines, schedule_s
from ds_hybridep.plan.rates import Rates
from ds_hybridep.plan.rivals import without_domains
from ds_hybridep.plan.stream_model import predict

seconds = st.floats(0.01, 2.0)


def step_by_step(num_stages, num_batches, ahead, forward_s, backward_s, transfer_s, latency_s):
    """The schedule, slow and obvious: whoever can begin first does so, until all is done."""
    stages, batches = range(num_stages), range(num_batches)
    programs = {}
    for stage in stages:
        first = min(ahead * (num_stages - 1 - stage), num_batches)
        later = itertools.zip_longest(range(first, num_batches), batches)
        turns = [("F", batch) for batch in range(first)]
        turns += [turn for pair in later for turn in zip("FB", pair, strict=True) if turn[1] is not None]
        programs[stage] = turns
    clock, uplink = dict.fromkeys(stages, 0.0), dict.fromkeys(stages, 0.0)
    there = {("F", 0, batch): 0.0 for batch in batches}
    while any(programs.values()):
        ready = [
            (max(clock[stage], there[kind, stage, batch]), stage, kind, batch)
            for stage, ((kind, batch), *_) in ((stage, turns) for stage, turns in programs.items() if turns)
            if (kind, stage, batch) in there
        ]
        begin_s, stage, kind, batch = min(ready)
        programs[stage].pop(0)
        clock[stage] = begin_s + (forward_s if kind == "F" else backward_s)
        if kind == "F" and stage == num_stages - 1:
            there["B", stage, batch] = clock[stage]
        elif kind == "F" or stage > 0:
            uplink[stage] = max(uplink[stage], clock[stage]) + transfer_s
            there[kind, stage + (1 if kind == "F" else -1), batch] = uplink[stage] + latency_s
    return clock[0]


@settings(max_examples=50)
@given(st.integers(1, 9), st.sampled_from([2.0, 3.0]), seconds, seconds, seconds, st.integers(1, 3))
def test_two_stages_take_what_a_schedule_worked_out_step_by_step_takes(rows, ratio, forward, transfer, latency, ahead):
    batches, backward = 2 * rows, ratio * forward
    found = schedule_s(2, batches, ahead, forward + backward, transfer_s=transfer, latency_s=latency)
    assert found == pytest.approx(step_by_step(2, batches, ahead, forward, backward, transfer, latency))


@settings(max_examples=50)
@given(st.integers(3, 5), st.integers(1, 8), st.floats(0.0, 1.0), st.floats(0.0, 1.0), st.integers(2, 3))
def test_more_stages_that_run_ahead_take_as_long_within_three_percent(stages, rows, transfer, latency, ahead):
    found = schedule_s(stages, stages * rows, ahead, 3.0, transfer_s=transfer, latency_s=latency)
    assert found == pytest.approx(step_by_step(stages, stages * rows, ahead, 1.0, 2.0, transfer, latency), rel=0.03)


def test_over_an_idle_border_the_bubble_is_one_batch_for_each_further_stage():
    for stages, batches in itertools.product((1, 2, 4), (4, 7)):
        assert schedule_s(stages, batches, 1, 3.0, transfer_s=0.0, latency_s=0.0) == pytest.approx(
            (batches + stages - 1) * 3.0
        )


def test_running_ahead_hides_the_way_over_a_slow_border():
    assert (
        schedule_s(2, 20, 1, 3.0, transfer_s=0.5, latency_s=1.0)
        > schedule_s(2, 20, 2, 3.0, transfer_s=0.5, latency_s=1.0)
        >= 20 * 3.0
    )
    # A border that is slower than the stages sets the pace.
    assert schedule_s(2, 20, 3, 3.0, transfer_s=5.0, latency_s=0.0) >= 20 * 5.0


def test_bytes_and_memory_of_a_pipeline():
    workload = toy(param_bytes=2, zero_stage=1, micro_steps=2, is_checkpointed=True)
    cluster = Cluster((Level("dc", 2, LinkSpeed(1e6, 0.01)), Level("gpu", 2, LinkSpeed(1e9, 0.0))))
    rates, inside = Rates(flops_per_s=1e9), without_domains((2,))
    whole = predict(Cluster(cluster.levels[1:]), inside, workload, rates)
    one, two, three = pipelines(cluster, inside, workload, rates, whole=whole)
    # Four micro-batches of two ranks cross each uplink once.
    assert one.border_bytes == 4 * 2 * workload.tokens_per_rank * workload.row_bytes
    # Half of the layers, with all experts of these shared out over two ranks that no other ranks hold.
    experts = TOY.num_moe_layers / 2 * TOY.num_experts / 2
    assert one.memory.owned_expert_bytes == experts * TOY.expert_params * (2 + 2 + 12)
    assert one.memory.dense_bytes == TOY.dense_params / 2 * (2 + 2 + 12 / 2)
    stored = TOY.num_moe_layers / 2 * workload.tokens_per_rank * workload.row_bytes
    assert three.memory.activation_bytes - two.memory.activation_bytes == pytest.approx(stored)
    assert one.step_s >= whole.step_s
    fewer = dataclasses.replace(workload, micro_steps=1)
    assert next(pipelines(cluster, inside, fewer, rates, whole=whole)).border_bytes == one.border_bytes / 2
