# SPDX-License-Identifier: Apache-2.0
"""The lab without root: in a user namespace an ordinary user may make hosts and links of their own."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from ds_hybridep.errors import LabError

# New user, mount and network namespaces, with this user as their root.
UNSHARE = ("unshare", "--user", "--map-root-user", "--mount", "--net")
# `ip netns` keeps its namespaces under /run, which belongs to the real root.
SCRIPT = 'mount -t tmpfs tmpfs /run && exec "$@"'
TIMEOUT_S = 10.0
SETTINGS: dict[str, Callable[[int], bool]] = {  # kernel settings, and which of their values forbid user namespaces
    "/proc/sys/kernel/apparmor_restrict_unprivileged_userns": lambda value: value == 1,
    "/proc/sys/kernel/unprivileged_userns_clone": lambda value: value == 0,
    "/proc/sys/user/max_user_namespaces": lambda value: value == 0,
}


def why_no_user_namespace() -> str | None:
    """Why this user cannot become root of namespaces of their own, and what to do; None if they can."""
    if shutil.which(UNSHARE[0]) is None:
        return "unshare not found: install util-linux, or run as root"
    try:
        tried = subprocess.run(
            [*UNSHARE, "sh", "-c", SCRIPT, "sh", "true"], capture_output=True, text=True, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"unshare did not end within {TIMEOUT_S:g} s; run as root"
    if tried.returncode == 0:
        return None
    for path, forbids in SETTINGS.items():
        if Path(path).exists() and forbids(int(Path(path).read_text())):
            name = path.removeprefix("/proc/sys/").replace("/", ".")
            return f"{name} = {Path(path).read_text().strip()} forbids user namespaces; change it, or run as root"
    return f"user namespaces are not permitted ({tried.stderr.strip()}); run as root (in Docker: --privileged)"


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
    command = [sys.executable, *sys.orig_argv[1:]]
    os.execvp(UNSHARE[0], [*UNSHARE, "sh", "-c", SCRIPT, "sh", *command])
