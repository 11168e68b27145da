# SPDX-License-Identifier: Apache-2.0
"""Joins the runtime to DeepSpeed: finds the MoE layers, and hooks step, gradients and checkpoints.

The only module that touches deepspeed, beside `autoep_layer`, `dense_hooks` and `expert_adapters`.  Modules are not
replaced: the forward of MoE layers is patched once per class and asks each instance for its `_hybridep`; methods of
the engine are overridden on the instance, and `detach` removes exactly those.
"""

import inspect
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.utils import groups, log_dist
from deepspeed.utils.bwc import bwc_tensor_model_parallel_world_size
from torch import Tensor, nn

from ds_hybridep.adaptive.planner import JobFacts, JobPlanner
from ds_hybridep.config import AUTO, IDENTITY, HybridEPConfig, parse_config
from ds_hybridep.errors import ConfigError, UnsupportedError
from ds_hybridep.experts.layer_spec import LayerSpec
from ds_hybridep.experts.migration import MigrationManager
from ds_hybridep.experts.replicas import no_scale
from ds_hybridep.integration import adapters as expert_adapters
from ds_hybridep.integration import autoep as autoep_layer
from ds_hybridep.integration import dense as dense_hooks
from ds_hybridep.integration.runtime import HybridRuntime, prepare_runtime
from ds_hybridep.integration.statistics import monitor_events, summarize
from ds_hybridep.tokens.layer import HybridMoE
from ds_hybridep.transport.agreement import announcing_failure
from ds_hybridep.transport.job import backend_name, group_ranks, is_initialized, world_size
from ds_hybridep.transport.trace import record_trace

BLOCK = "hybridep"
PLAN_FILE = "hybridep_plan.json"
_ONE_BIT_OPTIMIZERS = ("onebitadam", "onebitlamb", "zerooneadam")


def attach(engine_or_model: nn.Module, config: Mapping[str, Any] | HybridEPConfig | None = None) -> None:
    """Take over the MoE layers; all ranks must call.  Not needed where ds_config has a "hybridep" block.

    With `"enabled": false` in the block nothing happens, and `stats` and `detach` say that nothing is attached.

    Args:
        engine_or_model: a DeepSpeed engine; or a model whose MoE layers have their expert-parallel groups, trained
            without an engine: then every backward returns gradients, and `refresh` must follow every optimizer step.
        config: the block's content; by default that of the engine's ds_config.

    Raises:
        ConfigError, PlanError: the block is wrong or does not fit the model.
        UnsupportedError: a feature of DeepSpeed that does not work with hybridep is in use.
        AgreementError: ranks differ, or one did not come.
    """
    if BLOCK in _attachments(engine_or_model):
        raise ConfigError("hybridep is attached to this engine already; call ds_hybridep.detach(engine) first")
    is_engine = hasattr(engine_or_model, "_take_model_step")
    model = engine_or_model.module if is_engine else engine_or_model
    with announcing_failure():
        checked = _checked_config(engine_or_model, config)
        if not checked.enabled:
            return
        _refuse_combination(engine_or_model, checked, is_engine=is_engine)
        layers = _find_layers(model)
        if is_engine:
            _refuse_lost_experts(engine_or_model, layers)
        specs = [_spec_of(name, layer) for name, layer in layers.items()]
        _refuse_devices(specs)
    planner, start = None, checked
    if checked.is_planned:
        planner = JobPlanner(checked, specs, _facts_of(engine_or_model, layers))
        log_dist(planner.describe(), ranks=[0])
        start = planner.start_config
    prepare = partial(
        prepare_runtime,
        specs=specs,
        is_boundary=_boundary_of(engine_or_model) if is_engine else lambda: True,
        master_of=_master_of,
        loss_scale=partial(_loss_scale_of, engine_or_model) if is_engine else no_scale,
    )
    attachment = Attachment(engine_or_model, prepare, prepare(start)(), layers, planner)
    log_dist(attachment.runtime.describe(), ranks=[0])
    _attachments(engine_or_model)[BLOCK] = attachment
    attachment.bind(is_engine=is_engine)
    if getattr(engine_or_model, "micro_steps", 0) > 0:
        attachment.ship_partitioned()


