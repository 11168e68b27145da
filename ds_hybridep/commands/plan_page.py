# SPDX-License-Identifier: Apache-2.0
"""The answer of `plan` as a page: the same sentences and numbers, and a picture of bytes and seconds."""

import json
import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

from ds_hybridep.plan.answer import Answer
from ds_hybridep.plan.paste import ds_config_of, launch_of, reminders_of
from ds_hybridep.plan.summary import (
    GIGA,
    describe_bills,
    describe_hot,
    describe_memory,
    describe_question,
    is_for_you,
    legend,
    number,
    table_of,
    verdict,
)
from ds_hybridep.plan.table import Row, rows_of

STYLE = """
.verdict { padding: .75rem 1rem; border-left: .35rem solid var(--bad); background: var(--panel); font-size: 1.1rem }
.verdict.yes { border-color: var(--good) }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); gap: 0 2.5rem }
h3 { font-size: 1rem; margin: 1rem 0 0 }
.bar { margin: .45rem 0; font-size: .875rem; line-height: 1.3 }
.bar div { display: flex; justify-content: space-between; gap: 1rem }
.bar div span:last-child { white-space: nowrap; font-variant-numeric: tabular-nums }
.bar svg { display: block; width: 100%; height: .8rem; background: var(--panel) }
.bar line { stroke: var(--line) }
.chosen { font-weight: 700 }
.now rect { fill: var(--now) } .ours rect { fill: var(--ours) }
.sites rect { fill: var(--sites) } .elsewhere rect { fill: var(--elsewhere) }
.unfit rect { opacity: .4 }
.keys { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; font-size: .875rem }
.keys svg { width: .8rem; height: .8rem; vertical-align: -.05rem }
.faint { color: var(--faint); font-size: .875rem }
table { border-collapse: collapse; width: 100%; font-size: .875rem }
th, td { padding: .35rem .5rem; border-bottom: 1px solid var(--line); text-align: left; vertical-align: top }
td.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
th.number { text-align: right }
@media (max-width: 60rem) {
  thead { display: none }
  tr { display: block; padding: .5rem 0; border-bottom: 1px solid var(--line) }
  td, td.number { display: flex; justify-content: space-between; gap: 1rem; padding: .1rem 0; border: 0;
    text-align: right; white-space: normal }
  td::before { content: attr(data-is); color: var(--faint); text-align: left }
  td.name { font-weight: 700; text-align: left } td.name::before, td:empty { display: none }
}
"""
HEADINGS = "", "way to train", "", "", "", "", "", "", "note"  # where the table of the text has none
NUMBERS = range(2, 6)  # columns
WORDS = {
    "now": "what you have now",
    "ours": "this program, one job",
    "sites": "this program, a job in each datacentre",
    "elsewhere": "not provided here",
}
WIDE_SPREAD = 20.0  # from this ratio of the longest to the shortest bar on, a scale is logarithmic
LEAST_SHARE = 0.5  # of a bar that is much too short to see, in percent


def title_of(answer: Answer) -> str:
    """The page's title: what was asked."""
    cluster, model = answer.question.cluster, answer.question.workload.model
    return f"{model.name} on {' x '.join(str(size) for size in cluster.sizes)} GPUs"


def body_of(answer: Answer, steps: int, price_per_gb: float | None) -> str:
    """The page below its title, as HTML: all that `describe` says, and what to paste if it is for you."""
    first, *others = verdict(answer)
    cluster = answer.question.cluster
    outer = cluster.levels[0].name
    sections = [
        f'<p class="verdict{" yes" * is_for_you(answer)}">{escape(first)}</p>',
        *map(_paragraph, others),
        "<h2>Bytes and seconds</h2>",
        _keys(answer),
        '<div class="charts">',
        *([_chart(answer, f"GB per step over the link of a {outer}", _link_gb)] if cluster.sizes[0] > 1 else []),
        _chart(answer, "Seconds per step", lambda row: row.step_s),
        "</div>",
        "<h2>All ways</h2>",
        _table(answer),
        *(f'<p class="faint">{escape(line)}</p>' for line in legend(answer, "Bold")),
        *map(_paragraph, (describe_memory(answer), *describe_hot(answer))),
    ]
    if is_for_you(answer):
        sections += [
            "<h2>ds_config.json</h2>",
            _listing([json.dumps(ds_config_of(answer), indent=2)]),
            "<h2>Start it</h2>",
            _listing(launch_of(answer)),
            *map(_paragraph, reminders_of(answer)),
        ]
    if bills := describe_bills(answer, steps, price_per_gb).splitlines():
        sections += ["<h2>Hours, bytes and money</h2>", *map(_paragraph, bills)]
    sections += [
        "<h2>What was asked</h2>",
        *map(_paragraph, describe_question(answer.question).splitlines()),
        _paragraph("Predicted, not measured."),
    ]
    return "\n".join(sections)


