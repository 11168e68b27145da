# SPDX-License-Identifier: Apache-2.0
"""Connects one engine to its runtime, and changes its step, checkpoints and end while it is attached.

The engine owns its attachment, which refers to the engine weakly.  An engine ends in one of three ways:

    destroy, detach     on all ranks at the same point: changes are undone, connections closed, the watch stopped
    its start fails     the same, but the watch goes on until the next start: if nobody catches the error, it tells
                        the other ranks of it
    it is dropped       at any time and in any thread: the layers are given back.  Connections are closed at the next
                        start, and the watch never stops, since ranks must agree on when it does
"""

import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ds_hybridep.adaptive.planner import JobPlanner
from ds_hybridep.config import HybridEPConfig
from ds_hybridep.errors import ConfigError, UnsupportedError
from ds_hybridep.experts.migration import MigrationManager
from ds_hybridep.integration import autoep, checkpoint_guard, checkpoints, classic, saving
from ds_hybridep.integration.dense import DenseSync
from ds_hybridep.integration.log import log_dist
from ds_hybridep.integration.patches import (
    AUTOEP_LAYER,
    ENGINE,
    MODULE,
    MOE_LAYER,
    TRAINER,
    Patches,
    is_trainer_there,
)
from ds_hybridep.integration.runtime import EngineStep, HybridRuntime, boundary_of, noticing
from ds_hybridep.integration.statistics import monitor_events, summarize
from ds_hybridep.transport import watch
from ds_hybridep.transport.agreement import announcing_failure, together
from ds_hybridep.transport.job_link import LinkSettings

_attached: weakref.WeakSet["Attachment"] = weakref.WeakSet()
_left_open: list[Callable[[], None]] = []  # closes connections of engines that were dropped
_still_watching: list["Watched"] = []  # starts that failed


class Watched:
    """What the watch over the job asks about an attached engine."""

    def __init__(self, attachment: "Attachment", engine: Any) -> None:
        self._attachment, self._engine = weakref.ref(attachment), weakref.ref(engine)

    def num_steps(self) -> int:
        """Return the number of optimizer steps so far."""
        return int(getattr(self._engine(), "global_steps", 0))

    def last_transfer(self) -> str:
        """Describe the transfer that this rank started last."""
        runtime = getattr(self._attachment(), "runtime", None)
        return str(runtime.transport.last_transfer or "none") if runtime is not None else ""


