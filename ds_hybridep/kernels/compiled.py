# SPDX-License-Identifier: Apache-2.0
"""The routing kernels of csrc/ on CPU tensors, and what the kernels on CUDA tensors (`cuda.py`) share with them.

Each call checks what the extension cannot see (shape, dtype, device, contiguity), allocates the result, and passes
addresses, sizes and type codes.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ds_hybridep.geometry.row_format import RowFormat, record_bytes

# As `enum class Type` and `enum class RowFormat` in csrc/include/hybridep_rows.h.
TYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FORMAT_CODES: dict[RowFormat, int] = {"int8": 0, "fp8": 1}

# Says where a call of the extension runs: gives its argument `lane`, a number of threads or a CUDA stream.
Lane = Callable[[torch.device], AbstractContextManager[int]]


@dataclass(frozen=True, kw_only=True)
class Routes:
    """Which token is sent to which destination, and where each slot, a (token, k), finds its row afterwards.

    Rows are sorted by destination, then by token; a token whose slots share a destination has one row there.
    Example, T = 2, K = 2, experts 0 and 1 at destination 0, expert 2 at destination 1:

        topk_idx = [[2, 0],     rows_per_destination = (2, 1)     slot_to_row       = [[2, 0],
                    [1, 0]]     row_to_token  = [0, 1, 0]                              [1, 1]]
                                row_topk_idx  = [[-1, 0],         first_slot_to_row = [[2, 0],
                                                 [1, 0],                               [1, -1]]
                                                 [2, -1]]
    """

    rows_per_destination: tuple[int, ...]  # N, their sum is R: the send splits
    row_to_token: Tensor  # [R] int64
    row_topk_idx: Tensor  # [R, K] int32, expert ids of the row's token at the row's destination, -1 in other slots
    slot_to_row: Tensor  # [T, K] int64, the row that serves a slot, -1 if none does
    first_slot_to_row: Tensor  # [T, K] int64, the same with -1 at repeats: a sum over k visits each row once

    @property
    def num_rows(self) -> int:
        return len(self.row_to_token)


class CompiledKernels:
    """The operations of `ReferenceKernels` on raw memory, split over torch.get_num_threads() threads.

    All tensors must be contiguous and on one device (the CPU here), because a silent copy would hide where the time
    goes.  Tensors that are summed must be fp32, bf16 or fp16.  Results do not depend on the number of threads.  They
    equal those of `ReferenceKernels` bit for bit, except grad_weights, whose dot products sum in another order, and
    grad_rows if tokens share a row.
    """

    name: str = "compiled"
    device_type: ClassVar[str] = "cpu"

    def __init__(self, extension: Any) -> None:
        """Wrap `extension`, the module that HybridEPBuilder loads."""
        self.extension = extension
        self.lane: Lane = lambda device: nullcontext(torch.get_num_threads())
        self._rows = extension  # what moves and sums rows

    def plan_routes(self, topk_idx: Tensor, expert_to_destination: Tensor, num_destinations: int) -> Routes:
        """Return which token goes to which destination, by its experts [T, K] and the place of each [E], int32."""
        sizes = sizes_of("plan_routes", *"TKE", topk_idx=topk_idx, expert_to_destination=expert_to_destination)
        num_tokens, top_k, _ = sizes
        self._device_of(topk_idx=topk_idx, expert_to_destination=expert_to_destination)
        extension = self.extension
        num_chunks = extension.plan_chunks(num_tokens, top_k, torch.get_num_threads())
        chunk_rows = torch.empty(num_chunks, num_destinations, dtype=torch.int64)
        rows_per_destination = torch.empty(num_destinations, dtype=torch.int64)
        given = (topk_idx, expert_to_destination, *sizes, num_destinations, num_chunks, chunk_rows)
        num_rows = call(extension.plan_count, *given, rows_per_destination)
        routes = Routes(
            rows_per_destination=tuple(rows_per_destination.tolist()),
            row_to_token=torch.empty(num_rows, dtype=torch.int64),
            row_topk_idx=torch.empty(num_rows, top_k, dtype=torch.int32),
            slot_to_row=torch.empty(num_tokens, top_k, dtype=torch.int64),
            first_slot_to_row=torch.empty(num_tokens, top_k, dtype=torch.int64),
        )
        filled = (routes.row_to_token, routes.row_topk_idx, routes.slot_to_row, routes.first_slot_to_row)
        call(extension.plan_fill, *given, *filled)
        return routes

    def dispatch_rows(self, x: Tensor, slot_to_row: Tensor, num_rows: int) -> Tensor:
        """Return rows [R, D] with each token of x [T, D] in the rows that slot_to_row [T, K] gives it."""
        num_tokens, top_k, hidden = sizes_of("dispatch_rows", *"TKD", x=x, slot_to_row=slot_to_row)
        device = self._device_of(x=x, slot_to_row=slot_to_row)
        out = torch.empty((num_rows, hidden), dtype=x.dtype, device=device)
        sizes = (num_tokens, top_k, num_rows, hidden)
        with self.lane(device) as lane:
            call(self._rows.dispatch_rows, x, slot_to_row, *sizes, x.element_size(), lane, out)
        return out

    def quantise_rows(self, x: Tensor, slot_to_row: Tensor, num_rows: int, row_format: RowFormat) -> Tensor:
        num_tokens, top_k, hidden = sizes_of("dispatch_rows", *"TKD", x=x, slot_to_row=slot_to_row)
        x_type, code = _type_code("x", x.dtype), FORMAT_CODES[row_format]
        device = self._device_of(x=x, slot_to_row=slot_to_row)
        records = torch.empty((num_rows, record_bytes(hidden)), dtype=torch.uint8, device=device)
        sizes = (num_tokens, top_k, num_rows, hidden)
        with self.lane(device) as lane:
            call(self._rows.quantise_rows, x, x_type, slot_to_row, *sizes, code, lane, records)
        return records

    def dequantise_rows(
        self, records: Tensor, hidden: int, row_format: RowFormat, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Tensor:
        require_records(records, hidden, dtype, out)
        out_type, code = _type_code("dtype", dtype), FORMAT_CODES[row_format]
        device = self._device_of(records=records, out=out)
        if out is None:
            out = torch.empty((len(records), hidden), dtype=dtype, device=device)
        with self.lane(device) as lane:
            call(self._rows.dequantise_rows, records, len(records), hidden, code, lane, out, out_type)
        return out

    def combine_rows(
        self, rows: Tensor, slot_to_row: Tensor, weights: Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """Sum the rows [R, D] of each token's slots in fp32, times weights [T, K] fp32; returns [T, D], rounded."""
        sizes = sizes_of("combine_rows", *"TKRD", rows=rows, slot_to_row=slot_to_row, weights=weights)
        rows_type = _type_code("rows", rows.dtype)
        out_type = rows_type if out_dtype is None else _type_code("out_dtype", out_dtype)
        device = self._device_of(rows=rows, slot_to_row=slot_to_row, weights=weights)
        out = torch.empty((len(slot_to_row), rows.shape[1]), dtype=out_dtype or rows.dtype, device=device)
        with self.lane(device) as lane:
            call(self._rows.combine_rows, rows, rows_type, slot_to_row, weights, *sizes, lane, out, out_type)
        return out

    def combine_rows_backward(
        self, grad: Tensor, rows: Tensor, slot_to_row: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        tensors = {"grad": grad, "rows": rows, "slot_to_row": slot_to_row, "weights": weights}
        sizes = sizes_of("combine_rows_backward", *"TKRD", **tensors)
        given = (grad, _type_code("grad", grad.dtype), rows, _type_code("rows", rows.dtype), slot_to_row, weights)
        device = self._device_of(**tensors)
        scratch = torch.empty(2 * len(rows) + slot_to_row.numel(), dtype=torch.int64, device=device)
        grad_rows, grad_weights = torch.empty_like(rows), torch.empty_like(weights)
        with self.lane(device) as lane:
            call(self._rows.combine_rows_backward, *given, *sizes, lane, scratch, grad_rows, grad_weights)
        return grad_rows, grad_weights

    def bit_sums(self, tensor: Tensor) -> Tensor:
        device = self._device_of(tensor=tensor)
        word_bytes = min(tensor.element_size(), 2)
        sums = torch.empty(2, dtype=torch.int64, device=device)
        with self.lane(device) as lane:
            call(self.extension.bit_sums, tensor, tensor.nbytes // word_bytes, word_bytes, lane, sums)
        return sums

    def _device_of(self, **tensors: Tensor | None) -> torch.device:
        """Return the device of all tensors; ValueError unless they are contiguous, on one device of `device_type`."""
        for name, tensor in tensors.items():
            if tensor is not None:
                require_contiguous(name, tensor)
        return device_of(self.device_type, tensors)


def call(function: Any, *arguments: object) -> Any:
    """Call a function of the extension, which takes addresses of tensors, and 0 for none."""
    addresses = []
    for one in arguments:
        is_number = type(one) is int
        addresses.append(
            one if is_number else 0 if one is None else one.data_ptr() if isinstance(one, Tensor) else one
        )
    return function(*addresses)


def _type_code(name: str, dtype: torch.dtype) -> int:
    code = TYPE_CODES.get(dtype)
    if code is None:
        wanted = ", ".join(str(dtype) for dtype in TYPE_CODES)
        raise TypeError(f'{name}: got {dtype}, wanted one of {wanted}; the "reference" kernels take any')
    return code


# --- Checks of shapes and dtypes: a wrong one would make the extension read memory that is not the tensor's ----------

# Of each operation's tensors: a letter for each dimension, and the dtype; None for any.
ARGUMENTS: dict[str, dict[str, tuple[str, torch.dtype | None]]] = {
    "plan_routes": {"topk_idx": ("TK", torch.int32), "expert_to_destination": ("E", torch.int32)},
    "dispatch_rows": {"x": ("TD", None), "slot_to_row": ("TK", torch.int64)},
    "combine_rows": {"rows": ("RD", None), "slot_to_row": ("TK", torch.int64), "weights": ("TK", torch.float32)},
}
ARGUMENTS["combine_rows_backward"] = {**ARGUMENTS["combine_rows"], "grad": ("TD", None)}


def sizes_of(operation: str, *dims: str, **tensors: Tensor | None) -> list[int]:
    """Check a call of `operation`, and return the sizes of the dimensions with these letters."""
    sizes: dict[str, int] = {}
    for name, (letters, dtype) in ARGUMENTS[operation].items():
        tensor = tensors[name]
        if tensor is None:
            continue
        shape = tensor.shape
        is_right = len(shape) == len(letters)
        for letter, size in zip(letters, shape if is_right else (), strict=False):
            is_right &= sizes.setdefault(letter, size) == size
        if not is_right:
            given = ", ".join(f"{letter} = {sizes[letter]}" for letter in letters if letter in sizes)
            wanted = f"[{', '.join(letters)}]" + (f" with {given}" if given else "")
            raise ValueError(f"{name}: got shape {tuple(shape)}, wanted {wanted}")
        if dtype not in (None, tensor.dtype):
            raise TypeError(f"{name}: got {tensor.dtype}, wanted {dtype}")
    return [sizes[letter] for letter in dims]


def require_records(records: Tensor, hidden: int, dtype: torch.dtype, out: Tensor | None) -> None:
    """Raise ValueError unless records are [R, record_bytes(hidden)] uint8, and out, if given, [R, hidden] in dtype."""
    num_bytes = record_bytes(hidden)
    if records.dtype != torch.uint8 or records.dim() != 2 or records.shape[1] != num_bytes:
        got = f"{records.dtype} {tuple(records.shape)}"
        raise ValueError(f"records: got {got}, wanted torch.uint8 [R, {num_bytes}] for rows of {hidden}")
    if out is not None and (out.dtype != dtype or out.shape != (len(records), hidden)):
        raise ValueError(f"out: got {out.dtype} {tuple(out.shape)}, wanted {dtype} [{len(records)}, {hidden}]")


def device_of(device_type: str, tensors: dict[str, Tensor | None]) -> torch.device:
    """Return the device of all tensors that are not None; ValueError unless it is one, of this type."""
    first, device = "", None
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if device is None:
            first, device = name, tensor.device
        elif tensor.device != device:
            raise ValueError(f"{name}: on device {tensor.device}, wanted {device}, where {first} is")
    assert device is not None, "no tensors"
    if device.type != device_type:
        raise ValueError(f"{first}: on device {device}, wanted {device_type}; load the kernels for that device")
    return device


def require_contiguous(name: str, tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: strides {tensor.stride()} are not contiguous; pass {name}.contiguous()")
