# SPDX-License-Identifier: Apache-2.0
"""The demo, with few steps."""

import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(900)
def test_the_demo_compares_three_ways_and_writes_a_page(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/demo.py", "--steps", "7", "--out", str(tmp_path)]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=800)
    assert run.returncode == 0, run.stdout + run.stderr
    for way in ("EP over both datacentres", "EP inside each datacentre", "ds_hybridep"):
        assert way in run.stdout
    assert "The same training, three ways" in (tmp_path / "report.html").read_text()
