# SPDX-License-Identifier: Apache-2.0
"""The `show` subcommand: prints the record of a run as tables."""

import argparse
import html
import json
from pathlib import Path

from ds_hybridep.commands.record import format_run_record
from ds_hybridep.errors import ConfigError

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>
<body style="margin: 2em; color-scheme: light dark"><h1>{title}</h1><pre style="white-space: pre-wrap">{text}</pre>
</body></html>
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `show` to the subcommands of the program."""
    parser = subparsers.add_parser("show", help="print the record of a run as tables; why a planned run had its plan")
    parser.add_argument("record", type=Path, metavar="RUN.json", help='what the run wrote at its "report_file"')
    parser.add_argument("--html", type=Path, metavar="FILE", help="write it as a page for a browser too")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Prints the record as text.  Returns 0.  Raises ConfigError if the file is no record of a run."""
    try:
        text = format_run_record(json.loads(args.record.read_text()))
        if args.html is not None:
            write_page(args.html, text)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"RUN.json: {args.record} is no record of a run, or of another version ({reason}); give the file that "
            f"the run wrote at its report_file"
        ) from error
    print(text)
    return 0


def write_page(path: Path, text: str) -> None:
    """Write tables as a page that needs no other file."""
    path.write_text(PAGE.format(title="A run with ds_hybridep", text=html.escape(text)), encoding="utf-8")
