# SPDX-License-Identifier: Apache-2.0
"""Answers what the runtime and the planner ask about a model and its engine.

Everything here refers to the engine weakly: the model's parameters and graphs refer to it.
"""

import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from deepspeed.moe.sharded_moe import MOELayer
from torch import nn

from ds_hybridep.adaptive.rates import expert_params
from ds_hybridep.deepspeed import autoep, classic, data_parallel
from ds_hybridep.deepspeed.engine_view import is_boundary, loss_scale, master_of
from ds_hybridep.errors import UnsupportedError
from ds_hybridep.experts.layer_spec import LayerSpec
from ds_hybridep.experts.slots import lay_out
from ds_hybridep.plan.codec_costs import DEFAULT_LEARNING_RATE
from ds_hybridep.plan.workload import MoEModel, Workload
from ds_hybridep.runtime.build import Facts


def facts_of(engine: Any, layers: Mapping[str, Any]) -> Facts:
    """Return the facts of an engine with these MoE layers, of either kind."""
    weak = weakref.proxy(engine)
    specs = tuple(
        autoep.spec_of(name, layer) if autoep.is_autoep_layer(layer) else classic.spec_of(name, layer)
        for name, layer in layers.items()
    )
    return Facts(
        specs,
        is_boundary=partial(is_boundary, weak),
        sync_groups=partial(data_parallel.groups_of, weak, specs),
        parameters=lambda: weak.module.named_parameters(),
        master_of=partial(master_of, weak),
        loss_scale=partial(loss_scale, weak),
        sum_dtype=engine._config.communication_data_type,  # None unless ds_config has it
    )


def find_layers(model: nn.Module) -> dict[str, Any]:
    """Return DeepSpeed's MoE layers, classic ones and AutoEP's, by module name, in module order."""
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


def workload_of(engine: Any, layers: Mapping[str, Any], specs: Sequence[LayerSpec]) -> Workload:
    """Return the job's workload before any step was counted."""
    experts = {id(p) for layer in layers.values() for p in layer.experts.parameters()}
    others = [p for p in engine.module.parameters() if id(p) not in experts]
    # An embedding table is only looked up.  If it is the head too, another module has it as well and it counts there.
    owners = [(m, p) for m in engine.module.modules() for p in m.parameters(recurse=False)]
    multiplied = {id(p) for m, p in owners if not isinstance(m, nn.Embedding)}
    looked_up = {id(p) for m, p in owners if isinstance(m, nn.Embedding)} - multiplied
    first = specs[0]
    trained = [
        tuple(piece.shape)
        for block in lay_out(first.experts[0], is_grouped=first.is_grouped)
        if block.is_trainable
        for piece in block.slices
    ]
    model = MoEModel(
        name="this job",
        hidden=first.hidden,
        num_experts=first.num_experts,
        top_k=first.top_k,
        num_moe_layers=len(specs),
        expert_shapes=((expert_params(first),),),
        dense_shapes=tuple(tuple(p.shape) for p in others),
        active_dense_params=sum(p.numel() for p in others if id(p) not in looked_up),
        stacks_experts=first.is_grouped,
    )
    # The learning rate of ds_config comes first, since a schedule may begin at 0.
    rates = [(engine.optimizer_params() or {}).get("lr")]
    rates += [group.get("lr") for group in getattr(engine.optimizer, "param_groups", ())]
    # AutoEP drops no token and pads nothing.
    gate = getattr(next(iter(layers.values())), "gate", None)
    return Workload(
        model=model,
        tokens_per_rank=1,
        param_bytes=first.sample.element_size(),
        zero_stage=engine.zero_optimization_stage(),
        capacity_factor=float(getattr(gate, "capacity_factor", 1.0)),
        trainable_expert_shapes=tuple(trained),
        trainable_dense_shapes=tuple(tuple(p.shape) for p in others if p.requires_grad),
        learning_rate=next((float(rate) for rate in rates if rate), DEFAULT_LEARNING_RATE),
    )
