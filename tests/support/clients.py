# SPDX-License-Identifier: Apache-2.0
"""Environments of programs that read our exports or train with the blocks, each made once, and runs in them."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / ".cache" / "clients"
SCRIPT = REPOSITORY / "tests" / "clients" / "client_script.py"
TRAINER_SCRIPT = SCRIPT.with_name("trainer_script.py")
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


# -- programs that train ------------------------------------------------------------------------------------------

NUM_RANKS = 4
BLOCKS: dict[str, Any] = {
    "expert_parallel": {"enabled": True, "autoep_size": NUM_RANKS},
    "hybridep": {"levels": [{"name": "dc", "size": 2, "domain_size": 2}, {"name": "gpu", "size": 2}]},
}


@dataclass(frozen=True, kw_only=True)
class TrainingProgram(Client):
    """A program that trains on four CPU ranks, with this checkout installed beside it.

    stand_ins: modules that it always imports, and that these recipes do not need.
    """

    stand_ins: tuple[str, ...] = ()

    def make(self) -> None:
        """Make the environment, if it is not there."""
        super().make()
        packages = next(self.folder.glob("lib/python3*/site-packages"))
        if not any(packages.glob("ds_hybridep-*.dist-info")):
            self._install("--no-deps", "--no-build-isolation", "-e", str(REPOSITORY))
        for module in self.stand_ins:
            (packages / f"{module}.py").write_text('"""A stand-in: what is here is not used."""\n')

    def run(self, *command: object, folder: Path, **environment: str) -> None:
        """Run a command of this environment in a folder; fails with what it said."""
        own = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1", "TORCH_EXTENSIONS_DIR": str(self.folder / "torch_extensions"),
        }  # fmt: skip
        program = self.folder / "bin" / str(command[0])
        done = subprocess.run(
            [program, *map(str, command[1:])], cwd=folder, env=os.environ | own | environment, capture_output=True,
            text=True, timeout=RUN_LIMIT_S,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-6000:]}"

    def script(self, do: str, *paths: Path) -> None:
        """Call a function of trainer_script.py."""
        self.run("python", TRAINER_SCRIPT, do, *paths, folder=paths[0])

    def logits(self, model: Path, adapters: Path | None = None) -> torch.Tensor:
        """What plain transformers, with peft, computes with a saved folder."""
        out = (adapters or model) / "logits.pt"
        self.script("logits", model, out, *filter(None, [adapters]))
        return cast(torch.Tensor, torch.load(out))


def losses_of(folder: Path) -> list[float]:
    """Losses of training and of evaluation, in the order in which a Trainer has logged them."""
    log = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return [record[key] for record in log for key in ("loss", "eval_loss") if key in record]


def assert_same_weights(found: Path, expected: Path, files: Sequence[str], *, within: float = 1e-5) -> None:
    """Compare files of two folders: the same names, and values within this part of their norm.

    Sums in another order make 1e-7 to 2e-5 after six steps, since Adam divides small gradients by their own size.
    """
    for file in files:
        weights, wanted = load_file(found / file), load_file(expected / file)
        assert weights.keys() == wanted.keys()
        for name, weight in wanted.items():
            assert float((weights[name] - weight).norm()) <= within * float(weight.norm()), f"{file}: {name}"
