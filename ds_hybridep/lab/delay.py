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

SOURCE = Path(__file__).with_name("delay_line.c")
TUN_DEVICE = Path("/dev/net/tun")
COMPILE_FLAGS = ("-O2", "-std=c11", "-Wall", "-Wextra", "-Werror")
COMPILE_TIMEOUT_S = 60.0
READY = b"ready\n"
NS_PER_S = 1e9
PPM = 1e6


class LineEnd(NamedTuple):
    """A TAP device that a delay line makes: its name, and the namespace that it is in."""

    namespace: str
    device: str


def build_delay_line(cache_dir: Path | None = None) -> Path:
    """The compiled program; compiles it if this source was not compiled into `cache_dir` before.

    cache_dir: ~/.cache/ds_hybridep by default.
    Raises LabError if there is no C compiler or it fails.
    """
    cache_dir = cache_dir or Path.home() / ".cache" / "ds_hybridep"
    digest = hashlib.sha256(SOURCE.read_bytes() + " ".join(COMPILE_FLAGS).encode()).hexdigest()[:16]
    program = cache_dir / f"delay_line-{digest}"
    if program.exists():
        return program
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise LabError("a delay needs a C compiler (cc, gcc or clang) once: install one, or run the lab without delay")
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_dir) as folder:
        fresh = Path(folder) / "delay_line"
        run = subprocess.run(
            [compiler, *COMPILE_FLAGS, "-o", str(fresh), str(SOURCE)],
            capture_output=True,
            text=True,
            timeout=COMPILE_TIMEOUT_S,
        )
        if run.returncode != 0:
            raise LabError(f"{compiler} could not compile {SOURCE.name}:\n{run.stderr.strip()}")
        fresh.replace(program)  # in one step, because another process may be starting the program
    return program


def why_no_delay() -> str | None:
    """Why this process cannot make a delay line, in one sentence; None if it can."""
    if not TUN_DEVICE.exists():
        return f"{TUN_DEVICE} is missing (modprobe tun, or give the container --device {TUN_DEVICE})"
    if not os.access(TUN_DEVICE, os.R_OK | os.W_OK):
        return f"{TUN_DEVICE} may not be opened by this user"
    return None


class DelayLine:
    """A running cable between two new TAP devices; the devices exist as long as it runs.

    From the constructor until `stop`, every frame that leaves by device a arrives at device b `a_to_b_s` later. Frames
    from b to a arrive `b_to_a_s` later. From a to b, a frame takes up to `jitter_s` more, evenly distributed but in
    order, and the share `loss` of frames is lost. The line ends when the process that made it ends.
    """

    def __init__(
        self,
        program: Path,
        a: LineEnd,
        b: LineEnd,
        *,
        a_to_b_s: float,
        b_to_a_s: float,
        jitter_s: float = 0.0,
        loss: float = 0.0,
    ) -> None:
        times_ns = [str(round(time_s * NS_PER_S)) for time_s in (a_to_b_s, b_to_a_s, jitter_s)]
        self._process = subprocess.Popen(
            [str(program), str(os.getpid()), *a, *b, *times_ns, str(round(loss * PPM))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C must reach it through `stop`, after the ranks have ended
        )
        assert self._process.stdout is not None
        if self._process.stdout.readline() != READY:
            _, message = self._process.communicate()
            raise LabError(f"no delay line from {a} to {b}: {message.decode(errors='replace').strip()}")

    def change(self, *, a_to_b_s: float, jitter_s: float, loss: float) -> None:
        """Change delay, jitter and loss from a to b for frames that leave from now on. No frame overtakes another."""
        assert self._process.stdin is not None
        orders = struct.pack("=3q", round(a_to_b_s * NS_PER_S), round(jitter_s * NS_PER_S), round(loss * PPM))
        os.write(self._process.stdin.fileno(), orders)

    def stop(self) -> str | None:
        """Ends the line, its two devices and the frames under way. Returns what went wrong, or None."""
        ended_before = self._process.poll() is not None
        self._process.kill()
        _, message = self._process.communicate()
        said = message.decode(errors="replace").strip()
        return said or (f"a delay line ended with code {self._process.returncode}" if ended_before else None)
