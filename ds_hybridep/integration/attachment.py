# SPDX-License-Identifier: Apache-2.0
"""Connects one engine to its runtime, and changes its step, gradients, checkpoints and end while it is attached."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed.utils import log_dist
from torch import nn

from ds_hybridep.adaptive.planner import JobPlanner
from ds_hybridep.config import HybridEPConfig
from ds_hybridep.errors import UnsupportedError
from ds_hybridep.experts.migration import MigrationManager, is_in_backward
from ds_hybridep.integration import autoep, checkpoint_guard, checkpoints, classic
from ds_hybridep.integration.dense import DenseSync
from ds_hybridep.integration.patches import AUTOEP_LAYER, ENGINE, MODULE, MOE_LAYER, ZERO_OPTIMIZER, Patches
from ds_hybridep.integration.runtime import HybridRuntime
from ds_hybridep.integration.statistics import monitor_events, summarize
from ds_hybridep.integration.supported import check_optimizer
from ds_hybridep.transport import health
from ds_hybridep.transport.agreement import announcing_failure, together

_attached: list["Attachment"] = []


class Attachment:
    """Connects one engine to its runtime; raises AgreementError if a rank could not make its runtime.

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
        self.engine = engine
        self.layers = dict(layers)
        self.planner = planner
        self.last_report: dict[str, Any] | None = None
        self._prepare = prepare
        self._patches, self._plan_patches = Patches(), Patches()
        self._dense: DenseSync | None = None
        self._optimizer: Any = None
        build = prepare(config)
        # Before memory is allocated: if that gets a rank killed, the others notice at once.
        health.start(config.cluster(), config.timeout_s, self)
        try:
            self.runtime = _build_together(build, config.timeout_s)
        except BaseException:
            health.stop(self)
            raise

    def num_steps(self) -> int:
        """Return the number of optimizer steps so far."""
        return int(getattr(self.engine, "global_steps", 0))

    def last_transfer(self) -> str:
        """Describe the transfer that this rank started last."""
        runtime = getattr(self, "runtime", None)
        return str(runtime.transport.last_transfer or "none") if runtime is not None else ""

    # -- begin and end ----------------------------------------------------------------------------------------------

    def bind(self) -> None:
        """Connect engine and layers to the runtime."""
        _attached.append(self)
        patches = self._patches
        checkpoint_guard.install(patches)
        for layer in self.layers.values():
            is_classic = not autoep.is_autoep_layer(layer)
            owner, wrap = (MOE_LAYER, classic.wrap_forward) if is_classic else (AUTOEP_LAYER, autoep.wrap_forward)
            patches.share(owner, "forward", wrap)
        if self.planner is not None:
            for layer, watch in zip(self.layers.values(), self.planner.watches, strict=True):
                patches.keep(MODULE, "forward_pre_hook", layer.register_forward_pre_hook(watch).remove)
        for method, replacement in (
            ("_configure_optimizer", self._configure_optimizer),
            ("_take_model_step", self._take_model_step),
            ("zero_grad", partial(self._zero_grad, by_optimizer=False)),
            ("save_checkpoint", partial(checkpoints.save, self)),
            ("load_checkpoint", partial(checkpoints.load, self)),
            ("destroy", self._destroy),
            ("compile", partial(_refuse, "compile")),
            ("coalesce_grad_reduction", partial(_refuse, "coalesce_grad_reduction")),
        ):
            patches.wrap(ENGINE, method, self.engine, replacement)
        patches.share(MODULE, "zero_grad", _wrap_zero_grad_of_module)
        self._bind_runtime()

    def _bind_runtime(self) -> None:
        """Connect what every plan connects for itself."""
        patches = self._plan_patches
        for name, hybrid in self.runtime.layers.items():
            patches.put(MODULE, "_hybridep", self.layers[name], hybrid)
        if self.runtime.migration is not None:
            modules = [module for layer in self.layers.values() for module in layer.experts.modules()]
            hook = _refill_after_load(self.runtime.migration, modules)
            for module in modules:
                handle = module.register_load_state_dict_post_hook(hook)
                patches.keep(MODULE, "load_state_dict_post_hook", handle.remove)
            notice = self.engine.module.register_forward_pre_hook(_noticing(self))
            patches.keep(MODULE, "forward_pre_hook", notice.remove)
        if self.runtime.syncs:
            self._dense = DenseSync(self.engine, self.runtime.syncs, patches, boundary_of(self.engine))
            self.runtime.shared_parameters = self._dense.shared_parameters
        self._watch_optimizer()

    def unbind(self) -> None:
        """Undo all changes without waiting.  Parameters, optimizer and module tree were never changed."""
        _attached.remove(self)
        del self.engine.__dict__["_hybridep_attachment"]
        self._plan_patches.undo()
        self._patches.undo()
        if self.planner is not None:
            self.planner.close()
        self.runtime.close()
        health.stop(self)

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
        self.runtime, self._dense = runtime, None
        if lost := runtime.follow(earlier, undelivered):
            log_dist(f"hybridep: gradients of norm {lost:.3g} that codecs had kept back are dropped", ranks=[-1])
        earlier.close()
        self._bind_runtime()
        self.ship_partitioned()
        if self.planner is not None:
            self.planner.follow(config, runtime, reason)
        log_dist(runtime.describe(), ranks=[0])

    def _destroy(self, original: Callable[..., Any]) -> None:
        # May run while an exception propagates, so it waits for nothing.
        self.unbind()
        original()

    def ship_partitioned(self) -> None:
        """Under ZeRO-3, ship weights now: in a forward, ZeRO-3 prefetches the parameters that it expects next."""
        if self.engine.zero_optimization_stage() == 3 and self.runtime.migration is not None:
            self.runtime.migration.refresh_stale()

    # -- the optimizer and its step ---------------------------------------------------------------------------------

    def _configure_optimizer(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        original(*args, **kwargs)
        self._watch_optimizer()

    def _watch_optimizer(self) -> None:
        """Connect the optimizer as soon as it exists: DeepSpeed makes it after we attach."""
        optimizer = getattr(self.engine, "optimizer", None)
        if not hasattr(optimizer, "zero_grad"):
            return
        if self._optimizer is None:
            check_optimizer(self.engine)
            replacement = partial(self._zero_grad, by_optimizer=True)
            self._patches.wrap(ZERO_OPTIMIZER, "zero_grad", optimizer, replacement)
            self._optimizer = optimizer
        if self._dense is not None:
            self._dense.watch(self._optimizer)

    def _take_model_step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._watch_optimizer()
        self.runtime.before_step()
        try:
            chosen = self.planner.before_step(self.runtime) if self.planner is not None else None
            if self._dense is not None:
                self._dense.before_step()
            original(*args, **kwargs)
        except BaseException:
            self.runtime.abandon_step()
            raise
        finally:
            if self._dense is not None:
                self._dense.after_step()
        # Dense parameters and experts travel together.  Experts of several groups must arrive before they are shipped.
        if self._dense is not None:
            self._dense.finish_gathers(of_experts_only=True)
        report = self.runtime.after_step(was_applied=self.engine._step_applied, ships=chosen is None)
        if self._dense is not None:
            self._dense.finish_gathers(of_experts_only=False)
        if self.planner is not None:
            self.planner.after_step()
        if report is not None:
            self._publish(report)
        if chosen is not None and self.planner is not None:
            reason = self.planner.reason
            self.switch(chosen, reason)
            label = self.planner.history[-1]["to"]
            log_dist(f"hybridep after step {self.engine.global_steps}: {label}, {reason}", ranks=[0])

    def _publish(self, report: dict[str, Any]) -> None:
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

    # -- gradients that are forgotten -------------------------------------------------------------------------------

    def _zero_grad(self, original: Callable[..., Any], *args: Any, by_optimizer: bool, **kwargs: Any) -> Any:
        if not self._keeps_reduced and (by_optimizer or not self._has_accumulator):
            self.clear_gradients()
        return original(*args, **kwargs)

    @property
    def _keeps_reduced(self) -> bool:
        """True under ZeRO-2, which keeps reduced gradients whoever calls zero_grad."""
        return bool(getattr(self.engine.optimizer, "partition_gradients", False))

    @property
    def _has_accumulator(self) -> bool:
        """True if gradients are not in `.grad` between micro-steps, so only the optimizer's zero_grad clears them."""
        optimizer = self.engine.optimizer
        return (
            self.engine.zero_optimization_stage() == 3
            or hasattr(optimizer, "clear_hp_grads")
            or bool(getattr(optimizer, "use_grad_accum_attribute", False))
        )

    def clear_gradients(self) -> None:
        """Drop the gradients of replicas because their owners drop theirs."""
        # ZeRO 1 has copied the returned gradients, and its step applies the copy whoever calls zero_grad.  After a
        # step the table still has an entry for each group: None.
        averaged = getattr(self.engine.optimizer, "averaged_gradients", None) or {}
        self.runtime.clear_gradients(drops_returned=all(gradients is None for gradients in averaged.values()))

    def owned_in_grad(self) -> list[nn.Parameter]:
        """Return trainable parameters of owned experts if their gradients stay in `.grad` until the step; else []."""
        if self._keeps_reduced or self._has_accumulator:
            return []
        return [p for layer in self.layers.values() for p in layer.experts.parameters() if p.requires_grad]


def loss_scale_of(engine: Any) -> float:
    """Return the factor that gradients are multiplied by now."""
    return float(getattr(engine.optimizer, "loss_scale", 1.0))


def boundary_of(engine: Any) -> Callable[[], bool]:
    """Return a function that says whether the running backward is the last before the optimizer step.

    Call it only inside the backward.  Without managed accumulation nobody knows, so every backward returns gradients.
    Under no_sync the caller says that more backwards will follow.
    """

    def is_boundary() -> bool:
        if engine.inside_no_sync_ctxt:
            return False
        return bool(not engine.managed_gradient_accumulation() or engine.is_gradient_accumulation_boundary())

    return is_boundary


def _wrap_zero_grad_of_module(original: Callable[..., Any]) -> Callable[..., None]:
    """Let `torch.nn.Module.zero_grad` also clear sums of replicas if the module holds all experts of an engine."""

    def zero_grad(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        original(module, *args, **kwargs)
        cleared = {id(parameter) for parameter in module.parameters()} if _attached else set()
        for attachment in _attached:
            owned = attachment.owned_in_grad()
            if owned and all(id(parameter) in cleared for parameter in owned):
                attachment.clear_gradients()

    return zero_grad


def _noticing(attachment: Attachment) -> Callable[..., None]:
    """Return a hook before the model's forward: if no owner has a gradient, it clears sums of replicas too."""
    # A function, not a method: a deep copy of the model copies its hooks, and must not copy the attachment.

    def notice(_module: nn.Module, _inputs: Any) -> None:
        if is_in_backward():
            return
        owned = attachment.owned_in_grad()
        if owned and all(parameter.grad is None for parameter in owned):
            attachment.clear_gradients()

    return notice


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
