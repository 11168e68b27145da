# SPDX-License-Identifier: Apache-2.0
"""The `report` subcommand: what this machine has of what the kernels need, as ds_report does for DeepSpeed's."""

import argparse
import importlib
import os
import platform
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

TIMEOUT_S = 20
MISSING = "-"

Section = list[tuple[str, str]]  # names and what was found


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `report` to the subcommands of the program."""
    parser = subparsers.add_parser("report", help="print what this machine has: ops, compilers, torch, CUDA, NCCL")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the report.  Returns 0, whatever was found."""
    sections = {"ops": ops(), "compilers": compilers(), "versions": package_versions()}
    width = max(len(name) for rows in sections.values() for name, _ in rows) + 2
    for title, rows in sections.items():
        print(title)
        for name, found in rows:
            print(f"  {name + ' ':.<{width}} {found}")
    return 0


def ops() -> Section:
    """Whether the kernels for each type of device are built, can be built on first use, or why not."""
    builders: Any = importlib.import_module("ds_hybridep.op_builder")
    rows = []
    for device_type in ("cpu", "cuda"):
        builder = builders.HybridEPBuilder(device_type)
        reason = builder.why_not()
        if reason is not None:
            found = f"no: {reason}; on these tensors the slower PyTorch definitions run"
        else:
            found = f"built: {builder.name}" if builder.is_built() else "yes, on first use"
        rows.append((f"kernels for {device_type} tensors", found))
    return rows


def compilers() -> Section:
    """First lines of what the compilers say of themselves."""
    from torch.utils import cpp_extension

    nvcc = Path(cpp_extension.CUDA_HOME) / "bin" / "nvcc" if cpp_extension.CUDA_HOME else shutil.which("nvcc")
    return [
        ("c++", first_line([os.environ.get("CXX", "c++"), "--version"])),
        ("nvcc", first_line([str(nvcc), "--version"], containing="release") if nvcc else MISSING),
        ("ninja", first_line(["ninja", "--version"])),
        ("TORCH_CUDA_ARCH_LIST", os.environ.get("TORCH_CUDA_ARCH_LIST", MISSING)),
    ]


def package_versions() -> Section:
    """Python, the packages, and the libraries that torch brings."""
    import torch

    rows = [("python", platform.python_version())]
    for package in ("ds_hybridep", "torch", "deepspeed", "triton", "transformers", "peft"):
        try:
            rows.append((package, metadata.version(package)))
        except metadata.PackageNotFoundError:
            rows.append((package, MISSING))
    rows.append(("CUDA of torch", torch.version.cuda or MISSING))
    nccl = torch.cuda.nccl.version() if torch.version.cuda else None
    rows.append(("NCCL of torch", ".".join(map(str, nccl)) if nccl else MISSING))
    return rows


def first_line(command: list[str], *, containing: str = "") -> str:
    """The first line of a program's output that holds `containing`; "-" where it cannot be run."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return MISSING
    return next((line.strip() for line in run.stdout.splitlines() if containing in line), MISSING)
