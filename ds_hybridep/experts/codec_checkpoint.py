# SPDX-License-Identifier: Apache-2.0
"""What lossy codecs keep between steps, in a checkpoint: each rank writes and reads a file of its own.

At the same plan everything comes back as it was, and training goes on bit for bit.  At another plan mirrors begin anew
from the weights, and gradients that were not delivered yet go to the owners of their experts, who add them to the next
ones; for that a rank reads the files of all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ds_hybridep.experts.replicas import ReplicaStore

PATTERN = "hybridep_rank_*.pt"


def file_of(folder: Path, rank: int) -> Path:
    """Where a rank's state lies in the folder of a checkpoint."""
    return folder / f"hybridep_rank_{rank:05d}.pt"


def capture(stores: Sequence[ReplicaStore], plan: str, step: int) -> dict[str, Any]:
    """This rank's state, as torch.save writes it; nothing may be under way, and replicas must hold the weights.

    plan, step: what the state belongs to; a file of another checkpoint may lie in the same folder.
    """
    return {"plan": plan, "step": step, "layers": {store.layer: _capture_layer(store) for store in stores}}


def forget(stores: Sequence[ReplicaStore]) -> None:
    """Drop what belongs to gradients that were computed before a load."""
    for store in stores:
        store.lossy.encoders.clear()
        store.lossy.decoders.clear()
        store.lossy.undelivered = None


def restore(stores: Sequence[ReplicaStore], saved: Mapping[str, Any]) -> None:
    """Become what `capture` saw at the same plan; replicas must hold exact weights by now."""
    forget(stores)
    for store in stores:
        _restore_layer(store, saved["layers"][store.layer])


@dataclass(frozen=True, kw_only=True)
class OwnedExperts:
    """One layer's experts on this rank.

    Attributes:
        name: of the layer.
        experts: their ids.
        shapes: [e, *shape] of each trainable parameter.
        share: one over the number of ranks that own the same experts, whose gradients are summed in the end.
        device: of the parameters.
    """

    name: str
    experts: range
    shapes: tuple[tuple[int, ...], ...]
    share: float
    device: torch.device

    def record(self, parts: Sequence[Tensor]) -> dict[str, Any]:
        """As `capture` writes a layer of which nothing is kept but gradients that were not delivered."""
        nothing: dict[str, Any] = {"mirrors": {}, "replicas": [], "encoders": [], "decoders": []}
        return {**nothing, "undelivered": [{"experts": list(self.experts), "residuals": list(parts)}]}


def undelivered(layers: Sequence[OwnedExperts], files: Sequence[Path], step: int) -> dict[str, list[Tensor]]:
    """What no rank of the saved job had delivered of the owned experts, fp32 [e, *shape], by layer.

    Each owner of an expert takes its share.  Layers of which nothing was kept are left out.
    """
    found: dict[str, list[Tensor]] = {}
    for path in files:
        saved = torch.load(path, weights_only=True, map_location="cpu")
        if saved["step"] != step:
            continue  # of an earlier checkpoint in this folder
        for layer in layers:
            kept = saved["layers"].get(layer.name, {"encoders": [], "undelivered": []})
            for record in kept["encoders"] + kept["undelivered"]:
                for own_idx, expert in enumerate(layer.experts):
                    if expert not in record["experts"]:
                        continue
                    if layer.name not in found:
                        found[layer.name] = [torch.zeros(shape, device=layer.device) for shape in layer.shapes]
                    saved_idx = record["experts"].index(expert)
                    for total, part in zip(found[layer.name], record["residuals"], strict=True):
                        share = part[saved_idx].to(total.device)
                        total[own_idx].add_(share.view(total.shape[1:]), alpha=layer.share)
    return found


def _capture_layer(store: ReplicaStore) -> dict[str, Any]:
    lossy = store.lossy
    return {
        "mirrors": {name: mirror.state_dict() for name, mirror in lossy.mirrors.items()},
        "replicas": [
            {"slot": slot, "values": replica.values, "expected": replica.order.expected}
            for slot, replica in lossy.replicas.items()
        ],
        "encoders": [
            {"level": level, "slot": slot, "experts": list(store.expert_ids(slot)), **encoder.state_dict()}
            for (level, slot), encoder in lossy.encoders.items()
        ],
        "decoders": [
            {"sender": sender, "slot": slot, "expected": decoder.committed_step}
            for (sender, slot), decoder in lossy.decoders.items()
        ],
        "undelivered": [{"experts": list(store.expert_ids(store.own_index)), "residuals": lossy.undelivered.parts}]
        if lossy.undelivered is not None
        else [],
    }


def _restore_layer(store: ReplicaStore, saved: Mapping[str, Any]) -> None:
    lossy, device = store.lossy, store.weights[0].device
    for name, mirror in lossy.mirrors.items():
        mirror.load_state_dict(saved["mirrors"][name])
    for record in saved["replicas"]:
        replica = lossy.replicas[record["slot"]]
        for value, other in zip(replica.values, record["values"], strict=True):
            value.copy_(other)
        replica.order.expected = record["expected"]
        replica.copy_to(store.weight_parts[record["slot"]])
    for record in saved["encoders"]:
        layout = store.gradient_layouts[record["level"]]
        lossy.encoder(record["level"], record["slot"], layout, device).load_state_dict(record)
    for record in saved["decoders"]:
        layout = store.gradient_layouts[store.level_between(record["sender"], store.domain_ranks[store.own_index])]
        lossy.decoder(record["sender"], record["slot"], layout).expect(record["expected"])
    for record in saved["undelivered"]:
        for own_idx in range(store.num_local):
            store.add_undelivered(own_idx, [part[own_idx] for part in record["residuals"]])
