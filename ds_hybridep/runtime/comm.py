# SPDX-License-Identifier: Apache-2.0
"""The only module that talks to torch.distributed: point-to-point channels, counted and with a time limit.

Every transfer is a batch of sends and receives whose sizes both ends know.  Sends and receives between one pair of
ranks on one channel match in the order in which they were started, so ranks only have to agree on that order.
"""

import json
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hybridep.errors import AgreementError, CommunicationError
from ds_hybridep.plan.cluster import Cluster

KINDS = ("tokens", "expert_weights", "expert_gradients", "control")


@dataclass
class Traffic:
    """What this rank moved: bytes and messages per (level index, kind), and the seconds it waited per kind."""

    sent_bytes: dict[tuple[int, str], int] = field(default_factory=lambda: defaultdict(int))
    received_bytes: dict[tuple[int, str], int] = field(default_factory=lambda: defaultdict(int))
    sent_messages: dict[tuple[int, str], int] = field(default_factory=lambda: defaultdict(int))
    exposed_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))


@dataclass(frozen=True)
class Purpose:
    """What a transfer is for; goes into counters, traces and error messages."""

    kind: str
    operation: str
    layer: str = ""

    def __str__(self) -> str:
        return f"{self.operation} of {self.layer}" if self.layer else self.operation


@dataclass(frozen=True)
class TransferRecord:
    """One finished background transfer, for traces.  Times are `time.perf_counter_ns()`."""

    purpose: Purpose
    level: int
    num_bytes: int
    start_ns: int
    end_ns: int


class Transfer:
    """Handle of a started batch of sends and receives.  `wait` returns when all have finished."""

    def __init__(self, channel: "Channel", purpose: Purpose, works: list[Any], peers: str, num_bytes: int) -> None:
        self.channel = channel
        self.purpose = purpose
        self.start_ns = time.perf_counter_ns()
        self.num_bytes = num_bytes
        self._works = works
        self._peers = peers
        self._finished = threading.Event()
        self._failure: str | None = None

    def is_done(self) -> bool:
        """True when a background transfer has finished, well or badly.  Never blocks."""
        return self._finished.is_set()

    def wait(self) -> None:
        """Block until everything was sent and received.

        Raises:
            CommunicationError: the time limit (`hybridep.timeout_s`) passed or the transport failed.
        """
        if not self._finished.is_set():
            transport = self.channel.transport
            with transport.exposed(self.purpose):
                if not self.channel.is_background:
                    self.finish()
                elif not self._finished.wait(transport.timeout_s):
                    self._failure = f"passed the time limit of {transport.timeout_s:g} s"
        if self._failure is not None:
            self.channel.has_failed = True
            raise CommunicationError(self.describe(self._failure))

    def finish(self) -> None:
        """Wait in the calling thread and mark the transfer finished; a failure is kept for `wait`."""
        limit = timedelta(seconds=self.channel.transport.timeout_s)
        try:
            for work in self._works:
                work.wait(limit)
        except RuntimeError as error:
            self._failure = f"failed: {str(error).splitlines()[0]}"
        self._works = []
        self._finished.set()

    def describe(self, failure: str) -> str:
        """One sentence: who moved what over which level, what went wrong, and what to do."""
        transport = self.channel.transport
        level = transport.cluster.levels[self.channel.level].name
        return (
            f"rank {transport.rank}: {self.purpose} over level '{level}' ({self.num_bytes} bytes, {self._peers}) "
            f"{failure}; look at the log of the ranks named for the first error, or raise hybridep.timeout_s "
            f"if the link is merely slow"
        )


