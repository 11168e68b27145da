# SPDX-License-Identifier: Apache-2.0
"""Everything that one engine has under one plan; `prepare_runtime` makes it on all ranks together."""

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ds_hybridep.config import HybridEPConfig
from ds_hybridep.errors import GradientNotReturnedError
from ds_hybridep.experts.partitioned import full_shape
from ds_hybridep.experts.verification import verify
from ds_hybridep.kernels import Kernels, load_kernels
from ds_hybridep.plan.plan import JobPlan
from ds_hybridep.runtime.build import DENSE, Facts, PlannedLayer, build_layers, describe, encoding_of, plan_layer
from ds_hybridep.runtime.codec_state import CodecCheckpoint
from ds_hybridep.runtime.hot_experts import HotExperts
from ds_hybridep.runtime.statistics import RuntimeStatistics
from ds_hybridep.sync.group_sync import GroupSync
from ds_hybridep.sync.messages import squared_norm
from ds_hybridep.sync.transaction import Transaction
from ds_hybridep.sync.undelivered import GradientTarget, Undelivered, UndeliveredGradients
from ds_hybridep.tokens.layer import LayerStats
from ds_hybridep.transport.agreement import agree, announcing_failure, together
from ds_hybridep.transport.channels import Transport
from ds_hybridep.transport.job import backends_of, longest_wait_s
from ds_hybridep.transport.job_link import LinkSettings
from ds_hybridep.version import __version__


def prepare_runtime(config: HybridEPConfig, facts: Facts) -> Callable[[], "HybridRuntime"]:
    """Return the function that makes the runtime of a plan.  All ranks must call both, each at the same point.

    All checks of settings, layers and ranks are made here, before anything is built.  If the function fails on one
    rank, it raises AgreementError on all, and leaves nothing.

    Raises:
        PlanError: an expert-parallel group is not a regular part of the levels, or cannot be split into the domains.
        AgreementError: ranks differ in config, layers or version, or a rank is missing.
    """
    with announcing_failure():
        planned = [plan_layer(config, spec) for spec in facts.specs]
        synchronised = facts.sync_groups(config)
        device = facts.specs[0].sample.device
        kernels = load_kernels(config.advanced.kernels, device, config.advanced.dispatch_sms)
        backends = backends_of(config, device)
        link = LinkSettings.of(config)
        payload = {
            "version": __version__,
            "torch": torch.__version__,
            "kernels": kernels.name,
            "backends": list(backends),
            "config": config.canonical(),
            "layers": [layer.canonical() for layer in planned],
            "synchronised": sorted(synchronised),
        }
    generation = agree(payload, config.timeout_s)

    def build() -> HybridRuntime:
        made = ExitStack()
        with together(config.timeout_s, made.close):
            wait_s = longest_wait_s(config.timeout_s)
            transport = Transport(config.cluster(), wait_s, generation, backends, link=link)
            made.callback(transport.close)
            runtime = HybridRuntime(config, facts, transport, kernels, planned=planned, sync_groups=synchronised)
            made.callback(runtime.close)
        return runtime

    return build


class StepState(Enum):
    """Where the optimizer step is: `before_step`, `commit` and `after_step` or `abandon_step` go through them."""

    NONE = "between two steps: zero_grad undoes what codecs have noted"
    ANNOUNCED = "about to run, or to be skipped"
    CHANGING = "parameters change: the transaction is committed"


