# SPDX-License-Identifier: Apache-2.0
"""A page that says for well-known models and links what the planner would do, and what beats it.

    python -m benchmarks is-it-for-you

Nothing is measured: every number is the planner's.  It takes about a minute.
"""

import argparse
import contextlib
import itertools
from collections.abc import Iterator
from pathlib import Path

from benchmarks.common import REPOSITORY, table
from ds_hybridep.commands import question
from ds_hybridep.errors import PlanError
from ds_hybridep.plan.answer import Answer
from ds_hybridep.plan.planner import make_plan

MODELS = ("Qwen3-30B-A3B", "Mixtral-8x7B", "gpt-oss-120b")
TRAININGS = {"full": (), "LoRA, rank 16": ("--lora", "all", "--lora-rank", "16")}
GBPS = (1, 10, 100)
GPUS = (8, 16, 32, 64)  # of each datacentre; the fewest that something fits
ZERO_STAGES = (1, 2)
BUILDING = (25, 200)  # Gbit/s of the uplink of each machine of eight GPUs
COMMON = (
    "--lan", "3200gbps", "--tokens", "8192", "--accumulation", "4", "--checkpointing",
    "--learning-rate", "1e-5", "--memory", "80",
)  # fmt: skip

PAGE = """\
# Is it for you?

What `ds_hybridep plan` predicts for GPUs with 80 GB and NVLink: 8192 tokens per GPU and micro-step, 4 micro-steps,
checkpointed activations, sequences of 4096, bf16, a learning rate of 1e-5, 396 TFLOPS per GPU. **Nothing here was
measured on GPUs.**

## Two datacentres

10 ms apart, one way. Each has the fewest GPUs, of 8, 16, 32 ..., that any plan fits.

A cell says, for uplinks of this rate:

- seconds per step; how many times as fast (x) as the fastest that you have now and that fits: ZeRO-3 or FSDP over all
  GPUs or inside each datacentre, ZeRO++, DeepSpeed's expert parallelism inside each or over both; GB per GPU;
- the plan: domain sizes, codecs, size of the expert-parallel group ([how to read it](planning.md#what-comes-out));
- in brackets what is faster still, and how many times: pipeline stages across datacentres, or local SGD, which is not
  the same training. Neither is provided here.

{table}

## Inside one building

Two machines of eight GPUs, 0.05 ms apart. How many times as fast as the fastest that you have now, with codecs and
exact, for a network of 25 Gbit/s or 200 Gbit/s per machine. ZeRO++, which is lossy, counts beside codecs only:

{building}

So 25 Gbit/s for eight GPUs is a slow link too, and full fine-tuning gains much. Where the table says less than 1.1,
use what you have. On CPUs with an unlimited link ours was up to 8% slower for a [small model](../README.md), and up
to 38% for [very small layers](benchmarks.md#what-the-runtime-itself-costs). Predictions assume even routing; where
some experts get most of the rows, [hot experts](hot-experts.md) may help: see `plan --skew`.

Made by `python -m benchmarks is-it-for-you`.
"""


def plan_of(
    model: str, training: str, gpus: int, zero_stage: int, gbps: int, delay: str = "10ms", *more: str
) -> Answer:
    """gpus: of each datacentre.  Raises PlanError where nothing fits."""
    parser = argparse.ArgumentParser()
    question.add_arguments(parser)
    arguments = ["--model", model, "--dcs", f"2x{gpus}", "--wan", f"{gbps}gbps", "--zero-stage", str(zero_stage)]
    arguments += ["--delay", delay, *more]
    return make_plan(question.read_question(parser.parse_args([*arguments, *TRAININGS[training], *COMMON])))


def over_now(answer: Answer) -> str:
    """How many times as fast as the fastest that people have now and that fits."""
    theirs = [way.step_s for way in answer.alternatives if way.is_now and way.is_possible]
    return f"{min(theirs) / answer.best.step_s:.3g}" if theirs else "does not fit"


def smallest(model: str, training: str) -> tuple[int, int]:
    """The first number of GPUs and ZeRO stage that some plan fits."""
    for gpus, zero_stage in itertools.product(GPUS, ZERO_STAGES):
        with contextlib.suppress(PlanError):
            plan_of(model, training, gpus, zero_stage, GBPS[1])
            return gpus, zero_stage
    raise PlanError(f"{model}, {training}: nothing fits 2 x {GPUS[-1]} GPUs")


def rows() -> Iterator[tuple[str, ...]]:
    """Cells of the table, line by line."""
    for model, training in itertools.product(MODELS, TRAININGS):
        gpus, zero_stage = smallest(model, training)
        cells = [cell(plan_of(model, training, gpus, zero_stage, gbps)) for gbps in GBPS]
        yield (f"{model}, {training}; 2 x {gpus} GPUs, ZeRO-{zero_stage}", *cells)


def cell(answer: Answer) -> str:
    """Seconds, ratio, memory and name of the best plan, and what beats it."""
    best = answer.best
    faster = [
        f"{way.name.split(',')[0].replace('pipeline across dcs', 'pipeline stages')} {best.step_s / way.step_s:.2f}"
        for way in answer.alternatives
        if not way.lacking_bytes and not way.is_provided and way.step_s < best.step_s * 0.99
    ]
    figures = f"{best.step_s:.3g} s, {over_now(answer)} x, {best.memory.total_bytes / 1e9:.0f} GB"
    lines = [figures, best.label.replace("|", "/"), *([f"({', '.join(faster)})"] if faster else [])]
    return "<br>".join(lines)


def building_rows() -> Iterator[tuple[str, ...]]:
    """Cells of the table of one building, line by line."""
    for model, training in itertools.product(MODELS[:2], TRAININGS):
        cells = [
            over_now(plan_of(model, training, 8, 1, gbps, "0.05ms", *codecs))
            for gbps in BUILDING
            for codecs in ((), ("--codecs", "exact"))
        ]
        yield (f"{model}, {training}", *cells)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs" / "is-it-for-you.md")


def run(args: argparse.Namespace) -> int:
    header = "training", *(f"{gbps} Gbit/s" for gbps in GBPS)
    kinds = [f"{gbps} Gbit/s, {codecs}" for gbps in BUILDING for codecs in ("codecs", "exact")]
    building = table(("training", *kinds), building_rows())
    args.out.write_text(PAGE.format(table=table(header, rows()), building=building))
    return 0
