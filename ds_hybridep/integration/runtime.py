# SPDX-License-Identifier: Apache-2.0
"""The runtime of one engine under one plan, and the engine's optimizer step, which calls it.

HybridRuntime    channels, layers, migration and counters of one plan
EngineStep       what `engine.step()` and `zero_grad` do around DeepSpeed's own
"""

import math
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ds_hybridep.adaptive.planner import JobPlanner
from ds_hybridep.config import HybridEPConfig
from ds_hybridep.errors import GradientNotReturnedError, UnsupportedError
from ds_hybridep.experts.migration import is_in_backward
from ds_hybridep.experts.partitioned import full_shape
from ds_hybridep.experts.verification import verify
from ds_hybridep.integration.build import Builder, Facts, PlannedLayer, describe, encoding_of
from ds_hybridep.integration.codec_state import CodecCheckpoint
from ds_hybridep.integration.dense import DENSE, DenseSync
from ds_hybridep.integration.hot_experts import HotExperts
from ds_hybridep.integration.patches import ENGINE, OPTIMIZER, ZERO_OPTIMIZER, Patches
from ds_hybridep.integration.sites import SiteSync
from ds_hybridep.integration.statistics import RuntimeStatistics
from ds_hybridep.integration.supported import check_optimizer
from ds_hybridep.kernels import Kernels
from ds_hybridep.plan.plan import JobPlan
from ds_hybridep.sync.dense import GroupSync
from ds_hybridep.sync.gradients import StepChanges
from ds_hybridep.sync.messages import squared_norm
from ds_hybridep.sync.undelivered import GradientTarget, Undelivered, UndeliveredGradients
from ds_hybridep.tokens.layer import LayerStats
from ds_hybridep.transport.channels import Transport


