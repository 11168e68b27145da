# SPDX-License-Identifier: Apache-2.0
"""Formats the record of a run, the JSON file at `report_file`, as tables."""

from collections.abc import Mapping
from typing import Any

from ds_hybridep.plan.stream_model import TERM_WORDS
from ds_hybridep.plan.words import aligned

BYTES_PER_MB = 1e6
MISSING = "-"
NOT_COUNTED = "not counted"  # shown for null in a record: DeepSpeed sends these bytes
WAITS = {  # term of the stream model -> kind under which a rank counts its waits
    "tokens_s": "tokens",
    "expert_weights_s": "expert_weights",
    "expert_gradients_s": "expert_gradients",
    "dense_sync_s": "dense",  # includes the waits of "expert_sync_s"
}
SHARED = "dense_sync_s", "expert_sync_s"  # ranks count these two terms as one kind
LINK_TITLE = "connections of rank 0 since the start"
LOAD_TITLE = "rows of the fullest over the mean"
CODEC_TITLE = "encoded, MB per step of all ranks, ratios to fp32, relative error of replicas; times per step and rank"
SHARED_WORDS = "sums and gathers of what several ranks hold"


def format_run_record(record: Mapping[str, Any]) -> str:
    """A table of the megabytes sent per step on each level by kind, beside what plain EP would have sent.

    DeepSpeed sends the bytes that are null; the table shows "not counted" for them.  The share "of plain EP" leaves
    out the kind "dense", because plain EP has to synchronise it too.  `report_file` holds:

        {"steps": 100, "world_size": 4, "exposed_s": {"tokens": 0.5, ...},
         "levels": [{"name": "dc", "sent_bytes": {"tokens": 0, "expert_weights": 1000, ...}, "plain_ep_bytes": 4000}],
         "plan": "4 MoE layers, domain sizes dc 2, gpu 1, ..."}

    Bytes are sums over all ranks and steps; exposed seconds are means over ranks, summed over steps.
    """
    steps, levels = record["steps"], record["levels"]
    step_s = record.get("step_s")
    took = f", {1e3 * step_s:.0f} ms each" if step_s else ""
    sections = [
        f"MB sent per step, {record['world_size']} ranks together, mean of {steps} steps{took}",
        aligned(level_rows(record)),
        "time a rank waited for them, mean per step: "
        + ", ".join(
            f"{kind.replace('_', ' ')} {1e3 * seconds / steps:.1f} ms"
            for kind, seconds in record["exposed_s"].items()
            if seconds is not None
        ),
    ]
    if in_a_row := [f"{level['name']} {level['waits'] / steps:.1f}" for level in levels if "waits" in level]:
        sections.append(f"waits in a row over each level, mean per step: {', '.join(in_a_row)}")
    if slowest := slowest_rank(record):
        sections.append(slowest)
    for title, rows in (
        site_table(record),
        (LINK_TITLE, link_rows(record)),
        (LOAD_TITLE, load_rows(record)),
        (CODEC_TITLE, codec_rows(record)),
    ):
        sections += [title, aligned(rows)] if len(rows) > 1 else []
    if record.get("planning") is not None:
        sections.append(explain_plan(record["planning"]))
    elif "plan" in record:
        sections.append(f"plan: {record['plan']}")
    return "\n\n".join(sections)


def level_rows(record: Mapping[str, Any]) -> list[list[str]]:
    """A row of titles, then a row for each level: megabytes per step by kind, their sum, and beside plain EP."""
    steps, levels = record["steps"], record["levels"]
    kinds = list(levels[0]["sent_bytes"])
    rows = [["level", *(kind.replace("_", " ") for kind in kinds), "sum", "plain EP", "of plain EP"]]
    for level in levels:
        sent, plain_ep_bytes = level["sent_bytes"], level["plain_ep_bytes"]
        total = sum(num_bytes or 0 for num_bytes in sent.values())
        share = f"{(total - (sent['dense'] or 0)) / plain_ep_bytes:.0%}" if plain_ep_bytes else MISSING
        cells = [NOT_COUNTED if sent[kind] is None else _megabytes(sent[kind] / steps) for kind in kinds]
        rows.append([level["name"], *cells, _megabytes(total / steps), _megabytes(plain_ep_bytes / steps), share])
    return rows


def slowest_rank(record: Mapping[str, Any]) -> str:
    """A line about the rank that waited least; empty if it is not known, or if nobody waited."""
    slowest = record.get("slowest")
    if slowest is None or slowest["others_waited_s"] <= 0:
        return ""
    own, others = 1e3 * slowest["waited_s"], 1e3 * slowest["others_waited_s"]
    return f"slowest: rank {slowest['rank']}, which waited {own:.1f} ms per step; the others waited {others:.1f} ms"


def site_table(record: Mapping[str, Any]) -> tuple[str, list[list[str]]]:
    """A title about this site, and a row of titles with a row for each other site; no rows if there is none."""
    sites = record.get("sites")
    if not sites:
        return "", []
    drift = "" if sites["drift"] is None else f", weights {sites['drift']:.1e} from the common ones (relative)"
    title = (
        f"other sites, as rank 0 of site {sites['site']} sees them at step {sites['step']}; waited "
        f"{sites['quorum_s']:.1f} s for agreement, {sites['repeated']} exchanges repeated{drift}"
    )
    rows = [["site", "is", "last step", "waited", "sent, MB", "received, MB"]]
    for name, one in sites["others"].items():
        state, step = "present" if one["present"] else "absent", MISSING if one["step"] is None else str(one["step"])
        amounts = [_megabytes(one[key]) for key in ("sent_bytes", "received_bytes")]
        rows.append([name, state, step, f"{one['waited_s']:.1f} s", *amounts])
    return title, rows


