# SPDX-License-Identifier: Apache-2.0
"""Layers whose forward is not the one that DeepSpeed gave them."""

from typing import Any

import pytest
import torch
from autoep_cases import case2
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from deepspeed.moe.sharded_moe import MOELayer
from parity import Case, model_of, use_expert_groups_of
from process_pool import ProcessPool
from torch import Tensor
from training import initialize, moe_layers, train, world2

from ds_hybridep.errors import UnsupportedError

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]
_DEEPSPEED = MOELayer.forward
_AUTOEP = AutoEPMoELayer.forward


class OwnForward(MOELayer):  # type: ignore[misc]  # DeepSpeed has no types
    """A layer of the user's that goes past the class's present forward."""

    def forward(self, *inputs: Tensor, **kwargs: Any) -> Tensor:
        out: Tensor = _DEEPSPEED(self, *inputs, **kwargs)
        return out


class Passing(MOELayer):  # type: ignore[misc]
    """A layer of the user's that calls DeepSpeed's."""

    def forward(self, *inputs: Tensor, **kwargs: Any) -> Tensor:
        out: Tensor = super().forward(*inputs, **kwargs)
        return out


def first_step(case: Case, kind: str) -> str:
    use_expert_groups_of(case)
    torch.manual_seed(case.seed)
    model = model_of(case, seed=case.seed)
    if kind in ("own", "passing"):
        moe_layers(model)[1].__class__ = {"own": OwnForward, "passing": Passing}[kind]
    engine = initialize(case, model, with_block=True)
    layer: Any = [one for one in model.modules() if isinstance(one, MOELayer | AutoEPMoELayer)][1]
    original, deepspeeds = layer.forward, _DEEPSPEED if isinstance(layer, MOELayer) else _AUTOEP
    if kind == "replaced":
        layer.forward = lambda *inputs, **kwargs: deepspeeds(layer, *inputs, **kwargs)
    elif kind == "wrapped":
        layer.forward = lambda *inputs, **kwargs: original(*inputs, **kwargs)
    try:
        train(engine, case, 0, 1)
    except UnsupportedError as error:
        return str(error)
    finally:
        engine.destroy()
    return ""


def test_a_forward_that_leaves_ours_out_is_an_error_in_the_first_step(pool2: ProcessPool) -> None:
    case = world2(steps=1)
    for kind, where in (("own", "OwnForward.forward"), ("replaced", "first_step.<locals>.<lambda>")):
        for message in pool2.run(first_step, case=case, kind=kind):
            assert (
                f"has run without hybridep, since its forward, test_other_forwards.{where}, does not call" in message
            )
            assert "deepspeed_moe (" in message
    for kind in ("passing", "wrapped", "none"):
        assert pool2.run(first_step, case=case, kind=kind) == ["", ""]


def test_a_layer_of_autoep_whose_forward_leaves_ours_out_is_an_error_too(pool2: ProcessPool) -> None:
    case = case2("qwen3_moe", zero_stage=1)
    for message in pool2.run(first_step, case=case, kind="replaced"):
        assert "model.layers.1.mlp (" in message
        assert "has run without hybridep, since its forward, test_other_forwards.first_step.<locals>" in message
    assert pool2.run(first_step, case=case, kind="wrapped") == ["", ""]
