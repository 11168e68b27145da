# SPDX-License-Identifier: Apache-2.0
"""The `lab` subcommand: reads its arguments, runs the command on emulated hosts, prints and writes the result."""

import argparse
import json
import sys
from pathlib import Path

from ds_hybridep.errors import ConfigError, LabError
from ds_hybridep.lab.launcher import LabResult, ended_by_signals, format_result, log_folder, run_on_loopback, run_ranks
from ds_hybridep.lab.modelled import modelled_wan
from ds_hybridep.lab.network import EmulatedNetwork, why_not_permitted
from ds_hybridep.lab.topology import LinkSpec, Topology, parse_duration, parse_rate, parse_schedule, parse_share
from ds_hybridep.lab.unprivileged import become_root

EXIT_FAILED = 1
EXIT_TIMED_OUT = 124  # as `timeout` does

INSTEAD = "To run on loopback and compute what the WAN would cost, add --modelled."
DESCRIPTION = """\
Runs a training script, unchanged, with one rank per emulated host. Hosts of one datacentre are joined by a fast
link, datacentres by slow ones: every datacentre's uplink has the rate of --wan in each direction, and --delay passes
on the way from one datacentre to another, so a round trip takes twice that. Needs Linux with iproute2. Who is not root
works in a user namespace where the system permits it. A delay, jitter or loss needs root, and a C compiler once.
"""
EXAMPLE = """\
example:
  ds_hybridep lab --dcs 2x2 --wan 200mbit --delay 10ms -- \\
      python examples/train_lm.py --deepspeed_config ds_configs/two_dcs_2x2.json
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `lab` to the subcommands of the program."""
    parser = subparsers.add_parser(
        "lab",
        help="run a training script on emulated datacentres",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--dcs", required=True, metavar="DCxHOSTS", help="datacentres x hosts in each, such as 2x2")
    parser.add_argument(
        "--wan", required=True, metavar="RATE", help="bandwidth of each datacentre's uplink, such as 200mbit"
    )
    parser.add_argument("--delay", default="0", metavar="TIME", help="one-way delay between datacentres, such as 10ms")
    parser.add_argument("--jitter", default="0", metavar="TIME", help="random extra delay of up to this, such as 5ms")
    parser.add_argument(
        "--loss", default="0", metavar="SHARE", help="share of frames lost between datacentres, such as 1%%"
    )
    parser.add_argument("--lan", metavar="RATE", help="bandwidth of each host's link; not limited by default")
    parser.add_argument("--lan-delay", default="0", metavar="TIME", help="one-way delay between hosts of a datacentre")
    parser.add_argument(
        "--schedule",
        default="",
        metavar="EVENTS",
        help='changes while it runs: "30s:50mbit,60s:cut@1,65s:restore@1"; @N means only the uplink of datacentre N',
    )
    parser.add_argument("--timeout", default="600s", metavar="TIME", help="kill all ranks after this; default 600s")
    parser.add_argument("--log-dir", type=Path, help="folder for rank0.log, ...; default: a new temporary folder")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument(
        "--modelled",
        action="store_true",
        help="where namespaces are not permitted: run on loopback instead, with no link limited; "
        "what is printed about the WAN is then computed, not measured",
    )
    parser.add_argument("--run-record", type=Path, metavar="FILE", help="with --modelled: the run's report_file")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND ...", help="what each rank runs")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the parsed command line.  Returns 0, 1 if a rank failed, or 124 if the time limit was reached."""
    topology = Topology.parse(args.dcs)
    links = LinkSpec(
        wan_bits_per_s=parse_rate(args.wan, "--wan"),
        wan_delay_s=parse_duration(args.delay, "--delay"),
        lan_bits_per_s=None if args.lan is None else parse_rate(args.lan, "--lan"),
        lan_delay_s=parse_duration(args.lan_delay, "--lan-delay"),
        wan_jitter_s=parse_duration(args.jitter, "--jitter"),
        wan_loss=parse_share(args.loss, "--loss"),
    )
    schedule = parse_schedule(args.schedule, topology)
    timeout_s = parse_duration(f"{args.timeout}s" if args.timeout.strip().isdecimal() else args.timeout, "--timeout")
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise ConfigError("command: nothing to run; put it behind --, as in `ds_hybridep lab ... -- python train.py`")
    if args.run_record is not None and not args.modelled:
        raise ConfigError("--run-record: only --modelled reads it; on emulated hosts the WAN is measured")
    if args.modelled and schedule:
        raise ConfigError("--schedule: with --modelled there is no link that could change")
    if not args.modelled:
        _become_root()
    with log_folder(args.log_dir) as log_dir, ended_by_signals():
        if args.modelled:
            print("modelled: all ranks run on loopback and no link is limited", flush=True)
            result = run_on_loopback(
                command, num_ranks=topology.num_ranks, log_dir=log_dir, timeout_s=timeout_s, live=sys.stdout
            )
            if args.run_record is not None and result.is_success:
                print(modelled_wan(json.loads(args.run_record.read_text()), topology, links))
        elif reason := why_not_permitted(with_delay=bool(links.needs_delay_line or links.lan_delay_s)):
            raise LabError(f"{reason}\n{INSTEAD}")
        else:
            with EmulatedNetwork(topology, links) as network:
                result = run_ranks(
                    network, command, log_dir=log_dir, timeout_s=timeout_s, schedule=schedule, live=sys.stdout
                )
        _report(result, args, log_dir)
    if result.is_success:
        return 0
    return EXIT_TIMED_OUT if result.timed_out else EXIT_FAILED


def _become_root() -> None:
    try:
        become_root()
    except LabError as error:
        raise LabError(f"{error}\n{INSTEAD}") from error


def _report(result: LabResult, args: argparse.Namespace, log_dir: Path) -> None:
    print(f"\n{format_result(result)}\nlogs: {log_dir}", flush=True)
    if not result.is_success:
        for rank in result.failed_ranks[:1]:
            print(f"\nend of the log of rank {rank}:\n{result.tail_of_log(rank)}", file=sys.stderr)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        record = {"label": "modelled" if args.modelled else "measured", **result.to_record()}
        args.json.write_text(json.dumps(record, indent=2) + "\n")
