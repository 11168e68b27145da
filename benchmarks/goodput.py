# SPDX-License-Identifier: Apache-2.0
"""How much of a long link one or several TCP connections fill: with BBR or CUBIC, with and without loss.

    sudo python benchmarks/goodput.py --connections 1 8 --out benchmarks/results/goodput.jsonl
    sudo python benchmarks/goodput.py --connections 1 8 --congestion-control bbr --out benchmarks/results/goodput.jsonl
    python benchmarks/goodput.py --report benchmarks/results/goodput.jsonl

Two ranks in two datacentres send each other one message over channels with so many `connections`.  Needs root,
iproute2 and a C++ compiler.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import bench

RATE, DELAY = "1000mbit", "50ms"
LIMIT_S = 300.0


def work(args: argparse.Namespace) -> None:
    """One rank: time each number of connections `--rounds` times, in turn; rank 0 writes."""
    import torch
    import torch.distributed as dist

    from ds_hybridep.plan.cluster import Cluster, Level, Link
    from ds_hybridep.transport.channels import Purpose, Transport

    dist.init_process_group("gloo")
    rank, purpose = dist.get_rank(), Purpose("dense", "goodput")
    channels = {}
    for count in args.connections:
        cluster = Cluster((Level("dc", 2, Link(None, None, count, args.congestion_control)), Level("gpu", 1)))
        channels[count] = Transport(cluster, LIMIT_S, count).channel("goodput", (0, 1), background=True)
    found: dict[int, list[float]] = {count: [] for count in args.connections}
    for round_number in range(args.rounds + 1):  # the first one warms up
        for count in args.connections:
            sent, arriving = (torch.zeros(args.megabytes * 10**6, dtype=torch.uint8) for _ in range(2))
            dist.barrier()
            begin = time.perf_counter()
            channels[count].start([(1 - rank, sent)], [(1 - rank, arriving)], purpose).wait()
            seconds = torch.tensor([time.perf_counter() - begin])
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            if round_number:
                found[count].append(seconds.item())
    if rank == 0:
        args.worker.write_text(json.dumps(found))
    dist.barrier()
    for channel in channels.values():
        channel.close()


def measure(args: argparse.Namespace, loss: str) -> list[dict[str, Any]]:
    from ds_hybridep.lab.launcher import run_ranks
    from ds_hybridep.lab.network import EmulatedNetwork
    from ds_hybridep.lab.topology import LinkSpec, Topology, parse_duration, parse_rate

    links = LinkSpec(
        wan_bits_per_s=parse_rate(RATE, "rate"), wan_delay_s=parse_duration(DELAY, "delay"),
        wan_loss=float(loss.rstrip("%")) / 100,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch, EmulatedNetwork(Topology(2, 1), links) as network:
        record = Path(scratch) / "record.json"
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", str(record)]
        command += ["--rounds", str(args.rounds), "--megabytes", str(args.megabytes)]
        command += ["--connections", *map(str, args.connections), "--congestion-control", args.congestion_control]
        result = run_ranks(network, command, log_dir=Path(scratch) / "logs", timeout_s=LIMIT_S)
        if not result.is_success:
            print(f"loss {loss}: {result.failure}\n{result.tail_of_log(0, 20)}", file=sys.stderr)
            return []
        about = {"case": "goodput", "rate": RATE, "delay": DELAY, "wan_loss": loss, "megabytes": args.megabytes}
        about["congestion_control"] = args.congestion_control
        return [
            {**about, "connections": int(count), "seconds": seconds, "versions": bench.versions()}
            for count, seconds in json.loads(record.read_text()).items()
        ]


def report(path: Path) -> str:
    """Mbit/s each way, medians, with the range."""
    rows: dict[tuple[str, str], dict[int, str]] = {}
    for record in map(json.loads, path.read_text().splitlines()):
        rates = sorted(8 * record["megabytes"] / seconds for seconds in record["seconds"])
        cell = f"{statistics.median(rates):.3g} ({rates[0]:.3g} to {rates[-1]:.3g})"
        rows.setdefault((record["wan_loss"], record["congestion_control"]), {})[record["connections"]] = cell
    counts = sorted({count for cells in rows.values() for count in cells})
    lines = [f"Mbit/s each way at once over {RATE}, {DELAY} one way; medians and ranges.", ""]
    lines += [
        "| loss | | " + " | ".join(f"{count} connections" for count in counts) + " |",
        "|---" * (len(counts) + 2) + "|",
    ]
    lines += [
        f"| {loss} | {control} | " + " | ".join(cells.get(count, "") for count in counts) + " |"
        for (loss, control), cells in sorted(rows.items())
    ]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--losses", nargs="+", default=["0%", "0.1%", "1%"])
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--congestion-control", default="cubic", choices=("bbr", "cubic"))
    parser.add_argument("--megabytes", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON lines are appended here")
    parser.add_argument("--report", type=Path, help="print the table of these records")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker is not None:
        work(args)
        return 0
    if args.report is not None:
        print(report(args.report))
        return 0
    for loss in args.losses:
        found = measure(args, loss)
        if not found:
            return 1
        for record in found:
            print(json.dumps(record))
            if args.out is not None:
                with args.out.open("a") as file:
                    file.write(json.dumps(record) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
