# SPDX-License-Identifier: Apache-2.0
import dataclasses
import itertools

import pytest
import torch
from estimate import needs_of_layers, shell
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import TOY, cases, cluster_of, plan_over, toy

from ds_hybridep.errors import PlanError
from ds_hybridep.geometry import packets
from ds_hybridep.geometry.cluster import Cluster, Level, LinkSpeed
from ds_hybridep.geometry.packets import COMPACT_BYTES
from ds_hybridep.plan.costs import HOST_BYTES_PER_S, row_counts
from ds_hybridep.plan.memory import memory_of
from ds_hybridep.plan.model_sizes import model_from_mapping
from ds_hybridep.plan.models import read_model_file
from ds_hybridep.plan.plan import ExpertGroup, LevelCodecs, Plan
from ds_hybridep.plan.rates import CodecCost, Rates
from ds_hybridep.plan.stream_model import predict
from ds_hybridep.plan.workload import MoEModel, Workload

# A slow machine is no failure, so there is no deadline per example.
properties = settings(max_examples=150)

FAST = 1e15


rates_of_toy = Rates(flops_per_s=1e9)
FASTEST = cluster_of(2, 2, bandwidth=1e15)


@properties
@given(cases())
def test_no_step_is_shorter_than_its_bytes_take_on_any_level(case):
    cluster, plan, workload, rates = case
    prediction = predict(cluster, plan, workload, rates)
    for level, entry in enumerate(cluster.levels):
        assert prediction.step_s >= prediction.level_bytes(level) / entry.link.bandwidth_bytes_per_s * (1 - 1e-9)


@properties
@given(cases(), st.data())
def test_less_bandwidth_never_makes_a_step_shorter(case, data):
    cluster, plan, workload, rates = case
    level = data.draw(st.integers(0, len(cluster.levels) - 1))
    slower = cluster.levels[level].link.bandwidth_bytes_per_s * data.draw(st.floats(0.01, 1.0))
    before = predict(cluster, plan, workload, rates).step_s
    after = predict(cluster.with_link(level, bandwidth_bytes_per_s=slower), plan, workload, rates).step_s
    assert after >= before * (1 - 1e-9)


@properties
@given(cases())
def test_waiting_for_gradients_later_never_takes_longer(case):
    cluster, plan, workload, rates = case
    deeper = dataclasses.replace(plan, prefetch_depth=plan.prefetch_depth + 1)
    assert predict(cluster, deeper, workload, rates).step_s <= predict(
        cluster, plan, workload, rates
    ).step_s * (1 + 1e-9)  # fmt: skip


@properties
@given(cases())
def test_terms_are_not_negative_and_add_up(case):
    cluster, plan, workload, rates = case
    prediction = predict(cluster, plan, workload, rates)
    terms = prediction.terms_s
    assert all(seconds >= 0 for seconds in terms.values())
    assert prediction.step_s == pytest.approx(sum(terms.values()))


# ---- bytes ----


def test_expert_bytes_are_those_that_the_runtime_counted():
    # Recorded with benchmarks e2e: 4235264 B of weights, and of gradients, over both DC uplinks.
    prediction = predict(cluster_of(2, 2), plan_over((2, 2), (2, 1)), toy(), rates_of_toy)
    assert 2 * prediction.uplink_bytes[0]["expert_weights"] == 4235264
    assert 2 * prediction.uplink_bytes[0]["expert_gradients"] == 4235264
    assert prediction.uplink_bytes[0]["tokens"] == 0
    assert prediction.uplink_bytes[1]["expert_weights"] == 0


def packet_bytes(plan, workload, way):
    """What a rank of 2 x 2 sends over each level of a layer's experts."""
    cluster = cluster_of(2, 2)
    sent = predict(cluster, plan, workload, rates_of_toy).uplink_bytes
    totals = (kinds[f"expert_{way}"] / TOY.num_moe_layers for kinds in sent)
    return tuple(total / below for total, below in zip(totals, cluster.ranks_below, strict=True))


