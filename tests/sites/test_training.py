# SPDX-License-Identifier: Apache-2.0
"""Two sites, each a job of its own, beside one DeepSpeed job over all ranks."""

import functools
import importlib.util
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from large_packets import lose_large_packets, pass_large_packets
from marks import slow
from process_pool import ProcessPool
from site_jobs import ForkedJob, Job, Meeting, block, end_together, secret_file
from torch.distributed import distributed_c10d
from training import Case, engine_of, world2

from ds_hybridep.lab.network import EmulatedNetwork
from ds_hybridep.lab.topology import LinkSpec, Topology

pytestmark = pytest.mark.dist
DOMAINS = [{"name": "gpu", "size": 2, "domain_size": 2}]
HOT = [{"name": "rank", "size": 2, "hot_experts": 2}]
AUTOEP = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers: '.[hf]'"),
]


@pytest.fixture
def meeting(tmp_path: Path) -> Any:
    with Meeting(tmp_path) as one:
        yield one


def train(meeting: Meeting, folder: Path, ranks: int, sites: dict[str, Any], **options: Any) -> list[dict[str, Any]]:
    """Return the records of all ranks of site a, then of site b.  levels: of the inside of each."""
    levels = options.pop("levels", None)
    both = block(meeting, folder, sites=sites, **({"levels": levels} if levels else {}))
    options = {"ep_size": ranks, **options}
    jobs = [
        ForkedJob(folder, name, ranks, site=name, block=both, first_rank=index * ranks, **options)
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
        pytest.param({"zero": 1, "clip": 0.5, "accumulation": 2}, marks=pytest.mark.slow),
        pytest.param({"zero": 0}, marks=pytest.mark.slow),
        pytest.param({"zero": 0, "clip": 0.1, "accumulation": 4}, marks=pytest.mark.slow),
        pytest.param({"zero": 2, "accumulation": 4}, marks=pytest.mark.slow),
        pytest.param({"zero": 1, "ranks": 2}, marks=pytest.mark.slow),
        pytest.param({"zero": 2, "ranks": 2, "clip": 0.5}, marks=pytest.mark.slow),
        pytest.param({"zero": 1, "ranks": 2, "levels": DOMAINS, "accumulation": 2}, marks=pytest.mark.slow),
        pytest.param({"zero": 1, "ranks": 2, "levels": HOT, "accumulation": 2}, marks=pytest.mark.slow),
        pytest.param({"family": "mixtral", "zero": 1, "ranks": 2, "accumulation": 2}, marks=AUTOEP),
        pytest.param({"family": "qwen3_moe", "zero": 2, "ranks": 2}, marks=AUTOEP),
        pytest.param({"family": "qwen3_moe", "zero": 3, "ranks": 2, "clip": 0.5, "accumulation": 2}, marks=AUTOEP),
        pytest.param({"family": "qwen3_moe", "zero": 2, "ranks": 2, "levels": DOMAINS}, marks=AUTOEP),
        pytest.param(
            {"family": "qwen3_moe", "zero": 3, "ranks": 2, "levels": DOMAINS, "accumulation": 2}, marks=AUTOEP
        ),
        pytest.param({"family": "qwen3_moe", "zero": 1, "ranks": 2, "levels": HOT}, marks=AUTOEP),
    ],
)
def test_losses_are_those_of_one_job_over_all_ranks(meeting: Meeting, tmp_path: Path, options: dict[str, Any]) -> None:
    options = dict(options)
    ranks = options.pop("ranks", 1)
    sites = train(meeting, tmp_path, ranks, {}, **options)
    options.pop("levels", None)
    one = ForkedJob(tmp_path, "one", 2 * ranks, ep_size=ranks, **options).records()
    for got, wanted in zip(sites, one, strict=True):
        assert got["losses"] == pytest.approx(wanted["losses"], abs=2e-6), "fp32, up to the order of sums"
    assert [one["weights"] for one in sites[:ranks]] == [one["weights"] for one in sites[ranks:]]


