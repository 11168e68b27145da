# SPDX-License-Identifier: Apache-2.0
"""Trains for a long time on links and machines that misbehave, beside an undisturbed run.

    python -m benchmarks soak --minutes 10 --seed 1 --out soak.jsonl

By the seed, at random times: rates, delays and losses that change, links that are cut for less than timeout_s, ranks
that are stopped for a while, ranks that are killed, links that are cut for good.  After each end of the job all ranks
are started again from the newest whole checkpoint.  Between attempts another job, which runs from the beginning to the
end, never saves and is never disturbed, follows to the same step: every loss must be bit-equal, and nothing may be
left in /dev/shm, which is this program's own.  Growth of memory, descriptors and threads is that of the undisturbed
job; that of a third job without the block, which takes as many steps at the end, is beside it.  Classic MoE and AutoEP
take turns, an attempt each.

After each attempt the record so far is printed.
"""

import argparse
import ctypes
import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any

from benchmarks.common import Record, Records, growth_of, new_folder, table
from benchmarks.disturbed import CODECS, KINDS, TOPOLOGY, Orders, Ranks, Undisturbed, Watched
from ds_hybridep.lab.network import EmulatedNetwork
from ds_hybridep.lab.topology import LinkSpec

RATES = (5e6, 20e6, 100e6, 500e6)  # bits per second of an uplink
CALM = LinkSpec(wan_bits_per_s=RATES[-1])
DELAYS_S = (0.0, 0.002, 0.01, 0.05)
LOSSES = (0.0, 0.0, 0.001, 0.01)
EVENTS = {"rate": 5, "path": 3, "short cut": 3, "short stop": 2, "kill": 1, "long cut": 0.5}  # kind -> how often
ENDING = ("kill", "long cut")
GAP_S = (1.0, 8.0)
# Cuts and stops are at most a fifth of timeout_s, and the next event is at least as far away: TCP waits up to as long
# again as a cut was, and twice that where a frame loss hits what it sends then.
SHORT_S = (0.5, 6.0)
START_LIMIT_S = 300.0
END_EXTRA_S = 60.0  # beyond timeout_s, for ranks to end by themselves
CLONE_NEWNS, MS_PRIVATE_ALL = 0x20000, 0x44000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--codecs", choices=CODECS, default="recommended")
    parser.add_argument("--timeout-s", type=float, default=30.0)
    parser.add_argument("--step-s", type=float, default=0.1, help="slept in each step, so that cores stay free")
    parser.add_argument("--logs", type=Path, help="keep the ranks' logs and checkpoints here")


@dataclass
class Soak:
    """The job that is disturbed."""

    network: EmulatedNetwork
    orders: Orders
    draw: random.Random
    begin: float = field(default_factory=time.monotonic)
    events: list[Record] = field(default_factory=list)
    attempts: list[Record] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    differ: list[str] = field(default_factory=list)

    def attempt(self, until: float) -> str:
        """Start all ranks and disturb them; returns what ended them."""
        started, first = time.monotonic(), max(self.losses, default=-1)
        job = Watched(self.network, self.orders, self.orders.folder / f"attempt{len(self.attempts)}")
        try:
            ending = self._watch(job, until)
        finally:
            job.ranks.kill()
        self._collect(job)
        self.network.restore(None)
        self.network.set_wan_path(0.0)
        self.attempts.append({
            "at_s": round(started - self.begin), "seconds": round(time.monotonic() - started), "ended_by": ending,
            "new_steps": max(self.losses, default=-1) - first, "errors": sorted(set(job.errors())),
            "statuses": [job.ranks.ended[rank][1] for rank in sorted(job.ranks.ended)],
        })  # fmt: skip
        return ending

    def _watch(self, job: Watched, until: float) -> str:
        started, num_known = time.monotonic(), len(self.losses)
        next_event, ended_at, ending = 0.0, 0.0, ""
        while job.ranks.poll():
            now = time.monotonic()
            self._collect(job)
            trains = len(self.losses) > num_known
            if not ending and now > until:
                return "time"
            if ending and now - ended_at > self.orders.timeout_s + END_EXTRA_S:
                return f"{ending}, and ranks did not end by themselves"
            if not ending and not trains and now - started > START_LIMIT_S:
                return "a start that took too long"
            if trains and not ending and not job.ranks.ended and now > next_event:
                ending = self._disturb(job.ranks) if next_event else ""
                ended_at = time.monotonic()
                next_event = ended_at + self.draw.uniform(*GAP_S) + ended_at - now
            time.sleep(0.05)
        return ending or "a failure that was not ordered"

    def _disturb(self, ranks: Ranks) -> str:
        """One event; its kind if it ends the job."""
        kind = self.draw.choices(list(EVENTS), list(EVENTS.values()))[0]
        rank, dc = self.draw.randrange(len(ranks.pids)), self.draw.randrange(2)
        seconds = round(min(self.draw.uniform(*SHORT_S), self.orders.timeout_s / 5), 1)
        told: Record = {"at_s": round(time.monotonic() - self.begin), "kind": kind}
        if kind == "rate":
            rate = self.draw.choice(RATES)
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

    def _collect(self, job: Watched) -> None:
        """New losses; those of steps that are repeated must be the same."""
        for step, loss in job.new_losses():
            if self.losses.setdefault(step, loss) != loss:
                self.differ.append(f"step {step}: {loss} after {self.losses[step]}")


