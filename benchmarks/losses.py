# SPDX-License-Identifier: Apache-2.0
"""What encoding everything costs in loss: real engines on four ranks, exact against encoded, paired by seed.

    python -m benchmarks losses --seeds 0 1 2 3 4 --out benchmarks/results/losses.jsonl

Two phases: from scratch on the sources of Python's standard library, and from the exact run's result on other text,
the C++ headers that come with torch, at a lower learning rate.  Runs of one seed share initial weights and batches.
The loss is that of held-out text, the mean over the same batches for all runs.  Any difference, however small, grows
into another run of the same quality, so gaps have an upper 95% bound over the seeds.

The model is that of examples/train_lm.py on two datacentres of two ranks (no network is emulated: only what arrives
matters).  Layouts: "domain", one expert domain over both datacentres; "copies", the EP group inside the datacentre, so
that each expert has two copies.
"""

import argparse
import json
import math
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ds_hybridep
from benchmarks.common import OKABE_ITO, Record, Records, margin_95, new_figure, run_job, save_figure, table, upper_95
from benchmarks.training import (
    SIZES,
    Job,
    byte_model,
    engine_of,
    header_files,
    loss_on,
    texts_of,
    train_lm,
    train_step,
)

__all__ = ["Job", "add_arguments", "rank", "report", "run"]

LAYOUTS = {"domain": (4, (2, 1)), "copies": (2, (1, 1))}  # EP size, domain sizes
PHASES = {"scratch": (1e-3, 300), "tune": (1e-4, 150)}  # learning rate, steps
EVALUATED = 40  # batches
SEQ_LEN = SIZES["seq_len"]
RATIOS = ("weight_ratio", "gradient_ratio")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_training_arguments(parser)
    parser.add_argument("--codecs", nargs="+", default=["recommended"], help="or settings of a level as JSON")
    parser.add_argument("--plot", type=Path, help="with --report: an SVG file of the gaps")


def add_training_arguments(parser: argparse.ArgumentParser, dtype: str = "bf16") -> None:
    """What `compare` reads."""
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--phases", nargs="+", choices=tuple(PHASES), default=list(PHASES))
    parser.add_argument("--layout", choices=tuple(LAYOUTS), default="domain")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default=dtype)
    parser.add_argument("--zero-stage", type=int, default=1)
    parser.add_argument("--hidden", type=int, default=SIZES["hidden"])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--steps", type=int, help="of each phase; by default its own")


def run(args: argparse.Namespace, records: Records) -> None:
    run_job("2x2", None, records, limit_s=1e6)


def rank(args: argparse.Namespace, job: Job) -> None:
    short = {"recommended": {"codecs": "recommended"}}
    compare(args, job, {name: short[name] if name in short else json.loads(name) for name in args.codecs})


def engine_for(args: argparse.Namespace, seed: int, phase: str, codecs: Mapping[str, Any]) -> Any:
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


def compare(args: argparse.Namespace, job: Job, cases: Mapping[str, Mapping[str, Any]]) -> None:
    """Train exactly and with the slow level's settings of each case; a record for each seed and phase."""
    corpora = {"scratch": train_lm.read_corpus(), "tune": texts_of(header_files("ATen"))}
    for seed in args.seeds:
        begin: dict[str, Tensor] = {}
        for phase in args.phases:
            steps = args.steps or PHASES[phase][1]
            found: dict[str, dict[str, Any]] = {"losses": {}, "codecs": {}}
            for name, codecs in {"exact": {}, **cases}.items():
                engine = engine_for(args, seed, phase, codecs)
                if phase == "tune" and begin:
                    start_from(engine, begin)
                start_s = time.perf_counter()
                for step in range(steps):
                    train_step(engine, corpora[phase][0], step, rows=args.rows, seq_len=SEQ_LEN, seed=seed)
                found["codecs"][name] = in_codecs(engine, time.perf_counter() - start_s)
                found["losses"][name] = loss_on(engine, corpora[phase][1], EVALUATED, seq_len=SEQ_LEN)
                if phase == "scratch" and name == "exact":
                    begin = {key: value.clone() for key, value in engine.module.state_dict().items()}
                engine.destroy()
            params = {name: getattr(args, name) for name in ("layout", "dtype", "hidden", "zero_stage", "layers")}
            job.record({**params, "seed": seed, "phase": phase, "steps": steps}, **found)
            job.say(f"seed {seed}, {phase}: done")
    job.end()


