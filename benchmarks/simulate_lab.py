# SPDX-License-Identifier: Apache-2.0
"""How well the simulator, or the stream model, gives the step times that benchmarks/e2e.py measured, for all plans.

    python benchmarks/simulate_lab.py benchmarks/results/e2e-2x2.jsonl benchmarks/results/e2e-4x1.jsonl
    python benchmarks/simulate_lab.py benchmarks/results/e2e-2x2.jsonl --by stream_model

What depends on this machine is fitted on a third of the grid of rates x batches of the first file, the one that
benchmarks/predict.py fits on: seconds per token, layer, expert call, round of messages and step, the rate left to
transfers while ranks compute, the time of each lossy codec, and from the interface counters the bytes of DeepSpeed's
own synchronisation. Where the records say how fast the machine was at each point of the grid (`probe_s`), its times
are scaled by that, as a job's own probe would have it. All other points, and the other files, are simulated without
having been seen; but where there are more than two DCs one number more is fitted, on one batch of their file: by how
much an exchange between them takes longer than its bytes on the busiest link, as flows that share links at both ends
do not end together. Beside them stands the naive line, which is told more: the same plan's measured step without a
limit at that very batch, plus its measured bytes over the bandwidth. The last line is one JSON document.
"""

import argparse
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import predict
from predict import AGAIN, FLAT, INSIDE, LOOPBACK_BYTES_PER_S, UNSHAPED, WIRE_FACTOR

from ds_hybridep.lab.topology import parse_duration, parse_rate
from ds_hybridep.plan import stream_model
from ds_hybridep.plan.cluster import Cluster, Level, Link
from ds_hybridep.plan.costs import experts_per_rank
from ds_hybridep.plan.layout import IDENTITY, CodecCost, Layout, LevelCodecs, Rates, SyncModel
from ds_hybridep.plan.partition import Partition
from ds_hybridep.plan.token_route import choose_exchange
from ds_hybridep.plan.workload import MoEModel, Workload
from ds_hybridep.simulate.scenario import Scenario
from ds_hybridep.simulate.simulator import simulate

LOSSY = ("int8", "low rank 7 int4")
EXACT = "identity"
EVEN, COUNTED, RELATIVE, NAIVE = "even routing", "counted rows", "counted rows, over flat EP", "naive line"
OTHERS = ("auto", "recommended codecs")  # are several plans, or have other codecs for gradients than for weights
Record = Mapping[str, Any]
Fitted = dict[str, float]

# Decoding takes this share of the time of encoding (results/codecs-time.jsonl).
DECODE_SHARE = {"int8": 0.56, "low rank 7 int4": 0.25}

# Free parameters, and where the search begins.  codec_s: of encoding one rank's experts of a layer; token_s: of what a
# layer does for each token where the rest is slept; flops_per_s: where nothing is; crowding: what exchanges between
# more than two DCs take over the time of their bytes.
START: Fitted = {
    "flops_per_s": 1e10,
    "token_s": 1e-6,
    "layer_s": 1e-3,
    "expert_call_s": 3e-4,
    "message_s": 5e-4,
    "step_s": 1e-2,
    "overlap": 0.5,
    "int8_s": 1e-3,
    "low rank 7 int4_s": 1e-3,
    "crowding": 1.0,
}
COMPUTE_PARAMETERS = tuple(name for name in START if name not in ("token_s", "crowding"))
SLEEP_PARAMETERS = tuple(name for name in START if name not in ("flops_per_s", "crowding"))


@dataclass(frozen=True)
class Point:
    """One measured plan at one point of the grid.

    codec: of expert weights and gradients between DCs, by name.
    ratio: its bytes as counted, `identity` over it.
    wan_bytes, counted: of all DC uplinks together, one direction, on the wire and by kind.
    probe_s: of the same computation, in the minutes in which this place of the grid was measured; 0 where not known.
    """

    plan: str
    rate: str
    delay_s: float
    sizes: tuple[int, ...]
    layout: Layout
    workload: Workload
    algorithm: str
    codec: str
    ratio: float
    slept: tuple[float, float] | None  # of a dense sublayer and of a row, where compute is sleep
    step_s: float
    wan_bytes: float
    counted: Mapping[str, float]
    probe_s: float = 0.0

    @property
    def batch(self) -> tuple[int, int]:
        """The point's place on the grid but for its rate."""
        return self.workload.tokens_per_rank, self.workload.micro_steps


