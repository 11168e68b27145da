# SPDX-License-Identifier: Apache-2.0
"""Engines whose gradients sites cannot exchange."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ds_hybridep.deepspeed.site_state import SiteState
from ds_hybridep.errors import UnsupportedError

# By kind of optimizer: where it keeps the parameters that it was given, another attribute that it has, and its stage.
KINDS = {
    "torch": ("", "", 0),
    "FP16_Optimizer": ("fp16_groups", "", 0),
    "BF16_Optimizer": ("bf16_groups", "fp32_groups_gradient_flat_partition", 1),
    "ZeRO 1": ("bit16_groups", "averaged_gradients", 1),
    "ZeRO 3": ("fp16_groups", "averaged_gradients", 3),
}


def engine_with(module: nn.Module, *more: nn.Parameter, kind: str = "torch") -> Any:
    """As `SiteState` sees an engine."""
    base = torch.optim.SGD([*module.parameters(), *more], lr=0.1)
    kept, other, stage = KINDS[kind]
    optimizer = SimpleNamespace(**{kept: [base.param_groups[0]["params"]], other: {}})
    return SimpleNamespace(
        module=module, optimizer=optimizer, basic_optimizer=base, zero_optimization_stage=lambda: stage
    )


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_are_not_in_the_model(kind: str) -> None:
    model = nn.Linear(2, 2)
    SiteState(engine_with(model, kind=kind))
    with pytest.raises(UnsupportedError, match="parameters that are not in the model"):
        SiteState(engine_with(model, nn.Parameter(torch.zeros(2)), kind=kind))


def test_muon() -> None:
    model = nn.Linear(2, 2)
    model.weight.use_muon = True
    with pytest.raises(UnsupportedError, match="Muon changes gradients before sites can average them"):
        SiteState(engine_with(model))
