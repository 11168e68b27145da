# SPDX-License-Identifier: Apache-2.0
"""Local steps against torch's own SGD with Nesterov momentum as the outer optimizer."""

import copy

import pytest
import torch
from torch import nn

from ds_hybridep.geometry.slots import whole
from ds_hybridep.sites.local_steps import MOMENTUM, RATE, LocalSteps
from ds_hybridep.sites.packets import OwnedSlice, Packets
from ds_hybridep.sync.home import Home

HOME = Home(torch.device("cpu"))


def owned(model: nn.Module) -> list[OwnedSlice]:
    named = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    spans = tuple(whole(name, tensor.shape) for name, tensor in named)
    return [OwnedSlice(spans, tuple(tensor.view(-1) for _, tensor in named), False)]


@pytest.mark.parametrize("every", [2, 3, 7])
def test_the_outer_step_is_that_of_nesterov_sgd(every: int) -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    reference = copy.deepcopy(models[0])
    outer = torch.optim.SGD(reference.parameters(), lr=RATE, momentum=MOMENTUM, nesterov=True)
    sites = [LocalSteps(owned(model), every, HOME) for model in models]
    packets = [Packets(str(index), None, None, torch.float32, home=HOME) for index in range(2)]
    names = [name for name, _ in reference.named_parameters()]
    num_exchanged = dict.fromkeys(names, 0)
    for step in range(1, 4 * every + 1):
        for model in models:
            for parameter in model.parameters():
                parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
        fragment = sites[0].due(step)
        if fragment is None:
            continue
        deltas = [site.deltas(fragment) for site in sites]
        none = torch.empty(0, dtype=torch.uint8)
        sent = [torch.cat([none, *map(p.encode, delta)]) for p, delta in zip(packets, deltas, strict=True)]
        chosen = [span.name for one in deltas[0] for span in one.spans]
        for name, parameter in reference.named_parameters():
            parameter.grad = None
            if name in chosen:
                both = [dict(model.named_parameters())[name].detach() for model in models]
                parameter.grad = parameter.detach() - (both[0] + both[1]) / 2
                num_exchanged[name] += 1
        outer.step()
        for site, one, delta in zip(sites, packets, deltas, strict=True):
            one.average(delta, sent, [1.0, 1.0])
            site.apply(fragment, delta)
        for name in chosen:
            expected = dict(reference.named_parameters())[name]
            ours = [dict(model.named_parameters())[name] for model in models]
            torch.testing.assert_close(ours[0], expected, atol=1e-5, rtol=1e-5)
            assert torch.equal(ours[0], ours[1]), "bit for bit"
    assert set(num_exchanged.values()) == {4}, "each parameter takes its turn once in `every` steps"


def test_a_site_that_comes_back_gets_common_weights_and_momentum() -> None:
    model, other = nn.Linear(3, 2), nn.Linear(3, 2)
    ours, theirs = LocalSteps(owned(model), 2, HOME), LocalSteps(owned(other), 2, HOME)
    for fragment in range(2):
        model.weight.data.add_(0.1)
        ours.apply(fragment, ours.deltas(fragment))
    theirs.load_state_dict(ours.state_dict())
    ours.reset()
    theirs.reset()
    assert all(map(torch.equal, model.parameters(), other.parameters()))
    for site in (ours, theirs):
        site.apply(0, site.deltas(0))
    assert all(map(torch.equal, ours.common(), theirs.common()))
