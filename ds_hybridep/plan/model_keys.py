# SPDX-License-Identifier: Apache-2.0
"""The keys of a Hugging Face config.json: what each means, which were read, and which could matter but were not.

`NAMES` is the one table of what is called differently in different families.  What a family has that others have not
is in `model_families`.
"""

from collections.abc import Mapping
from typing import Any

from ds_hybridep.errors import PlanError

# Meaning -> keys that families use for it; the first one that is present counts.
NAMES: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "d_model"),
    "layers": ("num_hidden_layers", "n_layers"),
    "vocabulary": ("vocab_size",),
    "heads": ("num_attention_heads", "n_heads"),
    "key_heads": ("num_key_value_heads", "kv_n_heads"),
    "head_size": ("head_dim", "attention_head_dim"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "top_k": (
        "num_experts_per_tok", "num_experts_per_token", "experts_per_token", "moe_topk", "moe_top_k", "moe_k",
    ),
    "expert_ffn": ("moe_intermediate_size", "expert_ffn_hidden_size"),
    "ffn": ("intermediate_size", "ffn_hidden_size"),
    "shared_experts": (
        "n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts",
    ),
    "shared_ffn": ("shared_expert_intermediate_size", "shared_intermediate_size"),
    "attention_bias": ("attention_bias", "use_bias", "qkv_bias", "add_qkv_bias", "use_qkv_bias"),
}  # fmt: skip

# A key with one of these words in its name could say a size; it must be read, or be in `HARMLESS`.
SIZES = frozenset(
    """
    size dim rank layer layers expert experts head heads hidden intermediate num n kernel freq interval period offset
    step pattern window chunk latent group groups bias conv mamba linear ffn mlp shared norm tie vocab attn attention
    moe width depth channels type types
    """.split()
)
# Such keys without influence on sizes and seconds.
HARMLESS = frozenset(
    """
    model_type attention_dropout hidden_dropout hidden_dropout_prob attention_probs_dropout_prob moe_dropout_prob
    hidden_act mamba_hidden_act ffn_act_fn output_attentions output_hidden_states chunk_size_feed_forward
    attn_implementation _attn_implementation num_logits_to_keep use_mamba_kernels attention_softmax_in_fp32
    rms_norm_eps norm_eps layer_norm_eps layer_norm_epsilon layernorm_epsilon norm_topk_prob moe_norm_topk_prob
    moe_norm_min norm_head moe_jitter_eps moe_loss_weight moe_normalize_expert_weights aux_loss_alpha n_group
    topk_group num_expert_group num_limited_groups use_expert_bias moe_router_enable_expert_bias moe_gate moe_capacity
    moe_use_aux_free moe_use_hard_gate moe_group moe_aux_loss_lambda moe_orthogonal_loss_lambda topk_method
    num_nextn_predict_layers num_mtp_layers mtp_num_hidden_layers num_nextn_predict_layer mtp_num_layers
    attn_temperature_tuning attn_scale attention_multiplier block_size full_attn_alpha_factor full_attn_beta_factor
    linear_attn_alpha_factor linear_attn_beta_factor mlp_alpha_factor mlp_beta_factor postnorm position_embedding_type
    layernorm_full_attention_alpha layernorm_full_attention_beta layernorm_linear_attention_alpha
    layernorm_linear_attention_beta layernorm_mlp_alpha layernorm_mlp_beta num_labels problem_type rope_type ep_size
    time_step_min time_step_max time_step_limit time_step_floor mamba_ssm_dtype attention_rope_scaling
    full_attention_interval experts_implementation nope_layer_interval use_cache
    use_flash_attn clip_qkv moe_router_dtype moe_layer_auto_map num_return_sequences router_num_group mlp_type
    rotary_dim shared_moe_mode
    """.split()
)


class Keys:
    """The keys of a config.json, by name or by meaning (`NAMES`), and which of them were read."""

    def __init__(self, content: Mapping[str, Any], model: str) -> None:
        self._content, self._model = dict(content), model
        self._read: set[str] = set()

    @property
    def where(self) -> str:
        """The model, as messages name it."""
        return f"model {self._model!r}"

    def has(self, meaning: str) -> bool:
        """True if a key of this meaning is present and not null."""
        return self._find(meaning) is not None

    def integer(self, meaning: str, *, default: int | None = None) -> int:
        """A number, also from a list of equal ones.  Raises PlanError if it is missing and there is no default."""
        key = self._find(meaning)
        if key is None:
            if default is None:
                raise PlanError(f"model {self._model!r} has no key {self._wanted(meaning)}; add it")
            return default
        return self._as_integer(key)

    def _as_integer(self, key: str) -> int:
        value = self._content[key]
        if isinstance(value, list) and value and all(one == value[0] for one in value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 0:
            raise PlanError(f"model {self._model!r}: {key} is {value!r}, but must be an integer >= 0")
        return int(value)

    def plain_integer(self, key: str) -> int:
        """A number of our short form, whose keys have one name."""
        return self._as_integer(key)

    def flag(self, meaning: str, *, default: bool = False) -> bool:
        """A truth value.  Raises PlanError if it is something else."""
        key = self._find(meaning)
        value = default if key is None else self._content[key]
        if value not in (True, False):
            raise PlanError(f"model {self._model!r}: {key} is {value!r}, but must be true or false")
        return bool(value)

    def sequence(self, key: str) -> list[Any]:
        """A list; empty if the key is missing or null.  Raises PlanError if it is something else."""
        self._read.add(key)
        value = self._content.get(key)
        if value is not None and not isinstance(value, list | tuple):
            raise PlanError(f"model {self._model!r}: {key} is {value!r}, but must be a list")
        return list(value or ())

    def is_sequence(self, key: str) -> bool:
        return isinstance(self._content.get(key), list | tuple)

    def understand(self, *keys: str) -> None:
        """Take keys for read that say what others say, too."""
        self._read.update(keys)

    def check_all_read(self) -> None:
        """Raises PlanError that names the keys which could matter and which nothing has read."""
        unread = sorted(
            key
            for key, value in self._content.items()
            if key not in self._read and key not in HARMLESS and _could_matter(key, value)
        )
        if unread:
            listed = ", ".join(f"{key} ({str(self._content[key])[:40]})" for key in unread)
            raise PlanError(
                f"model {self._model!r}: {listed}: not understood, and could change sizes; remove what does not, or "
                f"describe the model in a file with layers, hidden, ffn, experts, top_k"
            )

    def _find(self, meaning: str) -> str | None:
        names = NAMES.get(meaning, (meaning,))
        present = [name for name in names if self._content.get(name) is not None]
        # Another name for the same number is no second meaning.
        self._read.update(name for name in present if self._content[name] == self._content[present[0]])
        return present[0] if present else None

    @staticmethod
    def _wanted(meaning: str) -> str:
        return " or ".join(NAMES.get(meaning, (meaning,)))


def _could_matter(key: str, value: Any) -> bool:
    if value is None or value is False or value == 0 or value in ("", [], {}):
        return False  # what it is about does not exist
    is_token = key.endswith(("token_id", "token_ids", "token_index", "token"))
    return not is_token and bool(SIZES & set(key.lower().split("_")))