def _paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _listing(lines: Iterable[str]) -> str:
    return f"<pre>{escape(chr(10).join(lines))}</pre>"


# ---- the picture ----


def _keys(answer: Answer) -> str:
    kinds = dict.fromkeys(row.kind for row in rows_of(answer))
    square = '<svg aria-hidden="true"><rect width="100%" height="100%"/></svg>'
    drawn = (f'<span class="{kind}">{square} {escape(WORDS[kind])}</span>' for kind in kinds)
    unfit = '<span class="faint">pale: does not fit into memory</span>' if any(map(_lacks, rows_of(answer))) else ""
    return f'<div class="keys">{"".join(drawn)}{unfit}</div>'


def _link_gb(row: Row) -> float:
    return (row.link_bytes or 0.0) / GIGA


def _lacks(row: Row) -> bool:
    return row.lacking_bytes > 0


def _chart(answer: Answer, title: str, value_of: Callable[[Row], float]) -> str:
    """A bar for each row, from a common start; values that are far apart on a logarithmic scale."""
    rows = rows_of(answer)
    values = [value_of(row) for row in rows]
    share_of, ticks, remark = _scale(values)
    bars = (_bar(row, value, share_of(value), ticks) for row, value in zip(rows, values, strict=True))
    return f'<div><h3>{escape(title)}</h3><p class="faint">{escape(remark)}</p>{"".join(bars)}</div>'


def _scale(values: Sequence[float]) -> tuple[Callable[[float], float], list[float], str]:
    """How long a bar is, in percent, where the lines are, and a sentence about them."""
    known = [value for value in values if value > 0] or [1.0]
    least, most = min(known), max(known)
    if most < WIDE_SPREAD * least:
        return lambda value: 100 * value / most, [], "A bar twice as long is twice as much."
    low, high = math.floor(math.log10(least) - 0.3), math.ceil(math.log10(most))
    ticks = [100 * (power - low) / (high - low) for power in range(low + 1, high)]

    def share(value: float) -> float:
        return 100 * (math.log10(value) - low) / (high - low) if value > 0 else 0.0

    return share, ticks, f"Logarithmic, from {10.0**low:g} to {10.0**high:g}: each line is ten times the one before."


def _bar(row: Row, value: float, share: float, ticks: Sequence[float]) -> str:
    classes = f"bar {row.kind}{' chosen' * row.is_chosen}{' unfit' * _lacks(row)}"
    name, figure = escape(row.name), "" if row.link_bytes is None and not value else number(value)
    lines = "".join(f'<line x1="{at:.2f}%" x2="{at:.2f}%" y1="0" y2="100%"/>' for at in ticks)
    width = max(share, LEAST_SHARE) if value else 0.0
    drawing = f'<rect width="{width:.2f}%" height="100%"/>{lines}'
    return (
        f'<div class="{classes}"><div><span>{name}</span><span>{figure}</span></div>'
        f'<svg role="img" aria-label="{name}: {figure}">{drawing}</svg></div>'
    )


# ---- the table ----


def _table(answer: Answer) -> str:
    header, *rows = table_of(answer)
    headings = [text or own for text, own in zip(header, (*HEADINGS, ""), strict=False)]
    head = "".join(f"<th{_class_of(column)}>{escape(text)}</th>" for column, text in enumerate(headings) if column)
    body = []
    for mark, *cells in rows:
        row = (
            f'<td{_class_of(column)} data-is="{escape(headings[column])}">{escape(text)}</td>'
            for column, text in enumerate(cells, 1)
        )
        opening = '<tr class="chosen">' if mark else "<tr>"
        body.append(f"{opening}{''.join(row)}</tr>")
    return f"<table><thead><tr>{head}</tr></thead><tbody>\n{chr(10).join(body)}\n</tbody></table>"


def _class_of(column: int) -> str:
    if column == 1:
        return ' class="name"'
    return ' class="number"' if column in NUMBERS else ""
