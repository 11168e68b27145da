# SPDX-License-Identifier: Apache-2.0
"""What is trained, what it costs, and on which GPU: sums by hand beside the model's."""

import argparse
import json
from dataclasses import replace

import pytest

from ds_hybridep.commands.question import add_arguments, read_question
from ds_hybridep.errors import ConfigError
from ds_hybridep.plan.adapters import with_adapters
from ds_hybridep.plan.codec_costs import H100_RATES
from ds_hybridep.plan.machines import GPUS, codec_rates_of, gpu_of
from ds_hybridep.plan.model_families import AUTOEP_PRESETS
from ds_hybridep.plan.model_sizes import model_from_mapping
from ds_hybridep.plan.models import read_model_file
from ds_hybridep.plan.paste import adapters_of
from ds_hybridep.plan.rivals import without_domains
from ds_hybridep.plan.workload import Workload

RANK, HIDDEN, LAYERS, TOKENS = 16, 2048, 48, 8192
# Qwen3-30B-A3B: queries and outputs of 4096, keys and values of 512; experts of 768.
OF_ATTENTION = RANK * (2 * (HIDDEN + 4096) + 2 * (HIDDEN + 512))
OF_EXPERT = RANK * 3 * (HIDDEN + 768)


def qwen():
    return model_from_mapping(read_model_file("Qwen3-30B-A3B"), "Qwen3-30B-A3B")


def asked(*arguments):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    common = ("--model", "Qwen3-30B-A3B", "--dcs", "2x8", "--wan", "10gbps", "--tokens", str(TOKENS))
    return read_question(parser.parse_args([*common, *arguments]))


@pytest.mark.parametrize(
    ("where", "of_expert", "of_layer"),
    [("attention", 0, OF_ATTENTION), ("experts", OF_EXPERT, 0), ("all", OF_EXPERT, OF_ATTENTION)],
)
def test_parameters_of_adapters(where, of_expert, of_layer):
    workload = asked("--lora", where).workload
    assert workload.expert_travel_params == of_expert
    assert workload.dense_train_params == LAYERS * of_layer
    assert workload.model.num_adapter_params == LAYERS * (128 * of_expert + of_layer)
    assert workload.model.num_params == qwen().num_params


def test_all_adapters_of_deepseek_are_those_beside_latent_attention_shared_experts_and_dense_layers():
    model = model_from_mapping(read_model_file("DeepSeek-V3"))
    _, (of_expert, of_dense) = with_adapters(model, "all", 1)
    attention = (7168 + 1536) + (1536 + 24576) + (7168 + 576) + (512 + 32768) + (16384 + 7168)
    shared, dense = 3 * (7168 + 2048), 3 * (7168 + 18432)
    assert sum(rows * cols for rows, cols in of_dense) == 61 * attention + 58 * shared + 3 * dense
    assert sum(rows * cols for rows, cols in of_expert) == 3 * (7168 + 2048)


@pytest.mark.parametrize("kind", sorted(set(AUTOEP_PRESETS) - {"minimax_m3_vl_text"}))  # transformers 5.3 lacks it
def test_names_for_peft_are_those_of_the_models_of_transformers(kind):
    """Adapters of attention have as many parameters as were planned; those of experts are found."""
    import peft
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(kind, num_hidden_layers=4, num_experts_per_tok=2)
    model = model_from_mapping(config.to_dict(), kind)
    found = {}
    for where in ("attention", "experts", "all"):
        adapted, (_, of_dense) = with_adapters(model, where, RANK)
        workload = Workload(model=adapted, tokens_per_rank=TOKENS)
        settings = adapters_of(replace(asked(), workload=workload, adapters=(where, RANK)))
        with torch.device("meta"):
            made = transformers.AutoModelForCausalLM.from_config(config)
            made = peft.get_peft_model(made, peft.LoraConfig(**settings))
        found[where] = {name for name, one in made.named_parameters() if one.requires_grad}
        if where == "attention" and kind != "qwen3_5_moe_text":  # its linear attention has more matrices, less wide
            trained = sum(one.numel() for one in made.parameters() if one.requires_grad)
            assert trained == sum(rows * cols for rows, cols in of_dense)
    assert found["experts"]
    assert all(".mlp.experts." in name for name in found["experts"])
    assert not any(".mlp.experts." in name for name in found["attention"])
    assert found["experts"] | found["attention"] <= found["all"]
    has_more = found["experts"] | found["attention"] != found["all"]
    assert has_more == (kind == "qwen3_5_moe_text")


