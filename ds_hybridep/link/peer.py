# SPDX-License-Identifier: Apache-2.0
"""The other end of a link: its lanes, messages on their way to and from it, and whether it lives."""

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from ds_hybridep.link.lane import JOIN_BYTES, Lane, Outgoing
from ds_hybridep.link.messages import Arrival, Inbox, Key, Receive, Send
from ds_hybridep.link.options import Options, round_trip_s
from ds_hybridep.link.wire import Frame, Kind

BEAT_S = 1.0  # between heartbeats in each lane
SILENT_S = 5.0  # a connection is given up if nothing comes for so long; a peer is then silent
REFUSED_S = 3.0  # a peer is gone if a port that has taken connections refuses them for so long
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 1.0  # before dialling again
URGENT, BULK = 0, 1  # priorities
# Announcements with which a peer is gone.
FAILED, LEFT = "failed", "left"


class State(str, Enum):
    """How a peer is."""

    ALIVE = "alive"
    SILENT = "silent"  # nothing has come for some time
    GONE = "gone"  # for good


class Fact(NamedTuple):
    """What a peer has announced, or what has become of it: then `kind` is one of `State`."""

    rank: int
    kind: str
    text: str


@dataclass(frozen=True)
class Statistics:
    """What one peer and this rank have exchanged.  Bytes include frames' headers, but not those of TLS and TCP."""

    state: State
    sent_bytes: int
    received_bytes: int
    round_trip_s: float | None  # TCP's own smoothed measurement
    retransmissions: int  # segments that TCP has sent again
    reconnects: int


@dataclass
class _Dialling:
    """When a lane without a connection is dialled again."""

    at: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    is_under_way: bool = False


