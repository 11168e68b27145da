# SPDX-License-Identifier: Apache-2.0
"""What happens when an engine is made: it is checked, gets a runtime, and its methods are changed.

The import hook calls the functions at the end of this file.  patches.py lists all changes.
"""

import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_hybridep.adaptive.planner import JobPlanner
from ds_hybridep.config import HybridEPConfig, parse_config
from ds_hybridep.deepspeed import (
    autoep,
    checkpoint_guard,
    checkpoints,
    classic,
    conversion,
    generation,
    offloading,
    other_saves,
    param_groups,
    step,
    supported,
)
from ds_hybridep.deepspeed.attachment import Attachment, attached, attachment_of
from ds_hybridep.deepspeed.facts import facts_of, find_layers, workload_of
from ds_hybridep.deepspeed.patches import AUTOEP_LAYER, ENGINE, MODULE, MOE_LAYER, Patches
from ds_hybridep.errors import ConfigError, UnsupportedError
from ds_hybridep.runtime.log import log_dist
from ds_hybridep.tokens.layer import note_call
from ds_hybridep.transport.agreement import announcing_failure
from ds_hybridep.transport.job import is_initialized, world_size

BLOCK = "hybridep"


def attach(engine: Any, config: Mapping[str, Any] | HybridEPConfig | None = None) -> None:
    """Take over the MoE layers; all ranks must call.  Not needed if ds_config has a "hybridep" block.

    With `"enabled": false` in the block this does nothing, and `stats` and `detach` raise ConfigError.

    Args:
        engine: the first value that `deepspeed.initialize` returned.
        config: content of the block; by default the block in the engine's ds_config.

    Raises:
        ConfigError, PlanError: the block is wrong or does not fit the model.
        UnsupportedError: the job uses a version or feature of DeepSpeed that was not tested with hybridep.
        AgreementError: ranks differ, or a rank failed or did not call in time.
    """
    if not hasattr(engine, "_take_model_step"):
        raise ConfigError(
            f"attach got a {type(engine).__name__}; give it the engine that deepspeed.initialize returns"
        )
    if "_hybridep_attachment" in engine.__dict__:
        raise ConfigError("hybridep is attached to this engine already; call ds_hybridep.detach(engine) first")
    with announcing_failure():
        supported.check_version()
        checked = checked_config(engine, config)
        if not checked.enabled:
            return
        layers = find_layers(engine.module)
        checked = supported.resolve(engine, checked, layers)
        supported.refuse_engine(engine, checked, layers)
        facts = facts_of(engine, layers)
        supported.refuse_devices(facts.specs)
        _take_over(layers)
    planner = None
    if checked.is_planned:
        weak, workload = weakref.proxy(engine), workload_of(engine, layers, facts.specs)
        planner = JobPlanner(checked, facts.specs, workload, micro_steps=lambda: weak.gradient_accumulation_steps())
        log_dist(planner.describe(), ranks=[0])
        checked = planner.start_config
    attachment = Attachment(engine, checked, facts, layers, planner=planner)
    try:
        _bind_engine(attachment)
        attachment.bind_plan()
        if getattr(engine, "micro_steps", 0) > 0:
            attachment.ship_partitioned()
        if attachment.optimizer is not None:  # the engine is made; otherwise `finish_start` does it
            attachment.join_sites()
    except BaseException:
        attachment.unbind(has_failed=True)
        raise
    log_dist(attachment.runtime.describe(), ranks=[0])


def checked_config(engine: Any, config: Mapping[str, Any] | HybridEPConfig | None) -> HybridEPConfig:
    """Return the settings of a block, by default that of the engine's ds_config."""
    if not is_initialized():
        raise ConfigError("hybridep needs the job's process group: call deepspeed.init_distributed() before attach")
    block: Any = config
    if isinstance(block, HybridEPConfig):
        return block
    if block is None:
        ds_config = getattr(getattr(engine, "_config", None), "_param_dict", {})
        if BLOCK not in ds_config:
            raise ConfigError('ds_config has no "hybridep" block: add one, or pass it to ds_hybridep.attach')
        block = ds_config[BLOCK]
    ds_config_path = getattr(engine, "config", None)
    base_dir = Path(ds_config_path).parent if isinstance(ds_config_path, str) else Path(".")
    return parse_config(block, world_size=world_size(), base_dir=base_dir)


def _take_over(layers: Mapping[str, nn.Module]) -> None:
    """Take layers from earlier engines: a Trainer for each stage of a training, or an engine that only evaluated.

    Raises GradientNotReturnedError if one of these engines is in the middle of a gradient accumulation.
    """
    for attachment in _owners_of(layers):
        engine, runtime = attachment.engine, attachment.runtime
        # Nothing waits: a rank may have freed its earlier engine already.
        runtime.migration.check_returned("another engine of the same model")
        norm = runtime.undelivered_norm
        attachment.unbind()
        Patches().wrap(ENGINE, "step", engine, partial(_refuse_step, dict(layers)))
        log_dist("hybridep: an earlier engine of the same model has given its MoE layers to a new one", ranks=[0])
        if norm:
            log_dist(f"hybridep: gradients of norm {norm:.3g} that codecs had kept back are dropped", ranks=[-1])


def _owners_of(layers: Mapping[str, nn.Module]) -> list[Attachment]:
    wanted = {id(layer) for layer in layers.values()}
    alive = [one for one in list(attached) if one.patches.is_on]  # not of an engine that was just freed
    return [one for one in alive if any(id(layer) in wanted for layer in one.layers.values())]


