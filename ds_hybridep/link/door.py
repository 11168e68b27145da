# SPDX-License-Identifier: Apache-2.0
"""A listening port and its handshakes: strangers are bounded in number and time, and others get in all the same."""

import contextlib
import errno
import os
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from selectors import EVENT_READ, EVENT_WRITE, BaseSelector, DefaultSelector
from typing import Any

from ds_hybridep.link.options import Address
from ds_hybridep.link.trust import SAME_TLS, Refused, Steps

MAX_STRANGERS = 64  # connections that others have made and whose handshake has not ended
HANDSHAKE_S = 10.0  # the longest handshake

# Is given a connection, what the other side claims, and the error that has ended the handshake, if one has.  Returns
# True if it keeps the connection, which is closed otherwise.
OnEnd = Callable[[socket.socket, Any, Exception | None], bool]


class Attempt:
    """A connection before its handshake has ended.

    steps: None only finds out whether the port takes connections.
    host: of the side that has made it; None if this side has.
    place: where to connect; None if it is connected.
    on_answer: called when the system there has taken the connection.
    """

    def __init__(
        self, door: "Door", sock: socket.socket, steps: Steps | None, on_end: OnEnd, *, host: str | None = None,
        place: tuple[object, ...] | None = None, on_answer: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self.began_at, self.host, self._door = time.monotonic(), host, door
        self._on_end, self._on_answer, self._is_connecting = on_end, on_answer, place is not None
        self._steps, self._got = steps, b""
        self._says, self._need = (b"", 0) if steps is None else next(steps)
        sock.setblocking(False)
        self.sock: socket.socket = sock
        if steps is not None and (context := door.contexts[host is not None]) is not None:
            self.sock = context.wrap_socket(sock, server_side=host is not None, do_handshake_on_connect=False)
        door.selector.register(self.sock, EVENT_WRITE, self.on_event)
        self._refusal = 0 if place is None else self.sock.connect_ex(place)
        door.attempts.append(self)

    def on_event(self, _: int) -> None:
        """Go as far as the socket allows."""
        try:
            theirs = self._go()
        except (BlockingIOError, ssl.SSLWantReadError):
            self._door.selector.modify(self.sock, EVENT_READ, self.on_event)
        except ssl.SSLWantWriteError:
            self._door.selector.modify(self.sock, EVENT_WRITE, self.on_event)
        except Refused as error:
            self._door.num_refused += self.host is not None
            self.end(error)
        except OSError as error:
            self.end(error if self._is_connecting else ConnectionError(f"{error}; {SAME_TLS}"))
        else:
            self.end(None, theirs)

    def end(self, error: Exception | None, theirs: Any = None) -> None:
        """Hand the connection over, or close it."""
        self._door.selector.unregister(self.sock)
        self._door.attempts.remove(self)
        if not self._on_end(self.sock, theirs, error):
            self.sock.close()

    def _go(self) -> Any:
        if self._is_connecting:
            number = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if self._refusal != errno.EINPROGRESS:
                number = number or self._refusal
            if number:
                raise OSError(number, os.strerror(number))
            self._is_connecting = False
            self._on_answer()
        if self._steps is None:
            return None
        if isinstance(self.sock, ssl.SSLSocket):
            self.sock.do_handshake()
        while True:
            if self._says and self.sock.send(self._says) < len(self._says):  # a new connection has room for it
                raise ConnectionError("it takes no bytes")
            self._says = b""
            while len(self._got) < self._need:
                if not (part := self.sock.recv(self._need - len(self._got))):
                    raise ConnectionError("it closed the connection in the handshake")
                self._got += part
            got, self._got = self._got, b""
            try:
                self._says, self._need = self._steps.send(got)
            except StopIteration as end:
                return end.value


class Door:
    """Handshakes under way, of connections that this side and others make; for the thread that runs the selector.

    contexts: for TLS, to dial and to accept with.
    """

    _listener: socket.socket | None = None
    _is_deaf = False

    def __init__(
        self, selector: BaseSelector, contexts: tuple[ssl.SSLContext | None, ssl.SSLContext | None] = (None, None)
    ) -> None:
        self.selector, self.contexts = selector, contexts
        self.attempts: list[Attempt] = []
        self.num_refused = 0  # strangers that had to make room, or were told that they do not belong here

    def open(self, listener: socket.socket, make_steps: Callable[[], Steps], on_end: OnEnd) -> int:
        """Take connections, with new steps for each; return the port."""
        self._listener, self._make_steps, self._on_end = listener, make_steps, on_end
        self.selector.register(listener, EVENT_READ, self._accept)
        port: int = listener.getsockname()[1]
        return port

    def begin(self, sock: socket.socket, steps: Steps | None, on_end: OnEnd, **how: Any) -> None:
        """Begin a handshake; how: as for `Attempt`.  OSError or ValueError if the connection has broken."""
        try:
            Attempt(self, sock, steps, on_end, **how)
        except BaseException:
            sock.close()
            raise

    def tick(self, now: float) -> None:
        """End handshakes that take too long."""
        if self._is_deaf and self._listener is not None:
            self.selector.register(self._listener, EVENT_READ, self._accept)
            self._is_deaf = False
        for attempt in [one for one in self.attempts if now - one.began_at > HANDSHAKE_S]:
            attempt.end(TimeoutError(f"no handshake in {HANDSHAKE_S:g} s; {SAME_TLS}"))

    def close(self) -> None:
        for attempt in self.attempts:
            attempt.sock.close()
        if self._listener is not None:
            self._listener.close()

    def _accept(self, _: int) -> None:
        assert self._listener is not None
        try:
            sock, address = self._listener.accept()
        except OSError:  # it has gone again, or no descriptor is free
            self.selector.unregister(self._listener)
            self._is_deaf = True  # until the next tick
            return
        self._make_room()
        with contextlib.suppress(OSError, ValueError):  # the other side has closed it already
            self.begin(sock, self._make_steps(), self._on_end, host=str(address[0]))

    def _make_room(self) -> None:
        """Of the host with the most strangers, the oldest one goes."""
        hosts = [one.host for one in self.attempts if one.host is not None]
        if len(hosts) >= MAX_STRANGERS:
            worst, _ = Counter(hosts).most_common(1)[0]
            self.num_refused += 1
            oldest = next(one for one in self.attempts if one.host == worst)
            oldest.end(ConnectionError("too many connections at once"))


def connect(address: Address, steps: Steps, context: ssl.SSLContext | None) -> socket.socket:
    """Return a connection after its handshake.  Raises OSError or Refused.

    Waits for up to HANDSHAKE_S for each address that the host has, and as long for the handshake.
    """
    ended: list[tuple[socket.socket, Exception | None]] = []

    def on_end(sock: socket.socket, _: Any, error: Exception | None) -> bool:
        ended.append((sock, error))
        return error is None

    with DefaultSelector() as selector, contextlib.closing(Door(selector, (context, None))) as door:
        door.begin(socket.create_connection(address, HANDSHAKE_S), steps, on_end)
        while not ended:
            run_ready(selector, 0.1)
            door.tick(time.monotonic())
    sock, error = ended[0]
    if error is not None:
        raise error
    return sock


def run_ready(selector: BaseSelector, wait_s: float) -> None:
    """Call what is registered for the connections that are ready; wait for one for up to `wait_s`."""
    for key, mask in selector.select(wait_s):
        now = selector.get_map().get(key.fd)
        if now is not None and now.fileobj is key.fileobj:  # else another event has closed it
            key.data(mask)