def read_points(records: Sequence[Record]) -> list[Point]:
    """Points by plan; the second run of flat EP counts as a repetition of the first, plans in OTHERS are left out."""
    grouped: dict[tuple[Any, ...], list[Record]] = {}
    for record in records:
        if any(other in record["params"]["plan"] for other in OTHERS):
            continue
        params = {**record["params"], "plan": record["params"]["plan"].replace(AGAIN, FLAT)}
        key = (record["delay"], *sorted((name, str(value)) for name, value in params.items()))
        grouped.setdefault(key, []).append({**record, "params": params})
    points = [_point(group) for group in grouped.values()]
    probes: dict[tuple[Any, ...], list[float]] = {}
    for point, group in zip(points, grouped.values(), strict=True):
        probes.setdefault((point.rate, point.batch), []).extend(
            seconds for record in group for seconds in record.get("probe_s", ())
        )
    return [replace(point, probe_s=statistics.median(probes[point.rate, point.batch] or [0.0])) for point in points]


def _point(group: Sequence[Record]) -> Point:
    params, counted = group[0]["params"], group[0]["counted_bytes_per_step"]
    sizes = tuple(int(size) for size in params["dcs"].split("x"))
    plan = params["plan"]
    workload = predict._workload(params)
    if params.get("compute") == "sleep":
        workload = replace(workload, model=_sleeping(workload.model))
    layout = _layout(plan, params, sizes)
    codec = next((name for name in LOSSY if name in plan), EXACT)
    exact_bytes = workload.model.num_moe_layers * experts_per_rank(layout, workload) * workload.expert_travel_bytes
    exact_bytes *= math.prod(sizes) * (layout.domain_sizes[0] - 1)
    return Point(
        plan=plan,
        rate=params["rate"],
        delay_s=parse_duration(group[0]["delay"], "delay"),
        sizes=sizes,
        layout=layout,
        workload=workload,
        algorithm="hierarchical" if "hierarchical dense" in plan else "ring",
        codec=codec,
        ratio=exact_bytes / counted["expert_weights"] if codec != EXACT else 1.0,
        slept=(params["dense_ms"] * 1e-3 * params["rows"], params["row_us"] * 1e-6)
        if params.get("compute") == "sleep"
        else None,
        step_s=statistics.median(seconds for record in group for seconds in record["step_s"]),
        wan_bytes=statistics.median(record["wan_bytes_per_step"] for record in group),
        counted=counted,
    )


def _sleeping(model: MoEModel) -> MoEModel:
    """The sizes of sleep_model.py: an embedding, a head and the gates beside the experts."""
    num_tables = 2 * predict.VOCABULARY * model.hidden + predict.VOCABULARY
    dense = num_tables + model.num_moe_layers * model.hidden * model.num_experts
    return replace(model, dense_params=dense, active_dense_params=dense, attention_width=0)


def _layout(plan: str, params: Mapping[str, Any], sizes: tuple[int, ...]) -> Layout:
    is_ours = plan.startswith("hybridep [")  # tokens go our way
    domain_sizes = tuple(json.loads(plan.split()[1].rstrip(","))) if is_ours else (1,) * len(sizes)
    cluster = Cluster(tuple(Level(f"level{index}", size) for index, size in enumerate(sizes)))
    partition = Partition.build(cluster, range(cluster.num_ranks), domain_sizes)
    exchange = choose_exchange(
        partition, cluster, params["experts"], params["top_k"], params["hidden"] * 4, predict.CHOSEN_FOR_TOKENS
    )
    return Layout(
        spans=(1, *sizes[1:]) if plan == INSIDE else sizes,
        domain_sizes=domain_sizes,
        codecs=(LevelCodecs(),) * len(sizes),
        exchange=exchange,
        is_padded=not is_ours,
    )


# ---- simulations ----


