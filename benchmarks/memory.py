# SPDX-License-Identifier: Apache-2.0
"""What replicas of experts take, in bytes per replicated parameter: counted, and measured as a whole.

    python -m benchmarks memory --out benchmarks/results/memory.jsonl

Two ranks train in bf16, each with replicas of all the other's experts, in layers of DeepSpeed's MoE or of AutoEP:

    between     held between steps, counted
    most        the most that is held in a step, counted whenever weights or gradients are asked for, and in the step
    peak        the most that torch has allocated in a step, over that of the same job without replicas: packets and
                whatever else comes and goes is in it, and what that job needs more for tokens on their way is not
    host        held in host memory, with "state": "host"; on a CPU it is in "peak" too

Gradients of so small layers would all be on their way at a time; here they are as those of large ones are, of
`prefetch_depth` + 1 layers of twelve.
"""

import argparse
from collections.abc import Mapping
from typing import Any

import torch

import ds_hybridep
from benchmarks.common import Record, Records, run_job, table
from benchmarks.training import Job, autoep, byte_model, engine_of, qwen3_moe, runtime_of, train_lm, train_step
from ds_hybridep.geometry import packets

__all__ = ["Job", "add_arguments", "rank", "report", "run"]

ROWS: dict[str, dict[str, Any]] = {
    "no replicas": {"domain_size": 1},
    "exact": {},
    "patch, exact gradients": {"weight_codec": "patch"},
    "recommended": {"codecs": "recommended"},
    "recommended, on the host": {"codecs": "recommended", "state": "host"},
    "int8, int8 gradients": {"weight_codec": "int8", "gradient_codec": "int8"},
    "low rank, low rank gradients": {"weight_codec": "low_rank", "gradient_codec": "low_rank"},
}
LAYERS = ("MoE", "AutoEP")
MODEL = {
    "hidden": 128, "layers": 12, "experts": 8, "top_k": 2, "seq_len": 32, "capacity_factor": 1.25, "ep_size": 2,
}  # fmt: skip
COLUMNS = ("between", "most", "peak", "host")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--accumulations", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--rows", nargs="+", choices=tuple(ROWS), default=list(ROWS))


def run(args: argparse.Namespace, records: Records) -> None:
    run_job("2x1", None, records)


def block_of(row: str) -> dict[str, Any]:
    settings = dict(ROWS[row])
    state = {"state": settings.pop("state")} if "state" in settings else {}
    levels = [{"name": "dc", "size": 2, "domain_size": 2, **settings}]
    return {"levels": levels, "dense_sync": "deepspeed", "report_interval": 0, **state}


def build(layers: str, block: Mapping[str, Any], accumulation: int) -> Any:
    torch.manual_seed(0)
    model = qwen3_moe(argparse.Namespace(**MODEL)) if layers == "AutoEP" else byte_model(**MODEL)
    zero = {"stage": 1, "reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000}
    settings = autoep(MODEL["ep_size"]) if layers == "AutoEP" else {}
    return engine_of(
        model, block, rate=1e-5, dtype="bf16", accumulation=accumulation, zero_optimization=zero, **settings
    )


def most_allocated(profile: Any) -> int:
    """The most bytes at once of what was allocated while a profile was taken."""
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most


def measure(layers: str, row: str, accumulation: int) -> dict[str, int]:
    """Bytes measured on one of two ranks."""
    corpus, block, held = train_lm.read_corpus()[0], block_of(row), [0]
    engine = build(layers, block, accumulation)
    migration = runtime_of(engine).migration
    for step in range(2):
        train_step(engine, corpus, step, rows=1, seq_len=MODEL["seq_len"])
    if migration is not None:
        migration.finish_shipments()
        progress, remember_sent = migration.progress, migration.remember_sent
        migration.progress = lambda: (held.append(migration.replica_bytes), progress())
        migration.remember_sent = lambda: (remember_sent(), held.append(migration.replica_bytes))
    between = ds_hybridep.stats(engine)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        train_step(engine, corpus, 2, rows=1, seq_len=MODEL["seq_len"])
    experts = (".deepspeed_experts.", ".mlp.experts.")
    named = engine.module.named_parameters()
    found = {
        "replicated": sum(p.numel() for name, p in named if any(one in name for one in experts)),
        "between": between["replica_bytes"], "host": between.get("host_bytes", 0), "most": max(held),
        "allocated": most_allocated(profile),
    }  # fmt: skip
    engine.destroy()
    return found


def rank(args: argparse.Namespace, job: Job) -> None:
    packets.RETURNING_BYTES = 0
    for layers in args.layers:
        measure(layers, "no replicas", 1)  # what is made once
        for accumulation in args.accumulations:
            for row in dict.fromkeys(["no replicas", *args.rows]):
                found = measure(layers, row, accumulation)
                job.record(
                    {"kind": layers, "row": row, "accumulation": accumulation, "dtype": "bf16", **MODEL}, **found
                )
                job.say(f"{layers}, {accumulation} micro-steps, {row}: done")
    job.end()


def report(records: list[Record], args: argparse.Namespace) -> str:
    rows = []
    for record in records:
        about = record["params"]
        if about["row"] != "no replicas":
            alone = next(one for one in records if one["params"] == {**about, "row": "no replicas"})
            peak = record["between"] + record["host"] + record["allocated"] - alone["allocated"]
            numbers = [f"{({**record, 'peak': peak})[name] / record['replicated']:.1f}" for name in COLUMNS]
            rows.append([about["kind"], about["accumulation"], about["row"], *numbers])
    return "Bytes per replicated parameter.\n\n" + table(["layers", "micro-steps", "codecs", *COLUMNS], rows)
