# SPDX-License-Identifier: Apache-2.0
"""Orders of start, stop, kill, cut and return of sites and of the meeting point, explored with a model of a site.

The meeting point is the real one, with a clock that the exploration moves.  A site is a model: it trains a step when
its epoch allows it, saves checkpoints now and then, calls for a quorum when it was told to or when an exchange fails,
and gets the state in two fragments when it joins.  The meeting point keeps its record in a folder.

Explored: all orders of up to `DEPTH` events for two sites, states that were seen before only once; random orders of
100 events for two, three and four sites.  An exchange either counts for all members, or for all but one that has its
packets.  A connection that breaks is noticed at once, and messages to and from the meeting point arrive in order.
Not explored: two breaks inside one exchange, members that reach some members and not others, ranks of a site that fail
one by one, and a meeting point without a folder.
"""

import copy
import random
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pytest
from marks import slow

from ds_hybridep.sites import meeting as meeting_module
from ds_hybridep.sites.meeting import KnownSite, Meeting, Orders, Record

WAIT_S = 10.0
FRAGMENTS = 2
DEPTH = 6  # of all orders of two sites in the quick tests
EVENTS = ("start", "kill", "leave", "cut", "restore", "save")


@dataclass
class Site:
    """A model of one site.  saved: run and step of its checkpoint.  left: fragments of the state that it lacks."""

    name: str
    is_alive: bool = False
    is_cut: bool = False
    instance: int = 0
    run: str = ""
    step: int = 0
    saved: tuple[str, int] | None = None
    is_whole: bool = True
    left: int = 0
    epoch: Any = None  # the meeting point's last answer
    is_calling: bool = False
    is_complete: bool = False
    missed: tuple[str, ...] = ()
    wants_change: bool = False
    known: KnownSite | None = None


class Violation(AssertionError):
    pass