def test_frozen_weights_need_one_product_in_the_backward_and_trained_ones_two():
    full, frozen = asked().workload, asked("--lora", "attention").workload
    assert full.pre_expert_backward_flops == 2 * full.pre_expert_flops
    assert full.expert_backward_flops_per_row == 2 * full.expert_flops_per_row
    # Experts are frozen, and have no adapters.
    assert frozen.expert_backward_flops_per_row == frozen.expert_flops_per_row == 2 * 3 * HIDDEN * 768
    # Scores have no weights: their backward takes twice as many in any case.
    adapters = 2 * TOKENS * OF_ATTENTION
    weights = full.pre_expert_flops - full.score_flops
    assert frozen.pre_expert_flops == pytest.approx(weights + adapters + full.score_flops)
    assert frozen.pre_expert_backward_flops == pytest.approx(weights + 2 * adapters + 2 * full.score_flops)


def test_seconds_of_computing_are_these_sums():
    """Attention adapters, checkpointed: two forwards, and a backward of frozen weights."""
    question = asked("--lora", "attention", "--checkpointing", "--accumulation", "4", "--gpu", "A100-80")
    terms = question.predict(without_domains((2, 8))).terms_s
    rate, tokens, top_k = 0.4 * 312e12, 4 * TOKENS, 8
    experts = 3 * tokens * top_k * LAYERS * 2 * (3 * HIDDEN * 768)
    assert terms["experts_s"] == pytest.approx(experts / rate)
    of_layer = 2 * HIDDEN * 4096 + 2 * HIDDEN * 512 + 128 * HIDDEN + 2 * HIDDEN + 2 * 128  # attention, router, norms
    active = LAYERS * of_layer + HIDDEN + 151936 * HIDDEN
    scores = LAYERS * 2 * 2 * 4096 * (4096 + 1) / 2  # queries and outputs, half of a sequence of 4096
    adapters = LAYERS * OF_ATTENTION
    dense = tokens * (3 * 2 * active + 4 * 2 * adapters + 4 * scores)
    assert terms["dense_s"] == pytest.approx(dense / rate)


def test_attention_scores_add_a_quarter_for_qwen3_at_4096_tokens():
    workload = asked("--seq", "4096").workload
    products = 2 * TOKENS * workload.model.num_active_params / LAYERS
    assert workload.score_flops / products == pytest.approx(0.26, abs=0.01)
    assert asked("--seq", "2048").workload.score_flops == pytest.approx(workload.score_flops / 2, rel=1e-3)
    assert Workload(model=qwen(), tokens_per_rank=TOKENS).score_flops == 0  # a running job does not know its sequences


def test_a_gpu_brings_its_rate_its_memory_and_its_link():
    for name, gpu in GPUS.items():
        question = asked("--gpu", name.lower())
        assert question.rates.flops_per_s == pytest.approx(0.4 * gpu.flops_per_s)
        assert question.memory_bytes == gpu.memory_bytes
        assert question.host_memory_bytes == 128e9
        assert question.cluster.levels[1].link.bandwidth_bytes_per_s == gpu.link_bytes_per_s
    several = asked("--dcs", "4x32")
    assert several.cluster.levels[1].link.bandwidth_bytes_per_s == 400e9 / 8  # not all in one machine
    own = asked("--memory", "64", "--tflops", "100", "--host-memory", "16", "--lan", "100gbps")
    assert (own.memory_bytes, own.host_memory_bytes) == (64e9, 16e9)
    assert own.rates.flops_per_s == pytest.approx(40e12)
    assert own.cluster.levels[1].link.bandwidth_bytes_per_s == 100e9 / 8


def test_codecs_follow_the_memory_of_a_gpu():
    assert codec_rates_of(gpu_of("H100")) == H100_RATES
    found = codec_rates_of(gpu_of("rtx 4090"))
    assert found.memory_bytes_per_s == pytest.approx(0.504e12)
    assert found.product_flops_per_s / H100_RATES.product_flops_per_s == pytest.approx(1.008 / 3.35)


def test_codecs_cost_what_a_probe_has_measured(tmp_path):
    def seconds(device):
        content = {"levels": [{"name": "dc", "size": 2, "bandwidth_gbps": 1}, {"name": "gpu", "size": 8}]}
        (tmp_path / "cluster.json").write_text(json.dumps(content | device))
        parser = argparse.ArgumentParser()
        add_arguments(parser)
        arguments = ["--model", "Qwen3-30B-A3B", "--cluster", str(tmp_path / "cluster.json"), "--lan", "100gbps"]
        question = read_question(parser.parse_args([*arguments, "--delay", "0ms"]))
        return 1 / question.codecs[1].gradient.encode_bytes_per_s

    usual, slow = seconds({}), seconds({"device": {"memory_gb_per_s": 16.75, "product_tflops": 0.335}})
    assert slow == pytest.approx(100 * usual)
    with pytest.raises(ConfigError, match=r"device in .*cluster.json is .*'memory_gb_per_s': 0.*above 0, as"):
        seconds({"device": {"memory_gb_per_s": 0, "product_tflops": 1}})
