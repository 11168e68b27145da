# SPDX-License-Identifier: Apache-2.0
"""Environments of programs that read our exports, each in a folder of its own that is made once, and runs in them."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / ".cache" / "clients"
SCRIPT = REPOSITORY / "tests" / "clients" / "client_script.py"
TORCH = os.environ.get("TORCH") or "torch==2.13.0"  # what to tell pip of torch; the Makefile says the same
INSTALL_LIMIT_S = 3600
RUN_LIMIT_S = 1200

# Prints what an installed package needs, without what is named behind it.
_NEEDS = """
import re, sys
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for one in map(Requirement, requires(sys.argv[1])):
    if one.name not in sys.argv[2:] and (one.marker is None or one.marker.evaluate({"extra": ""})):
        one.marker = None
        print(one)
"""


@dataclass(frozen=True, kw_only=True)
class Client:
    """A program, and what is installed for it."""

    name: str
    packages: tuple[str, ...]
    without_needs: str = ""  # a package that is installed with its needs but for those in `left_out`
    left_out: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Where its environment is."""
        return FOLDER / self.name

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    def make(self) -> None:
        """Make the environment, if it is not there; fail with what is missing."""
        stamp, wanted = self.folder / "made-of.json", [TORCH, self.without_needs, *self.packages]
        if stamp.exists() and json.loads(stamp.read_text()) == wanted:
            return
        shutil.rmtree(self.folder, ignore_errors=True)
        self._run(sys.executable, "-m", "venv", str(self.folder))
        self._install(*shlex.split(TORCH))  # first and alone: everything else accepts what is there
        if self.without_needs:
            self._install("--no-deps", self.without_needs)
            name = self.without_needs.split("==")[0]
            self._install(*self._run(str(self.python), "-c", _NEEDS, name, *self.left_out).splitlines())
        if self.packages:
            self._install(*self.packages)
        stamp.write_text(json.dumps(wanted))

    def _install(self, *packages: str) -> None:
        self._run(str(self.python), "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages)

    def _run(self, *command: str) -> str:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S)
            said, failed = done.stderr, done.returncode != 0
        except (OSError, subprocess.TimeoutExpired) as error:
            said, failed = str(error), True
        if failed:
            reason = next((line for line in said.splitlines() if line.startswith("ERROR")), said.strip()[-300:])
            needs = " and ".join(filter(None, (self.without_needs, *self.packages)))
            pytest.fail(
                f"{self.folder} has no environment with {TORCH} and {needs}, because `{shlex.join(command)[:200]}` "
                f"failed: {reason}",
                pytrace=False,
            )
        return done.stdout

    def do(self, tasks: Sequence[dict[str, Any]], folder: Path) -> list[Any]:
        """What client_script.py finds for these tasks, in one process of this environment."""
        self.make()
        asked, found = folder / f"{self.name}_tasks.json", folder / f"{self.name}_results.json"
        asked.write_text(json.dumps(tasks, default=str))  # paths too
        own = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "DS_"))}
        done = subprocess.run(
            [self.python, SCRIPT, asked, found], cwd=folder, env=own, capture_output=True, text=True,
            timeout=RUN_LIMIT_S,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return list(json.loads(found.read_text()))
