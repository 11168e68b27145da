# SPDX-License-Identifier: Apache-2.0
"""Where the gain comes from: each variant adds one thing to an earlier one, by rate and delay of the slow link.

    python -m benchmarks one-at-a-time --out benchmarks/results/one-at-a-time.jsonl --blocks 5 --minutes 60
    python -m benchmarks one-at-a-time --report benchmarks/results/one-at-a-time.jsonl --plots docs/images

Two emulated datacentres of two ranks train the byte-level model of examples/train_lm.py, 1024 tokens per rank and
step, fp32.  DeepSpeed, with each expert-parallel group inside a datacentre, runs with several settings (TUNINGS); the
fastest on a network is the first row there, picked by the blocks that are compared, which favours it by up to the
noise.  Ours are not tuned: ZeRO 1 with DeepSpeed's defaults.  So where DeepSpeed is fastest under ZeRO 0, which sends
less and takes more memory, the second row changes the stage too; the tables have all settings.

A block is a turn of every variant on one network, in a shuffled order that depends on the block only; a variant trains
one step, which is not timed, and then some that are.  Blocks of all networks take turns.  A sitting ends after
`--minutes`, and the same command goes on with the blocks that `--out` does not have yet.

Seconds are those of the slowest rank.  Bytes are counted by the uplinks of both datacentres, one direction, headers
included.  Ranks share the cores of one machine: what a datacentre of faster machines gains inside is not measured, and
routing is as even as the gate makes it, so hot experts have little to do here (`python -m benchmarks hot`).
"""

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import (
    OKABE_ITO,
    Record,
    Records,
    emulated,
    new_figure,
    plain_numbers,
    ratio,
    save_figure,
    table,
)
from benchmarks.sites import MEETING_PORT, TOPOLOGY, Job, Lab, Way, rank, secret_in, sites_block
from benchmarks.training import RECOMMENDED, Plan
from ds_hybridep.lab.topology import LinkSpec, parse_duration, parse_rate

__all__ = ["Job", "add_arguments", "rank", "report", "run"]

RATES = ("20mbit", "100mbit", "1000mbit", "none")
DELAYS = ("1ms", "30ms")
TUNED = "DeepSpeed, EP inside, tuned"
TUNINGS: dict[str, dict[str, Any]] = {  # of DeepSpeed; the fastest of a network counts
    "DeepSpeed, ZeRO 0": {"stage": 0},
    "DeepSpeed, ZeRO 1": {},
    "DeepSpeed, ZeRO 1, 4 buckets, overlap_comm": {"zero": {"buckets": 4, "overlap_comm": True}},
    "DeepSpeed, ZeRO 2, 16 buckets, overlap_comm": {"stage": 2, "zero": {"buckets": 16, "overlap_comm": True}},
}
SUMS, CODECS, DOMAINS = "+ hierarchical sums", "+ recommended codecs", "+ domains over both"
HOT, SITES = "+ hot experts", "sites, encoded"
BEFORE = {SUMS: TUNED, CODECS: SUMS, DOMAINS: CODECS, HOT: DOMAINS, SITES: CODECS}  # what each adds one thing to
SAME = ("rate", "delay", "hidden", "layers")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rates", nargs="+", default=list(RATES), help="of each DC's uplink; 'none': no limit")
    parser.add_argument("--delays", nargs="+", default=list(DELAYS), help="one way between DCs, above 0")
    parser.add_argument(
        "--variants",
        nargs="+",
        choices=(*TUNINGS, *BEFORE),
        default=[*TUNINGS, *BEFORE],
        help="the same in all sittings",
    )
    parser.add_argument("--blocks", type=int, default=5, help="of each network, in all sittings together")
    parser.add_argument("--minutes", type=float, default=60.0, help="of this sitting")
    parser.add_argument("--steps", type=int, default=4, help="of a block, that are timed")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0, help="of the orders")
    parser.add_argument("--plots", type=Path, help="folder for the plot of the report")


