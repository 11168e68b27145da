# SPDX-License-Identifier: Apache-2.0
"""Two sites, each a job of its own, beside one DeepSpeed job over all ranks."""

import time
from pathlib import Path
from typing import Any

import pytest
from site_jobs import Job, Meeting, block, secret_file

pytestmark = pytest.mark.dist


@pytest.fixture
def meeting(tmp_path: Path) -> Any:
    with Meeting(tmp_path) as one:
        yield one


def train(meeting: Meeting, folder: Path, ranks: int, sites: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """Return the records of all ranks of site a, then of site b."""
    both = block(meeting, folder, sites=sites)
    options = {"ep_size": ranks, **options}
    jobs = [
        Job(folder, name, ranks, site=name, block=both, first_rank=index * ranks, **options)
        for index, name in enumerate(("a", "b"))
    ]
    try:
        return [record for job in jobs for record in job.records()]
    finally:
        for job in jobs:
            job.kill()


@pytest.mark.parametrize(
    "options",
    [
        {"zero": 1, "clip": 0.5, "accumulation": 2},
        pytest.param({"zero": 0}, marks=pytest.mark.slow),
        pytest.param({"zero": 0, "clip": 0.1, "accumulation": 4}, marks=pytest.mark.slow),
        pytest.param({"zero": 2, "accumulation": 4}, marks=pytest.mark.slow),
        pytest.param({"zero": 1, "ranks": 2}, marks=pytest.mark.slow),
        pytest.param({"zero": 2, "ranks": 2, "clip": 0.5}, marks=pytest.mark.slow),
    ],
)
def test_losses_are_those_of_one_job_over_all_ranks(meeting: Meeting, tmp_path: Path, options: dict[str, Any]) -> None:
    options = dict(options)
    ranks = options.pop("ranks", 1)
    sites = train(meeting, tmp_path, ranks, {}, **options)
    one = Job(tmp_path, "one", 2 * ranks, ep_size=ranks, **options).records()
    for got, wanted in zip(sites, one, strict=True):
        assert got["losses"] == pytest.approx(wanted["losses"], abs=2e-6), "fp32, up to the order of sums"
    assert [one["weights"] for one in sites[:ranks]] == [one["weights"] for one in sites[ranks:]]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"zero": 1, "overflow_at": 3}, marks=pytest.mark.slow),
        pytest.param({"zero": 0}, marks=pytest.mark.slow),
        pytest.param({"zero": 1, "grad_accum_dtype": "fp32"}, marks=pytest.mark.slow),
        pytest.param({"zero": 2, "accumulation": 2, "clip": 0.5}, marks=pytest.mark.slow),
    ],
)
def test_encoded_gradients_leave_the_weights_of_all_sites_equal(
    meeting: Meeting, tmp_path: Path, options: dict[str, Any]
) -> None:
    a, b = train(meeting, tmp_path, 1, {"codecs": "recommended"}, dtype="bf16", steps=8, **options)
    assert a["weights"] == b["weights"]
    assert a["skipped"] == b["skipped"] == int("overflow_at" in options)


def test_a_site_that_was_killed_comes_back_while_the_other_goes_on(meeting: Meeting, tmp_path: Path) -> None:
    both = block(meeting, tmp_path, sites={"codecs": "recommended"})
    options = {"steps": 150, "pause_s": 0.05, "ep_size": 1, "block": both, "dtype": "bf16"}
    a = Job(tmp_path, "a", 1, site="a", **options)
    b = Job(tmp_path, "b", 1, site="b", first_rank=1, **options)
    try:
        a.wait_for_step(5)
        b.kill()
        at = a.step()
        a.wait_for_step(at + 5)
        b = Job(tmp_path, "b again", 1, site="b", first_rank=1, **options)
        (ours,), (theirs,) = a.records(), b.records()
    finally:
        a.kill()
        b.kill()
    assert ours["started_at"] == 0
    assert sorted(map(int, ours["losses"])) == list(range(150)), "it made each step once"
    assert theirs["started_at"] > at
    assert ours["weights"] == theirs["weights"]


@pytest.mark.slow
def test_a_meeting_point_that_is_gone_stops_nobody(meeting: Meeting, tmp_path: Path) -> None:
    both = block(meeting, tmp_path)
    options = {"steps": 40, "pause_s": 0.05, "ep_size": 1, "block": both}
    jobs = [Job(tmp_path, name, 1, site=name, first_rank=i, **options) for i, name in enumerate(("a", "b"))]
    try:
        jobs[0].wait_for_step(3)
        meeting.process.kill()
        (a,), (b,) = (job.records() for job in jobs)
    finally:
        for job in jobs:
            job.kill()
    assert a["weights"] == b["weights"]


def test_who_cannot_join_is_told_why(meeting: Meeting, tmp_path: Path) -> None:
    both = block(meeting, tmp_path)
    first = Job(tmp_path, "a", 1, site="a", block=both, ep_size=1, steps=10**6)  # until it is killed
    wrong = {**both, "sites": {**both["sites"], "secret_file": str(secret_file(tmp_path, "x" * 20))}}
    others = {
        "different secrets": {"site": "b", "block": wrong},
        "ZeRO stage is 2 instead of 1": {"site": "b", "block": both, "zero": 2},
        "set the environment variable HYBRIDEP_SITE": {"site": "c", "block": both},
        "another site 'a' is here already": {"site": "a", "block": {**both, "timeout_s": 3}},
    }  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while "site 'a' is here" not in meeting.log.read_text():
            assert time.monotonic() < deadline, first.output()
            time.sleep(0.1)
        jobs = {
            says: Job(tmp_path, f"other {index}", 1, ep_size=1, **options)
            for index, (says, options) in enumerate(others.items())
        }
        for says, job in jobs.items():
            assert job.wait() == [1]
            assert says in job.output()
    finally:
        first.kill()


@pytest.mark.slow
def test_local_steps_keep_common_weights_equal_also_for_a_site_that_comes_back(
    meeting: Meeting, tmp_path: Path
) -> None:
    both = block(meeting, tmp_path, sites={"every": 4})
    options = {"steps": 160, "pause_s": 0.05, "ep_size": 1, "block": both}
    a = Job(tmp_path, "a", 1, site="a", **options)
    b = Job(tmp_path, "b", 1, site="b", first_rank=1, **options)
    try:
        a.wait_for_step(6)
        b.kill()
        at = a.step()
        a.wait_for_step(at + 8)
        b = Job(tmp_path, "b again", 1, site="b", first_rank=1, **options)
        (ours,), (theirs,) = a.records(), b.records()
    finally:
        a.kill()
        b.kill()
    assert sorted(map(int, ours["losses"])) == list(range(160))
    assert theirs["started_at"] > at
    assert ours["common"] == theirs["common"]
    assert ours["weights"] != theirs["weights"], "each site makes its own steps"
