# SPDX-License-Identifier: Apache-2.0
"""Small messages over one connection: JSON objects, each behind four bytes of length."""

import json
import socket
import ssl
import struct
from collections.abc import Callable
from selectors import EVENT_READ, EVENT_WRITE, BaseSelector
from typing import Any

from ds_hybridep.link.lane import BLOCKED

LENGTH = struct.Struct("!I")
MAX_MESSAGE_BYTES = 2**20
Message = dict[str, Any]


class Line:
    """One connection after its handshake, for the thread that runs the selector's callbacks: TLS allows no other.

    Args:
        on_message: called with each message that comes.
        undelivered_s: what the other side's system has not taken after so long ends the connection, and so bounds
            what waits here.

    `on_event` is registered with the selector.  It raises OSError when the connection has ended, ValueError if what
    came is no message, and whatever `on_message` raises; `close` is the caller's then.
    """

    def __init__(
        self, sock: socket.socket, selector: BaseSelector, on_message: Callable[[Message], None], *,
        undelivered_s: float,
    ) -> None:  # fmt: skip
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * undelivered_s))
        self._sock, self._selector, self._on_message = sock, selector, on_message
        self._came, self._leaves = bytearray(), bytearray()
        self._is_closed = False
        selector.register(sock, EVENT_READ, self.on_event)

    @property
    def is_sending(self) -> bool:
        """True while the system has not taken all that was sent."""
        return bool(self._leaves)

    def send(self, message: Message) -> None:
        """Send a message with the next events; over a closed line, none."""
        if not self._is_closed:
            body = json.dumps(message).encode()
            self._leaves += LENGTH.pack(len(body)) + body
            self._selector.modify(self._sock, EVENT_READ | EVENT_WRITE, self.on_event)

    def on_event(self, mask: int) -> None:
        """Read or write what the socket allows."""
        try:
            # Not both: if the other side has closed the connection, writing fails, and its last words are lost.
            if mask & EVENT_READ:
                self._read()
            else:
                self._write()
        except BLOCKED:
            return
        while (message := self._next()) is not None:
            self._on_message(message)

    def close(self) -> None:
        """End the connection; what waits to be sent is lost."""
        if not self._is_closed:
            self._is_closed = True
            self._selector.unregister(self._sock)
            self._sock.close()

    def _read(self) -> None:
        while True:
            if not (part := self._sock.recv(2**16)):
                raise ConnectionError("it was closed")
            self._came += part
            if not isinstance(self._sock, ssl.SSLSocket) or not self._sock.pending():  # the selector knows the rest
                return

    def _write(self) -> None:
        del self._leaves[: self._sock.send(self._leaves)]
        if not self._leaves:
            self._selector.modify(self._sock, EVENT_READ, self.on_event)

    def _next(self) -> Message | None:
        """Take the next message that is whole from what came."""
        if self._is_closed or len(self._came) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack_from(self._came)
        if length > MAX_MESSAGE_BYTES:
            raise ValueError(f"a message of {length} bytes")
        end = LENGTH.size + length
        if len(self._came) < end:
            return None
        message = json.loads(self._came[LENGTH.size : end])
        del self._came[:end]
        if not isinstance(message, dict):
            raise ValueError("not an object")
        return message
