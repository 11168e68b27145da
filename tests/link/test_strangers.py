# SPDX-License-Identifier: Apache-2.0
"""Whoever does not belong to the job gets nothing, and costs next to nothing."""

import contextlib
import os
import socket
import struct
import threading
import time

import pytest
from link_pair import LIMIT_S, content, linked, linked_through_proxy, make_certificates, make_link
from marks import slow

import ds_hybridep.link.door as doors
from ds_hybridep.errors import CommunicationError, ConfigError
from ds_hybridep.link import TLS, LinkOptions
from ds_hybridep.link.admission import LINK
from ds_hybridep.link.wire import HEADER


def num_descriptors():
    return len(os.listdir("/proc/self/fd"))


@contextlib.contextmanager
def traffic(links):
    """Messages in both directions while the block lasts; all have to arrive, over the same connections."""
    stop, failures = threading.Event(), []

    def exchange():
        turn = 0
        try:
            while not stop.is_set() or turn == 0:
                for rank, link in enumerate(links):
                    link.channel("x", (0, 1)).send(1 - rank, content(turn, rank, num_bytes=100_000))
                for rank, link in enumerate(links):
                    got = link.channel("x", (0, 1)).receive(1 - rank, max_bytes=100_000).wait(LIMIT_S)
                    assert got == content(turn, 1 - rank, num_bytes=100_000)
                turn += 1
                stop.wait(0.02)  # no more than it takes to notice a connection that was lost
        except Exception as error:  # noqa: BLE001 (shown by the main thread)
            failures.append(error)

    thread = threading.Thread(target=exchange)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(LIMIT_S)
        assert not failures
        assert [link.statistics()[1 - rank].reconnects for rank, link in enumerate(links)] == [0, 0]


def answer_of(address, said):
    """What the link answers to bytes behind its challenge, until it closes the connection."""
    with socket.create_connection(address, timeout=LIMIT_S) as sock:
        sock.sendall(said)
        answer = b""
        with contextlib.suppress(ConnectionResetError):
            while part := sock.recv(1000):
                answer += part
        return answer


def test_silent_connections_are_bounded_in_number_and_age(monkeypatch):

    monkeypatch.setattr(doors, "HANDSHAKE_S", 0.5)
    with linked() as links, traffic(links):
        before = num_descriptors()
        silent = []
        try:
            for _ in range(300):
                silent.append(socket.create_connection(links[0].address))
                assert len(links[0].admission.door.attempts) <= doors.MAX_STRANGERS
            for sock in silent:
                sock.settimeout(LIMIT_S)
                with contextlib.suppress(ConnectionResetError):
                    while sock.recv(1000):
                        pass
        finally:
            for sock in silent:
                sock.close()
        assert num_descriptors() <= before + 2  # what another test's thread may just have open


def test_random_bytes_and_scans_are_answered_with_a_closed_connection():
    with linked() as links, traffic(links):
        for size in (0, 1, 47, 48, 200, 10_000):
            with socket.create_connection(links[0].address) as sock:
                sock.sendall(os.urandom(size))
        assert answer_of(links[0].address, os.urandom(200)).startswith(LINK.magic)
        assert answer_of(links[0].address, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(200)).startswith(LINK.magic)


def test_a_replayed_hello_opens_nothing():
    with linked_through_proxy() as (links, proxy):
        hello = max(proxy.heard, key=len)[:200]
        with traffic(links):
            answer = answer_of(links[0].address, hello)
            assert answer[48] == 1  # another secret, as the nonce is another


def test_a_wrong_secret_is_named_where_it_was_given_and_the_job_goes_on():
    with linked() as links, traffic(links):
        other = make_link(1, secret=b"another secret of 16 bytes or more")
        with pytest.raises(CommunicationError, match="rank 1: connecting with rank 0 .* have different secrets"):
            other.connect({0: links[0].address})
        other.close()


@pytest.mark.parametrize("settings", [{"world_size": 3}, {"connections": 2}])
def test_another_job_with_the_same_secret_is_refused(settings):
    with linked() as links, traffic(links):
        other = make_link(1, settings.get("world_size", 2))
        options = LinkOptions(connections=settings.get("connections", 1))
        with pytest.raises(CommunicationError, match="differ in ranks, number of ranks or number of connections"):
            other.connect({0: links[0].address}, options)
        other.close()


