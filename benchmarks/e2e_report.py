# SPDX-License-Identifier: Apache-2.0
"""Tables and plots of what benchmarks/e2e.py measured.

A ratio is paired block by block against the better of the two baselines (flat EP, EP inside the DC), with a 95%
bootstrap interval; "noise" is flat EP against itself.  The best of ours and the better baseline are picked by the same
blocks that make the interval, so where two plans are close the ratio flatters the winner by up to the noise.
"""

import argparse
import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common import median_95, new_figure, plain_numbers, ratio, save_figure, table

FLAT, AGAIN, INSIDE = "deepspeed, flat EP", "deepspeed, flat EP again", "deepspeed, EP inside the DC"
KINDS = ("tokens", "expert_weights", "expert_gradients", "dense", "control")
Record = dict[str, Any]


def rate_order(rate: str) -> float:
    """Minus Mbit/s: no limit comes first."""
    return -float("inf") if rate == "none" else -float(rate.removesuffix("mbit"))


def median_s(record: Record) -> float:
    return statistics.median(record["step_s"])


def cases(records: Sequence[Record]) -> Iterable[tuple[tuple[Any, ...], list[Record]]]:
    """Records by (compute, model, adapters, dcs, tokens, accumulation), in order."""

    def key(record: Record) -> tuple[Any, ...]:
        params = record["params"]
        kind = params.get("compute", "real"), params.get("model", "bytes"), params.get("adapters", "")
        return *kind, params["dcs"], params["tokens_per_rank"], params["accumulation"]

    for case, group in itertools.groupby(sorted(records, key=key), key):
        yield case, sorted(group, key=lambda record: rate_order(record["params"]["rate"]))


def by_rate(records: Sequence[Record]) -> dict[str, dict[str, Record]]:
    found: dict[str, dict[str, Record]] = {}
    for record in records:
        found.setdefault(record["params"]["rate"], {})[record["params"]["plan"]] = record
    return found


def shown(rate: str) -> str:
    return "no limit" if rate == "none" else rate


def over(one: Record, other: Record | None) -> str:
    """The ratio of step times; empty without the other."""
    return "" if other is None else str(ratio(one["step_s"], other["step_s"]))


def time_table(records: Sequence[Record]) -> str:
    """Median seconds per step of each plan, and the best of ours against the better baseline."""
    rates = by_rate(records)
    plans = [plan for plan in next(iter(rates.values())) if plan != AGAIN]
    rows = []
    for rate, by_plan in rates.items():
        ours = [by_plan[plan] for plan in by_plan if plan.startswith("hybridep") and not plan.startswith(AUTO)]
        best = min(ours, key=median_s)
        better = min((by_plan[plan] for plan in (FLAT, INSIDE) if plan in by_plan), key=median_s, default=None)
        cells = [f"{median_s(by_plan[plan]):.3f}" if plan in by_plan else "" for plan in plans]
        noise = over(by_plan[AGAIN], by_plan.get(FLAT)) if AGAIN in by_plan else ""
        cells += [over(best, by_plan.get(FLAT)), f"{over(best, better)} ({best['params']['plan']})", noise]
        rows.append([shown(rate), *cells])
    last = ("best of ours / flat EP", "best of ours / better baseline", "noise")
    return table(["uplink", *plans, *last], rows)


AUTO = "hybridep auto"  # the names of planned jobs begin with it
LOSSY = ("int8", "fp8", "low rank", "codecs", "recommended")


def is_by_hand(plan: str, *, with_codecs: bool) -> bool:
    """Plans that a planned job could have taken: what needs other expert-parallel groups is not among them."""
    is_lossy = any(word in plan for word in LOSSY)
    return plan not in (INSIDE, AGAIN) and not plan.startswith(AUTO) and (with_codecs or not is_lossy)