UNEQUAL = [  # options of site a, and of site b; a reads what two ranks of one job read, b what a third one does
    ({"accumulation": 2, "reads": [0, 1]}, {"reads": [2]}),
    # By samples both would count alike: b reads the same twice.
    ({"accumulation": 2, "reads": [0, 1], "weight": 2.0}, {"accumulation": 2, "reads": [2, 2], "weight": 1.0}),
]


@pytest.fixture(scope="module")
def weights_of_one_job(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, torch.Tensor]]:
    """What one job over three ranks ends with; each is trained once."""

    @functools.cache
    def train_one(**options: Any) -> dict[str, torch.Tensor]:
        folder = tmp_path_factory.mktemp("one")
        ForkedJob(folder, "one", 3, dump=str(folder / "one"), **options).records()
        weights: dict[str, torch.Tensor] = torch.load(folder / "one-0.pt")
        return weights

    return train_one


@pytest.mark.parametrize("zero", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("unequal", UNEQUAL, ids=["by samples", "by weights of the script"])
def test_sites_with_unequal_batches_train_as_one_job(
    meeting: Meeting,
    tmp_path: Path,
    weights_of_one_job: Callable[..., dict[str, torch.Tensor]],
    unequal: tuple[dict[str, Any], ...],
    zero: int,
) -> None:
    both = {"ep_size": 1, "zero": zero, "clip": 0.5, "steps": 8}
    jobs = [
        ForkedJob(
            tmp_path, name, 1, site=name, block=block(meeting, tmp_path), dump=str(tmp_path / name), **both, **one
        )
        for name, one in zip("ab", unequal, strict=True)
    ]
    try:
        for job in jobs:
            job.records()
    finally:
        for job in jobs:
            job.kill()
    wanted = weights_of_one_job(**both)
    for weights in (torch.load(tmp_path / f"{name}-0.pt") for name in "ab"):
        for name, value in wanted.items():
            torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    "options",
    [
        {"zero": 2, "accumulation": 2, "clip": 0.5},
        pytest.param({"zero": 1, "clip": 0.5, "accumulation": 2}, marks=pytest.mark.slow),
        pytest.param({"zero": 2, "ranks": 2, "grows_at": 3}, marks=pytest.mark.slow),
        pytest.param({"zero": 2, "ranks": 2, "levels": DOMAINS, "accumulation": 2}, marks=pytest.mark.slow),
        pytest.param({"family": "qwen3_moe", "zero": 2, "ranks": 2}, marks=AUTOEP),
    ],
)
def test_gradients_leave_while_the_backward_runs(meeting: Meeting, tmp_path: Path, options: dict[str, Any]) -> None:
    options = {"bucket": 500, **options}
    ranks = options.pop("ranks", 1)
    sites = train(meeting, tmp_path, ranks, {}, **options)
    options.pop("levels", None)
    one = ForkedJob(tmp_path, "one", 2 * ranks, ep_size=ranks, **options).records()
    for got, wanted in zip(sites, one, strict=True):
        assert got["losses"] == pytest.approx(wanted["losses"], abs=2e-6), "fp32, up to the order of sums"
    assert [one["weights"] for one in sites[:ranks]] == [one["weights"] for one in sites[ranks:]]
    for index, record in enumerate(sites):
        (other,) = record["sites"]["others"].values()
        assert other["early_bytes"] > other["sent_bytes"] / 2, f"rank {index}: 5 of 6 steps"


