# SPDX-License-Identifier: Apache-2.0
"""Measures the links of a job with its own communicator, level by level.

At each level the children of one parent form a ring.  A rank talks to the ranks at its own place in other children:

    rate      every rank sends to the next child and receives from the one before, all at once, as in a job
    latency   the first ranks of two neighbouring children send each other a few bytes

Example: with two DCs of two GPUs, level dc has 0 <-> 2 and 1 <-> 3; an uplink carries two messages in each direction.

A rate is that of one child's uplink in one direction.  It includes headers, as the rates of providers do: payload
bytes x 1514/1448, the frame over the payload of a full TCP segment.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ds_hybridep.plan.cluster import Cluster, Level
from ds_hybridep.plan.costs import ranks_below
from ds_hybridep.sync.dense import GroupSync
from ds_hybridep.sync.feedback import Encoding
from ds_hybridep.sync.gradients import StepChanges
from ds_hybridep.transport.channels import Channel, Purpose, Transport
from ds_hybridep.transport.streams import streams_of

WIRE_FACTOR = 1514 / 1448
NUM_PINGS = 20
PING_BYTES = 8
FIRST_BYTES = 1 << 16  # of a rank's first transfer; each next one is 2 to 8 times larger until one takes long enough
MOST_BYTES = 1 << 27
LONG_ENOUGH_S = 0.4  # that a long transfer should take
SHORT_SHARE = 4  # a short transfer is this many times smaller than a long one
REPETITIONS = 5
CPU = torch.device("cpu")
PROBE = Purpose("control", "probe of a link")

Place = tuple[int, ...]  # of a child: coordinates down to its level


class LinkProbe:
    """Times transfers of its own.  All ranks of the job must make the same calls, while no other transfer runs."""

    def __init__(self, transport: Transport, device: torch.device = CPU) -> None:
        self._transport, self._device = transport, device
        self._cluster = transport.cluster
        self._place = self._cluster.place_of(transport.rank)
        exact = (None,) * len(transport.cluster.levels)
        ranks = range(transport.world_size)
        self._group = GroupSync(transport, ranks, "probe", Encoding(exact, exact), StepChanges(), CPU)
        self._buffers: dict[str, Tensor] = {}
        for level, size in enumerate(self._cluster.sizes):
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
        """One level with its link.  Half of `limit_s` is for transfers that measure the rate, the rest for latency."""
        about = self._cluster.levels[level]
        if about.size == 1:
            return about
        latency_s = self.latency_s(level)
        rate = self._bytes_per_s(level, limit_s / 2)
        return replace(about, link=replace(about.link, bandwidth_bytes_per_s=rate, latency_s=latency_s))

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
        carried = self._carried(level, num_bytes)
        return min(_rate_of(carried, s, (0.0, latency_s)) for s in self._transfer_s(level, num_bytes).values())

    def _bytes_per_s(self, level: int, limit_s: float) -> float:
        """Rate of the slowest uplink, from its fastest transfers: other work on a machine only makes them slower.

        Transfers grow until they take long enough. Then long and short ones take turns. The rate is the difference of
        their bytes over the difference of their times, so the fixed cost of a transfer does not count.
        """
        until_s, num_bytes = time.perf_counter() + limit_s, FIRST_BYTES
        seconds = max(self._once(level, num_bytes).values())
        while seconds < LONG_ENOUGH_S / 2 and num_bytes < MOST_BYTES:
            growth = min(max(LONG_ENOUGH_S / max(seconds, 1e-6), 2.0), 8.0)
            num_bytes = min(int(num_bytes * growth), MOST_BYTES)
            seconds = max(self._once(level, num_bytes).values())
        short_bytes = num_bytes // SHORT_SHARE
        carried = self._carried(level, num_bytes), self._carried(level, short_bytes)
        longs, shorts = [], []
        for repetition in range(REPETITIONS):
            if repetition and any(row[0] <= 0 for row in self.table([until_s - time.perf_counter()])):
                break
            shorts.append(self._once(level, short_bytes))
            longs.append(self._once(level, num_bytes))
        return _slowest(carried, longs, shorts)

    def _carried(self, level: int, num_bytes: int) -> float:
        """Bytes over one uplink, headers included, when each rank sends `num_bytes`."""
        return ranks_below(self._cluster)[level] * num_bytes * WIRE_FACTOR

    def _once(self, level: int, num_bytes: int) -> dict[Place, float]:
        """Like `_transfer_s`, but all ranks begin together."""
        self.table([0.0])
        return self._transfer_s(level, num_bytes)

    def _transfer_s(self, level: int, num_bytes: int) -> dict[Place, float]:
        """Send from every rank to the next child.  Returns each uplink's seconds: the most of a rank at either end."""
        begin_s = time.perf_counter()
        self._pass_on(level, num_bytes)
        own_s = time.perf_counter() - begin_s
        seconds: dict[Place, float] = {}
        for rank, (took_s,) in enumerate(self.table([own_s])):
            *parent, at = self._cluster.place_of(rank)[: level + 1]
            # A sender may finish before its receiver.
            for uplink in ((*parent, at), (*parent, (at - 1) % self._cluster.sizes[level])):
                seconds[uplink] = max(seconds.get(uplink, 0.0), took_s)
        return seconds

    def _pass_on(self, level: int, num_bytes: int) -> None:
        """Send to the next child, receive from the one before, and wait until both are done on this rank."""
        channel, siblings = self._channel(level)
        at = self._place[level]
        to, fro = siblings[(at + 1) % len(siblings)], siblings[at - 1]
        sends, receives = [(to, self._buffer("out", num_bytes))], [(fro, self._buffer("in", num_bytes))]
        channel.start(sends, receives, PROBE).wait()
        streams_of(self._device).synchronize()

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
            streams_of(self._device).synchronize()
        return time.perf_counter() - begin_s

    def _buffer(self, way: str, num_bytes: int) -> Tensor:
        """A buffer that is kept, so that only the first transfer of a size allocates while it is timed."""
        if way not in self._buffers or self._buffers[way].numel() < num_bytes:
            self._buffers[way] = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        return self._buffers[way][:num_bytes]

    def _channel(self, level: int) -> tuple[Channel, tuple[int, ...]]:
        place, size = self._place, self._cluster.sizes[level]
        siblings = tuple(self._cluster.rank_at((*place[:level], at, *place[level + 1 :])) for at in range(size))
        channel = self._transport.channel(f"probe_{level}", siblings)
        channel.prepare(self._device)  # needs all siblings, and later not all of them send in pairs
        return channel, siblings


