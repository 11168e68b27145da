# SPDX-License-Identifier: Apache-2.0
"""The meeting point's connections: sites, operators and strangers, in one thread.

A stranger is a connection that has not proved the secret.  Their number is bounded, of one address too: the oldest one
of the address with the most of them makes room.
"""

import asyncio
import contextlib
import hmac
import itertools
import json
import os
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ds_hybridep.errors import ConfigError
from ds_hybridep.sites import protocol
from ds_hybridep.sites.meeting import KnownSite, Meeting, Orders, Record

MAX_STRANGERS = 64
HANDSHAKE_S = 10.0
TICK_S = 0.25
TICKS_OF_A_BEAT = 4  # between heartbeats, which sites answer
SILENT_MS = 20_000  # what TCP has not delivered after this ends a connection
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


class Server:
    """Serves a meeting point until it is cancelled.

    Args:
        secret: of all sites.
        context: for TLS, to accept with.
        log: is told what happens.
    """

    def __init__(
        self, meeting: Meeting, secret: bytes, context: ssl.SSLContext | None, log: Callable[[str], None]
    ) -> None:
        self.meeting, self._secret, self._context, self._log = meeting, secret, context, log
        self._strangers: dict[socket.socket, str] = {}  # and their addresses, the oldest first
        self.num_refused = 0  # strangers that had to make room or did not prove the secret
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, host: str, port: int, metrics_port: int | None = None) -> None:
        """Serve.  port: 0 for any; the log is told which one it is."""
        listener = socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=128
        )
        listener.setblocking(False)
        self._log(f"meeting point on port {listener.getsockname()[1]}")
        metrics = None
        if metrics_port is not None:
            metrics = await asyncio.start_server(self._metrics, host, metrics_port, limit=2**12)
        accepting = asyncio.ensure_future(self._accept(listener))
        try:
            for number in itertools.count():
                await asyncio.sleep(TICK_S)
                self.meeting.tick()
                for site in list(self.meeting.sites.values()) if number % TICKS_OF_A_BEAT == 0 else ():
                    site.send({"op": "beat"})
                if accepting.done():
                    accepting.result()
        finally:
            accepting.cancel()
            listener.close()
            if metrics is not None:
                metrics.close()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError:  # it has gone again, or no descriptor is free
                await asyncio.sleep(TICK_S)
                continue
            self._make_room()
            self._strangers[sock] = str(address[0])
            task = loop.create_task(self._serve(sock))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _make_room(self) -> None:
        if len(self._strangers) < MAX_STRANGERS:
            return
        worst, _ = Counter(self._strangers.values()).most_common(1)[0]
        oldest = next(sock for sock, address in self._strangers.items() if address == worst)
        del self._strangers[oldest]
        self.num_refused += 1
        with contextlib.suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)  # its task sees the end, and closes it

    async def _serve(self, sock: socket.socket) -> None:
        site, writer = None, None
        try:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENT_MS)
            reader, writer = await asyncio.wait_for(self._streams(sock), HANDSHAKE_S)
            site = await asyncio.wait_for(self._admit(sock, reader, writer), HANDSHAKE_S)
            while site is not None:
                self.meeting.hear(site, await _receive(reader))
        except (OSError, EOFError, TimeoutError, asyncio.TimeoutError, ValueError, KeyError, TypeError) as error:
            if site is not None and self.meeting.sites.get(site.name) is site:  # else its end has been told
                cause = "it was closed" if isinstance(error, EOFError) else f"{type(error).__name__}: {error}"
                self._log(f"the connection of site '{site.name}' has ended: {cause}")
        finally:
            self._strangers.pop(sock, None)
            if site is not None:
                self.meeting.lose(site)
            if writer is not None:
                writer.close()
            else:
                sock.close()

    async def _streams(self, sock: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=2**16, loop=loop)
        made = asyncio.StreamReaderProtocol(reader, loop=loop)
        limits = {} if self._context is None else {"ssl_handshake_timeout": HANDSHAKE_S}
        transport, _ = await loop.connect_accepted_socket(lambda: made, sock, ssl=self._context, **limits)
        return reader, asyncio.StreamWriter(transport, made, reader, loop)

    async def _admit(
        self, sock: socket.socket, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> KnownSite | None:
        """Return the site at the other end once it has proved the secret and is welcome, else None."""
        ours = protocol.challenge()
        writer.write(ours)
        hello = await reader.readexactly(protocol.HELLO_BYTES)
        theirs, proof = hello[: protocol.CHALLENGE_BYTES], hello[protocol.CHALLENGE_BYTES :]
        sides = [
            side for side in ("site", "operator")
            if hmac.compare_digest(proof, protocol.prove(self._secret, side, ours, theirs))
        ]  # fmt: skip
        if not theirs.startswith(protocol.MAGIC) or not sides:
            self.num_refused += 1
            writer.write(bytes(protocol.ANSWER_BYTES))
            await writer.drain()
            return None
        self._strangers.pop(sock, None)
        writer.write(b"\1" + protocol.prove(self._secret, "meeting", ours, theirs))
        said = await _receive(reader)
        if sides == ["operator"]:
            writer.write(protocol.pack(self.obey(said)))
            await writer.drain()
            return None

        def send(message: dict[str, Any]) -> None:
            if not writer.is_closing():
                writer.write(protocol.pack(message))

        meeting = self.meeting
        site, why = meeting.hello(said, send)
        if site is None:
            send({"op": "refused", "text": why, "may_pass": "is here already" in why})
        else:
            record = meeting.record
            send({
                "op": "welcome", "is_running": meeting.is_running, "epoch": record.epoch, "run": record.run,
                "step": record.step, "is_member": site.name in record.members,
            })  # fmt: skip
        await writer.drain()
        return site

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
            self._log(f"an operator has decided: {said}")
            meeting.tick()
            return {"text": f"{said}, at the next start"}
        return {**meeting.status(), "num_refused": self.num_refused}

    async def _metrics(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer any HTTP request with metrics in Prometheus' text format."""
        with contextlib.suppress(OSError, EOFError, asyncio.TimeoutError, ValueError):
            await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), HANDSHAKE_S)
            body = metrics_of(self.meeting.status(), self.num_refused).encode()
            head = f"HTTP/1.0 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            await writer.drain()
        writer.close()


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


async def _receive(reader: asyncio.StreamReader) -> dict[str, Any]:
    (length,) = protocol.LENGTH.unpack(await reader.readexactly(protocol.LENGTH.size))
    if length > protocol.MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {length} bytes")
    message = json.loads(await reader.readexactly(length))
    if not isinstance(message, dict):
        raise ValueError("not an object")
    return message
