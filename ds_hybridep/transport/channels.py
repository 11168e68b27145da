# SPDX-License-Identifier: Apache-2.0
"""Point-to-point channels between ranks, with byte counters and a time limit.

Every transfer is a batch of sends and receives whose sizes both ends know.  Sends and receives between one pair of
ranks on one channel match in the order in which they were started, so ranks only have to agree on that order.
"""

import atexit
import contextlib
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist

from ds_hybridep.errors import CommunicationError
from ds_hybridep.plan.cluster import Cluster
from ds_hybridep.transport.connections import NUM_TURNS, Arriving, Budget, Connections, Lengths, copy_bytes
from ds_hybridep.transport.groups import connect_gloo, first_line
from ds_hybridep.transport.nccl import NcclBatch, NcclGroup
from ds_hybridep.transport.staging import Part, Staging
from ds_hybridep.transport.streams import DeviceStreams, streams_of
from ds_hybridep.transport.waits import waiting

T = TypeVar("T")

_NO_RANGE = contextlib.nullcontext()
EXIT_LIMIT_S = 60.0  # how long an ending process waits for transfers under way
KINDS = ("tokens", "expert_weights", "expert_gradients", "dense", "control")


@dataclass
class Traffic:
    """What this rank moved: bytes and messages per (level index, kind), and how often and how long it waited."""

    sent_bytes: dict[tuple[int, str], int] = field(default_factory=lambda: defaultdict(int))
    received_bytes: dict[tuple[int, str], int] = field(default_factory=lambda: defaultdict(int))
    sent_messages: dict[tuple[int, str], int] = field(default_factory=lambda: defaultdict(int))
    exposed_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    waits: dict[int, int] = field(default_factory=lambda: defaultdict(int))  # in a row, by level; see `count_waits`


@dataclass(frozen=True)
class Purpose:
    """What a transfer is for, as counters, traces and error messages name it."""

    kind: str
    operation: str
    layer: str = ""

    def __str__(self) -> str:
        return f"{self.operation} of {self.layer}" if self.layer else self.operation


@dataclass(frozen=True)
class Wait:
    """One of the waits in a row over a level, for traces."""

    level: int
    purpose: Purpose
    begin_ns: int
    end_ns: int


class Transfer:
    """A started batch of sends and receives.  `end_ns` is measured for background transfers only."""

    def __init__(
        self, channel: "Channel", purpose: Purpose, sends: Sequence[Part], receives: Sequence[Part], lane: int,
        lengths: Lengths, rooms: Sequence[int] | None,
    ) -> None:  # fmt: skip
        self.channel = channel
        self.purpose = purpose
        self.lane, self.lengths, self.rooms = lane, lengths, rooms  # as in `Connections.post`
        self.start_ns = time.perf_counter_ns()
        self.end_ns = self.start_ns
        self.num_bytes = sum(tensor.nbytes for _, tensor in (*sends, *receives))
        self.works: list[Any] = []  # from gloo and NCCL; `wait(timeout)` raises RuntimeError if one failed
        self.device_side: Staging | NcclBatch | None = None  # for tensors on a device
        self.arriving: list[Arriving] = []  # messages that arrive in a lane
        self._destinations = [rank for rank, _ in sends]
        self._sources = [rank for rank, _ in receives]
        transport = channel.transport
        levels = {transport.level_to(rank) for rank in (*self._destinations, *self._sources)}
        self.waits_before = {level: transport.traffic.waits[level] for level in levels}
        # Foreground transfers finish in `wait`.  The thread of a background channel sets this event instead.
        self._finished = threading.Event() if channel.is_background else None
        self._failure: str | None = None

    def is_done(self) -> bool:
        """Return True if a background transfer has finished or failed."""
        return self._finished is not None and self._finished.is_set()

    def wait(self) -> None:
        """Block until everything was sent and received, or raise CommunicationError.

        For tensors on a device, the current stream waits for what arrives.  The host does not wait for a foreground
        transfer over NCCL.
        """
        transport = self.channel.transport
        if self._finished is None:
            begin_ns = time.perf_counter_ns()
            if self.works:
                with transport.exposed(self.purpose):
                    self.finish()
            transport.count_waits([self], begin_ns)
        elif not self._finished.is_set():
            with transport.exposed(self.purpose):
                if not self._finished.wait(transport.timeout_s):
                    self._failure = f"passed the time limit of {transport.timeout_s:g} s"
        if self._failure is not None:
            raise CommunicationError(self.describe(self._failure))
        if self.device_side is not None:
            self.device_side.deliver()
            self.device_side = None

    def finish(self) -> None:
        """Wait in the calling thread and mark the transfer as finished; keep a failure for `wait` to raise."""
        deadline = time.monotonic() + self.channel.transport.timeout_s
        try:
            for work in self.works:
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            for one in self.arriving:
                if one.place is not None:
                    copy_bytes(one.place, one.tensor)
            if (connections := self.channel.connections) is not None:
                connections.stand(self.arriving)
        except RuntimeError as error:
            self.fail(error)
        self.works, self.arriving = [], []
        if self.device_side is not None:
            self.device_side.release_sends()
        if self._finished is not None:
            self.end_ns = time.perf_counter_ns()
            self._finished.set()

    def fail(self, error: RuntimeError) -> None:
        if self._failure is None:
            self._failure = f"failed: {first_line(error)}"

    def describe(self, failure: str) -> str:
        return (
            f"rank {self.channel.transport.rank}: {self} {failure}; look at the log of the ranks "
            f"named for the first error, or raise hybridep.timeout_s if the link is merely slow"
        )

    def __str__(self) -> str:
        level = self.channel.transport.cluster.levels[self.channel.level].name
        return (
            f"{self.purpose} over level '{level}' ({self.num_bytes} bytes, to ranks {self._destinations}, "
            f"from ranks {self._sources})"
        )