def variants(meeting_host: str, secret: Path) -> list[Way]:
    """All of them but sites share the processes of one job."""
    sizes, world = (TOPOLOGY.num_dcs, TOPOLOGY.hosts_per_dc), TOPOLOGY.num_ranks

    def ours(name: str, ep_size: int, domain_sizes: tuple[int, ...], slow: Mapping[str, Any], **fast: Any) -> Way:
        block = Plan(name, ep_size, domain_sizes, slow).block(sizes)
        block["levels"][-1].update(fast)
        return Way(name, block=block, is_split=False, job="one job", ep_size=ep_size)

    inside = sizes[1]
    return [
        *(Way(name, is_split=False, job="one job", **settings) for name, settings in TUNINGS.items()),
        ours(SUMS, inside, (1, 1), {}),
        ours(CODECS, inside, (1, 1), RECOMMENDED),
        ours(DOMAINS, world, (sizes[0], 1), RECOMMENDED),
        ours(HOT, world, (sizes[0], 1), RECOMMENDED, hot_experts="auto"),
        Way(SITES, block=sites_block(meeting_host, MEETING_PORT, secret, RECOMMENDED)),
    ]


def run(args: argparse.Namespace, records: Records) -> None:
    end = time.monotonic() + 60 * args.minutes
    networks = [(rate, delay) for rate in args.rates for delay in args.delays]
    done = {(one["params"]["block"], *place_of(one)) for one in records.go_on()}
    model = (args.hidden, args.layers)
    missing = [
        (block, *network) for block in range(args.blocks) for network in networks
        if (block, *network, *model) not in done
    ]  # fmt: skip
    if not missing:
        print("all blocks are measured")
        return
    longest = LinkSpec(wan_delay_s=max(parse_duration(delay, "--delays") for delay in args.delays))
    with tempfile.TemporaryDirectory() as scratch, emulated(TOPOLOGY, longest) as network, ExitStack() as stack:
        assert network is not None
        every = variants(network.topology.address_of(0), secret_in(Path(scratch)))
        lab = Lab([way for way in every if way.name in args.variants], network, Path(scratch), stack)
        for way in lab.ways:
            lab.block(way, 1)  # the start, and memory
        for block, rate, delay in missing:
            if time.monotonic() > end:
                print(f"the sitting is over; {len(missing)} blocks of networks were missing at its start")
                break
            network.set_wan_path(parse_duration(delay, "--delays"))
            network.set_wan_rate(None if rate == "none" else parse_rate(rate, "--rates"))
            order = random.Random(f"{args.seed} {block} {rate} {delay}").sample(lab.ways, len(lab.ways))
            found = {way.name: lab.block(way, args.steps) for way in order}
            for place, way in enumerate(order):  # together: a block is in the file as a whole, or not
                params = {"variant": way.name, "block": block, "place": place, "rate": rate, "delay": delay}
                params |= {"hidden": args.hidden, "layers": args.layers, "steps": args.steps, "seed": args.seed}
                records.add(params, **found[way.name])
            print(f"block {block}, {rate}, {delay}: done", flush=True)
        lab.end()


# ---- the report ----

Blocks = dict[str, dict[int, Record]]  # by variant and block


def place_of(record: Record) -> tuple[Any, ...]:
    """The network and the model of a record."""
    return tuple(record["params"][name] for name in SAME)


def by_place(records: list[Record]) -> dict[tuple[Any, ...], Blocks]:
    """Complete blocks of each place, with the fastest of DeepSpeed's settings under the name TUNED."""
    found: dict[tuple[Any, ...], Blocks] = {}
    for record in records:
        blocks = found.setdefault(place_of(record), {})
        blocks.setdefault(record["params"]["variant"], {})[record["params"]["block"]] = record
    for blocks in found.values():
        settings = [name for name in TUNINGS if name in blocks]
        if settings:
            blocks[TUNED] = blocks[min(settings, key=lambda name: seconds_of(blocks[name]))]
    return found


def seconds_of(blocks: Mapping[int, Record]) -> float:
    """The median of all timed steps."""
    return statistics.median(seconds for record in blocks.values() for seconds in record["each_s"])


def over(blocks: Blocks, name: str, other: str) -> str:
    """The ratio of step times, block by block, with its interval; empty where one is missing."""
    both = sorted(set(blocks.get(name, ())) & set(blocks.get(other, ())))
    if not both:
        return ""
    return str(ratio(*([blocks[one][block]["step_s"] for block in both] for one in (name, other))))


