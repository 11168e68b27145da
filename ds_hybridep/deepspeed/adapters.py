# SPDX-License-Identifier: Apache-2.0
"""Carries peft's adapters on the experts of a Hugging Face model over to AutoEP's grouped weights.

With `target_parameters`, peft wraps all experts of a layer, and AutoEP does not find experts inside the wrapper.  So
this module removes the wrappers before AutoEP runs, and then gives each rank the factors of the experts that it owns:

    peft    experts.gate_up_proj [E, 2F, D] + scaling * lora_B [E, 2F, r] @ lora_A [E, r, D]
    here    experts.w1 | w3      [e, F, D]  + scaling * (upper | lower half of lora_B [e, 2F, r]) @ lora_A [e, r, D]

The base is frozen, so only factors migrate.
"""

import copy
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from deepspeed.moe.ep_experts import GroupedExperts
from deepspeed.utils import groups
from torch import Tensor, nn

from ds_hybridep.deepspeed.autoep import experts_of
from ds_hybridep.errors import ConfigError, UnsupportedError
from ds_hybridep.experts.partitioned import is_partitioned
from ds_hybridep.export.adapters import by_expert, is_crossed
from ds_hybridep.export.checkpoint import FACTOR_FILES

# By parameter of Hugging Face: the weights of AutoEP that make up its rows, from first to last.
PARTS = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
_MARKS = ("allreduce", "group_name", "ds_zero_placement_family", "ds_zero_partition_group_name")


@dataclass(frozen=True)
class Adapter:
    """What peft adds to one parameter of a layer's experts."""

    name: str  # of the adapter, "default" by default
    parameter: str
    base: nn.Parameter  # [E, rows, cols]
    originals: tuple[nn.Parameter, nn.Parameter]  # weights of peft's own modules that the factors are of
    factors: tuple[Tensor, Tensor]  # [E, r, cols] and [E, rows, r]
    scaling: float  # multiplies the product of the factors


class AdaptedExperts(GroupedExperts):  # type: ignore[misc]  # DeepSpeed has no types
    """DeepSpeed's grouped experts, which add the products of factors to the base weights.

    Each key of `scalings` has two factors, parameters [e, r, cols] and [e, rows, r] with the names of `factor_names`.
    """

    is_adapted = True
    scalings: dict[str, float]
    switch: Any  # an AdapterSwitch

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        """Return the output rows, [T, D] -> [T, D]; of the base alone while peft has switched adapters off."""
        output: Tensor
        if self.switch.disable_adapters:
            output = super().forward(x, num_tokens_per_expert)
            return output
        weights = {name: getattr(self, name) for name in ("w1", "w2", "w3")}
        (rescaling,) = self.switch.scaling.values()
        for parameter, scaling in self.scalings.items():
            lora_a, lora_b = (getattr(self, name) for name in factor_names(parameter))
            delta = rescaling * scaling * (lora_b @ lora_a)
            for name, part in zip(PARTS[parameter], delta.chunk(len(PARTS[parameter]), dim=1), strict=True):
                weights[name] = weights[name] + part
        adapted = copy.copy(self)
        adapted.__dict__["_parameters"] = weights
        output = GroupedExperts.forward(adapted, x, num_tokens_per_expert)
        return output


def factor_names(parameter: str) -> tuple[str, str]:
    """Return the names of the two factors of a Hugging Face parameter in `AdaptedExperts`."""
    return f"{parameter}_lora_A", f"{parameter}_lora_B"


def take_off(model: nn.Module) -> dict[str, list[Adapter]]:
    """Replace peft's wrappers by the experts inside.  Returns what the wrappers added, by name of the MoE block."""
    taken: dict[str, list[Adapter]] = {}
    if "peft" not in sys.modules:
        return taken
    from peft.tuners.lora.layer import ParamWrapper

    for name, block in list(model.named_modules()):
        wrapper = dict(block.named_children()).get("experts")
        while isinstance(wrapper, ParamWrapper):
            taken.setdefault(name, []).append(_adapter_of(f"{name}.experts", wrapper))
            wrapper = block.experts = wrapper.base_layer
    return taken


