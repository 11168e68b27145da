# SPDX-License-Identifier: Apache-2.0
"""Tells the user what a site waits for: after some seconds, again with growing pauses, and once when it goes on."""

import logging
import time
from typing import Any

logger = logging.getLogger(__name__)
FIRST_S = 5.0
GROWTH = 3.0  # of the time waited, from one line to the next


class Patience:
    """One wait.  what: such as "site 'a' waits for site 'b'"; an empty text says nothing."""

    def __init__(self, what: str) -> None:
        self._what, self._began, self._next_s = what, time.monotonic(), FIRST_S

    def look(self, why: str = "") -> None:
        """Call again and again while the wait lasts.  why: what is known of its cause."""
        waited_s = time.monotonic() - self._began
        if waited_s >= self._next_s:
            self._say(f"{self._what}, for {waited_s:.0f} s so far{f': {why}' if why else ''}")
            self._next_s = GROWTH * waited_s

    def _say(self, text: str) -> None:
        if self._what:
            logger.warning("hybridep: %s", text)

    def __enter__(self) -> "Patience":
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        if kind is None and self._next_s > FIRST_S:  # else nothing was said
            self._say(f"{self._what} no longer; it goes on after {time.monotonic() - self._began:.0f} s")
