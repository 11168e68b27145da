# SPDX-License-Identifier: Apache-2.0
"""Error feedback: what a packet of gradients leaves out goes into a later packet of the same sender.

    sender      gradient + residual -> codec -> packet     residual = what the packet lacks
    receiver    packet -> codec -> added to the sums       checks that no packet is missing

`SlotCodecs` finds the sender or receiver for a slot's message; `ErrorFeedback` has those of one layer or group.

A *residual* belongs to one span of a parameter and to one level.  A span that is not sent in a step keeps its
residual.  So what has arrived and what still waits is, added up, the sum of the gradients.

Senders and receivers join the transaction of the optimizer step, so a skipped step leaves no trace.  Nothing here
communicates.
"""

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from ds_hybridep.codecs import Codec, CodecState, PacketOrder, Source
from ds_hybridep.codecs.compact import compact, compact_shape, expand, mix
from ds_hybridep.geometry.slots import Span
from ds_hybridep.sync.encoding import CodecCounters, no_scale
from ds_hybridep.sync.home import Home
from ds_hybridep.sync.messages import MessageLayout, PacketPart, squared_norm
from ds_hybridep.sync.stages import SlotKey
from ds_hybridep.sync.transaction import Transaction

MIN_COMPACT = 1024  # elements; a smaller residual stays in fp32


@dataclass(eq=False)
class _SentSpan:
    """What a sender keeps of one span.

    shape: [n, rows, cols], as its codec sees it.
    residual: fp32 of this shape; int16 in the form of `codecs.compact` for 16-bit gradients.  Never changed in place.
    count: how often a residual was stored, for the random rounding of the compact form.
    """

    shape: tuple[int, int, int]
    state: CodecState
    residual: Tensor
    count: int = 0


