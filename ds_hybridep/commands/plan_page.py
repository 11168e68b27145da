# SPDX-License-Identifier: Apache-2.0
"""The answer of `plan` as a page: the same sentences and numbers, and a picture of bytes and seconds."""

import json
from collections.abc import Callable, Iterable, Iterator
from html import escape

from ds_hybridep.commands import bars
from ds_hybridep.commands.bars import Bar, chart, charts, table
from ds_hybridep.plan.answer import Answer
from ds_hybridep.plan.paste import IN_SCRIPT, ds_config_of, launch_of, reminders_of, script_of
from ds_hybridep.plan.summary import (
    describe_bills,
    describe_hot,
    describe_memory,
    describe_question,
    legend,
    table_of,
)
from ds_hybridep.plan.table import Row, rows_of
from ds_hybridep.plan.verdict import is_for_you, verdict
from ds_hybridep.plan.words import GIGA, number

STYLE = (
    bars.STYLE
    + """
.verdict { padding: .75rem 1rem; border-left: .35rem solid var(--bad); background: var(--panel); font-size: 1.1rem }
.verdict.yes { border-color: var(--good) }
.keys { display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; font-size: .875rem }
.keys svg { width: .8rem; height: .8rem; vertical-align: -.05rem }
"""
)
HEADINGS = "way to train", "", "", "", "", "", "", "remarks", ""  # where the table of the text has none
TEXTS = 4, 6, 7  # columns
WORDS = {
    "now": "what you have now",
    "ours": "this program, one job",
    "sites": "this program, a job in each datacentre",
    "elsewhere": "not provided here",
}


def title_of(answer: Answer) -> str:
    """The page's title: what was asked."""
    cluster, model = answer.question.cluster, answer.question.workload.model
    return f"{model.name} on {' x '.join(str(size) for size in cluster.sizes)} GPUs"


def body_of(answer: Answer, steps: int, price_per_gb: float | None) -> str:
    """The page below its title, as HTML: all that `describe` says, and what to paste if it is for you."""
    first, *others = verdict(answer)
    sections = [
        f'<p class="verdict{" yes" * is_for_you(answer)}">{escape(first)}</p>',
        *map(_paragraph, others),
        "<h2>Bytes and seconds</h2>",
        _keys(answer),
        charts(_charts(answer)),
        "<h2>All ways</h2>",
        _table(answer),
        *(f'<p class="faint">{escape(line)}</p>' for line in legend(answer, "Bold")),
        *map(_paragraph, (describe_memory(answer), *describe_hot(answer))),
    ]
    if is_for_you(answer):
        sections += [
            "<h2>ds_config.json</h2>",
            _listing([json.dumps(ds_config_of(answer), indent=2)]),
            *([f"<h2>{IN_SCRIPT}</h2>", _listing(script)] if (script := script_of(answer)) else []),
            "<h2>Start it</h2>",
            _listing(launch_of(answer)),
            *map(_paragraph, reminders_of(answer)),
        ]
    if bills := describe_bills(answer, steps, price_per_gb):
        sections += ["<h2>Hours, bytes and money</h2>", *map(_paragraph, bills)]
    sections += [
        "<h2>What was asked</h2>",
        *map(_paragraph, describe_question(answer.question)),
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


def _charts(answer: Answer) -> Iterator[str]:
    cluster = answer.question.cluster
    if cluster.sizes[0] > 1:
        yield _chart(answer, f"GB per step over the link of a {cluster.levels[0].name}", _link_gb)
    yield _chart(answer, "Seconds per step", lambda row: row.step_s)


def _chart(answer: Answer, title: str, value_of: Callable[[Row], float]) -> str:
    drawn = [_bar(row, value_of(row)) for row in rows_of(answer)]
    return chart(title, drawn, remark="A bar twice as long is twice as much.", may_be_logarithmic=True)


def _bar(row: Row, value: float) -> Bar:
    figure = "" if row.link_bytes is None and not value else number(value)
    return Bar(row.name, figure, value, f"{row.kind}{' marked' * row.is_chosen}{' faded' * _lacks(row)}")


def _table(answer: Answer) -> str:
    (_, *header), *rows = table_of(answer)
    titles = [text or own for text, own in zip(header, HEADINGS, strict=False)]
    marked = [at for at, row in enumerate(rows) if row[0]]
    return table([titles, *(row[1:] for row in rows)], texts=TEXTS, marked=marked)
