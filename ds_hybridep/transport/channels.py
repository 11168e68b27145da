# SPDX-License-Identifier: Apache-2.0
"""Point-to-point channels between ranks, with byte counters and a time limit.

Every transfer is a batch of sends and receives.  Those between one pair of ranks on one channel match in the order in
which they were started, for each purpose apart.  Messages in host memory cross the job's link (`ds_hybridep.link`),
those of a device cross it by way of pinned memory, or go over NCCL.
"""

import atexit
import contextlib
import logging
import queue
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from ds_hybridep.errors import CommunicationError
from ds_hybridep.geometry.cluster import Cluster
from ds_hybridep.link import BULK, URGENT, Handle
from ds_hybridep.transport.diagnosis import UNEQUAL_CALLS
from ds_hybridep.transport.job import first_line
from ds_hybridep.transport.job_link import LinkSettings, open_link
from ds_hybridep.transport.nccl import NcclBatch, NcclGroup
from ds_hybridep.transport.streams import DeviceStreams, PeerTensor, Pinned, streams_of
from ds_hybridep.transport.waits import waiting

_NO_RANGE = contextlib.nullcontext()
# A send waits for its acknowledgement, which takes a round trip.  Up to this size a copy is sent instead.
COPIED_BYTES = 4 * 2**20
LEAST_NOTICE_S = 10.0
EXIT_LIMIT_S = 60.0  # how long an ending process waits for transfers under way
KINDS = ("tokens", "expert_weights", "expert_gradients", "dense", "control")
logger = logging.getLogger(__name__)


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


class Transfer:
    """A started batch of sends and receives.  `end_ns` is measured for background transfers only."""

    def __init__(
        self, channel: "Channel", purpose: Purpose, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor]
    ) -> None:
        self.channel, self.purpose = channel, purpose
        self.start_ns = self.end_ns = time.perf_counter_ns()
        self.num_bytes = sum(tensor.nbytes for _, tensor in (*sends, *receives))
        self.device_side: Pinned | NcclBatch | None = None  # for tensors on a device
        self._destinations, self._sources = [rank for rank, _ in sends], [rank for rank, _ in receives]
        transport = channel.transport
        levels = {transport.level_to(rank) for rank in (*self._destinations, *self._sources)}
        self.waits_before = {level: transport.traffic.waits[level] for level in levels}
        self.arriving: list[tuple[int, Handle]] = []  # (sender, message), until `wait`
        self._lock = threading.Lock()  # guards what follows
        self._num_left = 1  # parts that have not ended, see `add`; the first one is its start
        self._failure: str | None = None
        self._ended = threading.Event()

    def is_done(self) -> bool:
        """Return True if everything was sent and received, or has failed."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Block until everything was sent and received, or raise CommunicationError.

        For tensors on a device, the current stream waits for what arrives.  The host does not wait for a foreground
        transfer over NCCL.
        """
        transport = self.channel.transport
        if not self._ended.is_set():
            with transport.exposed(self.purpose):
                self._failure = self._late() or self._failure
        if self._failure is not None:
            raise CommunicationError(self.describe(self._failure))
        for rank, handle in self.arriving:
            transport.count_received(rank, len(handle.wait()), self.purpose.kind)  # copies what came early
        self.arriving = []
        if not self.channel.is_background:
            transport.count_waits([self])
        if self.device_side is not None:
            self.device_side.deliver()
            self.device_side = None

    def _late(self) -> str | None:
        """Wait for the end, say once that it takes long, and return why it will not come."""
        transport, notice_s = self.channel.transport, self.channel.transport.notice_s
        if self._ended.wait(notice_s):
            return None
        missing = [rank for rank, handle in self.arriving if not handle.done()]
        logger.warning("%s", self.describe(f"has waited {notice_s:.0f} s for ranks {missing}"))
        if self._ended.wait(notice_s):
            return None
        # A message under way has begun by now.
        missing = [rank for rank, handle in self.arriving if not (handle.done() or handle.has_begun)]
        if gone := [(rank, one) for rank in missing for one in self.channel.unasked(rank)]:
            return f"will not end: rank {gone[0][0]} has gone on to {gone[0][1]}"
        if self._ended.wait(max(0.0, transport.timeout_s - 2 * notice_s)):
            return None
        return transport.passed_limit()

    def add(self, handle: Handle | None = None) -> None:
        """Let this transfer end only after a message of the link has gone or arrived, or after one more `end_part`."""
        with self._lock:
            self._num_left += 1
        if handle is not None:
            handle.add_done_callback(lambda one: self.end_part(one.result()))

    def end_part(self, failure: str | None = None) -> None:
        """Note that a part has ended, by the given failure if there is one."""
        with self._lock:
            if failure is not None:
                self._failure = self._failure or f"failed: {failure}"
            self._num_left -= 1
            if self._num_left:
                return
        if self.device_side is not None:
            self.device_side.release_sends()
        self.end_ns = time.perf_counter_ns()
        transport, is_background = self.channel.transport, self.channel.is_background
        if is_background and (records := transport.records) is not None:  # the main thread may end a trace at any time
            records.append(self)  # first: after the wait for the last transfer the trace has all
        self._ended.set()
        if is_background:
            transport.note_finished()

    def __str__(self) -> str:
        level = self.channel.transport.cluster.levels[self.channel.level].name
        ranks = f"to ranks {self._destinations}, from ranks {self._sources}"
        return f"{self.purpose} over level '{level}' ({self.num_bytes} bytes, {ranks})"

    def describe(self, failure: str) -> str:
        is_of_forward = self.purpose.kind in ("tokens", "expert_weights", "control")
        return (
            f"rank {self.channel.transport.rank}: {self} {failure}; "
            f"{UNEQUAL_CALLS if is_of_forward else ''}look at the log of the ranks named for the first error"
        )


