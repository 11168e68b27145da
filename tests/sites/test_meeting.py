# SPDX-License-Identifier: Apache-2.0
"""Which sites the meeting point lets go on, without connections and without waiting."""

import threading
from pathlib import Path
from typing import Any

import pytest

from ds_hybridep.commands.main import main
from ds_hybridep.sites import meeting as meeting_module
from ds_hybridep.sites.meeting import KnownSite, Meeting
from ds_hybridep.sites.member import Member

NAMES = ["a", "b", "c"]


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Sites:
    """A meeting point and the sites that talk to it."""

    def __init__(self, names: list[str], clock: Clock) -> None:
        self.names, self.clock = names, clock
        self.meeting = Meeting()
        self.heard: dict[str, list[dict[str, Any]]] = {}
        self.known: dict[str, KnownSite] = {}

    def come(self, name: str, instance: str = "1", **more: Any) -> str:
        heard = self.heard[name] = []
        said = {
            "site": name, "names": self.names, "settings": {"stage": 1}, "instance": instance, "wait_s": 10.0,
            "epoch": 0, "members": [], **more,
        }  # fmt: skip
        site, why = self.meeting.hello(said, heard.append)
        if site is not None:
            self.known[name] = site
        return why

    def call(self, name: str, step: int, **more: Any) -> None:
        said = {"step": step, "complete": False, "is_ready": False, "missed": [], "addresses": [], "digest": ""}
        self.meeting.hear(self.known[name], {"op": "quorum", **said, **more})

    def die(self, name: str) -> None:
        self.meeting.lose(self.known[name])

    def pass_s(self, seconds: float, alive: str = "") -> None:
        self.clock.now += seconds
        for name in alive:
            self.meeting.hear(self.known[name], {"op": "beat"})
        self.meeting.tick()

    def said(self, name: str) -> dict[str, Any]:
        """Return the last answer to a site."""
        answers = [one for one in self.heard[name] if one["op"] not in ("beat", "change", "note")]
        return answers[-1] if answers else {}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(meeting_module, "time", clock)
    return clock


def begun(clock: Clock, names: list[str], step: int = 0) -> Sites:
    sites = Sites(names, clock)
    for name in names:
        assert sites.come(name) == ""
    for name in names:
        sites.call(name, step)
    return sites


def test_the_first_epoch_has_all_sites(clock: Clock) -> None:
    sites = begun(clock, NAMES)
    assert all(sites.said(name)["members"] == NAMES for name in NAMES)


def test_a_site_that_does_not_come_to_the_start_is_not_waited_for_for_ever(clock: Clock) -> None:
    sites = Sites(["a", "b"], clock)
    sites.come("a")
    sites.call("a", 0)
    sites.pass_s(9, "a")
    assert sites.said("a") == {}
    sites.pass_s(2, "a")
    assert sites.said("a")["members"] == ["a"]


def test_a_site_that_leaves_before_the_start_does_not_start_it(clock: Clock) -> None:
    sites = Sites(["a", "b"], clock)
    sites.come("a")
    sites.call("a", 0)
    sites.pass_s(4, "a")
    sites.come("b")
    sites.meeting.hear(sites.known["b"], {"op": "leave"})
    sites.pass_s(4, "a")
    assert sites.said("a") == {}, "b may have been started again already"
    sites.pass_s(3, "a")
    assert sites.said("a")["members"] == ["a"]


def test_a_minority_of_three_does_not_start(clock: Clock) -> None:
    sites = Sites(NAMES, clock)
    sites.come("a")
    sites.call("a", 0)
    for _ in range(10):
        sites.pass_s(5, "a")
    assert sites.said("a") == {}


def test_the_others_go_on_without_a_site_that_was_killed(clock: Clock) -> None:
    sites = begun(clock, NAMES)
    sites.die("b")
    sites.call("a", 5, missed=["b"])
    sites.call("c", 5, missed=["b"])
    assert sites.said("a")["epoch"] == 1, "its connection may come back at once"
    sites.pass_s(4, "ac")
    assert sites.said("a")["members"] == sites.said("c")["members"] == ["a", "c"]


