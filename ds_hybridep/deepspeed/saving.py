# SPDX-License-Identifier: Apache-2.0
"""Writes the model of a running engine as transformers and peft write theirs, with the experts of all ranks.

All ranks go through the model together, parameter by parameter.  Rank 0 writes, and holds one whole parameter at most;
`whole_state` collects all of them there.
"""

import copy
import logging
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ds_hybridep.deepspeed import conversion
from ds_hybridep.deepspeed.autoep import experts_of, is_autoep_layer
from ds_hybridep.deepspeed.classic import is_classic
from ds_hybridep.deepspeed.patches import PEFT_MODEL, PRE_TRAINED, find
from ds_hybridep.errors import ExportError, HybridEPError, UnsupportedError
from ds_hybridep.experts.partitioned import is_partitioned
from ds_hybridep.export import writing
from ds_hybridep.export.base import Skeleton, without_weights
from ds_hybridep.export.folder import shadow_of, whole_folder
from ds_hybridep.export.stored import Parameter
from ds_hybridep.runtime.log import log_dist
from ds_hybridep.transport.agreement import agree, result_of_rank_0
from ds_hybridep.transport.job import gather_to_first, longest_wait_s, meet, own_rank

_EXPORT = "call engine.save_checkpoint(DIR), and then `ds_hybridep export DIR`"


def save_pretrained(
    engine: Any,
    folder: str | Path,
    *,
    form: writing.Form | None = None,
    dtype: torch.dtype | str | None = None,
    max_shard_size: str = "5GB",
) -> None:
    """Write a folder that from_pretrained of transformers or peft loads; all ranks must call, between two steps.

    A folder that is there already keeps its other files.  If the module only contains a model of transformers, this
    model is written.

    Args:
        engine: the first value that `deepspeed.initialize` returned, with the "hybridep" block or without.
        folder: written by rank 0 only.
        form: "adapters" (default if the model has any), "merged" (the whole model with its adapters added), or
            "per-expert" (adapters in the layout that vLLM reads).
        dtype: of the weights; by default that of the module.
        max_shard_size: of a file of weights, such as "5GB".

    Raises:
        ConfigError, UnsupportedError: this model cannot be written so.
        AgreementError: not all ranks called.
        ExportError: the folder could not be written; what was there before still is.
    """
    options = writing.WriteOptions(form, writing.dtype_of(dtype, "dtype"), max_shard_size)
    _meet_to_save(engine, "ds_hybridep.save_pretrained")
    model = LiveModel(engine.module)
    with torch.random.fork_rng(devices=[]):  # modules without weights are made, and the training must not notice
        plan = writing.plan_model(model.parameters(), model.moe_paths, model, model.adapter_config, options=options)
    said = _write(plan, Path(folder), max_shard_size)
    if reason := result_of_rank_0(lambda: said, longest_wait_s(0.0)):
        raise ExportError(reason)
    outside = [name for name, _ in engine.module.named_parameters() if not name.startswith(model.path)]
    left = f"; {', '.join(outside[:3])} and whatever else is outside {model.path[:-1]} is left out" if outside else ""
    log_dist(f"hybridep: {folder} is written: {len(plan.planned)} tensors{left}", ranks=[0])
    if own_rank() == 0 and plan.stem == "model" and (warning := shadow_of(Path(folder))):
        log_dist(f"hybridep: {warning}", ranks=[0], level=logging.WARNING)


def whole_state(engine: Any, call: str, *, exclude_frozen: bool = False) -> dict[str, Tensor] | None:
    """Return on rank 0 what `state_dict()` of the module would hold without expert parallelism, and None elsewhere.

    All ranks must call.  Tensors are on the host of rank 0, in the dtype of the module.

    call: what the user has called, for messages.
    """
    _meet_to_save(engine, call)
    planned = _state_of_classic(engine.module) or _state_of_autoep(engine.module)
    state: dict[str, Tensor] = {}
    names: dict[int, str] = {}  # of what was read; tied weights are one tensor
    for name, parameter in planned.items():
        if exclude_frozen and parameter.is_frozen:
            continue
        first = names.setdefault(id(parameter), name)
        tensor = state[first] if first in state else parameter.read(parameter.dtype)
        meet()  # no rank runs ahead, so each wait is that for one parameter
        state[name] = tensor if own_rank() == 0 else tensor[:0]
    return state if own_rank() == 0 else None


