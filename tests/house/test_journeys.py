# SPDX-License-Identifier: Apache-2.0
"""How many files a token and an expert's weight pass in a warm training step: a reader's way through the package.

Both lists hold each file once, in the order in which to read them.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from parity import Case, levels_of
from process_pool import ProcessPool
from toy_model import ToyConfig
from training import batch_of, engine_of, train

import ds_hybridep

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]

# Entered between the start of the forward and the end of the backward, where every domain is one rank.
TOKEN_JOURNEY = (
    "integration/classic.py",
    "tokens/layer.py",
    "tokens/exchange.py",
    "transport/channels.py",
    "link",
    "kernels/compiled.py",
)

# Entered from one optimizer step to the next, where one domain holds all ranks.  The files of the layer's forward and
# of the local kernels are those above.
EXPERT_JOURNEY = (
    "integration/runtime.py",
    "experts/migration.py",
    "experts/replicas.py",
    "experts/slots.py",
    "sync/transfers.py",
    "transport/channels.py",
    "link",
)

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
def recording(case: Case) -> Iterator[tuple[Recorder, Any]]:
    """An engine after two steps; recorded is this thread, where the backward of a CPU runs too, and all later ones."""
    recorder = Recorder()
    threading.setprofile(recorder)
    sys.setprofile(recorder)
    try:
        with engine_of(case, with_block=True) as engine:
            train(engine, case, 0, 2)
            yield recorder, engine
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def follow_a_token() -> set[tuple[str, str]]:
    """Functions entered by the forward and backward of a warm step."""
    with recording(ONE_RANK_EACH) as (recorder, engine):
        recorder.is_on = True
        engine.backward(engine(*batch_of(ONE_RANK_EACH, 2)))
        recorder.is_on = False
        engine.step()
    return recorder.entered


def follow_an_expert() -> set[tuple[str, str]]:
    """Functions entered from one warm optimizer step to the next, both included."""
    with recording(ALL_RANKS) as (recorder, engine):
        engine.backward(engine(*batch_of(ALL_RANKS, 2)))
        recorder.is_on = True
        engine.step()
        train(engine, ALL_RANKS, 3, 1)
        recorder.is_on = False
    return recorder.entered


def files_of(entered: set[tuple[str, str]]) -> set[str]:
    # One notes since when a rank waits, for the watch; the other, what a skipped step undoes.
    files = {file for file, _ in entered} - {"transport/waits.py", "sync/gradients.py"}
    return {"link" if file.startswith("link/") else file for file in files}  # used like a library


def test_a_token_passes_six_files(pool2: ProcessPool) -> None:
    for entered in pool2.run(follow_a_token):
        # Both ways were seen: the dispatch, and autograd's call of its backward.
        assert {("tokens/exchange.py", "dispatch_rows"), ("tokens/layer.py", "backward")} <= entered
        assert files_of(entered) == set(TOKEN_JOURNEY)
    assert len(TOKEN_JOURNEY) <= 6


def test_the_weight_of_an_expert_passes_seven_files(pool2: ProcessPool) -> None:
    for entered in pool2.run(follow_an_expert):
        assert {("transport/channels.py", "start"), ("experts/migration.py", "backward")} <= entered
        only_tokens = set(TOKEN_JOURNEY) - set(EXPERT_JOURNEY)
        assert files_of(entered) - only_tokens == set(EXPERT_JOURNEY)
    assert len(EXPERT_JOURNEY) <= 7
