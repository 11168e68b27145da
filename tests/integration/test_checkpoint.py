# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are DeepSpeed's own: written and read with the "hybridep" block or without it, they hold the same.

All files go through a folder that the ranks share.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import STEPS_AFTER, checked_engine, resume_across, resume_in_a_fresh_engine
from marks import slow
from parity import FP32_TOLERANCE, Case, levels_of
from process_pool import ProcessPool
from toy_model import ToyConfig
from training import Engine, batch_of, evaluate, train, world2

pytestmark = pytest.mark.dist


PLANS = [(2, 1), (2, 2)]
EACH_STAGE = [slow((2, 1), 0), ((2, 2), 1), slow((2, 1), 2), slow((2, 2), 0), slow((2, 1), 1), slow((2, 2), 2)]


# -- in the workers ---------------------------------------------------------------------------------------------


def with_and_without(case: Case, folder: str, what: Callable[..., list[float]], **options: Any) -> dict[bool, Any]:
    """By `with_block`: what `what` returns of an engine that has trained for one step, with a folder of its own."""
    found = {}
    for with_block in (False, True):
        with checked_engine(case, with_block=with_block) as engine:
            losses = train(engine, case, 0, 1)
            found[with_block] = losses + what(engine, case, f"{folder}/{with_block}", **options)
    return found


def go_back(engine: Engine, case: Case, folder: str, **options: Any) -> list[float]:
    """Losses of training on, going back to an earlier checkpoint, and training on from there."""
    engine.save_checkpoint(folder)
    # The last step's weights are still under way to the replicas when older ones are loaded.
    losses = train(engine, case, 1, 1)
    engine.load_checkpoint(folder, **options)
    return [*losses, evaluate(engine, case), *train(engine, case, 1, STEPS_AFTER)]


def copy_by_name(src: dict[str, torch.Tensor], dst: torch.nn.Module) -> None:
    """A custom_load_fn that goes round Module.load_state_dict."""
    with torch.no_grad():
        for name, parameter in dst.named_parameters():
            parameter.copy_(src[name])


def go_back_in_the_middle(engine: Engine, case: Case, folder: str, *, zeroes_gradients: bool) -> list[float]:
    """Losses after an earlier checkpoint is loaded after the first of the micro-steps."""
    engine.save_checkpoint(folder)
    engine.backward(engine(*batch_of(case, 1, 0)))
    engine.step()
    if zeroes_gradients:
        engine.zero_grad()
    engine.load_checkpoint(folder)
    return train(engine, case, 1, STEPS_AFTER)


def load_by_hand(engine: Engine, case: Case, folder: str) -> list[float]:
    """Losses before and after every rank loads earlier weights into the module."""
    start = {name: value.clone() for name, value in engine.module.state_dict().items()}
    losses = train(engine, case, 1, 1)
    engine.module.load_state_dict(start)
    return [*losses, evaluate(engine, case), *train(engine, case, 2, 1)]


def save_between_micro_steps(engine: Engine, case: Case, folder: str) -> list[float]:
    """Losses of a training that saves after every micro-step and goes on."""
    losses = []
    for step in range(1, 3):
        for micro_step in range(case.accumulation):
            loss = engine(*batch_of(case, step, micro_step))
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
            engine.save_checkpoint(folder, tag="latest_one")
    return losses


def write_both(case: Case, folder: str) -> None:
    for with_block in (False, True):
        with checked_engine(case, with_block=with_block) as engine:
            train(engine, case, 0, 1)
            engine.save_checkpoint(f"{folder}/{'hybrid' if with_block else 'plain'}", tag="step1")


# -- the tests --------------------------------------------------------------------------------------------------


def world4(domain_sizes: tuple[int, int], zero_stage: int, **options: Any) -> Case:
    toy = options.pop("toy", ToyConfig())
    levels = levels_of((2, 2), domain_sizes)
    return Case(levels=levels, toy=toy, zero_stage=zero_stage, kernels="reference", **options)


def assert_same(pool: ProcessPool, case: Case, folder: Path, what: Callable[..., list[float]], **options: Any) -> None:
    for losses in pool.run(with_and_without, case=case, folder=str(folder), what=what, **options):
        assert_close(losses[False], losses[True])


def assert_close(plain: list[float], hybrid: list[float]) -> None:
    assert hybrid == pytest.approx(plain, rel=FP32_TOLERANCE, abs=0.0)


@pytest.mark.core
@pytest.mark.parametrize(("domain_sizes", "zero_stage"), EACH_STAGE, ids=str)
def test_resume_is_bit_equal(
    pool4: ProcessPool, tmp_path: Path, domain_sizes: tuple[int, int], zero_stage: int
) -> None:
    case = world4(domain_sizes, zero_stage, accumulation=2)
    for rank, result in enumerate(pool4.run(resume_in_a_fresh_engine, case=case, folder=str(tmp_path))):
        assert result["is_loaded"], rank
        straight, resumed = result["losses"]
        assert resumed == straight, rank
        assert result["different"] == [], rank
        assert result["is_equal"], rank


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [1, 2])
def test_resume_is_bit_equal_in_bf16(pool4: ProcessPool, tmp_path: Path, zero_stage: int) -> None:
    case = world4((2, 1), zero_stage, dtype="bf16", toy=ToyConfig(routing="by_token"))
    for rank, result in enumerate(pool4.run(resume_in_a_fresh_engine, case=case, folder=str(tmp_path))):
        assert result["losses"][0] == result["losses"][1], rank
        assert result["different"] == [], rank


