# SPDX-License-Identifier: Apache-2.0
"""Saves, loads and drops what codecs keep between steps.  In a checkpoint each rank writes and reads its own file.

Under the same plan everything comes back as it was, and training goes on bit for bit.  Under another plan mirrors
start again from the weights, and residuals wait for the next gradients (`sync.undelivered`).
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hybridep.config import HybridEPConfig
from ds_hybridep.errors import AgreementError
from ds_hybridep.experts.codecs import ExpertCodecs
from ds_hybridep.experts.migration import MigrationManager
from ds_hybridep.experts.replicas import Replicas
from ds_hybridep.runtime.build import PlannedLayer
from ds_hybridep.runtime.hot_experts import HotExperts
from ds_hybridep.sync.error_feedback import ErrorFeedback
from ds_hybridep.sync.group_sync import GroupSync
from ds_hybridep.sync.transaction import Transaction
from ds_hybridep.sync.undelivered import Undelivered, UndeliveredGradients, collect, kept_back_in
from ds_hybridep.transport.agreement import agree, announcing_failure
from ds_hybridep.transport.channels import Transport

PATTERN = "hybridep_rank_*.pt"
FORMAT = 3  # of what codecs keep; what another format has kept is handed over like that of another plan
REMEDY = "copy the files to all nodes, or remove them to begin without what codecs kept"


class CodecCheckpoint:
    """What the codecs of one plan keep on this rank."""

    def __init__(
        self,
        config: HybridEPConfig,
        transport: Transport,
        planned: Sequence[PlannedLayer],
        migration: MigrationManager,
        *,
        waiting: UndeliveredGradients,
        syncs: Mapping[str, GroupSync],
        transaction: Transaction,
        hot: HotExperts,
    ) -> None:
        self._config, self._transport, self._planned = config, transport, planned
        self._migration, self._syncs, self._transaction, self.waiting = migration, syncs, transaction, waiting
        self._hot = hot

    @property
    def plan(self) -> str:
        """One string of all that the state of lossy codecs depends on: levels, domains, codecs, layers and sums."""
        levels = [
            [level.size, level.domain_size, *(codec.spec for codec in level.all_codecs)]
            for level in self._config.levels
        ]
        layers = [layer.canonical() for layer in self._planned]
        synchronised = {name: [sync.memory.is_mean, sync.memory.sums_for] for name, sync in self._syncs.items()}
        return json.dumps(
            {"format": FORMAT, "levels": levels, "layers": layers, "synchronised": synchronised}, sort_keys=True
        )

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, folder: Path, step: int) -> None:
        """Write what lossy codecs keep into a checkpoint's folder, before it is complete; all ranks must call."""
        if self.of_experts and self._migration.is_stale:
            self._migration.refresh()
        self._migration.finish()  # a run that resumes begins with up-to-date replicas
        saved = self._state() if self._has_state or self.waiting.is_in_use else None
        about = {"plan": self.plan, "step": step, "world_size": self._transport.world_size}
        write(folder, self._transport.rank, self._transport.world_size, saved and {**about, **saved})

    def _state(self) -> dict[str, Any]:
        """Return everything as of the last applied step; tensors are those in use."""
        return {
            "experts": {one.name: one.codecs.state_dict() for one in self.replicas if one.codecs is not None},
            "synchronised": {name: sync.memory.state_dict() for name, sync in self._groups.items()},
            "undelivered": [(one.name, one.start, one.values) for one in self.waiting.records()],
            "places": self.waiting.places(),
            "hot_experts": self._hot.state_dict(),
        }

    def load(self, folder: Path, step: int) -> str:
        """Take over what `save` wrote; all ranks must call, after weights were loaded.

        Returns:
            Text for the log, if gradients that another plan had kept back are handed over; else empty.

        Raises:
            AgreementError: some ranks found the state of this plan and others did not.
                Or it is of another plan, and files of some ranks are missing.
        """
        self.forget()
        files = sorted(folder.glob(PATTERN))
        saved = self._of_this_plan(folder, files, step)
        if saved is not None:
            if self._hot.layers:
                self._migration.finish()  # nothing may be under way when hot experts change
                # In the middle of an accumulation, replicas have gradients that are still to return.
                self._hot.load_state_dict(saved["hot_experts"], keeps_choice=bool(self._migration.not_returned))
            self._migration.refresh()
            for replicas in self.replicas:
                if replicas.codecs is not None:
                    replicas.codecs.load_state_dict(saved["experts"][replicas.name])
            for name, kept in saved["synchronised"].items():
                self._syncs[name].memory.load_state_dict(kept)
            self.waiting.add(Undelivered(*one) for one in saved["undelivered"])
            self.waiting.add(self._hot.hand_over_others(saved["hot_experts"]))
            return ""
        for path in files:
            saved = read(path)
            if saved["step"] != step:
                continue  # of an earlier checkpoint in this folder
            is_ours = _rank_of(path) % self._transport.world_size == self._transport.rank
            share_of = self.waiting.share_of(is_ours=is_ours)
            self.waiting.add(kept_back_in(saved, saved["world_size"], share_of))
        norm = math.sqrt(sum(float(one.values.double().square().sum()) for one in self.waiting.records()))
        told = f"the checkpoint is of another plan: mirrors begin anew, gradients of norm {norm:.3g} are handed over"
        return told if norm else ""

    def _of_this_plan(self, folder: Path, files: Sequence[Path], step: int) -> dict[str, Any] | None:
        """Return what this rank has saved at a step under this plan; on all ranks None if there is no such file."""
        path = file_of(folder, self._transport.rank)
        with announcing_failure():
            saved = read(path) if self._has_state and path in files else None
            is_same = saved is not None and saved["plan"] == self.plan and saved["step"] == step
            missing = [] if is_same else missing_ranks(files, step)
        what = f"{PATTERN} in {folder}"
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

    def owed_to_experts(self) -> Iterator[tuple[str, Tensor]]:
        """Yield residuals of experts' gradients so far, each with a name; read them in the side stream."""
        for replicas in self.replicas:
            if replicas.codecs is not None:
                yield from _residuals_of(replicas.name, replicas.codecs.feedback)

    def owed_to_others(self) -> Iterator[tuple[str, Tensor]]:
        """Yield residuals of sums of groups so far, and what waits at parameters, each with a name."""
        for name, sync in self._groups.items():
            kept = sync.memory
            for kind, gradients in (("sums", kept.sums), ("results", kept.results), ("rounded", kept.rounded)):
                yield from _residuals_of(f"{name} {kind}", gradients)
        for one in self.waiting.records():
            yield f"{one.name} {one.start}", one.values

    # -- another plan, other weights --------------------------------------------------------------------------------

    def hand_over(self) -> list[Undelivered]:
        """Return what waits at this rank's parameters under the next plan; all must call, with nothing under way."""
        self._transaction.commit()  # the next step uses the gradients that are there
        found = self.undelivered()
        self.waiting.remove()
        for replicas in self.replicas:
            if replicas.is_lossy:
                found += collect(replicas, replicas.domain_ranks, self._transport, self._transport.world_size)()
        return found

    def undelivered(self) -> list[Undelivered]:
        """Return what waits at parameters, and residuals but those of experts, which belong to their owners."""
        return list(kept_back_in({**self._state(), "experts": {}}, self._transport.world_size))

    def forget(self) -> None:
        """Call after weights were loaded: drops residuals, and lets the next forward ship the weights."""
        self._migration.finish_returns()  # a backward that failed may have left some, with packets of before
        self._transaction.commit()  # changes from before the load cannot be undone
        self.waiting.remove()
        self._migration.mark_weights_changed()
        for codecs in self.of_experts:
            codecs.feedback.forget()
        for sync in self._syncs.values():
            sync.memory.forget()

    @property
    def _has_state(self) -> bool:
        return bool(self.of_experts or self._groups or self._hot.layers)

    @property
    def _groups(self) -> dict[str, GroupSync]:
        return {name: sync for name, sync in self._syncs.items() if sync.is_encoded}

    @property
    def of_experts(self) -> list[ExpertCodecs]:
        return [replicas.codecs for replicas in self.replicas if replicas.codecs is not None]

    @property
    def replicas(self) -> list[Replicas]:
        return [layer.replicas for layer in self._migration.layers]


