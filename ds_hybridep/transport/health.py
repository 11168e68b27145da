# SPDX-License-Identifier: Apache-2.0
"""Ends all ranks of a job when one of them cannot go on, with a message that names it.

Each rank has a thread that tells some others once a second that it lives (`heartbeats`).  A peer is alive while its
messages come, silent if none came for timeout_s, and gone if its connection was closed and its port takes no new one.
What a rank does while it lives is not looked at: it may compute, evaluate or sleep for any time.

A rank that waits for others, in a collective of this package or of any other (`waits`), ends

    at once            when another rank raised an exception, or has judged that the job cannot go on
                       when a peer has been silent for timeout_s
    after timeout_s    when a peer is gone, and the wait brings no error
                       when a link passes nothing, though others hear the peer at its other end

It writes the message and all threads' stacks, aborts its process groups, and exits with EXIT_STATUS, because nothing
interrupts gloo.  Where the wait raises an error instead, the rank first says which rank's end was its cause, and ends
as after any exception.  A rank that waits for nobody is left alone.
"""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from typing import Protocol

import torch.distributed as dist

from ds_hybridep.plan.cluster import Cluster
from ds_hybridep.transport.addresses import connect
from ds_hybridep.transport.agreement import agree
from ds_hybridep.transport.diagnosis import SILENT_S, Direct, Entry, View, cause_of, report
from ds_hybridep.transport.endings import EXIT_STATUS, Endings, abort_groups, exit_now, follows_from_others
from ds_hybridep.transport.heartbeats import MAX_TEXT, Beat, Fact
from ds_hybridep.transport.sockets import Retransmission
from ds_hybridep.transport.waits import Waits

