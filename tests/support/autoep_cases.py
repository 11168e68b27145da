# SPDX-License-Identifier: Apache-2.0
"""Cases of Hugging Face models through AutoEP on four ranks and on two."""

from dataclasses import replace
from typing import Any

from parity import Case, levels_of
from toy_model import ToyConfig

SHAPE = ToyConfig(hidden=32, ffn=16, sequence=8, num_experts=8, k=2)


def case4(family: str, *domain_sizes: int, **options: Any) -> Case:
    options.setdefault("toy", SHAPE)
    return Case(levels=levels_of((2, 2), domain_sizes), family=family, **options)


def case2(family: str, domain_size: int = 2, **options: Any) -> Case:
    toy = replace(options.pop("toy", SHAPE), ep_size=2)
    return Case(levels=levels_of((2,), (domain_size,)), family=family, toy=toy, **options)