def test_of_two_sites_the_one_that_reaches_the_meeting_point_goes_on(clock: Clock) -> None:
    sites = begun(clock, ["a", "b"])
    sites.call("a", 5, missed=["b"])
    sites.pass_s(11, "a")
    assert sites.said("a")["members"] == ["a"]
    assert "went on without" in sites.come("b", epoch=1, members=["a", "b"]), "it must not go on from step 5 by itself"


def test_one_of_three_never_goes_on_by_itself(clock: Clock) -> None:
    sites = begun(clock, NAMES)
    sites.call("c", 5, missed=["a", "b"])
    for _ in range(20):
        sites.pass_s(5, "c")
    assert sites.said("c")["epoch"] == 1


def test_a_site_that_has_all_packets_applies_a_step_that_another_has_applied(clock: Clock) -> None:
    sites = begun(clock, ["a", "b"])
    sites.call("b", 5, complete=True, missed=["a"])
    sites.call("a", 6, missed=["b"])
    assert sites.said("b") == {"op": "commit"}
    sites.call("b", 6)
    assert sites.said("a")["members"] == sites.said("b")["members"] == ["a", "b"]


def test_a_site_that_misses_packets_of_an_applied_step_is_left_out(clock: Clock) -> None:
    sites = begun(clock, ["a", "b"])
    sites.call("b", 5, complete=False, missed=["a"])
    sites.call("a", 6, missed=["b"])
    assert sites.said("b") == {"op": "left out", "step": 6}
    assert sites.said("a")["members"] == ["a"]


def test_a_step_that_nobody_has_applied_is_repeated(clock: Clock) -> None:
    sites = begun(clock, ["a", "b"])
    sites.call("b", 5, complete=True, missed=["a"])
    sites.call("a", 5, complete=True, missed=["b"])
    assert sites.said("a")["members"] == ["a", "b"]
    assert sites.said("a")["epoch"] == 2


def test_a_newcomer_observes_first_and_is_a_member_when_it_is_up_to_date(clock: Clock) -> None:
    sites = begun(clock, ["a", "b"])
    sites.die("b")
    sites.call("a", 5, missed=["b"])
    sites.pass_s(4, "a")
    assert sites.come("b", instance="2") == ""
    sites.call("b", 0)
    assert {"op": "change"} in sites.heard["a"], "a must call before its next exchange"
    sites.call("a", 9)
    assert (sites.said("a")["members"], sites.said("a")["observers"]) == (["a"], ["b"])
    sites.call("b", 12, is_ready=True)
    sites.call("a", 13)
    assert (sites.said("b")["members"], sites.said("b")["observers"]) == (["a", "b"], [])


def test_a_newcomer_that_was_up_to_date_in_an_earlier_epoch_observes_again(clock: Clock) -> None:
    sites = begun(clock, NAMES)
    sites.meeting.hear(sites.known["c"], {"op": "leave"})
    sites.call("a", 5)
    sites.call("b", 5)
    sites.come("c", instance="2")
    sites.call("c", 0)
    for name in "ab":
        sites.call(name, 9)
    for name in "ab":
        sites.call(name, 12)  # the packets of the next steps do not go to c
    sites.call("c", 12, is_ready=True)
    for name in "ab":
        sites.call(name, 15)
    assert (sites.said("a")["members"], sites.said("a")["observers"]) == (["a", "b"], ["c"])


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_newcomer_that_was_killed_after_its_call_is_not_waited_for(clock: Clock, is_ready: bool) -> None:
    sites = begun(clock, ["a", "b"])
    sites.die("b")
    sites.call("a", 5, missed=["b"])
    sites.pass_s(4, "a")
    sites.come("b", instance="2")
    sites.call("b", 0, is_ready=is_ready)
    sites.die("b")
    sites.call("a", 9)
    assert (sites.said("a")["members"], sites.said("a")["observers"]) == (["a"], []), "nobody can connect with it"


