# SPDX-License-Identifier: Apache-2.0
"""What bandwidth does it take: what the answer is at every bandwidth of the slowest link.

Rates on a grid are answered, and between two neighbours with different answers the border is searched.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ds_hybridep.geometry.cluster import BITS_PER_BYTE, known_or_assumed_bandwidths
from ds_hybridep.plan.planner import answer_of
from ds_hybridep.plan.question import Question
from ds_hybridep.plan.table import chosen_row, tokens_per_s
from ds_hybridep.plan.verdict import MOST_WAIT, why_not_for_you
from ds_hybridep.plan.words import GIGA, aligned, number, wrapped

GRID_GBPS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 400, 800)
BISECTIONS = 4  # of each border: within 1/16 of a step of the grid, on a logarithmic scale


@dataclass(frozen=True, kw_only=True)
class Point:
    """The answer at one bandwidth: this program's way, and what people have now.

    why_not: a word, if it is not for you.  layout: of this program's way.
    fits, now_fits: whether each can train this at all.
    """

    gbps: float
    for_you: bool
    why_not: str
    name: str
    layout: str
    training: str
    fits: bool
    step_s: float
    tokens_per_s: float
    now_name: str
    now_training: str
    now_fits: bool
    now_step_s: float

    def is_like(self, other: "Point") -> bool:
        """True if no border is between the two."""
        return (self.why_not, self.layout, self.now_name) == (other.why_not, other.layout, other.now_name)


def asked_gbps(question: Question) -> float:
    """The bandwidth that was asked for."""
    return known_or_assumed_bandwidths(question.cluster)[0] * BITS_PER_BYTE / GIGA


def sweep_wan(question: Question, grid: Sequence[float] = GRID_GBPS) -> list[Point]:
    """The points where another answer begins, the ends of the grid, and the bandwidth that was asked for."""
    asked = asked_gbps(question)
    points = [_at(question, gbps) for gbps in sorted({*grid, asked})]
    found = [points[0]]
    for low, high in zip(points, points[1:], strict=False):
        found += _borders(question, low, high, BISECTIONS)
        found += [high] if high.gbps == asked and found[-1] is not high else []
    return [*found, *([] if found[-1] is points[-1] else points[-1:])]


def _borders(question: Question, low: Point, high: Point, depth: int) -> list[Point]:
    """The slowest links, as far as searched, at which something begins between the two, `high` included."""
    if low.is_like(high):
        return []
    if depth == 0:
        return [high]
    middle = _at(question, math.sqrt(low.gbps * high.gbps))
    return _borders(question, low, middle, depth - 1) + _borders(question, middle, high, depth - 1)


def _at(question: Question, gbps: float) -> Point:
    cluster = question.cluster.with_link(0, bandwidth_bytes_per_s=gbps * GIGA / BITS_PER_BYTE)
    answer = answer_of(replace(question, cluster=cluster))
    row, now, why_not = chosen_row(answer), answer.now, why_not_for_you(answer)
    return Point(
        gbps=gbps,
        for_you=not why_not,
        why_not=why_not,
        name=row.name,
        layout=row.layout,
        training=row.training,
        fits=not row.lacking_bytes,
        step_s=row.step_s,
        tokens_per_s=tokens_per_s(question, row.step_s),
        now_name=now.name,
        now_training=now.training,
        now_fits=now.is_possible,
        now_step_s=now.step_s,
    )


def describe_sweep(question: Question, points: Sequence[Point]) -> str:
    """The points as a table."""
    outer, asked = question.cluster.levels[0].name, asked_gbps(question)
    header = (
        "",
        f"from, each {outer}",
        "for you",
        "this program",
        "gradients",
        "s/step",
        "without it",
        "s/step",
        "gain",
    )
    rows = [
        (
            "->" if one.gbps == asked else "",
            _rate(one.gbps),
            "yes" if one.for_you else f"no, {one.why_not}",
            one.name,
            one.training,
            number(one.step_s) if one.fits else "-",
            one.now_name,
            number(one.now_step_s) if one.now_fits else "-",
            f"{number(one.now_step_s / one.step_s)} x" if one.fits and one.now_fits else "",
        )
        for one in points
    ]
    notes = [
        "Each line holds up to the rate of the next; its seconds and its gain are those at its own rate. -> is the "
        "rate asked for, where plan answers the same. -: does not fit.",
        f"no, gain: what you can have without this program is about as fast, or faster. no, waits: GPUs compute less "
        f"than {1 - MOST_WAIT:.0%} of the time.",
    ]
    return "\n".join([aligned([header, *rows], left=(0, 1, 2, 3, 4, 6)), "", *map(wrapped, notes)])


def _rate(gbps: float) -> str:
    return f"{number(gbps)} Gbit/s" if gbps >= 1 else f"{number(gbps * 1e3)} Mbit/s"


def sweep_json(points: Sequence[Point]) -> list[dict[str, Any]]:
    return [asdict(one) for one in points]
