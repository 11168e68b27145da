# SPDX-License-Identifier: Apache-2.0
"""What a release needs: a version, a changelog and a tag that agree, and a hosted CI that runs what `.ci/run` runs."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from scripts import output_of

import ds_hybridep
from ds_hybridep.commands.main import main
from ds_hybridep.version import __version__

REPOSITORY = Path(__file__).resolve().parents[2]


def program(name: str) -> ModuleType:
    """A program of .ci/ as a module."""
    spec = importlib.util.spec_from_file_location(name, REPOSITORY / ".ci" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


release = program("release")

# -- the version ------------------------------------------------------------------------------------------------


def test_the_program_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    assert capsys.readouterr().out == f"ds_hybridep {__version__}\n"


def test_the_version_is_in_one_place_and_the_changelog_has_it() -> None:
    assert release.version_of(REPOSITORY) == __version__
    text = (REPOSITORY / "CHANGELOG.md").read_text()
    problems = [problem for problem in release.changelog_problems(text, __version__) if "Unreleased" not in problem]
    assert problems == []
    for name in ("pyproject.toml", "setup.py"):
        assert __version__ not in (REPOSITORY / name).read_text(), name


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("# Changelog\n\n## [Unreleased]\n\n## [1.2.0] - 2026-01-02\n\n- A thing.\n\n## [1.1.0] - 2026-01-01\n", []),
        ("## [1.2.0] - 2026-01-02\n\n- A thing.\n", []),
        ("## [1.2.0] - 2026-01-02\n\n## [1.1.0] - 2026-01-01\n\n- A thing.\n", ["nothing under [1.2.0]"]),
        ("## [1.2.0]\n\n- A thing.\n", ["the newest section is [1.2.0], wanted [1.2.0] - YEAR-MONTH-DAY"]),
        ("# Changelog\n", ["the newest section is nothing, wanted [1.2.0] - YEAR-MONTH-DAY"]),
        (
            "## [Unreleased]\n\n### Added\n\n- A thing.\n\n## [1.1.0] - 2026-01-01\n\n- Another.\n",
            [
                "lines under [Unreleased]; move them to [1.2.0]",
                "the newest section is [1.1.0] - 2026-01-01, wanted [1.2.0] - YEAR-MONTH-DAY",
            ],
        ),
    ],
)
def test_a_changelog_that_does_not_fit_the_version_is_refused(text: str, problems: list[str]) -> None:
    assert release.changelog_problems(text, "1.2.0") == [f"CHANGELOG.md: {problem}" for problem in problems]


def test_a_commit_without_the_tag_or_with_changes_is_refused(tmp_path: Path) -> None:
    def git(*words: str) -> None:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "tag.gpgSign=false", "-c", "commit.gpgSign=false"]
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    git("init")
    (tmp_path / "file").write_text("1")
    git("add", ".")
    git("commit", "-m", "first")
    wanted = "wanted v1.2.0; make it with `git tag -a v1.2.0`"
    assert release.git_problems(tmp_path, "1.2.0") == [f"git: this commit has no tag, {wanted}"]
    git("tag", "-a", "v1.1.0", "-m", "1.1.0")
    assert release.git_problems(tmp_path, "1.2.0") == [f"git: this commit has v1.1.0, {wanted}"]
    git("tag", "-a", "v1.2.0", "-m", "1.2.0")
    assert release.git_problems(tmp_path, "1.2.0") == []
    (tmp_path / "file").write_text("2")
    assert release.git_problems(tmp_path, "1.2.0") == ["git: 1 files are not committed, such as file"]


# -- hosted CI --------------------------------------------------------------------------------------------------

WORKFLOW: dict[Any, Any] = yaml.safe_load((REPOSITORY / ".github" / "workflows" / "ci.yml").read_text())


def test_hosted_ci_runs_what_ci_run_runs_and_nothing_else() -> None:
    assert set(WORKFLOW[True]) == {"push", "pull_request"}  # YAML 1.1 reads the key `on` as true
    (job,) = WORKFLOW["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == ["bash .ci/run"]


def test_hosted_ci_may_only_read_and_its_actions_are_commits() -> None:
    assert WORKFLOW["permissions"] == {"contents": "read"}
    (job,) = WORKFLOW["jobs"].values()
    assert "permissions" not in job
    for step in job["steps"]:
        assert re.fullmatch(r"actions/[\w-]+@[0-9a-f]{40}", step.get("uses", f"actions/none@{'0' * 40}"))


def test_hosted_ci_has_the_pythons_of_the_package() -> None:
    (job,) = WORKFLOW["jobs"].values()
    project = (REPOSITORY / "pyproject.toml").read_text()
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    assert job["strategy"]["matrix"]["python-version"] == named
    assert f'requires-python = ">={named[0]}"' in project


# -- the reference ----------------------------------------------------------------------------------------------


def test_public_docstrings_explain_each_argument_and_the_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = program("reference")
    assert reference.gaps(ds_hybridep) == []

    def attach(engine: object, config: object = None) -> None:
        """Take over the MoE layers.

        Args:
            engine: from deepspeed.initialize.
        """

    monkeypatch.setattr(ds_hybridep, "attach", attach, raising=False)
    assert reference.gaps(ds_hybridep) == ["attach: config is not explained", "attach: its errors are not explained"]


@pytest.mark.slow  # the program fails where a name is not explained, and `make docs` runs it
def test_the_reference_has_the_public_names_and_no_others(tmp_path: Path) -> None:
    pytest.importorskip("pdoc")
    said = output_of([sys.executable, REPOSITORY / ".ci" / "reference.py", tmp_path], tmp_path, 100)
    assert said.startswith(f"{tmp_path / 'index.html'}: ")
    pages = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.html")}
    assert pages == {"index.html", "ds_hybridep.html", "ds_hybridep/errors.html"}
    sections = set(re.findall(r'<section id="(\w+)">', (tmp_path / "ds_hybridep.html").read_text()))
    assert sections == set(ds_hybridep.__all__)