class World:
    """The sites and the meeting point."""

    def __init__(self, names: str) -> None:
        self.now = 1000.0
        self.names = list(names)
        self.kept = Record()
        self.sites = {name: Site(name) for name in names}
        self.inbox: list[tuple[str, int, dict[str, Any]]] = []  # from the meeting point, on their way
        self.seen: dict[str, int] = {}  # steps by run that a meeting point has known of for a second
        self.is_decided = False  # an operator says whose state counts
        self.committed: dict[str, set[int]] = {}  # steps by run, but for those that were said to be lost
        self.meeting: Meeting | None = None
        self.restart()

    # Methods, not lambdas or built-in ones, because a copy of this world must have its own.
    def clock(self) -> float:
        return self.now

    def save_record(self, record: Record) -> None:
        self.kept = record

    def log(self, text: str) -> None:
        if found := re.match(r"steps (\d+) to (\d+) of run (\w+) are lost", text):
            first, last, run = int(found[1]), int(found[2]), found[3]
            self.committed[run] -= set(range(first, last + 1))
            self.seen[run] = first - 1

    # -- the meeting point ------------------------------------------------------------------------------------------

    def restart(self) -> None:
        self.meeting = Meeting(Record(**asdict(self.kept)), clock=self.clock, log=self.log, save=self.save_record)
        for site in self.sites.values():
            site.known = None
            self.hello(site)

    def end_meeting(self) -> None:
        self.meeting = None
        for site in self.sites.values():
            site.known = None

    def deliver(self) -> None:
        """Let all messages of the meeting point arrive, and what they lead to."""
        while self.inbox:
            name, instance, message = self.inbox.pop(0)
            site = self.sites[name]
            if site.is_alive and not site.is_cut and site.instance == instance:
                self.receive(site, message)

    def receive(self, site: Site, message: dict[str, Any]) -> None:
        op = message["op"]
        if op == "change":
            site.wants_change = True
        elif op == "epoch":
            self.enter(site, message)
        elif op == "refused":
            site.is_alive, site.known, site.is_calling = False, None, False
            site.saved = None  # its operator reads the line, and starts it without the checkpoint
        elif op == "commit":
            if not site.is_complete:
                raise Violation(f"{site.name} was told to commit a step of which it lacks packets")
            self.commit({site.name}, site.run, site.step + 1, is_new=False)
            site.step += 1
            site.is_calling, site.is_complete = False, False
            self.call(site, site.missed)
        elif op == "left out":
            site.is_calling, site.known = False, None  # that connection is given up
            self.hello(site)
            site.is_whole = False
            self.call(site, ())

    def enter(self, site: Site, message: dict[str, Any]) -> None:
        site.epoch, site.is_calling, site.wants_change = message, False, False
        site.missed, site.is_complete = (), False
        if site.name in message["members"]:
            if site.run not in ("", message["run"]) or site.step != message["step"]:
                raise Violation(
                    f"{site.name} is a member at step {message['step']}, and has {site.step} of {site.run}"
                )
            site.run, site.is_whole, site.left = message["run"], True, 0
            return
        if self.is_decided:
            site.is_whole = False
        if lost := [run for run, step in self.seen.items() if step and run != message["run"] and not self.is_decided]:
            raise Violation(f"a new run begins without a word of {lost}")
        is_newer = site.is_whole and site.run == message["run"] and site.step > message["step"]
        if is_newer or (site.is_whole and site.run not in ("", message["run"])):
            raise Violation(f"step {site.step} of run {site.run} of {site.name} is overwritten by {message['step']}")
        is_continued = site.left and (site.run, site.step) == (message["run"], message["step"])
        site.left = site.left if is_continued else FRAGMENTS
        site.run, site.step, site.is_whole = message["run"], message["step"], False

    def hello(self, site: Site) -> None:
        if self.meeting is None or site.is_cut or not site.is_alive or site.known is not None:
            return
        epoch = site.epoch or {"epoch": 0, "members": []}
        said = {
            "site": site.name, "names": self.names, "settings": {}, "instance": f"{site.name}{site.instance}",
            "wait_s": WAIT_S, "epoch": epoch["epoch"], "members": list(epoch["members"]),
            "run": site.run if site.epoch else "", "step": site.step if site.epoch else 0,
        }  # fmt: skip
        site.known, why = self.meeting.hello(said, Sender(self, site.name))
        if site.known is None and "is here already" not in why:
            raise Violation(f"{site.name} was refused: {why}")
        if site.known is None:
            site.is_alive = False
        elif site.epoch is not None and site.name not in self.meeting.members:
            site.wants_change = True
        if site.is_calling and site.known is not None:
            self.say_call(site)

    def call(self, site: Site, missed: tuple[str, ...]) -> None:
        site.is_calling, site.missed = True, missed
        self.say_call(site)

    def say_call(self, site: Site) -> None:
        if self.meeting is not None and site.known is not None and not site.is_cut:
            said = {
                "op": "quorum", "run": site.run, "step": site.step, "complete": site.is_complete,
                "is_whole": site.is_whole, "missed": dict.fromkeys(site.missed, "nothing came"), "addresses": [],
            }  # fmt: skip
            self.meeting.hear(site.known, said)

    # -- events -----------------------------------------------------------------------------------------------------

    def start(self, site: Site) -> None:
        if site.is_alive:
            return
        fresh = Site(site.name, is_alive=True, is_cut=site.is_cut, instance=site.instance + 1, saved=site.saved)
        self.sites[site.name] = fresh
        if self.meeting is None or site.is_cut:
            fresh.is_alive = False  # it does not reach the meeting point, and ends
            return
        self.hello(fresh)
        if not fresh.is_alive:
            return
        if not self.meeting.is_running and fresh.saved:  # else it joins, before it loads
            fresh.run, fresh.step = fresh.saved
        self.call(fresh, ())

    def kill(self, site: Site) -> None:
        if site.is_alive:
            if self.meeting is not None and site.known is not None:
                self.meeting.lose(site.known)
            site.is_alive, site.known = False, None

    def leave(self, site: Site) -> None:
        if site.is_alive and site.known is not None and not site.is_cut and not site.is_calling:
            assert self.meeting is not None
            self.meeting.hear(site.known, {"op": "leave"})
            site.is_alive, site.known = False, None

    def cut(self, site: Site) -> None:
        if not site.is_cut:
            if self.meeting is not None and site.known is not None:
                self.meeting.lose(site.known)
            site.is_cut, site.known = True, None

    def restore(self, site: Site) -> None:
        if site.is_cut:
            site.is_cut = False
            self.hello(site)

    def save(self, site: Site) -> None:
        if site.is_alive and site.is_whole and site.step and not site.is_calling:
            site.saved = site.run, site.step

    def exchange(self, loses: str = "") -> None:
        """Let each epoch take a step, if its members can.  loses: a member that does not hear that the step counts."""
        for number in {site.epoch["epoch"] for site in self.sites.values() if site.is_alive and site.epoch}:
            there = {
                name: site for name, site in self.sites.items()
                if site.is_alive and not site.is_calling and site.epoch and site.epoch["epoch"] == number
            }  # fmt: skip
            if there:
                self.step_of(there, next(iter(there.values())).epoch, loses)

    def step_of(self, there: dict[str, Site], epoch: dict[str, Any], loses: str) -> None:
        members = epoch["members"]
        reached = {name for name in there if not there[name].is_cut}
        for name, site in list(there.items()):
            if name in members and site.is_cut and len(members) > 1:
                self.call(site, tuple(one for one in members if one != name))
        able = [name for name in members if name in reached]
        joiners = [name for name in epoch["joiners"] if name in reached]
        if len(members) == 1 and able and (self.meeting is None or there[able[0]].known is None):
            return  # alone, a site waits until the meeting point knows of it: others might be chosen without it
        if able != members:
            absent = tuple(name for name in members if name not in able)
            self.call_all([there[name] for name in (*able, *joiners)], absent)
            return
        step = there[able[0]].step
        if any(there[name].step != step for name in able):
            raise Violation("members of one epoch are at different steps")
        lost = loses if loses in able and len(able) > 1 else ""
        self.commit(set(able), there[able[0]].run, step + 1)
        wants = any(there[name].wants_change for name in able) or bool(lost)
        for name in able:
            there[name].step += name != lost
            there[name].is_complete = name == lost
        for site in (there[name] for name in joiners if not there[name].is_calling):
            site.step, site.left = step + 1, max(site.left - 1, 0)
            site.is_whole = not site.left
            wants |= site.is_whole
        if wants:
            self.call_all([there[name] for name in (*able, *joiners)], (lost,) if lost else ())

    def call_all(self, sites: list[Site], missed: tuple[str, ...]) -> None:
        for site in sites:
            if site.is_alive and not site.is_calling:
                self.call(site, tuple(one for one in missed if one != site.name))

    def commit(self, members: set[str], run: str, step: int, *, is_new: bool = True) -> None:
        steps = self.committed.setdefault(run, set())
        if is_new and step in steps and step <= self.seen.get(run, 0):
            raise Violation(f"step {step} of run {run} was made twice, the second time by {members}")
        if not is_new and step not in steps:
            raise Violation(f"{members} were told to commit step {step} of run {run}, which nobody has")
        steps.add(step)
        for name in members:
            if self.meeting is not None and (known_site := self.sites[name].known) is not None:
                self.meeting.hear(known_site, {"op": "beat", "step": step})

    def pass_s(self, seconds: float) -> None:
        self.now += seconds
        if self.meeting is None:
            return
        for site in list(self.sites.values()):
            if site.is_alive and site.known is not None and not site.is_cut:
                try:
                    self.meeting.hear(site.known, {"op": "beat", "step": site.step})
                except ValueError:  # it was given up, and comes again
                    site.known = None
                    self.hello(site)
        self.meeting.tick()
        if (record := self.meeting.record).run:
            self.seen[record.run] = max(self.seen.get(record.run, 0), record.step)
        for name, site in self.sites.items():
            known = self.meeting.sites.get(name)
            if site.is_alive and site.known is not None and known is not None and known.call and not known.waits_for:
                raise Violation(f"{name} waits without a reason")

    def apply(self, event: tuple[str, str]) -> None:
        kind, name = event
        if kind == "meeting":
            self.restart() if self.meeting is None else self.end_meeting()
        elif kind == "time":
            self.pass_s(float(name))
        elif kind == "step":
            self.exchange()
        elif kind == "half step":
            self.exchange(loses=name)
        else:
            getattr(self, kind)(self.sites[name])
        self.deliver()

    def events(self) -> Iterator[tuple[str, str]]:
        yield from (("step", ""), ("meeting", ""), ("time", "1"), ("time", str(WAIT_S + 1)))
        for name in self.names:
            yield ("half step", name)
            yield from ((kind, name) for kind in EVENTS)

    # -- the end ----------------------------------------------------------------------------------------------------

    def heal(self) -> None:
        """Everybody comes back: then all are members of one epoch, at one step, after a while."""
        if self.meeting is None:
            self.restart()
        for site in list(self.sites.values()):
            self.restore(site)
        for round_ in range(60):
            for name in self.names:
                self.start(self.sites[name])
            self.deliver()
            self.pass_s(3.0)
            if round_ > 20:  # all have had the time to come
                self.decide()
            self.deliver()
            self.exchange()
            self.deliver()
            sites = list(self.sites.values())
            if len({(one.step, one.run) for one in sites}) == 1 and self.are_together(sites):
                return
        state = "; ".join(f"{one.name}: {one}" for one in self.sites.values())
        raise Violation(f"they do not come together: {state}; {self.meeting and self.meeting.status()}")

    def decide(self) -> None:
        """Do what the meeting point asks its operator to say, in words that name what is lost."""
        reason = self.meeting.status()["waits_for"] if self.meeting is not None else ""
        self.is_decided = True
        if self.meeting is None or not (found := re.search(r"meet --(new-run|run (\w+)|accept-step (\d+))", reason)):
            return
        if found[1] == "new-run":
            self.meeting.orders = Orders(run="new")
        elif found[2]:
            self.meeting.orders = Orders(run=found[2])
        else:
            self.meeting.orders = Orders(step=int(found[3]))

    def are_together(self, sites: list[Site]) -> bool:
        return all(
            one.is_alive and not one.is_calling and one.is_whole and one.epoch and one.epoch["members"] == self.names
            for one in sites
        )

    def state(self) -> str:
        """Return all that decides what comes, with short names for runs and times."""
        assert self.kept is not None
        parts = [repr(site) for site in self.sites.values()]
        meeting = self.meeting
        if meeting is not None:
            known = [
                (name, one.instance, one.is_connected, round(self.now - one.heard_at), one.call, one.was_told)
                for name, one in sorted(meeting.sites.items())
            ]
            parts += [repr(known), repr(meeting.record), repr(meeting.joiners), repr(meeting.orders)]
        parts += [repr(self.kept), repr(sorted(map(sorted, self.committed.values())))]
        text = re.sub(r"<[^>]*>|heard_at=[\d.]+|called_at=[\d.]+", "", "|".join(parts))
        names: dict[str, str] = {}
        return re.sub(r"\b[0-9a-f]{16}\b", lambda found: names.setdefault(found[0], f"run{len(names)}"), text)


