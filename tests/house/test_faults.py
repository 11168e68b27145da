# SPDX-License-Identifier: Apache-2.0
"""A sample of the table of benchmarks/faults.py: all ranks end in time and name what broke."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ds_hybridep.lab.network import why_not_permitted
from ds_hybridep.lab.unprivileged import why_no_user_namespace

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(400)]

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
REASON = why_not_permitted(with_delay=False) if os.geteuid() == 0 else why_no_user_namespace()


@pytest.mark.skipif(REASON is not None, reason=f"emulated hosts: {REASON}")
@pytest.mark.parametrize(
    ("phase", "codecs", "faults"),
    [
        ("backward", "recommended", ["kill", "stop", "exception", "dc"]),
        ("load", "exact", ["memory", "link", "kill rank 0"]),
    ],
)
def test_every_rank_ends_in_time_and_names_the_cause(phase: str, codecs: str, faults: list[str]) -> None:
    command = [sys.executable, str(BENCHMARKS / "faults.py"), "--kinds", "classic", "--at-once", "2"]
    command += ["--phases", phase, "--codecs", codecs, "--faults", *faults]
    run = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, "DS_ACCELERATOR": "cpu"}
    )
    assert run.returncode == 0, run.stdout + run.stderr[-2000:]
    assert f"{len(faults)} of {len(faults)} cases are good" in run.stdout
