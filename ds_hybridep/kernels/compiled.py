# SPDX-License-Identifier: Apache-2.0
"""The routing kernels of csrc/ on CPU tensors, and what those on CUDA tensors (`cuda.py`) share with them.

Each call checks what the extension cannot see (shape, dtype, device, contiguity), allocates the result, and passes
addresses, sizes and type codes.  All of it is in this one file.  The same operations are under `torch.ops.ds_hybridep`
with shape rules, for torch.compile and opcheck.
"""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, get_args

import torch
from torch import Tensor

from ds_hybridep.kernels.codecs import CompiledCodecs, Lane
from ds_hybridep.kernels.interface import RoutePlan
from ds_hybridep.plan.row_format import RowFormat, record_bytes

# As `enum class Type` and `enum class RowFormat` in csrc/include/hybridep_rows.h.
TYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FORMAT_CODES: dict[RowFormat, int] = {"int8": 0, "fp8": 1}

SCHEMAS = (
    "dispatch_rows(Tensor x, Tensor row_to_token) -> Tensor",
    "quantise_rows(Tensor x, Tensor row_to_token, str row_format) -> Tensor",
    "dequantise_rows(Tensor records, int hidden, str row_format, ScalarType dtype) -> Tensor",
    "combine_rows(Tensor rows, Tensor slot_to_row, Tensor? weights=None, *, ScalarType? out_dtype=None) -> Tensor",
    "combine_rows_backward(Tensor grad, Tensor rows, Tensor slot_to_row, Tensor weights) -> (Tensor, Tensor)",
)