class GradientSender:
    """Encodes the gradients that this rank sends over one level, and owns their residuals.

    name: of the layer or group, the rank and the level, for the random rounding.
    codec: None for a level where gradients go as they are; then it only keeps what others leave out.
    home: where residuals are, on the device or in host memory: `fetch` brings one to the device, `store` keeps one.
    """

    def __init__(self, name: str, codec: Codec | None, home: Home, transaction: Transaction) -> None:
        self.codec, self._name, self._home, self._transaction = codec, name, home, transaction
        self._sent: dict[Span, _SentSpan] = {}
        self._before: dict[Span, _SentSpan] = {}  # as of the last applied step, of what the step under way changes

    # -- messages ---------------------------------------------------------------------------------------------------

    def encode(self, layout: MessageLayout, gradients: Sequence[Tensor], scale: float) -> Tensor:
        """Return the uint8 message of gradients ([e, *shape] fp32 for each part), divided by the loss scale.

        If it fails, residuals are as before.
        """
        message = layout.new_message(self._home.device)
        left: list[tuple[_SentSpan, Tensor]] = []
        sent = [self._before_change(part) for part in layout.parts]
        # Neighbouring vectors share a packet.  The state of the first one encodes it, and the others' count it.
        states = [spans[0].state for spans in sent]
        for batch in layout.batches_to_encode(states):
            parts, packets = [layout.parts[at] for at in batch], layout.packets(message, batch)
            unscaled = [part.as_matrices(gradients[at]) for at, part in zip(batch, parts, strict=True)]
            unscaled = [one / scale for one in unscaled] if scale != 1.0 else unscaled
            residuals = [self._residual_of(part) for part in parts]  # copies, which become what the packets lack
            layout.codec.encode_batch(Source.RESIDUAL, unscaled, residuals, [states[at] for at in batch], packets)
            for part, residual in zip(parts, residuals, strict=True):
                left += self._stored(part, residual)  # now: only one batch at a time is fp32 on the device
        for other in (one for spans in sent for one in spans[1:]):
            other.state.step += 1
        _keep(left)
        return message

    def move_residuals(self, parts: Sequence[PacketPart], sums: Sequence[Tensor], scale: float) -> None:
        """Add residuals, times the loss scale, to `sums` ([e, *shape] fp32 for each part); zeros take their place."""
        for part, total in zip(parts, sums, strict=True):
            sent = self._before_change(part)
            residual = self._residual_of(part)
            total.view(residual.shape).add_(residual, alpha=scale)
            _keep([(one, self._home.store(torch.zeros_like(one.residual))) for one in sent])

    def leave_out(self, parts: Sequence[PacketPart], lost: Sequence[Tensor], scale: float) -> None:
        """Add to residuals what was lost behind the codec, times the loss scale ([e, *shape] fp32 for each part)."""
        for part, more in zip(parts, lost, strict=True):
            self._before_change(part)
            residual = self._residual_of(part)
            residual += torch.where(more.isfinite(), more, 0.0).view(residual.shape) / scale
            _keep(self._stored(part, residual))

    def make_residuals(self, part: PacketPart) -> None:
        """Allocate now what is kept of a part; otherwise its first message does."""
        for span in part.spans:
            self._sent_span(part, span)

    # -- spans ------------------------------------------------------------------------------------------------------

    def _sent_span(self, part: PacketPart, span: Span) -> _SentSpan:
        if (found := self._sent.get(span)) is not None:
            return found
        shape = part.matrices if len(part.spans) == 1 else (1, 1, span.num_elements)
        is_compact = part.dtype.itemsize == 2 and span.num_elements >= MIN_COMPACT
        stored = compact_shape(shape[0], shape[1] * shape[2]) if is_compact else shape
        residual = self._home.zeros(*stored, dtype=torch.int16 if is_compact else torch.float32)
        made = self._sent[span] = _SentSpan(shape, self._new_state(shape), residual)
        return made

    def _new_state(self, shape: tuple[int, int, int]) -> CodecState:
        return CodecState() if self.codec is None else self.codec.new_state(*shape, device=self._home.device)

    def _before_change(self, part: PacketPart) -> list[_SentSpan]:
        """Join the transaction, and return what is kept of a part's spans, which are about to change."""
        self._transaction.join(self)
        found = [self._sent_span(part, span) for span in part.spans]
        for span, sent in zip(part.spans, found, strict=True):
            if span not in self._before:
                self._before[span] = _SentSpan(sent.shape, sent.state.copy(), sent.residual, sent.count)
        return found

    def commit(self) -> None:
        self._before.clear()

    def undo(self) -> None:
        self._sent |= self._before
        self._before.clear()

    # -- residuals --------------------------------------------------------------------------------------------------

    def residual(self, span: Span) -> Tensor | None:
        """Return a copy of a span's residual on the device, fp32 [n, rows, cols]; None if nothing was ever sent."""
        return None if (sent := self._sent.get(span)) is None else self._expanded(sent)

    def _expanded(self, sent: _SentSpan) -> Tensor:
        stored = self._home.fetch(sent.residual)
        if stored.dtype == torch.int16:
            return expand(stored, torch.empty(sent.shape, device=stored.device))
        return stored.clone() if stored is sent.residual else stored

    def _residual_of(self, part: PacketPart) -> Tensor:
        """Return the residual of a part on the device, fp32 [e, rows, cols], to be changed."""
        found = [self._expanded(self._sent[span]) for span in part.spans]
        whole = found[0] if len(found) == 1 else torch.cat([one.view(-1) for one in found])
        return whole.view(part.matrices)

    def _stored(self, part: PacketPart, residual: Tensor) -> list[tuple[_SentSpan, Tensor]]:
        """Return a part's next residual, fp32 [e, rows, cols], as it is stored for each span."""
        runs = residual.view(-1).split([span.num_elements for span in part.spans])
        found = []
        for span, run in zip(part.spans, runs, strict=True):
            sent = self._sent[span]
            left = run.view(sent.shape)
            if sent.residual.dtype == torch.int16:
                seed = zlib.crc32(f"{self._name} {(span.name, span.start)}".encode())
                left = compact(left, mix(seed ^ mix(sent.count & 0xFFFFFFFF)))
            found.append((sent, self._home.store(left)))
        return found

    def squared_residual(self) -> float:
        """Return the sum of squares of what was not delivered yet."""
        self._home.wait()
        return sum(squared_norm(self._expanded(sent)) for sent in self._sent.values())

    @property
    def spans(self) -> list[Span]:
        """What was sent so far."""
        return list(self._sent)

    @property
    def residuals(self) -> list[Tensor]:
        """Residuals as they are stored: after the step under way, and before it where it has changed them."""
        found = {id(sent.residual): sent.residual for spans in (self._sent, self._before) for sent in spans.values()}
        return list(found.values())

    @property
    def states(self) -> list[CodecState]:
        return [sent.state for sent in self._sent.values()]

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def forget(self, spans: Collection[Span] | None = None) -> None:
        """Drop what is kept of all spans, or of these."""
        for span in list(self._sent) if spans is None else spans:
            self._sent.pop(span, None)
            self._before.pop(span, None)

    def state_dicts(self) -> Iterator[dict[str, Any]]:
        """Yield the state of each span after the last applied step; residuals are the tensors in use, not copies."""
        for span, sent in (self._sent | self._before).items():
            yield {
                "piece": [span.name, span.start],
                "shape": list(sent.shape),
                "residual": sent.residual,
                "state": sent.state.state_dict(),
                "count": sent.count,
            }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore one of `state_dicts`."""
        n, rows, cols = saved["shape"]
        name, start = saved["piece"]
        residual = self._home.zeros(*saved["residual"].shape, dtype=saved["residual"].dtype)
        residual.copy_(saved["residual"])
        state = self._new_state((n, rows, cols))
        state.load_state_dict(saved["state"])
        span = Span(name, (), start, n * rows * cols)
        self._sent[span] = _SentSpan((n, rows, cols), state, residual, saved["count"])


def _keep(stored: Sequence[tuple[_SentSpan, Tensor]]) -> None:
    """Let residuals, as they are stored, take the place of the earlier ones."""
    for sent, residual in stored:
        sent.residual = residual
        sent.count += 1


class GradientReceiver:
    """Decodes the gradients that one rank sends over one level, in the order in which they were sent."""

    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction
        self._next: dict[Span, PacketOrder] = {}
        self._before: dict[Span, int] = {}  # numbers as of the last applied step, of what the step under way changes

    def decode_add(self, layout: MessageLayout, message: Tensor, sums: Sequence[Tensor], scale: float) -> None:
        """Add what a message holds, times the loss scale, to `sums` ([e, *shape] fp32 for each part).

        Raises PacketError, and changes nothing, if it is not the sender's next message.
        """
        spans = [span for part in layout.parts for span in part.spans]
        orders = [self._next.setdefault(span, PacketOrder()) for span in spans]
        orders[0].check(*layout.packets(message, [0]))
        self._transaction.join(self)
        for span, order in zip(spans, orders, strict=True):
            self._before.setdefault(span, order.expected)
            order.advance()
        layout.decode_add(message, sums, scale)

    def commit(self) -> None:
        self._before.clear()

    def undo(self) -> None:
        for span, expected in self._before.items():
            self._next[span].expected = expected
        self._before.clear()

    def forget(self, spans: Collection[Span] | None = None) -> None:
        """Drop the numbers of all spans, or of these."""
        for span in list(self._next) if spans is None else spans:
            self._next.pop(span, None)
            self._before.pop(span, None)

    def state_dicts(self) -> Iterator[dict[str, Any]]:
        """Yield the number of each span's next packet as of the last applied step."""
        for span, order in self._next.items():
            yield {
                "piece": [span.name, span.start],
                "num_elements": span.num_elements,
                "expected": self._before.get(span, order.expected),
            }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore one of `state_dicts`."""
        name, start = saved["piece"]
        self._next[Span(name, (), start, saved["num_elements"])] = PacketOrder(saved["expected"])


class ErrorFeedback:
    """The senders and receivers of the gradients of one layer or group on this rank.

    Args:
        name: of the layer or group.
        codecs: by level; None for a level where gradients go as they are.

    senders: by level.
    """

    def __init__(
        self, name: str, codecs: Sequence[Codec | None], home: Home, transaction: Transaction, *, rank: int
    ) -> None:
        self.home, self._transaction = home, transaction
        self.senders = tuple(
            GradientSender(f"{name} {rank} {level}", codec, home, transaction) for level, codec in enumerate(codecs)
        )
        self._receivers: dict[tuple[int, int], GradientReceiver] = {}  # by level and sending rank

    def receiver(self, level: int, rank: int) -> GradientReceiver:
        """Return what decodes the messages that a rank sends over a level."""
        return self._receivers.setdefault((level, rank), GradientReceiver(self._transaction))

    def undelivered(self) -> Iterator[tuple[int, Span, Tensor]]:
        """Yield level, span and residual, fp32 [n, rows, cols], of all that was ever sent."""
        self.home.wait()
        for level, sender in enumerate(self.senders):
            for span in sender.spans:
                if (residual := sender.residual(span)) is not None:
                    yield level, span, residual

    @property
    def residuals(self) -> list[Tensor]:
        """Residuals as they are stored: after the step under way, and before it where it has changed them."""
        return [residual for sender in self.senders for residual in sender.residuals]

    def squared_residual(self) -> float:
        """Return the sum of squares of what was not delivered yet."""
        return sum(sender.squared_residual() for sender in self.senders)

    def forget(self, spans: Iterable[tuple[int, Span]] | None = None) -> None:
        """Drop residuals and packet numbers of all spans, or of these, by level."""
        of_level: dict[int, list[Span]] = {}
        for level, span in spans or ():
            of_level.setdefault(level, []).append(span)
        for level, sender in enumerate(self.senders):
            sender.forget(None if spans is None else of_level.get(level, ()))
        for (level, _), receiver in self._receivers.items():
            receiver.forget(None if spans is None else of_level.get(level, ()))

    def state_dict(self) -> dict[str, list[dict[str, Any]]]:
        """Return everything as of the last applied step."""
        self.home.wait()
        return {
            "sent": [
                {"level": level, **saved}
                for level, sender in enumerate(self.senders)
                for saved in sender.state_dicts()
            ],
            "received": [
                {"level": level, "sender": rank, **saved}
                for (level, rank), receiver in self._receivers.items()
                for saved in receiver.state_dicts()
            ],
        }

    def load_state_dict(self, saved: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Restore what `state_dict` returned under the same codecs."""
        self.forget()
        for one in saved["sent"]:
            self.senders[one["level"]].load_state_dict(one)
        for one in saved["received"]:
            self.receiver(one["level"], one["sender"]).load_state_dict(one)


