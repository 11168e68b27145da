# SPDX-License-Identifier: Apache-2.0
"""A lane: an ordered stream of frames between two ranks that outlives its TCP connections.

Both sides count the DATA frames of each direction.  The sender keeps what was not acknowledged, at most what the two
systems' buffers hold.  When a new connection takes the place of a broken one, each side says how many frames it has
got; the rest is sent again, and a frame that was cut off is read again from its start.
"""

import contextlib
import socket
import ssl
import sys
import time
from collections import deque
from collections.abc import Callable
from selectors import EVENT_READ, EVENT_WRITE, BaseSelector
from typing import Any

from ds_hybridep.link.messages import SMALL_BYTES, Mail, Piece, Receive
from ds_hybridep.link.options import tcp_info
from ds_hybridep.link.wire import FACT_BYTES, HEADER, Frame, Kind, parse

_BATCH_BYTES, _BATCH_BUFFERS = 2**18, 64  # given to the system at once
_ROUNDS = 32  # reads or writes in a row, before it is other lanes' turn
BEAT_S = 1.0  # between heartbeats in each lane
BLOCKED = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Lane:
    """One side of a lane, for the link's thread.  `sock` is None while there is no connection.

    priority: of the messages that it carries.
    on_frame: called with each frame that is no part of a message, and its payload.
    on_drop: called with the lane and the cause when its connection was closed.
    """

    def __init__(
        self,
        index: int,
        priority: int,
        mail: Mail,
        selector: BaseSelector,
        *,
        on_frame: Callable[[Frame, bytes], None],
        on_drop: Callable[["Lane", str], None],
    ) -> None:
        self.index, self._priority, self._mail, self._selector = index, priority, mail, selector
        self._on_frame, self._on_drop = on_frame, on_drop
        self.sock: socket.socket | None = None
        self.heard_at = self.acknowledged_at = time.monotonic()
        self.silent_s = self.stalled_s = 0.0  # for the peer to count
        self.received = 0  # DATA frames
        self.is_paused = False  # a frame has no place: nothing is read until `resume` finds one
        self.sent_bytes = self.received_bytes = self.num_connections = 0
        self.num_retransmitted = 0  # segments, over connections that were closed
        # TCP's acknowledged bytes: when this connection began or the last frame was acknowledged (None: now), last
        # seen, and the most of any connection since the last frame was acknowledged.
        self._base_bytes: int | None = None
        self._seen_bytes = self._furthest_bytes = 0
        self._acknowledged = 0
        self.kept: deque[Piece] = deque()  # not acknowledged
        self._header = memoryview(bytearray(HEADER.size))
        self._scratch = memoryview(bytearray(2**16))  # where that is read which is thrown away
        self._mask = 0
        self._clear()

    def _clear(self) -> None:
        """Forget what belongs to one connection."""
        self._again: deque[Piece] = deque()  # of those kept, the ones that this connection has not sent yet
        self._control = b""  # frames that go before all others
        self._out: deque[memoryview] = deque()  # what the socket takes next
        self._ack_is_due = self._ack_is_urgent = self.is_paused = False
        self._frame: Frame | None = None  # whose payload is read; None: a header is
        self._receive: Receive | None = None
        self._place: memoryview | None = self._header  # to read into; None throws it away
        self._at = 0  # how much of it is there

    # -- connections ------------------------------------------------------------------------------------------------

    def attach(self, sock: socket.socket, received: int) -> None:
        """Go on over a new connection, whose other side has got `received` frames."""
        self.sock, self.heard_at = sock, time.monotonic()
        self.num_connections += 1
        self._seen_bytes = self._base_bytes = tcp_info(sock).acknowledged_bytes
        self._wants(EVENT_READ)
        self._guarded(lambda: self._acknowledge(received))
        self._again = deque(self.kept)
        self.flush()
        self.on_event(EVENT_READ)  # TLS may hold what has come behind the handshake

    def drop(self, cause: str) -> None:
        """Close the connection, if there is one."""
        if self.sock is not None:
            self.num_retransmitted += tcp_info(self.sock).retransmissions
            self._wants(0)
            self.sock.close()
            self.sock = None
            self._clear()
            self._on_drop(self, cause)

    def on_event(self, mask: int) -> None:
        """Read and write what the socket allows."""
        if mask & EVENT_READ:
            self._guarded(self._read)
        if mask & EVENT_WRITE or self._ack_is_urgent:
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
        """Let a frame go before all others with the next `flush`; it is lost if the connection breaks."""
        if self.sock is not None:
            self._control += frame.pack() + payload

    def flush(self) -> None:
        """Send what there is, as far as the socket takes it."""
        self._guarded(self._write)

    def _write(self) -> None:
        for _ in range(_ROUNDS):
            if self.sock is None:
                return
            self._gather()
            if not self._out:
                self._wants(self._mask & ~EVENT_WRITE)
                return
            try:
                if isinstance(self.sock, ssl.SSLSocket):
                    count = self.sock.send(self._out[0])  # after a refusal, TLS wants the same bytes again
                else:
                    count = self.sock.sendmsg(self._out)
            except BLOCKED:
                break
            self.sent_bytes += count
            while self._out and count >= len(self._out[0]):
                count -= len(self._out.popleft())
            if count:
                self._out[0] = self._out[0][count:]
                break
        self._wants(self._mask | EVENT_WRITE)

    def _gather(self) -> None:
        """Line up the next frames: control, what the last connection has lost, messages."""
        if self._out:
            return
        if self._ack_is_due:
            self._ack_is_due = self._ack_is_urgent = False
            self.tell(Frame(Kind.ACK, sequence=self.received))
        if self._control:
            self._out.append(memoryview(self._control))
            self._control = b""
        num_bytes = 0
        while num_bytes < _BATCH_BYTES and len(self._out) < _BATCH_BUFFERS:
            piece: Piece | None
            if self._again:
                piece = self._again.popleft()
            elif (piece := self._mail.next_piece(self._priority)) is not None:
                self.kept.append(piece)
            else:
                return
            self._out += piece[0]
            num_bytes += sum(map(len, piece[0]))

    def _acknowledge(self, count: int) -> None:
        if not self._acknowledged <= count <= self._acknowledged + len(self.kept):
            raise ConnectionError(f"it acknowledges {count} frames, after {self._acknowledged}")
        while self._acknowledged < count:
            self.acknowledged_at = time.monotonic()
            self.stalled_s, self._base_bytes = 0.0, None
            self._acknowledged += 1
            self._mail.acknowledged(self.kept.popleft()[1])

    def count_stall(self, pause_s: float) -> bool:
        """Note how long nothing of what was sent has arrived; return True if a packet of full size just has.

        pause_s: time since the last call.  What was sent again over a new connection is no progress.
        """
        info = tcp_info(self.sock)
        new_bytes, self._seen_bytes = info.acknowledged_bytes - self._seen_bytes, info.acknowledged_bytes
        if self._base_bytes is None:
            self._base_bytes, self._furthest_bytes = info.acknowledged_bytes, 0
        this_far = info.acknowledged_bytes - self._base_bytes
        # Without segments under way, or without room, it is the peer that takes nothing: its process may be busy.
        is_waiting = self.kept and info.segments_under_way and info.takes_more
        if this_far > self._furthest_bytes or not is_waiting:
            self._furthest_bytes = max(this_far, self._furthest_bytes)
            self.stalled_s = 0.0
        else:
            self.stalled_s += pause_s
        return new_bytes >= info.segment_bytes > 0

    # -- receiving --------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Look again for the place of a frame that had none."""
        if self.is_paused:
            self.is_paused = False
            self._guarded(self._advance)
            if not self.is_paused:
                self._wants(self._mask | EVENT_READ)
                self.on_event(EVENT_READ)

    def _read(self) -> None:
        turn = 0
        # What TLS has decrypted is not reported again.
        while turn < _ROUNDS or (isinstance(self.sock, ssl.SSLSocket) and self.sock.pending()):
            turn += 1
            if self.sock is None or self.is_paused:
                return
            left = (HEADER.size if self._frame is None else self._frame.length) - self._at
            target = self._scratch[:left] if self._place is None else self._place[self._at : self._at + left]
            try:
                count = self.sock.recv_into(target)
            except BLOCKED:
                return
            if not count:
                raise ConnectionError("the other side closed the connection")
            self.heard_at = time.monotonic()
            self.received_bytes += count
            self._at += count
            if count == left:
                self._advance()
            elif not isinstance(self.sock, ssl.SSLSocket) and count < len(target):
                return  # that was all

    def _advance(self) -> None:
        """Go on from a header to its payload, or from a payload to the next header."""
        if self._frame is None:
            frame = parse(self._header)
            if frame.kind is Kind.DATA:
                self._receive = self._mail.place(frame, self._priority)
                if self._receive is None:
                    self.is_paused = True
                    self._wants(self._mask & ~EVENT_READ)
                    return
                memory = self._receive.memory
                self._place = None if memory is None else memory[frame.offset : frame.offset + frame.length]
            elif frame.length:
                self._place = memoryview(bytearray(FACT_BYTES))[: frame.length]
            self._frame, self._at = frame, 0
            if frame.length:
                return
        frame, receive, payload = self._frame, self._receive, self._place
        self._frame, self._receive, self._place, self._at = None, None, self._header, 0
        if frame.kind is Kind.ACK:
            self._acknowledge(frame.sequence)
        elif receive is None:
            self._on_frame(frame, b"" if payload is None else bytes(payload[: frame.length]))
        else:
            self.received += 1
            self._ack_is_due = True
            self._ack_is_urgent |= frame.length > SMALL_BYTES  # of others, nobody waits for an acknowledgement
            self._mail.arrived(frame, receive)


