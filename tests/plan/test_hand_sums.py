# SPDX-License-Identifier: Apache-2.0
"""The five cases of docs/five-plans.md: bytes over the link, arithmetic and memory, summed by hand.

Each sum is plain arithmetic from the model's sizes; nothing of the package is called for it.  Tolerances: bytes that
nothing encodes, arithmetic, and memory agree within 1%, which is what is left out by hand: norms, biases, headers.
Encoded bytes agree within 5%: small matrices have factors of a whole rank, and vectors have another codec.
"""

import json
import math
import re

import pytest

from ds_hybridep.commands.main import main

STEP = ("--tokens", "8192", "--accumulation", "4", "--checkpointing")
TOKENS, MICRO_STEPS, SEQUENCE = 8192, 4, 4096  # of a GPU
BF16, FP32 = 2, 4
ADAM = 4 + 8  # master copy and two moments
H100, A100 = 0.4 * 989e12, 0.4 * 312e12  # FLOP/s that are reached
PLAIN, ENCODED = 0.01, 0.05

CASES = {
    "qwen": ("Qwen3-30B-A3B", "--dcs", "2x8", "--wan", "10gbps", "--delay", "10ms"),  # the example of plan --help
    "lora": ("Qwen3-30B-A3B", "--lora", "attention", "--dcs", "2x8", "--wan", "1gbps", "--delay", "10ms"),
    "mixtral": ("Mixtral-8x7B", "--gpu", "A100-80", "--dcs", "2x8", "--wan", "25gbps", "--delay", "10ms"),
    "deepseek": ("DeepSeek-V3", "--lora", "all", "--dcs", "4x32", "--wan", "100gbps", "--delay", "10ms"),
    "olmoe": (*("OLMoE-1B-7B", "--learning-rate", "4e-4", "--dcs", "3x4", "--wan", "1gbps", "--delay", "80ms"),),
}
GBPS = {"qwen": 10, "lora": 1, "mixtral": 25, "deepseek": 100, "olmoe": 1}
NUM_DCS = {"qwen": 2, "lora": 2, "mixtral": 2, "deepseek": 4, "olmoe": 3}
ALONE = "one dc alone"


@pytest.fixture(scope="module")
def answers():
    """The JSON of each case, asked once."""
    return {}


@pytest.fixture
def answer(answers, capsys):
    def of(case):
        if case not in answers:
            assert main(["plan", "--model", *CASES[case], *STEP, "--json"]) == 0
            answers[case] = json.loads(capsys.readouterr().out)
        return answers[case]

    return of


def row_of(answer, begin):
    (row,) = [row for row in answer["table"] if re.match(re.escape(begin) + r"(\D|$)", row["name"])]
    return row


def close(value, tolerance=PLAIN):
    return pytest.approx(value, rel=tolerance)


# ---- sizes, from each model's config.json ----


class Qwen:
    hidden, layers, experts, top_k, ffn, vocabulary = 2048, 48, 128, 8, 768, 151936
    heads, kv_heads, head = 32, 4, 128
    attention = hidden * heads * head * 2 + hidden * kv_heads * head * 2
    expert = 3 * hidden * ffn
    of_experts = layers * experts * expert
    dense = layers * (attention + experts * hidden) + 2 * vocabulary * hidden
    every = of_experts + dense
    active = layers * (attention + experts * hidden + top_k * expert) + vocabulary * hidden  # the table is looked up
    scores = layers * 2 * (2 * heads * head) * SEQUENCE / 2  # FLOPs of a token: half of its sequence, q k and p v


class Mixtral:
    hidden, layers, experts, top_k, ffn, vocabulary = 4096, 32, 8, 2, 14336, 32000
    heads, kv_heads, head = 32, 8, 128
    attention = hidden * heads * head * 2 + hidden * kv_heads * head * 2
    expert = 3 * hidden * ffn
    of_experts = layers * experts * expert
    dense = layers * (attention + experts * hidden) + 2 * vocabulary * hidden
    every = of_experts + dense
    active = layers * (attention + experts * hidden + top_k * expert) + vocabulary * hidden
    scores = layers * 2 * (2 * heads * head) * SEQUENCE / 2


