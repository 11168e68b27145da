# SPDX-License-Identifier: Apache-2.0
"""Whether the gap in loss between encoded and exact training grows with the steps.

    python -m benchmarks gap --folder runs --minutes 120 --out benchmarks/results/gap.jsonl
    python -m benchmarks gap --hidden 64 --layers 2 --steps 20000 --every 1000 --seeds 0 1 2 ...
    python -m benchmarks gap --dtype fp32 --variants exact gradients ...
    python -m benchmarks gap --exact-steps 750 --every 100 ...
    python -m benchmarks gap --report benchmarks/results/gap.jsonl --plots docs/images

Two datacentres of one rank train the byte-level model of examples/train_lm.py with AdamW (no network is emulated: only
what arrives matters), once exactly and once with the recommended codecs, from the same weights on the same batches.
The variant "gradients" encodes gradients alone.  In bf16 it trains the same as "recommended", bit for bit, as weights
arrive exactly there, and needs a fifth less time; in fp32 they do not.  With `--exact-steps`, encoded runs begin as
copies of the exact run, whose checkpoint must be at that step.

The text is that of the Python files of the packages torch and deepspeed; one file in twenty is held out.  Every so
many steps there is a record with the loss of each held-out batch, the same batches each time.

Runs take many hours, so they continue: a sitting ends after `--minutes`, and the same command goes on from the
checkpoints in `--folder`.  The run that is behind goes first, so both are about as far.  Records name the sitting.

The band of the report is that of the mean over held-out batches, paired: it says how well the gap of these two runs is
known, not how far two other runs would be apart.  With several seeds it is that of the mean over seeds.
"""

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from deepspeed import comm as dist

from benchmarks.common import OKABE_ITO, Record, Records, margin_95, new_figure, run_job, save_figure, table
from benchmarks.training import (
    SIZES,
    Job,
    byte_model,
    engine_of,
    losses_on,
    multiply_in_fp32,
    python_files,
    save,
    steps_in,
    texts_of,
    train_lm,
    train_step,
)

__all__ = ["Job", "add_arguments", "rank", "report", "run"]

BALANCED = {"type": "low_rank", "weighting": "rms"}
VARIANTS: dict[str, dict[str, Any]] = {  # settings of the level
    "exact": {},
    "recommended": {"codecs": "recommended"},
    "gradients": {
        "gradient_codec": BALANCED,
        "dense_gradient_codec": {**BALANCED, "rest": {"type": "int2", "block": 64}},
    },
}
EVALUATED = 64  # batches of 4 rows on each rank
SEQ_LEN = SIZES["seq_len"]
WARM_UP = 0.03  # of all steps
SAME = ("hidden", "layers", "experts", "rows", "dtype", "zero_stage", "rate", "steps")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, default=Path("gap-runs"), help="of checkpoints, to go on from")
    parser.add_argument("--minutes", type=float, default=60.0, help="of this sitting")
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--every", type=int, default=250, help="steps between two records")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--variants", nargs="+", choices=tuple(VARIANTS), default=["exact", "recommended"])
    parser.add_argument("--exact-steps", type=int, default=0, help="of encoded runs, before the first encoded one")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--rows", type=int, default=4, help="sequences of a rank in a step")
    parser.add_argument("--rate", type=float, default=6e-4)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="bf16")
    parser.add_argument("--zero-stage", type=int, default=1)
    parser.add_argument("--plots", type=Path, help="folder for the plot of the report")


def run(args: argparse.Namespace, records: Records) -> None:
    args.folder.mkdir(parents=True, exist_ok=True)
    run_job("2x1", None, records, limit_s=60 * args.minutes + 3600)


