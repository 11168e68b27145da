# SPDX-License-Identifier: Apache-2.0
"""What a step takes if each datacentre is a site: two jobs of two ranks, beside one job over all four, in turns.

    python -m benchmarks sites --out benchmarks/results/sites-step.jsonl

All jobs of a lab are there at the same time, and each trains when it is its turn.  Jobs "apart" never exchange
anything: both sites as they would be alone, on the same busy machine.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist

import ds_hybridep
from benchmarks import training
from benchmarks.common import (
    JOB_FOLDER,
    POLL_S,
    REPOSITORY,
    Record,
    Records,
    emulated,
    interleaved,
    new_folder,
    ratio,
    table,
)
from benchmarks.training import RECOMMENDED, Plan, Run, byte_model, engine_of, train_lm
from ds_hybridep.lab.launcher import rank_environment
from ds_hybridep.lab.network import HOST_DEVICE, EmulatedNetwork
from ds_hybridep.lab.topology import LinkSpec, Topology, parse_duration, parse_rate

TOPOLOGY = Topology(2, 2)
MEETING_PORT, FIRST_PORT = 29400, 29500
ROWS, SEQ_LEN = 8, 128
LIMIT_S = 900.0  # for a block, and for the start
ONE_JOB, SITES, EARLY, APART = "one job, EP inside each", "sites", "sites, ZeRO 2", "two jobs apart"
POINTS = ("20mbit 0ms", "none 0ms", "20mbit 50ms")
BUCKETS = 16  # of ZeRO 2, about: gradients leave as soon as one is full


@dataclass(frozen=True)
class Way:
    """One way to train on both datacentres.

    stage: of ZeRO.  block: of ds_config, None without ours.  is_split: a job for each datacentre.  job: ways with the
    same one share its processes.  ep_size: ranks that share the experts.  zero: more settings of "zero_optimization";
    a "buckets" among them is the number of buckets that gradients fill, for DeepSpeed's reduce_bucket_size.
    """

    name: str
    stage: int = 1
    block: Mapping[str, Any] | None = None
    is_split: bool = True
    job: str = ""
    ep_size: int = TOPOLOGY.hosts_per_dc
    zero: Mapping[str, Any] = field(default_factory=dict)


class Job(training.Job):
    """A rank of one job; the driver says when it is its turn."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._turns = 0

    def turn(self) -> tuple[str, int]:
        """Wait for this job's turn; returns the name of the way and the steps to time, 0 at the end."""
        path = self.folder / f"turn-{self._turns}.json"
        if self.rank == 0:
            while not path.exists():
                time.sleep(POLL_S)
        dist.barrier()
        self._turns += 1
        way, steps = json.loads(path.read_text())
        return str(way), int(steps)

    def answer(self, **measured: Any) -> None:
        if self.rank == 0:
            write(self.folder / f"answer-{self._turns - 1}.json", measured)


def write(path: Path, value: Any) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value))
    os.replace(partial, path)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--points", nargs="+", default=list(POINTS), metavar="'RATE DELAY'", help="of the uplinks")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=5, help="of one block")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--exact", action="store_true", help="without codecs")
    parser.add_argument("--note", default="", help="kept in the records: what else the machine did")


# ---- the driver ----


def run(args: argparse.Namespace, records: Records) -> None:
    by_delay: dict[str, list[str]] = defaultdict(list)
    for point in args.points:
        rate, delay = point.split()
        by_delay[delay].append(rate)
    for delay, rates in by_delay.items():
        links = LinkSpec(wan_delay_s=parse_duration(delay, "--points"))
        with tempfile.TemporaryDirectory() as scratch, emulated(TOPOLOGY, links) as network, ExitStack() as stack:
            assert network is not None
            secret = secret_in(Path(scratch))
            ways = ways_of(network.topology.address_of(0), secret, {} if args.exact else RECOMMENDED)
            lab = Lab(ways, network, Path(scratch), stack)
            for way in lab.ways:
                lab.block(way, 1)  # the start, and memory
            for rate in rates:
                network.set_wan_rate(None if rate == "none" else parse_rate(rate, "--points"))
                ways = [way for way in lab.ways if rate == "none" or way.name != APART]
                measured = lab.measure(ways, args.rounds, args.steps)
                for way in ways:
                    params = {"rate": rate, "delay": delay, "way": way.name, "zero_stage": way.stage}
                    params |= {"layers": args.layers, "hidden": args.hidden, "tokens_per_rank": ROWS * SEQ_LEN}
                    params |= {"codecs": "exact" if args.exact else "recommended", "note": args.note}
                    records.add(params, **measured[way.name])
                print(f"{rate}, {delay}: done", flush=True)
            lab.end()


