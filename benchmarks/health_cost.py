# SPDX-License-Identifier: Apache-2.0
"""What heartbeats cost: CPU time of their thread, bytes, and what a busy main thread loses by them.

    python benchmarks/health_cost.py

Four ranks over loopback, whose main threads run small tensor operations in a deep stack, with the watch and without
it in turns.  Prints one JSON line of rank 0: the thread's CPU time as a share of one core, bytes sent per second to
all peers, and the median ratio of iterations with and without the watch in neighbouring blocks.
"""

import argparse
import json
import multiprocessing
import os
import socket
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from ds_hybridep.plan.cluster import Cluster, Level
from ds_hybridep.transport import health

DEPTH = 40  # frames, as in a model's forward
CLUSTER = Cluster((Level("dc", 2), Level("gpu", 2)))


class Owner:
    """Stands in for an attached engine."""

    def num_steps(self) -> int:
        return 1

    def last_transfer(self) -> str:
        return ""


def compute(until: float, depth: int = DEPTH) -> int:
    if depth:
        return compute(until, depth - 1)
    value, count = torch.ones(64, 64), 0
    while time.perf_counter() < until:
        value = value @ value / 64
        count += 1
    return count


def thread_s(name: str) -> float:
    """CPU seconds of a thread of this process."""
    for thread in health.threading.enumerate():
        if thread.name == name:
            with open(f"/proc/self/task/{thread.native_id}/schedstat") as file:
                return int(file.read().split()[0]) / 1e9
    return 0.0


def run(rank: int, port: int, blocks: int, block_s: float) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="4", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    owner = Owner()
    counts: dict[str, list[int]] = {"with": [], "without": []}
    cpu_s, num_bytes, watched_s = 0.0, 0, 0.0
    for _ in range(blocks):
        for name in ("without", "with"):
            if name == "with":
                health.start(CLUSTER, 600.0, owner)
            dist.barrier()
            before_s, sent = thread_s("hybridep-health"), _sent()
            # One rank at a time computes, so that ranks do not share cores; the others wait as in a step.
            counts[name].append(compute(time.perf_counter() + block_s) if rank == 0 else 0)
            if name == "with":
                cpu_s += thread_s("hybridep-health") - before_s
                num_bytes += _sent() - sent
                watched_s += block_s
            dist.barrier()
            if name == "with":
                health.stop(owner)
    if rank == 0:
        ratios = [a / b for a, b in zip(counts["with"], counts["without"], strict=True)]
        record: dict[str, Any] = {
            "case": "health_cost", "blocks": blocks, "block_s": block_s, "thread_share": cpu_s / watched_s,
            "sent_bytes_per_s": num_bytes / watched_s, "speed_with_over_without": statistics.median(ratios),
            "ratios": [round(ratio, 4) for ratio in ratios],
        }  # fmt: skip
        print(json.dumps(record))


def _sent() -> int:
    return health._running._mesh.sent_bytes if health._running is not None else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--block-s", type=float, default=4.0)
    args = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run, args=(rank, port, args.blocks, args.block_s)) for rank in range(4)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()


if __name__ == "__main__":
    main()