class Channel:
    """A process group of its own over `ranks`, for transfers of one purpose.

    A background channel has a thread that waits for transfers (it starts none): gloo reports the completion of a
    send or receive only to a waiter, and `is_done` and traces need the moment of completion.
    """

    def __init__(self, transport: "Transport", name: str, ranks: Sequence[int], level: int, background: bool) -> None:
        self.transport = transport
        self.name = name
        self.ranks = tuple(ranks)
        self.level = level
        self.is_background = background
        self.group = _take_group(self.ranks, transport.timeout_s)
        # gloo moves host memory as well; every other backend wants tensors on its device.
        self.needs_device_tensors = dist.get_backend(self.group) != "gloo"
        self.has_failed = False  # sends and receives may be out of step
        self._pending: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        purpose: Purpose,
    ) -> Transfer:
        """Start sending and receiving; the tensors must stay untouched until the transfer has finished.

        Args:
            sends: (global rank, contiguous tensor); empty tensors are skipped on both ends.
            receives: (global rank, contiguous tensor that is filled).
            purpose: kind, operation and layer, for counters and errors.
        """
        works, num_bytes = [], 0
        # Receives first: a posted receive lets the peer's data flow at once.
        for rank, tensor in receives:
            if tensor.numel():
                works.append(dist.irecv(tensor, rank, group=self.group))
                num_bytes += self.transport.count_received(rank, tensor, purpose.kind)
        for rank, tensor in sends:
            if tensor.numel():
                works.append(dist.isend(tensor, rank, group=self.group))
                num_bytes += self.transport.count_sent(rank, tensor, purpose.kind)
        peers = f"to ranks {[rank for rank, _ in sends]}, from ranks {[rank for rank, _ in receives]}"
        transfer = Transfer(self, purpose, works, peers, num_bytes)
        if self.is_background:
            self._watch(transfer)
        return transfer

    def _watch(self, transfer: Transfer) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait_for_transfers, name=f"hybridep-{self.name}", daemon=True)
            self._thread.start()
        self._pending.put(transfer)

    def _wait_for_transfers(self) -> None:
        while (transfer := self._pending.get()) is not None:
            transfer.finish()
            self.transport.note_finished(transfer)

    def close(self) -> None:
        """End the waiting thread and give the process group back."""
        if self._thread is not None:
            self._pending.put(None)
            self._thread.join(timeout=self.transport.timeout_s)
            self._thread = None
        if not self.has_failed:
            _idle_groups[self.ranks].append(self.group)


# Process groups that no channel uses now.  They are kept and not destroyed: torch names a group made by its members
# alone after its ranks, and a second group of that name would meet the addresses of the first one in the job's store.
_idle_groups: dict[tuple[int, ...], list[Any]] = defaultdict(list)


def _take_group(ranks: tuple[int, ...], timeout_s: float) -> Any:
    """A process group over `ranks` that nobody else uses; made by its members only, so no world-wide barrier."""
    idle = _idle_groups[ranks]
    while idle:
        group = idle.pop()
        if group in dist.distributed_c10d._world.pg_map:  # else it went with an earlier world
            return group
    limit = timedelta(seconds=timeout_s)
    return dist.new_group(list(ranks), timeout=limit, use_local_synchronization=True, group_desc="hybridep")


class Transport:
    """All channels of this process, with one time limit and one set of counters."""

    def __init__(self, cluster: Cluster, timeout_s: float) -> None:
        self.cluster = cluster
        self.timeout_s = timeout_s
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.traffic = Traffic()
        self.records: list[TransferRecord] | None = None  # a list while a trace is taken
        self._channels: dict[tuple[str, tuple[int, ...]], Channel] = {}
        self.num_finished = 0  # background transfers that have ended
        self._level_of_rank: dict[int, int] = {}
        self._finished = threading.Condition()

    def channel(self, name: str, ranks: Sequence[int], *, background: bool = False) -> Channel:
        """The channel `name` over `ranks` (made at the first call; all its ranks must call in the same order)."""
        key = (name, tuple(ranks))
        if key not in self._channels:
            level = min(self.level_to(rank) for rank in ranks if rank != self.rank)
            self._channels[key] = Channel(self, name, ranks, level, background)
        return self._channels[key]

    def level_to(self, rank: int) -> int:
        """Index of the slowest level that a message to `rank` crosses."""
        if rank not in self._level_of_rank:
            level = self.cluster.level_between(self.rank, rank)
            assert level is not None, f"rank {rank} sends to itself"
            self._level_of_rank[rank] = level
        return self._level_of_rank[rank]

    def count_sent(self, rank: int, tensor: Tensor, kind: str) -> int:
        key = (self.level_to(rank), kind)
        self.traffic.sent_bytes[key] += tensor.nbytes
        self.traffic.sent_messages[key] += 1
        return tensor.nbytes

    def count_received(self, rank: int, tensor: Tensor, kind: str) -> int:
        self.traffic.received_bytes[self.level_to(rank), kind] += tensor.nbytes
        return tensor.nbytes

    def note_finished(self, transfer: Transfer) -> None:
        """Called by the waiting threads: wakes whoever waits for background transfers."""
        if self.records is not None:
            self.records.append(
                TransferRecord(
                    purpose=transfer.purpose,
                    level=transfer.channel.level,
                    num_bytes=transfer.num_bytes,
                    start_ns=transfer.start_ns,
                    end_ns=time.perf_counter_ns(),
                )
            )
        with self._finished:
            self.num_finished += 1
            self._finished.notify_all()

    def wait_for_more_than(self, num_finished: int) -> bool:
        """Block until more background transfers than `num_finished` have ended; False when the time limit passes."""
        with self._finished:
            return self._finished.wait_for(lambda: self.num_finished > num_finished, self.timeout_s)

    @contextmanager
    def exposed(self, purpose: Purpose) -> Iterator[None]:
        """Count the seconds inside as time during which training waited for `purpose`."""
        begin = time.perf_counter()
        with torch.profiler.record_function(f"hybridep::wait::{purpose}"):
            yield
        self.traffic.exposed_s[purpose.kind] += time.perf_counter() - begin

    def close(self) -> None:
        """Close every channel, in the order of their making."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()


def group_ranks(group: Any) -> tuple[int, ...]:
    """Global ranks of a process group, in group-rank order."""
    return tuple(dist.get_process_group_ranks(group))


def world_size() -> int:
    """Number of ranks of the job."""
    return dist.get_world_size()


def is_initialized() -> bool:
    """True once the job's process group exists."""
    return dist.is_available() and dist.is_initialized()