@dataclass
class Sender:
    """What the meeting point calls to tell a site something."""

    world: World
    name: str

    def __call__(self, message: dict[str, Any]) -> None:
        site = self.world.sites[self.name]
        if site.is_alive and not site.is_cut:
            self.world.inbox.append((self.name, site.instance, message))


def explore(names: str, depth: int) -> int:
    """Try all orders of events; return the number of states."""
    first = World(names)
    for name in names:
        first.apply(("start", name))
    for _ in range(2):
        first.apply(("step", ""))
    seen = {first.state()}
    level: list[tuple[World, list[tuple[str, str]]]] = [(first, [])]
    for _ in range(depth):
        following = []
        for world, path in level:
            for event in world.events():
                try:
                    after = copy.deepcopy(world)
                    after.apply(event)
                    if (state := after.state()) in seen:
                        continue
                    seen.add(state)
                    copy.deepcopy(after).heal()
                except Exception as error:
                    raise AssertionError(f"after {[*path, event]}: {error}") from error
                following.append((after, [*path, event]))
        level = following
    return len(seen)


def walk(names: str, seed: int, length: int = 100) -> None:
    chooser, path = random.Random(seed), []
    world = World(names)
    try:
        for name in names:
            world.apply(("start", name))
        for _ in range(length):
            good = [("step", "")] * 20 + [("time", "1")] * 8
            good += [(kind, name) for name in names for kind in ("start", "restore") for _ in range(4)]
            event = chooser.choice([*world.events(), *good])
            path.append(event)
            world.apply(event)
        world.heal()
    except Exception as error:
        raise AssertionError(f"seed {seed}, after {path}: {error}") from error


