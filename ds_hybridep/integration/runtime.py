# SPDX-License-Identifier: Apache-2.0
"""The runtime of one attached model under one plan, and the engine's optimizer step, which calls it.

HybridRuntime    channels, layers, migration and counters
EngineStep       what `engine.step()` and `zero_grad` do around DeepSpeed's own
"""

import math
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ds_hybridep.config import HybridEPConfig
from ds_hybridep.errors import GradientNotReturnedError
from ds_hybridep.experts.migration import is_in_backward
from ds_hybridep.experts.partitioned import full_shape
from ds_hybridep.experts.verification import verify
from ds_hybridep.integration.build import Builder, PlannedLayer, describe, encoding_of
from ds_hybridep.integration.codec_state import CodecState
from ds_hybridep.integration.dense import DENSE
from ds_hybridep.integration.patches import ENGINE, OPTIMIZER, ZERO_OPTIMIZER, Patches
from ds_hybridep.integration.statistics import Statistics
from ds_hybridep.integration.supported import check_optimizer
from ds_hybridep.kernels import Kernels
from ds_hybridep.sync.dense import GroupSync
from ds_hybridep.sync.feedback import Encoding
from ds_hybridep.sync.gradients import StepChanges
from ds_hybridep.sync.undelivered import Target, Undelivered, UndeliveredGradients
from ds_hybridep.tokens.layer import LayerStats
from ds_hybridep.transport.channels import Transport

if TYPE_CHECKING:
    from ds_hybridep.integration.attachment import Attachment


