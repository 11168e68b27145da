# SPDX-License-Identifier: Apache-2.0
"""The routing kernels once more, one Python loop per sentence of their documentation, and payloads to feed them."""

import torch
from hypothesis import strategies as st

from ds_hybridep.kernels import RoutePlan

PLAN_FIELDS = ("rows_per_destination", "row_to_token", "row_topk_idx", "slot_to_row", "first_slot_to_row")


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
        "rows_per_destination": rows_per_destination,
        "row_to_token": [token for _, token in row_of],
        "row_topk_idx": row_topk_idx,
        "slot_to_row": slot_to_row,
        "first_slot_to_row": first_slot_to_row,
    }


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


def large_routes(num_tokens=6000, top_k=4, num_experts=16, num_destinations=4):
    """Arguments of plan_routes that are large enough for several threads."""
    slot = torch.arange(num_tokens * top_k, dtype=torch.int64)
    topk_idx = ((slot * 7919 + slot // 11) % (num_experts + 1) - 1).to(torch.int32).view(num_tokens, top_k)
    expert_to_destination = (torch.arange(num_experts) * 3 % (num_destinations + 1) - 1).to(torch.int32)
    return topk_idx, expert_to_destination, num_destinations


def assert_same_plan(plan: RoutePlan, wanted: RoutePlan):
    """All five tensors are equal, dtypes included."""
    for field in PLAN_FIELDS:
        torch.testing.assert_close(getattr(plan, field), getattr(wanted, field), rtol=0, atol=0, msg=field)
