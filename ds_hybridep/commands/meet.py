# SPDX-License-Identifier: Apache-2.0
"""`ds_hybridep meet`: the meeting point of sites, and what operators ask of a running one."""

import argparse
import contextlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from ds_hybridep.errors import ConfigError, SiteError
from ds_hybridep.link import TLS, read_secret
from ds_hybridep.plan.words import aligned
from ds_hybridep.sites.meeting import Meeting, Record
from ds_hybridep.sites.meeting_server import Server, read_record, write_record
from ds_hybridep.sites.member import ask_as_operator
from ds_hybridep.sites.protocol import split_address

HELP = "run the meeting point of sites that train one model"
ORDERS = ("status", "drop", "new_run", "run", "accept_step")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=int, help="port to listen on; all sites must reach it")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default: all of IPv4; ::: all)")
    parser.add_argument("--secret-file", type=Path, required=True, help="the file of sites.secret_file")
    parser.add_argument("--folder", type=Path, help="keeps here how far the run is, for the next meeting point")
    parser.add_argument("--metrics-port", type=int, help="answer HTTP here, with metrics for Prometheus")
    for name in ("certificate", "key", "authority"):
        parser.add_argument(f"--{name}", type=Path, help=f"for TLS, as hybridep.link.tls.{name}")
    asked = parser.add_argument_group("of a running meeting point")
    asked.add_argument("--connect", metavar="HOST:PORT", help="where it runs (default: this host and --port)")
    asked.add_argument("--status", action="store_true", help="print who is there")
    asked.add_argument("--json", action="store_true", help="print it as JSON")
    asked.add_argument("--drop", metavar="SITE", help="give a site up; the others go on without it")
    asked.add_argument("--new-run", action="store_true", help="let the next start begin a new run")
    asked.add_argument("--run", metavar="RUN", dest="run_name", help="let the next start go on with this run")
    asked.add_argument(
        "--accept-step", type=int, metavar="N", help="let the next start go on from step N, and lose later ones"
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until interrupted, or ask a meeting point that runs."""
    files = arguments.certificate, arguments.key, arguments.authority
    if any(files) and not all(files):
        raise ConfigError(
            "meet: TLS needs all of --certificate, --key and --authority; give the missing ones, or none"
        )
    tls = TLS(*files) if all(files) else None
    secret = read_secret(arguments.secret_file, "--secret-file")
    if (order := _order_of(arguments)) is not None:
        return _ask(arguments, order, secret, tls)
    if arguments.port is None:
        raise ConfigError("meet: --port is missing; give the port to listen on")
    record, folder = Record(), arguments.folder
    if folder is not None:
        record = read_record(folder)
        said = f"run {record.run}, step {record.step}, epoch {record.epoch}" if record.run else "no run yet"
        _say(f"keeps how far the run is in {folder}: {said}")
    else:
        _say("without --folder, this meeting point forgets the run when it ends")
    meeting = Meeting(record, save=lambda one: None if folder is None else write_record(folder, one), log=_say)
    server = Server(meeting, secret, None if tls is None else tls.contexts()[1], _say)
    with contextlib.suppress(KeyboardInterrupt):
        server.run(arguments.host, arguments.port, arguments.metrics_port)
    return 0


def _order_of(arguments: argparse.Namespace) -> dict[str, Any] | None:
    """Return what is asked of a running meeting point; None if one is to be run here."""
    if arguments.drop is not None:
        return {"op": "drop", "site": arguments.drop}
    if arguments.new_run or arguments.run_name or arguments.accept_step is not None:
        run_name = "new" if arguments.new_run else arguments.run_name or ""
        return {"op": "orders", "run": run_name, "step": arguments.accept_step}
    return {"op": "status"} if arguments.status or arguments.json else None


def _ask(arguments: argparse.Namespace, order: dict[str, Any], secret: bytes, tls: TLS | None) -> int:
    if arguments.connect is None and arguments.port is None:
        raise ConfigError("meet: where does the meeting point run? give --connect HOST:PORT, or --port for this host")
    address = split_address(arguments.connect) if arguments.connect else ("localhost", arguments.port)
    try:
        answer = ask_as_operator(address, order, secret=secret, context=None if tls is None else tls.contexts()[0])
    except (OSError, ValueError) as error:
        raise SiteError(
            f"meet: the meeting point {address[0]}:{address[1]} does not answer: {error}; is it running there, with "
            f"the same secret and TLS files?"
        ) from None
    if "text" in answer:
        print(answer["text"])
    elif arguments.json:
        print(json.dumps(answer, indent=2))
    else:
        print(format_status(answer))
    return 0


def format_status(status: dict[str, Any]) -> str:
    """Return a meeting point's status as a table."""
    run = f"run {status['run']}, step {status['step']}" if status["run"] else "no run yet"
    rows = [["site", "state", "step", "silent", "waits for"]]
    for name, site in status["sites"].items():
        silent = "" if site["silent_s"] is None else f"{site['silent_s']:.0f} s"
        cut = "" if site["is_connected"] or site["state"] == "absent" else ", cut off"
        step = "" if site["step"] is None or site["state"] == "joiner" else str(site["step"])
        rows.append([name, site["state"] + cut, step, silent, site["waits_for"]])
    lines = [f"epoch {status['epoch']}, {run}"]
    lines.append(aligned(rows, left=(0, 1, 4)) if status["sites"] else "no site has come yet")
    if status["waits_for"]:
        lines.append(f"waiting: {status['waits_for']}")
    if status["save_error"]:
        lines.append(f"the record of the run cannot be written: {status['save_error']}")
    return "\n".join(lines)


def _say(text: str) -> None:
    """Print a line; a full disk or a closed terminal ends no training."""
    line = f"{time.strftime('%H:%M:%S')} {text}"
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            print(line, file=stream, flush=True)
            return
