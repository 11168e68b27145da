# SPDX-License-Identifier: Apache-2.0
"""How well the stream model predicts the step times that benchmarks/e2e.py measured.

    python benchmarks/predict.py benchmarks/results/e2e-2x2.jsonl --plot predicted.svg

What depends on this machine is fitted on a third of the grid, spread evenly over rates and over batches: seconds per
token, per layer, per expert call, per round of messages and per step, how much of a link is left while ranks compute,
and from the interface counters the bytes of DeepSpeed's own synchronisation. All other points are then predicted
without having been seen, and scored beside the naive line, which is told more: the same plan's measured step without a
limit at that very batch, plus its measured bytes over the bandwidth.
"""

import argparse
import json
import math
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_hybridep.lab.topology import parse_duration, parse_rate
from ds_hybridep.plan.cluster import Cluster, Level, Link
from ds_hybridep.plan.layout import Layout, LevelCodecs, Rates, SyncModel
from ds_hybridep.plan.partition import Partition
from ds_hybridep.plan.stream_model import StepPrediction, predict
from ds_hybridep.plan.token_route import choose_exchange
from ds_hybridep.plan.workload import MoEModel, Workload

FLAT, AGAIN, INSIDE = "deepspeed, flat EP", "deepspeed, flat EP again", "deepspeed, EP inside the DC"
UNSHAPED = "none"
WIRE_FACTOR = 1514 / 1448  # Ethernet frame over payload of one full TCP segment
VOCABULARY, SEQ_LEN = 256, 128  # of examples/train_lm.py and benchmarks/e2e_worker.py
CAPACITY_FACTOR = 1.25
CHOSEN_FOR_TOKENS = 4096  # what the runtime assumes where it chooses the token exchange

Record = Mapping[str, Any]


@dataclass(frozen=True)
class Point:
    """One measured plan at one point of the grid; bytes are of all DC uplinks together, one direction."""

    plan: str
    rate: str
    delay_s: float
    sizes: tuple[int, ...]
    layout: Layout
    workload: Workload
    step_s: float
    wan_bytes: float
    counted: Mapping[str, float]

    @property
    def case(self) -> tuple[Any, ...]:
        """What the same plan has in common at all rates."""
        return self.plan, self.batch

    @property
    def batch(self) -> tuple[Any, ...]:
        """The point's place on the grid but for its rate."""
        workload = self.workload
        return (
            self.sizes, self.delay_s, workload.model.hidden, workload.zero_stage, workload.tokens_per_rank,
            workload.micro_steps,
        )  # fmt: skip

    @property
    def wan_bytes_per_s(self) -> float | None:
        """Rate of one uplink; None where it is not limited."""
        return None if self.rate == UNSHAPED else parse_rate(self.rate, "rate") / 8


OURS = re.compile(r"hybridep \[[\d,]+\]")

# Free parameters, and where the search begins.
START = {
    "flops_per_s": 3e9,
    "layer_s": 1e-3,
    "expert_call_s": 3e-4,
    "message_s": 5e-4,
    "step_s": 1e-2,
    "overlap": 0.5,
}
LOOPBACK_BYTES_PER_S = 1e12  # what is not shaped costs host time, and no time of its own


def read_points(records: Sequence[Record]) -> list[Point]:
    """Points of exact plans; the second run of flat EP counts as a repetition of the first."""
    grouped: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        params = {**record["params"], "plan": record["params"]["plan"].replace(AGAIN, FLAT)}
        if params["plan"] not in (FLAT, INSIDE) and not OURS.fullmatch(params["plan"]):
            continue  # lossy, or with sums by level: see simulate_lab.py
        key = (record["delay"], *sorted((name, value) for name, value in params.items()))
        grouped.setdefault(key, []).append({**record, "params": params})
    return [_point(group) for group in grouped.values()]


def _point(group: Sequence[Record]) -> Point:
    params = group[0]["params"]
    sizes = tuple(int(size) for size in params["dcs"].split("x"))
    return Point(
        plan=params["plan"],
        rate=params["rate"],
        delay_s=parse_duration(group[0]["delay"], "delay"),
        sizes=sizes,
        layout=_layout(params, sizes),
        workload=_workload(params),
        step_s=statistics.median(seconds for record in group for seconds in record["step_s"]),
        wan_bytes=statistics.median(record["wan_bytes_per_step"] for record in group),
        counted=group[0]["counted_bytes_per_step"],
    )


