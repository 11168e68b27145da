# SPDX-License-Identifier: Apache-2.0
"""Messages on their way: handles to wait for them, and where those that arrive find their memory.

A message is known by its key: its stream and its number in it.  Where a receive waits for the key, the message is read
into that receive's memory; else into memory of our own, which a later receive takes over or copies from.
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

from ds_hybridep.errors import CommunicationError
from ds_hybridep.link.wire import CHUNK_BYTES, LEAST_CHUNK_BYTES, Frame, Kind

logger = logging.getLogger(__name__)
Key = tuple[bytes, int]  # stream, sequence


class Handle:
    """A message that was given to `Channel.send` or asked for with `Channel.receive`."""

    def __init__(self, what: str) -> None:
        self.what = what  # for errors
        self._ended = threading.Event()
        self._failure: str | None = None
        self._callbacks: list[Callable[[Any], object]] = []
        self._lock = threading.Lock()

    def is_done(self) -> bool:
        """Return True if it was received, or its receipt was acknowledged, or if that will never happen."""
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> memoryview:
        """Block until it is done.  Return what was received; of a send nothing.

        Raises CommunicationError if the other rank is gone, if the message is longer than its receive takes, or after
        `timeout_s`; it may then be waited for again.
        """
        if not self._ended.wait(timeout_s):
            raise CommunicationError(f"{self.what} was not done after {timeout_s:g} s; see the log of that rank")
        if self._failure is not None:
            raise CommunicationError(f"{self.what} failed: {self._failure}")
        return self._result()

    def when_done(self, callback: Callable[[Any], object]) -> None:
        """Call `callback` with this handle once it is done: at once, or in the link's thread, which it must not block."""
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def end(self, failure: str | None = None) -> None:
        """Mark it as done or, with a reason, as failed; a second call does nothing."""
        with self._lock:
            if self._ended.is_set():
                return
            self._failure = failure
            self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(self)
            except Exception:  # noqa: BLE001 (the caller's code; the link's thread must go on)
                logger.exception("a callback of %s failed", self.what)

    def _result(self) -> memoryview:
        return memoryview(b"")


class Send(Handle):
    """A message to another rank.  Refers to the caller's memory until its receipt is acknowledged."""

    def __init__(self, what: str, key: Key, data: memoryview, num_pieces: int) -> None:
        super().__init__(what)
        self.key, self._data, self._next = key, data, 0
        self._chunk_bytes = min(max(-(-len(data) // num_pieces), LEAST_CHUNK_BYTES), CHUNK_BYTES)
        self._num_left = max(1, -(-len(data) // self._chunk_bytes))  # frames that were not acknowledged

    def next_frame(self) -> tuple[Frame, memoryview, bool]:
        """Return the next piece, and whether it is the last one."""
        begin, self._next = self._next, min(self._next + self._chunk_bytes, len(self._data))
        frame = Frame(Kind.DATA, self._next - begin, *self.key, len(self._data), begin)
        return frame, self._data[begin : self._next], self._next == len(self._data)

    def acknowledge_frame(self) -> bool:
        """Return True if that was the last one."""
        self._num_left -= 1
        if not self._num_left:
            self._data = memoryview(b"")
            self.end()
        return not self._num_left


class Receive(Handle):
    """A message that is expected from another rank."""

    def __init__(self, what: str, into: memoryview | None, max_bytes: int) -> None:
        super().__init__(what)
        self.into, self.max_bytes = into, max_bytes
        self.memory: memoryview | None = None  # where it has arrived, as long as it is

    def _result(self) -> memoryview:
        with self._lock:
            assert self.memory is not None, self.what
            if self.into is not None and self.memory.obj is not self.into.obj:
                # In the waiting thread, so that connections do not stand still meanwhile.
                place = self.into[: len(self.memory)]
                place[:] = self.memory
                self.memory = place
            return self.memory


Ended = tuple[Receive, str | None]  # with the reason if it has failed


class Arrival:
    """A message of which at least one header has arrived; `memory` is None if it is thrown away."""

    def __init__(self, memory: memoryview | None, total: int, receive: Receive | None) -> None:
        self.memory, self.receive, self.num_missing = memory, receive, total

    def place(self, frame: Frame) -> memoryview | None:
        return None if self.memory is None else self.memory[frame.offset : frame.offset + frame.length]


class Inbox:
    """What has arrived from one peer or is expected from it.  All methods need the link's lock.

    bound_bytes: for messages that no receive waits for.
    """

    def __init__(self, bound_bytes: int) -> None:
        self._bound_bytes, self._early_bytes = bound_bytes, 0
        self._receives: dict[Key, Receive] = {}  # of which nothing has arrived
        self._arrivals: dict[Key, Arrival] = {}

    def is_waited_for(self) -> bool:
        """Return True if a receive waits for a message of which nothing has arrived."""
        return bool(self._receives)

    def post(self, key: Key, receive: Receive) -> Ended | None:
        """Let `receive` have its message; it has ended if all of it is here already."""
        if (arrival := self._arrivals.get(key)) is None:
            self._receives[key] = receive
            return None
        total = 0 if arrival.memory is None else len(arrival.memory)
        self._early_bytes -= total
        arrival.receive = receive
        if total > receive.max_bytes:
            arrival.memory = None
        return self._finish(key, arrival, total) if not arrival.num_missing else None

    def place(self, frame: Frame, *, must: bool) -> Arrival | None:
        """Return where a DATA frame belongs; None if it has to wait, because early messages fill the bound.

        must: ignore the bound.
        """
        key = frame.stream, frame.sequence
        if (arrival := self._arrivals.get(key)) is not None:
            return arrival
        receive = self._receives.pop(key, None)
        memory: memoryview | None = None
        if receive is None:
            if self._early_bytes + frame.total > self._bound_bytes and not must:
                return None
            self._early_bytes += frame.total
            memory = memoryview(bytearray(frame.total))
        elif frame.total <= receive.max_bytes:
            memory = memoryview(bytearray(frame.total)) if receive.into is None else receive.into[: frame.total]
        self._arrivals[key] = Arrival(memory, frame.total, receive)
        return self._arrivals[key]

    def add(self, frame: Frame, arrival: Arrival) -> Ended | None:
        """Note that a frame has been read; the receive that waits for it has ended if that was the last one."""
        if frame.length > arrival.num_missing or (arrival.memory is not None and frame.total != len(arrival.memory)):
            raise ConnectionError(f"it sent more than the whole of a message: {frame}")
        arrival.num_missing -= frame.length
        if arrival.num_missing or arrival.receive is None:
            return None
        return self._finish((frame.stream, frame.sequence), arrival, frame.total)

    def _finish(self, key: Key, arrival: Arrival, total: int) -> Ended:
        del self._arrivals[key]
        receive, failure = arrival.receive, None
        assert receive is not None, key
        receive.memory = arrival.memory
        if arrival.memory is None:
            failure = f"it has {total} bytes, and this rank expects at most {receive.max_bytes}; do the ranks differ?"
        return receive, failure

    def clear(self) -> list[Receive]:
        """Forget everything, and return the receives that have to be ended."""
        waiting = [*self._receives.values(), *(one.receive for one in self._arrivals.values() if one.receive)]
        self._receives.clear()
        # What has arrived whole can still be received after its sender has gone.
        self._arrivals = {
            key: one for key, one in self._arrivals.items() if one.receive is None and not one.num_missing
        }
        return waiting