def summary_of(soak: Soak, undisturbed: Undisturbed) -> Record:
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


def own_shm() -> None:
    """A /dev/shm that only this program and its ranks see."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS) or libc.mount(None, b"/", None, MS_PRIVATE_ALL, None):
        raise OSError(ctypes.get_errno(), "a mount namespace of our own")
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], check=True)


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
            result[kind] = Soak(network, disturbed, draw, begin), undisturbed
        yield result


def orders_of(args: argparse.Namespace, folder: Path, kind: str, name: str, codecs: str = "", **more: Any) -> Orders:
    own = new_folder(folder / kind / name)
    return Orders(own, kind, codecs or args.codecs, args.timeout_s, num_steps=10**9, **more)


def growth_without_block(args: argparse.Namespace, folder: Path, kind: str, num_steps: int) -> dict[str, float]:
    """Growth of a job of DeepSpeed alone."""
    with EmulatedNetwork(TOPOLOGY, CALM) as network:
        job = Undisturbed(network, orders_of(args, folder, kind, "no-block", codecs="no block", follows=True))
        try:
            job.follow(num_steps - 1, limit_s=num_steps * 2.0 + START_LIMIT_S)
        finally:
            job.close()
    return growth_of(job.samples)


def run(args: argparse.Namespace, records: Records) -> int:
    own_shm()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.logs or Path(scratch)
        with jobs(args, folder) as by_kind:
            begin = time.monotonic()
            for kind in cycle(args.kinds):
                soak, undisturbed = by_kind[kind]
                ending = soak.attempt(begin + 60 * args.minutes)
                if soak.losses:
                    undisturbed.follow(max(soak.losses))
                found = summary_of(soak, undisturbed)
                print(kind, json.dumps({**soak.attempts[-1], **{name: found[name] for name in TOLD}}), flush=True)
                if ending not in ENDING:
                    break
            left = sorted(os.listdir("/dev/shm"))
            kinds = {kind: summary_of(*pair) for kind, pair in by_kind.items()}
        for kind, one in kinds.items():
            if num_steps := one["steps_compared"]:
                one["growth_without_block"] = growth_without_block(args, folder, kind, num_steps)
    is_good = not left and all(one["is_good"] for one in kinds.values())
    params = {name: getattr(args, name) for name in ("seed", "codecs", "timeout_s")}
    params["minutes"] = round((time.monotonic() - begin) / 60, 1)
    records.add(params, left_in_dev_shm=left, kinds=kinds, is_good=is_good)
    return int(not is_good)


TOLD = ("steps_compared", "steps_that_differ", "growth")


def report(records: list[Record], args: argparse.Namespace) -> str:
    rows = []
    for record in records:
        for kind, one in record["kinds"].items():
            events = ", ".join(f"{count} {name}" for name, count in one["events_by_kind"].items())
            growth = [one.get(name, {}).get("rss_mb", "") for name in ("growth", "growth_without_block")]
            rows.append(
                [record["params"]["minutes"], kind, one["steps"], len(one["steps_that_differ"]), events, *growth]
            )
    header = ("minutes", "model", "steps", "that differ", "events", "memory grew", "without the block")
    return table(header, rows) + "\n\n" + ("good" if all(one["is_good"] for one in records) else "NOT good")