def detach(engine: nn.Module) -> None:
    """Give the MoE layers back to DeepSpeed, as they were before `attach`; all ranks must call.

    Raises:
        GradientNotReturnedError: in the middle of a gradient accumulation.
    """
    attachment = _attachment_of(engine)
    attachment.runtime.finish()
    migration = attachment.runtime.migration
    if migration is not None and (norm := migration.undelivered_norm):
        log_dist(f"hybridep: detached with gradients of norm {norm:.3g} that codecs had kept back", ranks=[-1])
    attachment.unbind()


def stats(engine: nn.Module) -> dict[str, Any]:
    """Counters since attach: bytes and messages per level, direction and kind, exposed seconds, rows per layer.

    Returns:
        This rank's counters; under "job" those of all ranks together as of the last report, on rank 0 (None
        elsewhere and before the first report): sent bytes, bytes that plain EP would have sent, imbalance per layer.
        "replica_bytes": held now for replicas and their gradients.
        Under "planning" the plan of a job that is planned while it runs (None elsewhere), as in `report_file`.
    """
    attachment = _attachment_of(engine)
    record = attachment.runtime.statistics.local()
    for layer, codecs in zip(record["layers"], attachment.runtime.statistics.codecs(), strict=True):
        layer["codecs"] = codecs
    planning = None if attachment.planner is None else attachment.planner.record(attachment.runtime)
    migration = attachment.runtime.migration
    return {
        **record,
        "replica_bytes": 0 if migration is None else migration.replica_bytes,
        "job": attachment.last_report,
        "planning": planning,
    }


def refresh(engine: nn.Module) -> None:
    """Ship all experts' weights again and wait for them; all ranks must call.

    Needed after parameters were changed by anything else than `engine.step()` and checkpoint loading.
    """
    _attachment_of(engine).runtime.refresh()


