# SPDX-License-Identifier: Apache-2.0
"""The `show` subcommand: prints the record of a run as tables."""

import argparse
import html
import json
from pathlib import Path

from ds_hybridep.commands.page import write_page
from ds_hybridep.commands.record import format_run_record
from ds_hybridep.errors import ConfigError

HELP = "print the record of a run as tables; why a planned run had its plan"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("record", type=Path, metavar="RUN.json", help='what the run wrote at its "report_file"')
    parser.add_argument("--html", type=Path, metavar="FILE", help="write it as a page for a browser too")


def run(args: argparse.Namespace) -> int:
    """Raises ConfigError if the file is no record of a run."""
    try:
        text = format_run_record(json.loads(args.record.read_text()))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"RUN.json: {args.record} is no record of a run, or of another version ({reason}); give the file that "
            f"the run wrote at its report_file"
        ) from error
    if args.html is not None:
        write_page(args.html, "A run with ds_hybridep", f"<pre>{html.escape(text)}</pre>")
    print(text)
    return 0
