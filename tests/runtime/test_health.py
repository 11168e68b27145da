# SPDX-License-Identifier: Apache-2.0
"""Ranks that tell each other that they live, and what they conclude when one is silent, gone or has failed."""

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from health_script import HEALTHY
from hypothesis import given, settings
from hypothesis import strategies as st
from process_pool import COLLECTIVE_LIMIT_S, ProcessPool

from ds_hybridep.plan.cluster import Cluster, Level
from ds_hybridep.transport import addresses
from ds_hybridep.transport.diagnosis import Direct, Entry, View, cause_of, report
from ds_hybridep.transport.health import EXIT_STATUS, Health
from ds_hybridep.transport.heartbeats import FACTS, MAX_STRANGERS, Beat, Fact, Mesh, parse_beat, peers_of
from ds_hybridep.transport.job import longest_wait_s
from ds_hybridep.transport.waits import Waits

TWO_DCS = Cluster((Level("dc", 2), Level("gpu", 2)))


def view_of(cluster=TWO_DCS, **changes):
    """Rank 0's view: all others alive."""
    others = {rank: Entry(0.5, 4) for rank in range(1, cluster.num_ranks)}
    direct = {rank: Direct(0.5) for rank in peers_of(cluster, 0)}
    view = View(rank=0, cluster=cluster, timeout_s=10.0, step=4, others=others, direct=direct)
    return replace(view, **changes)


def silent(view, ranks, answer=""):
    """The view when nothing was heard of these ranks for 11 s."""
    others = {rank: Entry(11.0, one.step) if rank in ranks else one for rank, one in view.others.items()}
    direct = {rank: Direct(11.0, answer) if rank in ranks else one for rank, one in view.direct.items()}
    return replace(view, others=others, direct=direct)


# -- where ranks find each other --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "master", "host"),
    [
        ({"WORLD_SIZE": "16"}, "node1", "192.0.2.1"),  # srun sets no size of a node
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, "node1", "192.0.2.1"),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "16"}, "node1", "127.0.0.1"),
        ({"WORLD_SIZE": "16"}, "127.0.1.1", "127.0.0.1"),
    ],
)
def test_a_master_whose_own_name_is_a_loopback_address_is_found_by_other_hosts(monkeypatch, sizes, master, host):
    def look_up(name, port, **kind):
        return [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", ("127.0.1.1", port))]

    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {**sizes, "MASTER_ADDR": master}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(addresses.socket, "getaddrinfo", look_up)
    interfaces = {"lo": ["127.0.0.1"], "eth0": ["192.0.2.1"]}
    found = {device: [SimpleNamespace(address=one) for one in ones] for device, ones in interfaces.items()}
    monkeypatch.setattr(addresses.psutil, "net_if_addrs", lambda: found)
    assert addresses.own_host() == host


# -- what is concluded ------------------------------------------------------------------------------------------


def test_a_rank_that_is_silent_is_named_with_what_its_host_says():
    assert cause_of(silent(view_of(), {1}, "answers")).startswith(
        "rank 1 silent for 11 s: its host answers, but the process does not run"
    )


def test_a_datacentre_that_is_silent_is_named_with_the_link_to_it():
    found = cause_of(silent(view_of(), {2, 3}, "nothing"))
    assert found.startswith(
        "dc 1 (ranks [2, 3]) silent for 11 s: the link of level 'dc' between dc 0 and dc 1 is cut, or dc 1 is down"
    )


def test_a_datacentre_that_hears_no_other_knows_that_it_is_cut_off():
    three = view_of(Cluster((Level("dc", 3), Level("gpu", 2))))
    assert cause_of(silent(three, {2, 3, 4, 5}, "nothing")).startswith("dc 0 (this rank's) is cut off at level 'dc'")


def test_a_link_that_others_get_around_is_named():
    three = view_of(Cluster((Level("dc", 3), Level("gpu", 2))))
    direct = {rank: Direct(11.0) if rank in (4, 5) else one for rank, one in three.direct.items()}
    found = cause_of(replace(three, direct=direct))
    assert found.startswith("the link of level 'dc' between dc 0 and dc 2 passes nothing, though both are alive")


def test_while_all_are_heard_nobody_is_to_blame():
    assert cause_of(view_of()) == ""


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        (((2, "failed", "ValueError: x"), (1, "gone", "")), "rank 2 failed: ValueError: x"),
        (((1, "verdict", "rank 3 silent"), (2, "gone", "")), "rank 2 ended without a word"),
        (((1, "verdict", "rank 3 silent"),), "rank 3 silent"),
        (((2, "left", ""), (3, "gone", "")), "rank 3 ended without a word"),
    ],
)
def test_what_a_rank_said_itself_comes_first(facts, cause):
    view = silent(view_of(facts=tuple(Fact(*fact) for fact in facts)), {1})
    assert cause_of(view).startswith(cause)


