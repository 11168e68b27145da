# SPDX-License-Identifier: Apache-2.0
"""Trains the same model over an emulated slow link in three ways, and compares them.

    make demo
    make demo SITES=1       a fourth way: a job for each datacentre
    python -m benchmarks demo --report benchmarks/results/demo.jsonl

Four ranks in two datacentres run `examples/train_lm.py`, unchanged; only the ds_config and the size of the
expert-parallel group differ.  Where this machine does not permit emulated links, the ranks run side by side without a
slow link; then bytes are compared, and step times say nothing.
"""

import argparse
import fcntl
import json
import os
import secrets
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.common import REPOSITORY, Record, Records, free_port
from ds_hybridep.commands.record import format_run_record
from ds_hybridep.commands.run_page import write_run_page
from ds_hybridep.lab.launcher import RankProcesses
from ds_hybridep.lab.network import EmulatedNetwork, why_not_permitted
from ds_hybridep.lab.topology import LinkSpec, Topology, parse_rate
from ds_hybridep.plan.words import aligned

DATACENTRES = Topology(2, 2)
WARM_UP_STEPS = 5  # not in the median step time of `train_lm.py`, nor in the bytes
POLL_S = 0.05
TIMEOUT_S = 900.0

BUILD_PROGRAM = """
from deepspeed.accelerator import get_accelerator
from ds_hybridep.kernels.build import load_kernels
load_kernels("auto")
builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
if builder is not None:
    builder.load(verbose=False)
"""


@dataclass(frozen=True)
class Way:
    """One way to train."""

    title: str
    config: str  # a file of ds_configs/
    arguments: tuple[str, ...] = ()
    sites: tuple[str, ...] = ()  # names of jobs that train together; none: it is one job


@dataclass(frozen=True, kw_only=True)
class Run:
    """How one way went.

    step_s: median step time.  loss, valid_loss: values at the end.
    uplink_bytes: bytes per step over one datacentre's uplink in one direction; None if they were not counted.
    """

    title: str
    step_s: float
    uplink_bytes: float | None
    loss: float
    valid_loss: float


OURS = "ds_hybridep"
COUNTED = f"MB: counted by {OURS}; for EP over both datacentres those of its tokens alone."
MEETING_PORT = 29400  # on an emulated host
WAYS = (
    Way("DeepSpeed, EP over both datacentres", "plain_ep.json"),
    Way("DeepSpeed, EP inside each datacentre", "plain_ep.json", ("--ep-size", "2")),
    Way(OURS, "two_dcs_2x2.json"),
)
BY_SITES = Way("ds_hybridep, a job per datacentre", "two_dcs_2x2.json", ("--ep-size", "2"), ("a", "b"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=25, help="optimizer steps of each run (default 25)")
    parser.add_argument("--wan", default="50mbit", metavar="RATE", help="of the slow link (default 50mbit)")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "runs" / "demo", help="for logs and the page")
    parser.add_argument("--sites", action="store_true", help="train with a job for each datacentre too")


def run(args: argparse.Namespace, records: Records) -> int:
    if args.steps <= WARM_UP_STEPS:
        raise SystemExit(f"--steps: got {args.steps}, wanted more than {WARM_UP_STEPS}, which warm up")
    links = LinkSpec(wan_bits_per_s=parse_rate(args.wan, "--wan"))
    console = Console(highlight=False)
    reason = why_not_permitted(with_delay=False)
    environment = demo_environment()
    args.folder.mkdir(parents=True, exist_ok=True)
    build_ops(environment, console)
    if reason is None:
        console.print(f"4 ranks in 2 datacentres, joined by {args.wan}; {args.steps} steps each")
    else:
        console.print(f"No slow link can be emulated here: {reason}\nBytes are compared; step times say nothing.")
    runs = []
    for number, way in enumerate((*WAYS, *([BY_SITES] if args.sites else [])), 1):
        with EmulatedNetwork(DATACENTRES, links) if reason is None else nullcontext() as network:
            one = train(way, number, args, network, environment, console)
        if one is None:
            return 1
        runs.append(one)
    record = json.loads((args.folder / "run.json").read_text())
    if reason is not None:
        runs = with_counted_bytes(runs, record)
    for one in runs:
        about = {"way": one.title, "wan": args.wan if reason is None else None, "steps": args.steps}
        measured = {"step_s": one.step_s, "uplink_bytes": one.uplink_bytes}
        detail = {"record": record} if one.title == OURS else {}
        records.add(about, **measured, loss=one.loss, valid_loss=one.valid_loss, **detail)
    write_run_page(args.folder / "report.html", record)
    console.print("", f"{OURS} in detail:", format_run_record(record), sep="\n\n", markup=False, soft_wrap=True)
    console.print(f"\nAs a page: {args.folder / 'report.html'}\n", soft_wrap=True)
    return 0


