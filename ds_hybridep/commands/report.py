# SPDX-License-Identifier: Apache-2.0
"""The `report` subcommand: the kernels of this machine, beside what ds_report says of torch, compilers and CUDA."""

import argparse
import importlib
from importlib import metadata
from typing import Any


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `report` to the subcommands of the program."""
    parser = subparsers.add_parser(
        "report", help="print which kernels this machine has, or why not; see ds_report too"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the report.  Returns 0, whatever was found."""
    print(f"ds_hybridep {metadata.version('ds_hybridep')}; ds_report says what there is of torch, compilers and CUDA")
    for device_type in ("cpu", "cuda"):
        print(f"kernels for {device_type} tensors: {kernels_for(device_type)}")
    return 0


def kernels_for(device_type: str) -> str:
    """Whether the kernels for tensors on a type of device are built, can be built on first use, or why not."""
    builders: Any = importlib.import_module("ds_hybridep.op_builder")
    builder = builders.HybridEPBuilder(device_type)
    reason = builder.why_not()
    if reason is not None:
        return f"no: {reason}; on these tensors the slower PyTorch definitions run"
    return f"built: {builder.name}" if builder.is_built() else "yes, on first use"