def test_newcomers_do_not_cut_each_other_off(clock: Clock) -> None:
    sites = begun(clock, ["a", "b", "c", "d"])
    for name in "cd":
        sites.meeting.hear(sites.known[name], {"op": "leave"})
    sites.call("a", 5)
    sites.call("b", 5)
    for name in "cd":
        sites.come(name, instance="2")
        sites.call(name, 0)
        if name == "c":
            sites.call("a", 9)
            sites.call("b", 9)
    assert sites.said("c")["observers"] == ["c"]
    heard = [said for said in sites.heard["a"] if said["op"] == "change"]
    assert len(heard) == 1, "c still takes in the state"
    sites.call("c", 12, is_ready=True)
    sites.call("a", 13)
    sites.call("b", 13)
    assert (sites.said("c")["members"], sites.said("d")["observers"]) == (["a", "b", "c"], ["d"])


@pytest.mark.parametrize("comes_again", [False, True])
def test_the_next_newcomer_does_not_wait_for_one_that_was_killed(clock: Clock, comes_again: bool) -> None:
    sites = begun(clock, NAMES)
    for name in "bc":
        sites.meeting.hear(sites.known[name], {"op": "leave"})
        sites.call("a", 5)
    sites.come("b", instance="2")
    sites.call("b", 0)
    sites.call("a", 9)
    sites.come("c", instance="2")
    sites.call("c", 0)
    sites.die("b")
    if comes_again:
        sites.come("b", instance="3")
    sites.meeting.tick()
    sites.call("a", 13)
    assert (sites.said("a")["members"], sites.said("a")["observers"]) == (["a"], ["c"])


def test_a_call_counts_while_its_site_is_connected(clock: Clock) -> None:
    sites = begun(clock, NAMES)
    sites.call("c", 5)
    sites.die("c")
    sites.call("a", 5)
    sites.call("b", 5)
    assert sites.said("a")["epoch"] == 1, "its answer would be lost"
    assert sites.come("c", epoch=1, members=NAMES) == ""
    sites.meeting.tick()
    assert sites.said("c")["members"] == sites.said("a")["members"] == NAMES
    for name in "cab":
        sites.call(name, 9)
        if name == "c":
            sites.die("c")
    sites.pass_s(11, "ab")
    assert sites.said("a")["members"] == sites.said("b")["members"] == ["a", "b"]


def test_two_sites_that_do_not_reach_each_other_do_not_try_for_ever(clock: Clock) -> None:
    sites = begun(clock, ["a", "b"], step=3)
    for _ in range(3):
        sites.call("a", 3, missed=["b"])
        sites.call("b", 3, missed=["a"])
    assert sites.said("a")["members"] == ["a"]
    assert sites.said("b")["op"] == "left out"


def test_a_site_that_has_ended_is_not_waited_for(clock: Clock) -> None:
    sites = begun(clock, ["a", "b"])
    sites.call("a", 8, missed=["b"])
    sites.meeting.hear(sites.known["b"], {"op": "leave"})
    assert sites.said("a")["members"] == ["a"]


def test_a_meeting_point_that_was_restarted_learns_of_the_epoch(clock: Clock) -> None:
    sites = Sites(["a", "b"], clock)
    sites.come("a", epoch=7, members=["a", "b"])
    sites.come("b", instance="new")
    sites.call("b", 0)
    sites.pass_s(11, "ab")
    assert sites.said("b") == {}, "a trains, so b cannot begin anew"
    sites.call("a", 40)
    assert sites.said("a")["epoch"] == 8
    assert (sites.said("a")["members"], sites.said("a")["observers"]) == (["a"], ["b"])


def test_the_first_to_come_back_to_a_new_meeting_point_waits_for_the_other_members(clock: Clock) -> None:
    sites = Sites(["a", "b"], clock)
    sites.come("b", epoch=3, members=["a", "b"])  # a went on without it in epoch 4
    sites.call("b", 5)
    sites.pass_s(5, "b")
    assert sites.said("b") == {}
    sites.come("a", epoch=4, members=["a"])
    sites.call("a", 50)
    sites.pass_s(11, "ab")
    assert sites.said("a")["members"] == ["a"]


