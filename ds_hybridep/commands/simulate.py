# SPDX-License-Identifier: Apache-2.0
"""The `simulate` subcommand: simulates steps event by event and writes a table, JSON or a trace."""

import argparse
import json
from pathlib import Path

from ds_hybridep.commands import question as asking
from ds_hybridep.errors import ConfigError
from ds_hybridep.geometry.cluster import Cluster
from ds_hybridep.simulate import comparison
from ds_hybridep.simulate.scenario import Deviation

HELP = "simulate a step of plans event by event, on up to thousands of datacentres"
DESCRIPTION = """\
Simulates one training step of plans event by event: the best plan that `plan` finds, the ways to compare with, and the
domain sizes given with --domains. Takes the arguments of `plan` for cluster, model, training and machines.
"""
EXAMPLE = """\
example:
  ds_hybridep simulate --model Qwen3-30B-A3B --dcs 2x8 --wan 10gbps --delay 10ms --domains 2,1 --trace step.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    asking.add_arguments(parser)
    add = parser.add_argument_group("plans").add_argument
    add("--domains", action="append", default=[], metavar="N,N", help="also simulate these domain sizes")
    add = parser.add_argument_group("conditions").add_argument
    add(
        "--slow", action="append", default=[], metavar="PLACE:KEY=VALUE,...",
        help="a place that is slower: '3:bandwidth=0.5' halves the uplink of DC 3, '3.1:compute=2' doubles "
        "the seconds of its GPU 1; may be repeated",
    )  # fmt: skip
    add("--jitter", type=float, default=0.0, metavar="SHARE", help="random share that computations take longer")
    add = parser.add_argument_group("output of the simulation").add_argument
    add("--json", action="store_true", help="print JSON")
    add("--trace", type=Path, metavar="FILE.json", help="write a trace of the best plan, for Perfetto or Chrome")
    add("--rank", type=int, action="append", default=[], help="rank to trace; may be repeated; default 0")


def run(args: argparse.Namespace) -> int:
    question = asking.read_question(args)
    if args.jitter < 0:
        raise ConfigError(f"--jitter: got {args.jitter:g}, wanted at least 0")
    conditions = {"deviations": tuple(map(read_deviation, args.slow)), "jitter": args.jitter}
    domains = [read_domains(text, question.cluster) for text in args.domains]
    traced = list(dict.fromkeys(args.rank or [0])) if args.trace is not None else []
    for rank in traced:
        question.cluster.place_of(rank)  # raises for a rank that does not exist
    results = comparison.simulate_all(question, conditions, comparison.plans_of(question, domains), traced)
    if args.trace is not None:
        args.trace.write_text(json.dumps(comparison.chrome_trace(results[0].step)))
    answer = comparison.answer_json(question.cluster, results)
    print(json.dumps(answer, indent=2) if args.json else comparison.table(question, results))
    if args.trace is not None and not args.json:
        print(f"trace: {args.trace}")
    return 0


def read_deviation(text: str) -> Deviation:
    """Parses a slower place, such as "3.1:bandwidth=0.5,compute=2".  Raises ConfigError for other text."""
    names = {"bandwidth": "bandwidth_factor", "compute": "slowdown"}
    place, _, changes = text.partition(":")
    try:
        pairs = [part.split("=") for part in changes.split(",")]
        values = {names[key.strip()]: float(number) for key, number in pairs}
        coordinates = tuple(map(int, place.split(".")))
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"--slow: got '{text}', wanted a place and what is slower there, as in 3:bandwidth=0.5 or 3.1:compute=2"
        ) from error
    return Deviation(place=coordinates, **values)


def read_domains(text: str, cluster: Cluster) -> tuple[int, ...]:
    """Parses domain sizes such as "4,1".  Raises ConfigError for other text."""
    try:
        sizes = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--domains: got '{text}', wanted a size for each level, as in 2,1") from error
    if len(sizes) != len(cluster.levels):
        raise ConfigError(f"--domains: got '{text}', wanted a size for each of the levels {cluster}")
    return sizes
