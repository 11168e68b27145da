# SPDX-License-Identifier: Apache-2.0
"""ZeRO-Offload: the optimizer's states are on the host, as far as that shows where the device is the host, too.

Comparisons with DeepSpeed are in test_parity.py and test_autoep.py.  Here it is the block with itself: the arithmetic
is the same wherever the states are, so all must be equal bit for bit.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from autoep_cases import case2 as autoep2
from autoep_cases import case4
from deepspeed.accelerator import get_accelerator
from marks import slow
from parity import Case, whole_parameters
from process_pool import ProcessPool
from training import COARSE, LOW_RANK, block_with, close_to, engine_of, new_model, train
from training import world2 as case2
from training import world4 as toy4

from ds_hybridep.errors import UnsupportedError

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

EXACT = ("identity", "identity")
LOSSY = [("int8", LOW_RANK), EXACT]
PATCHES = [("patch", COARSE), EXACT]


# -- in the workers ---------------------------------------------------------------------------------------------


def train_here_and_there(case: Case, codecs: Any, folder: str, more: dict[str, Any]) -> dict[str, Any]:
    """Losses of four steps with states on the device, and on the host; then on from a checkpoint of both.

    Returns the losses, those of going on, and the names of parameters that are different in the end.
    """
    losses, ends = {}, []
    for offload in (None, "hybrid"):
        there, path = replace(case, offload=offload), f"{folder}/{offload}"
        block = block_with(case, codecs, **more)
        with engine_of(there, with_block=True, hybridep=block) as engine:
            first = train(engine, there, 0, 2)
            engine.save_checkpoint(path)
            losses[offload] = first + train(engine, there, 2, 2)
            ends.append(whole_parameters(engine.module))
        with engine_of(there, with_block=True, hybridep=block, seed=2) as engine:
            engine.load_checkpoint(path)
            losses[offload, "resumed"] = first + train(engine, there, 2, 2)
            ends.append(whole_parameters(engine.module))
    different = {name for one in ends[1:] for name, value in one.items() if not torch.equal(value, ends[0][name])}
    return {"losses": losses, "different": sorted(different)}


def train_past_an_overflow(case: Case) -> dict[bool, tuple[list[float], int]]:
    """By `with_block`: losses in fp16 with a scale that is too large at first, and the number of skipped steps."""
    found = {}
    fp16 = {"enabled": True, "initial_scale_power": 20, "hysteresis": 1}
    for with_block in (False, True):
        with (
            mock.patch.object(type(get_accelerator()), "is_fp16_supported", return_value=True),
            engine_of(case, with_block=with_block, fp16=fp16) as engine,
        ):
            losses = train(engine, case, 0, 8)
            found[with_block] = losses, engine.skipped_steps
    return found


def train_with_own_optimizer(case: Case) -> dict[bool, list[float]]:
    """By `with_block`: losses with an optimizer of the script's own."""
    import deepspeed
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    losses = {}
    for with_block in (False, True):
        model = new_model(case)
        groups = split_params_into_different_moe_groups_for_optimizer(
            {"params": list(model.parameters()), "name": "all"}
        )
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        config = {**case.ds_config(with_block=with_block), "zero_force_ds_cpu_optimizer": False}
        del config["optimizer"]
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        losses[with_block] = train(engine, case, 0, 3)
        engine.destroy()
    return losses


def train_with_deepspeeds_adam(case: Case) -> dict[bool, list[float]]:
    """By `with_block`: losses with the optimizer that DeepSpeed makes of "AdamW" beside ZeRO-Offload."""
    losses = {}
    for with_block in (False, True):
        optimizer = case.ds_config(with_block=with_block)["optimizer"]
        params = {name: value for name, value in optimizer["params"].items() if name != "torch_adam"}
        own = {"optimizer": optimizer | {"params": params}}
        with engine_of(case, with_block=with_block, **own) as engine:
            assert type(engine.basic_optimizer).__name__ == "DeepSpeedCPUAdam"
            losses[with_block] = train(engine, case, 0, 3)
    return losses


