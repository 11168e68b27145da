# SPDX-License-Identifier: Apache-2.0
"""A site's connection to the meeting point, held by its rank 0.  It is made again whenever it breaks."""

import atexit
import logging
import os
import socket
import ssl
import threading
import time
from contextlib import closing
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from ds_hybridep.errors import SiteError
from ds_hybridep.link.door import HANDSHAKE_S, connect, run_ready
from ds_hybridep.link.line import Line
from ds_hybridep.link.trust import Refused, dial
from ds_hybridep.sites.patience import Patience
from ds_hybridep.sites.protocol import MEETING, OPERATOR, SITE, Dialler

logger = logging.getLogger(__name__)
RETRY_S = 1.0
SILENT_S = 10.0  # without a heartbeat of the meeting point, the connection is made again
TELL_S = 0.1  # between words of how far this site is
LEAVE_S = 2.0  # how long the meeting point may take to hear that this site leaves
ANSWER_S = 10.0  # how long an operator waits


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
        self._where = f"the meeting point {address[0]}:{address[1]}"
        self._hello = {
            "op": "hello", "site": name, "names": names, "settings": settings, "instance": os.urandom(8).hex(),
            "wait_s": wait_s, "epoch": 0, "members": [], "run": "", "step": 0,
        }  # fmt: skip
        self._changed = threading.Condition()
        self._call: dict[str, Any] | None = None
        self._answer: dict[str, Any] | None = None
        self.is_connected = False  # and welcome
        self._is_closed = False
        self._outgoing: list[dict[str, Any]] = []
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.heard_at = time.monotonic()
        self._told_at = 0.0  # when `committed` was last passed on
        self.trouble = ""
        self._pid = os.getpid()  # a forked process has this connection, too
        atexit.register(self._leave)  # also after an exception: the others need not wait for this site
        self._thread = threading.Thread(target=self._run, name="hybridep-meeting-point", daemon=True)
        self._thread.start()
        self._come()

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
        self._thread.join(HANDSHAKE_S)
        if not self._thread.is_alive():
            os.close(self._wakes)

    def _leave(self) -> None:
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._is_closed = True
            self._send({"op": "leave", "step": self._hello["step"]})
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self.is_connected, LEAVE_S)

    def _come(self) -> None:
        """Wait until the meeting point has welcomed this site, or the thread has given up."""
        with Patience(f"site '{self.name}' waits for {self._where}") as patience:
            while True:
                with self._changed:
                    if self._changed.wait_for(lambda: self.welcome or self._is_closed, RETRY_S):
                        break
                patience.look(self.trouble)
            if not self.welcome:
                self.close()
                self._check()
                raise SiteError(f"site '{self.name}': {self.trouble}")

    # -- the connection: of the thread alone, because TLS allows one ------------------------------------------------

    def _run(self) -> None:
        deadline = time.monotonic() + self._wait_s
        try:
            while not self._is_closed:
                cause, is_final = self._stay_connected()
                if not self.welcome and not is_final and time.monotonic() > deadline:
                    cause, is_final = f"in {self._wait_s:g} s it was not welcome: {cause}", True
                self._note_end(cause, is_final)
                with self._changed:
                    self._changed.wait_for(lambda: self._is_closed, RETRY_S)
        except BaseException as error:  # noqa: BLE001 (whatever ends the thread is raised where it is waited for)
            self._error = error
            self._note_end(str(error), is_final=True)

    def _note_end(self, cause: str, is_final: bool) -> None:
        with self._changed:
            self.trouble, self.is_connected, self._outgoing = cause, False, []
            self._is_closed |= is_final
            self._changed.notify_all()

    def _stay_connected(self) -> tuple[str, bool]:
        """Connect, and talk until the connection ends; return why it has, and whether that is for good."""
        try:
            self._talk(connect(self._address, dial(self._secret, MEETING, Dialler(SITE)), self._context))
        except Refused as refusal:  # perhaps by a stranger, who has its port for a while
            return f"{self._where} refused it: {refusal}", not self.welcome
        except MeetingRefusal as refusal:
            return f"{self._where} refused it: {refusal}", not refusal.may_pass
        except (OSError, ValueError) as error:
            what = f"the connection to {self._where} broke" if self.is_connected else f"{self._where} is not reached"
            hint = "" if self.welcome else "; is 'ds_hybridep meet' running there, and does a firewall stop this port?"
            return f"{what}: {error}{hint}", False
        return "", True

    def _talk(self, sock: socket.socket) -> None:
        """Send and receive until this site leaves.  Raises OSError, ValueError or MeetingRefusal."""
        came_at = time.monotonic()
        with DefaultSelector() as selector, closing(Line(sock, selector, self._hear, undelivered_s=SILENT_S)) as line:
            selector.register(self._wakes, EVENT_READ, lambda _: os.eventfd_read(self._wakes))
            line.send(self._hello)
            while True:
                with self._changed:
                    messages, self._outgoing = self._outgoing, []
                for message in messages:
                    line.send(message)
                if self._is_closed and not (self.is_connected and line.is_sending):
                    return
                run_ready(selector, 1.0)
                if time.monotonic() - max(self.heard_at, came_at) > SILENT_S:
                    raise TimeoutError(
                        f"nothing was heard of it for {SILENT_S:g} s; if each new connection ends so, is the MTU too "
                        f"large somewhere on the way?"
                    )

    def _hear(self, said: dict[str, Any]) -> None:
        op = said["op"]
        if op == "refused":
            raise MeetingRefusal(said["text"], may_pass=said.get("may_pass", False))
        self.heard_at = time.monotonic()
        if op == "note":
            logger.warning("hybridep: %s", said["text"])
        elif op == "waiting":
            self.waiting_for = said["text"]
        elif op == "change":
            self.wants_change = True
        else:
            with self._changed:
                if op == "beat":
                    self._send({"op": "beat", "step": self._hello["step"]})
                elif op == "welcome":
                    if self.welcome and not said["is_member"]:
                        self.wants_change = True  # the others went on without this site
                    self.welcome, self.is_connected = self.welcome or said, True
                    self._outgoing = [] if self._call is None or self._answer is not None else [self._call]
                else:
                    self._answer = said
                    if op == "epoch":
                        self.wants_change = False  # it is what an earlier "change" has asked for
                self._changed.notify_all()

    def _send(self, message: dict[str, Any]) -> None:
        """Let the thread send a message, under the lock.  One that a broken connection loses is not repeated."""
        if self.is_connected:
            self._outgoing.append(message)
        os.eventfd_write(self._wakes, 1)


class MeetingRefusal(Exception):
    """The meeting point does not take a site.  may_pass: it may take it later."""

    def __init__(self, text: str, may_pass: bool) -> None:
        super().__init__(text)
        self.may_pass = may_pass


def ask_as_operator(
    address: tuple[str, int], order: dict[str, Any], *, secret: bytes, context: ssl.SSLContext | None = None
) -> dict[str, Any]:
    """Return what a running meeting point answers to an order.  Raises OSError or ValueError if it does not."""
    answers: list[dict[str, Any]] = []
    try:
        sock = connect(address, dial(secret, MEETING, Dialler(OPERATOR)), context)
    except Refused as error:
        raise ConnectionError(str(error)) from None
    deadline = time.monotonic() + ANSWER_S
    with DefaultSelector() as selector, closing(Line(sock, selector, answers.append, undelivered_s=ANSWER_S)) as line:
        line.send(order)
        while not answers:
            run_ready(selector, 0.1)
            if time.monotonic() > deadline:
                raise TimeoutError(f"no answer in {ANSWER_S:g} s")
    return answers[0]
