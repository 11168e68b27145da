# SPDX-License-Identifier: Apache-2.0
"""Engines of models whose experts have adapters of peft; all of it runs on the ranks of a pool."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
from parity import Case, model_of, use_expert_groups_of

BOTH = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
RANK = 4


def adapted_model(case: Case, targets: tuple[str, ...], *, seed: int) -> Any:
    import peft

    model = model_of(case, seed=seed)
    model.config.output_router_logits = False  # transformers before 5.6 makes its loss of probabilities
    settings = peft.LoraConfig(
        r=RANK, lora_alpha=3, target_modules=["q_proj"], target_parameters=list(targets), init_lora_weights=False
    )
    return peft.get_peft_model(model, settings)


@contextmanager
def engine_of(
    case: Case, targets: tuple[str, ...], *, with_block: bool, seed: int = 1, load_universal: bool = False
) -> Iterator[Any]:
    """With the block expert-parallel; without it every rank has all experts."""
    use_expert_groups_of(case)
    model = adapted_model(case, targets, seed=seed)
    config = case.ds_config(with_block=with_block)
    config["checkpoint"] = {"load_universal": load_universal}
    if with_block:
        config["hybridep"]["advanced"]["verify_interval"] = 1
    else:
        del config["expert_parallel"]
        config["zero_optimization"] = {"stage": 0}
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]  # as the Trainer gives them
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trainable, config=config)
    try:
        yield engine
    finally:
        engine.destroy()
        del engine, model, trainable
        gc.collect()