class Olmoe:
    hidden, layers, experts, top_k, ffn, vocabulary = 2048, 16, 64, 8, 1024, 50304
    heads, head = 16, 128
    attention = 4 * hidden * hidden
    expert = 3 * hidden * ffn
    of_experts = layers * experts * expert
    dense = layers * (attention + experts * hidden) + 2 * vocabulary * hidden
    every = of_experts + dense
    active = layers * (attention + experts * hidden + top_k * expert) + vocabulary * hidden
    scores = layers * 2 * (2 * heads * head) * SEQUENCE / 2


class DeepSeek:
    """Latent attention; 58 layers with a shared expert beside the routed ones, 3 dense ones before."""

    hidden, layers, moe_layers, experts, top_k, ffn, vocabulary = 7168, 61, 58, 256, 8, 2048, 129280
    heads, q_rank, kv_rank, nope, rope, value, dense_ffn = 128, 1536, 512, 128, 64, 128, 18432
    matrices = (
        (hidden, q_rank), (q_rank, heads * (nope + rope)), (hidden, kv_rank + rope),
        (kv_rank, heads * (nope + value)), (heads * value, hidden),
    )  # fmt: skip
    attention = sum(rows * cols for rows, cols in matrices)
    expert = 3 * hidden * ffn
    dense_layer = 3 * hidden * dense_ffn
    of_experts = moe_layers * experts * expert
    dense = layers * attention + moe_layers * (experts * hidden + expert) + 3 * dense_layer + 2 * vocabulary * hidden
    every = of_experts + dense
    active = dense - vocabulary * hidden + moe_layers * top_k * expert
    scores = layers * 2 * heads * (nope + rope + value) * SEQUENCE / 2
    # Adapters of rank 16 beside every matrix but routers, table and head.
    adapter = 16 * 3 * (hidden + ffn)
    dense_adapters = (
        layers * 16 * sum(rows + cols for rows, cols in matrices)
        + moe_layers * adapter + 3 * 16 * 3 * (hidden + dense_ffn)
    )  # fmt: skip
    trained = moe_layers * experts * adapter + dense_adapters


def low_rank_bytes(rows, cols):
    """Two factors of 4-bit integers, a 50th of fp32, but rank 256 at most, and a scale for each row and column."""
    rank = min(int((rows * cols * FP32 / 50 - rows - cols) / ((rows + cols) / 2)), 256)
    return rank * (rows + cols) / 2 + rows + cols


def encoded_gradient_of(model):
    """Bytes of a parameter: of experts, and of all else, with what is left out in 2 bits and a scale for 64."""
    ratio = low_rank_bytes(model.hidden, model.ffn) / (model.hidden * model.ffn)
    rest = 2 / 8 + 2 / 64
    dense = ratio if model is Mixtral else FP32 / 50
    return ratio, dense + rest


# ---- arithmetic: two FLOPs for each parameter and token ----


def seconds(model, rate, trained=None):
    """Two forwards, as activations are computed again, and a backward: two products, or one of what is frozen."""
    trained = model.active if trained is None else trained
    flops = (3 * 2 * model.active + 2 * trained) + 4 * model.scores
    return MICRO_STEPS * TOKENS * flops / rate


def computing_s(row):
    return row["step_s"] - row["wait_s"]


OF_ATTENTION = Qwen.layers * 16 * (2 * (2048 + 4096) + 2 * (2048 + 512))  # adapters of rank 16
ARITHMETIC = {
    "qwen": seconds(Qwen, H100),
    # Adapters themselves take four products, forward twice.
    "lora": seconds(Qwen, H100, 0) + MICRO_STEPS * TOKENS * 4 * 2 * OF_ATTENTION / H100,
    "mixtral": seconds(Mixtral, A100),
    "deepseek": seconds(DeepSeek, H100, 0)
    + MICRO_STEPS * TOKENS * 4 * 2 * (58 * 8 * DeepSeek.adapter + DeepSeek.dense_adapters) / H100,
    "olmoe": seconds(Olmoe, H100),
}


