# SPDX-License-Identifier: Apache-2.0
"""Finds the whole parameters of a DeepSpeed checkpoint in the files of all its ranks.

What counts for a parameter, in this order: the fp32 master in the ZeRO partitions; the fragments of a frozen one under
ZeRO 2 and 3; the files of single experts; the state dict of the module.  Parameters keep the names of the training;
those of experts are whole, [E, ...], in the order of the experts.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ds_hybridep.errors import ExportError, UnsupportedError
from ds_hybridep.export.stored import Parameter, Piece, in_files, load, whole

FACTOR_FILES = "hybridep_expert_adapters_*.pt"
_CLASSIC = re.compile(r"(.*\.deepspeed_experts\.)(\d+)(\..*)")
_RANK = re.compile(r"zero_pp_rank_(\d+)_mp_rank_(\d+)_")


def open_checkpoint(folder: Path) -> "Checkpoint":
    """Return all parameters of a checkpoint; ExportError if a file is missing, cut short or of another step."""
    names = [path.name for path in folder.glob("*.pt")]
    states = sorted(name for name in names if name.endswith("model_states.pt") and not name.startswith("layer_"))
    if not states:
        raise ExportError(
            f"{folder} holds no files *model_states.pt; give the folder that save_checkpoint wrote, or one tag in it"
        )
    for name in names:
        if (found := re.search(r"mp_rank_(\d+)", name)) and int(found[1]) > 0:
            raise UnsupportedError(f"{folder / name}: checkpoints of tensor or pipeline parallelism are not exported")
    loaded = [load(folder / name) for name in sorted(states, key=_rank_of)]
    try:
        return Checkpoint(folder, loaded)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, StopIteration) as error:
        raise ExportError(
            f"{folder} is not laid out as by DeepSpeed 0.19 ({type(error).__name__}: {error}); which version wrote it?"
        ) from error


def _rank_of(name: str) -> int:
    found = _RANK.search(name)
    return int(found[1]) if found else 0


class Checkpoint:
    """What is in a checkpoint's folder: `parameters` by name.

    moe_paths: names of AutoEP's layers.  is_classic: has layers of deepspeed.moe.layer.MoE.
    """

    def __init__(self, folder: Path, states: list[dict[str, Any]]) -> None:
        self.parameters: dict[str, Parameter] = {}
        self.folder, self.states, self.state, self.is_classic = folder, states, states[0], False
        self.world_size = int(self.state.get("dp_world_size", 1))
        self.layers: list[dict[str, Any]] = self.state.get("ds_autoep_layers") or []
        self.moe_paths = [layer["module_path"] for layer in self.layers]
        self.is_partitioned = len(states) > 1 or _RANK.search(next(folder.glob("*_model_states.pt")).name) is not None
        # Experts in the order of ranks and of their weights, by the prefix of the weights' names.
        self.placement = {f"{layer['module_path']}.": _placement(layer) for layer in self.layers}
        if self.is_partitioned:
            paths = self._files_of_ranks("model_states.pt")
            if len(paths) != len(self.states):
                raise ExportError(
                    f"{folder} holds {len(self.states)} files *model_states.pt, {len(paths)} of them of ranks; are "
                    f"files of another run in this folder?"
                )
            self._same("global_steps", paths, [state.get("global_steps") for state in self.states])
        zero = (self.state.get("ds_config") or {}).get("zero_optimization") or {}
        if any(self.folder.glob("*zero_pp_rank_*_optim_states.pt")) or zero.get("stage"):
            self._add_masters()
        self._add_fragments()
        self._add_factors()
        self._add_expert_files()
        self._add_module()

    # -- masters in ZeRO's partitions ---------------------------------------------------------------------------

    def _add_masters(self) -> None:
        paths = self._files_of_ranks("optim_states.pt")
        optimizers = [load(path)["optimizer_state_dict"] for path in paths]
        self._same("optimizer step", paths, list(map(_step_of, optimizers)))
        parts: dict[str, dict[int, list[Piece]]] = {}  # by name and rank of the expert-parallel group
        shapes: dict[str, tuple[int, ...]] = {}
        for rank, optimizer in enumerate(optimizers):
            partitions = self._of_zero3 if "fp32_flat_groups" in optimizer else self._of_zero12
            for name, ep_rank, shape, piece in partitions(rank, optimizer):
                parts.setdefault(name, {}).setdefault(ep_rank, []).append(piece)
                shapes[name] = shape
        local_counts = _classic_counts(shapes)
        for name, by_ep_rank in parts.items():
            self._add_assembled(name, shapes[name], by_ep_rank, local_counts)

    def _of_zero12(self, rank: int, optimizer: Mapping[str, Any]) -> Iterable[tuple[str, int, tuple[int, ...], Piece]]:
        counts = optimizer["partition_count"]
        for group, addresses in enumerate(optimizer["param_slice_mappings"]):
            flat = optimizer["single_partition_of_fp32_groups"][group]
            count = counts[group] if isinstance(counts, (list, tuple)) else counts
            ep_rank = self._ep_rank(rank, self.world_size // count)
            for name, address in addresses.items():
                shape = tuple(self.state["param_shapes"][group][name])
                yield name, ep_rank, shape, Piece(flat, address.start, address.numel)

    def _of_zero3(self, rank: int, optimizer: Mapping[str, Any]) -> Iterable[tuple[str, int, tuple[int, ...], Piece]]:
        state = self.states[rank]
        ep_rank_of = {f"{layer['module_path']}.": layer["ep_rank"] for layer in state.get("ds_autoep_layers") or ()}
        partitions = optimizer.get("ds_zero_partition_groups") or []
        for group, shapes in enumerate(state["param_shapes"]):
            partition = partitions[group] if group < len(partitions) else {}
            count, position = partition.get("partition_count", self.world_size), partition.get("partition_rank", rank)
            is_expert = "autoep_expert" in partition.get("families", ())
            offset = 0
            for name, shape in shapes.items():
                numel = math.prod(shape)
                share = -(-numel // count)
                own = max(0, min(share, numel - position * share))
                ep_rank = next(ep for path, ep in ep_rank_of.items() if name.startswith(path)) if is_expert else 0
                yield name, ep_rank, tuple(shape), Piece(optimizer["fp32_flat_groups"][group], offset, own)
                offset += share

    def _ep_rank(self, rank: int, ep_size: int) -> int:
        strided = (self.state.get("ds_config") or {}).get("use_data_before_expert_parallelism", False)
        return rank // (self.world_size // ep_size) if strided else rank % ep_size

    def _add_assembled(
        self, name: str, shape: tuple[int, ...], parts: Mapping[int, list[Piece]], counts: Mapping[str, int]
    ) -> None:
        numel = math.prod(shape)
        for ep_rank, pieces in parts.items():
            if (has := sum(piece.numel for piece in pieces)) != numel:
                raise ExportError(
                    f"{self.folder}: ZeRO's partitions hold {has} elements of {name}, whose shape {list(shape)} has "
                    f"{numel}; are files of another run in this folder?"
                )
            if classic := _CLASSIC.fullmatch(name):
                before, local, after = classic.groups()
                full = f"{before}{ep_rank * counts[before] + int(local)}{after}"
                self.parameters[full] = in_files(shape, pieces)
        if _CLASSIC.fullmatch(name):
            self.is_classic = True
            return
        prefix = next((one for one in self.placement if name.startswith(f"{one}experts.")), None)
        if prefix is None:
            self.parameters[name] = in_files(shape, parts[0])
            return
        placement = self.placement[prefix]
        if len(parts) != len(placement):
            raise ExportError(
                f"{self.folder}: {name} is there for {len(parts)} of {len(placement)} ranks of its experts"
            )
        size = math.prod(shape[1:])
        by_expert = {
            expert: _cut(parts[ep_rank], place * size, size)
            for ep_rank, experts in enumerate(placement)
            for place, expert in enumerate(experts)
        }
        self._add_experts(name, (len(by_expert), *shape[1:]), by_expert)

    def _add_experts(self, name: str, shape: tuple[int, ...], by_expert: Mapping[int, Sequence[Piece]]) -> None:
        pieces = [piece for expert in range(shape[0]) for piece in by_expert[expert]]
        self.parameters[name] = in_files(shape, pieces)

    # -- what has no master -------------------------------------------------------------------------------------

    def _add_fragments(self) -> None:
        for name, shape in (self.state.get("frozen_param_shapes") or {}).items():
            if name in self.parameters:
                continue
            left, pieces = math.prod(shape), []
            for state in self.states:
                fragment = state["frozen_param_fragments"][name]
                pieces.append(Piece(fragment, 0, min(fragment.numel(), left)))
                left -= pieces[-1].numel
            if left:
                raise ExportError(f"{self.folder}: {name} is incomplete in the files *model_states.pt of all ranks")
            self.parameters[name] = in_files(shape, pieces)

    def _add_factors(self) -> None:
        """Add the factors of experts that hybridep writes beside DeepSpeed's files."""
        found: dict[str, dict[int, Piece]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        steps: dict[Path, Any] = {}
        for path in sorted(self.folder.glob(FACTOR_FILES)):
            for layer, entry in load(path).items():
                steps[path] = entry.get("step")
                for key, stored in entry["factors"].items():
                    name, size = f"{layer}.experts.{key}", math.prod(stored.shape[1:])
                    shapes[name] = stored.shape[1:]
                    for place, expert in enumerate(entry["experts"]):
                        found.setdefault(name, {})[expert] = Piece(stored, place * size, size)
        self._same("step", list(steps), list(steps.values()))
        for name, by_expert in found.items():
            count = next(
                one["num_experts"] for one in self.layers if name.startswith(f"{one['module_path']}.experts.")
            )
            if missing := sorted(set(range(count)) - set(by_expert)):
                raise ExportError(
                    f"{self.folder}: {name} of the experts {missing} is in none of the files {FACTOR_FILES}"
                )
            if name not in self.parameters:
                self._add_experts(name, (count, *shapes[name]), {expert: (one,) for expert, one in by_expert.items()})

    def _add_expert_files(self) -> None:
        """Add what has no master from the files of single experts."""
        left = [one for one in self.layers if f"{one['module_path']}.experts.w1" not in self.parameters]
        counts = {layer["moe_layer_id"]: layer["num_experts"] for layer in left}
        if not self.layers:
            counts = dict(enumerate(self.state.get("num_experts") or ()))
            self.is_classic = any(counts.values())
        by_name: dict[str, dict[int, list[Piece]]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for layer, expert in ((layer, expert) for layer, count in counts.items() for expert in range(count)):
            path = self.folder / f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"
            for key, stored in load(path).items():
                if not isinstance(stored, Tensor):
                    continue
                if self.is_classic:
                    self.parameters.setdefault(key, whole(stored))
                    continue
                name, _, number = key.rpartition(".")  # M.experts.w1.3
                by_name.setdefault(name, {})[int(number)] = [Piece(stored, 0, stored.numel())]
                shapes[name] = (counts[layer], *stored.shape)
        for name, by_expert in by_name.items():
            self._add_experts(name, shapes[name], by_expert)

    def _add_module(self) -> None:
        for name, stored in self.state["module"].items():
            if isinstance(stored, Tensor) and (stored.numel() or not self.is_partitioned):  # ZeRO 3 leaves empty ones
                self.parameters.setdefault(name, whole(stored))
        for name, source in (self.state.get("shared_params") or {}).items():
            if source in self.parameters:
                self.parameters[name] = self.parameters[source]

    # -- checks -------------------------------------------------------------------------------------------------

    def _files_of_ranks(self, ending: str) -> list[Path]:
        """Return the files with this ending, in the order of ranks."""
        paths = sorted(self.folder.glob(f"*zero_pp_rank_*_{ending}"), key=lambda path: _rank_of(path.name))
        ranks = [_rank_of(path.name) for path in paths]
        if missing := sorted(set(range(self.world_size)) - set(ranks)):
            path = self.folder / f"zero_pp_rank_{missing[0]}_mp_rank_00_{ending}"
            raise ExportError(
                f"{path} is missing: the checkpoint is of {self.world_size} ranks, and {missing} have no files here; "
                f"copy them from their machines"
            )
        if len(ranks) != self.world_size:
            raise ExportError(
                f"{self.folder} holds {len(ranks)} files *_{ending}, and the checkpoint is of {self.world_size} "
                f"ranks; are files of another run in this folder?"
            )
        return paths

    def _same(self, what: str, paths: Sequence[Path], values: Sequence[Any]) -> None:
        for path, value in zip(paths, values, strict=True):
            if value != values[0]:
                raise ExportError(
                    f"{path} is of {what} {value}, the file of rank 0 of {what} {values[0]}; files of all ranks must "
                    f"come from one save"
                )


def _placement(layer: Mapping[str, Any]) -> list[list[int]]:
    if (descriptor := layer.get("expert_placement")) is not None:
        return [entry["experts"] for entry in sorted(descriptor["ranks"], key=lambda entry: entry["rank"])]
    count = layer["num_local_experts"]  # DeepSpeed before 0.19.8 gives experts out in the order of ranks
    return [list(range(first, first + count)) for first in range(0, layer["num_experts"], count)]


def _classic_counts(names: Iterable[str]) -> dict[str, int]:
    """Return how many experts each layer of deepspeed.moe.layer.MoE has on a rank, by what is before their numbers."""
    counts: dict[str, int] = {}
    for name in names:
        if found := _CLASSIC.fullmatch(name):
            counts[found[1]] = max(counts.get(found[1], 0), int(found[2]) + 1)
    return counts


def _cut(pieces: Sequence[Piece], start: int, numel: int) -> list[Piece]:
    """Return the pieces of elements `start` to `start + numel` of what `pieces` hold one after the other."""
    cut, place = [], 0
    for piece in pieces:
        first, last = max(start, place), min(start + numel, place + piece.numel)
        if first < last:
            cut.append(Piece(piece.stored, piece.start + first - place, last - first))
        place += piece.numel
    return cut


def _step_of(optimizer: Mapping[str, Any]) -> Any:
    """Return the step that an optimizer's state says, None where it says none."""
    base = optimizer.get("base_optimizer_state", optimizer.get("optimizer_state_dict"))
    if not isinstance(base, Mapping):
        return None
    for entry in (*(base.get("state") or {}).values(), *(base.get("param_groups") or ())):
        step = entry.get("step") if isinstance(entry, Mapping) else None
        if step is not None:
            return float(step)
    return None
