# SPDX-License-Identifier: Apache-2.0
"""A lane: an ordered stream of frames between two ranks that outlives its TCP connections.

Both sides count the DATA frames of each direction.  The sender keeps what was not acknowledged, at most what the two
systems' buffers hold.  When a new connection takes the place of a broken one, each side says how many frames it has
got; the rest is sent again, and a frame that was cut off is read again from its start.
"""

import itertools
import selectors
import socket
import ssl
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, Protocol

from ds_hybridep.link.messages import Arrival, Send
from ds_hybridep.link.options import num_retransmitted
from ds_hybridep.link.wire import FACT_BYTES, HEADER, Frame, Kind, parse

JOIN_BYTES = 2**14  # a shorter payload is copied behind its header
_STAGE_BYTES = 2**16
_BATCH_BYTES, _BATCH_BUFFERS = 2**18, 64  # given to the system at once
_ROUNDS = 32  # reads or writes of one lane in a row, before it is others' turn
_BLOCKED = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Outgoing(NamedTuple):
    """A frame with a message's bytes; kept until it is acknowledged."""

    buffers: tuple[memoryview, ...]
    send: Send


class Ends(Protocol):
    """What a lane asks of the peer that it belongs to."""

    def next_outgoing(self, lane: "Lane") -> Outgoing | None: ...
    def place(self, frame: Frame) -> Arrival | None: ...
    def arrived(self, lane: "Lane", frame: Frame, arrival: Arrival) -> None: ...
    def acknowledged(self, send: Send) -> None: ...
    def told(self, frame: Frame, payload: bytes) -> None: ...
    def dropped(self, lane: "Lane", cause: str) -> None: ...


