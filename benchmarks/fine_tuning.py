# SPDX-License-Identifier: Apache-2.0
"""What codecs and local steps cost in fine-tuning: a small Qwen3-MoE that knows Python learns C++, and forgets.

    python -m benchmarks fine-tuning --folder runs --minutes 120 --out benchmarks/results/fine-tuning.jsonl
    python -m benchmarks fine-tuning --report benchmarks/results/fine-tuning.jsonl --plots docs/images

Two datacentres of one rank (no network is emulated: only what arrives matters) train on bytes, with AdamW, in fp32:

1. "first", for each seed: from scratch on the Python files of the packages torch and deepspeed, exactly.
2. "search": for adapters (LoRA of attention and experts) and for full fine-tuning, and for each way, every rate of the
   same grid for a few steps on the C++ headers of torch, with a seed of its own; by the held-out loss of C++.
3. "tune": with each way's best rate, one epoch over `--megabytes` of these headers, for each seed.

Ways: exact and recommended codecs, in one job whose expert-parallel group and domain span both datacentres; and sites
of one rank that make local steps.  Runs of one seed begin with the same weights and see the same windows in the same
order; of sites, each sees what the rank in its place sees.

There are two losses, of held-out files, the same windows each time, without the router's auxiliary loss: that of C++
is what was learned, that of Python what was forgotten.  Each way is compared with exact runs, paired by seed.

Runs take hours, so they continue: a sitting ends after `--minutes`, and the same command goes on with what `--out`
does not have yet, from the checkpoints in `--folder`, which are made every so many steps.
"""

import argparse
import json
import math
import shutil
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from benchmarks.common import OKABE_ITO, Record, Records, margin_95, new_figure, save_figure, table
from benchmarks.equal_bytes import NAMES, Job, run_pair
from benchmarks.rivals import CLIP, schedule
from benchmarks.training import (
    SIZES,
    autoep,
    engine_of,
    header_files,
    python_files,
    qwen3_moe,
    save,
    steps_in,
    texts_of,
    train_lm,
)

__all__ = ["Job", "add_arguments", "rank", "report", "run"]

