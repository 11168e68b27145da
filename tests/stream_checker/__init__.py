# SPDX-License-Identifier: Apache-2.0
"""Streams without a GPU: what the runtime uses of torch.cuda, played on the CPU, and a search for races between them.

`FakeCuda` takes the place of torch.cuda in `DeviceStreams`.  Operations compute at once, as they are called, so
results are those of a CPU; which stream each one would have run in, and which waits order it behind others, is kept by
a `StreamChecker`.  Every stream and every thread has a clock of all others (a vector clock):

    an operation     reads and writes bytes of memory at its stream's time, behind all that its thread knows to be over
    event.record     remembers the stream's clock
    wait_event       the stream knows what the event remembers;  event.synchronize: the thread does
    memory is freed  it goes back to the stream that it was allocated in, which must know of all uses in others

An access that does not know of an earlier one to the same bytes, one of the two writing, is a race, whatever the order
in which they happened to run here.  Kernels of our own, which torch does not dispatch, are not seen.
"""

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_hybridep.experts import replicas as expert_gather
from ds_hybridep.transport import channels, job, nccl
from ds_hybridep.transport.streams import DeviceStreams, Pinned

Clock = dict[str, int]  # actor (a stream or a thread) -> its time

MAIN = "compute"  # the stream that is current where nobody says otherwise
HOST = "host"  # owner of pinned memory


def merge(clock: Clock, other: Clock) -> None:
    for actor, at in other.items():
        clock[actor] = max(clock.get(actor, 0), at)


class Memory:
    """Who used the bytes of one storage, and when."""

    def __init__(self, tensor: Tensor, owner: str) -> None:
        self.owner = owner  # the stream that it was allocated in
        self.storage = StorageWeakRef(tensor.untyped_storage())
        num_bytes = tensor.untyped_storage().nbytes()
        self.names = [""]  # of actors that wrote
        self.writer = np.zeros(num_bytes, dtype=np.int8)
        self.written = np.zeros(num_bytes, dtype=np.int64)
        self.read: dict[str, np.ndarray] = {}
        self.let_go: Clock = {}  # what threads knew that have given up this memory

    def conflicts(self, where: slice, clock: Clock, *, is_write: bool) -> Iterator[str]:
        """Actors whose use of these bytes `clock` does not know to be over."""
        for index, actor in enumerate(self.names):
            times = self.written[where][self.writer[where] == index]
            if times.max(initial=0) > clock.get(actor, 0):
                yield f"written by {actor}"
        for actor, times in self.read.items() if is_write else ():
            if times[where].max(initial=0) > clock.get(actor, 0):
                yield f"read by {actor}"

    def note(self, where: slice, actor: str, now: int, *, is_write: bool) -> None:
        if is_write:
            if actor not in self.names:
                self.names.append(actor)
            self.writer[where], self.written[where] = self.names.index(actor), now
        else:
            times = self.read.setdefault(actor, np.zeros(len(self.written), dtype=np.int64))
            times[where] = now

    def last_uses(self) -> Iterator[tuple[str, int]]:
        for index, actor in enumerate(self.names):
            yield actor, int(self.written[self.writer == index].max(initial=0))
        for actor, times in self.read.items():
            yield actor, int(times.max(initial=0))


