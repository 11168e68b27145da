# SPDX-License-Identifier: Apache-2.0
"""Cases of Hugging Face models through AutoEP on four ranks."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import deepspeed
from parity import Case, levels_of, merged, model_of, use_expert_groups_of
from toy_model import ToyConfig

SHAPE = ToyConfig(hidden=32, ffn=16, sequence=8, num_experts=8, k=2)


def case4(family: str, *domain_sizes: int, **options: Any) -> Case:
    options.setdefault("toy", SHAPE)
    return Case(levels=levels_of((2, 2), domain_sizes), family=family, **options)


@contextmanager
def engine_of(case: Case, *, with_block: bool, block: dict[str, Any] | None = None, **zero: Any) -> Iterator[Any]:
    """An engine; `block` and `zero` are added to those parts of ds_config."""
    use_expert_groups_of(case)
    model = model_of(case, seed=case.seed)
    config = case.ds_config(with_block=with_block)
    config["zero_optimization"] |= zero
    if with_block:
        config["hybridep"] = merged(config["hybridep"], {"advanced": {"verify_interval": 1}, **(block or {})})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    try:
        yield engine
    finally:
        engine.destroy()
        del engine, model
        gc.collect()