class HybridRuntime:
    """Everything that one engine has under one plan: channels, layers, migration and counters."""

    def __init__(
        self,
        config: HybridEPConfig,
        facts: Facts,
        transport: Transport,
        kernels: Kernels,
        *,
        planned: Sequence[PlannedLayer],
        sync_groups: Mapping[str, tuple[int, ...]],
    ) -> None:
        self.config, self.transport, self.kernels = config, transport, kernels
        self._planned = tuple(planned)
        self.transaction = Transaction()
        waiting = UndeliveredGradients(
            partial(_targets, transport, self._planned, facts.parameters),
            transport.world_size,
            facts.is_boundary,
            facts.loss_scale,
            transaction=self.transaction,
        )
        self.step_state = StepState.NONE
        self.shared_parameters: Callable[[str], Sequence[Tensor]] = lambda _: ()  # flat, by name of the group
        # This makes channels, in the same order on all ranks, and before memory is allocated.
        encoding = facts.complete(encoding_of(self.plan, config.advanced.kernels))
        of_dense = facts.complete(encoding_of(self.plan, config.advanced.kernels, is_dense=True))
        device = facts.specs[0].sample.device
        self.syncs = {
            name: GroupSync(
                transport,
                ranks,
                name,
                of_dense if name == DENSE else encoding,
                transaction=self.transaction,
                device=device,
            )
            for name, ranks in sync_groups.items()
        }
        ours = [layer for layer in planned if layer.exchange is not None]
        self.layers, self.migration = build_layers(
            ours,
            config,
            transport,
            kernels,
            encoding=encoding,
            transaction=self.transaction,
            is_boundary=facts.is_boundary,
        )
        self.layer_stats: dict[str, LayerStats] = {name: layer.stats for name, layer in self.layers.items()}
        pairs = [(self.layers[layer.spec.name], layer) for layer in ours]
        self.hot = HotExperts(config, transport, pairs)
        if self.hot.layers:
            for one in self.migration.layers:
                one.gradients.before_start = self.hot.send_counts
        self.codec_state = CodecCheckpoint(
            config,
            transport,
            planned,
            self.migration,
            waiting=waiting,
            syncs=self.syncs,
            transaction=self.transaction,
            hot=self.hot,
        )
        self.statistics = RuntimeStatistics(transport, pairs, self.hot, counts_dense=bool(self.syncs))

    # -- around the optimizer step ----------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Call before the optimizer step, which may still be skipped.

        Raises GradientNotReturnedError if replicas hold gradients that have not returned to their owners.
        """
        self.migration.before_step()
        interval, steps = self.config.advanced.verify_interval, self.statistics.num_steps
        if interval and steps and steps % interval == 0:
            self.verify()
        self.step_state = StepState.ANNOUNCED

    def commit(self) -> bool:
        """Call before each change of parameters in the optimizer step, which is not skipped any more.

        Residuals, states of codecs and packet numbers stay as the gradients of this step have left them.

        Returns True for the first change of a step.
        """
        if self.step_state != StepState.ANNOUNCED:
            return False
        self.step_state = StepState.CHANGING
        self.transaction.commit()  # first, because it frees memory that the step needs
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
        self.step_state = StepState.NONE
        self.migration.after_step(ships=False)

    def after_step(self, *, was_applied: bool, ships: bool = True) -> dict[str, Any] | None:
        """Call right after the optimizer step.  Returns the job's record on rank 0 every `report_interval` steps.

        ships: send the new weights to their replicas; False if another plan follows, which ships all weights.
        """
        self.step_state = StepState.NONE
        if was_applied:
            self.transaction.commit()  # again: an optimizer with a step of its own does not say when it begins
        if self.hot.layers and (found := self.hot.after_step(was_applied=was_applied)):
            self.codec_state.waiting.add(found)
        if was_applied:
            self.migration.after_step(ships=ships)
        else:
            self.transaction.undo()
            self.migration.skip_step()
        self.statistics.num_steps += 1
        self.statistics.step_ends.append(time.monotonic())
        interval = self.config.report_interval
        return self.statistics.gather_job() if interval and self.statistics.num_steps % interval == 0 else None

    def clear_gradients(self, *, drops_returned: bool) -> None:
        """Drop replica gradients, as zero_grad drops the owners' gradients.

        drops_returned: the owners also drop the gradients that were already returned to them.
        """
        # The step calls zero_grad itself; `after_step` then commits or undoes.
        if drops_returned and self.step_state == StepState.NONE:
            self.undo_gradients()
        self.migration.drop_gradients()

    def undo_gradients(self) -> None:
        """Undo what codecs have noted of gradients since the last step: no step will use them."""
        self.migration.finish_returns()  # what is under way would change more
        self.transaction.undo()

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
        self.codec_state.waiting.remove()
        self.migration.release()
        self.transport.close()

    # -- a change of plan -------------------------------------------------------------------------------------------

    def hand_over(self) -> list[Undelivered]:
        """Return what codecs have not delivered, before another plan; all ranks must call."""
        self.finish()
        return self.codec_state.hand_over()

    def follow(self, earlier: "HybridRuntime", undelivered: Sequence[Undelivered]) -> None:
        """Go on counting where `earlier` stopped, and add what it had not delivered to the next gradients."""
        self.transport.traffic = earlier.transport.traffic
        self.statistics.num_steps = earlier.statistics.num_steps
        for name, stats in earlier.layer_stats.items():
            vars(self.layer_stats.setdefault(name, stats)).update(vars(stats))
        self.codec_state.waiting.add(undelivered)
        self.hot.follow(earlier.hot)

    # -- a load -------------------------------------------------------------------------------------------------

    def forget_gradients(self) -> None:
        """Drop all gradients of the run so far: residuals, and sums that have not returned to their owners."""
        self.codec_state.forget()
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
        counters = [one.counters for one in self.codec_state.of_experts]
        counters += [sync.memory.counters for sync in self.syncs.values()]
        return sum(one.encode_s + one.decode_s for one in counters)

    @property
    def undelivered_norm(self) -> float:
        """L2 norm of the gradients that this rank has kept back."""
        squares = [one.feedback.squared_residual() for one in self.codec_state.of_experts]
        squares += [squared_norm(one.values) for one in self.codec_state.waiting.records()]
        return math.sqrt(math.fsum([*squares, *(sync.memory.squared_residual for sync in self.syncs.values())]))

    def describe(self) -> str:
        """Describe the plan in one line, for the log."""
        held = f"replicas and their gradients {self.migration.replica_bytes / 2**20:.1f} MiB per rank"
        memory = held if self.migration.layers else "no replicas"
        return describe(self._planned, self.config, self.transport.backends, self.kernels.name, memory=memory)


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
