# SPDX-License-Identifier: Apache-2.0
"""Start-up: all ranks agree on what they run, or every rank learns which one differs, failed or is missing."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist

from ds_hybridep.errors import AgreementError, CommunicationError
from ds_hybridep.transport.job import is_initialized, job_store, read_note
from ds_hybridep.transport.waits import waiting


def agree(payload: Mapping[str, Any], timeout_s: float) -> int:
    """Wait until all ranks have called with an equal payload, and return the number of this start-up.

    The number is new and equal on all ranks.  They use the job's store: ranks without the package join no collective.

    Args:
        payload: what all ranks must share, JSON-able.
        timeout_s: the longest wait for the other ranks.

    Raises:
        AgreementError: a rank differs (says which and in what), failed, or did not come.
    """
    return _meet(payload, timeout_s)[0]


def hear(say: Callable[[], Any], timeout_s: float) -> Any:
    """Call `say` on rank 0 only, and return its JSON-able result on all ranks; all ranks must call.

    Raises AgreementError on the other ranks if `say` fails on rank 0, and on all if one does not come in time.
    """
    with announcing_failure():
        said = say() if dist.get_rank() == 0 else None
    return _meet({}, timeout_s, said)[1]


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
        agree({} if reason is None else {"error": reason}, timeout_s)
    except BaseException:
        give_up()
        raise


def _announce(reason: str) -> None:
    if is_initialized():
        with contextlib.suppress(RuntimeError):  # the store may be gone; the error itself matters more
            _, store = _begin()
            _write(store, str(dist.get_rank()), {"error": reason})
            if dist.get_rank() == 0:
                _write(store, "verdict", [f"rank 0 cannot start: {reason}", None])


@waiting(for_all=True)
def _meet(payload: Mapping[str, Any], timeout_s: float, said: Any = None) -> tuple[int, Any]:
    """Return the number of a start-up with equal payloads, and what rank 0 has said there."""
    rank, limit_s = str(dist.get_rank()), 1.25 * timeout_s + 5.0  # rank 0 may first wait for its own limit
    try:
        number, store = _begin()
        _write(store, rank, payload)
        if rank == "0":
            _write(store, "verdict", [_judge(store, timeout_s), said])
        error, said = read_note(store, "verdict", limit_s) or (_missing("rank 0", limit_s), None)
        if error:  # rank 0 may still come
            _write(store, rank, {"error": "it has given up this start-up; start all ranks together"})
    except RuntimeError as failure:
        said = f"the job's store failed: {failure}; look at the log of the rank that hosts it"
        raise AgreementError(said) from failure
    if error:
        raise AgreementError(error)
    return number, said


def _begin() -> tuple[int, Any]:
    """Return the number of this rank's next start-up, which is the others' of the same number, and its place."""
    number = int(job_store().add(f"startups/{dist.get_rank()}", 1))
    return number, job_store(f"startup/{number}")


def _write(store: Any, key: str, value: Any) -> None:
    store.set(key, json.dumps(value))


def _judge(store: Any, timeout_s: float) -> str:
    """On rank 0: wait for the payloads of all ranks; return what is wrong, or an empty string if all are equal."""
    deadline = time.monotonic() + timeout_s
    # After the limit, the store still has 1 s for each rank, to deliver the payloads that are there.
    payloads = [
        read_note(store, str(rank), max(deadline - time.monotonic(), 1.0)) for rank in range(dist.get_world_size())
    ]
    if missing := [rank for rank, payload in enumerate(payloads) if payload is None]:
        return _missing(f"ranks {missing}", timeout_s)
    failed = [f"rank {rank} cannot start: {p['error']}" for rank, p in enumerate(payloads) if "error" in p]
    different = [
        f"rank {rank} differs from rank 0 in {path}: {theirs!r} instead of {ours!r}"
        for rank, payload in enumerate(payloads)
        for path, ours, theirs in _differences(payloads[0], payload, "")
    ]
    return "; ".join(failed or different[:8])


def _missing(who: str, limit_s: float) -> str:
    return (
        f"{who} did not join the hybridep start-up within {limit_s:g} s: install the same ds_hybridep there and give "
        f"every rank the same ds_config (hybridep.timeout_s sets the limit)"
    )


def _differences(ours: Any, theirs: Any, path: str) -> list[tuple[str, Any, Any]]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = sorted(set(ours) | set(theirs))
        pairs = [(f"{path}.{key}".lstrip("."), ours.get(key), theirs.get(key)) for key in keys]
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        pairs = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(ours, theirs, strict=True))]
    else:
        return [] if ours == theirs else [(path, ours, theirs)]
    return [difference for path, a, b in pairs for difference in _differences(a, b, path)]
