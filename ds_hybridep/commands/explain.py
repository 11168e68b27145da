# SPDX-License-Identifier: Apache-2.0
"""The `explain` subcommand: why a planned run had its plan, predicted beside measured."""

import argparse
from collections.abc import Mapping
from typing import Any

from ds_hybridep.commands.show import (
    KINDS,
    MISSING,
    add_record_argument,
    aligned,
    mapping_of,
    megabytes_per_step,
    number_of,
    run,
    sequence_of,
)

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
    """Adds `explain` to the subcommands of the program."""
    parser = subparsers.add_parser("explain", help="say why a planned run had its plan: predicted beside measured")
    add_record_argument(parser)
    parser.set_defaults(run=run, describe=explain_plan)


def explain_plan(record: Mapping[str, Any]) -> str:
    """Why a planned job runs as it does: the plan, its reason, and predicted beside measured, term by term.

    Measured are the seconds that rank 0 waited, for slower ranks too. What this program does not send itself
    (DeepSpeed's token exchange, its synchronisation) it cannot measure: "-". "All else" completes the step.
    """
    planning = mapping_of(record.get("planning"))
    if not planning:
        return 'nothing was planned in this run: no hybridep setting was "auto", or no report was written yet'
    predicted, measured = mapping_of(planning.get("predicted")), mapping_of(planning.get("measured"))
    lines = [
        f"plan: {planning.get('plan') or 'settings given by hand'}",
        f"because: {planning.get('reason', MISSING)}",
    ]
    if planning.get("runner_up") is not None:
        runner_up_s = number_of(planning.get("runner_up_s"))
        lines.append(f"runner-up at the last look: {planning['runner_up']}, {_seconds(runner_up_s)} s expected")
    lines += ["", *_links_table(planning), "", *_terms_table(planning, predicted, measured)]
    lines += ["", *_uplinks_table(planning, predicted, measured)]
    history = [entry for entry in sequence_of(planning.get("history")) if isinstance(entry, Mapping)]
    if history:
        lines += ["", "changes of plan:"]
        lines += [f"  step {entry.get('step')}: {entry.get('to')} ({entry.get('reason')})" for entry in history]
    return "\n".join(lines)


def _links_table(planning: Mapping[str, Any]) -> list[str]:
    rows = [["link", "Gbit/s", "latency [ms]"]]
    for link in sequence_of(planning.get("links")):
        about = mapping_of(link)
        numbers = [number_of(about.get("bandwidth_gbps")), number_of(about.get("latency_ms"))]
        rows.append([str(about.get("name", MISSING)), *(MISSING if n is None else f"{n:.4g}" for n in numbers)])
    return aligned(rows)


def _terms_table(planning: Mapping[str, Any], predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> list[str]:
    terms, waited = mapping_of(predicted.get("terms_s")), mapping_of(measured.get("waited_s"))
    step_s = number_of(planning.get("measured_step_s"))
    rows = [["seconds per step", "predicted", "measured"]]
    known_s = 0.0
    for name, title, source in TERMS:
        value = number_of(measured.get("codec_s")) if source == "codec_s" else number_of(waited.get(str(source)))
        is_ours = source is not None and value is not None and (value > 0 or not number_of(terms.get(name)))
        known_s += value if is_ours and value is not None else 0.0
        if number_of(terms.get(name)) or (is_ours and value):
            rows.append([title, _seconds(number_of(terms.get(name))), _seconds(value) if is_ours else MISSING])
    rows.append(["all else", MISSING, MISSING if step_s is None else _seconds(step_s - known_s)])
    rows.append(["the step", _seconds(number_of(predicted.get("step_s"))), _seconds(step_s)])
    return aligned(rows)


def _uplinks_table(
    planning: Mapping[str, Any], predicted: Mapping[str, Any], measured: Mapping[str, Any]
) -> list[str]:
    rows = [["MB per step over one uplink", "predicted", "measured"]]
    levels = [mapping_of(level) for level in sequence_of(planning.get("links"))]
    pairs = zip(sequence_of(predicted.get("uplink_bytes")), sequence_of(measured.get("uplink_bytes")), strict=False)
    for level, (ours, theirs) in zip(levels, pairs, strict=False):
        for kind in KINDS[:4]:
            expected = number_of(mapping_of(ours).get(PREDICTED_KIND.get(kind, kind)))
            found = number_of(mapping_of(theirs).get(kind))
            if expected or found:
                title = f"{level.get('name', MISSING)}, {kind.replace('_', ' ')}"
                rows.append([title, megabytes_per_step(expected, 1), megabytes_per_step(found or None, 1)])
    return aligned(rows)


def _seconds(value: float | None) -> str:
    return MISSING if value is None else f"{value:.4f}"
