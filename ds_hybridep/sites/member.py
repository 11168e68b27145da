# SPDX-License-Identifier: Apache-2.0
"""A site's connection to the meeting point, held by its rank 0.  It is made again whenever it breaks."""

import atexit
import hmac
import json
import logging
import os
import select
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
SILENT_S = 10.0  # without a heartbeat of the meeting point, the connection is made again
TELL_S = 0.1  # between words of how far this site is
LEAVE_S = 2.0  # how long the meeting point may take to hear that this site leaves
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
        self.name, self.wants_change = name, False
        self.welcome: dict[str, Any] = {}  # what the meeting point said at the start: is_running, epoch, run, step
        self.waiting_for = ""  # why it does not answer the last call
        self._error: BaseException | None = None  # what ended the thread
        self._address, self._secret, self._context, self._wait_s = address, secret, context, wait_s
        self._hello = {
            "op": "hello", "site": name, "names": names, "settings": settings, "instance": os.urandom(8).hex(),
            "wait_s": wait_s, "epoch": 0, "members": [], "run": "", "step": 0,
        }  # fmt: skip
        self._sock: socket.socket | None = None
        self._changed = threading.Condition()
        self._call: dict[str, Any] | None = None
        self._answer: dict[str, Any] | None = None
        self._is_closed = False
        self._outgoing: list[dict[str, Any]] = []
        self._wakes, self._flushed = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), threading.Event()
        self.heard_at = time.monotonic()
        self._told_at = 0.0  # when `committed` was last passed on
        self.trouble = ""
        self._come(time.monotonic() + wait_s)
        self._pid = os.getpid()  # a forked process has this connection, too
        atexit.register(self._leave)  # also after an exception: the others need not wait for this site
        self._thread = threading.Thread(target=self._run, name="hybridep-meeting-point", daemon=True)
        self._thread.start()

    def call(self, **said: Any) -> None:
        """Ask for a quorum; `answer` returns what comes of it."""
        self._check()
        with self._changed:
            self._call, self._answer, self.wants_change = {"op": "quorum", **said}, None, False
            self.waiting_for = ""
            self._hello["step"] = said["step"]
            self._send(self._call)

    def committed(self, step: int) -> None:
        """Say that so many steps are made, at once but not too often; heartbeats say it again."""
        self._hello["step"] = step
        if (now := time.monotonic()) - self._told_at > TELL_S:
            self._told_at = now
            with self._changed:
                self._send({"op": "beat", "step": step})

    def _check(self) -> None:
        if self._error is not None:
            raise SiteError(
                f"site '{self.name}': its connection to the meeting point has failed: "
                f"{type(self._error).__name__}: {self._error}"
            ) from self._error

    def answer(self, wait_s: float) -> dict[str, Any] | None:
        """Return the answer to the last call, or None if none comes in `wait_s`.

        Raises SiteError if the meeting point has refused this site since.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._answer is not None or self._is_closed, wait_s)
            self._check()
            if self._answer is None and self._is_closed:
                raise SiteError(
                    f"site '{self.name}': {self.trouble or 'its connection to the meeting point was closed'}"
                )
            answer, self._answer = self._answer, None
            if answer is not None:
                self._call = None
                if answer["op"] == "epoch":
                    self._hello |= {key: answer[key] for key in ("epoch", "members", "run")}
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
        if not self._thread.is_alive():
            os.close(self._wakes)

    def _leave(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._is_closed = True
            self._send({"op": "leave", "step": self._hello["step"]})
        if self._sock is not None:
            self._flushed.wait(LEAVE_S)

    def _come(self, deadline: float) -> None:
        """Connect for the first time."""
        where = f"the meeting point {self._address[0]}:{self._address[1]}"
        with Patience(f"site '{self.name}' waits for {where}") as patience:
            while True:
                try:
                    return self._connect()
                except OSError as error:
                    self.trouble = str(error)
                except MeetingRefusal as refusal:
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
        sock = connect(self._address, "site", self._secret, self._context)
        try:
            sock.sendall(protocol.pack(self._hello))
            said = _receive(sock)
            if said["op"] == "refused":
                raise MeetingRefusal(said["text"], may_pass=said["may_pass"])
            if not self.welcome:
                self.welcome = said
            elif not said["is_member"]:
                self.wants_change = True  # the others went on without this site
        except BaseException:
            sock.close()
            raise
        with self._changed:
            self._sock, self.heard_at = sock, time.monotonic()
            self._outgoing = [] if self._call is None or self._answer is not None else [self._call]

    def _run(self) -> None:
        try:
            self._stay_connected()
        except BaseException as error:  # noqa: BLE001 (whatever ends the thread is raised where it is waited for)
            with self._changed:
                self._error, self._is_closed = error, True
                self._changed.notify_all()
            if self._sock is not None:
                self._sock.close()

    def _stay_connected(self) -> None:
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
                except MeetingRefusal as refusal:
                    self.trouble = f"the meeting point refuses it now: {refusal}"
                    if refusal.is_final:
                        with self._changed:
                            self._is_closed = True
                            self._changed.notify_all()

    def _listen(self) -> None:
        """Receive and send until the connection breaks.  No other thread uses it: TLS allows one."""
        sock, got = self._sock, b""
        assert sock is not None
        while True:
            with self._changed:
                messages, self._outgoing = self._outgoing, []
            if messages:
                sock.settimeout(SILENT_S)
                sock.sendall(b"".join(map(protocol.pack, messages)))
            self._flushed.set()
            if self._is_closed:
                return
            sock.settimeout(0)
            is_waiting = isinstance(sock, ssl.SSLSocket) and sock.pending()
            ready, _, _ = select.select([sock.fileno(), self._wakes], [], [], 0 if is_waiting else 1.0)
            if self._wakes in ready:
                os.eventfd_read(self._wakes)
            if sock.fileno() in ready or is_waiting:
                try:
                    part = sock.recv(2**16)
                except (BlockingIOError, ssl.SSLWantReadError):
                    continue
                if not part:
                    raise EOFError("it was closed")
                self.heard_at = time.monotonic()
                got += part
                while (end := _end_of_message(got)) is not None:
                    said, got = json.loads(got[protocol.LENGTH.size : end]), got[end:]
                    self._hear(said)
            elif time.monotonic() - self.heard_at > SILENT_S:
                raise TimeoutError(
                    f"nothing was heard of it for {SILENT_S:g} s; if each new connection ends so, is the MTU too "
                    f"large somewhere on the way?"
                )

    def _hear(self, said: dict[str, Any]) -> None:
        if said["op"] == "note":
            logger.warning("hybridep: %s", said["text"])
        elif said["op"] == "waiting":
            self.waiting_for = said["text"]
        elif said["op"] == "refused":
            with self._changed:
                self.trouble, self._is_closed = said["text"], True
                self._changed.notify_all()
        elif said["op"] == "change":
            self.wants_change = True
        else:
            with self._changed:
                if said["op"] == "beat":
                    self._send({"op": "beat", "step": self._hello["step"]})
                else:
                    self._answer = said
                    if said["op"] == "epoch":
                        self.wants_change = False  # it is what an earlier "change" has asked for
                    self._changed.notify_all()

    def _send(self, message: dict[str, Any]) -> None:
        """Let the thread send a message, under the lock.  One that a broken connection loses is not repeated."""
        self._outgoing.append(message)
        self._flushed.clear()
        os.eventfd_write(self._wakes, 1)


class MeetingRefusal(Exception):
    """may_pass: it may be taken later.  is_proven: by a meeting point that knows the secret, not by a stranger."""

    def __init__(self, text: str, may_pass: bool = False, is_proven: bool = True) -> None:
        super().__init__(text)
        self.may_pass, self.is_final = may_pass, is_proven and not may_pass


def connect(address: tuple[str, int], side: str, secret: bytes, context: ssl.SSLContext | None) -> socket.socket:
    """Return a connection to the meeting point, after both have proved the secret.

    side: "site" or "operator".

    Raises OSError, or MeetingRefusal.
    """
    sock = socket.create_connection(address, CONNECT_S)
    try:
        if context is not None:
            sock = context.wrap_socket(sock)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * SILENT_S))
        theirs = _read(sock, protocol.CHALLENGE_BYTES)
        if not theirs.startswith(protocol.MAGIC):
            raise MeetingRefusal(
                "it does not speak this protocol; install the same version of ds_hybridep there", is_proven=False
            )
        ours = protocol.challenge()
        sock.sendall(ours + protocol.prove(secret, side, theirs, ours))
        verdict = _read(sock, protocol.ANSWER_BYTES)
        if not hmac.compare_digest(verdict[1:], protocol.prove(secret, "meeting", theirs, ours)):
            raise MeetingRefusal("the two have different secrets; give both the same secret file", is_proven=False)
    except (EOFError, TimeoutError) as error:
        sock.close()
        raise ConnectionError(f"{error} in the handshake; is TLS configured on both sides or on none?") from None
    except BaseException:
        sock.close()
        raise
    return sock


def ask_as_operator(
    address: tuple[str, int], order: dict[str, Any], *, secret: bytes, context: ssl.SSLContext | None = None
) -> dict[str, Any]:
    """Return what a running meeting point answers to an order.  Raises OSError or EOFError if it does not."""
    try:
        with connect(address, "operator", secret, context) as sock:
            sock.sendall(protocol.pack(order))
            return _receive(sock)
    except MeetingRefusal as refusal:
        raise ConnectionError(str(refusal)) from None


def _read(sock: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count:
        if not (part := sock.recv(count - len(got))):
            raise EOFError("it was closed")
        got += part
    return got


def _receive(sock: socket.socket) -> dict[str, Any]:
    head = _read(sock, protocol.LENGTH.size)
    if (end := _end_of_message(head)) is None:
        end = protocol.LENGTH.size + protocol.LENGTH.unpack(head)[0]
    message: dict[str, Any] = json.loads(_read(sock, end - len(head)))
    return message


def _end_of_message(got: bytes) -> int | None:
    """Return where the first message of `got` ends; None if it is not whole.  ConnectionError if it is too long."""
    if len(got) < protocol.LENGTH.size:
        return None
    (length,) = protocol.LENGTH.unpack_from(got)
    if length > protocol.MAX_MESSAGE_BYTES:
        raise ConnectionError(f"it sent a message of {length} bytes")
    end = protocol.LENGTH.size + length
    return end if len(got) >= end else None
