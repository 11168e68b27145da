# SPDX-License-Identifier: Apache-2.0
"""Bytes, parameters and FLOPs of one training step of a Mixture-of-Experts model, per layer and rank."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_hybridep.errors import PlanError

DTYPE_BYTES = {"fp32": 4, "float32": 4, "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2}
MASTER_BYTES = 4  # the gate's weights, gradient sums, and ZeRO's copy of a 2-byte parameter are fp32
ADAM_BYTES = 8  # two fp32 moments for each trained parameter
INDEX_BYTES = 4  # an expert id beside a row
COUNT_BYTES = 8  # a row count, one for each destination of an exchange
MIN_CAPACITY = 4  # deepspeed.moe.layer.MoE's default

# Keys of Hugging Face's config.json: the first one that is there counts.
NUM_EXPERTS_KEYS = ("num_local_experts", "num_experts", "n_routed_experts")
TOP_K_KEYS = ("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_topk")


@dataclass(frozen=True, kw_only=True)
class MoEModel:
    """Sizes of a model.

    expert_params: of one routed expert.
    dense_params: of all else on every rank: attention, norms, routers, shared experts, dense layers, embeddings.
    active_dense_params: those of them that every token is multiplied with (not a table that is looked up).
    attention_width: heads x head size, summed over layers; what attention scores cost on top of the projections.
    """

    name: str
    hidden: int
    num_experts: int
    top_k: int
    num_moe_layers: int
    expert_params: int
    dense_params: int
    active_dense_params: int
    attention_width: int = 0

    def __post_init__(self) -> None:
        for field in ("hidden", "num_experts", "top_k", "num_moe_layers", "expert_params"):
            if getattr(self, field) < 1:
                raise PlanError(f"model {self.name!r}: {field} is {getattr(self, field)}, but must be at least 1")
        if self.top_k > self.num_experts:
            raise PlanError(
                f"model {self.name!r}: top_k is {self.top_k}, but there are only {self.num_experts} experts"
            )

    @property
    def num_params(self) -> int:
        """Parameters of the whole model."""
        return self.dense_params + self.num_moe_layers * self.num_experts * self.expert_params


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One training step of a model, as one rank sees it.

    tokens_per_rank, seq_len: of a micro-step and of a sequence; 0 leaves attention scores out of the FLOPs.
    param_bytes: of a parameter, of its gradient and of a number in a token row.
    is_checkpointed: activations are recomputed in the backward, with the layers' exchanges.
    capacity_factor: of DeepSpeed's gate; its all-to-alls are padded to it.
    row_scale: measured rows over what even routing would send, such as 0.9 where tokens like experts close by.
    trainable_expert_params: of each expert; None: all. Adapters train few, and only those travel.
    """

    model: MoEModel
    tokens_per_rank: int
    micro_steps: int = 1
    param_bytes: int = 2
    zero_stage: int = 1
    is_checkpointed: bool = False
    seq_len: int = 0
    capacity_factor: float = 1.0
    row_scale: float = 1.0
    trainable_expert_params: int | None = None
    trainable_dense_params: int | None = None

    def __post_init__(self) -> None:
        for field, least in (("tokens_per_rank", 1), ("micro_steps", 1), ("param_bytes", 1), ("seq_len", 0)):
            if getattr(self, field) < least:
                raise PlanError(f"{field} is {getattr(self, field)}, but must be at least {least}")
        if self.zero_stage not in (0, 1, 2):
            raise PlanError(f"zero_stage is {self.zero_stage}, but plans are made for stages 0, 1 and 2")
        for field in ("capacity_factor", "row_scale"):
            value = getattr(self, field)
            if not (math.isfinite(value) and value >= 0):
                raise PlanError(f"{field} is {value}, but must be a finite number >= 0")

    @property
    def expert_travel_params(self) -> int:
        """Parameters of one expert that are shipped after each step, and whose gradients return."""
        return self.model.expert_params if self.trainable_expert_params is None else self.trainable_expert_params

    @property
    def expert_travel_bytes(self) -> int:
        """Bytes of one expert's weights, or of its gradients, uncompressed: both travel in the parameter's type."""
        return self.expert_travel_params * self.param_bytes

    @property
    def dense_train_params(self) -> int:
        """Dense parameters whose gradients are summed over all ranks."""
        return self.model.dense_params if self.trainable_dense_params is None else self.trainable_dense_params

    @property
    def row_bytes(self) -> int:
        """The hidden state, or its gradient."""
        return self.model.hidden * self.param_bytes

    @property
    def dispatch_extra_bytes(self) -> int:
        """Beside a row on its way to the experts: an id and an fp32 weight for each of its top_k experts."""
        return self.model.top_k * (INDEX_BYTES + MASTER_BYTES)

    @property
    def return_extra_bytes(self) -> int:
        """Beside a row's input gradient on its way back: the fp32 gradient of each gate weight."""
        return self.model.top_k * MASTER_BYTES

    @property
    def expert_capacity(self) -> int:
        """Rows that DeepSpeed's gate reserves for each expert on a rank.  Source: its sharded_moe._capacity."""
        model = self.model
        rows = math.ceil(self.tokens_per_rank / model.num_experts * self.capacity_factor * model.top_k)
        return max(rows, MIN_CAPACITY)

    @property
    def pre_expert_flops(self) -> float:
        """Forward FLOPs of all but the routed experts, for one MoE layer; what lies elsewhere is spread evenly."""
        # Causal attention scores and their use: 2 x seq_len x width.
        # Source: paper (1), (2), with PE = (m+1) attention + m FFN.
        per_token = 2.0 * self.model.active_dense_params + 2.0 * self.seq_len * self.model.attention_width
        return self.tokens_per_rank * per_token / self.model.num_moe_layers

    @property
    def expert_rows(self) -> int:
        """(token, expert) pairs of one rank and layer: rows that experts compute for it."""
        return self.tokens_per_rank * self.model.top_k

    @property
    def expert_flops_per_row(self) -> float:
        """Forward FLOPs of one expert on one row: two per parameter.  Source: paper (1)."""
        return 2.0 * self.model.expert_params


