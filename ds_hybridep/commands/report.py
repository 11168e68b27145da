# SPDX-License-Identifier: Apache-2.0
"""The `report` subcommand: prints the kernels and packages of this machine.  DeepSpeed's ds_report prints the rest."""

import argparse
import importlib
import platform
from importlib import metadata
from typing import Any

PACKAGES = ("ds_hybridep", "torch", "deepspeed", "transformers", "peft")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `report` to the subcommands of the program."""
    parser = subparsers.add_parser("report", help="print which kernels and packages there are, beside ds_report")
    parser.set_defaults(run=run)


def run(_args: argparse.Namespace) -> int:
    """Prints the report.  Always returns 0."""
    builders: Any = importlib.import_module("ds_hybridep.op_builder")
    for device_type in ("cpu", "cuda"):
        builder = builders.HybridEPBuilder(device_type)
        reason = builder.why_not()
        if reason is not None:
            found = f"no: {reason}; on these tensors the slower PyTorch definitions run"
        else:
            found = f"built: {builder.name}" if builder.is_built() else "yes, on first use"
        print(f"kernels for {device_type} tensors: {found}")
    print(f"python {platform.python_version()}")
    for package in PACKAGES:
        try:
            print(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            print(f"{package} is not installed")
    return 0