@pytest.mark.slow
@pytest.mark.parametrize("codecs", [None, "recommended"])
def test_what_a_site_sent_before_it_died_in_the_backward_does_not_count(tmp_path: Path, codecs: str | None) -> None:
    ends = []
    for dies_in in ("backward", "forward"):
        folder = tmp_path / dies_in
        folder.mkdir()
        with Meeting(folder) as meeting:
            both = block(meeting, folder, ("a", "b", "c"), sites={"codecs": codecs}, timeout_s=12)
            options = {"block": both, "zero": 2, "bucket": 500, "ep_size": 1, "steps": 8, "dtype": "bf16"}
            jobs = [
                ForkedJob(folder, name, 1, site=name, first_rank=at, **options,
                    **({"dies_at": 4} if name == "c" else {}), dies_in=dies_in)
                for at, name in enumerate("abc")
            ]  # fmt: skip
            try:
                (a,), (b,) = (job.records() for job in jobs[:2])
            finally:
                for job in jobs:
                    job.kill()
        assert a["weights"] == b["weights"]
        assert sorted(map(int, a["losses"])) == list(range(8)), "no step is lost"
        assert not a["sites"]["others"]["c"]["present"]
        assert (int((folder / "c-left").read_text()) > 0) == (dies_in == "backward"), "some packets were under way"
        assert a["sites"]["repeated"] >= 1
        ends.append((a["weights"], a["losses"]))
    assert ends[0] == ends[1]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"zero": 1, "overflow_at": 3}, marks=pytest.mark.slow),
        pytest.param({"zero": 0}, marks=pytest.mark.slow),
        pytest.param({"zero": 1, "grad_accum_dtype": "fp32"}, marks=pytest.mark.slow),
        pytest.param({"zero": 2, "accumulation": 2, "clip": 0.5}, marks=pytest.mark.slow),
        pytest.param({"zero": 2, "accumulation": 2, "bucket": 500, "overflow_at": 3}, marks=pytest.mark.slow),
        pytest.param({"zero": 2, "bucket": 500, "grad_accum_dtype": "fp32", "grows_at": 3}, marks=pytest.mark.slow),
    ],
)
def test_encoded_gradients_leave_the_weights_of_all_sites_equal(
    meeting: Meeting, tmp_path: Path, options: dict[str, Any]
) -> None:
    a, b = train(meeting, tmp_path, 1, {"codecs": "recommended"}, dtype="bf16", steps=8, **options)
    assert a["weights"] == b["weights"]
    assert a["skipped"] == b["skipped"] == int("overflow_at" in options)


@pytest.mark.slow  # a site that comes back begins with other weights too, see below
def test_a_site_that_starts_with_other_weights_joins_the_first(meeting: Meeting, tmp_path: Path) -> None:
    options = {"block": block(meeting, tmp_path), "ep_size": 2, "until": str(tmp_path / "until"), "steps": 10**6}
    a = ForkedJob(tmp_path, "a", 2, site="a", **options)
    b = ForkedJob(tmp_path, "b", 2, site="b", first_rank=2, seed=2, **options)
    try:
        b.wait_for_step(5)
        ours, theirs = end_together(tmp_path, [a, b])
    finally:
        a.kill()
        b.kill()
    assert [one["weights"] for one in ours] == [one["weights"] for one in theirs]
    assert [one["sites"]["joins"] for one in theirs] == [1, 1]


@pytest.mark.parametrize(
    "options",
    [
        {"sites": {"codecs": "recommended"}, "dtype": "bf16"},
        pytest.param({"ranks": 2, "levels": DOMAINS}, marks=pytest.mark.slow),
        pytest.param({"ranks": 2, "family": "qwen3_moe", "zero": 3}, marks=AUTOEP),
    ],
)
def test_a_site_that_was_killed_comes_back_while_the_other_goes_on(
    meeting: Meeting, tmp_path: Path, options: dict[str, Any]
) -> None:
    options = dict(options)
    ranks, of_block = options.pop("ranks", 1), {key: options.pop(key) for key in ("sites", "levels") if key in options}
    both = block(meeting, tmp_path, **of_block)
    options |= {"until": str(tmp_path / "until"), "steps": 10**6, "pause_s": 0.02, "ep_size": ranks, "block": both}
    a = ForkedJob(tmp_path, "a", ranks, site="a", **options)
    b = ForkedJob(tmp_path, "b", ranks, site="b", first_rank=ranks, **options)
    try:
        a.wait_for_step(5)
        b.kill()
        at = a.step()
        a.wait_for_step(at + 5)
        b = ForkedJob(tmp_path, "b again", ranks, site="b", first_rank=ranks, **options)
        b.wait_for_step(at + 1)
        ours, theirs = end_together(tmp_path, [a, b])
    finally:
        a.kill()
        b.kill()
    assert ours[0]["started_at"] == 0
    assert sorted(map(int, ours[0]["losses"])) == list(range(len(ours[0]["losses"]))), "it made each step once"
    assert theirs[0]["started_at"] > at
    assert [one["weights"] for one in ours] == [one["weights"] for one in theirs]
    report = ours[0]["sites"]
    assert report["step"] == report["others"]["b"]["step"] + 1
    assert report["others"]["b"]["present"]
    assert report["others"]["b"]["sent_bytes"] > 0


