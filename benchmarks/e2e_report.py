# SPDX-License-Identifier: Apache-2.0
"""Tables and plots of benchmarks/e2e.py's records.

    python benchmarks/e2e_report.py benchmarks/results/e2e-2x2.jsonl --plots docs/images > docs/benchmarks-e2e.md

A ratio is paired block by block against the better of the two baselines (flat EP, EP inside the DC), with a 95%
bootstrap interval; "noise" is flat EP against itself.  The best of ours and the better baseline are picked by the same
blocks that make the interval, so where two plans are close the ratio flatters the winner by up to the noise.
"""

import argparse
import itertools
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import bench

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
    table: dict[str, dict[str, Record]] = {}
    for record in records:
        table.setdefault(record["params"]["rate"], {})[record["params"]["plan"]] = record
    return table


def time_table(records: Sequence[Record]) -> str:
    """Median seconds per step of each plan, and the best of ours against the better baseline."""
    rates = by_rate(records)
    plans = [plan for plan in next(iter(rates.values())) if plan != AGAIN]
    lines = [
        "| uplink | " + " | ".join(plans) + " | best of ours / flat EP | best of ours / better baseline | noise |",
        "|---" * (len(plans) + 4) + "|",
    ]
    for rate, by_plan in rates.items():
        ours = min(
            (by_plan[plan] for plan in by_plan if plan.startswith("hybridep") and not plan.startswith(AUTO)),
            key=median_s,
        )
        baselines = [by_plan[plan] for plan in (FLAT, INSIDE) if plan in by_plan]
        better = min(baselines, key=median_s, default=None)
        cells = [f"{median_s(by_plan[plan]):.3f}" if plan in by_plan else "" for plan in plans]
        cells += [
            str(bench.ratio(ours["step_s"], by_plan[FLAT]["step_s"])) if FLAT in by_plan else "",
            f"{bench.ratio(ours['step_s'], better['step_s'])} ({ours['params']['plan']})" if better else "",
            str(bench.ratio(by_plan[AGAIN]["step_s"], by_plan[FLAT]["step_s"])) if AGAIN in by_plan else "",
        ]
        lines.append(f"| {'unshaped' if rate == 'none' else rate} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


AUTO = "hybridep auto"  # the names of planned jobs begin with it
LOSSY = ("int8", "fp8", "low rank", "codecs", "recommended")


def is_by_hand(plan: str, *, with_codecs: bool) -> bool:
    """Plans that a planned job could have taken: what needs other expert-parallel groups is not among them."""
    is_lossy = any(word in plan for word in LOSSY)
    return plan not in (INSIDE, AGAIN) and not plan.startswith(AUTO) and (with_codecs or not is_lossy)


def regret_table(records: Sequence[Record]) -> str:
    """What planned jobs have picked, and their step over that of the fastest plan by hand; empty without such jobs."""
    lines = ["| uplink | job | picked | seconds | fastest by hand | seconds | ratio | of flat EP |", "|---" * 8 + "|"]
    for rate, by_plan in by_rate(records).items():
        for name in (plan for plan in by_plan if plan.startswith(AUTO)):
            hand = [plan for plan in by_plan if is_by_hand(plan, with_codecs="codecs" in name)]
            best, auto = min((by_plan[plan] for plan in hand), key=median_s), by_plan[name]
            cells = [
                "unshaped" if rate == "none" else rate,
                name.removeprefix("hybridep "),
                str(auto.get("picked")),
                f"{median_s(auto):.3f}",
                best["params"]["plan"],
                f"{median_s(best):.3f}",
                str(bench.ratio(auto["step_s"], best["step_s"])),
                str(bench.ratio(auto["step_s"], by_plan[FLAT]["step_s"])),
            ]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) if len(lines) > 2 else ""


def byte_table(records: Sequence[Record]) -> str:
    """MB per step over the DC uplinks at the lowest rate: seen by the interfaces, and counted by the program."""
    by_plan = list(by_rate(records).values())[-1]
    lines = [
        "| plan | on the wire | tokens | expert weights | expert gradients | dense | control | rest (DeepSpeed's own, "
        "headers) | loss |",
        "|---" * 9 + "|",
    ]
    for plan, record in by_plan.items():
        counted = record["counted_bytes_per_step"]
        wire = record["wan_bytes_per_step"] / 1e6
        if not plan.startswith("hybridep"):
            lines.append(f"| {plan} | {wire:.2f} | | | | | | | {record['loss']:.4f} |")
            continue
        parts = [counted.get(kind, 0.0) / 1e6 for kind in KINDS]
        numbers = " | ".join(f"{part:.2f}" for part in [wire, *parts, wire - sum(parts)])
        lines.append(f"| {plan} | {numbers} | {record['loss']:.4f} |")
    return "\n".join(lines)


def dense_line(records: Sequence[Record]) -> str:
    """What dense gradients and parameters, which every plan has to send, cost of the link."""
    by_plan = list(by_rate(records).values())[-1]

    def not_experts(record: Record) -> float:
        counted = record["counted_bytes_per_step"]
        return record["wan_bytes_per_step"] - sum(n for kind, n in counted.items() if kind != "dense")

    for name_of_deepspeeds, name_of_ours in (
        ("hybridep [1,1], dense sums by DeepSpeed", "hybridep [1,1]"),
        ("hybridep [1,1]", "hybridep [1,1], hierarchical dense"),  # in older records
    ):
        if name_of_deepspeeds in by_plan and name_of_ours in by_plan:
            as_deepspeed, by_level = by_plan[name_of_deepspeeds], by_plan[name_of_ours]
            break
    else:
        return ""
    dense, flat = not_experts(as_deepspeed), by_plan[FLAT]["wan_bytes_per_step"]
    return (
        f"Dense gradients and parameters (all that is neither tokens nor experts, headers included) take "
        f"{dense / 1e6:.2f} MB as DeepSpeed sends them, {dense / flat:.0%} of what flat EP has on the link; level by "
        f"level {not_experts(by_level) / 1e6:.2f} MB."
    )