def test_all_orders_of_events_of_two_sites(record_property: Any) -> None:
    record_property("states", explore("ab", 3))


@pytest.mark.slow
def test_all_longer_orders_of_events_of_two_sites(record_property: Any) -> None:
    record_property("states", explore("ab", DEPTH))


@pytest.mark.parametrize("names", ["ab", "abc", slow("abcd")])
def test_random_orders_of_events(names: str) -> None:
    for seed in range(300):
        walk(names, seed)


def look_everywhere() -> None:
    explore("ab", 3)
    for names in ("abc", "ab"):
        for seed in range(300):
            walk(names, seed)


FAULTS = {
    "a fresh site may begin below what was seen": ("_begin", "if is_other:", "if False:"),
    "an older checkpoint leads": ("_begin", 'newest = max(call["step"]', 'newest = min(call["step"]'),
    "a member that lacks packets of a step is told to commit it": (
        "_go_on", 'call["complete"] and call["step"] == newest', 'call["step"] == newest'
    ),
    "nobody is told to commit": ("_tells_to_commit", "if behind:", "if False:"),
    "what is kept is never written": ("_keep", "self._save(copy)", "pass"),
    "a site at another step is a member": ("_form", "if name == lead or _is_like(calls[name], first)", "if True"),
    "steps that are lost are not named": ("_go_on", "if newest < known:", "if False:"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Each fault changes one line of the meeting point, as a mistake would."""
    import inspect
    import textwrap

    method, line, wrong = FAULTS[fault]
    source = textwrap.dedent(inspect.getsource(getattr(Meeting, method)))
    assert line in source
    scope = dict(vars(meeting_module))
    exec(source.replace(line, wrong), scope)
    monkeypatch.setattr(Meeting, method, scope[method])
    with pytest.raises(AssertionError, match=r"after \["):
        look_everywhere()