class Channel:
    """Connections between `ranks` that serve one purpose.

    A background channel reports the end of each transfer at once.  If it carries tensors of a device, it has a thread
    for that: it hands over what has reached the host, in the order of `start`, and waits for NCCL.
    """

    def __init__(
        self, transport: "Transport", name: str, ranks: Sequence[int], level: int, *, background: bool
    ) -> None:
        self.transport, self.name, self.ranks = transport, name, tuple(ranks)
        self.level, self.is_background = level, background
        fastest = max(1, len(transport.cluster.levels) - 1)  # messages over it are acknowledged in no time
        self._far = {rank for rank in ranks if rank != transport.rank and transport.level_to(rank) < fastest}
        priority = BULK if background else URGENT
        self._messages = transport.link.channel(name, self.ranks, generation=transport.generation, priority=priority)
        self._nccl: NcclGroup | None = None  # made by `prepare`
        self._is_closed = False
        self._failure: str | None = None  # once set, nothing more is sent from a device: messages match by order
        self._waiting: queue.SimpleQueue[Transfer | None] = queue.SimpleQueue()
        # Made when needed: it refers to the channel, so a channel that has one is not freed with its last user.
        self._thread: threading.Thread | None = None

    @property
    def has_equal_lengths(self) -> bool:
        """True over NCCL, where a message must be exactly as long as the room that its receiver has made for it."""
        return self.transport.backends[self.level] == "nccl"

    def prepare(self, device: torch.device) -> None:
        """Connect the ranks for tensors on `device`, or raise CommunicationError; all ranks of the channel must call.

        Without this call, the first transfer connects them and blocks until all ranks have started it.  A background
        transfer must not block, because some ranks start it only after others have gone on.
        """
        if self._nccl is None and self.has_equal_lengths and (streams := streams_of(device)) is not None:
            job = self.transport
            self._nccl = NcclGroup(
                self.name, self.ranks, streams, rank=job.rank, generation=job.generation, timeout_s=job.timeout_s
            )

    def start(self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], purpose: Purpose) -> Transfer:
        """Start sending and receiving; the tensors must stay untouched until the transfer has finished.

        Tensors on a device are sent after the work that is queued on the current stream.

        Args:
            sends: (global rank, contiguous tensor); empty tensors are skipped on both ends.
            receives: (global rank, contiguous tensor to fill); messages may be shorter, see `has_equal_lengths`.
            purpose: kind, operation and layer; the same at both ends.
        """
        assert not self._is_closed, f"channel {self.name} was closed"
        sends = [(rank, tensor) for rank, tensor in sends if tensor.numel()]
        receives = [(rank, tensor) for rank, tensor in receives if tensor.numel()]
        transfer = Transfer(self, purpose, sends, receives)
        self.transport.last_transfer = transfer
        streams = streams_of((sends or receives)[0][1].device) if sends or receives else None
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
        transfer.end_part()
        return transfer

    def _post(self, transfer: Transfer, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor]) -> None:
        """Give messages in host memory to the link."""
        kind = str(transfer.purpose)
        for rank, tensor in receives:
            receive = self._messages.receive(rank, into=tensor, kind=kind)
            transfer.arriving.append((rank, receive))
            transfer.add(receive)
        for rank, tensor in sends:
            is_own = transfer.device_side is not None  # pinned memory, which the link keeps as long as it needs it
            if not is_own and rank in self._far and tensor.nbytes <= COPIED_BYTES:
                tensor, is_own = tensor.detach().clone(), True
            send = self._messages.send(rank, tensor, kind=kind)
            if not is_own:
                transfer.add(send)

    def _start_on_device(
        self, transfer: Transfer, streams: DeviceStreams, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor]
    ) -> None:
        if self.has_equal_lengths:
            self.prepare(streams.device)
            assert self._nccl is not None
            transfer.device_side = self._nccl.start(sends, receives)
            for rank, tensor in receives:
                self.transport.count_received(rank, tensor.nbytes, transfer.purpose.kind)
        else:
            transfer.device_side = pinned = Pinned(streams, sends, receives, is_awaited=self.is_background)
            self._post(transfer, (), pinned.receives)
        if self.is_background:
            transfer.add()
            self._hand_over(transfer, streams)
        elif not self.has_equal_lengths:
            # Blocking costs nothing: the caller waits for a foreground transfer next, and the peers block here too.
            with self.transport.exposed(transfer.purpose):
                self._await_device(transfer)

    # -- the thread -------------------------------------------------------------------------------------------------

    def _hand_over(self, transfer: Transfer, streams: DeviceStreams) -> None:
        if self._thread is None:
            # A thread that comes back from C++ while the interpreter ends would abort it.
            atexit.register(self._end_thread)
            self._thread = threading.Thread(
                target=self._run, args=[streams], name=f"hybridep-{self.name}", daemon=True
            )
            self._thread.start()
        self._waiting.put(transfer)

    def _run(self, streams: DeviceStreams) -> None:
        streams.choose_device()
        while (transfer := self._waiting.get()) is not None:
            try:
                if self._failure is not None:
                    raise RuntimeError(self._failure)
                self._await_device(transfer)
                transfer.end_part()
            except RuntimeError as error:
                self._failure = first_line(error)
                transfer.end_part(self._failure)
        atexit.unregister(self._end_thread)  # not in `close`: after it, the thread may still be waited for

    def _await_device(self, transfer: Transfer) -> None:
        assert transfer.device_side is not None
        transfer.device_side.wait(self.transport.timeout_s)
        self._post(transfer, transfer.device_side.sends, ())

    def _end_thread(self) -> None:
        self._waiting.put(None)
        if self._thread is not None:
            with waiting():
                self._thread.join(min(self.transport.timeout_s, EXIT_LIMIT_S))

    def unasked(self, rank: int) -> list[str]:
        """Return what `rank` has sent in place of what this rank waits for: a foreground channel has one order."""
        return [] if self.is_background else self._messages.unasked(rank)

    def close(self) -> None:
        """Let the thread end and drop what has not arrived.  Does not block."""
        self._is_closed = True
        self._waiting.put(None)
        self._messages.close()
        self._nccl = None


