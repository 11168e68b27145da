# SPDX-License-Identifier: Apache-2.0
"""What encoding everything costs in loss: real engines on four ranks, exact against encoded, paired by seed.

    torchrun --nproc_per_node 4 benchmarks/losses.py --seeds 0 1 2 3 4 --out benchmarks/results/losses.jsonl
    python benchmarks/losses.py --report benchmarks/results/losses.jsonl

Two phases: from scratch on the sources of Python's standard library, and from the exact run's result on other text,
the C++ headers that come with torch, at a lower learning rate.  Runs of one seed share initial weights and batches.
The loss is that of held-out text, the mean over the same batches for all runs.

The model is that of examples/train_lm.py on two datacentres of two ranks (no network is emulated: only what arrives
matters).  Layouts: "domain", one expert domain over both datacentres; "copies", the EP group inside the datacentre, so
that each expert has two copies.
"""

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

import bench
import deepspeed
import torch
from deepspeed import comm as dist
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import train_lm

LAYOUTS = {"domain": (4, (2, 1)), "copies": (2, (1, 1))}  # EP size, domain sizes
PHASES = {"scratch": (1e-3, 300), "tune": (1e-4, 150)}  # learning rate, steps
EVALUATED = 40  # batches
T_95 = {2: 6.314, 3: 2.920, 4: 2.353, 5: 2.132, 6: 2.015, 7: 1.943, 8: 1.895, 10: 1.833}  # one-sided, by seeds


def engine_of(args: argparse.Namespace, seed: int, phase: str, codecs: dict[str, Any]) -> Any:
    ep_size, domain_sizes = LAYOUTS[args.layout]
    args.ep_size = ep_size
    torch.manual_seed(seed)
    model = train_lm.ByteModel(args)
    levels = [
        {"name": name, "size": 2, "domain_size": size} for name, size in zip(("dc", "gpu"), domain_sizes, strict=True)
    ]
    rate, steps = PHASES[phase][0] * codecs.pop("rate_factor", 1.0), args.steps or PHASES[phase][1]
    levels[0].update(codecs)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "steps_per_print": 1_000_000_000,
        "zero_optimization": {"stage": args.zero_stage},
        "bf16": {"enabled": args.dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": {"lr": rate, "torch_adam": True}},
        "scheduler": {"type": "WarmupDecayLR", "params": {
            "warmup_min_lr": 0.0, "warmup_max_lr": rate, "warmup_num_steps": steps // 15, "total_num_steps": steps,
        }},
        "hybridep": {"levels": levels, "report_interval": 0, "advanced": {"verify_interval": 0}},
    }  # fmt: skip
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def train(engine: Any, corpus: Tensor, seed: int, steps: int, args: argparse.Namespace) -> None:
    for step in range(steps):
        batch = train_lm.batch_at(corpus, (seed, step, 0, dist.get_rank()), rows=args.rows, seq_len=args.seq_len)
        loss, aux_loss = engine(*batch)
        engine.backward(loss + train_lm.AUX_LOSS_WEIGHT * aux_loss)
        engine.step()


@torch.no_grad()
def evaluate(engine: Any, corpus: Tensor, args: argparse.Namespace) -> float:
    engine.eval()
    losses = []
    for index in range(EVALUATED):
        batch = train_lm.batch_at(corpus, (977, index, 0, dist.get_rank()), rows=4, seq_len=args.seq_len)
        losses.append(float(engine(*batch)[0]))
    engine.train()
    total = torch.tensor([statistics.fmean(losses)])
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def start_from(engine: Any, weights: dict[str, Tensor]) -> None:
    """Give parameters and the optimizer's fp32 copies other values, on all ranks."""
    engine.module.load_state_dict(weights)
    if hasattr(engine.optimizer, "refresh_fp32_params"):
        engine.optimizer.refresh_fp32_params()


def run(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo")
    corpora = {"scratch": train_lm.read_corpus(), "tune": bench.read_headers(train_lm.VALID_EVERY)}
    for seed in args.seeds:
        begin: dict[str, Tensor] = {}
        for phase in args.phases:
            train_text, valid_text = corpora[phase]
            losses, digests = {}, {}
            for name in ("exact", *args.codecs):
                codecs = (
                    {} if name == "exact" else {"codecs": "recommended"} if name == "recommended" else json.loads(name)
                )
                engine = engine_of(args, seed, phase, codecs)
                if phase == "tune":
                    start_from(engine, begin)
                train(engine, train_text, seed, args.steps or PHASES[phase][1], args)
                losses[name] = evaluate(engine, valid_text, args)
                digests[name] = sum(float(p.detach().double().sum()) for p in engine.module.parameters())
                if phase == "scratch" and name == "exact":
                    begin = {key: value.clone() for key, value in engine.module.state_dict().items()}
                engine.destroy()
            if dist.get_rank() == 0:
                record = {
                    "params": {"layout": args.layout, "dtype": args.dtype, "hidden": args.hidden, "seed": seed,
                               "phase": phase, "zero_stage": args.zero_stage, "steps": args.steps or PHASES[phase][1]},
                    "losses": losses, "sums": digests, "versions": bench.versions(),
                }  # fmt: skip
                with args.out.open("a") as file:
                    file.write(json.dumps(record) + "\n")
                gaps = ", ".join(f"{name} {loss / losses['exact'] - 1:+.3%}" for name, loss in losses.items())
                print(f"seed {seed}, {phase}: exact {losses['exact']:.4f}, {gaps}", flush=True)
            dist.barrier()


def report(path: Path) -> None:
    """Mean gap to the exact runs, and its one-sided upper 95% bound over the seeds."""
    gaps: dict[tuple[Any, ...], list[float]] = {}
    for line in path.read_text().splitlines():
        record = json.loads(line)
        about = record["params"]
        for name, loss in record["losses"].items():
            key = (about["layout"], about["dtype"], about["hidden"], about["phase"], name)
            gaps.setdefault(key, []).append(loss / record["losses"]["exact"] - 1)
    print("| layout | dtype | hidden | phase | codecs | seeds | mean gap | upper 95% bound |\n" + "|---" * 8 + "|")
    for key, found in gaps.items():
        if key[-1] != "exact":
            mean, n = statistics.fmean(found), len(found)
            margin = T_95.get(n, 2.0) * statistics.stdev(found) / math.sqrt(n) if n > 1 else math.inf
            print(f"| {' | '.join(map(str, key))} | {n} | {mean:+.3%} | {mean + margin:+.3%} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--phases", nargs="+", choices=tuple(PHASES), default=list(PHASES))
    parser.add_argument("--layout", choices=tuple(LAYOUTS), default="domain")
    parser.add_argument(
        "--codecs",
        nargs="+",
        default=["recommended"],
        help='besides exact; settings of a level as JSON, and "rate_factor": 1.0001 to see what a change makes that '
        "means nothing",
    )
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--zero-stage", type=int, default=1)
    for name, default in (("hidden", 64), ("layers", 2), ("experts", 8), ("top-k", 2), ("seq-len", 128), ("rows", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--capacity-factor", type=float, default=1.25)
    parser.add_argument("--out", type=Path, default=Path("losses.jsonl"))
    parser.add_argument("--steps", type=int, help="of each phase; by default its own")
    parser.add_argument("--report", type=Path, help="print the table of these records")
    args = parser.parse_args()
    if args.report is not None:
        report(args.report)
    else:
        run(args)


if __name__ == "__main__":
    main()
