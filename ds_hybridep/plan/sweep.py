# SPDX-License-Identifier: Apache-2.0
"""What bandwidth does it take: which layout is fastest at every bandwidth of the slowest link.

Rates on a grid are priced, and between two neighbours with different winners the border is searched.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ds_hybridep.geometry.cluster import BITS_PER_BYTE
from ds_hybridep.plan.answer import TIE, Answer
from ds_hybridep.plan.planner import make_plan
from ds_hybridep.plan.question import Question
from ds_hybridep.plan.summary import GIGA, LEAST_GAIN, aligned
from ds_hybridep.plan.table import Row, rows_of, tokens_per_s

GRID_GBPS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 400, 800)
BISECTIONS = 4  # of each border: within 1/16 of a step of the grid, on a logarithmic scale


@dataclass(frozen=True, kw_only=True)
class Point:
    """The fastest way with the same training at one bandwidth, and what people have now.

    layout: what begins to win, apart from codecs of fast levels and where state lies.
    """

    gbps: float
    name: str
    layout: str
    step_s: float
    now_step_s: float
    tokens_per_s: float

    @property
    def is_worth_it(self) -> bool:
        return self.now_step_s >= LEAST_GAIN * self.step_s

    def is_like(self, other: "Point") -> bool:
        """True if no border is between the two."""
        return (self.layout, self.is_worth_it) == (other.layout, other.is_worth_it)


def sweep_wan(question: Question, grid: Sequence[float] = GRID_GBPS) -> list[Point]:
    """The points where another layout begins to win, or is no longer worth it, and the ends of the grid."""
    points = [_at(question, gbps) for gbps in grid]
    found = [points[0]]
    for low, high in zip(points, points[1:], strict=False):
        found += _borders(question, low, high, BISECTIONS)
    return [*found, points[-1]]


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
    answer = make_plan(replace(question, cluster=cluster))
    row = _winner(answer)
    return Point(
        gbps=gbps,
        name=row.name,
        layout=row.layout,
        step_s=row.step_s,
        now_step_s=answer.now.step_s,
        tokens_per_s=tokens_per_s(question, row.step_s),
    )


def _winner(answer: Answer) -> Row:
    """The fastest row that fits and is the same training; of equals, what people have, then what loses nothing."""
    refused = {way.name for way in answer.alternatives if way.refused}
    rows = [
        row
        for row in rows_of(answer)
        if not row.lacking_bytes
        and row.training != "local steps"
        and row.kind != "elsewhere"
        and row.name not in refused
    ]
    least_s = min(row.step_s for row in rows)
    return next(row for row in rows if row.step_s <= least_s * (1 + TIE))


def describe_sweep(question: Question, points: Sequence[Point]) -> str:
    """The points as a table."""
    outer = question.cluster.levels[0].name
    rows = [
        (
            _rate(one.gbps),
            one.name,
            f"{one.step_s:.4g}",
            f"{one.tokens_per_s:.0f}",
            f"{one.now_step_s / one.step_s:.3g} x",
            "" if one.is_worth_it else "not worth the change",
        )
        for one in points[:-1]
    ]
    last = points[-1]
    title = (f"from, each {outer}", "fastest", "s/step", "tokens/s", "over now", "")
    text = aligned([title, *rows], left=(0, 1, 5))
    end = f"At {_rate(last.gbps)}: {last.step_s:.4g} s a step, {last.now_step_s / last.step_s:.3g} x."
    return f"{text}\n{end}"


def _rate(gbps: float) -> str:
    return f"{gbps:.3g} Gbit/s" if gbps >= 1 else f"{gbps * 1e3:.3g} Mbit/s"


def sweep_json(points: Sequence[Point]) -> list[dict[str, Any]]:
    return [asdict(one) for one in points]
