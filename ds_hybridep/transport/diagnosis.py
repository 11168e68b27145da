# SPDX-License-Identifier: Apache-2.0
"""Says which rank or link is to blame for the end of a job, from what one rank knows.  All functions are pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ds_hybridep.geometry.cluster import Cluster
from ds_hybridep.link import BLOCKED, FAILED, LEFT, LOST, State

VERDICT = "verdict"  # what another rank has found to be the cause
GONE = State.GONE.value
ENDED = (FAILED, GONE, LEFT)  # kinds of news after which nothing comes of a rank, whoever waits for it
# Of several news, the first one of the most telling kind is the cause.
_TELLING = {
    FAILED: "rank {0} failed: {1}",
    BLOCKED: "{1}",
    GONE: "rank {0} ended without a word ({1}): killed, out of memory, or crashed",
    VERDICT: "{1}",
}
# What a rank that waits for another one's call of the model should be told.
UNEQUAL_CALLS = (
    "all ranks must call the model equally often, to evaluate too; if one calls `generate`, all must, with "
    "synced_gpus=True, which is the default here; "
)
BRIDGES = 4  # ranks of each domain with connections to other domains
NEARBY = 8  # up to so many domains, each has connections to all others


class News(NamedTuple):
    """What has become of a rank, or what it has found; as `link.Fact`, and which rank says so."""

    rank: int
    kind: str
    text: str
    by: int


def peers_of(cluster: Cluster, rank: int) -> list[int]:
    """Return the ranks that `rank` watches; few, mutual, and every rank is reached through them."""
    place, sizes = cluster.place_of(rank), cluster.sizes
    peers: set[int] = set()
    inner = cluster.num_ranks
    for level, size in enumerate(sizes):
        inner //= size
        if inner > 1 and rank % inner >= BRIDGES:
            continue
        steps: Iterable[int] = range(1, size) if size <= NEARBY else (1 << i for i in range(size.bit_length() - 1))
        for step in steps:
            for coordinate in ((place[level] + step) % size, (place[level] - step) % size):
                peers.add(cluster.rank_at((*place[:level], coordinate, *place[level + 1 :])))
    return sorted(peers - {rank})


@dataclass(frozen=True, kw_only=True)
class View:
    """All that one rank knows."""

    rank: int
    cluster: Cluster
    timeout_s: float
    step: int  # of this rank
    ages: Mapping[int, float] = field(default_factory=dict)  # seconds since a peer of this rank was heard
    steps: Mapping[int, int] = field(default_factory=dict)  # optimizer steps that it had made then
    news: Sequence[News] = ()  # in the order in which they came
    last_transfer: str = ""

    def ranks(self, *kinds: str) -> set[int]:
        """Return the ranks of which there are news of these kinds."""
        return {one.rank for one in self.news if one.kind in kinds}

    def cuts(self) -> set[tuple[int, int]]:
        """Return pairs of ranks of which the first has lost the second."""
        return {(one.by, one.rank) for one in self.news if one.kind == LOST}

    def silent(self) -> set[int]:
        """Return the ranks of which no news come, though they have not said that they end."""
        ended, cuts = self.ranks(*ENDED), self.cuts()
        reached, front = {self.rank}, [self.rank]
        while front:
            rank = front.pop()
            for peer in set(peers_of(self.cluster, rank)) - ended - reached:
                if not cuts & {(rank, peer), (peer, rank)}:
                    reached.add(peer)
                    front.append(peer)
        return set(range(self.cluster.num_ranks)) - reached - ended

    def last_seen(self, rank: int) -> str:
        return f"; last seen in step {self.steps[rank]}" if rank in self.steps else ""


def cause_of(view: View) -> str:
    """Say in one line what is wrong, beginning with the rank, the domain or the link that is to blame.

    Empty if no rank told the cause, is lost or has left.
    """
    return _told(view) or _silent(view) or _broken_link(view) or _left(view)


def _told(view: View) -> str:
    for kind, text in _TELLING.items():
        for one in view.news:
            if one.kind == kind and (one.rank != view.rank or kind == BLOCKED):
                is_of_one = kind in (FAILED, GONE)
                return text.format(one.rank, one.text) + (view.last_seen(one.rank) if is_of_one else "")
    return ""


def _silent(view: View) -> str:
    if not (silent := view.silent()):
        return ""
    level, ranks = _widest(view, silent)
    since = f"for {max(view.timeout_s, *(view.ages.get(rank, 0.0) for rank in ranks)):.0f} s"
    more = sorted(silent - set(ranks))
    rest = view.last_seen(ranks[0]) + (f"; silent too: ranks {more}" if more else "")
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"
    if level is None:
        said = next((one.text for one in view.news if one.kind == LOST and one.rank in ranks), "")
        return f"{who} silent {since}: {said.partition('; last, ')[2] or 'stopped, down or cut off'}{rest}"
    name = view.cluster.levels[level].name
    theirs, ours = view.cluster.place_of(ranks[0])[level], view.cluster.place_of(view.rank)[level]
    others = {view.cluster.place_of(rank)[level] for rank in silent} - {ours}
    if len(others) == view.cluster.levels[level].size - 1 and len(others) > 1:
        return (
            f"{name} {ours} (this rank's) is cut off at level '{name}': nothing was heard of any other {name} "
            f"{since}; look at its uplink"
        )
    return (
        f"{name} {theirs} ({who}) silent {since}: the link of level '{name}' between {name} {ours} and "
        f"{name} {theirs} is cut, or {name} {theirs} is down{rest}"
    )


def _widest(view: View, silent: set[int]) -> tuple[int | None, list[int]]:
    """Return level and ranks of the widest other domain that is silent as a whole; else None and all silent ranks."""
    inner = view.cluster.num_ranks
    for level, size in enumerate(view.cluster.sizes):
        inner //= size
        first = view.rank // (inner * size) * size  # child of this rank's parent
        for child in range(first, first + size):
            ranks = list(range(child * inner, (child + 1) * inner))
            is_one_of_many = inner == 1 and level > 0  # one rank: blame it, not its link
            if child != view.rank // inner and silent.issuperset(ranks) and not is_one_of_many:
                return level, ranks
    return None, sorted(silent)


def _broken_link(view: View) -> str:
    """Blame a link over which two ranks do not hear each other, though both are alive for others."""
    if not (cuts := view.cuts()):
        return ""
    ends = [view.cluster.place_of(rank) for rank in min(cuts)]
    level = next(at for at, (one, other) in enumerate(zip(*ends, strict=True)) if one != other)
    name = view.cluster.levels[level].name
    return (
        f"the link of level '{name}' between {name} {ends[0][level]} and {name} {ends[1][level]} passes nothing, "
        f"though both are alive: others hear both"
    )


def _left(view: View) -> str:
    if not (left := sorted(view.ranks(LEFT))):
        return ""
    who = f"rank {left[0]} has" if len(left) == 1 else f"ranks {left} have"
    return f"{who} ended or detached (the script returned, or called exit), while others wait in a collective"


def report(view: View, cause: str) -> str:
    """Return the message of a rank that ends: the cause, then what is known of every rank, and what to do."""
    known = {"has ended": view.ranks(FAILED, GONE), "has left": view.ranks(LEFT), "silent": view.silent()}
    by_state: dict[str, list[str]] = {}
    for rank in sorted(set(range(view.cluster.num_ranks)) - {view.rank}):
        state = next((state for state, ranks in known.items() if rank in ranks), "alive")
        state += f", was in step {view.steps[rank]}" if state in ("has ended", "silent") and rank in view.steps else ""
        by_state.setdefault(state, []).append(str(rank))
    lines = [f"hybridep: {cause}", f"  this is rank {view.rank}, in step {view.step}"]
    for state, ranks in by_state.items():
        more = f" and {len(ranks) - 16} more" if len(ranks) > 16 else ""
        lines.append(f"  rank{'s' * (len(ranks) > 1)} {', '.join(ranks[:16])}{more}: {state}")
    if view.last_transfer:
        lines.append(f"  last transfer of this rank: {view.last_transfer}")
    hint = f"; if it was only silent for a while, raise hybridep.timeout_s (now {view.timeout_s:g})"
    lines.append(
        "  what to do: read the log of the rank that the first line names, then restart from the last checkpoint"
        f"{'' if view.ranks(BLOCKED) else hint}"
    )
    return "\n".join(lines) + "\n"
