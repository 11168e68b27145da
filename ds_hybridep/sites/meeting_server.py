# SPDX-License-Identifier: Apache-2.0
"""The meeting point's connections: sites and operators, in one thread.  Its `Door` keeps strangers away."""

import contextlib
import itertools
import json
import os
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from selectors import DefaultSelector
from typing import Any

from ds_hybridep.errors import ConfigError
from ds_hybridep.link.door import HANDSHAKE_S, Door, run_ready
from ds_hybridep.link.line import Line
from ds_hybridep.link.options import listen
from ds_hybridep.link.trust import WELCOME, Steps, accept
from ds_hybridep.sites.meeting import KnownSite, Meeting, Orders, Record
from ds_hybridep.sites.protocol import MEETING, OPERATOR, Dialler

TICK_S = 0.25
TICKS_OF_A_BEAT = 4  # between heartbeats, which sites answer
SILENT_S = 20.0  # what TCP has not delivered after this ends a connection
MAX_HEAD_BYTES = 2**12  # of a request for metrics
RECORD_FILE = "run.json"


# -- what outlives the process -------------------------------------------------------------------------------------


def read_record(folder: Path) -> Record:
    """Return the record in a folder, which is made; an empty one if there is none.

    Raises ConfigError if it cannot be read.
    """
    path = folder / RECORD_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return Record(**json.loads(path.read_text())) if path.exists() else Record()
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"meet --folder: {path} cannot be read ({error}); it holds how far the run is: restore it, or move it "
            f"away and start the site with the newest checkpoint first"
        ) from error


def write_record(folder: Path, record: Record) -> None:
    """Keep a record, so that an end at any time leaves the old one or the new one.  OSError if that fails."""
    path, partial = folder / RECORD_FILE, folder / f"{RECORD_FILE}.partial"
    with partial.open("w") as file:
        json.dump(asdict(record), file)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


# -- connections ---------------------------------------------------------------------------------------------------


class Guest(Line):
    """A connection that has proved the secret.

    site: None for an operator, and until a site has said which one it is.
    known_at: when it last was the connection of a site that is here.
    """

    def __init__(self, server: "Server", sock: socket.socket, *, is_operator: bool) -> None:
        self.site: KnownSite | None = None
        self.known_at = time.monotonic()
        self._server, self._is_operator = server, is_operator
        super().__init__(sock, server.selector, self._hear, undelivered_s=SILENT_S)

    @property
    def is_known(self) -> bool:
        return self.site is not None and self._server.meeting.sites.get(self.site.name) is self.site

    def on_event(self, mask: int) -> None:
        """Read or write what the socket allows; what is wrong ends this connection only."""
        try:
            super().on_event(mask)
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.leave(str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}")

    def leave(self, cause: str) -> None:
        if self.site is not None and self.is_known:  # else its end has been told
            self._server.log(f"the connection of site '{self.site.name}' has ended: {cause}")
        self.close()
        self._server.guests.remove(self)
        if self.site is not None:
            self._server.meeting.lose(self.site)

    def _hear(self, said: dict[str, Any]) -> None:
        meeting = self._server.meeting
        if self._is_operator:
            self.send(self._server.obey(said))
        elif self.site is not None:
            meeting.hear(self.site, said)
        else:
            self.site, why = meeting.hello(said, self.send)
            if self.site is None:
                return self.send({"op": "refused", "text": why, "may_pass": "is here already" in why})
            record = meeting.record
            self.send({
                "op": "welcome", "is_running": meeting.is_running, "epoch": record.epoch, "run": record.run,
                "step": record.step, "is_member": self.site.name in record.members,
            })  # fmt: skip


