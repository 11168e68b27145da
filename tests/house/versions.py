# SPDX-License-Identifier: Apache-2.0
"""Which versions of DeepSpeed, Python and transformers work: the tests marked `core` in an environment for each.

    python tests/house/versions.py [--torch "torch==2.13.0 --index-url URL"]      writes docs/versions.md

Each DeepSpeed runs with the transformers of the extra "hf", and the newest one with others too.  Each Python has one
virtual environment in .cache/versions, whose DeepSpeed and transformers are replaced before each run; kernels are
built anew for each.  A Python is left out where pip would install a torch with CUDA, which takes gigabytes: give one
for CPUs, as in --torch "torch==2.13.0 --index-url URL".
"""

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = REPOSITORY / ".cache" / "versions"
TABLE = REPOSITORY / "docs" / "versions.md"

DEEPSPEED = ("0.19.8", "0.19.7", "0.19.6", "0.19.5", "0.19.4")
# The first is that of the extra "hf".  From 5.23 on AutoEP needs a row of integration/patches.py.
TRANSFORMERS = ("5.3.0", "5.22.2", "5.24.0")
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
INSTALL_LIMIT_S, TEST_LIMIT_S = 900, 1200

# Column of the table -> the tests in it, by file and name.
COLUMNS = {
    "MoE parity": r"test_parity\b",
    "MoE checkpoints": r"test_checkpoint\b",
    "import hook": r"test_autoload\b",
    "AutoEP parity": r"test_autoep(?!.*checkpoint)",
    "AutoEP checkpoints": r"test_autoep.*checkpoint",
}
# Older versions of DeepSpeed use what newer versions of torch deprecate.
IGNORED_WARNINGS = ("DeprecationWarning", "FutureWarning")

ABOUT = """\
# Versions

| | works | another version |
|---|---|---|
| Python, on Linux | 3.10 or later; tested: 3.11 | older: pip refuses |
| torch | 2.5 or later; tested: 2.13.0 for CPUs | older: pip replaces it |
| DeepSpeed | 0.19.4 to 0.19.8 | older: an error; newer: a warning, or an error if it lacks what we change |
| transformers, for AutoEP | 5.3.0 to 5.24.0 | older: an error; newer: a warning |
| peft, accelerate | 0.21.2, 1.15.0 | not tried |

`pip install '.[hf]'` takes transformers 5.3.0. Without the block, AutoEP of DeepSpeed 0.19.8 fails from 5.23 on
(`_CanRecordRegistry.get() takes 2 positional arguments but 3 were given`).

## What was tested
"""


class EnvironmentMissing(Exception):
    """Why there is no environment for a Python."""


@dataclass(frozen=True)
class Test:
    """One test's result."""

    name: str
    result: str  # "passed", "failed", "refused" or "n/a"
    reason: str = ""


@dataclass(frozen=True)
class Row:
    """What the tests say of one DeepSpeed on one Python, with one transformers."""

    deepspeed: str
    python: str
    transformers: str
    tests: Sequence[Test]

    def cell(self, column: str) -> str:
        """The worst result in a column of the table."""
        results = [test.result for test in self.tests if re.search(COLUMNS[column], test.name)]
        return next((one for one in ("failed", "refused", "n/a", "passed") if one in results), "not run")

    def notes(self) -> list[str]:
        """Each reason once."""
        reasons = dict.fromkeys(test.reason for test in self.tests if test.reason)
        return [f"DeepSpeed {self.deepspeed}, transformers {self.transformers}: {reason}" for reason in reasons]


def main() -> int:
    """Exit status 1 where a test did not pass in any environment, or there was none."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--torch", default="torch==2.13.0", help="what to tell pip")
    wanted = shlex.split(parser.parse_args().torch)
    pairs = [
        *((version, TRANSFORMERS[0]) for version in DEEPSPEED),
        *((DEEPSPEED[0], one) for one in TRANSFORMERS[1:]),
    ]
    rows: list[Row] = []
    not_tried: dict[str, list[str]] = {}  # Pythons, by the reason
    torch = ""
    for name in PYTHONS:
        try:
            python = make_environment(name, wanted)
        except EnvironmentMissing as reason:
            not_tried.setdefault(str(reason), []).append(name)
            continue
        torch = output_of([python, "-c", "import torch; print(torch.__version__)"])
        for version, transformers in pairs:
            rows.append(run_core_tests(python, name, version, transformers))
            print(table_line([version, name, transformers, *map(rows[-1].cell, COLUMNS)]), flush=True)
    notes = [f"Python {', '.join(names)}: not tried, {reason}" for reason, names in not_tried.items()]
    TABLE.write_text(render(rows, notes, torch), encoding="utf-8")
    return not rows or any(test.result in ("failed", "refused") for row in rows for test in row.tests)


# -- environments -----------------------------------------------------------------------------------------------


def make_environment(name: str, torch: Sequence[str]) -> Path:
    """The interpreter of a virtual environment for Python `name` with all that the tests need."""
    folder = FOLDER / f"py{name}"
    python = folder / "bin" / "python"
    if not python.exists():
        run([find_python(name), "-m", "venv", folder], limit_s=INSTALL_LIMIT_S)
        run([*pip(python), "install", "--quiet", "--upgrade", "pip"], limit_s=INSTALL_LIMIT_S)
    refuse_cuda_build(python, torch)
    run([*pip(python), "install", "--quiet", *torch], limit_s=INSTALL_LIMIT_S)
    run([*pip(python), "install", "--quiet", "--editable", f"{REPOSITORY}[dev,hf]"], limit_s=INSTALL_LIMIT_S)
    return python


def find_python(name: str) -> str:
    """An interpreter on the search path, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [shutil.which(f"python{name}"), *sorted(pyenv.glob(f"versions/{name}.*/bin/python"), reverse=True)]
    for python in filter(None, found):
        result = subprocess.run([python, "-c", "import venv"], capture_output=True)  # a shim may lead nowhere
        if result.returncode == 0:
            return str(python)
    raise EnvironmentMissing("no interpreter was found")


