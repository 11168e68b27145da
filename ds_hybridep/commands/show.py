# SPDX-License-Identifier: Apache-2.0
"""Turns the record of a run, the JSON file that `report_file` names, into a table to read."""

from collections.abc import Mapping, Sequence
from typing import Any

BYTES_PER_MB = 1e6
KINDS = ("tokens", "expert_weights", "expert_gradients", "dense", "control")
NOT_IN_PLAIN_EP = ("dense",)  # travels under plain EP too, and is in no count of it
MISSING = "-"
NOT_COUNTED = "not counted"  # null in a record: somebody else sends it


def format_run_record(record: Mapping[str, Any]) -> str:
    """A table of the megabytes sent per step on each level by kind, beside what plain EP would have sent.

    The share "of plain EP" leaves out the kind "dense", which plain EP has to synchronise too.

    Takes records of other versions too: what is missing is shown as "-", kinds it does not know get columns of their
    own.  Records of this shape are written at `report_file`:

        {"steps": 100, "world_size": 4, "exposed_s": {"tokens": 0.5, ...},
         "levels": [{"name": "dc", "sent_bytes": {"tokens": 0, "expert_weights": 1000, ...}, "plain_ep_bytes": 4000}]}

    record: bytes are sums over all ranks and steps; exposed seconds are means over ranks, summed over steps.
    """
    steps = _number(record.get("steps"))
    levels = [level for level in _sequence(record.get("levels")) if isinstance(level, Mapping)]
    if not levels:
        return "no traffic was recorded"
    sent = [_mapping(level.get("sent_bytes")) for level in levels]
    kinds = [*KINDS, *sorted({str(kind) for counts in sent for kind in counts} - set(KINDS))]

    rows = [["level", *(kind.replace("_", " ") for kind in kinds), "sum", "plain EP", "of plain EP"]]
    for level, counts in zip(levels, sent, strict=True):
        sent_bytes = {kind: number for kind in counts if (number := _number(counts[kind])) is not None}
        total_bytes = sum(sent_bytes.values())
        comparable_bytes = sum(number for kind, number in sent_bytes.items() if kind not in NOT_IN_PLAIN_EP)
        plain_ep_bytes = _number(level.get("plain_ep_bytes"))
        rows.append(
            [
                str(level.get("name", MISSING)),
                *(
                    NOT_COUNTED
                    if counts.get(kind, 0) is None
                    else _megabytes_per_step(_number(counts.get(kind)), steps)
                    for kind in kinds
                ),
                _megabytes_per_step(total_bytes if counts else None, steps),
                _megabytes_per_step(plain_ep_bytes, steps),
                f"{comparable_bytes / plain_ep_bytes:.0%}" if counts and plain_ep_bytes else MISSING,
            ]
        )
    ranks = _number(record.get("world_size"))
    header = "MB sent per step, {} ranks together, mean of {} steps".format(
        MISSING if ranks is None else f"{ranks:.0f}", MISSING if steps is None else f"{steps:.0f}"
    )
    lines = [header, "", *_aligned(rows)]
    exposed = _mapping(record.get("exposed_s"))
    waits = [
        f"{kind.replace('_', ' ')} {1e3 * seconds / steps:.1f} ms"
        for kind, value in exposed.items()
        if (seconds := _number(value)) is not None and steps
    ]
    if waits:
        lines += ["", f"time a rank waited for them, mean per step: {', '.join(waits)}"]
    return "\n".join(lines + _codec_lines(record, steps))


def _codec_lines(record: Mapping[str, Any], steps: float | None) -> list[str]:
    """A table of what codecs did in each layer; empty where all was exact."""
    layers = [layer for layer in _sequence(record.get("layers")) if isinstance(layer, Mapping)]
    rows = []
    for layer in layers:
        codecs = {name: number for name, value in _mapping(layer.get("codecs")).items() if (number := _number(value))}
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


