# SPDX-License-Identifier: Apache-2.0
"""Local steps (DiLoCo, arXiv 2311.08105): every H steps, sites exchange how far they have come since the last time.

    delta     = common - own                   what is encoded and averaged over sites, for one fragment of the model
    momentum  = MOMENTUM * momentum + delta
    common   -= RATE * (delta + MOMENTUM * momentum)
    own       = common

The model is cut into fragments that take turns, so that about the same amount crosses at each step (Streaming DiLoCo,
arXiv 2501.18512).  All sites hold the same common weights, bit for bit.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_hybridep.geometry.slots import Span
from ds_hybridep.sites.packets import OwnedSlice
from ds_hybridep.sync.home import Home

RATE, MOMENTUM = 0.7, 0.9


class LocalSteps:
    """The common weights and the outer momentum of what this rank owns.

    Args:
        owned: the optimizer's fp32 weights that this rank owns; they are changed in place.
        every: steps after which each fragment is exchanged.
        home: where common weights and momentum are kept.
        put: called after weights were changed here; the default does nothing.
    """

    def __init__(
        self, owned: Sequence[OwnedSlice], every: int, home: Home, put: Callable[[], None] = lambda: None
    ) -> None:
        self.every, self._home, self._put = every, home, put
        self._fragments = _cut(owned, every)
        self._common = [[home.store(t.detach().clone()) for one in f for t in one.tensors] for f in self._fragments]
        self._momentum = [[home.store(torch.zeros_like(t)) for one in f for t in one.tensors] for f in self._fragments]

    def due(self, step: int) -> int:
        """Return the fragment that is exchanged after step number `step`; on this rank it may be empty."""
        return step % self.every

    def deltas(self, fragment: int) -> list[OwnedSlice]:
        """Return how far this site has come since the last exchange of a fragment, in new memory."""
        common = iter(self._common[fragment])
        return [
            OwnedSlice(one.spans, tuple(self._home.fetch(next(common)) - t for t in one.tensors), one.is_expert)
            for one in self._fragments[fragment]
        ]

    def apply(self, fragment: int, mean: Sequence[OwnedSlice]) -> None:
        """Take the outer step with the mean of all sites' deltas, and set this rank's weights to the common ones."""
        deltas = [tensor for one in mean for tensor in one.tensors]
        owned = [tensor for one in self._fragments[fragment] for tensor in one.tensors]
        pairs = zip(deltas, owned, self._common[fragment], self._momentum[fragment], strict=True)
        for delta, own, kept_common, kept_momentum in pairs:
            common, momentum = self._home.fetch(kept_common), self._home.fetch(kept_momentum)
            momentum.mul_(MOMENTUM).add_(delta)
            common.sub_(delta.add(momentum, alpha=MOMENTUM), alpha=RATE)
            own.copy_(common)
            self._home.put(kept_common, common)
            self._home.put(kept_momentum, momentum)
        self._put()

    def begin(self) -> None:
        """Begin anew from this rank's weights: they are the common ones, and there is no momentum."""
        for own, common in self._pairs():
            common.copy_(own)
        for momentum in (one for fragment in self._momentum for one in fragment):
            momentum.zero_()

    def reset(self) -> None:
        """Set this rank's weights to the common ones."""
        for own, common in self._pairs():
            own.copy_(common)
        self._put()

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        owned = [tensor for fragment in self._fragments for one in fragment for tensor in one.tensors]
        return list(zip(owned, self.common(), strict=True))

    def drift(self) -> float:
        """Return the L2 distance of this rank's weights from the common ones, over the norm of the common ones."""
        squares = torch.zeros(2, dtype=torch.float64)
        for fragment, deltas in zip(self._common, map(self.deltas, range(self.every)), strict=True):
            for common, delta in zip(fragment, (t for one in deltas for t in one.tensors), strict=True):
                common = self._home.fetch(common)
                squares += torch.stack([delta.square().sum(), common.square().sum()]).double().cpu()
        return float((squares[0] / squares[1].clamp_min(1e-30)).sqrt())

    def groups(self) -> list[list[Tensor]]:
        """Return the common weights, each with its outer momentum, as they are kept."""
        common = (one for fragment in self._common for one in fragment)
        momentum = (one for fragment in self._momentum for one in fragment)
        return [[weight, of_it] for weight, of_it in zip(common, momentum, strict=True)]

    def common(self) -> list[Tensor]:
        """Return the common weights, for a hash."""
        return [tensor for fragment in self._common for tensor in fragment]

    def state_dict(self) -> dict[str, Any]:
        """What a site that comes back needs."""
        return {"common": self._common, "momentum": self._momentum}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        for mine, theirs in ((self._common, saved["common"]), (self._momentum, saved["momentum"])):
            for ours, other in zip(mine, theirs, strict=True):
                for kept, value in zip(ours, other, strict=True):
                    kept.copy_(value)


def _cut(owned: Sequence[OwnedSlice], num_fragments: int) -> list[list[OwnedSlice]]:
    """Return so many fragments of about equal size, each of whole spans, some empty; the same on all sites."""
    pieces: list[tuple[Span, Tensor, bool]] = [
        (span, tensor, one.is_expert) for one in owned for span, tensor in zip(one.spans, one.tensors, strict=True)
    ]
    total, seen = sum(tensor.numel() for _, tensor, _ in pieces), 0
    fragments: list[list[OwnedSlice]] = [[] for _ in range(num_fragments)]
    for span, tensor, is_expert in pieces:
        index = min(seen * num_fragments // max(total, 1), num_fragments - 1)
        fragments[index].append(OwnedSlice((span,), (tensor,), is_expert))
        seen += tensor.numel()
    return fragments
