# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tests of builds: a compiler that takes no time, and a machine with a GPU."""

import importlib
import json
import tempfile
import types
from pathlib import Path

import pytest
from deepspeed.ops.op_builder.builder import OpBuilder

from ds_hybridep.kernels import build

builder_module = importlib.import_module("ds_hybridep.op_builder.hybridep")
FAKE_COMPILE = Path(__file__).with_name("fake_compile.py")


@pytest.fixture
def forget_builds():
    """Let load_kernels decide anew, now and for the tests that follow."""
    caches = (build._extension_or_reason, build._kernels_of, build._warn_once, build.load_codec_kernels)
    loaded = list(build._loaded)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()
    build._loaded[:] = loaded


@pytest.fixture
def fake_compiler(monkeypatch, tmp_path):
    """Builds of this test are empty modules in folders of its own; returns a function that lists the calls so far."""
    log = tmp_path / "calls"
    monkeypatch.setenv("FAKE_LOG", str(log))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    monkeypatch.setattr(builder_module, "COMPILE_PROGRAM", FAKE_COMPILE)
    monkeypatch.setattr(OpBuilder, "_loaded_ops", {})  # where DeepSpeed remembers what a process loaded
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))  # where the locks are
    return lambda: [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


@pytest.fixture
def cuda_machine(monkeypatch, tmp_path):
    """As if there were a GPU and nvcc: returns what can be changed of them."""
    machine = types.SimpleNamespace(capabilities=[(9, 0)], nvcc="Cuda compilation tools, release 13.0, V13.0.48")
    monkeypatch.setattr(builder_module.torch.version, "cuda", "13.0")
    cuda = builder_module.torch.cuda
    monkeypatch.setattr(cuda, "is_available", lambda: bool(machine.capabilities))
    monkeypatch.setattr(cuda, "device_count", lambda: len(machine.capabilities))
    monkeypatch.setattr(cuda, "get_device_capability", lambda device=0: machine.capabilities[device])
    monkeypatch.setattr(cuda, "get_device_name", lambda device=0: "Some GPU")
    monkeypatch.setattr(builder_module.cpp_extension, "CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(builder_module, "_version_of", lambda command: machine.nvcc)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    (tmp_path / "include").mkdir()
    (tmp_path / "include" / "cuda_runtime.h").touch()
    return machine
