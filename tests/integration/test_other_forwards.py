# SPDX-License-Identifier: Apache-2.0
"""Layers whose forward is not the one that DeepSpeed gave them."""

from typing import Any

import pytest
import torch
from deepspeed.moe.sharded_moe import MOELayer
from parity import Case, model_of, use_expert_groups_of
from process_pool import ProcessPool
from torch import Tensor
from training import initialize, moe_layers, train, world2

from ds_hybridep.errors import UnsupportedError

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]
_DEEPSPEED = MOELayer.forward


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
    layer = moe_layers(model)[1]
    if kind in ("own", "passing"):
        layer.__class__ = {"own": OwnForward, "passing": Passing}[kind]
    engine = initialize(case, model, with_block=True)
    original = layer.forward
    if kind == "replaced":
        layer.forward = lambda *inputs, **kwargs: _DEEPSPEED(layer, *inputs, **kwargs)
    elif kind == "wrapped":
        layer.forward = lambda *inputs, **kwargs: original(*inputs, **kwargs)
    try:
        train(engine, case, 0, 2)
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
