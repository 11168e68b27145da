# SPDX-License-Identifier: Apache-2.0
"""The `lab` subcommand: reads its arguments, runs the command on emulated hosts, prints the result."""

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from ds_hybridep.errors import ConfigError
from ds_hybridep.lab.launcher import run_ranks
from ds_hybridep.lab.namespaces import become_root
from ds_hybridep.lab.network import EmulatedNetwork
from ds_hybridep.lab.topology import LinkSpec, Topology, parse_duration, parse_rate, parse_share

EXIT_FAILED = 1
EXIT_TIMED_OUT = 124  # as `timeout` does

HELP = "run a training script on emulated datacentres"
DESCRIPTION = """\
Runs a training script, unchanged, with one rank per emulated host. Hosts of one datacentre are joined by a fast
link, datacentres by slow ones: every datacentre's uplink has the rate of --wan in each direction, and --delay passes
on the way from one datacentre to another, so a round trip takes twice that. Needs Linux with iproute2. Who is not root
works in a user namespace where the system permits it. A delay or loss needs root, and a C++ compiler once.
"""
EXAMPLE = """\
example:
  ds_hybridep lab --dcs 2x2 --wan 200mbit --delay 10ms -- \\
      python examples/train_lm.py --deepspeed_config ds_configs/two_dcs_2x2.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--dcs", required=True, metavar="DCxHOSTS", help="datacentres x hosts in each, such as 2x2")
    add("--wan", required=True, metavar="RATE", help="bandwidth of each datacentre's uplink, such as 200mbit")
    add("--delay", default="0", metavar="TIME", help="one-way delay between datacentres, such as 10ms")
    add("--loss", default="0%", metavar="SHARE", help="share of frames lost between datacentres, such as 1%%")
    add("--timeout", default="600s", metavar="TIME", help="kill all ranks after this; default 600s")
    add("--log-dir", type=Path, help="folder for rank0.log, ...; default: a new temporary folder")
    add("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="what each rank runs")


def run(args: argparse.Namespace) -> int:
    """Returns 0, 1 if a rank failed, or 124 if the time limit was reached."""
    topology = Topology.parse(args.dcs)
    links = LinkSpec(
        wan_bits_per_s=parse_rate(args.wan, "--wan"),
        wan_delay_s=parse_duration(args.delay, "--delay"),
        wan_loss=parse_share(args.loss, "--loss"),
    )
    timeout_s = parse_duration(args.timeout, "--timeout")
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise ConfigError("command: nothing to run; put it behind --, as in `ds_hybridep lab ... -- python train.py`")
    become_root()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    log_dir = args.log_dir or Path(tempfile.mkdtemp(prefix="ds_hybridep-lab-"))
    with EmulatedNetwork(topology, links) as network:
        result = run_ranks(network, command, log_dir=log_dir, timeout_s=timeout_s, live=sys.stdout)
    print(f"\n{result}\nlogs: {log_dir}", flush=True)
    for rank in result.failed_ranks[:1]:
        print(f"\nend of the log of rank {rank}:\n{result.tail_of_log(rank)}", file=sys.stderr)
    if result.is_success:
        return 0
    return EXIT_TIMED_OUT if result.timed_out else EXIT_FAILED


def _end(number: int, _frame: object) -> None:
    """SIGTERM and SIGHUP end this program by an exception, as Ctrl-C does, so that everything is taken down."""
    raise SystemExit(128 + number)
