# SPDX-License-Identifier: Apache-2.0
"""The routing kernels once more, one Python loop per sentence of their documentation, and payloads to feed them."""

import math
from bisect import bisect_left

import torch
from hypothesis import strategies as st

from ds_hybridep.kernels import Routes

PLAN_FIELDS = ("row_to_token", "row_topk_idx", "slot_to_row", "first_slot_to_row")


def plan_by_loops(topk_idx, expert_to_destination, num_destinations):
    """What ReferenceKernels.plan_routes returns, as nested lists by field name."""
    top_k = len(topk_idx[0]) if topk_idx else 0
    destinations = [[expert_to_destination[e] if e >= 0 else -1 for e in experts] for experts in topk_idx]
    row_of = {}  # (destination, token) -> row
    rows_per_destination, row_topk_idx = [], []
    for n in range(num_destinations):
        before = len(row_of)
        for token, of_slot in enumerate(destinations):
            if n in of_slot:
                row_of[n, token] = len(row_of)
                experts = topk_idx[token]
                row_topk_idx.append([experts[k] if of_slot[k] == n else -1 for k in range(top_k)])
        rows_per_destination.append(len(row_of) - before)
    slot_to_row, first_slot_to_row = [], []
    for token, of_slot in enumerate(destinations):
        served_by = [row_of.get((n, token), -1) for n in of_slot]
        slot_to_row.append(served_by)
        first_slot_to_row.append([row if row not in served_by[:k] else -1 for k, row in enumerate(served_by)])
    return {
        "rows_per_destination": tuple(rows_per_destination),
        "row_to_token": [token for _, token in row_of],
        "row_topk_idx": row_topk_idx,
        "slot_to_row": slot_to_row,
        "first_slot_to_row": first_slot_to_row,
    }


def dispatch_by_loops(x, slot_to_row, num_rows):
    """ReferenceKernels.dispatch_rows: [R, D]."""
    out = x.new_empty(num_rows, x.shape[1])
    for t, rows in enumerate(slot_to_row.tolist()):
        for row in rows:
            if row >= 0:
                out[row] = x[t]
    return out


def combine_by_loops(rows, slot_to_row, weights=None):
    """ReferenceKernels.combine_rows in Python floats, which are fp64: [T, D] fp64."""
    num_tokens, top_k = slot_to_row.shape
    out = torch.zeros(num_tokens, rows.shape[1], dtype=torch.float64)
    for t in range(num_tokens):
        for k in range(top_k):
            row = int(slot_to_row[t, k])
            if row >= 0:
                for d in range(rows.shape[1]):
                    out[t, d] += (1.0 if weights is None else float(weights[t, k])) * float(rows[row, d])
    return out


def combine_backward_by_loops(grad, rows, slot_to_row, weights):
    """ReferenceKernels.combine_rows_backward in Python floats: [R, D] fp64 and [T, K] fp64."""
    num_tokens, top_k = slot_to_row.shape
    grad_rows = torch.zeros(rows.shape, dtype=torch.float64)
    grad_weights = torch.zeros(num_tokens, top_k, dtype=torch.float64)
    for t in range(num_tokens):
        for k in range(top_k):
            row = int(slot_to_row[t, k])
            if row >= 0:
                for d in range(rows.shape[1]):
                    grad_rows[row, d] += float(weights[t, k]) * float(grad[t, d])
                    grad_weights[t, k] += float(grad[t, d]) * float(rows[row, d])
    return grad_rows, grad_weights


# Magnitudes of e4m3 by code: 0 to 7 are subnormal, the last one is 448.
E4M3 = [m / 8 * 2.0**-6 for m in range(8)] + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][
    :-1
]


def record_by_loops(row, row_format):
    """The bytes that ReferenceKernels.quantise_rows makes of one row, given as Python floats."""
    codes, exponents = [], []
    for begin in range(0, len(row), 128):
        block, exponent = row[begin : begin + 128], 17
        if not all(math.isfinite(value) for value in block):
            codes += [0] * len(block)
            exponents.append(255)
            continue
        while max(map(abs, block)) > (127 if row_format == "int8" else 464) * 2.0 ** (exponent - 127):
            exponent += 1
        codes += [code_by_search(value / 2.0 ** (exponent - 127), row_format) for value in block]
        exponents.append(exponent)
    record = codes + exponents
    return record + [0] * (-len(record) % 16)


def code_by_search(value, row_format):
    """The byte of the nearest number of a format, of two the even one."""
    if row_format == "int8":
        return round(value) % 256
    above = bisect_left(E4M3, abs(value))
    near = [code for code in (above - 1, above) if 0 <= code < len(E4M3)]
    code = min(near, key=lambda code: (abs(E4M3[code] - abs(value)), code % 2))
    return code + (128 if math.copysign(1.0, value) < 0 else 0)


