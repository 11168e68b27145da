# SPDX-License-Identifier: Apache-2.0
"""Plans what an export writes, then goes through it parameter by parameter.

Where ranks export together, all of them plan the same and read in the same order, and one of them writes.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ds_hybridep.errors import ConfigError, ExportError, UnsupportedError
from ds_hybridep.export import adapters
from ds_hybridep.export.base import Skeleton
from ds_hybridep.export.folder import ShardWriter
from ds_hybridep.export.names import before_the_model, fit, name_in_file, plain_name, sort_names
from ds_hybridep.export.stored import Parameter

Form = Literal["adapters", "merged", "per-expert"]
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
DTYPES |= {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def dtype_of(name: object, where: str) -> torch.dtype | None:
    """Return the dtype of this name, None for None; ConfigError, which begins with `where`, for another name."""
    plain = str(name).removeprefix("torch.")
    if name is not None and plain not in DTYPES:
        raise ConfigError(f"{where}: got {name!r}; give one of {', '.join(DTYPES)}")
    return DTYPES.get(plain)


@dataclass(frozen=True)
class Item:
    """A parameter that is read at once, and what is written of it."""

    parameter: Parameter
    dtype: torch.dtype  # as which it is read
    planned: dict[str, Tensor]  # on the meta device
    split: Callable[[Tensor], Mapping[str, Tensor]]


@dataclass
class WritePlan:
    """What a folder will hold."""

    stem: str
    items: list[Item] = field(default_factory=list)
    finish: Callable[[Path], None] = lambda folder: None  # writes what a loader reads first
    left_out: list[str] = field(default_factory=list)  # parameters of a module around the model

    @property
    def planned(self) -> dict[str, Tensor]:
        """All tensors of the folder, on the meta device."""
        return {name: plan for item in self.items for name, plan in item.planned.items()}


@dataclass(frozen=True)
class WriteOptions:
    """How to write.  Raises ConfigError for what is no size."""

    form: Form | None = None  # None: adapters if the training has any, else the whole model
    dtype: torch.dtype | None = None  # None: that of the model
    max_shard_size: str = "5GB"

    def __post_init__(self) -> None:
        from huggingface_hub import split_torch_state_dict_into_shards

        try:
            split_torch_state_dict_into_shards({}, max_shard_size=self.max_shard_size)
        except ValueError as error:
            raise ConfigError(
                f"--max-shard-size: got {self.max_shard_size!r}; give a size such as 5GB or 500MB"
            ) from error


def _meta(dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def plan_state_dict(parameters: Mapping[str, Parameter], options: WriteOptions) -> WritePlan:
    """Return the plan of a state dict under the training's own names."""
    dtype = options.dtype or torch.float32
    return WritePlan("model", [_single(name, parameter, dtype) for name, parameter in parameters.items()])


def plan_model(
    parameters: Mapping[str, Parameter],
    moe_paths: Sequence[str],
    model: Any,
    adapter_config: Any,
    *,
    options: WriteOptions,
) -> WritePlan:
    """Return the plan of a folder that from_pretrained loads, of transformers or of peft.

    model: `base.Base`, or what stands for the module of a running engine and has the same methods.
    adapter_config: the config of peft; a function that finds it, called only if the training has adapters.
    """
    found = (before_the_model(path, one.shapes) for path in moe_paths[:1] for one in model.skeletons())
    outer = next((one for one in found if one is not None), "")
    left_out = sorted(name for name in parameters if not name.startswith(outer))
    parameters = {name.removeprefix(outer): one for name, one in parameters.items() if name.startswith(outer)}
    plan = _plan_inside(
        parameters, [path.removeprefix(outer) for path in moe_paths], model, adapter_config, options=options
    )
    plan.left_out = left_out
    return plan


def _plan_inside(
    parameters: Mapping[str, Parameter],
    moe_paths: Sequence[str],
    model: Any,
    adapter_config: Any,
    *,
    options: WriteOptions,
) -> WritePlan:
    names = sort_names(parameters)
    if not names.has_adapters:
        if options.form in ("adapters", "per-expert"):
            raise ConfigError(f"--{options.form}: the training has no adapters; leave the option out")
        return _whole(names.weights, moe_paths, model, options, products={})
    config = adapter_config()
    skeleton = _skeleton(names.weights, moe_paths, model)
    peft_model = adapters.PeftModel(skeleton.fresh(), config, names)
    if options.form == "merged":
        products = {target.weight: target.product for target in peft_model.targets()}
        return _whole(names.weights, moe_paths, model, options, products=products)
    dtype = options.dtype or model.dtype_of("")
    if options.form == "per-expert":
        return _per_expert(skeleton, peft_model, model, dtype)
    items = [_single(key, parameter, dtype) for key, parameter in peft_model.parameters().items()]
    return WritePlan("adapter_model", items, partial(adapters.write_config, config, model.name))


def by_own_names(
    parameters: Mapping[str, Parameter], moe_paths: Sequence[str], model: Any, adapter_config: Any
) -> dict[str, Parameter]:
    """Return what `state_dict()` would hold without expert parallelism, by its names there, with peft's names.

    Arguments are those of `plan_model`.
    """
    names = sort_names(parameters)
    skeleton = _skeleton(names.weights, moe_paths, model)
    found = fit(names.weights, moe_paths, skeleton.shapes, skeleton.tied)
    expected, in_files = skeleton.model.state_dict(), {}
    if names.has_adapters:
        peft_model = adapters.PeftModel(skeleton.fresh(), adapter_config(), names)
        expected, in_files = peft_model.model.state_dict(), peft_model.parameters()

    def value(name: str) -> Parameter:
        plain, in_file = plain_name(name), name_in_file(name)[0]
        if name in parameters:
            return parameters[name]
        if in_file in in_files:
            return in_files[in_file]
        plain = plain if plain in found else skeleton.tied.get(plain, plain)
        if plain not in found:
            raise ExportError(f"the module has no {name}, which {type(skeleton.model).__name__} has")
        return found[plain]

    return {name: value(name) for name in expected}


