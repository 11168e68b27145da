# SPDX-License-Identifier: Apache-2.0
"""The compiled kernels against their definitions; and what both say to arguments that are wrong.

"compiled" are those for the CPU, "emulated" those for CUDA run on the CPU (see cuda_emulation), "cuda" those on a GPU.
"""

import math
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cuda_emulation import load_emulated
from hypothesis import given
from hypothesis import strategies as st
from kernel_refs import (
    assert_same_plan,
    combines,
    dispatch_by_loops,
    large_routes,
    payload,
    routes,
    slots_with_rows,
    token_rows,
)
from on_device import on_cuda
from torch.utils._python_dispatch import TorchDispatchMode

from ds_hybridep.kernels import load_kernels

# The first test compiles the kernels where no cached build exists.

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROW_FORMATS = ["int8", "fp8"]
# Of every unit that rows move in, alone and with a rest; one, almost one, several pieces of a warp or a stage.
ROW_BYTES = [0, 1, 2, 6, 12, 16, 48, 129, 2032, 2048, 2064, 6160, 16 * 1024 + 16]
OFFSETS = [0, 0, 1, 2, 4, 8]  # of the first byte from a multiple of 16

reference = load_kernels("reference")


LOADED = {
    "compiled": lambda: load_kernels("compiled"),
    "compiled, 3 threads": lambda: load_kernels("compiled"),
    "emulated": load_emulated,
    "emulated on 3 SMs": lambda: load_emulated(dispatch_sms=3),
    "cuda": lambda: on_cuda(load_kernels("compiled", "cuda")),
    "cuda on 8 SMs": lambda: on_cuda(load_kernels("compiled", "cuda", dispatch_sms=8)),
}
MARKS = {"cuda": [pytest.mark.gpu], "cuda on 8 SMs": [pytest.mark.gpu], "emulated on 3 SMs": [pytest.mark.slow]}
ALL = [pytest.param(name, marks=MARKS.get(name, [])) for name in LOADED]


@pytest.fixture(scope="module", params=ALL)
def compiled(request):
    before = torch.get_num_threads()
    torch.set_num_threads(3 if "threads" in request.param else 1)
    yield LOADED[request.param]()
    torch.set_num_threads(before)


@pytest.fixture(params=["reference", "compiled", "emulated"])
def kernels(request):
    return load_emulated() if request.param == "emulated" else load_kernels(request.param)


def assert_identical(actual, wanted):
    torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)


def assert_same_dots(actual, wanted, grad, rows, slot_to_row):
    """Dot products of the same fp32 numbers in another order: apart by a few roundings of the sum of magnitudes."""
    size = (grad.float().abs().unsqueeze(1) * rows.float().abs()[slot_to_row.clamp(min=0)]).sum(dim=2)
    assert ((actual - wanted).abs() <= 1e-6 * size).all()
    assert not actual[slot_to_row < 0].any()


@given(arguments=routes())
def test_plan_equals_the_reference(compiled, arguments):
    assert_same_plan(compiled.plan_routes(*arguments), reference.plan_routes(*arguments))


def test_plan_of_many_tokens_equals_the_reference(compiled):
    arguments = large_routes()
    assert_same_plan(compiled.plan_routes(*arguments), reference.plan_routes(*arguments))


@given(arguments=routes())
def test_dispatch_equals_the_reference(compiled, arguments):
    plan = reference.plan_routes(*arguments)
    places = plan.first_slot_to_row, plan.num_rows
    for dtype in (*DTYPES, torch.float64, torch.int32, torch.uint8):
        x = (payload(arguments[0].shape[0], 7) * 100).abs().to(dtype)
        rows = compiled.dispatch_rows(x, *places)
        assert_identical(rows, reference.dispatch_rows(x, *places))
        assert_identical(rows, x[plan.row_to_token])


@given(
    data=st.data(), num_tokens=st.integers(0, 5), row_bytes=st.sampled_from(ROW_BYTES), offset=st.sampled_from(OFFSETS)
)
def test_tokens_of_any_length_and_address_come_to_their_rows(compiled, data, num_tokens, row_bytes, offset):
    """Rows in any order, tokens with all, some or no slots that have one, more slots than a warp has lanes."""
    places = data.draw(slots_with_rows(num_tokens, max_top_k=data.draw(st.sampled_from([1, 4, 9, 40]))))
    base = torch.arange(offset + num_tokens * row_bytes, dtype=torch.int32).remainder(251).to(torch.uint8)
    x = base[offset:].view(num_tokens, row_bytes)
    assert_identical(compiled.dispatch_rows(x, *places), dispatch_by_loops(x, *places))


