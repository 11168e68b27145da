# SPDX-License-Identifier: Apache-2.0
"""The definitions of the routing kernels, against loops over Python numbers, and as adjoint pairs."""

import math

import pytest
import torch
from hypothesis import given
from kernel_refs import (
    E4M3,
    PLAN_FIELDS,
    combine_backward_by_loops,
    combine_by_loops,
    combines,
    dispatch_by_loops,
    payload,
    plan_by_loops,
    record_by_loops,
    routes,
    steps_of,
    token_rows,
)

from ds_hybridep.kernels import load_kernels

# Half a unit in the last place of each dtype, and a few roundings of fp32 sums.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}

kernels = load_kernels("reference")

ONE_SLOT = torch.tensor([[0]])  # of one token, with one row


def _bits(tensor):
    return tensor.view(torch.uint8) if tensor.numel() else tensor  # nan is equal to itself


def int32(values):
    return torch.tensor(values, dtype=torch.int32)


@given(routes())
def test_plan_is_what_loops_give(arguments):
    topk_idx, expert_to_destination, num_destinations = arguments
    plan = kernels.plan_routes(topk_idx, expert_to_destination, num_destinations)
    wanted = plan_by_loops(topk_idx.tolist(), expert_to_destination.tolist(), num_destinations)
    assert plan.rows_per_destination == wanted["rows_per_destination"]
    for field in PLAN_FIELDS:
        assert getattr(plan, field).tolist() == wanted[field], field
        assert getattr(plan, field).dtype == (torch.int32 if field == "row_topk_idx" else torch.int64), field
    num_rows = plan.row_to_token.shape[0]
    assert plan.row_topk_idx.shape == (num_rows, topk_idx.shape[1])
    assert plan.slot_to_row.shape == plan.first_slot_to_row.shape == topk_idx.shape


def test_plan_of_the_documented_example():
    plan = kernels.plan_routes(int32([[2, 0], [1, 0]]), int32([0, 0, 1]), 2)
    assert plan.rows_per_destination == (2, 1)
    assert plan.row_to_token.tolist() == [0, 1, 0]
    assert plan.row_topk_idx.tolist() == [[-1, 0], [1, 0], [2, -1]]
    assert plan.slot_to_row.tolist() == [[2, 0], [1, 1]]
    assert plan.first_slot_to_row.tolist() == [[2, 0], [1, -1]]


@given(token_rows())
def test_dispatch_is_what_loops_give(arguments):
    assert torch.equal(_bits(kernels.dispatch_rows(*arguments)), _bits(dispatch_by_loops(*arguments)))


@given(combines())
def test_combine_is_what_loops_give(arguments):
    rows, slot_to_row, weights = arguments
    for given_weights in (weights, None):
        out = kernels.combine_rows(rows, slot_to_row, given_weights)
        wanted = combine_by_loops(rows, slot_to_row, given_weights)
        assert out.dtype == rows.dtype
        torch.testing.assert_close(out.double(), wanted, rtol=ROUNDING[rows.dtype], atol=4e-6)


@given(combines())
def test_combine_backward_is_what_loops_give(arguments):
    rows, slot_to_row, weights = arguments
    grad = payload(slot_to_row.shape[0], rows.shape[1], rows.dtype, salt=2)
    grad_rows, grad_weights = kernels.combine_rows_backward(grad, rows, slot_to_row, weights)
    wanted_rows, wanted_weights = combine_backward_by_loops(grad, rows, slot_to_row, weights)
    assert grad_rows.dtype == rows.dtype
    assert grad_weights.dtype == torch.float32
    # Up to 64 slots share a row: sums of that many terms of size 1 in fp32.
    torch.testing.assert_close(grad_rows.double(), wanted_rows, rtol=ROUNDING[rows.dtype], atol=3e-5)
    torch.testing.assert_close(grad_weights.double(), wanted_weights, rtol=2e-6, atol=4e-6)


@given(routes())
def test_dispatch_and_sum_of_first_slots_are_adjoint(arguments):
    topk_idx, expert_to_destination, num_destinations = arguments
    plan = kernels.plan_routes(topk_idx, expert_to_destination, num_destinations)
    x = payload(topk_idx.shape[0], 5, torch.float64)
    y = payload(plan.row_to_token.shape[0], 5, torch.float64, salt=1)
    forward = (kernels.dispatch_rows(x, plan.first_slot_to_row, plan.num_rows) * y).sum()
    backward = (x * kernels.combine_rows(y, plan.first_slot_to_row)).sum()
    torch.testing.assert_close(forward, backward, rtol=1e-12, atol=1e-12)


