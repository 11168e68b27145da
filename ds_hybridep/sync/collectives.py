# SPDX-License-Identifier: Apache-2.0
"""Sums and gathers over all ranks of a job, level by level, so that a byte crosses a slow link once per child.

A vector is cut into one block per rank.  To sum, ranks first trade blocks inside the fast level, each adding up what
is meant for its own column of the next slower level; what is left to cross the slow link is one sum per child and
block.  A gather goes the same way back.  Two DCs of two GPUs, blocks a b c d for ranks 0 1 2 3, `+` a sum of two:

    rank             0          1          2          3
    start         a b c d    a b c d    a b c d    a b c d
    sum, gpu      a+  c+       b+  d+   a+  c+       b+  d+    0 and 1 trade b d for a c
    sum, dc       a            b            c            d     0 and 2 trade c+ for a+
    gather, dc    a   c        b   d    a   c        b   d     the same trades backwards
    gather, gpu   a b c d    a b c d    a b c d    a b c d

Over the slow link each DC sends half of the vector for a sum, and half for a gather.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_hybridep.transport.channels import Channel, Purpose, Transport

SUM = Purpose("dense", "sum of dense gradients")
GATHER = Purpose("dense", "gather of dense parameters")


@dataclass(frozen=True)
class _LevelPeers:
    """The ranks that differ from this one at one level only, and the blocks that each of them carries further."""

    channel: Channel
    ranks: tuple[int, ...]  # by their coordinate at the level, this rank among them
    blocks: tuple[tuple[int, ...], ...]  # of each: all ranks that share its coordinates from this level inwards
    own: int  # index of this rank

    @property
    def others(self) -> list[int]:
        return [at for at in range(len(self.ranks)) if at != self.own]


class LevelCollectives:
    """Collectives over all ranks of the job; every rank must call each with the same sizes and in the same order.

    Results are bit-identical on all ranks and do not depend on timing: each block is summed by one rank, in the order
    of the coordinates.  16-bit types are summed in fp32 and rounded once per level.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.world_size = transport.world_size
        cluster = transport.cluster
        places = [cluster.place_of(rank) for rank in range(self.world_size)]
        own = places[self.rank]
        self._levels: list[_LevelPeers] = []  # slowest first
        for level, size in enumerate(cluster.sizes):
            if size > 1:
                ranks = tuple(cluster.rank_at((*own[:level], at, *own[level + 1 :])) for at in range(size))
                blocks = tuple(
                    tuple(rank for rank, place in enumerate(places) if place[level:] == (at, *own[level + 1 :]))
                    for at in range(size)
                )
                self._levels.append(_LevelPeers(transport.channel("dense", ranks), ranks, blocks, own[level]))

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace a contiguous tensor by its sum over all ranks."""
        blocks = list(tensor.detach().view(-1).tensor_split(self.world_size))
        self._reduce(blocks)
        self._gather(blocks)

    def reduce_slices(self, tensor: Tensor, slices: Sequence[tuple[int, int]]) -> None:
        """Replace the slices of a contiguous tensor that are this rank's by their sums; the others stay as they are.

        slices: (rank that needs the sum, number of elements), in the order of the tensor; equal on all ranks.
        """
        pieces = tensor.detach().view(-1).split([num_elements for _, num_elements in slices])
        by_owner: list[list[Tensor]] = [[] for _ in range(self.world_size)]
        for (owner, _), piece in zip(slices, pieces, strict=True):
            by_owner[owner].append(piece)
        blocks = [torch.cat(pieces) if pieces else tensor.new_empty(0) for pieces in by_owner]
        self._reduce(blocks)
        own = by_owner[self.rank]
        for piece, total in zip(own, blocks[self.rank].split([piece.numel() for piece in own]), strict=True):
            piece.copy_(total)

    def all_gather(self, output: Tensor, own: Tensor) -> None:
        """Fill a contiguous `output` with the equally large tensors `own` of all ranks, in rank order."""
        blocks = output.detach().view(self.world_size, -1).unbind(0)
        blocks[self.rank].copy_(own.detach().view(-1))
        self._gather(blocks)

    def _reduce(self, blocks: list[Tensor]) -> None:
        """Sum block r to rank r; what other blocks hold afterwards is of no use."""
        for level in reversed(self._levels):
            own = level.blocks[level.own]
            sends = [(level.ranks[at], blocks[block]) for at in level.others for block in level.blocks[at]]
            parts = {(at, block): torch.empty_like(blocks[block]) for at in level.others for block in own}
            receives = [(level.ranks[at], part) for (at, _), part in parts.items()]
            level.channel.start(sends, receives, SUM).wait()
            for block in own:
                total = blocks[block]
                _sum_in_order(total, [parts.get((at, block), total) for at in range(len(level.ranks))])

    def _gather(self, blocks: Sequence[Tensor]) -> None:
        """Fill every block r with that of rank r: the trades of `_reduce` backwards."""
        for level in self._levels:
            sends = [(level.ranks[at], blocks[block]) for at in level.others for block in level.blocks[level.own]]
            receives = [(level.ranks[at], blocks[block]) for at in level.others for block in level.blocks[at]]
            level.channel.start(sends, receives, GATHER).wait()


def _sum_in_order(target: Tensor, parts: Sequence[Tensor]) -> None:
    """target = parts[0] + parts[1] + ...; `target` may be one of them."""
    is_narrow = target.dtype in (torch.float16, torch.bfloat16)
    total = parts[0].float() if is_narrow else parts[0].clone()
    for part in parts[1:]:
        total += part
    target.copy_(total)
