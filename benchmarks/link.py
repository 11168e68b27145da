# SPDX-License-Identifier: Apache-2.0
"""What the link between two ranks does, and what the runtime costs where no link is slow.

    python -m benchmarks link goodput --congestion-control cubic bbr --out benchmarks/results/link-goodput.jsonl
    python -m benchmarks link messages
    python -m benchmarks link loopback --out benchmarks/results/link-loopback.jsonl

goodput   how much of a long link one or several connections fill, with BBR or CUBIC, with and without loss: two ranks
          on emulated hosts send each other one message
messages  GB/s in one direction and in both, and a round trip of 64 bytes, with and without TLS, beside gloo, on this
          machine
loopback  step time of MoE layers alone, DeepSpeed's and ours, on four ranks; DeepSpeed runs twice, so that the noise
          of the machine can be read off
"""

import argparse
import itertools
import statistics
import subprocess
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import ds_hybridep
from benchmarks.common import Record, Records, interleaved, ratio, run_job, table
from benchmarks.training import SIZES, Job, engine_of, moe_of
from ds_hybridep.lab.topology import LinkSpec, Topology, parse_duration, parse_rate
from ds_hybridep.link import TLS, URGENT, Link, LinkOptions

__all__ = ["Job", "add_arguments", "rank", "report", "run"]

RATE, DELAY = "1000mbit", "50ms"
NUM_TRIPS = 500
# Plans over two levels of two: domain sizes, and how tokens go; None: DeepSpeed.
PLANS: dict[str, tuple[tuple[int, int], str] | None] = {
    "deepspeed": None,
    "deepspeed again": None,
    "[1,1] direct": ((1, 1), "direct"),
    "[1,1] hierarchical": ((1, 1), "hierarchical"),
    "[2,1]": ((2, 1), "direct"),
    "[2,2]": ((2, 2), "direct"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", nargs="?", choices=("goodput", "messages", "loopback"), default="messages")
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 4], help="numbers to compare")
    parser.add_argument("--megabytes", type=int, default=32, help="of one message")
    parser.add_argument("--rounds", type=int, default=6)
    goodput = parser.add_argument_group("goodput")
    goodput.add_argument("--losses", nargs="+", default=["0%", "0.1%", "1%"], help="share of frames that are lost")
    goodput.add_argument("--congestion-control", nargs="+", default=["cubic"])
    steps = parser.add_argument_group("loopback")
    for name, default in (("hidden", 256), ("tokens", 1024), ("layers", 2), ("steps", 10)):
        steps.add_argument(f"--{name}", type=int, default=default)
    steps.add_argument("--kernels", default="auto")


def run(args: argparse.Namespace, records: Records) -> None:
    if args.what != "goodput":
        run_job("2x1" if args.what == "messages" else "2x2", None, records)
        return
    for loss in args.losses:
        links = LinkSpec(
            wan_bits_per_s=parse_rate(RATE, "rate"), wan_delay_s=parse_duration(DELAY, "delay"),
            wan_loss=float(loss.rstrip("%")) / 100,
        )  # fmt: skip
        run_job("2x1", links, records, "--losses", loss)


def rank(args: argparse.Namespace, job: Job) -> None:
    {"goodput": goodput, "messages": messages, "loopback": loopback}[args.what](args, job)
    job.end()


# ---- messages ----


class OverLink:
    """This rank's end of a link of two."""

    def __init__(self, rank: int, host: str, options: LinkOptions, tls: TLS | None = None) -> None:
        self.peer = 1 - rank
        self.link = Link(rank, 2, secret=bytes(32), host=host, tls=tls, timeout_s=60.0)
        addresses: list[tuple[str, int]] = [("", 0)] * 2
        dist.all_gather_object(addresses, self.link.address)
        self.link.connect(dict(enumerate(addresses)), options)
        self.bulk = self.link.channel("bulk", (0, 1))
        self.urgent = self.link.channel("urgent", (0, 1), priority=URGENT)

    def start(self, sent: Tensor | None, room: Tensor | None) -> list[Callable[[], object]]:
        channel = self.bulk if (room if sent is None else sent).nbytes > 2**16 else self.urgent
        receives = [] if room is None else [channel.receive(self.peer, room)]
        sends = [] if sent is None else [channel.send(self.peer, sent)]
        # A small message is copied when it is sent; nobody waits for its acknowledgement.
        return [one.wait for one in receives + (sends if channel is self.bulk else [])]


