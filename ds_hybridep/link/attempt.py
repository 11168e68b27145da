# SPDX-License-Identifier: Apache-2.0
"""A connection before its handshake has ended: bounded in age by its owner, and in size by fixed messages."""

import os
import selectors
import socket
import ssl
import time
from collections.abc import Callable

from ds_hybridep.link.trust import Claims, Refused, Steps

Address = tuple[str, int]
HANDSHAKE_S = 10.0  # the longest life of an attempt
# Called with the socket and what the other side claims, or with what has gone wrong; the socket is then closed.
OnEnd = Callable[["Attempt", socket.socket, Claims | None, Exception | None], None]


class Attempt:
    """Runs the steps of a handshake as bytes come in.

    Args:
        steps: from `trust.dial` or `trust.accept`; None only finds out whether the port takes connections.
        context: for TLS.
        dials: the address to connect `sock` to; None for a connection that was accepted.
    """

    def __init__(
        self,
        selector: selectors.BaseSelector,
        sock: socket.socket,
        steps: Steps | None,
        context: ssl.SSLContext | None,
        on_end: OnEnd,
        dials: tuple[object, ...] | None = None,
    ) -> None:
        self.began_at = time.monotonic()
        self._selector, self._steps, self._on_end = selector, steps, on_end
        self._is_connecting = dials is not None
        self._got, self._need, self._has_begun = b"", 0, False
        sock.setblocking(False)
        if context is not None and steps is not None:
            # do_handshake must be False: the connection is not up yet.
            self.sock = context.wrap_socket(sock, server_side=dials is None, do_handshake_on_connect=False)
        else:
            self.sock = sock
        self._selector.register(self.sock, selectors.EVENT_WRITE, self.on_event)
        if dials is not None:
            self.sock.connect_ex(dials)  # its outcome is asked for in `_go`

    def on_event(self, _: int) -> None:
        """Go as far as the socket allows."""
        try:
            claims = self._go()
        except (BlockingIOError, InterruptedError, ssl.SSLWantReadError):
            self._selector.modify(self.sock, selectors.EVENT_READ, self.on_event)
        except ssl.SSLWantWriteError:
            self._selector.modify(self.sock, selectors.EVENT_WRITE, self.on_event)
        except (OSError, Refused) as error:
            self.fail(error)
        else:
            self._selector.unregister(self.sock)
            self._on_end(self, self.sock, claims, None)

    def fail(self, error: Exception) -> None:
        """Close the connection."""
        self._selector.unregister(self.sock)
        self.sock.close()
        self._on_end(self, self.sock, None, error)

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
                    raise ConnectionError(
                        "it closed the connection in the handshake; is TLS configured on all ranks or on none?"
                    )
                self._got += part
            try:
                answer, self._need = self._steps.send(self._got if self._has_begun else None)  # type: ignore[arg-type]
            except StopIteration as end:
                claims: Claims = end.value
                return claims
            self._got, self._has_begun = b"", True
            if self.sock.send(answer) < len(answer):  # a new connection has room for it
                raise ConnectionError("it takes no bytes")
