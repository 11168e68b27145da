# SPDX-License-Identifier: Apache-2.0
"""The other end of a link: its lanes, when they are dialled, and whether it lives."""

import socket
import time
from collections import defaultdict
from collections.abc import Callable
from enum import Enum
from functools import partial
from math import inf
from selectors import BaseSelector
from threading import Lock
from typing import NamedTuple, Protocol

from ds_hybridep.link.lane import BEAT_S, Lane, Lifeline
from ds_hybridep.link.messages import BULK, URGENT, Mail
from ds_hybridep.link.options import Address, LinkOptions, resolve, tcp_info
from ds_hybridep.link.wire import Frame, Kind

SILENT_S = 5.0  # a connection is given up if nothing comes for so long; a peer is then silent
TRIAL_S = 1.0  # how long the start waits for the answer of a port that only the other side needs to reach
REFUSED_S = 1.0  # a peer is gone if a port that has taken connections refuses them for so long
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0  # before dialling again
FAILED, LEFT = "failed", "left"  # announcements with which a peer is gone
LOST = "lost"  # what is said of a peer that is gone because it was silent for too long
BLOCKED = "blocked"  # of one that is gone, though it lives, because large packets do not arrive; also an announcement


class State(str, Enum):
    """How a peer is."""

    ALIVE = "alive"
    SILENT = "silent"  # nothing has come for some time
    GONE = "gone"  # for good


class Fact(NamedTuple):
    """What a peer has announced, or what has become of it: then `kind` is LOST, BLOCKED or one of `State`."""

    rank: int
    kind: str
    text: str


class PeerStatistics(NamedTuple):
    """What one peer and this rank have exchanged.  Bytes include frames' headers, but not those of TLS and TCP."""

    state: State
    sent_bytes: int
    received_bytes: int
    round_trip_s: float | None  # TCP's own smoothed measurement
    retransmissions: int  # segments that TCP has sent again
    reconnects: int


class Local(Protocol):
    """What a peer needs of its link: this rank's side, which all peers share."""

    rank: int
    timeout_s: float
    early_bytes: int
    lock: Lock
    progress: int
    said: list[bytes]

    @property
    def selector(self) -> BaseSelector: ...

    def note(self, fact: Fact) -> None: ...