def _adapter_of(name: str, wrapper: Any) -> Adapter:
    parameter, base = wrapper.parameter_name, wrapper.get_param()
    reasons = {
        f"{len(wrapper.lora_A)} adapters at once": len(wrapper.lora_A) != 1,
        f"target_parameters {parameter!r}, which is none of {sorted(PARTS)}": parameter not in PARTS,
        "merged adapters": wrapper.merged,
        "an adapter that is not active": not set(wrapper.lora_A) & set(wrapper.active_adapters),
        "adapters that are switched off": wrapper.disable_adapters,
        "weights that are not fused, [experts, rows, cols]": base.ndim != 3 and not is_partitioned(base),
        "zero.Init (ZeRO-3 in the ds_config before the model is loaded)": is_partitioned(base),
    }
    if feature := next((feature for feature, is_used in reasons.items() if is_used), None):
        raise UnsupportedError(
            f"{name}: adapters of experts do not work with {feature}; leave target_parameters out of the LoraConfig, "
            f"or change that"
        )
    (adapter,), crossed = wrapper.lora_A, is_crossed(wrapper)
    originals = wrapper.lora_A[adapter].weight, wrapper.lora_B[adapter].weight
    factors = [
        by_expert(original.detach(), which, wrapper.num_experts, crossed=crossed).to(base.dtype)
        for which, original in zip("AB", originals, strict=True)
    ]
    first, second = (1, 0) if crossed else (0, 1)
    return Adapter(
        adapter,
        parameter,
        base,
        (originals[first], originals[second]),
        (factors[first], factors[second]),
        float(wrapper.scaling[adapter]),
    )


def put_on(model: nn.Module, taken: Mapping[str, list[Adapter]], sources: Any) -> None:
    """Give the experts that AutoEP has made the factors that `take_off` returned.

    sources: DeepSpeed's record of which parameter replaces which, for optimizers that hold the old ones.  None before
        DeepSpeed 0.19.7, which keeps no record.
    """
    if taken and sources is None:
        raise UnsupportedError(
            f"{next(iter(taken))}: adapters of experts need DeepSpeed 0.19.7 or newer, which gives its optimizer what "
            f"replaces a parameter; install it, or leave target_parameters out of the LoraConfig"
        )
    if not taken:
        return
    from ds_hybridep.deepspeed.adapter_switch import AdapterSwitch, guard  # here, because it needs peft

    switches = []
    for name, adapters in taken.items():
        layer: Any = model.get_submodule(name)
        if not getattr(type(layer), "_is_autoep_layer", False):
            raise UnsupportedError(
                f"{name}: AutoEP did not take this layer, whose experts have adapters; leave "
                f"expert_parallel.moe_layer_pattern out, or let it match {name!r}"
            )
        experts, own = layer.experts, experts_of(layer, layer.ep_rank)
        experts.__class__ = AdaptedExperts
        experts.scalings = {adapter.parameter: adapter.scaling for adapter in adapters}
        experts.switch = AdapterSwitch(name, adapters[0].name)
        switches.append(experts.switch)
        for adapter in adapters:
            _check_layout(name, experts, adapter, own)
            names = factor_names(adapter.parameter)
            for factor_name, factor, old in zip(names, adapter.factors, adapter.originals, strict=True):
                own_part = factor[own].clone(memory_format=torch.contiguous_format)
                parameter = nn.Parameter(own_part, requires_grad=old.requires_grad)
                for mark in _MARKS:
                    setattr(parameter, mark, getattr(experts.w1, mark))
                experts.register_parameter(factor_name, parameter)
                if sources:
                    sources.sources[id(parameter)] = [old]
                    sources.discarded.add(id(old))
        descriptor = getattr(layer, "expert_placement_descriptor", None)
        if descriptor is not None:  # what DeepSpeed writes about the layer into checkpoints, for ds_to_universal
            factors = [key for key, _ in _factors_of(layer)]
            layer.expert_placement_descriptor = {**descriptor, "hybridep_factors": factors}
    guard(model, switches)