def _skeleton(weights: Mapping[str, Parameter], moe_paths: Sequence[str], model: Any) -> Skeleton:
    """Return the class of the model that has the names of the training.  Raises what is wrong with the first one."""
    first_error: ExportError | None = None
    skeleton: Skeleton
    for skeleton in model.skeletons():
        try:
            fit(weights, moe_paths, skeleton.shapes, skeleton.tied)
        except ExportError as error:
            first_error = first_error or error
        else:
            return skeleton
    raise first_error or ConfigError(f"--model {model.name}: transformers has no class for this model")


def _whole(
    weights: Mapping[str, Parameter],
    moe_paths: Sequence[str],
    model: Any,
    options: WriteOptions,
    *,
    products: Mapping[str, adapters.Product],
) -> WritePlan:
    skeleton = _skeleton(weights, moe_paths, model)
    found = fit(weights, moe_paths, skeleton.shapes, skeleton.tied)
    items = []
    for name, hub in skeleton.hub_shapes.items():
        planned = {
            key: _meta(_dtype(skeleton, model, options, name, hub_name=key), shape) for key, shape in hub.items()
        }
        product = products.get(name)
        if name in found:
            parameter = found[name] if product is None else product.added_to(found[name])
            if not parameter.dtype.is_floating_point:  # is left as it is
                planned = {key: plan.to(parameter.dtype) for key, plan in planned.items()}
            dtypes = {plan.dtype for plan in planned.values()}
            dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
            items.append(Item(parameter, dtype, planned, partial(_hub, skeleton, name, planned)))
        elif product is not None:
            added = partial(_added, skeleton, model, name, planned)
            items.append(Item(product.alone(), torch.float32, planned, added))
        else:
            items += [_single(key, model.weight(key), plan.dtype) for key, plan in planned.items()]
    if unknown := sorted(set(products) - set(skeleton.hub_shapes)):
        raise ExportError(f"{unknown[0]} has an adapter, and the model given by --model has no such weight")
    dtype = options.dtype or model.dtype_of("")
    return WritePlan("model", items, partial(_finish_model, skeleton, model, dtype))


def _dtype(skeleton: Skeleton, model: Any, options: WriteOptions, name: str, *, hub_name: str) -> torch.dtype:
    if any(part in name for part in getattr(skeleton.model, "_keep_in_fp32_modules_strict", None) or ()):
        return torch.float32
    return options.dtype or model.dtype_of(hub_name)


def _hub(skeleton: Skeleton, name: str, planned: Mapping[str, Tensor], tensor: Tensor) -> dict[str, Tensor]:
    parts = skeleton.hub(name, tensor)
    return {key: parts[key].to(plan.dtype).reshape(plan.shape) for key, plan in planned.items()}


def _added(
    skeleton: Skeleton, model: Any, name: str, planned: Mapping[str, Tensor], product: Tensor
) -> dict[str, Tensor]:
    """Add what an adapter adds to a weight that the checkpoint has not, because it is the model's own."""
    parts = skeleton.hub(name, product)
    return {
        key: (model.weight(key).read(torch.float32) + parts[key].reshape(plan.shape)).to(plan.dtype)
        for key, plan in planned.items()
    }


def _single(name: str, parameter: Parameter, dtype: torch.dtype) -> Item:
    kept = dtype if parameter.dtype.is_floating_point else parameter.dtype
    return Item(parameter, kept, {name: _meta(kept, parameter.shape)}, lambda tensor: {name: tensor})


def _per_expert(skeleton: Skeleton, peft_model: adapters.PeftModel, model: Any, dtype: torch.dtype) -> WritePlan:
    if any(".lora_" not in key for key in peft_model.shapes):
        raise UnsupportedError(
            "layers of modules_to_save cannot be in adapters per expert; use --adapters or --merged"
        )
    items = []
    for target in peft_model.targets():
        for which, factor in (("A", target.product.a), ("B", target.product.b)):
            shapes = adapters.per_expert_shapes(skeleton, target, which)
            planned = {key: _meta(dtype, shape) for key, shape in shapes.items()}
            items.append(Item(factor, dtype, planned, partial(adapters.split_factor, skeleton, target, which, shapes)))
    plan = WritePlan("adapter_model", items)
    config = adapters.per_expert_config(peft_model.config, plan.planned)
    plan.finish = partial(adapters.write_config, config, model.name)
    return plan


def _finish_model(skeleton: Skeleton, model: Any, dtype: torch.dtype, folder: Path) -> None:
    model.copy_files(folder)
    config = copy.deepcopy(skeleton.model.config)
    config.dtype = dtype
    config.architectures = [type(skeleton.model).__name__]
    config.save_pretrained(folder)


def write_files(
    plan: WritePlan,
    folder: Path,
    max_shard_size: str,
    progress: Callable[[int], object] = lambda num_bytes: None,
    *,
    read: Callable[[Item], Tensor] = lambda item: item.parameter.read(item.dtype),
) -> None:
    """Write into a folder what the plan says, last what a loader reads first.  progress: is told bytes written."""
    # peft reads one file of adapters, never an index.
    writer = ShardWriter(folder, plan.stem, plan.planned, max_shard_size if plan.stem == "model" else 1 << 62)
    for item in plan.items:
        for name, part in item.split(read(item)).items():
            writer.write(name, part)
            progress(part.nbytes)
    writer.close()
    plan.finish(folder)
