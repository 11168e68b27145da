# SPDX-License-Identifier: Apache-2.0
"""Ends all ranks of a job when one of them cannot go on, with a message that names it.

Each rank has a thread that tells some others where its main thread is (`position`, `heartbeats`).  A rank ends

    at once                       when another rank has judged that the job cannot go on
                                  when another rank failed or is gone, and this rank waits in a collective
    after timeout_s of waiting    in one collective, of this package or of any other: it judges itself (`diagnosis`)

The others wait longer for a rank that computes, reads or writes, or is in a debugger, because a rank may evaluate or
save alone.  They end once it is idle for timeout_s or silent for most of it.  Once it has come, they give the
collective timeout_s more.  Waits of this package keep the limit timeout_s.

A rank that ends writes the message and all threads' stacks, aborts its process groups, and exits with EXIT_STATUS, no
matter what its main thread does.  If an exception follows from another rank's end, it first says what that was.
"""

import contextlib
import faulthandler
import os
import signal
import sys
import threading
import time
from dataclasses import replace
from typing import Protocol

import torch.distributed as dist

from ds_hybridep.errors import CommunicationError
from ds_hybridep.plan.cluster import Cluster
from ds_hybridep.transport.addresses import connect
from ds_hybridep.transport.agreement import LATE, agree
from ds_hybridep.transport.diagnosis import (
    Direct,
    Entry,
    View,
    any_missing,
    at_work,
    cause_of,
    is_firsthand,
    known_cause_of,
    report,
)
from ds_hybridep.transport.endings import (
    EXIT_STATUS,
    Endings,
    abort_groups,
    exit_later,
    exit_now,
    follows_from_others,
)
from ds_hybridep.transport.heartbeats import Beat, Fact
from ds_hybridep.transport.position import MAX_TEXT, MainThread, Position
from ds_hybridep.transport.sockets import Retransmission

LOOK_S = 0.5  # between looks at the main thread
BEAT_S = 1.0  # between messages to each peer
GRACE_S = 2.0  # beyond timeout_s, so that a wait with a limit of its own raises its error first
LINK_S = 5.0  # how long the start waits for the first message of all peers
SIGNAL_S = 1.5  # how long a rank waits for more news after others got SIGTERM
WORD_S = 3.0  # how long an exception waits for news of its cause
LEAVE_S = 1.0  # how long the last message may take to go out
SIGTERM_S = 2.5  # how long a rank that got SIGTERM may take to say why
END_S = 3.0  # how long the main thread has to end in good order
OWN_END_S = 8.0  # the same after an exception of its own
AT_WORK_S = 1800.0  # how long others wait for a rank that is at work, like torch's groups
ALERT_SHARE = 0.25  # of timeout_s: a rank that waits longer passes on what it hears

_running: "Health | None" = None
_owners: list["Owner"] = []


class Owner(Protocol):
    """An attached engine, which is watched."""

    def num_steps(self) -> int:
        """Optimizer steps so far."""
        ...

    def last_transfer(self) -> str:
        """Describe the transfer that this rank started last, for the message."""
        ...


def start(cluster: Cluster, timeout_s: float, owner: Owner) -> None:
    """Watch over this job until `stop`; all ranks must call.  One watch serves all owners of a process.

    Raises AgreementError if ranks do not say their addresses within the time limit.
    """
    global _running
    if _running is None and cluster.num_ranks > 1:
        _running = Health(cluster, timeout_s)
        _owners.append(owner)
        _running.begin()
    else:
        _owners.append(owner)


def stop(owner: Owner) -> None:
    """Undo `start`.  The last owner's call tells the other ranks that this rank needs no watch any more."""
    global _running
    _owners.remove(owner)
    if not _owners and _running is not None:
        _running.leave()
        _running = None


def _in_child() -> None:
    if _running is not None:
        _running.drop()


os.register_at_fork(after_in_child=_in_child)


