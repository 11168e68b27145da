# SPDX-License-Identifier: Apache-2.0
"""Ranks that tell each other where they are, and what they conclude when somebody does not come."""

import gc
import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from health_script import HEALTHY
from hypothesis import given, settings
from hypothesis import strategies as st

from ds_hybridep.plan.cluster import Cluster, Level
from ds_hybridep.transport import health
from ds_hybridep.transport.diagnosis import Direct, Entry, View, at_work, cause_of, report
from ds_hybridep.transport.health import EXIT_STATUS, Health, Patience
from ds_hybridep.transport.heartbeats import FACTS, Beat, Fact, parse_beat, peers_of
from ds_hybridep.transport.position import MainThread, Position

WAITING = Position(4, "backward", "all_reduce at a.py:1 (f)", True, 12.0)
LOADING = Position(4, "between steps", "loader.py:7 (next_sample)", False, 12.0)
TWO_DCS = Cluster((Level("dc", 2), Level("gpu", 2)))


def view_of(cluster=TWO_DCS, **changes):
    """Rank 0's view: all others alive, and waiting in the same collective."""
    others = {rank: Entry(0.5, WAITING) for rank in range(1, cluster.num_ranks)}
    direct = {rank: Direct(0.5) for rank in peers_of(cluster, 0)}
    view = View(rank=0, cluster=cluster, timeout_s=10.0, own=WAITING, others=others, direct=direct)
    return replace(view, **changes)


def silent(view, ranks, answer=""):
    """The view when nothing was heard of these ranks for 11 s."""
    others = {rank: Entry(11.0, one.position) if rank in ranks else one for rank, one in view.others.items()}
    direct = {rank: Direct(11.0, answer) if rank in ranks else one for rank, one in view.direct.items()}
    return replace(view, others=others, direct=direct)


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


def test_a_rank_that_is_elsewhere_is_named_with_its_place():
    view = view_of()
    found = cause_of(replace(view, others={**view.others, 2: Entry(0.5, LOADING)}))
    assert found.startswith("rank 2 does not come to the collective that others wait in: it is in between steps")
    assert "loader.py:7 (next_sample) for 12 s" in found


def test_a_rank_that_does_something_is_waited_for():
    busy = replace(LOADING, for_s=3.0)
    others = {1: Entry(0.5, busy), 2: Entry(0.5, LOADING), 3: Entry(0.5, WAITING)}
    assert at_work(view_of(others=others)) == [1]
    assert at_work(view_of(others={1: Entry(9.0, busy), 2: Entry(None), 3: Entry(0.5, WAITING)})) == []


def test_ranks_in_different_collectives_are_told_apart():
    view, other = view_of(), replace(WAITING, what="barrier at b.py:2 (g)")
    found = cause_of(replace(view, others={**view.others, 3: Entry(0.5, other)}))
    assert "ranks [0, 1, 2] in all_reduce at a.py:1 (f) (step 4); ranks [3] in barrier at b.py:2 (g) (step 4)" in found


def test_all_in_one_collective_points_to_the_link():
    assert cause_of(view_of()).startswith("all ranks wait in the same collective (all_reduce at a.py:1 (f))")


@pytest.mark.parametrize(
    ("facts", "cause"),
    [
        (((2, "failed", "ValueError: x"), (1, "gone", "")), "rank 2 failed: ValueError: x"),
        (((1, "signal", "SIGTERM"), (2, "gone", "")), "rank 2 ended without a word"),
        (((1, "verdict", "rank 3 silent"),), "rank 3 silent"),
        (((1, "left", ""), (3, "signal", "SIGTERM")), "rank 3 was ended by SIGTERM"),
    ],
)
def test_what_a_rank_said_itself_comes_first(facts, cause):
    view = silent(view_of(facts=tuple(Fact(*fact) for fact in facts)), {1})
    assert cause_of(view).startswith(cause)


def test_the_message_begins_with_the_cause_and_says_where_all_are():
    first, *rest = report(silent(view_of(last_transfer="rows"), {3}), "rank 3 silent", 75).splitlines()
    assert first == "hybridep: rank 3 silent"
    text = "\n".join(rest)
    assert "ranks 1, 2: alive" in text
    assert "rank 3: silent for 11 s" in text
    assert "last transfer of this rank: rows" in text
    assert "exit status 75" in text


# -- who is connected, and what is said -------------------------------------------------------------------------


@given(st.lists(st.integers(1, 12), min_size=1, max_size=3))
@settings(max_examples=30, deadline=None)
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


