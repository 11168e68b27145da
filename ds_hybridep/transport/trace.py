# SPDX-License-Identifier: Apache-2.0
"""A Chrome/Perfetto trace of some steps, with the background transfers of weights and gradients as rows of their own.

torch.profiler sees what threads do, not what is on the wire; the transport records when each background transfer
started and ended.  Both are put on one time axis by a marker that has been stamped with both clocks.
"""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from ds_hybridep.transport.channels import TransferRecord, Transport

CLOCK_MARK = "hybridep::clock"
TRANSFER_CATEGORY = "hybridep_transfer"
_NS_PER_US = 1e3


@contextmanager
def record_trace(transport: Transport, path: str | Path) -> Iterator[None]:
    """Profile the body and write `path` (Chrome trace JSON) when it ends; this rank only."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
    transport.records = []
    try:
        with profile(activities=activities) as profiler:
            marked_ns = time.perf_counter_ns()
            with torch.profiler.record_function(CLOCK_MARK):
                pass
            yield
        records = transport.records
    finally:
        transport.records = None
    profiler.export_chrome_trace(str(path))
    trace = json.loads(path.read_text())
    trace["traceEvents"] += _transfer_events(trace["traceEvents"], records, marked_ns, transport)
    path.write_text(json.dumps(trace))


def _transfer_events(
    events: Sequence[dict[str, Any]], records: Sequence[TransferRecord], marked_ns: int, transport: Transport
) -> list[dict[str, Any]]:
    """Complete events of the transfers, one row per level and kind, in the trace's microseconds."""
    mark_us = next(float(event["ts"]) for event in events if event.get("name") == CLOCK_MARK)
    rows = sorted({(record.level, record.purpose.kind) for record in records})
    process = "hybridep transfers"
    named: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": process, "args": {"name": process}}]
    for level, kind in rows:
        name = f"{kind} over {transport.cluster.levels[level].name}"
        row = rows.index((level, kind))
        named.append({"ph": "M", "name": "thread_name", "pid": process, "tid": row, "args": {"name": name}})
    return named + [
        {
            "ph": "X",
            "cat": TRANSFER_CATEGORY,
            "name": str(record.purpose),
            "pid": process,
            "tid": rows.index((record.level, record.purpose.kind)),
            "ts": mark_us + (record.start_ns - marked_ns) / _NS_PER_US,
            "dur": (record.end_ns - record.start_ns) / _NS_PER_US,
            "args": {"kind": record.purpose.kind, "layer": record.purpose.layer, "bytes": record.num_bytes},
        }
        for record in records
    ]
