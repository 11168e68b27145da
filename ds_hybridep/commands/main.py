# SPDX-License-Identifier: Apache-2.0
"""The program `ds_hybridep`: predicts plans, measures links, emulates datacentres, reports on runs, exports models.

The module of a subcommand has its name, HELP, `add_arguments` and `run`, which returns the exit code.
"""

import argparse
import sys
from collections.abc import Sequence

from ds_hybridep.commands import export, lab, meet, plan, probe, report, show, simulate
from ds_hybridep.errors import HybridEPError
from ds_hybridep.version import __version__

EXIT_MISUSED = 2  # as argparse does


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand. Returns its exit code, 2 with the error on stderr, or 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="ds_hybridep", description="Tools for training Mixture-of-Experts models with DeepSpeed over slow links."
    )
    parser.add_argument("--version", action="version", version=f"ds_hybridep {__version__}")
    # DeepSpeed's launcher passes this before all other arguments.
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    subparsers = parser.add_subparsers(required=True, metavar="SUBCOMMAND")
    for command in (plan, simulate, probe, lab, report, show, export, meet):
        subparser = subparsers.add_parser(
            command.__name__.rpartition(".")[2],
            help=command.HELP,
            description=getattr(command, "DESCRIPTION", None),
            epilog=getattr(command, "EXAMPLE", None),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except HybridEPError as error:
        print(f"ds_hybridep: {error}", file=sys.stderr)
        return EXIT_MISUSED
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
