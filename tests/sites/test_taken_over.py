# SPDX-License-Identifier: Apache-2.0
"""What a site exchanges after it has taken over the state of another one."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ds_hybridep.codecs import make_codec
from ds_hybridep.config_codecs import BlockwiseConfig
from ds_hybridep.deepspeed.site_exchange import SiteExchange
from ds_hybridep.deepspeed.site_overlap import Departures
from ds_hybridep.geometry.slots import whole
from ds_hybridep.kernels.reference import ReferenceKernels
from ds_hybridep.sites.local_steps import LocalSteps
from ds_hybridep.sites.packets import OwnedSlice, Packets
from ds_hybridep.sync.home import Home

HOME = Home(torch.device("cpu"))


class Connections:
    """As `Epochs`: site a, at step 3, is connected with site b, which is at step 6.

    fails: the first exchange misses packets; else a new epoch comes before it.
    """

    site, names, members, others, num_exchanges, crossing = "a", ["a", "b"], ["a", "b"], ["b"], 1, object()

    def __init__(self, fails: bool) -> None:
        self.fails, self.needs_quorum = fails, not fails

    def call(self, digest: bytes, *, is_complete: bool) -> dict[str, Any]:
        calls = {name: {"step": step, "digest": name, "is_ready": False} for name, step in (("a", 3), ("b", 6))}
        return {"op": "epoch", "observers": [], "calls": calls}

    def receive_state(self, crossing: Any, lead: str) -> bytes:
        return f"of {lead}".encode()

    def digest(self, own: bytes) -> bytes:
        return own

    def swap(self, packets: list[torch.Tensor]) -> Any:
        self.sent = torch.cat(packets)
        return [self.sent, self.sent.clone()], True

    def agree(self, is_complete: bool, digest: bytes) -> tuple[bool, bool]:
        is_agreed, self.fails = not self.fails, False
        return is_agreed, False


class State:
    """As `SiteState`: of step 3 and loss scale 8; that of site b is of step 6 and loss scale 2."""

    def __init__(self, slices: Any = ()) -> None:
        self.step, self.loss_scale, self.put = 3, 8.0, []
        self.view = SimpleNamespace(slices=lambda: (slices, lambda: self.put.append("put")))
        self.restored: Any = lambda: None  # returns the state of local steps

    def weights(self) -> dict[str, torch.Tensor]:
        return {}

    def restore(self, state: bytes) -> Any:
        assert state == b"of b"
        self.step, self.loss_scale = 6, 2.0
        return self.restored()


def site_a(state: State, *, fails: bool = False, codec: Any = None, local: LocalSteps | None = None) -> Any:
    packets = Packets("a", codec, None, torch.float32, home=HOME)
    departures = Departures(packets, ReferenceKernels())
    epochs: Any = Connections(fails)
    options: Any = {"local": local, "refresh": lambda: None, "verify_interval": 0}
    return SiteExchange(state, epochs, packets, departures, **options)  # type: ignore[arg-type]


def test_gradients_follow_the_loss_scale_of_the_state() -> None:
    gradient = torch.full((4,), 8.0 * 0.5)
    state = State([OwnedSlice((whole("w", torch.Size([4])),), (gradient,), False)])
    site_a(state).exchange()
    assert state.put == ["put"]
    assert torch.equal(gradient, torch.full((4,), 2.0 * 0.5))


@pytest.mark.parametrize("fails", [False, True])
def test_local_steps_exchange_the_fragment_of_the_state(fails: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    named = [(name, parameter.detach()) for name, parameter in model.named_parameters()]
    spans = tuple(whole(name, tensor.shape) for name, tensor in named)
    state, local = State(), LocalSteps([OwnedSlice(spans, tuple(tensor for _, tensor in named), False)], 2, HOME)
    site = site_a(state, fails=fails, local=local)
    before = [common.clone() for common in local.common()]
    for parameter in model.parameters():
        parameter.data.add_(1.0)  # what this site has learned

    def take_over() -> Any:  # and then what the other one has
        for parameter in model.parameters():
            parameter.data.sub_(2.0)
        return local.state_dict()

    state.restored = take_over
    site.after_step(was_applied=True)
    torch.testing.assert_close(site.epochs.sent.view(torch.float32), torch.full((9,), 1.0))
    assert torch.equal(local.common()[1], before[1]), "after step 6, fragment 0 has its turn, and not fragment 1"
    assert not torch.equal(local.common()[0], before[0])


def test_nothing_is_left_of_a_run_whose_optimizer_state_was_not_loaded() -> None:
    model = nn.Linear(3, 3, bias=False)
    weight = model.weight.detach()
    one = OwnedSlice((whole("w", weight.shape),), (weight,), False)
    site = site_a(State(), codec=make_codec(BlockwiseConfig(type="int2")), local=LocalSteps([one], 2, HOME))
    site.packets.encode(one)
    site.packets.transaction.commit()
    site.local.apply(0, [OwnedSlice(one.spans, (torch.ones(3, 3),), False)])
    weight.fill_(2.0)  # a checkpoint is loaded
    site.after_load(None, None)
    assert site.packets.state_dict()["dense"]["sent"] == []
    state = site.local.state_dict()
    assert all(not momentum.any() for fragment in state["momentum"] for momentum in fragment)
    assert all(bool((common == 2.0).all()) for fragment in state["common"] for common in fragment)


def test_an_exchange_that_does_not_count_leaves_no_residual() -> None:
    """Its packets were encoded, and are encoded again in the exchange that repeats it."""
    sent, residuals = [], []
    for fails in (False, True):
        state = State()
        state.view.loss_scale = 2.0  # that of the state of site b, too
        site = site_a(state, codec=make_codec(BlockwiseConfig(type="int2")))
        for step in range(2):
            gradient = torch.linspace(-1.0, 1.0 + step, 64).view(8, 8)
            leaves = [OwnedSlice((whole("w", gradient.shape),), (gradient,), False)]
            state.view.slices = lambda leaves=leaves: (leaves, lambda: None)
            site.epochs.fails = fails and step == 1
            site.exchange()
            site.after_step(was_applied=True)
        sent.append(site.epochs.sent)
        residuals += [kept["residual"] for kept in site.packets.state_dict()["dense"]["sent"]]
    assert torch.equal(sent[0], sent[1])
    assert len(residuals) == 2
    assert torch.equal(residuals[0], residuals[1])
    assert residuals[0].any()
