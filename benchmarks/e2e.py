# SPDX-License-Identifier: Apache-2.0
"""Step time of every plan on emulated datacentres: links x batch x accumulation x plans.

    python -m benchmarks e2e --dcs 2x2 --out benchmarks/results/e2e-slow-link.jsonl
    python -m benchmarks e2e --report benchmarks/results/e2e-slow-link.jsonl --plots docs/images

One job holds all plans and trains each on the same data, in interleaved blocks, phase by phase.  The driver owns the
network, changes its rate between phases and reads the uplinks' counters when the job asks.
"""

import argparse
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist

import ds_hybridep
from benchmarks import training
from benchmarks.common import Records, interleaved, run_job
from benchmarks.e2e_report import report
from benchmarks.training import Job, Run, build, planner_of, plans_of, plans_of_hf, runtime_of, train_lm
from ds_hybridep.adaptive.plans import label_of
from ds_hybridep.lab.topology import LinkSpec, parse_duration

__all__ = ["Job", "add_arguments", "rank", "report", "run"]

RATES = ("none", "1000mbit", "500mbit", "200mbit", "100mbit", "50mbit", "20mbit")
KINDS = ("tokens", "expert_weights", "expert_gradients", "dense", "control")
MODEL_PARAMS = (
    "dcs", "hidden", "layers", "experts", "top_k", "zero_stage", "lr", "dtype", "compute", "dense_ms", "row_us",
    "model",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dcs", default="2x2", help="DCs x hosts per DC")
    parser.add_argument("--rates", nargs="+", default=list(RATES), help="of each DC's uplink; 'none': no limit")
    parser.add_argument("--delay", default="0ms", help="one way between DCs")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="sequences per rank and micro-step")
    parser.add_argument("--accumulations", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="most steps of one block")
    parser.add_argument("--block-s", type=float, default=2.0, help="seconds of one block to aim at")
    parser.add_argument("--plans", nargs="+", default=[], help="by name; by default all")
    parser.add_argument("--plots", type=Path, help="folder for plots of the report")
    parser.add_argument("--limits", action="store_true", help="report steps over those of phases without a limit")
    training.add_model_arguments(parser)


def run(args: argparse.Namespace, records: Records) -> None:
    run_job(args.dcs, LinkSpec(wan_delay_s=parse_duration(args.delay, "--delay")), records)


def rank(args: argparse.Namespace, job: Job) -> None:
    sizes = tuple(int(size) for size in args.dcs.split("x"))
    known = plans_of(sizes) if args.model == "bytes" else plans_of_hf(sizes)
    plans = [plan for plan in known if not args.plans or plan.name in args.plans]
    job.ask("rate", rate="none")
    runs = {count: [build(args, plan, count, sizes) for plan in plans] for count in args.accumulations}
    corpus, _ = train_lm.read_corpus()
    for rate in args.rates:
        job.ask("rate", rate=rate)
        for rows in args.rows:
            for accumulation in args.accumulations:
                measured = phase(runs[accumulation], job, corpus, args, rows)
                for one in runs[accumulation]:
                    params = {name: getattr(args, name) for name in MODEL_PARAMS}
                    params |= {"rate": rate, "rows": rows, "accumulation": accumulation, "delay": args.delay}
                    params |= {"tokens_per_rank": rows * args.seq_len, "adapters": one.plan.adapters}
                    params["plan"] = one.plan.name.removeprefix(f"{one.plan.adapters}: ")
                    job.record(params, **measured_of(one, measured[one.plan.name]))
                job.say(f"{rate}, {rows} rows, accumulation {accumulation}: done")
    job.end()


def measured_of(run: Run, blocks: dict[str, list[Any]]) -> dict[str, Any]:
    """What a record says of one plan in one phase; bytes are per step, summed over ranks."""
    own = torch.tensor([statistics.median(one.get(kind, 0.0) for one in blocks["counted"]) for kind in KINDS])
    dist.all_reduce(own)
    planner = planner_of(run.engine)
    return {
        "step_s": blocks["step_s"], "probe_s": blocks["probe_s"],
        "wan_bytes_per_step": statistics.median(blocks["wan_bytes"]),
        "counted_bytes_per_step": dict(zip(KINDS, own.tolist(), strict=True)),
        "loss": run.loss, "num_steps": run.num_steps,
        "picked": None if planner is None else label_of(planner.current),
        "history": None if planner is None else planner.history,
        "links": [] if planner is None else planner.record(runtime_of(run.engine))["links"],
    }  # fmt: skip


def phase(runs: list[Run], job: Job, corpus: Any, args: argparse.Namespace, rows: int) -> dict[str, Any]:
    """Blocks of all plans at one rate and batch."""
    measured: dict[str, dict[str, list[Any]]] = {run.plan.name: defaultdict(list) for run in runs}
    for run in runs:
        run.settle(corpus, args, rows)
    seconds = []
    for run in runs:  # warm-up at this rate and batch, and how long a step takes
        begin = time.perf_counter()
        run.train(corpus, args, rows, 1)
        run.finish_transfers()
        seconds.append(time.perf_counter() - begin)
    wanted = torch.tensor([args.block_s / max(statistics.median(seconds), 1e-3)])
    dist.broadcast(wanted, 0)
    steps = max(1, min(args.steps, int(wanted.item())))  # fewer where one takes long; the same on all ranks
    by_name = {run.plan.name: run for run in runs}
    for order in interleaved(list(by_name), args.rounds):
        for name in order:
            measured[name]["probe_s"].append(compute_probe_s())
            block = run_block(by_name[name], job, corpus, args, rows, steps)
            for key, value in zip(("step_s", "wan_bytes", "counted"), block, strict=True):
                measured[name][key].append(value)
    return measured


def run_block(run: Run, job: Job, corpus: Any, args: argparse.Namespace, rows: int, steps: int) -> tuple[Any, ...]:
    """(seconds per step, WAN bytes per step, counted bytes per step by kind) of one block.

    A step leaves weights under way that the next one waits for.  So the clock runs as in the middle of a training: one
    step goes right before it starts, and what is under way when it stops arrives before another plan's turn.  Bytes
    are those of all of these steps: reading counters takes time, in which the link would carry weights for nothing.
    """
    before, counted_before = job.ask("counters"), level_0_bytes(run)
    run.train(corpus, args, rows, 1)
    dist.barrier()
    start = time.perf_counter()
    run.train(corpus, args, rows, steps)
    dist.barrier()  # the latest end over ranks
    seconds = time.perf_counter() - start
    run.finish_transfers()
    after, counted = job.ask("counters"), level_0_bytes(run)
    wan_bytes = (after.get("wan_bytes", 0) - before.get("wan_bytes", 0)) / (steps + 1)
    return seconds / steps, wan_bytes, {kind: (n - counted_before[kind]) / (steps + 1) for kind, n in counted.items()}


def level_0_bytes(run: Run) -> dict[str, int]:
    """By kind, without those that are not counted."""
    if run.plan.domain_sizes is None:
        return {}
    sent = ds_hybridep.stats(run.engine)["levels"][0]["sent_bytes"]
    return {kind: count for kind, count in sent.items() if count is not None}


def compute_probe_s(num_products: int = 400) -> float:
    """Seconds that the slowest rank takes for the same small matrix products, all ranks at once: this machine's speed
    drifts by more than plans differ, and a prediction has to know today's."""
    torch.manual_seed(0)
    x, weight = torch.randn(128, 64), torch.randn(64, 256)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(num_products):
        torch.relu(x @ weight) @ weight.T
    dist.barrier()
    return time.perf_counter() - start
