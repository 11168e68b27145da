# SPDX-License-Identifier: Apache-2.0
"""How well the planner's model predicts the step times that e2e measured (`simulate`: how well the simulator does).

    python -m benchmarks predict benchmarks/results/e2e-exact-2x2.jsonl

What depends on this machine is fitted on a third of the grid of rates x batches of the first file: seconds per token,
layer, expert call, round of messages and step, the rate left to transfers while ranks compute, the time of each lossy
codec, and from the interface counters the bytes of DeepSpeed's own synchronisation.  Where the records say how fast
the machine was at each point of the grid (`probe_s`), times are scaled by that, as a job's own probe would have it.
All other points, and the other files, are predicted without having been seen; but where there are more than two DCs
one number more is fitted, on one batch of their file: by how much an exchange between them takes longer than its bytes
on the busiest link, as flows that share links at both ends do not end together.  Beside them stands the naive line,
which is told more: the same plan's measured step without a limit at that very batch, plus its measured bytes over the
bandwidth.
"""

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import Record, Records, read_records, table
from ds_hybridep.geometry.cluster import Cluster, Level, LinkSpeed
from ds_hybridep.geometry.partition import Partition
from ds_hybridep.geometry.token_route import choose_exchange
from ds_hybridep.lab.topology import parse_rate
from ds_hybridep.plan import stream_model
from ds_hybridep.plan.plan import LevelCodecs, Plan, PricedPlan
from ds_hybridep.plan.rates import IDENTITY, CodecCost, Rates
from ds_hybridep.plan.routing import experts_per_rank
from ds_hybridep.plan.workload import MoEModel, Workload
from ds_hybridep.simulate.scenario import Scenario
from ds_hybridep.simulate.simulator import simulate

FLAT, AGAIN, INSIDE = "deepspeed, flat EP", "deepspeed, flat EP again", "deepspeed, EP inside the DC"
NO_LIMIT = "none"
LOSSY = {"int8": 0.56, "low rank 7 int4": 0.25}  # decoding takes this share of the time of encoding
OTHERS = ("auto", "recommended")  # are several plans, or have other codecs for gradients than for weights
EVEN, COUNTED, NAIVE = "even routing", "counted rows", "naive line"
WIRE_FACTOR = 1514 / 1448  # Ethernet frame over payload of one full TCP segment
LOOPBACK_BYTES_PER_S = 1e12  # what is not shaped costs host time, and no time of its own
VOCABULARY, SEQ_LEN, CAPACITY_FACTOR = 256, 128, 1.25  # of the model that e2e trains
CHOSEN_FOR_TOKENS = 4096  # what the runtime assumes where it chooses the token exchange

Fitted = dict[str, float]
# Where the search begins.  codec_s: of encoding one rank's experts of a layer; token_s: of what a layer does for each
# token where the rest is slept; flops_per_s: where nothing is; crowding: what exchanges between more than two DCs take
# over the time of their bytes.
START: Fitted = {
    "flops_per_s": 1e10, "token_s": 1e-6, "layer_s": 1e-3, "expert_call_s": 3e-4, "message_s": 5e-4, "step_s": 1e-2,
    "overlap": 0.5, **{f"{name}_s": 1e-3 for name in LOSSY}, "crowding": 1.0,
}  # fmt: skip


@dataclass(frozen=True)
class Point:
    """One measured plan at one point of the grid; bytes are of all DC uplinks together, one direction."""

    params: Mapping[str, Any]
    priced_plan: PricedPlan
    workload: Workload
    codec: str  # of LOSSY, between DCs, or ""
    ratio: float  # exact bytes of experts over those counted
    step_s: float
    wan_bytes: float
    counted: Mapping[str, float]
    probe_s: float = 0.0  # of the same computation in the same minutes; 0 where not known

    @property
    def plan(self) -> str:
        return str(self.params["plan"])

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(int(size) for size in self.params["dcs"].split("x"))

    @property
    def batch(self) -> tuple[int, int]:
        """The point's place on the grid but for its rate."""
        return self.workload.tokens_per_rank, self.workload.micro_steps

    @property
    def is_asleep(self) -> bool:
        return self.params.get("compute") == "sleep"

    @property
    def is_ring(self) -> bool:
        """Whether DeepSpeed itself sums what several ranks hold."""
        return "hierarchical dense" not in self.plan

    @property
    def wan_bytes_per_s(self) -> float | None:
        rate = self.params["rate"]
        return None if rate == NO_LIMIT else parse_rate(rate, "rate") / 8