@pytest.mark.slow  # test_meeting.py has the rules for who may begin anew
def test_a_fresh_site_waits_for_the_one_with_the_checkpoint_and_joins_it(tmp_path: Path) -> None:
    """Both were killed, and the disk of b is lost.  A fresh b once began alone, and overwrote what a had."""
    kept, saved = ["--folder", str(tmp_path / "kept")], str(tmp_path / "checkpoints")
    with Meeting(tmp_path, more=kept) as meeting:
        both = {"block": block(meeting, tmp_path, timeout_s=5), "ep_size": 1, "steps": 10**6, "pause_s": 0.02}
        jobs = [ForkedJob(tmp_path, "a", 1, site="a", checkpoints=saved, save_at=6, **both)]
        jobs.append(ForkedJob(tmp_path, "b", 1, site="b", first_rank=1, **both))
        try:
            jobs[0].wait_for_step(9)
            deadline = time.monotonic() + 400
            while json.loads((tmp_path / "kept" / "run.json").read_text())["step"] < 7:
                assert time.monotonic() < deadline
                time.sleep(0.05)
        finally:
            for job in jobs:
                job.kill()
    both["until"] = str(tmp_path / "until")
    with Meeting(tmp_path, port=meeting.port, more=kept) as meeting:
        b = ForkedJob(tmp_path, "b again", 1, site="b", first_rank=1, **both)
        a = None
        try:
            deadline = time.monotonic() + 400
            while "begin anew (b: step 0, no run)" not in meeting.log.read_text():
                assert time.monotonic() < deadline, meeting.log.read_text()
                time.sleep(0.1)
            time.sleep(6)  # longer than timeout_s, after which half of the sites may begin
            assert b.step() == 0
            a = ForkedJob(tmp_path, "a again", 1, site="a", checkpoints=saved, **both)
            b.wait_for_step(8)
            (ours,), (theirs,) = end_together(tmp_path, [a, b])
        finally:
            for job in (a, b):
                if job is not None:
                    job.kill()
    assert min(map(int, ours["losses"])) == 6, "from the checkpoint on"
    assert ours["weights"] == theirs["weights"]
    assert theirs["sites"]["joins"] == 1


def test_a_checkpoint_is_not_loaded_over_the_newer_state_of_others(tmp_path: Path) -> None:
    """Site b comes back and, as scripts do, loads its own checkpoint after it has joined."""
    saved = str(tmp_path / "checkpoints")
    with Meeting(tmp_path) as meeting:
        both = {"block": block(meeting, tmp_path), "ep_size": 1, "steps": 10**6, "pause_s": 0.02}
        both["until"] = str(tmp_path / "until")
        a = ForkedJob(tmp_path, "a", 1, site="a", **both)
        b = ForkedJob(tmp_path, "b", 1, site="b", first_rank=1, checkpoints=saved, save_at=4, **both)
        try:
            b.wait_for_step(6)
            b.kill()
            a.wait_for_step(a.step() + 5)
            b = ForkedJob(tmp_path, "b again", 1, site="b", first_rank=1, checkpoints=saved, **both)
            b.wait_for_step(11)
            (ours,), (theirs,) = end_together(tmp_path, [a, b])
        finally:
            a.kill()
            b.kill()
    assert ours["weights"] == theirs["weights"]
    assert sorted(map(int, ours["losses"])) == list(range(len(ours["losses"])))
    assert "keeps the state of the other sites" in b.output()
    assert "global_step4, of step 4, is not loaded" in b.output()


