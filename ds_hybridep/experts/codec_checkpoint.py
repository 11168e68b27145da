# SPDX-License-Identifier: Apache-2.0
"""Saves what lossy codecs keep between steps in a checkpoint: each rank writes and reads its own file.

Under the same plan everything comes back as it was, and training goes on bit for bit.  Under another plan mirrors
start again from the weights.  Undelivered gradients go to the experts' owners, who add them to the next gradients:
each rank opens the files of all ranks, and reads what concerns its own experts.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hybridep.experts.replicas import Replicas
from ds_hybridep.sync.gradients import residual_of

PATTERN = "hybridep_rank_*.pt"


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnedExperts:
    """One layer's experts on this rank, by id.

    shapes: [e, *shape] of each trainable parameter, by name.
    share: one over the number of ranks that own the same experts; the gradients of these ranks are summed in the end.
    """

    name: str
    experts: range
    shapes: Mapping[str, tuple[int, ...]]
    share: float
    device: torch.device


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"hybridep_rank_{rank:05d}.pt"


def rank_of(path: Path) -> int:
    """Return the rank whose file this is."""
    return int(path.stem.rpartition("_")[2])


def missing_ranks(files: Sequence[Path], step: int) -> list[int]:
    """Return the ranks of the job that saved `files` at a step whose files are not there."""
    sizes = (saved["world_size"] for saved in map(read, files) if saved["step"] == step)
    return sorted(set(range(next(sizes, 0))) - set(map(rank_of, files)))


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


def capture(
    layers: Sequence[Replicas],
    owned: Sequence[OwnedExperts],
    undelivered: Mapping[str, Sequence[Tensor]],
    plan: str,
    step: int,
    world_size: int,
) -> dict[str, Any]:
    """Return this rank's state at `plan` and `step`; nothing may be under way, and replicas must hold weights."""
    captured = {replicas.layer: _capture_layer(replicas) for replicas in layers}
    for layer in owned:
        if layer.name in undelivered:
            record = captured.setdefault(layer.name, _nothing())
            waiting = dict(zip(layer.shapes, undelivered[layer.name], strict=True))
            record["undelivered"] = {"experts": list(layer.experts), "gradients": waiting}
    return {"plan": plan, "step": step, "world_size": world_size, "layers": captured}


def restore(
    layers: Sequence[Replicas], owned: Sequence[OwnedExperts], saved: Mapping[str, Any]
) -> dict[str, list[Tensor]]:
    """Restore the state that `capture` saw under the same plan; replicas must already hold exact weights.

    Returns, by layer, what waited for the next gradients of the owned experts.
    """
    for replicas in layers:
        _restore_layer(replicas, saved["layers"][replicas.layer])
    waiting = {layer: saved["layers"].get(layer.name, {}).get("undelivered") for layer in owned}
    return {
        layer.name: [record["gradients"][name].to(layer.device, copy=True) for name in layer.shapes]
        for layer, record in waiting.items()
        if record is not None
    }


def undelivered(
    layers: Sequence[OwnedExperts], files: Sequence[Path], step: int, world_size: int
) -> dict[str, list[Tensor]]:
    """Return the owned experts' gradients that the saved job had not delivered, fp32 [e, *shape], by layer.

    Each owner of an expert takes its share.  Layers without such gradients are left out.  They are sums, which
    DeepSpeed divides by the number of ranks: with another number of ranks they are multiplied, so that the mean stays.
    """
    found: dict[str, dict[str, Tensor]] = {}
    for path in files:
        saved = read(path)
        if saved["step"] != step:
            continue  # of an earlier checkpoint in this folder
        scale = world_size / saved["world_size"]
        for layer in layers:
            for name, experts, kept in _kept(saved["layers"].get(layer.name, {}), set(layer.experts)):
                if layer.name not in found:
                    found[layer.name] = {
                        name: torch.zeros(shape, device=layer.device) for name, shape in layer.shapes.items()
                    }
                total = found[layer.name][name]
                for own_idx, expert in enumerate(layer.experts):
                    if expert in experts:
                        share = kept[experts.index(expert)].to(total.device)
                        total[own_idx].add_(share.view(total.shape[1:]), alpha=layer.share * scale)
    return {name: list(parts.values()) for name, parts in found.items()}


def _kept(record: Mapping[str, Any], wanted: set[int]) -> Iterator[tuple[str, list[int], Tensor]]:
    """Yield (parameter, expert ids, gradients [e, ...]) that one rank had kept back, if it is about wanted experts."""
    for sent in record.get("sent", ()):
        if not wanted.isdisjoint(sent["experts"]):
            _, name = sent["piece"]
            yield name, sent["experts"], residual_of(sent)
    waiting = record.get("undelivered", {"experts": [], "gradients": {}})
    if not wanted.isdisjoint(waiting["experts"]):
        for name, gradients in waiting["gradients"].items():
            yield name, waiting["experts"], gradients


def _capture_layer(replicas: Replicas) -> dict[str, Any]:
    feedback = replicas.feedback
    if feedback is None:
        return _nothing()
    gradients = feedback.gradients.state_dict()
    for record in gradients["sent"]:
        slot, _ = record["piece"]
        record["experts"] = list(replicas.expert_ids(slot))
    return {
        "mirrors": {name: mirror.state_dict() for name, mirror in feedback.mirrors.items()},
        "replicas": [
            {"slot": slot, "values": replica.values, "expected": replica.order.expected}
            for slot, replica in feedback.lossy_replicas.items()
        ],
        **gradients,
    }


def _nothing() -> dict[str, Any]:
    return {"mirrors": {}, "replicas": [], "sent": [], "received": []}


def _restore_layer(replicas: Replicas, saved: Mapping[str, Any]) -> None:
    feedback = replicas.feedback
    if feedback is None:
        return
    for name, mirror in feedback.mirrors.items():
        mirror.load_state_dict(saved["mirrors"][name])
    for record in saved["replicas"]:
        replica = feedback.lossy_replicas[record["slot"]]
        replica.load(record["values"], record["expected"])
    feedback.gradients.load_state_dict(saved)
