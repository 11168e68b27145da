# SPDX-License-Identifier: Apache-2.0
"""Builder of the CPU kernels in csrc/, on first use and once per machine and version of the sources."""

import fcntl
import hashlib
import os
import platform
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed.ops.op_builder.cpu.builder import CPUOpBuilder
from torch.utils import cpp_extension

LOCK_TIMEOUT_S = 600.0
LOCK_POLL_S = 0.1


class BuildLockTimeout(RuntimeError):
    """Another process has held the build lock for longer than any build takes."""


class HybridEPBuilder(CPUOpBuilder):  # type: ignore[misc]  # deepspeed has no types
    """Compiles and loads the kernels for CPU tensors.

    The module's name ends in a digest of all that decides what is built: sources, flags, Python, torch, and for
    `-march=native` the processor.  A changed source therefore has another name, and a home directory shared by unlike
    machines holds one build for each; no stale module can be loaded.

    Builds of one module exclude each other by `flock`, which the kernel drops when the holder dies.  torch's own lock
    is a file that stays behind a killed build and is then waited for without end: with the flock held nobody else can
    be at work, so such a file is removed.
    """

    BUILD_VAR = "DS_BUILD_HYBRIDEP"
    NAME = "hybridep_rows"

    def __init__(self, name: str | None = None) -> None:
        base = name or self.NAME
        super().__init__(name=base)
        self.name: str = f"{base}_{self.digest()}"

    def absolute_name(self) -> str:
        """Where the module would be if it were compiled ahead of time, which setup.py does not do."""
        return f"ds_hybridep.{self.name}"

    def csrc(self) -> Path:
        """Folder of the sources: beside this one in a checkout, in an editable install and in a wheel alike."""
        return Path(__file__).resolve().parent.parent / "csrc"

    def sources(self) -> list[str]:
        """Absolute paths: DeepSpeed resolves others inside its own folder."""
        names = ("bindings.cpp", "cpu/rows.cpp", "cpu/codecs.cpp", "cpu/top_k.cpp", "cpu/low_rank.cpp")
        return [str(self.csrc() / name) for name in names]

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
        return ["-O3", "-std=c++20", "-fopenmp", "-ffp-contract=off", "-fvisibility=hidden", self.cpu_arch()]

    def cpu_arch(self) -> str:
        """The flag to compile for this very processor.  DeepSpeed's own takes a second to arrive at the same."""
        return "-mcpu=native" if platform.machine().startswith("ppc") else "-march=native"

    def digest(self) -> str:
        """First 12 hex digits of a digest of all that decides what is built."""
        sha = hashlib.sha256()
        suffix = str(sysconfig.get_config_var("EXT_SUFFIX"))
        compiler = os.environ.get("CXX", "")
        for part in [*self.cxx_args(), sys.version, suffix, torch.__version__, compiler, _processor()]:
            sha.update(part.encode() + b"\0")
        headers = [path for folder in self.include_paths() for path in sorted(Path(folder).glob("*.h"))]
        for path in [*map(Path, self.sources()), *headers]:
            sha.update(path.read_bytes() + b"\0")
        return sha.hexdigest()[:12]

    def build_directory(self) -> Path:
        """Folder of this build, below TORCH_EXTENSIONS_DIR where that is set."""
        root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
        return Path(root) / self.name

    def jit_load(self, verbose: bool = True) -> Any:
        """The compiled module, built now unless that was done before.  `load` also remembers it in this process.

        Raises:
            RuntimeError: the compiler or ninja failed; the message ends with what the compiler said.
            ImportError: the module was built but cannot be loaded.
            OSError: the build folder cannot be written or locked.
            BuildLockTimeout: another process holds the lock and does not let go.
        """
        directory = self.build_directory()
        directory.mkdir(parents=True, exist_ok=True)
        with _ninja_on_path(), _exclusive(directory.parent / f"{self.name}.flock"):
            (directory / "lock").unlink(missing_ok=True)  # torch's, left by a build that was killed
            module = cpp_extension.load(
                name=self.name,
                sources=self.sources(),
                extra_include_paths=self.include_paths(),
                extra_cflags=self.cxx_args(),
                build_directory=str(directory),
                verbose=verbose,
            )
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
    """Let the `ninja` that pip installed beside this Python be found, in environments that were not activated."""
    if cpp_extension.is_ninja_available():
        yield
        return
    before = os.environ.get("PATH", os.defpath)
    os.environ["PATH"] = os.pathsep.join([sysconfig.get_path("scripts"), before])
    try:
        yield
    finally:
        os.environ["PATH"] = before


def _processor() -> str:
    """What `-march=native` depends on: the processor's model and features, where the system tells them."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    kept = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(kept)))
