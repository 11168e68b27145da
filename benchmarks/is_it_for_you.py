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
from ds_hybridep.plan.planner import Plan, make_plan

MODELS = ("Qwen3-30B-A3B", "Mixtral-8x7B", "gpt-oss-120b", "DeepSeek-V3")
TRAININGS = {"full": (), "LoRA, rank 16": ("--lora-rank", "16")}
GBPS = (1, 10, 100)
GPUS = (8, 16, 32, 64, 128, 256, 512)  # of each datacentre; the fewest that something fits
ZERO_STAGES = (1, 2)
COMMON = (
    "--delay", "10ms", "--lan", "3200gbps", "--tokens", "8192", "--accumulation", "4", "--checkpointing",
    "--learning-rate", "1e-5", "--memory", "80",
)  # fmt: skip

PAGE = """\
# Is it for you?

What `ds_hybridep plan` predicts for two datacentres of GPUs with 80 GB: 10 ms one way, NVLink inside; 8192 tokens per
GPU and micro-step, 4 micro-steps, checkpointed activations, bf16, a learning rate of 1e-5, 396 TFLOPS per GPU.
**Nothing here was measured on GPUs.** Each datacentre has the fewest GPUs, of 8, 16, 32 ..., that any plan fits.

- **Gbit/s**: of the uplink of each datacentre.
- **Plan**: domain sizes over the slow and the fast level, codecs, and the size of the expert-parallel group
  ([how to read it](planning.md#what-comes-out)).
- **Over DeepSpeed**: how many times as fast as the faster of DeepSpeed's layouts that fit: expert parallelism over
  everything, or inside each datacentre with data parallelism across.
- **What beats it**: pipeline stages across datacentres, or local SGD, which is not the same training. Neither is
  provided here.

{table}

Made by `python -m benchmarks is-it-for-you`.
"""


def plan_of(model: str, training: str, gpus: int, zero_stage: int, gbps: int) -> Plan:
    """gpus: of each datacentre.  Raises PlanError where nothing fits."""
    parser = argparse.ArgumentParser()
    question.add_arguments(parser)
    arguments = ["--model", model, "--dcs", f"2x{gpus}", "--wan", f"{gbps}gbps", "--zero-stage", str(zero_stage)]
    return make_plan(question.read_question(parser.parse_args([*arguments, *TRAININGS[training], *COMMON])))


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
        case = f"{model}, {training}; 2 x {gpus} GPUs, ZeRO-{zero_stage}"
        for gbps in GBPS:
            plan = plan_of(model, training, gpus, zero_stage, gbps)
            best, fitting = plan.best, [way for way in plan.alternatives if not way.lacking_bytes]
            theirs = [way.step_s for way in fitting if way.is_by_deepspeed]
            faster = [
                f"{way.name.split(',')[0].removesuffix(' across each dc')} {best.step_s / way.step_s:.2f}"
                for way in fitting
                if not way.is_provided and way.step_s < best.step_s * 0.99
            ]
            ratio = f"{min(theirs) / best.step_s:.3g}" if theirs else "does not fit"
            yield (
                case if gbps == GBPS[0] else "", str(gbps), best.label.replace("|", " / "),
                f"{best.step_s:.3g}", ratio, ", ".join(faster), f"{best.memory.total_bytes / 1e9:.0f}",
            )  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=REPOSITORY / "docs" / "is-it-for-you.md")


def run(args: argparse.Namespace) -> int:
    header = "training", "Gbit/s", "plan", "s/step", "over DeepSpeed", "what beats it, times as fast", "GB/GPU"
    args.out.write_text(PAGE.format(table=table(header, rows())))
    return 0