@pytest.mark.parametrize(
    ("factor", "joins", "repairs"),
    [(1 + 1e-3, 0, 1), slow(1 + 1e-7, 0, 0), slow(3.0, 1, 0)],
    ids=["too far", "as rounding does", "other weights"],
)
def test_weights_that_drift_apart_are_repaired_by_parts(
    meeting: Meeting, tmp_path: Path, factor: float, joins: int, repairs: int
) -> None:
    """The whole state crosses only if a site has other weights altogether."""
    both = block(meeting, tmp_path, advanced={"verify_interval": 5})
    options = {"block": both, "ep_size": 1, "steps": 10**6, "until": str(tmp_path / "until"), "pause_s": 0.01}
    a = ForkedJob(tmp_path, "a", 1, site="a", **options)
    b = ForkedJob(tmp_path, "b", 1, site="b", first_rank=1, drifts_at=7, drifts_by=factor, **options)
    try:
        b.wait_for_step(20)
        (ours,), (theirs,) = end_together(tmp_path, [a, b])
    finally:
        a.kill()
        b.kill()
    assert (theirs["sites"]["joins"], theirs["sites"]["repairs"]) == (joins, repairs)
    assert theirs["sites"]["apart"] < 1e-5
    if joins or repairs:
        assert ours["weights"] == theirs["weights"]
    sent, whole = ours["sites"]["others"]["b"]["state_bytes"], 3 * ours["master_bytes"]
    assert (sent > whole) == bool(joins)
    assert (sent > 0) == bool(joins or repairs)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 4])
def test_sites_with_processors_of_two_kinds_stay_within_the_tolerance(
    meeting: Meeting, tmp_path: Path, every: int
) -> None:
    both = block(meeting, tmp_path, sites={"every": every}, advanced={"verify_interval": 10})
    options = {"block": both, "ep_size": 1, "steps": 200}
    a = Job(tmp_path, "a", 1, site="a", **options)
    b = Job(tmp_path, "b", 1, ["env", "ATEN_CPU_CAPABILITY=default"], site="b", first_rank=1, **options)
    try:
        (ours,), (theirs,) = a.records(), b.records()
    finally:
        a.kill()
        b.kill()
    assert theirs["sites"]["apart"] < 1e-5
    assert theirs["sites"]["joins"] == theirs["sites"]["repairs"] == 0
    assert ours["sites"]["others"]["b"]["state_bytes"] == 0


@pytest.mark.slow
def test_a_meeting_point_that_is_gone_stops_nobody(meeting: Meeting, tmp_path: Path) -> None:
    both = block(meeting, tmp_path)
    options = {"steps": 40, "pause_s": 0.05, "ep_size": 1, "block": both}
    jobs = [ForkedJob(tmp_path, name, 1, site=name, first_rank=i, **options) for i, name in enumerate(("a", "b"))]
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
    first = ForkedJob(tmp_path, "a", 1, site="a", block=both, ep_size=1, steps=10**6)  # until it is killed
    wrong = {**both, "sites": {**both["sites"], "secret_file": str(secret_file(tmp_path, "x" * 20))}}
    others = {
        "different secrets": {"site": "b", "block": wrong},
        "zero_optimization.stage is 2 instead of 1": {"site": "b", "block": both, "zero": 2},
        "set the environment variable HYBRIDEP_SITE": {"site": "c", "block": both},
        "refused it: another site 'a' is here already": {"site": "a", "block": {**both, "timeout_s": 3}},
    }  # fmt: skip
    try:
        deadline = time.monotonic() + 400
        while "site 'a' is here" not in meeting.log.read_text():
            assert time.monotonic() < deadline, first.output()
            time.sleep(0.1)
        jobs = {
            says: ForkedJob(tmp_path, f"other {index}", 1, ep_size=1, **options)
            for index, (says, options) in enumerate(others.items())
        }
        for says, job in jobs.items():
            assert job.wait() == [1]
            assert says in job.output()
    finally:
        first.kill()


