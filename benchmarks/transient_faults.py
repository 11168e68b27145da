# SPDX-License-Identifier: Apache-2.0
"""Losses on links that misbehave for less than timeout_s, beside those of an undisturbed run: bit for bit.

    python benchmarks/transient_faults.py --out transient-faults.jsonl
    python benchmarks/transient_faults.py --report transient-faults.jsonl

Four ranks on emulated hosts of two datacentres train a tiny model.  After some steps a link is cut for 5 or for 60 s,
or is ten times slower for a minute; or it loses 1% of its frames all the time.  Needs root, for the loss.
"""

import argparse
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from soak import TOPOLOGY, Run, Undisturbed

from ds_hybridep.lab.namespaces import become_root
from ds_hybridep.lab.network import EmulatedNetwork
from ds_hybridep.lab.topology import LinkSpec

RATE = 20e6  # bits per second of an uplink
CASES = {"cut for 5 s": 5.0, "cut for 60 s": 60.0, "10x slower for 60 s": 60.0, "1% loss": 30.0}  # how long
STEPS_BEFORE, STEPS_AFTER = 5, 10
TIMEOUT_S = 120.0
LIMIT_S = 400.0


def losses_of(case: str, orders: Any, folder: Path) -> tuple[dict[int, float], int, float]:
    """Losses by step, how many steps the disturbance lasted, and the longest time between two steps."""
    loss = 0.01 if case == "1% loss" else 0.0
    links = LinkSpec(wan_bits_per_s=RATE, wan_delay_s=0.001 if loss else 0.0, wan_loss=loss)
    losses: dict[int, float] = {}
    begin = last_at = time.monotonic()
    longest_s, num_disturbed = 0.0, 0
    with EmulatedNetwork(TOPOLOGY, links) as network:
        run = Run(network, orders, folder)

        def train(num_steps: int, seconds: float = 0.0) -> int:
            nonlocal longest_s, last_at
            first, until = len(losses), time.monotonic() + seconds
            while len(losses) < first + num_steps or time.monotonic() < until:
                if not run.ranks.poll() or run.ranks.ended or time.monotonic() - begin > LIMIT_S:
                    raise RuntimeError(f"{case}: {run.errors()}")
                if new := run.new_losses():
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
            run.ranks.kill()
    return losses, num_disturbed, longest_s


def run(args: argparse.Namespace, folder: Path) -> bool:
    import faults_rank

    def orders_of(kind: str, codecs: str, name: str, **more: Any) -> Any:
        own = folder / f"{kind}-{codecs}-{name}".replace(" ", "-")
        own.mkdir(parents=True)
        return faults_rank.Orders(
            fault="none", phase="none", victim=-1, kind=kind, codecs=codecs, timeout_s=TIMEOUT_S,
            folder=str(own), num_steps=10**9, **more,
        )  # fmt: skip

    good = True
    for kind, codecs in itertools.product(args.kinds, args.codecs):
        results = {}
        for case in args.cases:
            orders = orders_of(kind, codecs, case, step_s=0.1)
            results[case] = losses_of(case, orders, Path(orders.folder))
        last = max(step for losses, _, _ in results.values() for step in losses)
        with EmulatedNetwork(TOPOLOGY, LinkSpec()) as network:
            undisturbed = Undisturbed(network, orders_of(kind, codecs, "undisturbed", follows=True))
            try:
                undisturbed.follow(last)
            finally:
                undisturbed.close()
        for case, (losses, num_disturbed, longest_s) in results.items():
            differ = [step for step, loss in losses.items() if undisturbed.losses[step] != loss]
            record = {
                "case": case, "kind": kind, "codecs": codecs, "timeout_s": TIMEOUT_S, "steps": len(losses),
                "steps_while_disturbed": num_disturbed, "longest_step_s": round(longest_s, 1),
                "steps_that_differ": differ,
            }  # fmt: skip
            good = good and not differ
            print(record, flush=True)
            if args.out:
                with args.out.open("a") as out:
                    out.write(json.dumps(record) + "\n")
    return good


def report(path: Path) -> None:
    print("| link | model | codecs | steps | of them while disturbed | longest step, s | steps whose loss differs |")
    print("|---|---|---|---|---|---|---|")
    for record in map(json.loads, path.read_text().splitlines()):
        print(
            f"| {record['case']} | {record['kind']} | {record['codecs']} | {record['steps']} | "
            f"{record['steps_while_disturbed']} | {record['longest_step_s']} | {len(record['steps_that_differ'])} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=CASES)
    parser.add_argument("--kinds", nargs="+", default=["classic", "autoep"], choices=["classic", "autoep"])
    parser.add_argument("--codecs", nargs="+", default=["exact", "recommended"], choices=["exact", "recommended"])
    parser.add_argument("--out", type=Path, help="JSON lines, one a case")
    parser.add_argument("--report", type=Path, help="print the table of such a file, and run nothing")
    args = parser.parse_args()
    if args.report:
        report(args.report)
        return
    become_root()
    import faults_rank  # noqa: F401
    import hf_model  # noqa: F401
    import torch._dynamo
    import torch._inductor.compile_fx  # noqa: F401  imported once, for all ranks

    with tempfile.TemporaryDirectory() as scratch:
        sys.exit(0 if run(args, Path(scratch)) else 1)


if __name__ == "__main__":
    main()
