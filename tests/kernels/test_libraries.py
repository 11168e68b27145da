# SPDX-License-Identifier: Apache-2.0
"""Libraries of the kernels: where they lie, which one is taken, and who builds it."""

import fcntl
import importlib
import os
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ds_hybridep.errors import KernelBuildError
from ds_hybridep.kernels import load_kernels

builder_module = importlib.import_module("ds_hybridep.op_builder.hybridep")
HybridEPBuilder = builder_module.HybridEPBuilder
FAKE_COMPILE = Path(__file__).with_name("fake_compile.py")


def lock_of(builder):
    """The file that says who builds, of this machine and user."""
    file = builder_module._open_lock(builder.library())
    assert file is not None
    return file


# --- Names -----------------------------------------------------------------------------------------------------------


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


def test_kernels_for_cuda_are_another_module_with_a_library_for_each_set_of_architectures(monkeypatch):
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
    builder = HybridEPBuilder("cuda")
    assert builder.name.startswith("hybridep_cuda_")
    assert any(source.endswith("cuda/rows.cu") for source in builder.sources())
    assert not any("/cpu/" in source for source in builder.sources())
    assert builder.library().name.startswith("8.0-9.0+PTX_")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    assert HybridEPBuilder("cuda").library().name.startswith("9.0_")
    with pytest.raises(ValueError, match="device_type: got 'tpu', wanted 'cpu' or 'cuda'"):
        HybridEPBuilder("tpu")


@pytest.mark.parametrize("device_type", ["cpu", "cuda"])
def test_another_version_of_a_compiler_makes_another_library(cuda_machine, device_type):
    before = HybridEPBuilder(device_type).library()
    cuda_machine.nvcc = "Cuda compilation tools, release 13.1, V13.1.1"
    after = HybridEPBuilder(device_type).library()
    assert after.parent == before.parent
    assert after != before


