# SPDX-License-Identifier: Apache-2.0
"""Whether somebody else has changed parameters: a user's averaging, an optimizer that nobody told us of."""

from collections.abc import Iterable, Sequence

from torch import Tensor

Versions = tuple[tuple[int, int], ...]


def versions_of(parameters: Iterable[Tensor]) -> Versions:
    """What torch changes with every write to a parameter, and with every replacement of its memory.

    A write to `parameter.data`, or to a flat buffer that the parameter is a part of, changes neither.
    """
    return tuple((parameter._version, parameter.data_ptr()) for parameter in parameters)


def changed_outside(parameters: Sequence[Tensor], seen: Versions | None) -> bool:
    """True if a parameter was written to or replaced since `versions_of` gave `seen`; None: nothing was seen yet."""
    return seen is not None and versions_of(parameters) != seen