def read_points(records: Sequence[Record]) -> list[Point]:
    """Points by plan; the second run of flat EP counts as a repetition of the first."""
    grouped: dict[str, list[Record]] = defaultdict(list)
    probes: dict[Any, list[float]] = defaultdict(list)
    for record in records:
        params = {**record["params"], "plan": record["params"]["plan"].replace(AGAIN, FLAT)}
        if not any(other in params["plan"] for other in OTHERS):
            grouped[json.dumps(params, sort_keys=True)].append({**record, "params": params})
            probes[_place(params)] += record.get("probe_s", ())
    return [
        replace(_point(group), probe_s=statistics.median(probes[_place(group[0]["params"])] or [0.0]))
        for group in grouped.values()
    ]


def _place(params: Mapping[str, Any]) -> tuple[Any, ...]:
    return params["rate"], params["tokens_per_rank"], params["accumulation"]


def _point(group: Sequence[Record]) -> Point:
    params, counted = group[0]["params"], group[0]["counted_bytes_per_step"]
    workload, priced_plan = _workload(params), _priced_plan(params)
    codec = next((name for name in LOSSY if name in params["plan"]), "")
    num_owned = workload.model.num_moe_layers * experts_per_rank(priced_plan, workload)
    exact_bytes = num_owned * workload.expert_travel_bytes
    exact_bytes *= math.prod(priced_plan.spans) * (priced_plan.domain_sizes[0] - 1)
    return Point(
        params, priced_plan, workload, codec, exact_bytes / counted["expert_weights"] if codec else 1.0,
        step_s=statistics.median(seconds for record in group for seconds in record["step_s"]),
        wan_bytes=statistics.median(record["wan_bytes_per_step"] for record in group), counted=counted,
    )  # fmt: skip


def _workload(params: Mapping[str, Any]) -> Workload:
    hidden, layers, experts = params["hidden"], params["layers"], params["experts"]
    # Embeddings, head and last norm; per layer attention with biases, two norms and the gate.
    active = VOCABULARY * hidden + 2 * hidden + layers * hidden * (4 * hidden + 8 + experts)
    dense, sequence = active + (VOCABULARY + SEQ_LEN) * hidden, SEQ_LEN
    if params.get("compute") == "sleep":  # an embedding, a head and the gates
        active = dense = 2 * VOCABULARY * hidden + VOCABULARY + layers * hidden * experts
        sequence = 0  # no attention
    model = MoEModel(
        name="byte model", hidden=hidden, num_experts=experts, top_k=params["top_k"], num_moe_layers=layers,
        expert_shapes=((8 * hidden * hidden + 5 * hidden,),), dense_shapes=((dense,),),
        active_dense_params=active,
    )  # fmt: skip
    return Workload(
        model=model, tokens_per_rank=params["tokens_per_rank"], sequence_tokens=sequence,
        micro_steps=params["accumulation"], param_bytes=4, zero_stage=params["zero_stage"],
        capacity_factor=CAPACITY_FACTOR,
    )  # fmt: skip


def _priced_plan(params: Mapping[str, Any]) -> PricedPlan:
    plan, sizes = params["plan"], tuple(int(size) for size in params["dcs"].split("x"))
    is_ours = plan.startswith("hybridep [")  # tokens go our way
    domain_sizes = tuple(json.loads(plan.split()[1].rstrip(","))) if is_ours else (1,) * len(sizes)
    cluster = Cluster(tuple(Level(f"level{index}", size) for index, size in enumerate(sizes)))
    partition = Partition.build(cluster, range(cluster.num_ranks), domain_sizes)
    exchange = choose_exchange(
        partition, num_experts=params["experts"], top_k=params["top_k"], row_bytes=params["hidden"] * 4,
        num_tokens=CHOSEN_FOR_TOKENS,
    )  # fmt: skip
    return Plan(
        spans=(1, *sizes[1:]) if plan == INSIDE else sizes, domain_sizes=domain_sizes,
        codecs=(LevelCodecs(),) * len(sizes), token_exchange=exchange if is_ours else "deepspeed",
    )  # fmt: skip


# ---- predictions ----