def demo_environment() -> dict[str, str]:
    """For the ranks."""
    cache = os.environ.get("TORCH_EXTENSIONS_DIR", str(REPOSITORY / ".cache" / "torch_extensions"))
    return {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "TORCH_EXTENSIONS_DIR": cache,
        "PATH": os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", "")]),
    }


def build_ops(environment: dict[str, str], console: Console) -> None:
    """Build what DeepSpeed and this package compile on first use, before ranks wait for each other over it.

    A build is guarded by a lock file that a killed process leaves behind, and that is then waited for for ever.
    Only one demo at a time holds `demo.lock`, which goes away with its process, so a lock file found here is stale (or
    of a test run that builds at this very moment: then both build, and the later one wins).
    """
    folder = Path(environment["TORCH_EXTENSIONS_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "demo.lock", "w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        for stale in folder.glob("*/lock"):
            stale.unlink()
        command = [sys.executable, "-c", BUILD_PROGRAM]
        with console.status("compiling DeepSpeed's and our operations, the first time (one to two minutes)"):
            start_s = time.perf_counter()
            built = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True)
        if built.returncode != 0:
            raise SystemExit(f"operations could not be compiled:\n{built.stderr[-4000:]}")
        if (seconds := time.perf_counter() - start_s) > 10:
            console.print(f"compiled in {seconds:.0f} s")


@dataclass(frozen=True)
class Job:
    """One DeepSpeed job of a way; name: of its site, or of the way."""

    name: str
    command: list[str]
    hosts: range
    environment: dict[str, str]
    result: Path


def jobs_of(way: Way, number: int, out: Path, steps: int, point: dict[str, str]) -> list[Job]:
    """The jobs of a way, with their ds_configs written.  point: where sites meet."""
    jobs = []
    for index, site in enumerate(way.sites or ("",)):
        hosts = DATACENTRES.ranks_in(index) if site else range(DATACENTRES.num_ranks)
        name = f"{number}{site}"
        config, result = out / f"{name}.json", out / f"{name}_result.json"
        ds_config = json.loads((REPOSITORY / "ds_configs" / way.config).read_text())
        if site:
            ds_config["hybridep"] = {"sites": {"names": list(way.sites), **point, "codecs": "recommended"}}
        elif "hybridep" in ds_config:
            ds_config["hybridep"]["levels"][0]["codecs"] = "recommended"
            ds_config["hybridep"].update(report_file=str(out / "run.json"), report_interval=steps)
        config.write_text(json.dumps(ds_config, indent=2))
        result.unlink(missing_ok=True)
        command = [sys.executable, str(REPOSITORY / "examples" / "train_lm.py"), "--deepspeed_config", str(config)]
        command += ["--steps", str(steps), "--log-interval", "1", "--eval-interval", "0", *way.arguments]
        command += ["--json-file", str(result), "--first-rank", str(hosts[0])]
        jobs.append(Job(name, command, hosts, {"HYBRIDEP_SITE": site} if site else {}, result))
    return jobs


@contextmanager
def meeting_point(out: Path, network: EmulatedNetwork | None, environment: dict[str, str]) -> Iterator[dict[str, str]]:
    """Run the meeting point of sites on host 0; gives the keys of "sites" that say where it is."""
    secret, port = out / "secret", MEETING_PORT if network else free_port()
    secret.touch(mode=0o600)
    secret.write_text(secrets.token_hex(32))
    command = [sys.executable, "-m", "ds_hybridep.commands.main", "meet", "--port", str(port)]
    command += ["--secret-file", str(secret)]
    with (out / "meeting.log").open("wb") as log:
        process = subprocess.Popen(
            network.command_on(0, command) if network else command,
            env={**os.environ, **environment}, stdout=log, stderr=log,
        )  # fmt: skip
    try:
        host = network.topology.address_of(0) if network else "127.0.0.1"
        yield {"meeting_point": f"{host}:{port}", "secret_file": str(secret)}
    finally:
        process.kill()
        process.wait()


def train(
    way: Way, number: int, args: argparse.Namespace, network: EmulatedNetwork | None, environment: dict[str, str],
    console: Console,
) -> Run | None:  # fmt: skip
    """How it went; None where it failed, with the end of its output shown."""
    columns = TextColumn("{task.description:38}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps")
    uplink_bytes: dict[int, int] = {}  # by steps done
    with ExitStack() as stack:
        point = stack.enter_context(meeting_point(args.folder, network, environment)) if way.sites else {}
        jobs = jobs_of(way, number, args.folder, args.steps, point)
        started = [
            stack.enter_context(
                RankProcesses(
                    network, job.command, num_ranks=len(job.hosts), log_dir=args.folder / job.name,
                    first_host=job.hosts[0], environment={**environment, **job.environment},
                )
            )
            for job in jobs
        ]  # fmt: skip
        log = stack.enter_context(started[0].log_files[0].open(errors="replace"))
        progress = stack.enter_context(
            Progress(*columns, TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn(), console=console)
        )
        bar = progress.add_task(way.title, total=args.steps)
        while any([one.poll() for one in started]) and not any(one.failed_ranks() for one in started):
            for line in log.readlines():
                if line.startswith("step ") and "validation" not in line:
                    done = int(line.split()[1].partition("/")[0])
                    progress.update(bar, completed=done)
                    if network is not None and done in (WARM_UP_STEPS, args.steps):
                        uplink_bytes[done] = network.counters()[0].out_bytes
            if time.monotonic() - started[0].start_s > TIMEOUT_S:
                break
            time.sleep(POLL_S)
    for job, one in zip(jobs, started, strict=True):
        if not has_succeeded(way.title, job, one, console):
            return None
    results: list[dict[str, Any]] = [json.loads(job.result.read_text()) for job in jobs]
    counted = uplink_bytes.get(args.steps, 0) - uplink_bytes.get(WARM_UP_STEPS, 0)
    return Run(
        title=way.title,
        step_s=max(result["median_step_s"] for result in results),
        uplink_bytes=counted / (args.steps - WARM_UP_STEPS) if network is not None else None,
        loss=statistics.fmean(result["loss"] for result in results),
        valid_loss=statistics.fmean(result["valid_loss"] for result in results),
    )


def has_succeeded(title: str, job: Job, ranks: RankProcesses, console: Console) -> bool:
    """Whether a job has trained to its end; says why if not."""
    failed, running = ranks.failed_ranks(), ranks.running_ranks()
    if failed and has_ended(ranks.log_files[0]):  # torch sometimes aborts while a process ends, after all work is done
        console.print(f"{title}: rank {failed[0]} failed after its last step; see {ranks.log_files[failed[0]]}")
        return True
    if not failed and not running and job.result.is_file():
        return True
    why = f"rank {failed[0]} failed" if failed else f"ranks {running} did not end within {TIMEOUT_S:g} s"
    tail = ranks.log_files[(failed or [0])[0]].read_text(errors="replace").splitlines()[-30:]
    console.print("\n".join([f"{title}: {why}; the end of its output:", *tail]), markup=False)
    return False


def with_counted_bytes(runs: list[Run], record: dict[str, Any]) -> list[Run]:
    """The runs with what our report knows of the link, where no interface has counted: flat EP's tokens, and ours."""
    flat, inside, ours, *others = runs
    slow, per_uplink = record["levels"][0], record["steps"] * DATACENTRES.num_dcs
    sent_bytes = sum(num_bytes or 0 for num_bytes in slow["sent_bytes"].values())
    return [
        replace(flat, uplink_bytes=slow["plain_ep_bytes"] / per_uplink),
        inside,
        replace(ours, uplink_bytes=sent_bytes / per_uplink),
        *others,
    ]


def has_ended(log: Path, limit_s: float = 10.0) -> bool:
    """Whether rank 0 has said its last word, or says it soon."""
    deadline = time.monotonic() + limit_s
    while "\ndone: loss" not in log.read_text(errors="replace"):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def report(records: list[Record], args: argparse.Namespace) -> str:
    """The ways beside each other, and one speed-up: over the best row of DeepSpeed, with its loss."""
    params, is_timed = records[0]["params"], records[0]["params"]["wan"] is not None
    rows = [["the same training", "step", "MB per step", "loss", "validation loss"]]
    for one in records:
        megabytes = "-" if one["uplink_bytes"] is None else f"{one['uplink_bytes'] / 1e6:.2f}"
        losses = [f"{one[name]:.4f}" for name in ("loss", "valid_loss")]
        rows.append([one["params"]["way"], f"{one['step_s']:.2f} s", megabytes, *losses])
    link = f"joined by {params['wan']}" if is_timed else "without a slow link between them"
    lines = [f"4 ranks in 2 datacentres {link}; {params['steps']} steps from scratch, one seed", "", aligned(rows), ""]
    lines.append("MB: of one datacentre, over the link." if is_timed else COUNTED)
    return "\n".join([*lines, *conclusion(records, is_timed=is_timed)])


def conclusion(records: list[Record], *, is_timed: bool) -> list[str]:
    """The speed-up if steps were timed over a slow link, and what happened to the loss."""
    (ours,) = (one for one in records if one["params"]["way"] == OURS)
    theirs = [one for one in records if one["params"]["way"].startswith("DeepSpeed")]
    best = min(theirs, key=lambda one: float(one["step_s"]))
    gap = ours["valid_loss"] / best["valid_loss"] - 1
    than = "lower" if gap < 0 else "higher"
    steps = ours["params"]["steps"]
    loss = f"After {steps} steps of one seed, its validation loss is {abs(gap):.2%} {than} than in that row."
    if not is_timed:
        return ["Step times say nothing here.", loss]
    return [f"{OURS} is {best['step_s'] / ours['step_s']:.1f} times as fast as {best['params']['way']}.", loss]
