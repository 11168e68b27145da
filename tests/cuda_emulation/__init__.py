# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels of csrc/cuda compiled for the CPU, where every CUDA thread is a fiber: see cuda_emulation.h.

`load_emulated()` gives them as kernels for CPU tensors, so that the tests of kernels run on them without a GPU.
"""

import ctypes
import fcntl
import functools
import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import pybind11

from ds_hybridep.kernels import CompiledCodecs
from ds_hybridep.kernels.cuda import CudaKernels

HERE = Path(__file__).resolve().parent
CSRC = HERE.parents[1] / "csrc"
COMPILE_LIMIT_S = 1200  # for one file, on a busy machine
FLAGS = ["-std=c++20", "-O1", "-ffp-contract=off", "-fPIC", "-fvisibility=hidden", "-Wall", "-Werror"]
FLAGS += ["-Wno-unknown-pragmas", "-DHYBRIDEP_CUDA", "-DHYBRIDEP_EMULATION"]
# EMULATION_SANITIZES=1 in the environment: undefined behaviour ends the process with a message.
SANITIZERS = ["-fsanitize=alignment,bounds,shift,signed-integer-overflow", "-fno-sanitize-recover=all"]
IS_SANITIZED = os.environ.get("EMULATION_SANITIZES") == "1"
FLAGS += SANITIZERS if IS_SANITIZED else []


class EmulatedKernels(CudaKernels):
    """CudaKernels for CPU tensors, under emulation."""

    name = "emulated"
    device_type: ClassVar[str] = "cpu"


@functools.cache
def load_emulated(dispatch_sms: int | None = None) -> EmulatedKernels:
    """The kernels, compiled now unless that was done before.  Raises RuntimeError with the compiler's output."""
    return EmulatedKernels(_extension(), lane=lambda device: nullcontext(0), dispatch_sms=dispatch_sms)


@functools.cache
def load_emulated_codecs() -> CompiledCodecs:
    """The kernels of codecs."""
    return CompiledCodecs(load_emulated())


def largest_grid() -> int:
    """Blocks of the largest launch since the last call."""
    return int(ctypes.CDLL(_extension().__file__).emulation_largest_grid())


@functools.cache
def _extension() -> Any:
    sources = [CSRC / "bindings.cpp", HERE / "launches.cpp", *sorted((CSRC / "cuda").glob("*.cu"))]
    headers = [*sorted((CSRC / "include").glob("*.h")), HERE / "cuda_emulation.h"]
    sha = hashlib.sha256(repr([FLAGS, sys.version, pybind11.__version__]).encode())
    for path in [*sources, *headers]:
        sha.update(path.read_bytes())
    name = f"hybridep_emulated_{sha.hexdigest()[:12]}"
    folder = Path(os.environ["TORCH_EXTENSIONS_DIR"]) / name
    module = folder / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # other processes wait for the one that compiles; its end frees the lock
        if not module.exists():
            with ThreadPoolExecutor(2) as pool:
                objects = list(pool.map(lambda source: _compile(source, name, folder), sources))
            _run(["-shared", *(SANITIZERS if IS_SANITIZED else []), *objects, "-o", f"{module}.part"])
            os.replace(f"{module}.part", module)
    spec = importlib.util.spec_from_file_location(name, module)
    assert spec is not None
    assert spec.loader is not None
    extension = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(extension)
    return extension


def _compile(source: Path, name: str, folder: Path) -> str:
    result = folder / f"{source.stem}.o"
    includes = [HERE, CSRC / "include", pybind11.get_include(), sysconfig.get_paths()["include"]]
    arguments = [*FLAGS, f"-DTORCH_EXTENSION_NAME={name}", *(f"-I{path}" for path in includes)]
    _run([*arguments, "-x", "c++", "-c", str(source), "-o", str(result)])
    return str(result)


def _run(arguments: list[str]) -> None:
    compiler = os.environ.get("CXX", "c++")
    result = subprocess.run([compiler, *arguments], capture_output=True, text=True, timeout=COMPILE_LIMIT_S)
    if result.returncode:
        raise RuntimeError(f"the emulated kernels do not compile:\n{result.stderr[-4000:]}")
