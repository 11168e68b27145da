# SPDX-License-Identifier: Apache-2.0
"""Start-up: all ranks agree on what they run, or every rank learns which one differs, failed or is missing."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from ds_hybridep.errors import AgreementError, CommunicationError
from ds_hybridep.transport.job import is_initialized, job_store, read_note
from ds_hybridep.transport.waits import waiting

_START = (
    "did not join the hybridep start-up within {limit_s:g} s: install the same ds_hybridep there and give every rank "
    "the same ds_config (hybridep.timeout_s sets the limit)"
)


def agree(payload: Mapping[str, Any], timeout_s: float, *, remedy: str = _START) -> int:
    """Wait until all ranks have called with an equal payload, and return the number of this start-up.

    The number is new and equal on all ranks.  They use the job's store: ranks without the package join no collective.

    Args:
        payload: what all ranks must share, JSON-able.  Its keys tell what they agree on: ranks that have come to
            different points must not take this for an agreement.
        timeout_s: the longest wait for the other ranks.
        remedy: what the message says where a rank does not come, after the rank, with "{limit_s:g}" for the limit.

    Raises:
        AgreementError: a rank differs (says which and in what), failed, or did not come.
    """
    return _meet(payload, timeout_s, remedy=remedy)[0]


def result_of_rank_0(call: Callable[[], Any], timeout_s: float) -> Any:
    """Call `call` on rank 0 only, and return its JSON-able result on all ranks; all ranks must call.

    Raises AgreementError on the other ranks if `call` fails on rank 0, and on all if one does not come in time.
    """
    with announcing_failure():
        result = call() if dist.get_rank() == 0 else None
    return _meet({"hears": "rank 0"}, timeout_s, result)[1]


@contextlib.contextmanager
def announcing_failure() -> Iterator[None]:
    """Tell the other ranks if this one fails before it calls `agree`, so that they need not wait for it."""
    try:
        yield
    except BaseException as error:
        _announce(f"{type(error).__name__}: {error}")
        raise


@contextlib.contextmanager
def together(timeout_s: float, give_up: Callable[[], None]) -> Iterator[None]:
    """Check that all ranks finish the body; otherwise each of them raises AgreementError and names those that failed.

    give_up: drops what the body made, connections too, because other ranks may be waiting in one of them.
    """
    reason = None
    try:
        yield
    except BaseException as error:
        give_up()
        reason = f"{type(error).__name__}: {error}"
        if not isinstance(error, CommunicationError):  # these mostly follow from another rank's failure
            _announce(reason)
            if not isinstance(error, Exception):
                raise
            raise AgreementError(f"rank {dist.get_rank()} cannot start: {reason}") from error
    try:
        agree({"has": "made its part"} if reason is None else {"error": reason}, timeout_s)
    except BaseException:
        give_up()
        raise


def _announce(reason: str) -> None:
    if is_initialized():
        with contextlib.suppress(RuntimeError):  # the store may be gone; the error itself matters more
            startup = _Startup(0.0)
            if dist.get_rank() == 0:
                startup.write("verdict", [f"rank 0 cannot start: {reason}", None])
            else:
                startup.write(str(dist.get_rank()), {"error": reason})


@waiting(for_all=True)
def _meet(payload: Mapping[str, Any], timeout_s: float, said: Any = None, *, remedy: str = _START) -> tuple[int, Any]:
    """Return the number of a start-up with equal payloads, and what rank 0 has said there."""
    startup = _Startup(timeout_s, remedy)
    startup.write(str(dist.get_rank()), payload)
    if dist.get_rank() == 0:
        startup.write("verdict", [startup.judge(), said])
    # Rank 0 may first wait for its own limit.
    error, said = startup.read("verdict", 1.25 * timeout_s + 5.0) or (startup.give_up([0], 1.25 * timeout_s + 5.0), "")
    if error:
        raise AgreementError(error)
    return startup.generation, said


class _Startup:
    """One start-up in the job's store: the payloads of all ranks and the verdict of rank 0.

    Every rank counts its own start-ups, and its n-th one meets the n-th of the others.  So a rank that fails three
    times in a row is three ahead for a while.  A rank skips a start-up if the others gave up waiting for it there and
    have gone on to a later one.
    """

    def __init__(self, timeout_s: float, remedy: str = _START) -> None:
        self._store, self._timeout_s, self._remedy, rank = job_store(), timeout_s, remedy, dist.get_rank()
        others = range(1, dist.get_world_size()) if rank == 0 else (0,)
        self.generation = self._count(rank, 1)
        while self._was_missed(rank) and any(self._count(other, 0) > self.generation for other in others):
            self.generation = self._count(rank, 1)

    def _count(self, rank: int, more: int) -> int:
        return int(self._store.add(f"startups/{rank}", more))

    def _was_missed(self, rank: int) -> bool:
        return bool(self._store.check([self._key(f"missed/{rank}")]))

    def _key(self, name: str) -> str:
        return f"startup/{self.generation}/{name}"

    def write(self, name: str, value: Any) -> None:
        self._store.set(self._key(name), json.dumps(value, sort_keys=True))

    def read(self, name: str, limit_s: float) -> Any:
        """Wait for a value and return it, or None if the limit passes first."""
        try:
            return read_note(self._store, self._key(name), limit_s)
        except RuntimeError as error:
            raise AgreementError(
                f"the job's store failed: {error}; look at the log of the rank that hosts it"
            ) from error

    def judge(self) -> str:
        """On rank 0: compare all payloads, and return what is wrong."""
        deadline = time.monotonic() + self._timeout_s
        # After the limit, the store still has 1 s for each rank, to deliver the payloads that are there.
        payloads = [
            self.read(str(rank), max(deadline - time.monotonic(), 1.0)) for rank in range(dist.get_world_size())
        ]
        if missing := [rank for rank, payload in enumerate(payloads) if payload is None]:
            return self.give_up(missing, self._timeout_s)
        if not (verdict := _compare_payloads(payloads)) and self._was_missed(0):
            verdict = "other ranks gave up waiting for rank 0 before it came; start all ranks together"
        return verdict

    def give_up(self, missing: Sequence[int], limit_s: float) -> str:
        """Tell the missing ranks that nobody waits for them any more, and return the verdict."""
        for rank in missing:
            self._store.set(self._key(f"missed/{rank}"), "")
        who = "rank 0" if missing == [0] else f"ranks {missing}"
        return f"{who} {self._remedy.format(limit_s=limit_s)}"


def _compare_payloads(payloads: Sequence[Mapping[str, Any]]) -> str:
    """Return what is wrong, or an empty string if all payloads are equal to rank 0's."""
    failed = [f"rank {rank} cannot start: {p['error']}" for rank, p in enumerate(payloads) if "error" in p]
    different = [
        f"rank {rank} differs from rank 0 in {path}: {theirs!r} instead of {ours!r}"
        for rank, payload in enumerate(payloads)
        for path, ours, theirs in _differences(payloads[0], payload, "")
    ]
    return "; ".join(failed or different[:8])


def _differences(ours: Any, theirs: Any, path: str) -> list[tuple[str, Any, Any]]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = sorted(set(ours) | set(theirs))
        pairs = [(f"{path}.{key}".lstrip("."), ours.get(key), theirs.get(key)) for key in keys]
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(ours, theirs, strict=True))]
    else:
        return [] if ours == theirs else [(path, ours, theirs)]
    return [difference for path, a, b in pairs for difference in _differences(a, b, path)]
