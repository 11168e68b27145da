# SPDX-License-Identifier: Apache-2.0
"""Each kind of optimizer that DeepSpeed makes, seen by its view: what a rank owns, and what a step uses of it."""

from collections import defaultdict
from typing import Any

import pytest
import torch
from parity import Case
from process_pool import ProcessPool
from toy_model import ToyConfig
from training import batch_of, engine_of, loss_of, train, world2

from ds_hybridep.deepspeed.engine_view import view_of

pytestmark = pytest.mark.dist

FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
BF16 = {"dtype": "bf16", "toy": ToyConfig(ep_size=2, routing="by_token")}
# (case, settings, view, DeepSpeed's optimizer)
KINDS: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({}, {}, "WholeView", "SGD"),
    (BF16, {}, "WholeView", "FP16_UnfusedOptimizer"),
    (BF16 | {"zero_stage": 1}, FP32_SUMS, "Bf16View", "BF16_Optimizer"),
    ({"zero_stage": 1}, {}, "Zero12View", "DeepSpeedZeroOptimizer"),
    (BF16 | {"zero_stage": 2}, {}, "Zero12View", "DeepSpeedZeroOptimizer"),
    ({"zero_stage": 3, "family": "mixtral"}, {}, "Zero3View", "DeepSpeedZeroOptimizer_Stage3"),
]


def put_zeros(case: Case, config: dict[str, Any]) -> dict[str, Any]:
    """What one rank owns in a step, and what the step does after the owned gradients were set to zero."""
    with engine_of(case, with_block=False, **config) as engine:
        train(engine, case, 0, 1)
        view = view_of(engine)
        found: dict[str, Any] = {"kinds": (type(view).__name__, type(engine.optimizer).__name__)}
        found["between steps"] = view.holds_averaged()
        engine.backward(loss_of(engine, case, *batch_of(case, 1)))
        found["before a step"] = view.holds_averaged()
        slices, put = view.slices()
        found["spans"] = [(s.name, s.start, s.num_elements, one.is_expert) for one in slices for s in one.spans]
        found["are gradients"] = any(bool(tensor.any()) for one in slices for tensor in one.tensors)
        for tensor in (tensor for one in slices for tensor in one.tensors):
            tensor.zero_()
        put()
        named: dict[str, Any] = dict(engine.module.named_parameters())
        found["sizes"] = {name: getattr(one, "ds_numel", one.numel()) for name, one in named.items()}
        before = [master.detach().clone() for master in view.masters()]
        engine.step()
        found["changes nothing"] = all(map(torch.equal, before, view.masters()))
        view.make_zeros()
        found["zeros"] = not any(bool(tensor.any()) for one in view.slices()[0] for tensor in one.tensors)
        return found


@pytest.mark.parametrize(("options", "config", "view", "optimizer"), KINDS, ids=[f"{v} {o}" for *_, v, o in KINDS])
def test_a_rank_owns_its_part_and_a_step_uses_what_is_put_back(
    pool2: ProcessPool, options: dict[str, Any], config: dict[str, Any], view: str, optimizer: str
) -> None:
    results = pool2.run(put_zeros, case=world2(optimizer="sgd", **options), config=config)
    owned: dict[Any, list[tuple[int, int]]] = defaultdict(list)
    for rank, found in enumerate(results):
        assert found["kinds"] == (view, optimizer)
        is_apart = view in ("Zero12View", "Zero3View")
        assert (found["between steps"], found["before a step"]) == (False, is_apart)
        assert found["are gradients"]
        assert found["changes nothing"]
        assert found["zeros"]
        for name, start, count, is_expert in found["spans"]:
            owned[name, rank if is_expert else "all"].append((start, start + count))
    names = {name for name, _ in owned}
    assert names == set(results[0]["sizes"])
    for (name, _), parts in owned.items():
        ends = sorted(parts)
        assert [start for start, _ in ends] == [0, *(end for _, end in ends[:-1])], f"{name}: {ends}"
        assert ends[-1][1] == results[0]["sizes"][name]
