# SPDX-License-Identifier: Apache-2.0
"""Adapters of peft: where each belongs, its scaling, and the layouts in which its factors are written.

Factors of experts, r rows each (rank), in three layouts:

    by expert          A [E, r, in]            B [E, out, r]      what AutoEP's layers hold
    peft's files       A [E * r, in]           B [out, r * E]     in B the expert is innermost
    one file entry     A [r, in]               B [out, r]         per expert and projection, which vLLM reads;
    per expert                                                    gate and up have the same A and parts of B

peft before 0.19 takes the rows of an expert's weight for its inputs: its A and B are our B and A, transposed.
"""

import copy
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ds_hybridep.errors import ExportError, UnsupportedError
from ds_hybridep.export.base import Skeleton
from ds_hybridep.export.names import PEFT_PREFIX, Names
from ds_hybridep.export.stored import Parameter

_ROUTER = re.compile(r"\.(gate|router)\.(weight|bias)$")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")


def is_crossed(wrapper: Any) -> bool:
    """Return whether A and B of peft's wrapper around a parameter [E, rows, cols] are our B and A, transposed."""
    return not getattr(wrapper, "_did_swap_in_out_features", False)


def by_expert(factor: Tensor, which: str, num_experts: int, *, crossed: bool) -> Tensor:
    """Return factor `which` of peft, "A" or "B", as [E, r, in] or [E, out, r]; if crossed, as the other one."""
    if which == "A":
        found = factor.reshape(num_experts, -1, factor.shape[-1])
    else:
        found = factor.reshape(factor.shape[0], -1, num_experts).permute(2, 0, 1)
    return found.transpose(1, 2) if crossed else found