class Lane:
    """One side of a lane; used by the link's thread only.  `sock` is None while there is no connection."""

    def __init__(self, index: int, peer: Ends, selector: selectors.BaseSelector) -> None:
        self.index, self._peer, self._selector = index, peer, selector
        self.sock: socket.socket | None = None
        self.heard_at = time.monotonic()
        self.received = 0  # DATA frames
        self.sent_bytes = self.received_bytes = self.num_connections = self._retransmitted = 0
        self.is_paused = False  # a frame has no place: nothing is read until `resume` finds one
        self._acknowledged = 0
        self._unacknowledged: deque[Outgoing] = deque()
        self._again: deque[Outgoing] = deque()  # those of them that this connection has not sent yet
        self._control = b""  # frames that go before all others
        self._out: deque[memoryview] = deque()  # what the socket takes next
        self._ack_is_due = self._ack_is_urgent = False
        self._mask = 0
        self._stage = memoryview(bytearray(_STAGE_BYTES))  # read, but not looked at, from _begin to _end
        self._scratch = memoryview(bytearray(_STAGE_BYTES))
        self._begin = self._end = 0
        self._frame: Frame | None = None  # whose payload comes next
        self._arrival: Arrival | None = None
        self._place: memoryview | None = None  # of the payload; None throws it away
        self._at = 0  # how much of it is there
        self._in_bulk = False

    # -- connections ------------------------------------------------------------------------------------------------

    def attach(self, sock: socket.socket, received: int) -> None:
        """Go on over a new connection, whose other side has got `received` frames."""
        self._acknowledge(received)
        self.sock, self.heard_at = sock, time.monotonic()
        self.num_connections += 1
        self._again = deque(self._unacknowledged)
        self._wants(selectors.EVENT_READ)
        self.flush()
        if self.sock is not None:
            self.on_event(selectors.EVENT_READ)  # TLS may hold what has come behind the handshake

    def drop(self, cause: str) -> None:
        """Close the connection, if there is one."""
        if (sock := self.sock) is None:
            return
        self._retransmitted += num_retransmitted(sock)
        self._wants(0)
        self.sock = None
        sock.close()
        self._out.clear()
        self._begin = self._end = self._at = 0
        self._frame, self._arrival, self._place = None, None, None
        self._control, self._ack_is_due, self._ack_is_urgent, self.is_paused = b"", False, False, False
        self._peer.dropped(self, cause)

    def num_retransmitted(self) -> int:
        return self._retransmitted + num_retransmitted(self.sock)

    def forget(self) -> None:
        """Keep nothing more for the other side, which has gone."""
        self._unacknowledged.clear()
        self._again.clear()

    def on_event(self, mask: int) -> None:
        """Read and write what the socket allows."""
        if mask & selectors.EVENT_READ:
            self._guarded(self._read)
        if mask & selectors.EVENT_WRITE or self._ack_is_urgent:
            self.flush()

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except OSError as error:  # ssl.SSLError and ConnectionError are some
            self.drop(str(error) or type(error).__name__)

    def _wants(self, mask: int) -> None:
        if self.sock is None or mask == self._mask:
            return
        if not self._mask:
            self._selector.register(self.sock, mask, self.on_event)
        elif mask:
            self._selector.modify(self.sock, mask, self.on_event)
        else:
            self._selector.unregister(self.sock)
        self._mask = mask

    # -- sending ----------------------------------------------------------------------------------------------------

    def tell(self, frame: Frame, payload: bytes = b"") -> None:
        """Send a frame that is not counted, before all others; it is lost if the connection breaks."""
        if self.sock is not None:
            self._control += frame.pack() + payload

    def flush(self) -> None:
        """Send what there is, as far as the socket takes it."""
        self._guarded(self._write)

    def _write(self) -> None:
        if self.sock is None:
            return
        for _ in range(_ROUNDS):
            if not self._out:
                self._gather()
            if not self._out:
                self._wants(self._mask & ~selectors.EVENT_WRITE)
                return
            try:
                if isinstance(self.sock, ssl.SSLSocket):
                    count = self.sock.send(self._out[0])  # after a refusal, TLS wants the same bytes again
                else:
                    count = self.sock.sendmsg(self._out)
            except _BLOCKED:
                break
            if not self._advance(count):
                break
        self._wants(self._mask | selectors.EVENT_WRITE)

    def _advance(self, count: int) -> bool:
        """Note what the socket has taken; False if it takes no more."""
        self.sent_bytes += count
        while self._out and count >= len(self._out[0]):
            count -= len(self._out.popleft())
        if count:
            self._out[0] = self._out[0][count:]
        return not self._out

    def _gather(self) -> None:
        """Line up the next frames: control, what the last connection has lost, messages."""
        if self._ack_is_due:
            self._ack_is_due = self._ack_is_urgent = False
            self.tell(Frame(Kind.ACK, sequence=self.received))
        if self._control:
            self._out.append(memoryview(self._control))
            self._control = b""
        num_bytes = 0
        while num_bytes < _BATCH_BYTES and len(self._out) < _BATCH_BUFFERS:
            if self._again:
                outgoing = self._again.popleft()
            elif (new := self._peer.next_outgoing(self)) is not None:
                self._unacknowledged.append(new)
                outgoing = new
            else:
                return
            self._out += outgoing.buffers
            num_bytes += sum(map(len, outgoing.buffers))

    def _acknowledge(self, count: int) -> None:
        if not self._acknowledged <= count <= self._acknowledged + len(self._unacknowledged):
            raise ConnectionError(f"it acknowledges {count} frames, after {self._acknowledged}")
        while self._acknowledged < count:
            self._acknowledged += 1
            self._peer.acknowledged(self._unacknowledged.popleft().send)

    # -- receiving --------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Look again for the place of a frame that had none."""
        if self.is_paused:
            self.is_paused = False
            self._guarded(self._consume)
            if not self.is_paused:
                self._wants(self._mask | selectors.EVENT_READ)
                self.on_event(selectors.EVENT_READ)

    def _read(self) -> None:
        for turn in itertools.count():
            if self.sock is None or self.is_paused:
                return
            # What TLS has decrypted is not reported again.
            if turn >= _ROUNDS and not (isinstance(self.sock, ssl.SSLSocket) and self.sock.pending()):
                return
            if is_direct := self._frame is not None:
                target = self._scratch if self._place is None else self._place[self._at :]
                target = target[: self._frame.length - self._at]
            else:
                # Behind a piece of a long message comes the next one, which is read where it belongs.
                target = self._stage[self._end : HEADER.size if self._in_bulk else _STAGE_BYTES]
            try:
                count = self.sock.recv_into(target)
            except _BLOCKED:
                return
            if not count:
                raise ConnectionError("the other side closed the connection")
            self.heard_at = time.monotonic()
            self.received_bytes += count
            if is_direct:
                self._at += count
            else:
                self._end += count
            self._consume()
            if count < len(target) and not isinstance(self.sock, ssl.SSLSocket):
                return  # that was all

    def _consume(self) -> None:
        """Take apart what was read."""
        while True:
            if (frame := self._frame) is not None:
                count = min(frame.length - self._at, self._end - self._begin)
                if self._place is not None and count:
                    self._place[self._at : self._at + count] = self._stage[self._begin : self._begin + count]
                self._at, self._begin = self._at + count, self._begin + count
                if self._at < frame.length:
                    break
                self._frame = None
                self._complete(frame)
                if self.sock is None:  # the peer has ended
                    return
            elif self._end - self._begin >= HEADER.size:
                if not self._open(parse(self._stage[self._begin :])):
                    self.is_paused = True
                    self._wants(self._mask & ~selectors.EVENT_READ)
                    return
                self._begin += HEADER.size
            else:
                break
        rest = self._end - self._begin
        self._stage[:rest] = self._stage[self._begin : self._end]
        self._begin, self._end = 0, rest

    def _open(self, frame: Frame) -> bool:
        """Find the place of a frame's payload; False if it has to wait."""
        if frame.kind is Kind.DATA:
            self._in_bulk = frame.length > JOIN_BYTES
            if (arrival := self._peer.place(frame)) is None:
                return False
            self._arrival, self._place = arrival, arrival.place(frame)
        elif frame.kind is Kind.FACT:
            self._place = memoryview(bytearray(FACT_BYTES))[: frame.length]
        self._frame, self._at = frame, 0
        return True

    def _complete(self, frame: Frame) -> None:
        place, self._place = self._place, None
        if frame.kind is Kind.DATA:
            arrival, self._arrival = self._arrival, None
            assert arrival is not None
            self.received += 1
            self._ack_is_due = True
            self._ack_is_urgent |= frame.length > JOIN_BYTES  # others were copied: nobody waits
            self._peer.arrived(self, frame, arrival)
        elif frame.kind is Kind.ACK:
            self._acknowledge(frame.sequence)
        else:
            self._peer.told(frame, b"" if place is None else bytes(place))
