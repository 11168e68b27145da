# SPDX-License-Identifier: Apache-2.0
"""The log: Python's own, under the name "ds_hybridep".  DeepSpeed's logger shows warnings only.

Lines from level INFO on appear on standard error, unless the script has set another level for this name.  If the
script has handlers for this name or above it, they get the lines, and standard error does not.
"""

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ds_hybridep.transport.job import is_initialized, own_rank

_logger = logging.getLogger("ds_hybridep")


def log_dist(message: str, ranks: Sequence[int], level: int = logging.INFO) -> None:
    """Log on some ranks, [-1] for all, as DeepSpeed's function of this name does; on all before the job is there."""
    _prepare()
    rank = own_rank() if is_initialized() else -1
    if rank == -1 or rank in ranks or -1 in ranks:
        _logger.log(level, f"[Rank {rank}] {message}")


@cache  # once in a process
def warn_once(message: str) -> None:
    """Warn on rank 0."""
    log_dist(f"hybridep: {message}", ranks=[0], level=logging.WARNING)


def write_json(path: Path, record: Mapping[str, Any], default: Callable[[Any], Any] | None = None) -> None:
    """Write or replace a file as a whole.  If that fails, log the error and let the training go on.

    default: returns what stands for a value that JSON does not know.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(path.suffix + ".partial")
        unfinished.write_text(json.dumps(record, indent=1, default=default) + "\n", encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as error:
        log_dist(f"hybridep: {path} is not written: {error}", ranks=[-1], level=logging.WARNING)


@cache  # once in a process
def _prepare() -> None:
    if _logger.level == logging.NOTSET:
        _logger.setLevel(logging.INFO)
    _logger.addHandler(_Screen())


class _Screen(logging.StreamHandler):  # type: ignore[type-arg]  # Python 3.10 takes no parameter here
    """Writes what no handler of the script takes."""

    def emit(self, record: logging.LogRecord) -> None:
        if all(handler is self for handler in (*_logger.handlers, *logging.root.handlers)):
            self.stream = sys.stderr  # scripts may replace it at any time
            super().emit(record)
