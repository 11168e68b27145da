# SPDX-License-Identifier: Apache-2.0
"""How long this process has waited for other ranks, without a look at its threads.

Waits of this package say so themselves (`waiting`).  About all others torch keeps a record: of each process group, the
number of the collective that was started last and of the one that ended last.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager

from torch._C import _distributed_c10d

_ours: dict[object, tuple[float, bool]] = {}  # waits of this package: when each began, and whether it needs all ranks
# torch's flight recorders: of gloo, and of NCCL in builds that have it.
_RECORDERS = [
    getattr(_distributed_c10d, name)
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    if hasattr(_distributed_c10d, name)
]


@contextmanager
def waiting(*, for_all: bool = False) -> Iterator[None]:
    """Count the time inside as a wait for other ranks; `for_all` if it cannot end before every rank has come."""
    key = object()
    _ours[key] = time.monotonic(), for_all
    try:
        yield
    finally:
        del _ours[key]


class Waits:
    """Call `look` again and again: torch's record says what is under way, and not since when."""

    def __init__(self) -> None:
        self._torch: dict[tuple[int, str, str], float] = {}  # collectives under way, and when each was first seen

    def look(self) -> None:
        now = time.monotonic()
        self._torch = {one: self._torch.get(one, now) for one in _under_way()}

    def longest_s(self) -> float:
        """Return how long the oldest wait has lasted; 0 for none."""
        return self._since([*self._torch.values(), *(begin for begin, _ in list(_ours.values()))])

    def longest_for_all_s(self) -> float:
        """Return the same for waits that are known to need every rank."""
        return self._since([begin for begin, for_all in list(_ours.values()) if for_all])

    def _since(self, begins: list[float]) -> float:
        return time.monotonic() - min(begins) if begins else 0.0


def _under_way() -> Iterator[tuple[int, str, str]]:
    """Yield recorder, group and number of each group's newest collective, if it has not ended."""
    for index, record in enumerate(_RECORDERS):
        for group, status in json.loads(record(False, True)).get("pg_status", {}).items():
            started = status["last_enqueued_collective"]
            if started != status["last_completed_collective"]:
                yield index, group, started