def replan(engine: nn.Module, config: Mapping[str, Any] | HybridEPConfig) -> None:
    """Go on with other settings: domain sizes, codecs, token exchange, dense synchronisation; all ranks must call.

    Nothing is lost: optimizer and parameters stay where they are, and what lossy codecs had kept back of gradients
    goes to the owners of the experts. Levels must be those of before. Where something is planned ("auto"), planning
    goes on from here; `config` itself must say all sizes and codecs.

    Args:
        engine: between two optimizer steps.
        config: the content of a "hybridep" block.

    Raises:
        ConfigError, PlanError, UnsupportedError: the block is wrong, leaves something "auto", or does not fit.
        GradientNotReturnedError: in the middle of a gradient accumulation.
        AgreementError: ranks differ.
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
        _refuse_combination(engine, checked, is_engine=attachment.is_engine)
    attachment.switch(checked, "by hand")


def trace(engine: nn.Module, path: str | Path) -> AbstractContextManager[None]:
    """Context manager: profile the steps inside and write a Chrome/Perfetto trace of this rank to `path`.

    Ranges of the runtime are named `hybridep::...`; transfers of weights and gradients are rows of their own.
    """
    return record_trace(_attachment_of(engine).runtime.transport, path)


def patch_deepspeed_engine(module: ModuleType) -> None:
    """Let every engine with a "hybridep" block in its ds_config attach itself.  Called by the import hook, once."""
    engine_class = module.DeepSpeedEngine
    configure_model, configure_experts = (
        engine_class._configure_distributed_model,
        engine_class._configure_expert_parallel,
    )

    @wraps(configure_model)
    def _configure_distributed_model(self: Any, model: nn.Module) -> None:
        configure_model(self, model)
        if _has_block(self):
            attach(self)

    @wraps(configure_experts)
    def _configure_expert_parallel(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        autoep = self._config.expert_parallel_config
        if not (_has_block(self) and autoep is not None and autoep.enabled):
            return configure_experts(self, model, *args, **kwargs)
        autoep_layer.check_transformers()  # before AutoEP fails on it with an error of its own
        adapters = expert_adapters.take_off(model)
        sources = configure_experts(self, model, *args, **kwargs)
        expert_adapters.put_on(model, adapters, sources)
        return sources

    engine_class._configure_distributed_model = _configure_distributed_model
    engine_class._configure_expert_parallel = _configure_expert_parallel


def _has_block(engine: Any) -> bool:
    block = engine._config._param_dict.get(BLOCK)
    return block is not None and not (isinstance(block, Mapping) and block.get("enabled") is False)


class Attachment:
    """What was changed on one engine (or model), and how to undo it.

    Args:
        engine: or model.
        prepare: checks given settings and returns what makes their runtime; all ranks must call.
        runtime: made by it.
        layers: by module name.
        planner: chooses other settings while the job runs; None where all are given.
    """

    def __init__(
        self,
        engine: nn.Module,
        prepare: Callable[[HybridEPConfig], Callable[[], HybridRuntime]],
        runtime: HybridRuntime,
        layers: Mapping[str, nn.Module],
        planner: JobPlanner | None,
    ) -> None:
        self.engine = engine
        self.runtime = runtime
        self.layers = dict(layers)
        self.planner = planner
        self.last_report: dict[str, Any] | None = None
        self.is_engine = False
        self._prepare = prepare
        self._is_bound = False
        self._undo: list[Callable[[], None]] = []
        self._handles: list[Any] = []
        self._optimizer: Any = None
        self._dense: dense_hooks.DenseHooks | None = None
        watches = () if planner is None else planner.watches
        self._watching = [
            layer.register_forward_pre_hook(watch) for layer, watch in zip(layers.values(), watches, strict=False)
        ]

    def bind(self, *, is_engine: bool) -> None:
        """Connect engine and layers to the runtime."""
        self.is_engine, self._is_bound = is_engine, True
        if is_engine:
            for method, replacement in (
                ("_configure_optimizer", self._configure_optimizer),
                ("_take_model_step", self._take_model_step),
                ("allreduce_bucket", self._allreduce_bucket),
                ("zero_grad", self._zero_grad),
                ("save_checkpoint", self._save_checkpoint),
                ("load_checkpoint", self._load_checkpoint),
                ("destroy", self._destroy),
                ("compile", _refuse_method("compile")),
                ("coalesce_grad_reduction", _refuse_method("coalesce_grad_reduction")),
            ):
                self._override(self.engine, method, replacement)
        self._bind_runtime()

    def _bind_runtime(self) -> None:
        """What another plan binds anew."""
        for name, hybrid in self.runtime.layers.items():
            layer = self.layers[name]
            if autoep_layer.is_autoep_layer(layer):
                autoep_layer.patch_class(type(layer))
            else:
                _patch_moe_layer_class()
            layer._hybridep = hybrid
        if self.runtime.migration is not None:
            modules = [module for layer in self.layers.values() for module in layer.experts.modules()]
            hook = _refill_after_load(self.runtime.migration, modules)
            self._handles = [module.register_load_state_dict_post_hook(hook) for module in modules]
        if self.is_engine:
            if self.runtime.dense is not None:
                self._dense = dense_hooks.DenseHooks(self.engine, self.runtime.dense, self.runtime.transport)
            self._watch_optimizer()

    def unbind(self) -> None:
        """Undo everything; parameters, optimizer and module tree were never changed.  Waits for nothing."""
        del _attachments(self.engine)[BLOCK]
        for handle in self._watching:
            handle.remove()
        self._unbind_runtime()
        self._is_bound = False
        for undo in reversed(self._undo):
            undo()
        self._undo = []
        if self.planner is not None:
            self.planner.close()
        self.runtime.close()

    def switch(self, config: HybridEPConfig, reason: str) -> None:
        """Go on with other settings, between two optimizer steps; all ranks must call."""
        earlier = self.runtime
        with announcing_failure():
            earlier.finish()
        build = self._prepare(config)  # all ranks agree in it; what may be refused is refused before anything changes
        undelivered = earlier.hand_over()
        runtime = build()
        self._unbind_runtime()
        self.runtime = runtime
        runtime.follow(earlier, undelivered)
        earlier.close()
        self._bind_runtime()
        self.ship_partitioned()
        if self.planner is not None:
            self.planner.follow(config, runtime, reason)
        log_dist(runtime.describe(), ranks=[0])

    def _unbind_runtime(self) -> None:
        for layer in self.layers.values():
            layer.__dict__.pop("_hybridep", None)
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if self._dense is not None:
            self._dense.remove()
            self._dense = None

    def _override(self, owner: Any, method: str, replacement: Callable[..., Any]) -> None:
        original, before = getattr(owner, method), owner.__dict__.get(method)

        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            return replacement(original, *args, **kwargs) if self._is_bound else original(*args, **kwargs)

        def undo() -> None:
            if owner.__dict__.get(method) is not call:
                return  # the user's own wrapper, which keeps calling what it wraps
            if before is None:
                del owner.__dict__[method]
            else:
                owner.__dict__[method] = before

        owner.__dict__[method] = call
        self._undo.append(undo)

    def _allreduce_bucket(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        replaced = original if self._dense is None else partial(self._dense.allreduce_bucket, original)
        return replaced(*args, **kwargs)

    def _take_model_step(self, original: Callable[..., Any], lr_kwargs: Any) -> None:
        self._watch_optimizer()
        self.runtime.before_step()
        try:
            chosen = self.planner.before_step(self.runtime) if self.planner is not None else None
            original(lr_kwargs)
        except BaseException:
            self.runtime.abandon_step()
            raise
        was_applied = self.engine._step_applied
        report = self.runtime.after_step(was_applied=was_applied, ships=chosen is None)
        if self.planner is not None:
            self.planner.after_step()
        if report is not None:
            self._publish(report)
        if chosen is not None and self.planner is not None:
            reason = self.planner.reason
            self.switch(chosen, reason)
            label = self.planner.current.label
            log_dist(f"hybridep after step {self.engine.global_steps}: {label}, {reason}", ranks=[0])

    def _configure_optimizer(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        self._watch_optimizer()

    def _watch_optimizer(self) -> None:
        """zero_grad of the optimizer must clear replica gradients too; DeepSpeed makes it after we attach."""
        optimizer = getattr(self.engine, "optimizer", None)
        if self._optimizer is None and hasattr(optimizer, "zero_grad"):
            self._override(optimizer, "zero_grad", self._zero_grad_of_optimizer)
            self._optimizer = optimizer
        if self._dense is not None and self._optimizer is not None:
            self._dense.watch(self._optimizer)

    def _zero_grad_of_optimizer(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._clear_gradients(by_optimizer=True)
        return original(*args, **kwargs)

    def _zero_grad(self, original: Callable[..., Any]) -> None:
        self._clear_gradients(by_optimizer=False)
        original()

    def _clear_gradients(self, *, by_optimizer: bool) -> None:
        """Clear replica gradients where DeepSpeed forgets the owner's, and only there.

        ZeRO-2 keeps what it has reduced, whoever calls; what ZeRO-3 has reduced and an fp32 accumulator beside `.grad`
        are kept by the engine's zero_grad and cleared by the optimizer's.
        """
        optimizer = self.engine.optimizer
        if getattr(optimizer, "partition_gradients", False):
            return
        has_accumulator = (
            self.engine.zero_optimization_stage() == 3
            or hasattr(optimizer, "clear_hp_grads")
            or getattr(optimizer, "use_grad_accum_attribute", False)
        )
        if by_optimizer or not has_accumulator:
            # ZeRO 1 has copied what was returned, and its step applies that whoever calls zero_grad.
            drops_returned = not getattr(optimizer, "averaged_gradients", None)
            self.runtime.clear_gradients(drops_returned=drops_returned)

    def ship_partitioned(self) -> None:
        """Under ZeRO-3 ship weights now: in a forward it fetches ahead what it knows to come next."""
        if self.is_engine and self.engine.zero_optimization_stage() == 3 and self.runtime.migration is not None:
            self.runtime.migration.refresh_stale()

    def _load_checkpoint(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loaded = self._load(original, *args, **kwargs)
        self.ship_partitioned()
        return loaded

    def _load(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # The others wait for this rank in `recall` or `load_codecs`, where plan and replicas depend on what it loads.
        is_awaited = self.planner is not None or self.runtime.migration is not None
        with announcing_failure() if is_awaited else nullcontext():
            call = inspect.signature(original).bind(*args, **kwargs)
            call.apply_defaults()
            adapted = expert_adapters.adapted_layers(self.layers)
            if adapted and self.engine.load_universal_checkpoint():
                raise UnsupportedError(
                    "checkpoint.load_universal is set, but universal checkpoints hold no adapters of experts; load "
                    "the checkpoint that was converted"
                )
            loaded = original(*args, **kwargs)
            if loaded[0] is not None and adapted:
                expert_adapters.load(adapted, Path(loaded[0]).parent)
                if call.arguments["load_module_only"] and hasattr(self.engine.optimizer, "refresh_fp32_params"):
                    self.engine.optimizer.refresh_fp32_params()  # DeepSpeed has, from what the factors were before
        takes_gradients = call.arguments["load_optimizer_states"] and not call.arguments["load_module_only"]
        recalled = None
        if self.planner is not None:
            is_resumed = loaded[0] is not None and takes_gradients
            recalled = self.planner.recall(Path(loaded[0]).parent / PLAN_FILE if is_resumed else None)
        if loaded[0] is None or not takes_gradients:
            self.runtime.forget_codecs()
            return loaded
        if recalled is not None:
            log_dist("hybridep: goes on with the plan of the checkpoint", ranks=[0])
            self.runtime.forget_gradients()  # they are of the run that is left, and nothing of it is handed over
            self.switch(recalled, "the plan of the checkpoint")
        lost = self.runtime.load_codecs(Path(loaded[0]).parent, self.engine.global_steps)
        if lost:
            log_dist(f"hybridep: {lost}", ranks=[0])
        return loaded

    def _save_checkpoint(
        self, original: Callable[..., Any], save_dir: str, tag: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        tag = str(tag) if tag is not None else f"global_step{self.engine.global_steps}"
        # First: DeepSpeed's own last acts are a barrier and the file that names the newest checkpoint.
        self.runtime.save_codecs(Path(save_dir) / tag, self.engine.global_steps)
        expert_adapters.save(expert_adapters.adapted_layers(self.layers), Path(save_dir) / tag)
        if self.planner is not None and self.runtime.transport.rank == 0:
            _write_json(Path(save_dir) / tag / PLAN_FILE, self.planner.record(self.runtime))
        return original(save_dir, tag, *args, **kwargs)

    def _destroy(self, original: Callable[..., Any]) -> None:
        # Also called while an exception is on its way, so nothing is waited for.
        self.unbind()
        original()

    def _publish(self, report: dict[str, Any]) -> None:
        """Log, monitor and file; on rank 0."""
        if self.planner is not None:
            report["planning"] = self.planner.record(self.runtime)
        self.last_report = report
        log_dist(summarize(report), ranks=[0])
        monitor = getattr(self.engine, "monitor", None)
        if monitor is not None and monitor.enabled:
            monitor.write_events(monitor_events(report, self.engine.global_samples))
        if self.runtime.config.report_file is not None:
            _write_json(Path(self.runtime.config.report_file), report)


def _write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write or replace a file as a whole; one that cannot be written is told of and does not stop the training."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(path.suffix + ".partial")
        unfinished.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as error:
        log_dist(f"hybridep: {path} is not written: {error}", ranks=[-1])


def _refill_after_load(migration: MigrationManager, modules: Sequence[nn.Module]) -> Callable[..., None]:
    """Hook for modules whose parameters were loaded, on all ranks: the next forward ships them."""

    def after_load(module: nn.Module, _incompatible_keys: Any) -> None:
        # A deep copy of a module carries this function along, and may be loaded on one rank only.
        if any(module is own for own in modules):
            migration.mark_weights_changed()

    return after_load


def _attachments(engine: nn.Module) -> dict[str, Attachment]:
    return engine.__dict__.setdefault("_hybridep_attachment", {})


def _attachment_of(engine: nn.Module) -> Attachment:
    attachment = _attachments(engine).get(BLOCK)
    if attachment is None:
        raise ConfigError(
            'hybridep is not attached to this engine: add a "hybridep" block to its ds_config, or call '
            "ds_hybridep.attach(engine, config); pass the object that deepspeed.initialize returned first"
        )
    return attachment


def _checked_config(engine: Any, config: Mapping[str, Any] | HybridEPConfig | None) -> HybridEPConfig:
    if not is_initialized():
        raise ConfigError("hybridep needs the job's process group: call deepspeed.init_distributed() before attach")
    if isinstance(config, HybridEPConfig):
        return config
    if config is None:
        ds_config = getattr(getattr(engine, "_config", None), "_param_dict", {})
        if BLOCK not in ds_config:
            raise ConfigError('ds_config has no "hybridep" block: add one, or pass it to ds_hybridep.attach')
        config = ds_config[BLOCK]
    ds_config_path = getattr(engine, "config", None)
    base_dir = Path(ds_config_path).parent if isinstance(ds_config_path, str) else Path(".")
    return parse_config(config, world_size=world_size(), base_dir=base_dir)


def _refuse_combination(engine: Any, config: HybridEPConfig, *, is_engine: bool) -> None:
    """Raise UnsupportedError where settings do not go together with the engine, or with a model without one."""
    if is_engine:
        _refuse_unsupported(engine)
        _refuse_unknown_scale(engine, config)
        if engine.zero_optimization_stage() == 3:
            _refuse_with_partitioned_parameters(engine, config)
    elif config.is_planned:
        raise UnsupportedError(
            'a hybridep setting is "auto", but without a DeepSpeed engine nobody knows the steps to plan for; attach '
            "to the engine that deepspeed.initialize returns, or write sizes and codecs"
        )
    else:
        _refuse_weight_codecs(config)
    _refuse_dense_sync(engine, config, is_engine=is_engine)


def _refuse_unsupported(engine: Any) -> None:
    """Raise UnsupportedError for what does not work, or was never tested, together with hybridep."""
    zero = engine._config.zero_config
    optimizer = engine.optimizer_name() or ""
    reasons = {
        "pipeline parallelism (PipelineModule)": engine.pipeline_parallelism,
        "tensor parallelism": bwc_tensor_model_parallel_world_size(groups.mpu) > 1 or engine.autotp_size() > 1,
        "sequence parallelism": groups._get_sequence_parallel_world_size() > 1,
        "optimizer offload (zero_optimization.offload_optimizer)": zero.offload_optimizer is not None
        and zero.offload_optimizer.device != "none",
        "parameter offload (zero_optimization.offload_param)": zero.offload_param is not None
        and zero.offload_param.device != "none",
        "ZenFlow (zero_optimization.zenflow)": zero.zenflow is not None,
        f"the 1-bit optimizer {optimizer}": optimizer.lower() in _ONE_BIT_OPTIMIZERS,
        "ZeRO stage 3 with native MoE layers": engine.zero_optimization_stage() == 3
        and any(isinstance(module, MOELayer) for module in engine.module.modules()),
    }
    for feature, is_used in reasons.items():
        if is_used:
            raise UnsupportedError(
                f'{feature} does not work together with the "hybridep" block yet; turn it off, or set '
                f'"hybridep": {{"enabled": false}}'
            )


def _refuse_with_partitioned_parameters(engine: Any, config: HybridEPConfig) -> None:
    """Raise UnsupportedError for settings that do not go together with ZeRO stage 3."""
    if config.is_planned:
        raise UnsupportedError(
            'a hybridep setting is "auto", but plans are not made for ZeRO stage 3, whose gathers of parameters they '
            "do not count; write sizes and codecs, or use stage 0, 1 or 2"
        )
    if config.replicas == "transient":
        raise UnsupportedError(
            'hybridep.replicas is "transient", but under ZeRO stage 3 copies of owned experts are computed with too; '
            'set it to "persistent", or use stage 0, 1 or 2'
        )
    leaves = [name for name, module in engine.module.named_modules() if getattr(module, "_z3_leaf", False)]
    layers = _find_layers(engine.module)
    inside = [leaf for leaf in leaves for name in layers if f"{name}.experts".startswith(f"{leaf}." if leaf else "")]
    if inside or engine._config.zero_config.module_granularity_threshold:
        raise UnsupportedError(
            f"zero_optimization.leaf_module makes one piece of {inside[:1] or 'modules'} under ZeRO stage 3, but "
            f"gradients of experts come back after their module's backward; leave MoE layers out of it, and "
            f"stage3_module_granularity_threshold at 0"
        )


def _refuse_lost_experts(engine: Any, layers: Mapping[str, nn.Module]) -> None:
    """Raise UnsupportedError where a load gives the frozen experts of rank 0 to all ranks, as DeepSpeed's does."""
    if engine.zero_optimization_stage() == 2 and expert_adapters.adapted_layers(layers):
        raise UnsupportedError(
            "adapters of experts do not work with ZeRO stage 2 (zero_optimization.stage), whose checkpoints hold "
            "frozen parameters as rank 0 has them, experts too; use stage 0 or 1"
        )


