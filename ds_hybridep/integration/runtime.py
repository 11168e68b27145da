# SPDX-License-Identifier: Apache-2.0
"""The runtime of one attached model under one plan; `Attachment` calls it around the optimizer step."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ds_hybridep.config import HybridEPConfig
from ds_hybridep.errors import GradientNotReturnedError
from ds_hybridep.experts.layer_spec import LayerSpec
from ds_hybridep.experts.undelivered import UndeliveredGradients, collect
from ds_hybridep.experts.verification import verify
from ds_hybridep.integration.build import Builder, PlannedLayer, describe, encoding_of, plan_layer
from ds_hybridep.integration.codec_state import CodecState
from ds_hybridep.integration.dense import DENSE
from ds_hybridep.integration.statistics import Statistics
from ds_hybridep.kernels import Kernels, load_kernels
from ds_hybridep.sync.dense import GroupSync
from ds_hybridep.sync.feedback import Encoding, StepChanges, no_master, no_scale
from ds_hybridep.tokens.layer import LayerStats
from ds_hybridep.transport.agreement import agree, announcing_failure
from ds_hybridep.transport.channels import Transport
from ds_hybridep.transport.job import backends_of
from ds_hybridep.version import __version__


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
    ) -> None:
        self.config, self.transport, self.kernels = config, transport, kernels
        self._planned = tuple(planned)
        self._changes = StepChanges()
        self._undelivered = UndeliveredGradients(
            {layer.spec.name: layer.spec.experts for layer in planned}, is_boundary, encoding.loss_scale, self._changes
        )
        self._is_stepping = False
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
        self.codecs = CodecState(
            config, transport, planned, self.migration, self._undelivered, self.syncs, self._changes
        )
        row_bytes = [layer.spec.hidden * layer.spec.sample.element_size() for layer in ours]
        partitions = [layer.partition for layer in ours]
        self.statistics = Statistics(
            transport,
            list(zip(self.layers.values(), partitions, row_bytes, strict=True)),
            counts_dense=bool(self.syncs),
        )

    # -- around the optimizer step ----------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Call right before the optimizer changes parameters."""
        if self.migration is not None:
            self.migration.before_step()
        interval, steps = self.config.advanced.verify_interval, self.statistics.num_steps
        if interval and steps and steps % interval == 0:
            self.verify()
        self._is_stepping = True

    def verify(self) -> None:
        """Raise VerificationError if ranks hold different weights; all ranks must call at the same step."""
        if self.migration is not None:
            verify(self.migration, self.transport, self.kernels)
        for name, sync in self.syncs.items():
            if sync.encodes_parameters:
                sync.verify([self.kernels.bit_sums(flat) for flat in self.shared_parameters(name)])

    def abandon_step(self) -> None:
        """Call if the optimizer failed in the step that `before_step` announced; some weights may have changed."""
        self._is_stepping = False
        if self.migration is not None:
            self.migration.after_step(ships=False)

    def after_step(self, *, was_applied: bool, ships: bool = True) -> dict[str, Any] | None:
        """Call right after the optimizer step.  Returns the job's record on rank 0 every `report_interval` steps.

        ships: send the new weights to their replicas; False if another plan follows, which ships all weights.
        """
        self._is_stepping = False
        if was_applied:
            if self._changes.notes:
                self._changes.keep()
            for sync in self.syncs.values():
                sync.memory.settle()
            if self._undelivered.parts:
                self._undelivered.deliver()
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
        self._undelivered.remove()
        if self.migration is not None:
            self.migration.release()
        self.transport.close()

    # -- a change of plan -------------------------------------------------------------------------------------------

    def hand_over(self) -> dict[str, list[Tensor]]:
        """Give the owners the gradients that senders had kept back, before another plan; all ranks must call.

        Returns the undelivered gradients of owned experts by layer, fp32 [e, *shape] for each trainable parameter.
        """
        self.finish()
        self._changes.keep()  # the next step uses the gradients that are there
        kept = {layer: list(parts) for layer, parts in self._undelivered.remove().items()}
        for replicas in self.codecs.replicas:
            if replicas.feedback is not None and replicas.feedback.is_lossy_for_gradients:
                collected = collect(replicas, self.transport)
                waiting = kept.get(replicas.layer)
                kept[replicas.layer] = collected if waiting is None else list(map(torch.add, collected, waiting))
        return kept

    def follow(self, earlier: "HybridRuntime", kept: Mapping[str, list[Tensor]]) -> float:
        """Go on counting where `earlier` stopped, and take over what it had not delivered.

        Returns the norm of the gradients that are lost because DeepSpeed synchronises them from now on.
        """
        self.transport.traffic = earlier.transport.traffic
        self.statistics.num_steps = earlier.statistics.num_steps
        for name, stats in earlier.layer_stats.items():
            if name in self.layer_stats:
                vars(self.layer_stats[name]).update(vars(stats))
            else:
                self.layer_stats[name] = stats
        self._undelivered.take_over(kept)
        lost = 0.0
        for name, sync in earlier.syncs.items():
            if name in self.syncs:
                self.syncs[name].memory.take_over(sync.memory.capture())
            else:
                lost += sync.memory.sums().squared_residual
        return math.sqrt(lost)

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
        feedbacks = self.codecs.feedbacks + [one for sync in self.syncs.values() for one in sync.memory.feedbacks]
        encoders = [encoder for feedback in feedbacks for encoder in feedback.encoders.values()]
        return math.sqrt(sum(encoder.squared_residual() for encoder in encoders))

    def describe(self) -> str:
        """Describe the plan in one line, for the log."""
        memory = "no replicas" if self.migration is None else self.migration.describe_memory()
        return describe(self._planned, self.config, self.transport.backends, self.kernels.name, memory)


def prepare_runtime(
    config: HybridEPConfig,
    specs: Sequence[LayerSpec],
    is_boundary: Callable[[], bool],
    *,
    sync_groups: Callable[[HybridEPConfig], Mapping[str, tuple[int, ...]]] = lambda _: {},
    master_of: Callable[[nn.Parameter], Tensor | None] = no_master,
    loss_scale: Callable[[], float] = no_scale,
) -> Callable[[], HybridRuntime]:
    """Return the function that makes a model's runtime.  All ranks must call both, each at the same point.

    All checks of settings, layers and ranks are made here, before anything is built.

    Args:
        specs: describe the model's MoE layers, in the order in which they run.
        is_boundary: returns True if the running backward is the last before the optimizer step.
        sync_groups: returns, by name, the ranks that hold the same parameters, if settings synchronise these by level.
        master_of, loss_scale: as in `Encoding`.

    Raises:
        PlanError: an expert-parallel group is not a regular part of the levels, or cannot be split into the domains.
        AgreementError: ranks differ in config, layers or version, or a rank is missing.
    """
    with announcing_failure():
        planned = [plan_layer(config, spec) for spec in specs]
        synchronised = sync_groups(config)
        encoding = replace(encoding_of(config), master_of=master_of, loss_scale=loss_scale)
        device = specs[0].sample.device
        kernels = load_kernels(config.advanced.kernels, device.type, config.advanced.dispatch_sms)
        backends = backends_of(config, device)
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
    transport = Transport(config.cluster(), config.timeout_s, generation, backends)

    def build() -> HybridRuntime:
        try:
            return HybridRuntime(config, transport, kernels, planned, encoding, is_boundary, synchronised)
        except BaseException:
            transport.close()
            raise

    return build
