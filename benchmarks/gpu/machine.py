# SPDX-License-Identifier: Apache-2.0
"""Phase "machine": what the machine is, and whether torch finds its GPU.

python -m benchmarks.gpu.machine [--pretend]
"""

import argparse
import contextlib
import importlib.metadata
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence

import torch

from benchmarks.gpu.toolkit import cuda_home, program
from ds_hybridep.commands import report

LIMIT_S = 20  # of each program
ASKED = "name,driver_version,memory.total,memory.used,utilization.gpu,power.limit,clocks.max.sm,clocks.max.memory"
PROGRAMS = (
    ("nvidia-smi", f"--query-gpu={ASKED}", "--format=csv"), ("nvidia-smi", "topo", "-m"), ("nvcc", "--version"),
    ("compute-sanitizer", "--version"), ("c++", "--version"),
)  # fmt: skip
PACKAGES = ("triton", "ninja", "pytest")  # beside those of `ds_hybridep report`


def said_by(words: Sequence[str]) -> str:
    """What a program prints, or why it did not run."""
    path = program(words[0])
    if path is None:
        return "not found"
    try:
        run = subprocess.run(
            [path, *words[1:]], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=LIMIT_S,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (run.stdout + run.stderr).strip() or f"exit status {run.returncode}"


def facts() -> list[str]:
    """Lines about this machine that no program of others prints."""
    found = io.StringIO()
    with contextlib.redirect_stdout(found):
        report.run(argparse.Namespace())
    lines = found.getvalue().splitlines()
    for package in PACKAGES:
        try:
            lines.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            lines.append(f"{package}: not installed")
    lines.append(f"CUDA of torch: {torch.version.cuda}; toolkit: {cuda_home() or 'none with headers'}")
    lines.append(f"processors: {os.cpu_count()}; free in /dev/shm: {shutil.disk_usage('/dev/shm').free / 1e9:.1f} GB")
    if torch.cuda.is_available():
        lines.append(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
        lines += [str(torch.cuda.get_device_properties(at)) for at in range(torch.cuda.device_count())]
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.machine", description=__doc__)
    parser.add_argument("--pretend", action="store_true", help="do without a GPU")
    args = parser.parse_args(arguments)
    parts = ["\n".join(facts()), *(f"$ {' '.join(words)}\n{said_by(words)}" for words in PROGRAMS)]
    print("````", "\n\n".join(parts), "````", sep="\n")
    if torch.cuda.is_available():
        print(f"\n{torch.cuda.device_count()} x {torch.cuda.get_device_name()}")
        return 0
    print("\ntorch finds no CUDA device" + (", and needs none to pretend" if args.pretend else ""))
    return int(not args.pretend)


if __name__ == "__main__":
    sys.exit(main())
