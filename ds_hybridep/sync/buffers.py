# SPDX-License-Identifier: Apache-2.0
"""What codecs keep for one flat buffer of a data-parallel group."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_hybridep.codecs import Codec, PacketOrder, Patch
from ds_hybridep.sync.feedback import Feedback
from ds_hybridep.sync.flat import Span, split
from ds_hybridep.sync.home import Home
from ds_hybridep.sync.messages import MessageLayout, PacketPart, load_states
from ds_hybridep.sync.mirrors import Mirror, PatchReplica, PatchSender, Replica


@dataclass
class Buffer:
    """The layout of gradients that are summed together.

    key: says what they consist of; the same on all ranks and in every run.
    spans: by slot.
    sums, results: feedback on the way to the owners, and on the sums' way to all ranks; None if nothing is encoded.
    rounded: what sums of 16-bit gradients lose at their owner when they get this type; None if nothing is encoded.
    """

    key: str
    spans: tuple[tuple[Span, ...], ...]
    sums: Feedback | None = None
    results: "SumFeedback | None" = None
    rounded: Feedback | None = None


class SumFeedback(Feedback):
    """What a codec keeps of sums on their way from the owners to all ranks; one codec serves all levels."""

    def encode(self, slot: int, total: Tensor, scale: float) -> Tensor | None:
        """Return the message of a slot's sum, or None if the slot is empty."""
        layout = self.layout(0, slot)
        if layout is None:
            return None
        with self.counters.timing("encode_s"):
            return self.gradients.encode(0, layout, split(total, self.parts[slot]), scale)


class HeldSum:
    """The sum of one slot, which every rank decodes from the same packet (a `sync.mirrors.HeldSlot`)."""

    varies = False

    def __init__(self, feedback: SumFeedback, slot: int, place: Tensor, scale: float) -> None:
        layout = feedback.layout(0, slot)
        assert layout is not None, f"slot {slot} is empty"
        self._layout: MessageLayout = layout
        self._gradients, self._slot = feedback.gradients, slot
        self._place, self._scale = place, scale

    def new_messages(self) -> list[Tensor]:
        return [self._layout.room(self._place.device)]

    def cut(self, messages: Sequence[Tensor]) -> list[Tensor]:
        return list(messages)

    def assign(self) -> None:
        raise AssertionError("sums are never gathered exactly where they are encoded")

    pass_over = assign

    def apply(self, messages: Sequence[Tensor]) -> None:
        self._place.copy_(self._decoded(messages[0]))

    def apply_own(self, message: Tensor) -> None:
        """Like `apply`, where the message was encoded: what the place cannot hold goes into a later one."""
        total = self._decoded(message)
        self._place.copy_(total)
        if self._place.dtype != total.dtype:
            lost = split(total - self._place, self._layout.parts)
            self._gradients.leave_out(0, self._layout.parts, lost, self._scale)

    def _decoded(self, message: Tensor) -> Tensor:
        total = torch.zeros(self._place.shape, device=self._place.device)
        sums = split(total, self._layout.parts)
        self._gradients.add(0, self._slot, self._layout, message, sums, self._scale)
        return total


class ParameterCodecs:
    """What codecs keep of one flat buffer of parameters, which is bit-identical on all ranks.

    16-bit parameters travel as patches over every level with a codec, because every holder would have to keep what a
    lossy codec leaves out.  Other parameters use the lossy codec of the slowest level that has one.

    Args:
        levels: those that the group crosses, slowest first.  level_to: by slot, the slowest level on the way to it.
    """

    def __init__(
        self,
        feedback: Feedback,
        codecs: Sequence[Codec | Patch | None],
        levels: Sequence[int],
        level_to: Sequence[int | None],
        own_slot: int,
        dtype: torch.dtype,
    ) -> None:
        self.feedback = feedback
        used = {level: codec for level in levels if (codec := codecs[level]) is not None}
        lossy = [codec for codec in used.values() if isinstance(codec, Codec)]
        is_narrow = dtype in (torch.bfloat16, torch.float16)
        self._patch = Patch(kernels=next(iter(used.values())).kernels) if is_narrow else None
        self.mirror: Mirror | None = None
        if not is_narrow:
            used = {level: codec for level, codec in used.items() if isinstance(codec, Codec)}
            if lossy:
                layout = MessageLayout(lossy[0], feedback.parts[own_slot])
                self.mirror = Mirror(layout, Home(feedback.home.device), values=())
        self._levels = tuple(used)
        self._own = own_slot
        self.num_gathers = 0
        self.orders = {slot: PacketOrder() for slot, level in enumerate(level_to) if level in used}

    def prepare(self, values: Sequence[Tensor], before: Tensor) -> dict[int, list[Tensor]]:
        """Return the own slot's messages by level.  A lossy codec changes the own slot to what the others will have.

        values: by slot; the own one is new.  The others are those of the last gather, as `before` is for the own one.
        """
        own, feedback = values[self._own], self.feedback
        messages: list[Tensor] = []
        with feedback.counters.timing("encode_s"):
            if self._patch is not None:
                sender = PatchSender(self._patch, [before], self.num_gathers)
                messages = sender.encode([own])
                feedback.patches = dict.fromkeys(self._levels, sender)
                feedback.replicas = {
                    slot: PatchReplica(self._patch, [values[slot]], self.num_gathers) for slot in self.orders
                }
            elif self.mirror is not None:
                layout = self.mirror.layout
                self.mirror.values = [part.as_matrices(view) for part, view in _views(before, layout)]
                messages = [self.mirror.encode([view for _, view in _views(own, layout)])]
                own.copy_(before)
                self.mirror.values = []
                feedback.replicas = {slot: self._replica(slot, values[slot]) for slot in self.orders}
        self.num_gathers += 1
        return dict.fromkeys(self._levels, messages) if messages else {}

    def _replica(self, slot: int, values: Tensor) -> Replica:
        assert self.mirror is not None
        parts = self.feedback.parts[slot]
        replica = Replica(MessageLayout(self.mirror.layout.codec, parts), split(values, parts))
        replica.order = self.orders[slot]
        return replica

    def state_dict(self) -> dict[str, Any]:
        """Return the present state, because a gather belongs to an applied step."""
        states = [] if self.mirror is None else [state.state_dict() for state in self.mirror.states]
        orders = {slot: order.expected for slot, order in self.orders.items()}
        return {"num_gathers": self.num_gathers, "states": states, "orders": orders}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self.num_gathers = saved["num_gathers"]
        if self.mirror is not None:
            load_states(self.mirror.states, saved["states"])
        for slot, expected in saved["orders"].items():
            self.orders[slot].expected = expected


def _views(flat: Tensor, layout: MessageLayout) -> list[tuple[PacketPart, Tensor]]:
    return list(zip(layout.parts, split(flat, layout.parts), strict=True))
