# SPDX-License-Identifier: Apache-2.0
"""The programs that measure training on emulated datacentres still run, from the first plan to the report."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_hybridep.lab.network import why_not_permitted

REPOSITORY = Path(__file__).resolve().parents[2]
REASON = why_not_permitted(with_delay=False)

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(REASON is not None, reason=f"emulated hosts: {REASON}"),
]


def run_program(*command: str) -> str:
    run = subprocess.run(
        [sys.executable, *command], cwd=REPOSITORY, capture_output=True, text=True, timeout=800,
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_e2e_runs_all_plans_and_its_report_reads_them(tmp_path: Path) -> None:
    out = str(tmp_path / "e2e.jsonl")
    options = ["--rates", "none", "--rows", "1", "--accumulations", "1", "--rounds", "1", "--steps", "1"]
    run_program("benchmarks/e2e.py", *options, "--block-s", "0.1", "--layers", "1", "--out", out)
    records = [json.loads(line) for line in Path(out).read_text().splitlines()]
    picked = {record["params"]["plan"]: record["picked"] for record in records}
    assert picked["deepspeed, flat EP"] is None
    assert picked["hybridep auto"].startswith("[")
    report = run_program("benchmarks/e2e_report.py", out)
    assert all(name in report for name in picked if not name.endswith("again"))


def test_replan_trains_by_hand_and_planned(tmp_path: Path) -> None:
    options = ["--rates", "500mbit", "50mbit", "--rows", "1", "--steps", "4", "--warm-up", "8", "--tries", "1"]
    said = run_program("benchmarks/replan.py", *options, "--layers", "1", "--out", str(tmp_path / "replan.jsonl"))
    assert "planned: losses differ from DeepSpeed's by" in said
