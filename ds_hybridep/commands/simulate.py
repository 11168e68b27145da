# SPDX-License-Identifier: Apache-2.0
"""The `simulate` subcommand: steps of plans on a cluster, event by event, as a table, JSON, plot or trace."""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ds_hybridep.commands import plan as plan_command
from ds_hybridep.errors import ConfigError
from ds_hybridep.plan.cluster import Cluster
from ds_hybridep.plan.layout import ExpertGroup, Layout, LevelCodecs
from ds_hybridep.plan.planner import Plan, Question, make_plan
from ds_hybridep.plan.stream_model import with_bandwidth
from ds_hybridep.simulate import chakra
from ds_hybridep.simulate.events import Span
from ds_hybridep.simulate.simulator import Assumptions, Deviation, Scenario, SimulatedStep, simulate

BITS_PER_BYTE = 8
GIGA = 1e9
MICRO = 1e6
BAR_WIDTH = 40
MAX_EXPORTED = 64  # ranks, where none are named
FLAT, DEDUPLICATED, INSIDE = (
    "DeepSpeed, flat EP",
    "flat EP, de-duplicated",
    "DeepSpeed, EP inside, data parallel across",
)

DESCRIPTION = """\
Simulates one training step of plans event by event: the best plan that `plan` finds, the ways to compare with, and the
domain sizes given with --domains. Takes the arguments of `plan` for cluster, model, training and machines.
"""
EXAMPLE = """\
example:
  ds_hybridep simulate --model Qwen3-30B-A3B --dcs 2x8 --wan 10gbps --delay 10ms --domains 2,1 --trace step.json
  ds_hybridep simulate --model moe.yaml --dcs 16x8 --wan 10gbps --sweep-dcs 16 128 1000 --sweep-wan 1gbps 100gbps
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `simulate` to the subcommands of the program."""
    parser = subparsers.add_parser(
        "simulate",
        help="simulate a step of plans event by event, on up to thousands of datacentres",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=[_plan_parser()],
        conflict_handler="resolve",
    )
    plans = parser.add_argument_group("plans")
    plans.add_argument(
        "--domains", action="append", default=[], metavar="N,N", help="domain sizes to simulate too; may be repeated"
    )
    conditions = parser.add_argument_group("conditions")
    conditions.add_argument(
        "--slow",
        action="append",
        default=[],
        metavar="PLACE:KEY=VALUE,...",
        help="a place that is slower: '3:bandwidth=0.5' halves the uplink of DC 3, '3.1:compute=2,from=10' doubles "
        "the seconds of its GPU 1 from second 10 on; may be repeated",
    )
    conditions.add_argument(
        "--zipf", type=float, metavar="S", help="routing: expert number n is chosen as often as 1 / n^S"
    )
    conditions.add_argument(
        "--jitter", type=float, default=0.0, metavar="SHARE", help="of each computation, at random"
    )
    conditions.add_argument("--seed", type=int, default=0, help="of the jitter")
    conditions.add_argument(
        "--switches", action="store_true", help="messages between DCs also pass the links inside, as in a tree"
    )
    sweep = parser.add_argument_group("sweep", "experts grow with the number of GPUs")
    sweep.add_argument("--sweep-dcs", type=int, nargs="+", default=[], metavar="N", help="numbers of DCs")
    sweep.add_argument("--sweep-wan", nargs="+", default=[], metavar="RATE", help="of each DC's uplink")
    output = parser.add_argument_group("output of the simulation")
    output.add_argument("--json", action="store_true", help="print JSON")
    output.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="with --sweep-dcs: speed-up against the number of DCs"
    )
    output.add_argument("--trace", type=Path, metavar="FILE.json", help="of the best plan, for Perfetto or Chrome")
    output.add_argument(
        "--export-chakra",
        type=Path,
        metavar="FOLDER",
        help="Chakra execution traces of the best plan: of --rank, or of all ranks up to 64",
    )
    output.add_argument(
        "--import-chakra",
        type=Path,
        metavar="FILE.et",
        help="a Chakra execution trace whose computation (nodes named as in an exported one) is simulated",
    )
    output.add_argument("--rank", type=int, action="append", default=[], help="to trace; may be repeated; default 0")
    parser.set_defaults(run=run)