@given(arguments=token_rows())
def test_records_and_their_rows_equal_the_reference(compiled, arguments):
    hidden = arguments[0].shape[1]
    for row_format in ROW_FORMATS:
        records = compiled.quantise_rows(*arguments, row_format)
        assert_identical(records, reference.quantise_rows(*arguments, row_format))
        for dtype in DTYPES:
            rows = compiled.dequantise_rows(records, hidden, row_format, dtype)
            assert_identical(rows, reference.dequantise_rows(records, hidden, row_format, dtype))


@pytest.mark.parametrize("hidden", [7, pytest.param(512, marks=pytest.mark.slow), 1104])
def test_records_of_many_rows_equal_the_reference(compiled, hidden):
    plan = reference.plan_routes(*large_routes(num_tokens=300))
    places = plan.first_slot_to_row, plan.num_rows
    for dtype in DTYPES:
        x = payload(300, hidden, dtype)
        for row_format in ROW_FORMATS:
            records = compiled.quantise_rows(x, *places, row_format)
            assert_identical(records, reference.quantise_rows(x, *places, row_format))
            rows = compiled.dequantise_rows(records, hidden, row_format, dtype)
            wanted = reference.dequantise_rows(records, hidden, row_format, dtype)
            assert_identical(rows, wanted)
            place = torch.full((len(rows) + 2, hidden), 7.0, dtype=dtype)
            compiled.dequantise_rows(records, hidden, row_format, dtype, out=place[1:-1])
            assert_identical(place, torch.nn.functional.pad(wanted, (0, 0, 1, 1), value=7.0))


def test_rounding_to_fp8_is_that_of_torch(compiled):
    """fp32 patterns around every step and every halfway case, subnormals and what rounds to 0 included."""
    steps = torch.arange(0x3A000000, 0x43E80000, 1 << 19)  # 2^-11 to 464
    near = torch.tensor([0, 1, 0x3FFFF, 0x40000, 0x40001, 0x7FFFF])
    values = (steps[:, None] + near).flatten().to(torch.int32).view(torch.float32)
    values = torch.cat([values, -values, torch.tensor([0.0, -0.0, 464.0, -464.0, 1e-30])])
    values = torch.nn.functional.pad(values, (0, -len(values) % 127)).view(-1, 127)
    x = torch.cat([torch.full((len(values), 1), 448.0), values], dim=1)  # a block with a scale of 1
    records = compiled.quantise_rows(x, torch.arange(len(x))[:, None], len(x), "fp8")
    assert records[:, 128].eq(127).all()
    assert_identical(records[:, :128], x.to(torch.float8_e4m3fn).view(torch.uint8))
    rows = compiled.dequantise_rows(records, 128, "fp8", torch.float32)
    assert_identical(rows, x.to(torch.float8_e4m3fn).float())


@given(arguments=combines())
def test_combine_equals_the_reference_bit_for_bit(compiled, arguments):
    rows, slot_to_row, weights = arguments
    for out_dtype in (None, *DTYPES):
        for given_weights in (weights, None):
            out = compiled.combine_rows(rows, slot_to_row, given_weights, out_dtype=out_dtype)
            wanted = reference.combine_rows(rows, slot_to_row, given_weights, out_dtype=out_dtype)
            assert_identical(out, wanted)


@given(arguments=combines())
def test_combine_backward_equals_the_reference(compiled, arguments):
    rows, slot_to_row, weights = arguments
    for grad_dtype in (rows.dtype, torch.float32):
        grad = payload(slot_to_row.shape[0], rows.shape[1], grad_dtype, salt=2)
        grad_rows, grad_weights = compiled.combine_rows_backward(grad, rows, slot_to_row, weights)
        wanted_rows, wanted_weights = reference.combine_rows_backward(grad, rows, slot_to_row, weights)
        # Tokens that share a row are summed in another order: 1e-6 of up to 64 terms, then one rounding.
        rounding = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[rows.dtype]
        torch.testing.assert_close(grad_rows, wanted_rows, rtol=rounding, atol=6e-5)
        if len(rows):
            assert_same_dots(grad_weights, wanted_weights, grad, rows, slot_to_row)
        else:
            assert not grad_weights.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (511, 512)), 513, 1104])