@pytest.mark.parametrize("domain_sizes", [(2, 1), (1, 2), (2, 2)])
def test_packets_are_counted_as_they_are_sent(domain_sizes):
    """Each rank forwards, level by level, all the experts that it has by then."""
    plan, workload = plan_over((2, 2), domain_sizes), toy()
    own = 2 * workload.expert_travel_bytes
    held, expected = own, []
    for size in domain_sizes:
        expected.append((size - 1) * held)
        held *= size
    assert packet_bytes(plan, workload, "weights") == pytest.approx(expected)
    assert packet_bytes(plan, workload, "gradients") == pytest.approx(expected)


def test_a_packet_keeps_the_codec_of_the_slowest_level_that_it_crossed():
    codecs = (LevelCodecs(weight=CodecCost("a", 10.0), gradient=CodecCost("b", 20.0)), LevelCodecs())
    plan = Plan(spans=(2, 2), domain_sizes=(2, 2), codecs=codecs)
    own = 2 * toy().expert_travel_bytes
    assert packet_bytes(plan, toy(), "weights") == pytest.approx((own / 10, own + own / 10))
    assert packet_bytes(plan, toy(), "gradients") == pytest.approx((own / 20, 2 * own))


def test_adapters_alone_travel():
    plan = plan_over((2, 2), (2, 1))
    full, adapters = toy(), toy(trainable_expert_shapes=((331,),))
    share = 331 / TOY.expert_params
    assert packet_bytes(plan, adapters, "weights")[0] == pytest.approx(share * packet_bytes(plan, full, "weights")[0])


def test_a_padded_all_to_all_sends_the_capacity_of_every_expert():
    plan, workload = plan_over((2, 2), (1, 1), token_exchange="deepspeed"), toy(capacity_factor=1.25)
    found = predict(cluster_of(2, 2), plan, workload, rates_of_toy).uplink_bytes
    # 40 rows for each of 8 experts, half of which are in the other DC, and a quarter at the neighbour; in 4 layers
    # there and back, in the forward and in the backward.  Two ranks share the uplink of a DC.
    assert [kinds["tokens"] / (16 * workload.row_bytes) for kinds in found] == [2 * 160, 80]


def test_token_bytes_of_one_row():
    """Four row passes, ids and gate weights on the way there, gate gradients on the way back, 8 B of counts."""
    prediction = predict(cluster_of(2, 1), plan_over((2, 1), (1, 1)), toy(tokens_per_rank=1), rates_of_toy)
    rows = row_counts(plan_over((2, 1), (1, 1)), toy(tokens_per_rank=1))[0]
    assert prediction.uplink_bytes[0]["tokens"] == pytest.approx(4 * (rows * (4 * 256 + 16 + 8) + 16))
    checkpointed = predict(
        cluster_of(2, 1), plan_over((2, 1), (1, 1)), toy(tokens_per_rank=1, is_checkpointed=True), rates_of_toy
    )
    assert checkpointed.uplink_bytes[0]["tokens"] == pytest.approx(4 * (rows * (6 * 256 + 2 * 16 + 8) + 32))


def dense_bytes(stage, micro_steps, dense_sync="hierarchical", codecs=None, sizes=(2, 2)):
    """Over one uplink of each level, in units of all dense parameters."""
    workload, plan = toy(zero_stage=stage, micro_steps=micro_steps), plan_over(sizes, (1,) * len(sizes))
    plan = dataclasses.replace(plan, codecs=codecs or plan.codecs, dense_sync=dense_sync)
    prediction = predict(cluster_of(*sizes), plan, workload, rates_of_toy)
    return [kinds["dense_sync"] / (TOY.dense_params * 4) for kinds in prediction.uplink_bytes]


def test_sums_by_deepspeed_by_zero_stage():
    # A ring of 4: each pass sends 3/4 over each edge. All-reduce: 2 passes; parameters gathered: 1.
    assert dense_bytes(0, 4, "deepspeed")[0] == pytest.approx(1.5)
    assert dense_bytes(1, 4, "deepspeed")[0] == pytest.approx(2.25)
    assert dense_bytes(2, 4, "deepspeed")[0] == pytest.approx(0.75 * (4 * 2 + 1))


