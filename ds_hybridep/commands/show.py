# SPDX-License-Identifier: Apache-2.0
"""The `show` and `explain` subcommands: the record of a run, the JSON that `report_file` names, as tables to read.

Records may be of any version, so nothing here knows the rest of the package.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BYTES_PER_MB = 1e6
KINDS = ("tokens", "expert_weights", "expert_gradients", "dense", "control")
NOT_IN_PLAIN_EP = ("dense",)  # travels under plain EP too, and is in no count of it
MISSING = "-"
NOT_COUNTED = "not counted"  # null in a record: somebody else sends it
EXIT_MISUSED = 2  # as argparse does

TERMS = (
    ("dense_s", "computation outside the experts", None),
    ("experts_s", "expert computation", None),
    ("codec_s", "encoding and decoding", "codec_s"),
    ("tokens_s", "token exchange", "tokens"),
    ("expert_weights_s", "waiting for expert weights", "expert_weights"),
    ("expert_gradients_s", "waiting for expert gradients", "expert_gradients"),
    ("dense_sync_s", "synchronising dense parameters", "dense"),
    ("expert_sync_s", "synchronising experts that several groups hold", None),
    ("host_s", "calls and messages", None),
    ("optimizer_s", "the optimizer", None),
)
PREDICTED_KIND = {"dense": "dense_sync"}  # what the stream model calls it


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `show` and `explain` to the subcommands of the program."""
    for name, what, describe in (
        ("show", "print the record of a run as a table", format_run_record),
        ("explain", "say why a planned run had its plan: predicted beside measured", explain_plan),
    ):
        parser = subparsers.add_parser(name, help=what)
        parser.add_argument("record", type=Path, metavar="RUN.json", help='what the run wrote at its "report_file"')
        parser.set_defaults(run=run, describe=describe)


def run(args: argparse.Namespace) -> int:
    """Prints what `args.describe` makes of the record.  Returns 0, or 2 with the error on stderr."""
    try:
        record = json.loads(args.record.read_text())
        if not isinstance(record, dict):
            raise ValueError(f"holds a {type(record).__name__}, wanted the object of a run record")
    except (OSError, ValueError) as error:
        print(f"ds_hybridep: RUN.json: {args.record} is no run record: {error}", file=sys.stderr)
        return EXIT_MISUSED
    print(args.describe(record))
    return 0


def format_run_record(record: Mapping[str, Any]) -> str:
    """A table of the megabytes sent per step on each level by kind, beside what plain EP would have sent.

    The share "of plain EP" leaves out the kind "dense", which plain EP has to synchronise too. Records of other
    versions are shown as far as they go, with "-" for what is missing. `report_file` holds:

        {"steps": 100, "world_size": 4, "exposed_s": {"tokens": 0.5, ...},
         "levels": [{"name": "dc", "sent_bytes": {"tokens": 0, "expert_weights": 1000, ...}, "plain_ep_bytes": 4000}]}

    Bytes are sums over all ranks and steps; exposed seconds are means over ranks, summed over steps.
    """
    steps = _number_of(record.get("steps"))
    levels = [level for level in _sequence_of(record.get("levels")) if isinstance(level, Mapping)]
    if not levels:
        return "no traffic was recorded"
    sent = [_numbers_of(level.get("sent_bytes")) for level in levels]
    kinds = [*KINDS, *sorted({kind for counts in sent for kind in counts} - set(KINDS))]

    rows = [["level", *(kind.replace("_", " ") for kind in kinds), "sum", "plain EP", "of plain EP"]]
    for level, counts in zip(levels, sent, strict=True):
        comparable_bytes = sum(number for kind, number in counts.items() if kind not in NOT_IN_PLAIN_EP)
        plain_ep_bytes = _number_of(level.get("plain_ep_bytes"))
        numbers = [*map(counts.get, kinds), sum(counts.values()) if counts else None, plain_ep_bytes]
        cells = [_megabytes_per_step(number, steps) for number in numbers]
        for kind in (kind for kind, value in _mapping_of(level.get("sent_bytes")).items() if value is None):
            cells[kinds.index(kind)] = NOT_COUNTED
        share = f"{comparable_bytes / plain_ep_bytes:.0%}" if counts and plain_ep_bytes else MISSING
        rows.append([str(level.get("name", MISSING)), *cells, share])
    ranks = _number_of(record.get("world_size"))
    shown = [MISSING if number is None else f"{number:.0f}" for number in (ranks, steps)]
    header = f"MB sent per step, {shown[0]} ranks together, mean of {shown[1]} steps"
    lines = [header, "", *_aligned(rows)]
    exposed_s = _numbers_of(record.get("exposed_s"))
    if exposed_s and steps:
        waits = [f"{kind.replace('_', ' ')} {1e3 * seconds / steps:.1f} ms" for kind, seconds in exposed_s.items()]
        lines += ["", f"time a rank waited for them, mean per step: {', '.join(waits)}"]
    return "\n".join(lines + _codec_lines(record, steps))


