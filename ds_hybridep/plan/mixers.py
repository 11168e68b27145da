# SPDX-License-Identifier: Apache-2.0
"""What stands before the experts in a layer, in each of its kinds: attention, Mamba, linear attention, convolution.

Each function reads its own keys of a config.json and gives the tensors of one layer.  A key that no function reads is
refused if it could matter; see `model_sizes`.
"""

from dataclasses import dataclass, replace
from typing import Literal

from ds_hybridep.geometry.slots import Shape
from ds_hybridep.plan.model_keys import Keys

QKNorm = Literal[
    "none", "head", "whole"
]  # of queries and keys: none, one for all heads, or one over all their elements


@dataclass(frozen=True, kw_only=True)
class Mixer:
    """Tensors of one layer's mixer, and elements that one token has in it.

    matrices: by which every token is multiplied; adapters go beside these.  others: vectors and convolutions.
    query, key, value, out: elements over all heads.  normed: elements that norms of queries and keys see.
    scored: elements by which attention multiplies each pair of tokens, queries and outputs; 0: no scores.
    window: tokens that a token looks back on at most; None: all.
    """

    matrices: tuple[Shape, ...]
    others: tuple[Shape, ...] = ()
    query: int
    key: int
    value: int
    out: int
    num_heads: int = 0
    normed: int = 0
    scored: int = 0
    window: int | None = None


# ---- attention ----


