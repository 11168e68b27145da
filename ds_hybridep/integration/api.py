# SPDX-License-Identifier: Apache-2.0
"""The public functions, and how an engine with the block attaches itself.  patches.py lists what they change."""

import logging
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from ds_hybridep.adaptive.planner import JobPlanner
from ds_hybridep.config import HybridEPConfig, parse_config
from ds_hybridep.errors import ConfigError
from ds_hybridep.integration import autoep, dense, facts, supported
from ds_hybridep.integration.attachment import Attachment, refuse_owned
from ds_hybridep.integration.log import log_dist
from ds_hybridep.integration.prepare import prepare_runtime
from ds_hybridep.integration.runtime import boundary_of, loss_scale_of
from ds_hybridep.transport.agreement import announcing_failure
from ds_hybridep.transport.job import is_initialized, world_size
from ds_hybridep.transport.trace import record_trace

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
        checked = _checked_config(engine, config)
        if not checked.enabled:
            return
        layers = facts.find_layers(engine.module)
        refuse_owned(layers)
        sample = next(next(iter(layers.values())).experts.parameters())
        checked = supported.resolve(engine, checked, sample)
        supported.refuse_engine(engine, checked, layers)
        specs = [facts.spec_of(name, layer) for name, layer in layers.items()]
        supported.refuse_devices(specs)
    weak = weakref.proxy(engine)  # for all that the model's parameters and graphs refer to
    planner, start = None, checked
    if checked.is_planned:
        workload = facts.workload_of(engine, layers, specs)
        planner = JobPlanner(checked, specs, workload, micro_steps=lambda: weak.gradient_accumulation_steps())
        log_dist(planner.describe(), ranks=[0])
        start = planner.start_config
    prepare = partial(
        prepare_runtime,
        specs=specs,
        sync_groups=partial(dense.groups_of, weak, specs),
        is_boundary=boundary_of(weak),
        parameters=lambda: weak.module.named_parameters(),
        master_of=facts.master_of,
        loss_scale=partial(loss_scale_of, weak),
    )
    try:
        attachment = Attachment(engine, prepare, start, layers, planner)
    except Exception:
        if planner is not None:
            planner.close()
        raise
    attachment.bind()
    log_dist(attachment.runtime.describe(), ranks=[0])
    log_dist(supported.on_other_ranks(layers), ranks=[0], level=logging.DEBUG)


def detach(engine: nn.Module) -> None:
    """Give the MoE layers back to DeepSpeed, as they were before `attach`; all ranks must call.

    Raises GradientNotReturnedError in the middle of a gradient accumulation.
    """
    attachment = _attachment_of(engine)
    attachment.runtime.finish()
    if norm := attachment.runtime.undelivered_norm:
        log_dist(f"hybridep: detached with gradients of norm {norm:.3g} that codecs had kept back", ranks=[-1])
    attachment.unbind()


def stats(engine: nn.Module) -> dict[str, Any]:
    """Return this rank's counters: bytes and messages per level, direction and kind; exposed seconds; rows.

    Kind "dense" covers all that several ranks hold; its counters are None (not counted) if DeepSpeed sends it itself.
    Counters begin at attach.  The result also has:

        "synchronised"   what codecs do, by name, for dense parameters and for experts that several groups hold
        "replica_bytes"  bytes held now on the device for replicas, their gradients and their codecs
        "host_bytes"     bytes held now in host memory for the same, if "state" is "host"
        "job"            counters of all ranks as of the last report, as in `report_file`; None before the first
                         report and on ranks other than 0
        "planning"       the plan, as in `report_file`, if the job is planned while it runs; else None
    """
    attachment = _attachment_of(engine)
    runtime, planner = attachment.runtime, attachment.planner
    record = runtime.statistics.local()
    for layer, codecs in zip(record["layers"], runtime.statistics.codecs(), strict=True):
        layer["codecs"] = codecs
    return {
        **record,
        "synchronised": {
            name: sync.memory.stats().record() for name, sync in runtime.syncs.items() if sync.is_encoded
        },
        "replica_bytes": 0 if runtime.migration is None else runtime.migration.replica_bytes,
        "host_bytes": 0 if runtime.migration is None else runtime.migration.host_bytes,
        "job": attachment.last_report,
        "planning": None if planner is None else planner.record(runtime),
    }