positions = st.builds(
    Position,
    st.integers(0, 10**6),
    st.sampled_from(["forward", "save"]),
    st.text("abc :()/é", max_size=30),
    st.booleans(),
    st.floats(0, 1e4).map(lambda value: round(value, 1)),
)
ranks = st.integers(0, 7)
beats = st.builds(
    Beat, ranks, st.integers(0, 10**6), positions, st.booleans(),
    st.lists(st.tuples(ranks, st.floats(0, 1e3).map(lambda v: round(v, 2)), st.integers(0, 99), positions), max_size=4)
    .map(tuple),
    st.lists(st.builds(Fact, ranks, st.sampled_from(FACTS), st.text("abc ", max_size=9)), max_size=3).map(tuple),
)  # fmt: skip


@given(beats)
@settings(deadline=None)
def test_a_message_arrives_as_it_was_sent(beat):
    assert parse_beat(beat.line(), 8) == beat


@given(beats, st.data())
@settings(max_examples=200, deadline=None)
def test_damaged_messages_are_dropped_or_harmless(beat, data):
    line = bytearray(beat.line())
    for _ in range(data.draw(st.integers(1, 4))):
        line[data.draw(st.integers(0, len(line) - 1))] = data.draw(st.integers(0, 255))
    found = parse_beat(bytes(line), 8)
    assert found is None or (0 <= found.rank < 8 and all(0 <= other[0] < 8 for other in found.others))


@pytest.mark.parametrize(
    "line", [b"", b"[]", b"{}", b"[" * 100_000, b"[1,2]", b'[9,0,[0,"","",0,0],0,[],[]]', b"null"]
)
def test_lines_that_no_rank_sends_are_dropped(line):
    assert parse_beat(line, 8) is None


def test_a_thread_that_computes_is_in_no_collective():
    position = MainThread(lambda: 3).look()
    assert (position.step, position.waits) == (3, False)
    assert "test_health.py" in position.what or "position.py" in position.what


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="frames of other threads may be read at any time")
def test_no_garbage_is_collected_while_frames_are_read():
    """Its finalizers let the thread go on whose frames are read, which then ends them: crashes were seen."""
    frames, seen = sys._current_frames, []

    def read():
        seen.append(gc.isenabled())
        return frames()

    with mock.patch.object(sys, "_current_frames", read):
        MainThread(lambda: 0).look()
        gc.disable()
        try:
            MainThread(lambda: 0).look()
            assert not gc.isenabled()
        finally:
            gc.enable()
    assert seen == [False, False]


# -- when a rank judges, by a clock of the test ---------------------------------------------------------------


def judged_at(
    at_s: Callable[[float], tuple[Position, float]], *, left_at: float = math.inf
) -> tuple[float, str] | None:
    """When rank 0 ends the job, and why.  It waits since 0 with timeout_s 600, like ranks 1 and 2.

    at_s: the position of rank 3 at a time, and for how long it has been silent.
    """
    ends, clock = [], [0.0]
    watch = Health.__new__(Health)
    watch.rank, watch.cluster, watch.timeout_s, watch._mesh = 0, TWO_DCS, 600.0, SimpleNamespace(links={})
    watch._fact_at, watch._patience, watch._asked = 0.0, Patience(600.0), None
    watch._end = lambda cause: ends.append((clock[0], cause))
    with mock.patch.object(health, "time", SimpleNamespace(monotonic=lambda: clock[0])):
        while not ends and clock[0] < 4000:
            now = clock[0]
            others = {1: (replace(WAITING, for_s=now), 0.0), 2: (replace(WAITING, for_s=now), 0.0), 3: at_s(now)}
            watch._position = replace(WAITING, for_s=now)
            watch._known = {rank: (now - silent_s, 0, position) for rank, (position, silent_s) in others.items()}
            watch._facts = [Fact(3, "left", "")] if now >= left_at else []
            watch._judge(now)
            clock[0] += 0.5
    return ends[0] if ends else None


def works_until(came: float, silent_from: float = math.inf) -> Callable[[float], tuple[Position, float]]:
    """Rank 3 computes, comes to the collective, and is silent for 10 s."""

    def at_s(now: float) -> tuple[Position, float]:
        silent_s = now - silent_from if silent_from < now < silent_from + 10 else 0.0
        return (replace(LOADING, for_s=0.0) if now < came else replace(WAITING, for_s=now - came)), silent_s

    return at_s


@pytest.mark.parametrize("came", [300.0, 598.0, 603.0, 1000.0])
@pytest.mark.parametrize("silent_after", [math.inf, 50.0])
def test_a_collective_gets_the_whole_limit_once_the_last_rank_has_come(came, silent_after):
    at, cause = judged_at(works_until(came, came + silent_after))
    assert came + 600 < at < came + 610
    assert cause.startswith("all ranks wait in the same collective")