def refuse_cuda_build(python: Path, torch: Sequence[str]) -> None:
    """Raise EnvironmentMissing where pip would install a torch that needs CUDA's libraries.  Downloads nothing big."""
    options = ["--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-"]
    report = json.loads(output_of([*pip(python), "install", *options, *torch]))
    for package in report["install"]:
        needs = package["metadata"].get("requires_dist", [])
        if any(need.startswith(("nvidia-", "cuda-")) for need in needs):
            raise EnvironmentMissing(f"pip has no build of {torch[0]} for CPUs")


def pip(python: Path) -> list[str]:
    return [str(python), "-m", "pip", "--disable-pip-version-check"]


# -- tests ------------------------------------------------------------------------------------------------------


def run_core_tests(python: Path, name: str, version: str, transformers: str) -> Row:
    """Install DeepSpeed `version` and transformers in the environment and run the tests marked `core`."""
    # pip warns of versions that pyproject.toml does not allow, and installs them.
    packages = [f"deepspeed=={version}", f"transformers=={transformers}"]
    run([*pip(python), "install", "--quiet", *packages], limit_s=INSTALL_LIMIT_S)
    folder = FOLDER / f"py{name}-deepspeed{version}-transformers{transformers}"
    folder.mkdir(parents=True, exist_ok=True)
    report = folder / "results.xml"
    report.unlink(missing_ok=True)
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["PATH"] = f"{python.parent}{os.pathsep}{environment['PATH']}"
    # One folder for each: DeepSpeed loads what it finds there, also where another version built it.
    environment["TORCH_EXTENSIONS_DIR"] = str(folder / "torch_extensions")
    warnings = [option for kind in IGNORED_WARNINGS for option in ("-W", f"ignore::{kind}")]
    command = [python, "-m", "pytest", "-m", "core", "--junitxml", report, *warnings]
    with (folder / "output.txt").open("w") as log, suppress(subprocess.TimeoutExpired):
        subprocess.run(command, cwd=REPOSITORY, env=environment, stdout=log, stderr=log, timeout=TEST_LIMIT_S)
    if not report.exists():
        return Row(version, name, transformers, [Test("all", "failed", f"no results; see {log.name}")])
    cases = ElementTree.parse(report).getroot().iter("testcase")
    return Row(version, name, transformers, [result_of(case) for case in cases])


def result_of(case: ElementTree.Element) -> Test:
    name = f"{case.get('classname')}.{case.get('name')}"
    for outcome in case:
        message = outcome.get("message", "")
        if outcome.tag == "skipped":
            return Test(name, "n/a", message)
        if outcome.tag in ("failure", "error"):
            reason = cause_of(f"{outcome.text}\n{message}")
            return Test(name, "refused" if "UnsupportedError" in reason else "failed", reason)
    return Test(name, "passed")


def cause_of(text: str) -> str:
    """The first error in a traceback that does not only say that there were others."""
    errors = re.findall(r"^E?\s*((?:\w+\.)*\w*(?:Error|Exception|Warning)\b.*)", text, re.MULTILINE)
    own = [error for error in errors if not re.search(r"RemoteError|\d+ of \d+ cases failed", error)]
    return (own or errors or [text.strip()])[0].strip()[:300]


# -- the table --------------------------------------------------------------------------------------------------


def render(rows: Sequence[Row], notes: Sequence[str], torch: str) -> str:
    """The table as Markdown, with reasons below."""
    lines = [
        *ABOUT.splitlines(),
        "",
        f"Made by `make test-versions` on {datetime.date.today()} with torch {torch} on {platform.machine()}.",
        "Each row is one run of the tests marked `core`: trainings and checkpoints with the block and without it must",
        "agree. Versions up to 0.19.3 are refused.",
        "",
        table_line(["DeepSpeed", "Python", "transformers", *COLUMNS]),
        table_line(["---"] * (3 + len(COLUMNS))),
        *(table_line([row.deepspeed, row.python, row.transformers, *map(row.cell, COLUMNS)]) for row in rows),
    ]
    below = [*notes, *(note for row in rows for note in row.notes())]
    if below:
        lines += ["", *(f"- {note}" for note in below)]
    return "\n".join(lines) + "\n"


def table_line(values: Iterable[str]) -> str:
    return f"| {' | '.join(values)} |"


def run(command: Sequence[str | Path], *, limit_s: float) -> None:
    subprocess.run(command, check=True, timeout=limit_s, cwd=REPOSITORY)


def output_of(command: Sequence[str | Path]) -> str:
    result = subprocess.run(
        command, check=True, timeout=INSTALL_LIMIT_S, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    return result.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
