# SPDX-License-Identifier: Apache-2.0
"""Rank <-> position <-> (domain, offset) of one expert-parallel group, and which rank owns which expert."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from ds_hybridep.errors import PlanError
from ds_hybridep.geometry.cluster import Cluster, divisors, flatten, unflatten

MAX_LISTED = 8  # items of a long list that an error message spells out


@dataclass(frozen=True)
class Partition:
    """One expert-parallel group cut into domains.  Use `Partition.build`, which checks its arguments.

    group_ranks: [G] global ranks, in the order of their rank inside the group.
    coordinates: per level, the ascending cluster coordinates of the group's ranks.  The *position* of a rank is the
        index of its coordinate among these, so a strided group also counts 0, 1, 2 ...

    Example: 4 DCs of 4 GPUs, all in the group, with domain sizes (2, 4):

        rank     place = position   domain   offset
        0        (0, 0)             (0, 0)   (0, 0)    domain 0 = ranks 0 .. 7, the DCs 0 and 1
        6        (1, 2)             (0, 0)   (1, 2)
        14       (3, 2)             (1, 0)   (1, 2)    peer of rank 6

    Source: paper, section on domains (multi-level place, domain index, offset).
    """

    cluster: Cluster
    group_ranks: tuple[int, ...]
    coordinates: tuple[tuple[int, ...], ...]
    domain_sizes: tuple[int, ...]

    @classmethod
    def build(cls, cluster: Cluster, group_ranks: Sequence[int], domain_sizes: Sequence[int]) -> "Partition":
        """Cut the group `group_ranks` into domains.  Raises PlanError that names the setting to change."""
        coordinates = _grid_coordinates(cluster, group_ranks)
        if len(domain_sizes) != len(cluster.levels):
            raise PlanError(
                f"{len(domain_sizes)} domain sizes {tuple(domain_sizes)} were given for the "
                f"{len(cluster.levels)} levels {cluster}; give one for each level"
            )
        for level, size in enumerate(domain_sizes):
            if size < 1 or len(coordinates[level]) % size:
                raise PlanError(_does_not_tile(cluster, level, domain_size=size, span=len(coordinates[level])))
        return cls(cluster, tuple(group_ranks), coordinates, tuple(domain_sizes))

    @property
    def num_levels(self) -> int:
        return len(self.domain_sizes)

    @cached_property
    def spans(self) -> tuple[int, ...]:
        """Number of positions of the group at each level; their product is the size of the group."""
        return tuple(len(level_coordinates) for level_coordinates in self.coordinates)

    @cached_property
    def domain_counts(self) -> tuple[int, ...]:
        """Number of domains at each level: spans / domain_sizes."""
        return tuple(span // size for span, size in zip(self.spans, self.domain_sizes, strict=True))

    @cached_property
    def num_domains(self) -> int:
        return math.prod(self.domain_counts)

    @cached_property
    def domain_size(self) -> int:
        return math.prod(self.domain_sizes)

    def position_of(self, rank: int) -> tuple[int, ...]:
        """Position of `rank` at each level.  Raises PlanError if the rank is not in the group."""
        pairs = list(zip(self.coordinates, self.cluster.place_of(rank), strict=True))
        if any(coordinate not in own for own, coordinate in pairs):
            raise PlanError(f"rank {rank} is not in the expert-parallel group of ranks {_listed(self.group_ranks)}")
        return tuple(own.index(coordinate) for own, coordinate in pairs)

    def domain_of(self, rank: int) -> tuple[int, ...]:
        """Domain coordinate of `rank` at each level."""
        return tuple(p // size for p, size in zip(self.position_of(rank), self.domain_sizes, strict=True))

    def offset_of(self, rank: int) -> tuple[int, ...]:
        """Offset of `rank` inside its domain at each level."""
        return tuple(p % size for p, size in zip(self.position_of(rank), self.domain_sizes, strict=True))

    def domain_index(self, rank: int) -> int:
        """Number of `rank`'s domain, 0 .. num_domains - 1, level 0 outermost."""
        return flatten(self.domain_of(rank), self.domain_counts)

    def offset_index(self, rank: int) -> int:
        """Number of `rank` inside its domain, 0 .. domain_size - 1, level 0 outermost."""
        return flatten(self.offset_of(rank), self.domain_sizes)

    def domain_ranks(self, rank: int) -> tuple[int, ...]:
        """[domain_size] ranks of `rank`'s domain, itself included, in the order of their offset index."""
        return self._ranks_of_domain(self.domain_index(rank))

    def peer_of(self, rank: int, domain_index: int) -> int:
        """Rank of the domain `domain_index` with the same offset as `rank`; in its own domain, `rank` itself."""
        return self._rank_at(unflatten(domain_index, self.domain_counts), self.offset_of(rank))

    def gather_peers(self, rank: int, level: int) -> tuple[int, ...]:
        """[domain_sizes[level]] ranks of `rank`'s domain whose offset may differ at `level` only, in offset order."""
        domain, offset = self.domain_of(rank), self.offset_of(rank)
        offsets = (_with_level(offset, level, other) for other in range(self.domain_sizes[level]))
        return tuple(self._rank_at(domain, other) for other in offsets)

    def exchange_peers(self, rank: int, level: int) -> tuple[int, ...]:
        """[domain_counts[level]] peers of `rank` whose domain may differ at `level` only, in domain order."""
        domain, offset = self.domain_of(rank), self.offset_of(rank)
        domains = (_with_level(domain, level, other) for other in range(self.domain_counts[level]))
        return tuple(self._rank_at(other, offset) for other in domains)

    def experts_per_rank(self, num_experts: int) -> int:
        """Number of experts that each rank owns.  Raises PlanError if the group cannot share them evenly."""
        num_ranks = len(self.group_ranks)
        if num_experts < 1 or num_experts % num_ranks:
            raise PlanError(
                f"{num_experts} experts cannot be shared evenly by the {num_ranks} ranks of the expert-parallel "
                f"group; choose ep_size so that it divides the number of experts"
            )
        return num_experts // num_ranks

    def domain_experts(self, domain_index: int, num_experts: int) -> tuple[int, ...]:
        """[domain_size * e] experts of a domain in slot order: by offset index of the owner, then local index.

        The i-th rank of the group owns the i-th block of experts, as in DeepSpeed.
        """
        num_owned, owners = self.experts_per_rank(num_experts), self._ranks_of_domain(domain_index)
        firsts = (self.group_ranks.index(owner) * num_owned for owner in owners)
        return tuple(expert for first in firsts for expert in range(first, first + num_owned))

    def _rank_at(self, domain: Sequence[int], offset: Sequence[int]) -> int:
        parts = zip(self.coordinates, domain, self.domain_sizes, offset, strict=True)
        return self.cluster.rank_at([own[at * size + inside] for own, at, size, inside in parts])

    def _ranks_of_domain(self, domain_index: int) -> tuple[int, ...]:
        domain = unflatten(domain_index, self.domain_counts)
        offsets = (unflatten(offset_index, self.domain_sizes) for offset_index in range(self.domain_size))
        return tuple(self._rank_at(domain, offset) for offset in offsets)


