# SPDX-License-Identifier: Apache-2.0
"""Messages to and from one peer: handles to wait for them, and where those that arrive find their memory.

A message is known by its key: its stream and its number in it.  Where a receive waits for the key, the message is read
into that receive's memory; else into new memory, bounded, which a later receive of the key takes over.
"""

import contextlib
import threading
from collections import defaultdict, deque
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as NotDone  # another class than Python's before 3.11

from ds_hybridep.errors import CommunicationError
from ds_hybridep.link.wire import CHUNK_BYTES, LEAST_CHUNK_BYTES, Frame, Kind

URGENT, BULK = 0, 1  # priorities
SMALL_BYTES = 2**14  # a payload up to this size is copied
Key = tuple[bytes, int]  # stream, sequence


class Handle(Future[str | None]):
    """A message that was given to `Channel.send` or asked for with `Channel.receive`; its result is why it has failed.

    It is done if it has arrived, for a send: if its memory may change again; or if it has failed.  Callbacks run in
    the link's thread, which must not wait, or at once if it is done.
    """

    def __init__(self, what: str = "") -> None:
        super().__init__()
        self.what = what  # for errors

    def wait(self, timeout_s: float | None = None) -> memoryview:
        """Block until it is done.  Return what was received; of a send nothing.

        Raises CommunicationError if the other rank is gone, if the message is longer than its receive takes, or after
        `timeout_s`; it may then be waited for again.
        """
        try:
            failure = self.result(timeout_s)
        except NotDone:
            failure = f"was not done after {timeout_s:g} s; see the log of that rank"
        else:
            failure = failure and f"failed: {failure}"
        if failure is not None:
            raise CommunicationError(f"{self.what} {failure}")
        return self._content()

    def failure(self) -> str | None:
        """Return why it has failed; None if it has not, or is not done."""
        return self.result() if self.done() else None

    def end(self, failure: str | None = None) -> None:
        """Mark it as done or, with a reason, as failed; a second call does nothing."""
        with contextlib.suppress(InvalidStateError):
            self.set_result(failure)
            vars(self)["_done_callbacks"].clear()  # they refer to what refers to this, tensors included

    @property
    def has_begun(self) -> bool:
        """True once a part of a message that is received has come."""
        return False

    def _content(self) -> memoryview:
        return memoryview(b"")


