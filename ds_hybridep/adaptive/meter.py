# SPDX-License-Identifier: Apache-2.0
"""What is known of a running job: its links, work, speed and memory, measured at the start and whenever the plan is
looked at.

Transfers of training cannot measure links: they wait for the slower of two ranks, and DeepSpeed's are not visible.
"""

import hashlib
import math
import resource
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import psutil
import torch
from torch import Tensor, nn

from ds_hybridep.adaptive.plans import Job
from ds_hybridep.adaptive.probe import LinkProbe
from ds_hybridep.geometry.cluster import Cluster
from ds_hybridep.plan.costs import row_counts
from ds_hybridep.plan.plan import JobPlan
from ds_hybridep.sync.transaction import is_in_backward
from ds_hybridep.tokens.layer import LayerStats
from ds_hybridep.transport.channels import Transport
from ds_hybridep.transport.streams import synchronize

ROOM_SHARE = 0.9  # of the free memory; packets and other short-lived buffers need the rest


class PlannedRuntime(Protocol):
    """What a planner reads from the runtime; `codec_s` starts at 0 with each plan, the rest continues."""

    transport: Transport
    layer_stats: dict[str, LayerStats]

    @property
    def plan(self) -> JobPlan: ...
    @property
    def codec_s(self) -> float: ...


class LayerCounts(NamedTuple):
    """Of all layers on a rank: forwards, their tokens, repeated forwards; rows sent, and forwards that sent them."""

    calls: int = 0
    tokens: int = 0
    recomputed: int = 0
    rows_sent: int = 0
    sending_calls: int = 0


class RankReport(NamedTuple):
    """What a rank brings to a look at the plan; counts are those since the last look."""

    step_s: float
    free_bytes: float
    working_bytes: float  # that a step needs temporarily
    calls: float
    tokens: float
    recomputed: float
    rows_sent: float
    sending_calls: float


@dataclass
class LayerWatch:
    """Forward pre-hook of one MoE layer: counts its calls and tokens, also while DeepSpeed serves it."""

    calls: int = 0
    tokens: int = 0
    recomputed: int = 0
    begin_s: float | None = None  # when the first call of this optimizer step began

    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        """Counts one forward of the layer.  Evaluations are not counted."""
        if not layer.training or not inputs:
            return
        if self.begin_s is None:
            self.begin_s = time.perf_counter()
        if is_in_backward():
            self.recomputed += 1
        else:
            self.calls += 1
            self.tokens += inputs[0].numel() // inputs[0].shape[-1]


