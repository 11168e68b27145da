# SPDX-License-Identifier: Apache-2.0
"""How long a site takes to join another one over a slow link, and what that costs the one that trains.

Two sites of one rank, and a meeting point, each in a datacentre of its own.  Site b is killed and started again.
Measured: steps of site a with b, alone and while b joins; the peak memory of both; the estimate of the join that b
logs first, and the truth.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks import training
from benchmarks.common import JOB_FOLDER, REPOSITORY, Record, Records, free_port, new_folder, table
from benchmarks.training import RECOMMENDED, byte_model, engine_of, train_lm
from ds_hybridep.lab.launcher import rank_environment
from ds_hybridep.lab.network import HOST_DEVICE, EmulatedNetwork
from ds_hybridep.lab.topology import LinkSpec, Topology, parse_duration, parse_rate

NAMES = ("a", "b")
ROWS, SEQ_LEN = 2, 64
LIMIT_S, MISSING = 900.0, "-"


class Job(training.Job):
    """A rank of one site."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate", nargs="+", default=["10mbit", "20mbit", "100mbit"], help="of each uplink")
    parser.add_argument("--delay", default="15ms", help="one way")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--step-s", type=float, default=0.1, help="a step sleeps so long")
    parser.add_argument("--codecs", choices=["none", "recommended"], default="none")
    parser.add_argument("--steps", type=int, default=15, help="of site a before b goes, and after it has joined")


# ---- a rank ----


def rank(args: argparse.Namespace, job: Job) -> None:
    """Train until the file `last` is there."""
    settings = json.loads((job.folder / "settings.json").read_text())
    torch.manual_seed(0)
    model = byte_model(hidden=args.hidden, layers=2, ep_size=1, seq_len=SEQ_LEN)
    engine = engine_of(model, settings["block"], zero_optimization={"stage": 1})
    corpus, _ = train_lm.read_corpus()
    with (job.folder / f"steps-{settings['life']}").open("w", buffering=1) as told:
        while not (job.folder.parent / "last").exists():
            place = (1, engine.global_steps, settings["index"], 0)
            loss, aux_loss = engine(*train_lm.batch_at(corpus, place, rows=ROWS, seq_len=SEQ_LEN))
            time.sleep(args.step_s)
            engine.backward(loss + train_lm.AUX_LOSS_WEIGHT * aux_loss)
            engine.step()
            told.write(json.dumps([time.time(), engine.global_steps]) + "\n")
    engine.destroy()


# ---- the driver ----


