# SPDX-License-Identifier: Apache-2.0
"""`ds_hybridep meet`: the meeting point of sites."""

import argparse
import asyncio
import contextlib
import time
from pathlib import Path

from ds_hybridep.errors import ConfigError
from ds_hybridep.link import TLS, read_secret
from ds_hybridep.sites.meeting import serve

HELP = "run the meeting point of sites that train one model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, required=True, help="port to listen on; all sites must reach it")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default: all)")
    parser.add_argument("--secret-file", type=Path, required=True, help="the file of sites.secret_file")
    for name in ("certificate", "key", "authority"):
        parser.add_argument(f"--{name}", type=Path, help=f"for TLS, as hybridep.link.tls.{name}")


def run(arguments: argparse.Namespace) -> int:
    """Serve until interrupted."""
    files = arguments.certificate, arguments.key, arguments.authority
    if any(files) and not all(files):
        raise ConfigError(
            "meet: TLS needs all of --certificate, --key and --authority; give the missing ones, or none"
        )
    context = TLS(*files).contexts()[1] if all(files) else None
    secret = read_secret(arguments.secret_file, "--secret-file")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(arguments.host, arguments.port, secret, context, _say))
    return 0


def _say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