def test_routed_tokens_there_and_back(compiled, dtype, hidden):
    """All operations in the order of a layer, with more columns than are summed at a time."""
    topk_idx, expert_to_destination, num_destinations = large_routes(num_tokens=700)
    plan = compiled.plan_routes(topk_idx, expert_to_destination, num_destinations)
    x, weights = payload(700, hidden, dtype), payload(*topk_idx.shape, salt=1)
    rows = compiled.dispatch_rows(x, plan.first_slot_to_row, plan.num_rows)
    assert 700 < len(rows) < 700 * 4  # some slots share a row
    assert_identical(rows, x[plan.row_to_token])
    assert_identical(
        compiled.combine_rows(rows, plan.slot_to_row, weights), reference.combine_rows(rows, plan.slot_to_row, weights)
    )
    assert_identical(
        compiled.combine_rows(rows, plan.first_slot_to_row), reference.combine_rows(rows, plan.first_slot_to_row)
    )
    grad = payload(700, hidden, dtype, salt=2)
    grad_rows, grad_weights = compiled.combine_rows_backward(grad, rows, plan.slot_to_row, weights)
    wanted_rows, wanted_weights = reference.combine_rows_backward(grad, rows, plan.slot_to_row, weights)
    assert_identical(grad_rows, wanted_rows)  # a row belongs to one token, whose slots come in order
    assert_same_dots(grad_weights, wanted_weights, grad, rows, plan.slot_to_row)


def test_every_half_precision_number_survives_the_way_through_fp32(compiled):
    all_bits = torch.arange(-(2**15), 2**15, dtype=torch.int64).to(torch.int16).view(-1, 256)
    slot_to_row = torch.arange(256).view(-1, 1)
    for dtype in (torch.bfloat16, torch.float16):
        values = all_bits.view(dtype)
        out = compiled.combine_rows(values, slot_to_row)
        wide = compiled.combine_rows(values, slot_to_row, out_dtype=torch.float32)
        assert_identical(out, values)
        assert_identical(wide, values.float())


def test_rounding_to_half_precision_is_that_of_torch(compiled):
    """Halfway cases, overflow, subnormals, inf and nan: fp32 patterns all over the range, and around every step."""
    steps = torch.arange(2**16, dtype=torch.int64) << 16
    near = torch.tensor([0, 1, 0xFFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x3001, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    bits = (steps.unsqueeze(1) + near).view(-1, 256)
    values = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)
    slot_to_row = torch.arange(len(values)).view(-1, 1)
    for dtype in (torch.bfloat16, torch.float16):
        assert_identical(compiled.combine_rows(values, slot_to_row, out_dtype=dtype), values.to(dtype))


@pytest.mark.parametrize("compiled", ["compiled"], indirect=True)
def test_calls_from_several_threads(compiled):
    """The GIL is released inside a kernel, so calls overlap."""
    plan, x = reference.plan_routes(*large_routes()), payload(6000, 64)

    def there_and_back(kernels, i):
        return kernels.combine_rows(
            kernels.dispatch_rows(x + i, plan.first_slot_to_row, plan.num_rows), plan.first_slot_to_row
        )

    with ThreadPoolExecutor(4) as pool:
        for i, result in enumerate(pool.map(lambda i: there_and_back(compiled, i), range(4))):
            assert_identical(result, there_and_back(reference, i))


# --- Sums of bits ----------------------------------------------------------------------------------------------------

BIT_SUM_DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.int8, torch.bool]


def bit_sums_by_loops(tensor):
    """As documented, over Python numbers."""
    size = 2 if tensor.element_size() > 1 else 1
    data = tensor.view(-1).view(torch.uint8).numpy().tobytes()
    words = [int.from_bytes(data[i : i + size], "little", signed=size > 1) for i in range(0, len(data), size)]
    sums = [sum(words), sum(word * (i % 65521 + 1) for i, word in enumerate(words))]
    return [(value + 2**63) % 2**64 - 2**63 for value in sums]


@pytest.mark.parametrize("dtype", BIT_SUM_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0,), (1,), (), (3, 5, 7), (70_001,)], ids=str)
def test_bit_sums_are_what_loops_give(kernels, dtype, shape):
    tensor = (payload(1, math.prod(shape)) * 100).to(dtype).view(shape)
    sums = kernels.bit_sums(tensor)
    assert sums.dtype == torch.int64
    assert sums.tolist() == bit_sums_by_loops(tensor)


