# SPDX-License-Identifier: Apache-2.0
"""Gradients that somebody forgets, and parameters that somebody changes, behind the engine's back."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.accelerator import get_accelerator
from marks import slow
from parity import Case, loss_of
from process_pool import ProcessPool
from torch import nn
from training import (
    COARSE,
    NOTHING_OWED,
    Codecs,
    Engine,
    batch_of,
    block_of,
    block_with,
    close_to,
    engine_of,
    error_of,
    evaluate,
    moe_layers,
    owed,
    residuals_of,
    train,
    world2,
)

import ds_hybridep
from ds_hybridep.deepspeed.engine_view import Zero12View
from ds_hybridep.errors import UnsupportedError, VerificationError
from ds_hybridep.runtime.runtime import HybridRuntime, StepState

pytestmark = pytest.mark.dist


# -- in the workers ---------------------------------------------------------------------------------------------


def set_to_none(engine: Engine) -> None:
    for parameter in engine.module.parameters():
        parameter.grad = None


WAYS: dict[str, Callable[[Engine], None]] = {
    "module.zero_grad()": lambda engine: engine.module.zero_grad(),
    "module.zero_grad(set_to_none=False)": lambda engine: engine.module.zero_grad(set_to_none=False),
    "zero_grad of a wrapper": lambda engine: nn.Sequential(engine.module).zero_grad(),
    "grad = None": set_to_none,
    "not at all": lambda engine: None,
}


def forget_between_micro_steps(case: Case, ways: Sequence[str]) -> dict[bool, tuple[list[float], float]]:
    """By `with_block`: losses, and the sum of the experts' parameters, where gradients of each first are forgotten.

    ways: one for each step.
    """
    found = {}
    for with_block in (False, True):
        with engine_of(case, with_block=with_block) as engine:
            losses = []
            for step, way in enumerate(ways):
                for micro_step in range(case.accumulation):
                    loss = engine(*batch_of(case, step, micro_step))
                    losses.append(loss.item())
                    engine.backward(loss)
                    engine.step()
                    if micro_step == 0:
                        WAYS[way](engine)
            experts = [p for layer in moe_layers(engine.module) for p in layer.experts.parameters()]
            found[with_block] = losses, sum(float(p.double().sum()) for p in experts)
    return found


def drop_after_a_step(case: Case) -> dict[str, bool]:
    """Residuals before a backward whose gradients are dropped, and after it, with a step before both."""
    settings = {"hybridep": block_with(case, [("identity", COARSE)]), "managed_gradient_accumulation": False}
    with engine_of(case, with_block=True, **settings) as engine:
        train(engine, case, 0, 2)
        before = owed(engine)
        engine.backward(engine(*batch_of(case, 7)))
        returned = owed(engine)
        engine.zero_grad()
        return {
            "are there": before != NOTHING_OWED,
            "changed by the backward": before != returned,
            "as before": before == owed(engine),
        }


def zero_in_place(engine: Engine) -> None:
    engine.optimizer.zero_grad(set_to_none=False)


DROPS: dict[str, Callable[[Engine], None]] = {
    "nothing": lambda engine: None,
    "engine.zero_grad()": lambda engine: engine.zero_grad(),
    "optimizer.zero_grad()": lambda engine: engine.optimizer.zero_grad(),
    "optimizer.zero_grad(set_to_none=False)": zero_in_place,
}
NO_CHANGE = {"type": "SGD", "params": {"lr": 0.0}}  # of weights: gradients depend on the batch alone


def spike(engine: Engine, case: Case, how: str) -> None:
    """Micro-steps up to an optimizer step that is left out, and another one instead of the last."""
    for micro_step in range(case.accumulation):
        engine.backward(loss_of(engine, case, *batch_of(case, 7, micro_step)))
        if micro_step < case.accumulation - 1:
            engine.step()
    DROPS[how](engine)
    engine.backward(loss_of(engine, case, *batch_of(case, 8)))
    engine.step()


def spikes(engine: Engine, case: Case, how: str, exactly: Callable[[], None]) -> None:
    """A spike with residuals in use, and one while what another plan has handed over waits for the next gradients."""
    train(engine, case, 0, 2)
    spike(engine, case, how)
    train(engine, case, 2, 1)
    exactly()
    spike(engine, case, how)


def zero_between_micro_steps(engine: Engine, case: Case, how: str, exactly: Callable[[], None]) -> None:
    for step in range(2):
        for micro_step in range(case.accumulation):
            engine.backward(loss_of(engine, case, *batch_of(case, step, micro_step)))
            if micro_step < case.accumulation - 1:
                DROPS[how](engine)
            if engine.managed_gradient_accumulation() or micro_step == case.accumulation - 1:
                engine.step()
    exactly()
    train(engine, case, 3, 2)


def one_forward_twice(engine: Engine, case: Case, how: str, exactly: Callable[[], None]) -> None:
    """Two backwards through one forward before a step."""
    train(engine, case, 0, 2)
    loss = loss_of(engine, case, *batch_of(case, 7))
    engine.backward(0.5 * loss, retain_graph=True)
    DROPS[how](engine)
    engine.backward(loss)
    engine.step()
    exactly()
    train(engine, case, 3, 2)


def sums_applied(
    case: Case, script: Callable[..., None], how: str, config: dict[str, Any] | None = None
) -> dict[str, float]:
    """How far the sums of the gradients that the optimizer gets are from those of DeepSpeed alone, relative."""
    runs = []
    for codecs in ([("identity", COARSE)], None):
        sums: dict[int, torch.Tensor] = {}

        def add(optimizer: torch.optim.Optimizer, *_: Any, sums: dict[int, torch.Tensor] = sums) -> None:
            for parameter in (one for group in optimizer.param_groups for one in group["params"]):
                if parameter.grad is not None:
                    sums[id(parameter)] = sums.get(id(parameter), 0) + parameter.grad.double()

        block = block_with(case, codecs) if codecs else None
        settings = {"hybridep": block, "optimizer": NO_CHANGE, **(config or {})}
        can_fp16 = mock.patch.object(type(get_accelerator()), "is_fp16_supported", return_value=True)
        with can_fp16, engine_of(case, with_block=codecs is not None, **settings) as engine:
            engine.basic_optimizer.register_step_pre_hook(add)
            exact = partial(ds_hybridep.replan, engine, block_of(case)) if codecs else int
            script(engine, case, how, exact)
        runs.append(list(sums.values()))
    apart = sum(float((one - other).square().sum()) for one, other in zip(*runs, strict=True))
    return {"apart": (apart / sum(float(one.square().sum()) for one in runs[1])) ** 0.5}


def spike_twice_on_the_host(case: Case) -> tuple[str, str]:
    """The error of a second spike, where DeepSpeed would add what the first one has left in the host's memory."""
    with engine_of(case, with_block=True, hybridep=block_with(case, [("identity", COARSE)])) as engine:
        train(engine, case, 0, 2)
        spike(engine, case, "nothing")
        return error_of(spike, engine, case, "nothing")


