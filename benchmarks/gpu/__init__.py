# SPDX-License-Identifier: Apache-2.0
"""What to run first on a machine with a GPU: half an hour without a network, and one page.

    make gpu               # or `python -m benchmarks gpu`; writes runs/gpu/report.md.  Please send it back.
    make gpu PRETEND=1     # the same on a CPU with small sizes, to try this program itself

Each phase is a program of its own with a limit of time, and leaves a result line and a section of the page.  One that
fails, or takes too long, costs no other.  The exit status is 1 if any has failed.  Needed are torch, DeepSpeed, this
checkout, and to build kernels a C++ compiler, ninja and the CUDA toolkit; with several GPUs, ds_hybridep installed.
"""

import argparse
import datetime
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.common import REPOSITORY, commit, new_folder, table
from benchmarks.gpu.toolkit import cuda_home

TAIL_LINES = 40
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
NOT_RUN = "not run"


@dataclass
class Phase:
    """A program, and how it went."""

    name: str
    about: str
    module: str  # and its options
    limit_s: int
    needs_kernels: bool = True
    result: str = NOT_RUN  # later "passed", "failed" or "skipped", a colon, and its last line or the reason
    seconds: float = 0.0
    output: str = ""
    errors: str = ""

    @property
    def has_failed(self) -> bool:
        return not self.result.startswith(("passed", "skipped"))


def phases_of(num_gpus: int) -> list[Phase]:
    """All phases, in order: half an hour for one GPU, and the last one for several."""
    phases = [
        Phase("machine", "what the machine is", "machine", 60, needs_kernels=False),
        Phase("build", "kernels compiled", "build", 300, needs_kernels=False),
        Phase("definitions", "each kernel beside its definition", "definitions", 240),
        Phase("kernels", "each kernel beside a copy, torch and Triton", "kernels", 300),
        Phase("training", "two ranks on one GPU beside CPUs", "two_ranks", 420, needs_kernels=False),
        Phase("encoding", "codecs beside computing", "encoding", 180),
        Phase("sanitizers", "bad addresses and races", "sanitizers", 240),
    ]
    if num_gpus > 1:
        phases.append(Phase("nccl", "all GPUs over NCCL", "nccl", 900, needs_kernels=False))
    return phases


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [phase.name for phase in phases_of(2)]
    parser.add_argument(
        "--pretend", action="store_true", help="on a CPU, with small sizes, to try this program itself"
    )
    parser.add_argument("--only", nargs="+", choices=names, metavar="PHASE", help=f"of {', '.join(names)}")
    parser.add_argument("--out", type=Path, help="for the page and the logs; default: a folder in runs")


def run(args: argparse.Namespace) -> int:
    usual = REPOSITORY / "runs" / "-".join(["gpu", *(args.only or [])])  # a whole page stays beside one of some phases
    out = new_folder((args.out or usual).absolute())
    num_gpus = 2 if args.pretend else torch.cuda.device_count()
    phases = [phase for phase in phases_of(num_gpus) if args.only is None or phase.name in args.only]
    print(f"At most {sum(phase.limit_s for phase in phases) / 60:.0f} minutes.", flush=True)
    has_kernels = True
    for at, phase in enumerate(phases):
        print(f"[{at + 1}/{len(phases)}] {phase.name}: {phase.about} ...", flush=True)
        if num_gpus == 0 and phase.name != "machine":
            phase.result = "skipped: torch finds no CUDA device"
        elif phase.needs_kernels and not has_kernels:
            phase.result = "skipped: the kernels were not built"
        else:
            execute(phase, command_of(phase, out, args.pretend, has_kernels), out, environment_of(args.pretend))
        if phase.name == "build":
            has_kernels = not phase.has_failed
        print(f"    {phase.result}, {phase.seconds:.0f} s", flush=True)
        (out / "report.md").write_text(page_of(phases, num_gpus, args.pretend))
    print(f"The page to send back: {out / 'report.md'}")
    return int(any(phase.has_failed for phase in phases))


# ---- one phase ----