@pytest.mark.parametrize("case", CASES)
def test_arithmetic(answer, case):
    """The same in all rows, since all compute the same; one datacentre alone computes the others' share too."""
    for row in answer(case)["table"]:
        times = NUM_DCS[case] if row["name"] == ALONE else 1
        assert computing_s(row) == close(times * ARITHMETIC[case]), row["name"]


@pytest.mark.parametrize("case", CASES)
def test_no_row_is_faster_than_its_arithmetic_or_its_bytes(answer, case):
    for row in answer(case)["table"]:
        on_link_s = row["link_bytes"] * 8 / (GBPS[case] * 1e9)
        assert row["step_s"] >= (1 - PLAIN) * max(ARITHMETIC[case], on_link_s), row["name"]


# ---- bytes of a step over the link of one datacentre, each way ----


def test_bytes_of_qwen(answer):
    found = answer("qwen")
    every = Qwen.every * BF16
    # Weights twice and gradients once in each micro-step, over a ring of 16.
    assert row_of(found, "FSDP or ZeRO-3, all")["link_bytes"] == close(4 * 15 / 16 * 3 * every)
    # 8-bit weights over 16; the half of 4-bit sums that the other datacentre owns.
    plus = 4 * (15 / 16 * Qwen.every + Qwen.every / 2 / 2)
    assert row_of(found, "ZeRO++")["link_bytes"] == close(plus)
    # Gradients once, over rings of two: half there, half back.
    assert row_of(found, "FSDP HYBRID_SHARD")["link_bytes"] == close(every)
    # DeepSpeed passes three times: sums, their spread, and the gather of parameters.
    rings = 3 * (Qwen.of_experts * BF16 / 2 + 15 / 16 * Qwen.dense * BF16)
    assert row_of(found, "DeepSpeed, EP 8")["link_bytes"] == close(rings)
    # Half of the experts live here. They go there, gradients come back; of all else half goes each time.
    assert row_of(found, "ours, exact: [2,1]")["link_bytes"] == close(every)
    # Weights as patches, a 47th; gradients as said.
    of_expert, of_dense = encoded_gradient_of(Qwen)
    experts, dense = Qwen.of_experts / 2, Qwen.dense / 2
    patches = (experts + dense) * BF16 / 47
    encoded = patches + experts * of_expert + dense * of_dense
    assert row_of(found, "ours, encoded: [2,1]")["link_bytes"] == close(encoded, ENCODED)
    # Sites send all that the counterpart lacks: sums of gradients, no weights.
    sites = 2 * (experts * of_expert + dense * of_dense)
    assert row_of(found, "sites, H = 1")["link_bytes"] == close(sites, ENCODED)
    # A border between two stages: activations there, gradients back on the other way.
    border = 8 * TOKENS * Qwen.hidden * BF16 * 2 * MICRO_STEPS
    assert row_of(found, "pipeline")["link_bytes"] == close(border)
    assert row_of(found, "local SGD")["link_bytes"] == close(every / 200)


def test_bytes_of_adapters_of_attention(answer):
    found = answer("lora")
    assert found["model"]["trained_parameters"] == OF_ATTENTION
    # Frozen weights are gathered twice in each micro-step.
    assert row_of(found, "FSDP or ZeRO-3, all")["link_bytes"] == close(4 * 15 / 16 * 2 * Qwen.every * BF16)
    assert row_of(found, "FSDP HYBRID_SHARD")["link_bytes"] == close(OF_ATTENTION * BF16)
    assert row_of(found, "ours, exact")["link_bytes"] == close(OF_ATTENTION * BF16)
    assert found["now"]["link_bytes"] == close(0.0267e9)
    _, of_dense = encoded_gradient_of(Qwen)
    encoded = OF_ATTENTION / 2 * (of_dense + BF16 / 16)  # patches at a rate of 1e-4
    assert row_of(found, "ours, encoded")["link_bytes"] == close(encoded, ENCODED)


