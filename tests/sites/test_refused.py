# SPDX-License-Identifier: Apache-2.0
"""Engines whose gradients sites cannot exchange."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ds_hybridep.deepspeed.owned import Owned
from ds_hybridep.errors import UnsupportedError


def engine_with(module: nn.Module, *more: nn.Parameter, wrapped: str = "") -> Any:
    """As `Owned` sees an engine; wrapped: where DeepSpeed's optimizer keeps the parameters that it was given."""
    base = torch.optim.SGD([*module.parameters(), *more], lr=0.1)
    optimizer = SimpleNamespace(**({wrapped: [base.param_groups[0]["params"]]} if wrapped else {}))
    return SimpleNamespace(module=module, optimizer=optimizer, basic_optimizer=base, zero_optimization_stage=lambda: 0)


@pytest.mark.parametrize("wrapped", ["", "bit16_groups", "bf16_groups", "fp16_groups"])
def test_parameters_that_are_not_in_the_model(wrapped: str) -> None:
    model = nn.Linear(2, 2)
    Owned(engine_with(model, wrapped=wrapped))
    with pytest.raises(UnsupportedError, match="parameters that are not in the model"):
        Owned(engine_with(model, nn.Parameter(torch.zeros(2)), wrapped=wrapped))


def test_muon() -> None:
    model = nn.Linear(2, 2)
    model.weight.use_muon = True
    with pytest.raises(UnsupportedError, match="Muon changes gradients before sites can average them"):
        Owned(engine_with(model))
