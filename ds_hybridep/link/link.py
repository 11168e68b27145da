# SPDX-License-Identifier: Apache-2.0
"""The link of one rank to others: one listening port, one thread, and the channels of its callers."""

import atexit
import logging
import os
import selectors
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence

from ds_hybridep.errors import CommunicationError, ConfigError
from ds_hybridep.link.admission import Admission, Claims
from ds_hybridep.link.door import run_ready
from ds_hybridep.link.messages import BULK, Receive, Send
from ds_hybridep.link.options import Address, LinkOptions, listen
from ds_hybridep.link.peer import FAILED, LEFT, Fact, Peer, PeerStatistics, State
from ds_hybridep.link.trust import LEAST_SECRET_BYTES, TLS
from ds_hybridep.link.wire import FACT_BYTES, Data, stream_of, view_of

logger = logging.getLogger(__name__)
TICK_S = 0.05  # between looks at what is due
LEAVE_S = 1.0  # how long the others may take to hear of this rank's end
LONGEST_FLUSH_S = 60.0  # how long an ending rank waits for a peer that dials again or still acknowledges
_links: "weakref.WeakSet[Link]" = weakref.WeakSet()


class Link:
    """Framed messages between this rank and its peers.

    Of two ranks the higher one dials: the ranks near rank 0 take connections anyway, for the job's rendezvous.

    Args:
        secret: of the job, the same on all ranks; at least 16 bytes.
        host: address of this rank as others reach it.
        ports: range to listen in, both ends included; None takes any free port.
        timeout_s: a peer of which nothing is heard for so long is gone.
        early_bytes: bound, per peer, for messages that nobody has asked for yet.  Past it a connection is not read,
            and TCP slows the sender down, unless this rank waits for anything of that peer.

    Raises CommunicationError if no port is free, ConfigError if the secret is short or TLS files cannot be used.
    """

    def __init__(
        self, rank: int, world_size: int, *, secret: bytes, host: str, ports: tuple[int, int] | None = None,
        tls: TLS | None = None, timeout_s: float, early_bytes: int = 2**28,
    ) -> None:  # fmt: skip
        if len(secret) < LEAST_SECRET_BYTES:
            raise ConfigError(f"the secret of the link has {len(secret)} bytes; give at least {LEAST_SECRET_BYTES}")
        self.rank, self.timeout_s, self.early_bytes = rank, timeout_s, early_bytes
        # Called in the link's thread, with each `Fact` and several times a second; they must not wait.
        self.on_change: Callable[[Fact], None] = lambda fact: None
        self.on_tick: Callable[[], None] = lambda: None
        self.lock = threading.Lock()
        self._changed = threading.Condition(self.lock)
        self.peers: dict[int, Peer] = {}
        self._to_pump: set[Peer] = set()
        self.progress = 0  # a number of the caller's, which heartbeats carry
        self.said: list[bytes] = []  # announcements: a kind, a zero byte and a text
        self.last_words: tuple[str, str] | None = None  # what the peers hear at the end; by default what has ended it
        self._has_said_them = False
        # Exceptions are known by their ids: to hold one would hold frames.
        self._progress, self._seen_id, self._survived_id = 0, id(_last_error()), id(_last_error())
        self._ends_at: float | None = None
        self._ends_by, self.is_closed = 0.0, False
        self.selector = selectors.DefaultSelector()
        contexts = (None, None) if tls is None else tls.contexts()
        self.instance = os.urandom(16)  # a name of this link alone
        self.admission = Admission(
            listen(host, ports), self.selector, self.peers, ours=Claims(rank, 0, world_size, 0, 0, self.instance, 0),
            secret=secret, contexts=contexts,
        )  # fmt: skip
        self.address: Address = (host, self.admission.port)
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.selector.register(self._wakes, selectors.EVENT_READ, lambda _: os.eventfd_read(self._wakes))
        self._thread = threading.Thread(target=self._run, name="hybridep-link", daemon=True)
        _links.add(self)
        atexit.register(self._at_exit)

    # -- for callers ------------------------------------------------------------------------------------------------

    def connect(
        self, addresses: Mapping[int, Address], options: LinkOptions | None = None, *, waits: bool = True
    ) -> None:
        """Connect to peers, given as rank -> `Link.address` of that rank; may be called again for others.

        A rank that is connected already is connected anew.  Raises CommunicationError if one is gone or not connected
        after `timeout_s`, or if the system refuses the options.  One that has left meanwhile is no error here, but for
        whoever receives from it.

        waits: False returns at once; what is sent meanwhile waits for the connection.
        """
        self._check_open()
        options, new = options or LinkOptions(), {}
        if refusal := options.why_refused():
            raise CommunicationError(f"rank {self.rank}: the system refuses {options} ({refusal}); choose others")
        for rank, (host, port) in addresses.items():
            if rank != self.rank:
                new[rank] = Peer(self, rank, (host, port), options, dial=self.admission.dial)
        with self._changed:
            for rank in new.keys() & self.peers.keys():
                self._discard(self.peers[rank], "it was connected anew")
            self.peers |= new
            self._to_pump |= set(new.values())
            if not self._thread.is_alive():
                self._thread.start()
            os.eventfd_write(self._wakes, 1)
            if not waits:
                return
            self._changed.wait_for(
                lambda: all(one.state is State.ALIVE or one.mail.cause or self.is_closed for one in new.values()),
                self.timeout_s,
            )
        for peer in new.values():
            if peer.state is not State.ALIVE and not peer.has_left:
                cause = peer.mail.cause or f"no connection after {self.timeout_s:g} s; last, {peer.last_trouble}"
                self._discard(self.peers.pop(peer.rank), cause)  # so that it may be tried again
                self._wake()
                raise CommunicationError(f"rank {self.rank}: connecting with {peer.who} failed: {cause}")

    def channel(self, name: str, ranks: Sequence[int], *, generation: int = 0, priority: int = BULK) -> "LinkChannel":
        """Return a channel; all its ranks must give the same name, ranks and generation.  priority: URGENT or BULK."""
        return LinkChannel(self, name, tuple(ranks), generation, priority=priority)

    def announce(self, kind: str, text: str) -> None:
        """Tell all peers something, now and after resets; with FAILED or LEFT, this rank is gone for them."""
        said = f"{kind}\0{text}".encode(errors="replace")[:FACT_BYTES]
        if said not in self.said:
            self.said.append(said)
        self._to_pump.update(self.peers.values())
        self._wake()

    def statistics(self) -> dict[int, PeerStatistics]:
        """Return what was exchanged with each peer."""
        return {rank: peer.statistics() for rank, peer in dict(self.peers).items()}

    def close(self, flush_s: float = 5.0, *, waits: bool = True, patience_s: float = LONGEST_FLUSH_S) -> None:
        """Wait up to `flush_s` until all that was sent is acknowledged, tell the peers, and end the thread.

        Receives that are waited for fail at once, in whatever thread; sends too if `flush_s` is 0.
        waits: False returns at once, and leaves this to the thread.
        patience_s: how much longer a peer has whose connection is being made again, or that still acknowledges.
        """
        if self._thread.is_alive():
            if self._ends_at is None:
                self.last_words = self.last_words or (LEFT, "it has closed its link")
                self._ends_by = time.monotonic() + flush_s + (patience_s if flush_s else 0.0)
                self._ends_at = time.monotonic() + flush_s
                for peer in list(self.peers.values()):
                    peer.mail.fail("the link was closed", with_sends=not flush_s)
                with self._changed:
                    self._changed.notify_all()
                self._wake()
            if waits and threading.current_thread() is not self._thread:
                self._thread.join(flush_s + LONGEST_FLUSH_S + 2 * LEAVE_S)
        elif not self.is_closed:
            self._end()

    def failure(self) -> BaseException | None:
        """Return the exception that ends this script, if one is known; not that of a notebook's earlier cell."""
        error = _last_error()
        return None if id(error) == self._survived_id else error

    def peer(self, rank: int) -> Peer:
        """Return a peer; CommunicationError if there is no such peer or the link was closed."""
        self._check_open()
        if rank not in self.peers:
            raise CommunicationError(f"rank {self.rank}: no link was connected with rank {rank}; call connect first")
        return self.peers[rank]

    def pump(self, peer: Peer) -> None:
        """Let the thread look at what was asked of a peer."""
        self._to_pump.add(peer)
        self._wake()

    def _check_open(self) -> None:
        if self.is_closed or self._ends_at is not None:
            raise CommunicationError(f"rank {self.rank}: the link was closed, or belongs to this process's parent")

    def _wake(self) -> None:
        with self.lock:  # once closed, the descriptor's number may be another file's
            if not self.is_closed:
                os.eventfd_write(self._wakes, 1)

    def _discard(self, peer: Peer, cause: str) -> None:
        """Let the thread end a peer."""
        peer.verdict = cause
        self._to_pump.add(peer)

    def _at_exit(self) -> None:
        error = self.failure()
        if error is None:
            self.last_words = self.last_words or (LEFT, "its script has ended")
            return self.close()
        self.last_words = self.last_words or (FAILED, f"{type(error).__name__}: {error}")
        self.close(patience_s=0.0)

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        cause = "the link was closed"
        try:
            ticked_at = time.monotonic()
            while not self._has_left():
                run_ready(self.selector, TICK_S)
                while self._to_pump:
                    self._to_pump.pop().pump()
                if (pause_s := time.monotonic() - ticked_at) >= TICK_S:
                    ticked_at += pause_s
                    self._tick(ticked_at)
        except BaseException as error:
            cause = f"the link's thread has failed: {type(error).__name__}: {error}"
            logger.exception("rank %d: the link's thread has failed", self.rank)
        finally:
            for peer in {*self.peers.values(), *self._to_pump}:
                peer.end(cause)
            self._end()

    def _tick(self, now: float) -> None:
        self.admission.door.tick(now)
        for peer in list(self.peers.values()):
            peer.tick(now)
        newest = id(_last_error())  # before `on_tick` looks at the progress, which may change meanwhile
        self._call(self.on_tick)
        if self._progress != self.progress:  # progress was made after an exception: it has ended no script
            self._progress, self._survived_id = self.progress, self._seen_id
        elif newest != self._survived_id:
            self._survived_id = 0  # another exception may get the same id
        self._seen_id = newest

    def _has_left(self) -> bool:
        """Return True once this rank wants to end and its peers know."""
        if self._ends_at is None:
            return False
        now, peers = time.monotonic(), list(self.peers.values())
        is_late = now > self._ends_by or (now > self._ends_at and not any(one.may_take_more() for one in peers))
        if not self._has_said_them and (is_late or not any(one.mail.has_outgoing() for one in peers)):
            self.announce(*(self.last_words or ("", "")))
            self._has_said_them, self._ends_at = True, now + LEAVE_S
        return self._has_said_them and (now > self._ends_at or all(one.state is State.GONE for one in peers))

    def note(self, fact: Fact) -> None:
        """Pass on what a peer has announced, or what has become of it."""
        with self._changed:
            self._changed.notify_all()
        self._call(self.on_change, fact)

    def _call(self, callback: Callable[..., None], *arguments: Fact) -> None:
        try:
            callback(*arguments)
        except Exception:
            logger.exception("rank %d: a callback of the link failed", self.rank)

    def _end(self) -> None:
        atexit.unregister(self._at_exit)
        with self._changed:
            self.is_closed = True
            os.close(self._wakes)
            self._changed.notify_all()
        self.admission.door.close()
        self.selector.close()

    def forget(self) -> None:
        """In a forked process: close its copies of the connections, which belong to the parent."""
        self.lock = threading.Lock()  # the parent's thread may have held it
        self._changed = threading.Condition(self.lock)
        for peer in self.peers.values():
            peer.mail.lock = self.lock
        if not self.is_closed:
            for sock in (lane.sock for peer in self.peers.values() for lane in peer.lanes):
                if sock is not None:
                    sock.close()
            self._end()


