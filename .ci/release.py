# SPDX-License-Identifier: Apache-2.0
"""Checks that version, changelog and tag agree, then builds both artefacts in dist/.  It uploads nothing.

    make release

The version is in ds_hybridep/version.py.  A person makes the tag, for instance `git tag -a v0.2.0`.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def version_of(repository: Path) -> str:
    """Return the version, read as text."""
    text = (repository / "ds_hybridep" / "version.py").read_text(encoding="utf-8")
    return re.findall(r'^__version__ = "(.+)"$', text, re.MULTILINE)[0]


def changelog_problems(text: str, version: str) -> list[str]:
    """Return what CHANGELOG.md lacks for a release of `version`."""
    sections = {
        title: body.strip() for title, body in re.findall(r"^## (.+)\n((?:(?!## ).*\n?)*)", text, re.MULTILINE)
    }
    problems = []
    if sections.pop("[Unreleased]", ""):
        problems.append(f"CHANGELOG.md: lines under [Unreleased]; move them to [{version}]")
    newest = next(iter(sections), "nothing")
    if not re.fullmatch(rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d", newest):
        problems.append(f"CHANGELOG.md: the newest section is {newest}, wanted [{version}] - YEAR-MONTH-DAY")
    elif not sections[newest]:
        problems.append(f"CHANGELOG.md: nothing under [{version}]")
    return problems


def git_problems(repository: Path, version: str) -> list[str]:
    """Return why the commit that is checked out is not the one to release."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=repository, check=True, capture_output=True, text=True).stdout

    problems = []
    if changed := git("status", "--porcelain").splitlines():
        problems.append(f"git: {len(changed)} files are not committed, such as {changed[0][3:]}")
    tags = git("tag", "--points-at", "HEAD").split()
    if f"v{version}" not in tags:
        found = ", ".join(tags) or "no tag"
        problems.append(f"git: this commit has {found}, wanted v{version}; make it with `git tag -a v{version}`")
    return problems


def main() -> int:
    version = version_of(REPOSITORY)
    text = (REPOSITORY / "CHANGELOG.md").read_text(encoding="utf-8")
    if problems := changelog_problems(text, version) + git_problems(REPOSITORY, version):
        print("\n".join([f"{version} is not released:", *problems]), file=sys.stderr)
        return 1
    shutil.rmtree(REPOSITORY / "dist", ignore_errors=True)
    subprocess.run([sys.executable, "-m", "build"], cwd=REPOSITORY, check=True)
    built = sorted(map(str, (REPOSITORY / "dist").iterdir()))
    if importlib.util.find_spec("twine"):
        subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *built], check=True)
    else:
        print("twine is not installed; the description was not checked")
    print("\n".join(["Built, not uploaded:", *built]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