def test_the_users_language_makes_no_difference(monkeypatch, tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho c++ 12.2 $LC_ALL $LANG\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.delenv("LANG", raising=False)
    libraries = set()
    for language in ("de_DE.UTF-8", "C"):
        monkeypatch.setenv("LC_ALL", language)
        libraries.add(HybridEPBuilder().library())
    assert len(libraries) == 1


# --- Built ahead of time ---------------------------------------------------------------------------------------------


def install(monkeypatch, module, name):
    """As if `module` had been built ahead of time under this name."""
    monkeypatch.setattr(builder_module.importlib.util, "find_spec", lambda wanted: wanted == name or None)
    monkeypatch.setitem(sys.modules, name, module)


def test_a_module_built_ahead_of_time_is_taken(fake_compiler, monkeypatch):
    module = types.ModuleType("kernels")
    install(monkeypatch, module, HybridEPBuilder().absolute_name())
    assert HybridEPBuilder().load() is module


@pytest.mark.parametrize("listed", [None, "9.0", "8.0 9.0a 10.0", "7.0"])
def test_a_module_built_ahead_of_time_is_taken_whatever_architectures_are_listed(
    cuda_machine, fake_compiler, forget_builds, monkeypatch, listed
):
    module = types.ModuleType("kernels")
    module.code_error = lambda: ""
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
    install(monkeypatch, module, HybridEPBuilder("cuda").builder().name)  # as setup.py builds it
    cuda_machine.nvcc = ""  # what runs the job needs no compiler, and has another one
    monkeypatch.setattr(builder_module.cpp_extension, "CUDA_HOME", None)
    monkeypatch.setenv("CXX", "another")
    monkeypatch.delenv("TORCH_CUDA_ARCH_LIST")
    if listed is not None:
        monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", listed)
    assert HybridEPBuilder("cuda").why_not() is None
    assert HybridEPBuilder("cuda").load() is module
    assert load_kernels("compiled", "cuda").extension is module
    assert fake_compiler() == []


def test_a_module_built_ahead_of_time_for_other_devices_gives_way_to_a_build(
    cuda_machine, fake_compiler, forget_builds, monkeypatch
):
    module = types.SimpleNamespace(code_error=lambda: "no kernel image is available")
    install(monkeypatch, module, HybridEPBuilder("cuda").absolute_name())
    built = HybridEPBuilder("cuda").load()
    assert built.__file__ == str(HybridEPBuilder("cuda").library())
    assert len(fake_compiler()) == 1


def test_a_module_built_ahead_of_time_for_other_devices_is_named_where_none_can_be_built(
    cuda_machine, fake_compiler, forget_builds, monkeypatch
):
    module = types.SimpleNamespace(code_error=lambda: "no kernel image is available")
    install(monkeypatch, module, HybridEPBuilder("cuda").absolute_name())
    monkeypatch.setattr(builder_module.cpp_extension, "CUDA_HOME", None)
    with pytest.raises(KernelBuildError, match="no code that Some GPU can run: .*add its compute capability, 9.0"):
        load_kernels("compiled", "cuda")


# --- Built earlier ---------------------------------------------------------------------------------------------------


def test_the_build_leaves_only_its_library(fake_compiler):
    builder = HybridEPBuilder()
    assert not builder.is_built()
    module = builder.load()
    assert module.__file__ == str(builder.library())
    assert os.listdir(builder.build_directory()) == [builder.library().name]
    assert HybridEPBuilder().is_built()
    assert HybridEPBuilder().load() is builder.load()  # remembered
    (call,) = fake_compiler()
    assert call["arguments"]["sources"] == builder.sources()
    assert call["environment"]["PATH"].endswith(builder_module.sysconfig.get_path("scripts"))  # where ninja may be


def test_a_library_that_exists_is_imported_without_compiler_ninja_and_lock(fake_compiler, monkeypatch):
    first = HybridEPBuilder().jit_load()
    with lock_of(HybridEPBuilder()) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert HybridEPBuilder().jit_load().__file__ == first.__file__
        monkeypatch.setenv("PATH", "")
        monkeypatch.setattr(builder_module, "_try_lock", None)  # not called
        builder = HybridEPBuilder()
        assert builder.compilers == ""
        assert builder.is_built()
        assert builder.jit_load().__file__ == first.__file__
    assert len(fake_compiler()) == 1


def test_a_library_for_cuda_needs_no_nvcc_once_it_is_built(cuda_machine, fake_compiler, monkeypatch):
    first = HybridEPBuilder("cuda").jit_load()
    cuda_machine.nvcc = ""
    monkeypatch.setattr(builder_module.cpp_extension, "CUDA_HOME", None)
    assert HybridEPBuilder("cuda").why_not() is None
    assert HybridEPBuilder("cuda").jit_load().__file__ == first.__file__
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "8.0")
    assert "nvcc was not found" in HybridEPBuilder("cuda").why_not()


def test_a_library_that_another_machine_has_built_meanwhile_is_not_replaced(fake_compiler, monkeypatch, tmp_path):
    """Its processes have it mapped."""
    elsewhere = HybridEPBuilder()
    elsewhere.jit_load()
    before = elsewhere.library().stat().st_ino
    kept = elsewhere.library().rename(tmp_path / "kept")
    program = tmp_path / "compile.py"
    ready = f"import os; os.link({str(kept)!r}, {str(elsewhere.library())!r})"
    program.write_text(f"{ready}\n{FAKE_COMPILE.read_text()}")
    monkeypatch.setattr(builder_module, "COMPILE_PROGRAM", program)
    HybridEPBuilder().jit_load()
    assert len(fake_compiler()) == 2
    assert elsewhere.library().stat().st_ino == before
    assert os.listdir(elsewhere.build_directory()) == [elsewhere.library().name]


def test_without_a_compiler_the_message_says_what_to_install(fake_compiler, monkeypatch, forget_builds):
    monkeypatch.setenv("CXX", "no-such-compiler -m64")
    with pytest.raises(KernelBuildError, match="no-such-compiler -m64 cannot be run; install a C.. compiler"):
        load_kernels("compiled")


# --- Several processes -----------------------------------------------------------------------------------------------

LOAD_IN_MANY = """
import importlib, os, sys
from pathlib import Path
module = importlib.import_module("ds_hybridep.op_builder.hybridep")
module.COMPILE_PROGRAM = Path(sys.argv[1])
for _ in range(int(sys.argv[2])):
    if os.fork() == 0:
        os.write(1, (module.HybridEPBuilder().load().__file__ + "\\n").encode())
        os._exit(0)
while True:
    try:
        os.wait()
    except ChildProcessError:
        break
"""


