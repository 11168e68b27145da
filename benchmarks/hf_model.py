# SPDX-License-Identifier: Apache-2.0
"""A small random Qwen3-MoE for benchmarks/e2e.py, trained as a whole or by adapters, through DeepSpeed's AutoEP."""

import argparse
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

VOCABULARY = 256
ADAPTER_RANK = 8


class BytesQwen3Moe(Qwen3MoeForCausalLM):
    """Called as the other models of these benchmarks are."""

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Loss, the router's auxiliary loss in it, of [B, S] int64 tokens; `targets` are made of them again."""
        loss = super().forward(input_ids=tokens, labels=tokens).loss
        return loss, torch.zeros_like(loss)


def build(args: argparse.Namespace, adapters: str) -> nn.Module:
    """The model; with `adapters`, of "attention" or "attention and experts", only these are trainable."""
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,
        moe_intermediate_size=2 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=args.hidden // 4,
        num_experts=args.experts,
        num_experts_per_tok=args.top_k,
        norm_topk_prob=True,
        output_router_logits=True,
        bos_token_id=None,
        eos_token_id=None,
        use_cache=False,
    )
    model = BytesQwen3Moe(config)
    if not adapters:
        return model
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"] if "experts" in adapters else None
    settings = LoraConfig(r=ADAPTER_RANK, target_modules=attention, target_parameters=experts)
    return get_peft_model(model, settings)


def autoep_block(ep_size: int) -> dict[str, Any]:
    """The "expert_parallel" block; peft puts a prefix before the names of modules."""
    pattern = r"(base_model\.model\.)?model\.layers\.\d+\.mlp"
    return {"enabled": True, "autoep_size": ep_size, "moe_layer_pattern": pattern}
