# SPDX-License-Identifier: Apache-2.0
"""Describes and runs the layers that DeepSpeed's AutoEP makes of Hugging Face MoE blocks.

AutoEP's router chooses experts, and AutoEP's tail adds shared experts and router logits.  In between, the routed
experts run over expert domains.  DeepSpeed's `GroupedExperts` computes them, with own weights and those of replicas.
"""

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ds_hybridep.deepspeed.patches import TRANSFORMERS_OUTPUTS, Patches
from ds_hybridep.errors import ConfigError, UnsupportedError
from ds_hybridep.experts.layer_spec import LayerSpec
from ds_hybridep.tokens.exchange import to_device
from ds_hybridep.tokens.layer import HybridMoE
from ds_hybridep.transport.job import group_ranks

_OF_RANKS = ("ep_group", "tp_group", "folding_group_handles", "_deepep_exchange")  # of a layer; copies share them


def is_autoep_layer(module: nn.Module) -> bool:
    """Return True for layers that AutoEP made for the "expert_parallel" block."""
    return getattr(type(module), "_is_autoep_layer", False)


class _PlainRegistry(dict[str, Any]):
    """Takes names of classes, and the models that newer versions of transformers ask for."""

    def get(self, key: Any, default: Any = None) -> Any:
        return super().get(key, default) if isinstance(key, str) else super().get(str(type(key))) or {}


@contextmanager
def plain_registry() -> Iterator[None]:
    """Show AutoEP the registry of recorded outputs as it was before transformers 5.23: a dict by names of classes.

    Newer versions have a class whose `get` takes a model and no default, and whose keys are models when it is written.
    AutoEP replaces entries for as long as it installs hooks, so it may do that to a copy.
    """
    outputs = sys.modules.get(TRANSFORMERS_OUTPUTS)
    registry = getattr(outputs, "_CAN_RECORD_REGISTRY", None)
    if type(registry) is dict or not isinstance(registry, dict):
        yield
        return
    changed = Patches()
    changed.put(TRANSFORMERS_OUTPUTS, "_CAN_RECORD_REGISTRY", outputs, _PlainRegistry(registry))
    try:
        yield
    finally:
        changed.undo()


def spec_of(name: str, layer: Any) -> LayerSpec:
    """Describe an AutoEP layer for the runtime; raises UnsupportedError for settings that do not work together."""
    _refuse_unsupported(name, layer)
    if layer.ep_group is None:
        raise ConfigError(f"{name}: the layer has no expert-parallel group yet; attach after deepspeed.initialize")
    return LayerSpec(
        name=name,
        group=layer.ep_group_name,
        group_ranks=group_ranks(layer.ep_group),
        num_experts=layer.num_experts,
        top_k=layer.top_k,
        hidden=layer.hidden_size,
        experts=(layer.experts,),
        is_grouped=True,
        call=call_grouped,
        weighs_inputs=layer.score_apply == "pre",
    )


def call_grouped(experts: nn.Module, weights: dict[str, Tensor], rows: Tensor, counts: Sequence[int]) -> Tensor:
    """Return the output rows of `GroupedExperts`, [n, D] -> [n, D], as DeepSpeed computes them.

    weights: replace all parameters of the module; if empty, the module runs with its own.
    rows: ordered by expert; `counts` gives the number of rows of each expert.
    """
    from deepspeed.module_inject.auto_ep_layer import permute_by_local_expert, unpermute_by_local_expert

    # DeepSpeed pads the rows of each expert to the alignment of its grouped products.
    rows_per_expert = to_device(torch.tensor(counts, dtype=torch.int32), rows.device)
    padded, places, padded_counts, num_rows = permute_by_local_expert(rows, rows_per_expert)
    if weights:
        # Call the forward without the module's hooks: with them ZeRO-3 would gather weights that are not used.
        experts = copy.copy(experts)
        experts.__dict__["_parameters"] = dict(weights)
    outputs = experts.forward(padded, padded_counts) if weights else experts(padded, padded_counts)
    rows_in_order: Tensor = unpermute_by_local_expert(outputs, places, num_rows)
    return rows_in_order


