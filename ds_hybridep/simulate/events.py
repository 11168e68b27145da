# SPDX-License-Identifier: Apache-2.0
"""Discrete-event simulation of programs that compute and send over shared links.

An *actor* (a rank, or a class of ranks that are alike) runs a list of instructions one after the other:

    Run    compute for some seconds
    Post   hand an operation to its channel and go on
    Wait   until an operation has arrived

A channel takes an actor's operations in the order of their posts. An operation consists of *flows*. A flow starts when
all of its members have reached the operation, drains at the rate that its links give it, and arrives one latency
later. Rates change whenever a flow begins or ends.
"""

import heapq
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ds_hybridep.simulate.flows import Bools, Floats, Flows, Ints, LinkShares

DONE_SHARE = 1e-9  # a smaller share of a flow's bytes is rounding
SAME_TIME = 1e-12  # a smaller share of the clock's time is rounding


@dataclass(frozen=True)
class Operation:
    """One communication operation of all actors.

    label: name in traces.
    channel: operations of one channel follow each other at each actor.
    flows: all flows of the operation.
    after: index of an operation that must have arrived first; None: none.
    """

    label: str
    channel: str
    flows: Flows
    after: int | None = None


@dataclass(frozen=True)
class TimedRun:
    """Compute for [num_actors] seconds; `is_computing` slows flows if the host has too few cores for both."""

    term: str
    label: str
    seconds: Floats
    is_computing: bool = True


@dataclass(frozen=True)
class TimedPost:
    """Hand an operation over; it is under way from now on."""

    operation: int


@dataclass(frozen=True)
class TimedWait:
    """Wait until the operation has arrived; the time counts for `term`."""

    operation: int
    term: str


Instruction = TimedRun | TimedPost | TimedWait


@dataclass(frozen=True)
class TraceSpan:
    """Something that an actor did, for traces: on "compute" or on a channel."""

    stream: str
    label: str
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class Outcome:
    """end_s: [num_actors] time at which each actor ended.  seconds: [num_actors] by term.  spans: by traced actor."""

    end_s: Floats
    seconds: dict[str, Floats]
    spans: dict[int, list[TraceSpan]]


class _Progress:
    """Progress of one operation."""

    def __init__(self, index: int, operation: Operation, num_actors: int, flows_of: Sequence[Ints]) -> None:
        flows = operation.flows
        self.index = index
        self.operation = operation
        self.flows_of = flows_of
        self.left = flows.num_bytes.copy()
        self.is_flowing = np.zeros(len(self.left), dtype=bool)
        self.num_absent = flows.num_members.copy()
        self.num_pending = np.bincount(flows.member_actor, minlength=num_actors)
        self.arrival_s = np.zeros(num_actors)
        self.begin_s = np.zeros(num_actors)
        self.is_arrived = np.zeros(num_actors, dtype=bool)
        self.waiting: set[int] = set()
        self.followers: list[tuple[int, int]] = []  # (actor, operation) pairs that wait for this operation to arrive