class JobMeter:
    """Keeps what is known of a job.  All ranks must make the same calls, while no other transfer runs.

    micro_steps: returns the micro-steps of an optimizer step.
    """

    def __init__(self, probe: LinkProbe, job: Job, num_layers: int, micro_steps: Callable[[], int]) -> None:
        self.job = job
        self.watches = tuple(LayerWatch() for _ in range(num_layers))
        self.memory = (math.inf, 0.0)  # free bytes of the fullest rank, and bytes that a step needs temporarily
        self.begin_s = self.end_s = 0.0  # of the last optimizer step
        self._probe, self._micro_steps = probe, micro_steps
        self._num_neighbours = ranks_on_host(probe)
        self._counted = LayerCounts()  # at the last look
        self._begin_step, self._begin_exposed_s = 0, dict[str, float]()

    def begin(self, runtime: PlannedRuntime, step: int) -> None:
        """Another plan starts here, after `step` optimizer steps."""
        self._counted = self._totals(runtime)
        self._begin_step, self._begin_exposed_s = step, dict(runtime.transport.traffic.exposed_s)

    def since_begin(self, runtime: PlannedRuntime, step: int) -> dict[str, Any]:
        """Per step of the plan on this rank: seconds waited by kind, and seconds in codecs."""
        steps, before_s = max(step - self._begin_step, 1), self._begin_exposed_s
        exposed_s = runtime.transport.traffic.exposed_s.items()
        waited_s = {kind: (seconds - before_s.get(kind, 0.0)) / steps for kind, seconds in exposed_s}
        return {"waited_s": waited_s, "codec_s": runtime.codec_s / steps}

    def begin_step(self) -> None:
        """Call before the optimizer.  A step begins at its first layer, without the script's work between steps."""
        begins = [watch.begin_s for watch in self.watches if watch.begin_s is not None]
        self.begin_s = min(begins, default=time.perf_counter())
        for watch in self.watches:
            watch.begin_s = None

    def end_step(self) -> float:
        """Seconds of the optimizer step that ends now."""
        synchronize(self._probe.device)
        self.end_s = time.perf_counter()
        return self.end_s - self.begin_s

    def measure(self, runtime: PlannedRuntime, plan: JobPlan | None, step_s: float | None) -> float | None:
        """Update `job` and `memory`.  Returns `step_s` of rank 0; None if that is None or no layer has trained.

        plan: the plan that has run since `begin` or the last call.
        """
        before, self._counted = self._counted, self._totals(runtime)
        since = (now - earlier for now, earlier in zip(self._counted, before, strict=True))
        own = RankReport(step_s or -1.0, *memory_left(self._probe.device, self._num_neighbours), *since)
        reports = [RankReport(*row) for row in self._probe.table(own)]
        # Temporary bytes are taken from the first look: later peaks also contain plans and their changes.
        _, working_bytes = self.memory
        self.memory = (
            min(one.free_bytes for one in reports),
            working_bytes or max(one.working_bytes for one in reports),
        )
        total = RankReport(*map(sum, zip(*reports, strict=True)))
        if not total.calls or reports[0].step_s < 0:
            return None
        workload = replace(
            self.job.workload,
            tokens_per_rank=max(round(total.tokens / total.calls), 1),
            micro_steps=max(self._micro_steps(), 1),
            is_checkpointed=total.recomputed > 0,
        )
        expected = 0.0
        if plan is not None and not plan.is_padded:
            expected = sum(row_counts(plan, replace(workload, row_scale=1.0)))
        if total.sending_calls and expected > 0:
            workload = replace(workload, row_scale=total.rows_sent / total.sending_calls / expected)
        self.job = replace(self.job, cluster=self._links_again(), workload=workload)
        return reports[0].step_s

    def _links_again(self) -> Cluster:
        levels = list(self.job.cluster.levels)
        for index, level in enumerate(levels):
            link = level.link
            if level.size > 1 and link.bandwidth_bytes_per_s is not None:
                rate = self._probe.measure_again(index, link.bandwidth_bytes_per_s, link.latency_s or 0.0)
                levels[index] = replace(level, link=replace(link, bandwidth_bytes_per_s=rate))
        return Cluster(tuple(levels))

    def _totals(self, runtime: PlannedRuntime) -> LayerCounts:
        """On this rank, since the start."""
        return LayerCounts(
            calls=sum(watch.calls for watch in self.watches),
            tokens=sum(watch.tokens for watch in self.watches),
            recomputed=sum(watch.recomputed for watch in self.watches),
            rows_sent=sum(one.rows_sent for one in runtime.layer_stats.values()),
            sending_calls=sum(one.calls for one in runtime.layer_stats.values()),
        )

    def has_room(self, current: JobPlan, plan: JobPlan) -> bool:
        """Whether there is memory for both plans' replicas at the change, and for the new ones in a step."""
        new_bytes, (free_bytes, working_bytes) = self.job.memory(plan).copies_bytes, self.memory
        growth_bytes = new_bytes - self.job.memory(current).copies_bytes
        return max(new_bytes, growth_bytes + working_bytes) <= ROOM_SHARE * free_bytes


def ranks_on_host(probe: LinkProbe) -> int:
    """The number of ranks on this host; all ranks must call."""
    name = float(int.from_bytes(hashlib.sha256(socket.gethostname().encode()).digest()[:6], "big"))
    return probe.table([name]).count([name])


def memory_left(device: torch.device, num_neighbours: int) -> tuple[float, float]:
    """Bytes that this rank may still take, and the bytes by which its peak was above what it holds now.

    num_neighbours: ranks on this host, which share its memory.  A GPU is assumed to belong to one rank.
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
    """Bytes left below the container's memory limit; inactive file cache counts as free.  Infinite without a limit."""
    try:
        limit, used = ((folder / name).read_text().strip() for name in ("memory.max", "memory.current"))
        if limit == "max":
            return math.inf
        counts = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return float(int(limit) - int(used) + int(counts["inactive_file"]))
    except (OSError, ValueError, KeyError):
        return math.inf
