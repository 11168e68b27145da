# SPDX-License-Identifier: Apache-2.0
"""How kernels are chosen, built, cached and refused."""

import importlib
import logging
import os
import types
from contextlib import contextmanager

import pytest
import torch
from codec_cases import make_codec

from ds_hybridep.errors import KernelBuildError
from ds_hybridep.kernels import load_kernels

builder_module = importlib.import_module("ds_hybridep.op_builder.hybridep")
HybridEPBuilder = builder_module.HybridEPBuilder


@pytest.fixture
def broken_source(forget_builds, monkeypatch, tmp_path):
    """A source with a mistake that the compiler will name."""
    source = tmp_path / "broken.cpp"
    source.write_text("#include <cstdint>\nint64_t mistake() { return not_declared_anywhere; }\n")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(HybridEPBuilder, "sources", lambda self: [str(source)])
    return source


# --- Choice ----------------------------------------------------------------------------------------------------------


def test_each_mode_gives_the_kernels_of_its_name():
    assert load_kernels("reference").name == "reference"
    assert load_kernels("compiled").name == "compiled"
    assert load_kernels("auto") is load_kernels("compiled", "cpu")
    assert load_kernels("compiled", "cpu", 8).name == "compiled"  # multiprocessors are none of a CPU's
    assert load_kernels("reference", "cpu", 8).name == "reference"


def test_compiled_never_falls_back_and_shows_what_the_compiler_said(broken_source):
    for _ in range(2):  # the second from the cache
        with pytest.raises(KernelBuildError) as caught:
            load_kernels("compiled")
        message = str(caught.value)
        assert "not_declared_anywhere" in message
        assert broken_source.name in message
        assert 'choose the kernels "auto" or "reference"' in message


def test_auto_falls_back_with_one_warning_that_tells_why(broken_source, caplog):
    with caplog.at_level(logging.WARNING, logger="ds_hybridep"):
        kernels = [load_kernels("auto") for _ in range(3)]
    assert {kernel.name for kernel in kernels} == {"reference"}
    assert len(caplog.records) == 1
    assert "not_declared_anywhere" in caplog.text
    assert "using the slower PyTorch reference on device type 'cpu'" in caplog.text


def test_cuda_kernels_are_refused_with_the_reason(forget_builds, caplog, monkeypatch):
    monkeypatch.setattr(HybridEPBuilder, "why_not", lambda self: "nvcc was not found" if self.is_cuda else None)
    with pytest.raises(KernelBuildError, match="compiled kernels for device type 'cuda': nvcc was not found"):
        load_kernels("compiled", "cuda")
    with caplog.at_level(logging.WARNING, logger="ds_hybridep"):
        assert load_kernels("auto", "cuda").name == "reference"
    assert "reference on device type 'cuda': nvcc was not found" in caplog.text


def test_what_stands_in_the_way_of_cuda_kernels_is_named(monkeypatch, tmp_path):
    builder = HybridEPBuilder("cuda")
    monkeypatch.setattr(builder_module.torch.version, "cuda", None)
    assert "is a build without CUDA" in builder.why_not()
    monkeypatch.setattr(builder_module.torch.version, "cuda", "13.0")
    monkeypatch.setattr(builder_module.torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    assert builder.why_not() == "torch finds no CUDA device"
    monkeypatch.setattr(builder_module.cpp_extension, "CUDA_HOME", str(tmp_path))
    assert "nvcc was not found" in builder.why_not(ahead_of_time=True)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    assert "has nvcc, but not include/cuda_runtime.h; set CUDA_HOME" in builder.why_not(ahead_of_time=True)
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_runtime.h").touch()
    assert builder.why_not(ahead_of_time=True) is None
    assert HybridEPBuilder("cpu").why_not() is None


def test_devices_and_toolkits_that_do_not_fit_are_named(cuda_machine, monkeypatch):
    builder = HybridEPBuilder("cuda")
    assert builder.why_not() is None
    cuda_machine.capabilities[:] = [(7, 5)]
    assert builder.why_not() == "Some GPU has compute capability 7.5; the kernels need 8.0 or later"
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.5;8.0")
    assert builder.why_not(ahead_of_time=True) is None  # for another machine
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "7.0 Turing")
    assert "TORCH_CUDA_ARCH_LIST='7.0 Turing' names nothing of" in builder.why_not(ahead_of_time=True)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    cuda_machine.nvcc = "Cuda compilation tools, release 12.8, V12.8.61"
    assert "nvcc is of CUDA 12, torch of CUDA 13.0; set CUDA_HOME" in builder.why_not(ahead_of_time=True)


@pytest.mark.parametrize(
    ("listed", "built"),
    [
        (None, None),
        ("native", None),
        ("8.0;9.0+PTX", None),
        ("7.5;8.0 10.0a", "8.0;10.0a"),
        ("Volta;Turing;Kepler+Tesla;Ampere", "Ampere"),
    ],
)
def test_nothing_is_built_for_devices_that_are_too_old(cuda_machine, fake_compiler, monkeypatch, listed, built):
    if listed is not None:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    before = dict(os.environ)
    HybridEPBuilder("cuda").jit_load()
    (call,) = fake_compiler()
    assert call["environment"].get("TORCH_CUDA_ARCH_LIST") == (built or listed)
    assert dict(os.environ) == before


def test_old_devices_beside_new_ones_are_left_out(cuda_machine):
    cuda_machine.capabilities[:] = [(9, 0), (7, 5), (8, 6)]
    assert HybridEPBuilder("cuda").environment() == {"TORCH_CUDA_ARCH_LIST": "8.6;9.0"}
    assert HybridEPBuilder("cpu").environment() == {}


def test_only_the_device_of_the_tensors_is_asked_what_it_can_run(cuda_machine, forget_builds, monkeypatch):
    """To ask makes a context, which takes memory, on the device that is the current one."""
    current, asked = [0], []

    @contextmanager
    def device(wanted):
        before, current[0] = current[0], wanted.index
        yield
        current[0] = before

    module = types.SimpleNamespace(code_error=lambda: asked.append(current[0]) or "no kernel image")
    monkeypatch.setattr(builder_module.torch.cuda, "device", device)
    monkeypatch.setattr(HybridEPBuilder, "load", lambda self, verbose: module)
    cuda_machine.capabilities[:] = [(9, 0)] * 4
    codec = make_codec("int8")
    assert codec.compiled(torch.device("cuda:3")) is None
    assert load_kernels("auto", torch.device("cuda:2")).name == load_kernels("auto", "cuda").name == "reference"
    assert asked == [3, 2, 0]


def test_mistakes_of_ours_are_not_taken_for_failed_builds(forget_builds, monkeypatch):
    def load(self, verbose):
        raise AttributeError("a mistake")

    monkeypatch.setattr(HybridEPBuilder, "load", load)
    with pytest.raises(AttributeError, match="a mistake"):
        load_kernels("auto")
