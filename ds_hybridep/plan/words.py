# SPDX-License-Identifier: Apache-2.0
"""How the answer writes numbers, rows and paragraphs: three digits, and lines that fit a terminal."""

import textwrap
from collections.abc import Sequence

GIGA = 1e9
WIDTH = 120  # columns of a line
LEAST = 0.001  # smaller numbers are written as less than this
UNITS = {1e9: "B", 1e6: "M", 1e3: "k"}


def number(value: float) -> str:
    """Three digits, all digits of a larger number, and never an exponent."""
    if value >= 999.5:
        return f"{value:,.0f}"
    if 0 < value < LEAST:
        return f"<{LEAST:g}"
    return f"{value:#.3g}".rstrip(".") if value else "0"


def count(value: float) -> str:
    """A number of things, such as 13.4 M."""
    unit = next((unit for unit in UNITS if value >= unit), 1.0)
    return f"{number(value / unit)} {UNITS[unit]}" if unit > 1 else f"{value:.0f}"


def seconds(value: float) -> str:
    """Seconds of a step."""
    return f"{number(value)} s a step"


def hours(value: float) -> str:
    """Hours, or minutes if it is less than one."""
    return f"{number(value)} hours" if value >= 1 else f"{number(60 * value)} minutes"


def wrapped(text: str) -> str:
    """A paragraph as lines that fit a terminal."""
    return textwrap.fill(text, WIDTH, break_long_words=False, break_on_hyphens=False)


def aligned(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Format rows as lines; columns in `left` are aligned left, the others, which hold numbers, are aligned right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