class Peer:
    """One peer, for the link's thread.

    dial: connects the lane of a peer with this number; -1 only tries whether its port takes connections.
    """

    def __init__(
        self, link: Local, rank: int, address: Address, options: LinkOptions, *, dial: Callable[..., None]
    ) -> None:
        self.link, self.rank, self.options = link, rank, options
        self.who = f"rank {rank} ({address[0]}:{address[1]})"
        self.mail = Mail(link.lock, link.early_bytes, options.connections)
        self._dials, self._dial = link.rank > rank, partial(dial, resolve(*address))
        priorities = [URGENT] * options.connections + [BULK] * options.connections
        make = partial(Lane, mail=self.mail, selector=link.selector, on_frame=self.told, on_drop=self.dropped)
        self._messages = [make(index, priority) for index, priority in enumerate(priorities)]
        lifeline = Lifeline(len(priorities), BULK, self.mail, link.selector, on_frame=self.told, on_drop=self.dropped)
        self.lanes = [*self._messages, lifeline]
        self.state, self.instance, self.last_trouble = State.SILENT, b"", "no connection was made"
        self.progress = 0  # `Link.progress` of the peer
        self.has_left = self.is_blocked = False  # in good order; because large packets do not arrive
        self.verdict = ""  # why this rank itself wants no more of it
        self._num_announced = self._num_facts = 0  # over this connection of lane 0; from the peer
        self._dial_at: dict[int, float] = defaultdict(float)  # by lane; never while an attempt is under way
        self._pause_s: dict[int, float] = defaultdict(lambda: FIRST_PAUSE_S)
        self._was_reached = False  # its port has taken a connection
        self._knows_port = self._dials  # whether it takes connections
        self._began_at = self._ticked_at = time.monotonic()
        self._refused_at, self._beaten_at = inf, 0.0

    @property
    def is_begun(self) -> bool:
        """True once a frame has come: a connection alone may be what an earlier link of the rank had under way."""
        return any(lane.received_bytes for lane in self._messages)

    def is_connected(self) -> bool:
        """Return True if every lane has had a connection."""
        return all(lane.num_connections for lane in self.lanes)

    def statistics(self) -> PeerStatistics:
        lanes, infos = self.lanes, [tcp_info(lane.sock) for lane in self.lanes]
        return PeerStatistics(
            self.state, sum(lane.sent_bytes for lane in lanes), sum(lane.received_bytes for lane in lanes),
            min((info.round_trip_s for info in infos if info.round_trip_s is not None), default=None),
            sum(lane.num_retransmitted for lane in lanes) + sum(info.retransmissions for info in infos),
            sum(max(lane.num_connections - 1, 0) for lane in lanes),
        )  # fmt: skip

    def pump(self) -> None:
        """Send and receive what callers have asked for."""
        if self.verdict:
            return self.end(self.verdict)
        if not self._beaten_at:
            self.tick(time.monotonic())
        self._announce()
        for lane in self._messages:
            lane.resume()
            lane.flush()

    def _announce(self) -> None:
        while self._num_announced < len(self.link.said) and self.lanes[0].sock is not None:
            said = self.link.said[self._num_announced]
            self._num_announced += 1
            self.lanes[0].tell(Frame(Kind.FACT, len(said), sequence=self._num_announced), said)

    def attach(self, index: int, sock: socket.socket, received: int) -> None:
        """Give a lane a new connection, whose other side has got `received` frames."""
        self.options.apply(sock)
        self.lanes[index].attach(sock, received)
        self.lanes[index].tell(Frame(Kind.BEAT, sequence=self.link.progress))
        self.pump()
        if self.is_connected():
            self.judge(time.monotonic())

    def dropped(self, lane: Lane, cause: str) -> None:
        """A connection was closed."""
        self._num_announced = 0 if lane.index == 0 else self._num_announced  # what was under way is lost
        self.note_trouble(lane.index, cause)
        if self._dial_at[-1] < inf:
            self._dial_at[-1] = 0.0  # look at once whether its port still takes connections

    def told(self, frame: Frame, payload: bytes) -> None:
        """A frame that is no part of a message has come."""
        if frame.kind is Kind.BEAT:
            self.progress = frame.sequence
            if self.state is State.SILENT:
                self.judge(time.monotonic())
        elif frame.kind is Kind.FACT and frame.sequence > self._num_facts:  # all are told again after a reset
            self._num_facts = frame.sequence
            kind, _, text = payload.decode(errors="replace").partition("\0")
            if kind in (FAILED, LEFT):
                self._announce()  # this rank may be about to leave, too
                self.lanes[0].flush()
                self.end(f"it has {kind}: {text}", kind)
            elif kind == BLOCKED:
                self.end(text, kind)
            else:
                self.link.note(Fact(self.rank, kind, text))

    def note_trouble(self, index: int, cause: str, *, is_refused: bool = False) -> None:
        """Dial a lane again a little later; index: as in `dial`."""
        now = time.monotonic()
        self._knows_port |= index < 0
        self.last_trouble = cause
        self._dial_at[index] = now + self._pause_s[index]
        self._pause_s[index] = min(2 * self._pause_s[index], LONGEST_PAUSE_S)
        # Before its port has ever been reached, a firewall may refuse us: the other side dials.
        self._refused_at = min(self._refused_at, now) if is_refused and self._was_reached else inf

    def note_answer(self) -> None:
        """Its system has taken a connection."""
        if self.state is State.SILENT and self.is_connected():
            self.last_trouble = "its host answers, but the process does not run"

    def note_reached(self, index: int) -> None:
        """The peer's port has taken a connection."""
        self._was_reached, self._refused_at = True, inf
        self._knows_port = True
        self.judge(time.monotonic())
        self._dial_at[index], self._pause_s[index] = time.monotonic() + LONGEST_PAUSE_S, FIRST_PAUSE_S

    def tick(self, now: float) -> None:
        """Do what is due: heartbeats, acknowledgements, dialling, and judging whether the peer lives."""
        if beats := now - self._beaten_at >= BEAT_S:
            self._beaten_at = now
        self._count_silence(now)
        for lane in self.lanes:
            if lane.is_paused:  # its own doing
                lane.heard_at = now
            if now - lane.heard_at > SILENT_S:
                lane.drop(f"nothing came for {SILENT_S:g} s")
            elif beats:
                lane.tell(Frame(Kind.BEAT, sequence=self.link.progress))
        self.pump()
        if self.state is State.GONE:
            return
        missing = [lane.index for lane in self.lanes if lane.sock is None]
        if not self._dials:
            missing = [-1] if len(missing) == len(self.lanes) or not self._was_reached else []
        for index in missing:
            if now >= self._dial_at[index]:
                self._dial_at[index] = inf
                self._dial(self, index)
        self.judge(now)

    def _count_silence(self, now: float) -> None:
        """Note how long each lane has been silent, but for times when C code keeps the peer's interpreter busy."""
        pause_s = now - self._ticked_at
        is_own = pause_s > SILENT_S / 2  # this process was stopped: the silence was its own
        lifeline = self.lanes[-1]
        is_busy = lifeline.heard_at - max(lane.heard_at for lane in self._messages) > 1.5 * BEAT_S
        is_busy = is_busy and now - lifeline.heard_at <= SILENT_S
        for lane in self.lanes:
            if lane.heard_at >= self._ticked_at:
                lane.silent_s = 0.0
            elif is_own:
                lane.heard_at = min(now, lane.heard_at + pause_s)
            elif not is_busy:
                lane.silent_s += pause_s
        # A lane whose connection is broken, or whose peer is silent, is judged by the silence alone.
        if not is_own and self.age_s() <= SILENT_S and any(lane.kept for lane in self._messages):
            connected = [lane for lane in self._messages if lane.sock is not None]
            if any([lane.count_stall(pause_s) for lane in connected]):
                for lane in connected:
                    lane.stalled_s = 0.0  # TCP only lets one connection wait for another
        self._ticked_at = now

    def age_s(self) -> float:
        """Return the seconds since the peer was heard."""
        listening = [lane for lane in self.lanes if not lane.is_paused] or self.lanes
        return time.monotonic() - max(lane.heard_at for lane in listening)

    def may_take_more(self) -> bool:
        """Return True if what was sent is not acknowledged, but may be: it dials again, or still acknowledges."""
        if self.state is State.GONE or not self.mail.has_outgoing():
            return False
        now = time.monotonic()
        return any(lane.sock is None or now - lane.acknowledged_at < SILENT_S for lane in self.lanes if lane.kept)

    def judge(self, now: float) -> None:
        """Find out whether the peer is alive, silent or gone."""
        if max(lane.silent_s for lane in self._messages) > self.link.timeout_s:  # what one carries is lost without it
            self.end(f"nothing was heard of it for {self.link.timeout_s:g} s; last, {self.last_trouble}", LOST)
        elif max(lane.stalled_s for lane in self._messages) > self.link.timeout_s:
            self._end_blocked()
        elif now - self._refused_at > REFUSED_S:
            self.end("its connections were closed and its port takes no new ones: its process has ended")
        elif self.state is not State.GONE:
            # Only who knows that its port took connections can tell later that its process has ended.
            knows_port = self._knows_port or now - self._began_at > TRIAL_S
            is_alive = self.age_s() <= SILENT_S and self.is_connected() and self.is_begun and knows_port
            if (state := State.ALIVE if is_alive else State.SILENT) is not self.state:
                self.state = state
                self.link.note(Fact(self.rank, state.value, "" if is_alive else self.last_trouble))

    def _end_blocked(self) -> None:
        """Large packets do not arrive: tell the peer over a lane that is not stuck, and end.

        Where all are stuck, it is told when it dials again.
        """
        text = (
            f"large packets from rank {self.link.rank} to {self.who} have not arrived for {self.link.timeout_s:g} s, "
            f"though small ones do: is the MTU too large somewhere on the way?"
        )
        said = f"{BLOCKED}\0{text}".encode()
        for lane in self._messages:
            if lane.stalled_s < self.link.timeout_s / 2:
                lane.tell(Frame(Kind.FACT, len(said), sequence=len(self.link.said) + 1), said)
                lane.flush()
        self.end(text, BLOCKED)

    def end(self, cause: str, kind: str = State.GONE.value) -> None:
        """The peer is gone: close its connections and let all waits for it fail."""
        if self.state is not State.GONE:
            self.state, self.has_left, self.is_blocked = State.GONE, kind == LEFT, kind == BLOCKED
            for lane in self.lanes:
                lane.drop(cause)
                lane.kept.clear()
            self.mail.fail(cause)
            if not self.verdict:
                self.link.note(Fact(self.rank, kind, cause))
