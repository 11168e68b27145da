# SPDX-License-Identifier: Apache-2.0
"""What people's scripts do with an engine while it trains: each as with DeepSpeed alone, or an error that says why."""

import importlib.util
import time
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from autoep_cases import case2, case4
from deepspeed import comm as dist
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from marks import slow
from parity import BF16_LOSS_TOLERANCE, Case, loss_of
from process_pool import ProcessPool
from torch import Tensor, nn
from toy_model import Block, ToyConfig
from training import (
    COARSE,
    LOW_RANK,
    Engine,
    batch_of,
    block_with,
    close_to,
    engine_of,
    error_of,
    evaluate,
    initialize,
    new_model,
    train,
    world2,
    world4,
)

import ds_hybridep
from ds_hybridep.errors import HybridEPError
from ds_hybridep.transport import channels

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers: '.[hf]'"
)


# -- in the workers ---------------------------------------------------------------------------------------------


def evaluate_first(case: Case) -> tuple[list[float], list[float]]:
    """Losses of a run that begins with an evaluation without autograd's records, and of one that does not."""
    losses = []
    for does in (False, True):
        with engine_of(case, with_block=True) as engine:
            if does:
                engine.eval()
                with torch.inference_mode():
                    loss_of(engine, case, *batch_of(case, 1000))
                engine.train()
            losses.append(train(engine, case, 0, 2))
    return losses[0], losses[1]


def offload_between_steps(case: Case, include: list[str] | None, **options: Any) -> dict[str, Any]:
    """Losses with states offloaded and reloaded between steps, and without."""
    found: dict[str, Any] = {}
    kinds = None if include is None else [OffloadStateTypeEnum(kind) for kind in include]
    for does in (False, True):
        with engine_of(case, with_block=True) as engine:
            losses = train(engine, case, 0, 1)
            for step in (1, 2):
                if does:
                    engine.offload_states(include=kinds, **options)
                    away = replica_bytes(engine)
                    if step == 1 and case.zero_stage < 3:  # which remembers a forward that has failed
                        found["refused"] = error_of(evaluate, engine, case)
                        engine.train()
                    engine.reload_states(non_blocking=options.get("non_blocking", False))
                    found["bytes"] = away, replica_bytes(engine)
                losses += train(engine, case, step, 1)
            found[f"losses {does}"] = losses
    return found


def replica_bytes(engine: Engine) -> int:
    return int(ds_hybridep.stats(engine)["replica_bytes"])


