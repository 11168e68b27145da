# SPDX-License-Identifier: Apache-2.0
"""Writes the model of a running engine as transformers and peft write theirs, with the experts of all ranks.

All ranks go through the model together, parameter by parameter.  Rank 0 writes, and holds one whole parameter at most.
What people call already (`Trainer.save_model`, `engine.save_16bit_model`) does the same while hybridep is attached;
`save_pretrained` of the module, which one rank may call alone, says what to call instead.
"""

import copy
import sys
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ds_hybridep.errors import ExportError, HybridEPError, UnsupportedError
from ds_hybridep.experts.partitioned import is_partitioned
from ds_hybridep.export import writing
from ds_hybridep.export.base import Skeleton, without_weights
from ds_hybridep.export.folder import whole_folder
from ds_hybridep.export.stored import Parameter
from ds_hybridep.integration import conversion
from ds_hybridep.integration.autoep import experts_of, is_autoep_layer
from ds_hybridep.integration.log import log_dist
from ds_hybridep.integration.patches import ENGINE, MODULE, TRAINER, Patches
from ds_hybridep.transport.agreement import hear
from ds_hybridep.transport.job import gather_to_first, longest_wait_s, meet, own_rank


def save_pretrained(
    engine: Any,
    folder: str | Path,
    *,
    form: writing.Form | None = None,
    dtype: torch.dtype | str | None = None,
    max_shard_size: str = "5GB",
) -> None:
    """Write a folder that from_pretrained of transformers or peft loads; all ranks must call, between two steps.

    A folder that is there already keeps its other files.

    Args:
        engine: the first value that `deepspeed.initialize` returned, with the "hybridep" block or without.
        folder: written by rank 0 only.
        form: "adapters" (default if the model has any), "merged" (the whole model with its adapters added), or
            "per-expert" (adapters in the layout that vLLM reads).
        dtype: of the weights; by default that of the module.
        max_shard_size: of a file of weights, such as "5GB".

    Raises:
        ConfigError, UnsupportedError: this model cannot be written so.
        ExportError: the folder could not be written, and on no rank is anything left of it.
    """
    options = writing.Options(form, writing.dtype_of(dtype, "dtype"), max_shard_size)
    module = engine.module
    model = LiveModel(module)
    with torch.random.fork_rng(devices=[]):  # modules without weights are made, and the training must not notice
        plan = writing.plan_model(
            dict(_parameters_of(module)), _moe_paths(module), model, partial(adapter_config_of, module), options
        )
    said = _write(plan, Path(folder), max_shard_size)
    if reason := hear(lambda: said, longest_wait_s(0.0)):
        raise ExportError(reason)
    without = f", without {', '.join(plan.left_out[:3])}, which the model has not" if plan.left_out else ""
    log_dist(f"hybridep: {folder} is written: {len(plan.planned)} tensors{without}", ranks=[0])


def _write(plan: writing.Plan, folder: Path, max_shard_size: str) -> str:
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

    return Parameter(shape, tensor.dtype, read)


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
    """The module of an engine, as what an export is made of."""

    def __init__(self, module: Any) -> None:
        self._inner = conversion.model_inside(module)
        if not hasattr(self._inner, "config") or not hasattr(self._inner, "_from_config"):
            raise UnsupportedError(
                f"{type(self._inner).__name__} is no model of transformers; call engine.save_checkpoint(DIR), then "
                f"`ds_hybridep export DIR`, which writes a state dict with all experts"
            )
        self.name = str(getattr(self._inner.config, "_name_or_path", ""))

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


def adapter_config_of(module: Any) -> Any:
    """Return the config of a module's only adapter; None if it has no adapters."""
    configs = conversion.peft_configs_of(module)
    if len(configs) > 1:
        raise UnsupportedError(f"the model has the adapters {sorted(configs)}; an export can have one only")
    return next(iter(configs.values()), None)


def _moe_paths(module: nn.Module) -> list[str]:
    return [name for name, layer in module.named_modules() if is_autoep_layer(layer)]


def _parameters_of(module: nn.Module) -> Iterator[tuple[str, Parameter]]:
    layers: dict[str, Any] = {f"{path}.experts.": module.get_submodule(path) for path in _moe_paths(module)}
    for name, parameter in module.named_parameters():
        if ".deepspeed_experts." in name:
            raise UnsupportedError(
                f"{name}: experts of deepspeed.moe.layer.MoE have no Hugging Face format; call "
                f"engine.save_checkpoint(DIR), and then `ds_hybridep export DIR`"
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


# -- what people call already -------------------------------------------------------------------------------------


def bind(patches: Patches, engine: Any, *, has_adapters: bool) -> None:
    """Make what writes the model write the experts of all ranks, or say what to call.

    has_adapters: experts have; otherwise peft writes its adapters rightly.
    """
    patches.wrap(ENGINE, "save_16bit_model", engine, partial(_save_16bit_model, engine))
    module = engine.module
    inner = conversion.model_inside(module)
    for owner in {id(one): one for one in (inner, module if has_adapters else inner)}.values():
        if hasattr(owner, "save_pretrained"):
            patches.put(MODULE, "save_pretrained", owner, _refuse_save_pretrained)
    if TRAINER.split(":")[0] in sys.modules:  # importing it takes seconds, and few need it
        patches.share(TRAINER, "save_model", _wrap_save_model)


def _save_16bit_model(engine: Any, _original: Callable[..., Any], save_dir: str | Path, *_: Any, **__: Any) -> bool:
    save_pretrained(engine, save_dir)
    return True


def _refuse_save_pretrained(*_: Any, **__: Any) -> None:
    raise UnsupportedError(
        "save_pretrained of the module would write the experts of one rank only; call "
        "ds_hybridep.save_pretrained(engine, DIR) on all ranks, or Trainer.save_model(DIR)"
    )


def _wrap_save_model(original: Callable[..., None]) -> Callable[..., None]:
    """Make `save_model` of a Trainer whose engine is attached write the experts of all ranks."""

    def save_model(trainer: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        engine = getattr(trainer, "deepspeed", None)
        if engine is None or "_hybridep_attachment" not in vars(engine) or not _moe_paths(engine.module):
            original(trainer, output_dir, _internal_call)
            return
        folder = output_dir if output_dir is not None else trainer.args.output_dir
        save_pretrained(engine, folder)
        if trainer.args.should_save:
            tokenizer = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            torch.save(trainer.args, Path(folder) / "training_args.bin")
        if trainer.args.push_to_hub and not _internal_call:
            trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)

    return save_model
