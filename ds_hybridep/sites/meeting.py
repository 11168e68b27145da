# SPDX-License-Identifier: Apache-2.0
"""The meeting point's decisions: which sites train together, from which step on, and whose state they have.

Sites connect and stay connected.  Before an exchange that follows a change, each site calls for a *quorum*.  The
answer names the *members* of the next *epoch*, and *joiners*, which get the state from the *lead* and become members
later.  Only the meeting point makes epochs, so no two sets of sites can go on apart from each other.

    who calls                           what it is in the next epoch
    the first site, in the order of     the lead, and a member
      names, with the newest step
      and a whole state
    same run and step, a whole state     a member
    anybody else                        a joiner

    members train     members that call are in the next epoch; those that are gone or have left are not.  At least half
                      of the last epoch's members must be there: a minority waits.  Joiners never stop members.
    nobody trains     all sites, or after `wait_s` at least half of them.  A run that has come to a step goes on from
                      this step or later; from an earlier one, or anew, only if somebody decides so (`Orders`).

A member that has all packets of a step which another member has applied is told to apply them too.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

GRACE_S = 3.0  # after its connection ended, a site that the others do not reach either is gone
MOST_TRIES = 2  # of one set of members at one step, before a site that others do not reach is left out
FIRST_PAUSE_S = 60.0  # before a joiner that members did not reach may try again; doubled each time
MOST_JOINS = 5  # such attempts of one process
SAVE_S = 1.0  # between records of how far the run is

_HELLO = {"site": str, "names": list, "settings": dict, "instance": str, "epoch": int, "members": list}
_CALL = {
    "run": str, "step": int, "complete": bool, "is_whole": bool, "missed": dict, "addresses": list,
}  # fmt: skip


@dataclass
class Record:
    """What outlives the meeting point's process.

    run: the identity of the training run; "" before the first epoch.
    step: the newest step that members have committed.
    members: of the last epoch, in the order of `names`, but for those that have left; which process each was,
        and who has left.
    """

    run: str = ""
    step: int = 0
    epoch: int = 0
    names: list[str] = field(default_factory=list)
    members: list[str] = field(default_factory=list)
    instances: dict[str, str] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)


@dataclass
class Orders:
    """What an operator has decided about the next start.

    run: go on with this run, though others are known; "new": begin a new one.
    step: go on from this step, though the run has come further; None: do not.
    """

    run: str = ""
    step: int | None = None


@dataclass
class KnownSite:
    """A site as the meeting point knows it."""

    name: str
    instance: str
    wait_s: float
    send: Callable[[dict[str, Any]], None]
    heard_at: float
    step: int = 0
    is_connected: bool = True
    call: dict[str, Any] | None = None  # its call for a quorum, not answered yet
    called_at: float = 0.0
    was_told: bool = False  # that others wait for its call
    waits_for: str = ""  # what it was told that it waits for

    def is_gone(self, now: float, is_missed: bool = False) -> bool:
        is_lost = is_missed and not self.is_connected and now - self.heard_at > GRACE_S
        return is_lost or now - self.heard_at > self.wait_s


@dataclass
class Attempts:
    """A joiner that members did not reach."""

    count: int = 0
    not_before: float = 0.0
    cause: str = ""


class Meeting:
    """Who is there, and what is agreed; knows nothing of connections.  `tick` and all events run in one thread.

    Args:
        record: of an earlier process.
        save: keeps a record; it may fail with OSError, and is then called again.
        clock: returns seconds that never go back.
    """

    def __init__(
        self, record: Record | None = None, *, save: Callable[[Record], None] = lambda _: None,
        log: Callable[[str], None] = lambda _: None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self.record = Record(**asdict(record)) if record is not None else Record()
        self._save, self._log, self._clock = save, log, clock
        self.orders = Orders()
        self.sites: dict[str, KnownSite] = {}
        self.joiners: list[str] = []
        self.save_error = ""
        self._settings: dict[str, Any] = {}
        self._tried: tuple[int, tuple[str, ...], int] = (0, (), 0)  # step, members, how often
        self._attempts: dict[tuple[str, str], Attempts] = {}  # of joiners, by name and instance
        self._first_call_at = 0.0
        self._adopted_at = clock() if self.record.members else float("-inf")  # when members were last learned
        self._has_formed = False  # the present members were chosen by this process
        self._replaced: list[str] = []  # members of the last epoch in whose place another process has come
        self._saved, self._saved_at = Record(**asdict(self.record)), float("-inf")
        self._reason = ""

    @property
    def members(self) -> list[str]:
        """The members of the last epoch, in the order of the sites' names, but for those that have left."""
        return self.record.members

    @property
    def is_running(self) -> bool:
        """True while a member of the last epoch is there."""
        return any(name in self.sites and self.sites[name].is_connected for name in self.members)

    # -- events -----------------------------------------------------------------------------------------------------

    def hello(self, said: Mapping[str, Any], send: Callable[[dict[str, Any]], None]) -> tuple[KnownSite | None, str]:
        """Take a site in; returns it, or None and the reason.  Raises ValueError for what is no first message."""
        self._drop_gone()
        name, names, instance = said["site"], said["names"], said["instance"]
        if not all(isinstance(said[key], kind) for key, kind in _HELLO.items()) or not 0 < float(said["wait_s"]) < 1e9:
            raise ValueError("not a site's first message")
        known = self.sites.get(name)
        if name not in names:
            return None, f"site '{name}' is not one of sites.names, {names}; correct HYBRIDEP_SITE"
        if known is not None and known.instance != instance and known.is_connected:
            return None, f"another site '{name}' is here already; give each site a name of its own in HYBRIDEP_SITE"
        if why := self._why_different(said):
            return None, why
        self._settings, self.record.names = dict(said["settings"]), list(names)
        epoch, members, record = said["epoch"], said["members"], self.record
        is_newer = epoch > record.epoch or (0 < epoch == record.epoch and not self.members)
        if is_newer and not self._has_formed:  # this meeting point was restarted: other members may still come
            left = record.left if epoch == record.epoch else []
            record.epoch, record.members = epoch, [one for one in members if one not in left]
            record.run = said.get("run") or record.run
            record.step = max(record.step, int(said.get("step", 0)))
            self._adopted_at, self._has_formed = self._clock(), False
        elif epoch == 0 and name in self.members and record.instances.get(name) != instance:
            self.members.remove(name)  # another process, which has the state of a start
            self._replaced.append(name)
        if name in self.joiners and (known is None or known.instance != instance):
            self.joiners.remove(name)
        site = KnownSite(name, instance, float(said["wait_s"]), send, self._clock(), int(said.get("step", 0)))
        if known is not None and known.instance == instance:
            site.call = known.call
        self.sites[name] = site
        went_on = 0 < epoch and name not in self.members
        self._log(f"site '{name}' is here" + (", and the others went on without it: it joins them" if went_on else ""))
        return site, ""

    def _why_different(self, said: Mapping[str, Any]) -> str:
        """Return in which settings a site differs from the sites that are here; tell them, too."""
        name, ours = said["site"], {**self._settings, "sites.names": self.record.names}
        theirs = {**said["settings"], "sites.names": said["names"]}
        if not self.sites.keys() - {name}:
            return ""
        differing = [
            f"{key} is {theirs.get(key)!r} instead of {ours.get(key)!r}"
            for key in {**theirs, **ours} if theirs.get(key) != ours.get(key)
        ]  # fmt: skip
        if not differing:
            return ""
        text = f"site '{name}' differs from the sites that are here: {'; '.join(differing[:4])}"
        for other in self.sites.values():
            other.send({"op": "note", "text": f"{text}; it was refused"})
        return f"{text}; use the same model and settings on all sites"

    def hear(self, site: KnownSite, said: Mapping[str, Any]) -> None:
        """Take a message of a site.  Raises ValueError for one that makes no sense, or if the site was given up."""
        if self.sites.get(site.name) is not site:
            raise ValueError(f"site '{site.name}' was given up; it may come again")
        site.heard_at = self._clock()
        if said["op"] == "beat":
            self._note_step(site, int(said.get("step", site.step)))
            self._keep()
        elif said["op"] == "quorum":
            if not all(isinstance(said[key], kind) for key, kind in _CALL.items()):
                raise ValueError("not a call")
            site.call, site.was_told, site.waits_for = dict(said), False, ""
            site.called_at = site.heard_at
            self._note_step(site, said["step"])
            self._first_call_at = self._first_call_at or site.heard_at
            self.tick()
        elif said["op"] == "leave":
            self._note_step(site, int(said.get("step", site.step)))
            self._saved_at = float("-inf")
            if site.name in self.members:
                self.members.remove(site.name)  # in good order: nobody has to wait for it
                self.record.left.append(site.name)
            self._remove(site, "has left")
            self.tick()

    def _note_step(self, site: KnownSite, step: int) -> None:
        site.step = step
        if self._has_formed and site.name in self.members:
            self.record.step = max(self.record.step, step)

    def lose(self, site: KnownSite) -> None:
        """A site's connection has ended; it may come back."""
        site.is_connected = False

    def drop(self, name: str) -> str:
        """Give a site up, by order of an operator; returns what was done."""
        if (site := self.sites.get(name)) is None:
            return f"site '{name}' is not here"
        if name in self.members:
            self.members.remove(name)
            self.record.left.append(name)
        site.send({"op": "refused", "text": f"an operator has dropped site '{name}'; start it again to join"})
        self._remove(site, "was dropped by an operator")
        self.tick()
        return f"site '{name}' was dropped"

    def _remove(self, site: KnownSite, why: str) -> None:
        if self.sites.get(site.name) is site:
            del self.sites[site.name]
            self._log(f"site '{site.name}' {why}")
        if not self.is_running:
            if not any(other.call for other in self.sites.values()):
                self._first_call_at = 0.0
            elif self.members:
                self._first_call_at = self._clock()
            self.record.members, self.joiners, self._has_formed = [], [], False

    def _drop_gone(self) -> None:
        now = self._clock()
        calls = [site.call for site in self.sites.values() if site.call is not None]
        for site in list(self.sites.values()):
            if site.is_gone(now, any(site.name in call["missed"] for call in calls)):
                self._remove(site, f"is gone: nothing was heard of it for {now - site.heard_at:.0f} s")

    # -- the quorum -------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Answer calls if they can be answered now, and say why not; keep the record."""
        self._drop_gone()
        # An answer to a site that is not connected would be lost, and the others would try to connect with it.
        calling = {name: site for name, site in self.sites.items() if site.call is not None and site.is_connected}
        if calling:
            if self.members and not self._may_run(calling):
                self.record.members, self._first_call_at = [], self._clock()
            self._reason = ""
            if self.members:
                self._go_on(calling)
            else:
                self._begin(calling)
            if self._reason:
                self._say_reason(calling)
        self._keep()

    def _may_run(self, calling: Mapping[str, KnownSite]) -> bool:
        """Return False if all members have gone; some may still come if this process has just been started."""
        wait_s = max(site.wait_s for site in calling.values())
        return any(name in self.sites for name in self.members) or self._clock() - self._adopted_at < wait_s

    def _say_reason(self, calling: Mapping[str, KnownSite]) -> None:
        for name, site in calling.items():
            if site.call is not None:
                self._tell(name, self._reason)
        # It is logged when it changes, but for seconds in it.
        key = "".join(one for one in self._reason if not one.isdigit())
        if key != self._said_reason:
            self._said_reason = key
            self._log(f"waiting: {self._reason}")

    _said_reason = ""

    def _begin(self, calling: dict[str, KnownSite]) -> None:
        """The first epoch of a start."""
        names, record, orders = self.record.names, self.record, self.orders
        calls = {name: site.call for name, site in calling.items() if site.call is not None}
        runs = {call["run"] for call in calls.values() if call["run"]}
        here = ", ".join(_at(name, call) for name, call in sorted(calls.items()))
        # 1. Which run.
        if orders.run == "new":
            run = ""
        elif orders.run:
            run = orders.run
        elif len(runs) > 1:
            self._reason = f"the sites have checkpoints of different runs ({here}); say `ds_hybridep meet --run RUN`"
            return
        else:
            run = next(iter(runs), "")
        is_other = record.run and run != record.run and not orders.run and (run or record.step)
        if is_other and run:
            self._reason = (
                f"run {record.run} has come to step {record.step}, but {here}; to go on with the checkpoint say "
                f"`ds_hybridep meet --run {run}`"
            )
            return
        if is_other:
            self._reason = (
                f"run {record.run} has come to step {record.step}, and the sites that are here begin anew ({here}); "
                f"start one with its checkpoint, or say `ds_hybridep meet --new-run`"
            )
            return
        # 2. From which step.
        whole = {name: call for name, call in calls.items() if call["is_whole"] and call["run"] == run}
        if not whole:
            self._give_up_parts(calling)
            self._reason = (
                f"no site that is here has the state of run {run} ({here}); start one with its checkpoint, or say "
                f"`ds_hybridep meet --new-run`"
            )
            return
        newest = max(call["step"] for call in whole.values())
        is_complete = len(calling) == len(names)
        is_behind = run and run == record.run and newest < record.step and orders.step != newest
        if is_behind and not is_complete:
            missing = ", ".join(sorted(set(names) - calling.keys()))
            self._reason = (
                f"run {run} has come to step {record.step}, and the newest site here has step {newest} ({here}); "
                f"start {missing}, or say `ds_hybridep meet --accept-step {newest}` to lose the steps after it"
            )
            return
        # 3. With whom.
        waited_s, wait_s = self._clock() - self._first_call_at, max(site.wait_s for site in calling.values())
        is_enough = 2 * len(calling) >= len(names)
        if not is_complete and not (is_enough and waited_s > wait_s and calling.keys() >= self.sites.keys()):
            missing = ", ".join(sorted(set(names) - calling.keys()))
            start = f"in {max(wait_s - waited_s, 0):.0f} s" if is_enough else "with at least half of the sites"
            self._reason = f"not here yet: {missing}; the others start {start}"
            return
        first = [name for name, call in whole.items() if call["step"] == newest]
        if all(calls[name]["complete"] for name in first):  # a member that is away may have applied the step
            for name in first:
                self._answer(name, {"op": "commit"})
            return
        if run and run == record.run and newest < record.step:
            self._log(f"steps {newest + 1} to {record.step} of run {run} are lost: no site that is here has them")
        record.run, record.step = run or os.urandom(8).hex(), newest
        self.orders = Orders()
        candidates = [name for name in names if name in whole and whole[name]["step"] == newest]
        self._form(calls, lead=candidates[0])

    def _give_up_parts(self, calling: Mapping[str, KnownSite]) -> None:
        """Refuse sites that have a part of the state only, if nobody with the whole one has come for long."""
        for name, site in calling.items():
            if site.call is not None and not site.call["is_whole"] and self._clock() - site.called_at > site.wait_s:
                self._refuse(
                    name,
                    f"the others have ended before site '{name}' had their state, and none has come back in "
                    f"{site.wait_s:g} s; start it again with a checkpoint of theirs",
                )

    def _go_on(self, calling: dict[str, KnownSite]) -> None:
        """Another epoch of sites that train."""
        earlier_joiners = list(self.joiners)
        # 1. Who may take part.
        for name in [name for name in calling if name not in self.members]:
            if self._is_held_back(name, calling[name]):
                del calling[name]
        there = [name for name in self.members if name in self.sites]
        self._reason = self._why_not_yet(calling, there) if calling else ""
        if not calling or self._reason:
            return
        # 2. All members are at one step.
        calls = {name: site.call for name, site in calling.items() if site.call is not None}
        newest = max(calls[name]["step"] for name in there)
        known = self.record.step  # members that have gone may have made it
        if (self._replaced or len(there) < len(self.members)) and all(
            call["complete"] and call["step"] == newest for call in map(calls.__getitem__, there)
        ):
            for name in there:  # whoever is missing may have applied the step
                self._answer(name, {"op": "commit"})
            return
        if self._tells_to_commit(there, calls, known if newest == known - 1 else newest):
            return  # who was told calls again at the next step
        if newest < known:
            self._log(
                f"steps {newest + 1} to {known} of run {self.record.run} are lost: no site that is here has them"
            )
            self.record.step = newest
        there = self._reachable(there, calls, newest)
        calls = {name: call for name, call in calls.items() if name in there or name not in self.members}
        for name in [
            name for name in calls if name not in (*there, *earlier_joiners) and calls[name]["step"] > newest
        ]:
            self._refuse(name, self._why_other_run(name, calls.pop(name)))
        # 3. Somebody leads.
        whole = [name for name in there if calls[name]["is_whole"]]
        if not whole:
            self._reason = "no member has a whole state"
            return
        self.record.step = max(self.record.step, newest)
        self._form(calls, lead=whole[0])

    def _why_not_yet(self, calling: Mapping[str, KnownSite], there: Sequence[str]) -> str:
        """Return what another epoch waits for; members that have not called are told."""
        waiting = [name for name in there if name not in calling]
        for name in waiting:  # they call before their next exchange
            if not self.sites[name].was_told:
                self.sites[name].send({"op": "change"})
                self.sites[name].was_told = True
        if waiting:
            return f"still to make a step: {', '.join(waiting)}"
        longest_s = max(site.wait_s for site in calling.values())
        away = [name for name in self.members if name not in there]
        if away and self._clock() - self._adopted_at < longest_s:
            return f"may come back to this meeting point: {', '.join(away)}"
        if not there or 2 * len(there) < len(self.members):
            return f"only {len(there)} of {len(self.members)} members are here; at least half must be"
        if slow := self._joiners_about_to_call(calling):
            return f"about to call: {', '.join(slow)}, which joins"
        return ""

    def _tells_to_commit(self, there: list[str], calls: dict[str, dict[str, Any]], newest: int) -> bool:
        """Tell members to commit that have all packets of a step which another has applied; leave out who lacks some.

        If nobody is here any more who has applied it, those who lack some are not left out.
        """
        behind = [name for name in there if calls[name]["step"] == newest - 1 and calls[name]["complete"]]
        for name in behind:
            self._answer(name, {"op": "commit"})
        if behind:
            return True
        for name in list(there):
            if calls[name]["step"] < newest and any(calls[other]["step"] == newest for other in there):
                self._answer(name, {"op": "left out", "step": newest, "cause": f"they are at step {newest}"})
                there.remove(name)
                del calls[name]
                self._remove(self.sites[name], f"was left out at step {newest}: it is at another step")
        return False

    def _joiners_about_to_call(self, calling: Mapping[str, KnownSite]) -> list[str]:
        """Return joiners of the last epoch that take part in its end: they call, too, unless members missed them."""
        missed = {name for site in calling.values() if site.call is not None for name in site.call["missed"]}
        waited_s = self._clock() - max(site.called_at for site in calling.values())
        there = [name for name in self.joiners if name in self.sites and self.sites[name].is_connected]
        return [name for name in there if name not in calling and name not in missed and waited_s < GRACE_S]

    def _is_held_back(self, name: str, site: KnownSite) -> bool:
        """Return True for a newcomer that cannot join now; one that cannot join at all is told and removed."""
        call, attempts = site.call, self._note_misses(name, site)
        assert call is not None
        if call["run"] not in ("", self.record.run):
            self._refuse(name, self._why_other_run(name, call))
        elif attempts.count >= MOST_JOINS:
            self._refuse(name, f"site '{name}' cannot join: in {attempts.count} attempts, {attempts.cause}")
        elif (left_s := attempts.not_before - self._clock()) > 0:
            self._tell(name, f"it may join again in {left_s:.0f} s, because {attempts.cause}")
        else:
            return False
        return True

    def _why_other_run(self, name: str, call: Mapping[str, Any]) -> str:
        return (
            f"site '{name}' has step {call['step']} of run {call['run'] or 'without a name'}, but the sites that "
            f"train are at step {self.record.step} of run {self.record.run}; to go on with its state, stop all sites, "
            f"say `ds_hybridep meet --run {call['run']}`, and start them; to join the others, start it without a "
            f"checkpoint"
        )

    def _note_misses(self, name: str, site: KnownSite) -> Attempts:
        """Count an attempt to join in which members did not reach this site."""
        attempts = self._attempts.setdefault((name, site.instance), Attempts())
        if name in self.joiners:
            calls = [self.sites[one].call for one in self.members if one in self.sites]
            missing = [call for call in calls if call is not None and name in call["missed"]]
            own = site.call["missed"] if site.call is not None else {}
            if missing or own:
                self.joiners.remove(name)
                attempts.count += 1
                attempts.not_before = self._clock() + FIRST_PAUSE_S * 2 ** (attempts.count - 1)
                attempts.cause = next(iter((*(call["missed"][name] for call in missing), *own.values())))
        return attempts

    def _refuse(self, name: str, text: str) -> None:
        site = self.sites[name]
        site.send({"op": "refused", "text": text})
        for member in self.members:
            if member in self.sites:
                self.sites[member].send({"op": "note", "text": text})
        self._remove(site, f"was refused: {text}")

    def _tell(self, name: str, reason: str) -> None:
        if (site := self.sites.get(name)) is not None and site.waits_for != reason:
            site.waits_for = reason
            site.send({"op": "waiting", "text": reason})

    def _reachable(self, there: list[str], calls: dict[str, dict[str, Any]], step: int) -> list[str]:
        """Leave out a site that the others do not reach, if the same sites have failed at the same step before."""
        key = step, tuple(there)
        count = self._tried[2] + 1 if self._tried[:2] == key else 1
        self._tried = (*key, count)
        if count <= MOST_TRIES or len(there) == 1:
            return there
        votes = {name: sum(name in calls[other]["missed"] for other in there) for name in there}
        worst = max(reversed(there), key=lambda name: votes[name])
        if votes[worst] == 0 or 2 * (len(there) - 1) < len(self.members):
            return there
        found = next(call["missed"][worst] for call in calls.values() if worst in call["missed"])
        cause = f"the others do not reach it: {found}"
        self._answer(worst, {"op": "left out", "step": step, "cause": cause})
        del calls[worst]
        self._remove(self.sites[worst], f"was left out at step {step}: {cause}")
        return [name for name in there if name != worst]

    def _form(self, calls: Mapping[str, dict[str, Any]], lead: str) -> None:
        """Answer all calls with a new epoch."""
        first, record = calls[lead], self.record
        in_order = [name for name in record.names if name in calls]
        members = [name for name in in_order if name == lead or _is_like(calls[name], first)]
        self.joiners = [name for name in in_order if name not in members]
        record.epoch += 1
        record.members, self._has_formed, self._replaced = members, True, []
        record.left = []
        record.instances = {name: self.sites[name].instance for name in members}
        for name in members:
            self._attempts.pop((name, self.sites[name].instance), None)
        message = {
            "op": "epoch", "epoch": record.epoch, "run": record.run, "step": first["step"], "lead": lead,
            "members": list(members), "joiners": list(self.joiners), "calls": dict(calls),
        }  # fmt: skip
        self._saved_at = float("-inf")
        self._keep()  # before anybody goes on
        for name in in_order:
            self._answer(name, message)
        also = f"; joining: {', '.join(self.joiners)}" if self.joiners else ""
        self._log(f"epoch {record.epoch}, run {record.run}, from step {first['step']} on: {', '.join(members)}{also}")
        self._said_reason = ""

    def _answer(self, name: str, message: dict[str, Any]) -> None:
        site = self.sites[name]
        site.call, site.waits_for = None, ""
        site.send(message)

    # -- what outlives this process ---------------------------------------------------------------------------------

    def _keep(self) -> None:
        now = self._clock()
        if self.record == self._saved or now - self._saved_at < SAVE_S:
            return
        self._saved_at = now
        copy = Record(**asdict(self.record))
        try:
            self._save(copy)
        except OSError as error:
            if not self.save_error:
                self._log(f"the record of the run cannot be written: {error}; it is tried again")
            self.save_error = str(error)
        else:
            self.save_error, self._saved = "", copy

    # -- for operators ----------------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return who is there and what is agreed, JSON-able."""
        now = self._clock()
        return {
            **asdict(self.record), "joiners": list(self.joiners), "is_running": self.is_running,
            "waits_for": self._reason if any(site.call for site in self.sites.values()) else "",
            "save_error": self.save_error,
            "sites": {name: self._status_of(name, now) for name in self._all_names()},
        }  # fmt: skip

    def _all_names(self) -> Sequence[str]:
        return [*self.record.names, *(name for name in self.sites if name not in self.record.names)]

    def _status_of(self, name: str, now: float) -> dict[str, Any]:
        site = self.sites.get(name)
        if site is None:
            state = "absent"
        elif site.call is not None:
            state = "waiting"
        else:
            state = "member" if name in self.members else "joiner" if name in self.joiners else "starting"
        return {
            "state": state, "step": None if site is None else site.step,
            "is_connected": site is not None and site.is_connected,
            "silent_s": None if site is None else round(now - site.heard_at, 1),
            "waits_for": "" if site is None else site.waits_for,
        }  # fmt: skip


def _is_like(call: Mapping[str, Any], first: Mapping[str, Any]) -> bool:
    """Return True if a site has the state of the lead."""
    return bool(call["is_whole"] and (call["run"], call["step"]) == (first["run"], first["step"]))


def _at(name: str, call: Mapping[str, Any]) -> str:
    return f"{name}: step {call['step']}" + (f" of run {call['run']}" if call["run"] else ", no run")
