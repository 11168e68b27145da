# SPDX-License-Identifier: Apache-2.0
"""The link of one rank to others: one listening port, one thread, and the channels of its callers."""

import atexit
import contextlib
import logging
import os
import selectors
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence

from ds_hybridep.errors import CommunicationError, ConfigError
from ds_hybridep.link.attempt import HANDSHAKE_S, Address, Attempt
from ds_hybridep.link.lane import Lane
from ds_hybridep.link.messages import Inbox, Receive, Send
from ds_hybridep.link.options import Options
from ds_hybridep.link.peer import BULK, FAILED, LEFT, SILENT_S, Fact, Peer, Statistics
from ds_hybridep.link.trust import LEAST_SECRET_BYTES, TLS, Claims, Refused, Steps, Verdict, accept, dial
from ds_hybridep.link.wire import FACT_BYTES, Data, Frame, Kind, stream_of, view_of

logger = logging.getLogger(__name__)

MAX_STRANGERS = 64  # connections whose handshake has not ended
TICK_S = 0.05  # between looks at what is due
LEAVE_S = 1.0  # how long the others may take to hear of this rank's end
_FINAL = (Verdict.SECRET, Verdict.PROTOCOL, Verdict.JOB, Verdict.RESTARTED)
_links: "weakref.WeakSet[Link]" = weakref.WeakSet()


