# SPDX-License-Identifier: Apache-2.0
"""Simulations of several plans side by side: as a table, JSON, or a trace for Perfetto."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.progress import track

from ds_hybridep.geometry.cluster import Cluster
from ds_hybridep.plan.plan import PricedPlan
from ds_hybridep.plan.planner import make_plan
from ds_hybridep.plan.question import Question
from ds_hybridep.plan.rivals import without_domains
from ds_hybridep.plan.words import GIGA, aligned
from ds_hybridep.simulate.scenario import Scenario
from ds_hybridep.simulate.simulator import SimulatedStep, simulate

MICRO = 1e6
WAITS = ("tokens_s", "expert_weights_s", "expert_gradients_s", "dense_sync_s", "expert_sync_s")  # for the network


@dataclass(frozen=True)
class SimulatedPlan:
    """A plan and its simulated step; lacking_bytes: memory that it lacks."""

    name: str
    plan: PricedPlan
    lacking_bytes: float
    step: SimulatedStep


def scenario_of(question: Question, plan: PricedPlan, **conditions: Any) -> Scenario:
    """A plan under conditions, which are fields of `Scenario`."""
    return Scenario(
        cluster=question.cluster, plan=plan, workload=question.workload, rates=question.rates,
        **conditions,
    )  # fmt: skip


def plans_of(question: Question, domains: Sequence[tuple[int, ...]]) -> list[tuple[str, PricedPlan, float]]:
    """(name, plan, bytes of memory lacking) of the planner's best, of the ways to compare with, and of `domains`."""
    answer = make_plan(question)
    plans = [(f"best plan, {answer.best.label}", answer.best.plan, answer.best.lacking_bytes)]
    plans += [(way.name, way.plan, way.lacking_bytes) for way in answer.alternatives if way.plan is not None]
    spans = answer.best.group.spans(question.cluster)
    for sizes in domains:
        plan, _ = question.with_best_exchange(replace(without_domains(spans, question.dense_sync), domain_sizes=sizes))
        plans.append(("[" + ",".join(map(str, sizes)) + "]", plan, 0.0))
    return plans


def simulate_all(
    question: Question,
    conditions: Mapping[str, Any],
    plans: Sequence[tuple[str, PricedPlan, float]],
    traced_ranks: Sequence[int] = (),
) -> list[SimulatedPlan]:
    """Simulate every plan; only the first simulation traces ranks.  Shows progress if stderr is a terminal.

    conditions: as `scenario_of` takes them.
    """
    results = []
    terminal = Console(stderr=True)
    shown = track(plans, "simulating", console=terminal, disable=not terminal.is_terminal, transient=True)
    for number, (name, plan, lacking) in enumerate(shown):
        step = simulate(scenario_of(question, plan, **conditions), traced_ranks=() if number else traced_ranks)
        results.append(SimulatedPlan(name, plan, lacking, step))
    return results


def table(question: Question, results: Sequence[SimulatedPlan]) -> str:
    """Seconds, bytes and waits of every plan."""
    first = question.cluster.levels[0].name
    rows = [("plan", "s/step", f"GB/step, {first} uplink", "waiting for")]
    for result in results:
        sent = result.step.uplink_bytes(question.cluster)[0]
        longest = sorted(((result.step.terms_s.get(name, 0.0), name) for name in WAITS), reverse=True)[:3]
        why = ", ".join(f"{name.removesuffix('_s').replace('_', ' ')} {seconds:.3g}" for seconds, name in longest)
        lacking = f"  ({result.lacking_bytes / GIGA:.1f} GB of memory lacking)" if result.lacking_bytes else ""
        rows.append((result.name, f"{result.step.step_s:.4g}", f"{sum(sent.values()) / GIGA:.4g}", why + lacking))
    text, error = aligned(rows, left=(0, 3)), max(result.step.quantisation for result in results)
    if error:
        text += f"\nToo many ranks differ: rates, speeds and loads were rounded, and are up to {100 * error:.2g}% off."
    return text


def answer_json(cluster: Cluster, results: Sequence[SimulatedPlan]) -> dict[str, Any]:
    """All results as JSON values."""
    return {
        "plans": [
            {
                "name": result.name,
                "domain_sizes": list(result.plan.domain_sizes),
                "spans": list(result.plan.spans),
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


def chrome_trace(step: SimulatedStep) -> list[dict[str, Any]]:
    """Trace events of the traced ranks: a process for each rank, a thread for each of its streams."""
    events: list[dict[str, Any]] = []
    for rank, spans in step.spans.items():
        events.append({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": f"rank {rank}"}})
        streams = sorted({span.stream for span in spans}, key=lambda stream: (stream != "compute", stream))
        for number, stream in enumerate(streams):
            events.append({"name": "thread_name", "ph": "M", "pid": rank, "tid": number, "args": {"name": stream}})
        events += [
            {
                "name": span.label, "ph": "X", "pid": rank, "tid": streams.index(span.stream),
                "ts": span.begin_s * MICRO, "dur": (span.end_s - span.begin_s) * MICRO,
            }
            for span in spans
        ]  # fmt: skip
    return events