def attention(
    keys: Keys,
    *,
    qk_norm: QKNorm = "none",
    qkv_bias: bool | None = None,
    out_bias: bool | None = None,
    gate: Literal["none", "query", "matrix"] = "none",
    has_sinks: bool = False,
) -> Mixer:
    """Attention with heads that may share keys and values.

    qkv_bias, out_bias: None: as `attention_bias` says.  gate: of the output: none, made with the queries, or by a
    matrix of its own.  has_sinks: one number for each head beside the scores.
    """
    hidden, heads = keys.integer("hidden"), keys.integer("heads")
    size = keys.integer("head_size", default=hidden // heads)
    query, key = heads * size, keys.integer("key_heads", default=heads) * size
    biased = keys.flag("attention_bias")
    matrices: tuple[Shape, ...] = (query * (2 if gate == "query" else 1), hidden), (key, hidden), (key, hidden)
    others: list[Shape] = []
    if biased if qkv_bias is None else qkv_bias:
        others.extend((rows,) for rows, _ in matrices)
    matrices += ((hidden, query),)
    if gate == "matrix":
        matrices += ((query, hidden),)
    if biased if out_bias is None else out_bias:
        others.append((hidden,))
    if qk_norm != "none":
        others += [(size,), (size,)] if qk_norm == "head" else [(query,), (key,)]
    if has_sinks:
        others.append((heads,))
    return Mixer(
        matrices=matrices, others=tuple(others), query=query, key=key, value=key, out=query, num_heads=heads,
        normed=0 if qk_norm == "none" else query + key, scored=2 * query,
    )  # fmt: skip


def latent_attention(keys: Keys, *, has_indexer: bool = False) -> Mixer:
    """DeepSeek's attention with keys and values of low rank.

    has_indexer: sparse attention; each token looks at the `index_topk` tokens that a small attention chooses.
    """
    hidden, heads = keys.integer("hidden"), keys.integer("heads")
    keys.understand("num_key_value_heads", "head_dim", "qk_head_dim")  # they follow from those below
    kv_rank, value_size = keys.integer("kv_lora_rank"), keys.integer("v_head_dim")
    nope, rope = keys.integer("qk_nope_head_dim"), keys.integer("qk_rope_head_dim")
    query_rank = keys.integer("q_lora_rank", default=0)
    query, value = heads * (nope + rope), heads * value_size
    matrices: tuple[Shape, ...] = ((query_rank, hidden), (query, query_rank)) if query_rank else ((query, hidden),)
    matrices += ((kv_rank + rope, hidden), (heads * (nope + value_size), kv_rank), (hidden, value))
    others: list[Shape] = [(kv_rank,), (query_rank,)] if query_rank else [(kv_rank,)]
    if keys.flag("attention_bias"):
        others += [(kv_rank + rope,), (hidden,), *([(query_rank,)] if query_rank else [])]
    window = None
    if has_indexer:
        window, index_heads, size = (keys.integer(key) for key in ("index_topk", "index_n_heads", "index_head_dim"))
        matrices += ((index_heads * size, query_rank), (size, hidden), (index_heads, hidden))
        others += [(size,), (size,)]
    return Mixer(
        matrices=matrices, others=tuple(others), query=query, key=query, value=value, out=value, num_heads=heads,
        normed=query_rank + kv_rank, scored=query + value, window=window,
    )  # fmt: skip


def with_windows(keys: Keys, mixer: Mixer, num_layers: int) -> list[Mixer]:
    """The mixer of each layer, with the window that `layer_types`, `sliding_window` and the like give it."""
    kinds, sliding = keys.sequence("layer_types"), keys.integer("sliding_window", default=0)
    chunk = keys.integer("attention_chunk_size", default=0)
    is_everywhere = keys.flag("use_sliding_window", default=True) and not kinds and not chunk
    keys.understand("max_window_layers", "sliding_window_pattern", "global_attn_every_n_layers")  # layer_types has it
    windows = {"sliding_attention": sliding, "chunked_attention": chunk}
    if chunk and not kinds:  # Llama 4: layers without positions see all
        kinds = ["chunked_attention" if one else "full_attention" for one in keys.sequence("no_rope_layers")]
    found = [windows.get(kind, 0) for kind in kinds] or [sliding if is_everywhere else 0] * num_layers
    return [replace(mixer, window=window or mixer.window) for window in found]


# ---- others ----


def delta_net(keys: Keys) -> Mixer:
    """The gated linear attention of Qwen3-Next and Qwen3.5."""
    hidden = keys.integer("hidden")
    key_heads, value_heads = keys.integer("linear_num_key_heads"), keys.integer("linear_num_value_heads")
    key = key_heads * keys.integer("linear_key_head_dim")
    value_size = keys.integer("linear_value_head_dim")
    value, kernel = value_heads * value_size, keys.integer("linear_conv_kernel_dim")
    return Mixer(
        matrices=((2 * key + 2 * value, hidden), (2 * value_heads, hidden), (hidden, value)),
        others=((2 * key + value, 1, kernel), (value_heads,), (value_heads,), (value_size,)),
        query=key, key=key, value=value, out=2 * value,
    )  # fmt: skip


def lightning_attention(keys: Keys) -> Mixer:
    """The linear attention of MiniMax-Text."""
    hidden, heads = keys.integer("hidden"), keys.integer("heads")
    width = heads * keys.integer("head_size", default=hidden // heads)
    return Mixer(
        matrices=((3 * width, hidden), (hidden, width), (width, hidden)),
        others=((width,),), query=width, key=width, value=width, out=2 * width,
    )  # fmt: skip


def mamba(keys: Keys) -> Mixer:
    """Jamba's Mamba."""
    hidden, state = keys.integer("hidden"), keys.integer("mamba_d_state")
    inner, rank = keys.integer("mamba_expand") * hidden, keys.integer("mamba_dt_rank")
    others: list[Shape] = [(inner, state), (inner,), (inner, 1, keys.integer("mamba_d_conv")), (inner,)]
    others += [(rank,), (state,), (state,)]
    others += [(inner,)] if keys.flag("mamba_conv_bias", default=True) else []
    others += [(2 * inner,), (hidden,)] if keys.flag("mamba_proj_bias") else []
    return Mixer(
        matrices=((2 * inner, hidden), (rank + 2 * state, inner), (inner, rank), (hidden, inner)),
        others=tuple(others), query=inner, key=inner, value=inner, out=inner,
    )  # fmt: skip


def mamba_2(keys: Keys) -> Mixer:
    """The Mamba 2 of Granite 4."""
    hidden, heads = keys.integer("hidden"), keys.integer("mamba_n_heads")
    inner = keys.integer("mamba_expand") * hidden
    keys.understand("mamba_d_head", "mamba_chunk_size")  # inner / heads; a matter of speed
    wide = inner + 2 * keys.integer("mamba_n_groups") * keys.integer("mamba_d_state")
    others: list[Shape] = [(wide, 1, keys.integer("mamba_d_conv")), (heads,), (heads,), (heads,), (inner,)]
    others += [(wide,)] if keys.flag("mamba_conv_bias", default=True) else []
    others += [(inner + wide + heads,), (hidden,)] if keys.flag("mamba_proj_bias") else []
    return Mixer(
        matrices=((inner + wide + heads, hidden), (hidden, inner)),
        others=tuple(others), query=inner, key=inner, value=wide, out=inner,
    )  # fmt: skip


def short_convolution(keys: Keys) -> Mixer:
    """The gated convolution of LFM2."""
    hidden = keys.integer("hidden")
    others: tuple[Shape, ...] = ((hidden, 1, keys.integer("conv_L_cache")),)
    if keys.flag("conv_bias"):
        others += ((hidden,), (3 * hidden,), (hidden,))
    return Mixer(
        matrices=((3 * hidden, hidden), (hidden, hidden)), others=others,
        query=hidden, key=hidden, value=hidden, out=hidden,
    )  # fmt: skip
