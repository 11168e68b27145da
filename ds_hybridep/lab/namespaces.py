# SPDX-License-Identifier: Apache-2.0
"""Network namespaces: runs the tools that make them, ends the processes inside, and removes those without an owner."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ds_hybridep.errors import LabError

TOOL_TIMEOUT_S = 120.0  # on a busy machine the kernel clears old namespaces late, and new ones wait for that
KILL_TIMEOUT_S = 10.0
NETNS_FOLDER = Path("/run/netns")
# PID and start time of the process that made the namespace, a serial number, and what the namespace is.
NAMESPACE_NAME = re.compile(r"hybridep-(?P<pid>\d+)-(?P<start>\d+)-\d+-\w+")
HINTS = {
    "not permitted": "this needs root with CAP_NET_ADMIN and CAP_SYS_ADMIN (in Docker: --privileged)",
    "Permission denied": "this needs root with CAP_NET_ADMIN and CAP_SYS_ADMIN (in Docker: --privileged)",
    "kind is unknown": "this kernel has no htb, bfifo or u32 (modules sch_htb, sch_fifo, cls_u32)",
    "Unknown device type": "this kernel has no veth pairs or bridges (modules veth, bridge)",
}


def reap_orphans() -> list[str]:
    """Removes namespaces whose owner was killed, and ends the processes in them. Returns the namespaces' names."""
    orphans = [name for name, match in _lab_namespaces() if start_time(int(match["pid"])) != int(match["start"])]
    for name in orphans:
        kill_processes_in(name)
    delete_namespaces(orphans)
    return orphans


def _lab_namespaces() -> Iterator[tuple[str, re.Match[str]]]:
    for name in sorted(os.listdir(NETNS_FOLDER)) if NETNS_FOLDER.is_dir() else []:
        if match := NAMESPACE_NAME.fullmatch(name):
            yield name, match


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if it does not run. With it, a reused PID is noticed."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = stat.rpartition(")")[2].split()  # the name before the bracket may contain any character
    return None if state in "ZX" else int(fields[18])


def delete_namespaces(names: Iterable[str]) -> None:
    for name in names:
        if (NETNS_FOLDER / name).exists():
            try:
                run_tool(["ip", "netns", "delete", name])
            except LabError:
                if (NETNS_FOLDER / name).exists():  # else another process reaped it first
                    raise


def processes_in(namespace: str) -> list[int]:
    try:
        wanted = os.stat(NETNS_FOLDER / namespace)
    except FileNotFoundError:
        return []
    found = []
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if os.path.samestat(os.stat(f"/proc/{pid}/ns/net"), wanted):
                found.append(int(pid))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            pass  # it has ended, is a zombie, or is not ours
    return found


def kill_processes_in(namespace: str) -> int:
    killed: set[int] = set()
    deadline_s = time.monotonic() + KILL_TIMEOUT_S
    # Repeat until none is left: a process may have forked while the list was read.
    while pids := set(processes_in(namespace)) - {os.getpid()}:
        if time.monotonic() > deadline_s:
            raise LabError(f"processes {sorted(pids)} in {namespace} do not end on SIGKILL")
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        killed |= pids
        time.sleep(0.005)
    return len(killed)


def run_ip(namespace: str, arguments: str) -> None:
    run_tool(["ip", "-n", namespace, *arguments.split()])


def run_batch(tool: str, namespace: str, lines: Sequence[str]) -> None:
    """Runs lines of `ip`, `tc` or `bridge` in a namespace, in one process."""
    run_tool([tool, "-n", namespace, "-batch", "-"], stdin="\n".join(lines) + "\n")


def run_tool(command: Sequence[str], stdin: str = "") -> str:
    """Runs a command and returns its output. Raises LabError with what it said, and with a hint if one is known."""
    try:
        run = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise LabError(f"`{' '.join(command)}` did not end within {TOOL_TIMEOUT_S:g} s") from error
    if run.returncode != 0:
        said = run.stderr.strip() or f"exit code {run.returncode}"
        hint = next((f"; {hint}" for text, hint in HINTS.items() if text in said), "")
        raise LabError(f"`{' '.join(command)}`: {said}{hint}")
    return run.stdout