def rank(args: argparse.Namespace, job: Job) -> None:
    """Train the run that is behind, part by part, until the sitting is over."""
    train, held_out = texts_of(python_files())
    end = time.time() + 60 * args.minutes
    runs = [(seed, variant) for seed in args.seeds for variant in args.variants]
    names = {one: name_of(args, one[1]) for one in runs}
    while True:
        folders = {one: args.folder / f"{names[one]}-{one[0]}" for one in runs}
        begins_at = {one: 0 if one[1] == "exact" else args.exact_steps for one in runs}
        done = {one: steps_in(folder) or begins_at[one] for one, folder in folders.items()}
        seed, variant = min(runs, key=lambda one: (done[one], one[1] == "exact"))  # before its checkpoint is another
        late_s = train_lm.mean_over_ranks(torch.tensor(time.time() - end))  # the same on both ranks
        if done[seed, variant] >= args.steps or late_s > 0:
            break
        begin = time.time()
        params = {name: getattr(args, name) for name in SAME} | {"seed": seed, "variant": names[seed, variant]}
        engine = engine_for(args, seed, variant)
        folder = folders[seed, variant]
        if steps_in(folder):
            engine.load_checkpoint(str(folder))
        elif done[seed, variant]:
            exact = args.folder / f"exact-{seed}"
            if (step := steps_in(exact)) != args.exact_steps:
                raise SystemExit(
                    f"--exact-steps {args.exact_steps}: the exact run, {exact}, is at step {step}; "
                    f"choose a new --folder, and an --every that divides {args.exact_steps}"
                )
            engine.load_checkpoint(str(exact))
        trained = []
        for step in range(done[seed, variant], min(done[seed, variant] + args.every, args.steps)):
            trained.append(train_step(engine, train, step, rows=args.rows, seq_len=SEQ_LEN, seed=seed))
        losses = losses_on(engine, held_out, EVALUATED, seq_len=SEQ_LEN)
        save(engine, folder)
        job.record(
            params, step=engine.global_steps, losses=[round(one, 5) for one in losses], sitting=round(end),
            trained=statistics.fmean(trained), seconds=time.time() - begin, train_bytes=len(train),
            parameters=num_parameters(engine),
        )  # fmt: skip
        job.say(f"{names[seed, variant]}, seed {seed}: step {engine.global_steps}, {statistics.fmean(losses):.4f}")
        engine.destroy()
        del engine
    job.end()


def name_of(args: argparse.Namespace, variant: str) -> str:
    return f"{variant} after {args.exact_steps}" if args.exact_steps and variant != "exact" else variant


def engine_for(args: argparse.Namespace, seed: int, variant: str) -> Any:
    torch.manual_seed(seed)
    model = byte_model(hidden=args.hidden, layers=args.layers, experts=args.experts, ep_size=dist.get_world_size())
    multiply_in_fp32(model)
    level = {"name": "dc", "size": 2, "domain_size": 2, **VARIANTS[variant]}
    warm_up = {"warmup_min_lr": 0.0, "warmup_max_lr": args.rate, "warmup_num_steps": math.ceil(WARM_UP * args.steps),
               "total_num_steps": args.steps}  # fmt: skip
    optimizer = {"type": "AdamW", "params": {"lr": args.rate, "torch_adam": True, "fused": True}}
    return engine_of(
        model, {"levels": [level], "advanced": {"verify_interval": 0}}, optimizer=optimizer, stage=args.zero_stage,
        dtype=args.dtype, gradient_clipping=1.0, scheduler={"type": "WarmupDecayLR", "params": warm_up},
    )  # fmt: skip


def num_parameters(engine: Any) -> int:
    """Of the whole model."""
    experts, shared = 0, 0
    for parameter in engine.module.parameters():
        if getattr(parameter, "allreduce", True):
            shared += parameter.numel()
        else:
            experts += parameter.numel()
    return shared + experts * dist.get_world_size()


# ---- the report ----


class Gap(NamedTuple):
    """Of one variant after some steps."""

    step: int
    seeds: int
    exact: float
    encoded: float
    margin: float  # half of the 95% interval of encoded - exact
    behind: float  # steps since the exact run had this loss, mean over seeds; nan: it began below it

    @property
    def relative(self) -> float:
        return self.encoded / self.exact - 1


def report(records: list[Record], args: argparse.Namespace) -> str:
    """A table for each model, and a plot of all gaps."""
    models: dict[tuple[Any, ...], dict[tuple[int, int, str], Record]] = {}
    for record in records:  # of a part that was trained again after a crash, the last record counts
        params = record["params"]
        about = tuple(params[name] for name in SAME)
        models.setdefault(about, {})[params["seed"], record["step"], params["variant"]] = record
    texts, lines = [], {}
    for found in models.values():
        first = next(iter(found.values()))
        params = first["params"]
        variants = dict.fromkeys(variant for *_, variant in found if variant != "exact")
        gaps = {variant: several for variant in variants if (several := gaps_of(found, variant))}
        name = f"{first['parameters'] / 1e6:.1f} million parameters, {params['dtype']}"
        sittings = len({record["sitting"] for record in found.values()})
        hours = sum(record["seconds"] for record in found.values()) / 3600
        texts.append(
            f"{name}: hidden {params['hidden']}, {params['layers']} layers, {params['experts']} experts, "
            f"{2 * params['rows'] * SEQ_LEN} tokens a step, rate {params['rate']:g}; {hours:.1f} hours in "
            f"{sittings} sittings\n"
        )
        rows = [[variant, gap.step, gap.seeds, f"{gap.exact:.4f}", f"{gap.encoded:.4f}", f"{gap.relative:+.2%}",
                 f"{gap.margin / gap.exact:.2%}", "" if math.isnan(gap.behind) else f"{gap.behind:.0f}"]
                for variant, several in gaps.items() for gap in several]  # fmt: skip
        heads = ["encoded", "step", "seeds", "exact", "encoded loss", "gap", "95% of it", "steps behind"]
        texts.append(table(heads, rows) + "\n")
        lines[name] = gaps
    if args.plots:
        plot(lines, args.plots / "gap.svg")
    return "\n".join(texts)


