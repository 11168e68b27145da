# SPDX-License-Identifier: Apache-2.0
"""Starts meeting points and jobs of `site_script.py` on this machine."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts import free_port

SUPPORT = Path(__file__).resolve().parent
SCRIPT = SUPPORT / "site_script.py"
LIMIT_S = 150.0


def secret_file(folder: Path, text: str = "a secret of at least sixteen bytes") -> Path:
    path = folder / f"secret-{len(text)}"
    path.write_text(text)
    return path


class Meeting:
    """A meeting point in a process of its own.  before: words in front of its command."""

    def __init__(self, folder: Path, host: str = "127.0.0.1", before: Sequence[str] = ()) -> None:
        self.port, self.host, self.log = free_port(), host, folder / "meeting.log"
        command = ["-m", "ds_hybridep.commands.main", "meet", "--port", str(self.port), "--host", host]
        self._file = self.log.open("a")
        self.process = subprocess.Popen(
            [*before, sys.executable, *command, "--secret-file", str(secret_file(folder))],
            stdout=self._file, stderr=self._file,
        )  # fmt: skip

    def __enter__(self) -> "Meeting":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._file.close()


class Job:
    """A job of `site_script.py`; all its ranks have a process group of their own.  before: as in `Meeting`."""

    def __init__(self, folder: Path, name: str, ranks: int, before: Sequence[str] = (), **options: Any) -> None:
        self.folder, self.name, self.ranks = folder, name, ranks
        port = free_port()
        self.processes = []
        site = options.pop("site", None)
        options = {"out": str(folder / name), "tell": str(folder / f"{name}.step"), **options}
        for rank in range(ranks):
            environment = {
                **os.environ, "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(rank),
                "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]),
            }  # fmt: skip
            environment.pop("HYBRIDEP_SITE", None)
            if site is not None:
                environment["HYBRIDEP_SITE"] = site
            command = [*before, sys.executable, str(SCRIPT), json.dumps(options)]
            with (folder / f"{name}-{rank}.log").open("w") as log:
                self.processes.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))

    def wait(self, limit_s: float = LIMIT_S) -> list[int]:
        """Return the exit statuses of all ranks."""
        deadline = time.monotonic() + limit_s
        try:
            return [process.wait(max(deadline - time.monotonic(), 0.1)) for process in self.processes]
        finally:
            self.kill()

    def kill(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()

    def records(self) -> list[dict[str, Any]]:
        """Wait for the end, and return what each rank has written."""
        statuses = self.wait()
        assert statuses == [0] * self.ranks, self.output()
        return [json.loads((self.folder / f"{self.name}-{rank}.json").read_text()) for rank in range(self.ranks)]

    def output(self) -> str:
        return "\n".join((self.folder / f"{self.name}-{rank}.log").read_text()[-4000:] for rank in range(self.ranks))

    def step(self) -> int:
        """Return the steps that rank 0 has made."""
        path = self.folder / f"{self.name}.step"
        return int(path.read_text() or 0) if path.exists() else 0

    def wait_for_step(self, step: int, limit_s: float = LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while self.step() < step:
            assert time.monotonic() < deadline, f"step {step} was not reached\n{self.output()}"
            assert any(process.poll() is None for process in self.processes), self.output()
            time.sleep(0.05)


def block(meeting: Meeting, folder: Path, names: tuple[str, ...] = ("a", "b"), **more: Any) -> dict[str, Any]:
    sites = {
        "names": list(names), "meeting_point": f"{meeting.host}:{meeting.port}",
        "secret_file": str(secret_file(folder)), **more.pop("sites", {}),
    }  # fmt: skip
    return {"sites": sites, "timeout_s": 20, **more}


def end_together(folder: Path, jobs: Sequence[Job], more_steps: int = 15) -> list[list[dict[str, Any]]]:
    """Let sites whose option `until` is "until" in the folder end at one step; return their records."""
    unfinished = folder / "until.partial"
    unfinished.write_text(str(max(job.step() for job in jobs) + more_steps))
    unfinished.rename(folder / "until")
    return [job.records() for job in jobs]