class HybridRuntime:
    """Everything that one attached model has under one plan: channels, layers, migration and counters."""

    def __init__(
        self,
        config: HybridEPConfig,
        transport: Transport,
        kernels: Kernels,
        planned: Sequence[PlannedLayer],
        encoding: Encoding,
        is_boundary: Callable[[], bool],
        sync_groups: Mapping[str, tuple[int, ...]],
        parameters: Callable[[], Iterable[tuple[str, nn.Parameter]]],
    ) -> None:
        self.config, self.transport, self.kernels = config, transport, kernels
        self._planned = tuple(planned)
        self._changes = StepChanges()
        waiting = UndeliveredGradients(
            partial(_targets, transport, self._planned, parameters),
            transport.world_size,
            is_boundary,
            encoding.loss_scale,
            self._changes,
        )
        self._is_stepping = self._is_committed = False
        self.shared_parameters: Callable[[str], Sequence[Tensor]] = lambda _: ()  # flat, by name of the group
        # This makes channels, in the same order on all ranks, and before memory is allocated.
        of_dense = replace(encoding_of(config, is_dense=True), loss_scale=encoding.loss_scale)
        self.syncs = {
            name: GroupSync(
                transport, ranks, name, of_dense if name == DENSE else encoding, self._changes, self.sample.device
            )
            for name, ranks in sync_groups.items()
        }
        ours = [layer for layer in planned if layer.exchange is not None]
        builder = Builder(config, transport, kernels, encoding, self._changes, is_boundary)
        self.layers, self.migration = builder.build(ours)
        self.layer_stats: dict[str, LayerStats] = {name: layer.stats for name, layer in self.layers.items()}
        self.codecs = CodecState(config, transport, planned, self.migration, waiting, self.syncs, self._changes)
        row_bytes = [layer.spec.hidden * layer.spec.sample.element_size() for layer in ours]
        partitions = [layer.partition for layer in ours]
        self.statistics = Statistics(
            transport,
            list(zip(self.layers.values(), partitions, row_bytes, strict=True)),
            counts_dense=bool(self.syncs),
        )

    # -- around the optimizer step ----------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Call before the optimizer step, which may still be skipped."""
        if self.migration is not None:
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
        self._changes.commit()  # first, because it frees what the step needs
        if self.migration is not None:
            self.migration.remember_sent()
        return True

    def verify(self) -> None:
        """Raise VerificationError if ranks hold different weights; all ranks must call at the same step."""
        if self.migration is not None:
            verify(self.migration, self.transport, self.kernels)
        for name, sync in self.syncs.items():
            if sync.encodes_parameters:
                sync.verify([self.kernels.bit_sums(flat) for flat in self.shared_parameters(name)])

    def abandon_step(self) -> None:
        """Call if the optimizer failed in the step that `before_step` announced; some weights may have changed."""
        self._is_stepping = self._is_committed = False
        if self.migration is not None:
            self.migration.after_step(ships=False)

    def after_step(self, *, was_applied: bool, ships: bool = True) -> dict[str, Any] | None:
        """Call right after the optimizer step.  Returns the job's record on rank 0 every `report_interval` steps.

        ships: send the new weights to their replicas; False if another plan follows, which ships all weights.
        """
        self._is_stepping = self._is_committed = False
        if was_applied:
            self._changes.commit()
            if self.migration is not None:
                self.migration.after_step(ships=ships)
        else:
            self._changes.undo()
            if self.migration is not None:
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
        if is_undone and self._changes.notes:
            self._changes.undo()
        if self.migration is not None:
            self.migration.clear_gradients(is_undone=is_undone)

    def refresh(self) -> None:
        """Ship all experts' weights again and wait for them; the next gathers of other parameters are exact."""
        for sync in self.syncs.values():
            sync.memory.gather_exactly()
        if self.migration is not None:
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
        if self.migration is not None:
            self.migration.check_returned("detach")
            self.migration.finish()

    def close(self) -> None:
        """Drop connections and replicas.  Waits for nothing, so that it can be called after an error too."""
        self.codecs.waiting.remove()
        if self.migration is not None:
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
            if name in self.layer_stats:
                vars(self.layer_stats[name]).update(vars(stats))
            else:
                self.layer_stats[name] = stats
        self.codecs.waiting.add(undelivered)

    # -- a load -------------------------------------------------------------------------------------------------

    def forget_gradients(self) -> None:
        """Drop all gradients of the run so far: residuals, and sums that have not returned to their owners."""
        self.codecs.forget()
        for sync in self.syncs.values():
            sync.drop_waiting()
        self.clear_gradients(drops_returned=True)

    # -- what others ask --------------------------------------------------------------------------------------------

    @property
    def sample(self) -> nn.Parameter:
        """A parameter to read dtype and device from."""
        return self._planned[0].spec.sample

    @property
    def token_exchange(self) -> Literal["direct", "hierarchical", "deepspeed"]:
        return self._planned[0].exchange or "deepspeed"

    @property
    def codec_s(self) -> float:
        """Seconds that this rank has spent on encoding and decoding under this plan."""
        counters = [one.counters for one in self.codecs.feedbacks] + [
            sync.memory.counters for sync in self.syncs.values()
        ]
        return sum(one.encode_s + one.decode_s for one in counters)

    @property
    def undelivered_norm(self) -> float:
        """L2 norm of the gradients that this rank has kept back."""
        squares = [feedback.gradients.squared_residual() for feedback in self.codecs.feedbacks]
        return math.sqrt(math.fsum([*squares, *(sync.memory.squared_residual for sync in self.syncs.values())]))

    def describe(self) -> str:
        """Describe the plan in one line, for the log."""
        held_mib = 0.0 if self.migration is None else self.migration.replica_bytes / 2**20
        memory = f"replicas and their gradients {held_mib:.1f} MiB per rank" if self.migration else "no replicas"
        return describe(self._planned, self.config, self.transport.backends, self.kernels.name, memory)


def _targets(
    transport: Transport,
    planned: Sequence[PlannedLayer],
    parameters: Callable[[], Iterable[tuple[str, nn.Parameter]]],
) -> dict[str, Target]:
    """Return this rank's parameters by their names in its model; its experts' are parts of their stacks."""
    targets = [one for layer in planned for one in layer.targets(transport.rank, transport.world_size)]
    of_experts = {id(one.parameter): one for one in targets}
    found = {
        name: of_experts.pop(id(parameter), Target(name, 0, full_shape(parameter).numel(), parameter))
        for name, parameter in parameters()
    }
    return found | {f"{one.name} {one.start}": one for one in of_experts.values()}