def scenario_of(point: Point, fitted: Fitted, row_scale: float = 1.0) -> Scenario:
    """The point as planner and simulator take it; links that are not shaped run at the speed of the loopback."""
    wan = point.wan_bytes_per_s or LOOPBACK_BYTES_PER_S
    links = [wan, *[LOOPBACK_BYTES_PER_S] * (len(point.sizes) - 1)]
    levels = (Level(f"level{at}", size, LinkSpeed(links[at], 0.0)) for at, size in enumerate(point.sizes))
    workload, codec = replace(point.workload, row_scale=row_scale), IDENTITY
    if point.probe_s and fitted.get("probe_s"):  # the machine's times as they were when the point was measured
        factor = point.probe_s / fitted["probe_s"]
        scaled = {name: value * factor for name, value in fitted.items() if name.endswith("_s")}
        fitted = {**fitted, **scaled, "flops_per_s": fitted["flops_per_s"] / factor}
    if point.codec:
        own_bytes = experts_per_rank(point.priced_plan, workload) * workload.expert_travel_bytes
        speed = own_bytes / max(fitted[f"{point.codec}_s"], 1e-12)
        codec = CodecCost(
            point.codec, point.ratio, encode_bytes_per_s=speed, decode_bytes_per_s=speed / LOSSY[point.codec]
        )
    crowding = fitted["crowding"] if point.sizes[0] > 2 else 1.0
    flops_per_s, expert_flops_per_s = fitted["flops_per_s"], None
    if point.is_asleep:
        slept_s = point.params["dense_ms"] * 1e-3 * point.params["rows"]
        flops_per_s = workload.pre_expert_flops / (slept_s + fitted["token_s"] * workload.tokens_per_rank)
        expert_flops_per_s = workload.expert_flops_per_row / (point.params["row_us"] * 1e-6)
    message_s = fitted["message_s"]
    return Scenario(
        cluster=Cluster(tuple(levels)), workload=workload,
        plan=replace(
            point.priced_plan, dense_sync="deepspeed" if point.is_ring else "hierarchical",
            codecs=(LevelCodecs(weight=codec, gradient=codec), *point.priced_plan.codecs[1:]),
        ),
        rates=Rates(
            flops_per_s=flops_per_s, expert_flops_per_s=expert_flops_per_s, layer_s=fitted["layer_s"],
            expert_call_s=fitted["expert_call_s"], exchange_s=message_s, all_to_all_s=message_s, packet_s=message_s,
            step_s=fitted["step_s"], overlap=max(fitted["overlap"], 1e-3), wire_factor=WIRE_FACTOR * crowding,
            # Rings are no exchange.
            sync_factor=fitted.get("sync_factor", 1.0) / crowding if point.is_ring else 1.0,
        ),
    )  # fmt: skip


StepOf = Callable[..., float]  # seconds of a point, given what was fitted and a factor of the token rows


def simulated_s(point: Point, fitted: Fitted, row_scale: float = 1.0) -> float:
    return simulate(scenario_of(point, fitted, row_scale)).step_s


def predicted_s(point: Point, fitted: Fitted, row_scale: float = 1.0) -> float:
    """In a thirtieth of the simulator's time."""
    one = scenario_of(point, fitted, row_scale)
    return stream_model.predict(one.cluster, one.plan, one.workload, one.rates).step_s


def row_scale_of(point: Point) -> float:
    """Token bytes that the runtime counted over what even routing would send; 1 where none were counted."""
    expected = simulate(scenario_of(point, START)).sent_bytes[0].get("tokens", 0.0)
    return point.counted["tokens"] / expected if expected and point.counted["tokens"] else 1.0


def sync_factor_of(points: Sequence[Point]) -> float:
    """Bytes of DeepSpeed's own synchronisation over the ring's, from interface counters: median over points."""
    factors = []
    for point in (point for point in points if point.is_ring):
        sent = simulate(scenario_of(point, START, row_scale_of(point))).sent_bytes[0]
        sync = sent["dense_sync"] + sent["expert_sync"]
        factors.append((point.wan_bytes / WIRE_FACTOR - sum(sent.values()) + sync) / sync)
    return statistics.median(factors)


def search(points: Sequence[Point], names: Sequence[str], start: Fitted, step_of: StepOf, step: float) -> Fitted:
    """Parameters `names` of least squared logarithmic error: one after the other, in ever smaller steps."""
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