class Line(Generic[T]):
    """A thread that hands items to `take` one by one, and None after the last one."""

    def __init__(self, name: str, take: Callable[[T | None], None]) -> None:
        self._take = take
        self._waiting: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def put(self, item: T) -> None:
        self._waiting.put(item)

    def end(self) -> None:
        """Stop after the items that were put."""
        self._waiting.put(None)

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            self._take(item)
        self._take(None)


class Channel:
    """Connections between `ranks` that serve one purpose.

    A background channel has a thread that waits for transfers.  Gloo reports the end of a send or receive only to a
    thread that waits for it, and `is_done` and traces need that moment.  If the channel carries tensors of a device
    through gloo, a second thread starts each send when its copy has reached the host, in the order of `start`.  The
    caller's thread starts everything else.
    """

    def __init__(self, transport: "Transport", name: str, ranks: Sequence[int], level: int, background: bool) -> None:
        self.transport = transport
        self.name = name
        self.ranks = tuple(ranks)
        self.level = level
        self.is_background = background
        is_fastest = 0 < level == len(transport.cluster.levels) - 1
        link = transport.cluster.levels[level].link
        names = [f"{name}/{at}" if at else name for at in range(link.connections)]
        groups = [connect_gloo(one, self.ranks, transport, link.congestion_control) for one in names]
        budget = transport.budget if background else transport.foreground_budget
        self.connections: Connections | None = Connections(groups, self.ranks, budget, stands=not is_fastest)
        self._turn = 0  # number of the next transfer with `rooms`
        self._nccl: NcclGroup | None = None  # made by `prepare`
        self._failure: str | None = None  # once set, nothing more is sent: messages match by order
        # Made when needed: they refer to the channel, so a channel that has them is not freed with its last user.
        self._under_way: Line[Transfer] | None = None
        self._departing: Line[Transfer] | None = None

    @property
    def has_equal_lengths(self) -> bool:
        """True over NCCL, where a message must be exactly as long as the room that its receiver has made for it.

        Gloo's TCP transport sends the length before each message, and checks that it fits the receiver's room
        (`Pair::prepareRead`).  tests/runtime/test_comm.py checks that the installed torch still does this.
        """
        return self.transport.backends[self.level] == "nccl"

    def prepare(self, device: torch.device) -> None:
        """Connect the ranks for tensors on `device`, or raise CommunicationError; all ranks of the channel must call.

        Without this call, the first transfer connects them and blocks until all ranks have started it.  A background
        transfer must not block, because some ranks start it only after others have gone on.
        """
        streams = _streams_on(device)
        if self._nccl is None and self.has_equal_lengths and streams is not None:
            self._nccl = NcclGroup(self.name, self.ranks, self.transport, streams)

    def start(
        self,
        sends: Sequence[Part],
        receives: Sequence[Part],
        purpose: Purpose,
        *,
        counts_receives: bool = True,
        lane: int = 0,
        rooms: Sequence[int] | None = None,
    ) -> Transfer:
        """Start sending and receiving; the tensors must stay untouched until the transfer has finished.

        Tensors on a device are sent after the work that is queued on the current stream.

        Args:
            sends: (global rank, contiguous tensor); empty tensors are skipped on both ends.
            receives: (global rank, contiguous tensor to fill); see `has_equal_lengths` for shorter messages.
            purpose: kind, operation and layer, for counters and errors.
            counts_receives: False if messages may be shorter; the caller then counts them with `count_received`.
            lane: the same number at both ends and in every step (see `transport.connections`), or 0 for none.
                If messages of a lane may be shorter, the room for them is always the same.
            rooms: for lengths that change from step to step: bytes that the receiver of each send has made room for,
                at least one of which is sent.  All ranks of the channel must call in the same order, without a lane.
        """
        assert self.connections is not None, f"channel {self.name} was closed"
        lengths = Lengths.EQUAL if counts_receives else Lengths.VARYING
        if rooms is not None:
            lengths, rooms = Lengths.BY_ROOM, [room for room in rooms if room]
            lane, self._turn = self._turn + 1, (self._turn + 1) % NUM_TURNS
        sends = [(rank, tensor) for rank, tensor in sends if tensor.numel()]
        receives = [(rank, tensor) for rank, tensor in receives if tensor.numel()]
        transfer = Transfer(self, purpose, sends, receives, lane, lengths, rooms)
        self.transport.last_transfer = transfer
        streams = _streams_on((sends or receives)[0][1].device) if sends or receives else None
        try:
            if streams is None:
                self._post(transfer, sends, receives)
            else:
                self._start_on_device(transfer, streams, sends, receives)
        except RuntimeError as error:
            raise CommunicationError(transfer.describe(f"failed: {first_line(error)}")) from error
        for rank, tensor in sends:
            key = (self.transport.level_to(rank), purpose.kind)
            self.transport.traffic.sent_bytes[key] += tensor.nbytes
            self.transport.traffic.sent_messages[key] += 1
        if counts_receives:
            for rank, tensor in receives:
                self.transport.count_received(rank, tensor.nbytes, purpose.kind)
        if self.is_background:
            self._watch(transfer)
        return transfer

    def _post(self, transfer: Transfer, sends: Sequence[Part], receives: Sequence[Part]) -> None:
        if (connections := self.connections) is None:  # another thread may have called `close`
            raise RuntimeError("the channel was closed")
        rooms = transfer.rooms if sends else None
        works, arriving = connections.post(sends, receives, transfer.lane, transfer.lengths, rooms)
        transfer.works += works
        transfer.arriving += arriving

    def _start_on_device(
        self, transfer: Transfer, streams: DeviceStreams, sends: Sequence[Part], receives: Sequence[Part]
    ) -> None:
        if self.has_equal_lengths:
            self.prepare(streams.device)
            assert self._nccl is not None
            transfer.device_side = batch = self._nccl.start(sends, receives)
            transfer.works = [batch] if self.is_background else []
            return
        transfer.device_side = staging = Staging(streams, sends, receives, is_awaited=self.is_background)
        self._post(transfer, (), staging.receives)
        if self.is_background:
            if self._departing is None:
                self._departing = Line(f"hybridep-{self.name}-departures", self._depart)
            return
        # Blocking costs nothing: the caller waits for a foreground transfer next, and the peers block here too.
        with self.transport.exposed(transfer.purpose):
            staging.await_sends()
        self._post(transfer, staging.sends, ())

    def _watch(self, transfer: Transfer) -> None:
        if self._under_way is None:
            # A thread that returns from gloo while the interpreter ends, with weights on their way, would abort it.
            atexit.register(self._end_threads)
            self._under_way = Line(f"hybridep-{self.name}", self._finish)
        (self._departing or self._under_way).put(transfer)

    def _depart(self, transfer: Transfer | None) -> None:
        assert self._under_way is not None, f"channel {self.name}: nobody waits for what departs"
        if transfer is None:
            self._under_way.end()
            return
        if isinstance(staging := transfer.device_side, Staging):
            try:
                if self._failure is not None:
                    raise RuntimeError(self._failure)
                staging.await_sends()
                self._post(transfer, staging.sends, ())
            except RuntimeError as error:
                self._failure = str(error)
                transfer.fail(error)
        self._under_way.put(transfer)

    def _finish(self, transfer: Transfer | None) -> None:
        if transfer is None:
            atexit.unregister(self._end_threads)  # not in `close`: after it, threads may still be waited for
            return
        transfer.finish()
        self.transport.note_finished(transfer)

    def _end_threads(self) -> None:
        for line in (self._departing, self._under_way):
            if line is not None:
                line.end()
                with waiting():
                    line.thread.join(min(self.transport.timeout_s, EXIT_LIMIT_S))

    def close(self) -> None:
        """Let the threads end and drop the connections.  Does not block."""
        if (line := self._departing or self._under_way) is not None:
            line.end()
        if self.connections is not None:
            self.connections.close()
        self.connections = self._nccl = None