def in_codecs(engine: Any, seconds: float) -> dict[str, float]:
    """Ratios of the first layer's experts, and the share of `seconds` that this rank has spent in codecs."""
    layers = [layer["codecs"] for layer in ds_hybridep.stats(engine)["layers"]]
    spent = sum(one.get("encode_s", 0.0) + one.get("decode_s", 0.0) for one in layers)
    return {"share": spent / seconds, **{key: layers[0][key] for key in RATIOS if key in layers[0]}}


def report(records: list[Record], args: argparse.Namespace) -> str:
    """Mean gap to the exact runs, and its one-sided upper 95% bound over the seeds."""
    gaps: dict[tuple[Any, ...], list[float]] = {}
    codecs: dict[tuple[Any, ...], dict[str, float]] = {}
    for record in records:
        about = tuple(record["params"].get(name, "") for name in ("layout", "dtype", "hidden", "phase", "steps"))
        for name, loss in record["losses"].items():
            if name != "exact":
                gaps.setdefault((*about, name), []).append(loss / record["losses"]["exact"] - 1)
                codecs.setdefault((*about, name), record.get("codecs", {}).get(name, {}))
    rows = []
    for key, found in gaps.items():
        ratios = [f"{codecs[key][name]:.1f}x" if name in codecs[key] else "" for name in RATIOS]
        share = f"{codecs[key]['share']:.1%}" if "share" in codecs[key] else ""
        upper = upper_95(found)
        bound = "" if math.isinf(upper) else f"{upper:+.3%}"
        rows.append([*key, *ratios, share, len(found), f"{statistics.fmean(found):+.3%}", bound])
    if getattr(args, "plot", None) is not None:
        plot(gaps, args.plot)
    header = ("layout", "dtype", "hidden", "phase", "steps", "codecs", "weights", "gradients", "share of a step")
    return table((*header, "seeds", "mean gap", "upper 95% bound"), rows)


PANELS = {"scratch": "from scratch, {} steps", "tune": "fine-tuning, {} steps"}


def plot(gaps: Mapping[tuple[Any, ...], list[float]], path: Path) -> None:
    """The gap of each seed, their mean and its 95% interval, for both phases.  gaps: by what `report` lists."""
    about = sorted({(dtype, hidden, codecs) for _, dtype, hidden, _, _, codecs in gaps})
    steps_of = {phase: steps for _, _, _, phase, steps, _ in gaps}
    figure, axes = new_figure(1, 2, figsize=(11, 1.5 + 0.55 * len(about)), sharey=True)
    for axis, (phase, title) in zip(axes, PANELS.items(), strict=True):
        for place, key in enumerate(about):
            of_case = {(*case[1:3], case[5]): found for case, found in gaps.items() if case[3] == phase}
            percent, color = [100 * gap for gap in of_case[key]], OKABE_ITO[place % len(OKABE_ITO)]
            mean, margin = statistics.fmean(percent), margin_95(percent)
            axis.errorbar(mean, place, xerr=margin, fmt="o", color=color, capsize=4, linewidth=2)
            axis.plot(percent, [place + 0.25] * len(percent), "|", color=color, alpha=0.7)
        axis.axvline(0, color="gray", linewidth=0.8)
        axis.set(title=title.format(steps_of[phase]), xlabel="held-out loss over the exact run's, %")
    axes[0].set_yticks(range(len(about)), [label_of(*key) for key in about])
    axes[0].set_ylim(len(about) - 0.4, -0.6)
    seeds = sorted({len(found) for found in gaps.values()})
    save_figure(
        figure, path,
        f"4 CPU ranks, 2 layers, domains over both datacentres, encoded, paired with exact runs of the same seed "
        f"({' or '.join(map(str, seeds))} seeds).\nDot and bar: mean and its 95% interval; strokes: seeds. Each panel "
        "has a scale of its own.",
    )  # fmt: skip


def label_of(dtype: str, hidden: int, codecs: str) -> str:
    """A case in words.  codecs: "recommended", or settings of a level as JSON."""
    if codecs == "recommended":
        return f"{dtype}, hidden {hidden}, recommended"
    return f"{dtype}, hidden {hidden}, ratio {json.loads(codecs)['gradient_codec']['ratio']}"
