# SPDX-License-Identifier: Apache-2.0
"""What ranks do when one of them breaks: how long until all have ended, and whether each names the true cause.

    python benchmarks/faults.py --out faults.jsonl                     every case
    python benchmarks/faults.py --faults kill stop --phases forward    some
    python benchmarks/faults.py --report faults.jsonl                  the table

Four ranks on emulated hosts of two datacentres train a tiny model; one breaks in the middle of a phase.  A case is
good if every rank that can end has done so in time, and the first line of each rank's error names the rank, the
datacentre or the link that broke.  Works without root where user namespaces are permitted.
"""

import argparse
import concurrent.futures
import ctypes
import itertools
import json
import os
import re
import signal
import sys
import tempfile
import time
import traceback
import weakref
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ds_hybridep.lab.launcher import MASTER_PORT, rank_environment
from ds_hybridep.lab.namespaces import become_root
from ds_hybridep.lab.network import HOST_DEVICE, EmulatedNetwork
from ds_hybridep.lab.topology import LinkSpec, Topology

FAULTS = ("kill", "stop", "exception", "memory", "link", "dc", "kill rank 0")
PHASES = ("forward", "backward", "step", "save", "load")
KINDS, CODECS = ("classic", "autoep"), ("exact", "recommended")
TIMEOUT_S = 8.0
TOLD_LIMIT_S = 5.0  # where the system tells of the end: a death, an exception
SILENT_EXTRA_S = 10.0  # beyond timeout_s
TOLD = ("kill", "kill rank 0", "exception", "memory")
START_LIMIT_S = 120.0
VICTIM = 3
CLONE_NEWNET = 0x40000000
NAMED = {  # what the first line of each rank's error must say; {v}: the victim
    "kill": r"rank {v} ended without a word",
    "kill rank 0": r"rank {v} ended without a word",
    "stop": r"rank {v} silent .* the process does not run",
    "exception": r"rank {v} failed: ValueError: a bad sample",
    "memory": r"rank {v} cannot start: MemoryError",
    "link": r"the link of level 'dc' between dc \d and dc \d",
    "dc": r"the link of level 'dc' between dc \d and dc \d is cut, or dc \d is down",
}
ERROR = re.compile(r"^(\[rank\d+\]: )?(hybridep: (?!\d)|Traceback|terminate called|Fatal Python|[\w.]+Error: )")


@dataclass(frozen=True)
class Case:
    fault: str
    phase: str
    kind: str
    codecs: str

    @property
    def victim(self) -> int:
        return 0 if self.fault == "kill rank 0" else VICTIM

    def __str__(self) -> str:
        return f"{self.fault} in {self.phase}, {self.kind}, {self.codecs}"


def cases_of(args: argparse.Namespace) -> Iterator[Case]:
    for fault, kind, codecs in itertools.product(args.faults, args.kinds, args.codecs):
        for phase in _phases_of(fault, args.phases):
            yield Case(fault, phase, kind, codecs)


def _phases_of(fault: str, phases: list[str]) -> list[str]:
    """Memory is short at attach."""
    return ["attach"] if fault == "memory" else phases


