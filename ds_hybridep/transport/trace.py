# SPDX-License-Identifier: Apache-2.0
"""A Chrome/Perfetto trace of some steps, with rows for background transfers and for waits in a row.

torch.profiler sees what threads do, not what is on the wire; the transport records when each background transfer
started and ended.  Markers with a time stamp of each clock put both on one time axis.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile

from ds_hybridep.transport.channels import Purpose, Transfer, Transport, Wait

CLOCK_MARK = "hybridep::clock"
TRANSFER_CATEGORY = "hybridep_transfer"
WAIT_CATEGORY = "hybridep_wait"
NUM_MARKS = 10  # a busy machine may stop this thread between the two clocks; the quickest marker counts
_NS_PER_US = 1e3


@contextmanager
def record_trace(transport: Transport, path: str | Path) -> Iterator[None]:
    """Profile the body and write `path` (Chrome trace JSON) when it ends; this rank only."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    transport.records, transport.wait_records = [], []
    try:
        with profile() as profiler:
            around_ns = [_mark() for _ in range(NUM_MARKS)]
            yield
        records, waits = transport.records, transport.wait_records
    finally:
        transport.records, transport.wait_records = None, []
    profiler.export_chrome_trace(str(path))
    trace = json.loads(path.read_text())
    marks_us = sorted(float(event["ts"]) for event in trace["traceEvents"] if event.get("name") == CLOCK_MARK)
    (before_ns, after_ns), mark_us = min(zip(around_ns, marks_us, strict=True), key=lambda one: one[0][1] - one[0][0])
    offset_us = mark_us - (before_ns + after_ns) / 2 / _NS_PER_US
    trace["traceEvents"] += _transfer_events(records, offset_us, transport)
    trace["traceEvents"] += _wait_events(waits, offset_us, transport)
    path.write_text(json.dumps(trace))


def _mark() -> tuple[int, int]:
    """Let the profiler note a time, and return those of this process's clock before and after it."""
    before_ns = time.perf_counter_ns()
    with torch.profiler.record_function(CLOCK_MARK):
        return before_ns, time.perf_counter_ns()


def _wait_events(waits: Sequence[Wait], offset_us: float, transport: Transport) -> list[dict[str, Any]]:
    """Complete events of the waits in a row, with one row per level."""
    levels = transport.cluster.levels
    return [
        {
            **_event(wait.purpose, wait.begin_ns, wait.end_ns, offset_us),
            "cat": WAIT_CATEGORY,
            "pid": "hybridep waits in a row",
            "tid": f"over {levels[wait.level].name}",
        }
        for wait in waits
    ]


def _transfer_events(transfers: Sequence[Transfer], offset_us: float, transport: Transport) -> list[dict[str, Any]]:
    """Complete events of finished transfers, with one row per level and kind."""
    levels = transport.cluster.levels
    return [
        {
            **_event(transfer.purpose, transfer.start_ns, transfer.end_ns, offset_us, bytes=transfer.num_bytes),
            "cat": TRANSFER_CATEGORY,
            "pid": "hybridep transfers",
            "tid": f"{transfer.purpose.kind} over {levels[transfer.channel.level].name}",
        }
        for transfer in transfers
    ]


def _event(purpose: Purpose, begin_ns: int, end_ns: int, offset_us: float, **more: int) -> dict[str, Any]:
    """Name, arguments and time, in the trace's microseconds, of a complete event."""
    return {
        "ph": "X",
        "name": str(purpose),
        "ts": begin_ns / _NS_PER_US + offset_us,
        "dur": (end_ns - begin_ns) / _NS_PER_US,
        "args": {"kind": purpose.kind, "layer": purpose.layer, **more},
    }
