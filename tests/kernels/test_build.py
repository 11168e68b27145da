# SPDX-License-Identifier: Apache-2.0
"""How kernels are chosen, built, cached and refused."""

import fcntl
import importlib
import logging
import os
import subprocess
import sys
import types
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from deepspeed.ops.op_builder.builder import OpBuilder

from ds_hybridep.codecs import make_codec
from ds_hybridep.errors import KernelBuildError
from ds_hybridep.kernels import build, load_kernels

pytestmark = pytest.mark.timeout(300)

builder_module = importlib.import_module("ds_hybridep.op_builder.hybridep")
HybridEPBuilder = builder_module.HybridEPBuilder


@pytest.fixture
def forget_builds():
    """Let load_kernels decide anew, now and for the tests that follow."""
    caches = (build._extension_or_reason, build._kernels_of, build._warn_once, build.load_codec_kernels)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.fixture
def broken_source(forget_builds, monkeypatch, tmp_path):
    """A source with a mistake that the compiler will name."""
    source = tmp_path / "broken.cpp"
    source.write_text("#include <cstdint>\nint64_t mistake() { return not_declared_anywhere; }\n")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(HybridEPBuilder, "sources", lambda self: [str(source)])
    return source


@pytest.fixture
def fake_compiler(monkeypatch, tmp_path):
    """Replaces torch's build: returns the arguments, and the files that it found in the build folder."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))

    def load(**arguments):
        return arguments, sorted(os.listdir(arguments["build_directory"]))

    monkeypatch.setattr(builder_module.cpp_extension, "load", load)
    monkeypatch.setattr(OpBuilder, "_loaded_ops", {})  # where DeepSpeed remembers what a process loaded


# --- Choice ----------------------------------------------------------------------------------------------------------


def test_each_mode_gives_the_kernels_of_its_name():
    assert load_kernels("reference").name == "reference"
    assert load_kernels("compiled").name == "compiled"
    assert load_kernels("auto") is load_kernels("compiled", "cpu")


def test_unknown_mode():
    with pytest.raises(ValueError, match="mode: got 'fast', wanted one of auto, compiled, reference"):
        load_kernels("fast")


@pytest.mark.parametrize("mode", ["auto", "compiled", "reference"])
def test_fewer_than_one_multiprocessor_is_refused_for_all_kernels(mode):
    with pytest.raises(ValueError, match="dispatch_sms: got 0, wanted 1 or more, or None for all multiprocessors"):
        load_kernels(mode, "cpu", 0)


def test_multiprocessors_have_no_effect_on_the_cpu():
    assert load_kernels("compiled", "cpu", 8).name == load_kernels("compiled", "cpu").name == "compiled"
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


def test_other_devices_have_no_compiled_kernels(forget_builds):
    with pytest.raises(KernelBuildError, match="compiled kernels for 'cpu' and 'cuda', none for 'xpu'"):
        load_kernels("compiled", "xpu")


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
    assert builder.why_not(ahead_of_time=True) is None
    assert HybridEPBuilder("cpu").why_not() is None


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
    monkeypatch.setattr(builder_module, "_version_of", lambda nvcc: machine.nvcc)
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST", raising=False)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    return machine


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


def test_a_module_built_ahead_of_time_needs_no_nvcc(cuda_machine, monkeypatch):
    name = HybridEPBuilder("cuda").absolute_name()
    monkeypatch.setattr(builder_module.cpp_extension, "CUDA_HOME", None)
    cuda_machine.nvcc = ""
    assert "nvcc was not found" in HybridEPBuilder("cuda").why_not()
    monkeypatch.setattr(builder_module.importlib.util, "find_spec", lambda wanted: wanted == name or None)
    assert HybridEPBuilder("cuda").why_not() is None


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
    found = []
    monkeypatch.setattr(
        builder_module.cpp_extension, "load", lambda **_: found.append(os.environ.get("TORCH_CUDA_ARCH_LIST"))
    )
    HybridEPBuilder("cuda").jit_load()
    assert found == [built or listed]
    assert os.environ.get("TORCH_CUDA_ARCH_LIST") == listed


def test_old_devices_beside_new_ones_are_left_out(cuda_machine):
    cuda_machine.capabilities[:] = [(9, 0), (7, 5), (8, 6)]
    assert HybridEPBuilder("cuda").environment() == {"TORCH_CUDA_ARCH_LIST": "8.6;9.0"}
    assert HybridEPBuilder("cpu").environment() == {}


def test_an_unknown_architecture_is_a_failed_build(cuda_machine, fake_compiler, forget_builds, monkeypatch, caplog):
    def load(**arguments):
        builder_module.cpp_extension._get_cuda_arch_flags()

    monkeypatch.setattr(builder_module.cpp_extension, "load", load)
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "99.0")
    with pytest.raises(KernelBuildError, match=r"Unknown CUDA arch \(99.0\).*TORCH_CUDA_ARCH_LIST is '99.0': set it"):
        load_kernels("compiled", "cuda")
    with caplog.at_level(logging.WARNING, logger="ds_hybridep"):
        assert load_kernels("auto", "cuda").name == "reference"
    assert "Unknown CUDA arch (99.0)" in caplog.text


def test_a_module_without_code_for_the_device_is_refused(cuda_machine, forget_builds, monkeypatch):
    module = types.SimpleNamespace(code_error=lambda: "no kernel image is available for execution on the device")
    monkeypatch.setattr(HybridEPBuilder, "load", lambda self, verbose: module)
    wanted = (
        "no code that Some GPU can run: no kernel image .*; add its compute capability, 9.0, to TORCH_CUDA_ARCH_LIST"
    )
    with pytest.raises(KernelBuildError, match=wanted):
        load_kernels("compiled", "cuda")


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


def test_long_compiler_output_keeps_its_first_line_and_its_end():
    described = build._describe(RuntimeError("Error building extension\n" + "x" * 10_000 + "\nlast words"))
    assert described.startswith("RuntimeError: Error building extension\n[...]\n")
    assert described.endswith("last words")
    assert len(described) < build.OUTPUT_TAIL_CHARS + 100


# --- Builder ---------------------------------------------------------------------------------------------------------


def test_sources_and_headers_are_there():
    builder = HybridEPBuilder()
    for path in [*builder.sources(), *builder.include_paths()]:
        assert Path(path).is_absolute()
        assert Path(path).exists()


def test_the_op_builder_package_lacks_the_mark_of_deepspeeds_own():
    assert not hasattr(importlib.import_module("ds_hybridep.op_builder"), "__deepspeed__")


def test_changed_sources_and_flags_change_the_name(monkeypatch, tmp_path):
    source, header = tmp_path / "a.cpp", tmp_path / "a.h"
    source.write_text("1")
    header.write_text("1")
    monkeypatch.setattr(HybridEPBuilder, "sources", lambda self: [str(source)])
    monkeypatch.setattr(HybridEPBuilder, "include_paths", lambda self: [str(tmp_path)])
    names = [HybridEPBuilder().name, HybridEPBuilder().name]
    assert names[0] == names[1]
    source.write_text("2")
    names.append(HybridEPBuilder().name)
    header.write_text("2")
    names.append(HybridEPBuilder().name)
    monkeypatch.setattr(HybridEPBuilder, "cpu_arch", lambda self: "-march=other")
    names.append(HybridEPBuilder().name)
    assert len(set(names)) == 4
    assert all(name.startswith("hybridep_rows_") for name in names)


def test_kernels_for_cuda_are_another_module_and_depend_on_architectures(monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    builder = HybridEPBuilder("cuda")
    assert builder.name.startswith("hybridep_cuda_")
    assert any(source.endswith("cuda/rows.cu") for source in builder.sources())
    assert not any("/cpu/" in source for source in builder.sources())
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    assert HybridEPBuilder("cuda").name != builder.name
    with pytest.raises(ValueError, match="device_type: got 'tpu', wanted 'cpu' or 'cuda'"):
        HybridEPBuilder("tpu")


def test_a_module_built_ahead_of_time_is_taken(fake_compiler, monkeypatch):
    module = types.ModuleType(HybridEPBuilder().absolute_name())
    monkeypatch.setattr(builder_module.importlib.util, "find_spec", lambda name: name == module.__name__ or None)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    assert HybridEPBuilder().load() is module


def test_the_build_stays_in_its_own_folder(fake_compiler, tmp_path):
    builder = HybridEPBuilder()
    arguments, _ = builder.load()
    assert arguments["build_directory"] == str(tmp_path / builder.name)
    assert arguments["sources"] == builder.sources()
    assert HybridEPBuilder().load() is builder.load()  # remembered


def test_torch_lock_left_by_a_killed_build_is_removed(fake_compiler):
    builder = HybridEPBuilder()
    builder.build_directory().mkdir(parents=True)
    (builder.build_directory() / "lock").touch()
    _, found = builder.load()
    assert "lock" not in found


def test_waiting_for_another_build_ends_with_the_name_of_the_lock(fake_compiler, monkeypatch, forget_builds):
    monkeypatch.setattr(builder_module, "LOCK_TIMEOUT_S", 0.2)
    builder = HybridEPBuilder()
    path = builder.build_directory().parent / f"{builder.name}.flock"
    with path.open("w") as file:
        file.write("process 12 on elsewhere")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(KernelBuildError, match="by process 12 on elsewhere.*delete the file") as caught:
            load_kernels("compiled")
    assert str(path) in str(caught.value)
    assert builder.load()  # free again


def test_ninja_of_this_python_is_found_without_an_activated_environment(monkeypatch):
    monkeypatch.setattr(builder_module.cpp_extension, "is_ninja_available", lambda: False)
    monkeypatch.setenv("PATH", "/nowhere")
    with builder_module._ninja_on_path():
        assert os.environ["PATH"].split(os.pathsep)[0] == builder_module.sysconfig.get_path("scripts")
    assert os.environ["PATH"] == "/nowhere"


@pytest.mark.slow
def test_processes_that_start_together_build_once(tmp_path):
    program = "from ds_hybridep.kernels import load_kernels; print(load_kernels('compiled').name)"
    environment = {**os.environ, "TORCH_EXTENSIONS_DIR": str(tmp_path)}
    processes = [
        subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert [output.strip().splitlines()[-1] for output in outputs] == ["compiled"] * 3
    modules = [path for path in tmp_path.rglob("*.so")]
    assert len(modules) == 1