class Send(Handle):
    """A message to another rank.  Refers to the caller's memory until its receipt is acknowledged."""

    def __init__(self, what: str, key: Key, data: memoryview, num_pieces: int) -> None:
        super().__init__(what)
        self.key, self._data, self._next = key, data, 0
        self._chunk_bytes = min(max(-(-len(data) // num_pieces), LEAST_CHUNK_BYTES), CHUNK_BYTES)
        self.num_left = max(1, -(-len(data) // self._chunk_bytes))  # frames that were not acknowledged

    def next_frame(self) -> tuple[Frame, memoryview]:
        begin, self._next = self._next, min(self._next + self._chunk_bytes, len(self._data))
        frame = Frame(Kind.DATA, self._next - begin, *self.key, len(self._data), begin)
        return frame, self._data[begin : self._next]


class Receive(Handle):
    """A message from another rank: expected, arriving, or both."""

    into: memoryview | None = None
    max_bytes: int | None = None  # None: nobody has asked for it yet
    memory: memoryview | None = None  # as long as the message; None: before its first frame, or to throw it away
    total = 0
    priority = BULK  # of the connection that brings it
    num_missing: int | None = None  # bytes; None before its first frame

    @property
    def has_begun(self) -> bool:
        return self.num_missing is not None

    def begin(self, total: int) -> None:
        """Take the memory for a message whose first frame is here."""
        if self.max_bytes is None or total <= self.max_bytes:
            try:
                self.memory = memoryview(bytearray(total)) if self.into is None else self.into[:total]
            except (MemoryError, OverflowError):
                raise ConnectionError(f"there is no memory for its message of {total} bytes") from None
        self.total = self.num_missing = total

    def _content(self) -> memoryview:
        assert self.memory is not None, self.what
        if self.into is not None and self.memory.obj is not self.into.obj:
            place = self.into[: self.total]  # copied by the thread that waits, so that others are read meanwhile
            place[:] = self.memory
            self.memory = place
        return self.memory


Piece = tuple[tuple[memoryview, ...], Send]  # a DATA frame and the message that it belongs to


class Mail:
    """All messages to and from one peer.

    lock: of the link, held for moments only.
    early_bytes: bound for messages of one priority that nobody has asked for.
    num_pieces: that a message is cut into if it is long enough.
    """

    def __init__(self, lock: threading.Lock, early_bytes: int, num_pieces: int) -> None:
        self.early_bytes = [0, 0]  # by priority, so that urgent ones never stop because of bulk ones
        self.cause = ""  # why the peer is gone
        self.lock, self._most_early_bytes, self._num_pieces = lock, early_bytes, num_pieces
        self._counts: dict[tuple[str, bytes], int] = defaultdict(int)  # of messages in each direction and stream
        self._queues: tuple[deque[Send], ...] = (deque(), deque())  # by priority
        self._sends: dict[Key, Send] = {}  # not acknowledged
        self._receives: dict[Key, Receive] = {}  # not both asked for and complete
        self._num_awaited = 0  # messages that were asked for and have not arrived whole
        self._cancelled: set[bytes] = set()  # streams whose messages are thrown away

    def send(self, stream: bytes, what: str, data: memoryview, priority: int) -> Send:
        is_small = len(data) <= SMALL_BYTES
        with self.lock:
            key = self._next_key("sent", stream)
            data = memoryview(bytes(data)) if is_small else data
            send = Send(f"{what} (number {key[1]})", key, data, self._num_pieces)
            if not (cause := self.cause):
                self._sends[key] = send
                self._queues[priority].append(send)
        if cause or is_small:
            send.end(cause or None)
        return send

    def receive(self, stream: bytes, what: str, into: memoryview | None, max_bytes: int) -> Receive:
        with self.lock:
            key = self._next_key("received", stream)
            if (receive := self._receives.get(key)) is None:
                receive = self._receives[key] = Receive()
            receive.what, receive.into, receive.max_bytes = f"{what} (number {key[1]})", into, max_bytes
            if receive.memory is not None:
                self.early_bytes[receive.priority] -= receive.total
            is_whole = receive.num_missing == 0
            self._num_awaited += not is_whole
            if is_whole or self.cause:
                del self._receives[key]
        if is_whole:
            self._finish(receive)
        elif self.cause:
            receive.end(self.cause)
        return receive

    def cancel(self, stream: bytes) -> None:
        """Let all receives of a stream fail, and throw away what comes later; what was sent still leaves."""
        with self.lock:
            self._cancelled.add(stream)
            found = [one for key, one in self._receives.items() if key[0] == stream]
            self._receives = {key: one for key, one in self._receives.items() if key[0] != stream}
            for one in found:
                if one.max_bytes is None:
                    self.early_bytes[one.priority] -= one.total
                else:
                    self._num_awaited -= 1
        for receive in found:
            receive.end("the channel was closed")

    def early_streams(self) -> set[bytes]:
        """Return the streams of messages that nobody has asked for yet."""
        with self.lock:
            return {key[0] for key, receive in self._receives.items() if receive.max_bytes is None}

    def has_outgoing(self) -> bool:
        """Return True if not all that was sent is acknowledged."""
        return bool(self._sends)

    def fail(self, cause: str, *, with_sends: bool = True) -> None:
        """Let all waits fail, now and later; what has arrived whole can still be received."""
        with self.lock:
            self.cause = self.cause or cause
            handles: list[Handle] = [one for one in self._receives.values() if one.max_bytes is not None]
            self._receives = {
                key: one for key, one in self._receives.items() if one.max_bytes is None and one.num_missing == 0
            }
            self._num_awaited = 0
            if with_sends:
                handles += self._sends.values()
                self._sends.clear()
                for queue in self._queues:
                    queue.clear()
        for handle in handles:
            handle.end(cause)

    # -- for the link's thread --------------------------------------------------------------------------------------

    def next_piece(self, priority: int) -> Piece | None:
        """Return the next frame to send."""
        with self.lock:
            if not (queue := self._queues[priority]):
                return None
            send = queue[0]
            frame, payload = send.next_frame()
            if frame.offset + frame.length == frame.total:
                queue.popleft()
        if frame.length <= SMALL_BYTES:
            return (memoryview(frame.pack() + payload),), send
        return (memoryview(frame.pack()), payload), send

    def acknowledged(self, send: Send) -> None:
        send.num_left -= 1
        if not send.num_left:
            send.end()
            with self.lock:
                self._sends.pop(send.key, None)

    def place(self, frame: Frame, priority: int) -> Receive | None:
        """Return the receive of a DATA frame; None if it has to wait, because early messages fill the bound."""
        key = frame.stream, frame.sequence
        with self.lock:
            receive = self._receives.get(key)
            if self.cause or frame.stream in self._cancelled:
                return Receive()  # without memory
            if receive is None:
                # While this rank waits for anything from the peer, it must read on: that may come behind this frame.
                is_awaited = self._num_awaited or self._sends
                if self.early_bytes[priority] + frame.total > self._most_early_bytes and not is_awaited:
                    return None
                receive = Receive()
                receive.begin(frame.total)
                receive.priority = priority
                self._receives[key] = receive
                self.early_bytes[priority] += frame.total
            elif receive.num_missing is None:
                receive.begin(frame.total)
            if frame.total != receive.total or frame.length > (receive.num_missing or 0):
                raise ConnectionError(f"it sent more than the whole of a message: {frame}")
        return receive

    def arrived(self, frame: Frame, receive: Receive) -> None:
        """Note that a frame has been read."""
        with self.lock:
            receive.num_missing = (receive.num_missing or 0) - frame.length
            is_unwanted = receive.max_bytes is None or self.cause or frame.stream in self._cancelled
            if receive.num_missing or is_unwanted:
                return
            self._receives.pop((frame.stream, frame.sequence), None)
            self._num_awaited -= 1
        self._finish(receive)

    def _finish(self, receive: Receive) -> None:
        assert receive.max_bytes is not None, receive.what
        if receive.total <= receive.max_bytes:
            receive.end()
        else:
            wanted = f"this rank expects at most {receive.max_bytes}; do the ranks differ?"
            receive.end(f"it has {receive.total} bytes, and {wanted}")

    def _next_key(self, direction: str, stream: bytes) -> Key:
        self._counts[direction, stream] += 1
        return stream, self._counts[direction, stream]