class Transport:
    """All channels of one attached model on this rank, with one time limit and one set of counters.

    Args:
        cluster: its levels are used in counters and errors, and say which connections each channel has.
        timeout_s: the longest wait for ranks that live.
        link: how ranks connect with each other.
        generation: from `agree`; makes the names of these connections unique in the job.
        backends: "gloo" or "nccl" at each level, for tensors on a device; empty for gloo, which stands for the link.

    All ranks of the job must make one at the same point.  Raises CommunicationError if the link cannot be opened.
    """

    def __init__(
        self, cluster: Cluster, timeout_s: float, generation: int, backends: Sequence[str] = (),
        *, link: LinkSettings | None = None,
    ) -> None:  # fmt: skip
        self.cluster, self.timeout_s, self.generation = cluster, timeout_s, generation
        # A wait that is worth a word: longer than a broken connection takes to be made again.
        self.notice_s = min(timeout_s, max(LEAST_NOTICE_S, (link.timeout_s if link else timeout_s) / 10))
        self.backends = tuple(backends) or ("gloo",) * len(cluster.levels)
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.traffic = Traffic()
        self.last_transfer: Transfer | None = None  # the one that was started last
        self.records: list[Transfer] | None = None  # finished background transfers, while a trace is taken
        self._channels: dict[tuple[str, tuple[int, ...]], Channel] = {}
        self.num_finished = 0  # background transfers that have ended
        self._level_of_rank = [cluster.level_between(self.rank, rank) for rank in range(self.world_size)]
        self._finished = threading.Condition()
        self._is_closed = False
        self.link = open_link(cluster, generation, link or LinkSettings(timeout_s))

    def channel(self, name: str, ranks: Sequence[int], *, background: bool = False, hub: int | None = None) -> Channel:
        """Return the channel `name` over `ranks`, made at the first call; its ranks must call in the same order.

        hub: the one rank that all messages come from or go to; others need no connections with each other.
        """
        key = (name, tuple(ranks))
        if key not in self._channels:
            level = min(self.level_to(rank) for rank in ranks if rank != self.rank)
            self.link.meet(ranks if hub in (None, self.rank) else (hub,))
            self._channels[key] = Channel(self, name, ranks, level, background=background)
        return self._channels[key]

    def level_to(self, rank: int) -> int:
        """Return the index of the slowest level that a message to `rank` crosses."""
        level = self._level_of_rank[rank]
        assert level is not None, f"rank {rank} sends to itself"
        return level

    def count_received(self, rank: int, num_bytes: int, kind: str) -> None:
        self.traffic.received_bytes[self.level_to(rank), kind] += num_bytes

    def count_waits(self, transfers: Sequence[Transfer]) -> None:
        """Count a wait for transfers over each level that they crossed.

        A transfer that started before an earlier wait over the level ended does not count again: the two travelled
        together, and the earlier wait includes the delay of both.
        """
        waits = self.traffic.waits
        for transfer in transfers:
            for level, before in transfer.waits_before.items():
                if waits[level] == before:
                    waits[level] = before + 1

    def passed_limit(self) -> str:
        """Return why a transfer is given up that nothing else has ended."""
        hint = "raise hybridep.timeout_s if the link is merely slow"
        return f"passed the time limit of {self.timeout_s:g} s; {hint}"

    def note_finished(self) -> None:
        with self._finished:
            self.num_finished += 1
            self._finished.notify_all()

    def wait_for_more_than(self, num_finished: int, limit_s: float) -> bool:
        """Block until more than `num_finished` background transfers have ended; return False after the limit."""
        with self._finished:
            return self._finished.wait_for(lambda: self.num_finished > num_finished, limit_s)

    @contextlib.contextmanager
    def exposed(self, purpose: Purpose) -> Iterator[None]:
        """Count the seconds inside as time during which training waited for `purpose`."""
        begin = time.perf_counter()
        with profiler_range("wait", str(purpose)), waiting():
            yield
        self.traffic.exposed_s[purpose.kind] += time.perf_counter() - begin

    def close(self) -> None:
        """Close every channel; call this when every transfer has ended or never will.  Later calls do nothing."""
        if self._is_closed:
            return
        self._is_closed = True
        for channel in self._channels.values():
            channel.close()
        self._channels.clear()
        self.link.leave()


def profiler_range(*words: str) -> contextlib.AbstractContextManager[Any]:
    """Return a range "hybridep::..." for torch's profiler, which costs nothing if no profiler runs."""
    if torch._C._autograd._profiler_enabled():
        return torch.profiler.record_function("::".join(("hybridep", *words)))
    return _NO_RANGE