def regret_table(records: Sequence[Record]) -> str:
    """What planned jobs have picked, and their step over that of the fastest plan by hand; empty without such jobs."""
    rows = []
    for rate, by_plan in by_rate(records).items():
        for name in (plan for plan in by_plan if plan.startswith(AUTO)):
            hand = [plan for plan in by_plan if is_by_hand(plan, with_codecs="codecs" in name)]
            best, auto = min((by_plan[plan] for plan in hand), key=median_s), by_plan[name]
            cells = [shown(rate), name.removeprefix("hybridep "), auto.get("picked"), f"{median_s(auto):.3f}"]
            cells += [best["params"]["plan"], f"{median_s(best):.3f}", over(auto, best), over(auto, by_plan.get(FLAT))]
            rows.append(cells)
    header = ("uplink", "job", "picked", "seconds", "fastest by hand", "seconds", "ratio", "of flat EP")
    return table(header, rows) if rows else ""


def byte_table(records: Sequence[Record]) -> str:
    """MB per step over the DC uplinks at the lowest rate: seen by the interfaces, and counted by the program."""
    rows = []
    for plan, record in list(by_rate(records).values())[-1].items():
        counted, wire = record["counted_bytes_per_step"], record["wan_bytes_per_step"] / 1e6
        parts = [counted.get(kind, 0.0) / 1e6 for kind in KINDS]
        numbers = [f"{part:.2f}" for part in [*parts, wire - sum(parts)]]
        if not plan.startswith("hybridep"):
            numbers = [""] * len(numbers)
        rows.append([plan, f"{wire:.2f}", *numbers, f"{record['loss']:.4f}"])
    kinds = (kind.replace("_", " ") for kind in KINDS)
    return table(["plan", "on the wire", *kinds, "rest (DeepSpeed's own, headers)", "loss"], rows)


def limits_table(records: Sequence[Record]) -> str:
    """Step times on a slow link over those without a limit, where phases with and without take turns.

    A phase is compared with the mean of its two neighbours: the machine gets faster and slower within minutes.
    """
    phases: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for record in records:
        params = {name: value for name, value in record["params"].items() if name != "rate"}
        phases[json.dumps(params)].append((record["params"]["rate"], median_s(record)))
    found: dict[str, dict[str, list[float]]] = {}
    for case, of_case in phases.items():
        for (before, (rate, step_s)), (_, after) in itertools.pairwise(itertools.pairwise(of_case)):
            if before[0] == after[0] == "none" != rate:
                gains = found.setdefault(case, defaultdict(list))
                gains[rate].append(2 * step_s / (before[1] + after[1]))
    rates = sorted({rate for gains in found.values() for rate in gains}, key=rate_order)
    rows = [
        [json.loads(case)[name] for name in SHOWN] + [", ".join(f"{one:.2f}" for one in gains[rate]) for rate in rates]
        for case, gains in found.items()
    ]
    lines = [table(["DCs x ranks", "tokens", "accumulation", "plan", *rates], rows)]
    for rate in rates:
        every = [one for gains in found.values() for one in gains[rate]]
        lines.append(f"{rate}: mean {statistics.mean(every):.2f}, {min(every):.2f} to {max(every):.2f}.")
    return "Step time over that of the neighbouring phases without a limit:\n\n" + "\n\n".join(lines)


SHOWN = ("dcs", "tokens_per_rank", "accumulation", "plan")
LEAST_RATES = 3  # of a plot; the unlimited link is not on its axis
NAMES = {
    FLAT: "DeepSpeed, flat EP",
    INSIDE: "DeepSpeed, EP inside",
    "hybridep [2,1]": "ours, domains over both, exact",
    "hybridep, EP inside the DC, recommended": "ours, EP inside, encoded",
    "hybridep [2,1] recommended": "ours, domains over both, encoded",
}
COLORS = dict(zip(NAMES, ("#666666", "#d55e00", "#cc79a7", "#009e73", "#0072b2"), strict=True))


