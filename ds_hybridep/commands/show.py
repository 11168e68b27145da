# SPDX-License-Identifier: Apache-2.0
"""The `show` and `explain` subcommands: print the record of a run, or write it as a page."""

import argparse
import json
from pathlib import Path

from ds_hybridep.commands.page import write_page
from ds_hybridep.commands.record import explain_plan, format_run_record
from ds_hybridep.errors import ConfigError


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `show` and `explain` to the subcommands of the program."""
    for name, what, describe in (
        ("show", "print the record of a run as a table", format_run_record),
        ("explain", "say why a planned run had its plan: predicted beside measured", explain_plan),
    ):
        parser = subparsers.add_parser(name, help=what)
        parser.add_argument("record", type=Path, metavar="RUN.json", help='what the run wrote at its "report_file"')
        if name == "show":
            parser.add_argument("--html", type=Path, metavar="FILE", help="write it as a page for a browser too")
        parser.set_defaults(run=run, describe=describe, html=None)


def run(args: argparse.Namespace) -> int:
    """Prints the record as text.  Returns 0.  Raises ConfigError if the file is no record of a run."""
    try:
        record = json.loads(args.record.read_text())
        text = args.describe(record)
        if args.html is not None:
            write_page(args.html, record)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"RUN.json: {args.record} is no record of a run, or of another version ({reason}); give the file that "
            f"the run wrote at its report_file"
        ) from error
    print(text)
    return 0