def command_of(phase: Phase, out: Path, pretends: bool, has_kernels: bool) -> list[str]:
    """The program of a phase; what it keeps lies in a folder of its name."""
    start = [sys.executable, "-m", f"benchmarks.gpu.{phase.module}"]
    if phase.module == "kernels":  # a program that one can also run by itself
        start = [sys.executable, "-m", "benchmarks", "kernels"]
    options = {
        "kernels": ["--out", str(out / "kernels.jsonl")],
        "encoding": ["--out", str(out / "encoding.jsonl")],
        "two_ranks": ["--out", str(out / "two_ranks"), *([] if has_kernels else ["--reference-kernels"])],
        "nccl": ["--out", str(out / "nccl")],
    }
    return [*start, *options.get(phase.module, []), *(["--pretend"] if pretends else [])]


def environment_of(pretends: bool) -> dict[str, str]:
    """What phases find set: the device, threads that leave room for several processes, and no network."""
    found = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    found.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // 4, 1)))
    # A build that was killed leaves a lock in the folder that all checkouts share.
    found.setdefault("TORCH_EXTENSIONS_DIR", str(REPOSITORY / ".cache" / "torch_extensions"))
    if (home := cuda_home()) is not None:
        found["CUDA_HOME"] = str(home)
    if pretends:
        return found | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return found | {"DS_ACCELERATOR": "cuda"}


def execute(phase: Phase, command: Sequence[str], out: Path, environment: Mapping[str, str]) -> None:
    """Run the program of a phase, and judge it.  What it has started ends with it."""
    begin_s, paths = time.monotonic(), [out / f"{phase.name}.{end}" for end in ("md", "log")]
    with paths[0].open("wb") as output, paths[1].open("wb") as errors:
        try:
            process = subprocess.Popen(
                command, cwd=REPOSITORY, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=errors,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            phase.result = f"failed: {error}"
            return
        try:
            status: int | None = process.wait(phase.limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    phase.seconds = time.monotonic() - begin_s
    phase.output, phase.errors = (cleaned(path.read_text(errors="replace")) for path in paths)
    phase.result = result_of(phase, status)


def result_of(phase: Phase, status: int | None) -> str:
    """The result line, from the exit status, None where time was up, and the last line of the output."""
    last = (phase.output.split("\n") or [""])[-1]
    if status is None:
        return f"failed: not done after {phase.limit_s} s"
    if status == 0:
        return last if last.startswith("skipped") else f"passed: {last}"
    return f"failed: {last or f'exit status {status}'}"


def cleaned(text: str) -> str:
    """Without colours, and without the folders of this machine."""
    text = COLOURS.sub("", text).replace(str(REPOSITORY), ".").replace(str(Path.home()), "~").strip()
    return "\n".join(line.rpartition("\r")[2].rstrip() for line in text.replace("\r\n", "\n").splitlines())


# ---- the page ----


def page_of(phases: Sequence[Phase], num_gpus: int, pretends: bool) -> str:
    rows = [
        (phase.name, phase.result, f"{phase.seconds:.0f} s" if phase.seconds else "", f"{phase.limit_s} s")
        for phase in phases
    ]
    device = "a CPU that pretends to be a GPU" if pretends else f"{num_gpus} GPU{'s' * (num_gpus != 1)}"
    now = datetime.datetime.now(datetime.timezone.utc)
    parts = [
        f"# ds_hybridep on {device}",
        f"Commit {commit()}, {now:%Y-%m-%d %H:%M} UTC. Made by `make gpu{' PRETEND=1' if pretends else ''}`.",
        table(("phase", "result", "time", "limit"), rows),
    ]
    for phase in phases:
        if phase.result != NOT_RUN:
            parts += [f"## {phase.name}: {phase.about}", *section_of(phase)]
    return "\n\n".join(parts) + "\n"


def section_of(phase: Phase) -> list[str]:
    """All that a phase has printed; of one that failed, also the end of its errors."""
    found = [phase.output or f"{phase.result}."]
    if phase.output.count("````") % 2:  # it was cut off inside of a listing
        found[0] += "\n````"
    if phase.has_failed and phase.errors:
        found += [f"**{phase.result}.** The end of its errors:", fenced(phase.errors.splitlines()[-TAIL_LINES:])]
    return found


def fenced(lines: Sequence[str]) -> str:
    return "\n".join(["````", *lines, "````"])
