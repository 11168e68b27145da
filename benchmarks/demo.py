# SPDX-License-Identifier: Apache-2.0
"""Trains the same model over an emulated slow link in three ways, and compares them.

    make demo

Four ranks in two datacentres run `examples/train_lm.py`, unchanged; only the ds_config and the size of the
expert-parallel group differ.  Where this machine does not permit emulated links, the ranks run side by side without a
slow link; then bytes are compared, and step times say nothing.
"""

import argparse
import fcntl
import json
import os
import subprocess
import sys
import sysconfig
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from benchmarks.common import REPOSITORY
from ds_hybridep.commands.record import format_run_record
from ds_hybridep.commands.show import write_page
from ds_hybridep.lab.launcher import RankProcesses
from ds_hybridep.lab.network import EmulatedNetwork, why_not_permitted
from ds_hybridep.lab.topology import LinkSpec, Topology, parse_rate

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


WAYS = (
    Way("DeepSpeed, EP over both datacentres", "plain_ep.json"),
    Way("DeepSpeed, EP inside each datacentre", "plain_ep.json", ("--ep-size", "2")),
    Way("ds_hybridep", "two_dcs_2x2.json"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=25, help="optimizer steps of each run (default 25)")
    parser.add_argument("--wan", default="50mbit", metavar="RATE", help="of the slow link (default 50mbit)")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "runs" / "demo", help="for logs and the record")


def run(args: argparse.Namespace) -> int:
    if args.steps <= WARM_UP_STEPS:
        raise SystemExit(f"--steps: got {args.steps}, wanted more than {WARM_UP_STEPS}, which warm up")
    links = LinkSpec(wan_bits_per_s=parse_rate(args.wan, "--wan"))
    console = Console(highlight=False)
    reason = why_not_permitted(with_delay=False)
    environment = demo_environment()
    args.out.mkdir(parents=True, exist_ok=True)
    build_ops(environment, console)
    if reason is None:
        console.print(f"4 ranks in 2 datacentres, joined by {args.wan}; {args.steps} steps each")
    else:
        console.print(f"No slow link can be emulated here: {reason}\nBytes are compared; step times say nothing.")
    runs = []
    for way in WAYS:
        with EmulatedNetwork(DATACENTRES, links) if reason is None else nullcontext() as network:
            one = train(way, args, network, environment, console)
        if one is None:
            return 1
        runs.append(one)
    record = json.loads((args.out / "run.json").read_text())
    if reason is not None:
        runs = with_counted_bytes(runs, record)
    console.print(table_of(runs, is_timed=reason is None))
    if reason is not None:
        console.print("MB: counted by ds_hybridep; for EP over both datacentres those of its tokens alone.")
    detail = format_run_record(record)
    console.print("\nThe last one in detail:", detail, sep="\n\n", markup=False, soft_wrap=True)
    write_page(args.out / "report.html", detail)
    console.print(f"\nAs a page: {args.out / 'report.html'}", soft_wrap=True)
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