class HybridRuntime:
    """Everything that one engine has under one plan: channels, layers, migration and counters."""

    def __init__(
        self,
        config: HybridEPConfig,
        facts: Facts,
        transport: Transport,
        kernels: Kernels,
        planned: Sequence[PlannedLayer],
        sync_groups: Mapping[str, tuple[int, ...]],
    ) -> None:
        self.config, self.transport, self.kernels = config, transport, kernels
        self._planned = tuple(planned)
        self.changes = StepChanges()
        waiting = UndeliveredGradients(
            partial(_targets, transport, self._planned, facts.parameters),
            transport.world_size,
            facts.is_boundary,
            facts.loss_scale,
            self.changes,
        )
        self._is_stepping = self._is_committed = False
        self.shared_parameters: Callable[[str], Sequence[Tensor]] = lambda _: ()  # flat, by name of the group
        # This makes channels, in the same order on all ranks, and before memory is allocated.
        encoding = facts.complete(encoding_of(self.plan, config.advanced.kernels))
        of_dense = encoding_of(self.plan, config.advanced.kernels, is_dense=True)
        of_dense = replace(of_dense, loss_scale=facts.loss_scale)
        device = facts.specs[0].sample.device
        self.syncs = {
            name: GroupSync(transport, ranks, name, of_dense if name == DENSE else encoding, self.changes, device)
            for name, ranks in sync_groups.items()
        }
        ours = [layer for layer in planned if layer.exchange is not None]
        builder = Builder(config, transport, kernels, encoding, self.changes, facts.is_boundary)
        self.layers, self.migration = builder.build(ours)
        self.layer_stats: dict[str, LayerStats] = {name: layer.stats for name, layer in self.layers.items()}
        pairs = [(self.layers[layer.spec.name], layer) for layer in ours]
        self.hot = HotExperts(config, transport, pairs)
        if self.hot.layers:
            self.migration.before_return = self.hot.send_counts
        self.codecs = CodecCheckpoint(
            config, transport, planned, self.migration, waiting, self.syncs, self.changes, self.hot
        )
        self.statistics = RuntimeStatistics(transport, pairs, self.hot, counts_dense=bool(self.syncs))

    # -- around the optimizer step ----------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Call before the optimizer step, which may still be skipped."""
        self.migration.before_step()
        interval, steps = self.config.advanced.verify_interval, self.statistics.num_steps
        if interval and steps and steps % interval == 0:
            self.verify()
        self._is_stepping = True

    def commit(self) -> bool:
        """Call before each change of parameters in the optimizer step, which is not skipped any more.

        Returns True for the first change of a step.
        """
        if not self._is_stepping or self._is_committed:
            return False
        self._is_committed = True
        self.changes.commit()  # first, because it frees what the step needs
        self.migration.remember_sent()
        return True

    def verify(self) -> None:
        """Raise VerificationError if ranks hold different weights; all ranks must call at the same step."""
        verify(self.migration, self.transport, self.kernels)
        for name, sync in self.syncs.items():
            if sync.encodes_parameters:
                sync.verify([self.kernels.bit_sums(flat) for flat in self.shared_parameters(name)])

    def abandon_step(self) -> None:
        """Call if the optimizer failed in the step that `before_step` announced; some weights may have changed."""
        self._is_stepping = self._is_committed = False
        self.migration.after_step(ships=False)

    def after_step(self, *, was_applied: bool, ships: bool = True) -> dict[str, Any] | None:
        """Call right after the optimizer step.  Returns the job's record on rank 0 every `report_interval` steps.

        ships: send the new weights to their replicas; False if another plan follows, which ships all weights.
        """
        self._is_stepping = self._is_committed = False
        if was_applied:
            self.changes.commit()
        if self.hot.layers and (found := self.hot.after_step(was_applied=was_applied)):
            self.codecs.waiting.add(found)
        if was_applied:
            self.migration.after_step(ships=ships)
        else:
            self.changes.undo()
            self.migration.skip_step()
        self.statistics.num_steps += 1
        self.statistics.step_ends.append(time.monotonic())
        interval = self.config.report_interval
        return self.statistics.gather_job() if interval and self.statistics.num_steps % interval == 0 else None

    def clear_gradients(self, *, drops_returned: bool) -> None:
        """Drop replica gradients, as zero_grad drops the owners' gradients.

        drops_returned: the owners also drop the gradients that were already returned to them.
        """
        # The step calls zero_grad itself, after it has used the gradients.
        is_undone = drops_returned and not self._is_stepping
        if is_undone:
            self.changes.undo()
        self.migration.clear_gradients(is_undone=is_undone)

    def undo_gradients(self) -> None:
        """Undo what codecs have noted of gradients since the last step: no step will use them."""
        self.changes.undo()
        for layer in self.migration.layers:
            layer.undo_return()

    def refresh(self) -> None:
        """Ship all experts' weights again and wait for them; the next gathers of other parameters are exact."""
        for sync in self.syncs.values():
            sync.memory.gather_exactly()
        self.migration.refresh()

    def finish(self) -> None:
        """Wait for everything under way; all ranks must call.

        Raises GradientNotReturnedError in the middle of an accumulation.
        """
        waiting = sorted(name for sync in self.syncs.values() for name in sync.waiting_names)
        if waiting:
            raise GradientNotReturnedError(
                f"rank {self.transport.rank}: gradients of {', '.join(waiting[:3])} wait for the last micro-step of "
                f"an accumulation; detach or replan before its first one"
            )
        self.migration.check_returned("detach")
        self.migration.finish()

    def close(self) -> None:
        """Drop connections and replicas.  Waits for nothing, so that it can be called after an error too."""
        self.codecs.waiting.remove()
        self.migration.release()
        self.transport.close()

    # -- a change of plan -------------------------------------------------------------------------------------------

    def hand_over(self) -> list[Undelivered]:
        """Return what codecs have not delivered, before another plan; all ranks must call."""
        self.finish()
        return self.codecs.hand_over()

    def follow(self, earlier: "HybridRuntime", undelivered: Sequence[Undelivered]) -> None:
        """Go on counting where `earlier` stopped, and add what it had not delivered to the next gradients."""
        self.transport.traffic = earlier.transport.traffic
        self.statistics.num_steps = earlier.statistics.num_steps
        for name, stats in earlier.layer_stats.items():
            vars(self.layer_stats.setdefault(name, stats)).update(vars(stats))
        self.codecs.waiting.add(undelivered)
        self.hot.follow(earlier.hot)

    # -- a load -------------------------------------------------------------------------------------------------

    def forget_gradients(self) -> None:
        """Drop all gradients of the run so far: residuals, and sums that have not returned to their owners."""
        self.codecs.forget()
        for sync in self.syncs.values():
            sync.drop_waiting()
        self.clear_gradients(drops_returned=True)

    # -- what others ask --------------------------------------------------------------------------------------------

    @property
    def plan(self) -> JobPlan:
        """The plan of the first layer; layers with other expert-parallel groups may have another exchange."""
        return self._planned[0].plan

    @property
    def codec_s(self) -> float:
        """Seconds that this rank has spent on encoding and decoding under this plan."""
        counters = [one.counters for one in self.codecs.feedbacks]
        counters += [sync.memory.counters for sync in self.syncs.values()]
        return sum(one.encode_s + one.decode_s for one in counters)

    @property
    def undelivered_norm(self) -> float:
        """L2 norm of the gradients that this rank has kept back."""
        squares = [feedback.gradients.squared_residual() for feedback in self.codecs.feedbacks]
        squares += [squared_norm(one.values) for one in self.codecs.waiting.records()]
        return math.sqrt(math.fsum([*squares, *(sync.memory.squared_residual for sync in self.syncs.values())]))

    def describe(self) -> str:
        """Describe the plan in one line, for the log."""
        held = f"replicas and their gradients {self.migration.replica_bytes / 2**20:.1f} MiB per rank"
        memory = held if self.migration.layers else "no replicas"
        return describe(self._planned, self.config, self.transport.backends, self.kernels.name, memory)