class Health:
    """The watch of one rank over the job; arguments as in `start`."""

    def __init__(self, cluster: Cluster, timeout_s: float) -> None:
        self.rank, self.cluster, self.timeout_s = dist.get_rank(), cluster, timeout_s
        self._main = MainThread(lambda: _owners[-1].num_steps() if _owners else 0)
        self._position = Position()
        self._facts: list[Fact] = []
        self._fact_at = 0.0  # when the first one came that is not "left"
        self._known: dict[int, tuple[float, int, Position]] = {}  # rank -> when it was sent, message count, position
        self._count = 0
        self._cause = ""
        self._patience = Patience(timeout_s)
        self._leaves = False
        self._asked: tuple[float, bool] | None = None  # when an exception asked for its cause; True: after a limit
        self._answered = threading.Event()
        self._linked = threading.Event()  # every peer was heard
        self._lock = threading.Lock()  # guards `_facts`
        self._endings = Endings(self._on_exception, self._at_exit)
        generation = agree({}, timeout_s)
        self._mesh, hosts = connect(self.rank, cluster, generation, timeout_s)
        self._retransmission = Retransmission(hosts, timeout_s)
        self._mesh.watch(self._endings.woken)
        self._thread = threading.Thread(target=self._run, name="hybridep-health", daemon=True)

    # -- begin and end ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._endings.watch()
        self._thread.start()
        if not self._linked.wait(LINK_S):  # if a rank dies from now on, those that have heard of it notice
            missing = sorted(peer for peer, link in self._mesh.links.items() if link.heard_at is None)
            _say(f"hybridep: rank {self.rank} hears no heartbeats of ranks {missing}: is there a firewall between?\n")
        self._linked.set()

    def leave(self) -> None:
        """Tell the others that this rank ends or detaches in good order, and stop watching."""
        self._leaves = True
        self._endings.nudge()
        self._thread.join(SIGTERM_S + 0.5)
        self._endings.unwatch()

    def drop(self) -> None:
        """Stop in a forked process, such as a data loader's worker, which must not keep our connections open."""
        if not self._leaves:
            self._leaves = True
            self._main.forked()
            self._mesh.close_copies()
            self._endings.unwatch()

    def _at_exit(self) -> None:
        if self._cause:
            exit_now(EXIT_STATUS)
        if self._answered.is_set():
            time.sleep(1.0)  # meanwhile the thread tells the others
        else:
            self.leave()

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        looked = beaten = float("-inf")
        while not self._leaves:
            beats = self._mesh.poll(0.02 if not self._linked.is_set() else 0.1 if self._facts else LOOK_S)
            for beat in beats:
                self._hear(beat)
            if beats and not self._linked.is_set():
                self._check_links()
            self._look_for_gone()
            if self._endings.take_sigterm():
                _die_of_sigterm(self)
            now = time.monotonic()
            if now - looked >= LOOK_S or self._facts:
                self._position, looked = self._look(), now
                self._retransmission.look(self._position.for_s if self._position.waits else 0.0, now)
            if now - beaten >= (BEAT_S if self._linked.is_set() else 0.02) or self._has_news():
                self._beat()
                beaten = now
            if not self._cause and not self._answered.is_set():
                self._judge(now)
        self._tell(Fact(self.rank, "left", ""))
        self._beat()
        self._mesh.drain(LEAVE_S)
        self._mesh.close()

    def _look(self) -> Position:
        before = self._position
        if self._answered.is_set():  # the main thread is in `_on_exception`, or after it
            return before
        if self._asked is None:
            return self._main.look()
        what = before.what if before.waits else "an error of communication"
        return replace(before, what=what, waits=True, for_s=0.0)

    def _hear(self, beat: Beat) -> None:
        now = time.monotonic()
        self._note(beat.rank, now, beat.count, beat.position)
        for rank, age, count, position in beat.others:
            if rank != self.rank:
                self._note(rank, now - age, count, position)
        for fact in beat.facts:
            self._tell(fact)

    def _note(self, rank: int, at: float, count: int, position: Position) -> None:
        known = self._known.get(rank)
        if known is None or count > known[1]:
            self._known[rank] = at, count, position

    def _tell(self, fact: Fact) -> None:
        """Keep a fact, and send it to all peers with the next message."""
        with self._lock:
            if any(one.rank == fact.rank and one.kind == fact.kind for one in self._facts):
                return
            if not any(one.kind != "left" for one in self._facts):
                self._fact_at = time.monotonic()
            self._facts.append(fact)
        self._mesh.gone.add(fact.rank)

    def _has_news(self) -> bool:
        return any(
            link.socket is not None and not link.told.issuperset(self._facts) for link in self._mesh.links.values()
        )

    def _check_links(self) -> None:
        if all(link.heard_at is not None for link in self._mesh.links.values()):
            self._linked.set()

    def _look_for_gone(self) -> None:
        """Note peers that closed their connection without a word and refuse a new one."""
        for peer, link in self._mesh.links.items():
            if link.closed_at is not None and link.answer == "refused" and peer not in self._mesh.gone:
                self._tell(Fact(peer, "gone", "its connections were closed and its port takes no new ones"))

    def _beat(self) -> None:
        self._count += 1
        now = time.monotonic()
        waits_long = self._position.waits and self._position.for_s > max(2.0, ALERT_SHARE * self.timeout_s)
        alert = waits_long or self._asked is not None
        for link in self._mesh.links.values():
            others: tuple[tuple[int, float, int, Position], ...] = ()
            if alert or link.alert or self._facts:
                others = tuple(
                    (rank, max(now - at, 0.0), count, position)
                    for rank, (at, count, position) in self._known.items()
                    if rank != link.rank
                )
            facts = tuple(fact for fact in self._facts if fact not in link.told)
            self._mesh.send(link, Beat(self.rank, self._count, self._position, alert, others, facts))

    # -- the judgement ----------------------------------------------------------------------------------------------

    def _judge(self, now: float) -> None:
        told = [fact for fact in self._facts if fact.kind != "left" and fact.rank != self.rank]
        if all(fact.kind == "signal" for fact in told) and now - self._fact_at < SIGNAL_S:
            told = []  # launchers signal the ranks beside the one that broke, and its own word may be on its way
        position = self._position
        is_over = any(fact.kind == "verdict" for fact in told)
        waits = self._asked is not None or (position.waits and position.for_s >= LOOK_S)
        if is_over or (told and (waits or min(now - self._fact_at, position.for_s) > self.timeout_s)):
            self._end(cause_of(self.view()))
            return
        over_s = -1.0
        if self._asked is not None:
            over_s = now - self._asked[0] - WORD_S
        elif position.waits and position.for_s > ALERT_SHARE * self.timeout_s:
            over_s = self._patience.overdue_s(self.view(), now)
        if over_s > 0:
            view = self.view()
            if is_firsthand(view) or over_s > GRACE_S:
                is_late = self._asked is None or self._asked[1]
                self._end(cause_of(view) if is_late else known_cause_of(view))

    def view(self) -> View:
        now = time.monotonic()
        others = {}
        for rank in range(self.cluster.num_ranks):
            if rank != self.rank:
                known = self._known.get(rank)
                others[rank] = Entry(None) if known is None else Entry(now - known[0], known[2])
        return View(
            rank=self.rank,
            cluster=self.cluster,
            timeout_s=self.timeout_s,
            own=self._position,
            others=others,
            direct={
                peer: Direct(None if link.heard_at is None else now - link.heard_at, link.answer)
                for peer, link in self._mesh.links.items()
            },
            facts=tuple(self._facts),
            last_transfer=_owners[-1].last_transfer() if _owners else "",
        )

    def _decide(self, cause: str) -> None:
        """Tell the others, and write the message."""
        self._cause = cause
        self._tell(Fact(self.rank, "verdict", cause[: 4 * MAX_TEXT]))
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        _say(report(self.view(), cause, EXIT_STATUS))

    def _end(self, cause: str) -> None:
        """End this rank, or let its exception end it; if `cause` is empty, the exception itself is the cause."""
        if self._asked is not None:
            if cause:
                self._decide(cause)
            self._answered.set()
            return
        self._decide(cause)
        self._beat()
        with contextlib.suppress(RuntimeError, ValueError, OSError):
            faulthandler.dump_traceback(2, all_threads=True)
        abort_groups()
        exit_later(END_S + 1.0, EXIT_STATUS)
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline:  # others hear the verdict meanwhile
            self._mesh.poll(0.1)
        exit_now(EXIT_STATUS)

    def _on_exception(self, error: BaseException) -> tuple[float, int]:
        """Handle an uncaught exception.  If another rank's end caused it, first wait for news of that rank."""
        if not self._cause and follows_from_others(error):
            self._asked = time.monotonic(), isinstance(error, CommunicationError) or LATE in str(error)
            self._endings.nudge()
            self._answered.wait(WORD_S + 2 * GRACE_S)
        self._answered.set()
        if not self._cause:
            said = str(error).strip().splitlines()
            text = f"{type(error).__name__}: {said[0] if said else ''}"[: 2 * MAX_TEXT]
            self._tell(Fact(self.rank, "failed", text))
        self._endings.nudge()
        return (END_S, EXIT_STATUS) if self._cause else (OWN_END_S, 1)