class CompiledKernels:
    """Kernels on raw memory; what they compute is documented in `interface.Kernels`.

    All tensors must be contiguous and on one device, the CPU here, and those that are summed fp32, bf16 or fp16.
    Otherwise the methods raise ValueError or TypeError: a silent copy would hide where the time goes.  Work is split
    over torch.get_num_threads() threads; the results do not depend on their number.

    Results equal those of `ReferenceKernels` bit for bit, except grad_weights, whose dot products sum in another
    order, and grad_rows where tokens share a row.
    """

    name = "compiled"
    device_type: ClassVar[str] = "cpu"
    dispatch_key: ClassVar[str | None] = "CPU"  # under which torch.ops finds these kernels

    def __init__(self, extension: Any) -> None:
        """Wrap `extension`, the module that HybridEPBuilder loads."""
        self._extension = extension
        self._dispatch_rows: Callable[..., None] = extension.dispatch_rows
        self._combine_rows: Callable[..., None] = extension.combine_rows
        self._lane: Lane = _threads
        self.codecs = CompiledCodecs(extension)
        if self.dispatch_key is not None:
            _register_ops(self, self.dispatch_key)

    def plan_routes(self, topk_idx: Tensor, expert_to_destination: Tensor, num_destinations: int) -> RoutePlan:
        """See `Kernels.plan_routes`."""
        num_tokens, top_k, num_experts = plan_sizes(topk_idx, expert_to_destination, num_destinations)
        self._device_of(topk_idx=topk_idx, expert_to_destination=expert_to_destination)
        extension = self._extension
        num_chunks = extension.plan_chunks(num_tokens, top_k, torch.get_num_threads())
        chunk_rows = torch.empty(num_chunks, num_destinations, dtype=torch.int64)
        rows_per_destination = torch.empty(num_destinations, dtype=torch.int64)
        routes = (
            topk_idx.data_ptr(),
            expert_to_destination.data_ptr(),
            num_tokens,
            top_k,
            num_experts,
            num_destinations,
            num_chunks,
            chunk_rows.data_ptr(),
        )
        num_rows = extension.plan_count(*routes, rows_per_destination.data_ptr())
        plan = RoutePlan(
            rows_per_destination=rows_per_destination,
            row_to_token=torch.empty(num_rows, dtype=torch.int64),
            row_topk_idx=torch.empty(num_rows, top_k, dtype=torch.int32),
            slot_to_row=torch.empty(num_tokens, top_k, dtype=torch.int64),
            first_slot_to_row=torch.empty(num_tokens, top_k, dtype=torch.int64),
        )
        extension.plan_fill(
            *routes,
            plan.row_to_token.data_ptr(),
            plan.row_topk_idx.data_ptr(),
            plan.slot_to_row.data_ptr(),
            plan.first_slot_to_row.data_ptr(),
        )
        return plan

    def dispatch_rows(self, x: Tensor, row_to_token: Tensor) -> Tensor:
        """See `Kernels.dispatch_rows`."""
        num_tokens, hidden, num_rows = dispatch_sizes(x, row_to_token)
        device = self._device_of(x=x, row_to_token=row_to_token)
        out = torch.empty((num_rows, hidden), dtype=x.dtype, device=device)
        with self._lane(device) as lane:
            self._dispatch_rows(
                x.data_ptr(),
                row_to_token.data_ptr(),
                num_tokens,
                num_rows,
                hidden * x.element_size(),
                lane,
                out.data_ptr(),
            )
        return out

    def quantise_rows(self, x: Tensor, row_to_token: Tensor, row_format: RowFormat) -> Tensor:
        """See `Kernels.quantise_rows`."""
        num_tokens, hidden, num_rows = quantise_sizes(x, row_to_token, row_format)
        x_type = _type_code("x", x.dtype)
        device = self._device_of(x=x, row_to_token=row_to_token)
        records = torch.empty((num_rows, record_bytes(hidden)), dtype=torch.uint8, device=device)
        with self._lane(device) as lane:
            self._extension.quantise_rows(
                x.data_ptr(),
                x_type,
                row_to_token.data_ptr(),
                num_tokens,
                num_rows,
                hidden,
                FORMAT_CODES[row_format],
                lane,
                records.data_ptr(),
            )
        return records

    def dequantise_rows(self, records: Tensor, hidden: int, row_format: RowFormat, dtype: torch.dtype) -> Tensor:
        """See `Kernels.dequantise_rows`."""
        num_rows = dequantise_sizes(records, hidden, row_format, dtype)
        out_type = _type_code("dtype", dtype)
        device = self._device_of(records=records)
        out = torch.empty((num_rows, hidden), dtype=dtype, device=device)
        with self._lane(device) as lane:
            self._extension.dequantise_rows(
                records.data_ptr(), num_rows, hidden, FORMAT_CODES[row_format], lane, out.data_ptr(), out_type
            )
        return out

    def combine_rows(
        self, rows: Tensor, slot_to_row: Tensor, weights: Tensor | None = None, *, out_dtype: torch.dtype | None = None
    ) -> Tensor:
        """See `Kernels.combine_rows`."""
        num_tokens, top_k, num_rows, hidden = combine_sizes(rows, slot_to_row, weights)
        rows_type = _type_code("rows", rows.dtype)
        out_type = rows_type if out_dtype is None else _type_code("out_dtype", out_dtype)
        device = self._device_of(rows=rows, slot_to_row=slot_to_row, weights=weights)
        out = torch.empty((num_tokens, hidden), dtype=out_dtype or rows.dtype, device=device)
        with self._lane(device) as lane:
            self._combine_rows(
                rows.data_ptr(),
                rows_type,
                slot_to_row.data_ptr(),
                0 if weights is None else weights.data_ptr(),
                num_tokens,
                top_k,
                num_rows,
                hidden,
                lane,
                out.data_ptr(),
                out_type,
            )
        return out

    def combine_rows_backward(
        self, grad: Tensor, rows: Tensor, slot_to_row: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See `Kernels.combine_rows_backward`."""
        num_tokens, top_k, num_rows, hidden = backward_sizes(grad, rows, slot_to_row, weights)
        grad_type = _type_code("grad", grad.dtype)
        rows_type = _type_code("rows", rows.dtype)
        device = self._device_of(grad=grad, rows=rows, slot_to_row=slot_to_row, weights=weights)
        scratch = torch.empty(2 * num_rows + num_tokens * top_k, dtype=torch.int64, device=device)
        grad_rows = torch.empty((num_rows, hidden), dtype=rows.dtype, device=device)
        grad_weights = torch.empty((num_tokens, top_k), dtype=torch.float32, device=device)
        with self._lane(device) as lane:
            self._extension.combine_rows_backward(
                grad.data_ptr(),
                grad_type,
                rows.data_ptr(),
                rows_type,
                slot_to_row.data_ptr(),
                weights.data_ptr(),
                num_tokens,
                top_k,
                num_rows,
                hidden,
                lane,
                scratch.data_ptr(),
                grad_rows.data_ptr(),
                grad_weights.data_ptr(),
            )
        return grad_rows, grad_weights

    def bit_sums(self, tensor: Tensor) -> Tensor:
        """See `Kernels.bit_sums`."""
        device = self._device_of(tensor=tensor)
        word_bytes = min(tensor.element_size(), 2)
        sums = torch.empty(2, dtype=torch.int64, device=device)
        with self._lane(device) as lane:
            self._extension.bit_sums(tensor.data_ptr(), tensor.nbytes // word_bytes, word_bytes, lane, sums.data_ptr())
        return sums

    def _device_of(self, **tensors: Tensor | None) -> torch.device:
        """The device of all tensors.  Raises ValueError unless it is one device of ours, and all are contiguous.

        Only then do addresses and sizes tell all of them.
        """
        device: torch.device | None = None
        for name, tensor in tensors.items():
            if tensor is None:
                continue
            if tensor.device.type != self.device_type:
                wanted = self.device_type
                raise ValueError(
                    f"{name}: on device {tensor.device}, wanted {wanted}; use load_kernels for that device"
                )
            if device is not None and tensor.device != device:
                raise ValueError(
                    f"{name}: on device {tensor.device}, wanted {device}, where the arguments before it are"
                )
            if not tensor.is_contiguous():
                raise ValueError(f"{name}: strides {tensor.stride()} are not contiguous; pass {name}.contiguous()")
            device = tensor.device
        assert device is not None
        return device


def _type_code(name: str, dtype: torch.dtype) -> int:
    """Code of `dtype` in the extension.  Raises TypeError if it has none."""
    code = TYPE_CODES.get(dtype)
    if code is None:
        wanted = ", ".join(str(dtype) for dtype in TYPE_CODES)
        raise TypeError(f'{name}: got {dtype}, wanted one of {wanted}; the "reference" kernels take any')
    return code


def _threads(device: torch.device) -> AbstractContextManager[int]:
    """As many threads as torch would use."""
    return nullcontext(torch.get_num_threads())


# --- Checks of shapes and dtypes -------------------------------------------------------------------------------------


def plan_sizes(topk_idx: Tensor, expert_to_destination: Tensor, num_destinations: int) -> tuple[int, int, int]:
    """T, K and E of a call of plan_routes.  Raises ValueError or TypeError where shapes or dtypes are wrong."""
    if topk_idx.dim() != 2 or topk_idx.shape[1] < 1:
        raise ValueError(f"topk_idx: got shape {tuple(topk_idx.shape)}, wanted [T, K] with K of 1 or more")
    if expert_to_destination.dim() != 1:
        raise ValueError(f"expert_to_destination: got shape {tuple(expert_to_destination.shape)}, wanted [E]")
    if num_destinations < 1:
        raise ValueError(f"num_destinations: got {num_destinations}, wanted 1 or more")
    _require_dtype("topk_idx", topk_idx, torch.int32)
    _require_dtype("expert_to_destination", expert_to_destination, torch.int32)
    num_tokens, top_k = topk_idx.shape
    return num_tokens, top_k, expert_to_destination.shape[0]


def dispatch_sizes(x: Tensor, row_to_token: Tensor) -> tuple[int, int, int]:
    """T, D and R of a call of dispatch_rows.  Raises ValueError or TypeError where shapes or dtypes are wrong."""
    if x.dim() != 2:
        raise ValueError(f"x: got shape {tuple(x.shape)}, wanted [T, D]")
    if row_to_token.dim() != 1:
        raise ValueError(f"row_to_token: got shape {tuple(row_to_token.shape)}, wanted [R]")
    _require_dtype("row_to_token", row_to_token, torch.int64)
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
    _require_dtype("records", records, torch.uint8)
    _require_floating("dtype", dtype)
    _require_format(row_format)
    return records.shape[0]


def combine_sizes(rows: Tensor, slot_to_row: Tensor, weights: Tensor | None) -> tuple[int, int, int, int]:
    """T, K, R and D of a call of combine_rows.  Raises ValueError or TypeError where shapes or dtypes are wrong."""
    if rows.dim() != 2:
        raise ValueError(f"rows: got shape {tuple(rows.shape)}, wanted [R, D]")
    if slot_to_row.dim() != 2:
        raise ValueError(f"slot_to_row: got shape {tuple(slot_to_row.shape)}, wanted [T, K]")
    _require_floating("rows", rows.dtype)
    _require_dtype("slot_to_row", slot_to_row, torch.int64)
    if weights is not None:
        _require_dtype("weights", weights, torch.float32)
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


def _require_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Raise TypeError unless `tensor` has `dtype`."""
    if tensor.dtype != dtype:
        raise TypeError(f"{name}: got {tensor.dtype}, wanted {dtype}; convert it with {name}.to({dtype})")


def _require_floating(name: str, dtype: torch.dtype) -> None:
    if not dtype.is_floating_point:
        raise TypeError(f"{name}: got {dtype}, wanted a floating point dtype")


def _require_format(row_format: str) -> None:
    if row_format not in get_args(RowFormat):
        raise ValueError(f"row_format: got {row_format!r}, wanted one of {', '.join(get_args(RowFormat))}")


# --- torch.library: shape rules of the operations whose output sizes follow from input sizes -------------------------


def _dispatch_shape(x: Tensor, row_to_token: Tensor) -> Tensor:
    _, hidden, num_rows = dispatch_sizes(x, row_to_token)
    return x.new_empty((num_rows, hidden))


def _quantise_shape(x: Tensor, row_to_token: Tensor, row_format: RowFormat) -> Tensor:
    _, hidden, num_rows = quantise_sizes(x, row_to_token, row_format)
    return x.new_empty((num_rows, record_bytes(hidden)), dtype=torch.uint8)


def _dequantise_shape(records: Tensor, hidden: int, row_format: RowFormat, dtype: torch.dtype) -> Tensor:
    num_rows = dequantise_sizes(records, hidden, row_format, dtype)
    return records.new_empty((num_rows, hidden), dtype=dtype)


def _combine_shape(
    rows: Tensor, slot_to_row: Tensor, weights: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    num_tokens, _, _, hidden = combine_sizes(rows, slot_to_row, weights)
    return rows.new_empty((num_tokens, hidden), dtype=out_dtype or rows.dtype)


def _combine_backward_shape(grad: Tensor, rows: Tensor, slot_to_row: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    backward_sizes(grad, rows, slot_to_row, weights)
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape)


SHAPES: dict[str, Callable[..., Any]] = {
    "dispatch_rows": _dispatch_shape,
    "quantise_rows": _quantise_shape,
    "dequantise_rows": _dequantise_shape,
    "combine_rows": _combine_shape,
    "combine_rows_backward": _combine_backward_shape,
}

# Dispatch keys whose kernels are registered.  For the process, with the first instance.
_registered: set[str] = set()


@functools.cache  # torch drops the ops when the library is collected
def _library() -> Any:
    """The definition of `torch.ops.ds_hybridep.*`, with their shape rules."""
    library_type: Any = torch.library.Library  # its methods have no types
    library = library_type("ds_hybridep", "DEF")
    for schema in SCHEMAS:
        library.define(schema, tags=torch.Tag.pt2_compliant_tag)
    for op, shape in SHAPES.items():
        torch.library.register_fake(f"ds_hybridep::{op}", shape, lib=library)
    return library


def _register_ops(kernels: CompiledKernels, dispatch_key: str) -> None:
    """Let `torch.ops.ds_hybridep.*` call `kernels` for tensors of this key, unless others are called already."""
    if dispatch_key in _registered:
        return
    _registered.add(dispatch_key)
    for op in SHAPES:
        _library().impl(op, getattr(kernels, op), dispatch_key)