def _refuse_dense_sync(engine: Any, config: HybridEPConfig, *, is_engine: bool) -> None:
    """Raise UnsupportedError where "dense_sync" asks for what cannot be done."""
    if config.dense_sync in ("deepspeed", AUTO):  # what is planned is not chosen where it cannot be done
        return
    if not is_engine:
        raise UnsupportedError(
            f'hybridep.dense_sync is "{config.dense_sync}", but without a DeepSpeed engine nobody synchronises dense '
            f'gradients; attach to the engine that deepspeed.initialize returns, or leave it at "deepspeed"'
        )
    dense_hooks.refuse_unsupported(engine)


def _refuse_weight_codecs(config: HybridEPConfig) -> None:
    """Without an engine weights travel in `refresh`, which ships them as they are."""
    for index, level in enumerate(config.levels):
        if level.domain_size != 1 and level.weight_codec != IDENTITY:
            raise UnsupportedError(
                f'hybridep.levels[{index}].weight_codec is "{level.weight_codec.type}", but without a DeepSpeed '
                f'engine weights are shipped by refresh(), exactly; attach to an engine, or set it to "identity"'
            )


def _refuse_unknown_scale(engine: Any, config: HybridEPConfig) -> None:
    """Residuals are kept without the loss scale, and torch's own scaler is not asked for it."""
    is_lossy = any(level.domain_size != 1 and level.gradient_codec != IDENTITY for level in config.levels)
    if is_lossy and engine.torch_autocast_enabled() and engine.torch_autocast_dtype() == torch.float16:
        raise UnsupportedError(
            'torch_autocast in fp16 does not work together with a hybridep gradient_codec yet: use bf16, or "identity"'
        )