def _codec_lines(record: Mapping[str, Any], steps: float | None) -> list[str]:
    """A table of what codecs did in each layer; empty where all was exact."""
    layers = [layer for layer in _sequence_of(record.get("layers")) if isinstance(layer, Mapping)]
    rows = []
    for layer in layers:
        codecs = {name: number for name, number in _numbers_of(layer.get("codecs")).items() if number}
        if not codecs:
            continue
        seconds = [codecs.get(name, 0.0) for name in ("encode_s", "decode_s", "exposed_s")]
        rows.append(
            [
                str(layer.get("name", MISSING)),
                _megabytes_per_step(codecs.get("weight_bytes"), steps),
                _ratio(codecs.get("weight_ratio")),
                f"{codecs.get('weight_error', 0.0):.1e}",
                _megabytes_per_step(codecs.get("gradient_bytes"), steps),
                _ratio(codecs.get("gradient_ratio")),
                f"{codecs.get('residual_norm', 0.0):.1e}",
                *(f"{1e3 * value / steps:.2f} ms" if steps else MISSING for value in seconds),
            ]
        )
    if not rows:
        return []
    head = ["layer", "weights", "ratio", "error", "gradients", "ratio", "residual", "encode", "decode", "waited"]
    title = "encoded, MB per step of all ranks, ratios to fp32, relative error of replicas; times per step and rank"
    return ["", title, "", *_aligned([head, *rows])]


def _ratio(value: float | None) -> str:
    return MISSING if value is None else f"{value:.1f}x"


def explain_plan(record: Mapping[str, Any]) -> str:
    """Why a planned job runs as it does: the plan, its reason, and predicted beside measured, term by term.

    Measured are the seconds that rank 0 waited, for slower ranks too. What this program does not send itself
    (DeepSpeed's token exchange, its synchronisation) it cannot measure: "-". "All else" completes the step.
    """
    planning = _mapping_of(record.get("planning"))
    if not planning:
        return 'nothing was planned in this run: no hybridep setting was "auto", or no report was written yet'
    predicted, measured = _mapping_of(planning.get("predicted")), _mapping_of(planning.get("measured"))
    lines = [
        f"plan: {planning.get('plan') or 'settings given by hand'}",
        f"because: {planning.get('reason', MISSING)}",
    ]
    if planning.get("runner_up") is not None:
        runner_up_s = _number_of(planning.get("runner_up_s"))
        lines.append(f"runner-up at the last look: {planning['runner_up']}, {_seconds(runner_up_s)} s expected")
    lines += ["", *_terms_table(planning, predicted, measured), "", *_uplinks_table(planning, predicted, measured)]
    history = [entry for entry in _sequence_of(planning.get("history")) if isinstance(entry, Mapping)]
    if history:
        lines += ["", "changes of plan:"]
        lines += [f"  step {entry.get('step')}: {entry.get('to')} ({entry.get('reason')})" for entry in history]
    return "\n".join(lines)


def _terms_table(planning: Mapping[str, Any], predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> list[str]:
    terms, waited = _mapping_of(predicted.get("terms_s")), _mapping_of(measured.get("waited_s"))
    step_s = _number_of(planning.get("measured_step_s"))
    rows = [["seconds per step", "predicted", "measured"]]
    known_s = 0.0
    for name, title, source in TERMS:
        value = _number_of(measured.get("codec_s")) if source == "codec_s" else _number_of(waited.get(str(source)))
        is_ours = source is not None and value is not None and (value > 0 or not _number_of(terms.get(name)))
        known_s += value if is_ours and value is not None else 0.0
        if _number_of(terms.get(name)) or (is_ours and value):
            rows.append([title, _seconds(_number_of(terms.get(name))), _seconds(value) if is_ours else MISSING])
    rows.append(["all else", MISSING, MISSING if step_s is None else _seconds(step_s - known_s)])
    rows.append(["the step", _seconds(_number_of(predicted.get("step_s"))), _seconds(step_s)])
    return _aligned(rows)


def _uplinks_table(
    planning: Mapping[str, Any], predicted: Mapping[str, Any], measured: Mapping[str, Any]
) -> list[str]:
    rows = [["MB per step over one uplink", "predicted", "measured"]]
    levels = [_mapping_of(level) for level in _sequence_of(planning.get("links"))]
    pairs = zip(_sequence_of(predicted.get("uplink_bytes")), _sequence_of(measured.get("uplink_bytes")), strict=False)
    for level, (ours, theirs) in zip(levels, pairs, strict=False):
        for kind in KINDS[:4]:
            expected = _number_of(_mapping_of(ours).get(PREDICTED_KIND.get(kind, kind)))
            found = _number_of(_mapping_of(theirs).get(kind))
            if expected or found:
                title = f"{level.get('name', MISSING)}, {kind.replace('_', ' ')}"
                rows.append([title, _megabytes_per_step(expected, 1), _megabytes_per_step(found or None, 1)])
    return _aligned(rows)


def _seconds(value: float | None) -> str:
    return MISSING if value is None else f"{value:.4f}"


def _number_of(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _sequence_of(value: object) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _mapping_of(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _numbers_of(value: object) -> dict[str, float]:
    found = {str(name): _number_of(one) for name, one in _mapping_of(value).items()}
    return {name: number for name, number in found.items() if number is not None}


def _megabytes_per_step(num_bytes: float | None, steps: float | None) -> str:
    return MISSING if num_bytes is None or not steps else f"{num_bytes / steps / BYTES_PER_MB:.3f}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines, first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "   ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
