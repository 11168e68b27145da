# SPDX-License-Identifier: Apache-2.0
"""Families of Mixture-of-Experts models: what each `model_type` of a config.json has that others have not.

What keys are called is in `model_keys.NAMES`, and which layers have experts in `EXPERT_LAYERS`, for all families.
Parameter counts of each are compared with transformers' models, and with published ones, in
tests/plan/test_model_families.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ds_hybridep.plan import mixers
from ds_hybridep.plan.mixers import Mixer
from ds_hybridep.plan.model_keys import Keys


@dataclass(frozen=True, kw_only=True)
class Family:
    """What a family has in its layers.

    mixer: of most layers.  other_mixer, is_other: the mixer of the other layers, and which layers these are.
    norms: vectors of the hidden width in a layer.  has_norm_bias: norms also have a bias.
    has_shared_gate: a gate for the shared experts.  num_shared: shared experts that no key mentions.
    has_router_bias, has_expert_bias: parameters, not buffers.
    ffn_of_dense: key for the width of layers without experts.  ties: default of `tie_word_embeddings`.
    """

    mixer: Callable[[Keys], Mixer] = mixers.attention
    other_mixer: Callable[[Keys], Mixer] | None = None
    is_other: Callable[[Keys, int], list[bool]] = lambda keys, layers: [False] * layers
    norms: int = 2
    has_norm_bias: bool = False
    has_shared_gate: bool = False
    num_shared: int = 0
    has_router_bias: bool = False
    has_expert_bias: bool = False
    ffn_of_dense: str = "ffn"
    ties: bool = False


def _is_kind(keys: Keys, layers: int, kinds: tuple[str, ...]) -> list[bool]:
    """Which layers `layer_types` calls one of these."""
    found = [kind in kinds for kind in keys.sequence("layer_types")]
    keys.understand("attn_type_list")
    return found or [kind == 0 for kind in keys.sequence("attn_type_list")] or [False] * layers


def _is_delta_net(keys: Keys, layers: int) -> list[bool]:
    """All but every fourth layer, unless `layer_types` says otherwise."""
    every = keys.integer("full_attention_interval", default=4)
    return (
        _is_kind(keys, layers, ("linear_attention",))
        if keys.sequence("layer_types")
        else [(layer + 1) % every > 0 for layer in range(layers)]
    )


def _is_mamba_of_jamba(keys: Keys, layers: int) -> list[bool]:
    period, offset = keys.integer("attn_layer_period"), keys.integer("attn_layer_offset")
    return [layer % period != offset for layer in range(layers)]


_latent = Family(mixer=mixers.latent_attention)
_per_head = Family(mixer=partial(mixers.attention, qk_norm="head"))
_plain = Family()
_glm = Family(mixer=partial(mixers.attention, out_bias=False))
_delta = Family(
    mixer=partial(mixers.attention, qk_norm="head", gate="query"),
    other_mixer=mixers.delta_net,
    is_other=_is_delta_net,
    has_shared_gate=True,
)
_minimax = Family(
    other_mixer=mixers.lightning_attention, is_other=partial(_is_kind, kinds=("linear_attention",))
)  # fmt: skip


def _glm4(keys: Keys) -> Mixer:
    return mixers.attention(keys, qk_norm="head" if keys.flag("use_qk_norm") else "none", out_bias=False)


def _llama4(keys: Keys) -> Mixer:
    keys.understand("use_qk_norm", "no_rope_layers")  # norms without weights; which layers see chunks: layer_types
    return mixers.attention(keys)


def _hunyuan(keys: Keys) -> Mixer:
    return mixers.attention(keys, qk_norm="head" if keys.flag("use_qk_norm", default=True) else "none")


FAMILIES: dict[str, Family] = {
    "afmoe": Family(mixer=partial(mixers.attention, qk_norm="head", gate="matrix"), norms=4, has_router_bias=True),
    "aria_text": _plain,
    "dbrx": _plain,
    "deepseek_v2": _latent,
    "deepseek_v3": _latent,
    "dots1": _per_head,
    "ernie4_5_moe": Family(has_router_bias=True, ties=True),
    "exaone_moe": _per_head,
    "flex_olmo": Family(mixer=partial(mixers.attention, qk_norm="whole")),
    "glm4_moe": Family(mixer=_glm4),
    "glm4_moe_lite": _latent,
    "glm4v_moe_text": _glm,
    "glm_moe_dsa": Family(mixer=partial(mixers.latent_attention, has_indexer=True)),
    "gpt_oss": Family(
        mixer=partial(mixers.attention, has_sinks=True), has_router_bias=True, has_expert_bias=True
    ),
    "granitemoe": _plain,
    "granitemoehybrid": Family(other_mixer=mixers.mamba_2, is_other=partial(_is_kind, kinds=("mamba",))),
    "granitemoeshared": _plain,
    "hunyuan_v1_moe": Family(mixer=_hunyuan, num_shared=1, ties=True),
    "jamba": Family(other_mixer=mixers.mamba, is_other=_is_mamba_of_jamba),
    "kimi_k2": _latent,
    "lfm2_moe": Family(
        mixer=partial(mixers.attention, qk_norm="head"),
        other_mixer=mixers.short_convolution,
        is_other=partial(_is_kind, kinds=("conv",)),
        ties=True,
    ),
    "llama4_text": Family(mixer=_llama4, num_shared=1, ffn_of_dense="intermediate_size_mlp"),
    "minimax": _minimax,
    "minimax_m1": _minimax,
    "minimax_m2": Family(mixer=partial(mixers.attention, qk_norm="whole")),
    "minimax_text_01": _minimax,
    "mixtral": _plain,
    "olmoe": Family(mixer=partial(mixers.attention, qk_norm="whole")),
    "phimoe": Family(has_norm_bias=True),
    "qwen2_moe": Family(
        mixer=partial(mixers.attention, qkv_bias=True, out_bias=False), has_shared_gate=True
    ),
    "qwen3_5_moe_text": _delta,
    "qwen3_moe": _per_head,
    "qwen3_next": _delta,
    "qwen3_vl_moe_text": _per_head,
    "solar_open": _plain,
}  # fmt: skip

# Families that AutoEP of DeepSpeed 0.19.8 trains, and its `preset_model` for each; a test compares it.
AUTOEP_PRESETS = {
    "deepseek_v2": "deepseek_v2",
    "deepseek_v3": "deepseek_v3",
    "minimax_m3_vl_text": "minimax_m3",
    "mixtral": "mixtral",
    "qwen2_moe": "qwen3_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
    "qwen3_moe": "qwen3_moe",
}

# A file in our short form may be any model: nothing is known of it.
UNKNOWN = Family()


def expert_layers(keys: Keys, num_layers: int) -> list[int]:
    """Layers with routed experts: those that every key which is present allows."""
    found = [set(range(num_layers))]
    for key, rule in EXPERT_LAYERS.items():
        if keys.is_sequence(key) and key in LISTED:
            found.append({layer for layer in range(num_layers) if LISTED[key](layer, keys.sequence(key))})
        elif rule is not None and keys.has(key):
            found.append({layer for layer in range(num_layers) if rule(layer, keys.integer(key))})
    if keys.has("expert_layer_period"):
        period, offset = keys.integer("expert_layer_period"), keys.integer("expert_layer_offset")
        found.append({layer for layer in range(num_layers) if layer % period == offset})
    return sorted(set.intersection(*found))


# Key -> whether a layer has experts, for its number.
EXPERT_LAYERS: dict[str, Callable[[int, int], bool] | None] = {
    "first_k_dense_replace": lambda layer, first: layer >= first,
    "num_dense_layers": lambda layer, first: layer >= first,
    "moe_layer_start_index": lambda layer, first: layer >= first,
    "moe_layer_end_index": lambda layer, last: layer <= last,
    "moe_layer_interval": lambda layer, step: (layer + 1) % step == 0,
    "decoder_sparse_step": lambda layer, step: (layer + 1) % max(step, 1) == 0,
    "interleave_moe_layer_step": lambda layer, step: (layer + 1) % step == 0,
    "moe_layer_freq": lambda layer, step: layer % max(step, 1) == 0,
    "mlp_only_layers": None,
    "moe_layers": None,
    "mlp_layer_types": None,
    "is_moe_layer": None,
}
# The same for keys with a list.
LISTED: dict[str, Callable[[int, list[object]], bool]] = {
    "moe_layer_freq": lambda layer, values: bool(values[layer]),
    "mlp_only_layers": lambda layer, dense: layer not in dense,
    "moe_layers": lambda layer, sparse: layer in sparse,
    "mlp_layer_types": lambda layer, kinds: kinds[layer] == "sparse",
    "is_moe_layer": lambda layer, values: bool(values[layer]),
}
