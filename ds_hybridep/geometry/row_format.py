# SPDX-License-Identifier: Apache-2.0
"""Token rows with one byte for each element.  Each row is a record, whose length is a multiple of 16 bytes.

codes of D elements | exponents of ceil(D / 128) blocks, a byte each | zeros
"""

from typing import Literal

RowFormat = Literal["int8", "fp8"]

SCALE_BLOCK = 128  # consecutive elements that share a scale; the last block of a row may be short
RECORD_ALIGNMENT = 16


def num_scales(hidden: int) -> int:
    """Number of blocks, and so of scales, in a row of `hidden` elements."""
    return -(-hidden // SCALE_BLOCK)


def record_bytes(hidden: int) -> int:
    """Bytes of the record of a row of `hidden` elements, in both formats."""
    num_bytes = hidden + num_scales(hidden)
    return -(-num_bytes // RECORD_ALIGNMENT) * RECORD_ALIGNMENT
