# SPDX-License-Identifier: Apache-2.0
"""Step time of every plan on emulated datacentres: links x batch x accumulation x plans, as JSON lines.

    sudo python benchmarks/e2e.py --dcs 2x2 --out benchmarks/results/e2e-2x2.jsonl
    python benchmarks/e2e_report.py benchmarks/results/e2e-2x2.jsonl --plots docs/images

One job holds all plans (benchmarks/e2e_worker.py runs on each host); this driver owns the network, changes its rate
between phases and reads the uplinks' counters when the job asks.  Needs root and iproute2.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import bench

from ds_hybridep.lab.launcher import RankProcesses
from ds_hybridep.lab.network import EmulatedNetwork, why_not_permitted
from ds_hybridep.lab.topology import LinkSpec, Topology, parse_duration, parse_rate

DEFAULT_RATES = ("none", "1000mbit", "500mbit", "200mbit", "100mbit", "50mbit", "20mbit")
POLL_S = 0.002
WORKER = Path(__file__).resolve().parent / "e2e_worker.py"


class Requests:
    """Answers the job's requests, in order."""

    def __init__(self, folder: Path, network: EmulatedNetwork, out: Path, delay: str) -> None:
        self._folder, self._network, self._out, self._delay = folder, network, out, delay
        self._count = 1
        self.is_done = False

    def serve(self) -> None:
        path = self._folder / f"request-{self._count}.json"
        if not path.exists():
            return
        answer = self._answer(json.loads(path.read_text()))
        partial = self._folder / "answer.partial"
        partial.write_text(json.dumps(answer))
        os.replace(partial, self._folder / f"answer-{self._count}.json")
        self._count += 1

    def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        command = request["command"]
        if command == "rate":
            rate = request["rate"]
            self._network.set_wan_rate(None if rate == "none" else parse_rate(rate, "--rates"))
        elif command == "counters":
            return {"wan_bytes": sum(uplink.out_bytes for uplink in self._network.counters())}
        elif command == "records":
            self._write(request["records"])
        elif command == "done":
            self.is_done = True
        return {}

    def _write(self, records: list[dict[str, Any]]) -> None:
        about = {"case": "e2e", "emulated": True, "delay": self._delay, "versions": bench.versions()}
        with self._out.open("a") as file:
            for record in records:
                file.write(json.dumps({**about, **record}) + "\n")
        first = records[0]["params"]
        times = ", ".join(f"{r['params']['plan']} {sorted(r['step_s'])[len(r['step_s']) // 2]:.2f}" for r in records)
        print(f"{first['rate']:>9} t{first['tokens_per_rank']} a{first['accumulation']}: {times}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dcs", default="2x2", help="DCs x hosts per DC")
    parser.add_argument(
        "--rates", nargs="+", default=list(DEFAULT_RATES), help="of each DC's uplink; 'none': unshaped"
    )
    parser.add_argument("--delay", default="0ms", help="one way between DCs")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8], help="sequences per rank and micro-step")
    parser.add_argument("--accumulations", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--out", type=Path, required=True, help="JSON lines are appended here")
    parser.add_argument("--timeout", default="120min")
    args, worker_args = parser.parse_known_args()
    if reason := why_not_permitted(with_delay=args.delay != "0ms"):
        print(f"no emulated network here: {reason}", file=sys.stderr)
        return 2
    num_dcs, hosts = (int(part) for part in args.dcs.split("x"))
    links = LinkSpec(wan_delay_s=parse_duration(args.delay, "--delay"))
    limit = time.monotonic() + parse_duration(args.timeout, "--timeout")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, EmulatedNetwork(Topology(num_dcs, hosts), links) as network:
        control = Path(scratch) / "control"
        control.mkdir()
        command = [sys.executable, str(WORKER), "--control", str(control), "--dcs", args.dcs, "--rates", *args.rates]
        for option in ("rows", "accumulations"):
            command += [f"--{option}", *(str(value) for value in getattr(args, option))]
        requests = Requests(control, network, args.out, args.delay)
        with RankProcesses(
            network, [*command, *worker_args], num_ranks=num_dcs * hosts, log_dir=Path(scratch) / "logs"
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
    return 0


if __name__ == "__main__":
    sys.exit(main())
