# SPDX-License-Identifier: Apache-2.0
"""Synchronisation of dense parameters where a job does not go straight on: unused parameters, loads, changed plans."""

import gc
import weakref
from typing import Any
from unittest import mock

import pytest
import torch
from encoded import digest, over_slow_level, residuals, world2, world4
from marks import slow
from process_pool import ProcessPool
from training import batch_of, engine_of, error_of, train

import ds_hybridep
from ds_hybridep.sync.memory import HeldSum

pytestmark = pytest.mark.dist


def dense_sync_of(engine: Any) -> Any:
    return engine.__dict__["_hybridep_attachment"].runtime.syncs["dense parameters"]


def leave_out(case: Any, with_block: bool, unused_in: int | None) -> dict[str, torch.Tensor]:
    """Dense parameters after two steps of two micro-steps, in one of which a layer is not used."""
    with engine_of(case, with_block=with_block) as engine:
        dense = engine.module.blocks[0].dense
        forward = dense.forward
        for step in range(2):
            for micro_step in range(2):
                dense.forward = torch.zeros_like if micro_step == unused_in else forward
                loss = engine(*batch_of(case, step, micro_step))
                engine.backward(loss)
                engine.step()
                if with_block and micro_step:
                    assert not dense_sync_of(engine).waiting_names
        named = engine.module.named_parameters()
        return {name: p.detach().clone() for name, p in named if "experts" not in name}