def refresh(engine: nn.Module) -> None:
    """Ship all experts' weights again and wait for them; all ranks must call.

    Call this after anything other than `engine.step()` or checkpoint loading has changed parameters.
    """
    _attachment_of(engine).runtime.refresh()


def replan(engine: nn.Module, config: Mapping[str, Any] | HybridEPConfig) -> None:
    """Switch to other settings: domain sizes, codecs, token exchange, dense synchronisation; all ranks must call.

    Optimizer and parameters stay where they are.  Gradients that lossy codecs had kept back go to the experts' owners
    and into the next gradients.  The levels must not change.  If the job is planned ("auto"), planning goes on, but
    `config` itself must give all sizes and codecs.

    Call between two optimizer steps, with the content of a "hybridep" block.

    Raises:
        ConfigError, PlanError, UnsupportedError: the block is wrong, leaves something "auto", or does not fit.
        GradientNotReturnedError: the call comes in the middle of a gradient accumulation.
        AgreementError: ranks differ, or a rank failed; the earlier settings stay.
    """
    attachment = _attachment_of(engine)
    with announcing_failure():
        checked = _checked_config(engine, config)
        if checked.is_planned or not checked.enabled:
            raise ConfigError(
                'replan takes settings that are enabled and say all sizes and codecs, without "auto"; to plan, detach '
                "and attach again"
            )
        if [level.size for level in checked.levels] != [level.size for level in attachment.runtime.config.levels]:
            raise ConfigError("replan takes the same levels as before, slowest first; only their settings may differ")
        checked = supported.resolve(engine, checked, attachment.runtime.sample)
        supported.refuse_engine(engine, checked, attachment.layers)
    attachment.switch(checked, "by hand")


def trace(engine: nn.Module, path: str | Path) -> AbstractContextManager[None]:
    """Return a context manager that profiles the steps inside, and writes this rank's Chrome/Perfetto trace to `path`.

    The runtime names its ranges `hybridep::...`.  Transfers of weights and gradients have their own rows.
    """
    return record_trace(_attachment_of(engine).runtime.transport, path)


def configure_distributed_model(original: Callable[..., Any], engine: Any, *args: Any, **kwargs: Any) -> None:
    """Replaces the engine's method of this name if ds_config has the block; the import hook calls it."""
    original(engine, *args, **kwargs)
    attach(engine)


def configure_expert_parallel(
    original: Callable[..., Any], engine: Any, model: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    """Replaces the engine's method of this name too: sets adapters of experts aside while AutoEP makes its layers."""
    settings = getattr(engine._config, "expert_parallel_config", None)
    if settings is None or not settings.enabled:
        return original(engine, model, *args, **kwargs)
    from ds_hybridep.integration import adapters  # here, because it needs modules of AutoEP

    supported.check_transformers()  # before AutoEP fails on it with its own error
    taken = adapters.take_off(model)
    with autoep.plain_registry():
        sources = original(engine, model, *args, **kwargs)
    adapters.put_on(model, taken, sources)
    return sources


def undo_start(engine: nn.Module) -> None:
    """Give everything back: `deepspeed.initialize` has failed after `attach`.  The import hook calls it."""
    _attachment_of(engine).unbind(has_failed=True)


def _attachment_of(engine: nn.Module) -> Attachment:
    attachment: Attachment | None = engine.__dict__.get("_hybridep_attachment")
    if attachment is None:
        raise ConfigError(
            'hybridep is not attached to this engine: add a "hybridep" block to its ds_config, or call '
            "ds_hybridep.attach(engine, config); pass the object that deepspeed.initialize returned first"
        )
    return attachment


def _checked_config(engine: Any, config: Mapping[str, Any] | HybridEPConfig | None) -> HybridEPConfig:
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