def train_with_offloaded_parameters(case: Case) -> tuple[list[float], list[float], str]:
    """Losses of AutoEP alone with parameters on the device and on the host, and the error with the block."""
    on_device = case.ds_config(with_block=False)["zero_optimization"]
    on_host = on_device | {"offload_param": {"device": "cpu"}}
    losses = []
    for zero in (on_device, on_host):
        with engine_of(case, with_block=False, zero_optimization=zero) as engine:
            losses.append(train(engine, case, 0, 3))
    try:
        with engine_of(case, with_block=True, zero_optimization=on_host):
            return losses[0], losses[1], ""
    except UnsupportedError as error:
        return losses[0], losses[1], str(error)


# -- tests ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "codecs", "more"),
    [
        slow(toy4(2, 1, zero_stage=1, accumulation=2, dtype="bf16"), LOSSY, {}),  # test_parity.py has such states
        slow(case4("qwen3_moe", 2, 1, zero_stage=3), LOSSY, {}),
        slow(case4("qwen3_moe", 2, 1, zero_stage=3, accumulation=2), LOSSY, {}),
        slow(toy4(2, 1, zero_stage=2, accumulation=2), LOSSY, {}),
        slow(toy4(2, 1, zero_stage=2, dtype="bf16"), PATCHES, {}),
        slow(toy4(2, 1, zero_stage=1, dtype="bf16"), PATCHES, {"state": "host"}),
        slow(toy4(1, 1, zero_stage=2, accumulation=2, hot_experts=1, optimizer="sgd"), [EXACT, EXACT], {}),
        slow(case4("qwen3_moe", 2, 1, zero_stage=3, dtype="bf16"), LOSSY, {}),
    ],
    ids=lambda value: getattr(value, "id", None),
)
def test_where_the_states_are_changes_no_bit(
    pool4: ProcessPool, tmp_path: Path, case: Case, codecs: Any, more: dict[str, Any]
) -> None:
    results = pool4.run(
        train_here_and_there, case=case, codecs=codecs, folder=str(tmp_path), more=more, timeout_s=120.0
    )
    for found in results:
        on_device, *others = found["losses"].values()
        assert all(losses == on_device for losses in others)
        assert found["different"] == []


def test_steps_that_overflow_are_skipped(pool2: ProcessPool) -> None:
    for found in pool2.run(train_past_an_overflow, case=case2(zero_stage=2, offload="both", optimizer="sgd")):
        (plain, plain_skipped), (losses, skipped) = found[False], found[True]
        assert 0 < skipped == plain_skipped < 8
        assert losses == pytest.approx(plain, rel=1e-2)


@pytest.mark.parametrize("zero_stage", [1, slow(2)])
def test_an_optimizer_of_the_script(pool2: ProcessPool, zero_stage: int) -> None:
    for losses in pool2.run(train_with_own_optimizer, case=case2(zero_stage=zero_stage, offload="both")):
        assert losses[True] == close_to(losses[False])


@pytest.mark.slow  # about DeepSpeed, but for the refusal
def test_parameters_on_the_host_train_with_autoep_alone_and_are_refused_by_name(pool2: ProcessPool) -> None:
    for on_device, on_host, error in pool2.run(
        train_with_offloaded_parameters, case=autoep2("qwen3_moe", zero_stage=3)
    ):
        assert on_host == on_device
        assert "zero_optimization.offload_param was not tested together" in error


@pytest.mark.slow  # DeepSpeed compiles it on first use, for minutes
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "case",
    [
        case2(zero_stage=1, offload="both"),
        case2(zero_stage=2, offload="both", accumulation=2),
        autoep2("qwen3_moe", zero_stage=3, offload="both"),
    ],
    ids=["zero 1", "zero 2", "zero 3, AutoEP"],
)
def test_the_optimizer_that_deepspeed_makes(pool2: ProcessPool, case: Case) -> None:
    for losses in pool2.run(train_with_deepspeeds_adam, case=case, timeout_s=800.0):
        assert losses[True] == close_to(losses[False])
