# SPDX-License-Identifier: Apache-2.0
"""All that one attached model has under one plan, driven around the optimizer step."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ds_hybridep.config import HybridEPConfig
from ds_hybridep.errors import AgreementError
from ds_hybridep.experts import codec_checkpoint
from ds_hybridep.experts.layer_spec import LayerSpec
from ds_hybridep.experts.replicas import Replicas
from ds_hybridep.experts.undelivered import UndeliveredGradients, collect
from ds_hybridep.experts.verification import verify
from ds_hybridep.integration.build import Builder, PlannedLayer, describe, encoding_of, plan_layer
from ds_hybridep.integration.statistics import Statistics
from ds_hybridep.kernels import Kernels, load_kernels
from ds_hybridep.sync.collectives import LevelCollectives
from ds_hybridep.sync.feedback import Encoding, Feedback, StepChanges, no_master, no_scale
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
    ) -> None:
        self.config, self.transport, self.kernels = config, transport, kernels
        self._planned = tuple(planned)
        self._changes = StepChanges()
        self._undelivered = UndeliveredGradients(
            {layer.spec.name: layer.spec.experts for layer in planned}, is_boundary, encoding.loss_scale, self._changes
        )
        self._is_stepping = False
        # Channels are made here, in the same order on all ranks, and before memory is taken.
        self.dense = LevelCollectives(transport) if config.dense_sync == "hierarchical" else None
        ours = [layer for layer in planned if layer.exchange is not None]
        builder = Builder(config, transport, kernels, encoding, self._changes, is_boundary)
        self.layers, self.migration = builder.build(ours)
        self.layer_stats: dict[str, LayerStats] = {name: layer.stats for name, layer in self.layers.items()}
        row_bytes = [layer.spec.hidden * layer.spec.sample.element_size() for layer in ours]
        partitions = [layer.partition for layer in ours]
        self.statistics = Statistics(
            transport,
            list(zip(self.layers.values(), partitions, row_bytes, strict=True)),
            counts_dense=self.dense is not None,
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
        """As `experts.verification.verify`, where there are replicas."""
        if self.migration is not None:
            verify(self.migration, self.transport, self.kernels)

    def abandon_step(self) -> None:
        """The optimizer failed in the step that `before_step` announced."""
        self._is_stepping = False

    def after_step(self, *, was_applied: bool, ships: bool = True) -> dict[str, Any] | None:
        """Call right after the optimizer step.  Returns the job's record on rank 0 every `report_interval` steps.

        ships: send the new weights to their replicas; False where another plan follows, which ships them all.
        """
        self._is_stepping = False
        if was_applied:
            if self._changes.notes:
                self._changes.keep()
            if self._undelivered.parts:
                self._undelivered.deliver()
            if self.migration is not None:
                self.migration.after_step(ships=ships)
        else:
            self._changes.undo()
        self.statistics.num_steps += 1
        interval = self.config.report_interval
        return self.statistics.gather_job() if interval and self.statistics.num_steps % interval == 0 else None

    def clear_gradients(self, *, drops_returned: bool) -> None:
        """Forget replica gradients, as zero_grad does for the owners'.

        drops_returned: those that were returned to their owners are forgotten there too.
        """
        # The step's own zero_grad comes after they were used.
        is_undone = drops_returned and not self._is_stepping
        if is_undone and self._changes.notes:
            self._changes.undo()
        if self.migration is not None:
            self.migration.clear_gradients(is_undone=is_undone)

    def refresh(self) -> None:
        """Ship all experts' weights again and wait for them."""
        if self.migration is not None:
            self.migration.refresh()

    def finish(self) -> None:
        """Wait for what is under way; all ranks must call, and not in the middle of an accumulation."""
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
        """Give the owners what senders of gradients had kept back, before another plan; all ranks must call.

        Returns by layer what was not delivered of the owned experts, fp32 [e, *shape] for each trainable parameter.
        """
        self.finish()
        kept = {layer: list(parts) for layer, parts in self._undelivered.remove().items()}
        for replicas in self._replicas:
            if replicas.feedback is not None and replicas.feedback.gradient_layouts:
                collected = collect(replicas, self.transport)
                waiting = kept.get(replicas.layer)
                kept[replicas.layer] = collected if waiting is None else list(map(torch.add, collected, waiting))
        return kept

    def follow(self, earlier: "HybridRuntime", kept: Mapping[str, list[Tensor]]) -> None:
        """Go on counting where `earlier` stopped, and take over what it had not delivered."""
        self.transport.traffic = earlier.transport.traffic
        self.statistics.num_steps = earlier.statistics.num_steps
        for name, stats in earlier.layer_stats.items():
            if name in self.layer_stats:
                vars(self.layer_stats[name]).update(vars(stats))
            else:
                self.layer_stats[name] = stats
        self._undelivered.take_over(kept)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def plan(self) -> str:
        """What lossy codecs' state depends on, in one form: levels, domains, codecs and layers."""
        levels = [
            [level.size, level.domain_size, level.weight_codec.spec, level.gradient_codec.spec]
            for level in self.config.levels
        ]
        return json.dumps({"levels": levels, "layers": [layer.canonical() for layer in self._planned]}, sort_keys=True)

    def save_codecs(self, folder: Path, step: int) -> None:
        """Write what lossy codecs keep into the folder of a checkpoint; all ranks must call, before it is complete."""
        saved = None
        if self.migration is not None:
            if self._feedbacks:
                self.migration.refresh_stale()
            self.migration.finish()  # a run that resumes begins with replicas as new as their owners
        waiting = self._undelivered.parts
        if self._feedbacks or waiting:
            saved = codec_checkpoint.capture(self._replicas, self._owned(), waiting, self.plan, step)
        codec_checkpoint.write(folder, self.transport.rank, self.transport.world_size, saved)

    def load_codecs(self, folder: Path, step: int) -> str:
        """Take over what `save_codecs` wrote; all ranks must call, after weights were loaded.

        Returns:
            What could not be kept, for the log; empty where all is well.

        Raises:
            AgreementError: some ranks found the state of this plan and others did not.
        """
        self.forget_codecs()
        files = sorted(folder.glob(codec_checkpoint.PATTERN))
        if self._feedbacks:
            assert self.migration is not None
            with announcing_failure():
                path = codec_checkpoint.file_of(folder, self.transport.rank)
                saved = codec_checkpoint.read(path) if path in files else None
            is_same = saved is not None and saved["plan"] == self.plan and saved["step"] == step
            try:
                agree({f"state of lossy codecs in {folder.name}": is_same}, self.config.timeout_s)
            except AgreementError as error:
                raise AgreementError(
                    f"{error} (True: its {codec_checkpoint.PATTERN} in {folder} is of this plan and step); all ranks "
                    f"or none must find theirs: copy the files to all nodes, or remove them to begin without what "
                    f"codecs kept"
                ) from error
            if saved is not None and is_same:
                self.migration.refresh()
                self._undelivered.take_over(codec_checkpoint.restore(self._replicas, saved))
                return ""
        found = codec_checkpoint.undelivered(self._owned(), files, step)
        self._undelivered.take_over(found)
        norm = sum(float(part.double().square().sum()) for parts in found.values() for part in parts) ** 0.5
        if not norm:
            return ""
        return f"the checkpoint is of another plan: mirrors begin anew, gradients of norm {norm:.3g} are handed over"

    def forget_codecs(self) -> None:
        """Weights were loaded without the optimizer: the next forward ships them, residuals are dropped."""
        self._undelivered.remove()
        self._changes.keep()  # nothing of before the load can be undone
        if self.migration is not None:
            self.migration.mark_weights_changed()
        for feedback in self._feedbacks:
            feedback.forget_gradients()

    def forget_gradients(self) -> None:
        """What was computed so far is left behind: drop residuals, and sums that did not return to their owners."""
        self.forget_codecs()
        self.clear_gradients(drops_returned=True)

    @property
    def _feedbacks(self) -> list[Feedback]:
        return [replicas.feedback for replicas in self._replicas if replicas.feedback is not None]

    @property
    def _replicas(self) -> list[Replicas]:
        return [] if self.migration is None else [layer.replicas for layer in self.migration.layers]

    def _owned(self) -> list[codec_checkpoint.OwnedExperts]:
        return [layer.owned(self.transport.rank, self.transport.world_size) for layer in self._planned]

    # -- what others ask --------------------------------------------------------------------------------------------

    @property
    def token_exchange(self) -> Literal["direct", "hierarchical", "deepspeed"]:
        return self._planned[0].exchange or "deepspeed"

    @property
    def codec_s(self) -> float:
        """Seconds that this rank has spent on encoding and decoding under this plan."""
        return sum(one.counters.encode_s + one.counters.decode_s for one in self._feedbacks)

    @property
    def undelivered_norm(self) -> float:
        """L2 norm of the gradients that this rank has kept back."""
        encoders = [encoder for feedback in self._feedbacks for encoder in feedback.encoders.values()]
        return math.sqrt(sum(encoder.squared_residual() for encoder in encoders))

    def describe(self) -> str:
        """The plan in one line, for the log."""
        memory = "no replicas" if self.migration is None else self.migration.describe_memory()
        return describe(self._planned, self.config, self.transport.backends, self.kernels.name, memory)


def prepare_runtime(
    config: HybridEPConfig,
    specs: Sequence[LayerSpec],
    is_boundary: Callable[[], bool],
    *,
    master_of: Callable[[nn.Parameter], Tensor | None] = no_master,
    loss_scale: Callable[[], float] = no_scale,
) -> Callable[[], HybridRuntime]:
    """What makes the runtime of a model; all ranks must call at the same point, and make the same use of it.

    All that settings, layers and ranks may be refused for is refused here, before anything is built.

    Args:
        specs: of the model's MoE layers, in the order in which they run.
        is_boundary: True when the backward that runs is the last before the optimizer step.
        master_of, loss_scale: as in `Encoding`.

    Raises:
        PlanError: an expert-parallel group is no regular part of the levels, or cannot be split into the domains.
        AgreementError: ranks differ in config, layers or version, or one is missing.
    """
    with announcing_failure():
        planned = [plan_layer(config, spec) for spec in specs]
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
        }
    generation = agree(payload, config.timeout_s)
    transport = Transport(config.cluster(), config.timeout_s, generation, backends)

    def build() -> HybridRuntime:
        try:
            return HybridRuntime(config, transport, kernels, planned, encoding, is_boundary)
        except BaseException:
            transport.close()
            raise

    return build
