# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paper_closed_form import (
    PaperCase,
    all_gather_s,
    all_to_all_s,
    best_share,
    exchanged_share,
    latency_s,
)

properties = settings(max_examples=200)


@st.composite
def cases(draw):
    return PaperCase(
        num_gpus=draw(st.integers(2, 64)),
        token_bytes=draw(st.floats(1e3, 1e9)),
        expert_bytes=draw(st.floats(1e3, 1e9)),
        bandwidth_bytes_per_s=draw(st.floats(1e6, 1e12)),
        pre_expert_s=draw(st.floats(0, 10)),
    )


@properties
@given(cases())
def test_no_share_is_better_than_the_closed_form(case):
    best_s = latency_s(case, best_share(case))
    assert all(best_s <= latency_s(case, step / 200) * (1 + 1e-9) for step in range(201))


def test_ends_of_the_range_are_plain_ep_and_one_domain():
    case = PaperCase(num_gpus=8, token_bytes=8e6, expert_bytes=1e6, bandwidth_bytes_per_s=1e6, pre_expert_s=1.0)
    assert (exchanged_share(8, 1), exchanged_share(8, 8)) == (1.0, 0.0)
    assert all_to_all_s(case, 1.0) == pytest.approx(7.0)  # 7/8 of 8 MB at 1 MB/s
    assert all_gather_s(case, 0.0) == pytest.approx(7.0)  # 7 experts of 1 MB
    assert latency_s(case, 0.0) == pytest.approx(7.0)
    assert latency_s(case, 1.0) == pytest.approx(1.0 + 14.0)
    assert best_share(case) == 0.0  # 2 D = 16 MB >= G P = 8 MB


def test_case_1_gathers_what_hides_behind_pre_expert_computation():
    case = PaperCase(num_gpus=5, token_bytes=1e6, expert_bytes=1e6, bandwidth_bytes_per_s=1e6, pre_expert_s=1.0)
    assert best_share(case) == pytest.approx(0.75)
    assert all_gather_s(case, 0.75) == pytest.approx(1.0)  # exactly as long as PE


def test_case_2_without_anything_to_hide_behind_is_plain_ep():
    case = PaperCase(num_gpus=5, token_bytes=1e6, expert_bytes=1e6, bandwidth_bytes_per_s=1e6, pre_expert_s=0.0)
    assert best_share(case) == 1.0
