# SPDX-License-Identifier: Apache-2.0
"""Who does not know the secret gets nothing from a meeting point, and who does cannot end it by a damaged message."""

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from link_pair import Proxy
from scripts import free_port
from site_jobs import Meeting, secret_file
from site_members import LIMIT_S, NAMES, member, until

from ds_hybridep.errors import SiteError
from ds_hybridep.link import door, read_secret
from ds_hybridep.link.door import connect
from ds_hybridep.link.trust import dial
from ds_hybridep.sites import meeting_server
from ds_hybridep.sites.meeting import Meeting as MeetingOfSites
from ds_hybridep.sites.meeting_server import Server
from ds_hybridep.sites.member import Member, ask_as_operator
from ds_hybridep.sites.protocol import MEETING, OPERATOR, SITE, Dialler


@pytest.fixture
def meeting(tmp_path: Path) -> Iterator[Meeting]:
    with Meeting(tmp_path) as one:
        until(lambda: "meeting point on port" in one.log.read_text(), "it listens")
        yield one


def secret_of(folder: Path) -> bytes:
    return read_secret(secret_file(folder), "")


def status_of(meeting: Meeting, folder: Path) -> dict[str, Any]:
    return ask_as_operator((meeting.host, meeting.port), {"op": "status"}, secret=secret_of(folder))


def answer_of(address: tuple[str, int], said: bytes) -> bytes:
    """What comes from there, until it closes the connection."""
    answer = b""
    with socket.create_connection(address, LIMIT_S) as sock, contextlib.suppress(ConnectionResetError):
        sock.sendall(said)
        while part := sock.recv(2**12):
            answer += part
    return answer


def test_a_site_with_another_secret_is_refused_and_told(meeting: Meeting, tmp_path: Path) -> None:
    one = member(meeting, tmp_path)
    with pytest.raises(SiteError, match="refused it: the two have different secrets"):
        Member((meeting.host, meeting.port), "b", NAMES, {}, secret=bytes(32), wait_s=30.0)
    with pytest.raises(ConnectionError, match="different secrets"):
        ask_as_operator((meeting.host, meeting.port), {"op": "status"}, secret=bytes(32))
    status = status_of(meeting, tmp_path)
    assert status["num_refused"] == 2
    assert status["sites"]["b"]["state"] == "absent"
    assert one.is_in_touch
    one.close()


def test_what_was_overheard_opens_nothing(meeting: Meeting, tmp_path: Path) -> None:
    proxy = Proxy((meeting.host, meeting.port))
    try:
        place = type("Place", (), {"host": proxy.address[0], "port": proxy.address[1]})
        one = member(place, tmp_path)
        until(lambda: len(proxy.heard[0]) >= 200, "a hello")
        answer = answer_of((meeting.host, meeting.port), proxy.heard[0])
        assert b'"op"' not in answer
        assert status_of(meeting, tmp_path)["num_refused"] == 1
        assert meeting.log.read_text().count("site 'a' is here") == 1
        one.close()
    finally:
        proxy.close()


@pytest.mark.parametrize(
    "said",
    [
        struct.pack("!I", 2**31) + b"{",  # a huge message
        struct.pack("!I", 2) + b"[]",
        struct.pack("!I", 2) + b"\xff\xff",
        struct.pack("!I", 2) + b"{}",  # says nothing
        struct.pack("!I", 20) + json.dumps({"op": "hello", "a": 1}).encode()[:20],
    ],
    ids=["huge", "no object", "no text", "empty", "cut off"],
)
def test_a_damaged_message_ends_its_connection_only(meeting: Meeting, tmp_path: Path, said: bytes) -> None:
    one = member(meeting, tmp_path)
    for side in (SITE, OPERATOR):
        steps = dial(secret_of(tmp_path), MEETING, Dialler(side))
        with connect((meeting.host, meeting.port), steps, None) as sock:
            sock.settimeout(LIMIT_S)
            sock.sendall(said)
            with contextlib.suppress(ConnectionResetError):
                while sock.recv(2**12):
                    if side == OPERATOR:  # what is no order is answered with the status
                        break
    assert status_of(meeting, tmp_path)["sites"]["a"]["is_connected"]
    assert one.is_in_touch
    one.close()


def test_another_version_is_told_in_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = type("Place", (), {"host": "127.0.0.1", "port": other.getsockname()[1]})
        other.settimeout(LIMIT_S)

        def answer() -> None:
            sock, _ = other.accept()
            with sock:
                sock.sendall(b"hybridep sites 1\n" + bytes(32))
                sock.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(SiteError, match="does not speak this protocol; install the same version"):
            member(place, tmp_path)
        thread.join(LIMIT_S)


@contextlib.contextmanager
def serving(metrics_port: int | None = None) -> Iterator[tuple[str, int]]:
    """A meeting point in this process; its address."""
    said: list[str] = []
    is_over = threading.Event()

    def clock() -> float:
        if is_over.is_set():
            raise SystemExit
        return time.monotonic()

    server = Server(MeetingOfSites(clock=clock), bytes(16), None, said.append)

    def serve() -> None:
        with contextlib.suppress(SystemExit):
            server.run("127.0.0.1", 0, metrics_port)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        until(lambda: said, "it listens")
        yield "127.0.0.1", int(said[0].rsplit(" ", 1)[1])
    finally:
        is_over.set()
        thread.join(LIMIT_S)


def is_closed(sock: socket.socket) -> bool:
    sock.setblocking(False)
    try:
        return not sock.recv(2**12)
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_who_proves_the_secret_and_says_nothing_has_its_time_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting_server, "HANDSHAKE_S", 1.0)
    with serving() as address:
        with connect(address, dial(bytes(16), MEETING, Dialler(SITE)), None) as silent:
            one = Member(address, "a", NAMES, {}, secret=bytes(16), wait_s=30.0)
            until(lambda: is_closed(silent), "its end")
            assert one.is_connected
            one.close()


def test_strangers_at_the_port_of_metrics_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "HANDSHAKE_S", 2.0)
    port = free_port()
    with serving(port), contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(100)]
        until(lambda: sum(map(is_closed, silent)) >= 100 - door.MAX_STRANGERS, "room")
        assert b"hybridep_epoch 0\n" in answer_of(("127.0.0.1", port), b"GET / HTTP/1.1\r\n\r\n")
        until(lambda: all(map(is_closed, silent)), "their end")
        assert answer_of(("127.0.0.1", port), b"x" * 2**13) == b""
