# SPDX-License-Identifier: Apache-2.0
"""peft switches off adapters of experts too, and what it cannot do with them it does with no layer."""

import copy
import importlib.util
import pickle
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from adapted_engines import BOTH, engine_of
from autoep_cases import SHAPE, case2, case4
from hf_models import hf_loss
from marks import slow
from parity import FP32_TOLERANCE, Case, model_of
from process_pool import Pools, ProcessPool
from torch import nn
from training import batch_of, error_of, train

from ds_hybridep.errors import UnsupportedError

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="needs peft: '.[hf]'"),
]


# -- in the workers ---------------------------------------------------------------------------------------------


def base_losses(case: Case) -> list[float]:
    """Of the model without adapters, a loss for each step."""
    model = model_of(case, seed=1)
    model.config.output_router_logits = False
    with torch.no_grad():
        return [hf_loss(model, *batch_of(case, step)).item() for step in range(case.steps)]


def train_with_references(case: Case, *, with_block: bool) -> dict[str, Any]:
    """Losses of training, and what the model without its adapters said before each step."""
    losses, references = [], []
    with engine_of(case, BOTH, with_block=with_block) as engine:
        for step in range(case.steps):
            with engine.module.disable_adapter():
                loss = hf_loss(engine, *batch_of(case, step))
                assert not loss.requires_grad
                references.append(loss.item())
            losses += train(engine, case, step, 1)
    return {"losses": losses, "references": references}


def compare(case: Case) -> dict[str, Any]:
    with engine_of(case, BOTH, with_block=False) as engine:
        alone = train(engine, case, 0, case.steps)
    return {
        "base": base_losses(case),
        "alone": alone,
        "plain": train_with_references(case, with_block=False),
        "hybrid": train_with_references(case, with_block=True),
    }


def switch_and_look(case: Case) -> dict[str, list[float]]:
    """Losses of one batch with adapters on and off, in the ways that peft knows."""
    from peft.helpers import rescale_adapter_scale

    off, on = [], []
    with engine_of(case, BOTH, with_block=True) as engine:
        model = engine.module

        def look() -> float:
            with torch.no_grad():
                return hf_loss(model, *batch_of(case, 0)).item()

        train(engine, case, 0, 1)
        on.append(look())
        with model.disable_adapter():
            off.append(look())
            with model.disable_adapter():
                off.append(look())
            off.append(look())
        on.append(look())
        with suppress(KeyError), model.disable_adapter():
            off.append(look())
            raise KeyError
        on.append(look())
        model.base_model.disable_adapter_layers()
        off.append(look())
        assert model.get_model_status().enabled is False
        with model.disable_adapter():
            off.append(look())
        off.append(look())
        model.base_model.enable_adapter_layers()
        assert model.get_model_status().enabled is True
        model.set_adapter("default")
        on.append(look())
        with rescale_adapter_scale(model, 0.0):
            off.append(look())
        on.append(look())
    return {"off": off, "on": on, "base": base_losses(case)[:1]}


def refuse(case: Case) -> dict[str, Any]:
    """Errors of what cannot work, by its name, and names of what it has changed all the same."""
    import peft

    with engine_of(case, BOTH, with_block=True) as engine:
        model = engine.module
        before = {name: value.clone() for name, value in model.state_dict().items()}
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        config = peft.LoraConfig(target_modules=["v_proj"])
        calls = {
            "merge_adapter": (model.merge_adapter,),
            "merge_and_unload": (model.merge_and_unload,),
            "unload": (model.unload,),
            "delete_adapter": (model.delete_adapter, "default"),
            "add_adapter": (model.add_adapter, "other", config),
            "load_adapter": (model.load_adapter, "/no/folder", "default"),
            "set_adapter": (model.base_model.set_adapter, "other"),
            "set_adapter of some": (model.base_model.set_adapter, ["default", "other"]),
            "set_requires_grad": (model.set_requires_grad, "default", False),
        }
        errors = {name: error_of(*call) for name, call in calls.items()}
        errors["inference_mode"] = error_of(model.set_adapter, "default", inference_mode=True)
        names = ["default", "__base__", "default"]
        errors["adapter_names"] = error_of(model, input_ids=batch_of(case, 0)[0], adapter_names=names)
        model.unmerge_adapter()  # of a trainer that cleans up after an error
        now = model.state_dict()
        changed = [name for name in before.keys() | now.keys() if not same(before.get(name), now.get(name))]
        assert trained == [name for name, parameter in model.named_parameters() if parameter.requires_grad]
        assert model.get_model_status().enabled is True
        return {"errors": errors, "changed": changed, "adapters": list(model.peft_config)}