LEAST_RATES = 3  # of a plot; the unlimited link is not on its axis
COLORS = {FLAT: "#666666", INSIDE: "#d55e00"}
OUR_COLORS = ("#0072b2", "#009e73", "#cc79a7")  # told apart by people who see few colours
NAMES = {
    FLAT: "DeepSpeed, EP over both",
    INSIDE: "DeepSpeed, EP inside each",
    "hybridep [2,1] recommended": "ours, domains over both",
    "hybridep, EP inside the DC, recommended": "ours, EP inside each",
}


def plot(records: Sequence[Record], path: Path) -> None:
    """Step time against bandwidth, and bytes over the link: both baselines, and the two best of ours."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "ds_hybridep"
    from matplotlib import pyplot, ticker

    rates = by_rate(records)
    mbits = sorted(-rate_order(rate) for rate in rates if rate != "none")
    at = {mbit: rates[f"{mbit:g}mbit"] for mbit in mbits}
    slowest = at[mbits[0]]
    ours = sorted((plan for plan in slowest if plan.startswith("hybridep")), key=lambda plan: median_s(slowest[plan]))
    shown = [plan for plan in (FLAT, INSIDE) if plan in slowest] + ours[:2]
    better = min((plan for plan in (FLAT, INSIDE) if plan in slowest), key=lambda plan: median_s(slowest[plan]))
    gain = median_s(slowest[better]) / median_s(slowest[ours[0]])

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 3.8), width_ratios=(3, 2))
    colors = dict(zip(ours[:2], OUR_COLORS, strict=False)) | COLORS
    for plan in shown:
        seconds = [median_s(at[mbit][plan]) for mbit in mbits]
        left.plot(mbits, seconds, marker="o", color=colors[plan], linewidth=2)
    ends = _apart([median_s(at[mbits[-1]][plan]) for plan in shown])
    for plan, end in zip(shown, ends, strict=True):
        left.annotate(NAMES.get(plan, plan), (mbits[-1] * 1.08, end), color=colors[plan], va="center", fontsize=9)
    left.set(xscale="log", yscale="log", xlabel="Mbit/s of each datacentre's uplink", ylabel="seconds per step")
    left.set_xlim(mbits[0] * 0.9, mbits[-1] * (mbits[-1] / mbits[0]) ** 0.75)
    for axis in (left.xaxis, left.yaxis):
        axis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        axis.set_minor_locator(ticker.NullLocator())
    left.set_xticks(mbits)
    left.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    figure.suptitle(
        f"{gain:.0f}x faster than {NAMES[better]} datacentre at {mbits[0]:g} Mbit/s", x=0.01, ha="left", weight="bold"
    )
    megabytes = [slowest[plan]["wan_bytes_per_step"] / 1e6 for plan in shown]
    bars = right.barh([NAMES.get(plan, plan) for plan in shown], megabytes, color=[colors[plan] for plan in shown])
    right.bar_label(bars, [f" {value:.3g}" for value in megabytes])
    right.set(xlabel="MB over the uplinks per step", xlim=(0, max(megabytes) * 1.15))
    right.invert_yaxis()
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})  # the same file from the same records
    pyplot.close(figure)


def _apart(values: Sequence[float], ratio: float = 1.18) -> list[float]:
    """Places of labels on a log axis: as near to the values as does not overlap."""
    places = dict.fromkeys(range(len(values)), 0.0)
    below = 0.0
    for index in sorted(places, key=lambda index: values[index]):
        below = places[index] = max(values[index], below * ratio)
    return list(places.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--plots", type=Path, help="folder for SVG files")
    args = parser.parse_args()
    records = [json.loads(line) for path in args.records for line in path.read_text().splitlines()]
    for (compute, model, adapters, dcs, tokens, accumulation), group in cases(records):
        title = f"{dcs}, {tokens} tokens per rank and micro-step, accumulation {accumulation}"
        title += f", {model}" if model != "bytes" else ""
        title += f", adapters of {adapters}" if adapters else ""
        title += ", compute slept" if compute == "sleep" else ""
        print(f"### {title}\n\nSeconds per step:\n\n{time_table(group)}\n")
        if regret := regret_table(group):
            print(f"Planned jobs against the fastest plan by hand:\n\n{regret}\n")
        print(f"MB per step over the DC uplinks, one direction, all ranks:\n\n{byte_table(group)}\n")
        if line := dense_line(group):
            print(f"{line}\n")
        if args.plots is not None and sum(rate != "none" for rate in by_rate(group)) >= LEAST_RATES:
            args.plots.mkdir(parents=True, exist_ok=True)
            kind = ("sleep-" if compute == "sleep" else "") + (f"{model}-" if model != "bytes" else "")
            kind += f"{adapters.replace(' ', '-')}-" if adapters else ""
            name = f"e2e-{kind}{dcs}-t{tokens}-a{accumulation}.svg"
            plot(group, args.plots / name)
            print(f"![{title}]({args.plots.name}/{name})\n")


if __name__ == "__main__":
    main()
