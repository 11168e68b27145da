# SPDX-License-Identifier: Apache-2.0
"""How long an engine lives, and what a start that fails leaves behind: as much as with DeepSpeed alone."""

import gc
import importlib.util
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import pytest
from deepspeed.moe.sharded_moe import MOELayer
from deepspeed.utils.debug import debug_clear_module_and_param_names
from marks import slow
from parity import Case
from process_pool import ProcessPool
from scripts import run_two_ranks
from torch import nn
from training import (
    THREAD_LIMIT_S,
    Engine,
    block_of,
    close_to,
    engine_of,
    error_of,
    hybridep_threads,
    initialize,
    new_model,
    train,
    world2,
)

import ds_hybridep
from ds_hybridep.deepspeed.patches import TABLE, find

pytestmark = pytest.mark.dist

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers: '.[hf]'"
)
BAD_SCHEDULER = {"scheduler": {"type": "NoSuchScheduler", "params": {}}}


# -- in the workers ---------------------------------------------------------------------------------------------


def what_lives(refs: dict[str, weakref.ref[Any]]) -> list[str]:
    """Names of what is still alive."""
    collect()
    return [name for name, ref in refs.items() if ref() is not None]


def collect() -> None:
    debug_clear_module_and_param_names()  # DeepSpeed's table of the last model
    for _ in range(3):  # what an engine's finalizer touches stays until the next collection
        gc.collect()


def parts_of(engine: Engine) -> dict[str, weakref.ref[Any]]:
    parts = {"engine": engine, "model": engine.module, "optimizer": engine.optimizer}
    return {name: weakref.ref(part) for name, part in parts.items()}


def lives_on(case: Case, *, with_block: bool, destroys: bool) -> list[str]:
    """What is left of an engine that has trained, after its last reference has gone."""
    engine = initialize(case, new_model(case), with_block=with_block)
    train(engine, case, 0, 2)
    refs = parts_of(engine)
    if destroys:
        engine.destroy()
    del engine
    return what_lives(refs)


def drop_several(case: Case) -> tuple[list[list[float]], list[int]]:
    """Losses of engines that are dropped one after another, and our threads while each of them lives."""
    losses, num_threads = [], []
    for _ in range(4):
        engine = initialize(case, new_model(case), with_block=True)
        losses.append(train(engine, case, 0, 3))
        deadline = time.monotonic() + THREAD_LIMIT_S
        while num_threads and len(hybridep_threads()) > 2 * num_threads[0] and time.monotonic() < deadline:
            time.sleep(0.01)  # threads that were told to end need some time for it
        num_threads.append(len(hybridep_threads()))
        del engine
        gc.collect()
    return losses, num_threads


def fail_and_retry(case: Case, *, with_block: bool) -> dict[str, Any]:
    """A start that fails after the MoE layers were bound, and one of a new model that does not."""
    known = {id(one) for one in engines()}
    model = new_model(case)
    kind = ""
    try:
        initialize(case, model, with_block=with_block, **BAD_SCHEDULER)
    except AssertionError as error:
        kind = str(error)
    found = {"error": kind, "left": left_on(model)}
    del model
    collect()
    found["dead engines"] = len([one for one in engines() if id(one) not in known])
    engine = initialize(case, new_model(case), with_block=with_block)
    found["losses"] = train(engine, case, 0, 3)
    engine.destroy()
    return found


def engines() -> list[Engine]:
    return [one for one in gc.get_objects() if type(one) is Engine]


def left_on(model: nn.Module) -> list[str]:
    """What of ours is on a model, and on the classes that all engines share."""
    found = [name for name, module in model.named_modules() if "_hybridep" in vars(module)]
    tables = [(module._forward_pre_hooks, module._load_state_dict_post_hooks) for module in model.modules()]
    hooks = [hook for pair in tables for table in pair for hook in table.values()]
    found += [hook.__qualname__ for hook in hooks if hook.__module__.startswith("ds_hybridep")]
    shared = [row for row in TABLE if row.until == "last detach"]
    changed = [vars(find(row.owner)).get(row.attribute) for row in shared]
    found += [row.attribute for row, now in zip(shared, changed, strict=True) if "ds_hybridep" in code_of(now)]
    return found


def code_of(method: Any) -> str:
    """The file that a method of a class comes from."""
    return getattr(getattr(method, "__func__", method), "__code__", SimpleNamespace(co_filename="")).co_filename


def retry_on_the_same_model(case: Case, *, with_block: bool) -> list[float]:
    """Losses of an AutoEP model whose first start failed; DeepSpeed's own hooks of that engine are taken off."""
    model = new_model(case)
    with pytest.raises(AssertionError, match="NoSuchScheduler"):
        initialize(case, model, with_block=True, **BAD_SCHEDULER)
    model._forward_pre_hooks.clear()
    model._forward_hooks.clear()
    engine = initialize(case, model, with_block=with_block, expert_parallel=None)  # its layers are AutoEP's by now
    try:
        return train(engine, case, 0, 3)
    finally:
        engine.destroy()


def losses_without_a_failure(case: Case, *, with_block: bool = True) -> list[float]:
    with engine_of(case, with_block=with_block) as engine:
        return train(engine, case, 0, 3)


def attach_twice(case: Case) -> dict[str, Any]:
    """Two engines that have the same MoE layers, and are attached one after the other."""
    with engine_of(case, with_block=True) as first:
        losses = train(first, case, 0, 1)
        model = nn.ModuleList([first.module])  # without the first engine's hooks
        for layer in model.modules():
            if isinstance(layer, MOELayer):
                layer.ep_group = layer.gate.ep_group = None  # DeepSpeed refuses to give it a group again
        second = initialize(case, model, with_block=False)
        ds_hybridep.attach(second, block_of(case))
        found: dict[str, Any] = {"on the first": [name for name in vars(first) if "hybridep" in name]}
        found["error"] = error_of(first.step)
        second.destroy()
        found["losses"] = losses + train(first, case, 1, 2)
        return found