def test_the_message_begins_with_the_cause_and_says_how_all_are():
    first, *rest = report(silent(view_of(last_transfer="rows"), {3}), "rank 3 silent", 75).splitlines()
    assert first == "hybridep: rank 3 silent"
    text = "\n".join(rest)
    assert "ranks 1, 2: alive, in step 4" in text
    assert "rank 3: silent for 11 s, was in step 4" in text
    assert "last transfer of this rank: rows" in text
    assert "exit status 75" in text


# -- who is connected, and what is said -------------------------------------------------------------------------


@given(st.lists(st.integers(1, 12), min_size=1, max_size=3))
@settings(max_examples=30)
def test_connections_are_mutual_few_and_reach_everybody(sizes):
    cluster = Cluster(tuple(Level(f"level{i}", size) for i, size in enumerate(sizes)))
    peers = {rank: peers_of(cluster, rank) for rank in range(cluster.num_ranks)}
    assert all(rank in peers[peer] for rank, own in peers.items() for peer in own)
    assert all(len(own) <= 8 * len(sizes) for own in peers.values())
    for lost in {None, 0}:  # without rank 0 too
        reached, new = set(), [cluster.num_ranks - 1]
        while new:
            rank = new.pop()
            if rank not in reached and rank != lost:
                reached.add(rank)
                new += peers[rank]
        if lost is None or (len(sizes) == 1 and sizes[0] > 2):
            assert len(reached) == cluster.num_ranks - (lost is not None)


ranks, steps = st.integers(0, 7), st.integers(0, 10**6)
beats = st.builds(
    Beat, ranks, st.integers(0, 10**6), steps, st.booleans(),
    st.lists(st.tuples(ranks, st.floats(0, 1e3).map(lambda v: round(v, 2)), st.integers(0, 99), steps), max_size=4)
    .map(tuple),
    st.lists(st.builds(Fact, ranks, st.sampled_from(FACTS), st.text("abc ", max_size=9)), max_size=3).map(tuple),
)  # fmt: skip


@given(beats)
def test_a_message_arrives_as_it_was_sent(beat):
    assert parse_beat(beat.line(), 8) == beat


@given(beats, st.data())
@settings(max_examples=200)
def test_damaged_messages_are_dropped_or_harmless(beat, data):
    line = bytearray(beat.line())
    for _ in range(data.draw(st.integers(1, 4))):
        line[data.draw(st.integers(0, len(line) - 1))] = data.draw(st.integers(0, 255))
    found = parse_beat(bytes(line), 8)
    assert found is None or (0 <= found.rank < 8 and all(0 <= other[0] < 8 for other in found.others))


@pytest.mark.parametrize("line", [b"", b"[]", b"{}", b"[" * 100_000, b"[1,2]", b"[9,0,0,0,[],[]]", b"null"])
def test_lines_that_no_rank_sends_are_dropped(line):
    assert parse_beat(line, 8) is None


