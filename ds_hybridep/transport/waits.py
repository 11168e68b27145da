# SPDX-License-Identifier: Apache-2.0
"""How long this process has waited for other ranks, without a look at its threads.

Waits of this package say so themselves (`waiting`).  About all others torch keeps a record: of each process group, the
number of the collective that was started last and of the one that ended last.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch._C import _distributed_c10d

_ours: dict[object, tuple[float, bool]] = {}  # waits of this package: when each began, and whether it needs all ranks
DROP_S = 1.0  # how long gloo may take to drop tensors
Collective = tuple[int, str, str]  # recorder, group, and its number in the group
# torch's flight recorders: of gloo, and of NCCL in builds that have it.
_RECORDERS = [
    getattr(_distributed_c10d, name)
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    if hasattr(_distributed_c10d, name)
]


@contextmanager
def waiting(*tensors: Tensor, for_all: bool = False) -> Iterator[None]:
    """Count the time inside as a wait for other ranks; `for_all` if it cannot end before every rank has come.

    tensors: of a collective inside; those on a device do not matter.  This returns once gloo's threads have dropped
    them: a thread that drops the last reference to a tensor while the interpreter ends aborts the process.
    """
    key = object()
    _ours[key] = time.monotonic(), for_all
    try:
        yield
    finally:
        of_gloo, until = [one for one in tensors if one.device.type == "cpu"], time.monotonic() + DROP_S
        while any(_users(one) > 1 for one in of_gloo) and time.monotonic() < until:
            time.sleep(1e-5)
        del _ours[key]


def _users(tensor: Any) -> int:
    """Return how many parts of the process have a tensor; Python is one."""
    return int(tensor._use_count())


class Waits:
    """Call `look` again and again: torch's record says what is under way, and not since when."""

    def __init__(self) -> None:
        self._torch: dict[Collective, float] = {}  # those under way, and when each was first seen
        self._ended: set[Collective] = set()  # those that torch calls under way, and that are not

    def look(self, *, closely: bool = False) -> None:
        """Look now; `closely` takes up to 0.1 s.

        Threads of gloo note the ends of collectives in any order.  So torch may call one under way that has ended,
        until the next one.  Only its record of each collective is sure.
        """
        now, said = time.monotonic(), set(_under_way())
        self._ended = {
            one for one in said if one in self._ended or (closely and one in self._torch and _has_ended(one))
        }
        self._torch = {one: self._torch.get(one, now) for one in said - self._ended}

    def longest_s(self) -> float:
        """Return how long the oldest wait has lasted; 0 for none."""
        return self._since([*self._torch.values(), *(begin for begin, _ in list(_ours.values()))])

    def longest_for_all_s(self) -> float:
        """Return the same for waits that are known to need every rank."""
        return self._since([begin for begin, for_all in list(_ours.values()) if for_all])

    def _since(self, begins: list[float]) -> float:
        return time.monotonic() - min(begins) if begins else 0.0


def _under_way() -> Iterator[Collective]:
    """Yield each group's newest collective, if torch has not noted its end."""
    for index, record in enumerate(_RECORDERS):
        for group, status in json.loads(record(False, True)).get("pg_status", {}).items():
            started = status["last_enqueued_collective"]
            if started != status["last_completed_collective"]:
                yield index, group, started


def _has_ended(one: Collective) -> bool:
    """Look a collective up in torch's record of those that were started last."""
    index, group, number = one
    entries = json.loads(_RECORDERS[index](True, False)).get("entries", ())
    return any(
        entry["retired"] and (str(entry["pg_id"]), str(entry["collective_seq_id"])) == (group, number)
        for entry in entries
        if not entry["is_p2p"]
    )
