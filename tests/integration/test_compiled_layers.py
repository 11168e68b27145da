# SPDX-License-Identifier: Apache-2.0
"""Models that the user has compiled with torch.compile before deepspeed.initialize: they train as uncompiled ones."""

import importlib.util
from typing import Any

import pytest
import torch
from marks import slow
from parity import Case
from process_pool import ProcessPool
from torch import nn
from training import close_to, initialize, new_model, train, world2

pytestmark = pytest.mark.dist

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="needs transformers: '.[hf]'"
)


# -- in the workers ---------------------------------------------------------------------------------------------


def compile_layers(model: Any, what: str, backend: str) -> nn.Module:
    """The model with some parts compiled, as a user's script does it."""
    if what == "model":
        model.compile(backend=backend)
    elif what == "wrapped model":
        return torch.compile(model, backend=backend)
    elif what == "decoder layers":
        for layer in model.model.layers:
            layer.compile(backend=backend)
    for index, block in enumerate(getattr(model, "blocks", ())):
        if what == "MoE layers":
            block.moe.compile(backend=backend)
        elif what == "experts":
            for expert in block.moe.deepspeed_moe.experts.deepspeed_experts:
                expert.compile(backend=backend)
        elif what == "wrapped blocks":
            model.blocks[index] = torch.compile(block, backend=backend)
    return model


def train_compiled(case: Case, what: str, backend: str) -> tuple[list[float], list[float], int]:
    """Losses of a plain model that is not compiled, and of one with the block that is; frames that Dynamo saw."""
    from torch._dynamo.utils import counters  # imports for three seconds

    losses = []
    torch._dynamo.reset()
    counters.clear()
    for with_block in (False, True):
        model = new_model(case)
        if with_block:
            model = compile_layers(model, what, backend)
        engine = initialize(case, model, with_block=with_block)
        losses.append(train(engine, case, 0, 3))
        engine.destroy()
    return losses[0], losses[1], counters["frames"]["total"]


# -- the tests --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "options"),
    [
        ("MoE layers", {}),
        slow("model", {"zero_stage": 1, "accumulation": 2}),
        slow("MoE layers", {"zero_stage": 2}),
        slow("wrapped blocks", {}),
        slow("wrapped model", {}),
        slow("experts", {}),
        slow("model", {"backend": "inductor"}),
        pytest.param("decoder layers", {"family": "mixtral"}, marks=[needs_transformers, pytest.mark.slow]),
        pytest.param("model", {"family": "mixtral"}, marks=[needs_transformers, pytest.mark.slow]),
    ],
    ids=str,
)
def test_a_model_that_was_compiled_trains_as_one_that_was_not(
    pool2: ProcessPool, what: str, options: dict[str, Any]
) -> None:
    backend = options.get("backend", "aot_eager")
    case = world2(**{name: value for name, value in options.items() if name != "backend"})
    for plain, compiled, num_frames in pool2.run(train_compiled, case=case, what=what, backend=backend):
        assert compiled == close_to(plain)
        assert num_frames > 0