def plot(records: Sequence[Record], path: Path) -> None:
    """Step time against bandwidth with 95% bands, and bytes over the link, of the plans that have a name."""
    from matplotlib import ticker

    rates = by_rate(records)
    mbits = sorted(-rate_order(rate) for rate in rates if rate != "none")
    at = {mbit: rates[f"{mbit:g}mbit"] for mbit in mbits}
    slowest = at[mbits[0]]
    shown = [plan for plan in NAMES if all(plan in by_plan for by_plan in at.values())]
    figure, (left, right) = new_figure(1, 2, figsize=(11, 4.4), width_ratios=(3, 2))
    for plan in shown:
        seconds = [median_s(at[mbit][plan]) for mbit in mbits]
        lows, highs = zip(*(median_95(at[mbit][plan]["step_s"]) for mbit in mbits), strict=True)
        left.plot(mbits, seconds, marker="o", color=COLORS[plan], linewidth=2)
        left.fill_between(mbits, lows, highs, color=COLORS[plan], alpha=0.2, linewidth=0)
    ends = _apart([median_s(at[mbits[-1]][plan]) for plan in shown])
    for plan, end in zip(shown, ends, strict=True):
        left.annotate(NAMES[plan], (mbits[-1] * 1.08, end), color=COLORS[plan], va="center", fontsize=9)
    left.set(xscale="log", yscale="log", xlabel="Mbit/s of each datacentre's uplink", ylabel="seconds per step")
    left.set_xlim(mbits[0] * 0.9, mbits[-1] * (mbits[-1] / mbits[0]) ** 0.95)
    plain_numbers(left)
    left.set_xticks(mbits)
    left.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    megabytes = [slowest[plan]["wan_bytes_per_step"] / 1e6 for plan in shown]
    bars = right.barh([NAMES[plan] for plan in shown], megabytes, color=[COLORS[plan] for plan in shown])
    right.bar_label(bars, [f" {value:.3g}" for value in megabytes])
    right.set(xlabel="MB over the uplinks per step", xlim=(0, max(megabytes) * 1.2))
    right.invert_yaxis()
    params, rounds = records[0]["params"], len(records[0]["step_s"])
    dcs, of_each = map(int, params["dcs"].split("x"))
    ranks = dcs * of_each
    save_figure(
        figure, path,
        f"{ranks} CPU ranks in {dcs} emulated datacentres, no added delay, {params['layers']} layers, hidden "
        f"{params['hidden']}, {params['tokens_per_rank']} tokens per rank, fp32, ZeRO {params['zero_stage']}. "
        f"Medians of {rounds} turns; bands: 95% bootstrap.",
    )  # fmt: skip


def _apart(values: Sequence[float], ratio: float = 1.22) -> list[float]:
    """Places of labels on a log axis: as near to the values as does not overlap."""
    places = dict.fromkeys(range(len(values)), 0.0)
    below = 0.0
    for index in sorted(places, key=lambda index: values[index]):
        below = places[index] = max(values[index], below * ratio)
    return list(places.values())


def report(records: Sequence[Record], args: argparse.Namespace) -> str:
    """Markdown of all cases; plots where a folder was named and a case has enough rates."""
    if args.limits:
        return limits_table(records)
    lines = []
    for (compute, model, adapters, dcs, tokens, accumulation), group in cases(records):
        title = f"{dcs}, {tokens} tokens per rank and micro-step, accumulation {accumulation}"
        title += f", {model}" if model != "bytes" else ""
        title += f", adapters of {adapters}" if adapters else ""
        title += ", compute slept" if compute == "sleep" else ""
        lines.append(f"### {title}\n\nSeconds per step:\n\n{time_table(group)}\n")
        if regret := regret_table(group):
            lines.append(f"Planned jobs against the fastest plan by hand:\n\n{regret}\n")
        lines.append(f"MB per step over the DC uplinks, one direction, all ranks:\n\n{byte_table(group)}\n")
        if args.plots is not None and sum(rate != "none" for rate in by_rate(group)) >= LEAST_RATES:
            path = args.plots / f"e2e-{dcs}-t{tokens}-a{accumulation}.svg"
            plot(group, path)
            lines.append(f"![{title}]({args.plots.name}/{path.name})\n")
    return "\n".join(lines)
