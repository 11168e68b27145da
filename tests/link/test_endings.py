# SPDX-License-Identifier: Apache-2.0
"""The link is a guest in the process: how it ends, forks and fails is the script's affair, and peers hear of it."""

import gc
import os
import subprocess
import sys
import threading
import time
import weakref

import pytest
from link_pair import LIMIT_S, Process, content, linked, make_link
from scripts import free_port

from ds_hybridep.errors import CommunicationError, ConfigError


@pytest.fixture
def first():
    link = make_link(0)
    yield link
    link.close()


def wait_for_fact(link, kind):
    deadline = time.monotonic() + LIMIT_S
    while not any(fact.kind == kind for fact in link.heard):
        assert time.monotonic() < deadline, link.heard
        time.sleep(0.02)
    return next(fact for fact in link.heard if fact.kind == kind)


@pytest.mark.dist
def test_what_was_sent_before_a_script_ends_arrives_and_then_its_end_is_known(first):
    with Process(first, "channel.send(0, content(num_bytes=5_000_000))") as process:
        arriving = [first.channel("x", (0, 1)).receive(1, max_bytes=5_000_000) for _ in range(2)]
        assert arriving[0].wait(LIMIT_S) == content(num_bytes=5_000_000)
        with pytest.raises(CommunicationError, match=r"from rank 1 .* it has left: its script has ended"):
            arriving[1].wait(LIMIT_S)
        assert process.end() == (0, "", "")


@pytest.mark.dist
def test_an_uncaught_exception_is_announced_with_its_text(first):
    with Process(first, "raise ValueError('no such expert')") as process:
        handle = first.channel("x", (0, 1)).receive(1, max_bytes=1)
        with pytest.raises(CommunicationError, match="it has failed: ValueError: no such expert"):
            handle.wait(LIMIT_S)
        status, _, complained = process.end()
        assert status == 1
        assert complained.strip().endswith("ValueError: no such expert")
        assert "hybridep" not in complained


@pytest.mark.dist
def test_an_early_message_of_a_rank_that_has_left_is_still_received(first):
    with Process(first, "channel.send(0, b'last words')"):
        wait_for_fact(first, "left")
        assert first.channel("x", (0, 1)).receive(1, max_bytes=20).wait(LIMIT_S) == b"last words"


@pytest.mark.dist
@pytest.mark.parametrize("program", ["sys.exit(3)", "os._exit(3)", "os.kill(os.getpid(), 9)"])
def test_the_exit_status_is_the_scripts_own(first, program):
    with Process(first, program) as process:
        assert process.end()[0] == (-9 if "kill" in program else 3)


@pytest.mark.dist
def test_a_forked_child_neither_ends_nor_uses_the_connections_of_its_parent(first):
    program = """
child = os.fork()
if child == 0:
    try:
        channel.send(0, b"from the child")
    except Exception as error:
        print(error, flush=True)
    sys.exit()
os.waitpid(child, 0)
channel.send(0, b"from the parent")
channel.receive(0, max_bytes=10).wait(60)
"""
    with Process(first, program) as process:
        assert first.channel("x", (0, 1)).receive(1, max_bytes=20).wait(LIMIT_S) == b"from the parent"
        assert first.statistics()[1].reconnects == 0
        first.channel("x", (0, 1)).send(1, b"end")
        status, said, _ = process.end()
        assert status == 0
        assert "belongs to this process's parent" in said


@pytest.mark.dist
def test_a_script_that_ends_while_its_peer_does_not_read_does_not_hang(first):
    first.early_bytes = 1000  # and rank 0 waits for nothing
    with Process(first, "channel.send(0, bytes(50_000_000))") as process:
        assert process.end()[0] == 0


def test_an_announcement_reaches_all_peers_also_after_a_reset():
    heard = threading.Event()
    with linked(on_change=lambda fact: heard.set() if fact.kind == "preempted" else None) as (left, right):
        for lane in right.peer(0).lanes:
            lane.sock.shutdown(2)
        left.announce("preempted", "in 30 s")
        assert heard.wait(LIMIT_S)
        assert [(fact.rank, fact.kind, fact.text) for fact in right.heard] == [(0, "preempted", "in 30 s")]


def test_a_caller_that_failed_is_not_held_by_its_handle():
    with linked() as (left, right):
        handle = right.channel("x", (0, 1)).receive(0, max_bytes=1)
        left.channel("x", (0, 1)).send(1, b"too long")

        class Held:
            pass

        def fail():
            held = Held()
            known = weakref.ref(held)
            with pytest.raises(CommunicationError):
                handle.wait(LIMIT_S)
            return known

        known = fail()
        gc.collect()
        assert known() is None


def test_ports_are_taken_from_the_range_and_a_full_range_is_named():
    port = free_port()
    taken = make_link(0, ports=(port, port))
    try:
        with pytest.raises(CommunicationError, match=rf"cannot listen on 127.0.0.1, ports {port} to {port}"):
            make_link(0, ports=(port, port))
    finally:
        taken.close()
    again = make_link(0, ports=(port, port))
    assert again.address[1] == port
    again.close()


def test_a_short_secret_is_refused():
    with pytest.raises(ConfigError, match="secret of the link has 5 bytes; give at least 16"):
        make_link(0, secret=b"short")


def test_a_link_that_nobody_closes_does_not_keep_the_interpreter():
    program = "from link_pair import *\nlinks = [make_link(rank) for rank in (0, 1)]\nconnect_all(links)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, env=environment, timeout=LIMIT_S, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
