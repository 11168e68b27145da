# SPDX-License-Identifier: Apache-2.0
"""Sites that train with Transformers' Trainer, beside one Trainer that reads what both read."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from site_jobs import SUPPORT, ForkedJob, Meeting, block

pytestmark = [
    pytest.mark.dist,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers: '.[hf]'"),
]


class TrainerJob(ForkedJob):
    script = SUPPORT / "site_trainer_script.py"


def weights_after(job: TrainerJob, out: Path) -> dict[str, Any]:
    assert job.wait() == [0], job.output()
    return torch.load(f"{out}.pt")


def test_sites_with_unequal_numbers_of_labels_train_as_one_trainer(tmp_path: Path) -> None:
    """Without a change of the script: site a has two sequences with all labels in a step, site b one with two."""
    with Meeting(tmp_path) as meeting:
        sites = [
            TrainerJob(
                tmp_path, name, 1, site=name, block=block(meeting, tmp_path), rows=len(places), places=places, steps=50
            )
            for name, places in (("a", [0, 2]), ("b", [1]))
        ]
        try:
            found = [weights_after(job, tmp_path / job.name) for job in sites]
        finally:
            for job in sites:
                job.kill()
    one = TrainerJob(tmp_path, "one", 1, block=None, rows=3, places=[0, 2, 1], steps=50)
    wanted = weights_after(one, tmp_path / "one")
    moved = max(float((value - wanted[name]).abs().max()) for name, value in start_of(tmp_path).items())
    assert moved > 1e-3
    for weights in found:
        for name, value in wanted.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6, msg=name)


def start_of(folder: Path) -> dict[str, Any]:
    job = TrainerJob(folder, "start", 1, block=None, rows=3, places=[0, 2, 1], steps=1)
    return weights_after(job, folder / "start")
