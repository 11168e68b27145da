# SPDX-License-Identifier: Apache-2.0
"""Measures the links of a job with its own communicator, level by level.

At each level the children of one parent form a ring, and ranks talk to those at the same place inside the next child:

    together   every rank sends to the next child and receives from the one before, all at once: what a job does
    one pair   the first rank of every other child sends to the next child, alone; then the other way round
    flows      the same over several connections side by side: more than one pair means that one connection is too few

Two DCs of two GPUs, level dc, together: 0 <-> 2 and 1 <-> 3, so an uplink carries two messages in each direction.

A rate is that of one child's uplink in one direction, headers included, as the link's provider names it: payload bytes
x 1514/1448, the frame over the payload of a full TCP segment.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_hybridep.plan.cluster import Cluster, Level, Link
from ds_hybridep.sync.collectives import LevelCollectives
from ds_hybridep.transport.channels import Channel, Purpose, Transport
from ds_hybridep.transport.streams import streams_of

WIRE_FACTOR = 1514 / 1448
NUM_FLOWS = 4
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


@dataclass(frozen=True)
class Spread:
    """Of several samples of one quantity."""

    median: float
    p10: float
    p90: float

    @classmethod
    def of(cls, samples: Sequence[float]) -> "Spread":
        """Raises ValueError where there are no samples."""
        ordered = sorted(samples)
        if not ordered:
            raise ValueError("a spread needs at least one sample")
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[round(0.1 * last)], ordered[round(0.9 * last)])


@dataclass(frozen=True)
class LevelProbe:
    """One level's links as measured; of a level with one child nothing is, and all are None.

    latency_s: one way, half of a round trip of 8 bytes.
    capacity_bytes_per_s: of the slowest uplink while all ranks send both ways, from the fastest transfers: what else a
        machine does can only make them slower.  What plans take for the link.
    together_bytes_per_s: the same, sample by sample.
    onward_bytes_per_s, backward_bytes_per_s: of one pair of ranks in one direction, the slowest pair.
    flows_bytes_per_s: of one pair over several connections.
    """

    name: str
    size: int
    latency_s: Spread | None = None
    capacity_bytes_per_s: float | None = None
    together_bytes_per_s: Spread | None = None
    onward_bytes_per_s: Spread | None = None
    backward_bytes_per_s: Spread | None = None
    flows_bytes_per_s: Spread | None = None

    @property
    def level(self) -> Level:
        """As plans take it."""
        if self.latency_s is None or self.capacity_bytes_per_s is None:
            return Level(self.name, self.size)
        return Level(self.name, self.size, Link(self.capacity_bytes_per_s, self.latency_s.median))


class LinkProbe:
    """Transfers made only to be timed; all ranks of the job must make the same calls, with nothing else under way.

    Args:
        transport: of the job; its levels say who talks to whom.
        device: of what is sent; copies to and from the host are timed with it.
    """

    def __init__(self, transport: Transport, device: torch.device = CPU) -> None:
        self._transport, self._device = transport, device
        self._cluster: Cluster = transport.cluster
        self._place = self._cluster.place_of(transport.rank)
        self._collectives = LevelCollectives(transport)
        self._buffers: dict[tuple[str, int], Tensor] = {}

    def table(self, values: Sequence[float]) -> list[list[float]]:
        """[world_size][len(values)]: one or more values of all ranks, equal in every bit on each of them."""
        world_size = self._transport.world_size
        table = torch.zeros(world_size, len(values), dtype=torch.float64)
        table[self._transport.rank] = torch.tensor(values, dtype=torch.float64)
        if world_size > 1:
            self._collectives.all_reduce(table)
        rows: list[list[float]] = table.tolist()
        return rows

    def measure(self, level: int, *, is_thorough: bool, limit_s: float) -> LevelProbe:
        """All about one level.

        Args:
            level: index of the level.
            is_thorough: pairs and flows too, not only what a plan needs.
            limit_s: no repetition begins after this many seconds, but the first of each kind.
        """
        about = self._cluster.levels[level]
        if about.size == 1:
            return LevelProbe(about.name, 1)
        patterns = [_Pattern()]
        if is_thorough:
            patterns += [_Pattern(is_pair=True), _Pattern(is_pair=True, step=-1)]
            patterns += [_Pattern(is_pair=True, num_flows=NUM_FLOWS)]
        deadline_s, share_s = time.perf_counter() + limit_s, limit_s / (len(patterns) + 1)
        latency, rates = self.latency(level), []
        for pattern in patterns:
            rates.append(self._rate(level, pattern, min(time.perf_counter() + share_s, deadline_s)))
        return LevelProbe(about.name, about.size, latency, rates[0][1], *(spread for spread, _ in rates))

    def latency(self, level: int) -> Spread:
        """Seconds one way between the first ranks of neighbouring children; of the slowest pair."""
        samples = []
        for ping in range(NUM_PINGS + 2):
            self.table([0.0])
            begin_s = time.perf_counter()
            self._pass_on(level, _Pattern(is_pair=True), PING_BYTES)
            self._pass_on(level, _Pattern(is_pair=True, step=-1), PING_BYTES)
            seconds = time.perf_counter() - begin_s
            if ping >= 2:  # the first packets of a connection take longer
                samples.append(seconds / 2 if self._roles(level, _Pattern(is_pair=True))[0] else 0.0)
        own = Spread.of(samples)
        return Spread(*max(self.table([own.median, own.p10, own.p90])))

    def burst(self, level: int, num_bytes: int, latency_s: float) -> float:
        """Bytes per second of the slowest uplink while every rank sends `num_bytes`, headers included.

        Call right after `table`, from which all ranks come together.

        Args:
            level: index of the level.
            num_bytes: of each rank, equal on all.
            latency_s: one way, which passes before anything arrives.
        """
        wait = _Carried(0.0, latency_s)
        return min(one.minus(wait).bytes_per_s for one in self._timed(level, _Pattern(), num_bytes).values())

    def _rate(self, level: int, pattern: "_Pattern", until_s: float) -> tuple[Spread, float]:
        """Bytes per second of the slowest uplink, by samples and by the fastest transfers.

        Transfers grow until they take long enough. Then long and short ones take turns, and a sample is what the long
        one carried more over the time that it took more: what a transfer costs whatever its size (latency, a start
        that is not the same moment everywhere, a connection that gets up to speed) is in both.
        """
        num_bytes = FIRST_BYTES
        long = self._once(level, pattern, num_bytes)
        while (seconds := max(one.seconds for one in long.values())) < LONG_ENOUGH_S / 2 and num_bytes < MOST_BYTES:
            growth = min(max(LONG_ENOUGH_S / max(seconds, 1e-6), 2.0), 8.0)
            num_bytes = min(int(num_bytes * growth), MOST_BYTES)
            long = self._once(level, pattern, num_bytes)
        longs, shorts, rates = [], [], list[float]()
        while len(rates) < REPETITIONS:
            if rates and any(row[0] <= 0 for row in self.table([until_s - time.perf_counter()])):
                break
            shorts.append(self._once(level, pattern, num_bytes // SHORT_SHARE))
            longs.append(self._once(level, pattern, num_bytes))
            rates.append(_slowest(longs[-1:], shorts[-1:]))
        return Spread.of(rates), _slowest(longs, shorts)

    def _once(self, level: int, pattern: "_Pattern", num_bytes: int) -> "dict[Place, _Carried]":
        """What each uplink that was used has carried, and how long that took."""
        for flow in range(pattern.num_flows):
            self._channel(level, flow)  # connected before the clock starts
        self.table([0.0])  # all begin together
        return self._timed(level, pattern, num_bytes)

    def _timed(self, level: int, pattern: "_Pattern", num_bytes: int) -> "dict[Place, _Carried]":
        begin_s = time.perf_counter()
        took_part = self._pass_on(level, pattern, num_bytes)
        own_s = time.perf_counter() - begin_s if took_part else 0.0
        # A sender may be done before its receiver is: an uplink is as slow as the slowest at either end of it.
        size = self._cluster.sizes[level]
        is_sender, _ = self._roles(level, pattern)
        seconds: dict[Place, float] = {}
        sent: dict[Place, float] = {}
        for rank, (took_s, sent_bytes) in enumerate(self.table([own_s, float(num_bytes if is_sender else 0)])):
            place = self._cluster.place_of(rank)
            uplink = place[: level + 1]
            before = (*place[:level], (place[level] - pattern.step) % size)
            sent[uplink] = sent.get(uplink, 0.0) + sent_bytes
            for end in (uplink, before):
                seconds[end] = max(seconds.get(end, 0.0), took_s)
        return {up: _Carried(count * WIRE_FACTOR, seconds[up]) for up, count in sent.items() if count > 0}

    def _roles(self, level: int, pattern: "_Pattern") -> tuple[bool, bool]:
        """Whether this rank sends, and whether it receives."""
        at, size = self._place[level], self._cluster.sizes[level]
        if not pattern.is_pair:
            return True, True
        if any(self._place[level + 1 :]) or at >= size - size % 2:
            return False, False
        is_sender = (at % 2 == 0) == (pattern.step > 0)
        return is_sender, not is_sender

    def _pass_on(self, level: int, pattern: "_Pattern", num_bytes: int) -> bool:
        """One transfer of the pattern, from its start to its end on this rank; True where it takes part."""
        is_sender, is_receiver = self._roles(level, pattern)
        transfers = []
        for flow in range(pattern.num_flows):
            channel, siblings = self._channel(level, flow)
            at = siblings.index(self._transport.rank)
            to, fro = siblings[(at + pattern.step) % len(siblings)], siblings[(at - pattern.step) % len(siblings)]
            share = num_bytes // pattern.num_flows
            sends = [(to, self._buffer("out", flow, share))] if is_sender else []
            receives = [(fro, self._buffer("in", flow, share))] if is_receiver else []
            transfers.append(channel.start(sends, receives, PROBE))
        for transfer in transfers:
            transfer.wait()
        streams_of(self._device).synchronize()
        return is_sender or is_receiver

    def _buffer(self, way: str, flow: int, num_bytes: int) -> Tensor:
        """Memory that is there when the clock runs, but for the first transfer of that size."""
        if (way, flow) not in self._buffers or self._buffers[way, flow].numel() < num_bytes:
            self._buffers[way, flow] = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)
        return self._buffers[way, flow][:num_bytes]

    def _channel(self, level: int, flow: int) -> tuple[Channel, tuple[int, ...]]:
        place, size = self._place, self._cluster.sizes[level]
        siblings = tuple(self._cluster.rank_at((*place[:level], at, *place[level + 1 :])) for at in range(size))
        channel = self._transport.channel(f"probe_{level}_{flow}", siblings)
        channel.prepare(self._device)  # here, where all siblings are: not all of them send in pairs
        return channel, siblings


@dataclass(frozen=True)
class _Carried:
    """By one uplink, headers included."""

    num_bytes: float
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        return self.num_bytes / max(self.seconds, 1e-9)

    def minus(self, other: "_Carried") -> "_Carried":
        """The rest; all of it where the other one, which carried less, took as long: a pause has struck it."""
        if other.seconds >= self.seconds:
            return self
        return _Carried(self.num_bytes - other.num_bytes, self.seconds - other.seconds)


def _slowest(longs: Sequence[dict[Place, _Carried]], shorts: Sequence[dict[Place, _Carried]]) -> float:
    """Rate of the slowest uplink by the fastest of its long and of its short transfers."""

    def fastest(transfers: Sequence[dict[Place, _Carried]], uplink: Place) -> _Carried:
        return min((transfer[uplink] for transfer in transfers), key=lambda one: one.seconds)

    return min(fastest(longs, uplink).minus(fastest(shorts, uplink)).bytes_per_s for uplink in longs[0])


@dataclass(frozen=True)
class _Pattern:
    """Who sends: all, or one pair; to the next child (step 1) or to the one before; over how many connections."""

    is_pair: bool = False
    step: int = 1
    num_flows: int = 1


def probe_links(transport: Transport, *, is_thorough: bool, limit_s: float) -> tuple[LevelProbe, ...]:
    """All levels, slowest first; all ranks must call.

    limit_s: seconds for all of it, shared out among the levels that have several children; a slow link may need more
        for its first transfers.
    """
    probe = LinkProbe(transport)
    num_levels = sum(size > 1 for size in transport.cluster.sizes)
    return tuple(
        probe.measure(level, is_thorough=is_thorough, limit_s=limit_s / max(num_levels, 1))
        for level in range(len(transport.cluster.levels))
    )
