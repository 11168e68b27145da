# SPDX-License-Identifier: Apache-2.0
"""The page of five plans has what `plan` prints today; `pytest --rewrite-golden` writes it there."""

import re
import shlex
from pathlib import Path

import pytest

from ds_hybridep.commands.main import main

PAGE = Path(__file__).resolve().parents[2] / "docs" / "five-plans.md"
CASE = re.compile(r"^```\n(ds_hybridep plan .*?)```\n\n```text\n(.*?)```\n", re.M | re.S)


@pytest.mark.parametrize("number", range(5))
def test_the_page_has_the_answers_of_today(
    number: int, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    page = PAGE.read_text()
    cases = list(CASE.finditer(page))
    assert len(cases) == 5
    case = cases[number]
    assert main(shlex.split(case[1].replace("\\\n", " "))[1:]) == 0
    said = capsys.readouterr().out
    if request.config.getoption("--rewrite-golden"):
        PAGE.write_text(page[: case.start(2)] + said + page[case.end(2) :])
    assert CASE.findall(PAGE.read_text())[number][1] == said


def test_the_table_of_the_page_about_planning_is_the_first_of_the_five() -> None:
    said = CASE.findall(PAGE.read_text())[0][1].splitlines()
    page = (PAGE.parent / "planning.md").read_text()
    table = next(body for body in re.findall(r"^```\n(.*?)^```", page, re.M | re.S) if "s/step" in body).splitlines()
    assert len(table) == 12
    begin = next(at for at, line in enumerate(said) if "s/step" in line and line.startswith("  "))
    assert [line.startswith(shown) for line, shown in zip(said[begin:], table, strict=False)] == len(table) * [True]