def train(
    way: Way, args: argparse.Namespace, network: EmulatedNetwork | None, environment: dict[str, str], console: Console
) -> Run | None:
    """How it went; None where it failed, with the end of its output shown."""
    name = f"{WAYS.index(way) + 1}"
    config, result_path = args.out / f"{name}.json", args.out / f"{name}_result.json"
    ds_config = json.loads((REPOSITORY / "ds_configs" / way.config).read_text())
    if "hybridep" in ds_config:
        ds_config["hybridep"]["levels"][0]["codecs"] = "recommended"
        ds_config["hybridep"].update(report_file=str(args.out / "run.json"), report_interval=args.steps)
    config.write_text(json.dumps(ds_config, indent=2))
    result_path.unlink(missing_ok=True)
    command = [sys.executable, str(REPOSITORY / "examples" / "train_lm.py"), "--deepspeed_config", str(config)]
    command += ["--steps", str(args.steps), "--log-interval", "1", "--eval-interval", "0", *way.arguments]
    command += ["--json-file", str(result_path)]
    columns = TextColumn("{task.description:38}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps")
    uplink_bytes: dict[int, int] = {}  # by steps done
    logs = args.out / name
    with (
        Progress(*columns, TimeElapsedColumn(), TextColumn("ETA"), TimeRemainingColumn(), console=console) as progress,
        RankProcesses(network, command, num_ranks=4, log_dir=logs, environment=environment) as ranks,
        ranks.log_files[0].open(errors="replace") as log,
    ):
        bar = progress.add_task(way.title, total=args.steps)
        while ranks.poll() and not ranks.failed_ranks():
            for line in log.readlines():
                if line.startswith("step ") and "validation" not in line:
                    done = int(line.split()[1].partition("/")[0])
                    progress.update(bar, completed=done)
                    if network is not None and done in (WARM_UP_STEPS, args.steps):
                        uplink_bytes[done] = network.counters()[0].out_bytes
            if time.monotonic() - ranks.start_s > TIMEOUT_S:
                break
            time.sleep(POLL_S)
        failed = ranks.failed_ranks()
        running = ranks.running_ranks()
        is_done = bool(failed) and has_ended(ranks.log_files[0])
    if is_done:  # torch sometimes aborts while a process ends, after all work is done
        console.print(f"{way.title}: rank {failed[0]} failed after its last step; see {ranks.log_files[failed[0]]}")
    elif failed or running or not result_path.is_file():
        why = f"rank {failed[0]} failed" if failed else f"ranks {running} did not end within {TIMEOUT_S:g} s"
        tail = (logs / f"rank{(failed or [0])[0]}.log").read_text(errors="replace").splitlines()[-30:]
        console.print("\n".join([f"{way.title}: {why}; the end of its output:", *tail]), markup=False)
        return None
    result: dict[str, Any] = json.loads(result_path.read_text())
    counted = uplink_bytes.get(args.steps, 0) - uplink_bytes.get(WARM_UP_STEPS, 0)
    return Run(
        title=way.title,
        step_s=result["median_step_s"],
        uplink_bytes=counted / (args.steps - WARM_UP_STEPS) if network is not None else None,
        loss=result["loss"],
        valid_loss=result["valid_loss"],
    )


def with_counted_bytes(runs: list[Run], record: dict[str, Any]) -> list[Run]:
    """The runs with what our report knows of the link, where no interface has counted: flat EP's tokens, and ours."""
    flat, inside, ours = runs
    slow, per_uplink = record["levels"][0], record["steps"] * DATACENTRES.num_dcs
    sent_bytes = sum(num_bytes or 0 for num_bytes in slow["sent_bytes"].values())
    return [
        replace(flat, uplink_bytes=slow["plain_ep_bytes"] / per_uplink),
        inside,
        replace(ours, uplink_bytes=sent_bytes / per_uplink),
    ]


def has_ended(log: Path, limit_s: float = 10.0) -> bool:
    """Whether rank 0 has said its last word, or says it soon."""
    deadline = time.monotonic() + limit_s
    while "\ndone: loss" not in log.read_text(errors="replace"):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def table_of(runs: list[Run], *, is_timed: bool) -> Table:
    table = Table(title="the same training in three ways")
    table.add_column("")
    for column in ("step", "speed-up", "MB over the link per step", "loss", "validation loss"):
        table.add_column(column, justify="right")
    for run in runs:
        speed_up = f"{runs[0].step_s / run.step_s:.1f}x" if is_timed else "-"
        megabytes = "-" if run.uplink_bytes is None else f"{run.uplink_bytes / 1e6:.2f}"
        table.add_row(
            run.title, f"{run.step_s:.2f} s", speed_up, megabytes, f"{run.loss:.4f}", f"{run.valid_loss:.4f}"
        )
    return table