POLL_S = 0.2  # the longest sleep of the thread
BEAT_S = 1.0  # between messages to each peer, and between looks at this rank's waits
WAIT_S = 1.0  # a wait that lasts longer does not end by itself
LINK_S = 5.0  # how long the start waits for the first message of all peers
WORD_S = 3.0  # how long an exception waits for news of its cause
ANSWER_S = 4.0  # beyond WORD_S, how long it waits for the thread
LEAVE_S = 1.0  # how long the last message may take to go out
END_S = 2.0  # how long others have to hear the message, and the wait to raise an error

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
        self._limit_s = max(timeout_s, SILENT_S)  # of silence
        self._facts: list[Fact] = []
        self._known: dict[int, tuple[float, int, int]] = {}  # rank -> when it was sent, message count, step
        self._count = 0
        self._waits = Waits()
        self._turned = self._looked = self._beaten = time.monotonic()
        self._resumed = 0.0  # when this process went on after it had been stopped
        self._cause = ""
        self._has_failed = False  # by an exception of its own
        self._leaves = False
        self._ends_at: float | None = None  # when this process is ended, if its wait does not end before
        self._asked: float | None = None  # when an exception asked for its cause
        self._answered = threading.Event()
        self._linked = threading.Event()  # every peer was heard
        self._lock = threading.Lock()  # guards `_facts`
        self._endings = Endings(self._on_exception, self._at_exit)
        generation = agree({}, timeout_s)
        self._mesh, hosts = connect(self.rank, cluster, generation, timeout_s)
        self._retransmission = Retransmission(hosts, timeout_s)
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
        """Tell the others that this rank ends or detaches, and stop watching."""
        self._leaves = True
        self._thread.join(POLL_S + LEAVE_S + END_S)
        self._endings.unwatch()

    def drop(self) -> None:
        """Stop in a forked process, such as a data loader's worker, which must not keep our connections open."""
        if not self._leaves:
            self._leaves = True
            self._mesh.close_copies()
            self._endings.unwatch()

    def _at_exit(self) -> None:
        self.leave()
        self._waits.look()
        if self._cause and self._waits.longest_s() > 0:  # the interpreter would wait for it without a limit
            exit_now(self._status)

    @property
    def _status(self) -> int:
        return 1 if self._has_failed else EXIT_STATUS

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._leaves:
                self._turn()
        finally:  # if this thread fails, too: its rank lives, but is not watched any more
            if not self._cause and not self._has_failed:
                self._tell(Fact(self.rank, "left", ""))
            self._beat()
            self._mesh.drain(LEAVE_S)
            self._mesh.close()

    def _turn(self) -> None:
        beats = self._mesh.poll(POLL_S if self._linked.is_set() else 0.02)
        now = time.monotonic()
        if now - self._turned > SILENT_S:  # this process was stopped: the silence was its own
            self._resumed = now
        self._turned = now
        for beat in beats:
            self._hear(beat)
        if beats and not self._linked.is_set():
            self._check_links()
        self._look_for_gone()
        if self._facts or now - self._looked >= BEAT_S:
            self._waits.look()
            self._retransmission.look(self._waits.longest_s(), now)
            self._looked = now
        if now - self._beaten >= (BEAT_S if self._linked.is_set() else 0.02) or self._has_news():
            self._beat()
        self._judge(now)

    def _hear(self, beat: Beat) -> None:
        now = time.monotonic()
        self._note(beat.rank, now, beat.count, beat.step)
        for rank, age, count, step in beat.others:
            if rank != self.rank:
                self._note(rank, now - age, count, step)
        for fact in beat.facts:
            self._tell(fact)

    def _note(self, rank: int, at: float, count: int, step: int) -> None:
        known = self._known.get(rank)
        if known is None or count > known[1]:
            self._known[rank] = at, count, step

    def _tell(self, fact: Fact) -> None:
        """Keep a fact, and send it to all peers with the next message."""
        with self._lock:
            if any(one.rank == fact.rank and one.kind == fact.kind for one in self._facts):
                return
            self._facts.append(fact)
        self._mesh.gone.add(fact.rank)

    def _has_news(self) -> bool:
        return any(
            link.socket is not None and not link.told.issuperset(self._facts) for link in self._mesh.links.values()
        )

    def _check_links(self) -> None:
        if all(link.heard_at is not None for link in self._mesh.links.values()):
            self._linked.set()
            self._beat()  # some may not have heard this rank yet, and the next message is a second away

    def _look_for_gone(self) -> None:
        """Note peers that closed their connection without a word and refuse a new one."""
        for peer, link in self._mesh.links.items():
            if link.closed_at is not None and link.answer == "refused" and peer not in self._mesh.gone:
                self._tell(Fact(peer, "gone", "its connections were closed and its port takes no new ones"))

    def _beat(self) -> None:
        self._count += 1
        self._beaten = time.monotonic()
        alert = self._asked is not None or self._longest_silence_s() > SILENT_S / 2
        for link in self._mesh.links.values():
            others: tuple[tuple[int, float, int, int], ...] = ()
            if alert or link.alert or self._facts:
                others = tuple(
                    (rank, max(self._beaten - at, 0.0), count, step)
                    for rank, (at, count, step) in self._known.items()
                    if rank != link.rank
                )
            facts = tuple(fact for fact in self._facts if fact not in link.told)
            self._mesh.send(link, Beat(self.rank, self._count, _num_steps(), alert, others, facts))

    # -- the judgement ----------------------------------------------------------------------------------------------

    def _judge(self, now: float) -> None:
        if self._asked is not None and not self._answered.is_set():
            if self._is_told("failed", "gone", "verdict") or now - self._asked > WORD_S:
                self._decide()
                self._answered.set()
        elif self._waits.longest_s() < WAIT_S or not self._cannot_go_on():
            self._ends_at = None  # an error may have ended the wait: what follows is up to the script
        elif self._ends_at is None:
            self._ends_at = now + END_S
            self._decide()
            with contextlib.suppress(RuntimeError, ValueError, OSError):
                faulthandler.dump_traceback(2, all_threads=True)
            abort_groups()
        elif now > self._ends_at:
            exit_now(self._status)

    def _cannot_go_on(self) -> bool:
        """Return whether what this rank waits for will not come."""
        waits_long = self._waits.longest_s() > self._limit_s
        # A process may end without a word and in good order, and torch's record does not say for whom this one waits.
        misses_all = waits_long or self._waits.longest_for_all_s() > WAIT_S
        peers = self._mesh.links.keys() & self._known.keys() - self._mesh.gone
        return (
            self._is_told("failed", "verdict")
            or (misses_all and self._is_told("gone"))
            or any(self._age_s(self._known[peer][0]) > self._limit_s for peer in peers)
            or (waits_long and self._longest_silence_s() > self._limit_s)
        )

    def _is_told(self, *kinds: str) -> bool:
        return any(fact.kind in kinds and fact.rank != self.rank for fact in self._facts)

    def _longest_silence_s(self) -> float:
        """Return the longest time that the connection with a peer has been silent, though others may hear the peer."""
        heard = [
            link.heard_at
            for peer, link in self._mesh.links.items()
            if link.heard_at is not None and peer not in self._mesh.gone
        ]
        return max((self._age_s(at) for at in heard), default=0.0)

    def _age_s(self, at: float) -> float:
        return time.monotonic() - max(at, self._resumed)

    def view(self) -> View:
        others = {}
        for rank in range(self.cluster.num_ranks):
            if rank != self.rank:
                known = self._known.get(rank)
                others[rank] = Entry(None) if known is None else Entry(self._age_s(known[0]), known[2])
        return View(
            rank=self.rank,
            cluster=self.cluster,
            timeout_s=self.timeout_s,
            step=_num_steps(),
            others=others,
            direct={
                peer: Direct(None if link.heard_at is None else self._age_s(link.heard_at), link.answer)
                for peer, link in self._mesh.links.items()
            },
            facts=tuple(self._facts),
            last_transfer=next((owner.last_transfer() for owner in reversed(_owners)), ""),
        )

    def _decide(self) -> None:
        """Find the cause, tell the others, and write the message, all but once; without a cause do nothing."""
        view = self.view()
        if self._cause or not (cause := cause_of(view)):
            return
        self._cause = cause
        self._tell(Fact(self.rank, "verdict", cause[:MAX_TEXT]))
        self._beat()
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        _say(report(view, cause, self._status))

    def _on_exception(self, error: BaseException) -> bool:
        """Return True if another rank's end caused this uncaught exception; first wait for news of that rank."""
        if self._leaves:  # a hook that was set after ours may still call it
            return False
        if not self._cause and follows_from_others(error):
            self._asked = time.monotonic()
            self._answered.wait(WORD_S + ANSWER_S)
        if not self._cause:
            self._has_failed = True
            said = str(error).strip().splitlines()
            text = f"{type(error).__name__}: {said[0] if said else ''}"
            self._tell(Fact(self.rank, "failed", text[: MAX_TEXT // 2]))
        return bool(self._cause)


def _num_steps() -> int:
    return max((owner.num_steps() for owner in _owners), default=0)


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))
