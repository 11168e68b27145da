# SPDX-License-Identifier: Apache-2.0
"""Losses of a few steps, on record: a change of numerics shows as a difference in tests/golden/losses.

`pytest tests/integration/test_golden_losses.py --rewrite-golden` records new ones.
"""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from parity import Case, levels_of, loss_of, merged, model_of, use_expert_groups_of
from process_pool import ProcessPool
from torch import distributed as dist
from torch import nn
from toy_model import ToyConfig, batch

pytestmark = pytest.mark.dist

GOLDEN = Path(__file__).parents[1] / "golden" / "losses"
STEPS = 4
EXACT, LOSSY = 1e-5, 1e-3  # other processors sum in other orders; one element may then be encoded differently
TOY = ToyConfig()
HF = ToyConfig(hidden=32, ffn=16, sequence=8, num_experts=8, k=2)
COPIES = ToyConfig(ep_size=2)  # two groups hold each expert
NEEDS_HF = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="needs transformers: '.[hf]'")

Codecs = dict[str, Any]
RECOMMENDED: Codecs = {"codecs": "recommended"}
INT8: Codecs = {"weight_codec": "int8", "gradient_codec": "int8"}
INT4: Codecs = {"gradient_codec": "int4"}


def case(*domain_sizes: int, toy: ToyConfig = TOY, **options: Any) -> Case:
    return Case(levels=levels_of((2, 2), domain_sizes), toy=toy, steps=STEPS, **options)


# name -> (case, codecs of the slow level)
CLASSIC: dict[str, tuple[Case, Codecs]] = {
    **{f"zero{stage}": (case(2, 1, zero_stage=stage), {}) for stage in (0, 1, 2)},
    **{f"zero{stage}-recommended": (case(2, 1, zero_stage=stage), RECOMMENDED) for stage in (0, 1, 2)},
    "plain-ep": (case(1, 1), {}),
    "whole-world-accumulation": (case(2, 2, zero_stage=2, accumulation=2), {}),
    "copies-recommended": (case(1, 2, zero_stage=1, toy=COPIES), RECOMMENDED),
    "int8": (case(2, 1, zero_stage=1), INT8),
    "int4-gradients-accumulation": (case(2, 1, zero_stage=2, accumulation=2), INT4),
    "clipping-recommended": (case(2, 1, zero_stage=1, gradient_clipping=0.1), RECOMMENDED),
}
AUTOEP: dict[str, tuple[Case, Codecs]] = {
    **{f"autoep-zero{stage}": (case(2, 1, zero_stage=stage, family="qwen3_moe", toy=HF), {}) for stage in range(4)},
    **{
        f"autoep-zero{stage}-recommended": (
            case(2, 1, zero_stage=stage, family="mixtral", toy=replace(HF, ep_size=4)),
            RECOMMENDED,
        )
        for stage in (1, 3)
    },
}


def train(case: Case, codecs: Codecs) -> list[float]:
    """The mean loss over ranks of each micro-step."""
    # ZeRO 3 puts its own in this place and leaves it there.  Gradients then come in another order, and ZeRO 2 puts
    # them into buckets, whose blocks are encoded, in that order.
    nn.functional.linear = torch._C._nn.linear
    use_expert_groups_of(case)
    model = model_of(case, seed=case.seed)
    config = case.ds_config(with_block=True)
    first, *others = config["hybridep"]["levels"]
    config["hybridep"] = merged(config["hybridep"], {"levels": [{**first, **codecs}, *others]})
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = []
    for step in range(STEPS):
        for micro_step in range(case.accumulation):
            data = batch(
                case.toy, seed=case.seed, step=step, micro_step=micro_step, rank=dist.get_rank(), num_sequences=3
            )
            loss = loss_of(engine, case, *data)
            engine.backward(loss)
            engine.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            losses.append(float(total) / dist.get_world_size())
    engine.destroy()
    return losses


# test_parity.py and test_autoep.py compare others like the exact ones with DeepSpeed; clipping is under ZeRO 1, too.
SLOW = (
    "zero0", "zero1", "zero2", "plain-ep", "autoep-zero0", "autoep-zero1", "autoep-zero2", "autoep-zero3",
    "zero1-recommended",
)  # fmt: skip


def marked(name: str) -> object:
    marks = [pytest.mark.slow] if name in SLOW else []
    return pytest.param(name, marks=[*marks, NEEDS_HF] if name in AUTOEP else marks)


@pytest.mark.parametrize("name", [marked(name) for name in (*CLASSIC, *AUTOEP)])
def test_losses_are_those_on_record(pool4: ProcessPool, name: str, request: pytest.FixtureRequest) -> None:
    case, codecs = {**CLASSIC, **AUTOEP}[name]
    found = pool4.run(train, case=case, codecs=codecs)
    assert all(losses == found[0] for losses in found)
    path = GOLDEN / f"{name}.json"
    if request.config.getoption("--rewrite-golden"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps([round(loss, 7) for loss in found[0]]) + "\n")
    assert found[0] == pytest.approx(json.loads(path.read_text()), rel=LOSSY if codecs else EXACT)


def test_every_record_has_its_test() -> None:
    assert {path.stem for path in GOLDEN.glob("*.json")} == {*CLASSIC, *AUTOEP}