FIRST, SEARCH, TUNE = "first", "search", "tune"
EXACT = "exact"
WAYS: dict[str, dict[str, Any]] = {  # settings of the slow level, or of sites
    EXACT: {},
    "recommended": {"codecs": "recommended"},
    "sites, H 10, recommended": {"every": 10, "codecs": "recommended"},
}
TRAINED = {"adapters": "attention and experts", "full": ""}  # what has adapters
SEARCH_SEED = 9
SEQ_LEN = SIZES["seq_len"]
EVALUATED = 32  # batches of 4 rows on each rank
KINDS = ("C++", "Python")
SAME = ("hidden", "layers", "rows", "megabytes", "first_steps", "search_steps")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, default=Path("fine-tuning-runs"), help="of checkpoints, to go on from")
    parser.add_argument("--minutes", type=float, default=60.0, help="of this sitting")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--trained", nargs="+", choices=tuple(TRAINED), default=list(TRAINED))
    parser.add_argument("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS))
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-4, 3e-4, 1e-3, 3e-3], help="that are searched")
    parser.add_argument("--megabytes", type=float, default=4.0, help="of C++, read once; there are about 37")
    parser.add_argument("--first-steps", type=int, default=2000)
    parser.add_argument("--search-steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=250, help="steps between two checkpoints")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=4, help="sequences of a rank in a step")
    parser.add_argument("--first-rate", type=float, default=1e-3)
    parser.add_argument("--plots", type=Path, help="folder for the plot of the report")


# ---- the driver ----


def run(args: argparse.Namespace, records: Records) -> None:
    """Run what is missing, one after the other, until the sitting is over."""
    end = time.monotonic() + 60 * args.minutes
    every = records.go_on()
    while time.monotonic() < end and (params := missing(args, every)) is not None:
        name = "-".join(str(params[key]).replace(" ", "") for key in ("phase", "trained", "way", "rate", "seed"))
        folder = args.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        settings = {**params, "folder": str(folder.resolve())}
        answers = run_pair(folder, settings, is_split=params["way"].startswith("sites"), end=end)
        if not answers:
            print(f"{name}: the sitting is over", flush=True)
            break
        losses = {kind: statistics.fmean(answer["losses"][kind] for answer in answers) for kind in KINDS}
        about = {key: answers[0][key] for key in ("steps", "train_bytes", "parameters", "trained_parameters")}
        records.add(params, losses=losses, seconds=sum(one["seconds"] for one in answers) / len(answers), **about)
        for path in folder.glob("checkpoint*"):
            shutil.rmtree(path)
        print(f"{name}: " + ", ".join(f"{kind} {loss:.4f}" for kind, loss in losses.items()), flush=True)


def missing(args: argparse.Namespace, records: Sequence[Record]) -> Record | None:
    """What to run next; None if all is there."""
    same = {name: getattr(args, name) for name in SAME}
    done = [record["params"] for record in records]

    def lacks(**params: Any) -> Record | None:
        return None if {**same, **params} in done else {**same, **params}

    for seed in (SEARCH_SEED, *args.seeds):
        if params := lacks(phase=FIRST, seed=seed, trained="full", way=EXACT, rate=args.first_rate):
            return params
    cases = [(trained, way) for trained in args.trained for way in args.ways]
    for trained, way in cases:
        for rate in args.rates:
            if params := lacks(phase=SEARCH, seed=SEARCH_SEED, trained=trained, way=way, rate=rate):
                return params
    best = best_rates([record for record in records if same.items() <= record["params"].items()])
    for seed in args.seeds:
        for trained, way in cases:
            if params := lacks(phase=TUNE, seed=seed, trained=trained, way=way, rate=best[trained, way]):
                return params
    return None


def best_rates(records: Sequence[Record]) -> dict[tuple[str, str], float]:
    """Of the search, by what is trained and by way."""
    found: dict[tuple[str, str], tuple[float, float]] = {}
    for record in records:
        params = record["params"]
        if params["phase"] == SEARCH:
            case, result = (params["trained"], params["way"]), (record["losses"][KINDS[0]], params["rate"])
            found[case] = min(found.get(case, result), result)
    return {case: rate for case, (_, rate) in found.items()}


# ---- the ranks ----


class Epoch:
    """Windows of a text that do not overlap, each once, in an order of the seed."""

    def __init__(self, corpus: Tensor, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._corpus = corpus
        self._starts = SEQ_LEN * torch.randperm((len(corpus) - 1) // SEQ_LEN, generator=generator)

    def num_steps(self, rows: int) -> int:
        """That all ranks together make of it, `rows` windows each."""
        return len(self._starts) // (len(NAMES) * rows)

    def batch(self, step: int, index: int, rows: int) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of one rank, [rows, SEQ_LEN] each; after the end it begins again."""
        first = (step % self.num_steps(rows) * len(NAMES) + index) * rows
        windows = torch.stack([
            self._corpus[start : start + SEQ_LEN + 1] for start in self._starts[first : first + rows].tolist()
        ]).long()  # fmt: skip
        return windows[:, :-1], windows[:, 1:]


def rank(args: argparse.Namespace, job: Job) -> None:
    settings, begin = job.settings, time.monotonic()
    phase, seed, is_alone = settings["phase"], settings["seed"], settings["way"].startswith("sites")
    texts = {"C++": texts_of(header_files()), "Python": texts_of(python_files())}
    train = texts["Python"][0] if phase == FIRST else texts["C++"][0][: int(1e6 * settings["megabytes"])]
    epoch = Epoch(train, seed)
    steps = {FIRST: args.first_steps, SEARCH: args.search_steps}.get(phase, epoch.num_steps(args.rows))
    engine = engine_for(args, job, steps)
    folder = Path(settings["folder"]) / f"checkpoint-{NAMES[job.index] if is_alone else 'both'}"
    if steps_in(folder):
        engine.load_checkpoint(str(folder))
    while engine.global_steps < steps:
        loss, aux_loss = engine(*epoch.batch(engine.global_steps, job.index, args.rows))
        engine.backward(loss + train_lm.AUX_LOSS_WEIGHT * aux_loss)
        engine.step()
        if engine.global_steps % args.every == 0 and engine.global_steps < steps:
            save(engine, folder)
    if phase == FIRST and job.index == 0:
        torch.save(engine.module.state_dict(), weights_of(args, seed))
    answer = {
        "losses": {kind: loss_on(engine, held_out, job.index) for kind, (_, held_out) in texts.items()},
        "steps": steps, "train_bytes": len(train), "seconds": time.monotonic() - begin,
        "parameters": num_parameters(args), "trained_parameters": sum(
            parameter.numel() for parameter in qwen3_moe(sized(args), TRAINED[settings["trained"]]).parameters()
            if parameter.requires_grad
        ),
    }  # fmt: skip
    (job.folder / f"{NAMES[job.index]}.json").write_text(json.dumps(answer))
    torch.distributed.barrier()


def weights_of(args: argparse.Namespace, seed: int) -> Path:
    """Where the result of the first training is."""
    return Path(args.folder.resolve()) / f"first-{seed}-{'-'.join(str(getattr(args, name)) for name in SAME)}.pt"


def sized(args: argparse.Namespace) -> argparse.Namespace:
    return argparse.Namespace(hidden=args.hidden, layers=args.layers, experts=SIZES["experts"], top_k=SIZES["top_k"])


def num_parameters(args: argparse.Namespace) -> int:
    return sum(parameter.numel() for parameter in qwen3_moe(sized(args)).parameters())


def engine_for(args: argparse.Namespace, job: Job, steps: int) -> Any:
    """The engine of a phase and a way; both ranks of the first training have the whole model, for its weights."""
    settings = job.settings
    way, seed, rate = settings["way"], settings["seed"], settings["rate"]
    torch.manual_seed(seed)
    weights = None if settings["phase"] == FIRST else torch.load(weights_of(args, seed))
    model = qwen3_moe(sized(args), TRAINED[settings["trained"]], weights)
    advanced, is_site = {"verify_interval": 0}, way.startswith("sites")
    block: dict[str, Any] | None = None
    if is_site:
        point = {"meeting_point": f"127.0.0.1:{settings['meeting_port']}", "secret_file": str(job.folder / "secret")}
        block = {"sites": {"names": list(NAMES), **point, **WAYS[way]}, "advanced": advanced, "timeout_s": 60}
    elif settings["phase"] != FIRST:
        level = {"name": "dc", "size": len(NAMES), "domain_size": len(NAMES), **WAYS[way]}
        block = {"levels": [level], "advanced": advanced}
    more = {} if block is None else autoep(1 if is_site else len(NAMES))
    scheduler = {"type": "WarmupDecayLR", "params": schedule(rate, steps)}
    return engine_of(model, block, rate=rate, gradient_clipping=CLIP, scheduler=scheduler, **more)


@torch.no_grad()
def loss_on(engine: Any, corpus: Tensor, index: int) -> float:
    """Of this rank's windows; both ranks evaluate at the same time."""
    engine.eval()
    losses = [
        engine(*train_lm.batch_at(corpus, (977, at, 0, index), rows=4, seq_len=SEQ_LEN))[0].item()
        for at in range(EVALUATED)
    ]
    engine.train()
    return statistics.fmean(losses)


# ---- the report ----


def report(records: list[Record], args: argparse.Namespace) -> str:
    """For each model: the search, and the gaps of both losses to exact runs, with their 95% intervals."""
    texts = []
    for model in sorted({tuple(record["params"][name] for name in SAME) for record in records}):
        found = [record for record in records if tuple(record["params"][name] for name in SAME) == model]
        first, about = found[0], dict(zip(SAME, model, strict=True))
        hours = sum(record["seconds"] for record in found) / 3600
        texts.append(
            f"{first['parameters'] / 1e6:.2f} million parameters: hidden {about['hidden']}, {about['layers']} layers; "
            f"{2 * about['rows'] * SEQ_LEN} tokens a step; {about['first_steps']} steps of Python, then "
            f"{about['megabytes']:g} MB of C++ once; {hours:.1f} hours\n"
        )
        texts.append(f"Search with seed {SEARCH_SEED}, {about['search_steps']} steps; loss of C++:\n")
        texts.append(search_table(found) + "\n")
        if any(record["params"]["phase"] == TUNE for record in found):
            texts.append(
                "After the epoch; gaps to exact runs of the same seed, in % of their loss, with 95% intervals:\n"
            )
            texts.append(gap_table(found) + "\n")
            if args.plots:
                plot(found, args.plots / f"fine-tuning-{about['hidden']}x{about['layers']}.svg")
    return "\n".join(texts)


def search_table(records: Sequence[Record]) -> str:
    searched = [record for record in records if record["params"]["phase"] == SEARCH]
    rates = sorted({record["params"]["rate"] for record in searched})
    losses = {
        tuple(record["params"][name] for name in ("trained", "way", "rate")): record["losses"][KINDS[0]]
        for record in searched
    }
    rows = []
    for case, best in best_rates(records).items():
        cells = [f"{losses[(*case, rate)]:.4f}" if (*case, rate) in losses else "" for rate in rates]
        rows.append([*case, *cells, f"{best:g}{', an end of the grid' if best in (rates[0], rates[-1]) else ''}"])
    return table(["trained", "way", *(f"{rate:g}" for rate in rates), "best"], rows)


Runs = dict[tuple[str, str], dict[int, Record]]  # by what is trained, way and seed


def tuned(records: Sequence[Record]) -> Runs:
    found: Runs = {}
    for record in records:
        params = record["params"]
        if params["phase"] == TUNE:
            found.setdefault((params["trained"], params["way"]), {})[params["seed"]] = record
    return found


def gaps_of(runs: Runs, case: tuple[str, str], kind: str) -> dict[int, float]:
    """By seed, in percent."""
    exact = runs.get((case[0], EXACT), {})
    return {
        seed: 100 * (record["losses"][kind] / exact[seed]["losses"][kind] - 1)
        for seed, record in runs[case].items() if seed in exact
    }  # fmt: skip


def gap_table(records: Sequence[Record]) -> str:
    runs = tuned(records)
    before = {record["params"]["seed"]: record["losses"] for record in records if record["params"]["phase"] == FIRST}
    rows = []
    for case, found in runs.items():
        cells: list[str] = []
        for kind in KINDS:
            start = statistics.fmean(before[seed][kind] for seed in found)
            end = statistics.fmean(record["losses"][kind] for record in found.values())
            gaps = list(gaps_of(runs, case, kind).values())
            said = "" if case[1] == EXACT or not gaps else f"{statistics.fmean(gaps):+.2f}"
            margin = f" ± {margin_95(gaps):.2f}" if said and not math.isinf(margin_95(gaps)) else ""
            cells += [f"{start:.4f} to {end:.4f}", said + margin]
        rate = next(iter(found.values()))["params"]["rate"]
        rows.append([*case, f"{rate:g}", len(found), *cells])
    return table(["trained", "way", "rate", "seeds", "C++", "gap, %", "Python", "gap, %"], rows)


def plot(records: Sequence[Record], path: Path) -> None:
    """The gap of each seed, their mean and its 95% interval, for both kinds of text."""
    runs = tuned(records)
    cases = [case for case in runs if case[1] != EXACT]
    figure, axes = new_figure(1, 2, figsize=(11, 1.5 + 0.55 * len(cases)), sharey=True)
    for axis, kind, title in zip(axes, KINDS, ("learned: C++", "forgotten: Python"), strict=True):
        for place, case in enumerate(cases):
            gaps, color = list(gaps_of(runs, case, kind).values()), OKABE_ITO[place % len(OKABE_ITO)]
            margin = margin_95(gaps)
            mean = statistics.fmean(gaps)
            axis.errorbar(mean, place, xerr=None if math.isinf(margin) else margin, fmt="o", color=color, capsize=4)
            axis.plot(gaps, [place + 0.25] * len(gaps), "|", color=color, alpha=0.7)
        axis.axvline(0, color="gray", linewidth=0.8)
        axis.set(title=title, xlabel="held-out loss over the exact run's, %")
    axes[0].set_yticks(range(len(cases)), [", ".join(case) for case in cases])
    axes[0].set_ylim(len(cases) - 0.4, -0.6)
    caption = "Dot and bar: mean and its 95% interval; strokes: seeds. Rates were searched for each way."
    save_figure(figure, path, caption)
