# SPDX-License-Identifier: Apache-2.0
"""The `show` subcommand: the record of a run, the JSON file that `report_file` names, as a table to read.

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
EXIT_MISUSED = 2  # as argparse does


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `show` to the subcommands of the program."""
    parser = subparsers.add_parser("show", help="print the record of a run as a table")
    add_record_argument(parser)
    parser.set_defaults(run=run, describe=format_run_record)


def add_record_argument(parser: argparse.ArgumentParser) -> None:
    """The record to read."""
    parser.add_argument("record", type=Path, metavar="RUN.json", help='what the run wrote at its "report_file"')


def run(args: argparse.Namespace) -> int:
    """Prints what `args.describe` makes of the record.  Returns 0, or 2 with the error on stderr."""
    try:
        record = json.loads(args.record.read_text())
    except (OSError, ValueError) as error:
        what = f"cannot be read: {error.strerror}" if isinstance(error, OSError) else f"is not JSON: {error}"
        return _refuse(args.record, what)
    if not isinstance(record, dict):
        return _refuse(args.record, f"holds a {type(record).__name__}, wanted the object of a run record")
    print(args.describe(record))
    return 0


def _refuse(path: Path, what: str) -> int:
    print(f"ds_hybridep: RUN.json: {path} {what}", file=sys.stderr)
    return EXIT_MISUSED


def format_run_record(record: Mapping[str, Any]) -> str:
    """A table of the megabytes sent per step on each level by kind, beside what plain EP would have sent.

    The share "of plain EP" leaves out the kind "dense", which plain EP has to synchronise too. Records of other
    versions are shown as far as they go, with "-" for what is missing. `report_file` holds:

        {"steps": 100, "world_size": 4, "exposed_s": {"tokens": 0.5, ...},
         "levels": [{"name": "dc", "sent_bytes": {"tokens": 0, "expert_weights": 1000, ...}, "plain_ep_bytes": 4000}]}

    Bytes are sums over all ranks and steps; exposed seconds are means over ranks, summed over steps.
    """
    steps = number_of(record.get("steps"))
    levels = [level for level in sequence_of(record.get("levels")) if isinstance(level, Mapping)]
    if not levels:
        return "no traffic was recorded"
    sent = [mapping_of(level.get("sent_bytes")) for level in levels]
    kinds = [*KINDS, *sorted({str(kind) for counts in sent for kind in counts} - set(KINDS))]

    rows = [["level", *(kind.replace("_", " ") for kind in kinds), "sum", "plain EP", "of plain EP"]]
    for level, counts in zip(levels, sent, strict=True):
        sent_bytes = {kind: number for kind in counts if (number := number_of(counts[kind])) is not None}
        total_bytes = sum(sent_bytes.values())
        comparable_bytes = sum(number for kind, number in sent_bytes.items() if kind not in NOT_IN_PLAIN_EP)
        plain_ep_bytes = number_of(level.get("plain_ep_bytes"))
        rows.append(
            [
                str(level.get("name", MISSING)),
                *(megabytes_per_step(number_of(counts.get(kind)), steps) for kind in kinds),
                megabytes_per_step(total_bytes if counts else None, steps),
                megabytes_per_step(plain_ep_bytes, steps),
                f"{comparable_bytes / plain_ep_bytes:.0%}" if counts and plain_ep_bytes else MISSING,
            ]
        )
    ranks = number_of(record.get("world_size"))
    shown = [MISSING if number is None else f"{number:.0f}" for number in (ranks, steps)]
    header = f"MB sent per step, {shown[0]} ranks together, mean of {shown[1]} steps"
    lines = [header, "", *aligned(rows)]
    exposed = mapping_of(record.get("exposed_s"))
    waits = [
        f"{kind.replace('_', ' ')} {1e3 * seconds / steps:.1f} ms"
        for kind, value in exposed.items()
        if (seconds := number_of(value)) is not None and steps
    ]
    if waits:
        lines += ["", f"time a rank waited for them, mean per step: {', '.join(waits)}"]
    return "\n".join(lines + _codec_lines(record, steps))


def _codec_lines(record: Mapping[str, Any], steps: float | None) -> list[str]:
    """A table of what codecs did in each layer; empty where all was exact."""
    layers = [layer for layer in sequence_of(record.get("layers")) if isinstance(layer, Mapping)]
    rows = []
    for layer in layers:
        found = mapping_of(layer.get("codecs"))
        codecs = {name: number for name, value in found.items() if (number := number_of(value))}
        if not codecs:
            continue
        seconds = [codecs.get(name, 0.0) for name in ("encode_s", "decode_s", "exposed_s")]
        rows.append(
            [
                str(layer.get("name", MISSING)),
                megabytes_per_step(codecs.get("weight_bytes"), steps),
                _ratio(codecs.get("weight_ratio")),
                f"{codecs.get('weight_error', 0.0):.1e}",
                megabytes_per_step(codecs.get("gradient_bytes"), steps),
                _ratio(codecs.get("gradient_ratio")),
                f"{codecs.get('residual_norm', 0.0):.1e}",
                *(f"{1e3 * value / steps:.2f} ms" if steps else MISSING for value in seconds),
            ]
        )
    if not rows:
        return []
    head = ["layer", "weights", "ratio", "error", "gradients", "ratio", "residual", "encode", "decode", "waited"]
    title = "encoded, MB per step of all ranks, ratios to fp32, relative error of replicas; times per step and rank"
    return ["", title, "", *aligned([head, *rows])]


def _ratio(value: float | None) -> str:
    return MISSING if value is None else f"{value:.1f}x"


def number_of(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def sequence_of(value: object) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def mapping_of(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def megabytes_per_step(num_bytes: float | None, steps: float | None) -> str:
    return MISSING if num_bytes is None or not steps else f"{num_bytes / steps / BYTES_PER_MB:.3f}"


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows as lines, first column to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "   ".join(
            [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        )
        for row in rows
    ]