def scenario_of(point: Point, fitted: Fitted, *, row_scale: float = 1.0) -> Scenario:
    """The point as the simulator takes it; links that are not shaped run at the speed of the loopback."""
    wan = LOOPBACK_BYTES_PER_S if point.rate == UNSHAPED else parse_rate(point.rate, "rate") / 8
    levels = [Level("dc", point.sizes[0], Link(wan, point.delay_s))]
    levels += [Level(f"level{i}", size, Link(LOOPBACK_BYTES_PER_S, 0.0)) for i, size in enumerate(point.sizes[1:], 1)]
    workload = replace(point.workload, row_scale=row_scale)
    fitted = slowed(fitted, point)
    codec = IDENTITY
    if point.codec != EXACT:
        own_bytes = experts_per_rank(point.layout, workload) * workload.expert_travel_bytes
        speed = own_bytes / max(fitted[f"{point.codec}_s"], 1e-12)
        decode_speed = speed / DECODE_SHARE[point.codec]
        codec = CodecCost(point.codec, point.ratio, encode_bytes_per_s=speed, decode_bytes_per_s=decode_speed)
    codecs = (LevelCodecs(weight=codec, gradient=codec), *point.layout.codecs[1:])
    crowding = fitted["crowding"] if point.sizes[0] > 2 else 1.0
    flops_per_s, expert_flops_per_s = fitted["flops_per_s"], None
    if point.slept is not None:
        dense_s = point.slept[0] + fitted["token_s"] * workload.tokens_per_rank
        flops_per_s = workload.pre_expert_flops / dense_s
        expert_flops_per_s = workload.expert_flops_per_row / point.slept[1]
    return Scenario(
        cluster=Cluster(tuple(levels)),
        layout=replace(point.layout, codecs=codecs),
        workload=workload,
        rates=Rates(
            flops_per_s=flops_per_s,
            expert_flops_per_s=expert_flops_per_s,
            layer_s=fitted["layer_s"],
            expert_call_s=fitted["expert_call_s"],
            exchange_s=fitted["message_s"],
            all_to_all_s=fitted["message_s"],
            packet_s=fitted["message_s"],
            step_s=fitted["step_s"],
            overlap=max(fitted["overlap"], 1e-3),
            wire_factor=WIRE_FACTOR * crowding,
        ),
        # Rings are no exchange.
        sync=SyncModel()
        if point.algorithm == "hierarchical"
        else SyncModel(algorithm="ring", factor=fitted.get("sync_factor", 1.0) / crowding),
    )


def slowed(fitted: Fitted, point: Point) -> Fitted:
    """The machine's times as the probe says they were when the point was measured."""
    factor = point.probe_s / fitted["probe_s"] if point.probe_s and fitted.get("probe_s") else 1.0
    scaled = {name: value * factor for name, value in fitted.items() if name.endswith("_s")}
    return {**fitted, **scaled, "flops_per_s": fitted["flops_per_s"] / factor}


StepOf = Callable[[Point, Fitted, float], float]  # seconds, given a factor of the token rows


def simulated_s(point: Point, fitted: Fitted, row_scale: float = 1.0) -> float:
    """Seconds of a step by the simulator."""
    return simulate(scenario_of(point, fitted, row_scale=row_scale)).step_s


def predicted_s(point: Point, fitted: Fitted, row_scale: float = 1.0) -> float:
    """Seconds of a step by the stream model, in a thirtieth of the time."""
    one = scenario_of(point, fitted, row_scale=row_scale)
    return stream_model.predict(one.cluster, one.layout, one.workload, one.rates, one.sync).step_s


def row_scale_of(point: Point) -> float:
    """Token bytes that the runtime counted over what even routing would send; 1 where none were counted."""
    expected = simulate(scenario_of(point, START)).sent_bytes[0].get("tokens", 0.0)
    return point.counted["tokens"] / expected if expected and point.counted["tokens"] else 1.0


def sync_factor_of(points: Sequence[Point]) -> float:
    """Bytes of DeepSpeed's own synchronisation over the ring's, from interface counters: median over points."""
    factors = []
    for point in points:
        if point.algorithm == "ring":
            sent = simulate(scenario_of(point, START, row_scale=row_scale_of(point))).sent_bytes[0]
            sync = sent["dense_sync"] + sent["expert_sync"]
            factors.append((point.wan_bytes / WIRE_FACTOR - sum(sent.values()) + sync) / sync)
    return statistics.median(factors)


