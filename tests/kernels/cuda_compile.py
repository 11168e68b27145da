# SPDX-License-Identifier: Apache-2.0
"""The CUDA sources through nvcc, without a GPU: what the compiler says of each kernel, and what it made of it."""

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ds_hybridep.op_builder import HybridEPBuilder
from torch.utils import cpp_extension

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
TIMEOUT_S = 280


@dataclass(frozen=True, kw_only=True)
class Compiled:
    """One kernel for one architecture."""

    source: str
    arch: str
    name: str  # mangled
    registers: int
    shared_bytes: int  # static
    spill_bytes: int  # stores and loads
    ptx: str


def find_nvcc() -> Path | None:
    """nvcc of CUDA_HOME, or on the PATH."""
    candidates = [Path(os.environ["CUDA_HOME"]) / "bin" / "nvcc"] if "CUDA_HOME" in os.environ else []
    on_path = shutil.which("nvcc")
    candidates += [Path(on_path)] if on_path else []
    return next((path for path in candidates if path.exists()), None)


def supported(nvcc: Path) -> list[str]:
    """Those of ARCHITECTURES that this nvcc knows."""
    known = _run([str(nvcc), "--list-gpu-code"]).split()
    return [arch for arch in ARCHITECTURES if arch in known]


def compile_all(nvcc: Path, folder: Path, architectures: Sequence[str]) -> list[Compiled]:
    """Every .cu with torch's flags, two at a time; the fat binaries stay in `folder`.  RuntimeError: nvcc's output."""
    sources = [Path(source) for source in HybridEPBuilder("cuda").sources() if source.endswith(".cu")]
    with ThreadPoolExecutor(2) as pool:
        return [
            kernel
            for kernels in pool.map(lambda path: _compile(nvcc, path, folder, architectures), sources)
            for kernel in kernels
        ]


def _compile(nvcc: Path, source: Path, folder: Path, architectures: Sequence[str]) -> list[Compiled]:
    builder = HybridEPBuilder("cuda")
    kept = folder / source.stem
    kept.mkdir()
    flags = [flag for flag in builder.nvcc_args() if flag != "--threads" and not flag.isdigit()]
    targets = [f"-gencode=arch=compute_{arch[3:]},code={arch}" for arch in architectures]
    command = [str(nvcc), *cpp_extension.COMMON_NVCC_FLAGS, "--compiler-options", "-fPIC", *flags, *targets]
    command += [f"-I{path}" for path in builder.include_paths()]
    command += ["-Werror", "all-warnings", "-Xptxas", "-v", "--keep", "--keep-dir", str(kept), "-fatbin", str(source)]
    output = _run([*command, "-o", str(folder / f"{source.stem}.fatbin")])
    ptx = {}
    for path in kept.glob("*.ptx"):
        text = path.read_text()
        arch = re.search(r"^\.target (sm_\d+)", text, re.MULTILINE)
        assert arch is not None, path
        bodies = re.split(r"^\s*(?:\.weak |\.visible )?\.entry ", text, flags=re.MULTILINE)[1:]
        ptx.update({(arch[1], body.split("(", 1)[0].strip()): body for body in bodies})
    pattern = re.compile(
        r"Compiling entry function '(\S+)' for '(\S+)'.*?\n.*?(\d+) bytes spill stores, "
        r"(\d+) bytes spill loads\n.*?Used (\d+) registers([^\n]*)",
        re.DOTALL,
    )
    kernels = []
    for name, arch, stores, loads, registers, rest in pattern.findall(output):
        shared = re.search(r"(\d+) bytes smem", rest)
        kernels.append(
            Compiled(
                source=source.name,
                arch=arch,
                name=name,
                registers=int(registers),
                shared_bytes=int(shared[1]) if shared else 0,
                spill_bytes=int(stores) + int(loads),
                ptx=ptx[arch, name],
            )
        )
    return kernels


def _run(command: list[str]) -> str:
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{result.stdout[-2000:]}{result.stderr[-4000:]}")
    return result.stdout + result.stderr