@dataclass(frozen=True)
class Product:
    """What an adapter adds to a weight: scaling * B A, of each expert if there are several."""

    a: Parameter
    b: Parameter
    scaling: float

    def alone(self) -> Parameter:
        """Return what the adapter adds to zeros."""
        shape = (*self.b.shape[:-1], self.a.shape[-1])
        return Parameter(shape, self.a.dtype, lambda dtype: self._add_to(torch.zeros(shape, dtype=dtype), dtype))

    def added_to(self, weight: Parameter) -> Parameter:
        """Return a weight with its adapter added in fp32."""
        return Parameter(weight.shape, weight.dtype, lambda dtype: self._add_to(weight.read(weight.dtype), dtype))

    def _add_to(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        a, b = self.a.read(torch.float32), self.b.read(torch.float32)
        if weight.ndim == 2:
            return (weight.float() + self.scaling * (b @ a)).to(dtype)
        merged = torch.empty(weight.shape, dtype=dtype)
        for place, expert, down, up in zip(merged, weight, a, b, strict=True):
            place.copy_(expert.float() + self.scaling * (up @ down))
        return merged


@dataclass(frozen=True)
class AdapterTarget:
    """A weight that has an adapter."""

    weight: str  # its name in the model
    key: str  # what stands before ".lora_A.weight" in peft's files
    num_experts: int  # 0 for weights of all tokens
    product: Product  # factors by expert


class _Wrapper(NamedTuple):
    """What peft has put around a weight."""

    weight: str  # its name in the model
    scaling: float
    num_experts: int = 0  # 0 for weights of all tokens
    crossed: bool = False

    def ours(self, which: str) -> str:
        """Return which of our factors is the transpose or the same as one of peft's."""
        return "BA"["AB".index(which)] if self.crossed else which


def _relaid(factor: Parameter, which: str, wrapper: _Wrapper, *, to_peft: bool = False) -> Parameter:
    """Return a factor by expert, from peft's layout, where it is `which`, "A" or "B"; or the other way round."""

    def relay(factor: Tensor) -> Tensor:
        if not to_peft:
            return by_expert(factor, which, wrapper.num_experts, crossed=wrapper.crossed)
        factor = factor.transpose(1, 2) if wrapper.crossed else factor
        return factor.flatten(0, 1) if which == "A" else factor.permute(1, 2, 0).flatten(1)

    shape = relay(torch.empty(factor.shape, device="meta")).shape
    return replace(factor, shape=tuple(shape), read=lambda dtype: relay(factor.read(dtype)).contiguous())


class PeftModel:
    """A model without weights in peft's wrappers, and the adapters that a training has for it."""

    def __init__(self, model: Any, config: Any, names: Names) -> None:
        import peft

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model = peft.get_peft_model(model, copy.deepcopy(config))
            expected = peft.get_peft_model_state_dict(self.model)
        self.config, self._names = config, names
        self.shapes = {key: tuple(value.shape) for key, value in expected.items()}
        self._wrappers = dict(self._find_wrappers())

    def _find_wrappers(self) -> Iterator[tuple[str, _Wrapper]]:
        from peft.tuners.lora.layer import LoraLayer, ParamWrapper

        for key, module in self.model.named_modules():
            if not isinstance(module, LoraLayer) or not module.scaling:
                continue
            path = key.removeprefix(PEFT_PREFIX).replace(".base_layer", "")
            (scaling,) = module.scaling.values()
            if isinstance(module, ParamWrapper):
                weight = f"{path}.{module.parameter_name}"
                yield key, _Wrapper(weight, float(scaling), module.num_experts, is_crossed(module))
            else:
                yield key, _Wrapper(f"{path}.weight", float(scaling))

    def parameters(self) -> dict[str, Parameter]:
        """Return all that peft's files hold, by name.  Raises ExportError if the checkpoint has others."""
        found: dict[str, Parameter] = {}
        for key, wrapper in self._wrappers.items():
            for which in "AB":
                factor = self._names.factors.get(f"{wrapper.weight}_lora_{wrapper.ours(which)}")
                if factor is not None:
                    found[f"{key}.lora_{which}.weight"] = _relaid(factor, which, wrapper, to_peft=True)
        for key in self.shapes:
            if key not in found:
                found[key] = self._in_checkpoint(key)
        for key, shape in self.shapes.items():
            if tuple(found[key].shape) != shape:
                raise ExportError(
                    f"{key} has shape {list(found[key].shape)} in the checkpoint, and {list(shape)} by the adapter's "
                    f"config and --model; give those of the training"
                )
        return {key: found[key] for key in self.shapes}

    def _in_checkpoint(self, key: str) -> Parameter:
        plain = key.removeprefix(PEFT_PREFIX).replace(".base_layer.", ".")
        of_autoep = _ROUTER.sub(r".router.gate.\2", plain)  # a router that peft trains as a whole
        weights = self._names.weights
        parameter = self._names.adapters.get(key, weights.get(plain, weights.get(of_autoep)))
        if parameter is None:
            raise ExportError(
                f"the checkpoint has no {key}, which the config of the adapter and --model ask for; give those of "
                f"the training"
            )
        return parameter

    def targets(self) -> list[AdapterTarget]:
        """Return the weights with adapters.  Raises UnsupportedError for adapters that are no plain LoRA."""
        parameters = self.parameters()
        found = []
        for key, wrapper in self._wrappers.items():
            a, b = (parameters.pop(f"{key}.lora_{which}.weight", None) for which in "AB")
            if a is None or b is None or not wrapper.weight.endswith((".weight", "_proj")):
                raise UnsupportedError(f"{key}: only adapters of linear layers and of experts can be merged")
            if wrapper.num_experts:
                ours = {wrapper.ours(which): _relaid(one, which, wrapper) for which, one in (("A", a), ("B", b))}
                a, b = ours["A"], ours["B"]
            product = Product(a, b, wrapper.scaling)
            found.append(AdapterTarget(wrapper.weight, key, wrapper.num_experts, product))
        if left := sorted(key for key in parameters if ".lora_" in key):
            raise UnsupportedError(f"{left[0]}: only plain LoRA can be merged (no DoRA, no bias); use --adapters")
        return found


def read_config(path: Path) -> Any:
    """Return the config of an adapter, from a file of JSON."""
    from peft import PeftConfig

    try:
        return PeftConfig.from_peft_type(**PeftConfig.from_json_file(str(path)))  # type: ignore[no-untyped-call]
    except (OSError, ValueError, TypeError, KeyError, json.JSONDecodeError) as error:
        raise ExportError(f"{path} is no adapter_config.json of peft: {error}") from error


def write_config(config: Any, base_name: str, folder: Path) -> None:
    """Write adapter_config.json."""
    written = copy.deepcopy(config)
    written.inference_mode = True
    written.base_model_name_or_path = written.base_model_name_or_path or base_name
    written.save_pretrained(str(folder))


def per_expert_config(config: Any, names: Mapping[str, Any]) -> Any:
    """Return the config for adapters of single experts, whose names in the file are given."""
    if getattr(config, "rank_pattern", None) or getattr(config, "alpha_pattern", None):
        raise UnsupportedError("adapters with a rank_pattern or alpha_pattern cannot be written per expert")
    changed = copy.deepcopy(config)
    changed.target_parameters = None
    changed.target_modules = {name.removesuffix(".weight").split(".")[-2] for name in names}
    return changed


def split_factor(
    skeleton: Skeleton, target: AdapterTarget, which: str, shapes: Mapping[str, tuple[int, ...]], factor: Tensor
) -> dict[str, Tensor]:
    """Return the parts of a factor, by name in a file with adapters of single experts."""
    hub = skeleton.hub_shapes[target.weight]
    if not target.num_experts:
        return dict.fromkeys(shapes, factor)
    if which == "B":
        parts = skeleton.hub(target.weight, factor)
    else:
        parts = {name: factor[expert_of(name)] for name in hub}
    return {key: parts[name].reshape(shapes[key]) for name, key in zip(hub, shapes, strict=True)}


def per_expert_shapes(skeleton: Skeleton, target: AdapterTarget, which: str) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a factor in a file with adapters of single experts."""
    rank = target.product.a.shape[-2]
    shapes: dict[str, tuple[int, ...]] = {}
    for name, shape in skeleton.hub_shapes[target.weight].items():
        if target.num_experts and not _EXPERT.search(name):
            raise UnsupportedError(f"{name}: this family has no files per expert, so its adapters have none either")
        key = f"{PEFT_PREFIX}{name.removesuffix('.weight')}.lora_{which}.weight"
        shapes[key] = (rank, shape[1]) if which == "A" else (shape[0], rank)
    return shapes


def expert_of(name: str) -> int:
    """Return the number of the expert in a name such as model.layers.0.mlp.experts.3.up_proj.weight."""
    found = _EXPERT.search(name)
    assert found, name
    return int(found[1])