def test_bytes_of_mixtral(answer):
    found = answer("mixtral")
    every = Mixtral.every * BF16
    assert row_of(found, "ZeRO++")["link_bytes"] == close(4 * (15 / 16 * Mixtral.every + Mixtral.every / 2 / 2))
    rings = 3 * (Mixtral.of_experts * BF16 / 2 + 15 / 16 * Mixtral.dense * BF16)
    assert row_of(found, "DeepSpeed, EP 8 in")["link_bytes"] == close(rings)
    # Both sides hold all experts: of each half the sum goes, and of the other half the new weights.
    assert row_of(found, "ours, exact")["link_bytes"] == close(every)
    of_expert, of_dense = encoded_gradient_of(Mixtral)
    experts, dense = Mixtral.of_experts / 2, Mixtral.dense / 2
    encoded = (experts + dense) * BF16 / 47 + experts * of_expert + dense * of_dense
    assert row_of(found, "ours, encoded")["link_bytes"] == close(encoded, ENCODED)


def test_bytes_of_deepseek(answer):
    found = answer("deepseek")
    # Micro-batches of one sequence, so eight of them.
    gathered = 8 * 127 / 128 * (2 * DeepSeek.every + 3 * DeepSeek.trained) * BF16
    assert row_of(found, "FSDP or ZeRO-3, all")["link_bytes"] == close(gathered)
    # A row goes once to each other datacentre that has one of its 8 experts, 64 of 256; rows return likewise. The
    # forward, its repetition and the backward take two exchanges each.
    needed = 1 - math.comb(192, 8) / math.comb(256, 8)
    rows = 32 * TOKENS * 3 * needed
    exchanged = 6 * DeepSeek.moe_layers * MICRO_STEPS * rows * DeepSeek.hidden * BF16
    assert row_of(found, "ours, exact: [1,1]")["link_bytes"] == close(exchanged)
    # DeepSpeed sends every (token, expert) pair to its expert: 96 of 128 ranks are elsewhere.
    plain = 6 * DeepSeek.moe_layers * MICRO_STEPS * 32 * TOKENS * 8 * 96 / 128 * DeepSeek.hidden * BF16
    (ep,) = [way for way in found["alternatives"] if way["name"] == "DeepSpeed, EP 128 across dcs"]
    assert ep["step_s"] == close(plain * 8 / 100e9 + ARITHMETIC["deepseek"], 0.02)
    assert row_of(found, "pipeline")["link_bytes"] == close(
        16 * 32 * TOKENS * DeepSeek.hidden * BF16 * 2  # a stage in the middle sends on and back
    )
    assert found["model"]["trained_parameters"] == DeepSeek.trained


def test_bytes_of_olmoe(answer):
    found = answer("olmoe")
    every = Olmoe.every * BF16
    # Three datacentres: two thirds there and two thirds back.
    assert row_of(found, "FSDP HYBRID_SHARD")["link_bytes"] == close(4 / 3 * every)
    assert row_of(found, "ours, exact")["link_bytes"] == close(4 / 3 * every)
    # At a rate of 4e-4, on the line from 9.0 at 3e-4 to 4.7 at 1e-3.
    share = math.log(4 / 3) / math.log(10 / 3)
    patch = 9.0 * (4.7 / 9.0) ** share
    of_expert, of_dense = encoded_gradient_of(Olmoe)
    encoded = 2 / 3 * (every / patch + Olmoe.of_experts * of_expert + Olmoe.dense * of_dense)
    assert found["chosen"]["training"] == "lossy"
    assert row_of(found, "ours, encoded")["link_bytes"] == close(encoded, ENCODED)
    # Two others get the sums of each datacentre: gradients in place of weights.
    sites = 2 * (Olmoe.of_experts * of_expert + Olmoe.dense * of_dense)
    assert row_of(found, "sites, H = 1")["link_bytes"] == close(sites, ENCODED)


