# SPDX-License-Identifier: Apache-2.0
"""Which ranks exchange which slots at each level.

A *slot* holds what one rank of a group owns: its experts, or its share of the dense parameters.  Values travel level
by level, slowest first, so that each byte crosses a slow link once per child and not once per rank.  Gradients travel
the opposite way.

    domain sizes [2, 2], the rank at offset (0, 1) sends:
    gather    stage 0: slot 01 to (1, 1)               stage 1: slots 01, 11 to (0, 0)
    reduce    stage 1: slots 00, 10 to (0, 0)          stage 0: slot 11 to (1, 1)
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from ds_hybridep.geometry.cluster import flatten
from ds_hybridep.geometry.partition import Partition
from ds_hybridep.transport.channels import Channel, Transport


@dataclass(frozen=True, order=True)
class HotSlot:
    """The hot experts of a slot, which travel where the whole slot does not."""

    slot: int


SlotKey = int | HotSlot


@dataclass(frozen=True)
class StagePeer:
    """A rank that differs from this one at one level only, and the slots that pass between the two.

    slots_here: of owners on this rank's side of the level: their values go to the peer, their gradients come back.
    slots_there: of owners on the peer's side: their values come from the peer, their gradients go back.
    """

    rank: int
    slots_here: tuple[SlotKey, ...]
    slots_there: tuple[SlotKey, ...]


@dataclass(frozen=True)
class Stage:
    """One level's part of a gather or a reduce: a level at which the domain has several members.

    peers: in the order of their offsets.
    weights: the channel of gathers; None until `connect`.
    gradients: the channel of reduces.
    """

    level: int
    peers: tuple[StagePeer, ...]
    weights: Channel | None = None
    gradients: Channel | None = None


def gather_stages(partition: Partition, rank: int, hot_level: int | None = None) -> tuple[Stage, ...]:
    """Return the stages of a gather of weights as `rank` sees it, slowest level first, without channels.

    hot_level: over this level, and wherever a slot has crossed it, only the slot's hot experts travel.
    """
    sizes = partition.domain_sizes
    own = partition.offset_of(rank)

    def travelling(offsets: Iterable[tuple[int, ...]], level: int) -> tuple[SlotKey, ...]:
        return tuple(
            HotSlot(flatten(offset, sizes))
            if hot_level is not None and hot_level in (level, *_differing(offset, own))
            else flatten(offset, sizes)
            for offset in offsets
        )

    stages: list[Stage] = []
    slower: set[int] = set()
    for level, size in enumerate(sizes):
        if size == 1:
            continue
        # For each offset at this level: slots with any offset at slower levels, and the own offset at faster ones.
        offsets: list[Sequence[int]] = [range(n) if at in slower else (own[at],) for at, n in enumerate(sizes)]
        held = []
        for offset in range(size):
            offsets[level] = (offset,)
            held.append(travelling(itertools.product(*offsets), level))
        peers = [
            StagePeer(peer, slots_here=held[own[level]], slots_there=held[offset])
            for offset, peer in enumerate(partition.gather_peers(rank, level))
            if peer != rank
        ]
        stages.append(Stage(level, tuple(peers)))
        slower.add(level)
    return tuple(stages)


def _differing(offset: Sequence[int], other: Sequence[int]) -> list[int]:
    return [level for level, (one, its) in enumerate(zip(offset, other, strict=True)) if one != its]


def connect(stages: Sequence[Stage], transport: Transport, group: str, device: torch.device) -> tuple[Stage, ...]:
    """Return the stages with channels for tensors on `device`; all ranks of the domain must call in the same order.

    Each expert-parallel `group` has its own channels, so that operations of groups with other levels do not mix.
    """

    def channel(kind: str, stage: Stage) -> Channel:
        ranks = sorted((transport.rank, *(peer.rank for peer in stage.peers)))
        made = transport.channel(f"{group}_{kind}_{stage.level}", ranks, background=True)
        made.prepare(device)
        return made

    return tuple(
        replace(stage, weights=channel("weights", stage), gradients=channel("gradients", stage)) for stage in stages
    )