@pytest.mark.parametrize("unused_in", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_parameter_that_one_micro_step_leaves_out(pool4: ProcessPool, unused_in: int) -> None:
    case = world4(1, 1, zero_stage=2, accumulation=2, optimizer="sgd")
    plain = pool4.run(leave_out, case=case, with_block=False, unused_in=unused_in)
    ours = pool4.run(leave_out, case=case, with_block=True, unused_in=unused_in)
    for one, other in zip(plain, ours, strict=True):
        for name, parameter in one.items():
            torch.testing.assert_close(other[name], parameter, rtol=1e-5, atol=1e-7, msg=name)


def leave_in_the_middle(case: Any) -> list[tuple[str, str]]:
    with engine_of(case, with_block=True) as engine:
        engine.backward(engine(*batch_of(case, 0, 0)))
        engine.step()
        block = case.ds_config(with_block=True)["hybridep"]
        found = [error_of(ds_hybridep.replan, engine, block), error_of(ds_hybridep.detach, engine)]
        engine.backward(engine(*batch_of(case, 0, 1)))
        engine.step()
        ds_hybridep.detach(engine)
        return found


def test_plans_do_not_change_in_the_middle_of_an_accumulation(pool4: ProcessPool) -> None:
    for found in pool4.run(leave_in_the_middle, case=world4(1, 1, zero_stage=2, accumulation=2)):
        for kind, message in found:
            assert kind == "GradientNotReturnedError"
            assert "wait for the last micro-step of an accumulation; detach or replan before its first one" in message


def load_and_go_on(case: Any, folder: str) -> dict[str, Any]:
    """What a load brings back, wherever it goes next."""
    block = over_slow_level(case, gradient_codec="int4")
    exact = case.ds_config(with_block=True)["hybridep"]
    with engine_of(case, with_block=True, hybridep=block) as engine:
        train(engine, case, 0, 2)
        engine.save_checkpoint(folder, tag="first")
        before = residuals(engine)
        train(engine, case, 2, 1)
        straight = digest(engine)
    with engine_of(case, with_block=True, hybridep=block) as engine:
        engine.load_checkpoint(folder, tag="first")
        found = {"right after the load": residuals(engine) == before}
        engine.save_checkpoint(folder, tag="second")
        ds_hybridep.replan(engine, exact)
        found["under another plan"] = residuals(engine) == pytest.approx(before, rel=1e-5, abs=1e-9)
    with engine_of(case, with_block=True, hybridep=block) as engine:
        engine.load_checkpoint(folder, tag="second")
        train(engine, case, 2, 1)
        found["from the second checkpoint"] = digest(engine) == straight
        engine.load_checkpoint(folder, tag="first", load_module_only=True)
        found["forgotten"] = residuals(engine) == {}
    other = {"zero_optimization": {"stage": case.zero_stage, "reduce_bucket_size": 700}}
    with engine_of(case, with_block=True, hybridep=block, **other) as engine:
        engine.load_checkpoint(folder, tag="first")
        found["in other buckets"] = residuals(engine) == before
        train(engine, case, 2, 1)
        found["has residuals"] = any(before.values())
    return found


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_what_was_loaded_is_neither_lost_nor_found_again(pool2: ProcessPool, stage: int, tmp_path: Any) -> None:
    for found in pool2.run(load_and_go_on, case=world2(1, zero_stage=stage), folder=str(tmp_path)):
        assert all(found.values()), found


def load_under_other_sums(case: Any, folder: str, changed: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """What this rank had kept back of dense gradients, as parts of a mean, before a load and after it."""
    settings = {"hybridep": over_slow_level(case, gradient_codec="int4")}

    def kept(engine: Any) -> torch.Tensor:
        found = engine.__dict__["_hybridep_attachment"].runtime.codec_state.undelivered()
        return torch.cat([one.values.double().view(-1) for one in found]).sum()

    with engine_of(case, with_block=True, **settings) as engine:
        train(engine, case, 0, 2)
        engine.save_checkpoint(folder)
        before = kept(engine)
    with engine_of(case, with_block=True, **settings, **changed) as engine:
        engine.load_checkpoint(folder)
        after = kept(engine)
        train(engine, case, 2, 1)
        return before, after


@pytest.mark.slow
@pytest.mark.parametrize("changed", [{"prescale_gradients": True}, {"communication_data_type": "bf16"}], ids=str)
def test_what_was_kept_back_fits_other_ways_to_sum(pool4: ProcessPool, tmp_path: Any, changed: dict[str, Any]) -> None:
    case = world4(1, 1, zero_stage=0)
    found = pool4.run(load_under_other_sums, case=case, folder=str(tmp_path), changed=changed)
    before, after = (torch.stack(column) for column in zip(*found, strict=True))
    assert before.abs().min() > 0
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-9)


def change_on_one_rank(case: Any, codecs: dict[str, Any], refresh: bool) -> tuple[tuple[str, str], str]:
    """The error of a step after one rank has changed a dense parameter, and all parameters after two more steps."""
    block = over_slow_level(case, **codecs)
    with engine_of(case, with_block=True, hybridep=block) as engine:
        train(engine, case, 0, 2)
        if torch.distributed.get_rank() == 1:
            with torch.no_grad():
                engine.module.head.weight.add_(0.1)
        if refresh:
            ds_hybridep.refresh(engine)
            engine.__dict__["_hybridep_attachment"].runtime.statistics.num_steps = 0  # verifies from the next step on
        error = error_of(train, engine, case, 2, 2) if not refresh else ("", str(train(engine, case, 2, 2)))
        return error, digest(engine)


@pytest.mark.parametrize("codecs", [{"weight_codec": "int8"}, slow({})])
def test_a_rank_with_other_parameters_is_found(pool2: ProcessPool, codecs: dict[str, Any]) -> None:
    case = world2(1, zero_stage=1)
    if codecs:
        for (kind, message), _ in pool2.run(change_on_one_rank, case=case, codecs=codecs, refresh=False):
            assert kind == "VerificationError"
            assert "dense parameters: ranks [1] hold other values than rank 0" in message
    found = pool2.run(change_on_one_rank, case=case, codecs=codecs, refresh=True)
    assert all(error[0] == "" for error, _ in found)


def memory_between_steps(case: Any) -> list[bool]:
    """Whether what takes messages into DeepSpeed's buffers is gone after a step."""
    with engine_of(case, with_block=True, hybridep=over_slow_level(case, codecs="recommended")) as engine:
        apply, seen = HeldSum.apply, []

        def noting(held: HeldSum, messages: Any) -> Any:
            seen.append(weakref.ref(held))
            return apply(held, messages)

        with mock.patch.object(HeldSum, "apply", noting):
            train(engine, case, 0, 2)
        gc.collect()
        return [one() is None for one in seen]


def test_nothing_of_deepspeeds_buffers_is_kept(pool2: ProcessPool) -> None:
    for found in pool2.run(memory_between_steps, case=world2(1, zero_stage=0)):
        assert found
        assert all(found)