def _rate_of(num_bytes: float, seconds: float, less: tuple[float, float]) -> float:
    """Bytes per second after subtracting `less`.  If `less` took as long, a pause hit it, and it is not subtracted."""
    less_bytes, less_s = less if less[1] < seconds else (0.0, 0.0)
    return (num_bytes - less_bytes) / max(seconds - less_s, 1e-9)


def _slowest(
    carried: tuple[float, float], longs: Sequence[Mapping[Place, float]], shorts: Sequence[Mapping[Place, float]]
) -> float:
    """Rate of the slowest uplink by its fastest long and short transfers, which carry `carried` bytes."""
    long_bytes, short_bytes = carried
    return min(
        _rate_of(long_bytes, min(one[uplink] for one in longs), (short_bytes, min(one[uplink] for one in shorts)))
        for uplink in longs[0]
    )


def probe_links(transport: Transport, *, limit_s: float) -> Cluster:
    """The job's levels with their links.  All ranks must call this.

    limit_s: for all levels together; the first transfers over a slow link may take longer.
    """
    probe, sizes = LinkProbe(transport), transport.cluster.sizes
    share_s = limit_s / max(sum(size > 1 for size in sizes), 1)
    return Cluster(tuple(probe.measure(level, limit_s=share_s) for level in range(len(sizes))))
