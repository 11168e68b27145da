# SPDX-License-Identifier: Apache-2.0
"""Where a link's connections come from: it takes those that others make, and makes those to its peers."""

import os
import selectors
import socket
import ssl

from ds_hybridep.errors import CommunicationError
from ds_hybridep.link import trust
from ds_hybridep.link.peer import Peer, State
from ds_hybridep.link.trust import Attempt, Claims, Refused

MAX_STRANGERS = 64  # connections that others have made and whose handshake has not ended
HANDSHAKE_S = 10.0  # the longest handshake
Address = tuple[str, int]
Resolved = tuple[int, tuple[object, ...]]  # address family and address, for a socket


class Door:
    """The listening port of one rank, and handshakes under way; for the link's thread.

    contexts: for TLS, to dial and to accept with.
    peers: by rank; the caller adds to it.
    """

    def __init__(
        self, rank: int, world_size: int, secret: bytes, contexts: tuple[ssl.SSLContext | None, ssl.SSLContext | None],
        listener: socket.socket, selector: selectors.BaseSelector, peers: dict[int, Peer],
    ) -> None:  # fmt: skip
        self._rank, self._world_size, self._secret, self._contexts = rank, world_size, secret, contexts
        self._listener, self._selector, self._peers = listener, selector, peers
        self.instance = os.urandom(16)
        self.attempts: list[Attempt] = []
        self._is_deaf = False
        self.port: int = listener.getsockname()[1]
        selector.register(listener, selectors.EVENT_READ, self._accept)

    def dial(self, place: Resolved, peer: Peer, index: int) -> None:
        """Connect a lane of a peer; index -1 only tries whether its port takes connections."""
        steps = None
        if index >= 0:
            received = peer.lanes[index].received
            ours = (self._rank, peer.rank, self._world_size, index, len(peer.lanes), self.instance, received)
            steps = trust.dial(self._secret, Claims(*ours))

        def on_end(attempt: Attempt, theirs: Claims | None, error: Exception | None) -> None:
            self.attempts.remove(attempt)
            if error is not None:
                peer.note_trouble(index, f"dialling it: {error}", is_refused=isinstance(error, ConnectionRefusedError))
                if isinstance(error, Refused) and error.args != (trust.EARLY,):
                    peer.end(f"it refused the connection: {error}")
                return
            peer.note_reached(index)
            if theirs is not None and self._is_same(peer, theirs):
                peer.attach(index, attempt.sock, theirs.received)
            else:
                attempt.sock.close()

        try:
            sock = socket.socket(place[0], socket.SOCK_STREAM)
        except OSError as error:  # no descriptor is free
            peer.note_trouble(index, str(error))
            return
        self.attempts.append(
            Attempt(self._selector, sock, steps, self._contexts[0], on_end, place[1], peer.note_answer)
        )

    def tick(self, now: float) -> None:
        """End handshakes that take too long."""
        if self._is_deaf:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._is_deaf = False
        for attempt in [one for one in self.attempts if now - one.began_at > HANDSHAKE_S]:
            attempt.end(None, TimeoutError(f"no handshake in {HANDSHAKE_S:g} s; {trust.SAME_TLS}"))

    def close(self) -> None:
        for attempt in self.attempts:
            attempt.sock.close()
        self._listener.close()

    def _accept(self, _: int) -> None:
        try:
            sock, _address = self._listener.accept()
        except OSError:  # it has gone again, or no descriptor is free
            self._selector.unregister(self._listener)
            self._is_deaf = True  # until the next tick
            return
        strangers = [one for one in self.attempts if not one.dials]
        if len(strangers) >= MAX_STRANGERS:
            strangers[0].end(None, ConnectionError("too many connections at once"))

        def on_end(attempt: Attempt, theirs: Claims | None, _: Exception | None) -> None:
            self.attempts.remove(attempt)
            if theirs is not None:
                self._peers[theirs.rank].attach(theirs.lane, attempt.sock, theirs.received)

        steps = trust.accept(self._secret, self._admit)
        try:
            sock.getpeername()  # raises an error if the other side has closed the connection already, as TLS would
            self.attempts.append(Attempt(self._selector, sock, steps, self._contexts[1], on_end))
        except (OSError, ValueError):
            sock.close()

    def _admit(self, theirs: Claims) -> tuple[int, Claims]:
        """Judge what a dialler claims who knows the secret."""
        ours = theirs._replace(rank=self._rank, to=theirs.rank, world_size=self._world_size, instance=self.instance)
        if theirs.world_size != self._world_size or theirs.to != self._rank or theirs.rank <= self._rank:
            return trust.JOB, ours
        if (peer := self._peers.get(theirs.rank)) is None:
            return trust.EARLY, ours
        if theirs.lane >= theirs.num_lanes or theirs.num_lanes != len(peer.lanes):
            return trust.JOB, ours
        if peer.has_left and peer.instance != theirs.instance:
            return trust.EARLY, ours  # it has a new link; this rank will connect with it again
        if not self._is_same(peer, theirs):
            return trust.RESTARTED, ours
        peer.lanes[theirs.lane].drop("the other side has dialled again")
        return trust.WELCOME, ours._replace(received=peer.lanes[theirs.lane].received)

    def _is_same(self, peer: Peer, theirs: Claims) -> bool:
        """Return False if the peer is gone, also because another process has taken its place."""
        if not peer.is_begun:
            peer.instance = theirs.instance
        if peer.instance != theirs.instance:
            peer.end("its process was restarted, and what it had sent and received is lost")
        return peer.state is not State.GONE


def resolve(host: str, port: int) -> Resolved:
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise CommunicationError(f"link: the address '{host}' is not found: {error}; give another one") from error
    return family, place


def listen(host: str, ports: tuple[int, int] | None) -> socket.socket:
    """Return a listening socket on the first free port."""
    low, high = ports or (0, 0)
    for port in range(low, high + 1):
        try:
            sock = socket.create_server((host, port), family=resolve(host, port)[0], backlog=MAX_STRANGERS)
        except OSError as error:
            trouble = error
        else:
            sock.setblocking(False)
            return sock
    raise CommunicationError(f"link: cannot listen on {host}, ports {low} to {high}: {trouble}; give other ports")