def _plan_parser() -> argparse.ArgumentParser:
    """The parser of `plan`, whose arguments all count here."""
    subparsers = argparse.ArgumentParser().add_subparsers()
    plan_command.add_parser(subparsers)
    parser: argparse.ArgumentParser = subparsers.choices["plan"]
    return parser


@dataclass(frozen=True)
class Result:
    """One plan, simulated."""

    name: str
    layout: Layout
    lacking_bytes: float
    step: SimulatedStep


def run(args: argparse.Namespace) -> int:
    """Runs the parsed command line.  Returns 0.  Raises ConfigError or PlanError that name an argument."""
    question = read_question(args)
    conditions = read_conditions(args, question)
    if args.sweep_dcs:
        points = sweep(args, question, conditions)
        if args.plot is not None:
            plot(points, args.plot)
        print(json.dumps(points, indent=2) if args.json else sweep_table(points))
        return 0
    if args.plot is not None:
        raise ConfigError("--plot: needs --sweep-dcs, the numbers of DCs to draw over")
    traced = traced_ranks(args, question.cluster)
    for rank in traced:
        question.cluster.place_of(rank)  # refuses a rank that is not there
    plan = make_plan(question)
    results = simulate_all(question, conditions, layouts_of(args, question, plan), traced)
    if args.trace is not None:
        args.trace.write_text(json.dumps(chrome_trace(results[0].step)))
    print(json.dumps(answer_json(question.cluster, results), indent=2) if args.json else table(question, results))
    if args.export_chakra is not None:
        chakra.export(conditions.scenario(question, results[0].layout), results[0].step, args.export_chakra)
    if not args.json:
        for what, path in (("trace", args.trace), ("Chakra traces", args.export_chakra)):
            if path is not None:
                print(f"{what}: {path}")
    return 0


def traced_ranks(args: argparse.Namespace, cluster: Cluster) -> list[int]:
    """Ranks of which something is written."""
    if args.rank:
        return list(dict.fromkeys(args.rank))
    if args.export_chakra is not None:
        return list(range(min(cluster.num_ranks, MAX_EXPORTED)))
    return [0] if args.trace is not None else []


# ---- reading arguments ----


def read_question(args: argparse.Namespace) -> Question:
    """What `plan` reads; but --dcs may name more datacentres than can be emulated."""
    match = re.fullmatch(r"\s*([1-9]\d*)\s*x\s*(\d+)\s*", args.dcs or "")
    if match is None:
        return plan_command.read_question(args)
    question = plan_command.read_question(argparse.Namespace(**{**vars(args), "dcs": f"1x{match[2]}"}))
    dcs, *inner = question.cluster.levels
    return replace(question, cluster=Cluster((replace(dcs, size=int(match[1])), *inner)))


@dataclass(frozen=True)
class Conditions:
    """What is not even."""

    deviations: tuple[Deviation, ...] = ()
    assumptions: Assumptions = Assumptions()
    zipf: float | None = None
    jitter: float = 0.0
    seed: int = 0
    measured_s: Mapping[str, float] = field(default_factory=dict)

    def scenario(self, question: Question, layout: Layout) -> Scenario:
        """A layout under these conditions."""
        workload = question.workload
        if self.zipf is not None:
            load = tuple(1.0 / (1 + expert) ** self.zipf for expert in range(workload.model.num_experts))
            workload = replace(workload, expert_load=load)
        return Scenario(
            cluster=question.cluster, layout=layout, workload=workload, rates=question.rates, sync=question.sync,
            deviations=self.deviations, assumptions=self.assumptions, jitter=self.jitter, seed=self.seed,
            measured_s=self.measured_s,
        )  # fmt: skip