class SlotCodecs:
    """How the slots of one layer or buffer travel encoded.

    Args:
        parts: by slot, the parts of its messages.
        feedback: who encodes and decodes gradients; other slots may share it.
        counters: of these slots and others.
        kind: what a gather of these slots brings, for the counters.
        loss_scale: returns the factor by which sums of gradients are multiplied now.
    """

    def __init__(
        self,
        parts: Mapping[SlotKey, tuple[PacketPart, ...]],
        feedback: ErrorFeedback,
        counters: CodecCounters | None = None,
        kind: Literal["weight", "gradient"] = "gradient",
        *,
        loss_scale: Callable[[], float] = no_scale,
    ) -> None:
        self.parts, self.feedback, self._kind, self.loss_scale = parts, feedback, kind, loss_scale
        self.counters = counters or CodecCounters()
        self._layouts: dict[tuple[int, SlotKey], MessageLayout] = {}  # of gradients, by level and slot

    def replace_parts(self, parts: Mapping[SlotKey, tuple[PacketPart, ...]]) -> None:
        """Let messages have other parts from now on: other experts are hot."""
        self.parts, self._layouts = parts, {}

    def count_gathered(self, slot: SlotKey, messages: Sequence[Tensor]) -> None:
        """Count what a gather sends in place of a slot's values."""
        fp32_bytes = sum(part.fp32_bytes for part in self.parts[slot])
        self.counters.count(self._kind, sum(message.nbytes for message in messages), fp32_bytes)

    # -- gradients: one message for each slot and level -------------------------------------------------------------

    def encodes(self, slot: SlotKey, level: int) -> bool:
        """Return True if a slot's gradients cross a level encoded; else they go as they are."""
        return self.feedback.senders[level].codec is not None and bool(self.parts[slot])

    def layout(self, slot: SlotKey, level: int) -> MessageLayout:
        """Return the layout of a slot's messages over a level that encodes it."""
        if (level, slot) not in self._layouts:
            codec = self.feedback.senders[level].codec
            assert codec is not None, f"slot {slot} goes as it is over level {level}"
            self._layouts[level, slot] = MessageLayout(codec, self.parts[slot])
        return self._layouts[level, slot]

    def make_residuals(self, slot: SlotKey, level: int) -> None:
        """Make now what is kept of a slot's gradients over a level; otherwise their first message does."""
        for part in self.parts[slot] if self.encodes(slot, level) else ():
            self.feedback.senders[level].make_residuals(part)

    def encode(self, slot: SlotKey, level: int, sums: Sequence[Tensor]) -> Tensor:
        """Return the message of a slot's sums (fp32 [e, *shape] for each part), and keep what it leaves out."""
        layout = self.layout(slot, level)
        with self.counters.timing("encode_s"):
            message = self.feedback.senders[level].encode(layout, sums, self.loss_scale())
        self.counters.count("gradient", message.nbytes, layout.fp32_bytes)
        return message

    def room(self, slot: SlotKey, level: int) -> Tensor:
        """Return memory for a message of a slot's gradients."""
        return self.layout(slot, level).room(self.feedback.home.device)

    def decode_add(self, slot: SlotKey, level: int, message: Tensor, *, src: int, sums: Sequence[Tensor]) -> None:
        """Add what a message from rank `src` holds to a slot's sums (fp32 [e, *shape] for each part).

        Raises PacketError, and changes nothing, if it is not the next message from there.
        """
        layout, receiver = self.layout(slot, level), self.feedback.receiver(level, src)
        receiver.decode_add(layout, message, sums, self.loss_scale())


def residual_of(saved: Mapping[str, Any]) -> Tensor:
    """Return a residual that `ErrorFeedback.state_dict` has saved, fp32 [n, rows, cols] on the host."""
    stored: Tensor = saved["residual"].cpu()
    if stored.dtype == torch.int16:
        return expand(stored, torch.empty(saved["shape"]))
    return stored
