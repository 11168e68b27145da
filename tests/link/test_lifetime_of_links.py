# SPDX-License-Identifier: Apache-2.0
"""A rank lives while its process runs, whatever holds Python's lock; links end at once and can be made again."""

import gc
import os
import signal
import socket
import sys
import threading
import time
import weakref

import pytest
from link_pair import (
    LIMIT_S,
    SECRET,
    Process,
    close_all,
    connect_all,
    content,
    linked,
    linked_through_proxy,
    make_link,
)  # fmt: skip

import ds_hybridep.link.peer as peers
from ds_hybridep.errors import CommunicationError
from ds_hybridep.link.admission import LINK, Claims
from ds_hybridep.link.trust import WELCOME, dial

COMPILED = "from ds_hybridep.kernels import load_kernels\nname = load_kernels('auto').name\nimport ctypes"
HOLDS_THE_LOCK = """
print(name, flush=True)
time.sleep(1.5)  # until the compiled thread writes
if name == "compiled":
    ctypes.PyDLL(None).usleep({microseconds})  # as any call of C code that does not release the lock
channel.send(0, b"back")
"""


@pytest.mark.dist
@pytest.mark.parametrize("seconds", [9, pytest.param(40, marks=pytest.mark.slow)])
def test_a_rank_that_keeps_the_lock_of_python_for_ten_times_timeout_s_lives(seconds):
    first = make_link(0, timeout_s=4.0)
    try:
        with Process(first, HOLDS_THE_LOCK.format(microseconds=seconds * 1_000_000), COMPILED) as process:
            name = process.read()
            begin = time.monotonic()
            assert first.channel("x", (0, 1)).receive(1, max_bytes=10).wait(LIMIT_S) == b"back"
            if name != "compiled":
                pytest.skip("compiled kernels cannot be built here")
            assert time.monotonic() - begin > seconds
            assert [fact.kind for fact in first.heard if fact.kind != "left"] == []
    finally:
        first.close()


@pytest.mark.dist
def test_a_rank_that_is_stopped_is_lost_though_its_host_answers(monkeypatch):
    monkeypatch.setattr(peers, "SILENT_S", 1.5)
    first = make_link(0, timeout_s=3.0)
    try:
        with Process(first, "print(name, flush=True)\ntime.sleep(60)", COMPILED) as process:
            process.read()
            handle = first.channel("x", (0, 1)).receive(1, max_bytes=10)
            time.sleep(1.5)
            process.signal(signal.SIGSTOP)
            with pytest.raises(CommunicationError, match="nothing was heard of it for 3 s"):
                handle.wait(LIMIT_S)
    finally:
        first.close()


def test_closing_a_link_fails_the_waits_of_other_threads_at_once():
    with linked() as (left, right):
        failed = []

        def wait():
            try:
                right.channel("x", (0, 1)).receive(0, max_bytes=10).wait(LIMIT_S)
            except CommunicationError as error:
                failed.append(str(error))

        threads = [threading.Thread(target=wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        while right.peer(0).mail._num_awaited < 3:
            time.sleep(0.01)
        right.close(waits=False)
        for thread in threads:
            thread.join(LIMIT_S)
        assert all("the link was closed" in text for text in failed)
        assert len(failed) == 3
        with pytest.raises(CommunicationError, match="the link was closed"):
            right.channel("x", (0, 1)).send(0, b"")
        with pytest.raises(CommunicationError, match="from rank 1 .* it has left"):  # the other side hears of it
            left.channel("x", (0, 1)).receive(1, max_bytes=10).wait(LIMIT_S)


def test_a_link_that_is_closed_without_patience_fails_sends_too():
    with linked_through_proxy() as (links, proxy):
        proxy.freeze()
        send = links[1].channel("x", (0, 1)).send(0, bytes(50_000_000))
        links[1].close(flush_s=0, waits=False)
        with pytest.raises(CommunicationError, match="the link was closed"):
            send.wait(LIMIT_S)


def test_links_are_made_again_and_again_and_leave_nothing_behind():
    def left_behind():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    before, known = left_behind(), []
    for turn in range(6):
        links = [make_link(rank, 3) for rank in range(3)]
        connect_all(links)
        for rank, link in enumerate(links):
            link.channel("x", (0, 1, 2), generation=turn).send((rank + 1) % 3, bytes([rank]) * 100_000)
        for rank, link in enumerate(links):
            got = link.channel("x", (0, 1, 2), generation=turn).receive((rank - 1) % 3, max_bytes=100_000)
            assert got.wait(LIMIT_S) == bytes([(rank - 1) % 3]) * 100_000
        known += map(weakref.ref, links)
        close_all(links)
        del links, link, got
    assert left_behind() == before
    assert [one for one in known if one() is not None] == []


def test_a_rank_that_has_made_its_link_again_is_connected_anew():
    first, second = make_link(0), make_link(1)
    try:
        for turn in range(3):
            connect_all([first, second])
            second.channel("x", (0, 1)).send(0, b"here")
            assert first.channel("x", (0, 1)).receive(1, max_bytes=4).wait(LIMIT_S) == b"here"
            second.close()
            assert [fact.kind for fact in first.heard] == ["left"] * (turn + 1)
            second = make_link(1)
    finally:
        close_all([first, second])


def test_what_an_earlier_link_of_a_rank_had_under_way_does_not_end_its_next_one():
    first, second = make_link(0), make_link(1)
    connecting = threading.Thread(target=first.connect, args=({1: second.address},), daemon=True)
    try:
        connecting.start()
        deadline = time.monotonic() + LIMIT_S
        while 1 not in first.peers and time.monotonic() < deadline:
            time.sleep(0.01)
        with socket.create_connection(first.address, timeout=LIMIT_S) as earlier:
            steps = dial(SECRET, LINK, Claims(1, 0, 2, lane=0, num_lanes=3, instance=bytes(16), received=0))
            _, count = next(steps)
            earlier.sendall(steps.send(earlier.recv(count, socket.MSG_WAITALL))[0])
            assert earlier.recv(1) == bytes([WELCOME])
        second.connect({0: first.address})
        connecting.join(LIMIT_S)
        for turn in range(2):
            second.channel("x", (0, 1)).send(0, content(turn, num_bytes=1000))
            assert first.channel("x", (0, 1)).receive(1, max_bytes=1000).wait(LIMIT_S) == content(turn, num_bytes=1000)
    finally:
        close_all([first, second])


def test_a_connection_that_cannot_be_made_leaves_nothing_behind():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        link = make_link(1, timeout_s=0.5)
        try:
            before = len(os.listdir("/proc/self/fd"))
            for _ in range(3):
                with pytest.raises(
                    CommunicationError,
                    match="connecting with rank 0 .* (no connection after|nothing was heard of it for) 0.5 s",
                ):
                    link.connect({0: silent.getsockname()})
            deadline = time.monotonic() + LIMIT_S
            while len(os.listdir("/proc/self/fd")) > before + len(link.admission.door.attempts) + 1:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            assert link.peers == {}
        finally:
            link.close()


def test_the_exception_of_a_notebooks_cell_is_no_failure_of_the_script(monkeypatch):
    with linked() as (link, _):
        monkeypatch.setattr(sys, "last_value", ValueError("of a cell"), raising=False)
        assert str(link.failure()) == "of a cell"
        time.sleep(0.3)
        link.progress += 1  # a step was made after it
        deadline = time.monotonic() + LIMIT_S
        while link.failure() is not None:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        monkeypatch.setattr(sys, "last_value", ValueError("of the script"))
        time.sleep(0.3)
        assert str(link.failure()) == "of the script"
