# SPDX-License-Identifier: Apache-2.0
"""Which sites the meeting point lets go on, without connections and without waiting."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ds_hybridep.commands.main import main
from ds_hybridep.sites.meeting import KnownSite, Meeting, Orders, Record

NAMES = ["a", "b", "c"]


class Sites:
    """A meeting point and the sites that talk to it; `now` is the time."""

    def __init__(self, names: list[str], record: Record | None = None) -> None:
        self.names, self.now, self.log = names, 1000.0, list[str]()
        self.saved: list[Record] = []
        self.meeting = Meeting(record, clock=lambda: self.now, log=self.log.append, save=self.saved.append)
        self.heard: dict[str, list[dict[str, Any]]] = {}
        self.known: dict[str, KnownSite] = {}
        self.runs: dict[str, str] = {}

    def come(self, name: str, instance: str = "1", **more: Any) -> str:
        epochs = [one["run"] for one in self.heard.get(name, ()) if one["op"] == "epoch"]
        self.runs[name] = more.get("run", epochs[-1] if "epoch" in more and epochs else "")
        heard = self.heard[name] = []
        said = {
            "site": name, "names": self.names, "settings": {"stage": 1}, "instance": instance, "wait_s": 10.0,
            "epoch": 0, "members": [], "run": self.runs.get(name, ""), "step": 0, **more,
        }  # fmt: skip
        site, why = self.meeting.hello(said, heard.append)
        if site is not None:
            self.known[name] = site
        return why

    def call(self, name: str, step: int, missed: Sequence[str] = (), cause: str = "nothing came", **more: Any) -> None:
        epochs = [one for one in self.heard[name] if one["op"] == "epoch"]
        run = more.get("run", epochs[-1]["run"] if epochs else self.runs.get(name, ""))
        said = {
            "run": run, "step": step, "complete": False, "is_whole": True, "missed": dict.fromkeys(missed, cause),
            "addresses": [],
        }  # fmt: skip
        self.meeting.hear(self.known[name], {"op": "quorum", **said, **more})

    def leave(self, name: str) -> None:
        self.meeting.hear(self.known[name], {"op": "leave"})

    def die(self, name: str) -> None:
        self.meeting.lose(self.known[name])

    def pass_s(self, seconds: float, alive: str = "") -> None:
        self.now += seconds
        for name in alive:
            self.meeting.hear(self.known[name], {"op": "beat"})
        self.meeting.tick()

    def said(self, name: str) -> dict[str, Any]:
        """Return the last answer to a site."""
        answers = [one for one in self.heard[name] if one["op"] not in ("beat", "change", "note", "waiting")]
        return answers[-1] if answers else {}

    def sets(self, name: str) -> tuple[list[str], list[str]]:
        """Return the members and joiners that a site was told."""
        return self.said(name)["members"], self.said(name)["joiners"]

    def reason(self, name: str) -> str:
        """Return why a site waits, as it was told."""
        return next((one["text"] for one in reversed(self.heard[name]) if one["op"] == "waiting"), "")


def begun(names: list[str], step: int = 0) -> Sites:
    sites = Sites(names)
    for name in names:
        assert sites.come(name) == ""
    for name in names:
        sites.call(name, step)
    return sites


def test_the_first_epoch_has_all_sites() -> None:
    sites = begun(NAMES)
    assert all(sites.said(name)["members"] == NAMES for name in NAMES)


def test_a_site_that_does_not_come_to_the_start_is_not_waited_for_for_ever() -> None:
    sites = Sites(["a", "b"])
    sites.come("a")
    sites.call("a", 0)
    sites.pass_s(9, "a")
    assert sites.said("a") == {}
    sites.pass_s(2, "a")
    assert sites.said("a")["members"] == ["a"]


def test_a_site_that_leaves_before_the_start_does_not_start_it() -> None:
    sites = Sites(["a", "b"])
    sites.come("a")
    sites.call("a", 0)
    sites.pass_s(4, "a")
    sites.come("b")
    sites.leave("b")
    sites.pass_s(4, "a")
    assert sites.said("a") == {}, "b may have been started again already"
    sites.pass_s(3, "a")
    assert sites.said("a")["members"] == ["a"]


def test_a_minority_of_three_does_not_start() -> None:
    sites = Sites(NAMES)
    sites.come("a")
    sites.call("a", 0)
    for _ in range(10):
        sites.pass_s(5, "a")
    assert sites.said("a") == {}


def test_the_others_go_on_without_a_site_that_was_killed() -> None:
    sites = begun(NAMES)
    sites.die("b")
    sites.call("a", 5, missed=["b"])
    sites.call("c", 5, missed=["b"])
    assert sites.said("a")["epoch"] == 1, "its connection may come back at once"
    sites.pass_s(4, "ac")
    assert sites.said("a")["members"] == sites.said("c")["members"] == ["a", "c"]


def test_of_two_sites_the_one_that_reaches_the_meeting_point_goes_on() -> None:
    sites = begun(["a", "b"])
    sites.call("a", 5, missed=["b"])
    sites.pass_s(11, "a")
    assert sites.said("a")["members"] == ["a"]
    assert sites.come("b", epoch=1, members=["a", "b"]) == ""
    sites.call("b", 5)
    sites.call("a", 9)
    assert sites.sets("a") == (["a"], ["b"]), "it must not go on from step 5 by itself"


def test_one_of_three_never_goes_on_by_itself() -> None:
    sites = begun(NAMES)
    sites.call("c", 5, missed=["a", "b"])
    for _ in range(20):
        sites.pass_s(5, "c")
    assert sites.said("c")["epoch"] == 1


def test_a_site_that_has_all_packets_applies_a_step_that_another_has_applied() -> None:
    sites = begun(["a", "b"])
    sites.call("b", 5, complete=True, missed=["a"])
    sites.call("a", 6, missed=["b"])
    assert sites.said("b") == {"op": "commit"}
    sites.call("b", 6)
    assert sites.said("a")["members"] == sites.said("b")["members"] == ["a", "b"]


def test_a_site_that_misses_packets_of_an_applied_step_is_left_out() -> None:
    sites = begun(["a", "b"])
    sites.call("b", 5, complete=False, missed=["a"])
    sites.call("a", 6, missed=["b"])
    assert sites.said("b") == {"op": "left out", "step": 6, "cause": "they are at step 6"}
    assert sites.said("a")["members"] == ["a"]


def test_a_step_that_nobody_has_applied_is_repeated() -> None:
    sites = begun(["a", "b"])
    sites.call("b", 5, complete=True, missed=["a"])
    sites.call("a", 5, complete=True, missed=["b"])
    assert sites.said("a")["members"] == ["a", "b"]
    assert sites.said("a")["epoch"] == 2


def test_a_newcomer_joins_first_and_is_a_member_when_it_has_the_state() -> None:
    sites = begun(["a", "b"])
    sites.die("b")
    sites.call("a", 5, missed=["b"])
    sites.pass_s(4, "a")
    assert sites.come("b", instance="2") == ""
    sites.call("b", 0)
    assert {"op": "change"} in sites.heard["a"], "a must call before its next exchange"
    sites.call("a", 9)
    assert sites.sets("a") == sites.sets("b") == (["a"], ["b"])
    assert sites.said("b")["lead"] == "a"
    sites.call("b", 13)
    assert sites.said("b")["epoch"] == 3, "a calls, too"
    sites.call("a", 13)
    assert sites.sets("b") == (["a", "b"], [])


def test_a_joiner_goes_on_in_the_next_epoch() -> None:
    sites = begun(NAMES)
    sites.leave("c")
    sites.come("c", instance="2")
    sites.call("c", 0)
    for name in "ab":
        sites.call(name, 9)
    assert sites.sets("c") == (["a", "b"], ["c"])
    sites.call("a", 12)
    sites.call("b", 12)
    assert sites.said("a")["epoch"] == 2, "c is connected with both, so it calls, too"
    sites.call("c", 12, is_whole=False)
    assert sites.sets("a") == (["a", "b"], ["c"])
    assert sites.said("a")["calls"]["c"]["step"] == 12


@pytest.mark.parametrize("is_whole", [False, True])
def test_a_newcomer_that_was_killed_after_its_call_is_not_waited_for(is_whole: bool) -> None:
    sites = begun(["a", "b"])
    sites.die("b")
    sites.call("a", 5, missed=["b"])
    sites.pass_s(4, "a")
    sites.come("b", instance="2")
    sites.call("b", 0, is_whole=is_whole)
    sites.die("b")
    sites.call("a", 9)
    assert sites.sets("a") == (["a"], []), "nobody can connect with it"


def test_two_may_join_at_a_time() -> None:
    sites = begun(["a", "b", "c", "d"])
    for name in "cd":
        sites.leave(name)
        sites.come(name, instance="2")
    sites.call("c", 0)
    sites.call("a", 9)
    sites.call("b", 9)
    sites.call("d", 0)
    for name in "ab":
        sites.call(name, 11)
    sites.call("c", 11, is_whole=False)
    assert sites.sets("a") == (["a", "b"], ["c", "d"])
    for name in "abcd":
        sites.call(name, 20, is_whole=name != "d")
    assert sites.sets("d") == (["a", "b", "c"], ["d"])


def test_members_and_other_joiners_do_not_wait_for_a_joiner_that_was_killed() -> None:
    sites = begun(NAMES)
    for name in "bc":
        sites.leave(name)
        sites.come(name, instance="2")
        sites.call(name, 0)
    sites.call("a", 9)
    assert sites.sets("a") == (["a"], ["b", "c"])
    sites.die("b")
    sites.call("a", 13, missed=["b"])
    sites.call("c", 13, is_whole=False)
    assert sites.sets("a") == (["a"], ["c"])


def test_a_call_counts_while_its_site_is_connected() -> None:
    sites = begun(NAMES)
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


def test_two_sites_that_do_not_reach_each_other_do_not_try_for_ever() -> None:
    sites = begun(["a", "b"], step=3)
    for _ in range(3):
        sites.call("a", 3, missed=["b"])
        sites.call("b", 3, missed=["a"])
    assert sites.said("a")["members"] == ["a"]
    assert sites.said("b")["op"] == "left out"
    assert sites.said("b")["cause"] == "the others do not reach it: nothing came"


def test_a_site_that_has_ended_is_not_waited_for() -> None:
    sites = begun(["a", "b"])
    sites.call("a", 8, missed=["b"])
    sites.leave("b")
    assert sites.said("a")["members"] == ["a"]


def test_a_meeting_point_that_was_restarted_learns_of_the_epoch() -> None:
    sites = Sites(["a", "b"])
    sites.come("a", epoch=7, members=["a", "b"], run="r")
    sites.come("b", instance="new")
    sites.call("b", 0)
    sites.pass_s(11, "ab")
    assert sites.said("b") == {}, "a trains, so b cannot begin anew"
    sites.call("a", 40, run="r")
    assert sites.said("a")["epoch"] == 8
    assert sites.sets("a") == (["a"], ["b"])


def test_the_first_to_come_back_to_a_new_meeting_point_waits_for_the_other_members() -> None:
    sites = Sites(["a", "b"])
    sites.come("b", epoch=3, members=["a", "b"])  # a went on without it in epoch 4
    sites.call("b", 5)
    sites.pass_s(5, "b")
    assert sites.said("b") == {}
    sites.come("a", epoch=4, members=["a"])
    sites.call("a", 50)
    sites.pass_s(11, "ab")
    assert sites.said("a")["members"] == ["a"]


def test_nobody_begins_anew_beside_a_site_that_is_out_of_reach() -> None:
    sites = begun(["a", "b"])
    sites.call("a", 5, missed=["b"])
    sites.pass_s(11, "a")
    sites.pass_s(11)  # a is out of reach
    assert sites.come("b", instance="2") == ""
    sites.call("b", 0)
    sites.pass_s(11, "b")
    assert "has come to step 5" in sites.reason("b"), "what a has done is not lost without a word"
    assert "meet --new-run" in sites.reason("b")
    assert sites.come("a", epoch=2, members=["a"]) == ""
    sites.call("a", 6)
    assert sites.sets("a") == (["a"], ["b"])


@pytest.mark.parametrize("epoch", [4, 5])
def test_two_sites_do_not_go_on_apart_after_a_restart_of_the_meeting_point(epoch: int) -> None:
    sites = Sites(["a", "b"])
    sites.come("b", epoch=3, members=["a", "b"])  # a went on without it, and is out of reach
    sites.call("b", 5)
    sites.pass_s(11, "b")
    assert sites.said("b")["members"] == ["b"], "half of the last members that are known here"
    assert sites.said("b")["epoch"] == 4
    assert sites.come("a", epoch=epoch, members=["a"]) == ""
    sites.call("a", 50, run=sites.meeting.record.run)
    sites.call("b", 6)
    assert sites.sets("b") == (["b"], [])
    assert "has step 50" in sites.said("a")["text"], "what it has done is not lost without a word"


def test_a_member_that_lost_its_connection_comes_back_to_its_epoch() -> None:
    sites = begun(["a", "b"])
    sites.die("b")
    assert sites.come("b", epoch=1, members=["a", "b"]) == ""
    sites.call("a", 5)
    sites.call("b", 5)
    assert sites.said("b")["members"] == ["a", "b"]


def test_sites_that_were_killed_together_begin_together_again() -> None:
    sites = begun(["a", "b"], step=9)
    sites.die("a")
    sites.die("b")
    sites.come("a", instance="2")
    assert not sites.meeting.is_running, "a must not wait for the state of b"
    sites.come("b", instance="2")
    run = sites.meeting.record.run
    sites.call("a", 5, run=run)
    sites.call("b", 5, run=run)
    assert sites.said("a")["members"] == sites.said("b")["members"] == ["a", "b"]
    assert f"steps 6 to 9 of run {run} are lost: no site that is here has them" in sites.log


def test_a_site_that_was_given_up_is_not_heard_any_more() -> None:
    sites = begun(["a", "b"])
    sites.pass_s(61)  # the meeting point was stopped
    with pytest.raises(ValueError, match="may come again"):
        sites.call("a", 5)
    assert sites.come("a", epoch=1, members=["a", "b"]) == ""
    assert sites.come("b", epoch=1, members=["a", "b"]) == ""
    sites.call("a", 5)
    sites.call("b", 5)
    assert sites.said("a")["members"] == ["a", "b"]


@pytest.mark.parametrize("said", [{"op": "quorum"}, {"op": "quorum", "step": "x"}])
def test_a_call_that_makes_no_sense_is_refused(said: dict[str, Any]) -> None:
    sites = begun(["a", "b"])
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
def test_who_does_not_fit_is_told_why(more: dict[str, Any], says: str) -> None:
    sites = Sites(["a", "b"])
    sites.come("a")
    assert says in sites.come(more.pop("name"), **more)


RUN = Record(run="r", step=40, epoch=7, names=["a", "b"], members=[])


def test_a_fresh_site_does_not_train_beside_a_checkpoint_that_another_site_has() -> None:
    """A fresh site once began at step 0 while the other one waited, and overwrote its step 40."""
    sites = Sites(["a", "b"], RUN)
    sites.come("b")
    sites.call("b", 0)
    for _ in range(5):
        sites.pass_s(10, "b")
    assert sites.said("b") == {}
    assert "run r has come to step 40" in sites.reason("b")
    assert sites.come("a") == ""
    sites.call("a", 40, run="r")
    assert sites.sets("b") == (["a"], ["b"])
    assert sites.said("b")["step"] == 40


def test_a_run_that_is_older_than_what_was_seen_waits_for_the_site_that_may_have_it() -> None:
    sites = Sites(["a", "b"], RUN)
    sites.come("b")
    sites.call("b", 30, run="r")
    sites.pass_s(20, "b")
    assert sites.said("b") == {}
    assert "start a, or say `ds_hybridep meet --accept-step 30`" in sites.reason("b")
    sites.meeting.orders = Orders(step=30)
    sites.pass_s(1, "b")
    assert sites.sets("b") == (["b"], [])
    assert "steps 31 to 40 of run r are lost: no site that is here has them" in sites.log


def test_the_newest_checkpoint_leads() -> None:
    sites = Sites(NAMES, Record(run="r", step=40, names=NAMES))
    for name, step in zip(NAMES, (30, 40, 40), strict=True):
        sites.come(name)
        sites.call(name, step, run="r")
    assert sites.sets("a") == (["b", "c"], ["a"])


@pytest.mark.parametrize("is_known", [False, True])
def test_checkpoints_of_two_runs_wait_for_a_decision(is_known: bool) -> None:
    sites = Sites(["a", "b"], RUN if is_known else None)
    for name, run in (("a", "other"), ("b", "r")):
        sites.come(name)
        sites.call(name, 40, run=run)
    sites.pass_s(30, "ab")
    assert sites.said("a") == sites.said("b") == {}
    assert "a: step 40 of run other, b: step 40 of run r" in sites.reason("a")
    sites.meeting.orders = Orders(run="other")
    sites.pass_s(1, "ab")
    assert sites.sets("b") == (["a"], ["b"])
    assert sites.meeting.record.run == "other"


def test_a_new_run_begins_only_by_order() -> None:
    sites = Sites(["a", "b"], RUN)
    for name in "ab":
        sites.come(name)
        sites.call(name, 0)
    sites.pass_s(30, "ab")
    assert "begin anew" in sites.reason("a")
    sites.meeting.orders = Orders(run="new")
    sites.pass_s(1, "ab")
    assert sites.sets("a") == (["a", "b"], [])
    assert sites.meeting.record.run not in ("", "r")
    assert sites.meeting.orders == Orders(), "an order holds for one start"


def test_a_site_with_another_run_or_a_newer_step_is_refused_and_the_others_hear_of_it() -> None:
    for more, says in (({"run": "other"}, "of run other"), ({"step": 99}, "has step 99")):
        sites = begun(["a", "b"])
        sites.leave("b")
        run = sites.meeting.record.run
        sites.come("b", instance="2")
        sites.call("b", more.get("step", 0), run=more.get("run", run))
        sites.call("a", 8)
        refused = sites.said("b")
        assert refused["op"] == "refused"
        assert says in refused["text"]
        assert "meet --run" in refused["text"]
        assert any(one["op"] == "note" and says in one["text"] for one in sites.heard["a"])


def test_two_of_three_sites_that_end_in_good_order_are_not_waited_for() -> None:
    sites = begun(NAMES)
    sites.leave("a")
    sites.leave("b")
    sites.call("c", 5)
    assert sites.sets("c") == (["c"], [])


def test_a_joiner_that_nobody_reaches_costs_the_others_less_and_less_and_is_told_why() -> None:
    sites = begun(["a", "b"])
    sites.leave("b")
    sites.come("b", instance="2")
    asked = []
    for number in range(400):
        if sites.known["b"].call is None and sites.said("b").get("op") != "refused":
            sites.call("b", 0, missed=["a"], cause="its port takes no connections")
        sites.pass_s(5, "ab" if sites.said("b").get("op") != "refused" else "a")
        if {"op": "change"} in sites.heard["a"]:
            asked.append(5 * number)
            sites.heard["a"].clear()
            sites.call("a", number, run=sites.meeting.record.run)
    gaps = [later - earlier for earlier, later in zip(asked, asked[1:], strict=False)]
    assert gaps == sorted(gaps)
    assert gaps[0] >= 60
    assert len(asked) <= 5
    assert "its port takes no connections" in sites.said("b")["text"]


def test_a_joiner_ends_with_the_cause_if_the_others_end_first() -> None:
    sites = begun(["a", "b"])
    sites.leave("b")
    sites.come("b", instance="2")
    sites.call("b", 0)
    sites.call("a", 9)
    assert sites.sets("b") == (["a"], ["b"])
    sites.leave("a")
    sites.call("b", 12, is_whole=False, missed=["a"])
    sites.pass_s(5, "b")
    assert "has the state of run" in sites.reason("b")
    sites.pass_s(6, "b")
    assert "the others have ended before site 'b' had their state" in sites.said("b")["text"]


def test_an_operator_drops_a_site_that_is_stuck() -> None:
    sites = begun(["a", "b"])
    sites.call("a", 5)
    assert "still to make a step: b" in sites.reason("a")
    assert sites.meeting.drop("b") == "site 'b' was dropped"
    assert sites.sets("a") == (["a"], [])
    assert sites.said("b")["op"] == "refused"
    assert sites.meeting.drop("b") == "site 'b' is not here"


def test_every_wait_has_a_reason_in_the_log_and_at_the_site() -> None:
    sites = Sites(NAMES)
    sites.come("a")
    sites.call("a", 0)
    assert sites.reason("a") == "not here yet: b, c; the others start with at least half of the sites"
    sites.come("b")
    sites.call("b", 0)
    assert sites.reason("b") == "not here yet: c; the others start in 10 s"
    sites.pass_s(3, "ab")
    assert sum("waiting: " in one for one in sites.log) == 2, "seconds that pass are no news"
    assert sites.meeting.status()["waits_for"] == "not here yet: c; the others start in 7 s"


def test_what_is_kept_follows_the_steps_and_a_full_disk_ends_nothing() -> None:
    sites = begun(["a", "b"])
    assert sites.saved[-1].members == ["a", "b"]
    sites.meeting.hear(sites.known["a"], {"op": "beat", "step": 12})
    sites.pass_s(2, "b")
    assert sites.saved[-1].step == 12

    def fail(_: Record) -> None:
        raise OSError("no space left on device")

    sites.meeting._save = fail  # as a disk that fills up while it runs
    for step in (13, 14, 15):
        sites.meeting.hear(sites.known["a"], {"op": "beat", "step": step})
        sites.pass_s(2, "b")
    assert sum("no space left" in one for one in sites.log) == 1
    assert "no space left" in sites.meeting.status()["save_error"]
    sites.meeting._save = sites.saved.append
    sites.pass_s(2, "ab")
    assert sites.saved[-1].step == 15
    assert sites.meeting.status()["save_error"] == ""


def test_half_of_the_files_for_tls_are_not_ignored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "secret").write_text("x" * 20)
    status = main(["meet", "--port", "1", "--secret-file", str(tmp_path / "secret"), "--certificate", "a.pem"])
    assert status == 2
    assert "TLS needs all of --certificate, --key and --authority" in capsys.readouterr().err