def _workload(params: Mapping[str, Any]) -> Workload:
    hidden, layers, experts = params["hidden"], params["layers"], params["experts"]
    # Embeddings, head and last norm; per layer attention with biases, two norms and the gate.
    active = VOCABULARY * hidden + 2 * hidden + layers * hidden * (4 * hidden + 8 + experts)
    model = MoEModel(
        name="byte model",
        hidden=hidden,
        num_experts=experts,
        top_k=params["top_k"],
        num_moe_layers=layers,
        expert_params=8 * hidden * hidden + 5 * hidden,
        dense_params=active + (VOCABULARY + SEQ_LEN) * hidden,
        active_dense_params=active,
        attention_width=layers * hidden,
    )
    return Workload(
        model=model,
        tokens_per_rank=params["tokens_per_rank"],
        micro_steps=params["accumulation"],
        param_bytes=4,
        zero_stage=params["zero_stage"],
        seq_len=SEQ_LEN,
        capacity_factor=CAPACITY_FACTOR,
    )


def _layout(params: Mapping[str, Any], sizes: tuple[int, ...]) -> Layout:
    plan = params["plan"]
    ones = (1,) * len(sizes)
    domain_sizes = tuple(json.loads(plan.split()[1])) if plan.startswith("hybridep") else ones
    cluster = Cluster(tuple(Level(f"level{index}", size) for index, size in enumerate(sizes)))
    partition = Partition.build(cluster, range(cluster.num_ranks), domain_sizes)
    row_bytes = params["hidden"] * 4
    exchange = choose_exchange(partition, cluster, params["experts"], params["top_k"], row_bytes, CHOSEN_FOR_TOKENS)
    return Layout(
        spans=(1, *sizes[1:]) if plan == INSIDE else sizes,
        domain_sizes=domain_sizes,
        codecs=(LevelCodecs(),) * len(sizes),
        prefetch_depth=2,
        exchange=exchange,
        is_padded=plan.startswith("deepspeed"),
    )


# ---- predictions ----


def predict_point(point: Point, fitted: Mapping[str, float], *, row_scale: float = 1.0) -> StepPrediction:
    """The step of a point; links that are not shaped run at the speed of the loopback."""
    bandwidths = [point.wan_bytes_per_s or LOOPBACK_BYTES_PER_S, *[LOOPBACK_BYTES_PER_S] * (len(point.sizes) - 1)]
    parts = enumerate(zip(point.sizes, bandwidths, strict=True))
    cluster = Cluster(
        tuple(
            Level(f"level{index}", size, Link(bandwidth, 0.0 if index else point.delay_s))
            for index, (size, bandwidth) in parts
        )
    )
    rates = Rates(
        flops_per_s=fitted["flops_per_s"],
        layer_s=fitted["layer_s"],
        expert_call_s=fitted["expert_call_s"],
        exchange_s=fitted["message_s"],
        all_to_all_s=fitted["message_s"],
        packet_s=fitted["message_s"],
        step_s=fitted["step_s"],
        overlap=fitted["overlap"],
        wire_factor=WIRE_FACTOR,
    )
    workload = point.workload
    if row_scale != 1.0:
        workload = Workload(**{**vars(workload), "row_scale": row_scale})
    return predict(
        cluster, point.layout, workload, rates, SyncModel(algorithm="ring", factor=fitted.get("sync_factor", 1.0))
    )


def row_scale_of(point: Point, fitted: Mapping[str, float]) -> float:
    """Token bytes that the runtime counted over what even routing would send; 1 where no rows were counted."""
    expected = predict_point(point, fitted).uplink_bytes[0]["tokens"] * point.sizes[0]
    return point.counted["tokens"] / expected if expected and point.counted["tokens"] else 1.0


def wire_bytes(point: Point, fitted: Mapping[str, float], *, row_scale: float = 1.0) -> float:
    """Predicted bytes over all DC uplinks, headers included."""
    prediction = predict_point(point, fitted, row_scale=row_scale)
    return prediction.level_bytes(0) * point.sizes[0] * WIRE_FACTOR


# ---- fitting ----