class Lifeline(Lane):
    """A lane that carries nothing but a byte a second, by which a peer knows that this process lives.

    Where compiled kernels are loaded, their thread writes it, also while C code keeps the interpreter's lock.  Only
    `ssl` in Python could write TLS's records, so behind the handshake the bytes are plain.
    """

    _native: tuple[Any, int] | None = None  # the compiled module that writes, and its number for this socket

    def attach(self, sock: socket.socket, received: int) -> None:
        """Go on over a new connection."""
        if isinstance(sock, ssl.SSLSocket):
            sock = socket.socket(fileno=sock.detach())
            sock.setblocking(False)
        self.sock, self.heard_at = sock, time.monotonic()
        self.num_connections += 1
        self._wants(EVENT_READ)

    def drop(self, cause: str) -> None:
        """Close the connection, if there is one."""
        if self._native is not None:
            module, number = self._native
            module.stop_lifeline(number)
            self._native = None
        super().drop(cause)

    def tell(self, frame: Frame, payload: bytes = b"") -> None:
        """Write a byte, whatever the frame, unless compiled code does."""
        if self.sock is None or self._native is not None:
            return
        build: Any = sys.modules.get("ds_hybridep.kernels.build")
        module = None if build is None else build.loaded_extension()
        with contextlib.suppress(OSError, RuntimeError):  # `_read` finds what is wrong with the connection
            if module is None:
                self.sock.send(b"\0")
            else:
                self._native = module, module.start_lifeline(self.sock.fileno(), round(BEAT_S * 1000))

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self.sock is not None:
                if not (part := self.sock.recv(len(self._scratch))):
                    raise ConnectionError("the other side closed the connection")
                self.heard_at = time.monotonic()
                self.received_bytes += len(part)
