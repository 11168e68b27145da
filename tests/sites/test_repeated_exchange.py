# SPDX-License-Identifier: Apache-2.0
"""What a site keeps of exchanges that are repeated, and of loads."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ds_hybridep.codecs import make_codec
from ds_hybridep.config_codecs import BlockwiseConfig
from ds_hybridep.deepspeed.site_exchange import SiteExchange
from ds_hybridep.deepspeed.site_overlap import Departures
from ds_hybridep.errors import SiteError
from ds_hybridep.geometry.slots import whole
from ds_hybridep.kernels.reference import ReferenceKernels
from ds_hybridep.sites.exchange import Header, Packet
from ds_hybridep.sites.local_steps import LocalSteps
from ds_hybridep.sites.packets import OwnedSlice, Packets
from ds_hybridep.sync.home import Home

HOME = Home(torch.device("cpu"))


class Connections:
    """As `Epochs`: sites a and b train together, and b has what a has, weighed and scaled as `theirs` says.

    fails: the next exchange misses packets.
    """

    site, names, members, others, lead, run = "a", ["a", "b"], ["a", "b"], ["b"], "a", "some run"
    num_exchanges, connections = 1, None
    inside = SimpleNamespace(rank=0, any_of=lambda said: said, mean=lambda number: number, broadcast=lambda said: said)

    def __init__(self, theirs: Callable[[Header], Header] = lambda header: header) -> None:
        self.fails = self.needs_quorum = False
        self._theirs = theirs

    def call(self, *, is_whole: bool) -> dict[str, Any]:
        self.needs_quorum = False
        return {"op": "epoch", "members": self.members, "joiners": [], "calls": {}}

    def exchange(self, packets: list[torch.Tensor], header: Header) -> tuple[dict[str, Packet], bool]:
        ours = Packet(header, torch.cat(packets))
        self.sent = ours.data
        is_agreed, self.fails = not self.fails, False
        return {"a": ours, "b": Packet(self._theirs(ours.header), ours.data.clone())}, is_agreed

    def committed(self, step: int) -> None:
        pass


class State:
    """As `SiteState`."""

    loss_scale, rates, num_samples, step = 2.0, (0.1,), 4, 3

    def __init__(self, gradient: torch.Tensor | None = None) -> None:
        tensors = () if gradient is None else (gradient,)
        leaves = [OwnedSlice((whole("w", one.shape),), (one,), False) for one in tensors]
        self.view = SimpleNamespace(slices=lambda: (leaves, lambda: None))


def site_a(state: State, *, codec: Any = None, local: LocalSteps | None = None, theirs: Any = None) -> Any:
    packets = Packets("a", codec, None, torch.float32, home=HOME)
    epochs: Any = Connections(theirs) if theirs else Connections()
    options: Any = {"local": local, "refresh": lambda: None, "verify_interval": 0}
    return SiteExchange(state, epochs, packets, Departures(packets, ReferenceKernels()), **options)  # type: ignore


def test_nothing_is_left_of_a_run_whose_optimizer_state_was_not_loaded() -> None:
    model = nn.Linear(3, 3, bias=False)
    weight = model.weight.detach()
    one = OwnedSlice((whole("w", weight.shape),), (weight,), False)
    site = site_a(State(), codec=make_codec(BlockwiseConfig(type="int2")), local=LocalSteps([one], 2, HOME))
    site.packets.encode(one)
    site.packets.transaction.commit()
    site.local.apply(0, [OwnedSlice(one.spans, (torch.ones(3, 3),), False)])
    weight.fill_(2.0)  # a checkpoint is loaded
    site.after_load(None)
    assert site.packets.state_dict()["dense"]["sent"] == []
    state = site.local.state_dict()
    assert all(not momentum.any() for fragment in state["momentum"] for momentum in fragment)
    assert all(bool((common == 2.0).all()) for fragment in state["common"] for common in fragment)


def test_a_checkpoint_of_other_local_steps_begins_them_anew(tmp_path: Path) -> None:
    """It once ended all sites with a TypeError or ValueError."""
    weight = torch.zeros(3, 3)
    one = OwnedSlice((whole("w", weight.shape),), (weight,), False)
    saved = site_a(State(), local=LocalSteps([one], 2, HOME))
    saved.local.apply(0, [OwnedSlice(one.spans, (torch.ones(3, 3),), False)])
    saved.save(tmp_path)
    same, other = (site_a(State(), local=LocalSteps([one], every, HOME)) for every in (2, 3))
    for site in (same, other):
        site.after_load(tmp_path)
        assert site.epochs.run == "some run"
    assert any(momentum.any() for fragment in same.local.state_dict()["momentum"] for momentum in fragment)
    assert not any(momentum.any() for fragment in other.local.state_dict()["momentum"] for momentum in fragment)
    site_a(State()).after_load(tmp_path)  # without local steps


def test_an_exchange_that_does_not_count_leaves_no_residual() -> None:
    """Its packets were encoded, and are encoded again in the exchange that repeats it."""
    sent, residuals = [], []
    for fails in (False, True):
        state = State()
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


@pytest.mark.parametrize(("other", "difference"), [
    ({}, None), ({"rates": (0.2,)}, "learning rates 0.2, and site 'a' 0.1"),
    ({"loss_scale": 4.0}, "loss scale 4.0, and site 'a' 2.0"), ({"step": 5}, "is at step 5, and site 'a' 3"),
])  # fmt: skip
def test_what_differs_between_sites_is_named_at_once(other: dict[str, Any], difference: str | None) -> None:
    def theirs(header: Header) -> Header:
        return Header(**{**vars(header), **other})

    site = site_a(State(torch.ones(4, 4)), theirs=theirs)
    with nullcontext() if difference is None else pytest.raises(SiteError, match=difference):
        site.exchange()


@pytest.mark.parametrize("weight", [None, 12.0])
@pytest.mark.parametrize("encodes", [False, True])
def test_packets_count_with_what_they_were_computed_from(weight: float | None, encodes: bool) -> None:
    """Site b sends what a sends, and weighs nothing or something: the mean stays.  Of other packets it moves."""
    codec = make_codec(BlockwiseConfig(type="int8")) if encodes else None
    for their_weight in (0.0, 3.0):
        gradient = torch.full((16, 16), 0.5)
        site = site_a(
            State(gradient), codec=codec, theirs=lambda h, w=their_weight: Header(h.step, h.loss_scale, w, h.rates)
        )
        site.weight = weight
        site.exchange()
        torch.testing.assert_close(gradient, torch.full((16, 16), 0.5), rtol=1e-2, atol=1e-3)
    packets = Packets("p", None, None, torch.float32, home=HOME)
    mean = torch.zeros(2)
    slices = [OwnedSlice((whole("w", mean.shape),), (mean,), False)]
    sent = [torch.tensor([value, -value]).view(torch.uint8) for value in (1.0, 4.0, 100.0)]
    packets.average(slices, sent, [1.0, 0.5, 0.0])
    assert mean.tolist() == [2.0, -2.0]
