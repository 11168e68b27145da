# SPDX-License-Identifier: Apache-2.0
"""The threads of background channels."""

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Line(Generic[T]):
    """A thread that takes one item after the other, and None when no more will come."""

    def __init__(self, name: str, take: Callable[[T | None], None]) -> None:
        self._take = take
        self._waiting: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def put(self, item: T) -> None:
        self._waiting.put(item)

    def end(self) -> None:
        """Stop behind what was put."""
        self._waiting.put(None)

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            self._take(item)
        self._take(None)