def same(one: Any, other: Any) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


# -- tests ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case2("qwen3_moe", 2, zero_stage=1, accumulation=2, steps=3), id="two ranks"),
        slow(case4("qwen3_moe", 2, 1, zero_stage=1, accumulation=2, steps=3), id="zero 1"),
        slow(case4("qwen3_moe", 1, 1, zero_stage=1), id="no domains"),
        slow(case4("qwen3_moe", 2, 2), id="all in one"),
        slow(case4("qwen3_moe", 2, 1, zero_stage=3), id="zero 3"),
        slow(case4("qwen3_moe", 2, 1, zero_stage=1, hot_experts=2, toy=replace(SHAPE, drift=2)), id="hot"),
    ],
)
def test_a_reference_is_the_base_and_leaves_no_trace(pool_of: Pools, case: Case) -> None:
    for found in pool_of(case.world_size).run(compare, case=case):
        for kind in ("plain", "hybrid"):
            assert found[kind]["references"] == pytest.approx(found["base"], rel=FP32_TOLERANCE)
            assert found[kind]["losses"] == pytest.approx(found["alone"], rel=FP32_TOLERANCE)
        assert found["base"] != pytest.approx(found["alone"][:: len(found["alone"]) // len(found["base"])], rel=1e-3)


def test_adapters_go_off_and_on_in_every_way_that_peft_knows(pool2: ProcessPool) -> None:
    for found in pool2.run(switch_and_look, case=case2("qwen3_moe", zero_stage=1)):
        assert found["off"] == [found["off"][0]] * 8
        assert found["off"][0] == pytest.approx(found["base"][0], rel=FP32_TOLERANCE)
        assert found["on"] == [found["on"][0]] * 5
        assert found["on"][0] != pytest.approx(found["base"][0], rel=1e-3)


def test_what_would_reach_adapters_of_attention_only_is_refused(pool2: ProcessPool) -> None:
    for found in pool2.run(refuse, case=case2("qwen3_moe", zero_stage=1)):
        for name, (kind, message) in found["errors"].items():
            assert kind == "UnsupportedError", name
            assert "adapters of experts" in message, name
        assert found["changed"] == []
        assert found["adapters"] == ["default"]


def pickled(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copy_of", [copy.deepcopy, pickled])
def test_a_copy_of_a_model_is_guarded_by_itself(pool2: ProcessPool, copy_of: Callable[[nn.Module], Any]) -> None:
    pool2.run(copy_and_look, copy_of=copy_of)  # on ranks, since they have imported peft


def copy_and_look(copy_of: Callable[[nn.Module], Any]) -> None:
    import peft

    from ds_hybridep.deepspeed.adapter_switch import AdapterSwitch, guard

    base = nn.Sequential(nn.Linear(2, 2))
    model: Any = peft.get_peft_model(base, peft.LoraConfig(target_modules=["0"]))
    base.add_module("experts", switch := AdapterSwitch("layer", "default"))
    guard(model, [switch])
    other = copy_of(model)
    with pytest.raises(UnsupportedError, match="merge_adapter"):
        other.merge_adapter()
    for one in (model, other):
        one.requires_grad_(False)
    other.set_adapter("default")  # trains its adapter
    assert any(parameter.requires_grad for parameter in other.parameters())
    assert not any(parameter.requires_grad for parameter in model.parameters())