def link_rows(record: Mapping[str, Any]) -> list[list[str]]:
    """A row of titles, then a row for each rank that rank 0 is connected with."""
    rows = [["rank", "state", "sent, MB", "received, MB", "round trip", "sent again", "reconnects"]]
    for peer in record.get("link", ()):
        trip_s = peer["round_trip_s"]
        trip = MISSING if trip_s is None else f"{1e3 * trip_s:.1f} ms"
        amounts = [_megabytes(peer[name]) for name in ("sent_bytes", "received_bytes")]
        counts = [str(peer[name]) for name in ("retransmissions", "reconnects")]
        rows.append([str(peer["rank"]), peer["state"], *amounts, trip, *counts])
    return rows


def load_rows(record: Mapping[str, Any]) -> list[list[str]]:
    """A row of titles, then a row for each layer whose rows were counted."""
    rows = [["layer", "rank", "expert"]]
    has_hot = any("hot_experts" in layer for layer in record["layers"])
    rows[0] += ["rank, lately", "without hot experts", "hot experts", "changes"] if has_hot else []
    for layer in record["layers"]:
        if "expert_load" in layer:
            rows.append([layer["name"], f"{layer['imbalance']:.2f}", f"{layer['expert_load']:.2f}"])
            if "hot_experts" in layer:
                loads = [layer["load_after"], layer["load_before"]]
                rows[-1] += [MISSING if load is None else f"{load:.2f}" for load in loads]
                rows[-1] += [", ".join(map(str, layer["hot_experts"])) or "none", str(layer["hot_changes"])]
            elif has_hot:
                rows[-1] += [MISSING] * 4
    return rows


def codec_rows(record: Mapping[str, Any]) -> list[list[str]]:
    """A row of titles, then a row for each layer that has codecs."""
    steps = record["steps"]
    rows = [["layer", "weights", "ratio", "error", "gradients", "ratio", "residual", "encode", "decode", "waited"]]
    for layer in record["layers"]:
        if codecs := layer["codecs"]:
            rows.append([
                layer["name"],
                _megabytes(codecs["weight_bytes"] / steps),
                f"{codecs['weight_ratio']:.1f}x",
                f"{codecs['weight_error']:.1e}",
                _megabytes(codecs["gradient_bytes"] / steps),
                f"{codecs['gradient_ratio']:.1f}x",
                f"{codecs['residual_norm']:.1e}",
                *(f"{1e3 * codecs[name] / steps:.2f} ms" for name in ("encode_s", "decode_s", "exposed_s")),
            ])  # fmt: skip
    return rows


def explain_plan(planning: Mapping[str, Any]) -> str:
    """Why a planned job runs as it does: the plan, its reason, and predicted beside measured, term by term.

    The measured seconds are those that rank 0 waited, also for slower ranks. What DeepSpeed sends itself (its token
    exchange, its sums and gathers) cannot be measured: the table shows "-" or "not counted". "All else" is the rest
    of the step.
    """
    return "\n".join([*plan_lines(planning), "", aligned(term_rows(planning))])


def plan_lines(planning: Mapping[str, Any]) -> list[str]:
    """The plan, its reason, the runner-up, and how the plan has changed."""
    lines = [f"plan: {planning['plan'] or 'settings given by hand'}", f"because: {planning['reason']}"]
    if planning["runner_up"] is not None:
        seconds = _seconds(planning["runner_up_s"])
        lines.append(f"runner-up at the last look: {planning['runner_up']}, {seconds} s expected")
    changes = [f"  step {entry['step']}: {entry['to']} ({entry['reason']})" for entry in planning["history"]]
    lines += ["changes of plan:", *changes] if changes else []
    return lines


def term_rows(planning: Mapping[str, Any]) -> list[list[str]]:
    """A row of titles, then what was predicted and measured for each term of the step, and for the step."""
    predicted, waited_s = planning["predicted"] or {}, planning["measured"]["waited_s"]
    terms = dict(predicted.get("terms_s", {}))
    dense, experts = SHARED
    if (shared_s := terms.pop(experts, None)) is not None:
        terms[dense] = terms.get(dense, 0.0) + shared_s
    rows = [["seconds per step", "predicted", "measured"]]
    known_s = 0.0
    for term, words in TERM_WORDS.items():
        expected_s = terms.get(term)
        found_s = planning["measured"]["codec_s"] if term == "codec_s" else waited_s.get(WAITS.get(term))
        known_s += found_s or 0.0
        if expected_s or found_s:
            # If a term is expected but nothing was measured, DeepSpeed sends it.
            unknown = NOT_COUNTED if term == dense else MISSING
            measured = _seconds(found_s) if found_s or not expected_s else unknown
            rows.append([SHARED_WORDS if term == dense else words, _seconds(expected_s), measured])
    step_s = planning["measured_step_s"]
    rows.append(["all else", MISSING, _seconds(None if step_s is None else step_s - known_s)])
    return [*rows, ["the step", _seconds(predicted.get("step_s")), _seconds(step_s)]]


def _seconds(value: float | None) -> str:
    return MISSING if value is None else f"{value:.4f}"


def _megabytes(num_bytes: float) -> str:
    return f"{num_bytes / BYTES_PER_MB:.3f}"
