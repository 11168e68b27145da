# SPDX-License-Identifier: Apache-2.0
"""Bars and tables for pages: HTML from plain texts, which are escaped here.  STYLE goes with it."""

import math
from collections.abc import Collection, Iterable, Sequence
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
.bar line { stroke: var(--line) }
.now rect { fill: var(--now) } .ours rect { fill: var(--ours) }
.sites rect { fill: var(--sites) } .elsewhere rect { fill: var(--elsewhere) }
.faded rect { opacity: .4 }
.marked { font-weight: 700 }
.faint { color: var(--faint); font-size: .875rem }
table { border-collapse: collapse; width: 100%; margin: .75rem 0 0; font-size: .875rem }
th, td { padding: .35rem .5rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top;
  font-variant-numeric: tabular-nums }
th:first-child, td:first-child, .text { text-align: left }
@media (max-width: 60rem) {
  thead { display: none }
  tr { display: block; padding: .5rem 0; border-bottom: 1px solid var(--line) }
  td, td.text { display: flex; justify-content: space-between; gap: 1rem; padding: .1rem 0; border: 0;
    text-align: right }
  td::before { content: attr(data-is); color: var(--faint); text-align: left }
  td:first-child { font-weight: 700; text-align: left } td:first-child::before, td:empty { display: none }
}
"""
LEAST_SHARE = 0.5  # of a bar that is much too short to see, in percent
WIDE_SPREAD = 20.0  # from this ratio of the longest to the shortest bar on, a scale may be logarithmic


@dataclass(frozen=True)
class Bar:
    """A line of a chart: its name, the figure beside it, its length, and whose it is.

    figure: text with its unit.  value: what the length stands for.  kind: the colour, "ours", "now", "sites" or
    "elsewhere", then "marked" or "faded" if it is, with spaces between.
    """

    name: str
    figure: str
    value: float
    kind: str = "ours"


def chart(
    title: str,
    bars: Sequence[Bar],
    *,
    remark: str = "",
    whole: float | None = None,
    may_be_logarithmic: bool = False,
) -> str:
    """Bars from a common start.

    whole: the value of a bar over the whole width; by default the largest.
    may_be_logarithmic: it is, if values are far apart.
    """
    known = [bar.value for bar in bars if _is_drawn(bar)] or [1.0]
    if may_be_logarithmic and max(known) >= WIDE_SPREAD * min(known):
        low, high = math.floor(math.log10(min(known)) - 0.3), math.ceil(math.log10(max(known)))
        lines = [100 * (power - low) / (high - low) for power in range(low + 1, high)]
        remark = f"Logarithmic, from {10.0**low:g} to {10.0**high:g}: each line is ten times the one before."
        shares = [100 * (math.log10(bar.value) - low) / (high - low) if _is_drawn(bar) else 0.0 for bar in bars]
    else:
        lines, most = [], max([whole or 0.0, *known])
        shares = [100 * bar.value / most if _is_drawn(bar) else 0.0 for bar in bars]
    said = f'<p class="faint">{escape(remark)}</p>' if remark else ""
    drawn = (_bar(bar, share, lines) for bar, share in zip(bars, shares, strict=True))
    return f"<div><h3>{escape(title)}</h3>{said}{''.join(drawn)}</div>"


def _is_drawn(bar: Bar) -> bool:
    return math.isfinite(bar.value) and bar.value > 0


def charts(drawn: Iterable[str]) -> str:
    """Charts beside each other where there is room."""
    return f'<div class="charts">{"".join(drawn)}</div>'


def _bar(bar: Bar, share: float, lines: Sequence[float]) -> str:
    name, figure = escape(bar.name), escape(bar.figure)
    width = max(share, LEAST_SHARE) if share else 0.0
    crossed = "".join(f'<line x1="{at:.2f}%" x2="{at:.2f}%" y1="0" y2="100%"/>' for at in lines)
    return (
        f'<div class="bar {escape(bar.kind)}"><div><span>{name}</span><span>{figure}</span></div><svg role="img" '
        f'aria-label="{name}: {figure}"><rect width="{width:.2f}%" height="100%"/>{crossed}</svg></div>'
    )


def table(rows: Sequence[Sequence[str]], *, texts: Collection[int] = (), marked: Collection[int] = ()) -> str:
    """A table whose first row has the titles of its columns.

    texts: columns that are no numbers, besides the first one.  marked: rows to point out; 0 is the first below titles.
    """
    titles = [escape(title) for title in rows[0]]
    aligned = [' class="text"' if column in texts else "" for column in range(len(titles))]
    head = "".join(f"<th{style}>{title}</th>" for style, title in zip(aligned, titles, strict=True))
    body = []
    for number, row in enumerate(rows[1:]):
        cells = (
            f'<td{style} data-is="{title}">{escape(cell)}</td>'
            for style, title, cell in zip(aligned, titles, row, strict=True)
        )
        opening = '<tr class="marked">' if number in marked else "<tr>"
        body.append(f"{opening}{''.join(cells)}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{chr(10).join(body)}\n</tbody></table>"
