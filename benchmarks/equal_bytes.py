# SPDX-License-Identifier: Apache-2.0
"""Loss against the bytes that cross: ours beside PowerSGD, DeMo and DiLoCo, paired by seed.

    python -m benchmarks equal-bytes --out benchmarks/results/equal-bytes.jsonl

Two datacentres of one rank, each with the whole model of examples/train_lm.py.  Weights at the start, batches and the
schedule of the learning rate are the same for all; the optimizer is AdamW, but for DeMo, which is one itself.  From
scratch and fine-tuning as in benchmarks/losses.py.  The loss is that of held-out text, the mean over both ranks.

Bytes are those that a rank sends to the other one, a step.  DeMo's amplitudes and indices count
two bytes each.
"""

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

import ds_hybridep
from benchmarks import training
from benchmarks.codecs import balanced, low_rank
from benchmarks.common import (
    JOB_FOLDER,
    OKABE_ITO,
    REPOSITORY,
    Record,
    Records,
    free_port,
    margin_95,
    new_figure,
    plain_numbers,
    save_figure,
    table,
    upper_95,
)
from benchmarks.losses import EVALUATED, PHASES, SEQ_LEN
from benchmarks.rivals import (
    CLIP,
    POWER_SGD_START,
    Sent,
    Train,
    schedule,
    with_demo,
    with_diloco,
    with_power_sgd,
    with_torchft,
)
from benchmarks.training import byte_model, engine_of, header_files, texts_of, train_lm
from ds_hybridep.lab.launcher import rank_environment

NAMES = ("a", "b")  # of sites
ROWS = 4  # sequences per rank and step
RUN_LIMIT_S = 1200.0


def by_ratio(ratio: int) -> dict[str, Any]:
    weight, gradient = low_rank(ratio=ratio), balanced(ratio=ratio)
    return {
        "weight_codec": weight, "gradient_codec": gradient,
        "dense_weight_codec": weight, "dense_gradient_codec": gradient,
    }  # fmt: skip


EXACT = "exact"
CASES: dict[str, dict[str, Any]] = {
    EXACT: {"levels": {}},
    "ours, ratio 25": {"levels": by_ratio(25)},
    "ours, recommended": {"levels": {"codecs": "recommended"}},
    "ours, ratio 100": {"levels": by_ratio(100)},
    "ours, sites, H 30": {"sites": {"every": 30}},
    **{
        f"ours, sites, H {every}, recommended": {"sites": {"every": every, "codecs": "recommended"}}
        for every in (10, 30, 100)
    },
    **{f"DiLoCo, H {every}": {"diloco": every} for every in (10, 30, 100)},
    **{f"DiLoCo of torchft, H {every}": {"torchft": every} for every in (10, 30)},
    **{f"PowerSGD, rank {rank}": {"power_sgd": rank} for rank in (1, 4)},
    **{f"DeMo, {count} of 4096": {"demo": count} for count in (8, 32)},
}
# DeMo needs a learning rate of its own: the best of 3e-4, 1e-3, 3e-3, 1e-2 and of 3e-5, 1e-4, 3e-4 with seed 9.
DEMO_RATES = {"scratch": 3e-3, "tune": 3e-4}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--phases", nargs="+", choices=tuple(PHASES), default=list(PHASES))
    parser.add_argument("--cases", nargs="+", choices=tuple(CASES), default=list(CASES), metavar="NAME")
    parser.add_argument("--steps", type=int, help="of each phase; by default its own")
    parser.add_argument("--demo-rate", type=float, help="learning rate of DeMo; by default what was found best")
    parser.add_argument("--plot", type=Path, help="with --report: an SVG file of the losses")


# ---- the driver ----


def run(args: argparse.Namespace, records: Records) -> None:
    if args.phases[0] != "scratch":
        print(
            "--phases: tuning begins from what the exact run of scratch has come to; name scratch first",
            file=sys.stderr,
        )
        raise SystemExit(2)
    cases = [EXACT, *(name for name in args.cases if name != EXACT)]
    if find_spec("torchft") is None and any("torchft" in CASES[name] for name in cases):
        print("torchft is not installed: its DiLoCo is left out")
        cases = [name for name in cases if "torchft" not in CASES[name]]
    with tempfile.TemporaryDirectory() as scratch:
        for seed in args.seeds:
            begin = Path(scratch) / f"begin-{seed}.pt"
            for phase in args.phases:
                for name in cases:
                    settings = {"case": name, "seed": seed, "phase": phase, "begin": str(begin)}
                    folder = Path(scratch) / f"{seed}-{phase}-{cases.index(name)}"
                    folder.mkdir()
                    begin_s = time.monotonic()
                    answers = run_pair(folder, settings, is_split="sites" in CASES[name])
                    params = {"case": name, "seed": seed, "phase": phase, "steps": steps_of(args, phase)}
                    if "demo" in CASES[name]:
                        params["rate"] = args.demo_rate or DEMO_RATES[phase]
                    loss = statistics.fmean(answer["loss"] for answer in answers)
                    sent = statistics.fmean(answer["bytes_per_step"] for answer in answers)
                    records.add(params, loss=loss, bytes_per_step=sent)
                    print(f"seed {seed}, {phase}, {name}: {loss:.4f}, {time.monotonic() - begin_s:.0f} s", flush=True)