def test_a_site_alone_that_was_out_of_reach_does_not_go_on_beside_one_that_began_anew(clock: Clock) -> None:
    sites = begun(clock, ["a", "b"])
    sites.call("a", 5, missed=["b"])
    sites.pass_s(11, "a")
    sites.pass_s(11)  # a is out of reach
    assert sites.come("b", instance="2") == ""
    sites.call("b", 0)
    sites.pass_s(11, "b")
    assert sites.said("b")["members"] == ["b"]
    assert "went on without" in sites.come("a", epoch=2, members=["a"])


@pytest.mark.parametrize("epoch", [4, 5])
def test_two_sites_do_not_go_on_apart_after_a_restart_of_the_meeting_point(clock: Clock, epoch: int) -> None:
    sites = Sites(["a", "b"], clock)
    sites.come("b", epoch=3, members=["a", "b"])  # a went on without it, and is out of reach
    sites.call("b", 5)
    sites.pass_s(11, "b")
    assert sites.said("b")["members"] == ["b"], "half of the last members that are known here"
    assert sites.said("b")["epoch"] == 4
    assert "went on without" in sites.come("a", epoch=epoch, members=["a"])


def test_a_member_that_lost_its_connection_comes_back_to_its_epoch(clock: Clock) -> None:
    sites = begun(clock, ["a", "b"])
    sites.die("b")
    assert sites.come("b", epoch=1, members=["a", "b"]) == ""
    sites.call("a", 5)
    sites.call("b", 5)
    assert sites.said("b")["members"] == ["a", "b"]


def test_an_epoch_is_what_an_earlier_word_of_a_change_has_asked_for() -> None:
    member = object.__new__(Member)  # without a connection
    member._changed, member._answer, member.wants_change = threading.Condition(), None, False
    member._hear({"op": "change"})  # was on its way when this site called
    assert member.wants_change
    member._hear({"op": "epoch", "epoch": 2, "members": ["a", "b"]})
    assert not member.wants_change, "else the sites would meet before every step"
    member._hear({"op": "change"})
    assert member.wants_change


def test_sites_that_were_killed_together_begin_together_again(clock: Clock) -> None:
    sites = begun(clock, ["a", "b"], step=9)
    sites.die("a")
    sites.die("b")
    sites.come("a", instance="2")
    assert not sites.meeting.is_running, "a must not wait for the state of b"
    sites.come("b", instance="2")
    sites.call("a", 5)
    sites.call("b", 5)
    assert sites.said("a")["members"] == sites.said("b")["members"] == ["a", "b"]


def test_a_site_that_was_given_up_is_not_heard_any_more(clock: Clock) -> None:
    sites = begun(clock, ["a", "b"])
    sites.pass_s(61)  # the meeting point was stopped
    with pytest.raises(ValueError, match="may come again"):
        sites.call("a", 5)
    assert sites.come("a", epoch=1, members=["a", "b"]) == ""
    assert sites.come("b", epoch=1, members=["a", "b"]) == ""
    sites.call("a", 5)
    sites.call("b", 5)
    assert sites.said("a")["members"] == ["a", "b"]


@pytest.mark.parametrize("said", [{"op": "quorum"}, {"op": "quorum", "step": "x"}])
def test_a_call_that_makes_no_sense_is_refused(clock: Clock, said: dict[str, Any]) -> None:
    sites = begun(clock, ["a", "b"])
    with pytest.raises((ValueError, KeyError)):
        sites.meeting.hear(sites.known["a"], said)
    sites.pass_s(1, "ab")


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"name": "d"}, "is not one of sites.names"),
        ({"name": "a", "instance": "2"}, "another site 'a' is here already"),
        ({"name": "b", "settings": {"stage": 2}}, "stage is 2 instead of 1"),
        ({"name": "b", "names": ["a", "b", "x"]}, "sites.names is"),
    ],
)
def test_who_does_not_fit_is_told_why(clock: Clock, more: dict[str, Any], says: str) -> None:
    sites = Sites(["a", "b"], clock)
    sites.come("a")
    assert says in sites.come(more.pop("name"), **more)


def test_half_of_the_files_for_tls_are_not_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "secret").write_text("x" * 20)
    status = main(["meet", "--port", "1", "--secret-file", str(tmp_path / "secret"), "--certificate", "a.pem"])
    assert status == 2
    assert "TLS needs all of --certificate, --key and --authority" in capsys.readouterr().err