def explain_plan(record: Mapping[str, Any]) -> str:
    """Why a planned job runs as it does: the plan, its reason, and predicted beside measured, term by term.

    Seconds that are measured are those that rank 0 waited, so that a wait for a slower rank is in them too. What this
    program does not send itself (DeepSpeed's token exchange, its synchronisation) it cannot measure: "-". All that has
    no measure of its own, such as computation, is in "all else", which makes the measured step complete.

    record: as `report_file` has it.
    """
    planning = _mapping(record.get("planning"))
    if not planning:
        return 'nothing was planned in this run: no hybridep setting was "auto", or no report was written yet'
    predicted, measured = _mapping(planning.get("predicted")), _mapping(planning.get("measured"))
    lines = [
        f"plan: {planning.get('plan') or 'settings given by hand'}",
        f"because: {planning.get('reason', MISSING)}",
    ]
    if planning.get("runner_up") is not None:
        runner_up_s = _number(planning.get("runner_up_s"))
        lines.append(f"runner-up at the last look: {planning['runner_up']}, {_seconds(runner_up_s)} s expected")
    lines += ["", *_links_table(planning), "", *_terms_table(planning, predicted, measured)]
    lines += ["", *_uplinks_table(planning, predicted, measured)]
    history = [entry for entry in _sequence(planning.get("history")) if isinstance(entry, Mapping)]
    if history:
        lines += ["", "changes of plan:"]
        lines += [f"  step {entry.get('step')}: {entry.get('to')} ({entry.get('reason')})" for entry in history]
    return "\n".join(lines)


def _links_table(planning: Mapping[str, Any]) -> list[str]:
    rows = [["link", "Gbit/s", "latency [ms]"]]
    for link in _sequence(planning.get("links")):
        about = _mapping(link)
        numbers = [_number(about.get("bandwidth_gbps")), _number(about.get("latency_ms"))]
        rows.append([str(about.get("name", MISSING)), *(MISSING if n is None else f"{n:.4g}" for n in numbers)])
    return _aligned(rows)


def _terms_table(planning: Mapping[str, Any], predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> list[str]:
    terms, waited = _mapping(predicted.get("terms_s")), _mapping(measured.get("waited_s"))
    step_s = _number(planning.get("measured_step_s"))
    rows = [["seconds per step", "predicted", "measured"]]
    known_s = 0.0
    for name, title, source in TERMS:
        value = _number(measured.get("codec_s")) if source == "codec_s" else _number(waited.get(str(source)))
        is_ours = source is not None and value is not None and (value > 0 or not _number(terms.get(name)))
        known_s += value if is_ours and value is not None else 0.0
        if _number(terms.get(name)) or (is_ours and value):
            rows.append([title, _seconds(_number(terms.get(name))), _seconds(value) if is_ours else MISSING])
    rows.append(["all else", MISSING, MISSING if step_s is None else _seconds(step_s - known_s)])
    rows.append(["the step", _seconds(_number(predicted.get("step_s"))), _seconds(step_s)])
    return _aligned(rows)


def _uplinks_table(
    planning: Mapping[str, Any], predicted: Mapping[str, Any], measured: Mapping[str, Any]
) -> list[str]:
    rows = [["MB per step over one uplink", "predicted", "measured"]]
    levels = [_mapping(level) for level in _sequence(planning.get("links"))]
    pairs = zip(_sequence(predicted.get("uplink_bytes")), _sequence(measured.get("uplink_bytes")), strict=False)
    for level, (ours, theirs) in zip(levels, pairs, strict=False):
        for kind in KINDS[:4]:
            expected = _number(_mapping(ours).get(PREDICTED_KIND.get(kind, kind)))
            found = _number(_mapping(theirs).get(kind))
            if expected or found:
                title = f"{level.get('name', MISSING)}, {kind.replace('_', ' ')}"
                rows.append([title, _megabytes_per_step(expected, 1), _megabytes_per_step(found or None, 1)])
    return _aligned(rows)


def _seconds(value: float | None) -> str:
    return MISSING if value is None else f"{value:.4f}"


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _sequence(value: object) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else ()


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


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