def _refuse_devices(specs: Sequence[LayerSpec]) -> None:
    """Raise UnsupportedError for what the transport does not carry."""
    devices, backend = sorted({spec.sample.device.type for spec in specs}), backend_name()
    if devices == ["cuda"] and ("gloo" in backend or "nccl" in backend):
        _warn_of_gpus()
    elif devices != ["cpu"] or "gloo" not in backend:
        raise UnsupportedError(
            f"hybridep moves a CPU's tensors over gloo, and a CUDA device's over gloo or NCCL; the model is on "
            f"{devices} and the job's backend is {backend!r}: train on one of these devices over one of its backends, "
            f'or set "hybridep": {{"enabled": false}}'
        )


@cache  # once in a process
def _warn_of_gpus() -> None:
    log_dist(
        "hybridep: training on GPUs was written without one: it has been checked on CPUs only and never run on a GPU "
        "by its authors; compare a few steps with the block disabled before you rely on it (docs/kernels.md)",
        ranks=[0],
        level=logging.WARNING,
    )


def _find_layers(model: nn.Module) -> dict[str, nn.Module]:
    """DeepSpeed's MoE layers, classic ones and AutoEP's, by module name, in module order."""
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, MOELayer) or autoep_layer.is_autoep_layer(module)
    }
    if not layers:
        raise UnsupportedError(
            "the model has no deepspeed.moe.layer.MoE layer, so hybridep has nothing to do; remove the block or build "
            "the model's MoE layers with deepspeed.moe.layer.MoE; for a Hugging Face model add an "
            '"expert_parallel" block (DeepSpeed AutoEP)'
        )
    return layers


