# SPDX-License-Identifier: Apache-2.0
"""Where the main thread is: in which phase of a step, and whether it waits in a collective.

Nothing is hooked for it.  Another thread reads the main thread's stack a few times a second: DeepSpeed's and torch's
own functions say what runs, whoever has called them.
"""

import gc
import linecache
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType

import torch

PHASES = {  # by functions of DeepSpeed's engine
    "__init__": "start",
    "forward": "forward",
    "backward": "backward",
    "step": "step",
    "save_checkpoint": "save",
    "load_checkpoint": "load",
}
_ENGINE = "deepspeed/runtime/engine.py"
_COLLECTIVES = (  # files whose functions wait for other ranks
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/c10d_logger.py",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/rendezvous.py",
    "deepspeed/comm/",
    "ds_hybridep/transport/agreement.py",
    "ds_hybridep/transport/channels.py",
    "ds_hybridep/transport/groups.py",
    "ds_hybridep/transport/nccl.py",
    "ds_hybridep/sync/transfers.py",
)
_WRAPPERS = {"log_wrapper", "wrapper", "func_wrapper", "wait", "finish", "exposed"}
_POLLERS = ("torch/utils/data/",)  # files that look again and again while they wait
_AT_WORK = ("/subprocess.py", "/bdb.py", "/pdb.py", "/pydevd", "/debugpy/", "torch/utils/file_baton.py")
_STDLIB = sysconfig.get_path("stdlib")
_MAX_FRAMES = 200
MAX_TEXT = 240
DEVICE_S = 5.0
WORK_SHARE = 0.05  # of a core: a thread that takes more is at work
WORK_BYTES = 1 << 20  # between two looks: a process that reads or writes more is at work


@dataclass(frozen=True)
class Position:
    """Where a rank is."""

    step: int = 0  # optimizer steps so far
    phase: str = ""  # of PHASES, or "between steps"
    what: str = ""  # operation or place
    waits: bool = False  # in a collective
    for_s: float = 0.0  # since when it has been in this very call, and has done nothing if that is no collective

    def __str__(self) -> str:
        since = f" for {self.for_s:.0f} s" if self.for_s >= 1 else ""
        return f"{self.phase} of step {self.step}, {'waits in ' if self.waits else ''}{self.what}{since}"


class MainThread:
    """Watches the thread that it was made in.

    step: the number of optimizer steps so far.
    """

    def __init__(self, step: Callable[[], int]) -> None:
        self._ident = threading.get_ident()
        self._step = step
        self._seen: tuple[int, int] | None = None  # id and instruction of the innermost frame
        # In a collective: kept once it was seen twice, so that its id is of no other frame.  Not elsewhere, since it
        # keeps what its function holds, and so do those that called it.
        self._held: FrameType | None = None
        self._pauses = False
        self._since = self._looked = time.monotonic()
        self._clock = time.pthread_getcpuclockid(self._ident)
        self._used = 0.0, 0  # CPU seconds of the thread, bytes that the process has read and written

    def look(self) -> Position:
        """Where the thread is now."""
        with self._no_collection():
            frames = self._frames()
        now = time.monotonic()
        if not frames:
            return Position(self._step(), "between steps", "main thread has ended")
        # A loop that polls stands where it was called.
        place = next((one for one in frames if not _polls(one.f_code.co_filename)), frames[0])
        collective, seen = _collective_of(frames), (id(place), place.f_lasti)
        if seen != self._seen or (self._held is not None and self._held is not place):
            self._seen, self._held, self._since = seen, None, now
        elif collective is not None:
            self._held = place
        phase, what, waits, for_s = _phase_of(frames), "", True, now - self._since
        if collective is not None:
            what, for_s = collective, for_s if self._held else 0.0
        elif for_s > DEVICE_S and phase in ("forward", "backward", "step") and torch.cuda.is_initialized():
            # A call that takes so long waits for the device, which waits in a collective of its own.
            what = f"the device at {_place_of(frames)}"
        else:
            what, waits = _place_of(frames), False
        if self._has_worked(now, frames) and not waits:
            self._since, for_s = now, 0.0
        return Position(self._step(), phase, what[:MAX_TEXT], waits, for_s)

    def _has_worked(self, now: float, frames: list[FrameType]) -> bool:
        """Since the last look: computed, read or written; or it waits for a program or a debugger."""
        cpu_s, num_bytes = _cpu_s(self._clock), _moved_bytes()
        seconds, self._looked = now - self._looked, now
        (earlier_s, earlier_bytes), self._used = self._used, (cpu_s, num_bytes)
        # A thread that waits for a device may spin.
        computes = cpu_s - earlier_s > WORK_SHARE * seconds and not torch.cuda.is_initialized()
        moves = num_bytes - earlier_bytes > WORK_BYTES
        return computes or moves or any(name in frame.f_code.co_filename for frame in frames for name in _AT_WORK)

    def _frames(self) -> list[FrameType]:
        """Frames of the thread, or of autograd's thread that runs a device's backward for it; the innermost first."""
        frames = sys._current_frames()
        frame = frames.get(self._ident)
        if frame is not None and frame.f_code.co_name == "_engine_run_backward":
            known = {one.ident for one in threading.enumerate() if not isinstance(one, threading._DummyThread)}
            frame = next((other for ident, other in frames.items() if ident not in known), frame)
        found: list[FrameType] = []
        while frame is not None and len(found) < _MAX_FRAMES:
            found.append(frame)
            frame = frame.f_back
        return found

    @contextmanager
    def _no_collection(self) -> Iterator[None]:
        """Python 3.11 makes a frame's object when it is asked for, which may collect garbage, whose finalizers may let
        the thread go on that is looked at: its frames are then read after they have ended.
        """
        self._pauses = sys.version_info < (3, 12) and gc.isenabled()
        if self._pauses:
            gc.disable()
        try:
            yield
        finally:
            self.forked()

    def forked(self) -> None:
        """Turn garbage collection on again in a process that was forked during a look."""
        if self._pauses:
            gc.enable()
        self._pauses = False


