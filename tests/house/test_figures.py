# SPDX-License-Identifier: Apache-2.0
"""Figures that documents claim: each has a record, and those of the README are what the records say."""

import importlib
import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
RESULTS = REPOSITORY / "benchmarks" / "results"
README = (REPOSITORY / "README.md").read_text()
PAGE = (REPOSITORY / "docs" / "benchmarks.md").read_text()
WITHOUT_FILE = "predicted: ", "**no record was kept**"
PLANS = {  # rows of the README's table
    "DeepSpeed, EP inside": "deepspeed, EP inside the DC",
    "ours, domains over both, exact": "hybridep [2,1]",
    "ours, EP inside, encoded": "hybridep, EP inside the DC, recommended",
    "ours, domains over both, encoded": "hybridep [2,1] recommended",
}
RATES = "20mbit", "50mbit", "100mbit", "none"


def records(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (RESULTS / name).read_text().splitlines()]


def rows() -> list[list[str]]:
    """Cells of the table of figures."""
    table = PAGE.split("## Where each figure comes from")[1]
    return [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")][1:]


def test_each_figure_has_a_page_and_a_record_that_exists_or_it_is_said_that_none_was_kept() -> None:
    assert len(rows()) > 20
    for figures, places, record in rows():
        assert re.search(r"\]\([^)]+\)", places), figures
        files = re.findall(r"\]\(\.\./benchmarks/results/([^)]+)\)", record)
        assert files or record.startswith(WITHOUT_FILE), figures
        for name in files:
            assert (RESULTS / name).stat().st_size, name


def test_each_record_is_in_the_table() -> None:
    named = {name for *_, record in rows() for name in re.findall(r"results/([^)]+)\)", record)}
    assert named == {path.name for path in RESULTS.iterdir()}


def test_the_table_of_the_readme_is_what_its_record_says() -> None:
    found = {
        (one["params"]["plan"], one["params"]["rate"]): one
        for one in records("e2e-slower-machine.jsonl")
        if one["params"]["accumulation"] == 1
    }
    for row, plan in PLANS.items():
        (cells,) = re.findall(rf"^\| {re.escape(row)} \|(.*)\|$", README, re.M)
        *seconds, megabytes = (float(cell) for cell in cells.split("|"))
        assert seconds == [round(statistics.median(found[plan, rate]["step_s"]), 2) for rate in RATES], row
        assert megabytes == pytest.approx(found[plan, "20mbit"]["wan_bytes_per_step"] / 1e6, rel=0.02), row


def test_losses_of_the_readme_are_what_their_record_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY)
    common = importlib.import_module("benchmarks.common")
    text = " ".join(README.split())
    for phase, words in (
        ("tune", "rose by {mean:.2f}% after 150 steps of fine-tuning (95% bound: {bound:.2f}%)"),
        ("scratch", "and by {mean:.2f}% after 300 steps from scratch ({bound:.2f}%)"),
    ):
        gaps = [
            100 * (one["losses"]["recommended"] / one["losses"]["exact"] - 1)
            for one in records("losses-integers.jsonl")
            if one["params"]["phase"] == phase
        ]
        assert words.format(mean=statistics.fmean(gaps), bound=common.upper_95(gaps)) in text


def test_intervals_hold_the_middle_and_get_narrower_with_more_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY)
    common = importlib.import_module("benchmarks.common")
    few, many = [1.0, 2.0, 3.0], [1.0, 2.0, 3.0] * 6
    assert common.margin_95(few) == pytest.approx(4.303 / 3**0.5)  # Student's t of two degrees of freedom
    assert common.margin_95(many) < common.margin_95(few)
    assert common.margin_95([1.0]) == float("inf")
    low, high = common.median_95(few)
    assert low <= 2.0 <= high
    assert common.median_95([4.0] * 5) == (4.0, 4.0)


def test_each_picture_is_in_a_document() -> None:
    documents = README + "".join(path.read_text() for path in (REPOSITORY / "docs").glob("*.md"))
    for path in (REPOSITORY / "docs" / "images").iterdir():
        assert f"images/{path.name}" in documents, path.name