@pytest.mark.parametrize("value", [-(2**15), 2**15 - 1])
def test_bit_sums_of_large_tensors_agree(compiled, value):
    """More words than the definition takes at a time, and all as large as they can be."""
    tensor = torch.full((3 * 2**20 + 11,), value, dtype=torch.int16)
    if compiled.name.startswith("emulated"):
        tensor = tensor[: 2**17 + 11]  # a fiber for each thread takes long
    assert compiled.bit_sums(tensor).tolist() == reference.bit_sums(tensor).tolist()


def test_bit_sums_tell_two_swapped_rows_apart(kernels):
    tensor = payload(4, 8, torch.bfloat16)
    first, second = kernels.bit_sums(tensor), kernels.bit_sums(tensor[[1, 0, 2, 3]])
    assert first[0] == second[0]
    assert first[1] != second[1]


def test_bit_sums_take_bounded_memory_beside_the_tensor():
    """Verification compares whole replicas, which leave no room for wider copies of themselves."""

    class Largest(TorchDispatchMode):
        num_bytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() != address:
                self.num_bytes = max(self.num_bytes, out.nbytes)
            return out

    tensor = torch.ones(2**24 + 3, dtype=torch.bfloat16)
    address = tensor.untyped_storage().data_ptr()
    for kernels, limit in ((reference, 2**20 * 8), (load_kernels("compiled"), 16)):
        with Largest() as largest:
            kernels.bit_sums(tensor)
        assert 0 < largest.num_bytes <= limit


# --- Wrong arguments: the same messages from both implementations, and those of memory from the compiled one ---------

TOPK_IDX = torch.tensor([[0, 1]], dtype=torch.int32)
DESTINATIONS = torch.tensor([0, 1], dtype=torch.int32)
ROWS, SLOTS, WEIGHTS = torch.ones(3, 4), torch.tensor([[0, 2]]), torch.ones(1, 2)
PLACES = torch.tensor([[0], [-1], [1]])
RECORDS = torch.zeros(2, 16, dtype=torch.uint8)
WIDE_RECORDS, TRANSPOSED = torch.zeros(2, 32, dtype=torch.uint8)[:, :16], torch.ones(4, 3).t()
PLAN, BACKWARD = "plan_routes", "combine_rows_backward"