def gaps_of(found: dict[tuple[int, int, str], Record], variant: str) -> list[Gap]:
    """Gaps after each number of steps that both runs of at least one seed have reached."""
    gaps: list[Gap] = []
    for step in sorted({step for _, step, _ in found}):
        seeds = [
            seed
            for seed in sorted({seed for seed, _, _ in found})
            if (seed, step, "exact") in found and (seed, step, variant) in found
        ]
        if not seeds:
            continue
        pairs = [(found[seed, step, "exact"]["losses"], found[seed, step, variant]["losses"]) for seed in seeds]
        exact, encoded = (statistics.fmean(statistics.fmean(pair[at]) for pair in pairs) for at in (0, 1))
        if len(pairs) == 1:
            several = [other - one for one, other in zip(*pairs[0], strict=True)]
        else:
            several = [statistics.fmean(other) - statistics.fmean(one) for one, other in pairs]
        curves = [
            [(at, statistics.fmean(record["losses"])) for (one, at, name), record in sorted(found.items())
             if (one, name) == (seed, "exact") and at <= step]
            for seed in seeds
        ]  # fmt: skip
        reached = [reached_at(curve, statistics.fmean(pair[1])) for curve, pair in zip(curves, pairs, strict=True)]
        gaps.append(Gap(step, len(pairs), exact, encoded, margin_95(several), step - statistics.fmean(reached)))
    return gaps


def reached_at(curve: Sequence[tuple[int, float]], loss: float) -> float:
    """After how many steps the exact run had a loss, on straight lines between its records; nan: before the first."""
    for (begin, high), (end, low) in itertools.pairwise(curve):
        if low <= loss <= high and low < high:
            return end - (end - begin) * (loss - low) / (high - low)
    return curve[-1][0] if loss <= curve[-1][1] else math.nan


def plot(lines: dict[str, dict[str, list[Gap]]], path: Path) -> None:
    """For each model the losses of all runs, and the gaps with their 95% intervals."""
    figure, axes = new_figure(len(lines), 2, figsize=(10, 3.4 * len(lines)), squeeze=False)
    for (of_losses, of_gaps), (name, variants) in zip(axes, lines.items(), strict=True):
        of_gaps.axhline(0, color="gray", linewidth=0.8)
        longest = max(variants.values(), key=len, default=[])
        of_losses.plot(
            [gap.step for gap in longest], [gap.exact for gap in longest], "--", color="gray", label="exact"
        )
        for colour, (variant, gaps) in zip(OKABE_ITO, variants.items(), strict=False):
            steps = [gap.step for gap in gaps]
            of_losses.plot(
                steps, [gap.encoded for gap in gaps], "o-", markersize=3, color=colour, label=f"encoded: {variant}"
            )
            low, high = ([100 * (gap.relative + sign * gap.margin / gap.exact) for gap in gaps] for sign in (-1, 1))
            of_gaps.fill_between(steps, low, high, alpha=0.25, linewidth=0, color=colour)
            of_gaps.plot(steps, [100 * gap.relative for gap in gaps], "o-", markersize=3, color=colour)
        of_losses.set(title=name, xlabel="step", ylabel="held-out loss, nats per byte")
        of_gaps.set(title="the gap", xlabel="step", ylabel="encoded over exact, %")
        of_losses.legend(frameon=False)
    save_figure(
        figure,
        path,
        "From scratch, AdamW with warm-up and decay over all steps; both runs of a seed see the same batches. "
        "Band: 95% over\nheld-out batches with one seed, over seeds with several.",
    )
