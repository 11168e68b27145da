# SPDX-License-Identifier: Apache-2.0
"""Makes what people call already to save a model save the experts of all ranks, or say what to call.

engine.save_16bit_model                     DeepSpeed's file, with all experts; all ranks must call.  A config is
                                            added if there is none
accelerator.get_state_dict, save_model      the whole model on rank 0 and None elsewhere, as under ZeRO 3
Trainer.save_model                          `saving.save_pretrained`; or the Trainer's own way, if it has a `_save`
                                            or its module only contains a model, as with a value head
model.save_pretrained, of transformers      refused, unless it is given such a state dict or has nothing to write
  and of peft
model.state_dict                            stays what it is, this rank's part, with a warning
get_peft_model_state_dict, of peft          refused if experts have adapters, which it would leave out

For layers of deepspeed.moe.layer.MoE the first two return the state dict of the model with ep_size=1.
"""

import inspect
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ds_hybridep.deepspeed.attachment import attached
from ds_hybridep.deepspeed.autoep import adapted_layers, is_autoep_layer
from ds_hybridep.deepspeed.patches import (
    ACCELERATOR,
    ENGINE,
    MODULE,
    PEFT_MODEL,
    PEFT_TUNER,
    PRE_TRAINED,
    TRAINER,
    Patches,
    find,
)
from ds_hybridep.deepspeed.saving import models_in, save_pretrained, whole_state
from ds_hybridep.errors import UnsupportedError
from ds_hybridep.export.names import name_in_file
from ds_hybridep.runtime.log import warn_once
from ds_hybridep.transport.agreement import result_of_rank_0
from ds_hybridep.transport.job import longest_wait_s

_ALL = "ds_hybridep.save_pretrained(engine, DIR) on all ranks"
_TRAINING_ARGS = "training_args.bin"
_FILE = "pytorch_model.bin"


def bind(patches: Patches, engine: Any) -> None:
    """Change what the engine and libraries in use offer."""
    patches.wrap(ENGINE, "save_16bit_model", engine, partial(_save_16bit_model, engine))
    patches.wrap(ENGINE, "_zero3_consolidated_16bit_state_dict", engine, partial(_consolidated, engine))
    _share(patches, ACCELERATOR, "get_state_dict", _wrap_get_state_dict)
    if not any(map(is_autoep_layer, engine.module.modules())):
        return
    for module in {id(one): one for one in (engine.module, *models_in(engine.module).values())}.values():
        hook = module.register_state_dict_pre_hook(_before_state_dict)
        patches.note(MODULE, "state_dict_pre_hook", hook.remove)
    _share(patches, PRE_TRAINED, "save_pretrained", _wrap_save_pretrained)
    _share(patches, PEFT_MODEL, "save_pretrained", _wrap_save_pretrained)
    _share(patches, PEFT_TUNER, "_get_adapter_state_dict", _wrap_adapter_state)
    _share(patches, TRAINER, "save_model", _wrap_save_model)


def _share(patches: Patches, owner: str, method: str, make: Callable[..., Any]) -> None:
    # Importing them takes seconds, and who uses an Accelerator or a Trainer has it before there is an engine.
    if owner.split(":")[0] in sys.modules and hasattr(find(owner), method):
        patches.share(owner, method, make)


def _save_16bit_model(
    engine: Any,
    _original: Callable[..., Any],
    save_dir: str | Path,
    save_filename: str = _FILE,
    exclude_frozen_parameters: bool = False,
) -> bool:
    state = whole_state(engine, "engine.save_16bit_model", exclude_frozen=exclude_frozen_parameters)
    result_of_rank_0(partial(_write_state, Path(save_dir) / save_filename, state, engine.module), longest_wait_s(0.0))
    return True


