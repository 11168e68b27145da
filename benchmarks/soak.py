# SPDX-License-Identifier: Apache-2.0
"""Trains for a long time on links and machines that misbehave, beside an undisturbed run.

    python benchmarks/soak.py --minutes 10 --seed 1 --out soak.json

By the seed, at random times: rates, delays and losses that change, links that are cut for less than timeout_s, ranks
that are stopped for a while, ranks that are killed, links that are cut for good.  After each end of the job all ranks
are started again from the newest whole checkpoint.  Between attempts another job, which runs from the beginning to the
end, never saves and is never disturbed, follows to the same step: every loss must be bit-equal, and nothing may be
left in /dev/shm, which is this program's own.  Growth of memory, descriptors and threads is that of the undisturbed
job; that of a third job without the block, which takes as many steps at the end, is beside it.  Classic MoE and AutoEP
take turns, an attempt each.

The record is written after each attempt, so that an early end leaves one.  Works without root where user namespaces
are permitted and /dev/net/tun may be opened.
"""

import argparse
import ctypes
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any

from faults import Ranks, first_error

from ds_hybridep.lab.namespaces import become_root
from ds_hybridep.lab.network import EmulatedNetwork
from ds_hybridep.lab.topology import LinkSpec, Topology

TOPOLOGY = Topology(2, 2)
RATES = (5e6, 20e6, 100e6, 500e6)  # bits per second of an uplink
CALM = LinkSpec(wan_bits_per_s=RATES[-1])
DELAYS_S = (0.0, 0.002, 0.01, 0.05)
LOSSES = (0.0, 0.0, 0.001, 0.01)
KINDS = ("classic", "autoep")
EVENTS = {"rate": 5, "path": 3, "short cut": 3, "short stop": 2, "kill": 1, "long cut": 0.5}  # kind -> how often
ENDING = ("kill", "long cut")
GAP_S = (1.0, 8.0)
# Cuts and stops are at most a fifth of timeout_s, and the next event is at least as far away: TCP waits up to as long
# again as a cut was, and twice that where a frame loss hits what it sends then.
SHORT_S = (0.5, 6.0)
SAMPLE_EVERY = 20  # steps of the undisturbed job
START_LIMIT_S = 300.0
END_EXTRA_S = 60.0  # beyond timeout_s, for ranks to end by themselves
CLONE_NEWNS, MS_PRIVATE_ALL = 0x20000, 0x44000