class Patience:
    """How long this rank waits in a collective while other ranks are at work."""

    def __init__(self, timeout_s: float) -> None:
        self._limit_s = timeout_s + GRACE_S
        self._worked_at = float("-inf")  # when a rank was last at work while this one waited
        self._said = float("-inf")  # start of the wait that was spoken of last

    def overdue_s(self, view: View, now: float) -> float:
        """Return how long this rank has waited beyond its limit; below 0 it waits on."""
        waited_s = view.own.for_s
        if waited_s < AT_WORK_S and at_work(view):
            self._worked_at = now
            if waited_s > self._limit_s:
                self._say(view, now - waited_s)
            return -1.0
        if not any_missing(view):  # all have come by now, and the collective itself may take timeout_s
            waited_s = min(waited_s, now - self._worked_at)
        return waited_s - self._limit_s

    def _say(self, view: View, since: float) -> None:
        """Say once per wait, on the first rank that waits, that it goes on waiting."""
        waiting = [rank for rank, entry in view.others.items() if entry.position.waits]
        if since - self._said > LOOK_S + 1.0 and view.rank <= min(waiting, default=view.rank):
            first = at_work(view)[0]
            said = f"rank {first} is at work in {view.others[first].position}, so rank {view.rank} goes on waiting"
            _say(f"hybridep: {said} in {view.own}\n")
        self._said = since


