# SPDX-License-Identifier: Apache-2.0
"""Losses on links that misbehave for less than timeout_s, beside those of an undisturbed run: bit for bit.

    python -m benchmarks cuts --out benchmarks/results/cuts.jsonl

Four ranks on emulated hosts of two datacentres train a tiny model.  After some steps a link is cut for 5 or for 60 s,
or is ten times slower for a minute; or it loses 1% of its frames all the time.  The loss needs root.
"""

import argparse
import itertools
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.common import Record, Records, new_folder, table
from benchmarks.disturbed import CODECS, KINDS, TOPOLOGY, Orders, Undisturbed, Watched
from ds_hybridep.lab.network import EmulatedNetwork
from ds_hybridep.lab.topology import LinkSpec

RATE = 20e6  # bits per second of an uplink
CASES = {"cut for 5 s": 5.0, "cut for 60 s": 60.0, "10x slower for 60 s": 60.0, "1% loss": 30.0}  # how long
STEPS_BEFORE, STEPS_AFTER = 5, 10
TIMEOUT_S, LIMIT_S = 120.0, 400.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--codecs", nargs="+", default=list(CODECS), choices=CODECS)


def losses_of(case: str, orders: Orders) -> tuple[dict[int, float], int, float]:
    """Losses by step, how many steps the disturbance lasted, and the longest time between two steps."""
    loss = 0.01 if case == "1% loss" else 0.0
    losses: dict[int, float] = {}
    begin = last_at = time.monotonic()
    longest_s = 0.0
    links = LinkSpec(wan_bits_per_s=RATE, wan_delay_s=0.001 if loss else 0.0, wan_loss=loss)
    with EmulatedNetwork(TOPOLOGY, links) as network:
        job = Watched(network, orders)

        def train(num_steps: int, seconds: float = 0.0) -> int:
            nonlocal longest_s, last_at
            first, until = len(losses), time.monotonic() + seconds
            while len(losses) < first + num_steps or time.monotonic() < until:
                if not job.ranks.poll() or job.ranks.ended or time.monotonic() - begin > LIMIT_S:
                    raise RuntimeError(f"{case}: {job.errors()}")
                if new := job.new_losses():
                    longest_s = max(longest_s, time.monotonic() - last_at) if losses else 0.0
                    last_at = time.monotonic()
                    losses.update(new)
                time.sleep(0.02)
            return len(losses) - first

        try:
            train(STEPS_BEFORE)
            if "cut" in case:
                network.cut(1)
            elif "slower" in case:
                network.set_wan_rate(RATE / 10)
            num_disturbed = train(0, CASES[case])
            if "cut" in case:
                network.restore(1)
            elif "slower" in case:
                network.set_wan_rate(RATE)
            train(STEPS_AFTER)
        finally:
            job.ranks.kill()
    return losses, num_disturbed, longest_s


def run(args: argparse.Namespace, records: Records) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        for kind, codecs in itertools.product(args.kinds, args.codecs):

            def orders(name: str, kind: str = kind, codecs: str = codecs, **more: Any) -> Orders:
                folder = new_folder(Path(scratch, kind, codecs, name.replace(" ", "-")))
                return Orders(folder, kind, codecs, TIMEOUT_S, num_steps=10**9, **more)

            results = {case: losses_of(case, orders(case, step_s=0.1)) for case in args.cases}
            with EmulatedNetwork(TOPOLOGY, LinkSpec()) as network:
                undisturbed = Undisturbed(network, orders("undisturbed", follows=True))
                try:
                    undisturbed.follow(max(step for losses, _, _ in results.values() for step in losses))
                finally:
                    undisturbed.close()
            for case, (losses, num_disturbed, longest_s) in results.items():
                differ = [step for step, loss in losses.items() if undisturbed.losses[step] != loss]
                records.add(
                    {"link": case, "kind": kind, "codecs": codecs, "timeout_s": TIMEOUT_S},
                    steps=len(losses), steps_while_disturbed=num_disturbed, longest_step_s=round(longest_s, 1),
                    steps_that_differ=differ,
                )  # fmt: skip
    return int(any(record["steps_that_differ"] for record in records.rows))


def report(records: list[Record], args: argparse.Namespace) -> str:
    rows = [
        [*(record["params"][name] for name in ("link", "kind", "codecs")), record["steps"],
         record["steps_while_disturbed"], record["longest_step_s"], len(record["steps_that_differ"])]
        for record in records
    ]  # fmt: skip
    header = ("link", "model", "codecs", "steps", "of them while disturbed", "longest step, s", "steps that differ")
    return table(header, rows)