def _write_state(path: Path, state: Any, module: nn.Module) -> None:
    """Write or replace a file as a whole.  With its usual name and a config, from_pretrained loads it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_transformers = PRE_TRAINED.split(":")[0] in sys.modules and isinstance(module, find(PRE_TRAINED))
    if is_transformers and path.name == _FILE and not (path.parent / "config.json").exists():
        module.config.save_pretrained(path.parent)  # type: ignore[union-attr, operator]
    unfinished = path.with_name(f"{path.name}.partial")
    try:
        torch.save(state, unfinished)
        os.replace(unfinished, path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _consolidated(
    engine: Any, _original: Callable[..., Any], exclude_frozen_parameters: bool = False
) -> dict[str, Tensor] | None:
    return whole_state(engine, "engine._zero3_consolidated_16bit_state_dict", exclude_frozen=exclude_frozen_parameters)


def _engine_of(model: Any, *, of_autoep: bool = False) -> Any:
    """Return the attached engine that is `model` or whose module it is, else None.

    of_autoep: only if its layers are AutoEP's.
    """
    for attachment in list(attached):
        engine = attachment.engine
        if model is engine.module or vars(model).get("_hybridep_attachment") is attachment:
            return engine if not of_autoep or any(map(is_autoep_layer, attachment.layers.values())) else None
    return None


def _wrap_get_state_dict(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make `get_state_dict` of accelerate return the whole model on rank 0 and None elsewhere."""

    def get_state_dict(accelerator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        engine = _engine_of(model)
        if engine is None:
            return original(accelerator, model, *args, **kwargs)
        return whole_state(engine, "accelerator.get_state_dict")

    return get_state_dict


def _wrap_save_model(original: Callable[..., None]) -> Callable[..., None]:
    """Make `save_model` of a Trainer whose engine is attached write the experts of all ranks."""

    def save_model(trainer: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        engine = getattr(trainer, "deepspeed", None)
        if (
            engine is None
            or _engine_of(engine, of_autoep=True) is None
            or type(trainer)._save is not find(TRAINER)._save
            or "" not in models_in(engine.module)
        ):
            original(trainer, output_dir, _internal_call)
            return
        folder = output_dir if output_dir is not None else trainer.args.output_dir
        save_pretrained(engine, folder)
        if trainer.args.should_save:
            tokenizer = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            torch.save(trainer.args, Path(folder) / _TRAINING_ARGS)
        if trainer.args.push_to_hub and not _internal_call:
            trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)

    return save_model


def _wrap_save_pretrained(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make `save_pretrained` of a model whose experts are on several ranks refuse to write those of one rank."""

    def save_pretrained(model: Any, *args: Any, **kwargs: Any) -> Any:
        parts = _parts_of(model) if attached else ()
        if parts:
            given = inspect.signature(original).bind(model, *args, **kwargs).arguments
            if not given.get("is_main_process", True):
                return None
            state = given.get("state_dict", given.get("kwargs", {}).get("state_dict"))
            if state is None or any(name.startswith(parts) for name in state):
                raise UnsupportedError(
                    f"save_pretrained of the module would write the experts of one rank only; call {_ALL}, or give it "
                    f"state_dict=accelerator.get_state_dict(engine), called on all ranks, or call "
                    f"Trainer.save_model(DIR)"
                )
        return original(model, *args, **kwargs)

    return save_pretrained


def _parts_of(model: nn.Module) -> tuple[str, ...]:
    """Return how names begin of parameters that the model has for one rank's experts; peft writes adapters only."""
    layers: dict[str, Any] = {name: layer for name, layer in model.named_modules() if is_autoep_layer(layer)}
    adapted: dict[str, Any] = adapted_layers(layers)
    is_peft = hasattr(model, "get_base_model")
    weights = [f"{name}.experts.w{number}" for name in (adapted if is_peft else layers) for number in (1, 2, 3)]
    factors = [
        f"{name}.experts.{parameter}_lora_" for name, layer in adapted.items() for parameter in layer.experts.scalings
    ]
    return (*weights, *factors)


def _wrap_adapter_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """Make peft find adapters of experts in a whole state dict: it looks for its own modules around the experts."""

    def adapter_state(cls: type, model: Any, *args: Any, **kwargs: Any) -> Any:
        found = original(cls, model, *args, **kwargs)
        paths = tuple(f"{name}." for name, experts in model.named_modules() if getattr(experts, "is_adapted", False))
        if paths:
            state = inspect.signature(original).bind(cls, model, *args, **kwargs).arguments["state_dict"]
            found |= {name: one for name, one in state.items() if name.startswith(paths) and name_in_file(name)[0]}
        return found

    return adapter_state


def _before_state_dict(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Tell people, but not DeepSpeed, that they get the experts of one rank."""
    caller: FrameType | None = sys._getframe(1)
    while caller is not None and _package_of(caller) == "torch":
        caller = caller.f_back
    if prefix or caller is None or _package_of(caller) == "deepspeed":
        return
    if _package_of(caller) == "peft":  # get_peft_model_state_dict, under whatever name it was imported
        if adapted := [name for name, layer in module.named_modules() if getattr(layer, "is_adapted", False)]:
            raise UnsupportedError(
                f"{adapted[0]}: peft's state dict would leave out adapters of experts, which hybridep has taken over; "
                f"call {_ALL}, or give peft state_dict=accelerator.get_state_dict(engine), called on all ranks"
            )
        return
    warn_once(
        f"state_dict() of the module holds one rank's experts, under AutoEP's names; to write a model, call {_ALL}"
    )


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]