def fit(points: Sequence[Point], names: Sequence[str], step_of: StepOf) -> Fitted:
    """Parameters `names` of least squared logarithmic error on `points`, first by the stream model, which is quick."""
    start = {
        **START,
        "sync_factor": sync_factor_of(points),
        "probe_s": statistics.median(point.probe_s for point in points),
    }
    near = search(points, names, start, predicted_s, step=2.0)
    return near if step_of is predicted_s else search(points, names, near, step_of, step=1.3)


def search(
    points: Sequence[Point],
    names: Sequence[str],
    start: Fitted,
    step_of: StepOf,
    *,
    step: float,
) -> Fitted:
    """One parameter after the other, in ever smaller steps."""
    scales = {id(point): row_scale_of(point) for point in points}

    def loss(parameters: Fitted) -> float:
        return sum(math.log(step_of(point, parameters, scales[id(point)]) / point.step_s) ** 2 for point in points)

    fitted, best = start, loss(start)
    while step > 1.02:
        before = best
        for name in names:
            for factor in (step, 1 / step):
                trial = {**fitted, name: fitted[name] * factor}
                trial["overlap"] = min(trial["overlap"], 1.0)
                if (value := loss(trial)) < best:
                    fitted, best = trial, value
        if best > 0.98 * before:  # a round that hardly helped: parameters trade off against each other
            step = math.sqrt(step)
    return fitted


# ---- the report ----


def is_fitted(point: Point, points: Sequence[Point], third: int) -> bool:
    """True for one of three thirds of the grid of rates x batches, along its diagonals."""
    rates = sorted({other.rate for other in points}, key=predict._rate_order)
    batches = sorted({other.batch for other in points})
    return (rates.index(point.rate) + batches.index(point.batch)) % 3 == third


def is_of_batch(point: Point, points: Sequence[Point], index: int) -> bool:
    """True for the points of one batch, at all rates."""
    batches = sorted({other.batch for other in points})
    return point.batch == batches[index % len(batches)]


Errors = Mapping[str, Sequence[float | None]]


def errors_of(points: Sequence[Point], everything: Sequence[Point], fitted: Fitted, step_of: StepOf) -> Errors:
    """Relative errors of held-out points.

    Rows as even routing has them, and as they were counted; of counted rows, and of what was measured, the ratio to
    flat EP in the same place of the grid, measured within the same minutes; and the naive line.
    """
    unlimited = {(one.plan, one.batch): one.step_s for one in everything if one.rate == UNSHAPED}
    flat = {(one.rate, one.batch): one for one in everything if one.plan == FLAT}
    result: dict[str, list[float | None]] = {name: [] for name in (EVEN, COUNTED, RELATIVE, NAIVE)}
    for point in points:
        result[EVEN].append(step_of(point, fitted, 1.0) / point.step_s - 1)
        counted_s = step_of(point, fitted, row_scale_of(point))
        result[COUNTED].append(counted_s / point.step_s - 1)
        base, relative = flat.get((point.rate, point.batch)), None
        if base is not None and base is not point:
            relative = counted_s / step_of(base, fitted, 1.0) * base.step_s / point.step_s - 1
        result[RELATIVE].append(relative)
        base_s, naive = unlimited.get((point.plan, point.batch)), None
        if base_s is not None and point.rate != UNSHAPED:
            wan_s = point.wan_bytes / point.sizes[0] / (parse_rate(point.rate, "rate") / 8)
            naive = (base_s + wan_s) / point.step_s - 1
        result[NAIVE].append(naive)
    return result


def table(points: Sequence[Point], errors: Errors, title: str) -> list[str]:
    """Markdown rows of all points, those with a limited link, and each plan."""
    groups: dict[str, Callable[[Point], bool]] = {
        "all": lambda point: True,
        "limited link": lambda point: point.rate != UNSHAPED,
    }
    groups |= {plan: lambda point, plan=plan: point.plan == plan for plan in dict.fromkeys(p.plan for p in points)}
    lines = []
    for name, belongs in groups.items():
        for kind, values in errors.items():
            pairs = [(point, value) for point, value in zip(points, values, strict=True) if belongs(point)]
            chosen = sorted(abs(value) for _, value in pairs if value is not None)
            if chosen and (kind != NAIVE or len(chosen) == len(pairs)):
                numbers = (statistics.median(chosen), chosen[max(math.ceil(0.9 * len(chosen)) - 1, 0)], chosen[-1])
                cells = " | ".join(f"{100 * value:.1f}%" for value in numbers)
                lines.append(f"| {title}, {name}, {kind} | {len(chosen)} | {cells} |")
    return lines