class Droppable(nn.Module):
    """A block that some micro-steps leave out."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block, self.is_left_out = block, False

    def forward(self, x: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return (x, x.new_zeros(())) if self.is_left_out else self.block(x, tokens)


def drop_layers(case: Case, *, with_block: bool, **config: Any) -> tuple[list[float], tuple[str, str]]:
    """Losses of a run in which the last micro-step of each step leaves out the last block, and its error."""
    model: Any = new_model(case)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = Droppable(block)
    engine = initialize(case, model, with_block=with_block, **config)
    losses: list[float] = []

    def run() -> None:
        for step in range(3):
            for micro_step in range(case.accumulation):
                model.blocks[-1].is_left_out = micro_step == case.accumulation - 1
                loss = loss_of(engine, case, *batch_of(case, step, micro_step))
                losses.append(loss.item())
                engine.backward(loss)
                if not config or micro_step == case.accumulation - 1:
                    engine.step()

    try:
        return losses, error_of(run)
    finally:
        engine.destroy()


def losses_with_and_without(
    case: Case, how: str = "train", *, blocks: Sequence[bool] = (False, True), **config: Any
) -> dict[Any, Any]:
    """Losses of three steps of a kind of script, by whether the ds_config has the block."""
    found: dict[Any, Any] = {}
    block = block_with(case, [(COARSE, LOW_RANK)]) if how == "a batch of nan" else None
    for with_block in blocks:
        settings = block if with_block else None
        with engine_of(case, with_block=with_block, hybridep=settings, **config) as engine:
            found[with_block] = SCRIPTS[how](engine, case)
            if with_block:
                levels = ds_hybridep.stats(engine)["levels"]
                found["gradient bytes"] = sum(level["sent_bytes"]["expert_gradients"] for level in levels)
    return found


def _train(engine: Engine, case: Case) -> list[float]:
    return train(engine, case, 0, 3)


def _compile(engine: Engine, case: Case) -> list[float]:
    torch._dynamo.reset()
    engine.compile(backend="eager")  # as accelerate does for TrainingArguments(torch_compile=True)
    return _train(engine, case)


def _save_on_cpu(engine: Engine, case: Case) -> list[float]:
    with torch.autograd.graph.save_on_cpu():
        return _train(engine, case)


def _two_forwards(engine: Engine, case: Case) -> list[float]:
    losses = []
    for step in range(2):
        for micro_step in range(case.accumulation):
            pair = [loss_of(engine, case, *batch_of(case, step + other, micro_step)) for other in (0, 50)]
            loss = (pair[0] + pair[1]) / 2
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
    return losses


def _nan(engine: Engine, case: Case) -> list[float]:
    losses = train(engine, case, 0, 2)
    loss = loss_of(engine, case, *batch_of(case, 2))
    engine.backward(loss * float("nan") if dist.get_rank() == 1 else loss)
    engine.step()
    return losses + [float(engine.skipped_steps)] + train(engine, case, 3, 2)


SCRIPTS = {
    "train": _train,
    "engine.compile()": _compile,
    "save_on_cpu": _save_on_cpu,
    "two forwards": _two_forwards,
    "a batch of nan": _nan,
}


def refusals(case: Case) -> tuple[tuple[str, str], tuple[str, str]]:
    """Errors of torch_autocast in float16, and of compiled autograd."""

    def start() -> None:
        with engine_of(case, with_block=True, torch_autocast={"enabled": True, "dtype": "float16"}):
            pass

    with engine_of(case, with_block=True) as engine:
        compiled = error_of(engine.compile, backend="eager", compiled_autograd_enabled=True)
    return error_of(start), compiled


def evaluate_on_one_rank(case: Case) -> tuple[str, float]:
    """The error where rank 0 alone evaluates, and how long it took to come."""
    soon = mock.patch.object(channels, "LEAST_NOTICE_S", 3.0)  # no key sets it; the notice takes twice that
    with soon, engine_of(case, with_block=True, hybridep={"timeout_s": 20}) as engine:
        train(engine, case, 0, 1)
        begin = time.monotonic()
        try:
            if dist.get_rank() == 0:
                evaluate(engine, case)
            train(engine, case, 1, 2)
        except HybridEPError as error:
            return str(error), time.monotonic() - begin
    return "", 0.0


# -- the tests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        slow(world4(2, 1, hot_experts=2, hot_level=1, zero_stage=1)),
        pytest.param(case4("mixtral", 2, 1, zero_stage=3), marks=[needs_transformers, pytest.mark.slow]),
    ],
    ids=["hot experts", "zero 3"],
)
def test_a_first_evaluation_in_inference_mode_changes_nothing(pool4: ProcessPool, case: Case) -> None:
    for trained, evaluated in pool4.run(evaluate_first, case=case):
        assert evaluated == trained


@pytest.mark.parametrize(
    ("case", "include", "options"),
    [
        slow(world2(zero_stage=1), None, {"pin_memory": False}),
        (world2(zero_stage=2, dtype="bf16"), None, {"non_blocking": True}),
        slow(world2(zero_stage=1), ["optim_states", "hp_params"], {}),
        pytest.param(
            case2("mixtral", zero_stage=3), ["lp_params", "lp_grads", "contiguous_grad_buffer"], {},
            marks=[needs_transformers, pytest.mark.slow],
        ),
    ],
    ids=["zero 1", "zero 2", "optimizer only", "zero 3"],
)  # fmt: skip
def test_states_that_were_offloaded_come_back(
    pool2: ProcessPool, case: Case, include: list[str] | None, options: dict[str, Any]
) -> None:
    for found in pool2.run(offload_between_steps, case=case, include=include, **options):
        assert found["losses True"] == found["losses False"]
        away, back = found["bytes"]
        if include is None or "lp_params" in include:
            assert away == 0 < back
        else:
            assert away == back
        kind, message = found.get("refused", ("", ""))
        if kind:
            assert (kind, include) == ("UnsupportedError", None)
            assert "call engine.reload_states() on all ranks" in message
        else:
            assert include is not None


def test_layer_drop_with_accumulation_works_as_the_message_says(pool2: ProcessPool) -> None:
    case = world2(accumulation=2)
    for _, (kind, message) in pool2.run(drop_layers, case=case, with_block=True):
        assert kind == "GradientNotReturnedError"
        assert "set managed_gradient_accumulation in ds_config to false (for LayerDrop)" in message
    config = {"managed_gradient_accumulation": False}
    plain, ours = (pool2.run(drop_layers, case=case, with_block=one, **config) for one in (False, True))
    assert [error for _, error in ours] == [("", "")] * 2
    assert [losses for losses, _ in ours] == [close_to(losses) for losses, _ in plain]


@pytest.mark.parametrize(
    ("how", "case"),
    [
        slow("engine.compile()", world2(zero_stage=1)),
        ("save_on_cpu", world2(zero_stage=1)),
        ("two forwards", world2(zero_stage=1, accumulation=2)),
        slow("two forwards", world2(zero_stage=2, accumulation=2)),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_a_script_trains_as_with_deepspeed_alone(pool2: ProcessPool, how: str, case: Case) -> None:
    for found in pool2.run(losses_with_and_without, case=case, how=how):
        assert found[True] == close_to(found[False])


@pytest.mark.slow  # test_compiled_layers.py has Dynamo
def test_a_compiled_engine_trains_as_with_deepspeed_alone(pool2: ProcessPool) -> None:
    case = world2(zero_stage=1, toy=ToyConfig(ep_size=2, num_layers=1))
    for found in pool2.run(losses_with_and_without, case=case, how="engine.compile()"):
        assert found[True] == close_to(found[False])


def test_torch_autocast_trains_as_with_deepspeed_alone(pool2: ProcessPool) -> None:
    config = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
    case = world2(zero_stage=1, toy=ToyConfig(ep_size=2, routing="by_token"))
    for found in pool2.run(losses_with_and_without, case=case, **config):
        assert found[True] == pytest.approx(found[False], rel=BF16_LOSS_TOLERANCE)


def test_what_cannot_be_compiled_or_cast_is_refused_with_a_way_out(pool2: ProcessPool) -> None:
    for cast, compiled in pool2.run(refusals, case=world2(zero_stage=1)):
        assert cast[0] == compiled[0] == "UnsupportedError"
        assert 'torch_autocast.dtype is "float16"' in cast[1]
        assert 'set it to "bfloat16"' in cast[1]
        assert "engine.compile() then compiles all but MoE layers" in compiled[1]


def test_sums_of_replicas_travel_in_the_communication_data_type(pool2: ProcessPool) -> None:
    case = world2(zero_stage=1)
    own, short = (
        pool2.run(losses_with_and_without, case=case, blocks=[True], **config)
        for config in ({}, {"communication_data_type": "bf16"})
    )
    for one, other in zip(own, short, strict=True):
        assert other["gradient bytes"] == one["gradient bytes"] / 2
        assert other[True] == pytest.approx(one[True], rel=BF16_LOSS_TOLERANCE)
        assert other[True] != one[True]


def test_a_batch_of_nan_is_skipped_also_with_lossy_codecs(pool2: ProcessPool) -> None:
    case = world2(zero_stage=1, dtype="bf16")
    config = {"bf16": {"enabled": True, "check_grad_overflow": True}}
    for found in pool2.run(losses_with_and_without, case=case, how="a batch of nan", **config):
        assert found[True][2] == found[False][2] == 1.0
        assert found[True] == pytest.approx(found[False], rel=0.2)  # codecs are lossy; nan would be unequal


def test_where_one_rank_alone_evaluates_an_error_says_so_soon(pool2: ProcessPool) -> None:
    found = pool2.run(evaluate_on_one_rank, case=world2(domain_size=1), timeout_s=100.0)
    assert [message for message, _ in found if "will not end: rank" in message], found
    for message, _ in found:
        assert "all ranks must call the model equally often" in message
        assert "synced_gpus=True" in message
