# SPDX-License-Identifier: Apache-2.0
"""The CUDA sources compile without spills, with nvcc and no GPU, and become the accesses that they are written for."""

import os
import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from ds_hybridep.op_builder import HybridEPBuilder
from torch.utils import cpp_extension

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")
ON_PATH = shutil.which("nvcc") or ""
NVCC = f"{os.environ['CUDA_HOME']}/bin/nvcc" if "CUDA_HOME" in os.environ else ON_PATH
SOURCES = [Path(source) for source in HybridEPBuilder("cuda").sources() if source.endswith(".cu")]

pytestmark = [
    pytest.mark.skipif(not Path(NVCC).is_file(), reason="nvcc was not found, so the CUDA sources are not compiled"),
]

# Kernels that move most bytes, by a part of their mangled names, with what they do 16 bytes at a time.
VECTORS = {
    "scatter_tokensI5uint4": "load store",
    "quantise_tokensI": "load",
    "dequantise_recordsI": "store",
    "combine_tokensILi128ENS_7VectorsI": "load",
    "combine_backward_by_slotI": "load",
    "encode_blocksILi1ELb1E": "load store",
    "encode_blocksILi2ELb1E": "load store",
    "encode_blocksILi4ELb1E": "load store",
    "encode_blocksILi8ELb1E": "load store",
    "decode_blocksILb1E": "load store",
}
IN_PTX = {"load": r"ld\.global\S*\.v4\.", "store": r"st\.global\S*\.v4\."}
BULK = ("scatter_in_bulk", "combine_in_bulk")
# What nvcc says of a kernel: name, architecture, stores and loads that spill, registers, and more.
SAID = re.compile(
    r"Compiling entry function '(\S+)' for '(\S+)'.*?\n.*?(\d+) bytes spill stores, "
    r"(\d+) bytes spill loads\n.*?Used (\d+) registers([^\n]*)",
    re.DOTALL,
)


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


def run(*command):
    result = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout[-2000:]}{result.stderr[-4000:]}"
    return result.stdout + result.stderr


def compiled(source, folder, architectures):
    """The kernels of a .cu, with torch's flags."""
    builder, kept = HybridEPBuilder("cuda"), folder / source.stem
    kept.mkdir()
    flags = [flag for flag in builder.nvcc_args() if flag != "--threads" and not flag.isdigit()]
    flags += [f"-gencode=arch=compute_{arch[3:]},code={arch}" for arch in architectures]
    flags += [f"-I{path}" for path in builder.include_paths()]
    flags += ["-Werror", "all-warnings", "-Xptxas", "-v", "--keep", "--keep-dir", str(kept), "-fatbin", str(source)]
    torchs = [*cpp_extension.COMMON_NVCC_FLAGS, "--compiler-options", "-fPIC"]
    said = run(NVCC, *torchs, *flags, "-o", str(folder / f"{source.stem}.fatbin"))
    ptx = {}
    for path in kept.glob("*.ptx"):
        text = path.read_text()
        arch = re.search(r"^\.target (sm_\d+)", text, re.MULTILINE)[1]
        bodies = re.split(r"^\s*(?:\.weak |\.visible )?\.entry ", text, flags=re.MULTILINE)[1:]
        ptx.update({(arch, body.split("(", 1)[0].strip()): body for body in bodies})
    kernels = []
    for name, arch, stores, loads, registers, rest in SAID.findall(said):
        shared = re.search(r"(\d+) bytes smem", rest)
        kernels.append(
            Compiled(
                source=source.name, arch=arch, name=name, registers=int(registers), ptx=ptx[arch, name],
                shared_bytes=int(shared[1]) if shared else 0, spill_bytes=int(stores) + int(loads),
            )
        )  # fmt: skip
    return kernels


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.slow) for name in ("sm_90", "all")])
def architectures(request):
    known = run(NVCC, "--list-gpu-code").split()
    return [arch for arch in ARCHITECTURES if arch in known] if request.param == "all" else [request.param]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory, architectures):
    compile_one = partial(compiled, folder=tmp_path_factory.mktemp("cuda"), architectures=architectures)
    with ThreadPoolExecutor(2) as pool:
        return [kernel for kernels in pool.map(compile_one, SOURCES) for kernel in kernels]


def test_every_source_has_kernels_for_every_architecture(kernels, architectures):
    found = {(kernel.source, kernel.arch) for kernel in kernels}
    assert found == {(source.name, arch) for source in SOURCES for arch in architectures}
    assert len(architectures) == 1 or architectures[0] == ARCHITECTURES[0]


def test_no_kernel_spills(kernels):
    assert [(kernel.name, kernel.arch, kernel.spill_bytes) for kernel in kernels if kernel.spill_bytes] == []


def test_kernels_fit_the_multiprocessor(kernels):
    for kernel in kernels:
        limit = int(re.search(r"\.maxntid (\d+)", kernel.ptx)[1]) if ".maxntid" in kernel.ptx else 256
        assert kernel.registers * limit <= 65536, kernel.name
        assert kernel.shared_bytes <= 48 * 1024, kernel.name


@pytest.mark.parametrize("part", VECTORS)
def test_rows_and_tensors_are_moved_16_bytes_at_a_time(kernels, architectures, part):
    meant = [kernel for kernel in kernels if part in kernel.name and "Scalars" not in kernel.name]
    assert {kernel.arch for kernel in meant} == set(architectures)
    for kernel in meant:
        for access in VECTORS[part].split():
            assert re.search(IN_PTX[access], kernel.ptx), (kernel.name, kernel.arch, access)


def test_bulk_copies_are_where_the_architecture_has_them(kernels, architectures):
    for name in BULK:
        meant = [kernel for kernel in kernels if name in kernel.name]
        assert {kernel.arch for kernel in meant} == set(architectures)
        for kernel in meant:
            has_bulk = "cp.async.bulk" in kernel.ptx
            assert has_bulk == (kernel.arch != "sm_80"), (kernel.name, kernel.arch)
            assert has_bulk or "trap;" in kernel.ptx, kernel.name  # not called there; in silence it would do nothing