def _targets(
    transport: Transport, planned: Sequence[PlannedLayer], parameters: Callable[[], Iterable[tuple[str, nn.Parameter]]]
) -> dict[str, GradientTarget]:
    """Return this rank's parameters by their names in its model; its experts' are parts of their stacks.

    A parameter of experts that several layers share is a part of the stack of each of them.
    """
    targets = [one for layer in planned for one in layer.targets(transport.rank, transport.world_size)]
    of_experts = {id(one.parameter): one for one in targets}
    found = {
        name: of_experts.get(id(parameter)) or GradientTarget(name, 0, full_shape(parameter).numel(), parameter)
        for name, parameter in parameters()
    }
    named = set(found.values())
    return found | {f"{one.name} {one.start}": one for one in targets if one not in named}


class EngineStep:
    """What `engine.step()` and `zero_grad` do around DeepSpeed's own while an engine is attached.

    engine: a weak reference.
    layers: its MoE layers by name.
    planner: chooses other settings while the job runs; None if the config gives them all.
    """

    runtime: HybridRuntime
    publish: Callable[[dict[str, Any]], None]
    switch: Callable[[HybridEPConfig, str], None]

    def __init__(self, engine: Any, layers: Mapping[str, Any], planner: JobPlanner | None) -> None:
        self.engine, self.layers, self.planner = engine, dict(layers), planner
        self.dense: DenseSync | None = None
        self.sites: SiteSync | None = None  # once the engine is made
        self.patches = Patches()
        self.optimizer: Any = None  # of the engine, once it is there

    def bind_step(self) -> None:
        """Change the engine's step and all that forgets gradients."""
        for method, replacement in (
            ("_take_model_step", self._take_step),
            ("zero_grad", partial(self._zero_grad, by_optimizer=False)),
        ):
            self.patches.wrap(ENGINE, method, self.engine, replacement)
        self.watch_optimizer()

    def watch_optimizer(self) -> None:
        """Connect the optimizer once it exists: DeepSpeed makes it after an engine with the block is attached."""
        optimizer = getattr(self.engine, "optimizer", None)
        if self.optimizer is not None or not hasattr(optimizer, "zero_grad"):
            return
        check_optimizer(self.engine)
        self.optimizer = optimizer
        self.patches.wrap(ZERO_OPTIMIZER, "zero_grad", optimizer, partial(self._zero_grad, by_optimizer=True))
        if isinstance(base := self.engine.basic_optimizer, torch.optim.Optimizer):
            known = weakref.ref(self)  # a user's optimizer may outlive the engine

            def commit(*_: Any) -> None:
                if (step := known()) is not None and step.runtime.commit() and step.dense is not None:
                    step.dense.commit()

            self.patches.note(OPTIMIZER, "step_pre_hook", base.register_step_pre_hook(commit).remove)
        if self.dense is not None:
            self.dense.watch(optimizer)

    def _refuse_other_forwards(self) -> None:
        """Raise UnsupportedError if a layer has run, but nothing of it here.  A layer that is left out may be."""
        for name, stats in self.runtime.layer_stats.items():
            if stats.module_calls and not stats.calls:
                kind = type(self.layers[name])
                forward = vars(self.layers[name]).get("forward", kind.forward)
                where = f"{getattr(forward, '__module__', '')}.{getattr(forward, '__qualname__', repr(forward))}"
                raise UnsupportedError(
                    f"{name} ({kind.__name__}) has run without hybridep, since its forward, {where}, does not call "
                    f"DeepSpeed's: call super().forward (or the layer's forward before it was replaced) in it, or set "
                    f'"hybridep": {{"enabled": false}}'
                )

    def _take_step(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        self.watch_optimizer()
        self._refuse_other_forwards()
        runtime, planner, dense, sites = self.runtime, self.planner, self.dense, self.sites
        runtime.before_step()
        try:
            chosen = planner.before_step(runtime) if planner is not None else None
            if sites is not None:
                sites.exchange()
            if dense is not None:
                dense.before_step()
            original(*args, **kwargs)
        except BaseException:
            runtime.abandon_step()
            raise
        finally:
            if dense is not None:
                dense.after_step()
        # Dense parameters and experts travel together.  Experts of several groups must arrive before they are shipped.
        if dense is not None:
            dense.finish_gathers(of_experts_only=True)
        report = runtime.after_step(was_applied=self.engine._step_applied, ships=chosen is None)
        if dense is not None:
            dense.finish_gathers(of_experts_only=False)
        if sites is not None:
            sites.after_step(was_applied=self.engine._step_applied)
        if planner is not None:
            planner.after_step()
        if report is not None:
            self.publish(report)
        if chosen is not None and planner is not None:
            self.switch(chosen, planner.reason)

    # -- gradients that are forgotten -------------------------------------------------------------------------------

    def _zero_grad(self, original: Callable[..., Any], *args: Any, by_optimizer: bool, **kwargs: Any) -> Any:
        if not self._keeps_reduced and (by_optimizer or not self._has_accumulator):
            # With False, ZeRO 1 sets `.grad` to zero and keeps what it has accumulated elsewhere.
            sets_to_none = args[0] if args else kwargs.get("set_to_none", True)
            if sets_to_none or not getattr(self.engine.optimizer, "use_grad_accum_attribute", False):
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
        # ZeRO 1 has copied the returned gradients, and its step applies the copy whoever calls zero_grad.
        self.runtime.clear_gradients(drops_returned=not holds_averaged(self.engine.optimizer))

    def owned_in_grad(self) -> list[nn.Parameter]:
        """Return trainable parameters of owned experts if their gradients stay in `.grad` until the step; else []."""
        if self._keeps_reduced or self._has_accumulator:
            return []
        return [p for layer in self.layers.values() for p in layer.experts.parameters() if p.requires_grad]


def noticing(step: EngineStep) -> Callable[..., None]:
    """Return a hook before the model's forward: if no owner has a gradient, it clears sums of replicas too."""
    # A function, not a method: a deep copy of the model copies its hooks, and must not copy the step.

    def notice(_module: nn.Module, _inputs: Any) -> None:
        if is_in_backward():
            return
        owned = step.owned_in_grad()
        if owned and all(parameter.grad is None for parameter in owned):
            step.clear_gradients()

    return notice


def is_boundary_of(engine: Any) -> bool:
    """Return True if the running backward, inside which it is called, is the last before the optimizer step.

    Without managed accumulation nobody knows, so every backward returns gradients.  Under no_sync the caller says that
    more backwards will follow.
    """
    if engine.inside_no_sync_ctxt:
        return False
    return bool(not engine.managed_gradient_accumulation() or engine.is_gradient_accumulation_boundary())


def loss_scale_of(engine: Any) -> float:
    """Return the factor that gradients are multiplied by now."""
    scale = getattr(engine.optimizer, "loss_scale", None)  # FP16_Optimizer has None in bf16
    return 1.0 if scale is None else float(scale)


def holds_averaged(optimizer: Any) -> bool:
    """Return True if averaged gradients wait for the step apart from `.grad`, so that no zero_grad drops them."""
    if getattr(optimizer, "cpu_offload", False) or getattr(optimizer, "offload_optimizer", False):
        return bool(optimizer.norm_for_param_grads)  # noted while they are copied to the host; a step drops them
    averaged = getattr(optimizer, "averaged_gradients", None) or {}
    return any(group is not None for group in averaged.values())  # after a step each entry is None
