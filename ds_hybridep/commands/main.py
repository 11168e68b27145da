# SPDX-License-Identifier: Apache-2.0
"""The program `ds_hybridep`: predicts plans, measures links, emulates datacentres, reports on runs, exports models.

The module of a subcommand has its name, HELP, `add_arguments` and `run`, which returns the exit code.
"""

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from ds_hybridep.commands import export, lab, meet, plan, probe, report, show, simulate
from ds_hybridep.errors import HybridEPError
from ds_hybridep.version import __version__

EXIT_MISUSED = 2  # as argparse does
EXIT_INTERRUPTED = 130  # as shells have it for SIGINT and SIGPIPE
EXIT_BROKEN_PIPE = 141


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the whole usage."""

    def error(self, message: str) -> NoReturn:
        option = re.match(r"argument (--[\w-]+)", message)
        action = self._option_string_actions.get(option[1]) if option else None
        if action is not None and action.choices and "choose from" not in message:
            message += f" of {', '.join(map(str, action.choices))}"
        self.exit(EXIT_MISUSED, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one subcommand.

    Returns its exit code: 2 with the error on stderr, 130 after Ctrl-C, 141 if nobody reads the output any more.
    """
    parser = _Parser(
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
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # of `ds_hybridep plan | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # takes what is still to be written at exit
        return EXIT_BROKEN_PIPE
    except HybridEPError as error:
        print(f"ds_hybridep: {error}", file=sys.stderr)
        return EXIT_MISUSED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
