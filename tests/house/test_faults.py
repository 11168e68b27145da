# SPDX-License-Identifier: Apache-2.0
"""A sample of the table of `python -m benchmarks faults`: all ranks end in time and name what broke."""

import os
import sys
from pathlib import Path

import pytest
from scripts import output_of

from ds_hybridep.lab.namespaces import why_no_user_namespace
from ds_hybridep.lab.network import why_not_permitted

pytestmark = [pytest.mark.dist, pytest.mark.slow]

REPOSITORY = Path(__file__).resolve().parents[2]
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
    command = [sys.executable, "-m", "benchmarks", "faults", "--kinds", "classic", "--at-once", "2"]
    command += ["--phases", phase, "--codecs", codecs, "--faults", *faults]
    said = output_of(command, REPOSITORY, 300)
    assert f"{len(faults)} of {len(faults)} cases are good" in said