def test_a_rank_that_works_and_then_hangs_is_named_when_it_was_idle_for_the_limit():
    at, cause = judged_at(lambda now: (replace(LOADING, for_s=max(0.0, now - 590)), 0.0))
    assert 590 + 600 <= at < 590 + 610
    assert cause.startswith("rank 3 does not come to the collective")


def test_a_rank_that_works_and_then_leaves_is_named():
    at, cause = judged_at(works_until(math.inf), left_at=1000.0)
    assert 1000 < at < 1000 + 610
    assert cause.startswith("rank 3 has ended or detached")


def test_a_rank_that_works_and_then_is_silent_is_named():
    at, cause = judged_at(lambda now: (replace(LOADING, for_s=0.0), max(0.0, now - 1000)))
    assert 1000 < at < 1000 + 610
    assert "silent" in cause


def test_no_rank_is_waited_for_longer_than_half_an_hour():
    at, cause = judged_at(works_until(math.inf))
    assert 1800 <= at < 1810
    assert cause.startswith("rank 3 does not come to the collective")


# -- how a watch ends ------------------------------------------------------------------------------------------------

ENDS = """
import os, signal, sys
from ds_hybridep.transport.endings import Endings
endings = Endings(lambda error: (1.0, 1), lambda: None)
endings.watch()
{}
"""


@pytest.mark.parametrize(
    ("program", "status"),
    [
        ("endings.unwatch(); endings.unwatch()", 0),
        ("os.kill(os.getpid(), signal.SIGTERM); endings.unwatch(); print('goes on')", -15),  # nobody took it
        ("os.kill(os.getpid(), signal.SIGTERM); assert endings.take_sigterm(); endings.unwatch()", 0),
        (
            "pid = os.fork()\nif pid == 0:\n    os.kill(os.getppid(), signal.SIGTERM)\n    endings.unwatch()\n"
            "    endings.unwatch()\n    os._exit(3)\n"
            "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3\nendings.unwatch()",
            -15,  # the fork has not taken the parent's signal
        ),
    ],
)
def test_a_watch_that_ends_keeps_no_signal_and_may_end_twice(program: str, status: int):
    run = subprocess.run(
        [sys.executable, "-c", ENDS.format(program)], capture_output=True, text=True, timeout=50,
        env={**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
    )  # fmt: skip
    assert (run.returncode, run.stdout) == (status, ""), run.stderr


# -- real ranks -------------------------------------------------------------------------------------------------


def run_ranks(fault: str, folder: Path) -> list[tuple[float, int | None]]:
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
    assert [status for _, status in found] == [0] * 4, logs
    if what == "evaluates":  # the others waited for long
        assert all(re.search(r"shortest retransmission bound (10000|0)$", log, re.MULTILINE) for log in logs[:3]), logs


@pytest.mark.dist
@pytest.mark.parametrize(
    ("fault", "limit_s", "cause"),
    [
        ("kill", 5.0, "rank 3 ended without a word"),
        ("exception", 5.0, "rank 3 failed: ValueError: a bad sample"),
        pytest.param("hang", 12.0, "rank 3 does not come to the collective", marks=pytest.mark.slow),
    ],
)
def test_all_ranks_end_and_name_the_one_that_broke(tmp_path: Path, fault, limit_s, cause):
    for rank, (seconds, status) in enumerate(run_ranks(fault, tmp_path)):
        assert seconds < limit_s
        if rank != 3 or fault == "hang":
            assert status == EXIT_STATUS
            lines = (tmp_path / f"rank{rank}.log").read_text().splitlines()
            said = next(line for line in lines if line.startswith("hybridep:") or "Traceback" in line)
            assert said.startswith(f"hybridep: {cause}")


@pytest.mark.dist
def test_ranks_that_a_launcher_signals_at_once_name_the_one_that_broke(tmp_path: Path):
    cause, found = "rank 3 ended without a word", run_ranks("kill, then SIGTERM", tmp_path)
    assert [status for _, status in found] == [-15, -15, -15, -9]
    for rank in (1, 2):  # those that are connected with rank 3
        lines = (tmp_path / f"rank{rank}.log").read_text().splitlines()
        assert next(line for line in lines if line.startswith("hybridep:")).startswith(f"hybridep: {cause}")


def test_no_garbage_is_collected_while_frames_of_another_thread_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection lets the other thread run, whose frames then are not those that are being read."""
    enabled, frames = [], sys._current_frames
    monkeypatch.setattr(sys, "_current_frames", lambda: enabled.append(gc.isenabled()) or frames())
    MainThread(lambda: 0).look()
    assert enabled == [False]
    assert gc.isenabled()
