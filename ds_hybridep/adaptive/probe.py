# SPDX-License-Identifier: Apache-2.0
"""Measures the links of a job with its own communicator, level by level.

At each level the children of one parent form a ring.  A rank talks to the ranks at its own place in other children:

    rate      every rank sends to the next child and receives from the one before, all at once, as in a job
    latency   the first ranks of two neighbouring children send each other a few bytes

Example: with two DCs of two GPUs, level dc has 0 <-> 2 and 1 <-> 3; an uplink carries two messages in each direction.

A rate is that of one child's uplink in one direction.  It includes headers, as the rates of providers do: payload
bytes x 1514/1448, the frame over the payload of a full TCP segment.
"""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ds_hybridep.geometry.cluster import Cluster, Level
from ds_hybridep.sync.encoding import Encoding
from ds_hybridep.sync.group_sync import GroupSync
from ds_hybridep.sync.transaction import Transaction
from ds_hybridep.transport.channels import Channel, Purpose, Transport
from ds_hybridep.transport.streams import synchronize

WIRE_FACTOR = 1514 / 1448
NUM_PINGS = 20
PING_BYTES = 8
LEAST_BYTES, MOST_BYTES = 1 << 15, 1 << 27  # of one rank in a burst
GROWTH = 4  # factor by which a burst grows that was too short
LONG_ENOUGH_S = 0.4  # that a burst takes at the start
SHORT_S = 0.02  # that it takes at a second look: a shaper lets about a millisecond pass at once
LEAST_LATENCIES = 8  # that it takes in any case: a connection takes a few round trips to get up to speed
REPETITIONS = 4  # bursts of that length
CHANGE = 0.2  # share by which a rate must differ from a known one to count as changed
CPU = torch.device("cpu")
PROBE = Purpose("control", "probe of a link")


