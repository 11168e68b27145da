# SPDX-License-Identifier: Apache-2.0
"""What ranks do when one of them breaks: how long until all have ended, and whether each names the true cause.

    python -m benchmarks faults --out benchmarks/results/faults.jsonl        every case
    python -m benchmarks faults --faults kill stop --phases forward          some

Four ranks on emulated hosts of two datacentres train a tiny model; one breaks in the middle of a phase.  A case is
good if every rank that can end has done so in time, and the first line of each rank's error names the rank, the
datacentre or the link that broke.
"""

import argparse
import concurrent.futures
import itertools
import multiprocessing
import re
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from benchmarks.common import Record, Records, table
from benchmarks.disturbed import CODECS, KINDS, TOPOLOGY, Orders, Ranks, first_error
from ds_hybridep.lab.network import EmulatedNetwork
from ds_hybridep.lab.topology import LinkSpec

NAMED = {  # fault -> what the first line of each rank's error must say; {v}: the victim
    "kill": r"rank {v} ended without a word",
    "stop": r"rank {v} silent .* the process does not run",
    "exception": r"rank {v} failed: ValueError: a bad sample",
    "memory": r"rank {v} cannot start: MemoryError",
    "link": r"the link of level 'dc' between dc \d and dc \d",
    "dc": r"the link of level 'dc' between dc \d and dc \d is cut, or dc \d is down",
    "kill rank 0": r"rank {v} ended without a word",
}
PHASES = ("forward", "backward", "step", "save", "load")
TOLD = ("kill", "kill rank 0", "exception", "memory")  # the system tells of the end: a death, an exception
TOLD_LIMIT_S = 5.0
SILENT_EXTRA_S = 10.0  # beyond timeout_s
START_LIMIT_S = 120.0
Case = tuple[str, str, str, str]  # fault, phase, kind, codecs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name, choices in (("faults", tuple(NAMED)), ("phases", PHASES), ("kinds", KINDS), ("codecs", CODECS)):
        parser.add_argument(f"--{name}", nargs="+", default=list(choices), choices=choices)
    parser.add_argument("--timeout-s", type=float, default=8.0)
    parser.add_argument("--at-once", type=int, default=1, help="cases that run beside each other")
    parser.add_argument("--logs", type=Path, help="keep the ranks' logs here")


def run(args: argparse.Namespace, records: Records) -> int:
    cases = [
        (fault, phase, kind, codecs)
        for fault, kind, codecs in itertools.product(args.faults, args.kinds, args.codecs)
        for phase in (["attach"] if fault == "memory" else args.phases)
    ]
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.logs or Path(scratch)
        jobs = [(case, folder / re.sub(r"\W+", "-", " ".join(case)), args.timeout_s) for case in cases]
        context = multiprocessing.get_context("fork")
        with concurrent.futures.ProcessPoolExecutor(args.at_once, mp_context=context) as pool:
            for params, measured in pool.map(run_safely, jobs):
                records.add(params, **measured)
                print(show(records.rows[-1]), flush=True)
    good = sum(record["is_good"] for record in records.rows)
    print(f"{good} of {len(cases)} cases are good")
    return int(good < len(cases))


def run_safely(job: tuple[Case, Path, float]) -> tuple[dict[str, Any], dict[str, Any]]:
    params = {**dict(zip(("fault", "phase", "kind", "codecs"), job[0], strict=True)), "timeout_s": job[2]}
    try:
        return params, run_case(*job)
    except Exception:  # noqa: BLE001  one case must not end the table
        return params, {"is_good": False, "last_s": 0.0, "ranks": [], "failure": traceback.format_exc()}


def run_case(case: Case, folder: Path, timeout_s: float) -> dict[str, Any]:
    """What came of a case: seconds until each rank had ended, and its first error line."""
    folder.mkdir(parents=True)
    fault, phase, kind, codecs = case
    victim = 0 if fault == "kill rank 0" else TOPOLOGY.num_ranks - 1
    orders = Orders(folder, kind, codecs, timeout_s, fault=fault, phase=phase, victim=victim)
    limit_s = TOLD_LIMIT_S if fault in TOLD else timeout_s + SILENT_EXTRA_S
    with EmulatedNetwork(TOPOLOGY, LinkSpec()) as network:
        ranks = Ranks(network, orders, folder)
        try:
            broken_at = watch(ranks, network, orders, limit_s)
        finally:
            ranks.kill()
    expected = re.compile(NAMED[fault].format(v=victim))
    found, last_s = [], 0.0
    for rank, log in enumerate(ranks.logs):
        ended_at, status = ranks.ended[rank]
        seconds = None if broken_at is None else round(ended_at - broken_at, 2)
        line, is_victim = first_error(log), rank == victim and fault not in ("link", "dc")
        is_stopped = is_victim and fault == "stop"
        found.append({
            "rank": rank, "seconds": seconds, "status": status, "error": line[:200],
            "is_named": is_victim or bool(expected.search(line)),
            "is_in_time": is_stopped or (seconds is not None and seconds <= limit_s),
        })  # fmt: skip
        last_s = last_s if is_stopped else max(last_s, seconds or 0.0)
    is_good = all(one["is_named"] and one["is_in_time"] for one in found)
    return {"limit_s": limit_s, "last_s": last_s, "ranks": found, "is_good": is_good}


def watch(ranks: Ranks, network: EmulatedNetwork, orders: Orders, limit_s: float) -> float | None:
    """Until all have ended or twice the limit is over.  Returns when it broke."""
    begin, broken_at, broken = time.time(), None, orders.folder / "broken"
    while ranks.poll():
        if broken_at is None and broken.exists():
            broken_at = float(broken.read_text() or time.time())
            if orders.fault in ("link", "dc"):
                network.cut(None if orders.fault == "link" else 1)
                broken_at = time.time()
                (orders.folder / "cut").touch()
        if broken_at is None and time.time() - begin > START_LIMIT_S:
            return None
        if broken_at is not None and time.time() - broken_at > 2 * limit_s + 5:
            break
        if orders.fault == "stop" and broken_at is not None and len(ranks.ended) == len(ranks.pids) - 1:
            break
        time.sleep(0.02)
    return broken_at


def name_of(record: Record) -> str:
    return "{fault} in {phase}, {kind}, {codecs}".format(**record["params"])


def show(record: Record) -> str:
    if record["is_good"]:
        return f"ok   {record['last_s']:6.1f} s  {name_of(record)}"
    late = [one["rank"] for one in record["ranks"] if not one["is_in_time"]]
    errors = sorted({one["error"][:110] for one in record["ranks"] if not one["is_named"]})
    return f"FAIL {name_of(record)}  late: {late}  not named: {errors} {record.get('failure', '')}"


def report(records: list[Record], args: argparse.Namespace) -> str:
    """By fault; of cases that were run several times the last counts."""
    last = {name_of(record): record for record in records}
    rows = []
    for fault in NAMED:
        cases = [record for record in last.values() if record["params"]["fault"] == fault]
        if cases:
            ends = sorted(record["last_s"] for record in cases)
            limit = TOLD_LIMIT_S if fault in TOLD else f"{cases[0]['params']['timeout_s']:g} + {SILENT_EXTRA_S:g}"
            good = sum(record["is_good"] for record in cases)
            rows.append([fault, len(cases), good, f"{ends[len(ends) // 2]:.1f}", f"{ends[-1]:.1f}", limit])
    bad = [show(record) for record in last.values() if not record["is_good"]]
    header = ("fault", "cases", "good", "s until all have ended: median", "worst", "limit")
    return table(header, rows) + "\n\n" + ("\n".join(bad) or f"All {len(last)} cases are good.")
