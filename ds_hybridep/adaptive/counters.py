# SPDX-License-Identifier: Apache-2.0
"""What a rank counts of its work, and the memory that it has left."""

import math
import resource
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import psutil
import torch
from torch import Tensor, nn

from ds_hybridep.experts.migration import is_in_backward
from ds_hybridep.tokens.layer import LayerStats
from ds_hybridep.transport.channels import Transport


class RunningPlan(Protocol):
    """What a planner reads of the runtime that carries out the plan; counters go on from plan to plan.

    transport: with the bytes sent and the seconds waited.
    layer_stats: of each layer the calls and the rows sent.
    token_exchange: in use.
    codec_s: seconds that this rank has spent on encoding and decoding under this plan.
    """

    @property
    def transport(self) -> Transport: ...
    @property
    def layer_stats(self) -> Mapping[str, LayerStats]: ...
    @property
    def token_exchange(self) -> Literal["direct", "hierarchical", "deepspeed"]: ...
    @property
    def codec_s(self) -> float: ...


@dataclass
class LayerWatch:
    """Counts what goes into one MoE layer, whoever serves it; a forward pre-hook of the layer."""

    calls: int = 0
    tokens: int = 0
    recomputed: int = 0
    begin_s: float | None = None  # of the first call in this optimizer step

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Before a forward of the layer; evaluations are not counted."""
        if not layer.training or not inputs:
            return
        if self.begin_s is None:
            self.begin_s = time.perf_counter()
        if is_in_backward():
            self.recomputed += 1
        else:
            self.calls += 1
            self.tokens += inputs[0].numel() // inputs[0].shape[-1]


class Totals(NamedTuple):
    """Work of this rank: calls of layers, their tokens and recomputations; rows sent, and the calls that sent them."""

    calls: float = 0
    tokens: float = 0
    recomputed: float = 0
    rows: float = 0
    row_calls: float = 0

    @classmethod
    def of(cls, watches: Iterable[LayerWatch], stats: Iterable[LayerStats]) -> "Totals":
        """As counted so far."""
        counts = [[watch.calls, watch.tokens, watch.recomputed, 0, 0] for watch in watches]
        counts += [[0, 0, 0, one.rows_sent, one.calls] for one in stats]
        return cls(*map(sum, zip(*counts, strict=True)))


def memory_left(device: torch.device, num_neighbours: int) -> tuple[float, float]:
    """Bytes that this rank may still take, and by how many more than now it has had at most.

    num_neighbours: ranks on this host, which share its memory; a GPU is taken to be of one rank alone.
    """
    if device.type == "cuda":
        allocated = torch.cuda.memory_allocated(device)
        cached = torch.cuda.memory_reserved(device) - allocated
        peak = torch.cuda.max_memory_allocated(device)
        return float(torch.cuda.mem_get_info(device)[0] + cached), float(peak - allocated)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    free_bytes = min(psutil.virtual_memory().available, _left_in_container())
    return free_bytes / num_neighbours, float(max(peak_bytes - psutil.Process().memory_info().rss, 0))


def _left_in_container(folder: Path = Path("/sys/fs/cgroup")) -> float:
    """Bytes below this process's memory limit, files read long ago not counted; infinite where there is no limit."""
    try:
        limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
        if limit == "max":
            return math.inf
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return float(int(limit) - int(used) + int(counts["inactive_file"]))
    except (OSError, ValueError, KeyError):
        return math.inf