def read_conditions(args: argparse.Namespace, question: Question) -> Conditions:
    """The arguments of the group "conditions".  Raises ConfigError that names one."""
    if args.jitter < 0 or (args.zipf is not None and args.zipf < 0):
        raise ConfigError(f"--jitter and --zipf: got {args.jitter:g} and {args.zipf}, wanted at least 0")
    if question.workload.imbalance != 1.0:
        raise ConfigError("--imbalance: the simulator routes by a load of experts; give --zipf instead")
    return Conditions(
        deviations=tuple(read_deviation(text) for text in args.slow),
        assumptions=Assumptions(crosses_inner_links=args.switches),
        zipf=args.zipf,
        jitter=args.jitter,
        seed=args.seed,
        measured_s={} if args.import_chakra is None else chakra.measured_seconds(args.import_chakra),
    )


def read_deviation(text: str) -> Deviation:
    """A place that is slower, from "3.1:bandwidth=0.5,compute=2,from=10".  Raises ConfigError for other text."""
    match = re.fullmatch(r"(\d+(?:\.\d+)*):(.+)", text.strip())
    names = {"bandwidth": "bandwidth_factor", "compute": "slowdown", "from": "from_s"}
    values: dict[str, float] = {}
    for part in match[2].split(",") if match else [""]:
        key, _, number = part.partition("=")
        try:
            values[names[key.strip()]] = float(number)
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"--slow: got '{text}', wanted a place and what is slower there, as in 3:bandwidth=0.5 or "
                f"3.1:compute=2,from=10"
            ) from error
    assert match is not None
    return Deviation(place=tuple(map(int, match[1].split("."))), **values)


def layouts_of(args: argparse.Namespace, question: Question, plan: Plan) -> list[tuple[str, Layout, float]]:
    """(name, layout, bytes of memory lacking): the planner's best, the ways to compare with, what was asked for."""
    best = plan.best
    layouts = [(f"best plan, {best.label}", best.layout, best.lacking_bytes)]
    names = iter((FLAT, DEDUPLICATED, INSIDE))
    layouts += [(next(names), way.layout, way.lacking_bytes) for way in plan.alternatives if way.layout is not None]
    for text in args.domains:
        layouts.append((f"[{text}]", read_domains(text, question, best.group), 0.0))
    return layouts


def read_domains(text: str, question: Question, group: ExpertGroup) -> Layout:
    """The layout of "4,1" on an expert-parallel group.  Raises ConfigError or PlanError."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--domains: got '{text}', wanted a size for each level, as in 2,1") from error
    if len(sizes) != len(question.cluster.levels):
        raise ConfigError(f"--domains: got '{text}', wanted a size for each of the levels {question.cluster}")
    codecs = question.with_tokens((LevelCodecs(),) * len(sizes))
    layout = Layout(spans=group.spans(question.cluster), domain_sizes=sizes, codecs=codecs)
    is_hierarchical = sum(count > 1 for count in layout.domain_counts) > 1
    return replace(layout, exchange="hierarchical") if is_hierarchical else layout


# ---- simulations ----


def simulate_all(
    question: Question,
    conditions: Conditions,
    layouts: Sequence[tuple[str, Layout, float]],
    traced_ranks: Sequence[int] = (),
) -> list[Result]:
    """Every layout; only of the first one ranks are traced."""
    results = []
    for number, (name, layout, lacking) in enumerate(layouts):
        bar = progress_bar(f"{number + 1}/{len(layouts)} {name}")
        step = simulate(
            conditions.scenario(question, layout), traced_ranks=() if number else traced_ranks, on_progress=bar
        )
        results.append(Result(name, layout, lacking, step))
    if sys.stderr.isatty():
        print("\r" + " " * 100 + "\r", end="", file=sys.stderr)
    return results


def progress_bar(name: str) -> Callable[[float], None] | None:
    """A bar on the terminal; None where there is none."""
    if not sys.stderr.isatty():
        return None

    def show(share: float) -> None:
        done = int(BAR_WIDTH * share)
        print(f"\r[{'#' * done}{'.' * (BAR_WIDTH - done)}] {name[:50]:50}", end="", file=sys.stderr, flush=True)

    return show


def sweep(args: argparse.Namespace, question: Question, conditions: Conditions) -> list[dict[str, Any]]:
    """The planner's best and the ways to compare with, at every number of DCs and bandwidth."""
    rates: list[float | None] = [
        plan_command.parse_bits_per_s(text, "--sweep-wan") / BITS_PER_BYTE for text in args.sweep_wan
    ]
    points = []
    for bandwidth in rates or [question.cluster.levels[0].link.bandwidth_bytes_per_s]:
        for num_dcs in args.sweep_dcs:
            asked = with_dcs(question, num_dcs)
            if bandwidth is not None:
                asked = replace(asked, cluster=with_bandwidth(asked.cluster, 0, bandwidth))
            plan = make_plan(asked)
            results = simulate_all(asked, conditions, layouts_of(args, asked, plan))
            points.append({"dcs": num_dcs, "bandwidth_bytes_per_s": bandwidth, **answer_json(asked.cluster, results)})
    return points


