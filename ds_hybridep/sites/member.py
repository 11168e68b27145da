# SPDX-License-Identifier: Apache-2.0
"""A site's connection to the meeting point, held by its rank 0.  It is made again whenever it breaks."""

import atexit
import contextlib
import hmac
import json
import logging
import os
import socket
import ssl
import threading
import time
from typing import Any

from ds_hybridep.errors import SiteError
from ds_hybridep.sites import protocol
from ds_hybridep.sites.patience import Patience

logger = logging.getLogger(__name__)
RETRY_S = 1.0
CONNECT_S = 10.0


class Member:
    """One site at the meeting point.

    Args:
        address: host and port of the meeting point.
        names: all sites, in the same order everywhere.
        settings: what all sites must share, JSON-able.
        wait_s: a site of which nothing is heard for so long is gone.

    Raises SiteError if the meeting point refuses this site, or is not reached in `wait_s`.
    """

    def __init__(
        self, address: tuple[str, int], name: str, names: list[str], settings: dict[str, Any], *, secret: bytes,
        wait_s: float, context: ssl.SSLContext | None = None,
    ) -> None:  # fmt: skip
        self.name, self.is_running, self.wants_change = name, False, False
        self._address, self._secret, self._context, self._wait_s = address, secret, context, wait_s
        self._hello = {
            "op": "hello", "site": name, "names": names, "settings": settings, "instance": os.urandom(8).hex(),
            "wait_s": wait_s, "epoch": 0, "members": [],
        }  # fmt: skip
        self._sock: socket.socket | None = None
        self._changed = threading.Condition()
        self._call: dict[str, Any] | None = None
        self._answer: dict[str, Any] | None = None
        self._is_closed = False
        self.heard_at = time.monotonic()
        self.trouble = ""
        self._come(time.monotonic() + wait_s)
        self._pid = os.getpid()  # a forked process has this connection, too
        atexit.register(self._leave)  # also after an exception: the others need not wait for this site
        self._thread = threading.Thread(target=self._run, name="hybridep-meeting-point", daemon=True)
        self._thread.start()

    def call(self, **said: Any) -> None:
        """Ask for a quorum; `answer` returns what comes of it."""
        with self._changed:
            self._call, self._answer, self.wants_change = {"op": "quorum", **said}, None, False
            self._send(self._call)

    def answer(self, wait_s: float) -> dict[str, Any] | None:
        """Return the answer to the last call, or None if none comes in `wait_s`.

        Raises SiteError if the meeting point has refused this site since.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._answer is not None or self._is_closed, wait_s)
            if self._answer is None and self._is_closed:
                raise SiteError(
                    f"site '{self.name}': {self.trouble or 'its connection to the meeting point was closed'}"
                )
            answer, self._answer = self._answer, None
            if answer is not None:
                self._call = None
                if answer["op"] == "epoch":
                    self._hello |= {"epoch": answer["epoch"], "members": answer["members"]}
            return answer

    @property
    def refusal(self) -> str:
        """Why the meeting point does not take this site back; empty if it does."""
        return self.trouble if self._is_closed else ""

    @property
    def is_in_touch(self) -> bool:
        """True if the meeting point cannot have given this site up."""
        return time.monotonic() - self.heard_at < self._wait_s / 2

    def close(self) -> None:
        """Leave for good."""
        atexit.unregister(self._leave)
        self._leave()
        self._thread.join(CONNECT_S)

    def _leave(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._is_closed = True
            self._send({"op": "leave"})
            if self._sock is not None:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)

    def _come(self, deadline: float) -> None:
        """Connect for the first time."""
        where = f"the meeting point {self._address[0]}:{self._address[1]}"
        with Patience(f"site '{self.name}' waits for {where}") as patience:
            while True:
                try:
                    return self._connect()
                except OSError as error:
                    self.trouble = str(error)
                except _Refused as refusal:
                    if not refusal.may_pass or time.monotonic() > deadline:
                        raise SiteError(f"site '{self.name}': the meeting point refused it: {refusal}") from None
                    self.trouble = str(refusal)
                if time.monotonic() > deadline:
                    raise SiteError(
                        f"site '{self.name}' did not reach {where} in {self._wait_s:g} s: {self.trouble}; is "
                        f"'ds_hybridep meet' running there, and does a firewall stop this port?"
                    )
                patience.look(self.trouble)
                time.sleep(RETRY_S)

    # -- the connection ---------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        sock = socket.create_connection(self._address, CONNECT_S)
        try:
            if self._context is not None:
                sock = self._context.wrap_socket(sock)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            theirs = _read(sock, protocol.CHALLENGE_BYTES)
            if not theirs.startswith(protocol.MAGIC):
                raise _Refused("it does not speak this protocol; install the same version of ds_hybridep there")
            ours = protocol.challenge()
            sock.sendall(ours + protocol.prove(self._secret, "site", theirs, ours))
            verdict = _read(sock, protocol.ANSWER_BYTES)
            if not hmac.compare_digest(verdict[1:], protocol.prove(self._secret, "meeting", theirs, ours)):
                raise _Refused("the two have different secrets; give both the same secret file")
            sock.sendall(protocol.pack(self._hello))
            said = _receive(sock)
            if said["op"] == "refused":
                raise _Refused(said["text"], may_pass="is here already" in said["text"])
            self.is_running = said["is_running"]
            sock.settimeout(self._wait_s)
        except EOFError as error:
            sock.close()
            raise ConnectionError(f"{error} in the handshake; is TLS configured on both sides or on none?") from None
        except BaseException:
            sock.close()
            raise
        with self._changed:
            self._sock, self.heard_at = sock, time.monotonic()
            if self._call is not None and self._answer is None:
                self._send(self._call)

    def _run(self) -> None:
        while not self._is_closed:
            try:
                self._listen()
            except (OSError, ValueError, EOFError) as error:
                self.trouble = f"the connection to the meeting point broke: {error}"
            with self._changed:
                if self._sock is not None:
                    self._sock.close()
                self._sock = None
            while not self._is_closed:
                time.sleep(RETRY_S)
                try:
                    self._connect()
                    break
                except OSError as error:
                    self.trouble = f"the meeting point is not reached: {error}"
                except _Refused as refusal:
                    self.trouble = f"the meeting point refuses it now: {refusal}"
                    if not refusal.may_pass:
                        with self._changed:
                            self._is_closed = True
                            self._changed.notify_all()

    def _listen(self) -> None:
        sock = self._sock
        assert sock is not None
        while not self._is_closed:
            try:
                said = _receive(sock)
            except TimeoutError:
                raise TimeoutError(f"nothing was heard of it for {self._wait_s:g} s") from None
            self.heard_at = time.monotonic()
            self._hear(said)

    def _hear(self, said: dict[str, Any]) -> None:
        if said["op"] == "note":
            logger.warning("hybridep: %s", said["text"])
        elif said["op"] == "change":
            self.wants_change = True
        else:
            with self._changed:
                if said["op"] == "beat":
                    self._send({"op": "beat"})
                else:
                    self._answer = said
                    if said["op"] == "epoch":
                        self.wants_change = False  # it is what an earlier "change" has asked for
                    self._changed.notify_all()

    def _send(self, message: dict[str, Any]) -> None:
        """Send, under the lock; if the connection is broken, `_connect` sends the call again."""
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.sendall(protocol.pack(message))


class _Refused(Exception):
    def __init__(self, text: str, may_pass: bool = False) -> None:
        super().__init__(text)
        self.may_pass = may_pass


def _read(sock: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count:
        if not (part := sock.recv(count - len(got))):
            raise EOFError("it was closed")
        got += part
    return got


def _receive(sock: socket.socket) -> dict[str, Any]:
    (length,) = protocol.LENGTH.unpack(_read(sock, protocol.LENGTH.size))
    if length > protocol.MAX_MESSAGE_BYTES:
        raise ConnectionError(f"it sent a message of {length} bytes")
    message: dict[str, Any] = json.loads(_read(sock, length))
    return message
