# SPDX-License-Identifier: Apache-2.0
"""Simulations of several plans side by side: as a table, JSON, a plot, or a trace for Perfetto."""

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from ds_hybridep.errors import ConfigError
from ds_hybridep.plan.cluster import Cluster
from ds_hybridep.plan.layout import Layout, LevelCodecs
from ds_hybridep.plan.planner import make_plan
from ds_hybridep.plan.question import Question
from ds_hybridep.simulate.events import Span
from ds_hybridep.simulate.scenario import Assumptions, Deviation, Scenario
from ds_hybridep.simulate.simulator import SimulatedStep, simulate

BITS_PER_BYTE = 8
GIGA = 1e9
MICRO = 1e6
BAR_WIDTH = 40
FLAT, DEDUPLICATED, INSIDE, INSIDE_EXACT = (
    "DeepSpeed, flat EP",
    "flat EP, de-duplicated",
    "DeepSpeed, EP inside, data parallel across",
    "EP inside, data parallel across, exact",
)
RIVALS = FLAT, DEDUPLICATED, INSIDE, INSIDE_EXACT


@dataclass(frozen=True)
class SimulatedPlan:
    """A plan and its simulated step; lacking_bytes: memory that it lacks."""

    name: str
    layout: Layout
    lacking_bytes: float
    step: SimulatedStep


@dataclass(frozen=True)
class Conditions:
    """Differences from levels and workload; zipf: expert n = 1, 2 ... gets rows in proportion to 1 / n^zipf."""

    deviations: tuple[Deviation, ...] = ()
    assumptions: Assumptions = Assumptions()
    zipf: float | None = None
    jitter: float = 0.0
    seed: int = 0
    measured_s: Mapping[str, float] = field(default_factory=dict)

    def scenario(self, question: Question, layout: Layout) -> Scenario:
        """A layout under these conditions."""
        load = None
        if self.zipf is not None:
            load = tuple(1.0 / (1 + expert) ** self.zipf for expert in range(question.workload.model.num_experts))
        return Scenario(
            cluster=question.cluster, layout=layout, workload=question.workload, rates=question.rates,
            sync=question.sync_of(layout), expert_load=load, deviations=self.deviations, assumptions=self.assumptions,
            jitter=self.jitter, seed=self.seed, measured_s=self.measured_s,
        )  # fmt: skip


# ---- simulations ----


def layouts_of(question: Question, domains: Sequence[tuple[int, ...]]) -> list[tuple[str, Layout, float]]:
    """(name, layout, bytes of memory lacking) of the planner's best, of the ways to compare with, and of `domains`."""
    plan = make_plan(question)
    layouts = [(f"best plan, {plan.best.label}", plan.best.layout, plan.best.lacking_bytes)]
    names = iter(RIVALS)
    layouts += [(next(names), way.layout, way.lacking_bytes) for way in plan.alternatives if way.layout is not None]
    spans = plan.best.group.spans(question.cluster)
    for sizes in domains:
        codecs = question.with_tokens((LevelCodecs(),) * len(sizes))
        layout = Layout(spans=spans, domain_sizes=sizes, codecs=codecs)
        is_hierarchical = sum(count > 1 for count in layout.domain_counts) > 1
        name = "[" + ",".join(map(str, sizes)) + "]"
        layouts.append((name, replace(layout, exchange="hierarchical") if is_hierarchical else layout, 0.0))
    return layouts


def simulate_all(
    question: Question,
    conditions: Conditions,
    layouts: Sequence[tuple[str, Layout, float]],
    traced_ranks: Sequence[int] = (),
) -> list[SimulatedPlan]:
    """Simulate every layout; only the first simulation traces ranks."""
    results = []
    for number, (name, layout, lacking) in enumerate(layouts):
        bar = progress_bar(f"{number + 1}/{len(layouts)} {name}")
        step = simulate(
            conditions.scenario(question, layout), traced_ranks=() if number else traced_ranks, on_progress=bar
        )
        results.append(SimulatedPlan(name, layout, lacking, step))
    if sys.stderr.isatty():
        sys.stderr.write("\r" + " " * 100 + "\r")
    return results