def fit_sync_factor(points: Sequence[Point]) -> float:
    """Bytes of DeepSpeed's own synchronisation over the ring's, from interface counters: median over points."""
    factors = []
    for point in points:
        scale = row_scale_of(point, START)
        sent = predict_point(point, START, row_scale=scale).uplink_bytes[0]
        sync = sent["dense_sync"] + sent["expert_sync"]
        others = sum(sent.values()) - sync
        factors.append((point.wan_bytes / point.sizes[0] / WIRE_FACTOR - others) / sync)
    return statistics.median(factors)


def fit(points: Sequence[Point]) -> dict[str, float]:
    """Free parameters of least squared logarithmic error on `points`.

    A search along one parameter at a time, in ever smaller steps: few parameters, no derivative, repeatable.
    """
    fitted = {**START, "sync_factor": fit_sync_factor(points)}

    def loss(parameters: Mapping[str, float]) -> float:
        return sum(math.log(predict_point(p, parameters).step_s / p.step_s) ** 2 for p in points)

    best, step = loss(fitted), 2.0
    while step > 1.002:
        improved = False
        for name in START:
            for factor in (step, 1 / step):
                trial = {**fitted, name: fitted[name] * factor}
                trial["overlap"] = min(trial["overlap"], 1.0)
                if (value := loss(trial)) < best * (1 - 1e-6):
                    fitted, best, improved = trial, value, True
        if not improved:
            step = math.sqrt(step)
    return fitted


# ---- the report ----


def is_fitted(point: Point, points: Sequence[Point], third: int) -> bool:
    """True for one of three thirds of the grid of rates x batches, along its diagonals."""
    rates = sorted({other.rate for other in points}, key=_rate_order)
    batches = sorted({other.batch for other in points})
    return (rates.index(point.rate) + batches.index(point.batch)) % 3 == third


def _rate_order(rate: str) -> float:
    return -math.inf if rate == UNSHAPED else -parse_rate(rate, "rate")


@dataclass(frozen=True)
class Score:
    """Seconds of one held-out point."""

    point: Point
    expected_rows_s: float
    measured_rows_s: float
    naive_s: float | None


def score(points: Sequence[Point], unshaped: Sequence[Point], fitted: Mapping[str, float]) -> list[Score]:
    """Predictions of held-out points; the naive line needs the same case without a limit."""
    unlimited = {point.case: point for point in unshaped}
    scores = []
    for point in points:
        scale = row_scale_of(point, fitted)
        base = unlimited.get(point.case)
        naive_s = None
        if base is not None and point.wan_bytes_per_s is not None:
            naive_s = base.step_s + point.wan_bytes / point.sizes[0] / point.wan_bytes_per_s
        scores.append(
            Score(
                point=point,
                expected_rows_s=predict_point(point, fitted).step_s,
                measured_rows_s=predict_point(point, fitted, row_scale=scale).step_s,
                naive_s=naive_s,
            )
        )
    return scores


LINES: tuple[tuple[str, Callable[[Score], float | None]], ...] = (
    ("model, even routing", lambda one: one.expected_rows_s),
    ("model, measured rows", lambda one: one.measured_rows_s),
    ("naive line", lambda one: one.naive_s),
)


def errors(scores: Sequence[Score], read: Callable[[Score], float | None]) -> list[float]:
    """Relative errors, ascending by size."""
    pairs = [(read(one), one.point.step_s) for one in scores]
    return sorted(abs(predicted / measured - 1) for predicted, measured in pairs if predicted is not None)


def report(scores: Sequence[Score], fitted: Mapping[str, float], points: Sequence[Point], num_fitted: int) -> str:
    """Markdown: fitted values, errors by plan, picks, and every held-out point."""
    lines = [f"Fitted on {num_fitted} of {len(points)} step times: "]
    lines[0] += ", ".join(f"{name} {value:.3g}" for name, value in fitted.items()) + "\n"
    lines += ["| error of held-out step times | points | median | 90% | worst |", "|---|---|---|---|---|"]
    # Where the naive line says something, all three are compared on the same points.
    shaped = [one for one in scores if one.naive_s is not None]
    groups = {"all": scores, "all with a limit": shaped}
    groups |= {f"{plan}, with a limit": [one for one in shaped if one.point.plan == plan] for plan in _plans(scores)}
    for title, chosen in groups.items():
        for name, read in LINES:
            found = errors(chosen, read)
            if len(found) == len(chosen) and found:
                cells = (statistics.median(found), found[max(math.ceil(0.9 * len(found)) - 1, 0)], found[-1])
                numbers = " | ".join(f"{100 * value:.1f}%" for value in cells)
                lines.append(f"| {title}: {name} | {len(found)} | {numbers} |")
    lines += ["", bytes_table(points, fitted), "", picks_table(scores), "", times_table(scores)]
    return "\n".join(lines)


