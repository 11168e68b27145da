# SPDX-License-Identifier: Apache-2.0
"""The delay line: a program that is compiled once into a cache folder. Each delayed link runs one process of it.

On two cores without shaping, TCP reached 7.3 Gbit/s through one delay line. It reached 1 Gbit/s with single frames of
1.5 KB, which TCP sends on links far slower than that. At 1 Gbit/s a delay line takes a fifth of a core.
"""

import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

from ds_hybridep.errors import LabError

SOURCE = Path(__file__).with_name("delay_line.cpp")
COMPILE_FLAGS = ("-O2", "-std=c++17", "-Wall", "-Wextra", "-Werror")
COMPILE_TIMEOUT_S = 60.0


class LineEnd(NamedTuple):
    """A TAP device that a delay line makes: the namespace that it is in, and its name."""

    namespace: str
    device: str


def build_delay_line(cache_dir: Path | None = None) -> Path:
    """The compiled program; compiles it if this source was not compiled into `cache_dir` before.

    cache_dir: ~/.cache/ds_hybridep by default.
    Raises LabError if there is no C++ compiler or it fails.
    """
    cache_dir = cache_dir or Path.home() / ".cache" / "ds_hybridep"
    digest = hashlib.sha256(SOURCE.read_bytes() + " ".join(COMPILE_FLAGS).encode()).hexdigest()[:16]
    program = cache_dir / f"delay_line-{digest}"
    if program.exists():
        return program
    compiler = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if compiler is None:
        raise LabError(
            "a delay needs a C++ compiler (c++, g++ or clang++) once: install one, or run the lab without delay"
        )
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir) as folder:
        fresh = Path(folder) / "delay_line"
        command = [compiler, *COMPILE_FLAGS, "-o", str(fresh), str(SOURCE)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S)
        if run.returncode != 0:
            raise LabError(f"{compiler} could not compile {SOURCE.name}:\n{run.stderr.strip()}")
        fresh.replace(program)  # in one step, because another process may be starting the program
    return program


class DelayLine:
    """A running cable between two new TAP devices, in one direction; the devices exist as long as it runs.

    Every frame that leaves by device a arrives at device b `delay_s` later, and the share `loss` of frames is lost.
    The line ends when the process that made it ends.
    """

    def __init__(self, a: LineEnd, b: LineEnd, *, delay_s: float, loss: float) -> None:
        self.process = subprocess.Popen(
            [str(build_delay_line()), *a, *b],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C must reach it through `stop`, after the ranks have ended
        )
        assert self.process.stdout is not None
        if self.process.stdout.readline() != b"ready\n":
            raise LabError(f"no delay line from {a} to {b}: {self.stop()}")
        self.change(delay_s=delay_s, loss=loss)

    def change(self, *, delay_s: float, loss: float) -> None:
        """Change delay and loss for frames that leave from now on. No frame overtakes another."""
        assert self.process.stdin is not None
        os.write(self.process.stdin.fileno(), struct.pack("=2q", round(delay_s * 1e9), round(loss * 1e6)))

    def stop(self) -> str:
        """Ends the line, its two devices and the frames under way. Returns what went wrong, or ""."""
        ended_before = self.process.poll()
        self.process.kill()
        _, message = self.process.communicate()
        said = message.decode(errors="replace").strip()
        return said or ("" if ended_before is None else f"a delay line ended with code {ended_before}")