def steps_of(args: argparse.Namespace, phase: str) -> int:
    return int(args.steps or PHASES[phase][1])


def run_pair(folder: Path, settings: Record, *, is_split: bool, end: float | None = None) -> list[Record]:
    """Run both ranks, as one job or as two sites; ends the program with status 1 if one fails.

    end: when both are killed, by time.monotonic(); then nothing is returned.
    """
    meeting_port, port = free_port(), free_port()
    (folder / "settings.json").write_text(json.dumps({**settings, "meeting_port": meeting_port}))
    with ExitStack() as stack:

        def start(name: str, line: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
            log = stack.enter_context((folder / f"{name}.log").open("wb"))
            process = subprocess.Popen(
                [sys.executable, *line], env={**os.environ, **environment}, stdout=log, stderr=log
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        if is_split:
            secret = folder / "secret"
            secret.write_text(os.urandom(16).hex())
            meet = ["meet", "--host", "127.0.0.1", "--port", str(meeting_port), "--secret-file", str(secret)]
            start("meeting", ["-m", "ds_hybridep.commands.main", *meet], {})
        ranks = []
        for index, name in enumerate(NAMES):
            place = (0, 1) if is_split else (index, 2)
            own_port = free_port() if is_split else port
            environment = rank_environment(*place, "127.0.0.1", "lo", port=own_port) | {JOB_FOLDER: str(folder)}
            path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
            environment |= {"HYBRIDEP_SITE": name, "PYTHONPATH": path, "SITE_INDEX": str(index)}
            ranks.append(start(name, ["-m", "benchmarks", *sys.argv[1:]], environment))
        limit = time.monotonic() + RUN_LIMIT_S if end is None else end
        for process in ranks:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(limit - time.monotonic(), 1.0))
            if process.returncode is None and end is not None:
                return []
            if process.returncode != 0:  # None: out of time
                for log in sorted(folder.glob("*.log")):
                    print(f"{log.name}:\n{log.read_text(errors='replace')[-3000:]}", file=sys.stderr)
                raise SystemExit(1)
    return [json.loads((folder / f"{name}.json").read_text()) for name in NAMES]


# ---- the ranks ----


class Job:
    """One rank, of a job over both datacentres or alone in its site."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.index = folder, int(os.environ["SITE_INDEX"])
        self.settings = json.loads((folder / "settings.json").read_text())
        torch.set_num_threads(1)
        training.join()


def rank(args: argparse.Namespace, job: Job) -> None:
    case, seed, phase = CASES[job.settings["case"]], job.settings["seed"], job.settings["phase"]
    begin, steps = Path(job.settings["begin"]), steps_of(args, phase)
    torch.manual_seed(seed)
    model = byte_model(hidden=64, layers=2, ep_size=1)
    if phase == "tune":
        model.load_state_dict(torch.load(begin))
    rate = PHASES[phase][0]
    if "demo" in case:
        rate = args.demo_rate or DEMO_RATES[phase]
    way = next(iter(case))
    train, sent = RIVALS[way](model, case[way], rate, steps) if way in RIVALS else ours(model, case, rate, steps, job)
    if phase == "scratch":
        train_corpus, valid_corpus = train_lm.read_corpus()
    else:
        train_corpus, valid_corpus = texts_of(header_files("ATen"))
    counted_from = min(POWER_SGD_START, steps - 1)
    before = 0.0
    for step in range(steps):
        if step == counted_from:
            before = sent()
        train(*train_lm.batch_at(train_corpus, (seed, step, 0, job.index), rows=ROWS, seq_len=SEQ_LEN))
    answer = {
        "loss": loss_on(model, valid_corpus, job.index),
        "bytes_per_step": (sent() - before) / (steps - counted_from),
    }
    if job.settings["case"] == EXACT and phase == "scratch" and job.index == 0:
        torch.save(model.state_dict(), begin)
    (job.folder / f"{NAMES[job.index]}.json").write_text(json.dumps(answer))
    torch.distributed.barrier()


@torch.no_grad()
def loss_on(model: nn.Module, corpus: Tensor, index: int) -> float:
    model.eval()
    losses = [
        model(*train_lm.batch_at(corpus, (977, at, 0, index), rows=4, seq_len=SEQ_LEN))[0].item()
        for at in range(EVALUATED)
    ]
    return statistics.fmean(losses)


def ours(model: nn.Module, case: Record, rate: float, steps: int, job: Job) -> tuple[Train, Sent]:
    """Ours: one job whose two ranks are datacentres, or a site."""
    advanced = {"verify_interval": 0}
    if "levels" in case:
        level = {"name": "dc", "size": 2, "domain_size": 1, **case["levels"]}
        block: dict[str, Any] = {"levels": [level], "advanced": advanced}
    else:
        point = {
            "meeting_point": f"127.0.0.1:{job.settings['meeting_port']}",
            "secret_file": str(job.folder / "secret"),
        }
        block = {"sites": {"names": list(NAMES), **point, **case["sites"]}, "advanced": advanced, "timeout_s": 60}
    scheduler = {"type": "WarmupDecayLR", "params": schedule(rate, steps)}
    engine = engine_of(model, block, rate=rate, gradient_clipping=CLIP, scheduler=scheduler)

    def train(tokens: Tensor, targets: Tensor) -> None:
        loss, aux_loss = engine(tokens, targets)
        engine.backward(loss + train_lm.AUX_LOSS_WEIGHT * aux_loss)
        engine.step()

    def sent() -> float:
        stats = ds_hybridep.stats(engine)
        if "sites" in case:
            return float(sum(other["sent_bytes"] for other in stats["sites"]["others"].values()))
        return float(sum(count or 0 for count in stats["levels"][0]["sent_bytes"].values()))

    return train, sent


RIVALS = {"power_sgd": with_power_sgd, "diloco": with_diloco, "torchft": with_torchft, "demo": with_demo}


# ---- what is printed ----


def report(records: list[Record], args: argparse.Namespace) -> str:
    """Markdown: bytes, and the mean gap to exact runs with its one-sided upper 95% bound over the seeds."""
    found = gaps_of(records)
    rows = []
    for phase in PHASES:
        for name in CASES:
            if (phase, name) in found and name != EXACT:
                sent, ratio, gaps = found[phase, name]
                mean, upper = statistics.fmean(gaps), upper_95(gaps)
                bound = "" if math.isinf(upper) else f"{upper:+.2%}"
                rows.append((phase, name, f"{sent / 1e3:.1f}", f"{ratio:.0f}", len(gaps), f"{mean:+.2%}", bound))
    if args.plot is not None:
        plot(found, args.plot)
    return table(("phase", "case", "kB a step", "exact over it", "seeds", "mean gap", "upper 95% bound"), rows)


Gaps = dict[tuple[str, str], tuple[float, float, list[float]]]


def gaps_of(records: list[Record]) -> Gaps:
    """By phase and case: bytes per step, how many times less than exact, and the gaps of all seeds.

    A run is compared with the last exact one before it, and replaces an earlier run of its case.
    """
    exact: dict[tuple[str, int], Record] = {}
    runs: dict[tuple[str, str, int], tuple[Record, Record]] = {}
    for one in records:
        phase, name, seed = (one["params"][key] for key in ("phase", "case", "seed"))
        if name == EXACT:
            exact[phase, seed] = one
        runs[phase, name, seed] = one, exact[phase, seed]
    found: Gaps = {}
    for (phase, name, _), (one, other) in runs.items():
        ratio = other["bytes_per_step"] / one["bytes_per_step"]
        gaps = [*found[phase, name][2]] if (phase, name) in found else []
        found[phase, name] = one["bytes_per_step"], ratio, [*gaps, one["loss"] / other["loss"] - 1]
    return found


FAMILIES = {  # names of cases -> label
    r"ours, r.*": "ours, every step",
    r"ours, sites, H \d+, recommended": "ours, local steps, encoded",
    r"PowerSGD.*": "PowerSGD",
    r"DeMo.*": "DeMo",
    r"DiLoCo, .*": "DiLoCo",
}


def plot(found: Gaps, path: Path) -> None:
    """Loss over exact against bytes, for both phases."""
    figure, axes = new_figure(1, 2, figsize=(11, 4.6))
    for axis, (phase, title) in zip(axes, (("scratch", "from scratch"), ("tune", "fine-tuning")), strict=True):
        for (pattern, label), color in zip(FAMILIES.items(), OKABE_ITO, strict=True):
            points = sorted(
                (sent / 1e3, 100 * statistics.fmean(gaps), 100 * margin_95(gaps))
                for (of, name), (sent, _, gaps) in found.items()
                if of == phase and re.fullmatch(pattern, name)
            )
            if points:
                sent_kb, means, margins = zip(*points, strict=True)
                style = {"marker": "o", "markersize": 4, "capsize": 3, "linewidth": 1.5}
                axis.errorbar(sent_kb, means, yerr=margins, color=color, label=label, **style)
        axis.axhline(0, color="gray", linewidth=0.8)
        axis.set(xscale="log", xlabel="kB that a rank sends per step", title=title)
        plain_numbers(axis)
        axis.set_xticks((1, 10, 100))
    axes[0].set_ylabel("loss over exact, %")
    axes[1].legend(frameon=False)
    save_figure(
        figure, path,
        "2 datacentres of one CPU rank, 2 layers, hidden 64, fp32, 300 and 150 steps, five seeds; bars: 95% interval "
        "of the mean. Below 0 in fine-tuning: outer steps act as a larger learning rate.",
    )  # fmt: skip
