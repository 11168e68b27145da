# SPDX-License-Identifier: Apache-2.0
"""A connection before its handshake has ended: bounded in age by its owner, and in size by fixed messages."""

import os
import selectors
import socket
import ssl
import time
from collections.abc import Callable

from ds_hybridep.link.trust import Claims, Refused, Steps

SAME_TLS = "is TLS configured on all ranks or on none?"


class Attempt:
    """Runs the steps of a handshake as bytes come in.

    Args:
        steps: from `trust.dial` or `trust.accept`; None only finds out whether the port takes connections.
        context: for TLS.
        on_end: called with this and with what the other side claims, or with what has gone wrong.
        place: the address to connect `sock` to; None for a connection that was accepted.
    """

    def __init__(
        self, selector: selectors.BaseSelector, sock: socket.socket, steps: Steps | None,
        context: ssl.SSLContext | None, on_end: Callable[["Attempt", Claims | None, Exception | None], None],
        place: tuple[object, ...] | None = None,
    ) -> None:  # fmt: skip
        self.began_at = time.monotonic()
        self._selector, self._steps, self._on_end = selector, steps, on_end
        self._is_connecting, self._has_begun = place is not None, False
        self._got, self._need = b"", 0
        sock.setblocking(False)
        self.sock: socket.socket = sock
        if context is not None and steps is not None:
            self.sock = context.wrap_socket(sock, server_side=place is None, do_handshake_on_connect=False)
        self._selector.register(self.sock, selectors.EVENT_WRITE, self.on_event)
        if place is not None:
            self.sock.connect_ex(place)  # `_go` asks for its outcome

    def on_event(self, _: int) -> None:
        """Go as far as the socket allows."""
        claims, failure = None, None  # type: Claims | None, Exception | None
        try:
            claims = self._go()
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError):
            self._selector.modify(self.sock, selectors.EVENT_READ, self.on_event)
            return
        except ssl.SSLWantWriteError:
            self._selector.modify(self.sock, selectors.EVENT_WRITE, self.on_event)
            return
        except Refused as error:
            failure = error
        except OSError as error:
            failure = error if self._is_connecting else ConnectionError(f"{error}; {SAME_TLS}")
        self.end(claims, failure)

    def end(self, claims: Claims | None, failure: Exception | None) -> None:
        """Hand the connection over, or close it."""
        self._selector.unregister(self.sock)
        if claims is None:
            self.sock.close()
        self._on_end(self, claims, failure)

    def _go(self) -> Claims | None:
        if self._is_connecting:
            if number := self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(number, os.strerror(number))
            self._is_connecting = False
        if self._steps is None:
            return None
        if isinstance(self.sock, ssl.SSLSocket):
            self.sock.do_handshake()
        while True:
            while len(self._got) < self._need:
                if not (part := self.sock.recv(self._need - len(self._got))):
                    raise ConnectionError("it closed the connection in the handshake")
                self._got += part
            try:
                answer, self._need = self._steps.send(self._got if self._has_begun else None)  # type: ignore[arg-type]
            except StopIteration as end:
                claims: Claims = end.value
                return claims
            self._got, self._has_begun = b"", True
            if self.sock.send(answer) < len(answer):  # a new connection has room for it
                raise ConnectionError("it takes no bytes")
