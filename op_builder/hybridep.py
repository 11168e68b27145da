# SPDX-License-Identifier: Apache-2.0
"""Builds the kernels in csrc/ for the CPU or for CUDA: on first use, once per kind of machine and version of sources.

    HybridEPBuilder()         for CPU tensors, with the C++ compiler
    HybridEPBuilder("cuda")   for CUDA tensors, with nvcc: for the architectures in TORCH_CUDA_ARCH_LIST, else those of
                              the devices found

With DS_BUILD_HYBRIDEP=1 in the environment, setup.py builds ahead of time whatever this machine can build.
"""

import fcntl
import glob
import hashlib
import importlib
import importlib.util
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, TextIO

import torch
from deepspeed.ops.op_builder.cpu.builder import CPUOpBuilder
from torch.utils import cpp_extension

COMPILE_PROGRAM = Path(__file__).with_name("compile.py")
MOST_WAIT_S = 600.0  # for the build of another process; then this one builds too
LOCK_POLL_S = 0.1

MIN_CAPABILITY = (8, 0)
NAMES_BELOW = ("Kepler", "Maxwell", "Pascal", "Volta", "Turing")  # torch's names for those below MIN_CAPABILITY
ARCH_LIST = "TORCH_CUDA_ARCH_LIST"


class HybridEPBuilder(CPUOpBuilder):  # type: ignore[misc]  # deepspeed has no types
    """Compiles and loads the kernels for tensors of one type of device.

    The CUDA kernels need compute capability 8.0 or later; lower entries of TORCH_CUDA_ARCH_LIST are left out.

    The module's name ends in a digest of sources, flags, Python, torch, and for `-march=native` of the processor.  So
    a changed source gets another name, and no stale module is loaded.  Unlike machines may share a home directory: a
    module has a library for each set of architectures and compilers.

        hybridep_cuda_0123456789ab/8.0-9.0_a1b2c3d4e5f6.so      the last part is a digest of the compilers' versions

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
            return None if self.is_built() or self.compilers else self._why_no_compiler()
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

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether the kernels are built, or can be built here.  DeepSpeed's `ds_report` asks."""
        reason = self.why_not()
        if reason is not None and verbose:
            self.warning(reason)
        return reason is None

    def _why_no_compiler(self) -> str:
        wanted = f"{os.environ.get('CXX', 'c++')}{' or nvcc' if self.is_cuda else ''}"
        return f"{wanted} cannot be run; install a C++ compiler, or set CXX to the one that you have"

    def _why_no_build(self) -> str | None:
        """Why nvcc cannot build here; None if no reason is known."""
        if not _architectures():
            return f"{ARCH_LIST}={os.environ[ARCH_LIST]!r} names nothing of compute capability 8.0 or later, as needed"
        if cpp_extension.CUDA_HOME is None or not self.nvcc().exists():
            return "nvcc was not found; install the CUDA toolkit of torch's version and set CUDA_HOME to its folder"
        if not (self.nvcc().parents[1] / "include" / "cuda_runtime.h").exists():
            return (
                f"{self.nvcc().parents[1]} has nvcc, but not include/cuda_runtime.h; set CUDA_HOME to the folder of "
                "the CUDA toolkit (torch takes the folder above the nvcc that it finds)"
            )
        version = re.search(r"release (\d+)\.\d+", _version_of([str(self.nvcc())]))
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

    @cached_property
    def compilers(self) -> str:
        """What the compilers say of themselves; empty unless all can be run."""
        commands = [shlex.split(os.environ.get("CXX", "c++")), *([[str(self.nvcc())]] if self.is_cuda else [])]
        said = [_version_of(command) for command in commands]
        return "\0".join(said) if all(said) else ""

    def digest(self) -> str:
        """A digest of what decides the module, whoever compiles it and for which architectures."""
        suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
        parts = [*self.cxx_args(), *self.nvcc_args(), sys.version, suffix, torch.__version__]
        headers = [path for folder in self.include_paths() for path in sorted(Path(folder).glob("*.h"))]
        texts = [path.read_bytes() for path in [*map(Path, self.sources()), *headers]]
        return _digest([*map(str.encode, parts), b"" if self.is_cuda else _processor().encode(), *texts])

    def build_directory(self) -> Path:
        """Folder of this module's libraries, below TORCH_EXTENSIONS_DIR if that is set."""
        root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
        return Path(root).absolute() / self.name

    def library(self) -> Path:
        """Where the library by the compilers of this machine lies, once it is built."""
        architectures = f"{'-'.join(_architectures())}_" if self.is_cuda else ""
        return self.build_directory() / f"{architectures}{_digest([self.compilers.encode()])}.so"

    def find_library(self) -> Path | None:
        """The library that was built earlier.  On a machine without compilers, that of any."""
        library = self.library()
        if self.compilers:
            return library if library.exists() else None
        architectures = library.name.rpartition("_")[0]
        pattern = f"{glob.escape(architectures)}_*.so" if self.is_cuda else "*.so"
        return min(library.parent.glob(pattern), default=None)

    def is_built(self) -> bool:
        """Whether loading would compile nothing."""
        return self.is_ahead_of_time() or self.find_library() is not None

    def load(self, verbose: bool = True) -> Any:
        """The module compiled ahead of time from these very sources and flags, else the one from `jit_load`."""
        if self.name not in self._loaded_ops:
            self._loaded_ops[self.name] = self._ahead_of_time() or self.jit_load(verbose)
        return self._loaded_ops[self.name]

    def _ahead_of_time(self) -> Any:
        """The module compiled ahead of time; None if there is none, or if a build would fit the device better."""
        if not self.is_ahead_of_time():
            return None
        module = importlib.import_module(self.absolute_name())
        if self.why_unusable(module) is None:
            return module
        return None if self.find_library() is not None or self._why_no_build() is None else module

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
        library = self.find_library()
        if library is None:
            library = self.library()
            _make_once(library, lambda: self._compile(library))
        spec = importlib.util.spec_from_file_location(self.name, library)
        assert spec is not None, library
        assert spec.loader is not None, library
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def _compile(self, library: Path) -> None:
        if not self.compilers:
            raise RuntimeError(self._why_no_compiler())
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
    """Call `make`, unless another process of this machine makes the library meanwhile.

    Nobody waits for more than one build: if that fails, its error is raised here too.  Machines do not wait for each
    other, because locks of shared folders cannot be relied on; the first that is ready puts its library in place.
    """
    file = _open_lock(library)
    if file is None:
        return make()
    with file:  # closing it gives up the lock, and so does the end of this process
        is_mine = is_first = _try_lock(file)
        deadline_s = time.monotonic() + MOST_WAIT_S
        while not (is_mine or library.exists() or time.monotonic() > deadline_s):
            time.sleep(LOCK_POLL_S)
            is_mine = _try_lock(file)
        if library.exists():
            return None
        failure = file.read() if is_mine and not is_first else ""
        if failure:
            raise RuntimeError(failure)
        if is_mine:
            file.truncate(0)
        try:
            make()
        except (RuntimeError, OSError) as error:
            if is_mine:
                file.seek(0)
                file.write(str(error))
            raise


def _open_lock(library: Path) -> TextIO | None:
    """A file of this machine and user that stands for the library; None if there cannot be one."""
    path = Path(tempfile.gettempdir()) / f"ds_hybridep_{os.getuid()}_{_digest([os.fsencode(library)])}.lock"
    try:
        return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600), "r+", encoding="utf-8")
    except OSError:
        return None


def _try_lock(file: TextIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks here: the lock only saves work
        pass
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


def _version_of(command: list[str]) -> str:
    """What a compiler says to --version, in English whatever the user's language; empty if it cannot be run."""
    english = {**os.environ, "LC_ALL": "C"}
    try:
        run = subprocess.run(
            [*command, "--version"], env=english, capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return run.stdout


def _processor() -> str:
    """What `-march=native` depends on: the processor's model and features, if the system tells them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    kept = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(kept)))
