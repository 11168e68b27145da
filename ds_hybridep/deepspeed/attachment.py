# SPDX-License-Identifier: Apache-2.0
"""Owns what an engine with the block has: its runtime, its planner, and the changes that were made for both.

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
from ds_hybridep.deepspeed.data_parallel import DataParallelSync
from ds_hybridep.deepspeed.dropped_gradients import DroppedGradients, before_forward
from ds_hybridep.deepspeed.engine_view import view_of
from ds_hybridep.deepspeed.patches import ENGINE, MODULE, Patches
from ds_hybridep.deepspeed.site_exchange import SiteExchange
from ds_hybridep.deepspeed.sites import join_sites
from ds_hybridep.errors import ConfigError
from ds_hybridep.experts.migration import MigrationManager
from ds_hybridep.runtime.build import Facts
from ds_hybridep.runtime.log import log_dist, write_json
from ds_hybridep.runtime.runtime import prepare_runtime
from ds_hybridep.runtime.statistics import monitor_events, summarize
from ds_hybridep.transport import watch
from ds_hybridep.transport.agreement import announcing_failure
from ds_hybridep.transport.job_link import LinkSettings

attached: weakref.WeakSet["Attachment"] = weakref.WeakSet()  # in this process
_left_open: list[Callable[[], None]] = []  # closes connections of engines that were dropped
_still_watching: list[watch.Look] = []  # starts that failed


def _progress_of(attachment: "Attachment", engine: Any) -> watch.Look:
    """Return what the watch looks at; it keeps neither of the two alive."""
    owner, held = weakref.ref(attachment), weakref.ref(engine)

    def look() -> tuple[int, str]:
        runtime = getattr(owner(), "runtime", None)
        last = "" if runtime is None else str(runtime.transport.last_transfer or "none")
        return int(getattr(held(), "global_steps", 0)), last

    return look


class Attachment:
    """One engine and its runtime; all ranks must make it.

    Raises AgreementError if a rank could not.  Then the planner is closed, and nothing is left.

    Args:
        engine: the attachment does not keep it alive.
        layers: its MoE layers by name.
        planner: chooses other settings while the job runs; None if the config gives them all.

    The runtime, and `dense`, are those of the present plan.
    """

    def __init__(
        self,
        engine: Any,
        config: HybridEPConfig,
        facts: Facts,
        layers: Mapping[str, Any],
        *,
        planner: JobPlanner | None,
    ) -> None:
        self.engine, self.layers, self.planner, self.facts = weakref.proxy(engine), dict(layers), planner, facts
        self.patches, self._plan_patches = Patches(), Patches()  # of the engine as long as it is attached; of a plan
        self.optimizer: Any = None  # of the engine, once it is there
        self.dense: DataParallelSync | None = None  # None if DeepSpeed synchronises what several ranks hold
        self.sites: SiteExchange | None = None  # once the optimizer is there
        self.last_report: dict[str, Any] | None = None
        self._watched = _progress_of(self, engine)
        while _left_open:
            _left_open.pop()()
        while _still_watching:
            watch.stop(_still_watching.pop())
        with ExitStack() as made:
            if planner is not None:
                made.callback(planner.close)
            build = prepare_runtime(config, facts)
            # Before memory is allocated: if that gets a rank killed, the others notice at once.
            watch.start(config.cluster(), LinkSettings.of(config), self._watched)
            made.callback(watch.stop, self._watched)
            self.runtime = build()
            made.pop_all()
        self.dropped = DroppedGradients(self.engine, self.layers, self.runtime)
        engine.__dict__["_hybridep_attachment"] = self
        attached.add(self)

    # -- the end ----------------------------------------------------------------------------------------------------

    def join_sites(self) -> None:
        """Join the other sites; all ranks must call once the optimizer exists."""
        if self.runtime.config.sites is not None and self.sites is None:
            runtime = self.runtime
            self.sites = join_sites(
                self.engine,
                runtime.config,
                self.facts,
                runtime.kernels,
                patches=self.patches,
                refresh=lambda: self.runtime.refresh(),
            )

    def unbind(self, *, has_failed: bool = False) -> None:
        """Undo all changes without waiting.  Parameters, optimizer and module tree were never changed.

        has_failed: the start has failed.
        """
        attached.discard(self)
        self.engine.__dict__.pop("_hybridep_attachment", None)
        self._plan_patches.undo()
        self.patches.undo()
        if self.sites is not None:
            self.sites.close()
        if self.planner is not None:
            self.planner.close()
        self.runtime.close()
        if has_failed:
            _still_watching.append(self._watched)
        else:
            watch.stop(self._watched)

    def abandon(self) -> None:
        """Give the layers back when the engine is freed.  Takes no lock: the thread that runs this may hold any."""
        self.patches.is_on = False
        self._plan_patches.undo()
        _left_open.append(self.runtime.transport.close)
        if self.sites is not None:
            _left_open.append(self.sites.close)
        if self.planner is not None:
            _left_open.append(self.planner.close)

    # -- plans ------------------------------------------------------------------------------------------------------

    def bind_plan(self) -> None:
        """Connect engine and layers to the runtime of the present plan."""
        patches, runtime = Patches(), self.runtime
        self._plan_patches, self.dropped.runtime = patches, runtime
        at_output = partial(self.dropped.at_output, self.facts.is_boundary)
        patches.wrap(ENGINE, "_backward_prologue_per_tensor", self.engine, at_output)
        for name, hybrid in runtime.layers.items():
            patches.put(MODULE, "_hybridep", self.layers[name], hybrid)
        if runtime.migration.layers:
            modules = [module for layer in self.layers.values() for module in layer.experts.modules()]
            hook = _refill_after_load(runtime.migration, modules)
            for module in modules:
                handle = module.register_load_state_dict_post_hook(hook)
                patches.note(MODULE, "load_state_dict_post_hook", handle.remove)
            notice = self.engine.module.register_forward_pre_hook(torch.compiler.disable(before_forward(self.dropped)))
            patches.note(MODULE, "forward_pre_hook", notice.remove)
        self.dense = None
        if runtime.syncs:
            self.dense = DataParallelSync(self.engine, runtime.syncs, patches, self.facts.is_boundary)
            runtime.shared_parameters = self.dense.shared_parameters
            self.dense.watch(self.optimizer)

    def switch(self, config: HybridEPConfig, reason: str) -> None:
        """Switch to other settings; all ranks must call, between two optimizer steps.

        Raises AgreementError if a rank cannot make the new runtime; then all ranks keep the earlier settings.
        """
        earlier = self.runtime
        with announcing_failure():
            earlier.finish()
        runtime = prepare_runtime(config, self.facts)()
        undelivered = earlier.hand_over()
        self._plan_patches.undo()
        self.runtime, self.dense = runtime, None
        runtime.follow(earlier, undelivered)
        earlier.close()
        self.bind_plan()
        self.ship_partitioned()
        if self.planner is not None:
            self.planner.follow(config, runtime, reason)
        plan = runtime.describe().removeprefix("hybridep: ")
        log_dist(f"hybridep after step {self.engine.global_steps}: {plan}; {reason}", ranks=[0])

    def ship_partitioned(self) -> None:
        """Under ZeRO-3, ship weights now: in a forward, ZeRO-3 prefetches the parameters that it expects next."""
        migration = self.runtime.migration
        if view_of(self.engine).partitions_parameters and migration.is_stale:
            migration.refresh()

    def coupled_ranks(self) -> tuple[int, ...]:
        """Return the ranks that must run a forward together with this one, in order; empty if it can run alone.

        Weights that no forward has shipped yet need all ranks once.
        """
        layers = self.runtime.layers  # the others leave tokens to DeepSpeed
        if view_of(self.engine).partitions_parameters:
            return tuple(range(self.runtime.transport.world_size))
        groups = [
            set(spec.group_ranks)
            for spec in self.facts.specs
            if len(spec.group_ranks) > 1 and (spec.name not in layers or layers[spec.name].exchanges)
        ]
        return tuple(sorted(set().union(*groups)))

    # -- reports ----------------------------------------------------------------------------------------------------

    def publish(self, report: dict[str, Any]) -> None:
        """Write a report to the log, the monitor and the report file, on rank 0."""
        report["plan"] = self.runtime.describe().removeprefix("hybridep: ")
        if self.planner is not None:
            report["planning"] = self.planner.record(self.runtime)
        if self.sites is not None:
            report["sites"] = self.sites.report()
        self.last_report = report
        log_dist(summarize(report), ranks=[0])
        monitor = getattr(self.engine, "monitor", None)
        if monitor is not None and monitor.enabled:
            monitor.write_events(monitor_events(report, self.engine.global_samples))
        if self.runtime.config.report_file is not None:
            write_json(Path(self.runtime.config.report_file), report)


def the_one_of_a_site() -> Attachment:
    """Return the attachment of an engine that trains together with other sites; ConfigError if there is none."""
    for attachment in list(attached):
        if attachment.sites is not None:
            return attachment
    raise ConfigError(
        "no engine of this process trains together with other sites; give ds_hybridep.site the ds_config or the engine"
    )


def attachment_of(engine: Any) -> Attachment:
    """Return the attachment of an engine; raises ConfigError if it has none."""
    attachment: Attachment | None = engine.__dict__.get("_hybridep_attachment")
    if attachment is None:
        raise ConfigError(
            'hybridep is not attached to this engine: add a "hybridep" block to its ds_config, or call '
            "ds_hybridep.attach(engine, config); pass the object that deepspeed.initialize returned first"
        )
    return attachment


def _refill_after_load(migration: MigrationManager, modules: list[nn.Module]) -> Callable[..., None]:
    """Return a hook for modules whose parameters all ranks have loaded: it lets the next forward ship them."""

    def after_load(module: nn.Module, _incompatible_keys: Any) -> None:
        # A deep copy of a module has this hook too, and may be loaded on one rank only.
        if any(module is own for own in modules):
            migration.mark_weights_changed()

    return after_load
