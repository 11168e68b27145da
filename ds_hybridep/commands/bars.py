# SPDX-License-Identifier: Apache-2.0
"""Bars and tables for pages: HTML from plain texts, which are escaped here.  STYLE goes with it."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

# Colours are those of `page`.  On a narrow screen, each row of a table is a block with a line for each cell.
STYLE = """
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); gap: 0 2.5rem }
.charts > *, .bar span, td, p { min-width: 0; overflow-wrap: anywhere }
h3 { font-size: 1rem; margin: 1rem 0 0 }
.bar { margin: .45rem 0; font-size: .875rem; line-height: 1.3 }
.bar div { display: flex; justify-content: space-between; gap: 1rem }
.bar div span:last-child { flex: none; font-variant-numeric: tabular-nums }
.bar svg { display: block; width: 100%; height: .8rem; background: var(--panel) }
.now rect { fill: var(--now) } .ours rect { fill: var(--ours) }
.faint { color: var(--faint); font-size: .875rem }
table { border-collapse: collapse; width: 100%; margin: .75rem 0 0; font-size: .875rem }
th, td { padding: .35rem .5rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top;
  font-variant-numeric: tabular-nums }
th:first-child, td:first-child { text-align: left }
@media (max-width: 60rem) {
  thead { display: none }
  tr { display: block; padding: .5rem 0; border-bottom: 1px solid var(--line) }
  td { display: flex; justify-content: space-between; gap: 1rem; padding: .1rem 0; border: 0 }
  td::before { content: attr(data-is); color: var(--faint); text-align: left }
  td:first-child { font-weight: 700 } td:first-child::before { display: none }
}
"""
LEAST_SHARE = 0.5  # of a bar that is much too short to see, in percent


@dataclass(frozen=True)
class Bar:
    """A line of a chart: its name, the figure beside it, its length, and whose it is.

    figure: text with its unit.  value: what the length stands for.  kind: "ours" or "now", the colour.
    """

    name: str
    figure: str
    value: float
    kind: str = "ours"


def chart(title: str, bars: Sequence[Bar], *, remark: str = "", whole: float | None = None) -> str:
    """Bars from a common start.  whole: the value of a bar over the whole width; by default the largest."""
    values = [bar.value if math.isfinite(bar.value) and bar.value > 0 else 0.0 for bar in bars]
    most = max([whole or 0.0, *values]) or 1.0
    drawn = (_bar(bar, 100 * value / most) for bar, value in zip(bars, values, strict=True))
    said = f'<p class="faint">{escape(remark)}</p>' if remark else ""
    return f"<div><h3>{escape(title)}</h3>{said}{''.join(drawn)}</div>"


def charts(drawn: Iterable[str]) -> str:
    """Charts beside each other where there is room."""
    return f'<div class="charts">{"".join(drawn)}</div>'


def _bar(bar: Bar, share: float) -> str:
    name, figure = escape(bar.name), escape(bar.figure)
    width = max(share, LEAST_SHARE) if share else 0.0
    return (
        f'<div class="bar {escape(bar.kind)}"><div><span>{name}</span><span>{figure}</span></div>'
        f'<svg role="img" aria-label="{name}: {figure}"><rect width="{width:.2f}%" height="100%"/></svg></div>'
    )


def table(rows: Sequence[Sequence[str]]) -> str:
    """A table whose first row has the titles of its columns."""
    titles, *others = [[escape(cell) for cell in row] for row in rows]
    head = "".join(f"<th>{title}</th>" for title in titles)
    body = "\n".join(
        f"<tr>{''.join(f'<td data-is={chr(34)}{title}{chr(34)}>{cell}</td>' for title, cell in cells)}</tr>"
        for cells in (zip(titles, row, strict=True) for row in others)
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"