def load_module_state_dict(
    layers: Mapping[str, Any], original: Any, checkpoint: Mapping[str, Any], *args: Any, **kwargs: Any
) -> Any:
    """Replaces `engine.load_module_state_dict`: keeps the factors, which `load` or a universal checkpoint gives."""
    module = dict(checkpoint["module"])
    for name, layer in layers.items():
        for key, parameter in _factors_of(layer):
            if f"{name}.experts.{key}" in module:
                module[f"{name}.experts.{key}"] = parameter.detach()
    return original({**checkpoint, "module": module}, *args, **kwargs)


def _check_layout(name: str, experts: nn.Module, adapter: Adapter, own: list[int]) -> None:
    parts = PARTS[adapter.parameter]
    for part, rows in zip(parts, adapter.base.detach()[own].chunk(len(parts), dim=1), strict=True):
        if not torch.equal(experts.get_parameter(part).detach(), rows):
            raise UnsupportedError(
                f"{name}: AutoEP lays out {adapter.parameter} in a way that adapters of experts do not know; leave "
                f"target_parameters out of the LoraConfig"
            )


# -- checkpoints: of each rank's own experts, DeepSpeed saves only w1, w2 and w3 ---------------------------------


def save(layers: Mapping[str, Any], folder: Path, step: int) -> None:
    """Write the factors of this rank's experts; of several ranks that own the same experts, only one writes."""
    first = next(iter(layers.values()))
    if groups._get_expert_data_parallel_rank(first.ep_group_name) != 0:
        return
    record = {
        name: {
            "experts": experts_of(layer, layer.ep_rank),
            "factors": {key: value.detach().clone() for key, value in _factors_of(layer)},
            "step": step,
        }
        for name, layer in layers.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FACTOR_FILES.replace("*", f"{first.ep_rank:05d}")
    torch.save(record, path.with_suffix(".partial"))
    os.replace(path.with_suffix(".partial"), path)
    kept = {FACTOR_FILES.replace("*", f"{ep_rank:05d}") for ep_rank in range(first.ep_size)}
    for old in folder.glob(FACTOR_FILES):
        if old.name not in kept:  # of an earlier save to this tag, by more ranks
            old.unlink(missing_ok=True)


def load(layers: Mapping[str, Any], folder: Path) -> None:
    """Read the files that `save` wrote on all ranks; each rank may own another number of experts than before."""
    found: dict[tuple[str, str, int], Tensor] = {}
    steps: dict[int, str] = {}
    for path in sorted(folder.glob(FACTOR_FILES)):
        for name, entry in torch.load(path, weights_only=True, map_location="cpu", mmap=True).items():
            steps[entry.get("step", -1)] = path.name
            for key, values in entry["factors"].items():
                found |= {(name, key, expert): value for expert, value in zip(entry["experts"], values, strict=True)}
    if len(steps) > 1:
        raise ConfigError(f"{folder}: adapters of experts are of several saves: {steps} (file by step)")
    for name, layer in layers.items():
        own = experts_of(layer, layer.ep_rank)
        for key, parameter in _factors_of(layer):
            for place, expert in zip(parameter.detach(), own, strict=True):
                if (name, key, expert) not in found:
                    raise ConfigError(
                        f"{name}: {folder} has no {key} of expert {expert}; it needs the files {FACTOR_FILES} of a "
                        f"checkpoint of this model with its adapters, on all nodes"
                    )
                place.copy_(found[name, key, expert])


def _factors_of(layer: Any) -> Iterable[tuple[str, nn.Parameter]]:
    names = {name for parameter in layer.experts.scalings for name in factor_names(parameter)}
    return [(name, parameter) for name, parameter in layer.experts.named_parameters() if name in names]
