# SPDX-License-Identifier: Apache-2.0
"""ZeRO-3 and FSDP: seconds, bytes and memory against sums by hand."""

from dataclasses import replace

import pytest

from ds_hybridep.geometry.cluster import Cluster, Level, LinkSpeed
from ds_hybridep.plan.question import Question
from ds_hybridep.plan.rates import Rates
from ds_hybridep.plan.rivals import alternatives
from ds_hybridep.plan.sharded import sharded
from ds_hybridep.plan.workload import MoEModel, Workload

LAYERS, EXPERTS, OF_EXPERT, DENSE, TOKENS, TOP_K, STEPS = 4, 8, 2_000_000, 16_000_000, 1000, 2, 3
ALL = LAYERS * EXPERTS * OF_EXPERT + DENSE
MODEL = MoEModel(
    name="toy", hidden=1000, num_experts=EXPERTS, top_k=TOP_K, num_moe_layers=LAYERS, expert_shapes=((1000, 2000),),
    dense_shapes=((1000, 1000),) * 16, active_dense_params=DENSE,
)  # fmt: skip
WORKLOAD = Workload(model=MODEL, tokens_per_rank=TOKENS, micro_steps=STEPS)
WAN, LAN, DELAY_S, FLOPS = 1e8, 1e11, 0.05, 1e12
CLUSTER = Cluster((Level("dc", 2, LinkSpeed(WAN, DELAY_S)), Level("gpu", 4, LinkSpeed(LAN, 0.0))))
FORWARD_S = 2 * TOKENS * (DENSE + LAYERS * TOP_K * OF_EXPERT) / FLOPS


def test_inside_each_datacentre_gradients_cross_once_and_hide_behind_the_last_backward():
    found = sharded(CLUSTER, WORKLOAD, Rates(flops_per_s=FLOPS), "inside")
    assert found.link_bytes == 2 * 1 / 2 * ALL * 2  # a ring of two, gradients in bf16
    crossing_s = found.link_bytes / WAN - 2 * FORWARD_S + 2 * DELAY_S
    assert found.step_s == pytest.approx(STEPS * 3 * FORWARD_S + crossing_s)
    assert found.wait_s == pytest.approx(crossing_s)


def test_over_all_ranks_parameters_cross_twice_and_gradients_once_in_each_micro_step():
    found = sharded(CLUSTER, WORKLOAD, Rates(flops_per_s=FLOPS), "everywhere")
    assert found.link_bytes == pytest.approx(STEPS * 7 / 8 * 3 * ALL * 2)
    assert found.step_s == pytest.approx(found.link_bytes / WAN)


def test_frozen_parameters_are_gathered_too_but_only_gradients_of_adapters_cross():
    adapters = replace(WORKLOAD, trainable_expert_shapes=(), trainable_dense_shapes=((1000, 16),))
    inside, over_all = (
        sharded(CLUSTER, adapters, Rates(flops_per_s=FLOPS), one) for one in ("inside", "everywhere")
    )  # fmt: skip
    assert inside.link_bytes == 16_000 * 2
    assert over_all.link_bytes == pytest.approx(STEPS * 7 / 8 * (2 * ALL + 16_000) * 2)


def test_memory_is_a_share_of_everything_whole_layers_and_activations():
    memory = sharded(CLUSTER, WORKLOAD, Rates(flops_per_s=FLOPS), "inside").memory
    assert memory.dense_bytes == pytest.approx(ALL * (2 + 2 + 12) / 4)
    assert memory.replica_bytes == 2 * 2 * (EXPERTS * OF_EXPERT + DENSE / LAYERS)
    on_host = sharded(CLUSTER, replace(WORKLOAD, offloads_optimizer=True), Rates(flops_per_s=FLOPS), "inside").memory
    assert on_host.host_bytes == pytest.approx(memory.dense_bytes - on_host.dense_bytes) == pytest.approx(ALL * 12 / 4)


def test_zero_plus_plus_crosses_with_8_bit_weights_in_the_forward_and_4_bit_gradients():
    """Two machines of four: a ring over eight for the forward, one of four inside for the backward."""
    found = sharded(CLUSTER, WORKLOAD, Rates(flops_per_s=FLOPS), "quantised")
    # A machine sends the half of its sums that the other owns.
    assert found.link_bytes == pytest.approx(STEPS * (7 / 8 * ALL * 1 + ALL / 2 * 1 / 2))
    assert found.step_s == pytest.approx(found.link_bytes / WAN)
    # Inside: both gathers, three quarters of the gradients, and a quarter of what leaves the machine.
    slow = replace(CLUSTER.levels[1], link=LinkSpeed(1e7, 0.0))
    inside = sharded(Cluster((CLUSTER.levels[0], slow)), WORKLOAD, Rates(flops_per_s=FLOPS), "quantised")
    passed = 7 / 8 * ALL + 3 / 4 * ALL + ALL / 2 * (3 / 4 + 1 / 4 * 1 / 2)
    assert inside.step_s == pytest.approx(STEPS * passed / 1e7)


def test_zero_plus_plus_between_several_machines_of_a_datacentre_sends_from_each():
    """Two datacentres of two machines of eight: each machine sends all others their quarter of its sums."""
    cluster = Cluster((CLUSTER.levels[0], Level("gpu", 16, LinkSpeed(LAN, 0.0))))
    found = sharded(cluster, WORKLOAD, Rates(flops_per_s=FLOPS), "quantised")
    assert found.link_bytes == pytest.approx(STEPS * (31 / 32 * ALL + 2 * ALL / 2 * 2 / 4))
    # The same where machines are a level of their own.
    levels = cluster.levels[0], Level("node", 2, LinkSpeed(LAN, 0.0)), Level("gpu", 8, LinkSpeed(LAN, 0.0))
    by_node = sharded(Cluster(levels), WORKLOAD, Rates(flops_per_s=FLOPS), "quantised")
    assert by_node == found


def test_zero_plus_plus_holds_its_parameters_twice():
    plain, second = (
        sharded(CLUSTER, WORKLOAD, Rates(flops_per_s=FLOPS), one).memory for one in ("everywhere", "quantised")
    )  # fmt: skip
    assert second.dense_bytes - plain.dense_bytes == pytest.approx(ALL * 2 / 4)


def test_micro_batches_are_as_large_as_fit():
    """Nobody keeps micro-batches that do not fit: a step has the same tokens in more micro-steps."""
    workload = replace(WORKLOAD, tokens_per_rank=8000, sequence_tokens=1000)
    question = Question(cluster=CLUSTER, workload=workload, rates=Rates(flops_per_s=FLOPS))
    free = next(way for way in alternatives(question) if "HYBRID_SHARD" in way.name)
    tight = replace(question, memory_bytes=free.memory_bytes - 1e6)
    found = next(way for way in alternatives(tight) if way.name == free.name)
    assert not found.lacking_bytes
    assert found.remark == "micro-batches of 4000 tokens"
    assert found.step_s >= free.step_s
    least = next(way for way in alternatives(replace(question, memory_bytes=1e6)) if way.name == free.name)
    assert least.remark == "micro-batches of 1000 tokens"  # one sequence
    assert least.lacking_bytes
