# SPDX-License-Identifier: Apache-2.0
"""Where the main thread is: in which phase of a step, and whether it waits in a collective.

This needs no hooks.  Another thread reads the main thread's stack a few times a second.  The functions of DeepSpeed
and torch on the stack show what runs, no matter who called them.
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
_POLLERS = ("torch/utils/data/",)  # files whose functions poll while they wait
_AT_WORK = ("/subprocess.py", "/bdb.py", "/pdb.py", "/pydevd", "/debugpy/", "torch/utils/file_baton.py")
_STDLIB = sysconfig.get_path("stdlib")
_MAX_FRAMES = 200
MAX_TEXT = 240
DEVICE_S = 5.0
WORK_SHARE = 0.05  # of a core: a thread that uses more is at work
WORK_BYTES = 1 << 20  # between two looks: a process that reads or writes more is at work


@dataclass(frozen=True)
class Position:
    """Where a rank is."""

    step: int = 0  # optimizer steps so far
    phase: str = ""  # of PHASES, or "between steps"
    what: str = ""  # operation or place
    waits: bool = False  # in a collective
    for_s: float = 0.0  # seconds in this same call; outside a collective, since it last did any work

    def __str__(self) -> str:
        since = f" for {self.for_s:.0f} s" if self.for_s >= 1 else ""
        return f"{self.phase} of step {self.step}, {'waits in ' if self.waits else ''}{self.what}{since}"


class MainThread:
    """Watches the thread that it was made in.

    step: returns the number of optimizer steps so far.
    """

    def __init__(self, step: Callable[[], int]) -> None:
        self._ident = threading.get_ident()
        self._step = step
        self._seen: tuple[int, int] | None = None  # id and instruction of the innermost frame that does not poll
        # A collective's frame that was seen twice, kept so that no other frame can get its id.  Frames outside of
        # collectives are not kept, because a frame keeps all variables of its function and its callers alive.
        self._held: FrameType | None = None
        self._pauses = False
        self._since = self._looked = time.monotonic()
        self._clock = time.pthread_getcpuclockid(self._ident)
        self._used = 0.0, 0  # CPU seconds of the thread, bytes that the process has read and written

    def look(self) -> Position:
        """Return where the thread is now."""
        with self._no_collection():
            frames = self._frames()
        now = time.monotonic()
        if not frames:
            return Position(self._step(), "between steps", "main thread has ended")
        # A function that polls counts as the place that called it.
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
            # A call that takes this long waits for the device, which itself waits in a collective.
            what = f"the device at {_place_of(frames)}"
        else:
            what, waits = _place_of(frames), False
        if self._has_worked(now, frames) and not waits:
            self._since, for_s = now, 0.0
        return Position(self._step(), phase, what[:MAX_TEXT], waits, for_s)

    def _has_worked(self, now: float, frames: list[FrameType]) -> bool:
        """Return True if it computed, read or wrote since the last look, or waits for a program or a debugger."""
        cpu_s, num_bytes = _cpu_s(self._clock), _moved_bytes()
        seconds, self._looked = now - self._looked, now
        (earlier_s, earlier_bytes), self._used = self._used, (cpu_s, num_bytes)
        # A thread that waits for a device may spin: its CPU time then says nothing.
        computes = cpu_s - earlier_s > WORK_SHARE * seconds and not torch.cuda.is_initialized()
        moves = num_bytes - earlier_bytes > WORK_BYTES
        return computes or moves or any(name in frame.f_code.co_filename for frame in frames for name in _AT_WORK)

    def _frames(self) -> list[FrameType]:
        """Return frames of the thread, or of autograd's thread that runs its backward on a device; innermost first."""
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
        """Pause garbage collection inside.  Python 3.11 may collect garbage when it makes a frame's object; finalizers
        may then let the watched thread go on, and its frames would be read after they have ended.
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
    """Return the bytes that this process has read and written, mostly files; 0 if the system does not say."""
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
    """Return the collective that the innermost frames wait in, and its caller; None for none."""
    operation, purpose, caller = "", "", None
    for frame in frames:
        path = frame.f_code.co_filename
        if any(one in path for one in _COLLECTIVES):
            name = frame.f_code.co_name
            operation = name if name not in _WRAPPERS or not operation else operation
            if name == "wait":  # of our own transfer
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
    """Return the innermost line outside Python's standard library."""
    return _describe(next((frame for frame in frames if not _is_stdlib(frame.f_code.co_filename)), frames[0]))


def _is_stdlib(path: str) -> bool:
    return path.startswith(("<frozen", _STDLIB)) and "site-packages" not in path


def _describe(frame: FrameType | None) -> str:
    if frame is None:
        return "?"
    path = "/".join(frame.f_code.co_filename.split("/")[-2:])
    return f"{path}:{frame.f_lineno} ({frame.f_code.co_name})"
