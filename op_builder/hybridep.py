# SPDX-License-Identifier: Apache-2.0
"""Builds the kernels in csrc/ for the CPU or for CUDA: on first use, once per kind of machine and version of sources.

    HybridEPBuilder()         for CPU tensors, with the C++ compiler
    HybridEPBuilder("cuda")   for CUDA tensors, with nvcc: for the architectures in TORCH_CUDA_ARCH_LIST, else those of
                              the devices found

With DS_BUILD_HYBRIDEP=1 in the environment, setup.py builds ahead of time whatever this machine can build.
"""

import fcntl
import hashlib
import importlib
import importlib.util
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import torch
from deepspeed.ops.op_builder.cpu.builder import CPUOpBuilder
from torch.utils import cpp_extension

COMPILE_PROGRAM = Path(__file__).with_name("compile.py")

MIN_CAPABILITY = (8, 0)
ARCH_LIST = "TORCH_CUDA_ARCH_LIST"


class HybridEPBuilder(CPUOpBuilder):  # type: ignore[misc]  # deepspeed has no types
    """Compiles and loads the kernels for tensors of one type of device.

    The CUDA kernels need compute capability 8.0 or later; lower entries of TORCH_CUDA_ARCH_LIST are left out.

    The module's name ends in a digest of sources, flags, Python, torch, the C library, and for `-march=native` of the
    processor.  So a changed source gets another name, no stale module is loaded, and unlike machines may share a home
    directory.  For CUDA it has a library for each set of architectures.

        hybridep_rows_0123456789ab/kernels.so
        hybridep_cuda_0123456789ab/8.0-9.0.so

    A library that exists is imported, without a lock.  One that does not is built in a folder of its own and then
    linked to its place, never over another one, because other processes have that mapped.  What a killed build leaves
    behind is in nobody's way.
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
        """The module's name if it was compiled ahead of time."""
        return f"ds_hybridep.{self.name}"

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
        return None if not ahead_of_time and self.is_built() else self._why_no_build()

    def _why_no_build(self) -> str | None:
        """Why nvcc cannot build here; None if no reason is known."""
        if not _architectures():
            return f"{ARCH_LIST}={os.environ[ARCH_LIST]!r} names nothing of compute capability 8.0 or later, as needed"
        if cpp_extension.CUDA_HOME is None or not self.nvcc().exists():
            return "nvcc was not found; install the CUDA toolkit of torch's version and set CUDA_HOME to its folder"
        version = re.search(r"release (\d+)\.\d+", _version_of(self.nvcc()))
        if version is not None and version[1] != str(torch.version.cuda).split(".")[0]:
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

    def digest(self) -> str:
        """A digest of what decides the module, whoever compiles it and for which architectures of GPUs."""
        suffix, c_library = str(sysconfig.get_config_var("EXT_SUFFIX")), "".join(platform.libc_ver())
        parts = [*self.cxx_args(), *self.nvcc_args(), sys.version, suffix, c_library, torch.__version__]
        headers = [path for folder in self.include_paths() for path in sorted(Path(folder).glob("*.h"))]
        texts = [path.read_bytes() for path in [*map(Path, self.sources()), *headers]]
        return _digest([*map(str.encode, parts), b"" if self.is_cuda else _processor().encode(), *texts])

    def build_directory(self) -> Path:
        """Folder of this module's libraries, below TORCH_EXTENSIONS_DIR if that is set."""
        root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
        return Path(root).absolute() / self.name

    def library(self) -> Path:
        """Where the library lies, once it is built."""
        architectures = "-".join(_architectures()) if self.is_cuda else "kernels"
        return self.build_directory() / f"{architectures}.so"

    def is_built(self) -> bool:
        """Whether loading would compile nothing."""
        return self.is_ahead_of_time() or self.library().exists()

    def load(self, verbose: bool = True) -> Any:
        """The module compiled ahead of time from these very sources and flags, else the one from `jit_load`."""
        if self.name not in self._loaded_ops:
            ready = importlib.import_module(self.absolute_name()) if self.is_ahead_of_time() else None
            self._loaded_ops[self.name] = ready or self.jit_load(verbose)
        return self._loaded_ops[self.name]

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
        """The compiled module, built now if it was not built before.  What compilers say is shown if they fail.

        Raises:
            RuntimeError: the compiler or ninja failed, here or in the process that this one waited for; the message
                ends with what the compiler said.  Or torch does not know an architecture that is listed.
            ImportError: the library cannot be loaded.
            OSError: the build folder cannot be written.
        """
        library = self.library()
        if not library.exists():
            _make_once(library, lambda: self._compile(library))
        spec = importlib.util.spec_from_file_location(self.name, library)
        assert spec is not None, library
        assert spec.loader is not None, library
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def _compile(self, library: Path) -> None:
        compiler = os.environ.get("CXX", "c++")
        if shutil.which(shlex.split(compiler)[0]) is None:
            raise RuntimeError(f"{compiler} cannot be run; install a C++ compiler, or set CXX to one that is there")
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="building-", dir=library.parent, ignore_cleanup_errors=True) as folder:
            arguments = {
                "name": self.name,
                "sources": self.sources(),
                "extra_include_paths": self.include_paths(),
                "extra_cflags": self.cxx_args(),
                "extra_cuda_cflags": self.nvcc_args(),
                "build_directory": folder,
            }
            # pip puts ninja beside this Python, which is on the PATH of activated environments only.
            path = os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])
            run = subprocess.run(
                [sys.executable, str(COMPILE_PROGRAM)],
                env={**os.environ, **self.environment(), "PATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
                input=json.dumps(arguments),
                capture_output=True,
                text=True,
                errors="replace",
            )
            if run.returncode:
                ended = f"{COMPILE_PROGRAM.name} ended with {run.returncode}: {run.stderr}"
                raise RuntimeError(run.stdout.strip() or ended)
            _put_in_place(Path(folder) / f"{self.name}.so", library)


def _make_once(library: Path, make: Callable[[], None]) -> None:
    """Call `make`, unless another process of this machine makes the library meanwhile; if it fails, so does this.

    Machines do not wait for each other, because locks of shared folders cannot be relied on; the first that is ready
    puts its library in place.
    """
    path = Path(tempfile.gettempdir()) / f"ds_hybridep_{os.getuid()}_{_digest([os.fsencode(library)])}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "r+", encoding="utf-8") as file:  # closing it gives up the lock, as does our end
        has_waited = not _try_lock(file)
        if has_waited:
            fcntl.flock(file, fcntl.LOCK_EX)
        if library.exists():
            return
        if has_waited and (failure := file.read()):
            raise RuntimeError(failure)
        file.truncate(0)
        try:
            make()
        except (RuntimeError, OSError) as error:
            file.seek(0)
            file.write(str(error))
            raise


def _try_lock(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _put_in_place(built: Path, library: Path) -> None:
    """Give a finished library its name, unless another machine was faster.  No library is overwritten."""
    try:
        os.link(built, library)
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        if not library.exists():
            os.rename(built, library)


def _digest(parts: list[bytes]) -> str:
    """The first 12 hex digits of a digest."""
    sha = hashlib.sha256()
    for part in parts:
        sha.update(part + b"\0")
    return sha.hexdigest()[:12]


def _architectures() -> list[str]:
    """The architectures to build for: those listed, or else the devices' own, from MIN_CAPABILITY on."""
    found = [(arch, re.match(r"(\d+)\.(\d+)", arch)) for arch in _listed() or _of_devices()]
    return [arch for arch, number in found if number is None or (int(number[1]), int(number[2])) >= MIN_CAPABILITY]


def _listed() -> list[str]:
    """The entries of TORCH_CUDA_ARCH_LIST; empty if it leaves the choice to the devices."""
    listed = os.environ.get(ARCH_LIST, "")
    return [] if listed == "native" else listed.replace(";", " ").split()


def _of_devices() -> list[str]:
    """The compute capabilities of the devices."""
    found = {torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())}
    return [f"{major}.{minor}" for major, minor in sorted(found)]


def _version_of(nvcc: Path) -> str:
    return subprocess.run([nvcc, "--version"], capture_output=True, text=True, timeout=60).stdout


def _processor() -> str:
    """What `-march=native` depends on: the processor's model and features, if the system tells them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    kept = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(kept)))