def test_strangers_that_connect_and_say_nothing_keep_few_descriptors_and_not_for_long():
    listening, dialling = Mesh(0, 2, "127.0.0.1", "key"), Mesh(1, 2, "127.0.0.1", "key")
    listening.connect({1: dialling.address})
    dialling.connect({0: listening.address})
    before = len(os.listdir("/proc/self/fd"))
    strangers = []
    for _ in range(400):
        strangers.append(socket.create_connection(listening.address))
        listening.poll(0.0)
    assert len(os.listdir("/proc/self/fd")) - before - len(strangers) <= MAX_STRANGERS
    heard, deadline = [], time.monotonic() + 50  # a peer comes through
    while not heard and time.monotonic() < deadline:
        dialling.poll(0.05)
        dialling.send(dialling.links[0], Beat(1, 1, 4, False))
        heard = listening.poll(0.05)
    assert heard[0].rank == 1
    while strangers and time.monotonic() < deadline:  # without another connection that would push them out
        listening.poll(0.05)
        for stranger in strangers:
            stranger.setblocking(False)
        strangers = [one for one in strangers if not is_closed(one)]
    assert strangers == []
    for mesh in (listening, dialling):
        mesh.close()


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end has closed this connection; then closes this end."""
    try:
        connection.recv(1)
    except BlockingIOError:
        return False
    except OSError:
        pass
    connection.close()
    return True


# -- when a rank ends ---------------------------------------------------------------------------------------------


def can_go_on(*, waits_s: float, for_all_s: float = 0.0, silent_s: float = 0.0, heard_s: float = 0.0, told: str = ""):
    """Whether rank 0 goes on, with timeout_s 600, if it waits and rank 3 is silent, or has done what is told.

    silent_s: since rank 3 was heard on this rank's connection.  heard_s: since there was any news of it.
    """
    now = time.monotonic()
    watch = Health.__new__(Health)
    watch.rank, watch._limit_s = 0, 600.0
    watch._resumed = -float("inf")  # the machine may have run for less than `silent_s`
    watch._waits = SimpleNamespace(longest_s=lambda: waits_s, longest_for_all_s=lambda: for_all_s)
    watch._facts = [Fact(3, told, "")] if told else []
    watch._mesh = SimpleNamespace(links={3: SimpleNamespace(heard_at=now - silent_s)}, gone={3} if told else set())
    watch._known = {3: (now - heard_s, 0, 4)}
    return not watch._cannot_go_on()


def test_a_rank_that_waits_goes_on_for_any_time_while_all_live():
    assert can_go_on(waits_s=1e6)
    assert can_go_on(waits_s=1e6, silent_s=500.0, heard_s=500.0)


@pytest.mark.parametrize("kind", ["failed", "verdict"])
def test_a_rank_that_waits_ends_at_once_if_another_one_says_that_it_ends(kind):
    assert not can_go_on(waits_s=1.5, told=kind)


def test_a_rank_that_waits_ends_if_another_one_is_silent_for_timeout_s():
    assert not can_go_on(waits_s=1.5, silent_s=601.0, heard_s=601.0)


def test_a_link_that_passes_nothing_ends_a_wait_of_timeout_s_though_others_hear_the_rank_behind_it():
    assert can_go_on(waits_s=500.0, silent_s=601.0, heard_s=0.5)
    assert not can_go_on(waits_s=601.0, silent_s=601.0, heard_s=0.5)


def test_a_rank_that_has_left_without_a_word_ends_only_waits_that_need_it():
    assert can_go_on(waits_s=500.0, told="gone")
    assert not can_go_on(waits_s=601.0, told="gone")
    assert not can_go_on(waits_s=1.5, for_all_s=1.5, told="gone")


def test_a_rank_that_ends_in_good_order_ends_nobody():
    assert can_go_on(waits_s=1e6, for_all_s=1e6, told="left")


# -- how long a rank waits ----------------------------------------------------------------------------------------


def watch_a_barrier() -> tuple[bool, bool, float]:
    """Whether rank 0's wait for rank 1 is seen, whether it is over afterwards, and how long it may last."""
    waits, is_seen = Waits(), []

    def look() -> None:
        deadline = time.monotonic() + 30
        while not waits.longest_s() > 0.5 and time.monotonic() < deadline:
            waits.look()
            time.sleep(0.1)
        is_seen.append(waits.longest_s() > 0.5)
        store.set("seen", "")

    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        thread = threading.Thread(target=look)
        thread.start()
    else:
        store.wait(["seen"])
    dist.barrier()
    if dist.get_rank() == 1:
        return True, True, longest_wait_s(1.0)
    thread.join()
    deadline = time.monotonic() + 10
    while waits.longest_s() > 0 and time.monotonic() < deadline:  # torch notes the end a moment later
        waits.look()
    return is_seen[0], waits.longest_s() == 0, longest_wait_s(1e6)


@pytest.mark.dist
def test_a_wait_in_a_collective_of_torch_is_seen_while_it_lasts(pool2: ProcessPool):
    assert pool2.run(watch_a_barrier) == [(True, True, 1e6), (True, True, COLLECTIVE_LIMIT_S)]


# -- real ranks -------------------------------------------------------------------------------------------------


def run_ranks(fault: str, folder: Path) -> list[int | None]:
    """The exit statuses of four ranks; None for one that did not end."""
    script = Path(__file__).with_name("health_script.py")
    run = subprocess.run([sys.executable, str(script), fault, str(folder)], capture_output=True, text=True, timeout=50)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("what", HEALTHY)
def test_a_healthy_job_is_left_alone(tmp_path: Path, what):
    found = run_ranks(what, tmp_path)
    logs = [(tmp_path / f"rank{rank}.log").read_text() for rank in range(4)]
    assert found == [0] * 4, logs
    if what == "sleeps":  # the others waited for long
        assert all(re.search(r"shortest retransmission bound (10000|0)$", log, re.MULTILINE) for log in logs[:3]), logs


@pytest.mark.dist
@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("kill", "rank 3 ended without a word"),
        ("exception", "rank 3 failed: ValueError: a bad sample"),
        pytest.param("stop", "rank 3 silent for", marks=pytest.mark.slow),
    ],
)
def test_all_ranks_end_and_name_the_one_that_broke(tmp_path: Path, fault, cause):
    statuses = run_ranks(fault, tmp_path)
    assert statuses[:3] == [EXIT_STATUS] * 3
    for rank in range(3):
        lines = (tmp_path / f"rank{rank}.log").read_text().splitlines()
        said = next(line for line in lines if line.startswith("hybridep:") or "Traceback" in line)
        assert said.startswith(f"hybridep: {cause}")