class Lab:
    """All jobs, and the meeting points."""

    def __init__(self, ways: list[Way], network: EmulatedNetwork, folder: Path, stack: ExitStack) -> None:
        self.ways, self._network, self._folder = ways, network, folder
        self._turns: dict[str, int] = defaultdict(int)
        self._jobs: dict[str, list[subprocess.Popen[bytes]]] = {}
        # Ranks have sessions of their own: without this they would stay when this process is ended.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        for way in ways:
            if way.block is not None and "sites" in way.block:
                self._meet(way.block["sites"], stack)
            for name, hosts in self.jobs_of(way).items():
                if name not in self._jobs:
                    of_job = [one for one in ways if name in self.jobs_of(one)]
                    self._start(of_job, name, hosts, stack)

    def _meet(self, sites: Mapping[str, str], stack: ExitStack) -> None:
        """Start the meeting point of these sites on host 0."""
        port = sites["meeting_point"].rpartition(":")[2]
        meet = ["-m", "ds_hybridep.commands.main", "meet", "--port", port, "--secret-file", sites["secret_file"]]
        log = stack.enter_context((self._folder / f"meeting-{port}.log").open("wb"))
        point = subprocess.Popen(self._network.command_on(0, [sys.executable, *meet]), stdout=log, stderr=log)
        stack.callback(point.wait)
        stack.callback(point.kill)

    def jobs_of(self, way: Way) -> dict[str, range]:
        """The jobs of a way, by name, and their hosts."""
        job = way.job or way.name
        if not way.is_split:
            return {job: range(TOPOLOGY.num_ranks)}
        return {f"{job} {'ab'[dc]}": TOPOLOGY.ranks_in(dc) for dc in range(TOPOLOGY.num_dcs)}

    def _start(self, ways: list[Way], name: str, hosts: range, stack: ExitStack) -> None:
        folder = new_folder(self._folder / name.replace(" ", "-"))
        write(folder / "settings.json", {"ways": [asdict(way) for way in ways], "seed": hosts[0]})
        port = FIRST_PORT + len(self._jobs)
        self._jobs[name] = []
        for rank, host in enumerate(hosts):
            master = self._network.topology.address_of(hosts[0])
            environment = {
                **os.environ, **rank_environment(rank, len(hosts), master, HOST_DEVICE, port=port),
                JOB_FOLDER: str(folder), "HYBRIDEP_SITE": name[-1],
                "PYTHONPATH": os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")])),
            }  # fmt: skip
            line = [sys.executable, "-m", "benchmarks", *sys.argv[1:]]
            log = stack.enter_context((folder / f"rank{rank}.log").open("wb"))
            process = subprocess.Popen(
                self._network.command_on(host, line), env=environment, stdout=log, stderr=log, start_new_session=True
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            self._jobs[name].append(process)

    def measure(self, ways: list[Way], rounds: int, steps: int) -> dict[str, dict[str, Any]]:
        """Seconds and bytes per step of each way, by block."""
        measured: dict[str, dict[str, list[Any]]] = {way.name: defaultdict(list) for way in ways}
        by_name = {way.name: way for way in ways}
        for way in ways:
            self.block(way, 1)  # at this rate
        for order in interleaved(list(by_name), rounds):
            for name in order:
                for key, value in self.block(by_name[name], steps).items():
                    measured[name][key].append(value)
        return {name: dict(found) for name, found in measured.items()}

    def block(self, way: Way, steps: int) -> dict[str, Any]:
        """Let the jobs of a way train; one step more than is timed."""
        names, before = list(self.jobs_of(way)), self._sent()
        for name in names:
            write(self._path(name, "turn"), (way.name, steps))
        answers = [self._answer(name) for name in names]
        self._turns |= {name: self._turns[name] + 1 for name in names}
        return {
            "step_s": max(one["seconds"] for one in answers) / steps,
            "waited_s": max(one["waited_s"] for one in answers) / (steps + 1),
            "early_share": statistics.fmean(one["early_share"] for one in answers),
            "wan_bytes_per_step": (self._sent() - before) / (steps + 1),
            "each_s": [max(each) for each in zip(*(one["each_s"] for one in answers), strict=True)],
            "loss": statistics.fmean(one["loss"] for one in answers),
        }

    def _sent(self) -> int:
        return sum(uplink.out_bytes for uplink in self._network.counters())

    def _path(self, name: str, kind: str) -> Path:
        return self._folder / name.replace(" ", "-") / f"{kind}-{self._turns[name]}.json"

    def _answer(self, name: str) -> dict[str, Any]:
        path, limit = self._path(name, "answer"), time.monotonic() + LIMIT_S
        while not path.exists():
            if time.monotonic() > limit or any(process.poll() is not None for process in self._jobs[name]):
                for log in sorted(path.parent.glob("rank*.log")):
                    print(log.read_text(errors="replace")[-3000:], file=sys.stderr)
                print(f"{name}: the job did not answer", file=sys.stderr)
                raise SystemExit(1)
            time.sleep(POLL_S)
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def end(self) -> None:
        """Let all jobs end, and wait for it."""
        for name in self._jobs:
            write(self._path(name, "turn"), ("", 0))
        for process in (process for job in self._jobs.values() for process in job):
            process.wait(LIMIT_S)


def secret_in(folder: Path) -> Path:
    secret = folder / "secret"
    secret.write_text(os.urandom(16).hex())
    return secret


def sites_block(meeting_host: str, port: int, secret: Path, codecs: Mapping[str, Any]) -> dict[str, Any]:
    """The "hybridep" block of a site that meets others at this port."""
    point = {"meeting_point": f"{meeting_host}:{port}", "secret_file": str(secret)}
    return {"sites": {"names": ["a", "b"], **point, **codecs}, "advanced": {"verify_interval": 0}}


def ways_of(meeting_host: str, secret: Path, codecs: Mapping[str, Any]) -> list[Way]:
    sizes = TOPOLOGY.num_dcs, TOPOLOGY.hosts_per_dc
    sites = [sites_block(meeting_host, MEETING_PORT + at, secret, codecs) for at in range(2)]
    return [
        Way(ONE_JOB, block=Plan("", TOPOLOGY.hosts_per_dc, (1, 1), codecs).block(sizes), is_split=False),
        Way(SITES, block=sites[0]),
        Way(EARLY, stage=2, zero={"buckets": BUCKETS}, block=sites[1]),
        Way(APART),
    ]


# ---- the ranks ----


def rank(args: argparse.Namespace, job: Job) -> None:
    """Train whenever it is this job's turn."""
    settings = json.loads((job.folder / "settings.json").read_text())
    # All ranks begin with the same seed.  A broadcast of each parameter would take longer than what is measured.
    deepspeed.DeepSpeedEngine._broadcast_model = lambda self: None
    runs = {way["name"]: run_for(args, Way(**way)) for way in settings["ways"]}
    corpus, _ = train_lm.read_corpus()
    data = argparse.Namespace(seq_len=SEQ_LEN, seed=settings["seed"])
    while (turn := job.turn())[1]:
        run, steps = runs[turn[0]], turn[1]
        run.train(corpus, data, ROWS, 1)
        before = counters_of(run.engine)
        dist.barrier()
        ends = [time.perf_counter()]
        for _ in range(steps):
            run.train(corpus, data, ROWS, 1)
            ends.append(time.perf_counter())
        dist.barrier()
        seconds = time.perf_counter() - ends[0]
        run.finish_transfers()
        each = torch.tensor([after - end for end, after in pairwise(ends)])
        dist.all_reduce(each, dist.ReduceOp.MAX)
        sent, early, waited_s = (now - then for now, then in zip(counters_of(run.engine), before, strict=True))
        early_share = early / max(sent, 1.0)
        job.answer(seconds=seconds, waited_s=waited_s, early_share=early_share, loss=run.loss, each_s=each.tolist())
    for run in runs.values():
        run.engine.destroy()
    dist.barrier()


def run_for(args: argparse.Namespace, way: Way) -> Run:
    torch.manual_seed(0)
    model = byte_model(hidden=args.hidden, layers=args.layers, ep_size=way.ep_size)
    zero = {"stage": way.stage, **way.zero}
    if buckets := zero.pop("buckets", 0):
        zero["reduce_bucket_size"] = sum(parameter.numel() for parameter in model.parameters()) // buckets
    engine = engine_of(model, way.block, zero_optimization=zero)
    return Run(Plan("", way.ep_size, (1, 1) if way.block else None), engine)


def counters_of(engine: Any) -> tuple[float, float, float]:
    """Bytes sent to other sites, those of them that left before the optimizer step, and seconds waited."""
    sites = ds_hybridep.stats(engine)["sites"] if hasattr(engine, "_hybridep_attachment") else None
    others = list(sites["others"].values()) if sites else []
    return (
        sum(one["sent_bytes"] for one in others), sum(one["early_bytes"] for one in others),
        sum(one["waited_s"] for one in others),
    )  # fmt: skip


def report(records: list[Record], args: argparse.Namespace) -> str:
    """Markdown: medians of steps, their ratio to those of one job in the same rounds, waits and bytes."""
    one_job = {run_of(record): record["step_s"] for record in records if record["params"]["way"] == ONE_JOB}
    rows = []
    for record in records:
        base = one_job.get(run_of(record))
        rows.append(
            [
                *point_of(record), record["params"]["way"], f"{statistics.median(record['step_s']):.3f}",
                f"{min(record['step_s']):.3f}", "-" if base is None else str(ratio(record["step_s"], base)),
                f"{statistics.median(record['waited_s']):.3f}", f"{statistics.median(record['early_share']):.0%}",
                f"{statistics.median(record['wan_bytes_per_step']) / 1e6:.3f}",
            ]
        )  # fmt: skip
    header = [
        "link", "delay", "codecs", "way", "s/step", "fastest", "over one job [95%]", "waited [s]", "left early",
        "MB/step, WAN",
    ]  # fmt: skip
    title = (
        "Medians of blocks.  waited: for packets of the other site, in the optimizer step.  left early: share of the "
        "bytes that left before it."
    )
    return f"{title}\n\n{table(header, rows)}"


def run_of(record: Record) -> tuple[str, ...]:
    """What the ways of one lab share; a point may have been measured twice."""
    return *point_of(record), str(record["params"]["hidden"]), record["params"]["note"]


def point_of(record: Record) -> tuple[str, ...]:
    return tuple(record["params"][name] for name in ("rate", "delay", "codecs"))
