# SPDX-License-Identifier: Apache-2.0
"""What crosses the links of one data-parallel group encoded, and what its codecs keep for that.

HeldSum           the sum of a slot that all ranks decode from one packet
ParameterCodecs   the packets of a flat buffer of parameters
CodecMemory       all that is kept, in use and in checkpoints
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import astuple, replace
from typing import Any

import torch
from torch import Tensor

from ds_hybridep.codecs import Codec, PacketOrder, PatchCodec
from ds_hybridep.geometry.slots import Span, cut, even_bounds
from ds_hybridep.sync.encoding import CodecCounters, Encoding
from ds_hybridep.sync.error_feedback import ErrorFeedback, SlotCodecs
from ds_hybridep.sync.home import Home
from ds_hybridep.sync.messages import NARROW, MessageLayout, PacketPart, load_states, packet_parts, split
from ds_hybridep.sync.mirrors import HeldSlot, Mirror, PatchReplica, PatchSender, Replica
from ds_hybridep.sync.stages import SlotKey
from ds_hybridep.sync.transaction import Transaction

MOST_BUFFERS = 64  # whose layouts are remembered; they follow from their spans


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
        self._receiver.decode_add(self._layout, message, sums, self._scale)
        return total


class ParameterCodecs(SlotCodecs):
    """The packets of one flat buffer of parameters, which is bit-identical on all ranks.

    16-bit parameters travel as patches over every level with a codec, because every holder would have to keep what a
    lossy codec leaves out.  Other parameters use the lossy codec of the slowest level that has one.

    Args:
        spans: by slot.
        codecs: by level, for those that the group crosses, slowest first.
        level_to: by slot, the slowest level on the way to it.
        nothing: keeps no gradients, since these slots have none.
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


