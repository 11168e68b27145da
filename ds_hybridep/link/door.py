# SPDX-License-Identifier: Apache-2.0
"""Where a link's connections come from: it takes those that others make, and makes those to its peers."""

import errno
import os
import socket
import ssl
import time
from collections.abc import Mapping
from selectors import EVENT_READ, EVENT_WRITE, BaseSelector
from typing import Any

from ds_hybridep.link.options import Resolved
from ds_hybridep.link.peer import BLOCKED, Peer, State
from ds_hybridep.link.trust import EARLY, JOB, LARGE, RESTARTED, SAME_TLS, WELCOME, Claims, Refused, Steps
from ds_hybridep.link.trust import accept as accept_steps
from ds_hybridep.link.trust import dial as dial_steps

MAX_STRANGERS = 64  # connections that others have made and whose handshake has not ended
HANDSHAKE_S = 10.0  # the longest handshake


class Attempt:
    """A connection before its handshake has ended; runs the handshake's steps as bytes come in.

    steps: from `trust`; None only finds out whether the port takes connections.
    peer, index, place: who is dialled, as in `Door.dial`; None for a connection that was accepted.
    """

    def __init__(
        self, door: "Door", sock: socket.socket, steps: Steps | None,
        peer: Peer | None = None, *, index: int = 0, place: Any = None,
    ) -> None:  # fmt: skip
        self.began_at, self.peer, self._index, self._door = time.monotonic(), peer, index, door
        self._is_connecting, self._steps = peer is not None, steps
        self._says, self._need = (b"", 0) if steps is None else next(steps)
        self._got = b""
        sock.setblocking(False)
        self.sock: socket.socket = sock
        if steps is not None and (context := door.contexts[peer is None]) is not None:
            self.sock = context.wrap_socket(sock, server_side=peer is None, do_handshake_on_connect=False)
        door.selector.register(self.sock, EVENT_WRITE, self.on_event)
        self._refusal = 0 if peer is None else self.sock.connect_ex(place)
        door.attempts.append(self)

    def on_event(self, _: int) -> None:
        """Go as far as the socket allows."""
        try:
            theirs = self._go()
        except (BlockingIOError, ssl.SSLWantReadError):
            self._door.selector.modify(self.sock, EVENT_READ, self.on_event)
        except ssl.SSLWantWriteError:
            self._door.selector.modify(self.sock, EVENT_WRITE, self.on_event)
        except (OSError, Refused) as error:
            is_told = self._is_connecting or isinstance(error, Refused)
            self.end(error if is_told else ConnectionError(f"{error}; {SAME_TLS}"))
        else:
            self.end(None, theirs)

    def end(self, error: Exception | None, theirs: Claims | None = None) -> None:
        """Hand the connection over, or close it."""
        self._door.selector.unregister(self.sock)
        self._door.attempts.remove(self)
        if self.peer is not None and error is None:
            self.peer.note_reached(self._index)
        if theirs is not None and (self.peer is None or self._door.is_same(self.peer, theirs)):
            peer = self.peer or self._door.peers.get(theirs.rank)  # None: a caller has just given it up
            if peer is not None:
                return peer.attach(theirs.lane, self.sock, theirs.received)
        self.sock.close()
        if self.peer is not None and error is not None:
            is_refused = isinstance(error, ConnectionRefusedError)
            self.peer.note_trouble(self._index, f"dialling it: {error}", is_refused=is_refused)
            if isinstance(error, Refused) and error.args != (EARLY,):
                kind = BLOCKED if error.args == (LARGE,) else State.GONE.value
                self.peer.end(f"{self.peer.who} has refused the connection: {error}", kind)

    def _go(self) -> Claims | None:
        if self._is_connecting and self.peer is not None:
            number = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if self._refusal != errno.EINPROGRESS:
                number = number or self._refusal
            if number:
                raise OSError(number, os.strerror(number))
            self._is_connecting = False
            self.peer.note_answer()
        if self._steps is None:
            return None
        if isinstance(self.sock, ssl.SSLSocket):
            self.sock.do_handshake()
        while True:
            if self._says and self.sock.send(self._says) < len(self._says):  # a new connection has room for it
                raise ConnectionError("it takes no bytes")
            self._says = b""
            while len(self._got) < self._need:
                if not (part := self.sock.recv(self._need - len(self._got))):
                    raise ConnectionError("it closed the connection in the handshake")
                self._got += part
            got, self._got = self._got, b""
            try:
                self._says, self._need = self._steps.send(got)
            except StopIteration as end:
                return Claims(*end.value)