class Transport:
    """All channels of one attached model on this rank, with one time limit and one set of counters.

    Args:
        cluster: its levels are used in counters and errors, and say which connections each channel has.
        timeout_s: the longest wait for ranks that live.
        generation: from `agree`; makes the names of these connections unique in the job.
        backends: "gloo" or "nccl" at each level, for tensors on a device; empty for gloo.  Host tensors use gloo.
    """

    def __init__(self, cluster: Cluster, timeout_s: float, generation: int, backends: Sequence[str] = ()) -> None:
        self.cluster = cluster
        self.backends = tuple(backends) or ("gloo",) * len(cluster.levels)
        self.timeout_s = timeout_s
        self.generation = generation
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        self.traffic = Traffic()
        self.records: list[Transfer] | None = None  # finished background transfers, while a trace is taken
        self.wait_records: list[Wait] = []  # waits in a row, while a trace is taken
        self.budget, self.foreground_budget = Budget(), Budget()
        self._channels: dict[tuple[str, tuple[int, ...]], Channel] = {}
        self.last_transfer: Transfer | None = None  # the one that was started last
        self.num_finished = 0  # background transfers that have ended
        self._level_of_rank = [cluster.level_between(self.rank, rank) for rank in range(self.world_size)]
        self._finished = threading.Condition()

    def channel(self, name: str, ranks: Sequence[int], *, background: bool = False) -> Channel:
        """Return the channel `name` over `ranks`, made at the first call; its ranks must call in the same order."""
        key = (name, tuple(ranks))
        if key not in self._channels:
            level = min(self.level_to(rank) for rank in ranks if rank != self.rank)
            self._channels[key] = Channel(self, name, ranks, level, background)
        return self._channels[key]

    def level_to(self, rank: int) -> int:
        """Return the index of the slowest level that a message to `rank` crosses."""
        level = self._level_of_rank[rank]
        assert level is not None, f"rank {rank} sends to itself"
        return level

    def count_received(self, rank: int, num_bytes: int, kind: str) -> None:
        self.traffic.received_bytes[self.level_to(rank), kind] += num_bytes

    def count_waits(self, transfers: Sequence[Transfer], begin_ns: int) -> None:
        """Count a wait for transfers, which began at `begin_ns`, over each level that they crossed.

        A transfer that started before an earlier wait over the level ended does not count again: the two travelled
        together, and the earlier wait includes the delay of both.
        """
        waits = self.traffic.waits
        for transfer in transfers:
            for level, before in transfer.waits_before.items():
                if waits[level] == before:
                    waits[level] = before + 1
                    if self.records is not None:
                        self.wait_records.append(Wait(level, transfer.purpose, begin_ns, time.perf_counter_ns()))

    def note_finished(self, transfer: Transfer) -> None:
        if (records := self.records) is not None:  # the main thread may end a trace at any time
            records.append(transfer)
        with self._finished:
            self.num_finished += 1
            self._finished.notify_all()

    def wait_for_more_than(self, num_finished: int) -> bool:
        """Block until more than `num_finished` background transfers have ended; return False after the time limit."""
        with self._finished:
            return self._finished.wait_for(lambda: self.num_finished > num_finished, self.timeout_s)

    @contextlib.contextmanager
    def exposed(self, purpose: Purpose) -> Iterator[None]:
        """Count the seconds inside as time during which training waited for `purpose`."""
        begin = time.perf_counter()
        with profiler_range("wait", str(purpose)), waiting():
            yield
        self.traffic.exposed_s[purpose.kind] += time.perf_counter() - begin

    def close(self) -> None:
        """Close every channel; call this when every transfer has ended or never will."""
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()


def _streams_on(device: torch.device) -> DeviceStreams | None:
    streams = streams_of(device)
    return streams if isinstance(streams, DeviceStreams) else None


def profiler_range(*words: str) -> contextlib.AbstractContextManager[Any]:
    """Return a range "hybridep::..." for torch's profiler, which costs nothing if no profiler runs."""
    if torch._C._autograd._profiler_enabled():
        return torch.profiler.record_function("::".join(("hybridep", *words)))
    return _NO_RANGE
