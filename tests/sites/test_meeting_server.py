# SPDX-License-Identifier: Apache-2.0
"""The meeting point as a process: strangers, operators, and what it keeps."""

import contextlib
import json
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from link_pair import make_certificates
from marks import slow
from scripts import free_port
from site_jobs import Meeting, secret_file
from site_members import LIMIT_S, NAMES, member, until

import ds_hybridep.sites.member
from ds_hybridep.commands.main import main
from ds_hybridep.errors import SiteError
from ds_hybridep.link import door
from ds_hybridep.sites.member import Member
from ds_hybridep.sites.protocol import split_address


def called(one: Member, step: int, run: str = "") -> Member:
    one.call(run=run, step=step, complete=False, is_whole=True, missed={}, addresses=[["h", 1]])
    return one


def answered(one: Member) -> dict[str, Any]:
    answer: dict[str, Any] = until(lambda: one.answer(0.1), "an epoch")
    return answer


@pytest.fixture
def meeting(tmp_path: Path) -> Iterator[Meeting]:
    with Meeting(tmp_path, more=["--folder", str(tmp_path / "kept")]) as one:
        until(lambda: "meeting point on port" in one.log.read_text(), "it listens")
        yield one


def ask(meeting: Meeting, folder: Path, *words: str) -> int:
    return main(
        ["meet", "--connect", f"{meeting.host}:{meeting.port}", "--secret-file", str(secret_file(folder)), *words]
    )


@pytest.mark.parametrize("encrypts", [slow(False), True], ids=["open", "TLS"])
def test_connections_of_strangers_leave_room_for_sites(tmp_path: Path, encrypts: bool) -> None:
    if encrypts and shutil.which("openssl") is None:
        pytest.skip("needs openssl, which makes certificates")
    tls = make_certificates(tmp_path) if encrypts else None
    with Meeting(tmp_path, tls=tls) as meeting:
        until(lambda: "meeting point on port" in meeting.log.read_text(), "it listens")
        strangers, is_over = [], threading.Event()

        def come() -> None:
            for _ in range(1500):
                with contextlib.suppress(OSError):
                    strangers.append(socket.create_connection((meeting.host, meeting.port), 1.0))
                    strangers[-1].setblocking(False)
                if len(strangers) > 700:  # of this process, which may have 1024 descriptors
                    strangers.pop(0).close()
                time.sleep(0.002)
            is_over.set()

        threading.Thread(target=come, daemon=True).start()
        try:
            until(lambda: len(strangers) > 200, "strangers come")
            one = member(meeting, tmp_path, context=None if tls is None else tls.contexts()[0])
            descriptors = len(os.listdir(f"/proc/{meeting.process.pid}/fd"))
            assert descriptors < 200
            assert is_over.wait(LIMIT_S)
            assert one.is_in_touch
            one.close()
        finally:
            for sock in strangers:
                sock.close()
        assert meeting.process.poll() is None


def test_an_operator_sees_who_is_there_drops_a_site_and_decides(
    meeting: Meeting, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a = called(member(meeting, tmp_path), 3, run="some run")
    until(lambda: a.waiting_for, "a reason")
    assert a.waiting_for.startswith("not here yet: b; the others start in")
    assert ask(meeting, tmp_path, "--status") == 0
    said = capsys.readouterr().out
    assert "epoch 0, no run yet" in said
    assert "a     waiting" in said
    assert "b     absent" in said
    b = called(member(meeting, tmp_path, "b"), 3, run="some run")
    assert answered(a)["members"] == answered(b)["members"] == NAMES
    for one in (a, b):
        one.committed(17)
    until(lambda: status_of(meeting, tmp_path, capsys)["step"] == 17, "heartbeats say the step")
    status = status_of(meeting, tmp_path, capsys)
    assert (status["run"], status["epoch"], status["members"]) == ("some run", 1, NAMES)
    assert status["sites"]["a"]["state"] == "member"
    assert ask(meeting, tmp_path, "--drop", "b") == 0
    assert "site 'b' was dropped" in capsys.readouterr().out
    with pytest.raises(SiteError, match="an operator has dropped site 'b'"):
        until(lambda: b.answer(0.1), "a refusal")
    for words, says in (
        (["--new-run"], "a new run begins"),
        (["--run", "x"], "run x goes on"),
        (["--accept-step", "4"], "step 4"),
    ):
        assert ask(meeting, tmp_path, *words) == 0
        assert says in capsys.readouterr().out
    a.close()
    b.close()


def status_of(meeting: Meeting, folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert ask(meeting, folder, "--status", "--json") == 0
    status: dict[str, Any] = json.loads(capsys.readouterr().out)
    return status


def test_a_meeting_point_that_is_not_there_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    secret = str(secret_file(tmp_path))
    assert main(["meet", "--connect", f"127.0.0.1:{free_port()}", "--secret-file", secret, "--status"]) != 0
    assert "does not answer" in capsys.readouterr().err
    assert main(["meet", "--secret-file", secret, "--status"]) != 0
    assert "--connect HOST:PORT" in capsys.readouterr().err


def test_a_port_that_is_taken_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        words = ["meet", "--host", "127.0.0.1", "--port", port, "--secret-file", str(secret_file(tmp_path))]
        assert main(words) != 0
    assert f"cannot listen on 127.0.0.1, ports {port} to {port}" in capsys.readouterr().err


def test_what_it_keeps_outlives_it(tmp_path: Path) -> None:
    kept = ["--folder", str(tmp_path / "kept")]
    port = free_port()
    with Meeting(tmp_path, port=port, more=kept) as meeting:
        members = [called(member(meeting, tmp_path, name), 9, run="r") for name in NAMES]
        assert [answered(one)["epoch"] for one in members] == [1, 1]
    with Meeting(tmp_path, port=port, more=kept) as meeting:
        until(lambda: "run r, step 9, epoch 1" in meeting.log.read_text(), "it has read what it kept")
        for one in members:
            until(lambda one=one: one.is_connected and one.is_in_touch, "they come back by themselves")
            called(one, 12, run="r")
        assert [answered(one)["epoch"] for one in members] == [2, 2]
        for one in members:
            one.close()
    (tmp_path / "kept" / "run.json").write_text("{")
    with Meeting(tmp_path, port=port, more=kept) as meeting:
        assert meeting.process.wait(LIMIT_S) != 0
        assert "run.json cannot be read" in meeting.log.read_text()


def test_another_service_on_its_port_for_a_while_ends_no_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ds_hybridep.sites.member, "RETRY_S", 0.2)  # no key sets it; the pauses are most of the test
    port = free_port()
    with Meeting(tmp_path, port=port) as meeting:
        one = member(meeting, tmp_path)
    with socket.create_server(("127.0.0.1", port)) as other:
        other.settimeout(LIMIT_S)
        for _ in range(2):
            sock, _ = other.accept()
            sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" + bytes(100))
            sock.close()
        until(lambda: "does not speak this protocol" in one.trouble or "broke" in one.trouble, "a cause")
    with Meeting(tmp_path, port=port):
        until(lambda: one.is_connected, "it is connected again")
        assert one.refusal == ""
        one.close()


def test_metrics_are_read_by_http(tmp_path: Path) -> None:
    port = free_port()
    with Meeting(tmp_path, more=["--metrics-port", str(port)]) as meeting:
        one = member(meeting, tmp_path)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=LIMIT_S) as answer:
            said = answer.read().decode()
        one.close()
    assert "hybridep_epoch 0\n" in said
    assert 'hybridep_site_is_member{site="a"} 0\n' in said
    for line in said.splitlines():
        name, value = line.rsplit(" ", 1)
        assert name.startswith("hybridep_")
        float(value)