class Attachment:
    """Connects one engine to its runtime; raises AgreementError if a rank could not make its runtime.

    engine: the attachment does not keep it alive.
    prepare: checks settings and returns the function that makes their runtime; all ranks must call it.
    planner: chooses other settings while the job runs; None if the config gives them all.
    """

    def __init__(
        self,
        engine: Any,
        prepare: Callable[[HybridEPConfig], Callable[[], HybridRuntime]],
        config: HybridEPConfig,
        layers: Mapping[str, Any],
        planner: JobPlanner | None,
    ) -> None:
        self.engine = weakref.proxy(engine)
        self.layers = dict(layers)
        self.planner = planner
        self.last_report: dict[str, Any] | None = None
        self._prepare = prepare
        self._patches, self._plan_patches = Patches(), Patches()
        self.dense: DenseSync | None = None
        _clear_up()
        build = prepare(config)
        self._watched = Watched(self, engine)
        # Before memory is allocated: if that gets a rank killed, the others notice at once.
        watch.start(config.cluster(), LinkSettings.of(config), self._watched)
        try:
            self.runtime = _build_together(build, config.timeout_s)
        except BaseException:
            watch.stop(self._watched)
            raise

    # -- begin and end ----------------------------------------------------------------------------------------------

    def bind(self) -> None:
        """Connect engine and layers to the runtime.  If that fails, undo it."""
        self.engine.__dict__["_hybridep_attachment"] = self
        _attached.add(self)
        try:
            self._bind_engine()
            self._bind_runtime()
            if getattr(self.engine, "micro_steps", 0) > 0:
                self.ship_partitioned()
        except BaseException:
            self.unbind(has_failed=True)
            raise

    def _bind_engine(self) -> None:
        """Connect what all plans share."""
        patches = self._patches
        patches.share(ENGINE, "__del__", _wrap_del)
        checkpoint_guard.install(patches)
        for layer in self.layers.values():
            is_classic = not autoep.is_autoep_layer(layer)
            owner, wrap = (MOE_LAYER, classic.wrap_forward) if is_classic else (AUTOEP_LAYER, autoep.wrap_forward)
            patches.share(owner, "forward", wrap)
        if self.planner is not None:
            for layer, meter in zip(self.layers.values(), self.planner.watches, strict=True):
                hook = torch.compiler.disable(meter.__call__)
                patches.keep(MODULE, "forward_pre_hook", layer.register_forward_pre_hook(hook).remove)
        for method, replacement in (
            ("_configure_optimizer", self._configure_optimizer),
            ("save_checkpoint", partial(checkpoints.save, self)),
            ("load_checkpoint", partial(checkpoints.load, self)),
            ("destroy", self._destroy),
            ("compile", partial(_refuse, "compile")),
            ("coalesce_grad_reduction", partial(_refuse, "coalesce_grad_reduction")),
        ):
            patches.wrap(ENGINE, method, self.engine, patches.while_on(replacement))
        self._bind_saving()
        self.step = EngineStep(self, patches)
        patches.share(MODULE, "zero_grad", _wrap_zero_grad_of_module)

    def _bind_saving(self) -> None:
        """Make what writes the model write the experts of all ranks, or say what to call."""
        patches, module = self._patches, self.engine.module
        if not all(autoep.is_autoep_layer(layer) for layer in self.layers.values()):
            return
        if adapted := autoep.adapted_layers(self.layers):
            from ds_hybridep.integration import adapters

            load = patches.while_on(partial(adapters.load_module_state_dict, adapted))
            patches.wrap(ENGINE, "load_module_state_dict", self.engine, load)
        save = partial(saving.save_16bit_model, self.engine)
        patches.wrap(ENGINE, "save_16bit_model", self.engine, patches.while_on(save))
        inner = module.get_base_model() if hasattr(module, "peft_config") else module
        owners = {id(one): one for one in (inner, module) if hasattr(one, "save_pretrained")}
        if inner is not module and not adapted:
            del owners[id(module)]  # peft writes adapters of other layers rightly
        for owner in owners.values():
            patches.put(MODULE, "save_pretrained", owner, saving.refuse_save_pretrained)
        if is_trainer_there():
            patches.share(TRAINER, "save_model", saving.wrap_save_model)

    def _bind_runtime(self) -> None:
        """Connect what each plan has for itself."""
        patches = self._plan_patches = Patches()
        for name, hybrid in self.runtime.layers.items():
            patches.put(MODULE, "_hybridep", self.layers[name], hybrid)
        if self.runtime.migration is not None:
            modules = [module for layer in self.layers.values() for module in layer.experts.modules()]
            hook = _refill_after_load(self.runtime.migration, modules)
            for module in modules:
                handle = module.register_load_state_dict_post_hook(hook)
                patches.keep(MODULE, "load_state_dict_post_hook", handle.remove)
            notice = self.engine.module.register_forward_pre_hook(torch.compiler.disable(noticing(self.step)))
            patches.keep(MODULE, "forward_pre_hook", notice.remove)
        if self.runtime.syncs:
            self.dense = DenseSync(self.engine, self.runtime.syncs, patches, boundary_of(self.engine))
            self.runtime.shared_parameters = self.dense.shared_parameters
        self.step.watch_optimizer()

    def unbind(self, *, has_failed: bool = False) -> None:
        """Undo all changes without waiting.  Parameters, optimizer and module tree were never changed.

        has_failed: the start has failed.
        """
        _attached.discard(self)
        self.engine.__dict__.pop("_hybridep_attachment", None)
        self._plan_patches.undo()
        self._patches.undo()
        if self.planner is not None:
            self.planner.close()
        self.runtime.close()
        if has_failed:
            _still_watching.append(self._watched)
        else:
            watch.stop(self._watched)

    def abandon(self) -> None:
        """Give the layers back when the engine is freed.  Takes no lock: the thread that runs this may hold any."""
        self._patches.is_on = False
        self._plan_patches.undo()
        _left_open.append(self.runtime.transport.close)
        if self.planner is not None:
            _left_open.append(self.planner.close)

    def switch(self, config: HybridEPConfig, reason: str) -> None:
        """Switch to other settings; all ranks must call, between two optimizer steps.

        Raises AgreementError if a rank cannot make the new runtime; then all ranks keep the earlier settings.
        """
        earlier = self.runtime
        with announcing_failure():
            earlier.finish()
        runtime = _build_together(self._prepare(config), config.timeout_s)
        undelivered = earlier.hand_over()
        self._plan_patches.undo()
        self.runtime, self.dense = runtime, None
        runtime.follow(earlier, undelivered)
        earlier.close()
        self._bind_runtime()
        self.ship_partitioned()
        if self.planner is not None:
            self.planner.follow(config, runtime, reason)
        plan = runtime.describe().removeprefix("hybridep: ")
        log_dist(f"hybridep after step {self.engine.global_steps}: {plan}; {reason}", ranks=[0])

    def _destroy(self, original: Callable[..., Any]) -> None:
        # May run while an exception propagates, so it waits for nothing.
        self.unbind()
        original()

    def ship_partitioned(self) -> None:
        """Under ZeRO-3, ship weights now: in a forward, ZeRO-3 prefetches the parameters that it expects next."""
        if self.engine.zero_optimization_stage() == 3 and self.runtime.migration is not None:
            self.runtime.migration.refresh_stale()

    def _configure_optimizer(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        self.step.watch_optimizer()

    def publish(self, report: dict[str, Any]) -> None:
        """Write a report to the log, the monitor and the report file, on rank 0."""
        report["plan"] = self.runtime.describe().removeprefix("hybridep: ")
        if self.planner is not None:
            report["planning"] = self.planner.record(self.runtime)
        self.last_report = report
        log_dist(summarize(report), ranks=[0])
        monitor = getattr(self.engine, "monitor", None)
        if monitor is not None and monitor.enabled:
            monitor.write_events(monitor_events(report, self.engine.global_samples))
        if self.runtime.config.report_file is not None:
            checkpoints.write_json(Path(self.runtime.config.report_file), report)


def refuse_owned(layers: Mapping[str, nn.Module]) -> None:
    """Raise ConfigError if another engine has one of the layers."""
    owned = {id(layer) for attachment in _attached for layer in attachment.layers.values()}
    if taken := next((name for name, layer in layers.items() if id(layer) in owned), None):
        raise ConfigError(
            f"{taken} belongs to another engine, to which hybridep is attached; call that engine's destroy(), or "
            f"ds_hybridep.detach with it, before another engine takes its layers"
        )


def _clear_up() -> None:
    """Close what engines have left behind that were dropped, and stop the watches of starts that failed."""
    while _left_open:
        _left_open.pop()()
    while _still_watching:
        watch.stop(_still_watching.pop())


def _wrap_del(original: Callable[..., None]) -> Callable[..., None]:
    """Let engines that were neither destroyed nor detached give up what they have: DeepSpeed calls `destroy` then."""

    def __del__(engine: Any) -> None:
        attachment = vars(engine).get("_hybridep_attachment")
        if attachment is not None:
            attachment.abandon()
        original(engine)

    return __del__


def _wrap_zero_grad_of_module(original: Callable[..., Any]) -> Callable[..., None]:
    """Let `torch.nn.Module.zero_grad` also clear sums of replicas if the module holds all experts of an engine."""

    def zero_grad(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(module, *args, **kwargs)
        attached = list(_attached)
        cleared = {id(parameter) for parameter in module.parameters()} if attached else set()
        for attachment in attached:
            owned = attachment.step.owned_in_grad()
            if owned and all(id(parameter) in cleared for parameter in owned):
                attachment.step.clear_gradients()

    return zero_grad


def _refill_after_load(migration: MigrationManager, modules: list[nn.Module]) -> Callable[..., None]:
    """Return a hook for modules whose parameters all ranks have loaded: it lets the next forward ship them."""

    def after_load(module: nn.Module, _incompatible_keys: Any) -> None:
        # A deep copy of a module has this hook too, and may be loaded on one rank only.
        if any(module is own for own in modules):
            migration.mark_weights_changed()

    return after_load


def _refuse(method: str, _original: Callable[..., Any], *_args: Any, **_kwargs: Any) -> Any:
    raise UnsupportedError(
        f"engine.{method}() does not work together with hybridep yet; leave it out, or set "
        f'"hybridep": {{"enabled": false}}'
    )


def _build_together(build: Callable[[], HybridRuntime], timeout_s: float) -> HybridRuntime:
    """Return what `build` makes, once it has worked on every rank.  If one fails, all raise AgreementError."""
    made = ExitStack()
    with together(timeout_s, made.close):
        runtime = build()
        made.callback(runtime.close)
    return runtime