def test_sums_level_by_level_by_zero_stage():
    # Over the slow link half of the vector for a sum and half for a gather. Inside, a rank sends half of it to its
    # neighbour, and gathers what the other DC has too.
    assert dense_bytes(0, 4) == pytest.approx([1.0, 1.0])
    assert dense_bytes(1, 4) == pytest.approx([1.0, 1.0])
    assert dense_bytes(2, 4) == pytest.approx([1.0, 0.5 * 4 + 0.5])


def test_a_fastest_level_that_encodes_is_crossed_once():
    half = CodecCost("half", ratio=2.0)
    inner = (LevelCodecs(), LevelCodecs(dense_gradient=half))
    assert dense_bytes(2, 4, codecs=inner) == pytest.approx([1.0, 0.25 + 0.5])
    outer = (LevelCodecs(dense_gradient=half), LevelCodecs())
    assert dense_bytes(2, 4, codecs=outer) == pytest.approx([0.25 + 0.5, 0.5 * 4 + 0.5])
    # With one level, that is the fastest.
    assert dense_bytes(2, 4, sizes=(2, 1)) == pytest.approx([0.5 * 4 + 0.5, 0.0])
    assert dense_bytes(2, 4, codecs=outer, sizes=(2, 1)) == pytest.approx([0.25 + 0.5, 0.0])


def test_gathered_sums_and_parameters_keep_the_codec_of_the_slowest_level():
    half, quarter = CodecCost("half", ratio=2.0), CodecCost("quarter", ratio=4.0)
    sums = (LevelCodecs(dense_gradient=half), LevelCodecs(dense_gradient=quarter))
    assert dense_bytes(0, 1, codecs=sums) == pytest.approx([0.25 + 0.25, 0.125 + 0.25])
    weights = (LevelCodecs(dense_weight=half), LevelCodecs(dense_weight=quarter))
    assert dense_bytes(1, 1, codecs=weights) == pytest.approx([0.5 + 0.25, 0.5 + 0.25])
    # What is encoded over the slow link goes on so; what the rank owns does not.
    assert dense_bytes(1, 1, codecs=(weights[0], LevelCodecs())) == pytest.approx([0.5 + 0.25, 0.5 + 0.125 + 0.25])


def test_16_bit_parameters_travel_as_patches_wherever_a_level_encodes():
    workload = toy(param_bytes=2, learning_rate=1e-4)
    lossy = (LevelCodecs(dense_weight=CodecCost("int8", ratio=2.0)), LevelCodecs())
    plan = dataclasses.replace(plan_over((2, 2), (1, 1)), codecs=lossy)
    sent = [kinds["dense_sync"] for kinds in predict(cluster_of(2, 2), plan, workload, rates_of_toy).uplink_bytes]
    slot_bytes = 2 * TOY.dense_params / 4
    patch_bytes = 24 + slot_bytes / 16
    # Sums, exact; then patches.  Inside, a rank gathers its own slot and the patch that it got from the other DC.
    assert sent == pytest.approx([2 * (slot_bytes + patch_bytes), 2 * slot_bytes + slot_bytes + patch_bytes])


def test_experts_held_by_several_groups_are_synchronised():
    inside = predict(cluster_of(2, 2), plan_over((1, 2), (1, 1)), toy(), rates_of_toy)
    # Two pairs over the uplink, each with half of the experts: a sum and a gather of half of them.
    assert inside.uplink_bytes[0]["expert_sync"] == pytest.approx(2 * 0.5 * 8 * 4 * 33088 * 4)
    around = predict(cluster_of(2, 2), plan_over((1, 2), (1, 1), dense_sync="deepspeed"), toy(), rates_of_toy)
    assert around.uplink_bytes[0]["expert_sync"] == pytest.approx(3 * 0.5 * 8 * 4 * 33088 * 4)
    assert inside.uplink_bytes[0]["tokens"] == 0
    assert predict(cluster_of(2, 2), plan_over((2, 2), (1, 1)), toy(), rates_of_toy).terms_s["expert_sync_s"] == 0


