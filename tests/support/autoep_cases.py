# SPDX-License-Identifier: Apache-2.0
"""Cases of Hugging Face models through AutoEP on four ranks."""

from contextlib import AbstractContextManager
from typing import Any

import training
from parity import Case, levels_of, merged
from toy_model import ToyConfig
from training import Engine

SHAPE = ToyConfig(hidden=32, ffn=16, sequence=8, num_experts=8, k=2)


def case4(family: str, *domain_sizes: int, **options: Any) -> Case:
    options.setdefault("toy", SHAPE)
    return Case(levels=levels_of((2, 2), domain_sizes), family=family, **options)


def engine_of(
    case: Case, *, with_block: bool, block: dict[str, Any] | None = None, **zero: Any
) -> AbstractContextManager[Engine]:
    """An engine whose steps are all verified; `block` and `zero` are added to those parts of ds_config."""
    hybridep = merged({"advanced": {"verify_interval": 1}}, block or {}) if with_block else None
    zero_optimization = case.ds_config(with_block=False)["zero_optimization"] | zero
    return training.engine_of(case, with_block=with_block, hybridep=hybridep, zero_optimization=zero_optimization)
