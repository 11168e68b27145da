# SPDX-License-Identifier: Apache-2.0
"""A training step as a program: what every rank does, in order.

    Run      compute, or be busy on the host, for some seconds
    Post     hand a message to the link and go on
    Wait     until the message has arrived
    Repeat   the same for each layer, or for each micro-step

All ranks run the same program.  A message says what a rank sends to each of its peers, who do the same.  `step` builds
the program of a plan, `stream_model` prices it with one clock for a rank and one for each link, and the simulator runs
it with flows that share links.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import Literal, get_args

from ds_hybridep.geometry.cluster import Cluster, latencies_of
from ds_hybridep.plan.plan import PricedPlan

Kind = Literal["tokens", "expert_weights", "expert_gradients", "dense_sync", "expert_sync"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# Of a rank's place at a level: its expert-parallel group, its domain in the group, its offset in the domain.
PlacePart = Literal["group", "domain", "offset"]


@dataclass(frozen=True)
class Peers:
    """Ranks that send to each other: their places differ in these parts of these levels, and in nothing else.

    is_ring: each rank sends only to the next one.
    """

    parts: tuple[PlacePart, ...]
    levels: tuple[int, ...]
    is_ring: bool = False

    def count(self, plan: PricedPlan, sizes: tuple[int, ...], level: int) -> int:
        """Number of a rank's peers whose places differ first at `level`; sizes: of the cluster's levels."""
        numbers = self.numbers(plan, sizes)
        return (numbers[level] - 1) * math.prod(numbers[level + 1 :])

    def numbers(self, plan: PricedPlan, sizes: tuple[int, ...]) -> list[int]:
        """By level, in how many places there a rank and its peers are."""
        of_parts = {
            "group": [size // span for size, span in zip(sizes, plan.spans, strict=True)],
            "domain": plan.domain_counts,
            "offset": plan.domain_sizes,
        }
        return [
            math.prod(of_parts[part][level] for part in self.parts) if level in self.levels else 1
            for level in range(len(sizes))
        ]


@dataclass(frozen=True, eq=False, kw_only=True)
class MessageStage:
    """What a rank sends to each of its peers at the same time; tuples have an entry for each level.

    fixed_bytes: to a peer at that distance, on each edge of a ring.
    row_bytes: if every token went there; beside the fixed ones.
    is_back: rows come back from where they were sent, so the chance is that of the sender's experts.
    uplink_bytes: over the busiest child's uplink in one direction, all ranks below it together.
    latencies_s: from the departure of the last byte to its arrival.
    """

    peers: Peers
    fixed_bytes: tuple[float, ...]
    row_bytes: tuple[float, ...]
    uplink_bytes: tuple[float, ...]
    latencies_s: tuple[float, ...]
    is_back: bool = False

    @classmethod
    def between(
        cls,
        peers: Peers,
        cluster: Cluster,
        plan: PricedPlan,
        fixed_bytes: Sequence[float],
        *,
        row_bytes: Sequence[float] = (),
        chances: Sequence[float] = (),
        is_back: bool = False,
    ) -> "MessageStage":
        """The stage between these peers of a plan.

        chances: by level, that a token goes to a given peer at that distance, a mean over the busiest uplink's ranks.
        """
        sizes, below = cluster.sizes, cluster.ranks_below
        rows, chances = row_bytes or [0.0] * len(sizes), chances or [0.0] * len(sizes)
        uplink_bytes = [
            below[level] * peers.count(plan, sizes, level) * (fixed_bytes[level] + rows[level] * chances[level])
            for level in range(len(sizes))
        ]
        return cls(
            peers=peers,
            fixed_bytes=tuple(fixed_bytes),
            row_bytes=tuple(rows),
            uplink_bytes=tuple(uplink_bytes),
            latencies_s=latencies_of(cluster),
            is_back=is_back,
        )

    @cached_property
    def levels(self) -> tuple[int, ...]:
        """Levels that something crosses."""
        return tuple(level for level, num_bytes in enumerate(self.uplink_bytes) if num_bytes > 0)


@dataclass(frozen=True, eq=False)
class Message:
    """What a rank sends and receives at a time; a stage begins when the one before has arrived.

    Messages of one kind follow each other.  Rows of tokens are urgent: they share links with all else.
    """

    kind: Kind
    label: str
    stages: tuple[MessageStage, ...]

    @cached_property
    def is_urgent(self) -> bool:
        return self.kind == "tokens"

    @cached_property
    def term(self) -> str:
        """The cause of waiting for it, as in `stream_model.TERM_WORDS`."""
        return f"{self.kind}_s"


@dataclass(frozen=True)
class Run:
    """Work of `seconds`.

    term: cause, as in `stream_model.TERM_WORDS`.
    is_computing: False for what the host does; the device is idle.
    grows_with_rows: under uneven routing, the work is in proportion to the rows that come to a rank.
    """

    term: str
    label: str
    seconds: float
    _: KW_ONLY
    is_computing: bool = True
    grows_with_rows: bool = False


@dataclass(frozen=True)
class Post:
    """Begin to send and to receive a message."""

    message: Message


@dataclass(frozen=True)
class Wait:
    """Wait until the message with the same number has arrived."""

    message: Message


@dataclass(frozen=True)
class Repeat:
    """Run the body once for each number.  Posts and waits in it are for the message with that number."""

    numbers: tuple[int, ...]
    body: tuple["Instruction", ...]


Instruction = Run | Post | Wait | Repeat
Program = tuple[Instruction, ...]


def peers_in(program: Program) -> Iterator[Peers]:
    """Who talks to whom in a program."""
    for one in program:
        if isinstance(one, Repeat):
            yield from peers_in(one.body)
        elif isinstance(one, Post):
            yield from (stage.peers for stage in one.message.stages)