def _grid_coordinates(cluster: Cluster, group_ranks: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Ascending coordinates of the group at each level.  Raises PlanError if the group is not their whole product."""
    members = set(group_ranks)
    if not members:
        raise PlanError("the expert-parallel group has no ranks")
    if len(members) != len(group_ranks):
        raise PlanError(f"the expert-parallel group repeats a rank: {_listed(group_ranks)}")
    by_level = zip(*(cluster.place_of(rank) for rank in group_ranks), strict=True)
    coordinates = tuple(tuple(sorted(set(level_coordinates))) for level_coordinates in by_level)
    num_places = math.prod(len(level_coordinates) for level_coordinates in coordinates)
    # The members are distinct and lie inside the product, so equal sizes mean equal sets.
    if num_places != len(members):
        used = " x ".join(
            f"{level.name} {{{_listed(level_coordinates)}}}"
            for level, level_coordinates in zip(cluster.levels, coordinates, strict=True)
        )
        raise PlanError(
            f"the expert-parallel group of ranks {_listed(group_ranks)} is no regular grid of the levels {cluster}: "
            f"its {len(members)} ranks touch {used}, which is {num_places} places; choose an ep_size that is "
            f"a divisor of one level's size times all sizes below it (above it, for a strided group), or change "
            f"hybridep.levels"
        )
    return coordinates


def _does_not_tile(cluster: Cluster, level: int, *, domain_size: int, span: int) -> str:
    name, size = cluster.levels[level].name, cluster.levels[level].size
    advice = ""
    if span < size:
        advice = (
            "; for larger domains make the group span the level: raise ep_size, or set "
            '"use_data_before_expert_parallelism": true to stride the group over it'
        )
    return (
        f"hybridep.levels[{level}].domain_size is {domain_size}, but the expert-parallel group spans {span} of the "
        f"{size} children of level {name!r}; allowed there: {', '.join(map(str, divisors(span)))}{advice}"
    )


def _with_level(coordinates: tuple[int, ...], level: int, value: int) -> tuple[int, ...]:
    return (*coordinates[:level], value, *coordinates[level + 1 :])


def _listed(values: Iterable[int]) -> str:
    values = list(values)
    shown = ", ".join(map(str, values[:MAX_LISTED]))
    return shown if len(values) <= MAX_LISTED else f"{shown}, ... ({len(values)} in all)"
