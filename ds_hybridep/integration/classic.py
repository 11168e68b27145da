# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's classic MoE layers: what the runtime must know of one, and its forward."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.moe.sharded_moe import MOELayer
from torch import Tensor

from ds_hybridep.errors import ConfigError, UnsupportedError
from ds_hybridep.experts.layer_spec import LayerSpec
from ds_hybridep.tokens.layer import HybridMoE, call_expert
from ds_hybridep.transport.job import group_ranks


def spec_of(name: str, layer: MOELayer) -> LayerSpec:
    """What the runtime must know of a layer; raises UnsupportedError where it uses Tutel."""
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
    """`MOELayer.forward` for layers that are attached: DeepSpeed's gate decides, experts run over expert domains."""

    def forward(layer: MOELayer, *inputs: Tensor, **kwargs: Any) -> Tensor:
        hybrid: HybridMoE | None = layer.__dict__.get("_hybridep")
        if hybrid is None:
            return original(layer, *inputs, **kwargs)
        hidden_states, used_token = inputs
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        with _agreeing_on_nothing(layer.gate):
            routed = layer.gate(x, used_token, True, False)
        layer.l_aux, capacity, _, topk_idx, _, topk_weights, layer.exp_counts = routed
        # Each of plain EP's exchanges carries C rows for each expert; without dropping, C is that of the fullest rank,
        # and at least this rank's own.
        hybrid.count_plain_ep(capacity * hybrid.num_local)
        output = hybrid.forward(x, topk_idx.t().contiguous(), topk_weights.t().float().contiguous())
        return output.reshape(hidden_states.shape)

    return forward


@contextmanager
def _agreeing_on_nothing(gate: Any) -> Iterator[None]:
    """Without dropping, the gate asks all ranks for the largest capacity, to pad to it.  Here nobody pads."""
    group, gate.ep_group = gate.ep_group, None
    try:
        yield
    finally:
        gate.ep_group = group
