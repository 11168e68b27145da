# SPDX-License-Identifier: Apache-2.0
"""Builds the kernels in csrc/ for the CPU or for CUDA: on first use, once per machine and version of the sources.

    HybridEPBuilder()         for CPU tensors, with the C++ compiler
    HybridEPBuilder("cuda")   for CUDA tensors, with nvcc: for the architectures in TORCH_CUDA_ARCH_LIST, else those of
                              the devices found

With DS_BUILD_HYBRIDEP=1 in the environment, setup.py builds ahead of time whatever this machine can build.
"""

import fcntl
import hashlib
import importlib
import importlib.util
import os
import platform
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.op_builder.cpu.builder import CPUOpBuilder
from torch.utils import cpp_extension

LOCK_TIMEOUT_S = 600.0
LOCK_POLL_S = 0.1

MIN_CAPABILITY = (8, 0)
NAMES_BELOW = ("Kepler", "Maxwell", "Pascal", "Volta", "Turing")  # torch's names for those below MIN_CAPABILITY
ARCH_LIST = "TORCH_CUDA_ARCH_LIST"


class BuildLockTimeout(RuntimeError):
    """Another process has held the build lock for longer than any build takes."""


class HybridEPBuilder(CPUOpBuilder):  # type: ignore[misc]  # deepspeed has no types
    """Compiles and loads the kernels for tensors of one type of device.

    The CUDA kernels need compute capability 8.0 or later; lower entries of TORCH_CUDA_ARCH_LIST are left out.

    The module's name ends in a digest of what decides the build: sources, flags, $CXX, nvcc's version, Python, torch,
    GPU architectures, and for `-march=native` the processor.  So a changed source gets another name, and no stale
    module is loaded.  Unlike machines that share a home directory get one build each.

    A `flock` lets only one process build a module; the kernel drops it when its holder dies.  torch's own lock is a
    file that a killed build leaves behind, and later builds wait for it without end.  The holder of the flock removes
    such a file, because no other process can be at work.
    """

    BUILD_VAR = "DS_BUILD_HYBRIDEP"
    NAME = "hybridep_rows"
    CUDA_NAME = "hybridep_cuda"

    def __init__(self, device_type: str = "cpu") -> None:
        """Builder of the kernels for tensors on `device_type`, "cpu" or "cuda"."""
        if device_type not in ("cpu", "cuda"):
            raise ValueError(f"device_type: got {device_type!r}, wanted 'cpu' or 'cuda'")
        self.is_cuda = device_type == "cuda"
        base = self.CUDA_NAME if self.is_cuda else self.NAME
        super().__init__(name=base)
        self.name: str = f"{base}_{self.digest()}"

    def absolute_name(self) -> str:
        """The module's name if it was compiled ahead of time.  Its digest leaves out nvcc, which may be missing."""
        if not self.is_cuda:
            return f"ds_hybridep.{self.name}"
        return f"ds_hybridep.{self.CUDA_NAME}_{self.digest(with_nvcc=False)}"

    def is_ahead_of_time(self) -> bool:
        """Whether the module was compiled ahead of time from these very sources and flags."""
        return importlib.util.find_spec(self.absolute_name()) is not None

    def why_not(self, ahead_of_time: bool = False) -> str | None:
        """Why the kernels cannot be built here; None if no reason is known.

        A build ahead of time needs no device if TORCH_CUDA_ARCH_LIST says what to build for.
        """
        if not self.is_cuda:
            return None
        if torch.version.cuda is None:
            return f"torch {torch.__version__} is a build without CUDA; install one with it"
        if not (ahead_of_time and _listed()):
            if not torch.cuda.is_available():
                return "torch finds no CUDA device"
            capability = torch.cuda.get_device_capability()
            if capability < MIN_CAPABILITY:
                found = ".".join(map(str, capability))
                return f"{torch.cuda.get_device_name()} has compute capability {found}; the kernels need 8.0 or later"
        if not ahead_of_time and self.is_ahead_of_time():
            return None
        if not _architectures():
            return f"{ARCH_LIST}={os.environ[ARCH_LIST]!r} names nothing of compute capability 8.0 or later, as needed"
        if cpp_extension.CUDA_HOME is None or not self.nvcc().exists():
            return "nvcc was not found; install the CUDA toolkit of torch's version and set CUDA_HOME to its folder"
        version = re.search(r"release (\d+)\.\d+", _version_of(self.nvcc()))
        if version is not None and version[1] != torch.version.cuda.split(".")[0]:
            return (
                f"{self.nvcc()} is of CUDA {version[1]}, torch of CUDA {torch.version.cuda}; "
                "set CUDA_HOME to the folder of a toolkit of torch's version"
            )
        return None

    def why_unusable(self, module: Any) -> str | None:
        """Why the current device cannot run the loaded `module`; None if it can."""
        error = module.code_error() if self.is_cuda else ""
        if not error:
            return None
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        return (
            f"{self.name} has no code that {torch.cuda.get_device_name()} can run: {error}; "
            f"add its compute capability, {capability}, to {ARCH_LIST}, or unset that, and build again"
        )

    def environment(self) -> dict[str, str]:
        """What to set for a build: TORCH_CUDA_ARCH_LIST, if torch would otherwise also build for too old devices."""
        kept = _architectures() if self.is_cuda else []
        return {ARCH_LIST: ";".join(kept)} if self.is_cuda and kept != (_listed() or _of_devices()) else {}

    def nvcc(self) -> Path:
        """The compiler that torch uses for .cu files."""
        return Path(cpp_extension.CUDA_HOME or "/usr/local/cuda") / "bin" / "nvcc"

    def csrc(self) -> Path:
        """Folder of the sources.  It is beside this one in a checkout, in an editable install and in a wheel."""
        return Path(__file__).resolve().parent.parent / "csrc"

    def sources(self) -> list[str]:
        """Absolute paths, because DeepSpeed resolves relative ones inside its own folder."""
        folder, suffix = ("cuda", "cu") if self.is_cuda else ("cpu", "cpp")
        return [str(self.csrc() / "bindings.cpp"), *map(str, sorted((self.csrc() / folder).glob(f"*.{suffix}")))]

    def include_paths(self) -> list[str]:
        """Absolute paths of the folders of headers."""
        return [str(self.csrc() / "include")]

    def cxx_args(self) -> list[str]:
        """Compiler flags.

        Without -ffp-contract=off the compiler fuses products into sums, and results differ between processors and
        from the definition.  DeepSpeed's `simd_width` only defines macros, which these sources do not read.
        -fopenmp stays out of the linker flags: the OpenMP calls then bind to the runtime that torch has loaded,
        while a second runtime would bring a second set of threads.
        """
        if self.is_cuda:
            return ["-O3", "-std=c++20", "-fvisibility=hidden", "-DHYBRIDEP_CUDA"]
        return ["-O3", "-std=c++20", "-fopenmp", "-ffp-contract=off", "-fvisibility=hidden", self.cpu_arch()]

    def nvcc_args(self) -> list[str]:
        """nvcc's flags, beside those that torch adds.  -fmad=false does what -ffp-contract=off does in `cxx_args`."""
        return ["-O3", "-std=c++20", "-fmad=false", "-lineinfo", "--threads", "4"] if self.is_cuda else []

    def cpu_arch(self) -> str:
        """The flag to compile for this very processor.  DeepSpeed's own method takes a second to find the same."""
        return "-mcpu=native" if platform.machine().startswith("ppc") else "-march=native"

    def digest(self, with_nvcc: bool = True) -> str:
        """First 12 hex digits of a digest of what decides the build; nvcc's version can be left out."""
        sha = hashlib.sha256()
        suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
        compiler = os.environ.get("CXX", "")
        parts = [*self.cxx_args(), *self.nvcc_args(), sys.version, suffix, torch.__version__, compiler]
        if self.is_cuda:
            parts += [_version_of(self.nvcc()) if with_nvcc else "", *_architectures()]
        else:
            parts.append(_processor())
        for part in parts:
            sha.update(part.encode() + b"\0")
        headers = [path for folder in self.include_paths() for path in sorted(Path(folder).glob("*.h"))]
        for path in [*map(Path, self.sources()), *headers]:
            sha.update(path.read_bytes() + b"\0")
        return sha.hexdigest()[:12]

    def build_directory(self) -> Path:
        """Folder of this build, below TORCH_EXTENSIONS_DIR if that is set."""
        root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
        return Path(root) / self.name

    def is_built(self) -> bool:
        """Whether loading would compile nothing."""
        return self.is_ahead_of_time() or (self.build_directory() / f"{self.name}.so").exists()

    def load(self, verbose: bool = True) -> Any:
        """The module compiled ahead of time from these very sources and flags, else the one from `jit_load`."""
        if self.name not in self._loaded_ops and self.is_ahead_of_time():
            self._loaded_ops[self.name] = importlib.import_module(self.absolute_name())
        return self._loaded_ops.get(self.name) or self.jit_load(verbose)

    def builder(self) -> Any:
        """The extension that setup.py builds ahead of time."""
        extension_type = cpp_extension.CUDAExtension if self.is_cuda else cpp_extension.CppExtension
        return extension_type(
            name=self.absolute_name(),
            sources=self.sources(),
            include_dirs=self.include_paths(),
            extra_compile_args={"cxx": self.cxx_args(), "nvcc": self.nvcc_args()},
        )

    def jit_load(self, verbose: bool = True) -> Any:
        """The compiled module, built now if it was not built before.  `load` then finds it again in this process.

        Raises:
            RuntimeError: the compiler or ninja failed; the message ends with what the compiler said.  Or torch does
                not know an architecture that is listed.
            ImportError: the module was built but cannot be loaded.
            OSError: the build folder cannot be written or locked.
            BuildLockTimeout: another process holds the lock and does not let go.
        """
        directory = self.build_directory()
        directory.mkdir(parents=True, exist_ok=True)
        with (
            _ninja_on_path(),
            _changed_environment(self.environment()),
            _exclusive(directory.parent / f"{self.name}.flock"),
        ):
            (directory / "lock").unlink(missing_ok=True)  # torch's lock, left by a build that was killed
            try:
                module = cpp_extension.load(
                    name=self.name,
                    sources=self.sources(),
                    extra_include_paths=self.include_paths(),
                    extra_cflags=self.cxx_args(),
                    extra_cuda_cflags=self.nvcc_args(),
                    build_directory=str(directory),
                    verbose=verbose,
                )
            except ValueError as error:
                listed = os.environ.get(ARCH_LIST)
                raise RuntimeError(
                    f"{error}; {ARCH_LIST} is {listed!r}: set it to what torch and nvcc know"
                ) from error
        self._loaded_ops[self.name] = module
        return module


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file `path`.  Raises BuildLockTimeout after LOCK_TIMEOUT_S."""
    with path.open("a+") as file:
        deadline_s = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                pass
            if time.monotonic() > deadline_s:
                file.seek(0)
                raise BuildLockTimeout(
                    f"{path}: held for over {LOCK_TIMEOUT_S:.0f} s by {file.read().strip() or 'an unknown process'}, "
                    "which builds the same kernels; end that process if it hangs, or delete the file"
                )
            time.sleep(LOCK_POLL_S)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
        yield  # closing the file gives up the lock; the file stays, since another process may wait on it


@contextmanager
def _ninja_on_path() -> Iterator[None]:
    """Put the `ninja` that pip installed beside this Python on PATH, if the environment was not activated."""
    if cpp_extension.is_ninja_available():
        yield
        return
    before = os.environ.get("PATH", os.defpath)
    with _changed_environment({"PATH": os.pathsep.join([sysconfig.get_path("scripts"), before])}):
        yield


@contextmanager
def _changed_environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables inside the `with` block."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _architectures() -> list[str]:
    """The architectures to build for: those listed, or else the devices' own, from MIN_CAPABILITY on."""
    return [arch for arch in _listed() or _of_devices() if not _is_below(arch)]


def _listed() -> list[str]:
    """The entries of TORCH_CUDA_ARCH_LIST; empty if it leaves the choice to the devices."""
    listed = os.environ.get(ARCH_LIST, "")
    return [] if listed == "native" else listed.replace(";", " ").split()


def _of_devices() -> list[str]:
    """The compute capabilities of the devices."""
    found = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    return [f"{major}.{minor}" for major, minor in sorted(found)]


def _is_below(arch: str) -> bool:
    """Whether an entry of TORCH_CUDA_ARCH_LIST, a number or a name, is below MIN_CAPABILITY."""
    number = re.match(r"(\d+)\.(\d+)", arch)
    return arch.startswith(NAMES_BELOW) if number is None else (int(number[1]), int(number[2])) < MIN_CAPABILITY


def _version_of(nvcc: Path) -> str:
    """What `nvcc --version` says; empty if it cannot be run."""
    try:
        return subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ""


def _processor() -> str:
    """What `-march=native` depends on: the processor's model and features, if the system tells them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    kept = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(kept)))
