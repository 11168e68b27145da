# SPDX-License-Identifier: Apache-2.0
"""A long training over links whose rate keeps changing, against the same training at a constant rate: equal losses?

    sudo python benchmarks/varying_rate.py --steps 1800 --out benchmarks/results/varying-rate.json

Every `--period` seconds each DC's uplink gets the next of `--rates`, and once per round one is cut for two seconds.
Both runs go on side by side, each in a network of its own, and log the loss of every step; they must agree in every
bit.  Needs root and iproute2.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import bench

from ds_hybridep.lab.launcher import run_ranks
from ds_hybridep.lab.network import EmulatedNetwork, why_not_permitted
from ds_hybridep.lab.topology import LinkSpec, Topology, parse_duration, parse_rate

REPOSITORY = Path(__file__).resolve().parent.parent
CUT_S = 2.0
Events = list[tuple[float, Callable[[EmulatedNetwork], None]]]


def schedule_of(rates: list[float], period_s: float, limit_s: float) -> Events:
    """The rates in turn until `limit_s`; the last period of a round begins with a cut of the first DC's uplink."""
    events: Events = []
    time_s = period_s
    while time_s < limit_s:
        index = round(time_s / period_s) % len(rates)
        events.append((time_s, partial(EmulatedNetwork.set_wan_rate, bits_per_s=rates[index])))
        if index == len(rates) - 1:
            events.append((time_s + 1.0, partial(EmulatedNetwork.cut, dc=0)))
            events.append((time_s + 1.0 + CUT_S, partial(EmulatedNetwork.restore, dc=0)))
        time_s += period_s
    return events


def train(args: argparse.Namespace, rate: float, events: Events, scratch: Path) -> dict[str, Any]:
    """Losses of all steps and the seconds of one run."""
    scratch.mkdir()
    record = scratch / "record.json"
    config = json.loads((REPOSITORY / "ds_configs" / "two_dcs_2x2.json").read_text())
    config["train_micro_batch_size_per_gpu"] = args.rows
    config["hybridep"]["levels"][0].update(weight_codec=args.codec, gradient_codec=args.codec)
    (scratch / "ds_config.json").write_text(json.dumps(config))
    command = [sys.executable, str(REPOSITORY / "examples" / "train_lm.py"), "--steps", str(args.steps)]
    command += ["--deepspeed_config", str(scratch / "ds_config.json"), "--log-interval", "1", "--eval-interval", "0"]
    command += ["--json-file", str(record), "--seed", str(args.seed)]
    links = LinkSpec(wan_bits_per_s=rate, wan_delay_s=parse_duration(args.delay, "--delay"))
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    with EmulatedNetwork(Topology(2, 2), links) as network:
        result = run_ranks(
            network,
            command,
            log_dir=scratch,
            timeout_s=parse_duration(args.timeout, "--timeout"),
            events=[(at_s, partial(change, network)) for at_s, change in events],
            environment=environment,
        )
    if not result.is_success:
        raise SystemExit(f"ranks {result.failed_ranks} failed:\n{(scratch / 'rank0.log').read_text()[-4000:]}")
    return {"losses": json.loads(record.read_text())["losses"], "seconds": result.seconds}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1800)
    parser.add_argument("--rates", nargs="+", default=["200mbit", "50mbit", "500mbit", "20mbit", "100mbit"])
    parser.add_argument("--constant", default="1000mbit", help="rate of the run to compare with")
    parser.add_argument("--period", default="20s")
    parser.add_argument("--delay", default="5ms", help="one way between the DCs")
    parser.add_argument("--rows", type=int, default=2, help="sequences per rank")
    parser.add_argument("--codec", default="identity", help="of weights and gradients between the DCs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout", default="90min", help="of each run")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    if reason := why_not_permitted():
        print(f"no emulated network here: {reason}", file=sys.stderr)
        return 2
    rates = [parse_rate(rate, "--rates") for rate in args.rates]
    events = schedule_of(rates, parse_duration(args.period, "--period"), parse_duration(args.timeout, "--timeout"))
    plans = {"varying": (rates[0], events), "constant": (parse_rate(args.constant, "--constant"), [])}
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor() as pool:
        started = {name: pool.submit(train, args, *plan, Path(scratch) / name) for name, plan in plans.items()}
        varying, constant = (started[name].result() for name in plans)
    print(f"{args.steps} steps at {', '.join(args.rates)} in turn: {varying['seconds']:.0f} s", flush=True)
    print(f"{args.steps} steps at {args.constant}: {constant['seconds']:.0f} s", flush=True)
    pairs = zip(varying["losses"], constant["losses"], strict=True)
    different = [step for (step, one), (_, other) in pairs if one != other]
    about = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
    about.pop("out")
    record = {
        "case": "varying rate",
        "params": about,
        "seconds": {"varying": varying["seconds"], "constant": constant["seconds"]},
        "last_loss": varying["losses"][-1],
        "steps_with_other_losses": different,
        "versions": bench.versions(),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a") as file:
        file.write(json.dumps(record) + "\n")
    verdict = f"differ at {different}" if different else "equal in every bit"
    print(f"losses of {len(varying['losses'])} steps: {verdict}")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