class Lab:
    """A meeting point and two sites on emulated hosts."""

    def __init__(self, args: argparse.Namespace, rate: str, folder: Path, stack: ExitStack) -> None:
        self._args, self._folder, self._stack = args, new_folder(folder), stack
        delay_s = parse_duration(args.delay, "--delay")
        spec = LinkSpec(wan_bits_per_s=parse_rate(rate, "--rate"), wan_delay_s=delay_s)
        self._network = stack.enter_context(EmulatedNetwork(Topology(3, 1), spec))
        self._secret, port = self._folder / "secret", free_port()
        self._secret.write_text(os.urandom(16).hex())
        self._meeting_point = f"{self._network.topology.address_of(2)}:{port}"
        meet = ["-m", "ds_hybridep.commands.main", "meet", "--port", str(port), "--secret-file", str(self._secret)]
        self._start(2, [sys.executable, *meet], "meeting", {})
        self.lives = dict.fromkeys(NAMES, 0)

    def _start(self, host: int, command: list[str], log: str, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        output = self._stack.enter_context((self._folder / log).open("wb"))
        process = subprocess.Popen(
            self._network.command_on(host, command), env={**os.environ, **environment}, stdout=output, stderr=output,
            start_new_session=True,
        )  # fmt: skip
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def site(self, name: str) -> subprocess.Popen[bytes]:
        index, life = NAMES.index(name), self.lives[name]
        self.lives[name] += 1
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        sites: dict[str, Any] = {
            "names": NAMES, "meeting_point": self._meeting_point, "secret_file": str(self._secret),
            **(RECOMMENDED if self._args.codecs == "recommended" else {}),
        }  # fmt: skip
        settings = {"block": {"sites": sites, "timeout_s": 60}, "index": index, "life": life}
        (folder / "settings.json").write_text(json.dumps(settings))
        environment = rank_environment(0, 1, "127.0.0.1", HOST_DEVICE, port=free_port())
        environment |= {JOB_FOLDER: str(folder), "HYBRIDEP_SITE": name, "PYTHONPATH": str(REPOSITORY)}
        return self._start(
            index, [sys.executable, "-m", "benchmarks", *sys.argv[1:]], f"{name}-{life}.log", environment
        )

    def steps(self, name: str) -> list[tuple[float, int]]:
        """Return when the latest life of a site has made which steps."""
        path = self._folder / name / f"steps-{self.lives[name] - 1}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [(at, step) for at, step in map(json.loads, lines)]

    def until(self, name: str, num_steps: int, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while len(self.steps(name)) < num_steps:
            assert time.monotonic() < deadline, self.said(f"{name}-{self.lives[name] - 1}.log")
            assert process.poll() is None, self.said(f"{name}-{self.lives[name] - 1}.log")
            time.sleep(0.05)

    def said(self, log: str) -> str:
        return (self._folder / log).read_text(errors="replace")

    def end(self) -> None:
        (self._folder / "last").touch()


def run(args: argparse.Namespace, records: Records) -> None:
    for rate in args.rate:
        with ExitStack() as stack:
            records.add({"rate": rate, "delay": args.delay, "codecs": args.codecs}, **joined(args, rate, stack))


def joined(args: argparse.Namespace, rate: str, stack: ExitStack) -> Record:
    lab = Lab(args, rate, Path("runs") / "site-joins" / rate, stack)
    a, b = lab.site("a"), lab.site("b")
    lab.until("a", args.steps, a)
    with_b = [at for at, _ in lab.steps("a")]
    b.kill()
    b.wait()
    lab.until("a", len(with_b) + args.steps, a)
    alone = len(lab.steps("a"))
    began = time.time()
    b = lab.site("b")
    lab.until("b", args.steps, b)
    log = lab.said("b-1.log")
    took = float(re.findall(r"joined at step \d+, after ([\d.]+) s", log)[0])
    first = re.findall(r"has (\d+)% of the state after (\d+) s.*about (\d+) s are left", log)
    steps = lab.steps("a")
    joined_at = lab.steps("b")[0][0]
    times = [at for at, _ in steps]
    gaps = [(later, later - earlier) for earlier, later in zip(times, times[1:], strict=False)]
    during = [gap for at, gap in gaps if joined_at - took < at < joined_at]
    memory = {name: peak_mb(process) for name, process in (("a", a), ("b", b))}
    lab.end()
    both = [later - earlier for earlier, later in zip(with_b[3:], with_b[4:], strict=False)]
    by_itself = [gap for _, gap in gaps[len(with_b) : alone]]
    return {
        "together_s": statistics.median(both), "alone_s": statistics.median(by_itself),
        "joining_s": statistics.median(during), "longest_s": max(during), "join_s": took,
        "start_s": joined_at - began - took,
        "estimate_s": sum(map(float, first[0][1:])) if first else None, "peak_mb": memory,
    }  # fmt: skip


def peak_mb(process: subprocess.Popen[bytes]) -> float:
    """Return the largest resident size of a process's children and itself."""
    pids = [process.pid, *map(int, Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())]
    found = [re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text()) for pid in pids]
    return max(int(one[1]) for one in found if one) / 1e3


def report(records: list[Record], args: argparse.Namespace) -> str:
    rows = [
        (
            one["params"]["rate"], one["params"]["codecs"], *(f"{one[key]:.2f}" for key in (
                "together_s", "alone_s", "joining_s", "longest_s"
            )), f"{one['join_s']:.0f}", MISSING if one["estimate_s"] is None else f"{one['estimate_s']:.0f}",
            f"{one['peak_mb']['a']:.0f}", f"{one['peak_mb']['b']:.0f}",
        )
        for one in records
    ]  # fmt: skip
    header = (
        "uplink", "codecs", "step together, s", "alone", "while b joins", "longest", "join, s", "first estimate",
        "peak MB of a", "of b",
    )  # fmt: skip
    return table(header, rows)
