# SPDX-License-Identifier: Apache-2.0
"""The `report` subcommand: prints what this machine has for ds_hybridep.  DeepSpeed's ds_report prints the rest."""

import argparse
import importlib
import os
from importlib import metadata
from typing import Any

from ds_hybridep.version import __version__


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `report` to the subcommands of the program."""
    parser = subparsers.add_parser("report", help="print the kernels, and whether DeepSpeed will find the block")
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
    print(f"start-up hook: {state_of_hook()}")
    print(f"ds_hybridep {__version__}")
    return 0


def state_of_hook() -> str:
    """Say whether torch will call the hook by which an engine finds its block."""
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return "off: unset TORCH_DEVICE_BACKEND_AUTOLOAD, or call ds_hybridep.attach(engine)"
    if any(hook.name == "ds_hybridep" for hook in metadata.entry_points(group="torch.backends")):
        return "registered"
    return "missing: a checkout on the path is not enough, run pip install . in this environment"
