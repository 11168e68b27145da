# SPDX-License-Identifier: Apache-2.0
"""How a process ends: by an exception, by SIGTERM, at its script's end, or because another rank cannot go on."""

import atexit
import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from types import TracebackType

import torch.distributed as dist

from ds_hybridep.errors import AgreementError, CommunicationError

EXIT_STATUS = 75  # of a rank that ends because of another one: EX_TEMPFAIL of sysexits.h, "try again"
_COMMUNICATION = ("gloo", "nccl", "connection", "process group", "timed out", "aborted", "socket", "store")


class Endings:
    """Notices the end of this process, from `watch` to `unwatch`.

    on_exception: called with an uncaught exception before it is shown.  Returns the seconds that the process has to
        end by itself, and its exit status if it does not.
    on_exit: called when the script has ended.
    """

    def __init__(
        self, on_exception: Callable[[BaseException], tuple[float, int]], on_exit: Callable[[], None]
    ) -> None:
        self._on_exception, self._on_exit = on_exception, on_exit
        self._pid = os.getpid()
        self._hook = sys.excepthook
        self._hears_sigterm = False
        self._wake, self.woken = socket.socketpair()  # `woken` is readable after `nudge` or a signal
        self._wake.setblocking(False)
        self.woken.setblocking(False)

    def watch(self) -> None:
        sys.excepthook = self._except
        atexit.register(self._exit)
        is_main = threading.current_thread() is threading.main_thread()
        # If nobody handles SIGTERM, notice it here, even while the main thread is in C code.
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            before = signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
            if before == -1:
                signal.signal(signal.SIGTERM, self._on_sigterm)
                self._hears_sigterm = True
            else:
                signal.set_wakeup_fd(before)

    def unwatch(self) -> None:
        """Stop noticing; a second call does nothing.  Dies of a SIGTERM that came and was not taken."""
        if self._wake.fileno() == -1:
            return
        is_ours = False
        atexit.unregister(self._exit)
        if sys.excepthook == self._except:
            sys.excepthook = self._hook
        if self._hears_sigterm:
            with contextlib.suppress(ValueError):  # not in the main thread
                signal.set_wakeup_fd(-1)
                if signal.getsignal(signal.SIGTERM) == self._on_sigterm:
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                    is_ours = self._pid == os.getpid()  # a forked process must not read what is the parent's
            self._hears_sigterm = False
        if is_ours and self._heard_sigterm():
            self.die_of_sigterm()
        self._wake.close()
        self.woken.close()

    def _on_sigterm(self, number: int, _frame: object) -> None:
        """Write the signal to `woken`: it is not there yet if other code has taken the wakeup descriptor."""
        with contextlib.suppress(OSError):
            self._wake.send(bytes([number]))

    def nudge(self) -> None:
        """Make `woken` readable."""
        with contextlib.suppress(OSError):
            self._wake.send(b"\0")

    def take_sigterm(self) -> bool:
        """Return True if SIGTERM has come and no other code handles it by now."""
        is_ours = self._hears_sigterm and signal.getsignal(signal.SIGTERM) == self._on_sigterm
        return self._heard_sigterm() and is_ours

    def _heard_sigterm(self) -> bool:
        with contextlib.suppress(BlockingIOError):
            return signal.SIGTERM in self.woken.recv(4096)
        return False

    def die_of_sigterm(self) -> None:
        """Die as if no handler had caught the signal."""
        ctypes.CDLL(None).signal(int(signal.SIGTERM), 0)  # `signal.signal` works in the main thread only
        os.kill(os.getpid(), signal.SIGTERM)

    def _except(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if self._pid != os.getpid():
            self._hook(kind, error, trace)
            return
        limit_s, status = self._on_exception(error)
        self._hook(kind, error, trace)
        if not hasattr(sys, "ps1") and not sys.flags.interactive:  # an interactive process goes on
            exit_later(limit_s, status)

    def _exit(self) -> None:
        if self._pid == os.getpid():
            self._on_exit()


def exit_now(status: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):
            stream.flush()
    os._exit(status)


def exit_later(limit_s: float, status: int) -> None:
    """Exit after `limit_s`, no matter what the threads do."""
    timer = threading.Timer(limit_s, exit_now, [status])
    timer.daemon = True
    timer.start()


def abort_groups() -> None:
    """Abort all process groups, so that the main thread leaves its collective.  Returns at once."""
    threading.Thread(target=_abort_groups, name="hybridep-abort", daemon=True).start()


def _abort_groups() -> None:
    for group in list(dist.distributed_c10d._world.pg_map):
        with contextlib.suppress(RuntimeError, AttributeError, TypeError):
            group.abort()


def follows_from_others(error: BaseException | None) -> bool:
    """Return True if a rank raises `error` because another rank is gone or late."""
    while error is not None:
        if isinstance(error, CommunicationError | AgreementError | dist.DistError):
            return True
        if isinstance(error, RuntimeError | OSError) and any(word in str(error).lower() for word in _COMMUNICATION):
            return True
        error = error.__cause__ or error.__context__
    return False