def with_dcs(question: Question, num_dcs: int) -> Question:
    """The question for another number of DCs, with as many experts on each GPU.  Raises ConfigError where none is."""
    if num_dcs < 1:
        raise ConfigError(f"--sweep-dcs: got {num_dcs}, wanted at least 1")
    cluster, model = question.cluster, question.workload.model
    levels = (replace(cluster.levels[0], size=num_dcs), *cluster.levels[1:])
    num_experts, rest = divmod(model.num_experts * num_dcs, cluster.sizes[0])
    if rest:
        raise ConfigError(
            f"--sweep-dcs: {model.num_experts} experts on {cluster.sizes[0]} DCs are no whole number on {num_dcs}"
        )
    workload = replace(question.workload, model=replace(model, num_experts=num_experts))
    return replace(question, cluster=Cluster(levels), workload=workload)


# ---- output ----


def table(question: Question, results: Sequence[Result]) -> str:
    """Seconds, bytes and waits of every plan."""
    first = question.cluster.levels[0].name
    lines = [f"{'plan':48} {'s/step':>10} {'GB/step, ' + first + ' uplink':>22}  waiting for"]
    for result in results:
        sent = result.step.uplink_bytes(question.cluster)[0]
        waits = {name: result.step.terms_s.get(name, 0.0) for name in result.step.terms_s if is_wait(name)}
        longest = sorted(waits.items(), key=lambda pair: -pair[1])[:3]
        why = ", ".join(f"{name.removesuffix('_s').replace('_', ' ')} {seconds:.3g}" for name, seconds in longest)
        lacking = f"  ({result.lacking_bytes / GIGA:.1f} GB of memory lacking)" if result.lacking_bytes else ""
        lines.append(f"{result.name:48} {result.step.step_s:10.4g} {sum(sent.values()) / GIGA:22.4g}  {why}{lacking}")
    errors = [result.step.quantisation for result in results]
    if any(errors):
        lines.append(
            f"Too many ranks differ: datacentres were merged into fewer kinds, with rates, speeds and loads up to "
            f"{100 * max(errors):.2g}% off."
        )
    return "\n".join(lines)


def is_wait(term: str) -> bool:
    """True for a term that is spent on the network."""
    return term in ("tokens_s", "expert_weights_s", "expert_gradients_s", "dense_sync_s", "expert_sync_s")