class EngineStep:
    """What an engine's optimizer step and its zero_grad do while the engine is attached."""

    def __init__(self, attachment: "Attachment", patches: Patches) -> None:
        self._attachment, self._patches = attachment, patches
        self._engine, self._optimizer = attachment.engine, None
        patches.wrap(ENGINE, "_take_model_step", self._engine, self._wrap_model_step)
        patches.wrap(ENGINE, "zero_grad", self._engine, partial(self._wrap_zero_grad, by_optimizer=False))

    def watch_optimizer(self) -> None:
        """Connect the optimizer as soon as it exists: DeepSpeed makes it after we attach."""
        optimizer = getattr(self._engine, "optimizer", None)
        if not hasattr(optimizer, "zero_grad"):
            return
        if self._optimizer is None:
            check_optimizer(self._engine)
            wrap = partial(self._wrap_zero_grad, by_optimizer=True)
            self._patches.wrap(ZERO_OPTIMIZER, "zero_grad", optimizer, wrap)
            self._optimizer = optimizer
            if isinstance(base := self._engine.basic_optimizer, torch.optim.Optimizer):
                self._patches.keep(OPTIMIZER, "step_pre_hook", self._commit_before(base).remove)
        if self._attachment.dense is not None:
            self._attachment.dense.watch(self._optimizer)

    def _commit_before(self, base: torch.optim.Optimizer) -> RemovableHandle:
        known = weakref.WeakMethod(self._commit)  # a user's optimizer may outlive the engine

        def commit(*_: Any) -> None:
            if (method := known()) is not None:
                method()

        return base.register_step_pre_hook(commit)

    def _commit(self) -> None:
        attachment = self._attachment
        if attachment.runtime.commit() and attachment.dense is not None:
            attachment.dense.commit()

    def _wrap_model_step(self, original: Callable[..., Any]) -> Callable[..., None]:
        def take_model_step(*args: Any, **kwargs: Any) -> None:
            if self._patches.is_on:
                self._take(partial(original, *args, **kwargs))
            else:
                original(*args, **kwargs)

        return take_model_step

    def _take(self, step: Callable[[], None]) -> None:
        self.watch_optimizer()
        attachment = self._attachment
        runtime, planner, dense = attachment.runtime, attachment.planner, attachment.dense
        runtime.before_step()
        try:
            chosen = planner.before_step(runtime) if planner is not None else None
            if dense is not None:
                dense.before_step()
            step()
        except BaseException:
            runtime.abandon_step()
            raise
        finally:
            if dense is not None:
                dense.after_step()
        # Dense parameters and experts travel together.  Experts of several groups must arrive before they are shipped.
        if dense is not None:
            dense.finish_gathers(of_experts_only=True)
        report = runtime.after_step(was_applied=self._engine._step_applied, ships=chosen is None)
        if dense is not None:
            dense.finish_gathers(of_experts_only=False)
        if planner is not None:
            planner.after_step()
        if report is not None:
            attachment.publish(report)
        if chosen is not None and planner is not None:
            attachment.switch(chosen, planner.reason)

    # -- gradients that are forgotten -------------------------------------------------------------------------------

    def _wrap_zero_grad(self, original: Callable[..., Any], *, by_optimizer: bool) -> Callable[..., Any]:
        def zero_grad(*args: Any, **kwargs: Any) -> Any:
            is_for_us = self._patches.is_on and not self._keeps_reduced
            if is_for_us and (by_optimizer or not self._has_accumulator):
                self.clear_gradients()
            return original(*args, **kwargs)

        return zero_grad

    @property
    def _keeps_reduced(self) -> bool:
        """True under ZeRO-2, which keeps reduced gradients whoever calls zero_grad."""
        return bool(getattr(self._engine.optimizer, "partition_gradients", False))

    @property
    def _has_accumulator(self) -> bool:
        """True if gradients are not in `.grad` between micro-steps, so only the optimizer's zero_grad clears them."""
        optimizer = self._engine.optimizer
        return (
            self._engine.zero_optimization_stage() == 3
            or hasattr(optimizer, "clear_hp_grads")
            or bool(getattr(optimizer, "use_grad_accum_attribute", False))
        )

    def clear_gradients(self) -> None:
        """Drop the gradients of replicas because their owners drop theirs."""
        # ZeRO 1 has copied the returned gradients, and its step applies the copy whoever calls zero_grad.  After a
        # step the table still has an entry for each group: None.
        averaged = getattr(self._engine.optimizer, "averaged_gradients", None) or {}
        drops_returned = all(gradients is None for gradients in averaged.values())
        self._attachment.runtime.clear_gradients(drops_returned=drops_returned)

    def owned_in_grad(self) -> list[nn.Parameter]:
        """Return trainable parameters of owned experts if their gradients stay in `.grad` until the step; else []."""
        if self._keeps_reduced or self._has_accumulator:
            return []
        return [p for layer in self._attachment.layers.values() for p in layer.experts.parameters() if p.requires_grad]


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


def loss_scale_of(engine: Any) -> float:
    """Return the factor that gradients are multiplied by now."""
    scale = getattr(engine.optimizer, "loss_scale", None)  # FP16_Optimizer has None in bf16
    return 1.0 if scale is None else float(scale)


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