class LinkProbe:
    """Times transfers of its own.  All ranks of the job must make the same calls, while no other transfer runs."""

    def __init__(self, transport: Transport, device: torch.device = CPU) -> None:
        self._transport, self.device = transport, device
        self.cluster = transport.cluster
        self._place = self.cluster.place_of(transport.rank)
        exact = (None,) * len(transport.cluster.levels)
        ranks = range(transport.world_size)
        self._group = GroupSync(
            transport, ranks, "probe", Encoding(exact, exact), transaction=Transaction(), device=CPU
        )
        self._buffers: dict[str, Tensor] = {}
        for level, size in enumerate(self.cluster.sizes):
            if size > 1:  # connect now: nobody then waits for a connection to a rank that fails later
                self._channel(level)

    def table(self, values: Sequence[float]) -> list[list[float]]:
        """The values of all ranks as [world_size][len(values)], equal in every bit on each rank."""
        world_size = self._transport.world_size
        table = torch.zeros(world_size, len(values), dtype=torch.float64)
        table[self._transport.rank] = torch.tensor(values, dtype=torch.float64)
        if world_size > 1:
            self._group.all_reduce(table)
        rows: list[list[float]] = table.tolist()
        return rows

    def measure(self, level: int, *, limit_s: float) -> Level:
        """One level with its link, by long and short transfers in turn.  Over a slow link they may pass `limit_s`.

        Other work on a machine can only make a transfer slower, so the fastest of several counts.
        """
        until_s, about = time.perf_counter() + limit_s, self.cluster.levels[level]
        latency_s = self.latency_s(level)
        num_bytes, rate = self._first_burst(level, LEAST_BYTES, latency_s, LONG_ENOUGH_S)
        short_bytes, long_s, short_s = num_bytes // GROWTH, math.inf, math.inf
        for repetition in range(REPETITIONS):
            if repetition and any(left_s <= 0 for (left_s,) in self.table([until_s - time.perf_counter()])):
                break
            short_s = min(short_s, self._transfer_s(level, short_bytes))
            long_s = min(long_s, self._transfer_s(level, num_bytes))
        if short_s < long_s:  # the difference, so that the fixed cost of a transfer does not count
            rate = self._carried(level, num_bytes - short_bytes) / (long_s - short_s)
        return replace(about, link=replace(about.link, bandwidth_bytes_per_s=rate, latency_s=latency_s))

    def measure_again(self, level: int, known: float, latency_s: float) -> float:
        """Bytes per second, by short bursts; `known` if they differ from it by no more than CHANGE."""
        least_s = max(SHORT_S, LEAST_LATENCIES * latency_s)
        # The first one is shorter, because the link may have become much slower.
        guess = int(known * least_s / self.cluster.ranks_below[level] / GROWTH)
        num_bytes, rate = self._first_burst(level, max(guess, LEAST_BYTES), latency_s, least_s)
        if abs(rate / known - 1) > CHANGE:
            rate = max(rate, *(self.burst(level, num_bytes, latency_s) for _ in range(REPETITIONS - 1)))
        return rate if abs(rate / known - 1) > CHANGE else known

    def _first_burst(self, level: int, num_bytes: int, latency_s: float, least_s: float) -> tuple[int, float]:
        """Bytes and rate of the first burst that takes long enough, beginning with `num_bytes`."""
        self.table([0.0])
        while True:
            num_bytes = min(num_bytes, MOST_BYTES)
            rate = self.burst(level, num_bytes, latency_s)
            if num_bytes == MOST_BYTES or self.cluster.ranks_below[level] * num_bytes / rate >= least_s / 2:
                return num_bytes, rate
            num_bytes *= GROWTH

    def latency_s(self, level: int) -> float:
        """One-way seconds between the first ranks of neighbouring children: the median of the slowest pair."""
        samples = []
        for ping in range(NUM_PINGS + 2):
            self.table([0.0])
            round_trip_s = self._ping(level)
            if ping >= 2:  # the first packets of a connection take longer
                samples.append(round_trip_s / 2)
        return max(own_s for (own_s,) in self.table([statistics.median(samples)]))

    def burst(self, level: int, num_bytes: int, latency_s: float) -> float:
        """Bytes per second of the slowest uplink while every rank sends `num_bytes`, headers included.

        Call right after `table`, which all ranks leave together.  `latency_s` is subtracted: nothing arrives in it.
        """
        seconds = self._transfer_s(level, num_bytes)
        # A transfer that took no longer than a ping was faster than the clock can tell.
        return self._carried(level, num_bytes) / max(seconds - latency_s, seconds / 10, 1e-9)

    def _carried(self, level: int, num_bytes: int) -> float:
        """Bytes over one uplink, headers included, when each rank sends `num_bytes`."""
        return self.cluster.ranks_below[level] * num_bytes * WIRE_FACTOR

    def _transfer_s(self, level: int, num_bytes: int) -> float:
        """Send from every rank to the next child.  Returns the most seconds that a rank took, on either end."""
        begin_s = time.perf_counter()
        self._pass_on(level, num_bytes)
        return max(took_s for (took_s,) in self.table([time.perf_counter() - begin_s]))

    def _pass_on(self, level: int, num_bytes: int) -> None:
        """Send to the next child, receive from the one before, and wait until both are done on this rank."""
        channel, siblings = self._channel(level)
        at = self._place[level]
        to, fro = siblings[(at + 1) % len(siblings)], siblings[at - 1]
        sends, receives = [(to, self._buffer("out", num_bytes))], [(fro, self._buffer("in", num_bytes))]
        channel.start(sends, receives, PROBE).wait()
        synchronize(self.device)

    def _ping(self, level: int) -> float:
        """Round-trip seconds between the first ranks of two neighbouring children; 0 on all other ranks."""
        channel, siblings = self._channel(level)
        at = self._place[level]
        if any(self._place[level + 1 :]) or at ^ 1 >= len(siblings):
            return 0.0
        begin_s = time.perf_counter()
        for is_sender in (at % 2 == 0, at % 2 == 1):
            message = (siblings[at ^ 1], self._buffer("out" if is_sender else "in", PING_BYTES))
            channel.start([message] if is_sender else [], [] if is_sender else [message], PROBE).wait()
            synchronize(self.device)
        return time.perf_counter() - begin_s

    def _buffer(self, way: str, num_bytes: int) -> Tensor:
        """A buffer that is kept, so that only the first transfer of a size allocates while it is timed."""
        if way not in self._buffers or self._buffers[way].numel() < num_bytes:
            self._buffers[way] = torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)
        return self._buffers[way][:num_bytes]

    def _channel(self, level: int) -> tuple[Channel, tuple[int, ...]]:
        place, size = self._place, self.cluster.sizes[level]
        siblings = tuple(self.cluster.rank_at((*place[:level], at, *place[level + 1 :])) for at in range(size))
        channel = self._transport.channel(f"probe_{level}", siblings)
        channel.prepare(self.device)  # needs all siblings, and later not all of them send in pairs
        return channel, siblings


def probe_links(probe: LinkProbe, *, limit_s: float, only_unknown: bool = False) -> Cluster:
    """The job's levels with their links.  All ranks must call this.

    limit_s: for all levels together; the first transfers over a slow link may take longer.
    only_unknown: whether links whose rate and latency are known are left as they are.
    """
    levels = list(probe.cluster.levels)
    for index, level in enumerate(levels):
        is_known = None not in (level.link.bandwidth_bytes_per_s, level.link.latency_s)
        if level.size > 1 and not (only_unknown and is_known):
            levels[index] = probe.measure(index, limit_s=limit_s / len(levels))
    return Cluster(tuple(levels))
