# SPDX-License-Identifier: Apache-2.0
"""Sites at a meeting point, without jobs."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from site_jobs import secret_file

from ds_hybridep.link import read_secret
from ds_hybridep.sites.member import Member

NAMES = ["a", "b"]
LIMIT_S = 120.0


def until(is_true: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not (found := is_true()):
        assert time.monotonic() < deadline, what
        time.sleep(0.05)
    return found


def member(
    meeting: Any, folder: Path, name: str = "a", context: Any = None, wait_s: float = 30.0, **settings: Any
) -> Member:
    secret = read_secret(secret_file(folder), "")
    return Member((meeting.host, meeting.port), name, NAMES, settings, secret=secret, wait_s=wait_s, context=context)