@pytest.mark.slow
def test_64_processes_at_once_build_once(fake_compiler, tmp_path):
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    command = [sys.executable, "-c", LOAD_IN_MANY, str(FAKE_COMPILE), "64"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert run.stdout.splitlines() == [str(HybridEPBuilder().library())] * 64, run.stderr
    assert len(fake_compiler()) == 1
    assert len(os.listdir(HybridEPBuilder().build_directory())) == 1


@pytest.fixture
def building(fake_compiler, monkeypatch):
    """A build that another process of this machine has begun: `begun.lock` is its file.

    `begun.load(count)` loads in threads, whose locks exclude each other like those of processes, and returns what they
    will return once `begun.waiting` is set: all of them wait.
    """
    begun = types.SimpleNamespace(lock=lock_of(HybridEPBuilder()), waiting=threading.Event())
    fcntl.flock(begun.lock, fcntl.LOCK_EX)
    pool, waiters, try_lock = ThreadPoolExecutor(8), set(), builder_module._try_lock

    def load(count):
        def note(file):
            is_mine = try_lock(file)
            waiters.update([] if is_mine else [threading.get_ident()])
            if len(waiters) == count:
                begun.waiting.set()
            return is_mine

        monkeypatch.setattr(builder_module, "_try_lock", note)
        return [pool.submit(lambda: HybridEPBuilder().jit_load().__file__) for _ in range(count)]

    begun.load = load
    with pool, begun.lock:
        yield begun


def test_processes_that_wait_for_a_build_that_fails_are_told_the_same(building, fake_compiler):
    futures = building.load(8)
    assert building.waiting.wait(300)
    building.lock.write("error: not_declared_anywhere")
    building.lock.close()
    for future in futures:
        with pytest.raises(RuntimeError, match="error: not_declared_anywhere"):
            future.result(100)
    assert fake_compiler() == []


def test_a_build_that_failed_is_tried_again_by_those_who_come_later(fake_compiler, monkeypatch):
    monkeypatch.setenv("FAKE_ERROR", "error: not_declared_anywhere")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="error: not_declared_anywhere"):
            HybridEPBuilder().jit_load()
    monkeypatch.delenv("FAKE_ERROR")
    assert HybridEPBuilder().jit_load()
    assert len(fake_compiler()) == 3


@pytest.mark.parametrize("end", ["killed", "built on another machine"])
def test_processes_that_wait_take_what_they_or_others_have_built(building, fake_compiler, end):
    futures = building.load(8)
    assert building.waiting.wait(300)
    if end == "killed":
        building.lock.close()  # as the system does
    else:
        HybridEPBuilder()._compile(HybridEPBuilder().library())
    assert {future.result(100) for future in futures} == {str(HybridEPBuilder().library())}
    assert len(fake_compiler()) == 1


def test_nobody_waits_for_ever(building, fake_compiler, monkeypatch):
    monkeypatch.setattr(builder_module, "MOST_WAIT_S", 0.2)
    assert HybridEPBuilder().jit_load()
    assert len(fake_compiler()) == 1


@pytest.mark.parametrize("place", ["missing", "file"])
def test_a_machine_without_a_place_for_locks_builds(fake_compiler, monkeypatch, tmp_path, place):
    (tmp_path / "file").touch()
    monkeypatch.setattr(builder_module.tempfile, "tempdir", str(tmp_path / place))
    assert HybridEPBuilder().jit_load()


def test_the_process_that_compiles_says_what_to_do_about_an_unknown_architecture(monkeypatch, capsys):
    path = Path(builder_module.COMPILE_PROGRAM)
    spec = importlib.util.spec_from_file_location("compile_program", path)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)

    def load(**arguments):
        program.cpp_extension._get_cuda_arch_flags()

    monkeypatch.setattr(program.cpp_extension, "load", load)
    monkeypatch.setattr(program.json, "load", lambda file: {})
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "99.0")
    assert program.main() == 1
    said = capsys.readouterr().out
    assert "Unknown CUDA arch (99.0)" in said
    assert "TORCH_CUDA_ARCH_LIST is '99.0': set it to what torch and nvcc know" in said