def test_hierarchical_sums_cross_once_per_child():
    workload = toy(zero_stage=0, trainable_dense_shapes=((20,),))  # 80 bytes
    prediction = predict(cluster_of(2, 4), plan_over((2, 4), (1, 1)), workload, rates_of_toy)
    assert [kinds["dense_sync"] for kinds in prediction.uplink_bytes] == pytest.approx([80.0, 120.0])
    ring = predict(cluster_of(2, 4), plan_over((2, 4), (1, 1), dense_sync="deepspeed"), workload, rates_of_toy)
    assert [kinds["dense_sync"] for kinds in ring.uplink_bytes] == [140.0, 140.0]


@pytest.mark.parametrize(
    ("name", "gpus", "thousands"),
    [
        ("Qwen3-30B-A3B", 1, 74), ("Qwen3-30B-A3B", 8, 9.2), ("Mixtral-8x7B", 1, 109), ("Mixtral-8x7B", 8, 13.7),
        ("DeepSeek-V3", 1, 395), ("DeepSeek-V3", 8, 49),
    ],
)  # fmt: skip
def test_bytes_break_even_at_known_token_counts(name, gpus, thousands):
    """All experts moved, exact bf16, two DCs: token bytes equal expert bytes, the ids beside the rows left out."""
    model = model_from_mapping(read_model_file(name), name)
    tokens = round(thousands * 1000)
    workload = Workload(model=model, tokens_per_rank=tokens)
    # Rows cross a DC border once, whatever the number of GPUs behind it.
    rows = row_counts(plan_over((2, 1), (1, 1), token_exchange="hierarchical"), workload)[0] * gpus
    # Each DC sends its half of the experts, and the gradients of the other half.
    expert_bytes = model.num_experts * workload.expert_travel_bytes
    assert rows * 4 * workload.row_bytes == pytest.approx(expert_bytes, rel=0.01)


# ---- time ----


def one_way(num_layers, transfer_s, compute_s, **settings):
    """A toy of which each layer's packet takes `transfer_s`, and each layer's forward `compute_s`."""
    model = MoEModel(
        name="line", hidden=1, num_experts=2, top_k=1, num_moe_layers=num_layers, expert_shapes=((1000,),),
        dense_shapes=((num_layers,),), active_dense_params=num_layers,
    )  # fmt: skip
    workload = Workload(model=model, tokens_per_rank=1, param_bytes=1, trainable_dense_shapes=(), zero_stage=0)
    cluster = Cluster((Level("dc", 2, LinkSpeed(1000 / transfer_s, 0.0)),))
    return predict(cluster, plan_over((2,), (2,), **settings), workload, Rates(flops_per_s=2 / compute_s,
                                                                              expert_flops_per_s=FAST))  # fmt: skip


def test_sixteen_layers_on_a_serial_link_are_not_hidden_one_by_one():
    """Transfer twice the computation: all 16 packets have to pass, whatever each layer computes meanwhile."""
    terms = one_way(16, transfer_s=2.0, compute_s=1.0).terms_s
    assert terms["expert_weights_s"] + 16 * 1.0 == pytest.approx(32.0)
    # Backward: all but the experts is frozen, so a layer's 1 s hides half of its packet.
    assert terms["expert_gradients_s"] == pytest.approx(16 * (2.0 - 1.0))


def test_fast_links_hide_all_but_the_first_packet(monkeypatch):
    terms = one_way(8, transfer_s=0.5, compute_s=1.0).terms_s
    assert terms["expert_weights_s"] == pytest.approx(0.0, abs=1e-6)  # computation before the first experts hides it
    assert terms["expert_gradients_s"] == pytest.approx(0.0, abs=1e-6)
    monkeypatch.setattr(packets, "RETURNING_BYTES", 0)  # no room for what returns
    without_overlap = one_way(8, transfer_s=0.5, compute_s=1.0, prefetch_depth=0).terms_s
    assert without_overlap["expert_gradients_s"] == pytest.approx(8 * 0.5)


def test_rows_share_a_link_with_packets_in_flight():
    """Half-size domains on one level: rows and packets cross the same uplink, and take as long as their sum."""
    cluster = Cluster((Level("dc", 4, LinkSpeed(1e6, 0.0)),))
    plan, workload = plan_over((4,), (2,)), toy(tokens_per_rank=2000)
    prediction = predict(cluster, plan, workload, Rates(flops_per_s=FAST))
    assert prediction.step_s == pytest.approx(prediction.level_bytes(0) / 1e6, rel=1e-3)