class OverGloo:
    def __init__(self, rank: int) -> None:
        self.peer = 1 - rank

    def start(self, sent: Tensor | None, room: Tensor | None) -> list[Callable[[], object]]:
        works = [] if room is None else [dist.irecv(room, self.peer)]
        return [work.wait for work in works + ([] if sent is None else [dist.isend(sent, self.peer)])]


def finish(waits: list[Callable[[], object]]) -> None:
    for wait in waits:
        wait()


def close(ways: list[Any]) -> None:
    """Both ends of all links at once: an end waits for the other."""
    dist.barrier()
    closing = [threading.Thread(target=way.link.close) for way in ways if isinstance(way, OverLink)]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()


def goodput(args: argparse.Namespace, job: Job) -> None:
    host = Topology(2, 1).address_of(job.rank)
    ways = {
        (count, control): OverLink(job.rank, host, LinkOptions(connections=count, congestion_control=control))
        for count in args.connections
        for control in args.congestion_control
    }
    found: dict[Any, list[float]] = defaultdict(list)
    for round_number in range(args.rounds + 1):  # the first one warms up
        for key, way in ways.items():
            sent, arriving = (torch.zeros(args.megabytes * 10**6, dtype=torch.uint8) for _ in range(2))
            dist.barrier()
            begin = time.perf_counter()
            finish(way.start(sent, arriving))
            seconds = torch.tensor([time.perf_counter() - begin])
            dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
            if round_number:
                found[key].append(seconds.item())
    for (count, control), taken in found.items():
        params = {"what": "goodput", "rate": RATE, "delay": DELAY, "wan_loss": args.losses[0]}
        params |= {"megabytes": args.megabytes, "congestion_control": control, "connections": count}
        job.record(params, seconds=taken)
    close(list(ways.values()))


