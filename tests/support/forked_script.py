# SPDX-License-Identifier: Apache-2.0
"""Runs a script as `python script.py` does, in a fork of a process that has imported torch and deepspeed.

It costs a tenth of the CPU.  What a test says of the start of a process, or of signals, needs a real one.
"""

import atexit
import os
import runpy
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from process_pool import fork_server


class ForkedScript:
    """A process with a session of its own, with the methods of Popen that tests use."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        """command: script and arguments."""
        context = fork_server()
        ours, theirs = context.Pipe()
        self._process = context.Process(
            target=_run, args=(list(command), dict(environment), str(log), theirs), daemon=True
        )
        self._process.start()
        self.pid = self._process.pid
        theirs.close()
        ours.recv()  # its group is there
        ours.close()

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("a forked script", timeout or 0.0)
        return self._process.exitcode


def _run(command: list[str], environment: dict[str, str], log: str, ready: Connection) -> None:
    os.setsid()
    ready.send(None)
    ready.close()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in (1, 2):
        os.dup2(output, number)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    status = 0
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:  # noqa: BLE001 (as the interpreter does)
        status = 1
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
        try:
            sys.excepthook(type(error), error, error.__traceback__)
        except BaseException:  # noqa: BLE001 (as the interpreter does)
            traceback.print_exc()
    threading._shutdown()  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