class Ranks:
    """Forked from this process, which has imported everything, each into the namespace of its host."""

    def __init__(self, network: EmulatedNetwork, orders: Any, folder: Path) -> None:
        self.logs = [folder / f"rank{rank}.log" for rank in range(network.topology.num_ranks)]
        self.pids = [self._fork(network, rank, orders) for rank in range(len(self.logs))]
        self.ended: dict[int, tuple[float, int]] = {}  # rank -> when, status

    def _fork(self, network: EmulatedNetwork, rank: int, orders: Any) -> int:
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            weakref.finalize._registry.clear()  # type: ignore[attr-defined]  # the parent removes its folders itself
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
            log = os.open(self.logs[rank], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            with open(f"/run/netns/{network.namespace_of(rank)}") as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            address = network.topology.address_of(0)
            environment = rank_environment(rank, network.topology.num_ranks, address, HOST_DEVICE, MASTER_PORT)
            os.environ.update(environment)
            status = run_as_script(orders)
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    def poll(self) -> bool:
        """Whether any rank still runs."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.ended:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.ended[rank] = time.time(), os.waitstatus_to_exitcode(status)
        return len(self.ended) < len(self.pids)

    def kill(self) -> None:
        for rank, pid in enumerate(self.pids):
            if rank not in self.ended:
                os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
                self.ended[rank] = time.time(), os.waitstatus_to_exitcode(status)


def run_as_script(orders: Any) -> int:
    """`faults_rank.main`, ended as the interpreter would: last_value, excepthook, then atexit."""
    import atexit

    import faults_rank

    status = 0
    try:
        faults_rank.main(orders)
    except BaseException as error:  # noqa: BLE001  as the interpreter does
        status, sys.last_value = 1, error
        sys.excepthook(type(error), error, error.__traceback__)
    atexit._run_exitfuncs()
    return status


def run_case(case: Case, folder: Path, timeout_s: float) -> dict[str, Any]:
    """What came of a case: seconds until each rank had ended, and its first error line."""
    import faults_rank

    folder.mkdir(parents=True)
    orders = faults_rank.Orders(
        fault=case.fault, phase=case.phase, victim=case.victim, kind=case.kind, codecs=case.codecs,
        timeout_s=timeout_s, folder=str(folder),
    )  # fmt: skip
    limit_s = TOLD_LIMIT_S if case.fault in TOLD else timeout_s + SILENT_EXTRA_S
    with EmulatedNetwork(Topology(2, 2), LinkSpec()) as network:
        ranks = Ranks(network, orders, folder)
        try:
            broken_at = _watch(ranks, network, case, folder, limit_s)
        finally:
            ranks.kill()
    expected = re.compile(NAMED[case.fault].format(v=case.victim))
    found = []
    for rank, log in enumerate(ranks.logs):
        ended_at, status = ranks.ended[rank]
        line = first_error(log)
        is_victim = rank == case.victim and case.fault in ("kill", "kill rank 0", "stop", "exception", "memory")
        found.append({
            "rank": rank, "seconds": None if broken_at is None else round(ended_at - broken_at, 2), "status": status,
            "error": line[:200], "is_named": is_victim or bool(expected.search(line)),
            "is_in_time": (case.fault == "stop" and is_victim)
            or (broken_at is not None and ended_at - broken_at <= limit_s),
        })  # fmt: skip
    own = {"exception": 8.0}.get(case.fault, 0.0)  # the rank that failed may take its time to leave
    last_s = max((one["seconds"] or 0.0 for one in found if not _is_stopped(case, one["rank"])), default=0.0)
    return {
        **asdict(case), "victim": case.victim, "timeout_s": timeout_s, "limit_s": limit_s, "last_s": last_s,
        "own_limit_s": own, "ranks": found, "is_good": all(one["is_named"] and one["is_in_time"] for one in found),
    }  # fmt: skip


def _is_stopped(case: Case, rank: int) -> bool:
    return case.fault == "stop" and rank == case.victim


def _watch(ranks: Ranks, network: EmulatedNetwork, case: Case, folder: Path, limit_s: float) -> float | None:
    """Until all have ended or twice the limit is over.  Returns when it broke."""
    begin, broken_at = time.time(), None
    while ranks.poll():
        if broken_at is None and (folder / "broken").exists():
            broken_at = float((folder / "broken").read_text() or time.time())
            if case.fault in ("link", "dc"):
                network.cut(None if case.fault == "link" else 1)
                broken_at = time.time()
                (folder / "cut").touch()
        if broken_at is None and time.time() - begin > START_LIMIT_S:
            return None
        if broken_at is not None and time.time() - broken_at > 2 * limit_s + 5:
            break
        if case.fault == "stop" and broken_at is not None and len(ranks.ended) == len(ranks.pids) - 1:
            break
        time.sleep(0.02)
    return broken_at


def first_error(log: Path) -> str:
    """The first line of this package that says what is wrong; else the last one of the first traceback."""
    found, ours = "", re.compile(r"hybridep: (rank|ranks|the link|\w+ \d+ \()")
    for line in log.read_text(errors="replace").splitlines():
        if ours.match(line):
            return line
    for line in log.read_text(errors="replace").splitlines():
        if not found and (match := ERROR.match(line)):
            found = line
            if match[2] != "Traceback":
                return found
        elif found and re.match(r"(\[rank\d+\]: )?[\w.]+(Error|Exception|Exit): ", line):
            return line
    return found


def _run(job: tuple[Case, Path, float]) -> dict[str, Any]:
    try:
        return run_case(*job)
    except Exception:  # noqa: BLE001  one case must not end the table
        return {**asdict(job[0]), "is_good": False, "last_s": 0.0, "ranks": [], "failure": traceback.format_exc()}


def show_case(record: dict[str, Any]) -> str:
    return str(Case(record["fault"], record["phase"], record["kind"], record["codecs"]))


def show(record: dict[str, Any]) -> str:
    errors = sorted({one["error"][:110] for one in record["ranks"] if not one["is_named"]})
    verdict = "ok  " if record["is_good"] else "FAIL"
    late = [one["rank"] for one in record["ranks"] if not one["is_in_time"]]
    return f"{verdict} {record['last_s']:6.1f} s  {show_case(record)}" + (
        f"  late: {late}  not named: {errors} {record.get('failure', '')}" if not record["is_good"] else ""
    )


def report(path: Path) -> None:
    """The table, by fault; of cases that were run several times the last counts."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for record in map(json.loads, path.read_text().splitlines()):
        runs.setdefault(show_case(record), []).append(record)
    print("| fault | cases | good | run again | s until all have ended: median | worst | limit |")
    print("|---|---|---|---|---|---|---|")
    for fault in FAULTS:
        cases = [records for records in runs.values() if records[-1]["fault"] == fault]
        if cases:
            last = [records[-1] for records in cases]
            ends = sorted(record["last_s"] for record in last)
            limit = last[0]["limit_s"] if fault in TOLD else f"{last[0]['timeout_s']:g} + {SILENT_EXTRA_S:g}"
            good, again = sum(one["is_good"] for one in last), sum(len(records) > 1 for records in cases)
            median_s, worst_s = ends[len(ends) // 2], ends[-1]
            print(f"| {fault} | {len(cases)} | {good} | {again} | {median_s:.1f} | {worst_s:.1f} | {limit} |")
    bad = [show(records[-1]) for records in runs.values() if not records[-1]["is_good"]]
    print("\n" + ("\n".join(bad) or f"All {len(runs)} cases are good."))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", nargs="+", default=list(FAULTS), choices=FAULTS)
    parser.add_argument("--phases", nargs="+", default=list(PHASES), choices=PHASES)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--codecs", nargs="+", default=list(CODECS), choices=CODECS)
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S)
    parser.add_argument("--at-once", type=int, default=1, help="cases that run beside each other")
    parser.add_argument("--out", type=Path, help="JSON lines, one a case")
    parser.add_argument("--logs", type=Path, help="keep the ranks' logs here")
    parser.add_argument("--report", type=Path, help="print the table of such a file, and run nothing")
    args = parser.parse_args()
    if args.report:
        report(args.report)
        return
    become_root()
    import faults_rank  # noqa: F401
    import hf_model  # noqa: F401  imported once, for all ranks
    import torch._dynamo
    import torch._inductor.compile_fx  # noqa: F401  imported once, for all ranks

    with tempfile.TemporaryDirectory() as scratch:
        folder = args.logs or Path(scratch)
        jobs = [(case, folder / re.sub(r"\W+", "-", str(case)), args.timeout_s) for case in cases_of(args)]
        good = 0
        context = __import__("multiprocessing").get_context("fork")
        with concurrent.futures.ProcessPoolExecutor(args.at_once, mp_context=context) as pool:
            for record in pool.map(_run, jobs):
                good += record["is_good"]
                print(show(record), flush=True)
                if args.out:
                    with args.out.open("a") as out:
                        out.write(json.dumps(record) + "\n")
    print(f"{good} of {len(jobs)} cases are good")
    sys.exit(0 if good == len(jobs) else 1)


if __name__ == "__main__":
    main()
