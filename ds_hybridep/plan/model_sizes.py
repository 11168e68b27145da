# SPDX-License-Identifier: Apache-2.0
"""A model's sizes, from any Hugging Face config.json of a Mixture-of-Experts model, or from our own short form."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ds_hybridep.errors import PlanError
from ds_hybridep.geometry.slots import Shape
from ds_hybridep.plan import mixers
from ds_hybridep.plan.mixers import Mixer
from ds_hybridep.plan.model_families import AUTOEP_PRESETS, FAMILIES, UNKNOWN, Family, expert_layers
from ds_hybridep.plan.model_keys import NAMES, Keys
from ds_hybridep.plan.workload import MoEModel, Scores, Widths, num_params

SHORT_KEYS = ("layers", "hidden", "ffn", "experts", "top_k")
NESTED = ("text_config", "llm_config", "language_config", "thinker_config")  # of models that also see or hear
MERGED = ("attn_config", "ffn_config")  # DBRX has some of its keys there


def model_from_mapping(content: Mapping[str, Any], name: str = "model") -> MoEModel:
    """The model that a Hugging Face config.json or a file in our own short form describes.

    Of a model that also sees or hears, only the part for text.  In our short form, all layers have `experts` of three
    matrices, and an attention of four.

    Raises PlanError that names the missing or wrong key, or keys that are not understood and could matter.
    """
    if "hidden" in content:
        return _from_short_form(content, name)
    flat = _flattened(content)
    if not any(key in flat for key in NAMES["hidden"]):
        raise PlanError(
            f"model {name!r} has neither hidden_size (Hugging Face's config.json) nor hidden (the short form: layers, "
            f"hidden, ffn, experts, top_k); give one of the two"
        )
    return _from_hugging_face(flat, name)


def _flattened(content: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the part for text, those of nested objects included."""
    flat = dict(content)
    while (inner := next((flat[key] for key in NESTED if isinstance(flat.get(key), Mapping)), None)) is not None:
        # Whether embeddings are tied stands outside, and counts there.
        flat = {"tie_word_embeddings": flat.get("tie_word_embeddings"), **inner}
    for key in MERGED:
        if isinstance(flat.get(key), Mapping):
            inner = flat.pop(key)
            flat |= {name: value for name, value in inner.items() if name != "model_type"}
    return flat


def _from_short_form(content: Mapping[str, Any], name: str) -> MoEModel:
    for key in content:
        if key not in SHORT_KEYS:
            raise PlanError(f"model {name!r}: {key} is not a known key; known are {', '.join(SHORT_KEYS)}")
    keys = Keys(content, name)
    missing = [key for key in SHORT_KEYS if key not in content]
    if missing:
        raise PlanError(f"model {name!r} has no key {missing[0]}; add it")
    layers, hidden, ffn, experts, top_k = (keys.plain_integer(key) for key in SHORT_KEYS)
    attention = ((hidden, hidden),) * 4 * layers
    dense_shapes = attention + ((experts, hidden),) * layers
    return MoEModel(
        name=name,
        hidden=hidden,
        num_experts=experts,
        top_k=top_k,
        num_moe_layers=layers,
        expert_shapes=_ffn_matrices(hidden, ffn),
        dense_shapes=dense_shapes,
        attention_matrices=attention,
        active_dense_params=num_params(dense_shapes),
    )


