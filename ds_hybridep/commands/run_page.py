# SPDX-License-Identifier: Apache-2.0
"""The record of a run as a page: the numbers of `record`, as bars and tables."""

from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from ds_hybridep.commands import bars
from ds_hybridep.commands.bars import Bar, chart, charts, table
from ds_hybridep.commands.page import write_page
from ds_hybridep.commands.record import (
    BYTES_PER_MB,
    CODEC_TITLE,
    LINK_TITLE,
    LOAD_TITLE,
    MISSING,
    codec_rows,
    format_run_record,
    level_rows,
    link_rows,
    load_rows,
    plan_lines,
    site_table,
    slowest_rank,
    term_rows,
)

TITLE = "A run with ds_hybridep"
MOST_LAYERS = 8  # with bars; the others are in the table
PLAIN_EP = -2  # where the last columns of the table of levels begin: plain EP, and the share of it
STYLE = bars.STYLE + "summary { cursor: pointer; margin: 2rem 0 .5rem; font-weight: 700 }\n"


def write_run_page(path: Path, record: Mapping[str, Any]) -> None:
    """Write the page of a run, which needs no other file."""
    write_page(path, TITLE, body_of(record), STYLE)


def body_of(record: Mapping[str, Any]) -> str:
    """The page below its title, as HTML."""
    sections = [*map(_paragraph, _summary(record)), *_bytes(record), *_waits(record)]
    sections += [*_planning(record), *_loads(record)]
    for title, rows in (site_table(record), (LINK_TITLE, link_rows(record)), (CODEC_TITLE, codec_rows(record))):
        sections += [_heading(title), table(rows)] if len(rows) > 1 else []
    if record.get("planning") is None and "plan" in record:
        sections += [_heading("plan"), _paragraph(str(record["plan"]))]
    listing = f"<pre>{escape(format_run_record(record))}</pre>"
    return "\n".join([*sections, f"<details><summary>The same as text</summary>{listing}</details>"])


def _summary(record: Mapping[str, Any]) -> Iterator[str]:
    """What a reader wants first."""
    step_s, steps = record.get("step_s"), record["steps"]
    took = f", {1e3 * step_s:.0f} ms each" if step_s else ""
    yield f"{record['world_size']} ranks, mean of {steps} steps{took}."
    *_, total, _, share = level_rows(record)[1]
    beside = "" if share == MISSING else f" Without dense, that is {share} of what plain EP would send."
    slowest = record["levels"][0]["name"]
    yield f"All ranks together send {total} MB per step over {slowest}, the slowest level.{beside}"
    waited_s = sum(_waited_s(record).values())
    part = f", {waited_s / step_s:.0%} of the step" if step_s else ""
    yield f"A rank waits {1e3 * waited_s:.1f} ms per step for transfers{part}."


def _waited_s(record: Mapping[str, Any]) -> dict[str, float]:
    """Seconds per step by kind, of the kinds that were counted."""
    return {
        kind.replace("_", " "): seconds / record["steps"]
        for kind, seconds in record["exposed_s"].items()
        if seconds is not None
    }


def _bytes(record: Mapping[str, Any]) -> Iterator[str]:
    (_, *titles), *levels = level_rows(record)
    drawn = []
    for level, (name, *cells) in zip(record["levels"], levels, strict=True):
        plain_ep, share = cells[PLAIN_EP:]
        ours = sum(num_bytes or 0 for kind, num_bytes in level["sent_bytes"].items() if kind != "dense")
        ours_mb = ours / record["steps"] / BYTES_PER_MB
        beside = [
            Bar("this run, without dense", f"{ours_mb:.3f} MB", ours_mb),
            Bar("plain EP", f"{plain_ep} MB", _number(plain_ep), "now"),
        ]
        remark = "Plain EP must send dense too." if share == MISSING else f"{share}; plain EP must send dense too."
        by_kind = [Bar(title, _with("MB", cell), _number(cell)) for title, cell in zip(titles, cells, strict=True)]
        drawn.append(
            chart(f"Over {name}, beside plain EP", beside, remark=remark)
            + chart(f"Over {name}, by kind", by_kind[:PLAIN_EP], remark="On a scale of its own.")
        )
    yield _heading("MB sent per step, all ranks together")
    yield charts(f"<div>{one}</div>" for one in drawn)


def _waits(record: Mapping[str, Any]) -> Iterator[str]:
    waited_s, step_s = _waited_s(record), record.get("step_s")
    rest_s = step_s - sum(waited_s.values()) if step_s else 0.0
    drawn = [Bar(kind, f"{1e3 * seconds:.1f} ms", seconds) for kind, seconds in waited_s.items()]
    drawn += [Bar("all else", f"{1e3 * rest_s:.1f} ms", rest_s, "now")] if rest_s > 0 else []
    yield _heading("Time of a step")
    yield chart("A rank waits for", drawn, remark="The whole width is a step." if rest_s > 0 else "", whole=step_s)
    for level in record["levels"]:
        if "waits" in level:
            yield _paragraph(f"Waits in a row over {level['name']}: {level['waits'] / record['steps']:.1f} per step.")
    if slowest := slowest_rank(record):
        yield _paragraph(slowest[0].upper() + slowest[1:] + ".")


def _planning(record: Mapping[str, Any]) -> Iterator[str]:
    planning = record.get("planning")
    if planning is None:
        return
    (_, *titles), *terms = term_rows(planning)
    drawn = [
        Bar(f"{words}, {title}", _with("s", cell), _number(cell), kind)
        for words, *cells in terms
        for title, cell, kind in zip(titles, cells, ("now", "ours"), strict=True)
        if cell != MISSING
    ]
    yield _heading("Plan")
    yield from map(_paragraph, plan_lines(planning))
    yield chart("Seconds per step, predicted and measured", drawn)


def _loads(record: Mapping[str, Any]) -> Iterator[str]:
    rows = load_rows(record)
    if len(rows) < 2:
        return
    fullest = sorted(rows[1:], key=lambda row: -_number(row[1]))[:MOST_LAYERS]
    remark = "1 is even: the others wait for the fullest."
    if len(rows) - 1 > MOST_LAYERS:
        remark += f" The {MOST_LAYERS} fullest of {len(rows) - 1} layers; the table has all."
    yield _heading(LOAD_TITLE)
    yield charts(
        chart(f"Rows of the fullest {rows[0][at]}", [Bar(row[0], row[at], _number(row[at])) for row in fullest],
              remark=remark)
        for at in (1, 2)
    )  # fmt: skip
    if len(rows) - 1 > MOST_LAYERS or len(rows[0]) > 3:  # more than the bars say
        yield table(rows)


def _paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def _heading(text: str) -> str:
    return f"<h2>{escape(text[0].upper() + text[1:])}</h2>"


def _with(unit: str, cell: str) -> str:
    return f"{cell} {unit}" if _number(cell) or cell[:1].isdigit() else cell


def _number(cell: str) -> float:
    """The value of a cell; 0 if it holds words."""
    try:
        return float(cell)
    except ValueError:
        return 0.0
