# SPDX-License-Identifier: Apache-2.0
"""What a site exchanges after it has taken over the state of another one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ds_hybridep.codecs import make_codec
from ds_hybridep.config_codecs import BlockwiseConfig
from ds_hybridep.integration.site_exchange import SiteExchange
from ds_hybridep.integration.site_overlap import Departures
from ds_hybridep.kernels.reference import ReferenceKernels
from ds_hybridep.plan.slots import whole
from ds_hybridep.sites.local_steps import LocalSteps
from ds_hybridep.sites.packets import OwnedSlice, Packets
from ds_hybridep.sync.home import Home

HOME = Home(torch.device("cpu"))


class TakesOver(SiteExchange):
    """A site whose state, of step 3, becomes that of step 6 of another site, before or in an exchange.

    fails: the first exchange misses packets.
    """

    def __init__(self, fails: bool = False) -> None:
        self.scale, self.fails = 8.0, fails
        self.members = self.names = ["a", "b"]
        self.num_exchanges, self._interval, self._needs_quorum, self._last_steps = 1, 0, not fails, {}
        self._num_repeated, self._is_replaying, self._has_caught_up, self._local = 0, False, False, None
        self._packets = Packets("a", None, None, torch.float32, HOME)
        self._engine = SimpleNamespace(global_steps=3)
        self._departures = Departures(None, self._packets, ReferenceKernels(), lambda: None, lambda: True, lambda: 1.0)
        self._publish = self._refresh = lambda: None

    @property
    def _others(self) -> list[str]:
        return ["b"]

    def _form(self, *, is_complete: bool) -> bool:
        self.scale, self._needs_quorum, self._engine.global_steps = 2.0, False, 6
        self.restore()
        return True

    def restore(self) -> None:
        pass

    def _swap(self, packets: list[torch.Tensor]) -> Any:
        self.sent = torch.cat(packets)
        return [self.sent, self.sent.clone()], True

    def _agree(self, is_complete: bool, digest: bytes) -> tuple[bool, bool]:
        is_agreed, self.fails = not self.fails, False
        return is_agreed, False


def test_gradients_follow_the_loss_scale_of_the_state() -> None:
    gradient = torch.full((4,), 8.0 * 0.5)
    site = TakesOver()
    one = OwnedSlice((whole("w", torch.Size([4])),), (gradient,), False)
    slices, has_changed = site._average(lambda: [one], lambda: site.scale)
    assert has_changed
    assert slices == [one]
    assert torch.equal(gradient, torch.full((4,), 2.0 * 0.5))


@pytest.mark.parametrize("fails", [False, True])
def test_local_steps_exchange_the_fragment_of_the_state(fails: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    named = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    spans = tuple(whole(name, tensor.shape) for name, tensor in named)
    site = TakesOver(fails)
    site._local = local = LocalSteps([OwnedSlice(spans, tuple(tensor for _, tensor in named), False)], 2, HOME)
    before = [common.clone() for common in local.common()]
    for parameter in model.parameters():
        parameter.data.add_(1.0)  # what this site has learned
    site.restore = lambda: [parameter.data.sub_(2.0) for parameter in model.parameters()]  # and then the other one
    site.after_step(was_applied=True)
    torch.testing.assert_close(site.sent.view(torch.float32), torch.full((9,), 1.0))
    assert torch.equal(local.common()[1], before[1]), "after step 6, fragment 0 has its turn, and not fragment 1"
    assert not torch.equal(local.common()[0], before[0])


def test_nothing_is_left_of_a_run_whose_optimizer_state_was_not_loaded() -> None:
    model = nn.Linear(3, 3, bias=False)
    weight = model.weight.detach()
    one = OwnedSlice((whole("w", weight.shape),), (weight,), False)
    site = TakesOver()
    site._packets = Packets("a", make_codec(BlockwiseConfig(type="int2")), None, torch.float32, HOME)
    site._packets.encode(one)
    site._packets.changes.commit()
    site._local = LocalSteps([one], 2, HOME)
    site._local.apply(0, [OwnedSlice(one.spans, (torch.ones(3, 3),), False)])
    weight.fill_(2.0)  # a checkpoint is loaded
    site.after_load(None, None)
    assert site._packets.state_dict()["dense"]["sent"] == []
    state = site._local.state_dict()
    assert all(not momentum.any() for fragment in state["momentum"] for momentum in fragment)
    assert all(bool((common == 2.0).all()) for fragment in state["common"] for common in fragment)


def test_an_exchange_that_does_not_count_leaves_no_residual() -> None:
    """Its packets were encoded, and are encoded again in the exchange that repeats it."""
    sent, residuals = [], []
    for fails in (False, True):
        site = TakesOver(fails)
        site.scale = 2.0  # that of the state, too
        site._packets = Packets("a", make_codec(BlockwiseConfig(type="int2")), None, torch.float32, HOME)
        for step in range(2):
            gradient = torch.linspace(-1.0, 1.0 + step, 64).view(8, 8)
            one = OwnedSlice((whole("w", gradient.shape),), (gradient,), False)
            site.fails = fails and step == 1
            site._average(lambda one=one: [one], lambda site=site: site.scale)
            site.after_step(was_applied=True)
        sent.append(site.sent)
        residuals += [kept["residual"] for kept in site._packets.state_dict()["dense"]["sent"]]
    assert torch.equal(sent[0], sent[1])
    assert len(residuals) == 2
    assert torch.equal(residuals[0], residuals[1])
    assert residuals[0].any()