def _from_hugging_face(content: Mapping[str, Any], name: str) -> MoEModel:
    """Layer by layer: norms, the mixer, then a router with experts, or a dense FFN."""
    keys, kind = Keys(content, name), str(content.get("model_type", ""))
    if not keys.has("experts"):
        raise PlanError(
            f"model {name!r} has no experts (none of the keys {', '.join(NAMES['experts'])}), so it seems dense; this "
            f"program is for Mixture-of-Experts models"
        )
    family = FAMILIES.get(kind) or _guessed(keys)
    hidden, layers, experts = keys.integer("hidden"), keys.integer("layers"), keys.integer("experts")
    ffn = keys.integer("ffn", default=0)
    expert_ffn = keys.integer("expert_ffn", default=ffn)
    shared_ffn = keys.integer("shared_ffn", default=0)
    shared_ffn += keys.integer("shared_experts", default=family.num_shared) * expert_ffn
    expert_shapes = _ffn_matrices(hidden, expert_ffn)
    if family.has_expert_bias:
        expert_shapes += ((expert_ffn,), (expert_ffn,), (hidden,))
    # 1. What each layer has.
    moe_layers, of_layers = expert_layers(keys, layers), _mixers(keys, family, layers)
    dense_ffn = keys.integer(family.ffn_of_dense, default=ffn)
    router: tuple[Shape, ...] = ((experts, hidden),) + (((experts,),) if family.has_router_bias else ())
    shared = _ffn_matrices(hidden, shared_ffn) if shared_ffn else ()
    gate: tuple[Shape, ...] = ((1, hidden),) if shared_ffn and family.has_shared_gate else ()
    norm: tuple[Shape, ...] = ((hidden,),) * (2 if family.has_norm_bias else 1)
    in_layers: list[Shape] = []
    attention: list[Shape] = []
    other: list[Shape] = []
    for layer, mixer in enumerate(of_layers):
        ffn_matrices = shared if layer in moe_layers else _ffn_matrices(hidden, dense_ffn)
        in_layers += [*norm * family.norms, *mixer.matrices, *mixer.others]
        in_layers += [*(router + gate if layer in moe_layers else ()), *ffn_matrices]
        attention += mixer.matrices
        other += ffn_matrices
    # 2. The table and the head.
    vocabulary = keys.integer("vocabulary", default=0)
    table: tuple[Shape, ...] = ((vocabulary, hidden),) if vocabulary else ()
    is_tied = keys.flag("tie_word_embeddings", default=family.ties)
    head = () if is_tied else table
    if keys.flag("lm_head_bias"):
        head += ((vocabulary,),)
    top_k = keys.integer("top_k")
    keys.check_all_read()
    dense_shapes = (*table, *in_layers, *norm, *head)
    return MoEModel(
        name=name,
        hidden=hidden,
        num_experts=experts,
        top_k=top_k,
        num_moe_layers=len(moe_layers),
        expert_shapes=expert_shapes,
        dense_shapes=dense_shapes,
        attention_matrices=tuple(attention),
        other_matrices=tuple(other),
        active_dense_params=num_params(in_layers) + num_params(norm) + num_params(table),
        stacks_experts=True,  # as in AutoEP
        known_widths=Widths(
            num_layers=layers,
            **_mean_widths(of_layers),
            scores=_scores(of_layers),
            expert_ffn=expert_ffn,
            shared_ffn=shared_ffn,
            dense_ffn=dense_ffn if len(moe_layers) < layers else 0,
            vocabulary=vocabulary,
        ),
        is_of_hub=True,
        autoep_preset=AUTOEP_PRESETS.get(kind),
        note=""
        if kind in FAMILIES
        else f"model_type {kind!r} is not known here: its keys are read as others use them",
    )


def _guessed(keys: Keys) -> Family:
    """A family that nobody has looked at: DeepSeek's attention if it has its keys, else the usual one."""
    return Family(mixer=mixers.latent_attention) if keys.has("kv_lora_rank") else UNKNOWN


def _mixers(keys: Keys, family: Family, layers: int) -> list[Mixer]:
    """The mixer of each layer."""
    usual = mixers.with_windows(keys, family.mixer(keys), layers)
    others = family.is_other(keys, layers)
    if len(usual) != layers or len(others) != layers:
        raise PlanError(f"{keys.where}: layer_types and the like have another length than {layers} layers; correct it")
    if family.other_mixer is None:
        return usual
    other = family.other_mixer(keys)
    return [other if is_other else one for is_other, one in zip(others, usual, strict=True)]


def _mean_widths(of_layers: Sequence[Mixer]) -> dict[str, int]:
    """Widths of the mixers, averaged over the layers."""

    def mean(values: Sequence[int]) -> int:
        return round(sum(values) / len(values))

    return {
        "query": mean([one.query for one in of_layers]),
        "key": mean([one.key for one in of_layers]),
        "value": mean([one.value for one in of_layers]),
        "attention_out": mean([one.out for one in of_layers]),
        "num_heads": mean([one.num_heads for one in of_layers]),
        "attention_norms": mean([one.normed for one in of_layers]),
    }


def _scores(of_layers: Sequence[Mixer]) -> tuple[Scores, ...]:
    counts = Counter((one.scored, one.window) for one in of_layers if one.scored)
    return tuple(Scores(layers, elements, window) for (elements, window), layers in counts.items())


def _ffn_matrices(hidden: int, ffn: int) -> tuple[Shape, ...]:
    """Gate, up and down."""
    return (ffn, hidden), (ffn, hidden), (hidden, ffn)