def _residuals_of(name: str, gradients: ErrorFeedback) -> Iterator[tuple[str, Tensor]]:
    for level, span, residual in gradients.undelivered():
        yield f"{name} {level} {span.name} {span.start}", residual


# -- files --------------------------------------------------------------------------------------------------------


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"hybridep_rank_{rank:05d}.pt"


def _rank_of(path: Path) -> int:
    return int(path.stem.rpartition("_")[2])


def missing_ranks(files: Sequence[Path], step: int) -> list[int]:
    """Return the ranks of the job that saved `files` at a step whose files are not there.

    Files without anything that codecs have kept do not count.
    """
    kept = ("experts", "synchronised", "undelivered")
    found = (saved for saved in map(read, files) if saved["step"] == step and any(saved[one] for one in kept))
    sizes = (saved["world_size"] for saved in found)
    return sorted(set(range(next(sizes, 0))) - set(map(_rank_of, files)))


def write(folder: Path, rank: int, world_size: int, saved: Mapping[str, Any] | None) -> None:
    """Write this rank's file, or remove it if there is nothing to save.

    Rank 0 also removes files that an earlier checkpoint of more ranks left in the same folder.
    """
    path = file_of(folder, rank)
    if saved is not None:
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".partial")
        torch.save(saved, unfinished)
        os.replace(unfinished, path)
    else:
        path.unlink(missing_ok=True)
    if rank == 0:
        for other in set(folder.glob(PATTERN)) - {file_of(folder, one) for one in range(world_size)}:
            other.unlink(missing_ok=True)


def read(path: Path) -> dict[str, Any]:
    """Return what `write` has written.  Tensors are memory-mapped: the disk delivers only those in use."""
    saved: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    return saved
