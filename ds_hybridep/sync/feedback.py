# SPDX-License-Identifier: Apache-2.0
"""Expert weights and gradients in encoded form: mirrors, residuals, and the messages that carry packets.

A message holds one packet for each trainable parameter of each of the e experts of a slot:

    [parameter 0, expert 0 | parameter 0, expert 1 | ... | padding | parameter 1, expert 0 | ...]

Weights travel as deltas.  The owner keeps a mirror of what its replicas hold, encodes weight - mirror and adds to the
mirror what it has encoded; a replica adds the same.  What a codec left out is still in weight - mirror the next time.
Gradients travel as they are, plus what earlier packets of the same sender left out: its residual.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ds_hybridep.codecs import Codec, CodecState, PacketOrder
from ds_hybridep.sync.counters import CodecCounters, CodecSums

ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class PacketPart:
    """One parameter in a message."""

    name: str
    shape: torch.Size
    num_experts: int

    @property
    def rows(self) -> int:
        """Rows as a codec sees them: 1 for vectors and scalars."""
        return self.shape[0] if len(self.shape) > 1 else 1

    @property
    def cols(self) -> int:
        return math.prod(self.shape) // max(self.rows, 1)

    def as_matrices(self, tensor: Tensor) -> Tensor:
        """[e, *shape] as a codec wants it, [e, rows, cols] fp32."""
        return tensor.float().reshape(self.num_experts, self.rows, self.cols)


@dataclass(frozen=True)
class MessageLayout:
    """The packets of one slot, for one codec."""

    codec: Codec
    parts: tuple[PacketPart, ...]
    _places: dict[int, tuple[int, list[tuple[int, int, int]]]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def num_bytes(self, step: int) -> int:
        """Length of the message of encoder step `step`."""
        return self._lay_out(step)[0]

    @property
    def fp32_bytes(self) -> int:
        """Of what a message stands for."""
        return sum(4 * part.num_experts * part.rows * part.cols for part in self.parts)

    def new_message(self, step: int, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        """Memory for the message of encoder step `step`, uint8, and its packets."""
        message = torch.empty(self.num_bytes(step), dtype=torch.uint8, device=device)
        return message, self.packets(message, step)

    def packets(self, message: Tensor, step: int) -> list[Tensor]:
        """Views of a message, [e, packet_bytes] uint8 for each part."""
        offset = message.storage_offset()
        return [
            message.as_strided((num_experts, num_bytes), (num_bytes, 1), offset + start)
            for num_experts, num_bytes, start in self._lay_out(step)[1]
        ]

    def new_states(self, device: torch.device) -> list[CodecState]:
        return [self.codec.new_state(part.num_experts, part.rows, part.cols, device=device) for part in self.parts]

    def new_values(self, device: torch.device) -> list[Tensor]:
        """Zeros, [e, rows, cols] fp32 for each part."""
        return [torch.zeros(part.num_experts, part.rows, part.cols, device=device) for part in self.parts]

    def _lay_out(self, step: int) -> tuple[int, list[tuple[int, int, int]]]:
        """Length of a message; packets of each part, bytes of one, and where they begin, aligned."""
        codec = self.codec.at(step)
        found = self._places.get(id(codec))
        if found is None:
            places, start = [], 0
            for part in self.parts:
                num_bytes = codec.packet_bytes(part.rows, part.cols)
                places.append((part.num_experts, num_bytes, start))
                start += math.ceil(part.num_experts * num_bytes / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            found = self._places[id(codec)] = (start, places)
        return found


def _copy_to(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for place, value in zip(places, values, strict=True):
        place.copy_(value)


def _load_states(states: Sequence[CodecState], saved: Sequence[dict[str, Any]]) -> None:
    for state, other in zip(states, saved, strict=True):
        state.load_state_dict(other)


class Mirror:
    """The owner's side of one lossy codec: what its replicas hold, and the encoder of what they lack."""

    def __init__(self, layout: MessageLayout, device: torch.device) -> None:
        self.layout = layout
        self.values = layout.new_values(device)
        self.states = layout.new_states(device)

    def assign(self, weights: Sequence[Tensor]) -> None:
        """Hold what was shipped exactly, [e, *shape] for each part."""
        for part, value, weight in zip(self.layout.parts, self.values, weights, strict=True):
            value.copy_(part.as_matrices(weight))

    def encode(self, weights: Sequence[Tensor]) -> Tensor:
        """The message that brings every replica closer to `weights` ([e, *shape] for each part); uint8."""
        message, packets = self.layout.new_message(self.states[0].step, self.values[0].device)
        for part, weight, value, state, out in zip(
            self.layout.parts, weights, self.values, self.states, packets, strict=True
        ):
            self.layout.codec.encode_update(part.as_matrices(weight), value, state, out=out)
        return message

    def tensors(self) -> list[Tensor]:
        return [*self.values, *(t for state in self.states for t in state.tensors.values())]

    def squared_distance(self, weights: Sequence[Tensor]) -> tuple[float, float]:
        """Sums over all elements of (weight - mirror)^2 and of weight^2."""
        wide = [part.as_matrices(w).double() for part, w in zip(self.layout.parts, weights, strict=True)]
        apart = sum(float((w - v).square().sum()) for w, v in zip(wide, self.values, strict=True))
        return apart, sum(float(w.square().sum()) for w in wide)

    def state_dict(self) -> dict[str, Any]:
        return {"values": [v.clone() for v in self.values], "states": [state.state_dict() for state in self.states]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        _copy_to(self.values, saved["values"])
        _load_states(self.states, saved["states"])


class Replica:
    """One slot's weights on a rank that does not own them, as its owner's mirror has them."""

    def __init__(self, layout: MessageLayout, values: Sequence[Tensor]) -> None:
        """values: [e, rows, cols] fp32 for each part; may be views of weights that are computed with."""
        self.layout = layout
        self.values = list(values)
        self.order = PacketOrder()  # its `expected` is the encoder step of the next message

    def assign(self, weights: Sequence[Tensor]) -> None:
        """Hold what was shipped exactly, [e, *shape] for each part."""
        for part, value, weight in zip(self.layout.parts, self.values, weights, strict=True):
            if value.data_ptr() != weight.data_ptr():
                value.copy_(part.as_matrices(weight))

    def copy_to(self, weights: Sequence[Tensor]) -> None:
        """Round to the weights that are computed with, [e, *shape] for each part."""
        for value, weight in zip(self.values, weights, strict=True):
            if value.data_ptr() != weight.data_ptr():
                weight.copy_(value.view(weight.shape))

    def apply(self, message: Tensor) -> None:
        """Add what a message holds, unless it was applied before.

        Raises:
            PacketError: a message before it is missing.
        """
        packets = self.layout.packets(message, self.order.expected)
        if self.order.accept(packets[0]):
            for part, value in zip(packets, self.values, strict=True):
                self.layout.codec.decode_add(part, value)


class StepChanges:
    """What the optimizer step under way has changed, and how to undo it where the step is skipped."""

    def __init__(self) -> None:
        self.notes: dict[Any, Callable[[], None]] = {}

    def __contains__(self, changed: object) -> bool:
        return changed in self.notes

    def note(self, changed: object, undo: Callable[[], None]) -> None:
        """`changed` differs from now on; `undo` brings it back.  The first note of a step counts."""
        self.notes.setdefault(changed, undo)

    def keep(self) -> None:
        """The optimizer step was applied."""
        self.notes.clear()

    def undo(self) -> None:
        """The optimizer step was skipped, or its gradients were dropped."""
        for undo in self.notes.values():
            undo()
        self.notes.clear()


class ResidualEncoder:
    """Sender of one slot's gradients over one level; adds to each gradient what earlier packets left out."""

    def __init__(self, layout: MessageLayout, device: torch.device, changes: StepChanges) -> None:
        self.layout = layout
        self.residuals = layout.new_values(device)
        self.states = layout.new_states(device)
        self._changes = changes
        # As they were after the last applied step; in use while `changes` has a note of this encoder.
        self._saved_residuals = layout.new_values(device)
        self._saved_states: list[dict[str, Any]] = []

    def encode(self, gradients: Sequence[Tensor], scale: float) -> Tensor:
        """The message of gradients ([e, *shape] fp32 for each part), divided by the loss scale; uint8."""
        if self not in self._changes:
            _copy_to(self._saved_residuals, self.residuals)
            self._saved_states = [state.state_dict() for state in self.states]
            self._changes.note(self, self._go_back)
        message, packets = self.layout.new_message(self.states[0].step, self.residuals[0].device)
        for part, gradient, residual, state, out in zip(
            self.layout.parts, gradients, self.residuals, self.states, packets, strict=True
        ):
            unscaled = part.as_matrices(gradient)
            unscaled = unscaled / scale if scale != 1.0 else unscaled
            self.layout.codec.encode_with_residual(unscaled, residual, state, out=out)
        return message

    def _go_back(self) -> None:
        self.load_state_dict({"residuals": self._saved_residuals, "states": self._saved_states})

    def tensors(self) -> list[Tensor]:
        return [*self.residuals, *self._saved_residuals, *(t for state in self.states for t in state.tensors.values())]

    def squared_residual(self) -> float:
        """Sum of squares of what was not delivered yet."""
        return sum(float(residual.double().square().sum()) for residual in self.residuals)

    def state_dict(self) -> dict[str, Any]:
        """As of the last applied step."""
        is_provisional = self in self._changes
        residuals = self._saved_residuals if is_provisional else self.residuals
        return {
            "residuals": [residual.clone() for residual in residuals],
            "states": self._saved_states if is_provisional else [state.state_dict() for state in self.states],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        _copy_to(self.residuals, saved["residuals"])
        _load_states(self.states, saved["states"])


class GradientDecoder:
    """Receiver of one sender's gradients for one slot."""

    def __init__(self, layout: MessageLayout, changes: StepChanges) -> None:
        self.layout = layout
        self.order = PacketOrder()  # its `expected` is the encoder step of the next message
        self._changes = changes
        self._saved = 0

    @property
    def committed_step(self) -> int:
        """The encoder step of the next message as of the last applied step."""
        return self._saved if self in self._changes else self.order.expected

    def add(self, message: Tensor, sums: Sequence[Tensor], scale: float) -> None:
        """Add what a message holds, times the loss scale, to `sums` ([e, *shape] fp32 for each part)."""
        if self not in self._changes:
            self._saved = self.order.expected
            self._changes.note(self, lambda: setattr(self.order, "expected", self._saved))
        packets = self.layout.packets(message, self.order.expected)
        if not self.order.accept(packets[0]):
            return
        for part, packet, total in zip(self.layout.parts, packets, sums, strict=True):
            matrices = total.view(part.num_experts, part.rows, part.cols)
            if scale == 1.0:
                self.layout.codec.decode_add(packet, matrices)
            else:
                matrices.add_(self.layout.codec.decode(packet, torch.empty_like(matrices)), alpha=scale)


def no_master(_: nn.Parameter) -> Tensor | None:
    return None


def no_scale() -> float:
    return 1.0


@dataclass(frozen=True)
class Encoding:
    """How weights and gradients travel; codecs by level index, None where they go as they are.

    master_of: the optimizer's fp32 copy of a parameter, flat or shaped; None where this rank does not hold all of it.
    """

    weight_codecs: tuple[Codec | None, ...]
    gradient_codecs: tuple[Codec | None, ...]
    master_of: Callable[[nn.Parameter], Tensor | None] = field(default=no_master, compare=False)
    loss_scale: Callable[[], float] = field(default=no_scale, compare=False)


class Feedback:
    """All that lossy codecs keep for one layer on this rank.

    Args:
        levels: that the layer's weights and gradients cross.
        replicas: by slot of another rank the level to its owner, and its weights [e, *shape] for each part.
        changes: shared by all layers.
    """

    def __init__(
        self,
        encoding: Encoding,
        parts: tuple[PacketPart, ...],
        levels: Sequence[int],
        replicas: Mapping[int, tuple[int, Sequence[Tensor]]],
        device: torch.device,
        changes: StepChanges,
    ) -> None:
        self.changes = changes
        self.counters = CodecCounters()
        self.mirrors: dict[str, Mirror] = {}  # by codec settings
        self.mirror_names: dict[int, str] = {}  # by level, the mirror that owned weights leave by
        self.replicas: dict[int, Replica] = {}  # by slot
        self.encoders: dict[tuple[int, int], ResidualEncoder] = {}  # by (level, slot)
        self.decoders: dict[tuple[int, int], GradientDecoder] = {}  # by (sender, slot)
        self._device = device
        self.gradient_layouts = {
            level: MessageLayout(codec, parts)
            for level in levels
            if (codec := encoding.gradient_codecs[level]) is not None
        }
        for level in levels:
            if (codec := encoding.weight_codecs[level]) is not None:
                name = self.mirror_names[level] = codec.settings()
                if name not in self.mirrors:
                    self.mirrors[name] = Mirror(MessageLayout(codec, parts), device)
        for slot, (level, weights) in replicas.items():
            if (codec := encoding.weight_codecs[level]) is not None:
                layout = MessageLayout(codec, parts)
                values = [
                    weight.view(value.shape) if weight.dtype == torch.float32 else value
                    for value, weight in zip(layout.new_values(device), weights, strict=True)
                ]
                self.replicas[slot] = Replica(layout, values)

    def encoder(self, level: int, slot: int) -> ResidualEncoder | None:
        """Made when first asked for; None where gradients go as they are."""
        if (level, slot) not in self.encoders and level in self.gradient_layouts:
            layout = self.gradient_layouts[level]
            self.encoders[level, slot] = ResidualEncoder(layout, self._device, self.changes)
        return self.encoders.get((level, slot))

    def decoder(self, level: int, sender: int, slot: int) -> GradientDecoder | None:
        """Likewise."""
        if (sender, slot) not in self.decoders and level in self.gradient_layouts:
            self.decoders[sender, slot] = GradientDecoder(self.gradient_layouts[level], self.changes)
        return self.decoders.get((sender, slot))

    def forget_gradients(self) -> None:
        """Drop residuals, and what is expected of other ranks' encoders."""
        self.encoders.clear()
        self.decoders.clear()

    def sums(self, weights: Sequence[Tensor]) -> CodecSums:
        """What codecs did, for owned weights [e, *shape] of each part."""
        distances = [mirror.squared_distance(weights) for mirror in self.mirrors.values()]
        return CodecSums(
            **asdict(self.counters),
            squared_error=sum(apart for apart, _ in distances),
            squared_weight=sum(whole for _, whole in distances),
            squared_residual=sum(encoder.squared_residual() for encoder in self.encoders.values()),
        )

    def num_bytes(self, weights: Sequence[Tensor]) -> int:
        """Bytes held beside weights and gradient sums; replicas that are views of `weights` are not counted."""
        shared = {tensor.untyped_storage()._cdata for tensor in weights}  # by identity: some have no address
        senders: list[Mirror | ResidualEncoder] = [*self.mirrors.values(), *self.encoders.values()]
        held = [tensor for sender in senders for tensor in sender.tensors()]
        held += [value for replica in self.replicas.values() for value in replica.values]
        return sum(tensor.nbytes for tensor in held if tensor.untyped_storage()._cdata not in shared)