class Run:
    """A job of four ranks in a folder, and what it has written there."""

    def __init__(self, network: EmulatedNetwork, orders: Any, logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.ranks = Ranks(network, orders, logs)
        self._losses = Path(orders.folder, "losses")
        self._read = self._losses.stat().st_size if self._losses.exists() else 0

    def new_losses(self) -> list[tuple[int, float]]:
        """(step, loss) that were not returned yet."""
        if not self._losses.exists():
            return []
        with self._losses.open() as file:
            file.seek(self._read)
            said = file.read()
        said = said[: said.rfind("\n") + 1]  # a rank that was killed may have written half a line
        self._read += len(said)
        return [(step, loss) for step, loss in map(json.loads, said.splitlines())]

    def errors(self) -> list[str]:
        return [first_error(log)[:200] for log in self.ranks.logs]


class Undisturbed:
    """The job that others are compared with; it runs as far as it is told."""

    def __init__(self, network: EmulatedNetwork, orders: Any) -> None:
        self._until = Path(orders.folder, "until")
        self._run = Run(network, orders, Path(orders.folder))
        self.losses: dict[int, float] = {}
        self.samples: list[dict[str, float]] = []

    def follow(self, step: int, limit_s: float = 900.0) -> None:
        """Run until the loss of this step is known.  RuntimeError where that takes too long, or a rank has ended."""
        partial = self._until.with_suffix(".partial")
        partial.write_text(str(step))
        partial.replace(self._until)
        begin, next_sample = time.monotonic(), len(self.losses) + SAMPLE_EVERY
        while step not in self.losses:
            if not self._run.ranks.poll() or self._run.ranks.ended or time.monotonic() - begin > limit_s:
                raise RuntimeError(f"the undisturbed job ended, or is slow: {self._run.errors()}")
            self.losses |= dict(self._run.new_losses())
            if len(self.losses) >= next_sample:
                self.samples.append(measure(self._run.ranks))
                next_sample = len(self.losses) + SAMPLE_EVERY
            time.sleep(0.1)

    def close(self) -> None:
        self._run.ranks.kill()


@dataclass
class Soak:
    """The job that is disturbed."""

    network: EmulatedNetwork
    folder: Path
    orders: Any
    draw: random.Random
    begin: float = field(default_factory=time.monotonic)
    events: list[dict[str, Any]] = field(default_factory=list)
    attempts: list[dict[str, Any]] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    differ: list[str] = field(default_factory=list)

    def attempt(self, until: float) -> str:
        """Start all ranks and disturb them; returns what ended them."""
        started, first = time.monotonic(), max(self.losses, default=-1)
        run = Run(self.network, self.orders, self.folder / f"attempt{len(self.attempts)}")
        try:
            ending = self._watch(run, until)
        finally:
            run.ranks.kill()
        self._collect(run)
        self.network.restore(None)
        self.network.set_wan_path(0.0)
        self.attempts.append({
            "at_s": round(started - self.begin), "seconds": round(time.monotonic() - started), "ended_by": ending,
            "new_steps": max(self.losses, default=-1) - first, "errors": sorted(set(run.errors())),
            "statuses": [run.ranks.ended[rank][1] for rank in sorted(run.ranks.ended)],
        })  # fmt: skip
        return ending

    def _watch(self, run: Run, until: float) -> str:
        started = time.monotonic()
        next_event, ended_at, ending = 0.0, 0.0, ""
        num_known = len(self.losses)
        while run.ranks.poll():
            now = time.monotonic()
            self._collect(run)
            trains = len(self.losses) > num_known
            if not ending and now > until:
                return "time"
            if ending and now - ended_at > self.orders.timeout_s + END_EXTRA_S:
                return f"{ending}, and ranks did not end by themselves"
            if not ending and not trains and now - started > START_LIMIT_S:
                return "a start that took too long"
            if trains and not ending and not run.ranks.ended and now > next_event:
                ending = self._disturb(run.ranks) if next_event else ""
                ended_at = time.monotonic()
                next_event = ended_at + self.draw.uniform(*GAP_S) + ended_at - now
            time.sleep(0.05)
        return ending or "a failure that was not ordered"

    def _disturb(self, ranks: Ranks) -> str:
        """One event; its kind if it ends the job."""
        kind = self.draw.choices(list(EVENTS), list(EVENTS.values()))[0]
        rank, dc = self.draw.randrange(len(ranks.pids)), self.draw.randrange(2)
        seconds = round(min(self.draw.uniform(*SHORT_S), self.orders.timeout_s / 5), 1)
        rate = self.draw.choice(RATES)
        told: dict[str, Any] = {"at_s": round(time.monotonic() - self.begin), "kind": kind}
        if kind == "rate":
            self.network.set_wan_rate(rate, dc=dc)
            told |= {"dc": dc, "bits_per_s": rate}
        elif kind == "path":
            path = {"delay_s": self.draw.choice(DELAYS_S), "loss": self.draw.choice(LOSSES)}
            self.network.set_wan_path(**path, dc=dc)
            told |= {"dc": dc, **path}
        elif kind == "short cut":
            self.network.cut(dc)
            time.sleep(seconds)
            self.network.restore(dc)
            told |= {"dc": dc, "seconds": seconds}
        elif kind == "short stop":
            os.kill(ranks.pids[rank], signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(ranks.pids[rank], signal.SIGCONT)
            told |= {"rank": rank, "seconds": seconds}
        elif kind == "kill":
            os.kill(ranks.pids[rank], signal.SIGKILL)
            told |= {"rank": rank}
        else:
            self.network.cut(None)
        self.events.append(told)
        return kind if kind in ENDING else ""

    def _collect(self, run: Run) -> None:
        """New losses; those of steps that are repeated must be the same."""
        for step, loss in run.new_losses():
            if self.losses.setdefault(step, loss) != loss:
                self.differ.append(f"step {step}: {loss} after {self.losses[step]}")


def measure(ranks: Ranks) -> dict[str, float]:
    """The largest of all ranks."""
    seen = {"rss_mb": 0.0, "descriptors": 0.0, "threads": 0.0}
    for pid in ranks.pids:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        seen["rss_mb"] = max(seen["rss_mb"], int(status["VmRSS"].split()[0]) / 1024)
        seen["threads"] = max(seen["threads"], int(status["Threads"]))
        seen["descriptors"] = max(seen["descriptors"], len(os.listdir(f"/proc/{pid}/fd")))
    return seen


def growth_of(samples: list[dict[str, float]]) -> dict[str, float]:
    """Growth from the second fifth of the samples (the first still warms up) to the last, as a factor of medians."""
    fifth = len(samples) // 5
    if fifth < 2:
        return {}

    def median(part: list[dict[str, float]], name: str) -> float:
        return sorted(sample[name] for sample in part)[len(part) // 2]

    return {
        name: round(median(samples[-fifth:], name) / median(samples[fifth : 2 * fifth], name), 4)
        for name in samples[0]
    }


def own_shm() -> None:
    """A /dev/shm that only this program and its ranks see."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) or libc.mount(None, b"/", None, MS_PRIVATE_ALL, None):
        raise OSError(ctypes.get_errno(), "a mount namespace of our own")
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)


def record_of(soak: Soak, undisturbed: Undisturbed) -> dict[str, Any]:
    compared = soak.losses.keys() & undisturbed.losses.keys()
    differ = [*soak.differ, *(f"step {n}" for n in sorted(compared) if soak.losses[n] != undisturbed.losses[n])]
    ends = [one["ended_by"] for one in soak.attempts]
    growth = growth_of(undisturbed.samples)
    return {
        "steps": len(soak.losses), "steps_compared": len(compared), "steps_that_differ": differ,
        "attempts_by_end": {end: ends.count(end) for end in sorted(set(ends))},
        "events_by_kind": {kind: sum(one["kind"] == kind for one in soak.events) for kind in EVENTS},
        "growth": growth, "first_sample": undisturbed.samples[:1], "last_sample": undisturbed.samples[-1:],
        "events": soak.events, "attempts": soak.attempts,
        "is_good": bool(compared) and not differ and all(one < 1.01 for one in growth.values())
        and all(one in ("time", *ENDING) for one in ends),
    }  # fmt: skip


def orders_of(args: argparse.Namespace, folder: Path, kind: str, name: str, **more: Any) -> Any:
    import faults_rank

    (folder / kind / name).mkdir(parents=True)
    common = {"fault": "none", "phase": "none", "victim": -1, "codecs": args.codecs, "timeout_s": args.timeout_s}
    common |= {"kind": kind, "folder": str(folder / kind / name), "num_steps": 10**9}
    return faults_rank.Orders(**(common | more))


@contextmanager
def jobs(args: argparse.Namespace, folder: Path) -> Iterator[dict[str, tuple[Soak, Undisturbed]]]:
    """For each kind, a job that is disturbed and one that is not."""
    with ExitStack() as stack:
        network = stack.enter_context(EmulatedNetwork(TOPOLOGY, replace(CALM, wan_delay_s=DELAYS_S[1])))
        draw, begin, result = random.Random(args.seed), time.monotonic(), {}
        for kind in args.kinds:
            calm = stack.enter_context(EmulatedNetwork(TOPOLOGY, CALM))
            undisturbed = Undisturbed(calm, orders_of(args, folder, kind, "undisturbed", follows=True))
            stack.callback(undisturbed.close)
            disturbed = orders_of(args, folder, kind, "disturbed", resume=True, step_s=args.step_s, save_every=2)
            result[kind] = Soak(network, folder / kind / "disturbed", disturbed, draw, begin), undisturbed
        yield result


def growth_without_block(args: argparse.Namespace, folder: Path, kind: str, num_steps: int) -> dict[str, float]:
    """Growth of a job of DeepSpeed alone."""
    with EmulatedNetwork(TOPOLOGY, CALM) as network:
        job = Undisturbed(network, orders_of(args, folder, kind, "no block", follows=True, codecs="no block"))
        try:
            job.follow(num_steps - 1, limit_s=num_steps * 2.0 + START_LIMIT_S)
        finally:
            job.close()
    return growth_of(job.samples)


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = {}
    with jobs(args, folder) as by_kind:
        begin = time.monotonic()
        for kind in cycle(args.kinds):
            soak, undisturbed = by_kind[kind]
            ending = soak.attempt(begin + 60 * args.minutes)
            if soak.losses:
                undisturbed.follow(max(soak.losses))
            records = {name: record_of(*pair) for name, pair in by_kind.items() if pair[0].attempts}
            record = {
                "seed": args.seed, "codecs": args.codecs, "timeout_s": args.timeout_s,
                "minutes": round((time.monotonic() - begin) / 60, 1),
                "left_in_dev_shm": (left := sorted(os.listdir("/dev/shm"))), "kinds": records,
                "is_good": not left and len(records) == len(args.kinds)
                and all(one["is_good"] for one in records.values()),
            }  # fmt: skip
            if args.out:
                partial = args.out.with_suffix(".partial")
                partial.write_text(json.dumps(record) + "\n")
                partial.replace(args.out)
            last, mine = soak.attempts[-1], records[kind]
            print(
                f"{last['at_s']} s, {kind}: {last['new_steps']} new steps in {last['seconds']} s, ended by {ending}; "
                f"of {mine['steps_compared']} steps {len(mine['steps_that_differ'])} differ; growth {mine['growth']}",
                flush=True,
            )
            if ending not in ENDING:
                break
        for kind, one in record["kinds"].items():
            num_steps = len(by_kind[kind][1].losses)
            try:
                one["growth_without_block"] = growth_without_block(args, folder, kind, num_steps) if num_steps else {}
            except RuntimeError as error:
                print(f"{kind} without the block: {error}", flush=True)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--codecs", choices=["exact", "recommended"], default="recommended")
    parser.add_argument("--timeout-s", type=float, default=30.0)
    parser.add_argument("--step-s", type=float, default=0.1, help="slept in each step, so that cores stay free")
    parser.add_argument("--out", type=Path, help="the record, JSON")
    parser.add_argument("--logs", type=Path, help="keep the ranks' logs and checkpoints here")
    args = parser.parse_args()
    become_root()
    own_shm()
    import faults_rank  # noqa: F401
    import torch._dynamo
    import torch._inductor.compile_fx  # noqa: F401  imported once, for all ranks

    if "autoep" in args.kinds:
        import hf_model  # noqa: F401
    with tempfile.TemporaryDirectory() as scratch:
        record = run(args, args.logs or Path(scratch))
    if args.out:
        args.out.write_text(json.dumps(record) + "\n")
    for kind, one in record["kinds"].items():
        print(kind, {name: value for name, value in one.items() if name not in ("events", "attempts")})
    print("good" if record["is_good"] else "NOT good")
    sys.exit(0 if record["is_good"] else 1)


if __name__ == "__main__":
    main()
