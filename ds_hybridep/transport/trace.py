# SPDX-License-Identifier: Apache-2.0
"""A Chrome/Perfetto trace of some steps, with rows for background transfers and loads of ranks.

torch.profiler sees what threads do, not what is on the wire; the transport records when each background transfer
started and ended.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.profiler import profile

from ds_hybridep.transport.channels import Transfer, Transport

TRANSFER_CATEGORY = "hybridep_transfer"
_NS_PER_US = 1e3


@contextmanager
def record_trace(
    transport: Transport, path: str | Path, loads: Callable[[], Mapping[str, Mapping[str, float]]]
) -> Iterator[None]:
    """Profile the body and write `path` (Chrome trace JSON) when it ends; this rank only.

    loads: returns numbers by layer, which the trace shows as counters.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    records: list[Transfer] = []
    transport.records = records
    try:
        with profile() as profiler:
            yield
    finally:
        transport.records = None
    profiler.export_chrome_trace(str(path))
    trace = json.loads(path.read_text())
    # The profiler's times are those of the system's clock, and count from the trace's base.
    zero_ns = trace["baseTimeNanoseconds"] - (time.time_ns() - time.perf_counter_ns())
    trace["traceEvents"] += [_event(transfer, transport, zero_ns) for transfer in records]
    now_us = (time.perf_counter_ns() - zero_ns) / _NS_PER_US
    trace["traceEvents"] += [
        {"ph": "C", "name": f"load of {layer}", "pid": "hybridep loads", "ts": now_us, "args": dict(found)}
        for layer, found in loads().items()
    ]
    path.write_text(json.dumps(trace))


def _event(transfer: Transfer, transport: Transport, zero_ns: int) -> dict[str, Any]:
    """Return the event of a finished transfer, in the row of its level and kind, in the trace's microseconds."""
    purpose, level = transfer.purpose, transport.cluster.levels[transfer.channel.level]
    return {
        "ph": "X", "cat": TRANSFER_CATEGORY, "name": str(purpose),
        "pid": "hybridep transfers", "tid": f"{purpose.kind} over {level.name}",
        "ts": (transfer.start_ns - zero_ns) / _NS_PER_US, "dur": (transfer.end_ns - transfer.start_ns) / _NS_PER_US,
        "args": {"kind": purpose.kind, "layer": purpose.layer, "bytes": transfer.num_bytes},
    }  # fmt: skip