def test_each_level_of_a_gather_adds_its_latency_once():
    rates, plan = Rates(flops_per_s=FAST), plan_over((2, 2), (2, 2), prefetch_depth=4)
    quiet = predict(cluster_of(2, 2, bandwidth=1e12), plan, toy(), rates)
    far = cluster_of(2, 2, bandwidth=1e12, latency_s=0.1)
    slow = predict(far, plan, toy(zero_stage=0), rates)
    assert quiet.step_s < 1e-3
    assert slow.terms_s["expert_weights_s"] == pytest.approx(0.2, rel=1e-3)
    assert slow.terms_s["expert_gradients_s"] == pytest.approx(0.2, rel=1e-3)


def test_accumulation_moves_experts_once_and_tokens_each_time():
    cluster, plan = cluster_of(2, 2), plan_over((2, 2), (2, 1))
    once, four = (predict(cluster, plan, toy(micro_steps=count), rates_of_toy) for count in (1, 4))
    assert four.uplink_bytes[0] == once.uplink_bytes[0]
    assert four.uplink_bytes[1]["tokens"] == 4 * once.uplink_bytes[1]["tokens"]
    assert four.terms_s["dense_s"] == pytest.approx(4 * once.terms_s["dense_s"])


def test_codecs_cost_time_and_save_bytes():
    codec = CodecCost("small", 50.0, encode_bytes_per_s=1e9, decode_bytes_per_s=1e9)
    exact = plan_over((2, 2), (2, 1))
    small = dataclasses.replace(exact, codecs=(LevelCodecs(codec, codec), LevelCodecs()))
    before, after = (predict(cluster_of(2, 2), plan, toy(), rates_of_toy) for plan in (exact, small))
    assert after.uplink_bytes[0]["expert_weights"] == pytest.approx(before.uplink_bytes[0]["expert_weights"] / 50)
    own_s = 4 * 2 * toy().expert_travel_bytes / 1e9
    assert after.terms_s["codec_s"] == pytest.approx(4 * own_s)  # encode and decode, both ways
    assert after.step_s < before.step_s


def test_without_overlap_every_packet_is_waited_for():
    plan, rates = plan_over((2, 2), (2, 1)), Rates(flops_per_s=1e9, overlap=0.0)
    prediction = predict(cluster_of(2, 2), plan, toy(), rates)
    terms, sent = prediction.terms_s, prediction.uplink_bytes[0]
    assert terms["expert_weights_s"] == pytest.approx(sent["expert_weights"] / 1e6)
    assert terms["expert_gradients_s"] == pytest.approx(sent["expert_gradients"] / 1e6)
    hidden, half = (
        predict(cluster_of(2, 2), plan, toy(), Rates(flops_per_s=1e9, overlap=overlap)).step_s
        for overlap in (1.0, 0.5)
    )
    assert hidden < half < prediction.step_s
    assert half == pytest.approx((hidden + prediction.step_s) / 2)


def test_rows_flow_while_the_host_is_busy_with_their_messages():
    plan = plan_over((2, 2), (1, 1))
    quick, slow = (
        predict(cluster_of(2, 2), plan, toy(), Rates(flops_per_s=FAST, exchange_s=seconds)).terms_s
        for seconds in (1e-6, 10.0)
    )
    assert slow["tokens_s"] == 0.0
    assert 0.0 < quick["tokens_s"]
    assert quick["tokens_s"] + quick["host_s"] < 10
    assert slow["host_s"] == pytest.approx(4 * 4 * 10.0)


def test_host_costs_are_counted_per_call():
    rates = Rates(flops_per_s=FAST, exchange_s=1.0)
    plan = plan_over((2, 2), (1, 1))
    # 4 layers: rows and counts, combine, output gradients, input gradients.
    assert predict(FASTEST, plan, toy(), rates).terms_s["host_s"] == pytest.approx(4 * 4)
    padded = plan_over((2, 2), (1, 1), token_exchange="deepspeed")
    per_all_to_all = Rates(flops_per_s=FAST, all_to_all_s=1.0)
    assert predict(FASTEST, padded, toy(), per_all_to_all).terms_s["host_s"] == pytest.approx(4 * 4)