def _state_of_autoep(module: nn.Module) -> dict[str, Parameter]:
    model = LiveModel(module)
    with torch.random.fork_rng(devices=[]):
        planned = writing.by_own_names(model.parameters(), model.moe_paths, model, model.adapter_config)
    inside = {f"{model.path}{name}": parameter for name, parameter in planned.items()}
    return inside | {name: one for name, one in _parameters_of(module) if not name.startswith(model.path)}


def _state_of_classic(module: nn.Module) -> dict[str, Parameter]:
    """Return the state of a model with layers of deepspeed.moe.layer.MoE, as with ep_size=1; empty if it has none."""
    layers = {f"{name}.experts.deepspeed_experts.": one for name, one in module.named_modules() if is_classic(one)}
    state: dict[str, Parameter] = {}
    for name, tensor in module.state_dict(keep_vars=True).items() if layers else ():
        prefix = next((prefix for prefix in layers if name.startswith(prefix)), "")
        if not prefix:
            state[name] = _live(tensor, tuple(tensor.shape))
            continue
        layer: Any = layers[prefix]
        local, _, rest = name.removeprefix(prefix).partition(".")
        parts: list[Tensor] = []  # gathered by the first read, of all ranks' experts with this local number
        for ep_rank in range(layer.ep_size):
            expert = ep_rank * layer.num_local_experts + int(local)
            state[f"{prefix}{expert}.{rest}"] = _of_rank(ep_rank, tensor, layer.ep_group, parts)
    return state


def _of_rank(ep_rank: int, tensor: Tensor, ep_group: Any, parts: list[Tensor]) -> Parameter:
    @torch.no_grad()
    def read(dtype: torch.dtype) -> Tensor:
        if ep_rank == 0:
            found = gather_to_first(_own(tensor, dtype).contiguous(), ep_group)
            parts.extend(found if own_rank() == 0 and found is not None else ())
        return parts[ep_rank].cpu() if parts else torch.zeros((), dtype=dtype).expand(tensor.shape)

    return Parameter(tuple(tensor.shape), tensor.dtype, read, _is_frozen(tensor))


