# SPDX-License-Identifier: Apache-2.0
"""Small random Hugging Face MoE models, one of each family that DeepSpeed's AutoEP knows and the tests try.

All ranks build the whole model from the same seed; AutoEP keeps each rank's experts.  transformers, which may be
missing, is imported when it is needed.
"""

import importlib.util
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from toy_model import ROUTING_GAP, ToyConfig

FAMILIES = ("mixtral", "qwen3_moe", "deepseek_v3", "qwen3_5_moe")


def preload() -> None:
    """Import what the models need, where it is installed: many seconds in each worker otherwise."""
    if importlib.util.find_spec("transformers") is None:
        return
    import transformers

    for model_class, _ in _FAMILY_SETTINGS.values():
        getattr(transformers, model_class)


def let_plain_autoep_work() -> None:
    """Let AutoEP without the block, to compare with, read newer versions of transformers as it can with the block."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    from ds_hybridep.deepspeed.autoep import plain_registry

    original = DeepSpeedEngine._configure_expert_parallel

    @wraps(original)
    def configure(engine: Any, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if "hybridep" in engine._config._param_dict else plain_registry():
            return original(engine, *args, **kwargs)

    DeepSpeedEngine._configure_expert_parallel = configure


def build_hf_model(family: str, config: ToyConfig, *, seed: int, **options: Any) -> nn.Module:
    """A causal language model of the shape that `config` describes; `options` go to its configuration."""
    model_class, settings = _FAMILY_SETTINGS[family]
    import transformers

    transformers.logging.set_verbosity_error()
    common = {
        "vocab_size": config.vocab,
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "moe_intermediate_size": config.ffn,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "num_experts_per_tok": config.k,
        "max_position_embeddings": 4 * config.sequence,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": None,
        "use_cache": False,
    }
    model_type = getattr(transformers, model_class)
    arguments = common | {key: value(config) for key, value in settings.items()} | options
    torch.manual_seed(seed)
    model = model_type(model_type.config_class(**arguments))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:  # some start at 0, and a difference would be told in units of a few steps
                parameter.add_(0.1 * torch.randn(parameter.shape))
    if config.routing == "by_token":
        _route_by_token(model, config)
    if config.checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": config.checkpointing == "reentrant"})
    return model


def hf_loss(engine: Any, tokens: Tensor, targets: Tensor) -> Tensor:
    """Training loss of a micro-batch, with the router's auxiliary loss where the model has one."""
    return engine(input_ids=tokens, labels=targets).loss


def by_expert(tensors: dict[str, Tensor], *, first_expert: int) -> dict[str, Tensor]:
    """Grouped weights [e, ...] of AutoEP taken apart, each named with its expert's global id; others as they are."""
    parts: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if ".experts.w" in name:
            parts |= {f"{name}.{first_expert + index}": part for index, part in enumerate(value)}
        else:
            parts[name] = value
    return parts


# Router logits are asked for where the family computes an auxiliary loss from them.
_FAMILY_SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": (
        "MixtralForCausalLM",
        {"num_local_experts": lambda c: c.num_experts, "output_router_logits": lambda c: True},
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {
            "num_experts": lambda c: c.num_experts,
            "head_dim": lambda c: 32 if c.hidden >= 64 else 8,  # vLLM takes no smaller ones than 32
            "norm_topk_prob": lambda c: True,
            "output_router_logits": lambda c: True,
        },
    ),
    # Group-limited routing with sigmoid scores and a shared expert; the first layer is dense.
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {
            "n_routed_experts": lambda c: c.num_experts,
            "num_hidden_layers": lambda c: c.num_layers + 1,
            "first_k_dense_replace": lambda c: 1,
            "n_group": lambda c: 2,
            "topk_group": lambda c: 1,
            "kv_lora_rank": lambda c: 8,
            "q_lora_rank": lambda c: 8,
            "qk_rope_head_dim": lambda c: 4,
            "v_head_dim": lambda c: 8,
            "qk_nope_head_dim": lambda c: 4,
        },
    ),
    # A gated shared expert, and linear attention in every layer but the last.
    "qwen3_5_moe": (
        "Qwen3_5MoeForCausalLM",
        {
            "num_experts": lambda c: c.num_experts,
            "shared_expert_intermediate_size": lambda c: c.ffn,
            "head_dim": lambda c: 8,
            "linear_key_head_dim": lambda c: 8,
            "linear_value_head_dim": lambda c: 8,
            "linear_num_key_heads": lambda c: 2,
            "linear_num_value_heads": lambda c: 2,
            "layer_types": lambda c: ["linear_attention"] * (c.num_layers - 1) + ["full_attention"],
        },
    ),
}


def _route_by_token(model: nn.Module, config: ToyConfig) -> None:
    """The last E features of a token are a wide preference for k neighbouring experts, which training hardly moves.

    Rounding then moves no token to another expert, which would drown everything that a test in bf16 could see. Where
    routing is limited to groups of experts the k are of one group.
    """
    num_experts = config.num_experts
    features = slice(-num_experts, None)
    experts = torch.arange(num_experts)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("embed_tokens.weight"):
                tokens = torch.arange(config.vocab)[:, None]
                is_chosen = experts // config.k == tokens * 3 % (num_experts // config.k)
                parameter[:, features] = torch.where(is_chosen, -0.05 * (experts % config.k), -1.0)
            elif name.endswith("mlp.gate.weight"):
                parameter.mul_(0.1)
                parameter[:, features] = ROUTING_GAP * num_experts * torch.eye(num_experts)
            elif name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
                parameter[features] = 0.0
            elif name.endswith("experts.down_proj"):
                parameter[:, features] = 0.0