def _die_of_sigterm(health: Health) -> None:
    """Tell the others, say why SIGTERM came if this rank can find out, and die of it, whatever happens meanwhile."""
    timer = threading.Timer(SIGTERM_S, health._endings.die_of_sigterm)  # standard error may block
    timer.daemon = True
    try:
        timer.start()
        health._tell(Fact(health.rank, "signal", "SIGTERM"))
        health._beat()
        _say_cause(health)
        health._beat()
        health._mesh.drain(LEAVE_S)
    finally:
        health._endings.die_of_sigterm()


def _say_cause(health: Health) -> None:
    """Say which rank's end made a launcher send SIGTERM, if that is known or found out within LEAVE_S.

    A launcher may signal a rank before it has noticed the end of the one that broke.
    """
    deadline = time.monotonic() + LEAVE_S
    while not health._cause and not health._answered.is_set():
        for beat in health._mesh.poll(0.1):
            health._hear(beat)
        health._endings.take_sigterm()  # or a second one would let `poll` return at once
        health._look_for_gone()
        if any(fact.kind in ("failed", "gone", "verdict") and fact.rank != health.rank for fact in health._facts):
            view = health.view()
            _say(report(view, cause_of(view), 128 + signal.SIGTERM))
            return
        if not health._mesh.dial_closed() or time.monotonic() > deadline:
            return


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))
