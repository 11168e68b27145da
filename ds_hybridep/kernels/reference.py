# SPDX-License-Identifier: Apache-2.0
"""The definition of each routing kernel in plain PyTorch.  Runs on every device and for every floating point dtype.

The operations come in adjoint pairs, so a backward pass needs no kernel of its own except for gate weights:

    forward                                          gradient of its first argument
    dispatch_rows(x, first_slot_to_row, R)           combine_rows(grad_rows, first_slot_to_row)
    combine_rows(rows, first_slot_to_row)            dispatch_rows(grad, first_slot_to_row, R)
    combine_rows(rows, slot_to_row, weights)         combine_rows_backward(grad, rows, slot_to_row, weights)

None of them records an autograd graph: callers wrap the pairs in `torch.autograd.Function`.  `quantise_rows` is
`dispatch_rows` with one byte per element, and `dequantise_rows` is its inverse.  This pair has no gradient: a caller
who wants one uses that of `dispatch_rows`, as if nothing had been rounded.

All raise ValueError if a shape is wrong, an id of a plan is out of range, a tensor is on another device or (compiled
kernels only) a tensor is not contiguous; TypeError if a dtype is wrong; IndexError if an index is out of range.
"""

import struct

import torch
from torch import Tensor

from ds_hybridep.geometry.row_format import SCALE_BLOCK, RowFormat, num_scales, record_bytes
from ds_hybridep.kernels.compiled import Routes, require_contiguous, require_records, sizes_of

FP32_BIAS, FP32_INFINITY, NOT_FINITE = 127, 0x7F800000, 255
SMALLEST_EXPONENT = 17  # scale 2^-110, so that no step of a format is a subnormal number, which processors may flush
POSITIONS = 65521  # of words in `bit_sums`, then 1 follows again: word times position fits 32 bits
WORDS_AT_A_TIME = 2**18  # bounds the memory of `bit_sums`
LARGEST_SCALED = {"int8": 127.0, "fp8": 464.0}  # 464 is the largest that rounds to 448, which is fp8's largest


