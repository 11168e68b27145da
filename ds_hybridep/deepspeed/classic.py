# SPDX-License-Identifier: Apache-2.0
"""Describes DeepSpeed's classic MoE layers for the runtime, and replaces their forward."""

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.moe.sharded_moe import MOELayer
from torch import Tensor, nn

from ds_hybridep.errors import ConfigError, UnsupportedError
from ds_hybridep.experts.layer_spec import LayerSpec
from ds_hybridep.tokens.layer import HybridMoE, call_expert
from ds_hybridep.transport.job import group_ranks


def is_classic(module: nn.Module) -> bool:
    """Return True for the layers of deepspeed.moe.layer.MoE."""
    return isinstance(module, MOELayer)


def spec_of(name: str, layer: MOELayer) -> LayerSpec:
    """Describe a layer for the runtime; raises UnsupportedError if it uses Tutel."""
    if layer.use_tutel:
        raise UnsupportedError(f"{name}: Tutel does not work with hybridep; build MoE with use_tutel=False")
    if layer.ep_group is None:
        raise ConfigError(
            f"{name}: the layer has no expert-parallel group yet; attach after deepspeed.initialize, or call its "
            f"set_deepspeed_parallelism() first"
        )
    num_experts, hidden = layer.gate.wg.weight.shape
    return LayerSpec(
        name=name,
        group=layer.ep_group_name,
        group_ranks=group_ranks(layer.ep_group),
        num_experts=num_experts,
        top_k=layer.gate.k,
        hidden=hidden,
        experts=tuple(layer.experts.deepspeed_experts),
        call=call_expert,
    )


def wrap_forward(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Make `MOELayer.forward` of attached layers: DeepSpeed's gate routes, experts run over expert domains."""
    run = torch.compiler.disable(_forward)  # traced, the nodes that return gradients would be lost

    def forward(layer: MOELayer, *inputs: Tensor, **kwargs: Any) -> Tensor:
        hybrid: HybridMoE | None = layer.__dict__.get("_hybridep")
        return original(layer, *inputs, **kwargs) if hybrid is None else run(layer, hybrid, *inputs)

    return forward


def _forward(layer: MOELayer, hybrid: HybridMoE, hidden_states: Tensor, used_token: Tensor | None) -> Tensor:
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    # Without a group the gate asks no rank for the largest capacity.  Without dropping it pads to that; we do not.
    group, layer.gate.ep_group = layer.gate.ep_group, None
    try:
        # sparse_routes, so topk_idx is [k, T] int32, -1 where a token is dropped; and not use_tutel.
        routed = layer.gate(x, used_token, True, False)
    finally:
        layer.gate.ep_group = group
    layer.l_aux, capacity, _, topk_idx, _, topk_weights, layer.exp_counts = routed
    # Each exchange of plain EP carries C rows for each expert.  Without dropping, C is the capacity of the fullest
    # rank; we count this rank's own, which is at most C.
    hybrid.count_plain_ep(capacity * hybrid.num_local)
    output = hybrid.forward(x, topk_idx.t().contiguous(), topk_weights.t().float().contiguous())
    return output.reshape(hidden_states.shape)
