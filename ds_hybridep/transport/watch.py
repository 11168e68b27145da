# SPDX-License-Identifier: Apache-2.0
"""Ends the waits of a job's ranks when one of them cannot go on, with a message that names it.

Each rank has a link to some others (`peers_of`), which tells whether each of them is alive, silent or gone.  What a
rank hears it passes on, so that all ranks know the same.  What a rank does while it lives is not looked at: it may
compute, evaluate or sleep for any time.

A rank that waits for others, in a collective of this package or of any other (`waits`), ends

    at once            when another rank raised an exception, or has judged that the job cannot go on
                       when a rank has been silent for timeout_s
    after timeout_s    when another rank is gone, and the wait brings no error

It writes the message and all threads' stacks, aborts its process groups, and exits with EXIT_STATUS, because nothing
interrupts gloo.  Where the wait raises an error instead, the script ends as after any exception, and the message is
written as the process exits.  A rank that waits for nobody is left alone.
"""

import atexit
import contextlib
import faulthandler
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from math import inf

import torch.distributed as dist

from ds_hybridep.errors import AgreementError, CommunicationError
from ds_hybridep.geometry.cluster import Cluster
from ds_hybridep.link import BLOCKED, FAILED, LEFT, LOST, SILENT_S, Fact, State
from ds_hybridep.transport.agreement import agree
from ds_hybridep.transport.diagnosis import ENDED, GONE, VERDICT, News, View, cause_of, peers_of, report
from ds_hybridep.transport.job_link import LinkSettings, open_link
from ds_hybridep.transport.waits import Waits

EXIT_STATUS = 75  # of a rank that ends because of another one: EX_TEMPFAIL of sysexits.h, "try again"
LOOK_S = 1.0  # between looks at this rank's waits
WAIT_S = 1.0  # a wait that lasts longer does not end by itself
AGREE_S = 2.5  # between the first and the last peer's loss of a rank
WORD_S = 4.0  # how long an ending process waits for news of what has ended it
TELL_S = 0.2  # how long the link's thread may take to tell the others
END_S = 2.0  # how long others have to hear the message, and the wait to raise an error
MAX_TEXT_BYTES = 1000  # of a fact
_COMMUNICATION = re.compile(r"gloo|nccl|c10d|tcpstore|process ?group|connection (closed|reset) by peer", re.IGNORECASE)

_running: "Watch | None" = None
Look = Callable[[], tuple[int, str]]  # tells the optimizer steps of an engine, and its last transfer
_owners: list[Look] = []


def start(cluster: Cluster, settings: LinkSettings, look: Look) -> None:
    """Watch over this job until `stop`; all ranks must call.  One watch serves all engines of a process.

    look: of an engine, until `stop`.
    Raises AgreementError or CommunicationError if ranks do not come within the time limit.
    """
    global _running
    if _running is None and cluster.num_ranks > 1:
        _running = Watch(cluster, settings)
    _owners.append(look)


def stop(look: Look) -> None:
    """Undo `start`."""
    global _running
    _owners.remove(look)
    if not _owners and _running is not None:
        _running.leave()
        _running = None


