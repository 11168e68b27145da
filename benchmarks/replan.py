# SPDX-License-Identifier: Apache-2.0
"""A link that drops and recovers: does a planned job see it, how soon, and what does that cost against a good hand?

    python -m benchmarks replan --rates 500mbit 20mbit 500mbit --rows 2 --out benchmarks/results/replan.jsonl

One job trains the same model over the same changes:

1. Every plan of the list runs a few steps at each rate; the fastest at a rate is what one would choose by hand.
2. By hand: that plan, with `ds_hybridep.replan` in the very step in which the rate changes.
3. Planned: everything "auto"; the program sees the change by itself.
4. DeepSpeed as it is, without a limit, for the losses.
"""

import argparse
import json
import statistics
import time
from typing import Any

import torch
from deepspeed import comm as dist

import ds_hybridep
from benchmarks.common import Record, Records, run_job
from benchmarks.training import Job, Plan, Run, add_model_arguments, build, planner_of, runtime_of, train_lm
from ds_hybridep.lab.topology import LinkSpec, parse_duration

__all__ = ["Job", "add_arguments", "rank", "report", "run"]

Sizes = tuple[int, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dcs", default="2x2", help="DCs x hosts per DC")
    parser.add_argument("--rates", nargs="+", default=["500mbit", "20mbit", "500mbit"], help="phase by phase")
    parser.add_argument("--steps", type=int, default=40, help="of a phase")
    parser.add_argument("--warm-up", type=int, default=30, help="steps at the first rate that are not counted")
    parser.add_argument("--tries", type=int, default=5, help="timed steps of each plan at each rate")
    parser.add_argument("--delay", default="0ms", help="one way between DCs")
    parser.add_argument("--rows", type=int, default=2, help="sequences per rank and micro-step")
    parser.add_argument("--accumulation", type=int, default=1)
    add_model_arguments(parser)


def run(args: argparse.Namespace, records: Records) -> None:
    run_job(args.dcs, LinkSpec(wan_delay_s=parse_duration(args.delay, "--delay")), records, limit_s=1800.0)


def plans_by_hand(sizes: Sizes) -> dict[str, Plan]:
    """What one would try."""
    dcs, gpus = sizes
    world = dcs * gpus
    plans = [
        Plan("DeepSpeed's own", world, (1, 1), dense_sync="deepspeed", token_exchange="deepspeed"),
        Plan("DeepSpeed's tokens, sums by level", world, (1, 1), token_exchange="deepspeed"),
        Plan("[1,1]", world, (1, 1)),
        Plan(f"[{dcs},1]", world, (dcs, 1)),
    ]
    return {plan.name: plan for plan in plans}


class Trial:
    """Steps of one engine, timed from barrier to barrier, with their losses."""

    def __init__(self, run: Run, corpus: torch.Tensor, args: argparse.Namespace) -> None:
        self.run, self._corpus, self._args = run, corpus, args
        self.seconds: list[float] = []
        self.losses: list[float] = []

    def steps(self, count: int, block: dict[str, Any] | None = None) -> None:
        """Optimizer steps; with a block, other settings before the first, in its time."""
        for index in range(count):
            begin_s = time.perf_counter()
            if block is not None and index == 0:
                ds_hybridep.replan(self.run.engine, block)
            self.run.train(self._corpus, self._args, self._args.rows, 1)
            dist.barrier()
            self.seconds.append(time.perf_counter() - begin_s)
            self.losses.append(self.run.loss)


def fastest_by_rate(
    plans: dict[str, Plan], args: argparse.Namespace, job: Job, corpus: torch.Tensor, sizes: Sizes
) -> dict[str, dict[str, float]]:
    """Median seconds of each plan at each rate."""
    trial = Trial(build(args, next(iter(plans.values())), args.accumulation, sizes), corpus, args)
    times: dict[str, dict[str, float]] = {}
    for rate in dict.fromkeys(args.rates):
        job.ask("rate", rate=rate)
        for name, plan in plans.items():
            trial.steps(2 + args.tries, {**plan.block(sizes), "report_interval": 0})
            median = torch.tensor([statistics.median(trial.seconds[-args.tries :])])
            dist.broadcast(median, 0)
            times.setdefault(rate, {})[name] = median.item()
            job.say(f"{rate} {name}: {median.item():.3f} s")
    trial.run.engine.destroy()
    return times


def rank(args: argparse.Namespace, job: Job) -> None:
    sizes = tuple(int(size) for size in args.dcs.split("x"))
    corpus, _ = train_lm.read_corpus()
    plans = plans_by_hand(sizes)
    job.ask("rate", rate="none")
    times = fastest_by_rate(plans, args, job, corpus, sizes)
    best = {rate: plans[min(found, key=found.__getitem__)] for rate, found in times.items()}
    auto = Plan("auto", sizes[0] * sizes[1], ("auto", "auto"))
    plain = Plan("DeepSpeed", sizes[0] * sizes[1])
    runs = []
    for name, plan in (("by hand", best[args.rates[0]]), ("planned", auto), ("DeepSpeed", plain)):
        trial = Trial(build(args, plan, args.accumulation, sizes), corpus, args)
        job.ask("rate", rate="none" if plan is plain else args.rates[0])
        trial.steps(args.warm_up)
        for index, rate in enumerate(args.rates):
            if plan is not plain:
                job.ask("rate", rate=rate)
            changes = name == "by hand" and index > 0
            trial.steps(args.steps, {**best[rate].block(sizes), "report_interval": 0} if changes else None)
        record = {"name": name, "step_s": trial.seconds[args.warm_up :], "losses": trial.losses}
        if (planner := planner_of(trial.run.engine)) is not None:
            record |= {"history": planner.history, "planning": planner.record(runtime_of(trial.run.engine))}
        runs.append(record)
        trial.run.engine.destroy()
    names = ("dcs", "rates", "steps", "warm_up", "delay", "rows", "accumulation")
    params = {name: getattr(args, name) for name in names}
    job.record(params, times_by_hand=times, best={rate: plan.name for rate, plan in best.items()}, runs=runs)
    job.end()


def report(records: list[Record], args: argparse.Namespace) -> str:
    return "\n\n".join(map(describe, records))


def describe(record: Record) -> str:
    """What happened, for people."""
    rates, steps, warm_up = (record["params"][name] for name in ("rates", "steps", "warm_up"))
    hand, planned, plain = ({run["name"]: run for run in record["runs"]}[one] for one in NAMES)
    lines = [f"median seconds of a step by hand: {json.dumps(record['times_by_hand'])}"]
    for index, rate in enumerate(rates):
        part = slice(index * steps, (index + 1) * steps)
        ours, theirs = sum(planned["step_s"][part]), sum(hand["step_s"][part])
        lines.append(f"{rate:>9}: planned {ours:.1f} s, by hand {theirs:.1f} s ({record['best'][rate]})")
    ours, theirs = sum(planned["step_s"]), sum(hand["step_s"])
    lines.append(f"     all: planned {ours:.1f} s, by hand {theirs:.1f} s, ratio {ours / theirs:.3f}")
    for entry in planned["history"]:
        done = entry["step"] - warm_up
        index = min(done // steps, len(rates) - 1)
        when = f"{done - index * steps} steps after the change to {rates[index]}" if done >= 0 else "in the warm-up"
        lines.append(f"step {entry['step']}, {when}: {entry['from']} -> {entry['to']} ({entry['reason']})")
    for run in (hand, planned):
        pairs = zip(run["losses"], plain["losses"], strict=True)
        lines.append(f"{run['name']}: losses differ from DeepSpeed's by {max(abs(a / b - 1) for a, b in pairs):.2e}")
    return "\n".join(lines)


NAMES = ("by hand", "planned", "DeepSpeed")
