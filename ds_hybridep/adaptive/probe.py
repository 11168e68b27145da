# SPDX-License-Identifier: Apache-2.0
"""Measures the links of a job with its own communicator, level by level.

At each level the children of one parent form a ring, and ranks talk to those at the same place inside another child:

    rate      every rank sends to the next child and receives from the one before, all at once: what a job does
    latency   the first ranks of two neighbouring children pass a few bytes there and back

Two DCs of two GPUs, level dc: 0 <-> 2 and 1 <-> 3, so an uplink carries two messages in each direction.

A rate is that of one child's uplink in one direction, headers included, as the link's provider names it: payload bytes
x 1514/1448, the frame over the payload of a full TCP segment.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ds_hybridep.plan.cluster import Cluster, Level, Link
from ds_hybridep.plan.costs import ranks_below
from ds_hybridep.sync.dense import GroupSync
from ds_hybridep.sync.feedback import Encoding, StepChanges
from ds_hybridep.transport.channels import Channel, Purpose, Transport
from ds_hybridep.transport.streams import streams_of

WIRE_FACTOR = 1514 / 1448
NUM_PINGS = 20
PING_BYTES = 8
FIRST_BYTES = 1 << 16  # of the first transfer of a rank; each one is twice as long until they take long enough
MOST_BYTES = 1 << 27
LONG_ENOUGH_S = 0.4  # of a long transfer
SHORT_SHARE = 4  # a short one is as many times smaller
REPETITIONS = 5
CPU = torch.device("cpu")
PROBE = Purpose("control", "probe of a link")

Place = tuple[int, ...]  # of a child: coordinates down to its level


class LinkProbe:
    """Transfers made only to be timed; all ranks of the job must make the same calls, with nothing else under way."""

    def __init__(self, transport: Transport, device: torch.device = CPU) -> None:
        self._transport, self._device = transport, device
        self._cluster = transport.cluster
        self._place = self._cluster.place_of(transport.rank)
        exact = (None,) * len(transport.cluster.levels)
        ranks = range(transport.world_size)
        self._group = GroupSync(transport, ranks, "probe", Encoding(exact, exact), StepChanges(), CPU)
        self._buffers: dict[str, Tensor] = {}
        for level, size in enumerate(self._cluster.sizes):
            if size > 1:  # a rank that fails later is not waited for in a connection to it
                self._channel(level)

    def table(self, values: Sequence[float]) -> list[list[float]]:
        """[world_size][len(values)]: one or more values of all ranks, equal in every bit on each of them."""
        world_size = self._transport.world_size
        table = torch.zeros(world_size, len(values), dtype=torch.float64)
        table[self._transport.rank] = torch.tensor(values, dtype=torch.float64)
        if world_size > 1:
            self._group.all_reduce(table)
        rows: list[list[float]] = table.tolist()
        return rows

    def measure(self, level: int, *, limit_s: float) -> Level:
        """One level with its link; transfers are repeated for half of `limit_s`, the rest is for what comes before."""
        about = self._cluster.levels[level]
        if about.size == 1:
            return about
        latency_s = self.latency_s(level)
        return replace(about, link=Link(self._bytes_per_s(level, limit_s / 2), latency_s, about.link.connections))

    def latency_s(self, level: int) -> float:
        """Seconds one way between the first ranks of neighbouring children: the median, of the slowest pair."""
        samples = []
        for ping in range(NUM_PINGS + 2):
            self.table([0.0])
            round_trip_s = self._ping(level)
            if ping >= 2:  # the first packets of a connection take longer
                samples.append(round_trip_s / 2)
        return max(own_s for (own_s,) in self.table([statistics.median(samples)]))

    def burst(self, level: int, num_bytes: int, latency_s: float) -> float:
        """Bytes per second of the slowest uplink while every rank sends `num_bytes`, headers included.

        Call right after `table`, from which all ranks come together.  `latency_s` passes before anything arrives.
        """
        carried = self._carried(level, num_bytes)
        return min(_rate_of(carried, s, (0.0, latency_s)) for s in self._transfer_s(level, num_bytes).values())

    def _bytes_per_s(self, level: int, limit_s: float) -> float:
        """Rate of the slowest uplink, from the fastest transfers: other work on a machine only makes them slower.

        Transfers grow until they take long enough. Then long and short ones take turns, and the rate is what a long
        one carried more over the time that it took more: what a transfer costs whatever its size is in both.
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
        """Bytes over one uplink where each rank sends `num_bytes`, headers included."""
        return ranks_below(self._cluster)[level] * num_bytes * WIRE_FACTOR

    def _once(self, level: int, num_bytes: int) -> dict[Place, float]:
        """Like `_transfer_s`, but all ranks begin together."""
        self.table([0.0])
        return self._transfer_s(level, num_bytes)

    def _transfer_s(self, level: int, num_bytes: int) -> dict[Place, float]:
        """Seconds of each uplink in which every rank sends to the next child, as slow as the slowest at either end."""
        begin_s = time.perf_counter()
        self._pass_on(level, num_bytes)
        own_s = time.perf_counter() - begin_s
        seconds: dict[Place, float] = {}
        for rank, (took_s,) in enumerate(self.table([own_s])):
            *parent, at = self._cluster.place_of(rank)[: level + 1]
            # A sender may be done before its receiver is.
            for uplink in ((*parent, at), (*parent, (at - 1) % self._cluster.sizes[level])):
                seconds[uplink] = max(seconds.get(uplink, 0.0), took_s)
        return seconds

    def _pass_on(self, level: int, num_bytes: int) -> None:
        """Send to the next child and receive from the one before, to the end on this rank."""
        channel, siblings = self._channel(level)
        at = self._place[level]
        to, fro = siblings[(at + 1) % len(siblings)], siblings[at - 1]
        sends, receives = [(to, self._buffer("out", num_bytes))], [(fro, self._buffer("in", num_bytes))]
        channel.start(sends, receives, PROBE).wait()
        streams_of(self._device).synchronize()

    def _ping(self, level: int) -> float:
        """Seconds there and back between the first ranks of two neighbouring children; 0 on ranks in no pair."""
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
        """Memory that is there when the clock runs, but for the first transfer of that size."""
        if way not in self._buffers or self._buffers[way].numel() < num_bytes:
            self._buffers[way] = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        return self._buffers[way][:num_bytes]

    def _channel(self, level: int) -> tuple[Channel, tuple[int, ...]]:
        place, size = self._place, self._cluster.sizes[level]
        siblings = tuple(self._cluster.rank_at((*place[:level], at, *place[level + 1 :])) for at in range(size))
        channel = self._transport.channel(f"probe_{level}", siblings)
        channel.prepare(self._device)  # here, where all siblings are: not all of them send in pairs
        return channel, siblings


