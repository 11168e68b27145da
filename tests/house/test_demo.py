# SPDX-License-Identifier: Apache-2.0
"""The demo, with few steps."""

import importlib
import sys
from pathlib import Path

import pytest
from scripts import output_of

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(900)
def test_the_demo_compares_all_ways_and_shows_the_record(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "demo", "--sites", "--steps", "7", "--out", str(tmp_path)]
    said = output_of(command, REPOSITORY, 800)
    for way in ("EP over both datacentres", "EP inside each datacentre", "ds_hybridep", "a job per"):
        assert way in said
    assert "MB sent per step, 4 ranks together" in said


def test_where_no_interface_counts_the_report_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(REPOSITORY)
    demo = importlib.import_module("benchmarks.demo")
    runs = [demo.Run(title=title, step_s=1.0, uplink_bytes=None, loss=3.0, valid_loss=3.0) for title in "abc"]
    sent_bytes = {"tokens": 0, "expert_weights": 600_000, "dense": 200_000}
    record = {"steps": 4, "levels": [{"name": "dc", "sent_bytes": sent_bytes, "plain_ep_bytes": 80_000_000}]}
    found = [run.uplink_bytes for run in demo.with_counted_bytes(runs, record)]
    assert found == [10e6, None, 0.1e6]  # of one datacentre, per step
