# SPDX-License-Identifier: Apache-2.0
"""What to run first on a machine with one GPU or several: checks, tests, kernels, and training over NCCL.

    make gpu               # one page for all: runs/gpu/report.md.  Please send it back.
    make gpu PRETEND=1     # the same on CPUs: gloo in place of NCCL, emulated kernels, no checks of devices

A step that fails is in the page with the end of its output, and the others go on; the exit status is then 1.
"""

import argparse
import datetime
import json
import math
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import REPOSITORY, commit, free_port, new_folder, read_records, table

SCRIPTS = Path(sysconfig.get_path("scripts"))
TAIL_LINES = 40
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
BUILD = "from ds_hybridep.kernels import load_kernels; print(type(load_kernels('compiled', '{device}')).__name__)"
PRETENDED_TESTS = "test_combine_equals_the_reference_bit_for_bit and emulated"
SIZES = {"layers": 4, "hidden": 1024, "seq-len": 512, "steps": 40}
PRETENDED_SIZES = {"layers": 1, "hidden": 32, "seq-len": 32, "steps": 10}
PRETENDED_RANKS = 2
WAYS = {  # name -> (codecs of the block, None without a block; whether in bf16)
    "DeepSpeed, fp32": (None, False),
    "block, exact, fp32": ("exact", False),
    "block, recommended codecs, fp32": ("recommended", False),
    "DeepSpeed, bf16": (None, True),
    "block, recommended codecs, bf16": ("recommended", True),
}


