# SPDX-License-Identifier: Apache-2.0
"""What encoding everything costs in loss: real engines on four ranks, exact against encoded, paired by seed.

    python -m benchmarks losses --seeds 0 1 2 3 4 --out benchmarks/results/losses.jsonl

Two phases: from scratch on the sources of Python's standard library, and from the exact run's result on other text,
the C++ headers that come with torch, at a lower learning rate.  Runs of one seed share initial weights and batches.
The loss is that of held-out text, the mean over the same batches for all runs.

The model is that of examples/train_lm.py on two datacentres of two ranks (no network is emulated: only what arrives
matters).  Layouts: "domain", one expert domain over both datacentres; "copies", the EP group inside the datacentre, so
that each expert has two copies.
"""

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import Record, Records, run_job, table, upper_95
from benchmarks.training import SIZES, Job, byte_model, engine_of, loss_on, train_lm, train_step

__all__ = ["Job", "add_arguments", "rank", "report", "run"]

LAYOUTS = {"domain": (4, (2, 1)), "copies": (2, (1, 1))}  # EP size, domain sizes
PHASES = {"scratch": (1e-3, 300), "tune": (1e-4, 150)}  # learning rate, steps
EVALUATED = 40  # batches


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--phases", nargs="+", choices=tuple(PHASES), default=list(PHASES))
    parser.add_argument("--layout", choices=tuple(LAYOUTS), default="domain")
    parser.add_argument("--codecs", nargs="+", default=["recommended"], help="or settings of a level as JSON")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--zero-stage", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=SIZES["hidden"])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--steps", type=int, help="of each phase; by default its own")


def run(args: argparse.Namespace, records: Records) -> None:
    run_job("2x2", None, records, limit_s=1e6)


def read_headers(valid_every: int) -> tuple[Tensor, Tensor]:
    """The C++ headers that come with torch as (train, valid), uint8 tensors; one file in `valid_every` is of valid."""
    files = sorted((Path(torch.__file__).parent / "include" / "ATen").rglob("*.h"))
    train, valid = bytearray(), bytearray()
    for file_idx, path in enumerate(files):
        (valid if file_idx % valid_every == 0 else train).extend(path.read_bytes())
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(valid, dtype=torch.uint8)


def engine_for(args: argparse.Namespace, seed: int, phase: str, codecs: dict[str, Any]) -> Any:
    ep_size, domain_sizes = LAYOUTS[args.layout]
    torch.manual_seed(seed)
    model = byte_model(hidden=args.hidden, layers=args.layers, ep_size=ep_size)
    levels: list[dict[str, Any]] = [
        {"name": name, "size": 2, "domain_size": size} for name, size in zip(("dc", "gpu"), domain_sizes, strict=True)
    ]
    levels[0].update(codecs)
    rate, steps = PHASES[phase][0], args.steps or PHASES[phase][1]
    warm_up = {"warmup_min_lr": 0.0, "warmup_max_lr": rate, "warmup_num_steps": steps // 15, "total_num_steps": steps}
    return engine_of(
        model, {"levels": levels, "advanced": {"verify_interval": 0}}, rate=rate, stage=args.zero_stage,
        dtype=args.dtype, gradient_clipping=1.0, scheduler={"type": "WarmupDecayLR", "params": warm_up},
    )  # fmt: skip


def start_from(engine: Any, weights: dict[str, Tensor]) -> None:
    """Give parameters and the optimizer's fp32 copies other values, on all ranks."""
    engine.module.load_state_dict(weights)
    if hasattr(engine.optimizer, "refresh_fp32_params"):
        engine.optimizer.refresh_fp32_params()


def rank(args: argparse.Namespace, job: Job) -> None:
    corpora = {"scratch": train_lm.read_corpus(), "tune": read_headers(train_lm.VALID_EVERY)}
    seq_len = SIZES["seq_len"]
    for seed in args.seeds:
        begin: dict[str, Tensor] = {}
        for phase in args.phases:
            train_text, valid_text = corpora[phase]
            steps, losses = args.steps or PHASES[phase][1], {}
            for name in ("exact", *args.codecs):
                short = {"exact": {}, "recommended": {"codecs": "recommended"}}
                engine = engine_for(args, seed, phase, short[name] if name in short else json.loads(name))
                if phase == "tune" and begin:
                    start_from(engine, begin)
                for step in range(steps):
                    train_step(engine, train_text, step, rows=args.rows, seq_len=seq_len, seed=seed)
                losses[name] = loss_on(engine, valid_text, EVALUATED, seq_len=seq_len)
                if phase == "scratch" and name == "exact":
                    begin = {key: value.clone() for key, value in engine.module.state_dict().items()}
                engine.destroy()
            params = {name: getattr(args, name) for name in ("layout", "dtype", "hidden", "zero_stage")}
            job.record({**params, "seed": seed, "phase": phase, "steps": steps}, losses=losses)
            gaps = ", ".join(f"{name} {loss / losses['exact'] - 1:+.3%}" for name, loss in losses.items())
            job.say(f"seed {seed}, {phase}: exact {losses['exact']:.4f}, {gaps}")
    job.end()


def report(records: list[Record], args: argparse.Namespace) -> str:
    """Mean gap to the exact runs, and its one-sided upper 95% bound over the seeds."""
    gaps: dict[tuple[Any, ...], list[float]] = {}
    for record in records:
        about = record["params"]
        for name, loss in record["losses"].items():
            if name != "exact":
                key = (about["layout"], about["dtype"], about["hidden"], about["phase"], name)
                gaps.setdefault(key, []).append(loss / record["losses"]["exact"] - 1)
    rows = [
        [*key, len(found), f"{statistics.fmean(found):+.3%}", f"{upper_95(found):+.3%}"] for key, found in gaps.items()
    ]
    header = ("layout", "dtype", "hidden", "phase", "codecs", "seeds", "mean gap", "upper 95% bound")
    return table(header, rows)
