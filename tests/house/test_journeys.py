# SPDX-License-Identifier: Apache-2.0
"""How many files a token, an expert's weight, its gradient and a dense gradient pass in a warm training step.

So many files a reader opens to follow them.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from parity import Case, levels_of
from process_pool import ProcessPool
from toy_model import ToyConfig
from training import batch_of, engine_of, train

import ds_hybridep

pytestmark = pytest.mark.dist

TOY = ToyConfig(ep_size=2, num_experts=4)
ONE_RANK_EACH = Case(levels=levels_of((2,), (1,)), toy=TOY, dense_sync="deepspeed")
ALL_RANKS = Case(levels=levels_of((2,), (2,)), toy=TOY, zero_stage=1, dense_sync="deepspeed")
PACKAGE = str(Path(ds_hybridep.__file__).parent)


class Recorder:
    """Notes which functions of the package are entered, by (file, function), while `is_on`."""

    def __init__(self) -> None:
        self.is_on = False
        self.entered: set[tuple[str, str]] = set()

    def __call__(self, frame: Any, event: str, _: Any) -> None:
        is_link = threading.current_thread().name == "hybridep-link"  # its heartbeats come at any time
        if self.is_on and not is_link and event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            file = str(Path(frame.f_code.co_filename).relative_to(PACKAGE))
            self.entered.add((file, frame.f_code.co_name))


@contextmanager
def recording() -> Iterator[Recorder]:
    """In this thread, where the backward of a CPU runs too, and in all threads that start inside."""
    recorder = Recorder()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    try:
        yield recorder
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def follow_a_token(case: Case = ONE_RANK_EACH) -> set[tuple[str, str]]:
    """Functions entered by the forward and backward of a warm step."""
    with recording() as recorder, engine_of(case, with_block=True) as engine:
        train(engine, case, 0, 2)
        recorder.is_on = True
        loss = engine(*batch_of(case, 2))
        engine.backward(loss)
        recorder.is_on = False
        engine.step()
    return recorder.entered


def follow_an_expert() -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """Functions entered by a warm step and the forward behind it, and by the backward behind that."""
    with recording() as recorder, engine_of(ALL_RANKS, with_block=True) as engine:
        train(engine, ALL_RANKS, 0, 2)
        engine.backward(engine(*batch_of(ALL_RANKS, 2)))
        recorder.is_on = True
        engine.step()
        loss = engine(*batch_of(ALL_RANKS, 3))
        recorder.is_on = False
        of_weight, recorder.entered = recorder.entered, set()
        recorder.is_on = True
        engine.backward(loss)
        recorder.is_on = False
        engine.step()
    return of_weight, recorder.entered


def follow_tokens_with_and_without_dense_gradients() -> tuple[set[tuple[str, str]], set[tuple[str, str]]]:
    """Under ZeRO 1, which sums gradients in the backward: with sums level by level, and with DeepSpeed's own."""
    without = replace(ONE_RANK_EACH, zero_stage=1)
    return follow_a_token(replace(without, dense_sync="hierarchical")), follow_a_token(without)


SHARED = {"transport/channels.py", "link"}  # everything crosses a link


def files_of(entered: set[tuple[str, str]]) -> set[str]:
    # Notes since when a rank waits, and what a skipped step undoes; asks if we are attached.
    plumbing = {"transport/waits.py", "sync/transaction.py", "deepspeed/patches.py"}
    # In each step zero_grad, and a hook before the forward, look whether gradients are dropped: no weight passes them.
    plumbing |= {"deepspeed/dropped_gradients.py", "deepspeed/engine_view.py"}
    files = {file for file, _ in entered} - plumbing
    return {"link" if file.startswith("link/") else file for file in files}  # used like a library


def test_a_token_passes_six_files(pool2: ProcessPool) -> None:
    for entered in pool2.run(follow_a_token):
        # Both ways were seen: the dispatch, and autograd's call of its backward.
        assert {("tokens/exchange.py", "exchange_rows"), ("tokens/layer.py", "backward")} <= entered
        assert len(files_of(entered)) <= 6, files_of(entered)


def test_an_expert_passes_nine_files_and_the_backward_of_its_gradient_seven(pool2: ProcessPool) -> None:
    only_tokens = files_of(pool2.run(follow_a_token)[0]) - SHARED
    for of_weight, of_gradient in pool2.run(follow_an_expert):
        assert {("transport/channels.py", "start"), ("experts/migration.py", "finish_shipment")} <= of_weight
        assert {("transport/channels.py", "start"), ("experts/gradient_return.py", "backward")} <= of_gradient
        files = files_of(of_weight | of_gradient) - only_tokens
        assert len(files) <= 9, sorted(files)
        assert len(files_of(of_gradient) - only_tokens) <= 7, sorted(files_of(of_gradient) - only_tokens)


def test_a_dense_gradient_passes_six_files(pool2: ProcessPool) -> None:
    for entered, of_tokens in pool2.run(follow_tokens_with_and_without_dense_gradients):
        assert {("sync/group_sync.py", "reduce_to_owners"), ("sync/transfers.py", "advance")} <= entered
        files = files_of(entered) - (files_of(of_tokens) - SHARED)
        assert len(files) <= 6, files
