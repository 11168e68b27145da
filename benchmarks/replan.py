# SPDX-License-Identifier: Apache-2.0
"""A link that drops and recovers: does a planned job see it, how soon, and what does that cost against a good hand?

    sudo python benchmarks/replan.py --rates 500mbit 20mbit 500mbit --rows 2 --out benchmarks/results/replan.jsonl

One job trains the same model over the same changes twice, see replan_worker.py.  Needs root and iproute2.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import bench
from e2e import POLL_S, Requests

from ds_hybridep.lab.launcher import RankProcesses
from ds_hybridep.lab.network import EmulatedNetwork, why_not_permitted
from ds_hybridep.lab.topology import LinkSpec, Topology, parse_duration

WORKER = Path(__file__).resolve().parent / "replan_worker.py"


class ReplanRequests(Requests):
    """Like those of e2e.py, with one record at the end."""

    records: list[dict[str, Any]] = []

    def _write(self, records: list[dict[str, Any]]) -> None:
        self.records = records


def report(records: list[dict[str, Any]], rates: list[str], warm_up: int, steps: int) -> str:
    """What happened, for people."""
    about, *runs = records
    by_name = {run["name"]: run for run in runs}
    lines = [f"median seconds of a step by hand: {json.dumps(about['times_by_hand'], indent=1)}"]
    hand, planned = by_name["by hand"], by_name["planned"]
    for index, rate in enumerate(rates):
        part = slice(index * steps, (index + 1) * steps)
        ours, theirs = sum(planned["step_s"][part]), sum(hand["step_s"][part])
        lines.append(f"{rate:>9}: planned {ours:.1f} s, by hand {theirs:.1f} s ({about['best'][rate]})")
    ours, theirs = sum(planned["step_s"]), sum(hand["step_s"])
    lines.append(f"     all: planned {ours:.1f} s, by hand {theirs:.1f} s, ratio {ours / theirs:.3f}")
    for entry in planned["history"]:
        done = entry["step"] - warm_up
        index = min(done // steps, len(rates) - 1)
        phase = f"{done - index * steps} steps after the change to {rates[index]}" if done >= 0 else "in the warm-up"
        lines.append(f"step {entry['step']}, {phase}: {entry['from']} -> {entry['to']} ({entry['reason']})")
    plain = by_name["DeepSpeed"]["losses"]
    for run in (hand, planned):
        pairs = zip(run["losses"], plain, strict=True)
        lines.append(f"{run['name']}: losses differ from DeepSpeed's by {max(abs(a / b - 1) for a, b in pairs):.2e}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dcs", default="2x2", help="DCs x hosts per DC")
    parser.add_argument("--rates", nargs="+", default=["500mbit", "20mbit", "500mbit"], help="phase by phase")
    parser.add_argument("--steps", type=int, default=40, help="of a phase")
    parser.add_argument("--warm-up", type=int, default=30)
    parser.add_argument("--delay", default="0ms", help="one way between DCs")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are appended here")
    parser.add_argument("--timeout", default="30min")
    args, worker_args = parser.parse_known_args()
    if reason := why_not_permitted(with_delay=args.delay != "0ms"):
        print(f"no emulated network here: {reason}", file=sys.stderr)
        return 2
    num_dcs, hosts = (int(part) for part in args.dcs.split("x"))
    limit = time.monotonic() + parse_duration(args.timeout, "--timeout")
    links = LinkSpec(wan_delay_s=parse_duration(args.delay, "--delay"))
    with tempfile.TemporaryDirectory() as scratch, EmulatedNetwork(Topology(num_dcs, hosts), links) as network:
        control = Path(scratch) / "control"
        control.mkdir()
        command = [sys.executable, str(WORKER), "--control", str(control), "--dcs", args.dcs, "--rates", *args.rates]
        command += ["--steps", str(args.steps), "--warm-up", str(args.warm_up), *worker_args]
        requests = ReplanRequests(control, network, args.out, args.delay)
        with RankProcesses(
            network, command, num_ranks=num_dcs * hosts, log_dir=Path(scratch) / "logs", live=sys.stdout
        ) as ranks:
            while ranks.poll():
                requests.serve()
                if ranks.failed_ranks() or time.monotonic() > limit:
                    break
                time.sleep(POLL_S)
            if not requests.is_done:
                failed = ranks.failed_ranks()
                print(f"the job did not finish; failed ranks: {failed or 'none, out of time'}", file=sys.stderr)
                for rank in failed[:1]:
                    print(ranks.log_files[rank].read_text(errors="replace")[-4000:], file=sys.stderr)
                return 1
    print(report(requests.records, args.rates, args.warm_up, args.steps))
    params = {name: value for name, value in vars(args).items() if name != "out"} | {"worker": worker_args}
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("a") as file:
        record = {"case": "replan", "params": params, "records": requests.records, "versions": bench.versions()}
        file.write(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