def cells(blocks: Blocks, name: str) -> list[str]:
    if name not in blocks:
        return [""] * 5
    of_blocks = [record["step_s"] for record in blocks[name].values()]
    every = sorted(seconds for record in blocks[name].values() for seconds in record["each_s"])
    tenth = len(every) // 10
    megabytes = statistics.median(record["wan_bytes_per_step"] for record in blocks[name].values()) / 1e6
    return [
        f"{statistics.median(every):.3f}", f"{every[tenth]:.3f} to {every[-1 - tenth]:.3f}", f"{megabytes:.3f}",
        over(blocks, name, BEFORE.get(name, "")), f"{len(of_blocks)}",
    ]  # fmt: skip


def shown(rate: str, delay: str) -> str:
    return f"{'no limit' if rate == 'none' else rate}, {delay}"


def report(records: list[Record], args: argparse.Namespace) -> str:
    """For each model: seconds and ratios by network, then the whole of each network, and DeepSpeed's settings."""
    texts = []
    places = by_place(records)
    for model in sorted({place[2:] for place in places}):
        networks = {place[:2]: blocks for place, blocks in places.items() if place[2:] == model}
        rows = [
            [name, *(f"{seconds_of(blocks[name]):.3f}" if name in blocks else "" for blocks in networks.values())]
            for name in (TUNED, *BEFORE)
        ]
        header = [shown(*network) for network in networks]
        texts.append(f"Hidden {model[0]}, {model[1]} layers. Seconds of a step, medians of all steps:\n")
        texts.append(table(["variant", *header], rows) + "\n")
        ratios = [
            [name, other, *(over(blocks, name, other) for blocks in networks.values())]
            for name, other in BEFORE.items()
        ]
        texts.append("Step time over that of an earlier row, median of blocks [95%]:\n")
        texts.append(table(["variant", "over", *header], ratios) + "\n")
        columns = ["variant", "seconds", "middle 80% of steps", "MB/step, WAN", "over the earlier [95%]", "blocks"]
        for network, blocks in networks.items():
            rows = [[name, *cells(blocks, name)] for name in (TUNED, *BEFORE, *TUNINGS) if name in blocks]
            texts.append(f"{shown(*network)}:\n\n{table(columns, rows)}\n")
        if args.plots:
            plot(networks, args.plots / f"one-at-a-time-{model[0]}x{model[1]}.svg")
    return "\n".join(texts)


def plot(networks: Mapping[tuple[Any, ...], Blocks], path: Path) -> None:
    """Seconds of each variant by network; strokes: the middle 80% of steps."""
    from matplotlib import ticker

    names = [name for name in (TUNED, *BEFORE) if any(name in blocks for blocks in networks.values())]
    colors = dict(zip((TUNED, *BEFORE), (*OKABE_ITO, "#56b4e9"), strict=True))
    figure, ax = new_figure(figsize=(11, 4.4))
    width = 0.8 / len(names)
    for at, name in enumerate(names):
        every = {
            place: sorted(seconds for record in blocks[name].values() for seconds in record["each_s"])
            for place, blocks in enumerate(networks.values()) if name in blocks
        }  # fmt: skip
        middle = [statistics.median(found) for found in every.values()]
        low = [one - found[len(found) // 10] for one, found in zip(middle, every.values(), strict=True)]
        high = [found[-1 - len(found) // 10] - one for one, found in zip(middle, every.values(), strict=True)]
        where = [place + (at - (len(names) - 1) / 2) * width for place in every]
        ax.errorbar(where, middle, (low, high), fmt="o", capsize=3, color=colors[name], label=name)
    ax.set(yscale="log", ylabel="seconds of a step")
    plain_numbers(ax)
    ax.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    ax.grid(axis="y", linewidth=0.4, alpha=0.6)
    ax.set_xticks(range(len(networks)), [shown(*network).replace(", ", "\n") for network in networks])
    ax.legend(frameon=False, fontsize=8, ncols=2)
    save_figure(
        figure, path,
        "4 CPU ranks in 2 emulated datacentres. Dots: medians of all steps; strokes: the middle 80% of them. Each "
        "variant adds one thing to the one before; sites, to codecs.",
    )  # fmt: skip
