# SPDX-License-Identifier: Apache-2.0
"""The machines of a job as a tree of levels, and the place of each rank in it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ds_hybridep.errors import PlanError

# People write Gbit/s and ms; everything in here is in bytes and seconds.
BITS_PER_BYTE = 8
MS_PER_S = 1e3

# Assumed for unknown bandwidths: 10 Gbit/s Ethernet between DCs as on the paper's machines, times 8 for each level.
ASSUMED_SLOWEST_BYTES_PER_S = 1.25e9
ASSUMED_SPEEDUP_PER_LEVEL = 8.0


def flatten(coordinates: Sequence[int], sizes: Sequence[int]) -> int:
    """Row-major index of `coordinates` in a grid of `sizes`: the first coordinate is the outermost."""
    index = 0
    for coordinate, size in zip(coordinates, sizes, strict=True):
        index = index * size + coordinate
    return index


def unflatten(index: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Coordinates of a row-major `index` in a grid of `sizes`; the inverse of `flatten`."""
    coordinates = []
    for size in reversed(sizes):
        index, coordinate = divmod(index, size)
        coordinates.append(coordinate)
    return tuple(reversed(coordinates))


def divisors(number: int) -> tuple[int, ...]:
    """All divisors of a positive `number`, ascending."""
    small = [candidate for candidate in range(1, math.isqrt(number) + 1) if number % candidate == 0]
    large = [number // candidate for candidate in reversed(small) if candidate * candidate != number]
    return (*small, *large)


@dataclass(frozen=True)
class LinkSpeed:
    """The uplink of one child of a level in each direction, shared by all ranks below it; None: not known yet.

    connections: number of connections between two ranks for each purpose.
    congestion_control: of these connections; None: the system's.
    """

    bandwidth_bytes_per_s: float | None = None
    latency_s: float | None = None
    connections: int = 1
    congestion_control: str | None = None


@dataclass(frozen=True)
class Level:
    """One level of the tree: every parent has `size` children, joined by links of one speed."""

    name: str
    size: int
    link: LinkSpeed = LinkSpeed()


@dataclass(frozen=True)
class Cluster:
    """A job's ranks in row-major order over its levels; level 0 is the slowest and outermost.

    Example: two DCs of three GPUs each, so the levels are dc (2) and gpu (3):

        rank    0      1      2      3      4      5
        place  (0,0)  (0,1)  (0,2)  (1,0)  (1,1)  (1,2)
    """

    levels: tuple[Level, ...]

    def __post_init__(self) -> None:
        names = [level.name for level in self.levels]
        if not names:
            raise PlanError("a cluster has at least one level, but none was given")
        if len(set(names)) != len(names):
            raise PlanError(f"level names must differ, but they are {', '.join(names)}")

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(level.size for level in self.levels)

    @property
    def num_ranks(self) -> int:
        return math.prod(self.sizes)

    @cached_property
    def ranks_below(self) -> tuple[int, ...]:
        """By level, the ranks that share one uplink."""
        return tuple(math.prod(self.sizes[level + 1 :]) for level in range(len(self.levels)))

    def place_of(self, rank: int) -> tuple[int, ...]:
        """Coordinate of a global `rank` at each level.  Raises PlanError outside 0 .. num_ranks - 1."""
        if not 0 <= rank < self.num_ranks:
            raise PlanError(f"rank {rank} is outside the cluster {self}, whose ranks are 0 .. {self.num_ranks - 1}")
        return unflatten(rank, self.sizes)

    def rank_at(self, place: Sequence[int]) -> int:
        """Global rank at a `place`, the inverse of `place_of`.  Raises PlanError if the cluster has no such place."""
        sizes = self.sizes
        if len(place) != len(sizes) or any(not 0 <= one < size for one, size in zip(place, sizes, strict=True)):
            raise PlanError(f"the cluster {self} has no place {tuple(place)}")
        return flatten(place, sizes)

    def level_between(self, rank_a: int, rank_b: int) -> int | None:
        """Index of the slowest level that a message between two ranks crosses; None if both are the same rank."""
        place_a, place_b = self.place_of(rank_a), self.place_of(rank_b)
        for level, (coordinate_a, coordinate_b) in enumerate(zip(place_a, place_b, strict=True)):
            if coordinate_a != coordinate_b:
                return level
        return None

    def with_link(
        self, level: int, *, bandwidth_bytes_per_s: float | None = None, latency_s: float | None = None
    ) -> "Cluster":
        """The same cluster with another link at one level; None keeps the old value."""
        values = {"bandwidth_bytes_per_s": bandwidth_bytes_per_s, "latency_s": latency_s}
        known: dict[str, Any] = {key: value for key, value in values.items() if value is not None}
        levels = list(self.levels)
        levels[level] = replace(levels[level], link=replace(levels[level].link, **known))
        return Cluster(tuple(levels))

    def without_bandwidths(self) -> "Cluster":
        """The same cluster with unknown bandwidths."""
        links = (replace(level.link, bandwidth_bytes_per_s=None) for level in self.levels)
        return Cluster(tuple(replace(level, link=link) for level, link in zip(self.levels, links, strict=True)))

    def __str__(self) -> str:
        return " x ".join(f"{level.name} ({level.size})" for level in self.levels)


def latencies_of(cluster: Cluster) -> tuple[float, ...]:
    """One-way latency of each level in seconds; 0 if it is not known."""
    return tuple(level.link.latency_s or 0.0 for level in cluster.levels)


def known_or_assumed_bandwidths(cluster: Cluster) -> tuple[float, ...]:
    """Bytes/s by level. An unknown level has 8 times those of the level above; level 0 has 1.25e9 if none is known."""
    given = [level.link.bandwidth_bytes_per_s for level in cluster.levels]
    known = ((index, bandwidth) for index, bandwidth in enumerate(given) if bandwidth is not None)
    index, first = next(known, (0, ASSUMED_SLOWEST_BYTES_PER_S))
    assumed = first / ASSUMED_SPEEDUP_PER_LEVEL**index
    bandwidths: list[float] = []
    for bandwidth in given:
        bandwidths.append(assumed if bandwidth is None else bandwidth)
        assumed = bandwidths[-1] * ASSUMED_SPEEDUP_PER_LEVEL
    return tuple(bandwidths)
