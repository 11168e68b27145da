# SPDX-License-Identifier: Apache-2.0
"""Two links in one process, and a proxy between them that resets, freezes and restores their connections."""

import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import ds_hybridep.link.link
from ds_hybridep.link import TLS, Fact, Link, LinkOptions, State

SECRET = b"0123456789abcdef"
LIMIT_S = 300.0


def make_link(rank: int, world_size: int = 2, on_change: Any = None, **settings: Any) -> Any:
    """A link that keeps in `heard` what it hears of peers, but for changes between alive and silent."""
    link: Any = Link(rank, world_size, **{"secret": SECRET, "host": "127.0.0.1", "timeout_s": LIMIT_S, **settings})
    link.heard = heard = []

    def note(fact: Fact) -> None:
        if fact.kind not in (State.ALIVE, State.SILENT):
            heard.append(fact)
        if on_change is not None:
            on_change(fact)

    link.on_change = note
    return link


def connect_all(links: list[Link], addresses: list[tuple[str, int]] | None = None, connections: int = 1) -> None:
    """Connect links with each other; addresses: of all ranks, if not their own."""
    book = dict(enumerate(addresses or [link.address for link in links]))
    threads = [
        threading.Thread(target=link.connect, args=(book, LinkOptions(connections=connections)), daemon=True)
        for link in links[1:]
    ]
    for thread in threads:
        thread.start()
    links[0].connect(book, LinkOptions(connections=connections))
    for thread in threads:
        thread.join(LIMIT_S)


def close_all(links: list[Link]) -> None:
    threads = [threading.Thread(target=link.close, daemon=True) for link in links]
    with mock.patch.object(ds_hybridep.link.link, "LEAVE_S", 0.05):  # all leave: nobody needs to hear of it
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)


@contextlib.contextmanager
def linked(connections: int = 1, **settings: Any) -> Iterator[list[Link]]:
    """Ranks 0 and 1, connected."""
    links = [make_link(rank, **settings) for rank in (0, 1)]
    try:
        connect_all(links, connections=connections)
        yield links
    finally:
        close_all(links)


def content(*of: Any, num_bytes: int) -> bytes:
    """Bytes that are a function of `of`, each message's different from all others'."""
    block = b"".join(struct.pack("!Q", hash((*of, index)) & 2**64 - 1) for index in range(16))
    return (block * (num_bytes // len(block) + 1))[:num_bytes]


class Proxy:
    """Forwards TCP connections to `target`."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()[:2]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._flows = threading.Event()  # cleared: bytes are taken and never handed on, as by a dead router
        self._flows.set()
        self.heard: list[bytes] = []  # the first bytes that each dialler said
        self.num_accepted = 0
        self._lock, self._is_closed = threading.Lock(), False
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                inner, _ = self._listener.accept()
                self.num_accepted += 1
                if not self._flows.is_set():
                    self._add(inner, inner)
                    continue
                try:
                    outer = socket.create_connection(self._target)
                except OSError:  # the target has ended
                    inner.close()
                    continue
                self._add(inner, outer)
                self.heard.append(b"")
                for source, sink, at in ((inner, outer, len(self.heard) - 1), (outer, inner, None)):
                    threading.Thread(target=self._pump, args=(source, sink, at), daemon=True).start()

    def _add(self, inner: socket.socket, outer: socket.socket) -> None:
        with self._lock:
            self._pairs.append((inner, outer))
        if self._is_closed:  # `close` may have come before this pair
            self.reset()

    def _pump(self, source: socket.socket, sink: socket.socket, at: int | None) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                if at is not None and len(self.heard[at]) < 200:
                    self.heard[at] += data
                if self._flows.is_set():
                    sink.sendall(data)
        if self._flows.is_set():
            for sock in (source, sink):
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def reset(self) -> None:
        """Break all connections, as a router does that has forgotten them."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for sock in (sock for pair in pairs for sock in pair):
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                sock.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads
            sock.close()

    def freeze(self) -> None:
        """Lose all that is sent, without a word."""
        self._flows.clear()

    def thaw(self) -> None:
        """Hand on what new connections send."""
        self._flows.set()

    def close(self) -> None:
        self._is_closed = True
        self._listener.close()
        self.reset()


@contextlib.contextmanager
def linked_through_proxy(connections: int = 1, **settings: Any) -> Iterator[tuple[list[Link], Proxy]]:
    """Ranks 0 and 1; rank 1 dials rank 0 through a proxy."""
    links = [make_link(rank, **settings) for rank in (0, 1)]
    proxy = Proxy(links[0].address)
    try:
        connect_all(links, [proxy.address, links[1].address], connections)
        yield links, proxy
    finally:
        proxy.thaw()
        close_all(links)
        proxy.close()


def make_certificates(folder, name="authority"):
    def openssl(words):
        subprocess.run(["openssl", *words.split()], check=True, capture_output=True, cwd=folder, timeout=LIMIT_S)

    for key in (name, f"{name}-rank"):
        openssl(f"ecparam -name prime256v1 -genkey -noout -out {key}.key")
    openssl(f"req -x509 -new -key {name}.key -subj /CN={name} -days 2 -out {name}.pem")
    openssl(f"req -new -key {name}-rank.key -subj /CN=rank -out {name}.csr")
    openssl(f"x509 -req -in {name}.csr -CA {name}.pem -CAkey {name}.key -CAcreateserial -days 2 -out {name}-rank.pem")
    return TLS(folder / f"{name}-rank.pem", folder / f"{name}-rank.key", folder / f"{name}.pem")


class Process:
    """Rank 1 in a process of its own, which connects `link` with `first` and runs `program`.  port: 0 takes any."""

    def __init__(self, first: Link, program: str, before: str = "", port: int = 0) -> None:
        source = f"""
import json, os, sys, threading, time
from link_pair import *
{before}
link = make_link(1, ports=({port}, {port}))
print(json.dumps(link.address), flush=True)
link.connect({{0: json.loads(sys.stdin.readline())}})
channel = link.channel("x", (0, 1))
sys.stdin.readline()  # the other rank is connected, too
{program}
"""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", source], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, env=environment,
        )  # fmt: skip
        self.address = tuple(json.loads(self._process.stdout.readline()))
        self._process.stdin.write(json.dumps(first.address) + "\n")
        self._process.stdin.flush()
        first.connect({1: self.address})
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def read(self) -> str:
        return self._process.stdout.readline().strip()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> tuple[int, str, str]:
        """Wait for its end; return its status and the rest of what it said."""
        said, complained = self._process.communicate(timeout=LIMIT_S)
        return self._process.returncode, said, complained

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate(timeout=LIMIT_S)
