# SPDX-License-Identifier: Apache-2.0
"""How a process ends: by an exception, at its script's end, or because another rank cannot go on."""

import atexit
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType

import torch.distributed as dist

from ds_hybridep.errors import AgreementError, CommunicationError

EXIT_STATUS = 75  # of a rank that ends because of another one: EX_TEMPFAIL of sysexits.h, "try again"
_COMMUNICATION = ("gloo", "nccl", "connection", "process group", "timed out", "aborted", "socket", "store")


class Endings:
    """Notices the end of this process, from `watch` to `unwatch`, and leaves its way to the interpreter.

    on_exception: called with an uncaught exception before it is shown.  Returns True if it follows from another rank's
        end; the exit status then is EXIT_STATUS.
    on_exit: called when the script and its threads have ended.
    """

    def __init__(self, on_exception: Callable[[BaseException], bool], on_exit: Callable[[], None]) -> None:
        self._on_exception, self._on_exit = on_exception, on_exit
        self._pid = os.getpid()
        self._hook = sys.excepthook

    def watch(self) -> None:
        sys.excepthook = self._except
        atexit.register(self._exit)

    def unwatch(self) -> None:
        """Stop noticing; a second call does nothing."""
        atexit.unregister(self._exit)
        if sys.excepthook == self._except:
            sys.excepthook = self._hook

    def _except(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        follows = self._pid == os.getpid() and self._on_exception(error)
        self._hook(kind, error, trace)
        if follows and not hasattr(sys, "ps1") and not sys.flags.interactive:  # an interactive process goes on
            raise SystemExit(EXIT_STATUS)  # the interpreter ends as it does after any exception, with this status

    def _exit(self) -> None:
        if self._pid == os.getpid():
            self._on_exit()


def exit_now(status: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError, OSError):
            stream.flush()
    os._exit(status)


def abort_groups() -> None:
    """Abort all process groups and return at once.  The main thread then leaves a collective over NCCL, not gloo's."""
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