def _spec_of(name: str, layer: nn.Module) -> LayerSpec:
    if autoep_layer.is_autoep_layer(layer):
        return autoep_layer.spec_of(name, layer)
    if layer.use_tutel:
        raise UnsupportedError(f"{name}: Tutel does not work with hybridep; build MoE with use_tutel=False")
    if layer.ep_group is None:
        raise ConfigError(
            f"{name}: the layer has no expert-parallel group yet; attach after deepspeed.initialize, or call its "
            f"set_deepspeed_parallelism() first"
        )
    num_experts, hidden = layer.gate.wg.weight.shape
    return LayerSpec(
        name=name,
        group=layer.ep_group_name,
        group_ranks=group_ranks(layer.ep_group),
        num_experts=num_experts,
        top_k=layer.gate.k,
        hidden=hidden,
        experts=tuple(layer.experts.deepspeed_experts),
    )


def _facts_of(engine: Any, layers: Mapping[str, nn.Module]) -> JobFacts:
    """What plans need to know of the model and the engine."""
    experts = {id(p) for layer in layers.values() for p in layer.experts.parameters()}
    dense = [p for p in engine.module.parameters() if id(p) not in experts]
    # A table is looked up; where it is the head too, it is in another module as well and counted there.
    tables = {id(m.weight) for m in engine.module.modules() if isinstance(m, nn.Embedding)}
    others = {
        id(p) for m in engine.module.modules() if not isinstance(m, nn.Embedding) for p in m.parameters(recurse=False)
    }
    # AutoEP drops no token and pads nothing.
    gate = getattr(next(iter(layers.values())), "gate", None)
    try:
        dense_hooks.refuse_unsupported(engine)
        can_sync_by_level = True
    except UnsupportedError:
        can_sync_by_level = False
    return JobFacts(
        dense_params=sum(p.numel() for p in dense),
        active_dense_params=sum(p.numel() for p in dense if id(p) not in tables or id(p) in others),
        trainable_dense_params=sum(p.numel() for p in dense if p.requires_grad),
        zero_stage=engine.zero_optimization_stage(),
        micro_steps=engine.gradient_accumulation_steps,
        capacity_factor=float(getattr(gate, "capacity_factor", 1.0)),
        can_sync_by_level=can_sync_by_level,
    )