def agree(payload: Mapping[str, Any], timeout_s: float) -> None:
    """Return when every rank has called with an equal payload.

    Goes through the job's store and not through a collective, because a rank without the package would never join
    one.  Rank 0 compares and publishes the verdict.

    Args:
        payload: what all ranks must share, JSON-able.
        timeout_s: seconds to wait for the other ranks.

    Raises:
        AgreementError: a rank differs (says which and in what), failed, or did not come.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    attempt = store.add(f"ds_hybridep/attempt/{rank}", 1)
    prefix = f"ds_hybridep/agree/{attempt}"
    store.set(f"{prefix}/{rank}", json.dumps(payload, sort_keys=True))
    limit = timedelta(seconds=timeout_s)
    if rank == 0:
        verdict = _compare_payloads(lambda key: _get(store, f"{prefix}/{key}", limit), num_ranks, timeout_s)
        store.set(f"{prefix}/verdict", verdict)
    else:
        # Rank 0 may itself wait for the limit before it can say who is missing.
        text = _get(store, f"{prefix}/verdict", 2 * limit)
        verdict = f"rank 0 gave no verdict within {2 * timeout_s:g} s: is ds_hybridep installed there?"
        verdict = text if text is not None else verdict
    if verdict:
        raise AgreementError(verdict)


def refuse(reason: str) -> None:
    """Tell the other ranks, without waiting for them, why this rank cannot start; then `agree` fails there."""
    if not is_initialized():
        return
    rank = dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    attempt = store.add(f"ds_hybridep/attempt/{rank}", 1)
    if rank == 0:
        store.set(f"ds_hybridep/agree/{attempt}/verdict", f"rank 0 cannot start: {reason}")
    else:
        store.set(f"ds_hybridep/agree/{attempt}/{rank}", json.dumps({"error": reason}))


def _get(store: Any, key: str, limit: timedelta) -> str | None:
    """The value of `key` once it is there; None when the limit passes first."""
    try:
        store.wait([key], limit)
    except RuntimeError:  # includes torch.distributed.DistStoreError
        return None
    return str(store.get(key), "utf-8")


def _compare_payloads(read: Callable[[int], str | None], num_ranks: int, timeout_s: float) -> str:
    """Empty if all payloads are equal to rank 0's; else what is wrong, in one sentence per rank."""
    texts = [read(rank) for rank in range(num_ranks)]
    missing = [rank for rank, text in enumerate(texts) if text is None]
    if missing:
        return (
            f"ranks {missing} did not join the hybridep start-up within {timeout_s:g} s: install the same ds_hybridep "
            f"there and give every rank the same ds_config (hybridep.timeout_s sets the limit)"
        )
    payloads = [json.loads(text) for text in texts if text is not None]
    failed = [f"rank {rank} cannot start: {p['error']}" for rank, p in enumerate(payloads) if "error" in p]
    if failed:
        return "; ".join(failed)
    different = [
        f"rank {rank} differs from rank 0 in {path}: {theirs!r} instead of {ours!r}"
        for rank, payload in enumerate(payloads)
        for path, ours, theirs in _differences(payloads[0], payload, "")
    ]
    return "; ".join(different[:8])


def _differences(ours: Any, theirs: Any, path: str) -> list[tuple[str, Any, Any]]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        keys = sorted(set(ours) | set(theirs))
        return [d for key in keys for d in _differences(ours.get(key), theirs.get(key), f"{path}.{key}".lstrip("."))]
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        return [
            d for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) for d in _differences(a, b, f"{path}[{i}]")
        ]
    return [] if ours == theirs else [(path, ours, theirs)]
