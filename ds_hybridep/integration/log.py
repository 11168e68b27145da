# SPDX-License-Identifier: Apache-2.0
"""The log: Python's own, under the name "ds_hybridep".  DeepSpeed's logger shows warnings only.

Lines from level INFO on appear on standard error, unless the script has set another level for this name.  If the
script has handlers for this name or above it, they get the lines, and standard error does not.
"""

import logging
import sys
from collections.abc import Sequence
from functools import cache

from deepspeed.utils.logging import get_dist_msg

_logger = logging.getLogger("ds_hybridep")


def log_dist(message: str, ranks: Sequence[int], level: int = logging.INFO) -> None:
    """Log on some ranks, [-1] for all, as DeepSpeed's function of this name does."""
    _prepare()
    said = get_dist_msg(message, ranks)
    if said is not None:
        _logger.log(level, said)


@cache  # once in a process
def _prepare() -> None:
    if _logger.level == logging.NOTSET:
        _logger.setLevel(logging.INFO)
    _logger.addHandler(_Screen())


class _Screen(logging.StreamHandler):  # type: ignore[type-arg]  # Python 3.10 takes no parameter here
    """Writes what no handler of the script takes."""

    def emit(self, record: logging.LogRecord) -> None:
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return
            logger = logger.parent if logger.propagate else None
        self.stream = sys.stderr  # scripts may replace it at any time
        super().emit(record)