class ReferenceKernels:
    """Kernels whose source is their definition."""

    name: str = "reference"  # what logs and benchmark records call this implementation

    def plan_routes(self, topk_idx: Tensor, expert_to_destination: Tensor, num_destinations: int) -> Routes:
        """Choose the rows to send to each of N destinations.

        topk_idx: [T, K] int32, expert of each slot; negative if the slot was dropped.
        expert_to_destination: [E] int32, in 0..N-1; negative if this plan does not route the expert.
        """
        tensors = {"topk_idx": topk_idx, "expert_to_destination": expert_to_destination}
        num_tokens, top_k, num_experts = sizes_of("plan_routes", *"TKE", **tensors)
        nowhere = num_destinations  # a destination past all others, for slots that are not routed

        # 1. Destination of every slot.  Dropped slots read the entry appended to the map.
        _require_below("topk_idx", topk_idx, num_experts, "experts")
        _require_below("expert_to_destination", expert_to_destination, num_destinations, "destinations")
        with_dropped = torch.cat([expert_to_destination, expert_to_destination.new_full((1,), -1)])
        slot_destination = with_dropped[torch.where(topk_idx < 0, num_experts, topk_idx).long()].long()  # [T, K]
        slot_destination = torch.where(slot_destination < 0, nowhere, slot_destination)

        # 2. The first slot of each distinct (token, destination) owns a row; later ones share it.
        is_same = slot_destination.unsqueeze(2) == slot_destination.unsqueeze(1)  # [T, K, K]
        first_slot = is_same.int().argmax(dim=2)  # [T, K], argmax returns the first of equals
        is_owner = (first_slot == torch.arange(top_k, device=topk_idx.device)) & (slot_destination != nowhere)

        # 3. Rows: owners sorted by destination.  The sort is stable and slots stand in token order.
        row_key = torch.where(is_owner, slot_destination, nowhere).reshape(-1)  # [T * K]
        counts = row_key.new_zeros(num_destinations + 1)
        counts.scatter_add_(0, row_key, torch.ones_like(row_key))
        # Device-to-host sync on an accelerator: R is the size of the tensors that follow.
        rows_per_destination = tuple(counts[:num_destinations].tolist())
        num_rows = sum(rows_per_destination)
        row_slot = torch.argsort(row_key, stable=True)[:num_rows]  # [R], flat index of the owner
        row_to_token = row_slot // top_k

        # 4. The same rows seen from the slots, and the experts that each row is for.
        first_slot_to_row = row_key.new_full((num_tokens * top_k,), -1)
        first_slot_to_row[row_slot] = torch.arange(num_rows, device=topk_idx.device)
        first_slot_to_row = first_slot_to_row.view(num_tokens, top_k)
        slot_to_row = torch.where(slot_destination == nowhere, -1, first_slot_to_row.gather(1, first_slot))
        is_here = slot_destination[row_to_token] == row_key[row_slot].unsqueeze(1)  # [R, K]
        row_topk_idx = torch.where(is_here, topk_idx[row_to_token], -1)
        return Routes(
            rows_per_destination=rows_per_destination,
            row_to_token=row_to_token,
            row_topk_idx=row_topk_idx,
            slot_to_row=slot_to_row,
            first_slot_to_row=first_slot_to_row,
        )

    def dispatch_rows(self, x: Tensor, slot_to_row: Tensor, num_rows: int) -> Tensor:
        """Copy each token to its rows: out[slot_to_row[t, k]] = x[t], [R, D] in x.dtype.

            x = [a, b, c], slot_to_row = [[-1, 1], [-1, -1], [2, 0]]  ->  [c, a, c]

        x: [T, D] of any dtype.
        slot_to_row: [T, K] int64, each row of 0..R-1 in one slot (`Routes.first_slot_to_row`); negative elsewhere.
        """
        sizes_of("dispatch_rows", x=x, slot_to_row=slot_to_row)
        return x.index_select(0, _row_to_token(slot_to_row, num_rows))

    def quantise_rows(self, x: Tensor, slot_to_row: Tensor, num_rows: int, row_format: RowFormat) -> Tensor:
        """Return records of what `dispatch_rows` returns, [R, record_bytes(D)] uint8, as in `geometry.row_format`.

        A block of 128 elements with the largest magnitude a has the scale s = 2^(exponent byte - 127):

            row_format  codes                                 s, a power of two, at least 2^-110
            int8        round(element / s), two's complement  the least with a <= 127 s
            fp8         element / s as float8_e4m3fn          the least with a <= 464 s, which rounds to 448 s

        Halves round to even.  Division and multiplication by a power of two are exact.  So an element is off by half a
        step at most (a step is s, or e4m3's step times s), the result fits the dtype of x without another rounding,
        and quantising it again gives the same record.  A block with inf or nan has the exponent byte 255 and codes of
        0: all of it becomes nan.  Other blocks are not affected.

        x: [T, D] floating point.  Elements beyond the range of fp32 count as inf.
        slot_to_row, num_rows: as in `dispatch_rows`.
        """
        hidden = x.shape[-1]
        rows = self.dispatch_rows(x, slot_to_row, num_rows)
        padded = torch.nn.functional.pad(rows.float(), (0, -hidden % SCALE_BLOCK))
        blocks = padded.view(num_rows, num_scales(hidden), SCALE_BLOCK)
        exponents = _exponents_of(blocks, LARGEST_SCALED[row_format])
        is_finite = (exponents != NOT_FINITE).unsqueeze(-1)
        scaled = torch.where(is_finite, blocks, 0.0) / torch.where(is_finite, _scales_of(exponents), 1.0)
        codes = scaled.to(torch.float8_e4m3fn) if row_format == "fp8" else scaled.round().to(torch.int8)
        records = torch.zeros((num_rows, record_bytes(hidden)), dtype=torch.uint8, device=x.device)
        records[:, :hidden] = codes.view(torch.uint8).flatten(1)[:, :hidden]
        records[:, hidden : hidden + exponents.shape[1]] = exponents
        return records

    def dequantise_rows(
        self, records: Tensor, hidden: int, row_format: RowFormat, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Tensor:
        """Return the rows [R, hidden] of records [R, record_bytes(hidden)] uint8 that `quantise_rows` has made.

        Elements are code times scale, at most the largest finite number of the floating point `dtype`.  Without this
        bound, a finite element near the largest number of its dtype could round to inf.

        out: where to write them, a contiguous tensor that is returned; None for a new one.
        """
        require_records(records, hidden, dtype, out)
        code_dtype = torch.float8_e4m3fn if row_format == "fp8" else torch.int8
        codes = records[:, :hidden].contiguous().view(code_dtype).to(torch.promote_types(dtype, torch.float32))
        exponents = records[:, hidden : hidden + num_scales(hidden)]
        values = codes * _scales_of(exponents).expand(-1, -1, SCALE_BLOCK).flatten(1)[:, :hidden]
        largest = torch.finfo(dtype).max
        rows = values.clamp(-largest, largest).to(dtype)
        return rows if out is None else out.copy_(rows)

    def combine_rows(
        self, rows: Tensor, slot_to_row: Tensor, weights: Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """Sum over the slots of each token: out[t] = sum_k weights[t, k] * rows[slot_to_row[t, k]], [T, D].

        Products and sums are fp32 (fp64 for fp64 rows), in slot order, rounded once at the end.

        rows: [R, D] floating point.
        slot_to_row: [T, K] int64 below R; negative if a slot adds nothing.
        weights: [T, K] fp32; None for ones.
        out_dtype: dtype of the result; None for rows.dtype.
        """
        tensors = {"rows": rows, "slot_to_row": slot_to_row, "weights": weights}
        num_tokens, top_k, num_rows, hidden = sizes_of("combine_rows", *"TKRD", **tensors)
        _require_rows(slot_to_row, num_rows)
        out = rows.new_zeros((num_tokens, hidden), dtype=_sum_dtype(rows))
        for k in range(top_k if num_rows else 0):
            row = slot_to_row[:, k]
            value = rows.index_select(0, row.clamp(min=0)).to(out.dtype)
            if weights is not None:
                value = value * weights[:, k, None]
            # Not a product with 0: the row that stands in for a missing one may hold inf or nan.
            out += torch.where((row >= 0).unsqueeze(1), value, 0.0)
        return out.to(out_dtype or rows.dtype)

    def combine_rows_backward(
        self, grad: Tensor, rows: Tensor, slot_to_row: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return gradients of weighted combine_rows: of `rows`, [R, D] in rows.dtype, and of `weights`, [T, K] fp32.

            grad_rows[r]       = sum of weights[t, k] * grad[t] over the slots that r serves, 0 if it serves none
            grad_weights[t, k] = <grad[t], rows[slot_to_row[t, k]]>, 0 where slot_to_row is negative

        grad: [T, D] floating point, gradient of the result; the other arguments as given to combine_rows.
        """
        tensors = {"grad": grad, "rows": rows, "slot_to_row": slot_to_row, "weights": weights}
        top_k, num_rows, hidden = sizes_of("combine_rows_backward", *"KRD", **tensors)
        _require_rows(slot_to_row, num_rows)
        wide_grad = grad.to(_sum_dtype(rows))
        # An extra row takes what slots without a row add.
        grad_rows = rows.new_zeros((num_rows + 1, hidden), dtype=wide_grad.dtype)
        grad_weights = torch.zeros_like(weights)
        for k in range(top_k if num_rows else 0):
            row = slot_to_row[:, k]
            is_missing = row < 0
            grad_rows.index_add_(0, torch.where(is_missing, num_rows, row), wide_grad * weights[:, k, None])
            dot = (wide_grad * rows.index_select(0, row.clamp(min=0))).sum(dim=1)
            grad_weights[:, k] = torch.where(is_missing, 0.0, dot)
        return grad_rows[:num_rows].to(rows.dtype), grad_weights

    def bit_sums(self, tensor: Tensor) -> Tensor:
        """Return [2] int64: the sum of a contiguous tensor's words, and of words times position, both modulo 2^64.

        Two ranks compare these instead of the tensors themselves.  A word is two bytes, signed; in tensors of one-byte
        elements it is one byte, unsigned.  Positions count from 1 and start again after 65521 words.  The extra memory
        is bounded.  The result is on the tensor's device, and the host does not wait for it.

            int16 {1, 2, -3}  ->  {0, -4}
        """
        require_contiguous("tensor", tensor)
        words = tensor.view(-1).view(torch.int16 if tensor.element_size() > 1 else torch.uint8)
        sums = torch.zeros(2, dtype=torch.int64, device=tensor.device)
        for begin in range(0, len(words), WORDS_AT_A_TIME):
            wide = words[begin : begin + WORDS_AT_A_TIME].long()
            positions = torch.arange(begin, begin + len(wide), device=tensor.device) % POSITIONS + 1
            sums += torch.stack([wide.sum(), (wide * positions).sum()])
        return sums


def _exponents_of(blocks: Tensor, largest_scaled: float) -> Tensor:
    """Return the exponent bytes of fp32 blocks [R, N, 128], [R, N] int32."""
    # fp32 magnitudes have the same order as their bits, and the next exponent is 2^23 more.
    largest = (blocks.view(torch.int32) & 0x7FFFFFFF).amax(dim=2)
    scaled_bits = int.from_bytes(struct.pack("<f", largest_scaled), "little")
    exponents = ((largest - scaled_bits + (1 << 23) - 1) >> 23) + FP32_BIAS
    return torch.where(largest < FP32_INFINITY, exponents.clamp(min=SMALLEST_EXPONENT), NOT_FINITE)


def _scales_of(exponents: Tensor) -> Tensor:
    """Return the scales of exponent bytes [R, N], [R, N, 1] fp32: powers of two, and inf for 255."""
    return (exponents.to(torch.int32) << 23).view(torch.float32).unsqueeze(-1)


def _sum_dtype(rows: Tensor) -> torch.dtype:
    """Return the dtype of sums over `rows`: fp32 or wider."""
    return torch.promote_types(rows.dtype, torch.float32)


def _require_below(name: str, ids: Tensor, limit: int, of_what: str) -> None:
    """Raise ValueError if `ids` holds `limit` or more.  Skipped on an accelerator, where reading it is a sync."""
    if ids.numel() and ids.device.type == "cpu":
        largest = int(ids.max())
        if largest >= limit:
            raise ValueError(f"{name}: holds {largest}, but there are {limit} {of_what}: wanted ids below {limit}")


def _require_rows(slot_to_row: Tensor, num_rows: int) -> None:
    """Raise IndexError if a slot has a row that is not below `num_rows`.  Skipped on an accelerator too."""
    if slot_to_row.numel() and slot_to_row.device.type == "cpu":
        largest = int(slot_to_row.max())
        if largest >= num_rows:
            raise IndexError(f"slot_to_row: holds {largest}, but there are {num_rows} rows")


def _row_to_token(slot_to_row: Tensor, num_rows: int) -> Tensor:
    """Return the token of each row, [R] int64; checks as in `_require_rows`."""
    _require_rows(slot_to_row, num_rows)
    num_tokens, top_k = slot_to_row.shape
    if slot_to_row.device.type == "cpu" and (found := int((slot_to_row >= 0).sum())) != num_rows:
        raise ValueError(
            f"slot_to_row: {found} slots have a row, but there are {num_rows} rows: wanted one slot for each"
        )
    token = torch.arange(num_tokens, device=slot_to_row.device).unsqueeze(1).expand(num_tokens, top_k)
    # An extra row takes the slots without a row.
    places = slot_to_row.where(slot_to_row >= 0, num_rows)
    return slot_to_row.new_zeros(num_rows + 1).scatter(0, places.flatten(), token.flatten())[:num_rows]