class Engine:
    """Runs one program on all actors at once.

    Args:
        capacities: [L] bytes/s of the links.
        num_actors: number of actors that run the program.
        program: the instructions.
        operations: operations to which the instructions refer by index.
        busy_share: factor on the rate of a flow while one of its members computes.
        traced: actors whose spans are kept.
    """

    def __init__(
        self,
        capacities: Floats,
        num_actors: int,
        program: Sequence[Instruction],
        operations: Sequence[Operation],
        *,
        busy_share: float = 1.0,
        traced: Sequence[int] = (),
    ) -> None:
        self._shares = LinkShares(capacities, busy_share)
        self._num_actors = num_actors
        self._program = program
        self._operations = operations
        self._busy_share = busy_share
        shared = {id(operation.flows): operation.flows for operation in operations}
        self._flows_of = {key: flows.flows_of(num_actors) for key, flows in shared.items()}
        self._progress: dict[int, _Progress] = {}
        self._queues: dict[tuple[int, str], deque[int]] = {}
        self._position = [0] * num_actors
        self._is_computing = np.zeros(num_actors, dtype=bool)
        self._waiting_since: dict[int, float] = {}
        terms = {part.term for part in program if not isinstance(part, TimedPost)}
        self._seconds = {term: np.zeros(num_actors) for term in sorted(terms)}
        self._end_s = np.zeros(num_actors)
        self._spans: dict[int, list[TraceSpan]] = {actor: [] for actor in traced}
        self._now_s = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_events = 0
        self._active: list[_Progress] = []  # operations with bytes under way
        self._rates: list[Floats] = []  # rates of their flowing flows
        self._is_stale = False

    def run(self) -> Outcome:
        """Run the whole program.  Raises AssertionError if actors wait for operations that never arrive."""
        for actor in range(self._num_actors):
            self._go_on(actor)
        while True:
            if self._is_stale:
                self._share_links()
            drained_s = self._next_drain_s()
            event_s = self._events[0][0] if self._events else math.inf
            next_s = min(drained_s, event_s)
            if next_s == math.inf:
                break
            self._flow_until(next_s)
            if drained_s <= next_s:
                self._drain()
            while self._events and self._events[0][0] <= next_s:
                _, _, action, arguments = heapq.heappop(self._events)
                action(*arguments)
        stuck = [actor for actor in range(self._num_actors) if self._position[actor] < len(self._program)]
        assert not stuck, f"actors {stuck[:8]} wait for operations that never arrive"
        return Outcome(self._end_s, self._seconds, self._spans)

    # ---- actors ----

    def _go_on(self, actor: int) -> None:
        """Run an actor's instructions until one takes time."""
        while self._position[actor] < len(self._program):
            instruction = self._program[self._position[actor]]
            if isinstance(instruction, TimedRun):
                seconds = float(instruction.seconds[actor])
                if seconds > 0.0:
                    self._set_computing(actor, instruction.is_computing)
                    self._at(self._now_s + seconds, self._end_run, actor, instruction, seconds)
                    return
            elif isinstance(instruction, TimedPost):
                self._post(actor, instruction.operation)
            elif not self._of(instruction.operation).is_arrived[actor]:
                self._of(instruction.operation).waiting.add(actor)
                self._waiting_since[actor] = self._now_s
                return
            self._position[actor] += 1
        self._end_s[actor] = self._now_s

    def _end_run(self, actor: int, instruction: TimedRun, seconds: float) -> None:
        self._set_computing(actor, False)
        self._seconds[instruction.term][actor] += seconds
        self._trace(actor, "compute", instruction.label, self._now_s - seconds)
        self._position[actor] += 1
        self._go_on(actor)

    def _set_computing(self, actor: int, is_computing: bool) -> None:
        if self._busy_share < 1.0 and bool(self._is_computing[actor]) != is_computing:
            self._is_computing[actor] = is_computing
            self._is_stale = True

    # ---- operations ----

    def _of(self, index: int) -> _Progress:
        if index not in self._progress:
            operation = self._operations[index]
            flows_of = self._flows_of[id(operation.flows)]
            self._progress[index] = _Progress(index, operation, self._num_actors, flows_of)
        return self._progress[index]

    def _post(self, actor: int, index: int) -> None:
        queue = self._queues.setdefault((actor, self._operations[index].channel), deque())
        queue.append(index)
        if len(queue) == 1:
            self._reach(actor, index)

    def _reach(self, actor: int, index: int) -> None:
        """Begin an operation that is at the head of its channel, unless it must wait for another one."""
        progress = self._of(index)
        after = progress.operation.after
        if after is not None and not self._of(after).is_arrived[actor]:
            self._of(after).followers.append((actor, index))
            return
        progress.begin_s[actor] = self._now_s
        if progress.num_pending[actor] == 0:  # nothing to send or to receive
            self._leave(actor, index)
            return
        flows = progress.flows_of[actor]
        progress.num_absent[flows] -= 1
        starting = flows[progress.num_absent[flows] == 0]
        if len(starting):
            progress.is_flowing[starting] = True
            if not any(other is progress for other in self._active):
                self._active.append(progress)
            self._is_stale = True

    def _leave(self, actor: int, index: int) -> None:
        """Free the channel after an actor's part of an operation has been sent; the arrival follows later."""
        progress = self._of(index)
        self._at(max(float(progress.arrival_s[actor]), self._now_s), self._arrive, actor, index)
        queue = self._queues[actor, progress.operation.channel]
        queue.popleft()
        if queue:
            self._reach(actor, queue[0])

    def _arrive(self, actor: int, index: int) -> None:
        progress = self._of(index)
        progress.is_arrived[actor] = True
        if progress.num_pending[actor] == 0 and len(progress.flows_of[actor]):
            self._trace(actor, progress.operation.channel, progress.operation.label, float(progress.begin_s[actor]))
        for follower in [pair for pair in progress.followers if pair[0] == actor]:
            progress.followers.remove(follower)
            self._reach(*follower)
        if actor in progress.waiting:
            progress.waiting.remove(actor)
            instruction = self._program[self._position[actor]]
            assert isinstance(instruction, TimedWait)
            self._seconds[instruction.term][actor] += self._now_s - self._waiting_since[actor]
            self._position[actor] += 1
            self._go_on(actor)

    # ---- flows ----

    def _share_links(self) -> None:
        self._is_stale = False
        self._active = [progress for progress in self._active if progress.is_flowing.any()]
        active = [(progress.operation.flows, progress.is_flowing) for progress in self._active]
        self._rates = self._shares.rates(active, self._is_computing)

    def _next_drain_s(self) -> float:
        earliest_s = math.inf
        for progress, rates in zip(self._active, self._rates, strict=True):
            left = progress.left[progress.is_flowing]
            # If `busy_share` is 0, the rates of flows are 0 while their members compute.
            seconds = np.divide(left, rates, out=np.full(len(left), math.inf), where=rates > 0.0)
            earliest_s = min(earliest_s, float(seconds.min()))
        return self._now_s + earliest_s

    def _flow_until(self, time_s: float) -> None:
        elapsed_s = time_s - self._now_s
        if elapsed_s > 0.0:
            for progress, rates in zip(self._active, self._rates, strict=True):
                progress.left[progress.is_flowing] -= rates * elapsed_s
        self._now_s = time_s

    def _drain(self) -> None:
        """Remove the flows that have sent everything; actors without other flows leave the operation."""
        self._is_stale = True
        # First find all finished flows: flows that begin in the next loop are in `is_flowing`, but have no rate yet.
        drained: list[tuple[_Progress, Bools]] = []
        for progress, rates in zip(self._active, self._rates, strict=True):
            is_done = progress.is_flowing.copy()
            left, num_bytes = progress.left[is_done], progress.operation.flows.num_bytes[is_done]
            is_done[is_done] = left <= np.maximum(DONE_SHARE * num_bytes, rates * SAME_TIME * self._now_s)
            drained.append((progress, is_done))
        for progress, is_done in drained:
            flows = progress.operation.flows
            progress.is_flowing &= ~is_done
            members = np.flatnonzero(is_done[flows.member_flow])
            actors = flows.member_actor[members]
            arrivals = self._now_s + flows.latencies_s[flows.member_flow[members]]
            np.maximum.at(progress.arrival_s, actors, arrivals)
            np.subtract.at(progress.num_pending, actors, 1)
            for actor in np.flatnonzero(np.bincount(actors)):
                if progress.num_pending[actor] == 0:
                    self._leave(int(actor), progress.index)

    # ---- time ----

    def _at(self, time_s: float, action: Callable[..., None], *arguments: Any) -> None:
        self._num_events += 1
        heapq.heappush(self._events, (time_s, self._num_events, action, arguments))

    def _trace(self, actor: int, stream: str, label: str, begin_s: float) -> None:
        if actor in self._spans:
            self._spans[actor].append(TraceSpan(stream, label, begin_s, self._now_s))