def _refuse_step(layers: Mapping[str, nn.Module], original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if _owners_of(layers):
        raise UnsupportedError(
            f"engine.step() of an engine whose layer {next(iter(layers))} a later engine has taken over: the copies "
            f"of its experts would not hear of the step; train with the last engine that was made of the model"
        )
    return original(*args, **kwargs)


def _bind_engine(attachment: Attachment) -> None:
    """Change what stays changed over all plans."""
    patches, engine, layers, planner = attachment.patches, attachment.engine, attachment.layers, attachment.planner
    patches.share(ENGINE, "__del__", _wrap_del)
    checkpoint_guard.install(patches)
    param_groups.bind(patches, engine, layers)
    generation.install(patches)
    offloading.bind(patches, engine, lambda: attachment.runtime.migration)
    for layer in layers.values():
        noted = layer.register_forward_hook(torch.compiler.disable(note_call))
        patches.note(MODULE, "forward_hook", noted.remove)
        if autoep.is_autoep_layer(layer):
            patches.share(AUTOEP_LAYER, "forward", autoep.wrap_forward)
            patches.put(AUTOEP_LAYER, "__deepcopy__", layer, partial(autoep.deep_copy, layer))
        else:
            patches.share(MOE_LAYER, "forward", classic.wrap_forward)
    if planner is not None:
        for layer, meter in zip(layers.values(), planner.watches, strict=True):
            hook = torch.compiler.disable(meter.__call__)
            patches.note(MODULE, "forward_pre_hook", layer.register_forward_pre_hook(hook).remove)
    for method, replacement in (
        ("save_checkpoint", partial(checkpoints.save, attachment)),
        ("load_checkpoint", partial(checkpoints.load, attachment)),
        ("destroy", partial(_destroy, attachment)),
        ("compile", partial(_compile, attachment.engine)),
        ("coalesce_grad_reduction", partial(_refuse, "coalesce_grad_reduction")),
    ):
        patches.wrap(ENGINE, method, engine, replacement)
    if all(map(autoep.is_autoep_layer, layers.values())):
        if adapted := autoep.adapted_layers(layers):
            from ds_hybridep.deepspeed import adapters  # here, because it needs modules of AutoEP

            load = partial(adapters.load_module_state_dict, adapted)
            patches.wrap(ENGINE, "load_module_state_dict", engine, load)
    other_saves.bind(patches, engine)
    patches.share(MODULE, "zero_grad", _wrap_zero_grad_of_module)
    step.bind(attachment)


def _destroy(attachment: Attachment, original: Callable[..., Any]) -> None:
    # May run while an exception propagates, so it waits for nothing.
    attachment.unbind()
    original()


def _compile(engine: Any, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Compile all but MoE layers, as torch.compile of the module does: their forward is not for Dynamo."""
    if engine.is_deepcompile_enabled() or (args[3] if len(args) > 3 else kwargs.get("compiled_autograd_enabled")):
        raise UnsupportedError(
            "engine.compile() with compile.deepcompile or compiled_autograd_enabled does not work together with "
            "hybridep, whose gradients come through hooks of autograd; leave both out: engine.compile() then compiles "
            "all but MoE layers"
        )
    original(*args, **kwargs)


def _refuse(method: str, _original: Callable[..., Any], *_args: Any, **_kwargs: Any) -> Any:
    raise UnsupportedError(
        f"engine.{method}() does not work together with hybridep yet; leave it out, or set "
        f'"hybridep": {{"enabled": false}}'
    )


def _wrap_del(original: Callable[..., None]) -> Callable[..., None]:
    """Let engines that were neither destroyed nor detached give up what they have: DeepSpeed calls `destroy` then."""

    def __del__(engine: Any) -> None:
        if "_hybridep_attachment" in vars(engine):
            attachment_of(engine).abandon()
        original(engine)

    return __del__


def _wrap_zero_grad_of_module(original: Callable[..., Any]) -> Callable[..., None]:
    """Let `torch.nn.Module.zero_grad` also clear sums of replicas if the module holds all experts of an engine."""

    def zero_grad(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(module, *args, **kwargs)
        attachments = list(attached)
        cleared = {id(parameter) for parameter in module.parameters()} if attachments else set()
        for attachment in attachments:
            owned = attachment.dropped.in_grad()
            if owned and all(id(parameter) in cleared for parameter in owned):
                attachment.dropped.clear()

    return zero_grad


# -- what the import hook calls -----------------------------------------------------------------------------------


def configure_distributed_model(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces the engine's method of this name if ds_config has the block."""
    original(engine, *args, **kwargs)
    attach(engine)


def configure_expert_parallel(
    original: Callable[..., Any], engine: Any, model: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    """Replaces the engine's method of this name too: lets AutoEP find the layers, and keeps what it would drop."""
    settings = getattr(engine._config, "expert_parallel_config", None)
    if settings is None or not settings.enabled:
        return original(engine, model, *args, **kwargs)
    supported.check_hugging_face()  # before AutoEP fails on it with its own error
    return conversion.convert(original, engine, model, *args, **kwargs)


def finish_start(engine: nn.Module) -> None:
    """The engine is made, and its optimizer: connect that, and join the other sites if there are any."""
    attachment = attachment_of(engine)
    step.bind_optimizer(attachment)
    attachment.join_sites()


def undo_start(engine: nn.Module) -> None:
    """Give everything back: `deepspeed.initialize` has failed after `attach`."""
    attachment_of(engine).unbind(has_failed=True)
