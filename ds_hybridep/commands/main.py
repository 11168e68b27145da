# SPDX-License-Identifier: Apache-2.0
"""The program `ds_hybridep`: predicts plans, measures links, emulates datacentres, reports on runs and machines."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds_hybridep.commands import lab as lab_command
from ds_hybridep.commands import plan as plan_command
from ds_hybridep.commands import probe as probe_command
from ds_hybridep.commands import report as report_command
from ds_hybridep.commands import simulate as simulate_command
from ds_hybridep.errors import ConfigError, HybridEPError

EXIT_MISUSED = 2  # as argparse does


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand. Returns the exit code: 0, what the subcommand says, or 2 with the error on stderr."""
    parser = argparse.ArgumentParser(prog="ds_hybridep", description="Tools around expert migration for DeepSpeed.")
    subparsers = parser.add_subparsers(required=True, metavar="SUBCOMMAND")
    plan_command.add_parser(subparsers)
    simulate_command.add_parser(subparsers)
    probe_command.add_parser(subparsers)
    lab_command.add_parser(subparsers)
    report_command.add_parser(subparsers)
    show = subparsers.add_parser("show", help="print the record of a run as a table")
    show.add_argument("record", type=Path, metavar="RUN.json", help='what the run wrote at its "report_file"')
    show.set_defaults(run=_show)
    explain = subparsers.add_parser("explain", help="say why a planned run had its plan: predicted beside measured")
    explain.add_argument("record", type=Path, metavar="RUN.json", help='what the run wrote at its "report_file"')
    explain.set_defaults(run=_explain)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except HybridEPError as error:
        print(f"ds_hybridep: {error}", file=sys.stderr)
        return EXIT_MISUSED
    except KeyboardInterrupt:
        return 130


def _show(args: argparse.Namespace) -> int:
    from ds_hybridep.commands.show import format_run_record

    print(format_run_record(_read_record(args)))
    return 0


def _explain(args: argparse.Namespace) -> int:
    from ds_hybridep.commands.show import explain_plan

    print(explain_plan(_read_record(args)))
    return 0


def _read_record(args: argparse.Namespace) -> dict[str, Any]:
    try:
        record = json.loads(args.record.read_text())
    except OSError as error:
        raise ConfigError(f"RUN.json: {args.record} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"RUN.json: {args.record} is not JSON: {error}") from error
    if not isinstance(record, dict):
        raise ConfigError(
            f"RUN.json: {args.record} holds a {type(record).__name__}, wanted the object of a run record"
        )
    return record


if __name__ == "__main__":
    sys.exit(main())