def answer_json(cluster: Cluster, results: Sequence[Result]) -> dict[str, Any]:
    """All that was found, as JSON values."""
    return {
        "plans": [
            {
                "name": result.name,
                "domain_sizes": list(result.layout.domain_sizes),
                "spans": list(result.layout.spans),
                "step_s": result.step.step_s,
                "terms_s": dict(result.step.terms_s),
                "uplink_bytes": [dict(kinds) for kinds in result.step.uplink_bytes(cluster)],
                "lacking_bytes": result.lacking_bytes,
                "classes": result.step.num_classes,
                "quantisation": result.step.quantisation,
            }
            for result in results
        ]
    }


def speed_ups(point: dict[str, Any]) -> dict[str, float]:
    """Of the best plan, over each way to compare with that fits the memory."""
    best_s = point["plans"][0]["step_s"]
    return {
        plan["name"]: plan["step_s"] / best_s
        for plan in point["plans"]
        if plan["name"] in (FLAT, DEDUPLICATED, INSIDE) and not plan["lacking_bytes"]
    }


def sweep_table(points: Sequence[dict[str, Any]]) -> str:
    """Speed-ups at every point."""
    lines = [
        f"{'Gbit/s':>8} {'DCs':>6} {'best plan':32} {'s/step':>10}  speed-up over {FLAT}; {DEDUPLICATED}; {INSIDE}"
    ]
    for point in points:
        bandwidth = point["bandwidth_bytes_per_s"]
        gbps = "?" if bandwidth is None else f"{bandwidth * BITS_PER_BYTE / GIGA:g}"
        found = speed_ups(point)
        ratios = "; ".join(f"{found[name]:.2f}" if name in found else "-" for name in (FLAT, DEDUPLICATED, INSIDE))
        best = point["plans"][0]
        lines.append(f"{gbps:>8} {point['dcs']:>6} {best['name'][:32]:32} {best['step_s']:10.4g}  {ratios}")
    return "\n".join(lines)


def chrome_trace(step: SimulatedStep) -> list[dict[str, Any]]:
    """Trace events of the traced ranks: a process for each rank, a thread for each of its streams."""
    events: list[dict[str, Any]] = []
    for rank, spans in step.spans.items():
        events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
        streams = list(dict.fromkeys(span.stream for span in sorted(spans, key=_stream_order)))
        for number, stream in enumerate(streams):
            events.append(
                {"name": "thread_name", "ph": "M", "pid": rank, "tid": number, "args": {"name": stream}}
            )  # fmt: skip
        events += [
            {
                "name": span.label, "ph": "X", "pid": rank, "tid": streams.index(span.stream),
                "ts": span.begin_s * MICRO, "dur": (span.end_s - span.begin_s) * MICRO,
            }
            for span in spans
        ]  # fmt: skip
    return events


def _stream_order(span: Span) -> tuple[bool, str]:
    return span.stream != "compute", span.stream


def plot(points: Sequence[dict[str, Any]], path: Path) -> None:
    """Speed-up of the best plan against the number of DCs, a curve for each bandwidth.

    Raises ConfigError without matplotlib.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError('--plot: needs matplotlib; install it with pip install "ds_hybridep[plot]"') from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = (FLAT, DEDUPLICATED, INSIDE)
    figure, all_axes = pyplot.subplots(1, len(names), figsize=(5 * len(names), 4.5), sharex=True)
    for name, axes in zip(names, all_axes, strict=True):
        for bandwidth in dict.fromkeys(point["bandwidth_bytes_per_s"] for point in points):
            chosen = [p for p in points if p["bandwidth_bytes_per_s"] == bandwidth and name in speed_ups(p)]
            label = "" if bandwidth is None else f"{bandwidth * BITS_PER_BYTE / GIGA:g} Gbit/s"
            axes.plot([p["dcs"] for p in chosen], [speed_ups(p)[name] for p in chosen], "o-", label=label)
        axes.axhline(1.0, color="grey", linestyle=":")
        axes.set(xscale="log", xlabel="datacentres", title=f"speed-up over\n{name}")
        axes.grid(which="both", alpha=0.3)
    all_axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