def test_a_message_costs_once_for_each_peer():
    rates = Rates(flops_per_s=FAST, message_s=1.0)
    # Two ranks in each of two DCs; 4 layers of 4 exchanges with 3 peers, and of 2 packets to those of the domain.
    for domain_sizes, num_messages in (((1, 1), 4 * 4 * 3), ((2, 1), 4 * (4 * 1 + 2 * 1)), ((2, 2), 4 * 2 * 2)):
        plan = plan_over((2, 2), domain_sizes, token_exchange="direct")
        assert predict(FASTEST, plan, toy(), rates).terms_s["host_s"] == pytest.approx(num_messages)
    padded = plan_over((2, 2), (1, 1), token_exchange="deepspeed")
    assert predict(FASTEST, padded, toy(), rates).terms_s["host_s"] == pytest.approx(4 * 4 * 3)


def test_bytes_do_not_flow_before_their_messages_are_handed_over():
    plan, cluster = plan_over((2, 2), (1, 1)), cluster_of(2, 2)
    free, dear = (
        predict(cluster, plan, toy(), Rates(flops_per_s=FAST, message_s=cost)).terms_s for cost in (0.0, 1.0)
    )
    assert dear["tokens_s"] == pytest.approx(free["tokens_s"])


EXACT, LOSSY = CodecCost("identity", is_lossy=False), CodecCost("lossy", 4.0)
CHANGES = CodecCost("patch", 4.0, is_lossy=False)


def memory_on(domain_sizes, weight, gradient, state="device", **settings):
    """Of a toy on 2 x 2 ranks, with codecs over the slow level."""
    codecs = (LevelCodecs(weight, gradient, dense_weight=weight, dense_gradient=gradient), LevelCodecs())
    plan = Plan(spans=(2, 2), domain_sizes=domain_sizes, codecs=codecs, state=state)
    return memory_of(cluster_of(2, 2), plan, toy(**{"param_bytes": 2, "zero_stage": 1, **settings}))


def test_memory_per_rank():
    owned = 4 * 2 * TOY.expert_params
    in_flight, leaving = 1, 3 / 4  # of all layers: they are small
    plain = memory_on((1, 1), EXACT, EXACT)
    assert plain.replica_bytes == 0
    assert plain.owned_expert_bytes == owned * (2 + 2 + 12)
    assert plain.dense_bytes == TOY.dense_params * (2 + 2 + 12 / 4)
    # A copy; sums of it, and what came back for the owned one, of layers in flight.
    assert memory_on((2, 1), EXACT, EXACT).replica_bytes == owned * (2 + 4 * leaving + 4 * in_flight)
    # What came encoded is fp32 beside the 16-bit copy, and owned weights have a mirror; residuals are there twice.
    assert memory_on((2, 1), LOSSY, LOSSY).replica_bytes == owned * (
        2 + 4 + 4 + 2 * COMPACT_BYTES + 4 * leaving + 4 * in_flight
    )
    assert plain.total_bytes == plain.state_bytes + plain.activation_bytes + plain.workspace_bytes


def test_what_a_replicated_parameter_takes_under_patches_and_error_feedback(monkeypatch):
    """Copy 2, sum 4, residual 2.5; beside that buffers of the layers in flight."""
    owned, in_flight = 4 * 2 * TOY.expert_params, 1
    many, one = (memory_on((2, 1), CHANGES, LOSSY, micro_steps=steps) for steps in (4, 1))
    assert many.replica_bytes == owned * (2 + COMPACT_BYTES + 4 + (4 + COMPACT_BYTES) * in_flight)
    # With one micro-step there are sums of the layers that leave, and new residuals of all.
    assert one.replica_bytes == owned * (2 + COMPACT_BYTES + 4 * in_flight + COMPACT_BYTES + 4 * 3 / 4)
    # What was sent last is there while the step is applied, when there are no sums and no second residuals.
    monkeypatch.setattr(packets, "RETURNING_BYTES", 0)  # of large layers few are in flight
    alone = memory_on((2, 1), CHANGES, EXACT, micro_steps=1, model=dataclasses.replace(TOY, num_moe_layers=48))
    assert alone.replica_bytes == 12 * owned * (2 + 2)
    assert many.host_bytes == 0