def steps_of(rows, row_format):
    """Distances of neighbouring numbers of a format around each element of finite rows [R, D], fp64."""
    num_rows, hidden = rows.shape
    blocks = torch.nn.functional.pad(rows.double(), (0, -hidden % 128)).view(num_rows, -(-hidden // 128), 128)
    largest = blocks.abs().amax(dim=2, keepdim=True) / (127 if row_format == "int8" else 464)
    scale = torch.where(largest > 2.0**-110, 2.0 ** largest.log2().ceil(), 2.0**-110)
    if row_format == "fp8":  # 8 steps from one power of two to the next
        scale = scale * 2.0 ** ((blocks.abs() / scale).clamp(min=2.0**-6).log2().floor() - 3)
    return scale.expand(blocks.shape).flatten(1)[:, :hidden]


def payload(num_rows, hidden, dtype=torch.float32, salt=0):
    """Values in [-1, 1] that are a function of row, column and `salt`, [num_rows, hidden]."""
    row = torch.arange(num_rows, dtype=torch.float64).unsqueeze(1)
    column = torch.arange(hidden, dtype=torch.float64).unsqueeze(0)
    return torch.sin(1.0 + 12.9898 * row + 78.233 * column + 37.719 * salt).to(dtype)


@st.composite
def routes(draw, max_tokens=12):
    """Arguments of plan_routes: no tokens, dropped slots, repeated experts and unrouted experts included."""
    num_tokens = draw(st.integers(0, max_tokens))
    top_k = draw(st.integers(1, 8))
    num_experts = draw(st.integers(0, 6))
    num_destinations = draw(st.integers(1, 4))
    expert = st.integers(-1, num_experts - 1)
    token = st.lists(expert, min_size=top_k, max_size=top_k)
    topk_idx = draw(st.lists(token, min_size=num_tokens, max_size=num_tokens))
    destination = st.integers(-1, num_destinations - 1)
    expert_to_destination = draw(st.lists(destination, min_size=num_experts, max_size=num_experts))
    return (
        torch.tensor(topk_idx, dtype=torch.int32).view(num_tokens, top_k),
        torch.tensor(expert_to_destination, dtype=torch.int32),
        num_destinations,
    )


@st.composite
def combines(draw, max_tokens=8):
    """rows, slot_to_row, weights: any map, also with rows that no slot or several tokens use, and without rows."""
    num_tokens = draw(st.integers(0, max_tokens))
    top_k = draw(st.integers(1, 8))
    num_rows = draw(st.integers(0, 8))
    hidden = draw(st.sampled_from([0, 1, 3, 17]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    slots = draw(st.lists(st.integers(-1, num_rows - 1), min_size=num_tokens * top_k, max_size=num_tokens * top_k))
    slot_to_row = torch.tensor(slots, dtype=torch.int64).view(num_tokens, top_k)
    return payload(num_rows, hidden, dtype), slot_to_row, payload(num_tokens, top_k, salt=1)


@st.composite
def slots_with_rows(draw, num_tokens, max_top_k=4):
    """slot_to_row [T, K] with each of R rows in one slot; R."""
    top_k = draw(st.integers(1, max_top_k))
    num_rows = draw(st.integers(0, num_tokens * top_k))
    slots = draw(st.permutations([*range(num_rows), *[-1] * (num_tokens * top_k - num_rows)]))
    return torch.tensor(slots, dtype=torch.int64).view(num_tokens, top_k), num_rows


@st.composite
def token_rows(draw, max_tokens=3, *, is_finite=False):
    """x [T, D], and slots with rows for it.  Rows are in any order, and a token may have none.

    Elements have very different sizes; some are zeros, and unless `is_finite` inf and nan.
    """
    num_tokens, hidden = draw(st.integers(0, max_tokens)), draw(st.sampled_from([0, 1, 8, 127, 128, 136, 260]))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    exponents = st.integers(-24, 15) if dtype == torch.float16 else st.integers(-149, 127)
    size = 2.0 ** torch.tensor(
        draw(st.lists(exponents, min_size=num_tokens, max_size=num_tokens)), dtype=torch.float64
    )
    salt = draw(st.integers(0, 1000))
    spread = 2.0 ** torch.floor(8 * payload(num_tokens, hidden, torch.float64, salt=salt + 1) - 8)
    x = payload(num_tokens, hidden, torch.float64, salt=salt) * spread * 1.99 * size[:, None]
    specials = st.sampled_from([0.0, -0.0, torch.finfo(dtype).max, torch.finfo(dtype).tiny, -1.0, 464.0, 127.5])
    if not is_finite:
        specials = specials | st.sampled_from([math.inf, -math.inf, math.nan])
    for place in draw(st.lists(st.integers(0, max(num_tokens * hidden - 1, 0)), max_size=4 if x.numel() else 0)):
        x.view(-1)[place] = draw(specials)
    return x.to(dtype), *draw(slots_with_rows(num_tokens))


def large_routes(num_tokens=6000, top_k=4, num_experts=16, num_destinations=4):
    """Arguments of plan_routes that are large enough for several threads."""
    slot = torch.arange(num_tokens * top_k, dtype=torch.int64)
    topk_idx = ((slot * 7919 + slot // 11) % (num_experts + 1) - 1).to(torch.int32).view(num_tokens, top_k)
    expert_to_destination = (torch.arange(num_experts) * 3 % (num_destinations + 1) - 1).to(torch.int32)
    return topk_idx, expert_to_destination, num_destinations


def assert_same_plan(plan: Routes, wanted: Routes):
    """The splits and all four tensors are equal, dtypes included."""
    assert plan.rows_per_destination == wanted.rows_per_destination
    for field in PLAN_FIELDS:
        torch.testing.assert_close(getattr(plan, field), getattr(wanted, field), rtol=0, atol=0, msg=field)