@pytest.mark.slow
def test_two_of_three_sites_go_on_while_one_is_killed_and_comes_back(tmp_path: Path) -> None:
    with Meeting(tmp_path) as meeting, three_sites(meeting, tmp_path) as (start, jobs):
        jobs["a"].wait_for_step(4)
        jobs["b"].kill()
        at = jobs["a"].step()
        jobs["a"].wait_for_step(at + 5)
        assert jobs["c"].step() > at
        start("b", "b again").wait_for_step(at + 1)
        records = end_together(tmp_path, list(jobs.values()))
    assert len({ranks[0]["weights"] for ranks in records}) == 1
    assert sorted(map(int, records[0][0]["losses"])) == list(range(len(records[0][0]["losses"])))
    assert records[1][0]["started_at"] > at


@pytest.mark.slow
@pytest.mark.usefixtures("permitted_without_delay")
def test_one_of_three_that_is_cut_off_never_steps_and_joins_again_in_its_own_process(tmp_path: Path) -> None:
    with EmulatedNetwork(Topology(4, 1), LinkSpec()) as network:
        places = {name: network.command_on(host, []) for host, name in enumerate("abc")}
        point = Meeting(tmp_path, network.topology.address_of(3), network.command_on(3, []))
        with point as meeting, three_sites(meeting, tmp_path, places) as (_, jobs):
            jobs["a"].wait_for_step(4)
            network.cut(2)
            time.sleep(1)  # what is on its way arrives
            at = jobs["c"].step()
            jobs["a"].wait_for_step(at + 10)
            assert jobs["c"].step() == at, "not one step by itself"
            network.restore(2)
            jobs["c"].wait_for_step(at + 10)
            records = end_together(tmp_path, list(jobs.values()))
            said = jobs["c"].output()
    assert len({ranks[0]["weights"] for ranks in records}) == 1
    assert records[2][0]["sites"]["joins"] == 1
    assert "site 'c' waits for" in said
    assert "the other sites went on without site 'c'" in said or "joined at step" in said


@pytest.mark.slow
def test_a_site_that_large_packets_do_not_reach_says_so_and_joins_once_they_do(
    permitted: None, tmp_path: Path
) -> None:
    with EmulatedNetwork(Topology(4, 1), LinkSpec()) as network:
        places = {name: network.command_on(host, []) for host, name in enumerate("abc")}
        point = Meeting(tmp_path, network.topology.address_of(3), network.command_on(3, []))
        with point as meeting, three_sites(meeting, tmp_path, places) as (_, jobs):
            jobs["a"].wait_for_step(4)
            lose_large_packets(network, 2)
            time.sleep(1)  # what is on its way arrives
            at = jobs["c"].step()
            jobs["a"].wait_for_step(at + 10)
            assert jobs["c"].step() == at, "not one step by itself"
            pass_large_packets(network, 2)
            jobs["c"].wait_for_step(at + 10)
            records = end_together(tmp_path, list(jobs.values()))
            said = jobs["c"].output()
    assert len({ranks[0]["weights"] for ranks in records}) == 1
    assert "is the MTU too large somewhere on the way?" in said