@dataclass
class Step:
    """One program that is run, and how that went."""

    title: str
    command: Sequence[str | Path]
    limit_s: float
    result: str = "not run"  # later "passed", "failed: why" or "skipped: why"
    seconds: float = 0.0
    output: str = ""

    @property
    def name(self) -> str:
        return re.sub(r"\W+", "-", self.title.lower())

    @property
    def has_failed(self) -> bool:
        return self.result.startswith(("failed", "not run"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--pretend", action="store_true", help="on CPUs, to try this program itself")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "runs" / "gpu", help="for the page and the logs")


def run(args: argparse.Namespace) -> int:
    out, num_ranks = new_folder(args.out.absolute()), PRETENDED_RANKS if args.pretend else torch.cuda.device_count()
    steps = steps_of(out, num_ranks, args.pretend)
    for index, step in enumerate(steps):
        print(f"[{index + 1}/{len(steps)}] {step.title}", end=" ", flush=True)
        if step.result == "not run":
            execute(step, out, args.pretend)
            judge(step, out, args.pretend)
        print(f"{step.result}, {step.seconds:.0f} s" if step.seconds else step.result, flush=True)
        (out / "report.md").write_text(page_of(steps, out, num_ranks, args.pretend))
    print(f"The page to send back: {out / 'report.md'}")
    return int(any(step.has_failed for step in steps))


# ---- steps ----


def steps_of(out: Path, num_ranks: int, pretends: bool) -> list[Step]:
    """All steps, in order; those that make no sense here are skipped already."""
    python, device = sys.executable, "cpu" if pretends else "cuda"
    tests = ["-k", PRETENDED_TESTS, "tests/kernels/test_compiled.py"] if pretends else ["-m", "gpu"]
    steps = [
        Step("Versions", [SCRIPTS / "ds_hybridep", "report"], 300),
        Step("ds_report", [SCRIPTS / "ds_report"], 300),
        Step("Driver and links", ["nvidia-smi", "topo", "-m"], 60),
        Step("nvcc", [nvcc(), "--version"], 60),
        Step("Build the kernels", [python, "-c", BUILD.format(device=device)], 1800),
        Step("GPU tests", [python, "-m", "pytest", "-q", "--timeout", "1200", *tests], 7200),
        Step("Kernels", [python, "-m", "benchmarks", "kernels", "--out", out / "kernels.jsonl"], 1800),
        *(Step(f"Train: {way}", training(way, out, num_ranks, pretends), 900) for way in WAYS),
    ]
    for step in steps:
        if pretends and step.title in ("Driver and links", "nvcc"):
            step.result = "skipped: pretending"
        elif num_ranks == 0 and step.title.startswith("Train"):
            step.result = "failed: torch finds no CUDA device"
    return steps


def nvcc() -> Path:
    """torch's nvcc."""
    from torch.utils.cpp_extension import CUDA_HOME

    return Path(CUDA_HOME or "/usr/local/cuda") / "bin" / "nvcc"


def training(way: str, out: Path, num_ranks: int, pretends: bool) -> list[str | Path]:
    """The command of one way to train; writes its ds_config.  All ways start from the same weights."""
    codecs, is_bf16 = WAYS[way]
    config = json.loads((REPOSITORY / "ds_configs" / "plain_ep.json").read_text())
    sizes, name = PRETENDED_SIZES if pretends else SIZES, file_of(way)
    config["optimizer"]["params"]["lr"] = 3e-3 if pretends else 3e-4
    config["train_micro_batch_size_per_gpu"] = 2 if pretends else 16
    if is_bf16:
        config["bf16"] = {"enabled": True}
    if codecs is not None:
        config["hybridep"] = {"levels": levels_of(num_ranks, codecs), "report_interval": sizes["steps"]}
    (out / f"{name}.json").write_text(json.dumps(config, indent=2))
    launch = ["--nproc_per_node", str(max(num_ranks, 1)), "--master_addr", "127.0.0.1"]
    launch += ["--master_port", str(free_port())]
    # As many experts on each rank whatever their number.
    options = {**sizes, "experts": num_ranks * max(1, 16 // max(num_ranks, 1)), "log-interval": 5, "eval-interval": 0}
    return [
        sys.executable, "-m", "torch.distributed.run", *launch,
        REPOSITORY / "examples" / "train_lm.py", "--deepspeed_config", out / f"{name}.json",
        "--json-file", out / f"{name}-result.json", *(f"--{key}={value}" for key, value in options.items()),
    ]  # fmt: skip


def levels_of(num_ranks: int, codecs: str) -> list[dict[str, Any]]:
    """Two halves of the GPUs, as if a slow link were between them, where their number is even."""
    coded = {} if codecs == "exact" else {"codecs": codecs}
    if num_ranks % 2:
        return [{"name": "gpu", "size": num_ranks, **coded}]
    halves = {"name": "half", "size": 2, "domain_size": 2, **coded}
    return [halves, *([{"name": "gpu", "size": num_ranks // 2}] if num_ranks > 2 else [])]


def file_of(way: str) -> str:
    return re.sub(r"\W+", "-", way.lower())


def execute(step: Step, out: Path, pretends: bool) -> None:
    """Run a step's program; its output also goes to a log.  What it has started ends with it."""
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    environment |= {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""} if pretends else {}
    start_s, log = time.monotonic(), out / f"{step.name}.log"
    try:
        with log.open("wb") as file:
            process = subprocess.Popen(
                list(map(str, step.command)), cwd=REPOSITORY, env=environment, stdin=subprocess.DEVNULL,
                stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        try:
            status = process.wait(step.limit_s)
            step.result = "passed" if status == 0 else f"failed: exit status {status}"
        except subprocess.TimeoutExpired:
            step.result = f"failed: not done after {step.limit_s:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    except OSError as error:
        log.write_text(f"{error}\n")
        step.result = f"failed: {error.strerror}"
    step.seconds = time.monotonic() - start_s
    step.output = cleaned(log.read_text(errors="replace"))


def cleaned(text: str) -> str:
    """Without colours, and without the folders of this machine."""
    text = COLOURS.sub("", text).replace(str(REPOSITORY), ".").replace(str(Path.home()), "~")
    return "\n".join(line.rpartition("\r")[2].rstrip() for line in text.replace("\r\n", "\n").splitlines())


def judge(step: Step, out: Path, pretends: bool) -> None:
    """Look into what a program left that ended well."""
    if step.result != "passed":
        return
    if step.title == "Kernels":
        reasons = [record["reason"] for record in read_records([out / "kernels.jsonl"]) if "reason" in record]
        if reasons:
            step.result = f"{'skipped' if pretends else 'failed'}: {reasons[0].splitlines()[0]}"
    elif step.title.startswith("Train") and not all(math.isfinite(loss) for _, loss in result_of(step, out)["losses"]):
        step.result = "failed: a loss is not finite"


def result_of(step: Step, out: Path) -> dict[str, Any]:
    """The record of a training; {} if there is none."""
    path = out / f"{file_of(step.title.partition(': ')[2])}-result.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


# ---- the page ----


def page_of(steps: Sequence[Step], out: Path, num_ranks: int, pretends: bool) -> str:
    rows = [(step.title, step.result, f"{step.seconds:.0f} s" if step.seconds else "") for step in steps]
    device = "CPUs that pretend to be GPUs" if pretends else f"{num_ranks} GPUs"
    now = datetime.datetime.now(datetime.timezone.utc)
    parts = [
        f"# ds_hybridep on {device}",
        f"Commit {commit()}, {now:%Y-%m-%d %H:%M} UTC. Made by `make gpu{' PRETEND=1' if pretends else ''}`.",
        table(("step", "result", "time"), rows),
    ]
    for step in steps:
        if step.title.startswith("Train"):
            continue
        parts += [f"## {step.title}", *section_of(step)]
    parts += ["## Training", *training_parts([step for step in steps if step.title.startswith("Train")], out)]
    return "\n\n".join(parts) + "\n"


def section_of(step: Step) -> list[str]:
    """All that a short program said; of a long one or one that failed, the end."""
    if not step.output:
        return [f"{step.result}."]
    if step.has_failed:
        end = "\n".join(step.output.splitlines()[-TAIL_LINES:])
        return [f"**{step.result}.** The end of its output:", fenced(end)]
    if step.title == "Kernels" and step.result == "passed":
        return [step.output.strip()]  # a table already
    lines = step.output.strip().splitlines()
    return [fenced("\n".join(lines[-3:] if step.title == "GPU tests" else lines))]


def training_parts(steps: Sequence[Step], out: Path) -> list[str]:
    """Losses and times side by side, what the block has counted, and what failed."""
    results = {step.title.partition(": ")[2]: result_of(step, out) for step in steps}
    results = {way: result for way, result in results.items() if result}
    parts = []
    if results:
        by_step = {way: dict(result["losses"]) for way, result in results.items()}
        places = sorted({place for losses in by_step.values() for place in losses})
        rows: list[list[object]] = [[place, *(number(by_step[way].get(place)) for way in results)] for place in places]
        rows.append(["held-out loss", *(number(result["valid_loss"]) for result in results.values())])
        rows.append(["median step", *(f"{result['median_step_s'] * 1e3:.1f} ms" for result in results.values())])
        parts += ["Losses by optimizer step, from the same weights and batches:", table(("step", *results), rows)]
    for step in steps:
        if step.has_failed:
            parts += [f"### {step.title}", *section_of(step)]
        elif said := [line for line in step.output.splitlines() if "hybridep" in line.split("per step")[0]]:
            parts += [f"### {step.title}", fenced("\n".join(dict.fromkeys(said)))]
    return parts


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6f}"


def fenced(text: str) -> str:
    return f"````\n{text}\n````"