def _rate_of(num_bytes: float, seconds: float, less: tuple[float, float]) -> float:
    """Without the bytes and seconds of `less`; all of it where that took as long: a pause has struck it."""
    less_bytes, less_s = less if less[1] < seconds else (0.0, 0.0)
    return (num_bytes - less_bytes) / max(seconds - less_s, 1e-9)


def _slowest(
    carried: tuple[float, float], longs: Sequence[Mapping[Place, float]], shorts: Sequence[Mapping[Place, float]]
) -> float:
    """Rate of the slowest uplink by the fastest of its long and its short transfers, which carry `carried` bytes."""
    long_bytes, short_bytes = carried
    return min(
        _rate_of(long_bytes, min(one[uplink] for one in longs), (short_bytes, min(one[uplink] for one in shorts)))
        for uplink in longs[0]
    )


def probe_links(transport: Transport, *, limit_s: float) -> Cluster:
    """The job's levels with their links; all ranks must call.

    limit_s: for all levels together; a slow link may need more for its first transfers.
    """
    probe, sizes = LinkProbe(transport), transport.cluster.sizes
    share_s = limit_s / max(sum(size > 1 for size in sizes), 1)
    return Cluster(tuple(probe.measure(level, limit_s=share_s) for level in range(len(sizes))))