def wrap_forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make the forward of attached layers: AutoEP routes and adds shared experts, experts run over domains."""
    run = torch.compiler.disable(_forward)  # as in classic.py

    def forward(layer: Any, hidden_states: Tensor) -> Any:
        hybrid: HybridMoE | None = layer.__dict__.get("_hybridep")
        return original(layer, hidden_states) if hybrid is None else run(layer, hybrid, hidden_states)

    return forward


def _forward(layer: Any, hybrid: HybridMoE, hidden_states: Tensor) -> Any:
    hidden = hidden_states.shape[-1]
    x = hidden_states.reshape(-1, hidden)
    topk_weights, topk_idx, rows_per_expert = layer.router(x, layer.expert_bias)
    with torch.no_grad():
        layer.tokens_per_expert.add_(rows_per_expert)
    hybrid.count_plain_ep(rows_per_expert.view(-1, layer.num_local_experts).sum(1))
    output = hybrid.forward(x, topk_idx.int(), topk_weights.float())
    finalize = getattr(layer, "_finalize_output", None) or partial(_finalize_output, layer)
    return finalize(output.reshape(hidden_states.shape), x, hidden_states, hidden)


def _finalize_output(layer: Any, output: Tensor, x: Tensor, hidden_states: Tensor, hidden: int) -> Any:
    """Add shared experts and router logits, as DeepSpeed before 0.19.7 does inside `forward`."""
    if layer.moe_output_shape == "flat":
        output = output.reshape(-1, hidden)
    if layer.shared_experts is not None:
        takes_rows = layer.moe_output_shape == "flat" or layer.shared_experts_gate is not None
        inputs = x if takes_rows else hidden_states
        shared = layer.shared_experts(inputs)
        if layer.shared_experts_gate is not None:
            shared = torch.sigmoid(layer.shared_experts_gate(inputs)) * shared
        output = output + shared.reshape(output.shape)
    logits, layer._cached_router_logits = layer._cached_router_logits, None
    return (output, logits) if layer.return_router_logits else output


def deep_copy(layer: Any, memo: dict[int, Any]) -> Any:
    """Return what `copy.deepcopy` returns of an attached layer: one of AutoEP, which shares the groups of ranks.

    Without it, a copy of a model (an average of its weights, for example) fails, as it does with AutoEP alone.
    """
    made: Any = object.__new__(type(layer))
    memo[id(layer)] = made
    for name, value in vars(layer).items():
        if name != "__deepcopy__":
            vars(made)[name] = value if name in _OF_RANKS else copy.deepcopy(value, memo)
    return made


def experts_of(layer: Any, ep_rank: int) -> list[int]:
    """Return the experts that a rank of the layer's group owns, in the order of its weights."""
    descriptor = getattr(layer, "expert_placement_descriptor", None)
    if descriptor is None:  # DeepSpeed before 0.19.8 gives experts out in the order of ranks
        first = ep_rank * layer.num_local_experts
        return list(range(first, first + layer.num_local_experts))
    from deepspeed.checkpoint.autoep_affine import autoep_experts_for_rank

    return list(autoep_experts_for_rank(descriptor, ep_rank))


def adapted_layers(layers: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the layers whose experts have adapters.  Not in adapters.py, because that needs modules of AutoEP."""
    return {name: layer for name, layer in layers.items() if getattr(layer.experts, "is_adapted", False)}


def _refuse_unsupported(name: str, layer: Any) -> None:
    folding = layer.folding_group_handles
    backend = getattr(layer, "comm_backend", "comm")  # from DeepSpeed 0.19.7 on
    reasons = {
        "folded tensor parallelism (tensor_parallel.autotp_size)": folding is not None and folding.spec.tp_size > 1,
        f'expert_parallel.comm_backend "{backend}"': backend != "comm",
        f'expert_parallel.combine_impl "{layer.combine_impl}"': layer.combine_impl != "weighted_sum",
        "expert_parallel.async_split_plan": getattr(layer, "async_split_plan", False),  # from 0.19.8 on
    }
    if feature := next((feature for feature, is_used in reasons.items() if is_used), None):
        raise UnsupportedError(
            f'{name}: {feature} does not work together with the "hybridep" block, which moves tokens itself; leave it '
            f'out, or set "hybridep": {{"enabled": false}}'
        )