class StreamChecker(TorchDispatchMode):
    """Inside, all operations on tensors are taken to be those of one device, in the current fake stream."""

    def __init__(self, cuda: "FakeCuda") -> None:
        super().__init__()
        self.cuda = cuda
        self._lock = threading.Lock()
        self.races: list[str] = []
        self.memory: dict[int, Memory] = {}
        self.shared: set[int] = set()  # used by more than their owner

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outputs = func(*args, **kwargs)
        reads, writes, made = _accesses(func._schema, args, kwargs, outputs)
        stream = self.cuda.current_stream().name
        for tensor in made:
            if tensor.numel() and tensor.device.type == "cpu":
                self.own(tensor, stream)
        self.launch(str(func._schema.name), stream, reads, writes + made)
        return outputs

    def launch(self, name: str, stream: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        """One operation in a stream, given by this thread."""
        with self._lock:
            clock = self.cuda.clocks[stream]
            merge(clock, self.cuda.thread_clock())
            self._sweep()
            clock[stream] = now = clock.get(stream, 0) + 1
            for tensor, is_write in [*((t, False) for t in reads), *((t, True) for t in writes)]:
                self._use(name, tensor, stream, now, clock, is_write=is_write)

    def own(self, tensor: Tensor, owner: str) -> None:
        """New memory belongs to `owner`."""
        with self._lock:
            self.memory[tensor.untyped_storage()._cdata] = Memory(tensor, owner)

    def let_go(self, tensor: Tensor) -> None:
        """This thread gives up memory: whoever frees it comes after that."""
        with self._lock:
            memory = self.memory.get(tensor.untyped_storage()._cdata)
            if memory is not None:
                merge(memory.let_go, self.cuda.thread_clock())

    def wait_before_reuse(self, tensor: Tensor, stream: str) -> None:
        """Memory of a tensor that is freed is used again only behind what `stream` was given so far."""
        with self._lock:
            memory = self.memory.get(tensor.untyped_storage()._cdata)
            if memory is not None:
                merge(memory.let_go, self.cuda.clocks[stream])

    def by_host(self, name: str, tensor: Tensor, *, is_write: bool) -> None:
        """This thread, or the network on its behalf, uses host memory."""
        with self._lock:
            clock, actor = self.cuda.thread_clock(), threading.current_thread().name
            clock[actor] = clock.get(actor, 0) + 1
            self._use(name, tensor, actor, clock[actor], clock, is_write=is_write)

    def _use(self, name: str, tensor: Tensor, actor: str, now: int, clock: Clock, *, is_write: bool) -> None:
        where = _bytes_of(tensor)
        if where is None:
            return
        key = tensor.untyped_storage()._cdata
        memory = self.memory.get(key)
        if memory is None or len(memory.written) < tensor.untyped_storage().nbytes():
            memory = self.memory[key] = Memory(tensor, MAIN)  # from before
        if actor != memory.owner:
            self.shared.add(key)
        for conflict in memory.conflicts(where, clock, is_write=is_write):
            if not conflict.endswith(f" {actor}"):
                self.races.append(f"{name} in {actor} {'writes' if is_write else 'reads'} what was {conflict}")
        memory.note(where, actor, now, is_write=is_write)

    def _sweep(self) -> None:
        """Memory that was freed since the last operation goes back to its owner."""
        for key in [key for key in self.shared if self.memory[key].storage.expired()]:
            memory = self.memory.pop(key)
            self.shared.discard(key)
            if memory.owner == HOST:
                continue  # torch's allocator of pinned memory waits for copies, and gloo keeps what it sends
            known = dict(self.cuda.clocks[memory.owner])
            merge(known, self.cuda.thread_clock())
            merge(known, memory.let_go)
            for actor, at in memory.last_uses():
                if actor != memory.owner and at > known.get(actor, 0):
                    self.races.append(f"memory of {memory.owner} is freed while {actor} may use it")
        if len(self.memory) > 4000:
            # Another thread may have freed shared memory just now: the next sweep looks at that.
            self.memory = {
                key: one for key, one in self.memory.items() if key in self.shared or not one.storage.expired()
            }


class FakeStream:
    """In the place of torch.cuda.Stream."""

    def __init__(self, cuda: "FakeCuda", name: str) -> None:
        self.cuda, self.name = cuda, name
        cuda.clocks[name] = {}

    def wait_event(self, event: "FakeEvent") -> None:
        if not self.cuda.is_dropped():
            merge(self.cuda.clocks[self.name], event.clock)

    def synchronize(self) -> None:
        merge(self.cuda.thread_clock(), self.cuda.clocks[self.name])


class FakeEvent:
    """In the place of torch.cuda.Event."""

    def __init__(self, cuda: "FakeCuda", is_awaited: bool) -> None:
        self.cuda, self.is_awaited, self.clock = cuda, is_awaited, Clock()

    def record(self, stream: FakeStream) -> None:
        merge(self.cuda.clocks[stream.name], self.cuda.thread_clock())
        self.clock = dict(self.cuda.clocks[stream.name])

    def synchronize(self) -> None:
        if self.is_awaited:
            self.cuda.on_sleep()
        if not self.cuda.is_dropped():
            merge(self.cuda.thread_clock(), self.clock)

    def query(self) -> bool:
        merge(self.cuda.thread_clock(), self.clock)
        return True


class FakeCuda:
    """In the place of torch.cuda.

    dropped: parts of the names of functions; a wait that is asked for beneath all of them, and beneath none of those
        after a "!", does nothing.
    """

    def __init__(self, *dropped: str) -> None:
        self.dropped = dropped
        self.num_dropped = 0
        self.clocks: dict[str, Clock] = {}
        self._of_threads: dict[str, Clock] = defaultdict(Clock)
        self._main = FakeStream(self, MAIN)
        self._current = threading.local()
        self._num_streams = 0

    def Stream(self, device: torch.device) -> FakeStream:
        self._num_streams += 1
        names = {1: "side", 2: "outbound", 3: "inbound"}
        return FakeStream(self, names.get(self._num_streams, f"stream {self._num_streams}"))

    def Event(self, *, blocking: bool = False) -> FakeEvent:
        return FakeEvent(self, blocking)

    def set_device(self, _device: Any) -> None:
        """There is one."""

    def current_stream(self, _device: Any = None) -> FakeStream:
        return getattr(self._current, "stream", self._main)

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self._current.stream = self.current_stream(), stream
        try:
            yield
        finally:
            self._current.stream = before

    def thread_clock(self) -> Clock:
        """What the calling thread knows to be over."""
        return self._of_threads[threading.current_thread().name]

    def on_sleep(self) -> None:
        """A thread waits for a device that is behind."""
        time.sleep(0.001)

    def is_dropped(self) -> bool:
        """Whether the wait that is being asked for is one of those to leave out."""
        if not self.dropped:
            return False
        names, frame = [], sys._getframe(1)
        while frame is not None and len(names) < 12:
            names.append(f"{frame.f_globals.get('__name__', '')}.{frame.f_code.co_qualname}")
            frame = frame.f_back
        found = all(any(part.lstrip("!") in name for name in names) != part.startswith("!") for part in self.dropped)
        self.num_dropped += found
        return found


class FakeStreams(DeviceStreams):
    """Streams of a device that is the CPU."""

    def __init__(self, cuda: FakeCuda, checker: StreamChecker | None) -> None:
        super().__init__(torch.device("cpu"), cuda)
        self._checker = checker

    def free_behind_side(self, tensor: Tensor) -> None:
        if self._checker is not None:
            self._checker.wait_before_reuse(tensor, "side")

    def pinned_like(self, tensor: Tensor) -> Tensor:
        with torch.utils._python_dispatch._disable_current_modes():
            pinned = torch.empty_like(tensor)
        if self._checker is not None:
            self._checker.own(pinned, HOST)
        return pinned


class FakeNccl:
    """In the place of an NCCL process group: one batch at a time, over gloo, in a stream of its own.

    Every message is preceded by its length, which must be that of the room that was made for it.
    """

    def __init__(
        self, cuda: FakeCuda, checker: StreamChecker, name: str, ranks: Any, *, rank: int, timeout_s: float
    ) -> None:
        self._cuda, self._checker = cuda, checker
        path = f"fake_nccl/{name}/{ranks}"
        store = torch.distributed.distributed_c10d.PrefixStore(path, job.job_store())
        limit = timedelta(seconds=timeout_s)
        self._group = torch.distributed.distributed_c10d.ProcessGroupGloo(store, ranks.index(rank), len(ranks), limit)
        self._stream = FakeStream(cuda, f"nccl {name} {ranks}")
        self._batch: list[tuple[bool, Tensor, int]] = []

    def _start_coalescing(self, _device: torch.device) -> None:
        self._batch = []

    def send(self, tensors: list[Tensor], index: int, _tag: int) -> None:
        self._batch.append((True, tensors[0], index))

    def recv(self, tensors: list[Tensor], index: int, _tag: int) -> None:
        self._batch.append((False, tensors[0], index))

    def _end_coalescing(self, _device: torch.device) -> "FakeNccl":
        works, lengths = [], []
        with torch.utils._python_dispatch._disable_current_modes():
            for is_send, tensor, index in self._batch:
                length = torch.tensor([tensor.nbytes if is_send else -1])
                start = self._group.send if is_send else self._group.recv
                works += [start([length], index, 0), start([tensor], index, 0)]
                lengths.append((length, tensor))
            for work in works:
                work.wait()
            assert all(int(length) == tensor.nbytes for length, tensor in lengths), "NCCL would wait for ever"
        before = FakeEvent(self._cuda, is_awaited=False)
        before.record(self._cuda.current_stream())
        self._stream.wait_event(before)
        sent, received = ([tensor for is_send, tensor, _ in self._batch if is_send == way] for way in (True, False))
        self._checker.launch("nccl", self._stream.name, sent, received)
        return self

    def wait(self) -> None:
        """As of a work: the current stream goes on behind the batch."""
        after = FakeEvent(self._cuda, is_awaited=False)
        after.record(self._stream)
        self._cuda.current_stream().wait_event(after)


@contextmanager
def fake_nccl(cuda: FakeCuda, checker: StreamChecker) -> Iterator[None]:
    """All levels choose NCCL, and get `FakeNccl`."""

    def connect(name: str, ranks: Any, rank: int, *, timeout_s: float, device: torch.device) -> FakeNccl:
        return FakeNccl(cuda, checker, name, ranks, rank=rank, timeout_s=timeout_s)

    with mock.patch.object(job, "backend_for", return_value="nccl"):
        with mock.patch.object(nccl, "connect_nccl", connect):
            yield


@contextmanager
def fake_device(cuda: FakeCuda, checker: StreamChecker | None = None) -> Iterator[FakeStreams]:
    """Tensors of the CPU are those of a device."""
    streams = FakeStreams(cuda, checker)
    told = _HandOvers(cuda, checker)
    with (
        mock.patch.object(channels, "streams_of", return_value=streams),
        mock.patch.object(expert_gather, "streams_of", return_value=streams),
        mock.patch.object(channels.Channel, "_hand_over", told.wrap(channels.Channel._hand_over, told.put)),
        mock.patch.object(channels.Channel, "_await_device", told.wrap(channels.Channel._await_device, told.take)),
        mock.patch.object(channels.Channel, "_post", told.wrap(channels.Channel._post, told.post)),
        mock.patch.object(Pinned, "release_sends", told.wrap(Pinned.release_sends, told.finish)),
        mock.patch.object(Pinned, "wait", told.wrap(Pinned.wait, told.await_sends)),
        mock.patch.object(Pinned, "deliver", told.wrap(Pinned.deliver, told.deliver)),
        mock.patch.object(nccl.NcclBatch, "deliver", told.wrap(nccl.NcclBatch.deliver, told.deliver)),
        mock.patch.object(torch, "frombuffer", told.frombuffer),
    ):
        yield streams


class _HandOvers:
    """What one thread tells another with a transfer, and what the link does with memory."""

    def __init__(self, cuda: FakeCuda, checker: StreamChecker | None) -> None:
        self._cuda, self._checker = cuda, checker
        self._told: dict[int, Clock] = defaultdict(Clock)  # by a transfer's side on the device

    @staticmethod
    def wrap(original: Any, method: Any) -> Any:
        def call(*args: Any) -> None:
            method(original, *args)

        return call

    def put(self, original: Any, channel: Any, transfer: Any, streams: Any) -> None:
        self._tell(transfer.device_side)
        original(channel, transfer, streams)

    def take(self, original: Any, channel: Any, transfer: Any) -> None:
        merge(self._cuda.thread_clock(), self._told[id(transfer.device_side)])
        original(channel, transfer)
        self._tell(transfer.device_side)

    def finish(self, original: Any, pinned: Any) -> None:
        """The link's thread has filled the memory of the receives; it knows what was known when they were posted."""
        clock = self._cuda.thread_clock()
        known = dict(clock)
        merge(clock, self._told[id(pinned)])
        for _, tensor in pinned.receives if self._checker is not None else ():
            self._checker.by_host("network", tensor, is_write=True)
        self._tell(pinned)
        if threading.current_thread().name == "hybridep-link":
            clock.clear()  # of the next message it knows nothing
            clock.update(known)
        original(pinned)

    def deliver(self, original: Any, pinned: Any) -> None:
        merge(self._cuda.thread_clock(), self._told.pop(id(pinned), {}))
        original(pinned)

    def post(self, original: Any, channel: Any, transfer: Any, sends: Any, receives: Any) -> None:
        for _, tensor in sends if self._checker is not None and transfer.device_side is not None else ():
            self._checker.by_host("send", tensor, is_write=False)
        original(channel, transfer, sends, receives)
        self._tell(transfer.device_side)

    def await_sends(self, original: Any, pinned: Any, timeout_s: float) -> None:
        held = list(pinned._origins)
        original(pinned, timeout_s)
        if self._checker is not None:
            for tensor in held:
                self._checker.let_go(tensor)

    def frombuffer(self, *args: Any, _original: Any = torch.frombuffer, **kwargs: Any) -> Tensor:
        """Of the host's memory; no operation tells of it."""
        tensor = _original(*args, **kwargs)
        if self._checker is not None:
            self._checker.own(tensor, HOST)
        return tensor

    def _tell(self, device_side: Any) -> None:
        if device_side is not None:
            merge(self._told[id(device_side)], self._cuda.thread_clock())


def _accesses(schema: Any, args: Any, kwargs: Any, outputs: Any) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Tensors that an operation reads, those that it changes, and those that it makes; views read nothing."""
    reads, writes, made = [], [], []
    names = [argument.name for argument in schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    is_factory = schema.name.split("::")[-1].startswith("new_") or schema.name.endswith("_like")
    if schema.name == "aten::lift_fresh":  # of torch.tensor, which no other operation tells of
        return [], [], [args[0]]
    for argument in schema.arguments:
        tensors = [leaf for leaf in tree_leaves(given.get(argument.name)) if isinstance(leaf, Tensor)]
        if argument.alias_info is not None and argument.alias_info.is_write:
            writes += tensors
            if not schema.name.endswith(("copy_", "fill_", "zero_")):
                reads += tensors
        elif argument.alias_info is None and not is_factory:
            reads += tensors
    for result in schema.returns:
        if result.alias_info is None:  # new memory, but for views that do not say so
            given_memory = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
            found = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
            made = [tensor for tensor in found if tensor.untyped_storage()._cdata not in given_memory]
            break
    return reads, writes, made


def _bytes_of(tensor: Tensor) -> slice | None:
    """From the first to the last byte of its storage that a tensor covers; None for none."""
    if tensor.numel() == 0 or tensor.device.type != "cpu" or type(tensor) is not Tensor:
        if not isinstance(tensor, torch.nn.Parameter) or tensor.numel() == 0:
            return None
    size = tensor.element_size()
    first = tensor.storage_offset()
    last = first + sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return slice(first * size, (last + 1) * size)
