# SPDX-License-Identifier: Apache-2.0
"""Cases whose dense parameters are synchronised over levels that encode."""

import hashlib
from typing import Any

import torch
from parity import Case, levels_of
from toy_model import ToyConfig


def world2(domain_size: int, **options: Any) -> Case:
    toy = ToyConfig(ep_size=2, num_experts=4)
    return Case(levels=levels_of((2,), (domain_size,)), dense_sync="hierarchical", **{"toy": toy, **options})


def world4(*domain_sizes: int, **options: Any) -> Case:
    return Case(levels=levels_of((2, 2), domain_sizes), dense_sync="hierarchical", **options)


def over_slow_level(case: Case, **codecs: Any) -> dict[str, Any]:
    """Settings of the block with these codecs over the first level."""
    first, *others = case.ds_config(with_block=True)["hybridep"]["levels"]
    return {"levels": [{**first, **codecs}, *others], "advanced": {"verify_interval": 1}}


def digest(engine: Any) -> str:
    """Of all parameters, bit by bit."""
    found = hashlib.sha256()
    for parameter in engine.module.parameters():
        found.update(parameter.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def residuals(engine: Any) -> dict[str, float]:
    """Sum over this rank's residuals of each dense parameter, waiting ones included."""
    total: dict[str, float] = {}
    for one in engine.__dict__["_hybridep_attachment"].runtime.codec_state.undelivered():
        if " " not in one.name:  # not of an expert
            total[one.name] = total.get(one.name, 0.0) + float(one.values.double().sum())
    return {name: value for name, value in total.items() if value}
