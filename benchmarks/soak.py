# SPDX-License-Identifier: Apache-2.0
"""Trains for a long time on links and machines that misbehave, and compares with an undisturbed run.

    python benchmarks/soak.py --minutes 10 --seed 1 --out soak.json

By the seed, at random times: rates that change, links that are cut for less than timeout_s, ranks that are stopped
for a while, ranks that are killed, links that are cut for good.  After each end of the job all ranks are started
again from the newest whole checkpoint.  At the end every loss must be bit-equal to the undisturbed run's, and nothing
may be left in /dev/shm; growth of memory, descriptors and threads is told.  Works without root where user namespaces
are permitted.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from faults import Ranks, first_error

from ds_hybridep.lab.network import EmulatedNetwork
from ds_hybridep.lab.topology import LinkSpec, Topology
from ds_hybridep.lab.unprivileged import become_root

RATES = (5e6, 20e6, 100e6, 500e6)  # bits per second of an uplink
EVENTS = {"rate": 5, "short cut": 3, "short stop": 2, "kill": 1, "long cut": 0.5}  # kind -> how often
ENDING = ("kill", "long cut")
GAP_S = (1.0, 8.0)
SAMPLE_S = 2.0
END_LIMIT_S = 60.0
WARM_UP_S = 20.0  # of an attempt, in which its memory may still grow


@dataclass
class Soak:
    """One run and what was seen of it."""

    network: EmulatedNetwork
    folder: Path
    orders: Any
    draw: random.Random
    disturbs: bool
    events: list[dict[str, Any]] = field(default_factory=list)
    attempts: list[dict[str, Any]] = field(default_factory=list)
    losses: dict[int, float] = field(default_factory=dict)
    mismatches: list[str] = field(default_factory=list)

    def run(self, limit_s: float) -> None:
        """Attempts until the steps are done or the time is over."""
        begin = time.monotonic()
        while time.monotonic() - begin < limit_s:
            folder = self.folder / f"attempt{len(self.attempts)}"
            folder.mkdir(parents=True)
            (self.folder / "losses.json").unlink(missing_ok=True)
            started = time.monotonic()
            ranks = Ranks(self.network, self.orders, folder)
            samples: list[dict[str, float]] = []
            try:
                ending = self._watch(ranks, begin + limit_s, samples)
            finally:
                ranks.kill()
            self._collect()
            self.attempts.append({
                "seconds": round(time.monotonic() - started, 1), "ended_by": ending, "growth": growth_of(samples),
                "samples": len(samples), "errors": [first_error(log)[:200] for log in ranks.logs],
                "statuses": [ranks.ended[rank][1] for rank in sorted(ranks.ended)],
            })  # fmt: skip
            if ending in ("done", "time"):
                return

    def _watch(self, ranks: Ranks, until: float, samples: list[dict[str, float]]) -> str:
        """One attempt; what ended it."""
        next_event = time.monotonic() + WARM_UP_S / 2
        next_sample, started = time.monotonic() + SAMPLE_S, time.monotonic()
        ending, ended_at = "", 0.0
        while ranks.poll():
            now = time.monotonic()
            if now > until:
                return "time"
            if ending and now - ended_at > END_LIMIT_S:
                return f"{ending}, and ranks did not end by themselves"
            if now > next_sample:
                next_sample = now + SAMPLE_S
                if now - started > WARM_UP_S and not ending:
                    samples.append(measure(ranks))
            if self.disturbs and not ending and now > next_event and (self.folder / "losses.json").exists():
                ending, ended_at = self._disturb(ranks), time.monotonic()
                next_event = time.monotonic() + self.draw.uniform(*GAP_S)
            time.sleep(0.05)
        self.network.restore(None)
        statuses = {status for _, status in ranks.ended.values()}
        return "done" if statuses == {0} else ending or "a failure that was not ordered"

    def _disturb(self, ranks: Ranks) -> str:
        kind = self.draw.choices(list(EVENTS), list(EVENTS.values()))[0]
        rank, dc = self.draw.randrange(len(ranks.pids)), self.draw.randrange(2)
        seconds = round(self.draw.uniform(0.5, self.orders.timeout_s / 3), 1)
        rate = self.draw.choice(RATES)
        told: dict[str, Any] = {"at_s": round(time.monotonic(), 1), "kind": kind}
        if kind == "rate":
            self.network.set_wan_rate(rate, dc=dc)
            told |= {"dc": dc, "bits_per_s": rate}
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

    def _collect(self) -> None:
        """Losses of an attempt; those of steps that were repeated must be the same."""
        path = self.folder / "losses.json"
        try:
            found = json.loads(path.read_text()) if path.exists() else {}
        except ValueError:
            found = {}  # rank 0 was killed while it wrote
        for step, loss in found.items():
            if self.losses.setdefault(int(step), loss) != loss:
                self.mismatches.append(f"step {step}: {loss} after {self.losses[int(step)]}")


def measure(ranks: Ranks) -> dict[str, float]:
    """The largest of all ranks."""
    seen = {"rss_mb": 0.0, "descriptors": 0.0, "threads": 0.0}
    for pid in ranks.pids:
        try:
            status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
            seen["rss_mb"] = max(seen["rss_mb"], int(status["VmRSS"].split()[0]) / 1024)
            seen["threads"] = max(seen["threads"], int(status["Threads"]))
            seen["descriptors"] = max(seen["descriptors"], len(os.listdir(f"/proc/{pid}/fd")))
        except (OSError, KeyError):
            continue  # it has ended
    return seen


def growth_of(samples: list[dict[str, float]]) -> dict[str, float]:
    """From the first fifth of the samples to the last, as a factor of medians."""
    fifth = len(samples) // 5
    if fifth < 2:
        return {}

    def median(part: list[dict[str, float]], name: str) -> float:
        return sorted(sample[name] for sample in part)[len(part) // 2]

    return {name: round(median(samples[-fifth:], name) / median(samples[:fifth], name), 4) for name in samples[0]}


def leftovers() -> set[str]:
    return set(os.listdir("/dev/shm"))


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    import faults_rank

    draw, shm = random.Random(args.seed), leftovers()
    results: dict[str, Soak] = {}
    for name in ("disturbed", "undisturbed"):
        own = folder / name
        orders = faults_rank.Orders(
            fault="none", phase="none", victim=-1, kind=args.kind, codecs=args.codecs, timeout_s=args.timeout_s,
            folder=str(own), num_steps=10**9, resume=True, step_s=args.step_s,
        )  # fmt: skip
        if name == "undisturbed":
            orders = replace(orders, num_steps=max(results["disturbed"].losses, default=-1) + 1, step_s=0.001)
        with EmulatedNetwork(Topology(2, 2), LinkSpec(wan_bits_per_s=RATES[-1])) as network:
            results[name] = Soak(network, own, orders, draw, name == "disturbed")
            results[name].run(60 * args.minutes if name == "disturbed" else 3600.0)
    disturbed, undisturbed = results["disturbed"], results["undisturbed"]
    different = [step for step, loss in disturbed.losses.items() if undisturbed.losses.get(step) != loss]
    return {
        "seed": args.seed, "minutes": args.minutes, "kind": args.kind, "codecs": args.codecs,
        "timeout_s": args.timeout_s, "steps": len(disturbed.losses), "steps_that_differ": different,
        "repeated_steps_that_differ": disturbed.mismatches, "events": disturbed.events,
        "attempts": disturbed.attempts, "undisturbed_growth": undisturbed.attempts[-1]["growth"],
        "left_in_dev_shm": sorted(leftovers() - shm),
        "is_good": bool(disturbed.losses) and not different and not disturbed.mismatches and leftovers() <= shm
        and all(one["ended_by"] in ("done", "time", *ENDING) for one in disturbed.attempts),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of the disturbed run")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kind", choices=["classic", "autoep"], default="classic")
    parser.add_argument("--codecs", choices=["exact", "recommended"], default="recommended")
    parser.add_argument("--timeout-s", type=float, default=12.0)
    parser.add_argument("--step-s", type=float, default=0.25, help="slept in each step, so that cores stay free")
    parser.add_argument("--out", type=Path, help="the record, JSON")
    parser.add_argument("--logs", type=Path, help="keep the ranks' logs and checkpoints here")
    args = parser.parse_args()
    become_root()
    import faults_rank  # noqa: F401
    import torch._dynamo  # noqa: F401  imported once, for all ranks

    if args.kind == "autoep":
        import hf_model  # noqa: F401
    with tempfile.TemporaryDirectory() as scratch:
        record = run(args, args.logs or Path(scratch))
    if args.out:
        args.out.write_text(json.dumps(record, indent=1) + "\n")
    counts = {kind: sum(event["kind"] == kind for event in record["events"]) for kind in EVENTS}
    print(f"{record['steps']} steps in {len(record['attempts'])} attempts; events {counts}")
    print(
        f"steps that differ: {record['steps_that_differ'][:10]}; repeated: {record['repeated_steps_that_differ'][:5]}"
    )
    for attempt in record["attempts"]:
        print(f"  {attempt['seconds']} s, ended by {attempt['ended_by']}, growth {attempt['growth']}")
        print(f"    {attempt['errors'][0]}")
    print("good" if record["is_good"] else "NOT good")
    sys.exit(0 if record["is_good"] else 1)


if __name__ == "__main__":
    main()