@contextmanager
def three_sites(meeting: Meeting, folder: Path, places: Mapping[str, list[str]] | None = None) -> Iterator[Any]:
    """Give a function that starts a site, and the jobs of all three, which run.  places: words before commands."""
    block_of_all = block(meeting, folder, ("a", "b", "c"), timeout_s=12)
    options = {"block": block_of_all, "until": str(folder / "until"), "steps": 10**6, "pause_s": 0.02, "ep_size": 1}
    jobs: dict[str, ForkedJob] = {}

    def start(site: str, name: str) -> ForkedJob:
        before = (places or {}).get(site, ())
        jobs[site] = ForkedJob(folder, name, 1, before, site=site, first_rank="abc".index(site), **options)
        return jobs[site]

    try:
        for site in "abc":
            start(site, site)
        yield start, jobs
    finally:
        for job in jobs.values():
            job.kill()


def groups_after_each_engine(case: Case, sites: dict[str, Any]) -> list[int]:
    """Process groups of this process, each time after an engine of site a was destroyed."""
    found = []
    for _ in range(3):
        with engine_of(case, with_block=True, hybridep={"sites": {**sites, "name": "a"}}):
            pass
        found.append(len(distributed_c10d._world.pg_map))
    return found


def test_engines_of_a_site_leave_no_process_groups_behind(
    meeting: Meeting, tmp_path: Path, pool2: ProcessPool
) -> None:
    sites = block(meeting, tmp_path)["sites"]
    for found in pool2.run(groups_after_each_engine, case=world2(), sites=sites):
        assert len(set(found)) == 1, found


def test_codecs_inside_a_site_are_refused(meeting: Meeting, tmp_path: Path) -> None:
    levels = [{"name": "gpu", "size": 1, "codecs": "recommended"}]
    job = ForkedJob(tmp_path, "a", 1, site="a", block=block(meeting, tmp_path, levels=levels), ep_size=1)
    assert job.wait() == [1]
    assert "leave out the codecs of levels" in job.output()


@pytest.mark.slow
@pytest.mark.parametrize("overflow_at", [-1, 3])
def test_local_steps_send_the_weights_of_a_domain_once_for_each_step(
    meeting: Meeting, tmp_path: Path, overflow_at: int
) -> None:
    inside = {"levels": DOMAINS, "advanced": {"verify_interval": 1}}  # compares the copies of an expert at each step
    options = {"ep_size": 2, "overflow_at": overflow_at}
    alone = ForkedJob(tmp_path, "alone", 2, block=inside, **options)
    both = block(meeting, tmp_path, sites={"every": 2}, **inside)
    jobs = [
        ForkedJob(tmp_path, name, 2, site=name, block=both, first_rank=2 * i, **options) for i, name in enumerate("ab")
    ]
    try:
        (wanted, _), *sites = (job.records() for job in (alone, *jobs))
    finally:
        for job in (alone, *jobs):
            job.kill()
    a_step = wanted["weight_bytes"] / 6  # of which the first start sends one
    for found in (ranks[0] for ranks in sites):
        assert found["skipped"] == int(overflow_at >= 0)
        assert found["weight_bytes"] == wanted["weight_bytes"] + (a_step if overflow_at >= 0 else 0)


@pytest.mark.slow
def test_local_steps_keep_common_weights_equal_also_for_a_site_that_comes_back(
    meeting: Meeting, tmp_path: Path
) -> None:
    both = block(meeting, tmp_path, sites={"every": 4})
    options = {"steps": 10**6, "until": str(tmp_path / "until"), "pause_s": 0.05, "ep_size": 1, "block": both}
    a = ForkedJob(tmp_path, "a", 1, site="a", **options)
    b = ForkedJob(tmp_path, "b", 1, site="b", first_rank=1, **options)
    try:
        a.wait_for_step(6)
        b.kill()
        at = a.step()
        a.wait_for_step(at + 8)
        b = ForkedJob(tmp_path, "b again", 1, site="b", first_rank=1, **options)
        b.wait_for_step(at + 9)
        (ours,), (theirs,) = end_together(tmp_path, [a, b])
    finally:
        a.kill()
        b.kill()
    assert sorted(map(int, ours["losses"])) == list(range(len(ours["losses"])))
    assert theirs["started_at"] > at
    assert ours["common"] == theirs["common"]
    assert ours["weights"] != theirs["weights"], "each site makes its own steps"
