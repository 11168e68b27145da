# SPDX-License-Identifier: Apache-2.0
"""What ranks conclude when one is silent, gone or has failed, and how they end."""

import json
import os
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import replace
from math import inf
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from forked_script import ForkedScript
from hypothesis import given
from hypothesis import strategies as st
from process_pool import COLLECTIVE_LIMIT_S, ProcessPool
from watch_script import HEALTHY

from ds_hybridep.errors import CommunicationError
from ds_hybridep.geometry.cluster import Cluster, Level
from ds_hybridep.link import Fact
from ds_hybridep.transport import job_link
from ds_hybridep.transport import waits as waits_module
from ds_hybridep.transport.diagnosis import NEARBY, News, View, cause_of, peers_of, report
from ds_hybridep.transport.job import longest_wait_s
from ds_hybridep.transport.waits import Waits
from ds_hybridep.transport.watch import AGREE_S, EXIT_STATUS, Watch, follows_from_others

TWO_DCS = Cluster((Level("dc", 2), Level("gpu", 2)))
THREE_DCS = Cluster((Level("dc", 3), Level("gpu", 2)))


def view_of(cluster=TWO_DCS, **changes):
    """Rank 0's view: all others alive."""
    peers = peers_of(cluster, 0)
    view = View(
        rank=0, cluster=cluster, timeout_s=10.0, step=4, ages=dict.fromkeys(peers, 0.5), steps=dict.fromkeys(peers, 4)
    )
    return replace(view, **changes)


def silent(view, ranks):
    """The view when the other ranks have heard nothing of these for 11 s."""
    pairs = [
        (rank, peer)
        for rank in range(view.cluster.num_ranks)
        for peer in peers_of(view.cluster, rank)
        if peer in ranks and rank not in ranks
    ]
    ages = {rank: 11.0 if rank in ranks else age for rank, age in view.ages.items()}
    return replace(lost(view, pairs), ages=ages)


def lost(view, pairs, text="nothing was heard of it"):
    """The view when of each of these pairs the first rank has lost the second."""
    return replace(view, news=(*view.news, *(News(rank, "lost", text, by) for by, rank in pairs)))


def told(view, *news):
    """The view when rank 1 has told this of other ranks."""
    return replace(view, news=(*view.news, *(News(*one, 1) for one in news)))


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
    monkeypatch.setattr(job_link.socket, "getaddrinfo", look_up)
    interfaces = {"lo": ["127.0.0.1"], "eth0": ["192.0.2.1"]}
    found = {device: [SimpleNamespace(address=one) for one in ones] for device, ones in interfaces.items()}
    monkeypatch.setattr(job_link.psutil, "net_if_addrs", lambda: found)
    assert job_link.own_host() == host


# -- what is concluded ------------------------------------------------------------------------------------------


def test_a_rank_that_is_silent_is_named():
    assert cause_of(silent(view_of(), {1})).startswith("rank 1 silent for 11 s: stopped, down or cut off")
    answers = lost(view_of(), [(0, 1), (3, 1)], "nothing was heard of it for 10 s; last, its host answers")
    assert cause_of(answers) == "rank 1 silent for 10 s: its host answers; last seen in step 4"


def test_a_datacentre_that_is_silent_is_named_with_the_link_to_it():
    found = cause_of(silent(view_of(), {2, 3}))
    assert found.startswith(
        "dc 1 (ranks [2, 3]) silent for 11 s: the link of level 'dc' between dc 0 and dc 1 is cut, or dc 1 is down"
    )


def test_a_datacentre_that_hears_no_other_knows_that_it_is_cut_off():
    assert cause_of(silent(view_of(THREE_DCS), {2, 3, 4, 5})).startswith("dc 0 (this rank's) is cut off at level 'dc'")


def test_what_silent_ranks_have_said_of_each_other_counts_no_more():
    view = silent(view_of(), {2, 3})
    assert view.silent() == {2, 3}
    assert lost(view_of(), [(0, 2)]).silent() == set()  # rank 1 still hears rank 3


def test_a_link_that_others_get_around_is_named():
    found = cause_of(lost(view_of(THREE_DCS), [(rank, peer) for rank in (0, 1) for peer in (4, 5)]))
    assert found.startswith("the link of level 'dc' between dc 0 and dc 2 passes nothing, though both are alive")


def test_while_all_are_heard_nobody_is_to_blame():
    assert cause_of(view_of()) == ""


@pytest.mark.parametrize(
    ("news", "cause"),
    [
        (((2, "failed", "ValueError: x"), (1, "gone", "")), "rank 2 failed: ValueError: x"),
        (((1, "verdict", "rank 3 silent"), (2, "gone", "")), "rank 2 ended without a word"),
        (((1, "verdict", "rank 3 silent"),), "rank 3 silent"),
        (((2, "left", ""), (3, "gone", "")), "rank 3 ended without a word"),
    ],
)
def test_what_a_rank_said_itself_comes_first(news, cause):
    assert cause_of(silent(told(view_of(), *news), {1})).startswith(cause)


