# SPDX-License-Identifier: Apache-2.0
"""The `probe` subcommand: measures links between ranks, and their devices, and writes a cluster file."""

import argparse
import json
import os
import re
import sys
from dataclasses import astuple, replace
from pathlib import Path

from ds_hybridep.errors import ConfigError
from ds_hybridep.geometry.cluster import Cluster, Level, LinkSpeed
from ds_hybridep.plan.codec_costs import DeviceRates
from ds_hybridep.plan.paste import level_settings

LIMIT_S = 10.0
BBR = "bbr"
MANY = 8  # connections to try between two ranks over a long link
LONG_S = 0.002  # a link is long if its one-way latency is at least this
GAIN = 1.25  # other connections are kept if they are faster by more than this factor
TIMEOUT_S = 120.0
LEVEL = re.compile(r"(?:([A-Za-z_]\w*)=)?([1-9]\d*)")

HELP = "measure links between ranks, and their devices, and write a cluster file"
DESCRIPTION = """\
Measures latency and bandwidth of every level, and how fast the ranks' devices are at what codecs do: GPUs, if there
are any. Writes a cluster file, which `ds_hybridep plan --cluster` and "levels" in the hybridep block read. Start it as
a training script is started, one process per rank.
"""
EXAMPLE = """\
examples:
  deepspeed --hostfile hosts --no_python ds_hybridep probe --levels dc=2,gpu=8 --out cluster.yaml
  ds_hybridep lab --dcs 2x2 --wan 100mbit -- ds_hybridep probe --levels dc=2,gpu=2 --out cluster.yaml
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--levels", required=True, metavar="NAME=SIZE,...", help="levels of the job, slowest first, such as dc=2,gpu=8"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="cluster file to write")
    parser.add_argument("--local_rank", type=int, default=0, help=argparse.SUPPRESS)  # DeepSpeed's launcher sets it


def run(args: argparse.Namespace) -> int:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import torch

    from ds_hybridep.adaptive.device import measure_device
    from ds_hybridep.adaptive.probe import LinkProbe, probe_links
    from ds_hybridep.link import LinkOptions
    from ds_hybridep.transport.agreement import agree
    from ds_hybridep.transport.channels import Transport
    from ds_hybridep.transport.job import join_job, leave_job

    cluster = read_levels(args.levels)
    join_job(TIMEOUT_S)
    try:
        levels = [f"{level.name}={level.size}" for level in cluster.levels]
        transport = Transport(cluster, TIMEOUT_S, agree({"levels": levels}, TIMEOUT_S))
        if transport.world_size != cluster.num_ranks:
            raise ConfigError(
                f"--levels: {','.join(levels)} make {cluster.num_ranks} ranks, but the job has {transport.world_size}"
            )
        _say(transport.rank, f"measuring {', '.join(levels)}")
        probe = LinkProbe(transport)
        found = probe_links(probe, limit_s=LIMIT_S)
        device = torch.device("cuda", args.local_rank) if torch.cuda.is_available() else torch.device("cpu")
        rates = measure_device(device)
        slowest = [min(of_all) for of_all in zip(*probe.table([*astuple(rates)]), strict=True)]
        has_bbr = all(answer for (answer,) in probe.table([not LinkOptions(congestion_control=BBR).why_refused()]))
        transport.close()
        # Measure long links again with other connections, which carry more where frames get lost.
        for other in (LinkSpeed(congestion_control=BBR), LinkSpeed(connections=MANY)):
            tried = with_connections(found, other)
            if tried != found and (has_bbr or other.congestion_control is None):
                kind = other.congestion_control or other.connections
                _say(transport.rank, f"measuring long links again, with {kind} connections")
                transport = Transport(tried, TIMEOUT_S, agree({"levels": levels}, TIMEOUT_S))
                found = better_of(found, probe_links(LinkProbe(transport), limit_s=LIMIT_S))
                transport.close()
        if transport.rank == 0:
            text = cluster_file(found, DeviceRates(*slowest))
            print(text, end="", flush=True)
            if args.out is not None:
                args.out.parent.mkdir(parents=True, exist_ok=True)
                args.out.write_text(text, encoding="utf-8")
    finally:
        leave_job()
    return 0


def _say(rank: int, doing: str) -> None:
    """Rank 0 says what happens.  Launchers put words before each line, so this is no progress bar."""
    if rank == 0:
        print(f"{doing}: about {LIMIT_S:g} s", file=sys.stderr, flush=True)


def with_connections(cluster: Cluster, like: LinkSpeed) -> Cluster:
    """The cluster with other connections over its long links."""
    levels = list(cluster.levels)
    for index, level in enumerate(levels):
        if level.size > 1 and (level.link.latency_s or 0.0) >= LONG_S:
            link = replace(level.link, connections=like.connections, congestion_control=like.congestion_control)
            levels[index] = replace(level, link=link)
    return Cluster(tuple(levels))


def better_of(one: Cluster, several: Cluster) -> Cluster:
    """Takes each level from `several` if its link is clearly faster there, else from `one`."""
    return Cluster(
        tuple(
            b if (b.link.bandwidth_bytes_per_s or 0.0) > GAIN * (a.link.bandwidth_bytes_per_s or 0.0) else a
            for a, b in zip(one.levels, several.levels, strict=True)
        )
    )


def read_levels(text: str) -> Cluster:
    """Parses levels such as "dc=2,gpu=8".  Raises ConfigError for other text."""
    levels = []
    for index, part in enumerate(text.split(",")):
        match = LEVEL.fullmatch(part.strip())
        if match is None:
            raise ConfigError(f"--levels: got '{part}', wanted NAME=SIZE, as in dc=2,gpu=8")
        levels.append(Level(match[1] or f"level{index}", int(match[2])))
    return Cluster(tuple(levels))


def cluster_file(cluster: Cluster, device: DeviceRates) -> str:
    """The text of a cluster file: the levels and their links, and the slowest device, as JSON, which is also YAML.

    Rates of links are of one child's uplink in one direction, headers included.
    """
    of_device = {
        "memory_gb_per_s": round(device.memory_bytes_per_s / 1e9, 3),
        "product_tflops": round(device.product_flops_per_s / 1e12, 6),
    }
    levels = [level_settings(level) for level in cluster.levels]
    return json.dumps({"levels": levels, "device": of_device}, indent=2) + "\n"
