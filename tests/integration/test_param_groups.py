# SPDX-License-Identifier: Apache-2.0
"""Groups of a script's optimizer, and the parts of them that DeepSpeed gets."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from ds_hybridep.deepspeed.param_groups import with_experts_apart


def parameters(number: int, *, of_experts: bool) -> list[nn.Parameter]:
    made = [nn.Parameter(torch.full((2,), float(index))) for index in range(number)]
    for one in made:
        if of_experts:
            one.allreduce, one.group_name = False, "ep_size_2"
    return made


class CountingSGD(torch.optim.SGD):
    """Keeps a counter in each group, as some optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


SCHEDULERS = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, [lambda step: 1 + step, lambda step: 0.5**step]),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2], total_steps=10),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 4),
}


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.filterwarnings("error")
def test_experts_follow_the_schedule_of_their_group(name: str) -> None:
    dense, experts, only = (parameters(2, of_experts=of_experts) for of_experts in (False, True, True))
    script = CountingSGD([{"params": dense + experts, "lr": 0.1, "name": "mine"}, {"params": only, "lr": 0.2}], 0.9)
    other = CountingSGD(
        [
            {"params": parameters(4, of_experts=False), "lr": 0.1},
            {"params": parameters(2, of_experts=False), "lr": 0.2},
        ],
        0.9,
    )
    schedules = [SCHEDULERS[name](one) for one in (script, other)]
    apart = with_experts_apart(script)
    assert [group["params"] for group in apart.param_groups] == [dense, experts, only]
    assert [group.get("moe", False) for group in apart.param_groups] == [False, True, True]
    assert [group["name"] for group in apart.param_groups] == ["mine", "ep_size_2", "ep_size_2"]
    for _ in range(4):
        for one in (script, other):
            for group in one.param_groups:
                for parameter in group["params"]:
                    parameter.grad = torch.ones(2)
        for parameter in (*experts, *only):
            parameter.grad = torch.ones(2)
        apart.step()
        other.step()
        for schedule in schedules:
            schedule.step()
    assert [group["lr"] for group in script.param_groups] == [group["lr"] for group in other.param_groups]
    ours = [parameter.detach() for group in (dense, experts, only) for parameter in group]
    plain = [parameter.detach() for group in other.param_groups for parameter in group["params"]]
    starts = [0.0, 1.0, 0.0, 1.0, 0.0, 1.0], [0.0, 1.0, 2.0, 3.0, 0.0, 1.0]
    for a, b, first, second in zip(ours, plain, *starts, strict=True):
        torch.testing.assert_close(a - first, b - second)
    assert [group["count"] for group in apart.param_groups] == [4, 4, 4]


def test_what_is_loaded_reaches_the_scripts_groups_and_stays_connected() -> None:
    dense, experts, only = (parameters(1, of_experts=of_experts) for of_experts in (False, True, True))
    script = torch.optim.SGD([{"params": dense + experts, "lr": 0.1}, {"params": only, "lr": 0.2}])
    mine = list(script.param_groups)
    apart = with_experts_apart(script)
    saved = apart.state_dict()
    for group in saved["param_groups"]:
        group["lr"] *= 0.5
    apart.load_state_dict(saved)
    assert [group["lr"] for group in script.param_groups] == [0.05, 0.1]
    assert all(a is b for a, b in zip(mine, script.param_groups, strict=True))
    mine[0]["lr"], mine[1]["lr"] = 1.0, 2.0
    apart.step()
    assert [group["lr"] for group in apart.param_groups] == [1.0, 1.0, 2.0]


def test_frozen_experts_have_no_group() -> None:
    dense, experts = parameters(1, of_experts=False), parameters(2, of_experts=True)
    experts[0].requires_grad_(False)
    apart = with_experts_apart(torch.optim.SGD(dense + experts, lr=0.1))
    assert [len(group["params"]) for group in apart.param_groups] == [1, 1]