def test_the_message_begins_with_the_cause_and_says_how_all_are():
    view = silent(told(view_of(last_transfer="rows"), (2, "left", "")), {1})
    first, *rest = report(view, "rank 1 silent").splitlines()
    assert first == "hybridep: rank 1 silent"
    text = "\n".join(rest)
    assert "rank 1: silent, was in step 4" in text
    assert "rank 2: has left" in text
    assert "last transfer of this rank: rows" in text


@pytest.mark.parametrize(
    ("error", "follows"),
    [
        (RuntimeError("cannot restore the sampler's state"), False),
        (ConnectionResetError("Connection reset by peer"), False),  # of a data loader
        (RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:32447"), True),
        (CommunicationError("a transfer failed"), True),
    ],
)
def test_errors_of_collectives_follow_from_other_ranks(error, follows):
    assert follows_from_others(error) == follows


# -- who watches whom -------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 10), min_size=1, max_size=3))
def test_ranks_watch_each_other_are_few_and_reach_everybody(sizes):
    cluster = Cluster(tuple(Level(f"level{i}", size) for i, size in enumerate(sizes)))
    peers = [peers_of(cluster, rank) for rank in range(cluster.num_ranks)]
    assert all(rank in peers[peer] for rank in range(cluster.num_ranks) for peer in peers[rank])
    assert all(len(one) <= len(sizes) * NEARBY for one in peers)
    assert View(rank=0, cluster=cluster, timeout_s=1.0, step=0).silent() == set()


# -- when a rank ends ---------------------------------------------------------------------------------------------


def can_go_on(*, waits_s: float, for_all_s: float = 0.0, told: str = "", told_s: float = AGREE_S + 0.1):
    """Whether rank 0 goes on, with timeout_s 600, if it waits and was told this of rank 3 so long ago."""
    watch = Watch.__new__(Watch)
    watch.rank, watch._limit_s, watch._news, watch._lost_at = 0, 600.0, {}, inf
    watch._waits = SimpleNamespace(longest_s=lambda: waits_s, longest_for_all_s=lambda: for_all_s)
    watch._link = SimpleNamespace(announce=lambda kind, text: None)
    if told:
        watch.on_change(Fact(1, "news", json.dumps([3, told, "", 1])))
        watch._lost_at -= told_s
    return not watch._cannot_go_on()


def test_a_rank_that_waits_goes_on_for_any_time_while_all_live():
    assert can_go_on(waits_s=1e6)


@pytest.mark.parametrize("kind", ["failed", "verdict", "lost"])
def test_a_rank_that_waits_ends_at_once_if_another_one_has_failed_or_was_silent_for_timeout_s(kind):
    assert not can_go_on(waits_s=1.5, told=kind)


def test_before_a_lost_rank_ends_the_job_all_its_peers_may_say_so():
    assert can_go_on(waits_s=1.5, told="lost", told_s=AGREE_S - 0.5)


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
        waits.look(closely=True)
    return is_seen[0], waits.longest_s() == 0, longest_wait_s(1e6)


@pytest.mark.dist
def test_a_wait_in_a_collective_of_torch_is_seen_while_it_lasts(pool2: ProcessPool):
    assert pool2.run(watch_a_barrier) == [(True, True, 1e6), (True, True, COLLECTIVE_LIMIT_S)]


@pytest.mark.parametrize("has_ended", [False, True])
def test_a_collective_whose_end_torch_has_noted_late_is_no_wait(monkeypatch, has_ended: bool):
    """torch says that number 6 has ended last, because gloo's threads may note the ends of 6 and 7 in this order."""

    def record(with_collectives: bool, _: bool) -> str:
        entry = {"pg_id": 0, "is_p2p": False}
        entries = [{**entry, "collective_seq_id": number, "retired": number < 7 or has_ended} for number in (5, 6, 7)]
        status = {"0": {"last_enqueued_collective": "7", "last_completed_collective": "6"}}
        return json.dumps({"pg_status": status, "entries": entries if with_collectives else []})

    monkeypatch.setattr(waits_module, "_RECORDERS", [record])
    waits = Waits()
    waits.look()
    waits.look(closely=True)
    assert (waits.longest_s() == 0) == has_ended


# -- real ranks -------------------------------------------------------------------------------------------------


def run_ranks(fault: str, folder: Path) -> list[int | None]:
    """The exit statuses of four ranks; None for one that did not end."""
    script, log = Path(__file__).with_name("watch_script.py"), folder / "script.log"
    run = ForkedScript([str(script), fault, str(folder)], os.environ, log)
    try:
        assert run.wait(500) == 0, log.read_text()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
    return json.loads(log.read_text().splitlines()[-1])


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("what", HEALTHY)
def test_a_healthy_job_is_left_alone(tmp_path: Path, what):
    found = run_ranks(what, tmp_path)
    logs = [(tmp_path / f"rank{rank}.log").read_text() for rank in range(4)]
    assert found == [0] * 4, logs


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
    for rank in range(3):
        said = (tmp_path / f"rank{rank}.log").read_text()
        assert f"hybridep: {cause}" in said
        assert statuses[rank] == (1 if "Traceback" in said else EXIT_STATUS)  # Python's own, if the wait has failed
