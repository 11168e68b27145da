# SPDX-License-Identifier: Apache-2.0
"""Ends all ranks of a job when one of them cannot go on, with a message that names it.

Each rank has a thread that tells some others where its main thread is (`position`, `heartbeats`).  A rank ends

    at once                       when another has judged that the job cannot go on, or told that it failed,
                                  or is gone, and this rank waits in a collective
    after timeout_s of waiting    in one collective, of this package or of any other: it judges itself (`diagnosis`)

The end: the message, all threads' stacks, process groups aborted, then the exit status EXIT_STATUS, whatever the main
thread does.  An exception that only follows from another rank's end is preceded by what that was.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from types import TracebackType

import psutil
import torch.distributed as dist

from ds_hybridep.errors import AgreementError, CommunicationError
from ds_hybridep.plan.cluster import Cluster
from ds_hybridep.transport.agreement import agree
from ds_hybridep.transport.diagnosis import Direct, Entry, View, cause_of, is_firsthand, known_cause_of, report
from ds_hybridep.transport.heartbeats import Beat, Fact, Mesh, peers_of
from ds_hybridep.transport.position import MAX_TEXT, MainThread, Position

EXIT_STATUS = 75  # of a rank that ends because of another one: EX_TEMPFAIL of sysexits.h, "try again"
LOOK_S = 0.5  # between looks at the main thread
BEAT_S = 1.0  # between messages to each peer
GRACE_S = 2.0  # beyond timeout_s, so that a wait with a limit of its own says what it has to say
LINK_S = 5.0  # how long the start waits for the first message of all peers
WORD_S = 3.0  # how long an exception waits for news of what it follows from
END_S = 3.0  # what the main thread gets for an end in good order
OWN_END_S = 8.0  # the same after an exception of its own
ALERT_SHARE = 0.25  # of timeout_s, after which a rank that waits passes on what it hears

_running: "Health | None" = None
_users = 0


def start(cluster: Cluster, timeout_s: float, step: Callable[[], int], last_transfer: Callable[[], str]) -> None:
    """Watch over this job until `stop`; all ranks must call.  Later calls count users.

    step: the number of optimizer steps so far.
    last_transfer: what this rank has started to move last, for the message.
    Raises AgreementError where a rank does not say its address within the time limit.
    """
    global _running, _users
    _users += 1
    if _running is None and cluster.num_ranks > 1:
        try:
            _running = Health(cluster, timeout_s, step, last_transfer)
        except BaseException:
            _users -= 1
            raise
        _running.begin()


def stop() -> None:
    """The counterpart of `start`: the last one tells the others that this rank needs no watch any more."""
    global _running, _users
    _users -= 1
    if _users == 0 and _running is not None:
        _running.leave()
        _running = None


class Health:
    """The watch of one rank over the job; arguments as for `start`."""

    def __init__(
        self,
        cluster: Cluster,
        timeout_s: float,
        step: Callable[[], int],
        last_transfer: Callable[[], str],
    ) -> None:
        self.rank, self.cluster, self.timeout_s = dist.get_rank(), cluster, timeout_s
        self._last_transfer = last_transfer
        self._main = MainThread(step)
        self._position = Position()
        self._facts: list[Fact] = []
        self._fact_at = 0.0  # when the first one came
        self._known: dict[int, tuple[float, int, Position]] = {}  # rank -> when it was sent, count, position
        self._count = 0
        self._cause = ""
        self._leaves = False
        self._asked: tuple[float, bool] | None = None  # when an exception asked for its cause; True: it passed a limit
        self._answered = threading.Event()
        self._linked = threading.Event()  # every peer was heard
        self._lock = threading.Lock()  # of facts
        self._pid = os.getpid()
        self._wake, self._woken = socket.socketpair()
        generation = agree({}, timeout_s)
        self._mesh = Mesh(self.rank, cluster.num_ranks, _own_host(), f"hybridep-{generation}")
        try:
            self._mesh.connect(self._exchange(generation))
        except BaseException:
            self._mesh.close()
            raise
        for one in (self._wake, self._woken):
            one.setblocking(False)
        self._mesh.watch(self._woken)
        self._thread = threading.Thread(target=self._run, name="hybridep-health", daemon=True)

    def _exchange(self, generation: int) -> dict[int, tuple[str, int]]:
        """Addresses of the peers, through the job's store."""
        store = dist.distributed_c10d._get_default_store()
        path = f"ds_hybridep/{generation}/health"
        store.set(f"{path}/{self.rank}", json.dumps(self._mesh.address))
        addresses = {}
        for peer in peers_of(self.cluster, self.rank):
            try:
                store.wait([f"{path}/{peer}"], timedelta(seconds=self.timeout_s))
            except RuntimeError as error:
                raise AgreementError(f"rank {peer} did not say its address for heartbeats: {error}") from error
            host, port = json.loads(store.get(f"{path}/{peer}"))
            addresses[peer] = str(host), int(port)
        return addresses

    # -- begin and end ----------------------------------------------------------------------------------------------

    def begin(self) -> None:
        self._hook = sys.excepthook
        sys.excepthook = self._on_exception
        atexit.register(self._at_exit)
        os.register_at_fork(after_in_child=self._in_child)
        self._watch_sigterm()
        self._thread.start()
        self._linked.wait(LINK_S)  # a rank that dies from now on is missed by those that have heard of it
        self._linked.set()

    def leave(self) -> None:
        """Tell the others that this rank ends or detaches in good order, and end."""
        self._leaves = True
        self._nudge()
        self._thread.join(2.0)
        atexit.unregister(self._at_exit)
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._hook
        if self._old_wakeup is not None:
            with contextlib.suppress(ValueError):  # not in the main thread
                signal.set_wakeup_fd(self._old_wakeup)
                if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for one in (self._wake, self._woken):
            one.close()

    def _in_child(self) -> None:
        """A forked process, such as a data loader's worker, must not keep our connections open."""
        if self._pid != os.getpid() and not self._leaves:
            self._leaves = True
            self._mesh.close_copies()
            sys.excepthook = self._hook
            if self._old_wakeup is not None:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
            atexit.unregister(self._at_exit)

    def _watch_sigterm(self) -> None:
        """Where nobody handles SIGTERM: hear of it while the main thread is in C code, and tell the others."""
        self._old_wakeup: int | None = None
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
            if before != -1:
                signal.set_wakeup_fd(before)
                return
            self._old_wakeup = before
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, number: int, _frame: object) -> None:
        """The thread does it; the main thread may not come here."""

    def _at_exit(self) -> None:
        if self._pid != os.getpid():
            return
        if self._cause:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(EXIT_STATUS)
        if self._answered.is_set():
            time.sleep(1.0)  # meanwhile the others are told
        else:
            self.leave()

    def _nudge(self) -> None:
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        looked = beaten = float("-inf")
        while not self._leaves:
            beats = self._mesh.poll(LOOK_S if self._linked.is_set() and not self._facts else 0.1)
            for beat in beats:
                self._hear(beat)
            if beats and not self._linked.is_set():
                self._check_links()
            self._look_for_gone()
            self._take_signals()
            now = time.monotonic()
            if now - looked >= LOOK_S or self._facts:
                self._position, looked = self._look(), now
            if now - beaten >= (BEAT_S if self._linked.is_set() else 0.1) or self._has_news():
                self._beat(now)
                beaten = now
            if not self._cause and not self._answered.is_set():
                self._judge(now)
        if self._pid == os.getpid():
            self._tell(Fact(self.rank, "left", ""))
            self._beat(time.monotonic())
            self._mesh.poll(0.0)
            self._mesh.close()

    def _look(self) -> Position:
        before = self._position
        if self._answered.is_set():  # the main thread stands in `_on_exception`, or behind it
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
        """Keep a fact, which goes to all peers with the next message."""
        with self._lock:
            if any(one.rank == fact.rank and one.kind == fact.kind for one in self._facts):
                return
            if not any(one.kind != "left" for one in self._facts):
                self._fact_at = time.monotonic()
            self._facts.append(fact)
        if fact.kind in ("failed", "gone", "left", "signal"):
            self._mesh.gone.add(fact.rank)

    def _has_news(self) -> bool:
        return any(
            link.socket is not None and not link.told.issuperset(self._facts) for link in self._mesh.links.values()
        )

    def _check_links(self) -> None:
        if all(link.heard_at is not None for link in self._mesh.links.values()):
            self._linked.set()

    def _look_for_gone(self) -> None:
        """A connection that was closed without a word, and nobody takes a new one."""
        for peer, link in self._mesh.links.items():
            if link.closed_at is not None and link.answer == "refused" and peer not in self._mesh.gone:
                self._tell(Fact(peer, "gone", "its connections were closed and its port takes no new ones"))

    def _take_signals(self) -> None:
        try:
            numbers = self._woken.recv(4096)
        except BlockingIOError:
            return
        if signal.SIGTERM in numbers and self._old_wakeup is not None:
            self._tell(Fact(self.rank, "signal", "SIGTERM"))
            self._beat(time.monotonic())
            self._mesh.poll(0.1)
            ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)  # only the main thread may by `signal.signal`
            os.kill(os.getpid(), signal.SIGTERM)

    def _beat(self, now: float) -> None:
        self._count += 1
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
        position = self._position
        is_over = any(fact.kind == "verdict" for fact in told)
        waits = self._asked is not None or (position.waits and position.for_s >= LOOK_S)
        if is_over or (told and (waits or now - self._fact_at > self.timeout_s)):
            self._end(cause_of(self.view()))
            return
        over_s = position.for_s - self.timeout_s - GRACE_S if position.waits else -1.0
        if self._asked is not None:
            over_s = now - self._asked[0] - WORD_S
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
            last_transfer=self._last_transfer(),
        )

    def _decide(self, cause: str) -> None:
        """Tell the others, and write the message."""
        self._cause = cause
        self._tell(Fact(self.rank, "verdict", cause[: 4 * MAX_TEXT]))
        with contextlib.suppress(OSError):
            sys.stdout.flush()
            os.write(2, report(self.view(), cause, EXIT_STATUS).encode(errors="replace"))

    def _end(self, cause: str) -> None:
        """End this rank, or let its exception do so; without a cause that exception is one."""
        if self._asked is not None:
            if cause:
                self._decide(cause)
            self._answered.set()
            return
        self._decide(cause)
        self._beat(time.monotonic())
        with contextlib.suppress(RuntimeError, ValueError, OSError):
            faulthandler.dump_traceback(2, all_threads=True)
        threading.Thread(target=_abort_groups, name="hybridep-abort", daemon=True).start()
        self._exit_later(END_S + 1.0, EXIT_STATUS)
        deadline = time.monotonic() + END_S
        while time.monotonic() < deadline:  # others hear the verdict meanwhile
            self._mesh.poll(0.1)
        self._exit(EXIT_STATUS)

    def _exit_later(self, limit_s: float, status: int) -> None:
        """Whatever becomes of the thread that calls."""
        timer = threading.Timer(limit_s, self._exit, [status])
        timer.daemon = True
        timer.start()

    def _exit(self, status: int) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(ValueError, OSError):
                stream.flush()
        os._exit(status)

    # -- exceptions of the main thread ------------------------------------------------------------------------------

    def _on_exception(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """In the place of sys.excepthook: what another rank's end has caused is preceded by what that was."""
        if self._pid != os.getpid():
            self._hook(kind, error, trace)
            return
        if not self._cause and _follows_from_others(error):
            self._asked = time.monotonic(), isinstance(error, CommunicationError)
            self._nudge()
            self._answered.wait(WORD_S + 2 * GRACE_S)
        self._answered.set()
        if not self._cause:
            said = str(error).strip().splitlines()
            text = f"{kind.__name__}: {said[0] if said else ''}"[: 2 * MAX_TEXT]
            self._tell(Fact(self.rank, "failed", text))
        self._nudge()
        self._hook(kind, error, trace)
        if self._cause:
            self._exit_later(END_S, EXIT_STATUS)
        else:
            self._exit_later(OWN_END_S, 1)


def _follows_from_others(error: BaseException | None) -> bool:
    """True for what a rank raises when another one is gone, or does not come in time."""
    while error is not None:
        if isinstance(error, CommunicationError | AgreementError | dist.DistError):
            return True
        words = ("gloo", "nccl", "connection", "process group", "timed out", "aborted", "socket", "store")
        if isinstance(error, RuntimeError | OSError) and any(word in str(error).lower() for word in words):
            return True
        error = error.__cause__ or error.__context__
    return False


def _abort_groups() -> None:
    """Let the main thread go from whatever collective it waits in."""
    for group in list(dist.distributed_c10d._world.pg_map):
        with contextlib.suppress(RuntimeError, AttributeError, TypeError):
            group.abort()


def _own_host() -> str:
    """The address by which other ranks reach this one."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        device = os.environ.get(name, "").split(",")[0].lstrip("^=")
        for one in psutil.net_if_addrs().get(device, ()):
            if one.family == socket.AF_INET:
                return str(one.address)
    master = os.environ.get("MASTER_ADDR", "127.0.0.1")
    with contextlib.suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(master, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    return "127.0.0.1"
