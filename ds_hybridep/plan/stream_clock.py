# SPDX-License-Identifier: Apache-2.0
"""The clock of one rank in a step: every second has a cause, and links carry packets at the same time."""

import math
from collections import deque
from collections.abc import Sequence, Set
from dataclasses import dataclass, field


@dataclass
class _Link:
    """One level's uplink: its packets in order, each with its remaining bytes."""

    bytes_per_s: float
    queue: deque[list[float]] = field(default_factory=deque)  # [packet, bytes left]
    finish_s: dict[int, float] = field(default_factory=dict)
    backlog: float = 0.0

    def add(self, packet: int, num_bytes: float) -> None:
        self.queue.append([packet, num_bytes])
        self.backlog += num_bytes

    def serve(self, start_s: float, duration_s: float, bytes_per_s: float) -> None:
        """Let packets flow for `duration_s` from `start_s` on."""
        capacity = duration_s * bytes_per_s
        elapsed_s = 0.0
        while self.queue and self.queue[0][1] <= capacity:
            packet, num_bytes = self.queue.popleft()
            capacity -= num_bytes
            elapsed_s += num_bytes / bytes_per_s
            self.finish_s[int(packet)] = start_s + elapsed_s
            self.backlog -= num_bytes
        if self.queue:
            self.queue[0][1] -= capacity
            self.backlog -= capacity
        else:
            self.backlog = 0.0

    def finish_of(self, packet: int, now_s: float) -> float:
        """Time at which `packet` has left, if only packets flow from now on."""
        if packet in self.finish_s:
            return self.finish_s[packet]
        ahead = 0.0
        for other, num_bytes in self.queue:
            ahead += num_bytes
            if other == packet:
                break
        return now_s + ahead / self.bytes_per_s


@dataclass(frozen=True)
class MessageRound:
    """One round of messages: (level, bytes over its uplink), one level after the other."""

    level_bytes: tuple[tuple[int, float], ...]


class StepClock:
    """Time of one rank; each call that advances it names the cause."""

    def __init__(self, bandwidths: Sequence[float], latencies: Sequence[float], terms: Sequence[str]) -> None:
        self.now_s = 0.0
        self.seconds: dict[str, float] = dict.fromkeys(terms, 0.0)
        self.links = [_Link(bandwidth) for bandwidth in bandwidths]
        self.waits = [0] * len(bandwidths)  # in a row, by level, counted as `transport.channels.Transport` does
        self._latencies = latencies
        self._packets: dict[int, tuple[float, ...]] = {}
        self._waits_before: dict[int, tuple[int, ...]] = {}  # by packet

    def spend(self, seconds: float, term: str) -> None:
        """Compute or wait for `seconds`; packets flow at the same time."""
        if seconds <= 0.0:
            return
        for link in self.links:
            if link.queue:
                link.serve(self.now_s, seconds, link.bytes_per_s)
        self.now_s += seconds
        self.seconds[term] += seconds

    def repeat_waits(self, before: Sequence[int], after: Sequence[int], times: int) -> None:
        """Count the waits between `before` and `after` another `times` times."""
        self.waits = [now + times * (b - a) for now, a, b in zip(self.waits, before, after, strict=True)]

    def exchange(self, rounds: Sequence[MessageRound], term: str, round_s: float) -> None:
        """Send rows, which share links with packets byte for byte; a round takes the host `round_s` at least."""
        for one in rounds:
            begin_s = arrival_s = self.now_s
            for level, num_bytes in one.level_bytes:
                self.waits[level] += 1
                link = self.links[level]
                shared = min(link.backlog, num_bytes) if link.queue else 0.0
                shared_s, alone_s = 2.0 * shared / link.bytes_per_s, (num_bytes - shared) / link.bytes_per_s
                for other in self.links:
                    if other is link and shared_s:
                        other.serve(self.now_s, shared_s, other.bytes_per_s / 2.0)
                        other.serve(self.now_s + shared_s, alone_s, other.bytes_per_s)
                    elif other.queue:
                        other.serve(self.now_s, shared_s + alone_s, other.bytes_per_s)
                self.now_s += shared_s + alone_s
                self.seconds[term] += shared_s + alone_s
                arrival_s = max(arrival_s, self.now_s + self._latencies[level])
            self.spend(arrival_s - self.now_s, term)
            self.spend(begin_s + round_s - self.now_s, "host_s")

    def send_packet(self, packet: int, level_bytes: tuple[float, ...], waited: Set[int] = frozenset()) -> None:
        """Queue one packet on every level that it crosses; `waited`: levels where another wait counts for it too."""
        self._packets[packet] = level_bytes
        self._waits_before[packet] = tuple(-1 if level in waited else now for level, now in enumerate(self.waits))
        for link, num_bytes in zip(self.links, level_bytes, strict=True):
            if num_bytes > 0:
                link.add(packet, num_bytes)

    def await_packet(self, packet: int, term: str) -> None:
        """Wait until a packet has left its busiest level, has taken its own time on the others, and has arrived."""
        level_bytes = self._packets[packet]
        for level, before in enumerate(self._waits_before[packet]):
            if level_bytes[level] > 0 and self.waits[level] == before:
                self.waits[level] += 1
        own_s = [num_bytes / link.bytes_per_s for link, num_bytes in zip(self.links, level_bytes, strict=True)]
        total_s = math.fsum(own_s)
        arrival_s = 0.0
        for level, link in enumerate(self.links):
            if level_bytes[level] > 0:
                arrival_s = max(arrival_s, link.finish_of(packet, self.now_s) + total_s - own_s[level])
        arrival_s += math.fsum(self._latencies[level] for level, num_bytes in enumerate(level_bytes) if num_bytes > 0)
        self.spend(arrival_s - self.now_s, term)
