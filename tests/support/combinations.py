# SPDX-License-Identifier: Apache-2.0
"""Few settings in place of a whole grid: every two or three values of different axes meet in at least one of them."""

import itertools
from collections.abc import Sequence
from typing import Any


def each_combination(axes: Sequence[Sequence[Any]], *, of: int) -> list[tuple[Any, ...]]:
    """Settings, one value of each axis, such that any `of` values of different axes occur together in one of them.

    Faults come from one setting, or from a few that meet; a grid repeats each such meeting many times.  Takes the
    setting with most new combinations, again and again, so the result is always the same.
    """
    settings = list(itertools.product(*axes))
    chosen_axes = list(itertools.combinations(range(len(axes)), of))
    found = {setting: {(which, tuple(setting[i] for i in which)) for which in chosen_axes} for setting in settings}
    missing = set().union(*found.values())
    chosen = []
    while missing:
        best = max(settings, key=lambda setting: len(found[setting] & missing))
        chosen.append(best)
        missing -= found[best]
    return chosen
