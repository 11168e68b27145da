# SPDX-License-Identifier: Apache-2.0
"""What replicas of experts take, in bytes per replicated parameter: counted, estimated, and as the process grows.

    python benchmarks/memory.py --out benchmarks/results/memory.jsonl
    python benchmarks/memory.py --report benchmarks/results/memory.jsonl

Two ranks train in bf16, each with replicas of all the other's experts.  A job for each row:

    after     held when a step was applied and new weights travel
    most      the most that is held in a step, as counted whenever a layer's weights or gradients are asked for
    estimate  what `estimate_hybridep_mem_needs_all_live` says of it
    process   growth of the peak of resident memory in a step, over that of the same job without replicas
    host      held in host memory, with "state": "host"; on a CPU it is in "process" too
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import bench

ROWS: dict[str, dict[str, Any]] = {
    "no replicas": {"domain_size": 1},
    "exact": {},
    "patch, exact gradients": {"weight_codec": "patch"},
    "patch, int4 gradients": {"weight_codec": "patch", "gradient_codec": "int4"},
    "recommended": {"codecs": "recommended"},
    "recommended, on the host": {"codecs": "recommended", "state": "host"},
    "int8, int8 gradients": {"weight_codec": "int8", "gradient_codec": "int8"},
}
SIZES = {
    "hidden": 256, "layers": 6, "experts": 8, "top_k": 2, "seq_len": 64, "rows": 1, "capacity_factor": 1.25,
    "ep_size": 2,
}  # fmt: skip


def engine_of(row: str, accumulation: int) -> tuple[Any, dict[str, Any], Any]:
    """The engine, its block, and the settings of the model."""
    import deepspeed
    import torch

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
    import train_lm

    settings = dict(ROWS[row])
    state = {"state": settings.pop("state")} if "state" in settings else {}
    levels = [{"name": "dc", "size": 2, "domain_size": 2, **settings}]
    block = {"levels": levels, "dense_sync": "deepspeed", "report_interval": 0, **state}
    args = argparse.Namespace(**SIZES)
    torch.manual_seed(0)
    model = train_lm.ByteModel(args)
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": accumulation,
            "steps_per_print": 1_000_000_000,
            "zero_optimization": {"stage": 1},
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "torch_adam": True}},
            "hybridep": block,
        },
    )
    return engine, block, args


def measure(row: str, accumulation: int) -> None:
    """In one of two ranks; rank 0 prints what it found, in bytes."""
    import contextlib
    import io

    import deepspeed
    import torch
    from deepspeed import comm as dist

    import ds_hybridep

    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    engine, block, args = engine_of(row, accumulation)
    import train_lm

    corpus, held = train_lm.read_corpus()[0], [0]
    migration = engine.__dict__["_hybridep_attachment"].runtime.migration

    def train(step: int) -> None:
        for micro_step in range(accumulation):
            batch = train_lm.batch_at(
                corpus, (0, step, micro_step, dist.get_rank()), rows=args.rows, seq_len=args.seq_len
            )
            loss, _ = engine(*batch)
            engine.backward(loss)
            engine.step()

    train(0)
    after = ds_hybridep.stats(engine)
    if migration is not None:
        progress = migration.progress

        def sample() -> None:
            held.append(migration.replica_bytes)
            progress()

        migration.progress = sample
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory begins anew
    train(1)
    status = Path("/proc/self/status").read_text()
    peak_kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    with contextlib.redirect_stdout(io.StringIO()):
        needs = ds_hybridep.estimate_hybridep_mem_needs_all_live(engine.module, block, 2, accumulation=accumulation)
    experts = [p for name, p in engine.module.named_parameters() if ".deepspeed_experts." in name]
    found = {
        "replicated": sum(p.numel() for p in experts),
        "after": after["replica_bytes"],
        "host": after.get("host_bytes", 0),
        "most": max(held),
        "estimate": needs[(2,)].total,
        "process": peak_kib * 1024,
    }
    if dist.get_rank() == 0:
        print("FOUND " + json.dumps(found), flush=True)


def run(out: Path) -> None:
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    for accumulation in (1, 4):
        for row in ROWS:
            launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29877"]
            command = [*launch, __file__, "--one", row, "--accumulation", str(accumulation)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
            lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
            if not lines:
                raise SystemExit(f"{row}: {done.stderr[-3000:]}")
            found = json.loads(lines[0].removeprefix("FOUND "))
            with out.open("a") as file:
                params = {"row": row, "accumulation": accumulation, "dtype": "bf16", **SIZES}
                file.write(json.dumps({"params": params, **found, "versions": bench.versions()}) + "\n")
            print(row, accumulation, found, flush=True)


def report(path: Path) -> None:
    records = [json.loads(line) for line in path.read_text().splitlines()]
    columns = ("after", "most", "estimate", "process", "host")
    print(f"| accumulation | codecs | {' | '.join(columns)} |\n" + "|---" * (2 + len(columns)) + "|")
    for record in records:
        about = record["params"]
        alone = next(
            one["process"]
            for one in records
            if one["params"] == {**about, "row": "no replicas"} and one["versions"] == record["versions"]
        )
        if about["row"] != "no replicas":
            cells = [(record[name] - (alone if name == "process" else 0)) / record["replicated"] for name in columns]
            numbers = " | ".join(f"{cell:.1f}" for cell in cells)
            print(f"| {about['accumulation']} | {about['row']} ({record['versions']['commit']}) | {numbers} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("memory.jsonl"))
    parser.add_argument("--report", type=Path, help="print the table of these records")
    parser.add_argument("--one", choices=tuple(ROWS), help="one row in one rank; used by the jobs")
    parser.add_argument("--accumulation", type=int, default=1)
    args = parser.parse_args()
    if args.report is not None:
        report(args.report)
    elif args.one is not None:
        measure(args.one, args.accumulation)
    else:
        run(args.out)


if __name__ == "__main__":
    main()
