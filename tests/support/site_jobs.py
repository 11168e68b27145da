# SPDX-License-Identifier: Apache-2.0
"""Starts meeting points and jobs of `site_script.py` on this machine."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from forked_script import ForkedScript
from scripts import free_port

from ds_hybridep.link import TLS

SUPPORT = Path(__file__).resolve().parent
SCRIPT = SUPPORT / "site_script.py"
LIMIT_S = 400.0


def secret_file(folder: Path, text: str = "a secret of at least sixteen bytes") -> Path:
    path = folder / f"secret-{len(text)}"
    path.write_text(text)
    return path


class Meeting:
    """A meeting point in a process of its own.

    before: words in front of its command.  port: 0 chooses one.  more: words behind it.
    """

    def __init__(
        self, folder: Path, host: str = "127.0.0.1", before: Sequence[str] = (), port: int = 0,
        tls: TLS | None = None, more: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.port, self.host, self.log = port or free_port(), host, folder / "meeting.log"
        command = ["-m", "ds_hybridep.commands.main", "meet", "--port", str(self.port), "--host", host]
        command += [word for name, path in vars(tls).items() for word in (f"--{name}", str(path))] if tls else []
        self._file = self.log.open("a")
        self.process = subprocess.Popen(
            [*before, sys.executable, *command, "--secret-file", str(secret_file(folder)), *more],
            stdout=self._file, stderr=self._file,
        )  # fmt: skip

    def __enter__(self) -> "Meeting":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self._file.close()


class Job:
    """A job of `site_script.py`; it has a process group of its own for each command.  before: as in `Meeting`."""

    script = SCRIPT

    def __init__(self, folder: Path, name: str, ranks: int, before: Sequence[str] = (), **options: Any) -> None:
        self.folder, self.name, self.ranks = folder, name, ranks
        self.processes: list[Any] = []
        site = options.pop("site", None)
        options = {"out": str(folder / name), "tell": str(folder / f"{name}.step"), **options}
        for index, (command, more) in enumerate(self._commands(json.dumps(options))):
            environment = {
                **os.environ, **more, "PYTHONPATH": os.pathsep.join([str(SUPPORT), os.environ.get("PYTHONPATH", "")]),
            }  # fmt: skip
            environment.pop("HYBRIDEP_SITE", None)
            if site is not None:
                environment["HYBRIDEP_SITE"] = site
            self.processes.append(self._start(before, command, environment, folder / f"{name}-{index}.log"))

    def _start(self, before: Sequence[str], command: Sequence[str], environment: Mapping[str, str], log: Path) -> Any:
        with log.open("w") as output:
            return subprocess.Popen(
                [*before, *command], env=environment, stdout=output, stderr=output, start_new_session=True
            )

    def _commands(self, options: str) -> list[tuple[list[str], dict[str, str]]]:
        """Return commands, and what they need in their environment: one for each rank."""
        ours = {"WORLD_SIZE": self.ranks, "LOCAL_SIZE": self.ranks, "MASTER_PORT": free_port()}
        command = [sys.executable, str(self.script), options]
        return [
            (command, {name: str(value) for name, value in {**ours, "RANK": rank, "LOCAL_RANK": rank}.items()})
            for rank in range(self.ranks)
        ]

    def wait(self, limit_s: float = LIMIT_S) -> list[int]:
        """Return the exit statuses of all commands."""
        deadline = time.monotonic() + limit_s
        try:
            return [process.wait(max(deadline - time.monotonic(), 0.1)) for process in self.processes]
        finally:
            self.kill()

    def kill(self, number: int = signal.SIGKILL) -> None:
        """Send a signal to all that belongs to the job."""
        for process in self.processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            if number == signal.SIGKILL:
                process.wait()

    def records(self) -> list[dict[str, Any]]:
        """Wait for the end, and return what each rank has written."""
        statuses = self.wait()
        assert statuses == [0] * len(statuses), self.output()
        return [json.loads((self.folder / f"{self.name}-{rank}.json").read_text()) for rank in range(self.ranks)]

    def output(self) -> str:
        logs = [self.folder / f"{self.name}-{index}.log" for index in range(len(self.processes))]
        return "\n".join(log.read_text()[-4000:] for log in logs)

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


class ForkedJob(Job):
    """A job whose processes need not import torch and deepspeed: see `ForkedScript`."""

    def _start(self, before: Sequence[str], command: Sequence[str], environment: Mapping[str, str], log: Path) -> Any:
        if before:
            return super()._start(before, command, environment, log)
        return ForkedScript(command[1:], environment, log)


class Launched(Job):
    """A job that one `deepspeed` command starts."""

    def _commands(self, options: str) -> list[tuple[list[str], dict[str, str]]]:
        command = [
            str(Path(sys.executable).parent / "deepspeed"), "--num_gpus", str(self.ranks), "--master_port",
            str(free_port()), "--no_local_rank", str(SCRIPT), options,
        ]  # fmt: skip
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        return [(command, {"PATH": path, "GLOO_SOCKET_IFNAME": "lo"})]


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
