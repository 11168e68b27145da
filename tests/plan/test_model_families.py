# SPDX-License-Identifier: Apache-2.0
"""Models read from config.json: parameters as published, and as transformers makes them; what is not understood."""

import warnings

import pytest
from published_models import PUBLISHED

from ds_hybridep.errors import PlanError
from ds_hybridep.plan.model_families import AUTOEP_PRESETS, FAMILIES
from ds_hybridep.plan.model_sizes import model_from_mapping
from ds_hybridep.plan.models import read_model_file, ready_names
from ds_hybridep.plan.workload import Scores

READY = {  # billions of parameters: all, and for each token; pages of some count the table, too
    "Qwen3-30B-A3B": (30.5, 3.3),
    "Qwen3-235B-A22B": (235, 22),
    "Mixtral-8x7B": (46.7, 12.9),
    "DeepSeek-V3": (671, 37),
    "gpt-oss-120b": (117, 5.1),
    "gpt-oss-20b": (21, 3.6),
    "OLMoE-1B-7B": (6.9, 1.3),
}
# Sizes of small models of each family, where those by default are large or say nothing.
SMALL = {
    "deepseek_v2": {"num_experts_per_tok": 6, "first_k_dense_replace": 1},
    "glm4_moe": {"head_dim": 128, "attention_bias": True, "use_qk_norm": True},
    "granitemoehybrid": {
        "layer_types": ["mamba", "mamba", "attention", "mamba"], "shared_intermediate_size": 512,
    },
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "intermediate_size": 96, "head_dim": 32},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "llama4_text": {"interleave_moe_layer_step": 2},
}  # fmt: skip
# Families whose model in transformers 5.3 cannot be made without memory; see PUBLISHED for them.
NOT_MADE = {"dbrx", "dots1", "glm4v_moe_text", "kimi_k2", "minimax_m1", "minimax_text_01", "qwen3_vl_moe_text"}


def test_ready_models_have_the_published_parameters():
    assert set(READY) == set(ready_names())
    for name, (billions, active) in READY.items():
        model = model_from_mapping(read_model_file(name), name)
        assert model.num_params / 1e9 == pytest.approx(billions, rel=0.01), name
        assert model.num_active_params / 1e9 == pytest.approx(active, rel=0.1), name


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_of_the_hub_have_the_published_parameters(name):
    billions, content = PUBLISHED[name]
    assert model_from_mapping(content, name).num_params / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("kind", sorted(set(FAMILIES) - NOT_MADE))
def test_parameters_are_those_of_the_model_that_transformers_makes(kind):
    import torch
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of families that transformers itself warns of
        config = transformers.AutoConfig.for_model(kind, **{"num_hidden_layers": 4, **SMALL.get(kind, {})})
        with torch.device("meta"):
            made = transformers.AutoModelForCausalLM.from_config(config)
    model = model_from_mapping(config.to_dict(), kind)
    assert model.num_params == sum(one.numel() for one in made.parameters())
    assert not model.note


def test_autoep_trains_what_deepspeed_has_presets_for():
    from deepspeed.module_inject.auto_ep_presets.registry import PRESET_MODELS

    presets = {kind: name for name, preset in PRESET_MODELS.items() for kind in preset.hf_model_types}
    assert presets == AUTOEP_PRESETS
    assert model_from_mapping(read_model_file("Qwen3-30B-A3B")).autoep_preset == "qwen3_moe"
    assert model_from_mapping(read_model_file("gpt-oss-20b")).autoep_preset is None


def test_the_part_for_text_of_a_model_that_sees():
    text = read_model_file("Qwen3-30B-A3B") | {"model_type": "qwen3_vl_moe_text"}
    content = {"model_type": "qwen3_vl_moe", "vision_config": {"hidden_size": 1152}, "text_config": text}
    assert model_from_mapping(content).num_params == model_from_mapping(text).num_params
    # It is tied where the outer object says so.
    tied = model_from_mapping(
        {**content, "tie_word_embeddings": True, "text_config": without(text, "tie_word_embeddings")}
    )
    assert model_from_mapping(text).num_params - tied.num_params == 151936 * 2048


def without(content, *names):
    return {key: value for key, value in content.items() if key not in names}


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"zero_expert_num": 256}, r"zero_expert_num \(256\)"),
        ({"layers_block_type": ["mamba", "moe"]}, "layers_block_type"),
        ({"linear_attn_config": {"num_heads": 32}}, "linear_attn_config"),
        ({"moe_latent_size": 1024}, "moe_latent_size"),
        ({"q_bias_lora": 1, "use_parallel_dense_mlp": True}, "q_bias_lora .*, use_parallel_dense_mlp"),
    ],
)
def test_keys_that_could_matter_and_are_not_understood_are_named(more, named):
    with pytest.raises(PlanError, match=f"{named}.*: not understood, and could change sizes"):
        model_from_mapping(read_model_file("Qwen3-30B-A3B") | more, "new")


def test_keys_without_influence_and_features_that_are_off_do_not_matter():
    plain = read_model_file("Qwen3-30B-A3B")
    more = {
        "moe_latent_size": None, "use_sliding_window": False, "sliding_window": 4096, "pad_token_id": 5,
        "rope_theta": 1e6, "rope_scaling": {"factor": 4}, "router_aux_loss_coef": 0.1, "architectures": ["A"],
        "quantization_config": {"bits": 8}, "torch_dtype": "bfloat16", "num_nextn_predict_layers": 1,
        "hidden_dropout": 0.1, "transformers_version": "5.3.0",
    }  # fmt: skip
    assert model_from_mapping(plain | more) == model_from_mapping(plain)


def test_a_family_that_is_not_known_is_read_as_others_are_and_said_to_be_so():
    known = read_model_file("DeepSeek-V3")
    model = model_from_mapping(known | {"model_type": "deepseek_v9"})
    assert model.num_params == model_from_mapping(known).num_params
    assert "model_type 'deepseek_v9' is not known here" in model.note


def test_windows_bound_attention_scores():
    twins = [model_from_mapping(PUBLISHED["Mixtral-8x22B"][1] | {"sliding_window": window}) for window in (None, 1024)]
    assert [one.widths.scores for one in twins] == [(Scores(56, 2 * 6144),), (Scores(56, 2 * 6144, 1024),)]
    mixed = model_from_mapping(read_model_file("gpt-oss-20b")).widths.scores
    assert set(mixed) == {Scores(12, 2 * 64 * 64, 128), Scores(12, 2 * 64 * 64)}
    # Each token sees itself and those before it: on average half of a sequence, or the window.
    assert Scores(1, 1).flops_per_token(5) == 2 * (1 + 2 + 3 + 4 + 5) / 5
    assert Scores(1, 1, 2).flops_per_token(5) == 2 * (1 + 2 + 2 + 2 + 2) / 5
    assert Scores(1, 1, 9).flops_per_token(5) == Scores(1, 1).flops_per_token(5)


def test_lists_of_another_length_are_an_error():
    with pytest.raises(PlanError, match="layer_types and the like have another length than 24 layers"):
        model_from_mapping(read_model_file("gpt-oss-20b") | {"layer_types": ["full_attention"]})
