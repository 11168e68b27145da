# SPDX-License-Identifier: Apache-2.0
"""A datacentre is lost: the other one goes on from the checkpoint with half the ranks."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from autoep_cases import SHAPE, case4
from parity import FP32_TOLERANCE, Case, levels_of, snapshot
from process_pool import ProcessPool
from torch import Tensor
from toy_model import ToyConfig
from training import train
from universal import convert, read, universal_engine, write

pytestmark = [pytest.mark.dist, pytest.mark.slow]

NEEDS_HF = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers: '.[hf]'")
LEVELS = [{"name": "gpu", "size": 2, "domain_size": 2}]
PLANNED = [{"name": "gpu", "size": 2, "domain_size": "auto"}]


# -- in the workers ---------------------------------------------------------------------------------------------


def write_all(case: Case, folder: str) -> dict[str, Tensor]:
    return write(case, Path(folder), with_block=True)[0]


def write_classic(case: Case, folder: str) -> dict[str, Tensor]:
    with universal_engine(case, with_block=True, is_universal=False, seed=1) as engine:
        train(engine, case, 0, 2)
        engine.save_checkpoint(folder, tag="two")
        return snapshot(case, engine.module)


def read_all(case: Case, folder: str) -> dict[str, Any]:
    """Weights and losses of going on: without the block, with it, and with a plan made anew."""
    blocks = {"block": LEVELS} if case.zero_stage == 3 else {"block": LEVELS, "planned": PLANNED}
    found = {name: read(case, Path(folder), with_block=True, levels=levels) for name, levels in blocks.items()}
    return {"plain": read(case, Path(folder), with_block=False), **found}


def read_classic(case: Case, folder: str) -> dict[bool, Any]:
    """Weights and losses of going on from them alone, without the block and with it."""
    found = {}
    for with_block in (False, True):
        with universal_engine(case, with_block=with_block, is_universal=False, seed=2) as engine:
            engine.load_checkpoint(folder, load_optimizer_states=False)
            found[with_block] = snapshot(case, engine.module), train(engine, case, 2, 2)
    return found


# -- the tests --------------------------------------------------------------------------------------------------


def all_of(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: value for part in parts for name, value in part.items()}


@NEEDS_HF
@pytest.mark.parametrize("zero_stage", [1, 2, 3])
def test_autoep_goes_on_with_its_optimizer_from_a_universal_checkpoint(
    pool4: ProcessPool, pool2: ProcessPool, tmp_path: Path, zero_stage: int
) -> None:
    saved = all_of(pool4.run(write_all, case=case4("qwen3_moe", 2, 1, zero_stage=zero_stage), folder=str(tmp_path)))
    case = Case(levels=levels_of((2,), (2,)), family="qwen3_moe", toy=replace(SHAPE, ep_size=2), zero_stage=zero_stage)
    results = pool2.run(read_all, case=case, folder=str(tmp_path))
    for name in results[0]:
        loaded = all_of([found[name][0] for found in results])
        assert loaded.keys() == saved.keys()
        assert [key for key, value in saved.items() if not torch.equal(value, loaded[key])] == []
        for found in results:
            assert found[name][1] == pytest.approx(found["plain"][1], rel=FP32_TOLERANCE, abs=0.0)


def test_classic_goes_on_with_its_weights(pool4: ProcessPool, pool2: ProcessPool, tmp_path: Path) -> None:
    case = Case(levels=levels_of((2, 2), (2, 1)), kernels="reference", toy=ToyConfig(ep_size=4))
    saved = all_of(pool4.run(write_classic, case=case, folder=str(tmp_path)))
    with pytest.raises(KeyError, match="optimizer_state_dict"):  # where this ends, say so in docs
        convert(tmp_path / "two", tmp_path / "two_universal")
    half = Case(levels=levels_of((2,), (2,)), kernels="reference", toy=ToyConfig(ep_size=2))
    results = pool2.run(read_classic, case=half, folder=str(tmp_path))
    for with_block in (False, True):
        loaded = all_of([found[with_block][0] for found in results])
        assert loaded.keys() == saved.keys()
        assert [key for key, value in saved.items() if not torch.equal(value, loaded[key])] == []
        for found in results:
            assert found[with_block][1] == pytest.approx(found[False][1], rel=FP32_TOLERANCE, abs=0.0)
