# SPDX-License-Identifier: Apache-2.0
"""Start-up: all ranks agree on what they run, or every rank learns which one differs, failed or is missing."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from ds_hybridep.errors import AgreementError, CommunicationError
from ds_hybridep.transport.job import is_initialized, job_store
from ds_hybridep.transport.waits import waiting


@waiting(for_all=True)
def agree(payload: Mapping[str, Any], timeout_s: float) -> int:
    """Wait until all ranks have called with an equal payload, and return the number of this start-up.

    The number is new and equal on all ranks.  They use the job's store: ranks without the package join no collective.

    Args:
        payload: what all ranks must share, JSON-able.
        timeout_s: the longest wait for the other ranks.

    Raises:
        AgreementError: a rank differs (says which and in what), failed, or did not come.
    """
    startup = _Startup(timeout_s)
    startup.publish(payload)
    verdict = startup.judge() if dist.get_rank() == 0 else startup.await_verdict()
    if verdict:
        raise AgreementError(verdict)
    return startup.generation


def hear(say: Callable[[], Any], timeout_s: float) -> Any:
    """Call `say` on rank 0 only, and return its JSON-able result on all ranks; all ranks must call.

    Raises AgreementError on the other ranks if `say` fails on rank 0, or if rank 0 does not come in time.
    """
    startup = _Startup(timeout_s)
    if dist.get_rank() == 0:
        try:
            said = say()
        except BaseException as error:
            startup.publish({"error": f"{type(error).__name__}: {error}"})
            raise
        startup.publish({"said": said})
        return said
    heard = startup.await_payload()
    if "error" in heard:
        raise AgreementError(f"rank 0 cannot start: {heard['error']}")
    return heard["said"]


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
            _Startup(0.0).announce(reason)


class _Startup:
    """One start-up in the job's store: the payloads of all ranks and the verdict of rank 0.

    Every rank counts its own start-ups, and its n-th one meets the n-th of the others.  So a rank that fails three
    times in a row is three ahead for a while.  A rank skips a start-up if the others gave up waiting for it there and
    have gone on to a later one.
    """

    @waiting(for_all=True)
    def __init__(self, timeout_s: float) -> None:
        self._store = job_store()
        self._timeout_s = timeout_s
        self._rank = dist.get_rank()
        self.generation = self._count(self._rank, 1)
        while self._was_missed(self._rank) and self._others_went_on():
            self.generation = self._count(self._rank, 1)

    def _count(self, rank: int, more: int) -> int:
        return int(self._store.add(f"ds_hybridep/startups/{rank}", more))

    def _others_went_on(self) -> bool:
        others = range(1, dist.get_world_size()) if self._rank == 0 else (0,)
        return any(self._count(rank, 0) > self.generation for rank in others)

    def _was_missed(self, rank: int) -> bool:
        return bool(self._store.check([self._key(f"missed/{rank}")]))

    def _key(self, name: str) -> str:
        return f"ds_hybridep/startup/{self.generation}/{name}"

    @waiting(for_all=True)
    def publish(self, payload: Mapping[str, Any]) -> None:
        self._store.set(self._key(str(self._rank)), json.dumps(payload, sort_keys=True))

    def announce(self, reason: str) -> None:
        if self._rank == 0:
            self._store.set(self._key("verdict"), f"rank 0 cannot start: {reason}")
        else:
            self.publish({"error": reason})

    def judge(self) -> str:
        """On rank 0: compare all payloads, and tell all ranks the verdict, which is empty if they are equal."""
        deadline = time.monotonic() + self._timeout_s
        # After the limit, the store still has 1 s for each rank, to deliver the payloads that are there.
        texts = [self._get(str(rank), max(deadline - time.monotonic(), 1.0)) for rank in range(dist.get_world_size())]
        missing = [rank for rank, text in enumerate(texts) if text is None]
        if missing:
            verdict = self._give_up(missing, f"ranks {missing}", self._timeout_s)
        else:
            verdict = _compare_payloads([json.loads(text) for text in texts if text is not None])
        if not verdict and self._was_missed(0):
            verdict = "other ranks gave up waiting for rank 0 before it came; start all ranks together"
        self._store.set(self._key("verdict"), verdict)
        return verdict

    def await_verdict(self) -> str:
        """On other ranks: return the verdict of rank 0, which may first wait for its own limit."""
        limit_s = 1.25 * self._timeout_s + 5.0
        verdict = self._get("verdict", limit_s)
        return self._give_up([0], "rank 0", limit_s) if verdict is None else verdict

    @waiting(for_all=True)
    def await_payload(self) -> Mapping[str, Any]:
        """On other ranks: return what rank 0 has published."""
        text = self._get("0", self._timeout_s)
        if text is None:
            raise AgreementError(self._give_up([0], "rank 0", self._timeout_s))
        heard: Mapping[str, Any] = json.loads(text)
        return heard

    def _give_up(self, missing: Sequence[int], who: str, limit_s: float) -> str:
        """Tell the missing ranks that nobody waits for them any more, and return the verdict."""
        for rank in missing:
            self._store.set(self._key(f"missed/{rank}"), "")
        return (
            f"{who} did not join the hybridep start-up within {limit_s:g} s: install the same ds_hybridep there "
            f"and give every rank the same ds_config (hybridep.timeout_s sets the limit)"
        )

    def _get(self, name: str, limit_s: float) -> str | None:
        """Wait for a value and return it, or None if the limit passes first."""
        key = self._key(name)
        try:
            self._store.wait([key], timedelta(seconds=limit_s))
        except dist.DistStoreError:
            return None
        except RuntimeError as error:
            raise AgreementError(
                f"the job's store failed: {error}; look at the log of the rank that hosts it"
            ) from error
        return str(self._store.get(key), "utf-8")


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
