# SPDX-License-Identifier: Apache-2.0
"""Network namespaces: runs the tools that make them, ends the processes inside, and removes those without an owner.

Root may make them, and an ordinary user in a user namespace of their own.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
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
# New user, mount and network namespaces, with this user as their root. `ip netns` keeps its namespaces under /run,
# which belongs to the real root.
UNSHARE = ("unshare", "--user", "--map-root-user", "--mount", "--net")
UNSHARED = ("sh", "-c", 'mount -t tmpfs tmpfs /run && exec "$@"', "sh")
FORBIDDING = {  # kernel settings, and the value that forbids user namespaces
    "kernel.apparmor_restrict_unprivileged_userns": "1",
    "kernel.unprivileged_userns_clone": "0",
    "user.max_user_namespaces": "0",
}


def reap_orphans() -> list[str]:
    """Removes namespaces whose owner was killed, and ends the processes in them. Returns the namespaces' names."""
    names = os.listdir(NETNS_FOLDER) if NETNS_FOLDER.is_dir() else []
    matches = filter(None, map(NAMESPACE_NAME.fullmatch, names))
    orphans = [match[0] for match in matches if start_time(int(match["pid"])) != int(match["start"])]
    delete_namespaces(orphans)
    return orphans


def start_time(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if it does not run. With it, a reused PID is noticed."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = stat.rpartition(")")[2].split()  # the name before the bracket may contain any character
    return None if state in "ZX" else int(fields[18])


def delete_namespaces(names: Iterable[str]) -> None:
    """Ends the processes in namespaces and removes them, those that exist."""
    for name in names:
        kill_processes_in(name)
        if (NETNS_FOLDER / name).exists():
            try:
                run_tool(["ip", "netns", "delete", name])
            except LabError:
                if (NETNS_FOLDER / name).exists():  # else another process reaped it first
                    raise


def processes_in(namespace: str) -> set[int]:
    """PIDs of the processes in a namespace, without this one."""
    found: set[int] = set()
    for pid in filter(str.isdecimal, os.listdir("/proc")):
        try:
            if os.path.samefile(f"/proc/{pid}/ns/net", NETNS_FOLDER / namespace):
                found.add(int(pid))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            pass  # it has ended, is a zombie, or is not ours; or the namespace is gone
    return found - {os.getpid()}


def kill_processes_in(namespace: str) -> set[int]:
    """Ends every process in a namespace by SIGKILL and waits until all are gone. Returns their PIDs."""
    killed: set[int] = set()
    deadline_s = time.monotonic() + KILL_TIMEOUT_S
    # Repeat until none is left: a process may have forked while the list was read.
    while pids := processes_in(namespace):
        if time.monotonic() > deadline_s:
            raise LabError(f"processes {sorted(pids)} in {namespace} do not end on SIGKILL")
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        killed |= pids
        time.sleep(0.005)
    return killed


def configure(tool: str, namespace: str, *lines: str) -> None:
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


def become_root() -> None:
    """Restart this program as root of its own namespaces. Does nothing if the user is root, or not on Linux.

    The program starts again from its beginning, so call this before anything else.

    Raises:
        LabError: the system does not permit it.
    """
    if not sys.platform.startswith("linux") or os.geteuid() == 0:
        return
    if reason := why_no_user_namespace():
        raise LabError(f"emulated hosts need root or a user namespace: {reason}")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvp(UNSHARE[0], [*UNSHARE, *UNSHARED, sys.executable, *sys.orig_argv[1:]])


def why_no_user_namespace() -> str | None:
    """Why this user cannot become root of namespaces of their own, and what to do; None if they can."""
    if shutil.which("unshare") is None:
        return "unshare not found: install util-linux, or run as root"
    try:
        run_tool([*UNSHARE, *UNSHARED, "true"])
        return None
    except LabError as error:
        for name, forbids in FORBIDDING.items():
            setting = Path("/proc/sys", *name.split("."))
            if setting.exists() and setting.read_text().strip() == forbids:
                return f"{name} = {forbids} forbids user namespaces; change it, or run as root"
        return str(error)
