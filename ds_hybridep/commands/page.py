# SPDX-License-Identifier: Apache-2.0
"""Writes the record of a run as one HTML page that needs no other file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jinja2

from ds_hybridep.commands.record import CODEC_TITLE, NOT_COUNTED, codec_rows, explain_plan, slowest_rank
from ds_hybridep.version import __version__

TEMPLATE = Path(__file__).with_name("page.html")
KIND_WORDS = {
    "tokens": "tokens",
    "expert_weights": "expert weights",
    "expert_gradients": "expert gradients",
    "dense": "dense parameters",
    "control": "control",
}
PLAIN_EP = "plain EP"
REST = "computation and all else"


@dataclass(frozen=True, kw_only=True)
class Run:
    """One of several ways to train the same model.

    step_s: median step time.  loss, valid_loss: values at the end.
    uplink_bytes: bytes per step over one datacentre's uplink in one direction; None if they were not counted.
    """

    title: str
    step_s: float
    uplink_bytes: float | None
    loss: float
    valid_loss: float


class Part(NamedTuple):
    """A coloured part of a bar; `percent` is its length as a percentage of the longest bar."""

    kind: str
    words: str
    percent: float


class Bar(NamedTuple):
    """A labelled bar: its parts in order, and the text at its end."""

    title: str
    parts: list[Part]
    value: str


def write_page(path: Path, record: Mapping[str, Any], runs: Sequence[Run] = ()) -> None:
    """Write a run record as a page; with several `runs`, the page also compares them.

    record: the content of `report_file`, described at `commands.record.format_run_record`.
    """
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    path.write_text(template.render(_content(record, runs)), encoding="utf-8")


def _content(record: Mapping[str, Any], runs: Sequence[Run]) -> dict[str, Any]:
    step_s = record.get("step_s")
    return {
        "version": __version__,
        "headline": _headline(record, runs),
        "facts": f"{record['world_size']} ranks, {record['steps']} steps"
        + (f", {1e3 * step_s:.0f} ms per step" if step_s else ""),
        "runs": runs,
        "run_bars": _bars([(run.title, {REST: run.step_s}, _speed_up(run, runs)) for run in runs]),
        "link_bars": _bars(
            [(run.title, {"tokens": run.uplink_bytes}, _mb(run.uplink_bytes)) for run in runs if run.uplink_bytes]
        ),
        "time_bars": _time_bars(record),
        "byte_bars": [(level["name"], _byte_bars(level, record["steps"])) for level in record["levels"]],
        "wait_bars": _bars(
            [
                (level["name"], {REST: level["waits"]}, f"{level['waits'] / record['steps']:.1f}")
                for level in record["levels"]
                if "waits" in level
            ]
        ),
        "slowest": slowest_rank(record),
        "expert_bars": _load_bars(record, "expert_load"),
        "rank_bars": _load_bars(record, "imbalance"),
        "codec_title": CODEC_TITLE,
        "codec_rows": codec_rows(record),
        "plan": record.get("plan", ""),
        "planning": explain_plan(record) if record.get("planning") else "",
        "kinds": KIND_WORDS,
    }


def _headline(record: Mapping[str, Any], runs: Sequence[Run]) -> str:
    if len(runs) > 1:
        ours, best = runs[-1], min(runs[:-1], key=lambda run: run.step_s)
        return f"{ours.title} is {best.step_s / ours.step_s:.1f} times as fast as {best.title}"
    level = record["levels"][0]
    sent, plain = sum(count or 0 for count in level["sent_bytes"].values()), level["plain_ep_bytes"]
    if not plain:
        return f"{_mb(sent / record['steps'])} per step over level {level['name']}"
    return f"{sent / plain:.1%} of plain EP's bytes over level {level['name']}"


def _speed_up(run: Run, runs: Sequence[Run]) -> str:
    seconds = f"{run.step_s:.2f} s"
    return seconds if run is runs[0] else f"{seconds}, {runs[0].step_s / run.step_s:.1f}x"


def _time_bars(record: Mapping[str, Any]) -> list[Bar]:
    """Bars for the parts of a mean step."""
    waits = {kind: (seconds or 0.0) / record["steps"] for kind, seconds in record["exposed_s"].items()}
    step_s = record.get("step_s")
    parts = waits | ({REST: max(step_s - sum(waits.values()), 0.0)} if step_s else {})
    rows = [(_words(kind), {kind: seconds}, f"{1e3 * seconds:.1f} ms") for kind, seconds in parts.items()]
    return _bars(rows)


def _load_bars(record: Mapping[str, Any], name: str) -> list[Bar]:
    """One bar per layer with the value `name`, a maximum over a mean."""
    return _bars(
        [(layer["name"], {REST: layer[name]}, f"{layer[name]:.2f}") for layer in record["layers"] if name in layer]
    )


def _byte_bars(level: Mapping[str, Any], steps: int) -> list[Bar]:
    sent = {kind: (count or 0) / steps for kind, count in level["sent_bytes"].items()}
    uncounted = [KIND_WORDS[kind] for kind, count in level["sent_bytes"].items() if count is None]
    note = f", {', '.join(uncounted)} {NOT_COUNTED}" if uncounted else ""
    plain = level["plain_ep_bytes"] / steps
    rows = [("this run", sent, _mb(sum(sent.values())) + note)]
    if plain:
        rows.append((f"{PLAIN_EP}, without dense parameters", {"tokens": plain}, _mb(plain)))
    return _bars(rows)


def _bars(rows: Sequence[tuple[str, Mapping[str, float | None], str]]) -> list[Bar]:
    longest = max((sum(value or 0.0 for value in parts.values()) for _, parts, _ in rows), default=0.0) or 1.0
    return [
        Bar(
            title,
            [Part(kind, _words(kind), 100.0 * value / longest) for kind, value in parts.items() if value],
            value,
        )
        for title, parts, value in rows
    ]


def _words(kind: str) -> str:
    return KIND_WORDS.get(kind, kind)


def _mb(num_bytes: float | None) -> str:
    return NOT_COUNTED if num_bytes is None else f"{num_bytes / 1e6:#.3g} MB"