@pytest.mark.parametrize(
    "frame",
    [
        HEADER.pack(1, 2**31, bytes(16), 1, 2**40, 0),  # a huge piece
        HEADER.pack(1, 10, bytes(16), 1, 5, 0),  # more than its message
        HEADER.pack(1, 10, bytes(16), 1, 20, 2**63),
        HEADER.pack(4, 2**20, bytes(16), 0, 0, 0),  # a huge announcement
        HEADER.pack(2, 0, bytes(16), 77, 0, 0),  # acknowledges what was never sent
        HEADER.pack(99, 0, bytes(16), 0, 0, 0),
        b"\xff" * 1000,
    ],
)
def test_bad_frames_of_a_peer_close_their_connection_only(frame):
    with linked() as links:
        for rank, link in enumerate(links):  # as if the other rank's memory were damaged
            lane = link.peer(1 - rank).lanes[1]
            lane._out.append(memoryview(frame))
            link.pump(link.peer(1 - rank))
        for turn in range(5):
            for rank, link in enumerate(links):
                link.channel("x", (0, 1)).send(1 - rank, content(turn, num_bytes=300_000))
            for rank, link in enumerate(links):
                got = link.channel("x", (0, 1)).receive(1 - rank, max_bytes=300_000).wait(LIMIT_S)
                assert got == content(turn, num_bytes=300_000)
        assert links[0].statistics()[1].reconnects > 0


def test_a_message_that_claims_to_be_huge_takes_no_memory():
    with linked() as (left, right):
        right.peer(0).lanes[1]._out.append(memoryview(HEADER.pack(1, 2**20, bytes(16), 1, 2**50, 0)))
        right.pump(right.peer(0))
        time.sleep(0.3)
        assert sum(left.peer(1).mail.early_bytes) == 0
        assert left.statistics()[1].state == "alive"
        left.peer(1).lanes[1].sock.shutdown(2)  # else the frame stays where it is


# -- TLS ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("tls"))


def test_tls_carries_all_sizes_through_resets_and_nothing_is_in_the_clear(tls):
    with linked_through_proxy(2, tls=tls) as (links, proxy):
        for turn, size in enumerate([0, 1, 2**14, 2**16 + 1, 3_000_000, 3_000_000]):
            for rank, link in enumerate(links):
                link.channel("x", (0, 1)).send(1 - rank, content(turn, rank, num_bytes=size))
            if size == 3_000_000:
                proxy.reset()
            for rank, link in enumerate(links):
                got = link.channel("x", (0, 1)).receive(1 - rank, max_bytes=size).wait(LIMIT_S)
                assert got == content(turn, 1 - rank, num_bytes=size)
        deadline = time.monotonic() + LIMIT_S
        while (sock := links[1].peer(0).lanes[0].sock) is None:  # after a reset
            assert time.monotonic() < deadline
        assert sock.version() == "TLSv1.3"
        assert not any(LINK.magic in heard for heard in proxy.heard)


@pytest.mark.parametrize("dialler", [slow("none"), "other authority"])
def test_a_rank_without_the_right_certificate_is_refused_and_told(tls, tmp_path, monkeypatch, dialler):
    monkeypatch.setattr(doors, "HANDSHAKE_S", 0.5)
    with linked(tls=tls) as links, traffic(links):
        theirs = None if dialler == "none" else make_certificates(tmp_path, "other")
        other = make_link(1, tls=theirs, timeout_s=5.0)
        expected = "certificate|alert|CERTIFICATE" if theirs else "TLS configured on both sides or on none"
        with pytest.raises(CommunicationError, match=expected):
            other.connect({0: links[0].address})
        other.close()


def test_a_rank_with_tls_dials_one_without_and_is_told(tls):
    with linked() as links, traffic(links):
        other = make_link(1, tls=tls, timeout_s=5.0)
        with pytest.raises(CommunicationError, match="is TLS configured on both sides or on none"):
            other.connect({0: links[0].address})
        other.close()


def test_a_missing_certificate_is_named(tls, tmp_path):
    with pytest.raises(ConfigError, match=r"link\.tls: .*nowhere\.pem"):
        make_link(0, tls=TLS(tmp_path / "nowhere.pem", tls.key, tls.authority))


# Python's ssl leaves it to the garbage collector to close a connection that is reset while it is wrapped.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_strangers_that_reset_their_connections_at_once_end_nothing(tls):
    with linked(tls=tls) as links, traffic(links):
        for turn in range(200):
            with socket.create_connection(links[0].address) as stranger:
                if turn % 2:
                    stranger.sendall(b"x")
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        links[1].channel("after", (0, 1)).send(0, b"alive").wait(LIMIT_S)
        assert links[0].channel("after", (0, 1)).receive(1, max_bytes=5).wait(LIMIT_S) == b"alive"
