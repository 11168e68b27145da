# SPDX-License-Identifier: Apache-2.0
"""Says which rank or link is to blame for the end of a job, from what one rank knows.  All functions are pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ds_hybridep.plan.cluster import Cluster
from ds_hybridep.transport.heartbeats import FACTS, Fact

SILENT_S = 5.0  # a rank is silent after this long without news of it


@dataclass(frozen=True)
class Entry:
    """What is known about another rank."""

    age_s: float | None  # since the last news of it, direct or through others; None: never
    step: int = 0  # optimizer steps that it had made then


@dataclass(frozen=True)
class Direct:
    """The connection with a peer."""

    age_s: float | None  # since the peer was last heard on this connection; None: never
    answer: str = ""  # of the peer's host: "answers", "refused", "nothing"


@dataclass(frozen=True, kw_only=True)
class View:
    """All that one rank knows."""

    rank: int
    cluster: Cluster
    timeout_s: float
    step: int  # of this rank
    others: Mapping[int, Entry]
    direct: Mapping[int, Direct] = field(default_factory=dict)
    facts: Sequence[Fact] = ()  # in the order in which they came
    last_transfer: str = ""


def cause_of(view: View) -> str:
    """Say in one line what is wrong, beginning with the rank, the domain or the link that is to blame.

    Empty if no rank told the cause, is silent or has left, and every peer is heard.
    """
    return _told(view) or _silent(view) or _broken_link(view) or _left(view)


def _silent_ranks(view: View) -> set[int]:
    return {
        rank
        for rank, entry in view.others.items()
        if (entry.age_s is None or entry.age_s > SILENT_S) and not _has_left(view, rank)
    }


def _told(view: View) -> str:
    facts = [fact for fact in view.facts if fact.kind != "left" and fact.rank != view.rank]
    if not facts:
        return ""
    # Of several facts, the first one of the most telling kind counts.
    first = min(facts, key=lambda fact: FACTS.index(fact.kind))
    if first.kind == "verdict":
        return first.text
    where = _last_seen(view, first.rank)
    if first.kind == "failed":
        return f"rank {first.rank} failed: {first.text}{where}"
    return f"rank {first.rank} ended without a word ({first.text}): killed, out of memory, or crashed{where}"


def _last_seen(view: View, rank: int) -> str:
    entry = view.others.get(rank)
    return f"; last seen in step {entry.step}" if entry is not None and entry.age_s is not None else ""


def _silent(view: View) -> str:
    silent = _silent_ranks(view)
    if not silent:
        return ""
    level, ranks, whole = _widest(view, silent)
    ages = [entry.age_s for rank in ranks if (entry := view.others[rank]).age_s is not None]
    since = f"for {max(age for age in ages if age is not None):.0f} s" if ages else "since the start"
    more = sorted(silent - set(ranks))
    also = f"; silent too: ranks {more}" if more else ""
    answers = {view.direct[rank].answer for rank in ranks if rank in view.direct}
    name = view.cluster.levels[level].name
    if not whole:
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"
        return f"{who} silent {since}: {_reason(answers)}{_last_seen(view, ranks[0])}{also}"
    theirs, ours = view.cluster.place_of(ranks[0])[level], view.cluster.place_of(view.rank)[level]
    if "answers" in answers:
        what = f"rank {ranks[0]}" if len(ranks) == 1 else f"{name} {theirs} (ranks {ranks})"
        return f"{what} silent {since}: {_reason(answers)}{_last_seen(view, ranks[0])}{also}"
    others = {view.cluster.place_of(rank)[level] for rank in silent} - {ours}
    if len(others) == view.cluster.levels[level].size - 1 and len(others) > 1:
        return (
            f"{name} {ours} (this rank's) is cut off at level '{name}': nothing was heard of any other {name} "
            f"{since}; look at its uplink"
        )
    who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks}"
    return (
        f"{name} {theirs} ({who}) silent {since}: the link of level '{name}' between {name} {ours} and "
        f"{name} {theirs} is cut, or {name} {theirs} is down{_last_seen(view, ranks[0])}{also}"
    )


def _reason(answers: set[str]) -> str:
    if "answers" in answers:
        return "its host answers, but the process does not run (stopped, swapping, or hanging in C code)"
    if "refused" in answers:
        return "the process is gone"
    if "nothing" in answers:
        return "its host does not answer (down, or cut off)"
    return "stopped, down or cut off"


def _widest(view: View, silent: set[int]) -> tuple[int, list[int], bool]:
    """Return level and ranks of the widest other domain that is silent as a whole, and True; else all silent ranks."""
    cluster, inner = view.cluster, view.cluster.num_ranks
    for level, size in enumerate(cluster.sizes):
        inner //= size
        own_parent, own_child = view.rank // (inner * size), view.rank // inner
        for child in range(own_parent * size, (own_parent + 1) * size):
            ranks = list(range(child * inner, (child + 1) * inner))
            is_one_of_many = inner == 1 and size > 2  # one rank among several: blame it, not its link
            if child != own_child and silent.issuperset(ranks) and not (is_one_of_many and level > 0):
                return level, ranks, True
    levels = [cluster.level_between(view.rank, rank) or 0 for rank in silent]
    return min(levels), sorted(silent), False


def _broken_link(view: View) -> str:
    """Blame a link if this rank hears nothing over it, though others hear the ranks behind it."""
    pairs: dict[tuple[int, int, int], list[bool]] = {}
    for rank, direct in view.direct.items():
        level = view.cluster.level_between(view.rank, rank)
        if level is not None and not _has_left(view, rank):
            ours, theirs = view.cluster.place_of(view.rank)[level], view.cluster.place_of(rank)[level]
            pairs.setdefault((level, ours, theirs), []).append(direct.age_s is None or direct.age_s > SILENT_S)
    for (level, ours, theirs), are_silent in sorted(pairs.items()):
        if all(are_silent):
            name = view.cluster.levels[level].name
            return (
                f"the link of level '{name}' between {name} {ours} and {name} {theirs} passes nothing, though both "
                f"are alive: others hear both"
            )
    return ""


def _left(view: View) -> str:
    left = sorted(fact.rank for fact in view.facts if fact.kind == "left")
    if not left:
        return ""
    who = f"rank {left[0]} has" if len(left) == 1 else f"ranks {left} have"
    return f"{who} ended or detached (the script returned, or called exit), while others wait in a collective"


def _has_left(view: View, rank: int) -> bool:
    return any(fact.rank == rank and fact.kind == "left" for fact in view.facts)


def report(view: View, cause: str, status: int) -> str:
    """Return the message of a rank that ends: the cause, then what is known of every rank, and what to do."""
    this = f"this is rank {view.rank}, in step {view.step}"
    lines = [f"hybridep: {cause}", f"  {this}; it ends with exit status {status}"]
    by_state: dict[str, list[int]] = {}
    ends = {fact.rank: fact.kind for fact in view.facts if fact.kind != "verdict"}
    for rank, entry in sorted(view.others.items()):
        if rank in ends:
            said = "has left" if ends[rank] == "left" else f"has ended, was last seen in step {entry.step}"
        elif entry.age_s is None:
            said = "never heard of"
        elif entry.age_s > SILENT_S:
            said = f"silent for {entry.age_s:.0f} s, was in step {entry.step}"
        else:
            said = f"alive, in step {entry.step}"
        by_state.setdefault(said, []).append(rank)
    lines += [f"  rank{'s' * (len(ranks) > 1)} {_short(ranks)}: {said}" for said, ranks in by_state.items()]
    if view.last_transfer:
        lines.append(f"  last transfer of this rank: {view.last_transfer}")
    lines.append(
        "  what to do: read the log of the rank that the first line names, then restart from the last checkpoint; "
        f"if it was only silent for a while, raise hybridep.timeout_s (now {view.timeout_s:g})"
    )
    return "\n".join(lines) + "\n"


def _short(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:16])) + (f" and {len(ranks) - 16} more" if len(ranks) > 16 else "")