def test_state_on_the_host_leaves_copies_and_sums_on_the_device():
    owned, in_flight = 4 * 2 * TOY.expert_params, 1
    here, there = (memory_on((2, 1), CHANGES, LOSSY, state, micro_steps=4) for state in ("device", "host"))
    assert there.replica_bytes == owned * (2 + 4 + 4 * in_flight)
    assert there.host_bytes == owned * 2 * COMPACT_BYTES + here.sync_bytes
    assert there.sync_bytes == 0
    # Of a quarter of the dense parameters: a residual and a new one for a message.
    assert here.sync_bytes == TOY.dense_params / 4 * 2 * COMPACT_BYTES


def test_an_optimizer_on_the_host_leaves_parameters_on_the_device():
    owned = 4 * 2 * TOY.expert_params
    here, there = (memory_on((2, 1), EXACT, EXACT, offloads_optimizer=one) for one in (False, True))
    assert there.owned_expert_bytes == owned * (2 + 2)
    assert there.dense_bytes == TOY.dense_params * (2 + 2)
    assert (there.replica_bytes, there.activation_bytes) == (here.replica_bytes, here.activation_bytes)
    # Two moments, a master copy, a gradient, and the new parameter.
    of_each = 8 + 4 + 4 + 2
    assert there.host_bytes == (owned + TOY.dense_params / 4) * of_each
    # ZeRO-2 moves gradients to the host, too, and adds up micro-steps there.
    stage2 = memory_on((2, 1), EXACT, EXACT, offloads_optimizer=True, zero_stage=2, micro_steps=2)
    assert stage2.owned_expert_bytes == owned * 2
    assert stage2.host_bytes == (owned + TOY.dense_params / 4) * (of_each + 2)
    # What codecs keep may be there as well.
    both = memory_on((2, 1), CHANGES, LOSSY, "host", offloads_optimizer=True)
    assert both.host_bytes == there.host_bytes + memory_on((2, 1), CHANGES, LOSSY, "host").host_bytes


def test_own_parameters_as_they_were_are_kept_in_the_place_of_activations():
    model = dataclasses.replace(TOY, dense_shapes=((10**7,),))
    few, many = (memory_on((1, 1), CHANGES, LOSSY, model=model, tokens_per_rank=count) for count in (10, 10_000))
    assert few.activation_bytes == 10**7 / 4 * 2
    assert many.activation_bytes > 2 * few.activation_bytes


def test_state_on_the_host_takes_the_time_of_its_way():
    """Per owned parameter: residuals there and back."""
    codecs = (LevelCodecs(CHANGES, LOSSY), LevelCodecs())
    here = Plan(spans=(2, 2), domain_sizes=(2, 1), codecs=codecs)
    rates = Rates(flops_per_s=FAST)
    workload = toy(param_bytes=2, micro_steps=3)
    seconds = [
        predict(FASTEST, plan, workload, rates).terms_s["codec_s"]
        for plan in (here, dataclasses.replace(here, state="host"))
    ]
    owned = 4 * 2 * TOY.expert_params
    assert seconds[1] - seconds[0] == pytest.approx(owned * 2 * COMPACT_BYTES / HOST_BYTES_PER_S)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("codecs", [("int8", "int8"), ("int8", "identity"), ("patch", "int8")])
