# SPDX-License-Identifier: Apache-2.0
"""What runtime and planner ask about a model and its engine."""

from collections.abc import Mapping
from typing import Any

from deepspeed.moe.sharded_moe import MOELayer
from torch import Tensor, nn

from ds_hybridep.adaptive.planner import JobFacts
from ds_hybridep.errors import UnsupportedError
from ds_hybridep.experts.layer_spec import LayerSpec
from ds_hybridep.integration import autoep, classic, dense


def find_layers(model: nn.Module) -> dict[str, Any]:
    """DeepSpeed's MoE layers, classic ones and AutoEP's, by module name, in module order."""
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, MOELayer) or autoep.is_autoep_layer(module)
    }
    if not layers:
        raise UnsupportedError(
            "the model has no deepspeed.moe.layer.MoE layer, so hybridep has nothing to do; remove the block or build "
            "the model's MoE layers with deepspeed.moe.layer.MoE; for a Hugging Face model add an "
            '"expert_parallel" block (DeepSpeed AutoEP)'
        )
    return layers


def spec_of(name: str, layer: Any) -> LayerSpec:
    """What the runtime must know of a layer of either kind."""
    return autoep.spec_of(name, layer) if autoep.is_autoep_layer(layer) else classic.spec_of(name, layer)


def facts_of(engine: Any, layers: Mapping[str, Any]) -> JobFacts:
    """What plans need to know of the model and the engine."""
    experts = {id(p) for layer in layers.values() for p in layer.experts.parameters()}
    others = [p for p in engine.module.parameters() if id(p) not in experts]
    # A table is looked up; where it is the head too, it is in another module as well and counted there.
    tables = {id(m.weight) for m in engine.module.modules() if isinstance(m, nn.Embedding)}
    multiplied = {
        id(p) for m in engine.module.modules() if not isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)
    }
    # AutoEP drops no token and pads nothing.
    gate = getattr(next(iter(layers.values())), "gate", None)
    try:
        dense.refuse_unsupported(engine)
        can_sync_by_level = True
    except UnsupportedError:
        can_sync_by_level = False
    return JobFacts(
        dense_params=sum(p.numel() for p in others),
        active_dense_params=sum(p.numel() for p in others if id(p) not in tables or id(p) in multiplied),
        trainable_dense_params=sum(p.numel() for p in others if p.requires_grad),
        zero_stage=engine.zero_optimization_stage(),
        micro_steps=engine.gradient_accumulation_steps,
        capacity_factor=float(getattr(gate, "capacity_factor", 1.0)),
        can_sync_by_level=can_sync_by_level,
    )


def master_of(parameter: Any) -> Tensor | None:
    """The fp32 copy that DeepSpeed's optimizer updates; None where it is in parts, or there is none."""
    stage3 = getattr(parameter, "_z3_optimizer", None)
    if stage3 is not None and parameter.requires_grad:
        is_whole = parameter.partition_numel() == parameter.ds_numel
        master: Tensor | None = stage3.get_local_fp32_param(parameter) if is_whole else None
        return master
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None or mapping.lp_fragment_address.numel != parameter.numel():
        return None
    fragment: Tensor = mapping.hp_fragment
    return fragment