def fit(points: Sequence[Point], step_of: StepOf) -> Fitted:
    """First by the planner's model, which is quick."""
    unused = ("flops_per_s" if points[0].is_asleep else "token_s", "crowding")
    names = [name for name in START if name not in unused]
    probe_s = statistics.median(point.probe_s for point in points)
    start = {**START, "sync_factor": sync_factor_of(points), "probe_s": probe_s}
    near = search(points, names, start, predicted_s, step=2.0)
    return near if step_of is predicted_s else search(points, names, near, step_of, step=1.3)


# ---- the program ----


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("records", type=Path, nargs="*", help="of e2e; a third of the first file is fitted on")
    parser.add_argument("--third", type=int, choices=(0, 1, 2), default=0, help="which third of the grid is fitted on")


def run(args: argparse.Namespace, records: Records, step_of: StepOf = predicted_s) -> None:
    first, *others = args.records
    points = read_points(read_records([first]))
    rates = sorted({point.params["rate"] for point in points}, key=_rate_order)
    batches = sorted({point.batch for point in points})

    def is_known(point: Point) -> bool:
        """True for one of three thirds of the grid, along its diagonals."""
        return (rates.index(point.params["rate"]) + batches.index(point.batch)) % 3 == args.third

    fitted = fit([point for point in points if is_known(point)], step_of)
    scored = [(first, [point for point in points if not is_known(point)], points)]
    for path in others:
        everything = read_points(read_records([path]))
        batch = sorted({point.batch for point in everything})
        chosen = batch[args.third % len(batch)]
        crowded = [point for point in everything if point.sizes[0] > 2 and point.batch == chosen]
        fitted = search(crowded, ("crowding",), fitted, step_of, step=1.3) if crowded else fitted
        scored.append((path, [point for point in everything if point not in crowded], everything))
    found = [
        {"file": path.name, "plan": point.plan, "rate": point.params["rate"], "batch": point.batch,
         "measured_s": point.step_s, "errors": errors_of(point, everything, fitted, step_of)}
        for path, held_out, everything in scored
        for point in held_out
    ]  # fmt: skip
    by = "stream_model" if step_of is predicted_s else "simulator"
    records.add({"by": by, "third": args.third}, fitted=fitted, points=found)


def _rate_order(rate: str) -> float:
    return -math.inf if rate == NO_LIMIT else -parse_rate(rate, "rate")


def errors_of(point: Point, everything: Sequence[Point], fitted: Fitted, step_of: StepOf) -> dict[str, float | None]:
    """Relative errors: rows as even routing has them, and as they were counted; and the naive line."""
    found: dict[str, float | None] = {EVEN: step_of(point, fitted) / point.step_s - 1}
    found |= {COUNTED: step_of(point, fitted, row_scale_of(point)) / point.step_s - 1, NAIVE: None}
    for one in everything:
        is_base = one.plan == point.plan and one.batch == point.batch and one.params["rate"] == NO_LIMIT
        if is_base and point.wan_bytes_per_s is not None:
            wan_s = point.wan_bytes / point.sizes[0] / point.wan_bytes_per_s
            found[NAIVE] = (one.step_s + wan_s) / point.step_s - 1
    return {kind: None if error is None else round(error, 4) for kind, error in found.items()}


def report(records: list[Record], args: argparse.Namespace) -> str:
    """Errors of held-out step times: median, 90% and worst, of all points, and of limited links."""
    rows = []
    for record in records:
        groups: dict[tuple[str, str], list[Record]] = defaultdict(list)
        for point in record["points"]:
            groups[point["file"], "all"].append(point)
            if point["rate"] != NO_LIMIT:
                groups[point["file"], "limited link"].append(point)
        about = (record["params"]["by"].replace("_", " "), record["params"]["third"])
        for (file, group), points in groups.items():
            for kind in (EVEN, COUNTED, NAIVE):
                found = sorted(abs(error) for point in points if (error := point["errors"][kind]) is not None)
                if found and (kind != NAIVE or len(found) == len(points)):
                    nine_of_ten = found[max(math.ceil(0.9 * len(found)) - 1, 0)]
                    cells = [f"{100 * value:.1f}%" for value in (statistics.median(found), nine_of_ten, found[-1])]
                    rows.append([*about, file.removesuffix(".jsonl"), group, kind, len(found), *cells])
    return table(("by", "third", "file", "points", "error", "number", "median", "90%", "worst"), rows)