def fail_in_a_backward(case: Case, recovery: Sequence[str], folder: str) -> dict[str, Any]:
    """Losses of four steps, with and without a backward before the third that fails and from which all recover."""
    block, found = block_with(case, [("identity", COARSE)], advanced={"prefetch_depth": 1}), {}
    for name in ("undisturbed", "failed"):
        with engine_of(case, with_block=True, hybridep=block) as engine:
            losses = train(engine, case, 0, 2)
            engine.save_checkpoint(folder, tag=name)
            if name == "failed":
                # After the last layer has started its return, and before the node that would wait for it.
                first = moe_layers(engine.module)[0]
                handle = first.register_forward_hook(_make_fail)
                loss = engine(*batch_of(case, 7))
                handle.remove()
                with pytest.raises(ZeroDivisionError):
                    engine.backward(loss)
                for one in recovery:
                    engine.zero_grad() if one == "zero_grad" else engine.load_checkpoint(folder, tag=name)
            found[name] = losses + train(engine, case, 2, 2)
            found[f"residuals, {name}"] = [float(residual.double().sum()) for residual in residuals_of(engine)]
    return found


def _make_fail(_layer: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
    output.register_hook(_fail)


def _fail(_gradient: torch.Tensor) -> None:
    raise ZeroDivisionError


def swap_for_evaluation(case: Case, how: str) -> dict[str, Any]:
    """Errors of evaluating with other weights, unsaid and after `refresh`."""
    with engine_of(case, with_block=True) as engine:
        train(engine, case, 0, 2)
        for layer in moe_layers(engine.module)[1:]:
            for parameter in layer.experts.parameters():
                if how == "written":
                    with torch.no_grad():
                        parameter.mul_(0.5)
                else:
                    parameter.data = parameter.data * 0.5
        found = {"unsaid": error_of(evaluate, engine.module, case)}
        ds_hybridep.refresh(engine)
        found["refreshed"] = error_of(evaluate, engine.module, case)
        found["trained on"] = error_of(train, engine, case, 2, 2)
        return found


def gradients_asked_for(case: Case, codecs: Codecs) -> dict[bool, tuple[list[float], list[Any]]]:
    """By `with_block`: losses, and before each backward the sum of what `torch.autograd.grad` says, or its error."""
    found: dict[bool, tuple[list[float], list[Any]]] = {}
    for with_block in (False, True):
        block = block_with(case, codecs) if with_block else None
        with engine_of(case, with_block=with_block, hybridep=block) as engine:
            experts = [p for layer in moe_layers(engine.module) for p in layer.experts.parameters()]
            losses, asked = found[with_block] = [], []
            for step in range(3):
                for micro_step in range(case.accumulation):
                    # Not through the engine, which lets nobody but itself run a backward under ZeRO 0.
                    loss = engine.module(*batch_of(case, step, micro_step))
                    losses.append(loss.item())
                    try:
                        given = torch.autograd.grad(loss, experts, retain_graph=True)
                        asked.append(sum(float(one.double().abs().sum()) for one in given))
                    except UnsupportedError as error:
                        asked.append(str(error))
                    engine.backward(loss)
                    engine.step()
    return found


# -- the tests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero_stage", [slow(0), 1])
@pytest.mark.parametrize("ways", [list(WAYS), *(slow([way] * 3) for way in WAYS)], ids=str)
def test_gradients_forgotten_between_micro_steps_are_forgotten_by_replicas_too(
    pool2: ProcessPool, ways: list[str], zero_stage: int
) -> None:
    case = world2(zero_stage=zero_stage, accumulation=2, optimizer="sgd")
    for found in pool2.run(forget_between_micro_steps, case=case, ways=ways):
        (plain_losses, plain_sum), (losses, parameter_sum) = found[False], found[True]
        assert losses == close_to(plain_losses)
        assert parameter_sum == pytest.approx(plain_sum, rel=1e-6)


@pytest.mark.parametrize("zero_stage", [slow(0), 1])
def test_residuals_of_dropped_gradients_come_back_after_a_step_too(pool2: ProcessPool, zero_stage: int) -> None:
    for found in pool2.run(drop_after_a_step, case=world2(zero_stage=zero_stage)):
        assert found == {"are there": True, "changed by the backward": True, "as before": True}


def test_residuals_stay_spent_where_zero_2_keeps_what_it_has_reduced(pool2: ProcessPool) -> None:
    for found in pool2.run(drop_after_a_step, case=world2(zero_stage=2)):
        assert found == {"are there": True, "changed by the backward": True, "as before": False}


FP16 = {"fp16": {"enabled": True, "loss_scale": 64.0}, "data_types": {"grad_accum_dtype": "fp32"}}
KINDS: list[dict[str, Any]] = [
    {"zero_stage": 1, "accumulation": 2},
    {"zero_stage": 2},
    {"zero_stage": 1},
    {"zero_stage": 2, "accumulation": 2},
    {"zero_stage": 3, "family": "mixtral"},
    {"zero_stage": 2, "accumulation": 2, "offload": "both"},
    {"zero_stage": 3, "family": "mixtral", "offload": "both"},
]
LEFT_OUT = [(KINDS[4], "nothing")]
LEFT_OUT += [slow(kind, how) for kind in KINDS for how in DROPS if (kind, how) not in LEFT_OUT]


@pytest.mark.parametrize("zero_stage", [slow(1), 2])
def test_sums_are_exact_where_a_step_follows_two_backwards_through_one_forward(
    pool2: ProcessPool, zero_stage: int
) -> None:
    for found in pool2.run(sums_applied, case=world2(zero_stage=zero_stage), script=one_forward_twice, how="nothing"):
        assert found["apart"] < 1e-5


@pytest.mark.parametrize(("options", "how"), LEFT_OUT, ids=str)
def test_sums_are_exact_where_a_step_is_left_out(pool2: ProcessPool, options: dict[str, Any], how: str) -> None:
    for found in pool2.run(sums_applied, case=world2(**options), script=spikes, how=how):
        assert found["apart"] < 1e-5


@pytest.mark.parametrize("zero_stage", [slow(1), 2])
def test_sums_are_exact_where_gradients_of_a_step_that_is_left_out_are_kept(
    pool2: ProcessPool, zero_stage: int
) -> None:
    case = world2(zero_stage=zero_stage)
    for found in pool2.run(sums_applied, case=case, script=spikes, how="optimizer.zero_grad()", config=FP16):
        assert found["apart"] < 1e-3


@pytest.mark.parametrize(
    ("options", "how", "config", "tolerance"),
    [
        slow(
            {"zero_stage": 3, "family": "mixtral"},
            "optimizer.zero_grad()",
            {"managed_gradient_accumulation": False},
            1e-5,
        ),
        ({"zero_stage": 1}, "optimizer.zero_grad(set_to_none=False)", FP16, 1e-3),
        slow({"zero_stage": 1}, "optimizer.zero_grad()", FP16, 1e-3),
        slow({"zero_stage": 1}, "optimizer.zero_grad(set_to_none=False)", {}, 1e-5),
    ],
    ids=str,
)
def test_sums_are_exact_where_zero_grad_is_called_in_an_accumulation(
    pool2: ProcessPool, options: dict[str, Any], how: str, config: dict[str, Any], tolerance: float
) -> None:
    case, script = world2(accumulation=2, **options), zero_between_micro_steps
    for found in pool2.run(sums_applied, case=case, script=script, how=how, config=config):
        assert found["apart"] < tolerance


def test_gradients_of_which_deepspeed_replaces_only_some_are_refused() -> None:
    """Muon's parameter groups are replaced, others are added to."""
    engine: Any = mock.Mock(global_rank=1)
    engine.zero_optimization_stage.return_value = 1
    engine.optimizer.cpu_offload = False
    flat = mock.Mock(flat_partition=torch.zeros(1))
    for averaged, is_replaced in (({}, False), ({0: None}, False), ({0: flat}, False), ({0: [], 1: None}, True)):
        engine.optimizer.averaged_gradients = averaged
        assert Zero12View(engine).replaces_gradients(is_boundary=True) == is_replaced
    engine.optimizer.averaged_gradients = {0: [], 1: flat}
    with pytest.raises(UnsupportedError, match="rank 1: engine.step.. was left out.*call engine.step"):
        Zero12View(engine).replaces_gradients(is_boundary=True)
    assert not Zero12View(engine).replaces_gradients(is_boundary=False)


def test_a_step_left_out_that_deepspeed_mixes_with_an_earlier_one_is_refused(pool2: ProcessPool) -> None:
    results = pool2.run(spike_twice_on_the_host, case=world2(zero_stage=1, offload="both"))
    for rank, (kind, message) in enumerate(results):
        assert kind == "UnsupportedError"
        assert message.startswith(f"rank {rank}: engine.step() was left out")
        assert "zero_optimization.offload_optimizer" in message


@pytest.mark.parametrize("recovery", [["zero_grad"], slow(["load", "zero_grad"]), slow(["zero_grad", "load"])])
def test_a_backward_that_fails_and_is_dropped_loses_no_later_gradients(
    pool2: ProcessPool, recovery: list[str], tmp_path: Path
) -> None:
    for found in pool2.run(fail_in_a_backward, case=world2(), recovery=recovery, folder=str(tmp_path)):
        assert found["failed"] == found["undisturbed"]  # bit for bit
        assert found["residuals, failed"] == found["residuals, undisturbed"]


@pytest.mark.parametrize("zero_stage", [slow(0), slow(1), 2])
@pytest.mark.parametrize("how", ["written", "replaced"])
def test_weights_swapped_for_an_evaluation_are_noticed(pool2: ProcessPool, how: str, zero_stage: int) -> None:
    for found in pool2.run(swap_for_evaluation, case=world2(zero_stage=zero_stage), how=how):
        kind, message = found["unsaid"]
        assert kind == "VerificationError"
        assert "blocks.1.moe.deepspeed_moe: parameters of this rank's experts were changed outside" in message
        assert "ds_hybridep.refresh(engine) on all ranks" in message
        assert found["refreshed"] == found["trained on"] == ("", "")


def test_a_verification_that_fails_opens_no_step() -> None:
    """In an open step zero_grad keeps what codecs have noted."""
    runtime: Any = HybridRuntime.__new__(HybridRuntime)
    runtime.config = SimpleNamespace(advanced=SimpleNamespace(verify_interval=1))
    runtime.statistics, runtime.migration = SimpleNamespace(num_steps=1), mock.Mock()
    runtime.step_state = StepState.NONE
    with mock.patch.object(HybridRuntime, "verify", side_effect=VerificationError), pytest.raises(VerificationError):
        runtime.before_step()
    assert runtime.step_state == StepState.NONE
    with mock.patch.object(HybridRuntime, "verify"):
        runtime.before_step()
    assert runtime.step_state == StepState.ANNOUNCED


@pytest.mark.parametrize(
    ("codec", "accumulation", "zero_stage"),
    [("identity", 1, 0), slow("identity", 2, 0), slow("identity", 2, 2), ("int8", 1, 0)],
)
def test_gradients_of_experts_that_autograd_returns_are_right_or_refused(
    pool2: ProcessPool, codec: str, accumulation: int, zero_stage: int
) -> None:
    case = world2(accumulation=accumulation, zero_stage=zero_stage, optimizer="sgd")
    for found in pool2.run(gradients_asked_for, case=case, codecs=[("identity", codec)]):
        (plain_losses, plain_asked), (losses, asked) = found[False], found[True]
        if (codec, accumulation) == ("identity", 1):
            assert asked == close_to(plain_asked)
        else:
            assert len(asked) == 3 * accumulation
            assert all("blocks.1.moe.deepspeed_moe: torch.autograd.grad" in str(one) for one in asked)
        if codec == "identity":
            assert losses == close_to(plain_losses)
        else:
            assert losses == pytest.approx(plain_losses, rel=1e-3)