class Door:
    """The listening port of one rank, and handshakes under way; for the link's thread.

    instance: the name of the link alone.
    contexts: for TLS, to dial and to accept with.
    peers: by rank, those that are known.
    """

    def __init__(
        self,
        listener: socket.socket,
        selector: BaseSelector,
        peers: Mapping[int, Peer],
        *,
        rank: int,
        world_size: int,
        instance: bytes,
        secret: bytes,
        contexts: tuple[ssl.SSLContext | None, ssl.SSLContext | None],
    ) -> None:
        self._rank, self._world_size, self._secret, self._instance = rank, world_size, secret, instance
        self._listener, self.contexts, self.selector, self.peers = listener, contexts, selector, peers
        self.attempts: list[Attempt] = []
        self._is_deaf = False
        self.port: int = listener.getsockname()[1]
        self.selector.register(listener, EVENT_READ, self._accept)

    def dial(self, place: Resolved, peer: Peer, index: int) -> None:
        """Connect a lane of a peer; index -1 only tries whether its port takes connections."""
        steps = None
        if index >= 0:
            received = peer.lanes[index].received
            ours = (self._rank, peer.rank, self._world_size, index, len(peer.lanes), self._instance, received)
            steps = dial_steps(self._secret, Claims(*ours))

        try:
            Attempt(self, socket.socket(place[0], socket.SOCK_STREAM), steps, peer, index=index, place=place[1])
        except OSError as error:  # no descriptor is free
            peer.note_trouble(index, str(error))

    def tick(self, now: float) -> None:
        """End handshakes that take too long."""
        if self._is_deaf:
            self.selector.register(self._listener, EVENT_READ, self._accept)
            self._is_deaf = False
        for attempt in [one for one in self.attempts if now - one.began_at > HANDSHAKE_S]:
            attempt.end(TimeoutError(f"no handshake in {HANDSHAKE_S:g} s; {SAME_TLS}"))

    def close(self) -> None:
        for attempt in self.attempts:
            attempt.sock.close()
        self._listener.close()

    def _accept(self, _: int) -> None:
        try:
            sock, _address = self._listener.accept()
        except OSError:  # it has gone again, or no descriptor is free
            self.selector.unregister(self._listener)
            self._is_deaf = True  # until the next tick
            return
        strangers = [one for one in self.attempts if one.peer is None]
        if len(strangers) >= MAX_STRANGERS:
            strangers[0].end(ConnectionError("too many connections at once"))
        try:
            sock.getpeername()  # raises an error if the other side has closed the connection already, as TLS would
            Attempt(self, sock, accept_steps(self._secret, self._admit))
        except (OSError, ValueError):
            sock.close()

    def _admit(self, theirs: Claims) -> tuple[int, Claims]:
        """Judge what a dialler claims who knows the secret."""
        ours = theirs._replace(rank=self._rank, to=theirs.rank, world_size=self._world_size, instance=self._instance)
        if theirs.world_size != self._world_size or theirs.to != self._rank or theirs.rank <= self._rank:
            return JOB, ours
        if (peer := self.peers.get(theirs.rank)) is None:
            return EARLY, ours
        if theirs.lane >= theirs.num_lanes or theirs.num_lanes != len(peer.lanes):
            return JOB, ours
        if peer.has_left and peer.instance != theirs.instance:
            return EARLY, ours  # it has a new link; this rank will connect with it again
        if not self.is_same(peer, theirs):
            return LARGE if peer.is_blocked else RESTARTED, ours
        peer.lanes[theirs.lane].drop("the other side has dialled again")
        return WELCOME, ours._replace(received=peer.lanes[theirs.lane].received)

    def is_same(self, peer: Peer, theirs: Claims) -> bool:
        """Return False if the peer is gone, also because another process has taken its place."""
        if not peer.is_begun:
            peer.instance = theirs.instance
        if peer.instance != theirs.instance:
            peer.end("its process was restarted, and what it had sent and received is lost")
        return peer.state is not State.GONE
