# SPDX-License-Identifier: Apache-2.0
"""What crosses a link encoded, of one flat buffer of a data-parallel group: sums of gradients, and parameters."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_hybridep.codecs import Codec, PacketOrder, PatchCodec
from ds_hybridep.geometry.slots import Span
from ds_hybridep.sync.encoding import CodecCounters
from ds_hybridep.sync.error_feedback import ErrorFeedback, SlotCodecs
from ds_hybridep.sync.home import Home
from ds_hybridep.sync.messages import NARROW, MessageLayout, PacketPart, load_states, packet_parts, split
from ds_hybridep.sync.mirrors import HeldSlot, Mirror, PatchReplica, PatchSender, Replica
from ds_hybridep.sync.stages import SlotKey


class HeldSum:
    """The sum of one slot, which every rank decodes from the same packet (a `sync.mirrors.HeldSlot`)."""

    varies = False

    def __init__(self, codecs: SlotCodecs, slot: int, place: Tensor) -> None:
        self._layout = codecs.layout(slot, 0)
        self._sender, self._receiver = codecs.feedback.senders[0], codecs.feedback.receiver(0, slot)
        self._place, self._scale = place, codecs.loss_scale()

    def new_messages(self) -> list[Tensor]:
        return [self._layout.room(self._place.device)]

    def assign(self, *, instead_of_messages: bool) -> None:
        raise AssertionError("sums never arrive as they are where they are encoded")

    def apply(self, messages: Sequence[Tensor]) -> list[Tensor]:
        self._place.copy_(self._decoded(messages[0]))
        return list(messages)

    def encode(self, total: Tensor) -> list[Tensor]:
        """Return the messages of a sum, and take in what they hold; what has no room there goes into a later sum."""
        parts = self._layout.parts
        message = self._sender.encode(self._layout, split(total, parts), self._scale)
        decoded = self._decoded(message)
        self._place.copy_(decoded)
        if self._place.dtype != decoded.dtype:
            self._sender.leave_out(parts, split(decoded - self._place, parts), self._scale)
        return [message]

    def _decoded(self, message: Tensor) -> Tensor:
        total = torch.zeros(self._place.shape, device=self._place.device)
        sums = split(total, self._layout.parts)
        self._receiver.add(self._layout, message, sums, self._scale)
        return total


class ParameterCodecs(SlotCodecs):
    """The packets of one flat buffer of parameters, which is bit-identical on all ranks.

    16-bit parameters travel as patches over every level with a codec, because every holder would have to keep what a
    lossy codec leaves out.  Other parameters use the lossy codec of the slowest level that has one.

    Args:
        spans: by slot.
        codecs: by level, for those that the group crosses, slowest first.
        level_to: by slot, the slowest level on the way to it.
    """

    def __init__(
        self,
        spans: Sequence[tuple[Span, ...]],
        codecs: Mapping[int, Codec | PatchCodec | None],
        level_to: Sequence[int | None],
        own_slot: int,
        *,
        dtype: torch.dtype,
        nothing: ErrorFeedback,
        counters: CodecCounters,
    ) -> None:
        super().__init__({slot: packet_parts(held) for slot, held in enumerate(spans)}, nothing, counters, "weight")
        used = {level: codec for level, codec in codecs.items() if codec is not None}
        is_narrow = dtype in NARROW
        self._patch = PatchCodec(kernels=next(iter(used.values())).kernels) if is_narrow else None
        self._mirror: Mirror | None = None
        if not is_narrow:
            lossy = {level: codec for level, codec in used.items() if isinstance(codec, Codec)}
            if lossy:
                layout = MessageLayout(next(iter(lossy.values())), self.parts[own_slot])
                self._mirror = Mirror(layout, Home(nothing.home.device), values=())
            used = {**lossy}
        self._levels, self._own = tuple(used), own_slot
        self._num_gathers = 0
        self._orders = {slot: PacketOrder() for slot, level in enumerate(level_to) if level in used}

    def prepare(
        self, values: Sequence[Tensor], before: Tensor
    ) -> tuple[dict[int, list[Tensor]], dict[SlotKey, HeldSlot]]:
        """Return the own slot's messages by level, and by slot what takes the others' messages.

        A lossy codec changes the own slot to what the others will have.

        values: by slot; the own one is new.  The others are those of the last gather, as `before` is for the own one.
        """
        own, step = values[self._own], self._num_gathers
        replicas: dict[SlotKey, HeldSlot] = {}
        messages: list[Tensor] = []
        with self.counters.timing("encode_s"):
            if (patch := self._patch) is not None:
                messages = PatchSender(patch, [before], step).encode([own])
                replicas = {slot: PatchReplica(patch, [values[slot]], step) for slot in self._orders}
            elif (mirror := self._mirror) is not None:
                mirror.values = [part.as_matrices(view) for part, view in _views(before, mirror.layout)]
                messages = mirror.encode([view for _, view in _views(own, mirror.layout)])
                own.copy_(before)
                mirror.values = []
                replicas = {slot: self._replica(slot, mirror.layout.codec, values[slot]) for slot in self._orders}
        self._num_gathers += 1
        return (dict.fromkeys(self._levels, messages) if messages else {}), replicas

    def _replica(self, slot: int, codec: Codec, values: Tensor) -> Replica:
        replica = Replica(MessageLayout(codec, self.parts[slot]), split(values, self.parts[slot]))
        replica.order = self._orders[slot]
        return replica

    def state_dict(self) -> dict[str, Any]:
        """Return the present state, because a gather belongs to an applied step."""
        states = [] if self._mirror is None else [state.state_dict() for state in self._mirror.states]
        orders = {slot: order.expected for slot, order in self._orders.items()}
        return {"num_gathers": self._num_gathers, "states": states, "orders": orders}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self._num_gathers = saved["num_gathers"]
        if self._mirror is not None:
            load_states(self._mirror.states, saved["states"])
        for slot, expected in saved["orders"].items():
            self._orders[slot].expected = expected


def _views(flat: Tensor, layout: MessageLayout) -> list[tuple[PacketPart, Tensor]]:
    return list(zip(layout.parts, split(flat, layout.parts), strict=True))