class Watch:
    """The watch of one rank over the job; arguments as in `start`.  All but its ends run in the link's thread."""

    def __init__(self, cluster: Cluster, settings: LinkSettings) -> None:
        self.rank, self.cluster, self.timeout_s = dist.get_rank(), cluster, settings.timeout_s
        self._limit_s = max(settings.timeout_s, 2 * SILENT_S)
        self._pid = os.getpid()
        self._news: dict[tuple[int, str, int], News] = {}  # in the order in which they came
        self._lost_at = inf  # when this rank heard first that one is lost
        self._has_announced = False
        self._waits = Waits()
        self._looked_at = time.monotonic()
        self._ends_at: float | None = None  # when this process is ended, if its wait does not end before
        self._cause = ""
        self._link = open_link(cluster, agree({"starts": "a watch"}, settings.timeout_s), settings)
        self._link.on_change, self._link.on_tick = self.on_change, self.on_tick
        try:
            self._link.meet(peers_of(cluster, self.rank))
        except BaseException:
            self.leave()
            raise
        for peer in list(self._link.peers.values()):  # where a planner has opened the link
            if peer.state is State.GONE:
                self.on_change(Fact(peer.rank, LEFT if peer.has_left else GONE, peer.mail.cause))
        atexit.register(self._at_exit)

    def leave(self) -> None:
        """Stop watching."""
        atexit.unregister(self._at_exit)
        self._link.on_change, self._link.on_tick = lambda fact: None, lambda: None
        self._link.leave()

    # -- news -------------------------------------------------------------------------------------------------------

    def on_change(self, fact: Fact) -> None:
        """Hear what the link knows of a peer, or what a peer passes on."""
        if fact.kind == "news":
            self._hear(News(*json.loads(fact.text)))
        elif fact.kind in (*ENDED, BLOCKED, LOST):
            self._hear(News(*fact, self.rank))

    def _hear(self, news: News) -> None:
        """Keep news, and pass them on."""
        is_of_a_link = news.kind in (BLOCKED, LOST)  # not of a rank
        key = news.rank, news.kind, news.by if is_of_a_link else -1
        if key in self._news or (news.rank == self.rank and not is_of_a_link):
            return
        self._news[key] = news
        if news.kind == LOST:
            self._lost_at = min(self._lost_at, time.monotonic())
        self._tell(news)
        self._looked_at = 0.0

    def _tell(self, news: News) -> None:
        """Tell all peers what has become of a rank."""
        text = news.text.encode(errors="replace")[:MAX_TEXT_BYTES].decode(errors="ignore")
        self._link.announce("news", json.dumps(news._replace(text=text), ensure_ascii=False))

    def _has(self, *kinds: str) -> bool:
        return any(one.kind in kinds for one in list(self._news.values()))

    def _is_told(self) -> bool:
        """Return whether it is known that the job cannot go on, and why."""
        return self._has(BLOCKED, FAILED, VERDICT) or time.monotonic() - self._lost_at > AGREE_S

    # -- the judgement ----------------------------------------------------------------------------------------------

    def on_tick(self) -> None:
        """Look at what has become of this rank's waits, and of its main thread."""
        self._link.progress = _num_steps()
        error = self._link.failure()
        if error is not None and not threading.main_thread().is_alive():  # other threads may still run for long
            self._announce_failure(error)
        now = time.monotonic()
        if now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        self._waits.look(closely=bool(self._news))
        if self._waits.longest_s() < WAIT_S or not self._cannot_go_on():
            self._ends_at = None  # an error may have ended the wait: what follows is up to the script
        elif self._ends_at is None:
            self._ends_at = now + END_S
            if self._decide():
                with contextlib.suppress(RuntimeError, ValueError, OSError):
                    faulthandler.dump_traceback(2, all_threads=True)
            _abort_groups()
        elif now > self._ends_at:
            _exit_now(EXIT_STATUS)

    def _cannot_go_on(self) -> bool:
        """Return whether what this rank waits for will not come."""
        # A process may end without a word and in good order, and torch's record does not say for whom this one waits.
        misses_all = self._waits.longest_s() > self._limit_s or self._waits.longest_for_all_s() > WAIT_S
        return self._is_told() or (misses_all and self._has(GONE))

    def _decide(self) -> bool:
        """Find the cause, tell the others, and write the message, once; without a cause return False."""
        view = self.view()
        if self._cause or not (cause := cause_of(view)):
            return bool(self._cause)
        self._cause = cause
        self._tell(News(self.rank, VERDICT, cause, self.rank))
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        with contextlib.suppress(OSError):
            os.write(2, report(view, cause).encode(errors="replace"))
        return True

    def view(self) -> View:
        """Return all that this rank knows."""
        peers = dict(self._link.peers)
        return View(
            rank=self.rank, cluster=self.cluster, timeout_s=self.timeout_s, step=_num_steps(),
            ages={rank: peer.age_s() for rank, peer in peers.items()},
            steps={rank: peer.progress for rank, peer in peers.items()}, news=tuple(dict(self._news).values()),
            last_transfer=_owners[-1]()[1] if _owners else "",
        )  # fmt: skip

    # -- the end of this process --------------------------------------------------------------------------------------

    def _announce_failure(self, error: BaseException) -> None:
        """Tell the others of the exception that ends this script, unless it follows from another rank's end."""
        if self._has_announced:
            return
        self._has_announced = True
        if not follows_from_others(error):
            said = str(error).strip().splitlines()
            text = f"{type(error).__name__}: {said[0] if said else ''}"
            self._tell(News(self.rank, FAILED, text, self.rank))
        self._link.last_words = LEFT, "it has failed"

    def _at_exit(self) -> None:
        if self._pid != os.getpid():
            return
        error = self._link.failure()
        if error is not None:
            self._announce_failure(error)
            if follows_from_others(error):
                until = time.monotonic() + WORD_S
                while not self._is_told() and not self._has(GONE) and time.monotonic() < until:
                    time.sleep(LOOK_S / 20)
                self._decide()
        self._waits.look(closely=bool(self._news))
        # The interpreter would wait for collectives under way without a limit.  One that has failed is no longer under
        # way, but torch's record does not tell.
        if self._cause and self._waits.longest_s() > 0 and not _is_of_torch(error):
            time.sleep(TELL_S)
            _exit_now(EXIT_STATUS if error is None else 1)


def follows_from_others(error: BaseException | None) -> bool:
    """Return True if a rank raises `error` because another rank is gone or late."""
    while error is not None:
        if isinstance(error, CommunicationError | AgreementError) or _is_of_torch(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def _is_of_torch(error: BaseException | None) -> bool:
    """Return True if a collective of torch has raised an error."""
    if isinstance(error, CommunicationError | AgreementError):
        return False
    is_told = isinstance(error, RuntimeError) and _COMMUNICATION.search(str(error)) is not None
    return isinstance(error, dist.DistError) or is_told


def _exit_now(status: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):
            stream.flush()
    os._exit(status)


def _abort_groups() -> None:
    """Abort all process groups and return at once.  The main thread then leaves a collective over NCCL, not gloo's."""

    def abort() -> None:
        for group in list(dist.distributed_c10d._world.pg_map):
            with contextlib.suppress(RuntimeError, AttributeError, TypeError):
                group.abort()

    threading.Thread(target=abort, name="hybridep-abort", daemon=True).start()


def _num_steps() -> int:
    return max((look()[0] for look in _owners), default=0)
