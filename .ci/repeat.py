# SPDX-License-Identifier: Apache-2.0
"""Runs the tests several times, beside other load if that is wanted; prints how each run went and what it took.

    .ci/repeat.py [--runs RUNS] [--load PROCESSES] [-- COMMAND ...]

CPU-minutes are those of all processes that a run starts, those that outlive their parents too.  The output of each
run is in runs/repeat.  The exit status is 1 if any run failed or left a process.
"""

import argparse
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import Pipe, Process
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PR_SET_CHILD_SUBREAPER = 36
GRACE_S = 60.0  # for processes that notice the end of their parent


def children() -> list[int]:
    return [int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]


def run(command: Sequence[str], log: Path, answer: Connection) -> None:
    """Send the exit status, the seconds, the CPU-seconds and how many processes had to be killed."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphans become our children, so that we count them
    begin_s, ended_s, status, cpu_s, killed = time.monotonic(), None, 1, 0.0, 0
    with log.open("wb") as output:
        first = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
    while children():
        pid, how, usage = os.wait4(-1, os.WNOHANG)
        if pid == 0:
            if ended_s is not None and time.monotonic() > ended_s + GRACE_S:
                killed += len(left := children())
                for one in left:
                    with suppress(ProcessLookupError):
                        os.kill(one, 9)
            time.sleep(0.1)
            continue
        cpu_s += usage.ru_utime + usage.ru_stime
        if pid == first.pid:
            ended_s, status = time.monotonic(), os.waitstatus_to_exitcode(how)
            first.returncode = status
    answer.send((status, (ended_s or begin_s) - begin_s, cpu_s, killed))


@contextmanager
def load(processes: int) -> Iterator[None]:
    """Keep so many processes busy."""
    loop = f"import os\nwhile os.getppid() == {os.getpid()}: pass"  # it ends with this process, too
    busy = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--load", type=int, default=0, metavar="PROCESSES")
    parser.add_argument("command", nargs="*", default=["make", "--no-print-directory", "test"])
    args = parser.parse_args()
    folder, are_good = ROOT / "runs" / "repeat", True
    folder.mkdir(parents=True, exist_ok=True)
    print(f"{os.cpu_count()} CPUs, {args.load} busy processes beside each run", flush=True)
    with load(args.load):
        for number in range(1, args.runs + 1):
            log, (ours, theirs) = folder / f"{number}.log", Pipe()
            process = Process(target=run, args=(args.command, log, theirs))
            process.start()
            theirs.close()
            status, seconds, cpu_s, killed = ours.recv()
            process.join()
            are_good = are_good and status == 0 and not killed
            said = (log.read_text(errors="replace").strip().splitlines() or [""])[-1]
            left = f", {killed} processes had to be killed" if killed else ""
            print(
                f"run {number}: {'passed' if status == 0 else f'FAILED with status {status}'}{left}, "
                f"{seconds / 60:.1f} minutes, {cpu_s / 60:.1f} CPU-minutes: {said.strip('= ')}",
                flush=True,
            )
    return 0 if are_good else 1


if __name__ == "__main__":
    sys.exit(main())