class LinkChannel:
    """Messages of one purpose between some ranks.

    Sends and receives between two ranks match in the order in which they are called, for each kind apart.
    """

    def __init__(self, link: Link, name: str, ranks: tuple[int, ...], generation: int, *, priority: int) -> None:
        self.link, self.name, self.ranks, self.generation, self.priority = link, name, ranks, generation, priority
        self._streams: dict[str, bytes] = {}

    def send(self, rank: int, data: Data, *, kind: str = "") -> Send:
        """Send the bytes of a contiguous CPU tensor or a buffer; they must not change before the handle is done."""
        peer, stream, what = self._find(rank, kind, "to")
        send = peer.mail.send(stream, what, view_of(data), self.priority)
        self.link.pump(peer)
        return send

    def receive(self, rank: int, into: Data | None = None, *, max_bytes: int = 0, kind: str = "") -> Receive:
        """Receive the next message of a kind, into memory of the caller or new memory of up to `max_bytes`.

        It may be shorter: the handle's `wait` returns a view of what has come.  `into` is filled once `wait` returns.
        """
        peer, stream, what = self._find(rank, kind, "from")
        place = None if into is None else view_of(into)
        receive = peer.mail.receive(stream, what, place, max_bytes if place is None else len(place))
        if any(lane.is_paused for lane in peer.lanes):
            self.link.pump(peer)
        return receive

    def unasked(self, rank: int) -> list[str]:
        """Return the kinds of messages that have come from `rank`, and that this rank has not asked for yet."""
        early = self.link.peer(rank).mail.early_streams()
        return [kind for kind, stream in self._streams.items() if stream in early]

    def close(self) -> None:
        """Let all receives fail, and throw away what still comes; what was sent still leaves."""
        for rank in self.ranks:
            if (peer := self.link.peers.get(rank)) is not None:
                for stream in list(self._streams.values()):
                    peer.mail.cancel(stream)

    def _find(self, rank: int, kind: str, word: str) -> tuple[Peer, bytes, str]:
        if (stream := self._streams.get(kind)) is None:
            stream = self._streams[kind] = stream_of(self.name, self.ranks, self.generation, kind)
        peer = self.link.peer(rank)
        return peer, stream, f"rank {self.link.rank}: a message '{kind}' on channel '{self.name}' {word} {peer.who}"


def _last_error() -> BaseException | None:
    return getattr(sys, "last_value", None)  # which the interpreter sets to what nobody catches


def _in_child() -> None:
    for link in list(_links):
        link.forget()


os.register_at_fork(after_in_child=_in_child)