@dataclass(eq=False)
class Peer:
    """One peer.  The caller's threads use what needs `lock`, the link's thread everything.

    Args:
        who: rank and address, for errors.
        dials: True if this rank makes the connections.
        dial: called with the index of a lane; -1 only tries whether the port takes connections.
        on_change: called with what is announced, and with changes of the state.
    """

    rank: int
    who: str
    lock: threading.Lock
    options: Options
    timeout_s: float
    dials: bool
    dial: Callable[["Peer", int], None]
    on_change: Callable[[Fact], None]
    inbox: Inbox
    lanes: list[Lane] = field(default_factory=list)
    state: State = State.SILENT
    cause: str = ""  # why it is gone
    instance: bytes = b""
    num_facts: int = 0

    def __post_init__(self) -> None:
        self._queues: tuple[deque[Send], ...] = (deque(), deque())
        self._sends: dict[Key, Send] = {}  # that were not acknowledged
        self._complaints: deque[Frame] = deque()
        self._send_counts: dict[bytes, int] = defaultdict(int)
        self._receive_counts: dict[bytes, int] = defaultdict(int)
        self._dialling: dict[int, _Dialling] = defaultdict(_Dialling)
        self.last_trouble = "no connection was made"
        self._refused_at: float | None = None
        self._was_reached = False  # its port has taken a connection
        self._beaten_at = 0.0

    # -- for the caller's threads -----------------------------------------------------------------------------------

    def post_send(self, stream: bytes, what: str, data: memoryview, priority: int) -> Send:
        with self.lock:
            self._send_counts[stream] += 1
            number = self._send_counts[stream]
            is_small = len(data) <= JOIN_BYTES
            data = memoryview(bytes(data)) if is_small else data
            send = Send(f"{what} (number {number})", (stream, number), data, self.options.connections)
            if not (cause := self.cause):
                self._sends[send.key] = send
                self._queues[priority].append(send)
        if cause or is_small:
            send.end(cause or None)
        return send

    def post_receive(self, stream: bytes, what: str, into: memoryview | None, max_bytes: int) -> Receive:
        with self.lock:
            self._receive_counts[stream] += 1
            number = self._receive_counts[stream]
            receive = Receive(f"{what} (number {number})", into, max_bytes)
            ended = self.inbox.post((stream, number), receive)
            failed = self.inbox.clear() if self.cause else []
            if ended is not None and ended[1] is not None:
                self._complaints.append(Frame(Kind.REFUSED, 0, stream, number, max_bytes))
        for one in failed:
            one.end(self.cause)
        if ended is not None:
            receive.end(ended[1])
        return receive

    def is_connected(self) -> bool:
        """Return True if every lane has had a connection."""
        return all(lane.num_connections for lane in self.lanes)

    def has_outgoing(self) -> bool:
        """Return True if not all that was sent is acknowledged."""
        return bool(self._sends)

    def statistics(self) -> Statistics:
        times = [time_s for lane in self.lanes if (time_s := round_trip_s(lane.sock)) is not None]
        return Statistics(
            self.state,
            sum(lane.sent_bytes for lane in self.lanes),
            sum(lane.received_bytes for lane in self.lanes),
            min(times, default=None),
            sum(lane.num_retransmitted() for lane in self.lanes),
            sum(max(lane.num_connections - 1, 0) for lane in self.lanes),
        )

    # -- what lanes ask for -----------------------------------------------------------------------------------------

    def next_outgoing(self, lane: Lane) -> Outgoing | None:
        """Return the next piece to send; each lane serves one priority."""
        with self.lock:
            if not (queue := self._queues[lane.index // self.options.connections]):
                return None
            frame, payload, is_last = queue[0].next_frame()
            send = queue.popleft() if is_last else queue[0]
        if frame.length <= JOIN_BYTES:
            return Outgoing((memoryview(frame.pack() + payload),), send)
        return Outgoing((memoryview(frame.pack()), payload), send)

    def place(self, frame: Frame) -> Arrival | None:
        with self.lock:
            # While this rank waits for anything from the peer, it must read on: what it waits for may lie behind.
            return self.inbox.place(frame, must=self.inbox.is_waited_for() or bool(self._sends))

    def arrived(self, lane: Lane, frame: Frame, arrival: Arrival) -> None:
        with self.lock:
            ended = self.inbox.add(frame, arrival)
        if ended is not None:
            receive, failure = ended
            if failure is not None:  # said before the acknowledgement, which ends the other side's handle
                lane.tell(Frame(Kind.REFUSED, 0, frame.stream, frame.sequence, receive.max_bytes))
            receive.end(failure)

    def acknowledged(self, send: Send) -> None:
        if send.acknowledge_frame():
            with self.lock:
                self._sends.pop(send.key, None)

    def told(self, frame: Frame, payload: bytes) -> None:
        if frame.kind is Kind.REFUSED:
            with self.lock:
                send = self._sends.get((frame.stream, frame.sequence))
            failure = f"it expects at most {frame.total} bytes of a message that is longer; do the ranks differ?"
            if send is not None:
                send.end(failure)
            self.on_change(Fact(self.rank, "refused", failure if send is None else f"{send.what}: {failure}"))
        elif frame.kind is Kind.FACT and frame.sequence >= self.num_facts:  # all are told again after a reset
            self.num_facts = frame.sequence + 1
            kind, _, text = payload.decode(errors="replace").partition("\0")
            if kind in (FAILED, LEFT):
                self.end(f"it has {kind}: {text}", Fact(self.rank, kind, text))
            else:
                self.on_change(Fact(self.rank, kind, text))

    def dropped(self, lane: Lane, cause: str) -> None:
        self.note_trouble(lane.index, cause)

    # -- life -------------------------------------------------------------------------------------------------------

    def pump(self) -> None:
        """Send and receive what the caller has asked for."""
        while self._complaints:
            self.lanes[0].tell(self._complaints.popleft())
        for lane in self.lanes:
            lane.resume()
            lane.flush()

    def note_trouble(self, index: int, cause: str, *, is_refused: bool = False) -> None:
        """Dial a lane again a little later.  index: of the lane, -1 for a try of the port."""
        now, dialling = time.monotonic(), self._dialling[index]
        dialling.is_under_way = False
        dialling.at, dialling.pause_s = now + dialling.pause_s, min(2 * dialling.pause_s, LONGEST_PAUSE_S)
        self.last_trouble = cause
        if not is_refused:
            self._refused_at = None
        elif self._was_reached:  # else a firewall may refuse what the other side can dial
            self._refused_at = self._refused_at or now

    def note_reached(self, index: int) -> None:
        """The peer's port has taken a connection."""
        self._dialling[index] = _Dialling(time.monotonic() + LONGEST_PAUSE_S)
        self._was_reached, self._refused_at = True, None

    def tick(self, now: float) -> None:
        """Do what is due: heartbeats, dialling, and judging whether the peer lives."""
        beats = now - self._beaten_at >= BEAT_S
        self._beaten_at = now if beats else self._beaten_at
        for lane in self.lanes:
            if lane.sock is None:
                continue
            if lane.is_paused:  # its own doing
                lane.heard_at = now
            elif now - lane.heard_at > SILENT_S:
                lane.drop(f"nothing came for {SILENT_S:g} s")
            elif beats:
                lane.tell(Frame(Kind.BEAT))
            lane.flush()
        if self.cause:
            return
        missing = [lane.index for lane in self.lanes if lane.sock is None]
        if not self.dials and (len(missing) == len(self.lanes) or not self._was_reached):
            missing = [-1]
        for index in missing if self.dials or missing == [-1] else ():
            dialling = self._dialling[index]
            if not dialling.is_under_way and now >= dialling.at:
                dialling.is_under_way = True
                self.dial(self, index)
        self.judge(now)

    def judge(self, now: float) -> None:
        age_s = now - max(lane.heard_at for lane in self.lanes)
        if age_s > self.timeout_s:
            self.end(f"nothing was heard of it for {age_s:.0f} s; last, {self.last_trouble}")
        elif self._refused_at is not None and now - self._refused_at > REFUSED_S:
            self.end("its connections were closed and its port takes no new ones: its process has ended")
        else:
            is_alive = age_s <= SILENT_S and any(lane.num_connections for lane in self.lanes)
            if (state := State.ALIVE if is_alive else State.SILENT) is not self.state:
                self.state = state
                self.on_change(Fact(self.rank, state.value, "" if is_alive else self.last_trouble))

    def end(self, cause: str, fact: Fact | None = None) -> None:
        """The peer is gone: close its connections and let all waits for it fail."""
        with self.lock:
            if self.cause:
                return
            self.cause, self.state = cause, State.GONE
            handles = [*self._sends.values(), *self.inbox.clear()]
            self._sends.clear()
            for queue in self._queues:
                queue.clear()
        for lane in self.lanes:
            lane.drop(cause)
            lane.forget()
        for handle in handles:
            handle.end(cause)
        self.on_change(fact or Fact(self.rank, State.GONE.value, cause))