@pytest.mark.parametrize("state", ["device", "host"])
@pytest.mark.parametrize(("where", "accumulation"), [((0,), 1), ((1,), 4), ((0, 1), 4)])
def test_memory_of_replicas_is_what_building_them_takes(dtype, codecs, where, accumulation, state):
    levels = [{"name": "dc", "size": 2}, {"name": "gpu", "size": 4}]
    for level in where:
        levels[level] |= {"weight_codec": codecs[0], "gradient_codec": codecs[1]}
    expert = shell([(shape, dtype, True) for shape in ((64, 32), (32, 64))])
    block = {"levels": levels, "state": state}
    needs = needs_of_layers([(expert, 2, 8)] * 4, block, 8, accumulation=accumulation, is_partitioned=False)
    names = [codecs if level in where else ("identity", "identity") for level in (0, 1)]
    pairs = [LevelCodecs(*(CodecCost(name, is_lossy=name == "int8") for name in one)) for one in names]
    model = dataclasses.replace(TOY, num_experts=16, num_moe_layers=4, expert_shapes=((2 * 64 * 32,),))
    workload = toy(model=model, param_bytes=dtype.itemsize, micro_steps=accumulation)
    for sizes, need in needs.items():
        plan = Plan(spans=(2, 4), domain_sizes=sizes, codecs=tuple(pairs), state=state)
        assert memory_of(cluster_of(2, 4), plan, workload).replica_bytes == need.total, sizes


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.data())
def test_a_pass_of_a_ring_ends_when_the_block_with_the_longest_way_has_arrived(sizes, data):
    latencies = [data.draw(st.sampled_from([0.001, 0.01, 0.1])) for _ in sizes]
    places = list(itertools.product(*(range(size) for size in sizes)))

    def hop_s(one, other):
        return next((latency for a, b, latency in zip(one, other, latencies, strict=True) if a != b), 0.0)

    hops = [hop_s(place, places[(rank + 1) % len(places)]) for rank, place in enumerate(places)]
    longest_s = max(sum(hops[(start + hop) % len(hops)] for hop in range(len(hops) - 1)) for start in range(len(hops)))

    def sync_s(latencies):
        levels = (Level(f"{i}", n, LinkSpeed(1e9, s)) for i, (n, s) in enumerate(zip(sizes, latencies, strict=True)))
        plan = plan_over((1,) * len(sizes), (1,) * len(sizes), dense_sync="deepspeed")
        workload = toy(zero_stage=1, model=dataclasses.replace(TOY, num_experts=1, top_k=1))
        return predict(Cluster(tuple(levels)), plan, workload, Rates(flops_per_s=FAST)).terms_s["dense_sync_s"]

    passes = 3  # an all-reduce and a gather of parameters
    assert sync_s(latencies) - sync_s([0.0] * len(sizes)) == pytest.approx(passes * longest_s, abs=1e-9)


# ---- groups and refusals ----


@pytest.mark.parametrize(
    ("ep_size", "is_strided", "spans"),
    [(16, False, (2, 8)), (8, False, (1, 8)), (4, False, (1, 4)), (8, True, (2, 4)), (2, True, (2, 1)),
     (1, False, (1, 1))],
)  # fmt: skip
def test_spans_of_an_expert_group(ep_size, is_strided, spans):
    assert ExpertGroup(ep_size, is_strided).spans(cluster_of(2, 8)) == spans


@pytest.mark.parametrize("ep_size", [3, 12, 32, 0])
def test_an_irregular_group_is_refused(ep_size):
    with pytest.raises(PlanError, match=rf"ep_size {ep_size} is no regular grid of the levels dc \(2\) x gpu \(8\)"):
        ExpertGroup(ep_size).spans(cluster_of(2, 8))


def test_domain_sizes_that_do_not_divide_are_refused():
    with pytest.raises(PlanError, match=r"\(3, 1\) do not divide the group's spans \(2, 2\)"):
        plan_over((2, 2), (3, 1))


def test_a_plan_of_another_cluster_is_refused():
    with pytest.raises(PlanError, match=r"spans \(2, 2\) does not fit the levels dc \(3\) x gpu \(2\)"):
        predict(cluster_of(3, 2), plan_over((2, 2), (1, 1)), toy(), rates_of_toy)


def test_experts_that_cannot_be_shared_are_refused():
    with pytest.raises(PlanError, match="8 experts cannot be shared evenly by an expert-parallel group of 3"):
        predict(cluster_of(3), plan_over((3,), (1,)), toy(), rates_of_toy)


def test_an_impossible_overlap_is_refused():
    with pytest.raises(PlanError, match="overlap is 2"):
        Rates(flops_per_s=1, overlap=2)
