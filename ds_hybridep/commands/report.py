# SPDX-License-Identifier: Apache-2.0
"""The `report` subcommand: what this machine has for ds_hybridep, to read first and to paste into an issue.

DeepSpeed's ds_report prints the rest.
"""

import argparse
import contextlib
import importlib
import os
import platform
from importlib import metadata
from typing import Any

from ds_hybridep.version import __version__

HELP = "print versions, settings and kernels, and whether the block is found"
SETTINGS = (  # of docs/environment.md, those that a user sets and that name no host
    "TORCH_DEVICE_BACKEND_AUTOLOAD", "HYBRIDEP_SITE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "DS_ACCELERATOR",
    "OMP_NUM_THREADS", "TORCH_EXTENSIONS_DIR", "CXX", "CUDA_HOME", "TORCH_CUDA_ARCH_LIST", "DS_BUILD_HYBRIDEP",
)  # fmt: skip
PACKAGES = ("deepspeed", "torch", "transformers", "peft", "numpy")


def add_arguments(_parser: argparse.ArgumentParser) -> None:
    pass


def run(_args: argparse.Namespace) -> int:
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
    print(f"versions: {', '.join(versions())}")
    print(f"GPUs: {', '.join(gpus()) or 'none'}")
    print(f"environment: {' '.join(f'{name}={os.environ[name]}' for name in SETTINGS if name in os.environ) or '-'}")
    return 0


def versions() -> list[str]:
    """Of the packages that are installed, of Python and of the system."""
    found = []
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{package} {metadata.version(package)}")
    return [*found, f"Python {platform.python_version()}", f"{platform.system()} {platform.machine()}"]


def gpus() -> list[str]:
    """Name and compute capability of each CUDA device."""
    cuda: Any = importlib.import_module("torch").cuda
    devices = range(cuda.device_count())
    return [f"{cuda.get_device_name(at)} ({'.'.join(map(str, cuda.get_device_capability(at)))})" for at in devices]


def state_of_hook() -> str:
    """Say whether torch will call the hook by which an engine finds its block."""
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        return "off: unset TORCH_DEVICE_BACKEND_AUTOLOAD, or call ds_hybridep.attach(engine)"
    if any(hook.name == "ds_hybridep" for hook in metadata.entry_points(group="torch.backends")):
        return "registered"
    return "missing: a checkout on the path is not enough, run pip install . in this environment"