def _boundary_of(engine: Any) -> Callable[[], bool]:
    """Whether the running backward is the last before the optimizer step.

    Asked inside the backward only.  Without managed accumulation nobody knows, so every backward returns gradients;
    under no_sync the caller says that more will follow.
    """

    def is_boundary() -> bool:
        if engine.inside_no_sync_ctxt:
            return False
        return not engine.managed_gradient_accumulation() or engine.is_gradient_accumulation_boundary()

    return is_boundary


def _master_of(parameter: nn.Parameter) -> Tensor | None:
    """The fp32 copy that DeepSpeed's optimizer updates; None where it is in parts, or there is none."""
    stage3 = getattr(parameter, "_z3_optimizer", None)
    if stage3 is not None and parameter.requires_grad:
        is_whole = parameter.partition_numel() == parameter.ds_numel
        return stage3.get_local_fp32_param(parameter) if is_whole else None
    mapping = getattr(parameter, "_hp_mapping", None)
    if mapping is None or mapping.lp_fragment_address.numel != parameter.numel():
        return None
    return mapping.hp_fragment


def _loss_scale_of(engine: Any) -> float:
    return float(getattr(engine.optimizer, "loss_scale", 1.0))


def _refuse_method(method: str) -> Callable[..., Any]:
    def refuse_call(_original: Callable[..., Any], *_args: Any, **_kwargs: Any) -> Any:
        raise UnsupportedError(
            f"engine.{method}() does not work together with hybridep yet; leave it out, or set "
            f'"hybridep": {{"enabled": false}}'
        )

    return refuse_call