def start_again_with_another_size(case: Case) -> tuple[str, str]:
    """Error of a second engine for the same Hugging Face model, with expert-parallel groups of another size."""
    with engine_of(case, with_block=True) as engine:
        config = {**case.ds_config(with_block=True), "expert_parallel": {"enabled": True, "autoep_size": 1}}
        return error_of(deepspeed.initialize, model=engine.module, config=config)


def attach_that_fails(case: Case) -> dict[str, Any]:
    """Error of attaching where binding fails at its end, what is left, and losses after attaching again."""
    with engine_of(case, with_block=False) as engine:
        with mock.patch("ds_hybridep.deepspeed.supported.TESTED_WRAPPERS", ()):
            error = error_of(ds_hybridep.attach, engine, block_of(case))
        left = left_on(engine.module), [name for name in vars(engine) if "hybridep" in name]
        ds_hybridep.attach(engine, block_of(case))
        return {"error": error, "left": left, "losses": train(engine, case, 0, 3)}


# -- the tests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("end", "zero_stage"),
    [
        slow("destroyed", 0), slow("destroyed", 1), ("destroyed", 2),
        ("dropped", 0), slow("dropped", 1), slow("dropped", 2),
    ],
)  # fmt: skip
def test_an_engine_is_freed_when_it_would_be_without_the_block(end: str, zero_stage: int) -> None:
    # DeepSpeed frees an engine that was dropped without ZeRO; under ZeRO only one that was destroyed.
    case, destroys = world2(zero_stage=zero_stage), end == "destroyed"
    with ProcessPool(2) as pool:  # its own: what is never freed would be there for the next tests
        plain, hybrid = (
            pool.run(lives_on, case=case, with_block=with_block, destroys=destroys) for with_block in (False, True)
        )
    assert hybrid == plain
    assert (plain == [[], []]) == (destroys or zero_stage == 0)


@pytest.mark.slow  # one that is freed, above, leaves no threads
def test_engines_dropped_one_after_another_train_alike_and_leave_no_threads_behind() -> None:
    with ProcessPool(2) as pool:
        for losses, num_threads in pool.run(drop_several, case=world2()):
            assert losses == [losses[0]] * len(losses)
            assert max(num_threads) <= 2 * num_threads[0]  # those of the engine before may be there too


@pytest.mark.parametrize("family", [None, pytest.param("mixtral", marks=[needs_transformers, pytest.mark.slow])])
@pytest.mark.parametrize("zero_stage", [slow(0), slow(1), 2])
def test_a_start_that_fails_leaves_nothing_and_the_next_one_trains_as_if_it_had_not(
    pool2: ProcessPool, family: str | None, zero_stage: int
) -> None:
    case = world2(zero_stage=zero_stage, family=family)
    never_failed = pool2.run(losses_without_a_failure, case=case)
    plain, hybrid = (pool2.run(fail_and_retry, case=case, with_block=with_block) for with_block in (False, True))
    for without, found, losses in zip(plain, hybrid, never_failed, strict=True):
        assert "NoSuchScheduler" in found["error"]
        assert found["left"] == []
        assert found["dead engines"] == without["dead engines"]
        assert found["losses"] == losses


@needs_transformers
@pytest.mark.parametrize("with_block", [True, slow(False)])
def test_an_autoep_model_whose_start_failed_trains_as_if_it_had_not(pool2: ProcessPool, with_block: bool) -> None:
    case = world2(family="mixtral")
    retried = pool2.run(retry_on_the_same_model, case=case, with_block=with_block)
    assert retried == pool2.run(losses_without_a_failure, case=case, with_block=with_block)


def test_a_second_engine_takes_the_layers_and_the_first_steps_only_when_it_is_gone(pool2: ProcessPool) -> None:
    case = world2()
    losses = pool2.run(losses_without_a_failure, case=case)
    for found, expected in zip(pool2.run(attach_twice, case=case), losses, strict=True):
        kind, message = found["error"]
        assert kind == "UnsupportedError"
        assert "layer 0.blocks.0.moe.deepspeed_moe a later engine has taken over" in message
        assert "train with the last engine" in message
        assert found["on the first"] == []
        assert found["losses"] == close_to(expected)


@needs_transformers
def test_a_second_engine_with_groups_of_another_size_is_refused(pool2: ProcessPool) -> None:
    for kind, message in pool2.run(start_again_with_another_size, case=world2(family="mixtral")):
        assert kind == "ConfigError"
        assert "expert_parallel.autoep_size is 1, but an earlier deepspeed.initialize" in message
        assert "layers for 2; use the same size" in message


@pytest.mark.slow
def test_attaching_that_fails_at_its_end_leaves_nothing(pool2: ProcessPool) -> None:
    case = world2(dtype="bf16")
    losses = pool2.run(losses_without_a_failure, case=case)
    for found, expected in zip(pool2.run(attach_that_fails, case=case), losses, strict=True):
        kind, message = found["error"]
        assert kind == "UnsupportedError"
        assert "was not tested together" in message
        assert found["left"] == ([], [])
        assert found["losses"] == expected


@pytest.mark.slow
def test_a_rank_whose_start_fails_after_it_joined_is_named_by_the_others(tmp_path: Path) -> None:
    config = world2().ds_config(with_block=True)
    (waiting, said), (failed, _) = run_two_ranks(tmp_path, [config, {**config, **BAD_SCHEDULER}])
    assert failed == 1
    assert waiting != 0
    assert "rank 1 failed: AssertionError: DeepSpeed does not recognize LR scheduler NoSuchScheduler" in said