def plot(points: Sequence[Point], errors: Errors, path: Path, title: str) -> None:
    """Predicted against measured seconds; the diagonal is a perfect prediction, the dashed lines are 20% off."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(figsize=(6.5, 6))
    for kind, marker in ((EVEN, "o"), (COUNTED, "."), (NAIVE, "x")):
        values = errors[kind]
        pairs = [(p.step_s, p.step_s * (1 + e)) for p, e in zip(points, values, strict=True) if e is not None]
        axes.plot([x for x, _ in pairs], [y for _, y in pairs], marker, label=kind, alpha=0.6)
    ends = [min(point.step_s for point in points), max(point.step_s for point in points)]
    for factor, style in ((1.0, "-"), (1.2, "--"), (0.8, "--")):
        axes.plot(ends, [factor * end for end in ends], style, color="grey", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="measured seconds per step", ylabel="predicted", title=title)
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())  # they would overlap
    axes.legend()
    axes.grid(which="both", alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def read_file(path: Path) -> list[Point]:
    """Points of a file of records."""
    return read_points([json.loads(line) for line in path.read_text().splitlines()])


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="a third of it is fitted on")
    parser.add_argument("others", type=Path, nargs="*", help="not fitted on, but see above")
    parser.add_argument("--third", type=int, choices=(0, 1, 2), default=0, help="which third of the grid is fitted on")
    parser.add_argument(
        "--plot", type=Path, help="PNG of predicted against measured seconds of the first file's points"
    )
    parser.add_argument("--by", choices=("simulator", "stream_model"), default="simulator")
    args = parser.parse_args()
    step_of: StepOf = simulated_s if args.by == "simulator" else predicted_s
    points = read_file(args.records)
    known = [point for point in points if is_fitted(point, points, args.third)]
    unknown = [point for point in points if not is_fitted(point, points, args.third)]
    if not known or not unknown:
        parser.error("the records hold too few points to fit on some and to simulate others")
    names = SLEEP_PARAMETERS if known[0].slept is not None else COMPUTE_PARAMETERS
    fitted = fit(known, names, step_of)
    print(f"Fitted on {len(known)} of {len(points)} step times: ", end="")
    print(", ".join(f"{name} {fitted[name]:.3g}" for name in (*names, "sync_factor")) + "\n")
    print("| error of held-out step times | points | median | 90% | worst |\n|---|---|---|---|---|")
    document: dict[str, Any] = {
        "case": "simulate_lab",
        "by": args.by,
        "third": args.third,
        "fitted": fitted,
        "points": [],
    }
    scored = [(args.records, unknown, points)]
    for path in args.others:
        others = read_file(path)
        crowded = [point for point in others if point.sizes[0] > 2 and is_of_batch(point, others, args.third)]
        if crowded:
            fitted = search(crowded, ("crowding",), fitted, step_of, step=1.3)
            print(f"Fitted on {len(crowded)} of {len(others)} of {path.name}: crowding {fitted['crowding']:.3g}\n")
        scored.append((path, [point for point in others if point not in crowded], others))
    for path, held_out, everything in scored:
        errors = errors_of(held_out, everything, fitted, step_of)
        print("\n".join(table(held_out, errors, path.stem)))
        if args.plot is not None and held_out is unknown:
            plot(held_out, errors, args.plot, f"{path.stem}, held-out points, {args.by.replace('_', ' ')}")
        for index, point in enumerate(held_out):
            one = {kind: _rounded(values[index]) for kind, values in errors.items()}
            where = {"file": path.name, "plan": point.plan, "rate": point.rate, "batch": point.batch}
            document["points"].append({**where, "measured_s": point.step_s, "errors": one})
    print(json.dumps(document))


if __name__ == "__main__":
    main()