WRONG = {
    ValueError: [
        ("topk_idx: holds 7, but there are 2 experts: wanted ids below 2", PLAN, TOPK_IDX * 7, DESTINATIONS, 2),
        ("expert_to_destination: holds 1, but there are 1 destinations", PLAN, TOPK_IDX, DESTINATIONS, 1),
        ("topk_idx: got shape (2,), wanted [T, K]", PLAN, TOPK_IDX[0], DESTINATIONS, 2),
        ("expert_to_destination: got shape (1, 2), wanted [E]", PLAN, TOPK_IDX, DESTINATIONS[None], 2),
        ("x: got shape (4,), wanted [T, D]", "dispatch_rows", ROWS[0], PLACES, 2),
        ("slot_to_row: got shape (3,), wanted [T, K] with T = 3", "dispatch_rows", ROWS, PLACES[:, 0], 2),
        ("slot_to_row: got shape (2, 1), wanted [T, K] with T = 3", "quantise_rows", ROWS, PLACES[:2], 2, "int8"),
        ("records: got torch.uint8 (2, 16), wanted", "dequantise_rows", RECORDS, 16, "int8", torch.float32),
        ("records: got torch.int8 (2, 16)", "dequantise_rows", RECORDS.char(), 4, "int8", torch.float32),
        ("weights: got shape (1, 1), wanted [T, K] with T = 1, K = 2", "combine_rows", ROWS, SLOTS, WEIGHTS[:, :1]),
        ("rows: got shape (4,), wanted [R, D]", "combine_rows", ROWS[0], SLOTS),
        ("slot_to_row: got shape (2,), wanted [T, K]", "combine_rows", ROWS, SLOTS[0]),
        ("grad: got shape (3, 4), wanted [T, D] with T = 1, D = 4", BACKWARD, ROWS, ROWS, SLOTS, WEIGHTS),
    ],
    TypeError: [
        ("topk_idx: got torch.int64, wanted torch.int32", PLAN, TOPK_IDX.long(), DESTINATIONS, 2),
        ("expert_to_destination: got torch.int64, wanted", PLAN, TOPK_IDX, DESTINATIONS.long(), 2),
        ("slot_to_row: got torch.int32, wanted torch.int64", "dispatch_rows", ROWS, PLACES.int(), 2),
        ("weights: got torch.float64", "combine_rows", ROWS, SLOTS, WEIGHTS.double()),
    ],
    IndexError: [
        ("slot_to_row: holds 2, but there are 2 rows", "dispatch_rows", ROWS, PLACES + 1, 2),
        ("slot_to_row: holds 0, but there are 0 rows", "dispatch_rows", ROWS, PLACES - 1, 0),
        ("slot_to_row: holds 2, but there are 2 rows", "quantise_rows", ROWS, PLACES + 1, 2, "int8"),
        ("slot_to_row: holds 3, but there are 3 rows", "combine_rows", ROWS, SLOTS + 1),
        ("slot_to_row: holds 1, but there are 0 rows", "combine_rows", ROWS[:0], SLOTS - 1),
        ("slot_to_row: holds 3, but there are 3 rows", BACKWARD, ROWS[:1], ROWS, SLOTS + 1, WEIGHTS),
    ],
}
ONLY_BY_THE_REFERENCE = {
    TypeError: [
        ("rows: got torch.float64, wanted one of torch.float32, torch.bfloat16", "combine_rows", ROWS.double(), SLOTS),
        ("x: got torch.float64, wanted one of torch.float32", "quantise_rows", ROWS.double(), PLACES, 2, "fp8"),
        ("dtype: got torch.float64", "dequantise_rows", RECORDS, 4, "fp8", torch.float64),
        ("grad: got torch.float64", BACKWARD, ROWS[:1].double(), ROWS, SLOTS, WEIGHTS),
    ],
    ValueError: [
        ("records: strides (32, 1) are not contiguous", "dequantise_rows", WIDE_RECORDS, 4, "fp8", torch.float32),
        ("x: strides (1, 3) are not contiguous; pass x.contiguous()", "dispatch_rows", TRANSPOSED, PLACES, 2),
        ("grad: strides (1, 0) are not", BACKWARD, torch.ones(1, 1).expand(1, 4), ROWS, SLOTS, WEIGHTS),
        ("tensor: strides (1, 3) are not contiguous; pass tensor.contiguous()", "bit_sums", TRANSPOSED),
        ("rows: on device meta, wanted cpu; load the", "combine_rows", ROWS.to("meta"), SLOTS.to("meta")),
        ("slot_to_row: on device meta, wanted cpu, where rows is", "combine_rows", ROWS, SLOTS.to("meta")),
    ],
}


def cases_of(table):
    return [(error, case[0], case[1], case[2:]) for error, cases in table.items() for case in cases]


@pytest.mark.parametrize(("error", "message", "operation", "arguments"), cases_of(WRONG))
def test_wrong_arguments(kernels, error, message, operation, arguments):
    with pytest.raises(error, match=re.escape(message)):
        getattr(kernels, operation)(*arguments)


@pytest.mark.parametrize(
    "place", [torch.ones(2, 5), torch.ones(1, 4), torch.ones(2, 4).half()], ids=["D", "R", "fp16"]
)
def test_rows_of_records_fit_their_place(kernels, place):
    message = f"out: got {place.dtype} {tuple(place.shape)}, wanted torch.float32 [2, 4]"
    with pytest.raises(ValueError, match=re.escape(message)):
        kernels.dequantise_rows(RECORDS, 4, "int8", torch.float32, out=place)


@pytest.mark.parametrize("name", ["reference", "compiled"])
@pytest.mark.parametrize(("operation", "row_format"), [("dispatch_rows", ()), ("quantise_rows", ("int8",))])
def test_rows_that_no_slot_has_are_no_memory_of_before(name, operation, row_format):
    message = "slot_to_row: 2 slots have a row, but there are 3 rows: wanted one slot for each"
    with pytest.raises(ValueError, match=re.escape(message)):
        getattr(load_kernels(name), operation)(ROWS, PLACES, 3, *row_format)


@pytest.mark.parametrize(("error", "message", "operation", "arguments"), cases_of(ONLY_BY_THE_REFERENCE))
@pytest.mark.parametrize("load", [lambda: load_kernels("compiled"), load_emulated], ids=["compiled", "emulated"])
def test_arguments_that_only_the_reference_takes(load, error, message, operation, arguments):
    with pytest.raises(error, match=re.escape(message)):
        getattr(load(), operation)(*arguments)