@pytest.mark.core
@pytest.mark.parametrize("zero_stage", [slow(0), 1, slow(2)])
def test_checkpoints_are_read_with_and_without_the_block(pool4: ProcessPool, tmp_path: Path, zero_stage: int) -> None:
    case = world4((2, 1) if zero_stage != 1 else (2, 2), zero_stage)
    for losses in pool4.run(resume_across, case=case, folder=str(tmp_path)):
        for writes_with_block, reads_with_block in ((False, True), (True, False), (True, True)):
            assert_close(losses[False, False], losses[writes_with_block, reads_with_block])


@pytest.mark.core
def test_files_are_those_of_deepspeed(pool2: ProcessPool, tmp_path: Path) -> None:
    case = world2(zero_stage=1)
    pool2.run(write_both, case=case, folder=str(tmp_path))
    plain, hybrid = (
        sorted(str(path.relative_to(tmp_path / kind)) for path in (tmp_path / kind).rglob("*"))
        for kind in ("plain", "hybrid")
    )
    assert hybrid == plain
    of_experts = sorted(Path(path).name for path in hybrid if "expert_" in Path(path).name and "layer_" in path)
    toy = case.toy
    assert of_experts == sorted(
        f"layer_{layer}_expert_{expert}_mp_rank_00_model_states.pt"
        for layer in range(toy.num_layers)
        for expert in range(toy.num_experts)
    )
    # No class of this package, so that a process without it can load them.
    files = [tmp_path / "hybrid" / path for path in hybrid]
    assert not [file for file in files if file.is_file() and b"ds_hybridep" in file.read_bytes()]
    # Same keys in every file of weights: neither replicas nor anything else of ours.
    for path in hybrid:
        if path.endswith("model_states.pt"):
            keys = [
                _tensor_names(torch.load(tmp_path / kind / path, weights_only=False)) for kind in ("plain", "hybrid")
            ]
            assert keys[0] == keys[1], path


def _tensor_names(content: Any, prefix: str = "") -> list[str]:
    """Paths and shapes of all tensors in nested dicts."""
    if isinstance(content, torch.Tensor):
        return [f"{prefix} {tuple(content.shape)}"]
    if isinstance(content, dict):
        return sorted(name for key, value in content.items() for name in _tensor_names(value, f"{prefix}/{key}"))
    return []


MIDDLE = [(True, 2), slow(False, 0), slow(True, 0), slow(True, 1), slow(False, 1), slow(False, 2)]


def test_load_into_a_running_engine_leaves_no_stale_replica(pool2: ProcessPool, tmp_path: Path) -> None:
    assert_same(pool2, world2(zero_stage=1), tmp_path, go_back)


@pytest.mark.slow
@pytest.mark.parametrize(("domain_sizes", "zero_stage"), EACH_STAGE, ids=str)
def test_load_into_a_running_engine_of_four_ranks_leaves_no_stale_replica(
    pool4: ProcessPool, tmp_path: Path, domain_sizes: tuple[int, int], zero_stage: int
) -> None:
    assert_same(pool4, world4(domain_sizes, zero_stage), tmp_path, go_back)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"load_module_only": True}, {"custom_load_fn": copy_by_name}], ids=" ".join)
def test_other_ways_of_loading_leave_no_stale_replica(
    pool4: ProcessPool, tmp_path: Path, options: dict[str, Any]
) -> None:
    assert_same(pool4, world4((2, 1), zero_stage=1), tmp_path, go_back, **options)


@pytest.mark.parametrize(("zeroes_gradients", "zero_stage"), MIDDLE)
def test_load_in_the_middle_of_an_accumulation(
    pool2: ProcessPool, tmp_path: Path, zero_stage: int, zeroes_gradients: bool
) -> None:
    case = world2(zero_stage=zero_stage, accumulation=3)
    assert_same(pool2, case, tmp_path, go_back_in_the_middle, zeroes_gradients=zeroes_gradients)


def test_save_between_micro_steps(pool2: ProcessPool, tmp_path: Path) -> None:
    assert_same(pool2, world2(zero_stage=2, accumulation=2), tmp_path, save_between_micro_steps)


def test_load_state_dict_leaves_no_stale_replica(pool2: ProcessPool, tmp_path: Path) -> None:
    assert_same(pool2, world2(), tmp_path, load_by_hand)


@pytest.mark.slow
@pytest.mark.parametrize("domain_sizes", PLANS, ids=str)
def test_load_state_dict_on_four_ranks_leaves_no_stale_replica(
    pool4: ProcessPool, tmp_path: Path, domain_sizes: tuple[int, int]
) -> None:
    assert_same(pool4, world4(domain_sizes, zero_stage=0), tmp_path, load_by_hand)