def _cpu_s(clock: int) -> float:
    """CPU time of a thread; 0 once it has ended."""
    with suppress(OSError):
        return time.clock_gettime(clock)
    return 0.0


def _moved_bytes() -> int:
    """What this process has read and written, of files above all; 0 where the system does not say."""
    with suppress(OSError, ValueError, IndexError), open("/proc/self/io", "rb") as file:
        return sum(int(line.split()[1]) for line in file.read().splitlines()[:2])
    return 0


def _polls(path: str) -> bool:
    return _is_stdlib(path) or any(one in path for one in _POLLERS)


def _phase_of(frames: list[FrameType]) -> str:
    for frame in reversed(frames):
        name, path = frame.f_code.co_name, frame.f_code.co_filename
        if name in PHASES and path.endswith(_ENGINE):
            return PHASES[name]
        if name == "backward" and path.endswith("torch/_tensor.py"):
            return "backward"
    return "between steps"


def _collective_of(frames: list[FrameType]) -> str | None:
    """The collective that the innermost frames wait in, and who called it; None for none."""
    operation, purpose, caller = "", "", None
    for frame in frames:
        path = frame.f_code.co_filename
        if any(one in path for one in _COLLECTIVES):
            name = frame.f_code.co_name
            operation = name if name not in _WRAPPERS or not operation else operation
            if name == "wait":  # of a transfer of ours
                purpose = str(getattr(frame.f_locals.get("self"), "purpose", purpose))
        elif not _is_stdlib(path):
            caller = frame
            break
    if operation:
        return purpose or f"{operation} at {_describe(caller)}"
    if caller is frames[0] and ".wait(" in linecache.getline(caller.f_code.co_filename, caller.f_lineno or 0):
        return f"wait at {_describe(caller)}"  # a handle of an asynchronous collective
    return None


def _place_of(frames: list[FrameType]) -> str:
    """The innermost line that is not of Python's own library."""
    return _describe(next((frame for frame in frames if not _is_stdlib(frame.f_code.co_filename)), frames[0]))


def _is_stdlib(path: str) -> bool:
    return path.startswith(("<frozen", _STDLIB)) and "site-packages" not in path


def _describe(frame: FrameType | None) -> str:
    if frame is None:
        return "?"
    path = "/".join(frame.f_code.co_filename.split("/")[-2:])
    return f"{path}:{frame.f_lineno} ({frame.f_code.co_name})"