def test_a_closed_terminal_or_a_full_disk_ends_nothing(tmp_path: Path) -> None:
    port = free_port()
    full = Path("/dev/full").open("w")
    command = [sys.executable, "-m", "ds_hybridep.commands.main", "meet", "--port", str(port), "--host", "127.0.0.1"]
    with (
        full,
        subprocess.Popen([*command, "--secret-file", str(secret_file(tmp_path))], stdout=full, stderr=full) as process,
    ):
        try:
            one = member(type("Place", (), {"host": "127.0.0.1", "port": port}), tmp_path)
            one.close()
            assert process.poll() is None
        finally:
            process.kill()


@pytest.mark.skipif(not socket.has_ipv6, reason="needs IPv6")
def test_it_listens_on_ipv6(tmp_path: Path) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no ::1")
    with Meeting(tmp_path, host="::1") as meeting:
        one = member(meeting, tmp_path)
        assert one.welcome["is_running"] is False
        one.close()


@pytest.mark.parametrize(
    ("text", "address"), [("h:1", ("h", 1)), ("[::1]:29400", ("::1", 29400)), ("10.0.0.1:80", ("10.0.0.1", 80))]
)
def test_addresses_are_read(text: str, address: tuple[str, int]) -> None:
    assert split_address(text) == address


@pytest.mark.parametrize("text", ["h", "h:", ":1", "::1:29400", "h:x"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not HOST:PORT"):
        split_address(text)


def test_a_thread_that_fails_is_heard_of(meeting: Meeting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hear = Member.__dict__["_hear"]

    def fail_later(one: Member, said: dict[str, Any]) -> None:
        if said["op"] == "beat":
            raise RuntimeError("a defect")
        hear(one, said)

    monkeypatch.setattr(Member, "_hear", fail_later)  # a defect in what it does with messages
    one = member(meeting, tmp_path)
    with pytest.raises(SiteError, match="RuntimeError: a defect"):
        until(lambda: one.answer(0.2), "its error")
    one.close()


def test_half_a_tls_handshake_is_no_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl, which makes certificates")
    tls = make_certificates(tmp_path)
    with Meeting(tmp_path, tls=tls) as meeting:
        until(lambda: "meeting point on port" in meeting.log.read_text(), "it listens")
        with monkeypatch.context() as patch:
            patch.setattr(door, "HANDSHAKE_S", 2.5)  # else the thread that has asked waits for longer
            with pytest.raises(SiteError, match="is TLS configured on both sides or on none"):
                member(meeting, tmp_path, wait_s=2.0)
        context = ssl.create_default_context(ssl.Purpose.SERVER_AUTH)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with socket.create_connection((meeting.host, meeting.port)) as sock, contextlib.suppress(OSError):
            with context.wrap_socket(sock) as encrypted:  # without a certificate
                encrypted.recv(1)
        one = member(meeting, tmp_path, context=tls.contexts()[0])
        one.close()