# ---- one datacentre alone ----


def test_one_datacentre_alone_has_no_slow_link(answer):
    """ZeRO-3 on its GPUs, in micro-batches of one sequence or two: whichever takes longer, products or gathers."""
    # 1. Sixteen micro-steps of 4096 tokens: weights twice and gradients once over NVLink, 450 GB/s, in a ring of 8.
    alone = row_of(answer("qwen"), ALONE)
    gathers_s = 16 * 7 / 8 * 3 * Qwen.every * BF16 / 450e9
    assert gathers_s > 2 * ARITHMETIC["qwen"]
    assert (alone["step_s"], alone["num_gpus"], alone["link_bytes"]) == (close(gathers_s), 8, 0)
    layers = 2 * (Qwen.experts * Qwen.expert + Qwen.dense / Qwen.layers) * BF16
    state = Qwen.every / 8 * (BF16 + BF16 + ADAM) + layers
    assert alone["memory_bytes"] == close(with_allowance(state, activations(Qwen) / 2))
    # 2. Where products take longer, it takes as many times as long as there are datacentres.
    for case in ("lora", "olmoe"):
        assert row_of(answer(case), ALONE)["step_s"] == close(NUM_DCS[case] * ARITHMETIC[case])
    # 3. What does not fit: an eighth of Mixtral's experts with their optimizer; of DeepSeek-V3 a 32nd and two layers.
    mixtral, deepseek = (row_of(answer(case), ALONE) for case in ("mixtral", "deepseek"))
    assert mixtral["memory_bytes"] > Mixtral.of_experts / 8 * (BF16 + BF16 + ADAM) > 80e9
    layers = 2 * (DeepSeek.experts * DeepSeek.expert + DeepSeek.dense / DeepSeek.layers) * BF16
    state = DeepSeek.every / 32 * BF16 + DeepSeek.trained / 32 * (BF16 + BF16 + ADAM) + layers
    assert deepseek["memory_bytes"] == close(with_allowance(state, activations(DeepSeek) / 2))
    for alone in (mixtral, deepseek):
        assert alone["lacking_bytes"] == close(alone["memory_bytes"] - 80e9)


# ---- memory of a GPU ----


def with_allowance(state, activations):
    """3 GB for libraries and buckets, and a twentieth of activations for the allocator."""
    return state + 1.05 * activations + 3e9


def activations(model, layers=None):
    """The input of every layer, the last norm, and the logits: log-probabilities and two gradients in fp32."""
    stored = (layers or model.layers) * model.hidden * BF16 + 8 * model.hidden
    return TOKENS * (stored + 12 * model.vocabulary)


def test_memory_of_qwen(answer):
    found = answer("qwen")
    busy = activations(Qwen)
    # Experts of 16 ranks; all else on each of them, with a sixteenth of the optimizer.
    state = Qwen.of_experts / 16 * (BF16 + BF16 + ADAM) + Qwen.dense * (BF16 + BF16 + ADAM / 16)
    ours = found["plan"]
    copies = Qwen.of_experts / 16  # the counterpart's experts
    # A copy, sums in fp32, a residual of 2.52 B, and of dense ones two for a sixteenth; 3 of 48 layers on their way.
    kept = copies * (BF16 + FP32 + 2.52) + 3 / 48 * copies * (FP32 + 2.52) + 2 * Qwen.dense / 16 * 2.52
    assert ours["memory_bytes"] == close(with_allowance(state + kept, busy))
    # ZeRO-3 over all: a sixteenth of everything, and two whole layers.
    layers = 2 * (Qwen.experts * Qwen.expert + Qwen.dense / Qwen.layers) * BF16
    over_all = row_of(found, "FSDP or ZeRO-3, all")["memory_bytes"]
    assert over_all == close(with_allowance(Qwen.every / 16 * (BF16 + BF16 + ADAM) + layers, busy))
    # ZeRO++: the same, and an eighth of the weights once more.
    plus = row_of(found, "ZeRO++")["memory_bytes"]
    assert plus - over_all == close(Qwen.every / 8 * BF16)


