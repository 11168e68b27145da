# SPDX-License-Identifier: Apache-2.0
"""The demo, with few steps."""

import argparse
import importlib
import json
import sys
from pathlib import Path

import pytest
from scripts import output_of

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(900)
def test_the_demo_compares_all_ways_and_shows_the_record(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "demo", "--sites", "--steps", "7", "--folder", str(tmp_path)]
    said = output_of(command, REPOSITORY, 800)
    for way in ("EP over both datacentres", "EP inside each datacentre", "ds_hybridep", "a job per"):
        assert way in said
    assert "MB sent per step, 4 ranks together" in said
    assert "of one seed, its validation loss is " in said.splitlines()[-1]
    assert "A run with ds_hybridep" in (tmp_path / "report.html").read_text()


def said_of(monkeypatch: pytest.MonkeyPatch, step_s: tuple[float, float, float], wan: str | None) -> str:
    monkeypatch.syspath_prepend(REPOSITORY)
    demo = importlib.import_module("benchmarks.demo")
    losses = (3.0, 3.0, 3.03)
    records = [
        {"params": {"way": way.title, "wan": wan, "steps": 25}, "step_s": seconds, "uplink_bytes": 1e6,
         "loss": loss, "valid_loss": loss}
        for way, seconds, loss in zip(demo.WAYS, step_s, losses, strict=True)
    ]  # fmt: skip
    return str(demo.report(records, argparse.Namespace()))


def test_the_speed_up_is_over_the_best_row_and_its_loss_is_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    said = said_of(monkeypatch, (8.0, 2.0, 0.5), "50mbit").splitlines()
    assert said[0] == "4 ranks in 2 datacentres joined by 50mbit; 25 steps from scratch, one seed"
    assert said[-2:] == [
        "ds_hybridep is 4.0 times as fast as DeepSpeed, EP inside each datacentre.",
        "After 25 steps of one seed, its validation loss is 1.00% higher than in that row.",
    ]
    assert max(map(len, said)) <= 100
    other = said_of(monkeypatch, (1.0, 2.0, 0.5), "50mbit")
    assert "is 2.0 times as fast as DeepSpeed, EP over both datacentres." in other
    assert other.count(" times as fast") == 1


def test_without_a_slow_link_there_is_no_speed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    said = said_of(monkeypatch, (8.0, 2.0, 0.5), None)
    assert "times as fast" not in said
    assert "Step times say nothing here." in said


def test_a_run_keeps_its_records_and_writes_the_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(REPOSITORY)
    demo, program = (importlib.import_module(f"benchmarks.{name}") for name in ("demo", "__main__"))
    kept = (REPOSITORY / "benchmarks" / "results" / "demo.jsonl").read_text().splitlines()
    (tmp_path / "run.json").write_text(json.dumps(json.loads(kept[2])["record"]))
    monkeypatch.setattr(demo, "why_not_permitted", lambda **_: "not here")
    monkeypatch.setattr(demo, "build_ops", lambda *_: None)
    monkeypatch.setattr(demo, "train", lambda way, *_: demo.Run(
        title=way.title, step_s=1.0, uplink_bytes=None, loss=3.0, valid_loss=3.0))  # fmt: skip
    monkeypatch.setattr(program, "become_root", lambda: None)
    monkeypatch.delenv("BENCHMARKS_JOB", raising=False)
    records = tmp_path / "records.jsonl"
    assert program.main(["demo", "--sites", "--folder", str(tmp_path), "--out", str(records)]) == 0
    said = capsys.readouterr().out
    assert "MB sent per step, 4 ranks together" in said
    assert "Step times say nothing here." in said
    assert "A run with ds_hybridep" in (tmp_path / "report.html").read_text()
    found = [json.loads(line) for line in records.read_text().splitlines()]
    assert [one["params"]["way"] for one in found] == [way.title for way in (*demo.WAYS, demo.BY_SITES)]
    assert [one["params"]["way"] for one in found if "record" in one] == ["ds_hybridep"]


def test_readme_says_what_the_record_of_the_demo_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY)
    lines = (REPOSITORY / "benchmarks" / "results" / "demo.jsonl").read_text().splitlines()
    said = importlib.import_module("benchmarks.demo").report([json.loads(line) for line in lines], None)
    readme = " ".join((REPOSITORY / "README.md").read_text().split())
    for sentence in said.splitlines()[-2:]:
        assert sentence in readme


def test_where_no_interface_counts_the_report_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY)
    demo = importlib.import_module("benchmarks.demo")
    runs = [demo.Run(title=title, step_s=1.0, uplink_bytes=None, loss=3.0, valid_loss=3.0) for title in "abc"]
    sent_bytes = {"tokens": 0, "expert_weights": 600_000, "dense": 200_000}
    record = {"steps": 4, "levels": [{"name": "dc", "sent_bytes": sent_bytes, "plain_ep_bytes": 80_000_000}]}
    found = [run.uplink_bytes for run in demo.with_counted_bytes(runs, record)]
    assert found == [10e6, None, 0.1e6]  # of one datacentre, per step
