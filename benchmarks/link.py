# SPDX-License-Identifier: Apache-2.0
"""Goodput and round trip of the link between two processes on this machine, beside gloo's, in turns.

    python benchmarks/link.py --rounds 10

Prints one JSON line per way of sending: GB/s of messages in one direction and in both, and microseconds of a 64-byte
round trip, each as median and quartiles.
"""

import argparse
import json
import statistics
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

from ds_hybridep.link import TLS, URGENT, Link, Options

LIMIT_S = 60.0
NUM_TRIPS = 500


def certificates(folder: Path) -> TLS:
    """An authority and one certificate, for both ranks."""

    def openssl(*words: str) -> None:
        subprocess.run(["openssl", *words], check=True, capture_output=True, cwd=folder, timeout=LIMIT_S)

    for name in ("authority", "rank"):
        openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", f"{name}.key")
    openssl(
        "req",
        "-x509",
        "-new",
        "-key",
        "authority.key",
        "-subj",
        "/CN=authority",
        "-days",
        "2",
        "-out",
        "authority.pem",
    )
    openssl("req", "-new", "-key", "rank.key", "-subj", "/CN=rank", "-out", "rank.csr")
    openssl(
        *"x509 -req -in rank.csr -CA authority.pem -CAkey authority.key -CAcreateserial -days 2 -out rank.pem".split()
    )
    return TLS(folder / "rank.pem", folder / "rank.key", folder / "authority.pem")


class OverLink:
    """Both ranks' ends of a link."""

    def __init__(self, rank: int, tls: TLS | None, connections: int) -> None:
        self.peer = 1 - rank
        self.link = Link(rank, 2, secret=bytes(32), host="127.0.0.1", tls=tls, timeout_s=LIMIT_S)
        addresses: list[tuple[str, int]] = [("", 0)] * 2
        dist.all_gather_object(addresses, self.link.address)
        self.link.connect(dict(enumerate(addresses)), Options(connections=connections))
        self.bulk = self.link.channel("bulk", (0, 1))
        self.urgent = self.link.channel("urgent", (0, 1), priority=URGENT)

    def start(self, sent: torch.Tensor | None, room: torch.Tensor | None) -> list[Callable[[], object]]:
        channel = self.bulk if (room if sent is None else sent).nbytes > 2**16 else self.urgent
        receives = [] if room is None else [channel.receive(self.peer, room)]
        sends = [] if sent is None else [channel.send(self.peer, sent)]
        # A small message is copied when it is sent; nobody waits for its acknowledgement.
        return [one.wait for one in receives + (sends if channel is self.bulk else [])]

    def close(self) -> None:
        self.link.close()


class OverGloo:
    def __init__(self, rank: int) -> None:
        self.peer = 1 - rank

    def start(self, sent: torch.Tensor | None, room: torch.Tensor | None) -> list[Callable[[], object]]:
        works = [] if room is None else [dist.irecv(room, self.peer)]
        return [work.wait for work in works + ([] if sent is None else [dist.isend(sent, self.peer)])]

    def close(self) -> None:
        pass


def finish(waits: list[Callable[[], object]]) -> None:
    for wait in waits:
        wait()


def one_way_gbytes_per_s(way: OverLink | OverGloo, rank: int, big: torch.Tensor, room: torch.Tensor) -> float:
    """Of four messages, until the last is there and its sender may use the memory again."""
    dist.barrier()
    begin = time.perf_counter()
    finish([wait for _ in range(4) for wait in (way.start(None, room) if rank else way.start(big, None))])
    dist.barrier()
    return 4 * big.nbytes / (time.perf_counter() - begin) / 1e9


def both_ways_gbytes_per_s(way: OverLink | OverGloo, rank: int, big: torch.Tensor, room: torch.Tensor) -> float:
    dist.barrier()
    begin = time.perf_counter()
    finish([wait for _ in range(4) for wait in way.start(big, room)])
    dist.barrier()
    return 8 * big.nbytes / (time.perf_counter() - begin) / 1e9


def round_trip_us(way: OverLink | OverGloo, rank: int, big: torch.Tensor, room: torch.Tensor) -> float:
    ping, pong = torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(NUM_TRIPS):
        for is_turn in (rank == 0, rank == 1):
            finish(way.start(ping, None) if is_turn else way.start(None, pong))
    return (time.perf_counter() - begin) / NUM_TRIPS * 1e6


MEASURES = (one_way_gbytes_per_s, both_ways_gbytes_per_s, round_trip_us)


def work(rank: int, args: argparse.Namespace, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    ways: dict[str, OverLink | OverGloo] = {"gloo": OverGloo(rank)}
    for count in args.connections:
        ways[f"link, {count} connections"] = OverLink(rank, None, count)
        tls = TLS(*(Path(folder) / name for name in ("rank.pem", "rank.key", "authority.pem")))
        ways[f"link, TLS, {count} connections"] = OverLink(rank, tls, count)
    big, room = (
        torch.ones(args.megabytes * 10**6, dtype=torch.uint8),
        torch.zeros(args.megabytes * 10**6, dtype=torch.uint8),
    )
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for round_number in range(args.rounds + 1):  # the first one warms up
        for name, way in ways.items():
            for measure in MEASURES:
                value = measure(way, rank, big, room)
                if round_number:
                    found[name, measure.__name__].append(value)
    if rank == 0:
        for name in ways:
            record: dict[str, object] = {"way": name, "megabytes": args.megabytes, "rounds": args.rounds}
            for measure in MEASURES:
                quartiles = statistics.quantiles(found[name, measure.__name__], n=4, method="inclusive")
                record[measure.__name__] = [float(f"{one:.3g}") for one in quartiles]
            print(json.dumps(record), flush=True)
    dist.barrier()
    closing = [threading.Thread(target=way.close) for way in ways.values()]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 4], help="numbers to compare")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        certificates(Path(folder))
        torch.multiprocessing.spawn(work, (args, folder), nprocs=2)


if __name__ == "__main__":
    main()