def test_memory_of_adapters_of_attention(answer):
    found = answer("lora")
    trained = OF_ATTENTION * (BF16 + ADAM / 16)
    frozen = (Qwen.of_experts / 8 + Qwen.dense) * BF16
    # Domains of 4 inside: copies of three others' frozen experts, which do not travel.
    copies = 3 * Qwen.of_experts / 8 * BF16
    assert found["plan"]["ep_size"] == 8
    assert found["plan"]["domain_sizes"] == [1, 4]
    assert found["plan"]["memory_bytes"] == close(with_allowance(frozen + copies + trained, activations(Qwen)))
    inside = row_of(found, "FSDP HYBRID_SHARD")["memory_bytes"]
    layers = 2 * (Qwen.experts * Qwen.expert + Qwen.dense / Qwen.layers) * BF16
    assert inside == close(with_allowance(Qwen.every / 8 * BF16 + trained + layers, activations(Qwen)))


def test_memory_of_mixtral(answer):
    """The layer at work needs more than the logits."""
    found = answer("mixtral")
    # The optimizer of an expert is divided between the two ranks that hold it.
    state = Mixtral.of_experts / 8 * (BF16 + BF16 + ADAM / 2) + Mixtral.dense * (BF16 + BF16 + ADAM / 16)
    rows = 2 * TOKENS
    attention = 2 * 8 * Mixtral.hidden + BF16 * (2 * 4096 + 2 * 1024)  # two norms; q, k, v and the output
    kept = TOKENS * attention + rows * BF16 * (2 * Mixtral.hidden + 4 * Mixtral.ffn)
    gradients = rows * BF16 * 7 * Mixtral.hidden
    stored = TOKENS * (Mixtral.layers * Mixtral.hidden * BF16 + 8 * Mixtral.hidden)
    busy = stored + kept + gradients
    assert kept + gradients > 12 * TOKENS * Mixtral.vocabulary
    assert row_of(found, "ours, exact")["memory_bytes"] == close(with_allowance(state, busy))
    # What codecs keep is on the host: two residuals of 2.52 B of each own half, or sixteenth.
    assert found["plan"]["state"] == "host"
    assert found["plan"]["memory_bytes"] == close(with_allowance(state, busy))
    owned = Mixtral.of_experts / 8 / 2 + Mixtral.dense / 16
    assert found["plan"]["host_bytes"] == close(2 * 2.52 * owned)


def test_memory_of_deepseek(answer):
    """A 128th of the experts, and all else whole; what is trained are the adapters."""
    found = answer("deepseek")
    of_adapters = 58 * 256 * DeepSeek.adapter
    state = DeepSeek.of_experts / 128 * BF16 + of_adapters / 128 * (BF16 + BF16 + ADAM)
    state += DeepSeek.dense * BF16 + DeepSeek.dense_adapters * (BF16 + BF16 + ADAM / 128)
    assert row_of(found, "ours, exact: [1,1]")["memory_bytes"] == close(with_allowance(state, activations(DeepSeek)))


def test_memory_of_olmoe(answer):
    """Four ranks share the experts, and three datacentres hold the same."""
    found = answer("olmoe")
    state = Olmoe.of_experts / 4 * (BF16 + BF16 + ADAM / 3) + Olmoe.dense * (BF16 + BF16 + ADAM / 12)
    deepspeed = row_of(found, "DeepSpeed, EP 4")["memory_bytes"]
    assert deepspeed == close(with_allowance(state, activations(Olmoe)))
    # Sites: each is a job of four that holds all, with two residuals of 2.52 B of what a rank owns.
    alone = Olmoe.of_experts / 4 * (BF16 + BF16 + ADAM) + Olmoe.dense * (BF16 + BF16 + ADAM / 4)
    kept = 2 * 2.52 * Olmoe.every / 4
    sites = row_of(found, "sites, H = 1")["memory_bytes"]
    assert sites == close(with_allowance(alone + kept, activations(Olmoe)))
