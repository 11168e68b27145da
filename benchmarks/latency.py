# SPDX-License-Identifier: Apache-2.0
"""What a long link costs a step: step time at several one-way delays, 4 and 12 layers, with and without dropping.

    python -m benchmarks latency --out benchmarks/results/latency.jsonl

Each delay and layer count is one job on emulated datacentres that trains all plans in turn.  A table shows the step at
the shortest delay, and what each longer one adds.
"""

import argparse
import statistics
import time
from dataclasses import replace
from typing import Any

import deepspeed

import ds_hybridep
from benchmarks.common import Record, Records, run_job, table
from benchmarks.training import Job, Run, build, plans_of, plans_of_hf, train_lm
from ds_hybridep.lab.topology import LinkSpec, Topology, parse_duration, parse_rate

__all__ = ["Job", "add_arguments", "rank", "report", "run"]

KINDS = ("dropping", "without dropping", "AutoEP")
PLANS = (
    "deepspeed, flat EP", "deepspeed, EP inside the DC", "hybridep, EP inside the DC", "hybridep [1,1]",
    "hybridep [2,1]", "hybridep [2,1] recommended",
)  # fmt: skip
SLOW_PLANS = PLANS[:1]  # they take seconds, and accumulate nothing
DCS, RATE = "2x2", "1000mbit"
WARM_UP_STEPS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--delays", nargs="+", default=["1ms", "10ms", "50ms"], help="one way between DCs")
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 12])
    parser.add_argument("--accumulations", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--plans", nargs="+", choices=PLANS, default=list(PLANS))
    parser.add_argument("--steps", type=int, default=7, help="that are timed")
    parser.add_argument("--congestion-control", choices=("bbr", "cubic"), help="at the slow level")


def run(args: argparse.Namespace, records: Records) -> None:
    for num_layers in args.layers:
        for delay in args.delays:
            links = LinkSpec(wan_bits_per_s=parse_rate(RATE, "rate"), wan_delay_s=parse_duration(delay, "--delays"))
            run_job(DCS, links, records, "--layers", str(num_layers), "--delays", delay)


def settings_of(kind: str, num_layers: int) -> argparse.Namespace:
    return argparse.Namespace(
        hidden=64, layers=num_layers, experts=8, top_k=2, seq_len=32, seed=0, lr=1e-3, dtype="fp32", zero_stage=1,
        capacity_factor=0.0 if kind == "without dropping" else 1.25, compute="real", prefetch_depth=2,
        model="qwen3_moe" if kind == "AutoEP" else "bytes",
    )  # fmt: skip


def rank(args: argparse.Namespace, job: Job) -> None:
    """Train every plan."""
    # All ranks begin with the same seed.  A broadcast of each parameter would take longer than what is measured.
    deepspeed.DeepSpeedEngine._broadcast_model = lambda self: None
    sizes = Topology.parse(DCS)
    corpus, _ = train_lm.read_corpus()
    for kind in args.kinds:
        settings = settings_of(kind, args.layers[0])
        plans = (plans_of if kind != "AutoEP" else plans_of_hf)((sizes.num_dcs, sizes.hosts_per_dc))
        for accumulation in args.accumulations:
            for plan in (plan for plan in plans if plan.name in args.plans):
                if accumulation > 1 and plan.name in SLOW_PLANS:
                    continue
                if args.congestion_control is not None and plan.domain_sizes is not None:
                    control = {"congestion_control": args.congestion_control}
                    plan = replace(plan, slow={**(plan.slow or {}), **control})
                run = build(settings, plan, accumulation, (sizes.num_dcs, sizes.hosts_per_dc))
                run.train(corpus, settings, 1, WARM_UP_STEPS)
                before, seconds = waits_of(run), []
                for _ in range(2 if plan.name in SLOW_PLANS else args.steps):
                    begin = time.perf_counter()
                    run.train(corpus, settings, 1, 1)
                    seconds.append(time.perf_counter() - begin)
                waits = {at: (n - before[at]) / len(seconds) for at, n in waits_of(run).items()}
                run.finish_transfers()
                params = {
                    "kind": kind, "plan": plan.name, "layers": settings.layers, "accumulation": accumulation,
                    "delay": args.delays[0], "rate": RATE, "dcs": DCS,
                }  # fmt: skip
                job.record(params, step_s=seconds, waits=waits, loss=run.loss)
                run.engine.destroy()
        job.say(f"{args.layers[0]} layers, {args.delays[0]}, {kind}: done")
    job.end()


def waits_of(run: Run) -> dict[str, int]:
    """Waits in a row over each level so far."""
    if run.plan.domain_sizes is None:
        return {}
    return {level["name"]: level["waits"] for level in ds_hybridep.stats(run.engine)["levels"]}


def report(records: list[Record], args: argparse.Namespace) -> str:
    """Markdown: the step at the shortest delay and what longer ones add, medians and fastest steps; waits in a row."""
    delays = sorted({delay_of(record) for record in records}, key=lambda delay: float(delay.removesuffix("ms")))
    rows: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    waits: dict[tuple[Any, ...], set[float]] = {}
    for record in records:
        key = tuple(record["params"][name] for name in ("kind", "plan", "layers", "accumulation"))
        rows.setdefault(key, {}).setdefault(delay_of(record), []).extend(record["step_s"])
        waits.setdefault(key, set()).update(list(record["waits"].values())[:1])  # over the long link
    columns = [f"{delays[0]} [s]", *(f"+ {delay}" for delay in delays[1:])]
    header = ["kind", "plan", "layers", "accumulation", *columns, *(f"fastest {one}" for one in columns), "waits"]
    lines = []
    for key, by_delay in rows.items():
        cells = [str(part) for part in key]
        for of_all in (statistics.median, min):
            first = of_all(by_delay[delays[0]])
            later = [of_all(by_delay[one]) - first if one in by_delay else None for one in delays[1:]]
            cells += ["" if seconds is None else f"{seconds:.3f}" for seconds in (first, *later)]
        lines.append([*cells, " to ".join(f"{count:g}" for count in sorted(waits[key])) or "-"])
    title = "Seconds of a step at the shortest delay, and what longer ones add: medians, and the fastest steps."
    return f"{title}\n\n{table(header, lines)}"


def delay_of(record: Record) -> str:
    return str(record["params"]["delay"])
