# SPDX-License-Identifier: Apache-2.0
"""What the routing kernels compute, and the rules that arguments of every implementation obey.

The operations come in adjoint pairs, so a backward pass needs no kernel of its own except for gate weights:

    forward                                          gradient of its first argument
    dispatch_rows(x, row_to_token)                   combine_rows(grad_rows, first_slot_to_row)
    scatter_rows(x, first_slot_to_row, R)            the same: it is the same operation, given by token
    combine_rows(rows, first_slot_to_row)            dispatch_rows(grad, row_to_token)
    combine_rows(rows, slot_to_row, weights)         combine_rows_backward(grad, rows, slot_to_row, weights)

None of them records an autograd graph: callers wrap the pairs in `torch.autograd.Function`.

`quantise_rows` is dispatch_rows to rows of one byte an element, `dequantise_rows` its inverse.  The pair has no
gradient: a caller who wants one takes that of dispatch_rows, as if nothing had been rounded.
"""

from dataclasses import dataclass
from typing import Protocol, get_args

import torch
from torch import Tensor

from ds_hybridep.plan.row_format import RowFormat, record_bytes


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

    def scatter_rows(self, x: Tensor, slot_to_row: Tensor, num_rows: int) -> Tensor:
        """Rows out[slot_to_row[t, k]] = x[t], [R, D] in x.dtype.

        With first_slot_to_row of a plan this is dispatch_rows, with each token read once instead of once for each row.

        Args:
            x: [T, D], any dtype.
            slot_to_row: [T, K] int64 below R; a row is named by one token only, or by none, and then holds anything.
            num_rows: R.

        Raises:
            IndexError: an entry of slot_to_row is R or more.
            TypeError, ValueError: a dtype or a shape is wrong.
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


def plan_sizes(topk_idx: Tensor, expert_to_destination: Tensor, num_destinations: int) -> tuple[int, int, int]:
    """T, K and E of a call of plan_routes.  Raises ValueError or TypeError where shapes or dtypes are wrong."""
    if topk_idx.dim() != 2 or topk_idx.shape[1] < 1:
        raise ValueError(f"topk_idx: got shape {tuple(topk_idx.shape)}, wanted [T, K] with K of 1 or more")
    if expert_to_destination.dim() != 1:
        raise ValueError(f"expert_to_destination: got shape {tuple(expert_to_destination.shape)}, wanted [E]")
    if num_destinations < 1:
        raise ValueError(f"num_destinations: got {num_destinations}, wanted 1 or more")
    require_dtype("topk_idx", topk_idx, torch.int32)
    require_dtype("expert_to_destination", expert_to_destination, torch.int32)
    num_tokens, top_k = topk_idx.shape
    return num_tokens, top_k, expert_to_destination.shape[0]


def dispatch_sizes(x: Tensor, row_to_token: Tensor) -> tuple[int, int, int]:
    """T, D and R of a call of dispatch_rows.  Raises ValueError or TypeError where shapes or dtypes are wrong."""
    if x.dim() != 2:
        raise ValueError(f"x: got shape {tuple(x.shape)}, wanted [T, D]")
    if row_to_token.dim() != 1:
        raise ValueError(f"row_to_token: got shape {tuple(row_to_token.shape)}, wanted [R]")
    require_dtype("row_to_token", row_to_token, torch.int64)
    num_tokens, hidden = x.shape
    return num_tokens, hidden, row_to_token.shape[0]


def quantise_sizes(x: Tensor, row_to_token: Tensor, row_format: RowFormat) -> tuple[int, int, int]:
    """T, D and R of a call of quantise_rows.  Raises ValueError or TypeError where arguments are wrong."""
    sizes = dispatch_sizes(x, row_to_token)
    _require_floating("x", x.dtype)
    _require_format(row_format)
    return sizes


def dequantise_sizes(records: Tensor, hidden: int, row_format: RowFormat, dtype: torch.dtype) -> int:
    """R of a call of dequantise_rows.  Raises ValueError or TypeError where arguments are wrong."""
    if hidden < 0:
        raise ValueError(f"hidden: got {hidden}, wanted 0 or more")
    if records.dim() != 2 or records.shape[1] != record_bytes(hidden):
        wanted = record_bytes(hidden)
        raise ValueError(f"records: got shape {tuple(records.shape)}, wanted [R, {wanted}] for rows of {hidden}")
    require_dtype("records", records, torch.uint8)
    _require_floating("dtype", dtype)
    _require_format(row_format)
    return records.shape[0]


def scatter_sizes(x: Tensor, slot_to_row: Tensor, num_rows: int) -> tuple[int, int, int]:
    """T, K and D of a call of scatter_rows.  Raises ValueError or TypeError where shapes or dtypes are wrong."""
    if x.dim() != 2:
        raise ValueError(f"x: got shape {tuple(x.shape)}, wanted [T, D]")
    num_tokens, hidden = x.shape
    if slot_to_row.dim() != 2 or slot_to_row.shape[0] != num_tokens:
        raise ValueError(f"slot_to_row: got shape {tuple(slot_to_row.shape)}, wanted [T, K] with T = {num_tokens}")
    require_dtype("slot_to_row", slot_to_row, torch.int64)
    if num_rows < 0:
        raise ValueError(f"num_rows: got {num_rows}, wanted 0 or more")
    return num_tokens, slot_to_row.shape[1], hidden


def combine_sizes(rows: Tensor, slot_to_row: Tensor, weights: Tensor | None) -> tuple[int, int, int, int]:
    """T, K, R and D of a call of combine_rows.  Raises ValueError or TypeError where shapes or dtypes are wrong."""
    if rows.dim() != 2:
        raise ValueError(f"rows: got shape {tuple(rows.shape)}, wanted [R, D]")
    if slot_to_row.dim() != 2:
        raise ValueError(f"slot_to_row: got shape {tuple(slot_to_row.shape)}, wanted [T, K]")
    _require_floating("rows", rows.dtype)
    require_dtype("slot_to_row", slot_to_row, torch.int64)
    if weights is not None:
        require_dtype("weights", weights, torch.float32)
        if weights.shape != slot_to_row.shape:
            raise ValueError(
                f"weights: got shape {tuple(weights.shape)}, wanted that of slot_to_row, {tuple(slot_to_row.shape)}"
            )
    num_tokens, top_k = slot_to_row.shape
    num_rows, hidden = rows.shape
    return num_tokens, top_k, num_rows, hidden


def backward_sizes(grad: Tensor, rows: Tensor, slot_to_row: Tensor, weights: Tensor) -> tuple[int, int, int, int]:
    """T, K, R and D of a call of combine_rows_backward.  Raises as `combine_sizes`."""
    num_tokens, top_k, num_rows, hidden = combine_sizes(rows, slot_to_row, weights)
    if grad.shape != (num_tokens, hidden):
        raise ValueError(f"grad: got shape {tuple(grad.shape)}, wanted [T, D] = {(num_tokens, hidden)}")
    _require_floating("grad", grad.dtype)
    return num_tokens, top_k, num_rows, hidden


def require_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Raise TypeError unless `tensor` has `dtype`."""
    if tensor.dtype != dtype:
        raise TypeError(f"{name}: got {tensor.dtype}, wanted {dtype}; convert it with {name}.to({dtype})")


def _require_floating(name: str, dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        raise TypeError(f"{name}: got {dtype}, wanted a floating point dtype")


def _require_format(row_format: str) -> None:
    if row_format not in get_args(RowFormat):
        raise ValueError(f"row_format: got {row_format!r}, wanted one of {', '.join(get_args(RowFormat))}")