def _plans(scores: Sequence[Score]) -> list[str]:
    return list(dict.fromkeys(one.point.plan for one in scores))


def bytes_table(points: Sequence[Point], fitted: Mapping[str, float]) -> str:
    """Predicted over measured bytes on the DC uplinks."""
    lines = ["| bytes over the uplinks, predicted / measured | least | median | most |", "|---|---|---|---|"]
    for plan in dict.fromkeys(point.plan for point in points):
        chosen = [point for point in points if point.plan == plan]
        for name, use_measured in (("even routing", False), ("measured rows", True)):
            if use_measured and not any(point.counted["tokens"] for point in chosen):
                continue
            ratios = sorted(
                wire_bytes(p, fitted, row_scale=row_scale_of(p, fitted) if use_measured else 1.0) / p.wan_bytes
                for p in chosen
            )
            numbers = " | ".join(f"{value:.3f}" for value in (ratios[0], statistics.median(ratios), ratios[-1]))
            lines.append(f"| {plan}, {name} | {numbers} |")
    return "\n".join(lines)


def picks_table(scores: Sequence[Score]) -> str:
    """Does the plan that the model picks at a point win there, and if not, what does the wrong pick cost?"""
    cases: dict[tuple[Any, ...], list[Score]] = {}
    for one in scores:
        cases.setdefault((one.point.rate, one.point.batch), []).append(one)
    lines = ["| uplink, tokens, accumulation | picked (even routing) | fastest measured | cost |", "|---|---|---|---|"]
    for (rate, batch), group in cases.items():
        *_, tokens, accumulation = batch
        picked = min(group, key=lambda one: one.expected_rows_s).point
        best = min((one.point for one in group), key=lambda point: point.step_s)
        cost = f"{picked.step_s / best.step_s:.3f}"
        lines.append(f"| {rate}, {tokens}, {accumulation} | {picked.plan} | {best.plan} | {cost} |")
    return "\n".join(lines)


def times_table(scores: Sequence[Score]) -> str:
    """Every held-out point."""
    lines = [
        "| uplink | tokens | accumulation | plan | measured [s] | even routing | measured rows | naive |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for one in scores:
        point, workload = one.point, one.point.workload
        cells = [f"{one.expected_rows_s:.3f}", f"{one.measured_rows_s:.3f}"]
        cells.append("" if one.naive_s is None else f"{one.naive_s:.3f}")
        where = f"{point.rate} | {workload.tokens_per_rank} | {workload.micro_steps} | {point.plan}"
        lines.append(f"| {where} | {point.step_s:.3f} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(scores: Sequence[Score], path: Path) -> None:
    """Predicted against measured seconds; the diagonal is a perfect prediction."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.5, 6))
    for (name, read), marker in zip(LINES, "osx", strict=True):
        pairs = [(one.point.step_s, read(one)) for one in scores if read(one) is not None]
        axes.plot([x for x, _ in pairs], [y for _, y in pairs], marker, label=name, alpha=0.7)
    ends = [min(one.point.step_s for one in scores), max(one.point.step_s for one in scores)]
    axes.plot(ends, ends, color="grey", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="measured seconds per step", ylabel="predicted")
    axes.set_title("held-out points")
    axes.legend()
    axes.grid(which="both", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--third", type=int, choices=(0, 1, 2), default=0, help="which third of the grid is fitted on")
    parser.add_argument("--plot", type=Path, help="PNG of predicted against measured seconds")
    args = parser.parse_args()
    points = read_points([json.loads(line) for path in args.records for line in path.read_text().splitlines()])
    known = [point for point in points if is_fitted(point, points, args.third)]
    unknown = [point for point in points if not is_fitted(point, points, args.third)]
    if not known or not unknown:
        parser.error("the records hold too few points to fit on some and to predict others")
    fitted = fit(known)
    scores = score(unknown, [point for point in points if point.rate == UNSHAPED], fitted)
    print(report(scores, fitted, points, len(known)))
    if args.plot is not None:
        plot(scores, args.plot)


if __name__ == "__main__":
    main()
