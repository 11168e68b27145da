# SPDX-License-Identifier: Apache-2.0
"""Saves, loads and drops what codecs keep between steps for experts and for data-parallel parameters."""

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ds_hybridep.config import HybridEPConfig
from ds_hybridep.errors import AgreementError
from ds_hybridep.experts import codec_checkpoint
from ds_hybridep.experts.migration import MigrationManager
from ds_hybridep.experts.replicas import Replicas
from ds_hybridep.experts.undelivered import UndeliveredGradients
from ds_hybridep.integration.build import PlannedLayer
from ds_hybridep.integration.dense import DENSE
from ds_hybridep.sync.dense import GroupSync
from ds_hybridep.sync.feedback import Feedback
from ds_hybridep.sync.gradients import StepChanges
from ds_hybridep.sync.memory import undelivered
from ds_hybridep.transport.agreement import agree, announcing_failure
from ds_hybridep.transport.channels import Transport

REMEDY = "copy the files to all nodes, or remove them to begin without what codecs kept"


class CodecState:
    """What the codecs of one plan keep on this rank."""

    def __init__(
        self,
        config: HybridEPConfig,
        transport: Transport,
        planned: Sequence[PlannedLayer],
        migration: MigrationManager | None,
        undelivered: UndeliveredGradients,
        syncs: Mapping[str, GroupSync],
        changes: StepChanges,
    ) -> None:
        self._config, self._transport, self._planned = config, transport, planned
        self._migration, self._undelivered, self._syncs, self._changes = migration, undelivered, syncs, changes

    @property
    def plan(self) -> str:
        """One string of all that the state of lossy codecs depends on: levels, domains, codecs, layers and sums."""
        levels = [
            [level.size, level.domain_size, *(codec.spec for codec in level.all_codecs)]
            for level in self._config.levels
        ]
        layers = [layer.canonical() for layer in self._planned]
        synchronised = {name: [sync.memory.is_mean, sync.memory.sums_for] for name, sync in self._syncs.items()}
        return json.dumps({"levels": levels, "layers": layers, "synchronised": synchronised}, sort_keys=True)

    def save(self, folder: Path, step: int) -> None:
        """Write what lossy codecs keep into a checkpoint's folder, before it is complete; all ranks must call."""
        saved = None
        if self._migration is not None:
            if self.feedbacks:
                self._migration.refresh_stale()
            self._migration.finish()  # a run that resumes begins with up-to-date replicas
        waiting = self._undelivered.parts
        synchronised = {
            name: sync.memory.capture() for name, sync in self._syncs.items() if sync.is_encoded or sync.memory.kept
        }
        if self.feedbacks or waiting or synchronised:
            world_size = self._transport.world_size
            saved = codec_checkpoint.capture(self.replicas, self._owned(), waiting, self.plan, step, world_size)
            saved["synchronised"] = synchronised
        codec_checkpoint.write(folder, self._transport.rank, self._transport.world_size, saved)

    def load(self, folder: Path, step: int) -> str:
        """Take over what `save` wrote; all ranks must call, after weights were loaded.

        Returns:
            Text for the log, if gradients that another plan had kept back are handed over or dropped; else empty.

        Raises:
            AgreementError: some ranks found the state of this plan and others did not.
                Or it is of another plan, and files of some ranks are missing.
        """
        self.forget()
        files = sorted(folder.glob(codec_checkpoint.PATTERN))
        saved = self._of_this_plan(folder, files, step)
        if saved is not None:
            if self._migration is not None:
                self._migration.refresh()
            for name, kept in saved["synchronised"].items():
                self._syncs[name].memory.resume(kept)
            self._undelivered.take_over(codec_checkpoint.restore(self.replicas, self._owned(), saved))
            return ""
        found = codec_checkpoint.undelivered(self._owned(), files, step, self._transport.world_size)
        self._undelivered.take_over(found)
        kept = [part for parts in found.values() for part in parts]
        dropped = self._take_over_residuals(files, step)
        if (sync := self._syncs.get(DENSE)) is not None:
            kept += [one.values for waiting in sync.memory.kept.values() for one in waiting]
        norms = [(_norm(tensors), what) for tensors, what in ((kept, "handed over"), (dropped, "dropped"))]
        told = " and ".join(f"gradients of norm {norm:.3g} are {what}" for norm, what in norms if norm)
        return f"the checkpoint is of another plan: mirrors begin anew, {told}" if told else ""

    def _of_this_plan(self, folder: Path, files: Sequence[Path], step: int) -> dict[str, Any] | None:
        """Return what this rank has saved at a step under this plan; on all ranks None if there is no such file."""
        path = codec_checkpoint.file_of(folder, self._transport.rank)
        with announcing_failure():
            is_lossy = bool(self.feedbacks) or any(sync.is_encoded for sync in self._syncs.values())
            saved = codec_checkpoint.read(path) if is_lossy and path in files else None
            is_same = saved is not None and saved["plan"] == self.plan and saved["step"] == step
            missing = [] if is_same else codec_checkpoint.missing_ranks(files, step)
        what = f"{codec_checkpoint.PATTERN} in {folder}"
        try:
            agree({f"state of lossy codecs in {folder.name}": is_same}, self._transport.timeout_s)
            agree({f"ranks without {what}": missing}, self._transport.timeout_s)
        except AgreementError as error:
            raise AgreementError(
                f"{error} (True: its {what} is of this plan and step); all ranks or none must find theirs: {REMEDY}"
            ) from error
        if missing:
            raise AgreementError(f"{what} of ranks {missing} are missing, and they are of another plan: {REMEDY}")
        return saved if is_same else None

    def _take_over_residuals(self, files: Sequence[Path], step: int) -> list[Tensor]:
        """Add dense gradients that ranks of the saved job had kept back to this rank's next gradients.

        Each rank reads the files of every `world_size`-th rank.  Returns the gradients that are dropped: those of
        experts with several copies, which other ranks may hold now, and all others if DeepSpeed synchronises them.
        """
        dropped: list[Tensor] = []
        rank, world_size = self._transport.rank, self._transport.world_size
        for path in (one for one in files if codec_checkpoint.rank_of(one) % world_size == rank):
            saved = codec_checkpoint.read(path)
            for name, kept in saved.get("synchronised", {}).items() if saved["step"] == step else ():
                if name == DENSE and name in self._syncs:
                    self._syncs[name].memory.take_over(kept)
                else:
                    dropped += [one.values for one in undelivered(kept)]
        return dropped

    def forget(self) -> None:
        """Call after weights were loaded: drops residuals, and lets the next forward ship the weights."""
        self._undelivered.remove()
        self._changes.keep()  # changes from before the load cannot be undone
        if self._migration is not None:
            self._migration.mark_weights_changed()
        for feedback in self.feedbacks:
            feedback.gradients.forget()
        for sync in self._syncs.values():
            sync.memory.forget()

    @property
    def feedbacks(self) -> list[Feedback]:
        return [replicas.feedback for replicas in self.replicas if replicas.feedback is not None]

    @property
    def replicas(self) -> list[Replicas]:
        return [] if self._migration is None else [layer.replicas for layer in self._migration.layers]

    def _owned(self) -> list[codec_checkpoint.OwnedExperts]:
        return [layer.owned(self._transport.rank, self._transport.world_size) for layer in self._planned]


def _norm(tensors: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))
