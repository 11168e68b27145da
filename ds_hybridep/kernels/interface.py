# SPDX-License-Identifier: Apache-2.0
"""What the kernels compute: types and documentation, which no step of a training enters.

The operations come in adjoint pairs, so a backward pass needs no kernel of its own except for gate weights:

    forward                                          gradient of its first argument
    dispatch_rows(x, row_to_token)                   combine_rows(grad_rows, first_slot_to_row)
    combine_rows(rows, first_slot_to_row)            dispatch_rows(grad, row_to_token)
    combine_rows(rows, slot_to_row, weights)         combine_rows_backward(grad, rows, slot_to_row, weights)

None of them records an autograd graph: callers wrap the pairs in `torch.autograd.Function`.

`quantise_rows` is dispatch_rows to rows of one byte an element, `dequantise_rows` its inverse.  The pair has no
gradient: a caller who wants one takes that of dispatch_rows, as if nothing had been rounded.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ds_hybridep.plan.row_format import RowFormat


@dataclass(frozen=True, kw_only=True)
class RoutePlan:
    """Which token is sent to which destination, and where each (token, k) slot finds its row afterwards.

    Rows are sorted by destination, then by token; a token whose slots share a destination has one row there.
    Example, T = 2, K = 2, experts 0 and 1 at destination 0, expert 2 at destination 1:

        topk_idx = [[2, 0],     rows_per_destination = [2, 1]     slot_to_row       = [[2, 0],
                    [1, 0]]     row_to_token  = [0, 1, 0]                              [1, 1]]
                                row_topk_idx  = [[-1, 0],         first_slot_to_row = [[2, 0],
                                                 [1, 0],                               [1, -1]]
                                                 [2, -1]]
    """

    rows_per_destination: Tensor  # [N] int64, sums to R: the send splits
    row_to_token: Tensor  # [R] int64
    row_topk_idx: Tensor  # [R, K] int32, expert ids of the row's token at the row's destination, -1 in other slots
    slot_to_row: Tensor  # [T, K] int64, the row that serves a slot, -1 where none does
    first_slot_to_row: Tensor  # [T, K] int64, the same with -1 at repeats: a sum over k visits each row once


class Kernels(Protocol):
    """The operations of token routing on one kind of device."""

    @property
    def name(self) -> str:
        """What logs and benchmark records call this implementation."""

    def plan_routes(self, topk_idx: Tensor, expert_to_destination: Tensor, num_destinations: int) -> RoutePlan:
        """Rows to send to each destination.

        Args:
            topk_idx: [T, K] int32, expert of each slot; negative where the slot was dropped.
            expert_to_destination: [E] int32, in 0..N-1; negative where an expert is not routed by this plan.
            num_destinations: N.

        Raises:
            ValueError: an expert id is E or more, a destination is N or more, or a shape is wrong.
            TypeError: a tensor is not int32.
        """

    def dispatch_rows(self, x: Tensor, row_to_token: Tensor) -> Tensor:
        """Rows x[row_to_token], [R, D] in x.dtype.  Gradient of x: combine_rows(grad, first_slot_to_row).

        Args:
            x: [T, D], any dtype.
            row_to_token: [R] int64 in 0..T-1.

        Raises:
            IndexError: an entry of row_to_token is outside 0..T-1.
            TypeError, ValueError: a dtype or a shape is wrong.
        """

    def quantise_rows(self, x: Tensor, row_to_token: Tensor, row_format: RowFormat) -> Tensor:
        """Records of the rows x[row_to_token], [R, record_bytes(D)] uint8, laid out as in `plan.row_format`.

        With the largest magnitude a of a block of 128 elements, and its scale s = 2^(exponent byte - 127):

            row_format  codes                                 s, a power of two, at least 2^-110
            int8        round(element / s), two's complement  the least with a <= 127 s
            fp8         element / s as float8_e4m3fn          the least with a <= 464 s, which rounds to 448 s

        Halves round to even.  Powers of two divide and multiply exactly, so an element is off by half a step at most
        (of s; of e4m3 times s), the dtype of x holds what comes of it without another rounding, and rows that were
        quantised before give the same records again.  A block with inf or nan has the exponent byte 255 and codes of
        0: all of it becomes nan, and the other blocks stay.

        Args:
            x: [T, D] floating point.  Elements beyond the range of fp32 count as inf.
            row_to_token: [R] int64 in 0..T-1.
            row_format: "int8" or "fp8".

        Raises:
            IndexError: an entry of row_to_token is outside 0..T-1.
            TypeError, ValueError: a dtype, a shape or the format is wrong.
        """

    def dequantise_rows(self, records: Tensor, hidden: int, row_format: RowFormat, dtype: torch.dtype) -> Tensor:
        """Rows of records, [R, D] in `dtype`: code times scale, at most the largest finite number of `dtype`.

        The bound keeps finite what was: an element that is nearly the largest of its dtype may round beyond it.

        Args:
            records: [R, record_bytes(D)] uint8, made by `quantise_rows`.
            hidden: D.
            row_format: of the records.
            dtype: of the rows, floating point.

        Raises:
            TypeError, ValueError: a dtype, a shape or the format is wrong.
        """

    def combine_rows(
        self, rows: Tensor, slot_to_row: Tensor, weights: Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """Sum over the slots of each token, out[t] = sum_k weights[t, k] * rows[slot_to_row[t, k]], [T, D].

        Products and sums are fp32 (fp64 for fp64 rows), in slot order, rounded once at the end.  Gradient of `rows`
        without weights: dispatch_rows(grad, row_to_token), when each row is in one slot as in first_slot_to_row.
        With weights: combine_rows_backward.

        Args:
            rows: [R, D] floating point.
            slot_to_row: [T, K] int64 below R; negative where a slot adds nothing.
            weights: [T, K] fp32; None for ones.
            out_dtype: dtype of the result; None for rows.dtype.

        Raises:
            IndexError: an entry of slot_to_row is R or more.
            TypeError, ValueError: a dtype or a shape is wrong.
        """

    def combine_rows_backward(
        self, grad: Tensor, rows: Tensor, slot_to_row: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of weighted combine_rows: those of `rows`, [R, D] in rows.dtype, and of `weights`, [T, K] fp32.

            grad_rows[r]       = sum of weights[t, k] * grad[t] over the slots that r serves, 0 if it serves none
            grad_weights[t, k] = <grad[t], rows[slot_to_row[t, k]]>, 0 where slot_to_row is negative

        Args:
            grad: [T, D] floating point, gradient of the result.
            rows: [R, D] floating point, as given to combine_rows.
            slot_to_row: [T, K] int64, likewise.
            weights: [T, K] fp32, likewise.

        Raises:
            IndexError: an entry of slot_to_row is R or more.
            TypeError, ValueError: a dtype or a shape is wrong.
        """

    def bit_sums(self, tensor: Tensor) -> Tensor:
        """[2] int64: the sum of a tensor's words, and that of words times position, both modulo 2^64.

        Two ranks compare these instead of the tensors themselves.  A word is two bytes with their sign; in tensors of
        one-byte elements it is a byte without sign.  Positions count from 1 and begin anew after 65521 words.  The
        extra memory is bounded, and nothing is waited for: the result is on the tensor's device.

            int16 {1, 2, -3}  ->  {0, -4}

        Args:
            tensor: contiguous, any shape and dtype.

        Raises:
            ValueError: the tensor is not contiguous.
        """