def _is_frozen(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad


def remedy_for(call: str) -> str:
    """Return what `agree` says of a rank that does not come to save."""
    return (
        f"did not call {call} within {{limit_s:g}} s: a rank has only its own experts, so all ranks must call it at "
        f"the same point of the script (hybridep.timeout_s sets the limit)"
    )


def _meet_to_save(engine: Any, call: str) -> None:
    """Wait until all ranks have called.  AgreementError if one does not, after `hybridep.timeout_s`."""
    attachment = vars(engine).get("_hybridep_attachment")
    timeout_s = longest_wait_s(0.0) if attachment is None else attachment.runtime.config.timeout_s
    agree({"saves by": call}, timeout_s, remedy=remedy_for(call))


def _write(plan: writing.WritePlan, folder: Path, max_shard_size: str) -> str:
    """Write on rank 0, and read on all ranks.  Returns what failed on rank 0."""
    left, said = deque(plan.items), ""

    def read(item: writing.Item) -> Tensor:
        left.popleft()
        tensor = item.parameter.read(item.dtype)
        meet()  # no rank runs ahead, so each wait is that for one parameter
        return tensor

    if own_rank() == 0:
        try:
            with whole_folder(folder, replace=True) as partial_folder:
                writing.write_files(plan, partial_folder, max_shard_size, read=read)
        except HybridEPError as error:
            said = str(error)
    while left:  # also on rank 0 after an error: the other ranks do not know yet
        read(left[0])
    return said


def _live(tensor: Tensor, shape: tuple[int, ...], layer: Any = None) -> Parameter:
    """Return a parameter or buffer of the module, whose experts are gathered from the ranks of the AutoEP `layer`.

    Its `read` returns it on rank 0, and zeros elsewhere; all ranks must call.
    """

    @torch.no_grad()
    def read(dtype: torch.dtype) -> Tensor:
        own = _own(tensor, dtype)
        parts = [own] if layer is None else gather_to_first(own.contiguous(), layer.ep_group)
        if parts is None or own_rank() != 0:
            return torch.zeros((), dtype=dtype).expand(shape)
        whole = torch.empty(shape, dtype=dtype)
        if layer is None:
            return whole.copy_(parts[0])
        for ep_rank, part in enumerate(parts):
            whole[experts_of(layer, ep_rank)] = part.cpu()
        return whole

    return Parameter(shape, tensor.dtype, read, _is_frozen(tensor))


def _own(tensor: Any, dtype: torch.dtype) -> Tensor:
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    held: Tensor = tensor.detach()
    if dtype.itemsize > held.dtype.itemsize and (master := safe_get_full_fp32_param(tensor)) is not None:
        held = master
    elif is_partitioned(tensor):
        with deepspeed.zero.GatheredParameters([tensor]):
            held = tensor.detach().to(dtype, copy=True)
    return held.to(dtype)


class LiveModel:
    """The model of transformers that the module of an engine is or contains, as what an export is made of.

    path: of the model in the module, such as "pretrained_model."; empty if it is the module itself.
    """

    def __init__(self, module: nn.Module) -> None:
        self.path, self.model = _model_in(module)
        self._inner = inner_of(self.model)
        self.moe_paths = [name for name, layer in self.model.named_modules() if is_autoep_layer(layer)]
        self.name = str(getattr(self._inner.config, "_name_or_path", ""))

    def parameters(self) -> dict[str, Parameter]:
        """Return all that a state dict of the model would hold; reads are for all ranks together."""
        return dict(_parameters_of(self.model))

    def adapter_config(self) -> Any:
        """Return the config of the model's only adapter; None if it has no adapters."""
        return adapter_config_of(self.model)

    def skeletons(self) -> Iterator[Skeleton]:
        """Return the model's own class."""
        yield Skeleton(without_weights(type(self._inner), copy.deepcopy(self._inner.config)))

    def dtype_of(self, hub_name: str) -> torch.dtype:
        """Return the dtype of the module."""
        dtype: torch.dtype = self._inner.dtype
        return dtype

    def weight(self, hub_name: str) -> Parameter:
        """Fail: a module has all its weights."""
        raise ExportError(f"the module has no {hub_name}")

    def copy_files(self, folder: Path) -> None:
        """Write the generation config."""
        if self._inner.can_generate():
            self._inner.generation_config.save_pretrained(folder)


def inner_of(model: Any) -> Any:
    """Return the model inside peft's wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def models_in(module: nn.Module) -> dict[str, Any]:
    """Return the outermost models of transformers or peft, by path in the module, such as "pretrained_model."."""
    kinds = tuple(find(row) for row in (PRE_TRAINED, PEFT_MODEL) if row.split(":")[0] in sys.modules)
    found: dict[int, tuple[str, Any]] = {}

    def look(path: str, one: nn.Module) -> None:
        if isinstance(one, kinds):
            found.setdefault(id(one), (path, one))
        else:
            for name, child in one.named_children():
                look(f"{path}{name}.", child)

    look("", module)
    return dict(found.values())


def _model_in(module: nn.Module) -> tuple[str, Any]:
    """Return the only model of transformers or peft, and its path; UnsupportedError if there is not just one."""
    found = models_in(module)
    if len(found) == 1:
        return next(iter(found.items()))
    if not found:
        raise UnsupportedError(
            f"{type(module).__name__} is no model of transformers and contains none; {_EXPORT}, which writes a state "
            f"dict with all experts"
        )
    raise UnsupportedError(
        f"{type(module).__name__} contains {len(found)} models of transformers ({', '.join(found)}), and only one can "
        f"be written; {_EXPORT}, with the --model that you want"
    )


def adapter_config_of(module: Any) -> Any:
    """Return the config of a module's only adapter; None if it has no adapters."""
    configs = conversion.peft_configs_of(module)
    if len(configs) > 1:
        raise UnsupportedError(f"the model has the adapters {sorted(configs)}; an export can have one only")
    return next(iter(configs.values()), None)


def _parameters_of(module: nn.Module) -> Iterator[tuple[str, Parameter]]:
    layers: dict[str, Any] = {
        f"{name}.experts.": layer for name, layer in module.named_modules() if is_autoep_layer(layer)
    }
    for name, parameter in module.named_parameters():
        if ".deepspeed_experts." in name:
            raise UnsupportedError(
                f"{name}: experts of deepspeed.moe.layer.MoE have no Hugging Face format; {_EXPORT}"
            )
        shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
        layer = next((layer for prefix, layer in layers.items() if name.startswith(prefix)), None)
        if layer is None:
            yield name, _live(parameter, shape)
        else:
            yield name, _live(parameter, (layer.num_experts, *shape[1:]), layer)
    for path, owner in module.named_modules():
        for name, buffer in owner.named_buffers(recurse=False):
            if name not in owner._non_persistent_buffers_set:
                full = f"{path}.{name}" if path else name
                yield full, _live(buffer, tuple(buffer.shape))
