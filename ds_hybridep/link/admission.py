# SPDX-License-Identifier: Apache-2.0
"""Which connection is whose: what ranks claim in the handshake, and what becomes of it."""

import socket
import ssl
import struct
from collections.abc import Mapping
from functools import partial
from selectors import BaseSelector
from typing import NamedTuple

from ds_hybridep.link.door import Door
from ds_hybridep.link.options import Resolved
from ds_hybridep.link.peer import BLOCKED, Peer, State
from ds_hybridep.link.trust import WELCOME, Protocol, Refused, accept, dial

JOB, RESTARTED, EARLY, LARGE = range(3, 7)  # verdicts


class Claims(NamedTuple):
    """What a rank says about itself and this connection."""

    rank: int
    to: int  # rank that it means to talk to
    world_size: int
    lane: int  # which of the pair's connections this is
    num_lanes: int
    instance: bytes  # 16 random bytes, of this link alone
    received: int  # DATA frames that it has got in this lane


LINK = Protocol(
    b"hybridep link 1\n",
    Claims,
    struct.Struct("!IIIHH16sQ"),
    {
        JOB: "the two differ in ranks, number of ranks or number of connections; is another job at this address?",
        RESTARTED: "one of the two was restarted, and what it had sent and received is lost",
        EARLY: "it does not expect this rank yet",
        LARGE: "its large packets have not arrived, though small ones do: is the MTU too large somewhere on the way?",
    },
)


class Admission:
    """Gives peers their connections; for the link's thread.

    ours: what this rank claims, but for what belongs to one connection.
    contexts: for TLS, to dial and to accept with.
    peers: by rank, those that are known.
    """

    def __init__(
        self, listener: socket.socket, selector: BaseSelector, peers: Mapping[int, Peer], *, ours: Claims,
        secret: bytes, contexts: tuple[ssl.SSLContext | None, ssl.SSLContext | None],
    ) -> None:  # fmt: skip
        self._peers, self._ours, self._secret = peers, ours, secret
        self.door = Door(selector, contexts)
        self.port = self.door.open(listener, lambda: accept(secret, LINK, self._judge), self._accepted)

    def dial(self, place: Resolved, peer: Peer, index: int) -> None:
        """Connect a lane of a peer; index -1 only tries whether its port takes connections."""
        steps = None
        if index >= 0:
            ours = self._ours._replace(to=peer.rank, lane=index, num_lanes=len(peer.lanes))
            steps = dial(self._secret, LINK, ours._replace(received=peer.lanes[index].received))
        on_end = partial(self._dialled, peer, index)
        try:
            sock = socket.socket(place[0], socket.SOCK_STREAM)
            self.door.begin(sock, steps, on_end, place=place[1], on_answer=peer.note_answer)
        except OSError as error:  # no descriptor is free
            peer.note_trouble(index, str(error))

    def _dialled(
        self, peer: Peer, index: int, sock: socket.socket, theirs: Claims | None, error: Exception | None
    ) -> bool:
        if error is None:
            peer.note_reached(index)
            return theirs is not None and self._hand_over(peer, sock, theirs)
        peer.note_trouble(index, f"dialling it: {error}", is_refused=isinstance(error, ConnectionRefusedError))
        if isinstance(error, Refused) and error.verdict != EARLY:
            kind = BLOCKED if error.verdict == LARGE else State.GONE.value
            peer.end(f"{peer.who} has refused the connection: {error}", kind)
        return False

    def _accepted(self, sock: socket.socket, theirs: Claims | None, _: Exception | None) -> bool:
        peer = None if theirs is None else self._peers.get(theirs.rank)  # None: a caller has just given it up
        return theirs is not None and peer is not None and self._hand_over(peer, sock, theirs)

    def _hand_over(self, peer: Peer, sock: socket.socket, theirs: Claims) -> bool:
        if not self._is_same(peer, theirs):
            return False
        peer.attach(theirs.lane, sock, theirs.received)
        return True

    def _judge(self, theirs: Claims) -> tuple[int, Claims]:
        """Judge what a dialler claims who knows the secret."""
        ours = self._ours._replace(to=theirs.rank, lane=theirs.lane, num_lanes=theirs.num_lanes)
        if theirs.world_size != ours.world_size or theirs.to != ours.rank or theirs.rank <= ours.rank:
            return JOB, ours
        if (peer := self._peers.get(theirs.rank)) is None:
            return EARLY, ours
        if theirs.lane >= theirs.num_lanes or theirs.num_lanes != len(peer.lanes):
            return JOB, ours
        if peer.has_left and peer.instance != theirs.instance:
            return EARLY, ours  # it has a new link; this rank will connect with it again
        if not self._is_same(peer, theirs):
            return LARGE if peer.is_blocked else RESTARTED, ours
        peer.lanes[theirs.lane].drop("the other side has dialled again")
        return WELCOME, ours._replace(received=peer.lanes[theirs.lane].received)

    @staticmethod
    def _is_same(peer: Peer, theirs: Claims) -> bool:
        """Return False if the peer is gone, also because another process has taken its place."""
        if not peer.is_begun:
            peer.instance = theirs.instance
        if peer.instance != theirs.instance:
            peer.end("its process was restarted, and what it had sent and received is lost")
        return peer.state is not State.GONE