@given(routes())
def test_weighted_combine_has_the_gradients_that_autograd_finds(arguments):
    topk_idx, expert_to_destination, num_destinations = arguments
    plan = kernels.plan_routes(topk_idx, expert_to_destination, num_destinations)
    rows = payload(plan.row_to_token.shape[0], 5, torch.float64).requires_grad_()
    weights = payload(*topk_idx.shape, salt=1).requires_grad_()
    grad = payload(topk_idx.shape[0], 5, torch.float64, salt=2)
    out = kernels.combine_rows(rows, plan.slot_to_row, weights)
    grads = kernels.combine_rows_backward(grad, rows.detach(), plan.slot_to_row, weights.detach())
    if not out.requires_grad:  # no rows: nothing depends on them
        assert not any(gradient.any() for gradient in grads)
        return
    wanted_rows, wanted_weights = torch.autograd.grad(out, (rows, weights), grad, materialize_grads=True)
    torch.testing.assert_close(grads[0], wanted_rows, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads[1], wanted_weights)


def test_combine_ignores_inf_and_nan_in_rows_that_are_not_asked_for():
    rows = torch.tensor([[float("nan")], [2.0]])
    out = kernels.combine_rows(rows, torch.tensor([[-1, 1]]), torch.ones(1, 2))
    assert out.tolist() == [[2.0]]


def test_combine_rounds_once():
    rows = torch.tensor([[1.0], [2.0**-9], [2.0**-9]], dtype=torch.bfloat16)  # each step alone rounds back to 1
    out = kernels.combine_rows(rows, torch.tensor([[0, 1, 2]]))
    assert out.item() == 1.0  # 1 + 2^-8 lies halfway and goes to even
    wide = kernels.combine_rows(rows, torch.tensor([[0, 1, 2]]), out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert wide.item() == 1.0 + 2.0**-8


# --- Rows of one byte an element -------------------------------------------------------------------------------------

FORMATS = ["int8", "fp8"]


@given(token_rows())
def test_records_are_what_loops_give(arguments):
    for row_format in FORMATS:
        records = kernels.quantise_rows(*arguments, row_format)
        assert records.tolist() == [record_by_loops(row.tolist(), row_format) for row in dispatch_by_loops(*arguments)]
        assert records.dtype == torch.uint8
        assert records.shape[1] % 16 == 0


@given(token_rows(is_finite=True))
def test_an_element_is_off_by_half_a_step_at_most(arguments):
    wanted = dispatch_by_loops(*arguments)
    for row_format in FORMATS:
        records = kernels.quantise_rows(*arguments, row_format)
        rows = kernels.dequantise_rows(records, wanted.shape[1], row_format, wanted.dtype)
        assert rows.dtype == wanted.dtype
        assert ((rows.double() - wanted.double()).abs() <= steps_of(wanted, row_format) / 2).all()
        assert ((rows.sign() == wanted.sign()) | (rows == 0)).all()


@given(token_rows())
def test_rows_that_were_quantised_give_the_same_records(arguments):
    x, _, num_rows = arguments
    for row_format in FORMATS:
        records = kernels.quantise_rows(*arguments, row_format)
        rows = kernels.dequantise_rows(records, x.shape[1], row_format, x.dtype)
        assert torch.equal(kernels.quantise_rows(rows, torch.arange(num_rows)[:, None], num_rows, row_format), records)


@pytest.mark.parametrize("row_format", FORMATS)
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_makes_its_block_nan_and_no_other(row_format, value):
    x = payload(1, 300)
    x[0, 200] = value
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        records = kernels.quantise_rows(x.to(dtype), ONE_SLOT, 1, row_format)
        rows = kernels.dequantise_rows(records, 300, row_format, dtype)
        assert rows[0, 128:256].isnan().all()
        assert rows[0, :128].isfinite().all()
        assert rows[0, 256:].isfinite().all()


def test_a_record_of_the_documented_layout():
    x = torch.zeros(1, 200)
    x[0, :3] = torch.tensor([254.0, -2.0, 3.0])  # 3 lies halfway between 2 and 4 and goes to the even multiple of 2
    (record,) = kernels.quantise_rows(x, ONE_SLOT, 1, "int8").tolist()
    assert record == [127, 255, 2, *[0] * 197, 128, 17, *[0] * 6]
    (record,) = kernels.quantise_rows(x, ONE_SLOT, 1, "fp8").tolist()
    assert [E4M3[code % 128] for code in record[:3]] == [256, 2, 3]
    assert record[200:] == [127, 17, 0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("row_format", FORMATS)
def test_the_largest_finite_numbers_stay_finite(row_format):
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        largest = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
        x = torch.tensor([[largest, -largest, largest / 3]], dtype=dtype)
        rows = kernels.dequantise_rows(kernels.quantise_rows(x, ONE_SLOT, 1, row_format), 3, row_format, dtype)
        assert rows.isfinite().all()
        torch.testing.assert_close(rows.double(), x.double(), rtol=2.0**-4, atol=0)
