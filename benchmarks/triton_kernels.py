# SPDX-License-Identifier: Apache-2.0
"""Rows and blocks in Triton, to compare our kernels with: what one writes in an hour.  Needs Triton, and a GPU."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit  # type: ignore[untyped-decorator]
def _scatter(x, slots, out, D: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + token * D + at, mask=at < D)
    for k in range(K):
        row = tl.load(slots + token * K + k)
        if row >= 0:
            tl.store(out + row * D + at, values, mask=at < D)


def scatter_rows(x: Tensor, first_slot_to_row: Tensor, num_rows: int, block: int = 2048) -> Tensor:
    """What `dispatch_rows` gives, [num_rows, D]; each token is read once and written to all its rows."""
    (num_tokens, hidden), top_k = x.shape, first_slot_to_row.shape[1]
    out = torch.empty(num_rows, hidden, dtype=x.dtype, device=x.device)
    grid = (num_tokens, triton.cdiv(hidden, block))
    _scatter[grid](x, first_slot_to_row, out, hidden, top_k, block, num_warps=4)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _int8_update(a, mirror, codes, scales, N, BLOCK: tl.constexpr, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    block = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    before = tl.load(mirror + at, mask=at < N, other=0.0)
    x = tl.load(a + at, mask=at < N, other=0.0) - before
    largest = tl.max(tl.abs(x), axis=1)
    scale = tl.where(largest > 0, largest / 127.0, 1.0)
    code = tl.floor(x / scale[:, None] + 0.5)
    tl.store(mirror + at, before + code * scale[:, None], mask=at < N)
    tl.store(codes + at, (code + 128.0).to(tl.uint8), mask=at < N)
    tl.store(scales + block, scale, mask=block * BLOCK < N)


class Int8:
    """Blocks of 128 elements with an fp32 scale each: the work of `encode_update` with int8, in another format."""

    BLOCK, ROWS = 128, 8

    def __init__(self, num_elements: int, device: torch.device) -> None:
        self.num_elements = num_elements
        self.codes = torch.empty(num_elements, dtype=torch.uint8, device=device)
        self.scales = torch.empty(-(-num_elements // self.BLOCK), dtype=torch.float32, device=device)

    def encode_update(self, a: Tensor, mirror: Tensor) -> None:
        grid: Any = (triton.cdiv(self.num_elements, self.BLOCK * self.ROWS),)
        _int8_update[grid](a, mirror, self.codes, self.scales, self.num_elements, self.BLOCK, self.ROWS, num_warps=4)