class Server:
    """Serves a meeting point.

    Args:
        secret: of all sites.
        context: for TLS, to accept with.
        log: is told what happens.
    """

    def __init__(
        self, meeting: Meeting, secret: bytes, context: ssl.SSLContext | None, log: Callable[[str], None]
    ) -> None:
        self.meeting, self.log, self._secret = meeting, log, secret
        self.selector = DefaultSelector()
        self._door, self._metrics_door = Door(self.selector, (None, context)), Door(self.selector)
        self.guests: list[Guest] = []

    @property
    def num_refused(self) -> int:
        """Strangers that had to make room or did not prove the secret."""
        return self._door.num_refused

    def run(self, host: str, port: int, metrics_port: int | None = None) -> None:
        """Serve, until an exception comes.  port: 0 for any; the log is told which one it is.

        Raises CommunicationError if the ports cannot be had.
        """
        try:
            port = self._door.open(listen(host, (port, port)), self._steps, self._take)
            if metrics_port is not None:
                self._metrics_door.open(
                    listen(host, (metrics_port, metrics_port)), self._answer_http, lambda *_: False
                )
            self.log(f"meeting point on port {port}")
            for number in itertools.count():
                until = time.monotonic() + TICK_S
                while (left_s := until - time.monotonic()) > 0:
                    run_ready(self.selector, left_s)
                self._tick(time.monotonic(), beats=number % TICKS_OF_A_BEAT == 0)
        finally:
            for door in (self._door, self._metrics_door):
                door.close()
            for guest in self.guests:
                guest.close()
            self.selector.close()

    def _tick(self, now: float, *, beats: bool) -> None:
        self.meeting.tick()
        for door in (self._door, self._metrics_door):
            door.tick(now)
        for site in list(self.meeting.sites.values()) if beats else ():
            site.send({"op": "beat"})
        for guest in list(self.guests):
            if guest.is_known:
                guest.known_at = now
            elif now - guest.known_at > HANDSHAKE_S:
                guest.leave("it is not that of a site that is here")

    def _steps(self) -> Steps:
        return accept(self._secret, MEETING, lambda theirs: (WELCOME, theirs))

    def _take(self, sock: socket.socket, theirs: Dialler | None, _: Exception | None) -> bool:
        """Take a connection that has proved the secret."""
        with contextlib.suppress(OSError):  # it has broken since
            if theirs is not None:
                self.guests.append(Guest(self, sock, is_operator=theirs.side == OPERATOR))
                return True
        return False

    def _answer_http(self) -> Steps:
        """Answer any HTTP request with metrics in Prometheus' text format."""
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            if len(head) >= MAX_HEAD_BYTES:
                raise ConnectionError("no request")
            head += yield b"", 1  # what came behind it would reset the connection
        body = metrics_of(self.meeting.status(), self.num_refused).encode()
        lines = "HTTP/1.0 200 OK", "Content-Type: text/plain; version=0.0.4", f"Content-Length: {len(body)}"
        yield b"\r\n".join([*(line.encode() for line in lines), b"", body]), 0
        return None

    # -- operators --------------------------------------------------------------------------------------------------

    def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        """Do what an operator says, and return the answer."""
        meeting, op = self.meeting, order.get("op")
        if op == "drop":
            return {"text": meeting.drop(str(order["site"]))}
        if op == "orders":
            orders = Orders(str(order.get("run") or ""), order.get("step"))
            meeting.orders = orders
            said = {"new": "a new run begins", "": ""}.get(orders.run, f"run {orders.run} goes on")
            if orders.step is not None:
                said = f"the run goes on from step {orders.step}"
            self.log(f"an operator has decided: {said}")
            meeting.tick()
            return {"text": f"{said}, at the next start"}
        return {**meeting.status(), "num_refused": self.num_refused}


def metrics_of(status: dict[str, Any], num_refused: int) -> str:
    """Return a status as Prometheus' text."""
    lines = [
        f"hybridep_epoch {status['epoch']}",
        f"hybridep_step {status['step']}",
        f"hybridep_members {len(status['members'])}",
        f"hybridep_joiners {len(status['joiners'])}",
        f"hybridep_waiting {int(bool(status['waits_for']))}",
        f"hybridep_connections_refused_total {num_refused}",
        f"hybridep_record_is_kept {int(not status['save_error'])}",
    ]
    for name, site in status["sites"].items():
        lines.append(f'hybridep_site_is_member{{site="{name}"}} {int(name in status["members"])}')
        if site["silent_s"] is not None:
            lines.append(f'hybridep_site_silent_seconds{{site="{name}"}} {site["silent_s"]}')
            lines.append(f'hybridep_site_step{{site="{name}"}} {site["step"]}')
    return "\n".join(lines) + "\n"
