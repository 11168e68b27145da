# SPDX-License-Identifier: Apache-2.0
"""A model's sizes, from Hugging Face's config.json or our own short form."""

from collections.abc import Mapping
from typing import Any

from ds_hybridep.errors import PlanError
from ds_hybridep.geometry.slots import Shape
from ds_hybridep.plan.workload import MoEModel, Widths, num_params

# Keys of Hugging Face's config.json: the first key that is present counts.
NUM_EXPERTS_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
TOP_K_KEYS = ("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_topk")

SHORT_KEYS = ("layers", "hidden", "ffn", "experts", "top_k")


def model_from_mapping(content: Mapping[str, Any], name: str = "model") -> MoEModel:
    """The model that a Hugging Face config.json or a file in our own short form describes.

    In our short form, all layers have `experts` of three matrices, and an attention of four.

    Raises PlanError that names the missing or wrong key.
    """
    if "hidden_size" in content:
        return _from_hugging_face(content, name)
    if "hidden" in content:
        return _from_short_form(content, name)
    raise PlanError(
        f"model {name!r} has neither hidden_size (Hugging Face's config.json) nor hidden (the short form: layers, "
        f"hidden, ffn, experts, top_k); give one of the two"
    )


def _from_short_form(content: Mapping[str, Any], name: str) -> MoEModel:
    for key in content:
        if key not in SHORT_KEYS:
            raise PlanError(f"model {name!r}: {key} is not a known key; known are {', '.join(SHORT_KEYS)}")
    layers, hidden, ffn, experts, top_k = (_integer(content, key, name) for key in SHORT_KEYS)
    dense_shapes = ((hidden, hidden),) * 4 * layers + ((experts, hidden),) * layers
    return MoEModel(
        name=name,
        hidden=hidden,
        num_experts=experts,
        top_k=top_k,
        num_moe_layers=layers,
        expert_shapes=_ffn_matrices(hidden, ffn),
        dense_shapes=dense_shapes,
        active_dense_params=num_params(dense_shapes),
    )


def _from_hugging_face(content: Mapping[str, Any], name: str) -> MoEModel:
    hidden, layers = _integer(content, "hidden_size", name), _integer(content, "num_hidden_layers", name)
    experts = _first(content, NUM_EXPERTS_KEYS, name)
    dense_ffn = _integer(content, "intermediate_size", name)
    expert_ffn = _integer(content, "moe_intermediate_size", name, dense_ffn)
    has_bias = content.get("model_type") == "gpt_oss"  # its experts, router and projections have biases
    expert_shapes = _ffn_matrices(hidden, expert_ffn)
    if has_bias:
        expert_shapes += ((expert_ffn,), (expert_ffn,), (hidden,))
    shared_ffn = _integer(content, "shared_expert_intermediate_size", name, 0)
    shared_ffn += _integer(content, "n_shared_experts", name, 0) * expert_ffn
    attention, widths = _attention(content, hidden, name)
    router: tuple[Shape, ...] = ((experts, hidden), (experts,)) if has_bias else ((experts, hidden),)
    shared = _ffn_matrices(hidden, shared_ffn) if shared_ffn else ()
    in_layers: list[Shape] = []
    moe_layers = _moe_layers(content, layers)
    for layer in range(layers):
        in_layers += [(hidden,), *attention, (hidden,)]
        in_layers += [*router, *shared] if layer in moe_layers else _ffn_matrices(hidden, dense_ffn)
    vocabulary = _integer(content, "vocab_size", name, 0)
    table: tuple[Shape, ...] = ((vocabulary, hidden),) if vocabulary else ()
    head = () if content.get("tie_word_embeddings", False) else table
    dense_shapes = (*table, *in_layers, (hidden,), *head)
    return MoEModel(
        name=name,
        hidden=hidden,
        num_experts=experts,
        top_k=_first(content, TOP_K_KEYS, name),
        num_moe_layers=len(moe_layers),
        expert_shapes=expert_shapes,
        dense_shapes=dense_shapes,
        active_dense_params=num_params(in_layers) + hidden + num_params(table),
        stacks_experts=True,  # as in AutoEP
        known_widths=Widths(
            num_layers=layers,
            **widths,
            expert_ffn=expert_ffn,
            shared_ffn=shared_ffn,
            dense_ffn=dense_ffn if len(moe_layers) < layers else 0,
            vocabulary=vocabulary,
        ),
    )


def _ffn_matrices(hidden: int, ffn: int) -> tuple[Shape, ...]:
    """Gate, up and down."""
    return (ffn, hidden), (ffn, hidden), (hidden, ffn)


def _moe_layers(content: Mapping[str, Any], layers: int) -> set[int]:
    """Layers with routed experts.  A config can make dense: the first layers, named layers, all but every n-th."""
    first = int(content.get("first_k_dense_replace", 0))
    dense = set(content.get("mlp_only_layers") or ())
    step = int(content.get("decoder_sparse_step", content.get("moe_layer_freq", 1)) or 1)
    return {layer for layer in range(first, layers) if layer not in dense and (layer + 1) % step == 0}


def _attention(content: Mapping[str, Any], hidden: int, name: str) -> tuple[tuple[Shape, ...], dict[str, int]]:
    """(shapes of tensors, elements of a token as in `Widths`) of one layer's attention."""
    heads = _integer(content, "num_attention_heads", name)
    if "kv_lora_rank" in content:  # multi-head latent attention: low-rank queries, keys and values
        kv_rank, value_size = _integer(content, "kv_lora_rank", name), _integer(content, "v_head_dim", name)
        rope_size = _integer(content, "qk_rope_head_dim", name)
        nope_size = _integer(content, "qk_nope_head_dim", name)
        query_rank = int(content.get("q_lora_rank") or 0)
        query = key = heads * (nope_size + rope_size)
        value = out = heads * value_size
        norms = query_rank + kv_rank
        shapes: tuple[Shape, ...] = ((query_rank, hidden), (query, query_rank)) if query_rank else ((query, hidden),)
        shapes += ((kv_rank + rope_size, hidden), (heads * (nope_size + value_size), kv_rank), (hidden, value))
    else:
        head_size = _integer(content, "head_dim", name, hidden // heads)
        query = out = heads * head_size
        key = value = _integer(content, "num_key_value_heads", name, heads) * head_size
        shapes = (query, hidden), (key, hidden), (value, hidden), (hidden, out)
        if content.get("attention_bias"):
            shapes += tuple((rows,) for rows, _ in shapes)
        # Qwen3 normalises queries and keys.
        norms = query + key if str(content.get("model_type", "")).startswith("qwen3") else 0
    sizes = {"query": query, "key": key, "value": value, "attention_out": out}
    return shapes, {**sizes, "num_heads": heads, "attention_norms": norms}


def _first(content: Mapping[str, Any], keys: tuple[str, ...], name: str) -> int:
    for key in keys:
        if content.get(key) is not None:
            return _integer(content, key, name)
    raise PlanError(f"model {name!r} has none of the keys {', '.join(keys)}; is it a Mixture-of-Experts model?")


def _integer(content: Mapping[str, Any], key: str, name: str, default: int | None = None) -> int:
    value = content.get(key)
    if value is None:
        if default is None:
            raise PlanError(f"model {name!r} has no key {key}; add it")
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 0:
        raise PlanError(f"model {name!r}: {key} is {value!r}, but must be an integer >= 0")
    return int(value)