def make_certificate(folder: Path, rank: int) -> TLS:
    """Return a certificate that is its own authority; that of rank 0 on both."""
    folders = [folder]
    dist.broadcast_object_list(folders)
    certificate, key = folders[0] / "certificate.pem", folders[0] / "key.pem"
    if rank == 0:
        words = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=rank "
        subprocess.run([*words.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    dist.barrier()
    return TLS(certificate, key, certificate)


def messages(args: argparse.Namespace, job: Job) -> None:
    ways: dict[str, Any] = {"gloo": OverGloo(job.rank)}
    with tempfile.TemporaryDirectory() as folder:
        tls = make_certificate(Path(folder), job.rank)
        for count, (name, files) in itertools.product(args.connections, (("link", None), ("TLS", tls))):
            ways[f"{name}, {count} connections"] = OverLink(
                job.rank, "127.0.0.1", LinkOptions(connections=count), files
            )
    big, room = (torch.ones(args.megabytes * 10**6, dtype=torch.uint8) for _ in range(2))
    small, answer = torch.zeros(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    is_first = job.rank == 0

    def one_way(way: Any) -> None:
        starts = [way.start(big, None) if is_first else way.start(None, room) for _ in range(4)]
        finish([wait for waits in starts for wait in waits])

    def both_ways(way: Any) -> None:
        finish([wait for _ in range(4) for wait in way.start(big, room)])

    def round_trips(way: Any) -> None:
        for is_turn in (is_first, not is_first) * NUM_TRIPS:
            finish(way.start(small, None) if is_turn else way.start(None, answer))

    found: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in ways}
    for round_number in range(args.rounds + 1):  # the first one warms up
        for (name, way), call in itertools.product(ways.items(), (one_way, both_ways, round_trips)):
            dist.barrier()
            begin = time.perf_counter()
            call(way)
            dist.barrier()
            if round_number:
                found[name][f"{call.__name__}_s"].append(time.perf_counter() - begin)
    for name in ways:
        job.record({"what": "messages", "way": name, "megabytes": args.megabytes, "trips": NUM_TRIPS}, **found[name])
    close(list(ways.values()))


# ---- steps over loopback ----


class Layers(nn.Module):
    """MoE layers only: everything else would dilute the comparison."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__()
        sizes = argparse.Namespace(**{**SIZES, "hidden": args.hidden, "ep_size": 4})
        expert = nn.Sequential(
            nn.Linear(args.hidden, 4 * args.hidden), nn.GELU(), nn.Linear(4 * args.hidden, args.hidden)
        )
        self.layers = nn.ModuleList(moe_of(sizes, expert) for _ in range(args.layers))

    def forward(self, x: Tensor) -> Tensor:
        total_aux = 0.0
        for layer in self.layers:
            y, aux, _ = layer(x)
            x, total_aux = x + y, total_aux + aux
        return x.square().mean() + 0.01 * total_aux


def loopback(args: argparse.Namespace, job: Job) -> None:
    """Plans in interleaved blocks; seconds from the earliest start to the latest end over ranks."""
    engines = {name: engine_for(args, plan) for name, plan in PLANS.items()}
    x = torch.randn(args.tokens, args.hidden, generator=torch.Generator().manual_seed(job.rank))

    def train(engine: Any, num_steps: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(num_steps):
            engine.backward(engine(x))
            engine.step()
        dist.barrier()
        return (time.perf_counter() - start) / num_steps

    step_s: dict[str, list[float]] = defaultdict(list)
    for engine in engines.values():
        train(engine, 3)
    for order in interleaved(list(engines), args.rounds):
        for name in order:
            step_s[name].append(train(engines[name], args.steps))
    for name, seconds in step_s.items():
        params = {one: getattr(args, one) for one in ("what", "hidden", "tokens", "layers", "steps", "kernels")}
        job.record({**params, "plan": name}, step_s=seconds)


def engine_for(args: argparse.Namespace, plan: tuple[tuple[int, int], str] | None) -> Any:
    torch.manual_seed(0)
    engine = engine_of(Layers(args), stage=0, rate=1e-4)
    if plan is not None:
        (dc, gpu), tokens = plan
        levels = [{"name": "dc", "size": 2, "domain_size": dc}, {"name": "gpu", "size": 2, "domain_size": gpu}]
        advanced = {"verify_interval": 0, "kernels": args.kernels}
        block = {"levels": levels, "token_exchange": tokens, "report_interval": 0, "advanced": advanced}
        ds_hybridep.attach(engine, block)
    return engine


# ---- reports ----


def report(records: list[Record], args: argparse.Namespace) -> str:
    of_kind: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        of_kind[record["params"]["what"]].append(record)
    tables = {"goodput": goodput_table, "messages": messages_table, "loopback": loopback_table}
    return "\n\n".join(tables[what](found) for what, found in of_kind.items())


def goodput_table(records: list[Record]) -> str:
    """Mbit/s each way, medians, with the range."""
    rows: dict[tuple[str, str], dict[int, str]] = defaultdict(dict)
    for record in records:
        params = record["params"]
        rates = sorted(8 * params["megabytes"] / seconds for seconds in record["seconds"])
        cell = f"{statistics.median(rates):.3g} ({rates[0]:.3g} to {rates[-1]:.3g})"
        rows[params["wan_loss"], params["congestion_control"]][params["connections"]] = cell
    counts = sorted({count for cells in rows.values() for count in cells})
    lines = [[*key, *(cells.get(count, "") for count in counts)] for key, cells in sorted(rows.items())]
    title = f"Mbit/s each way, medians with the range, at {RATE} and {DELAY}:\n\n"
    return title + table(["frames lost", "", *(f"{count} connections" for count in counts)], lines)


def messages_table(records: list[Record]) -> str:
    rows = []
    for record in records:
        params, cells = record["params"], []
        big_gb = 4e-3 * params["megabytes"]  # four messages at a time
        for taken, value in (
            ("one_way_s", lambda seconds, gb=big_gb: gb / seconds),
            ("both_ways_s", lambda seconds, gb=big_gb: 2 * gb / seconds),
            ("round_trips_s", lambda seconds, trips=params["trips"]: 1e6 * seconds / trips),
        ):
            low, median, high = statistics.quantiles(map(value, record[taken]), n=4, method="inclusive")
            cells.append(f"{median:.3g} ({low:.3g} to {high:.3g})")
        rows.append([params["way"], *cells])
    return "Medians and quartiles:\n\n" + table(["way", "GB/s one way", "GB/s both ways", "round trip, us"], rows)


def loopback_table(records: list[Record]) -> str:
    """Step time over DeepSpeed's, with 95% intervals."""
    cases: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        cases[tuple(record["params"][name] for name in ("tokens", "hidden"))].append(record)
    lines = []
    for (tokens, hidden), found in cases.items():
        rows = [
            [one["params"]["plan"], f"{1e3 * statistics.median(one['step_s']):.1f}",
             str(ratio(one["step_s"], found[0]["step_s"]))]
            for one in found
        ]  # fmt: skip
        header = ("plan", "ms/step", f"over {found[0]['params']['plan']}")
        lines.append(f"{tokens} tokens, hidden {hidden}:\n\n{table(header, rows)}")
    return "\n\n".join(lines)
