# SPDX-License-Identifier: Apache-2.0
"""Gives the parameters of a training the names and layouts that the model has in transformers.

training                                      model
base_model.model.X (peft)                     X
X.base_layer.weight, X.lora_A.NAME.weight     X.weight and its adapter
X.modules_to_save.NAME.weight (peft)          X.weight
M.experts.w1, M.experts.w3 (AutoEP)           M.experts.gate_up_proj [E, 2F, D], w1 above w3
M.experts.w2                                  M.experts.down_proj
M.router.gate.weight                          M.gate.weight, or as the family calls it
M.shared_experts, M.shared_experts_gate       M.shared_experts or M.shared_expert, M.shared_expert_gate
M.experts.gate_up_proj_lora_A, _lora_B        an adapter of M.experts.gate_up_proj
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ds_hybridep.errors import ExportError, UnsupportedError
from ds_hybridep.export.stored import Parameter

PEFT_PREFIX = "base_model.model."
FACTOR = re.compile(r"(.*\.experts\.(?:gate_up_proj|down_proj))_lora_([AB])")
_ADAPTER = re.compile(r"(.*)\.(lora_[A-Za-z_]+)\.([^.]+)(\.weight|\.bias)?")
_SAVED = re.compile(r"(.*)\.modules_to_save\.([^.]+)\.(.*)")
_HEADS = (
    ("router.gate.", ("gate.", "router.")),
    ("router.", ("gate.", "router.")),
    ("shared_experts_gate.", ("shared_expert_gate.", "shared_experts_gate.")),
    ("shared_experts.", ("shared_experts.", "shared_expert.", "shared_mlp.")),
)


def before_the_model(moe_path: str, names: Iterable[str]) -> str | None:
    """Return what stands in a layer's path before the model's own names, or peft's: a module around the model adds it.

    None if the model has no such layer.  names: of its parameters.
    """
    known = list(names)
    parts = moe_path.split(".")
    for at in range(len(parts)):
        inside = ".".join(parts[at:])
        if any(name.startswith(f"{inside}.experts.") for name in known):
            return moe_path.removesuffix(inside).removesuffix(PEFT_PREFIX)
    return None


def _joined(parts: Sequence[Parameter]) -> Parameter:
    """Return gate above up, along the rows of [E, F, D]."""
    (num_experts, _, *rest), rows = parts[0].shape, [part.shape[1] for part in parts]
    shape = (num_experts, sum(rows), *rest)

    def read(dtype: torch.dtype) -> Tensor:
        whole = torch.empty(shape, dtype=dtype)
        for place, part in zip(whole.split(rows, dim=1), parts, strict=True):
            place.copy_(part.read(dtype))
        return whole

    return Parameter(shape, parts[0].dtype, read, parts[0].is_frozen)


def plain_name(full: str) -> str:
    """Return the model's own name of a weight inside peft's wrappers."""
    plain = full.removeprefix(PEFT_PREFIX).replace(".original_module.", ".")
    while ".base_layer." in plain:  # experts have one wrapper for each of their parameters
        plain = plain.replace(".base_layer.", ".")
    return plain


def name_in_file(full: str) -> tuple[str, str]:
    """Return the name in peft's files of what an adapter has, and the adapter's name; empty for other parameters."""
    if found := _ADAPTER.fullmatch(full):
        return f"{found[1]}.{found[2]}{found[4] or ''}", found[3]
    if found := _SAVED.fullmatch(full):
        return f"{found[1]}.{found[3]}", found[2]
    return "", ""


@dataclass
class Names:
    """The parameters of a training, sorted."""

    weights: dict[str, Parameter] = field(default_factory=dict)  # by the training's name without what peft adds
    adapters: dict[str, Parameter] = field(default_factory=dict)  # by name in peft's files
    factors: dict[str, Parameter] = field(default_factory=dict)  # of experts, M.experts.gate_up_proj_lora_A

    @property
    def has_adapters(self) -> bool:
        """True if anything of peft was found."""
        return bool(self.adapters or self.factors)


def sort_names(parameters: Mapping[str, Parameter]) -> Names:
    """Tell weights from adapters."""
    names, saved, adapter_names = Names(), {}, set()
    is_peft = any(name.startswith(PEFT_PREFIX) for name in parameters)
    for full, parameter in parameters.items():
        if FACTOR.fullmatch(full):
            names.factors[full.removeprefix(PEFT_PREFIX)] = parameter
        elif is_peft and (in_file := name_in_file(full))[0]:
            names.adapters[in_file[0]] = parameter
            adapter_names.add(in_file[1])
            if _SAVED.fullmatch(full):
                saved[in_file[0].removeprefix(PEFT_PREFIX)] = parameter
        else:
            names.weights[plain_name(full) if is_peft else full] = parameter
    if len(adapter_names) > 1:
        raise UnsupportedError(f"the checkpoint has the adapters {sorted(adapter_names)}; an export can have one only")
    names.weights |= saved
    return names


def fit(
    weights: Mapping[str, Parameter],
    moe_paths: Iterable[str],
    shapes: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, str],
) -> dict[str, Parameter]:
    """Return the parameters by the model's names.

    shapes: of the model's parameters, but for those in `tied`, which stands for others by the names of its values.

    Raises ExportError if the model has other names or shapes; it may have parameters that the training has not.
    """
    paths = [path.removeprefix(PEFT_PREFIX) for path in moe_paths]
    found: dict[str, Parameter] = {}
    unknown = []
    for name, parameter in weights.items():
        path = next((one for one in paths if name.startswith(f"{one}.")), None)
        if path is not None and name not in shapes:
            name = _in_moe_layer(path, name, weights, shapes)
            if not name:
                continue  # a second name that AutoEP gives to the router
            if name.endswith(".experts.gate_up_proj"):
                parameter = _joined((weights[f"{path}.experts.w1"], weights[f"{path}.experts.w3"]))
        if name in tied and tied[name] not in weights:
            name = tied[name]
        if name in shapes:
            found[name] = parameter
        elif name not in tied:
            unknown.append(name)
    _check(found, unknown, shapes)
    return found


def _in_moe_layer(
    path: str, name: str, weights: Mapping[str, Parameter], shapes: Mapping[str, tuple[int, ...]]
) -> str:
    """Return the model's name of what AutoEP's layer has; empty for a router that has another name too."""
    rest = name.removeprefix(f"{path}.")
    fused = {"experts.w1": "gate_up_proj", "experts.w3": "gate_up_proj", "experts.w2": "down_proj"}
    if rest in fused:
        return f"{path}.experts.{fused[rest]}"
    for head, others in _HEADS:
        if rest.startswith(head):
            candidates = [f"{path}.{other}{rest.removeprefix(head)}" for other in others]
            return next((one for one in candidates if one in shapes), name)
    router, _, last = rest.rpartition(".gate.")
    if f"{path}.{router}.{last}" in shapes:
        return "" if f"{path}.router.gate.{last}" in weights else f"{path}.{router}.{last}"
    return name


def _check(found: Mapping[str, Parameter], unknown: list[str], shapes: Mapping[str, tuple[int, ...]]) -> None:
    if unknown:
        raise ExportError(
            f"the model given by --model has no {unknown[0]}, which the checkpoint has ({len(unknown)} such names); "
            f"give the model that was trained"
        )
    for name, parameter in found.items():
        if tuple(parameter.shape) != shapes[name]:
            what = "experts, rows and columns" if ".experts." in name else "shape"
            raise ExportError(
                f"{name} has {what} {list(parameter.shape)} in the checkpoint and {list(shapes[name])} in the model "
                f"given by --model; give the model that was trained"
            )