def _patch_moe_layer_class() -> None:
    """Make `MOELayer.forward` ask each instance for its hybridep; without one nothing changes.  Idempotent."""
    original = MOELayer.forward
    if getattr(original, "is_hybridep", False):
        return

    @wraps(original)
    def forward(self: MOELayer, *inputs: Tensor, **kwargs: Any) -> Tensor:
        hybrid = self.__dict__.get("_hybridep")
        if hybrid is None:
            return original(self, *inputs, **kwargs)
        return _forward_layer(self, hybrid, *inputs)

    forward.is_hybridep = True  # type: ignore[attr-defined]
    MOELayer.forward = forward


def _forward_layer(layer: MOELayer, hybrid: HybridMoE, hidden_states: Tensor, used_token: Tensor | None) -> Tensor:
    """DeepSpeed's gate decides; the routed experts run over expert domains."""
    x = hidden_states.reshape(-1, hidden_states.shape[-1])
    layer.l_aux, capacity, _, topk_idx, _, topk_weights, layer.exp_counts = layer.gate(x, used_token, True, False)
    # Each of plain EP's exchanges carries C rows for each expert.
    hybrid.count_plain_ep(capacity * hybrid.num_local)
    output = hybrid.forward(x, topk_idx.t().contiguous(), topk_weights.t().float().contiguous())
    return output.reshape(hidden_states.shape)