def progress_bar(name: str) -> Callable[[float], None] | None:
    """A function that shows progress as a bar; None if stderr is no terminal."""
    if not sys.stderr.isatty():
        return None

    def show(share: float) -> None:
        done = int(BAR_WIDTH * share)
        sys.stderr.write(f"\r[{'#' * done}{'.' * (BAR_WIDTH - done)}] {name[:50]:50}")
        sys.stderr.flush()

    return show


def sweep(
    question: Question,
    conditions: Conditions,
    domains: Sequence[tuple[int, ...]],
    numbers_of_dcs: Sequence[int],
    bandwidths: Sequence[float],
) -> list[dict[str, Any]]:
    """Simulate the layouts of `layouts_of` at every number of DCs and every bandwidth of level 0.

    Shows progress if stderr is a terminal.
    """
    points = []
    given = question.cluster.levels[0].link.bandwidth_bytes_per_s
    grid = list(itertools.product(bandwidths or (given,), numbers_of_dcs))
    terminal = Console(stderr=True)
    for bandwidth, num_dcs in track(grid, "simulating", console=terminal, disable=not terminal.is_terminal):
        asked = with_dcs(question, num_dcs)
        asked = replace(asked, cluster=asked.cluster.with_link(0, bandwidth_bytes_per_s=bandwidth))
        results = simulate_all(asked, conditions, layouts_of(asked, domains))
        points.append({"dcs": num_dcs, "bandwidth_bytes_per_s": bandwidth, **answer_json(asked.cluster, results)})
    return points


def with_dcs(question: Question, num_dcs: int) -> Question:
    """The question for another number of DCs, with as many experts on each GPU.  Raises ConfigError if none exists."""
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


def table(question: Question, results: Sequence[SimulatedPlan]) -> str:
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
    """True for a term of time that the network takes."""
    return term in ("tokens_s", "expert_weights_s", "expert_gradients_s", "dense_sync_s", "expert_sync_s")


def answer_json(cluster: Cluster, results: Sequence[SimulatedPlan]) -> dict[str, Any]:
    """All results as JSON values."""
    return {
        "plans": [
            {
                "name": result.name,
                "domain_sizes": list(result.layout.domain_sizes),
                "spans": list(result.layout.spans),
                "step_s": result.step.step_s,
                "terms_s": dict(result.step.terms_s),
                "uplink_bytes": [dict(kinds) for kinds in result.step.uplink_bytes(cluster)],
                "waits": list(result.step.schedule.waits),
                "lacking_bytes": result.lacking_bytes,
                "classes": result.step.num_classes,
                "quantisation": result.step.quantisation,
            }
            for result in results
        ]
    }


def speed_ups(point: dict[str, Any]) -> dict[str, float]:
    """Speed-ups of the best plan over each alternative that fits into the memory."""
    best_s = point["plans"][0]["step_s"]
    return {
        plan["name"]: plan["step_s"] / best_s
        for plan in point["plans"]
        if plan["name"] in RIVALS and not plan["lacking_bytes"]
    }


def sweep_table(points: Sequence[dict[str, Any]]) -> str:
    """Table of the speed-ups at every point."""
    lines = [f"{'Gbit/s':>8} {'DCs':>6} {'best plan':32} {'s/step':>10}  speed-up over {'; '.join(RIVALS)}"]
    for point in points:
        bandwidth = point["bandwidth_bytes_per_s"]
        gbps = "?" if bandwidth is None else f"{bandwidth * BITS_PER_BYTE / GIGA:g}"
        found = speed_ups(point)
        ratios = "; ".join(f"{found[name]:.2f}" if name in found else "-" for name in RIVALS)
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
    """Plot speed-ups of the best plan over the number of DCs, with a curve for each bandwidth.

    Raises ConfigError without matplotlib.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError('--plot: needs matplotlib; install it with pip install "ds_hybridep[plot]"') from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = RIVALS
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
