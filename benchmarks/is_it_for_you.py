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
from ds_hybridep.errors import ConfigError, PlanError
from ds_hybridep.plan.answer import Answer
from ds_hybridep.plan.planner import make_plan
from ds_hybridep.plan.verdict import is_for_you, only_waits

MODELS = ("Qwen3-30B-A3B", "Mixtral-8x7B", "Qwen3-235B-A22B")
TRAININGS = {"full": (), "LoRA, rank 16": ("--lora", "all", "--lora-rank", "16")}
GBPS = (1, 10, 100)
GPUS = (8, 16, 32, 64)  # of each datacentre; the fewest that something fits which computes part of the time
ZERO_STAGES = (1, 2)
BUILDING = (25, 200)  # Gbit/s of the uplink of each machine of eight GPUs
COMMON = (
    "--lan", "3200gbps", "--tokens", "8192", "--accumulation", "4", "--checkpointing",
    "--learning-rate", "1e-5", "--memory", "80",
)  # fmt: skip

PAGE = """\
# Is it for you?

What `ds_hybridep plan` predicts for GPUs of 80 GB, with 3200 Gbit/s between those of a datacentre: 8192 tokens per GPU
and micro-step, 4 micro-steps, checkpointed activations, sequences of 4096, bf16, a learning rate of 1e-5, 396 TFLOPS
per GPU. **Nothing here was measured on GPUs.** For your model, rate and tokens [ask `plan`](planning.md). README has
the first model with 3600 Gbit/s: there one datacentre alone takes 5.7 s.

## Two datacentres

10 ms apart, one way. Each datacentre has the smallest number of GPUs (8, 16, 32 or 64) into which a plan fits that
does not wait nearly all of the time. A cell says, for uplinks of this rate:

- seconds per step, and GB per GPU;
- **how many times as fast as what exists today** (x): first over the fastest that fits into memory, then in brackets
  over ZeRO-3 or FSDP over all GPUs, if it fits; "not for you" where `plan` says so. Compared are ZeRO-3 or FSDP over
  all GPUs and inside each datacentre, ZeRO++, DeepSpeed's expert parallelism inside each datacentre and over both, and
  the best of these on one datacentre alone, with half of the GPUs for the same tokens in a step. The first column has
  its seconds. Where it fits, nothing over two datacentres is more than about twice as fast;
- the plan: domain sizes, codecs, size of the expert-parallel group ([how to read it](planning.md#what-comes-out));
- in brackets what is faster still, and how many times: pipeline stages across datacentres, or local SGD, which is not
  the same training. Neither is provided here.

{table}

## Inside one building

Two machines of eight GPUs, 0.05 ms apart. How many times as fast as the fastest that exists today, one machine alone
included, with codecs and exact, for a network of 25 Gbit/s or 200 Gbit/s per machine. Columns with codecs are also
compared with ZeRO++. Exact columns are not, because ZeRO++ is lossy:

{building}

So 25 Gbit/s for eight GPUs is a slow link too, and full fine-tuning gains much there. Where one machine can hold the
training, as for Qwen3-30B-A3B, two are at most about twice as fast. Where a table says less than 1.1, use
what you have. "LoRA" here means adapters of attention and experts; those of attention alone [gain
nothing](huggingface.md#adapters-lora) over ZeRO-3 or FSDP inside each datacentre.

More tokens in a step (accumulation) make the gain over ZeRO-3 over all GPUs and over one datacentre alone larger, and
the gain over the others smaller ([why](costs.md#traffic)). On CPUs with an unlimited link ours was somewhat slower for
a [small model](../README.md#measured), and up to 38% for [very small
layers](benchmarks.md#what-the-runtime-itself-costs).

Predictions assume that all experts get equally many tokens. Where they do not, [hot experts](hot-experts.md) may
help: see `plan --skew`.

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
    return times(min(theirs) / answer.best.step_s) if theirs else "does not fit"


def over_zero_3(answer: Answer) -> str:
    """The same over ZeRO-3 or FSDP over all GPUs; empty if it does not fit."""
    theirs = [way for way in answer.alternatives if way.name.startswith("FSDP or ZeRO-3, all") and way.is_possible]
    return f" ({times(theirs[0].step_s / answer.best.step_s)} x)" if theirs else ""


def one_alone(answer: Answer) -> str:
    """Seconds of a step on one datacentre without the other; the link does not matter."""
    way = answer.alone
    assert way is not None, "there are two datacentres"
    return f"lacks {way.lacking_bytes / 1e9:.2g} GB of memory" if way.lacking_bytes else f"{way.step_s:.3g} s"


def times(ratio: float) -> str:
    """A ratio in three digits or all before the point."""
    return f"{ratio:,.0f}" if ratio >= 1000 else f"{ratio:.3g}"


def smallest(model: str, training: str) -> tuple[int, int]:
    """The first number of GPUs and ZeRO stage that some plan fits which does not wait nearly all of the time."""
    for gpus, zero_stage in itertools.product(GPUS, ZERO_STAGES):
        with contextlib.suppress(PlanError, ConfigError):  # adapters of experts do not work under ZeRO 2
            if not only_waits(plan_of(model, training, gpus, zero_stage, GBPS[1])):
                return gpus, zero_stage
    raise PlanError(f"{model}, {training}: nothing fits 2 x {GPUS[-1]} GPUs")


def rows() -> Iterator[tuple[str, ...]]:
    """Cells of the table, line by line."""
    for model, training in itertools.product(MODELS, TRAININGS):
        gpus, zero_stage = smallest(model, training)
        cells = [cell(plan_of(model, training, gpus, zero_stage, gbps)) for gbps in GBPS]
        alone = one_alone(plan_of(model, training, gpus, zero_stage, GBPS[0]))
        yield (f"{model}, {training}; 2 x {gpus} GPUs, ZeRO-{zero_stage}<br>one datacentre alone: {alone}", *cells)


def cell(answer: Answer) -> str:
    """Seconds, ratio, memory and name of the best plan, and what beats it."""
    best = answer.best
    faster = [
        f"{way.name.split(',')[0].replace('pipeline across dcs', 'pipeline stages')} {best.step_s / way.step_s:.2f}"
        for way in answer.alternatives
        if not way.lacking_bytes and not way.is_provided and way.step_s < best.step_s * 0.99
    ]
    ratios = f"{over_now(answer)} x{over_zero_3(answer)}{'' if is_for_you(answer) else ', not for you'}"
    figures = f"{best.step_s:.3g} s, {best.memory.total_bytes / 1e9:.0f} GB<br>**{ratios}**"
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