class Link:
    """Framed messages between this rank and its peers.

    Of two ranks the higher one dials: the ranks near rank 0 take connections anyway, for the job's rendezvous.

    Args:
        secret: of the job, the same on all ranks; at least 16 bytes.
        host: address of this rank as others reach it.
        ports: range to listen in, both ends included; None takes any free port.
        timeout_s: a peer of which nothing is heard for so long is gone.
        early_bytes: bound, per peer, for messages that no receive waits for.  Past it a connection is not read, and TCP
            slows the sender down, unless this rank waits for anything of that peer.
        on_change: called in the link's thread with each `Fact`; it must not block.

    Raises CommunicationError if no port is free, ConfigError if the secret is short or TLS files cannot be used.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        secret: bytes,
        host: str,
        ports: tuple[int, int] | None = None,
        tls: TLS | None = None,
        timeout_s: float,
        early_bytes: int = 256 * 2**20,
        on_change: Callable[[Fact], None] | None = None,
    ) -> None:
        if len(secret) < LEAST_SECRET_BYTES:
            raise ConfigError(f"the secret of the link has {len(secret)} bytes; give at least {LEAST_SECRET_BYTES}")
        self.rank, self.world_size, self.timeout_s = rank, world_size, timeout_s
        self._secret, self._early_bytes, self._on_change = secret, early_bytes, on_change
        self._contexts = (None, None) if tls is None else tls.contexts()
        self._instance = os.urandom(16)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._peers: dict[int, Peer] = {}
        self._places: dict[int, tuple[int, tuple[object, ...]]] = {}  # address family and address of each peer
        self._dirty: set[Peer] = set()  # with something to do for the thread
        self._facts: list[Fact] = []
        self._told: list[bytes] = []  # own announcements
        self._num_told = 0  # of which the thread knows
        self._strangers: list[Attempt] = []
        self._ends_at: float | None = None  # when waiting for acknowledgements ends
        self._is_closed = False
        self._listener = _listen(host, ports)
        self.address: Address = (host, self._listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._wakes = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._wakes, selectors.EVENT_READ, lambda _: os.eventfd_read(self._wakes))
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._thread = threading.Thread(target=self._run, name="hybridep-link", daemon=True)
        _links.add(self)
        atexit.register(self._at_exit)

    # -- for callers ------------------------------------------------------------------------------------------------

    def connect(self, addresses: Mapping[int, Address], options: Options | None = None) -> None:
        """Connect to peers, given as rank -> `Link.address` of that rank; may be called again for others.

        Raises CommunicationError if one is gone or not connected after `timeout_s`.
        """
        options = options or Options()
        with contextlib.closing(socket.socket()) as trial:
            options.apply(trial)
        new = []
        for rank, (host, port) in addresses.items():
            if rank == self.rank:
                continue
            try:
                self._places[rank] = _resolve(host, port)
            except OSError as error:
                raise CommunicationError(f"rank {self.rank}: the address {host} of rank {rank}: {error}") from error
            who = f"rank {rank} ({host}:{port})"
            peer = Peer(
                rank, who, self._lock, options, self.timeout_s, self.rank > rank, self._dial, self._note,
                Inbox(self._early_bytes),
            )  # fmt: skip
            peer.lanes += [Lane(index, peer, self._selector) for index in range(2 * options.connections)]
            new.append(peer)
        with self._changed:
            self._check_open()
            self._peers.update({peer.rank: peer for peer in new})
            if not self._thread.is_alive():
                self._thread.start()
            self._changed.wait_for(lambda: all(peer.is_connected() or peer.cause for peer in new), self.timeout_s)
        for peer in new:
            if not peer.is_connected():
                cause = peer.cause or f"no connection after {self.timeout_s:g} s; last, {peer.last_trouble}"
                raise CommunicationError(f"rank {self.rank}: connecting with {peer.who} failed: {cause}")

    def channel(self, name: str, ranks: Sequence[int], *, generation: int = 0, priority: int = BULK) -> "Channel":
        """Return a channel; all its ranks must give the same name, ranks and generation.  priority: URGENT or BULK."""
        return Channel(self, name, tuple(ranks), generation, priority)

    def announce(self, kind: str, text: str) -> None:
        """Tell all peers something, now and after resets; with FAILED or LEFT, this rank is gone for them."""
        with self._lock:
            self._told.append(f"{kind}\0{text}".encode()[:FACT_BYTES])
        self._wake()

    def facts(self) -> list[Fact]:
        """Return what peers have announced, and which are gone."""
        return list(self._facts)

    def statistics(self) -> dict[int, Statistics]:
        return {rank: peer.statistics() for rank, peer in self._peers.items()}

    def close(self, flush_s: float = 5.0, *, kind: str = LEFT, text: str = "it has closed its link") -> None:
        """Wait up to `flush_s` until all that was sent is acknowledged, tell the peers, and end the thread."""
        atexit.unregister(self._at_exit)
        if self._is_closed:
            return
        if not self._thread.is_alive():
            self._end()
            return
        self._ends_at, self._last_words = time.monotonic() + flush_s, (kind, text)
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join(flush_s + 2 * LEAVE_S)

    def peer(self, rank: int) -> Peer:
        self._check_open()
        if rank not in self._peers:
            raise CommunicationError(
                f"rank {self.rank}: the link is not connected with rank {rank}; call connect first"
            )
        return self._peers[rank]

    def note_work(self, peer: Peer) -> None:
        """Let the thread look at what was asked of a peer."""
        self._dirty.add(peer)
        self._wake()

    def _check_open(self) -> None:
        if self._is_closed:
            raise CommunicationError(
                f"rank {self.rank}: the link of this process was closed, or belongs to its parent"
            )

    def _wake(self) -> None:
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wakes, 1)

    def _at_exit(self) -> None:
        error = getattr(sys, "last_value", None)  # the interpreter sets it for an exception that nobody caught
        if error is None:
            self.close(text="its script has ended")
        else:
            self.close(kind=FAILED, text=f"{type(error).__name__}: {error}")

    # -- the thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        cause = "the link was closed"
        try:
            self._loop()
        except BaseException as error:  # noqa: BLE001 (else waits would never end)
            cause = f"the link's thread has failed: {type(error).__name__}: {error}"
            logger.exception("rank %d: the link's thread has failed", self.rank)
        finally:
            for peer in self._peers.values():
                peer.end(cause)
            self._end()

    def _loop(self) -> None:
        ticked_at = time.monotonic()
        while not self._has_left():
            for key, mask in self._selector.select(TICK_S):
                if key.fd in self._selector.get_map():  # another event may have closed it
                    key.data(mask)
            while self._dirty:
                self._dirty.pop().pump()
            if self._num_told < len(self._told):
                begin, self._num_told = self._num_told, len(self._told)
                for peer in self._peers.values():
                    self._tell(peer, begin)
            now = time.monotonic()
            if now - ticked_at < TICK_S:
                continue
            if (pause_s := now - ticked_at) > SILENT_S / 2:  # this process was stopped: the silence was its own
                for peer in self._peers.values():
                    for lane in peer.lanes:
                        lane.heard_at += pause_s
            ticked_at = now
            for attempt in [one for one in self._strangers if now - one.began_at > HANDSHAKE_S]:
                attempt.fail(TimeoutError(f"the handshake took longer than {HANDSHAKE_S:g} s"))
            for peer in list(self._peers.values()):
                peer.tick(now)

    def _has_left(self) -> bool:
        """Return True once this rank wants to end and its peers know."""
        if self._ends_at is None:
            return False
        now = time.monotonic()
        if self._last_words is not None:
            if now < self._ends_at and any(peer.has_outgoing() for peer in self._peers.values()):
                return False
            self.announce(*self._last_words)
            self._last_words, self._ends_at = None, now + LEAVE_S
        return now > self._ends_at or not any(lane.sock for peer in self._peers.values() for lane in peer.lanes)

    def _tell(self, peer: Peer, begin: int) -> None:
        for number, said in list(enumerate(self._told))[begin:]:
            peer.lanes[0].tell(Frame(Kind.FACT, len(said), sequence=number), said)
        peer.lanes[0].flush()

    def _note(self, fact: Fact) -> None:
        with self._changed:
            if fact.kind not in ("alive", "silent"):
                self._facts.append(fact)
            self._changed.notify_all()
        if self._on_change is not None:
            self._on_change(fact)

    # -- connections ------------------------------------------------------------------------------------------------

    def _accept(self, _: int) -> None:
        try:
            sock, _address = self._listener.accept()
        except OSError:  # it has gone again, or there are too many descriptors
            return
        if len(self._strangers) >= MAX_STRANGERS:
            self._strangers[0].fail(ConnectionError("too many connections"))
        self._strangers.append(
            Attempt(self._selector, sock, accept(self._secret, self._admit), self._contexts[1], self._on_accepted)
        )

    def _admit(self, theirs: Claims) -> tuple[Verdict, Claims]:
        ours = Claims(self.rank, theirs.rank, self.world_size, theirs.lane, theirs.num_lanes, self._instance, 0)
        if theirs.world_size != self.world_size or theirs.to != self.rank or theirs.rank <= self.rank:
            return Verdict.JOB, ours
        if (peer := self._peers.get(theirs.rank)) is None:
            return Verdict.EARLY, ours
        if theirs.lane >= theirs.num_lanes or theirs.num_lanes != len(peer.lanes):
            return Verdict.JOB, ours
        if not self._is_same(peer, theirs.instance):
            return Verdict.RESTARTED, ours
        lane = peer.lanes[theirs.lane]
        lane.drop("the other side has dialled again")
        return Verdict.WELCOME, ours._replace(received=lane.received)

    def _is_same(self, peer: Peer, instance: bytes) -> bool:
        """Return False if the peer is gone, also because another process has taken its place."""
        peer.instance = peer.instance or instance
        if peer.instance != instance:
            peer.end("its process was restarted, and what it had sent and received is lost")
        return not peer.cause

    def _on_accepted(self, attempt: Attempt, sock: socket.socket, theirs: Claims | None, error: object) -> None:
        self._strangers.remove(attempt)
        if theirs is not None:
            self._attach(self._peers[theirs.rank], theirs, sock)

    def _dial(self, peer: Peer, index: int) -> None:
        family, place = self._places[peer.rank]
        steps: Steps | None = None
        if index >= 0:
            received = peer.lanes[index].received
            steps = dial(
                self._secret,
                Claims(self.rank, peer.rank, self.world_size, index, len(peer.lanes), self._instance, received),
            )

        def on_end(attempt: Attempt, sock: socket.socket, theirs: Claims | None, error: Exception | None) -> None:
            self._strangers.remove(attempt)
            if error is not None:
                peer.note_trouble(index, f"dialling it: {error}", is_refused=isinstance(error, ConnectionRefusedError))
                if isinstance(error, Refused) and error.verdict in _FINAL:
                    peer.end(f"it refused the connection: {error}")
                return
            peer.note_reached(index)
            if theirs is None:
                sock.close()
            elif self._is_same(peer, theirs.instance):
                self._attach(peer, theirs, sock)
            else:
                sock.close()

        sock = socket.socket(family, socket.SOCK_STREAM)
        self._strangers.append(Attempt(self._selector, sock, steps, self._contexts[0], on_end, place))

    def _attach(self, peer: Peer, theirs: Claims, sock: socket.socket) -> None:
        lane = peer.lanes[theirs.lane]
        peer.options.apply(sock)
        try:
            lane.attach(sock, theirs.received)
        except ConnectionError as error:
            sock.close()
            peer.end(str(error))
            return
        if lane.index == 0:
            self._tell(peer, 0)
        peer.judge(time.monotonic())
        with self._changed:
            self._changed.notify_all()

    def _end(self) -> None:
        self._is_closed = True
        for attempt in list(self._strangers):
            attempt.sock.close()
        self._listener.close()
        self._selector.close()
        os.close(self._wakes)

    def forget(self) -> None:
        """In a forked process: close its copies of the connections, which belong to the parent."""
        self._lock = threading.Lock()  # the parent's thread may have held it
        atexit.unregister(self._at_exit)
        if self._is_closed:
            return
        for lane in (lane for peer in self._peers.values() for lane in peer.lanes):
            if lane.sock is not None:
                lane.sock.close()
        self._end()


class Channel:
    """Messages of one purpose between some ranks.

    Sends and receives between two ranks match in the order in which they are called, for each kind apart.
    """

    def __init__(self, link: Link, name: str, ranks: tuple[int, ...], generation: int, priority: int) -> None:
        self.link, self.name, self.ranks, self.generation, self.priority = link, name, ranks, generation, priority
        self._streams: dict[str, bytes] = {}

    def send(self, rank: int, data: Data, *, kind: str = "") -> Send:
        """Send the bytes of a contiguous CPU tensor or a buffer; they must not change before the handle is done."""
        peer, stream, what = self._find(rank, kind, "to")
        send = peer.post_send(stream, what, view_of(data), self.priority)
        self.link.note_work(peer)
        return send

    def receive(self, rank: int, into: Data | None = None, *, max_bytes: int = 0, kind: str = "") -> Receive:
        """Receive the next message of a kind, into memory of the caller or new memory of up to `max_bytes`.

        It may be shorter: the handle's `wait` returns a view of what has come.  `into` is filled once `wait` returns.
        """
        peer, stream, what = self._find(rank, kind, "from")
        place = None if into is None else view_of(into)
        receive = peer.post_receive(stream, what, place, max_bytes if place is None else len(place))
        self.link.note_work(peer)
        return receive

    def _find(self, rank: int, kind: str, direction: str) -> tuple[Peer, bytes, str]:
        if (stream := self._streams.get(kind)) is None:
            stream = self._streams[kind] = stream_of(self.name, self.ranks, self.generation, kind)
        peer = self.link.peer(rank)
        return (
            peer,
            stream,
            f"rank {self.link.rank}: a message '{kind}' on channel '{self.name}' {direction} {peer.who}",
        )


def _resolve(host: str, port: int) -> tuple[int, tuple[object, ...]]:
    family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return family, place


def _listen(host: str, ports: tuple[int, int] | None) -> socket.socket:
    """Return a listening socket on the first free port."""
    low, high = ports or (0, 0)
    for port in range(low, high + 1):
        family, place = _resolve(host, port)
        sock = socket.socket(family, socket.SOCK_STREAM)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(place)
            sock.listen(MAX_STRANGERS)
        except OSError as error:
            sock.close()
            trouble = error
        else:
            sock.setblocking(False)
            return sock
    raise CommunicationError(f"link: cannot listen on {host}, ports {low} to {high}: {trouble}; give other ports")


def _in_child() -> None:
    for link in list(_links):
        link.forget()


os.register_at_fork(after_in_child=_in_child)
