# SPDX-License-Identifier: Apache-2.0
"""The CUDA sources compile for all architectures without spills, and become the accesses that they are written for.

`make test` compiles for the one with bulk copies that most have, `make test-slow` for all.
"""

import re
from pathlib import Path

import pytest
from cuda_compile import ARCHITECTURES, compile_all, find_nvcc, supported
from ds_hybridep.op_builder import HybridEPBuilder

NVCC = find_nvcc()

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(NVCC is None, reason="nvcc was not found, so the CUDA sources are not compiled"),
]

# Kernels that move most bytes, by a part of their mangled names, with what they do 16 bytes at a time.
VECTORS = {
    "gather_rowsI5uint4": "load store",
    "quantise_tokensI": "load",
    "dequantise_recordsI": "store",
    "combine_tokensILi128ENS_7VectorsI": "load",
    "combine_backward_by_slotI": "load",
    "encode_blocksILi1ELb1E": "load store",
    "encode_blocksILi2ELb1E": "load store",
    "encode_blocksILi4ELb1E": "load store",
    "encode_blocksILi8ELb1E": "load store",
    "decode_blocksILb1E": "load store",
    "apply_productILb1E": "load store",
}
IN_PTX = {"load": r"ld\.global\S*\.v4\.", "store": r"st\.global\S*\.v4\."}
BULK = ("gather_in_bulk", "combine_in_bulk")


@pytest.fixture(scope="module", params=[pytest.param(name, marks=pytest.mark.slow) for name in ("sm_90", "all")])
def architectures(request):
    return supported(NVCC) if request.param == "all" else [request.param]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory, architectures):
    return compile_all(NVCC, tmp_path_factory.mktemp("cuda"), architectures)


def test_every_source_has_kernels_for_every_architecture(kernels, architectures):
    sources = {Path(source).name for source in HybridEPBuilder("cuda").sources() if source.endswith(".cu")}
    found = {(kernel.source, kernel.arch) for kernel in kernels}
    assert found == {(source, arch) for source in sources for arch in architectures}
    assert supported(NVCC)[0] == ARCHITECTURES[0]


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
