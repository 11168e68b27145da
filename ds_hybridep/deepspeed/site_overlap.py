# SPDX-License-Identifier: Apache-2.0
"""Lets gradients leave for the other sites while the backward still runs (ZeRO 1 and 2).

    DeepSpeed has reduced a bucket  ->  all parameters of a leaf are reduced  ->  its packet departs

ZeRO 2 reduces buckets in the backward, ZeRO 1 too with `overlap_comm`, else right after it.  What has departed decides
nothing: before the optimizer step, `SiteExchange` looks whether the gradients are still those that have departed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from ds_hybridep.deepspeed.engine_view import Zero12View, loss_scale
from ds_hybridep.deepspeed.patches import ZERO_OPTIMIZER, Patches
from ds_hybridep.geometry.slots import Span
from ds_hybridep.kernels import Kernels
from ds_hybridep.sites.exchange import SiteConnections
from ds_hybridep.sites.packets import OwnedSlice, Packets


@dataclass(frozen=True)
class Departed:
    """The packet of a leaf under way, and what it was made of."""

    packet: Tensor
    scale: float  # of the loss
    bit_sums: Tensor


class Departures:
    """The packets that have departed in the running step.

    kernels: for checksums.
    """

    def __init__(self, packets: Packets, kernels: Kernels) -> None:
        self._packets, self._kernels = packets, kernels
        self.departed: dict[int, Departed] = {}  # by the index of the leaf
        self._leaves: list[tuple[tuple[Span, ...], bool]] = []  # of the last exchange: spans, is_expert
        self._sizes: list[int] = []  # bytes of their packets
        self._place: dict[str, int] = {}  # the leaf of each parameter
        self._reduced: list[dict[str, tuple[int, Any]]] = []  # by leaf: parameter group and parameter, by name

    def watch(
        self, view: Zero12View, patches: Patches, *, connections: Callable[[], SiteConnections | None],
        is_last: Callable[[], bool],
    ) -> None:  # fmt: skip
        """Look at each bucket that the optimizer reduces.

        patches: of the engine.
        connections: returns the connections that the next exchange will use; None if that is not known yet.
        is_last: returns True in the last backward before the optimizer step.
        """
        optimizer = view.optimizer

        def reduce(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            places = [one for bucket in optimizer.ipg_buckets.values() for one in bucket.params]
            result = original(*args, **kwargs)
            if self._leaves and is_last() and (others := connections()) is not None:
                self._note([one for one in places if optimizer.params_already_reduced[one[2]]], view, others)
            return result

        patches.wrap(ZERO_OPTIMIZER, "reduce_ipg_grads", optimizer, reduce)

    def learn(self, leaves: Sequence[OwnedSlice]) -> None:
        """An exchange of these leaves has ended: the next one has the same."""
        if not self._leaves:
            self._leaves = [(one.spans, one.is_expert) for one in leaves]
            self._sizes = [self._packets.num_bytes(one) for one in leaves]
            self._place = {span.name: index for index, one in enumerate(leaves) for span in one.spans}
        self.forget()

    def forget(self) -> None:
        """What has departed is of no use any more."""
        self.departed.clear()
        self._reduced = [{} for _ in self._leaves]

    def are_as_sent(self, leaves: Sequence[OwnedSlice], scale: float) -> bool:
        """Return True if the leaves that have departed hold the gradients that they held then."""
        return all(
            one.scale == scale and torch.equal(one.bit_sums, self._bit_sums(leaves[index].tensors))
            for index, one in self.departed.items()
        )

    def _note(self, places: Sequence[tuple[int, int, int]], view: Zero12View, others: SiteConnections) -> None:
        for group, member, _ in places:
            parameter = view.optimizer.bit16_groups[group][member]
            name = view.names[id(parameter)]
            if (index := self._place.get(name)) is None or index in self.departed:
                continue
            self._reduced[index][name] = group, parameter
            if len(self._reduced[index]) == len(self._leaves[index][0]):
                self._depart(index, view, others)

    def _depart(self, index: int, view: Zero12View, others: SiteConnections) -> None:
        optimizer = view.optimizer
        if optimizer.overlap_comm and not get_accelerator().resolves_data_dependency():
            get_accelerator().current_stream().wait_stream(optimizer.reduction_stream)
        spans, is_expert = self._leaves[index]
        tensors = tuple(view.reduced(*self._reduced[index][span.name], span) for span in spans)
        scale = loss_scale(view.engine)
        packet = self._packets.encode(OwnedSlice(spans, tensors, is_expert), scale)
        self.departed[index] = Departed(packet, scale, self._bit_sums(tensors))
        others.begin(self._sizes)
        others.depart(index, packet)

    def _bit_sums(self, tensors: Sequence[Tensor]) -> Tensor:
        return self._kernels.bit_sums(torch.cat([tensor.detach().reshape(-1) for tensor in tensors]))