class CodecMemory:
    """All that the codecs of one group keep.

    num_ranks: the size of the group.  levels: those that the group crosses, slowest first.
    """

    def __init__(
        self,
        name: str,
        rank: int,
        transaction: Transaction,
        encoding: Encoding,
        *,
        num_ranks: int,
        levels: Sequence[int],
        device: torch.device,
    ) -> None:
        self._encoding, self._levels = encoding, tuple(levels)
        self.is_mean = False  # True if the sums are means: DeepSpeed divides before it sums
        self.sums_for = ""  # whom DeepSpeed's sums are for, and their type: with others, what is kept has other pieces
        codecs = encoding.gradient_codecs
        slowest = next((codecs[level] for level in levels if codecs[level] is not None), None)
        home = Home(device, encoding.is_on_host)
        # What is kept on the sums' way to the owners, on their way to all ranks, and of sums that the owner rounds.
        self.sums = ErrorFeedback(f"{name}, sums", codecs, home, transaction, rank=rank)
        self.results = ErrorFeedback(f"{name}, results", (slowest,), home, transaction, rank=rank)
        self.rounded = ErrorFeedback(f"{name}, rounded", (None,), home, transaction, rank=rank)
        self.parameters: dict[str, ParameterCodecs] = {}  # by dtype and spans
        self.counters = CodecCounters()  # what codecs did
        self._nothing = ErrorFeedback("", (), Home(device), transaction, rank=rank)
        self._buffers: dict[str, tuple[SlotCodecs, SlotCodecs]] = {}  # by dtype and spans, the latest ones
        self._slices: dict[Span, list[tuple[int, Span]]] = {}  # of sums for all ranks: (slot, part of the span)
        self._saved_parameters: dict[str, Any] = {}  # states of buffers that were not asked for yet
        self._num_ranks = num_ranks

    @property
    def squared_residual(self) -> float:
        """The sum of squares of the gradients that were not delivered yet."""
        return sum(one.squared_residual() for one in (self.sums, self.results, self.rounded))

    def stats(self) -> CodecCounters:
        """Return what codecs did, and how much of the gradients they have not delivered."""
        return replace(self.counters, squared_residual=self.squared_residual)

    def forget(self) -> None:
        """Drop everything but the counters; all ranks must call."""
        for one in (self.sums, self.results, self.rounded):
            one.forget()
        self.gather_exactly()
        self._slices = {}

    def gather_exactly(self) -> None:
        """Make the next gathers send every parameter as it is, because parameters may have changed on any rank."""
        self.parameters.clear()
        self._saved_parameters = {}

    # -- buffers ----------------------------------------------------------------------------------------------------

    def slot_codecs(self, spans: Sequence[tuple[Span, ...]], like: Tensor) -> tuple[SlotCodecs, SlotCodecs] | None:
        """Return the codecs of a flat buffer on the sums' way to owners, and on that to all ranks.

        None if gradients travel as they are.

        spans: by slot; without their names nothing is encoded.
        """
        is_known = all(span.name for slot in spans for span in slot)
        if not is_known or like.dtype == torch.float64:
            return None
        key = f"{like.dtype} {hash_of(spans)}"
        found = self._buffers.pop(key, None)
        if found is None:
            parts: dict[SlotKey, tuple[PacketPart, ...]] = {
                slot: packet_parts(held, like.dtype) for slot, held in enumerate(spans)
            }
            loss_scale = self._encoding.loss_scale
            found = (
                SlotCodecs(parts, self.sums, self.counters, loss_scale=loss_scale),
                SlotCodecs(parts, self.results, self.counters, loss_scale=loss_scale),
            )
        self._buffers[key] = found
        while len(self._buffers) > MOST_BUFFERS:
            self._buffers.pop(next(iter(self._buffers)))
        return found

    def slices(self, spans: Sequence[Span]) -> list[tuple[int, Span]]:
        """Cut the spans of a flat buffer into (slot, span), so that slots get equal shares.

        A tensor is cut as it was the first time, whatever buffer it is in: then its residuals fit.
        """
        new = [span for span in spans if span not in self._slices]
        by_slot = cut(new, even_bounds(new, self._num_ranks))
        sliced = [(slot, part) for slot, parts in enumerate(by_slot) for part in parts]
        for span in new:
            rest = span.num_elements
            self._slices[span] = []
            while rest:
                slot, part = sliced.pop(0)
                self._slices[span].append((slot, part))
                rest -= part.num_elements
        return [one for span in spans for one in self._slices[span]]

    def parameter_codecs(
        self, spans: Sequence[tuple[Span, ...]], like: Tensor, level_to: Sequence[int | None], own_slot: int
    ) -> ParameterCodecs | None:
        """Return what is kept of one flat buffer of parameters; None in its first gather, which is exact.

        spans: by slot.
        """
        key = f"{like.dtype} {hash_of(spans)}"
        if (known := self.parameters.get(key)) is not None:
            return known
        codecs = {level: self._encoding.weight_codecs[level] for level in self._levels}
        made = ParameterCodecs(
            spans, codecs, level_to, own_slot, dtype=like.dtype, nothing=self._nothing, counters=self.counters
        )
        self.parameters[key] = made
        if (saved := self._saved_parameters.pop(key, None)) is None:
            return None
        made.load_state_dict(saved)
        return made

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything as of the last applied step, for a checkpoint or the next plan."""
        states = {key: codecs.state_dict() for key, codecs in self.parameters.items()}
        return {
            "sums": self.sums.state_dict(),
            "results": self.results.state_dict(),
            "rounded": self.rounded.state_dict(),
            "parameters": {**self._saved_parameters, **states},
            "slices": [
                [*astuple(span), [[slot, part.start, part.num_elements] for slot, part in parts]]
                for span, parts in self._slices.items()
            ],
            "is_mean": self.is_mean,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned under the same plan."""
        self.forget()
        self.sums.load_state_dict(saved["sums"])
        self.results.load_state_dict(saved["results"])
        self.rounded.load_state_dict(saved["rounded"])
        self._saved_parameters = dict(saved["parameters"])
        for name, shape, *run, parts in saved["slices"]:
            found = [(slot, Span(name, tuple(shape), start, num_elements)) for slot, start, num_elements in parts]
            self._slices[Span(name, tuple(shape), *run)] = found


def hash_of(slots: Sequence[Sequence[Span]]) -> str:
    """Return a hash that is the same for the same spans in every process."""
    return hashlib.sha1(repr([tuple(slot) for slot in slots]).encode(), usedforsecurity=False).hexdigest()[:16]
