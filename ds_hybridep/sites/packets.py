# SPDX-License-Identifier: Apache-2.0
"""The packets that one rank sends to its counterparts in an exchange between sites: what it owns, encoded.

    slices -> fp32 -> + residual -> packets -> all sites decode the same packets, in the same order -> mean -> slices

A site decodes its own packets too, so all sites get the same bits.  Without a codec a packet holds the values as they
are, and the mean is taken in fp32.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_hybridep.codecs import Codec
from ds_hybridep.geometry.packets import LEAST_LEAF, MOST_LEAVES
from ds_hybridep.geometry.slots import Span
from ds_hybridep.sync.error_feedback import ErrorFeedback
from ds_hybridep.sync.home import Home
from ds_hybridep.sync.messages import MessageLayout, packet_parts, split
from ds_hybridep.sync.transaction import Transaction


@dataclass(frozen=True)
class OwnedSlice:
    """What this rank owns of one parameter group, or a part of it.

    spans: which elements of which parameters, in order.
    tensors: the values, flat or shaped, one for each span; an exchange changes them in place.
    is_expert: of experts, which have a codec of their own.
    """

    spans: tuple[Span, ...]
    tensors: tuple[Tensor, ...]
    is_expert: bool


def leaves_of(slices: Sequence[OwnedSlice]) -> list[OwnedSlice]:
    """Cut slices into at most about `MOST_LEAVES` *leaves*, runs of whole spans of about the same size.

    All sites cut in the same way.  The packet of a leaf may leave before the others.
    """
    total = sum(span.num_elements for one in slices for span in one.spans)
    size = max(total / MOST_LEAVES, LEAST_LEAF)
    leaves = []
    for one in slices:
        begin = held = 0
        for end, span in enumerate(one.spans, 1):
            held += span.num_elements
            if held >= size or end == len(one.spans):
                leaves.append(OwnedSlice(one.spans[begin:end], one.tensors[begin:end], one.is_expert))
                begin, held = end, 0
    return leaves


class Packets:
    """Encodes and decodes what this rank owns; keeps residuals by parameter.

    Args:
        name: of this site and rank, for the random rounding.
        dense, experts: codecs; None sends values as they are.
        dtype: of the parameters: residuals of 16-bit ones are stored in 16 bits and a part.
    """

    def __init__(
        self, name: str, dense: Codec | None, experts: Codec | None, dtype: torch.dtype, *, home: Home
    ) -> None:
        self.transaction = Transaction()
        self.codecs = ["" if one is None else f"{type(one).__name__} {one.settings()}" for one in (dense, experts)]
        self._dtype, self._home = dtype, home
        self._layouts: dict[tuple[tuple[Span, ...], bool], MessageLayout] = {}
        self._gradients = {
            kind: ErrorFeedback(f"{name}, sites, {kind}", (codec,), home, self.transaction, rank=0)
            for kind, codec in (("dense", dense), ("experts", experts))
        }

    def average(
        self, slices: Sequence[OwnedSlice], packets: Sequence[Tensor], weights: Sequence[float], scale: float = 1.0
    ) -> None:
        """Set `slices` to the weighted mean of what sites sent, times the loss scale; to zeros if nothing counts.

        packets: uint8, by site in their order, the packets of all slices one after the other.
        """
        at = 0
        for one in slices:
            num_bytes = self.num_bytes(one)
            total = torch.zeros(sum(tensor.numel() for tensor in one.tensors), device=self._home.device)
            for packet, weight in zip(packets, weights, strict=True):
                if weight:
                    self._add(one, packet[at : at + num_bytes], total, scale=scale, weight=weight)
            total /= sum(weights) or 1.0
            at += num_bytes
            for tensor, mean in zip(one.tensors, total.split([t.numel() for t in one.tensors]), strict=True):
                tensor.copy_(mean.view_as(tensor))

    def num_bytes(self, one: OwnedSlice) -> int:
        """Return the bytes of a slice's packet."""
        if (layout := self._layout(one)) is not None:
            return layout.num_bytes
        return sum(tensor.nbytes for tensor in one.tensors)

    def state_dict(self) -> dict[str, Any]:
        """Residuals as of the last applied step."""
        return {kind: gradients.state_dict() for kind, gradients in self._gradients.items()}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        for kind, gradients in self._gradients.items():
            gradients.load_state_dict(saved[kind])

    def forget(self) -> None:
        """Drop residuals."""
        for gradients in self._gradients.values():
            gradients.forget()

    def _gradients_of(self, one: OwnedSlice) -> ErrorFeedback:
        return self._gradients["experts" if one.is_expert else "dense"]

    def _layout(self, one: OwnedSlice) -> MessageLayout | None:
        if (codec := self._gradients_of(one).senders[0].codec) is None:
            return None
        key = one.spans, one.is_expert
        if key not in self._layouts:
            self._layouts[key] = MessageLayout(codec, packet_parts(one.spans, self._dtype))
        return self._layouts[key]

    def encode(self, one: OwnedSlice, scale: float = 1.0) -> Tensor:
        """Return the packet of a slice, uint8 on the CPU, of values that are divided by the loss scale `scale`."""
        if not one.tensors:
            return torch.empty(0, dtype=torch.uint8)
        if (layout := self._layout(one)) is None:
            return torch.cat([tensor.detach().reshape(-1) for tensor in one.tensors]).view(torch.uint8).cpu()
        flat = torch.cat([tensor.detach().reshape(-1).float() for tensor in one.tensors])
        return self._gradients_of(one).senders[0].encode(layout, split(flat, layout.parts), scale).cpu()

    def _add(self, one: OwnedSlice, packet: Tensor, total: Tensor, *, scale: float, weight: float) -> None:
        if not one.tensors:
            return
        packet = packet.to(self._home.device)
        if (layout := self._layout(one)) is None:
            values = packet.clone().view(one.tensors[0].dtype)  # a view of bytes needs its own, aligned memory
            total.add_(values, alpha=weight)  # as they are: times the loss scale
            return
        layout.decode_add(packet, split(total, layout.parts), scale * weight)