# ---- reading models ----


def model_from_mapping(content: Mapping[str, Any], name: str = "model") -> MoEModel:
    """The model that a Hugging Face config.json or a file in our own short form describes.

    Our own form has `layers`, `hidden`, `ffn`, `experts`, `top_k` and, where they differ from the defaults: `gated`
    (true: three matrices in an expert, false: two), `moe_layers` (all), `expert_params` (what ffn and gated give).

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


SHORT_KEYS = (
    "name", "layers", "hidden", "ffn", "experts", "top_k", "tokens", "dtype", "gated", "moe_layers", "expert_params",
)  # fmt: skip


def _from_short_form(content: Mapping[str, Any], name: str) -> MoEModel:
    for key in content:
        if key not in SHORT_KEYS:
            raise PlanError(f"model {name!r}: {key} is not a known key; known are {', '.join(SHORT_KEYS)}")
    layers, hidden = _integer(content, "layers", name), _integer(content, "hidden", name)
    experts = _integer(content, "experts", name)
    moe_layers = _integer(content, "moe_layers", name, layers)
    matrices_params = (3 if content.get("gated", True) else 2) * hidden * _integer(content, "ffn", name)
    dense = layers * 4 * hidden * hidden + moe_layers * hidden * experts  # attention and routers
    return MoEModel(
        name=str(content.get("name", name)),
        hidden=hidden,
        num_experts=experts,
        top_k=_integer(content, "top_k", name),
        num_moe_layers=moe_layers,
        expert_params=_integer(content, "expert_params", name, matrices_params),
        dense_params=dense,
        active_dense_params=dense,
        attention_width=layers * hidden,
    )


def _from_hugging_face(content: Mapping[str, Any], name: str) -> MoEModel:
    hidden, layers = _integer(content, "hidden_size", name), _integer(content, "num_hidden_layers", name)
    experts, top_k = _first(content, NUM_EXPERTS_KEYS, name), _first(content, TOP_K_KEYS, name)
    dense_ffn = _integer(content, "intermediate_size", name)
    expert_ffn = _integer(content, "moe_intermediate_size", name, dense_ffn)
    has_bias = content.get("model_type") == "gpt_oss"  # its experts, router and projections have biases
    moe_layers = _num_moe_layers(content, layers)
    expert_params = 3 * hidden * expert_ffn + (2 * expert_ffn + hidden if has_bias else 0)
    shared_ffn = _integer(content, "shared_expert_intermediate_size", name, 0)
    shared_ffn += _integer(content, "n_shared_experts", name, 0) * expert_ffn
    attention_params, width = _attention(content, hidden, name)
    per_moe_layer = hidden * experts + (experts if has_bias else 0) + 3 * hidden * shared_ffn
    in_layers = layers * (attention_params + 2 * hidden)
    in_layers += moe_layers * per_moe_layer + (layers - moe_layers) * 3 * hidden * dense_ffn
    embedding = _integer(content, "vocab_size", name, 0) * hidden
    num_tables = 1 if content.get("tie_word_embeddings", False) else 2
    return MoEModel(
        name=name,
        hidden=hidden,
        num_experts=experts,
        top_k=top_k,
        num_moe_layers=moe_layers,
        expert_params=expert_params,
        dense_params=in_layers + hidden + num_tables * embedding,
        active_dense_params=in_layers + hidden + embedding,
        attention_width=layers * width,
    )


def _num_moe_layers(content: Mapping[str, Any], layers: int) -> int:
    """Layers with routed experts: not the first dense ones, not those in between that a config names."""
    first = int(content.get("first_k_dense_replace", 0))
    dense = set(content.get("mlp_only_layers") or ())
    step = int(content.get("decoder_sparse_step", content.get("moe_layer_freq", 1)) or 1)
    return sum(1 for layer in range(first, layers) if layer not in dense and (layer + 1) % step == 0)


def _attention(content: Mapping[str, Any], hidden: int, name: str) -> tuple[int, int]:
    """(parameters, heads x head size) of one layer's attention."""
    heads = _integer(content, "num_attention_heads", name)
    if "kv_lora_rank" in content:  # multi-head latent attention: low-rank queries, keys and values
        kv_rank, value_size = _integer(content, "kv_lora_rank", name), _integer(content, "v_head_dim", name)
        rope_size = _integer(content, "qk_rope_head_dim", name)
        nope_size = _integer(content, "qk_nope_head_dim", name)
        query_rank = int(content.get("q_lora_rank") or 0)
        query_width = heads * (nope_size + rope_size)
        query = query_rank * (hidden + query_width) if query_rank else hidden * query_width
        keys_values = hidden * (kv_rank + rope_size) + kv_rank * heads * (nope_size + value_size)
        return query + keys_values + heads * value_size * hidden, heads * (nope_size + rope_size + value_size) // 2
    head_size = _integer(content, "head_dim", name, hidden // heads)
    kv_heads = _integer(content, "num_key_value_heads", name, heads)
    width, kv_width = heads * head_size, kv_heads * head_size
    biases = width + 2 * kv_width + hidden if content.get("attention_bias") else 0
    return 2 * hidden * width + 2 * hidden * kv_width + biases, width


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
