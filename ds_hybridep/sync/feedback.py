# SPDX-License-Identifier: Apache-2.0
"""Expert weights and gradients in encoded form: mirrors, residuals, and the messages that carry packets.

A message holds one packet for each trainable parameter of each of the e experts of a slot:

    [parameter 0, expert 0 | parameter 0, expert 1 | ... | padding | parameter 1, expert 0 | ...]

Weights travel as deltas.  The owner keeps a mirror of what its replicas hold, encodes weight - mirror and adds to the
mirror what it has encoded; a replica adds the same.  What a codec left out is still in weight - mirror the next time.
Gradients travel as they are, plus what earlier packets of the same sender left out: its residual.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ds_hybridep.codecs import Codec, CodecState, PacketOrder

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
        """Columns as a codec sees them."""
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
        """Bytes of what a message stands for, in fp32."""
        return sum(4 * part.num_experts * part.rows * part.cols for part in self.parts)

    def packets(self, message: Tensor, step: int) -> list[Tensor]:
        """Views of a message, [e, packet_bytes] uint8 for each part."""
        offset = message.storage_offset()
        return [
            message.as_strided((num_experts, num_bytes), (num_bytes, 1), offset + start)
            for num_experts, num_bytes, start in self._lay_out(step)[1]
        ]

    def new_states(self, device: torch.device) -> list[CodecState]:
        """Encoder states that have encoded nothing yet."""
        return [self.codec.new_state(part.num_experts, part.rows, part.cols, device=device) for part in self.parts]

    def new_values(self, device: torch.device) -> list[Tensor]:
        """Zeros, [e, rows, cols] fp32 for each part."""
        return [torch.zeros(part.num_experts, part.rows, part.cols, device=device) for part in self.parts]

    def _lay_out(self, step: int) -> tuple[int, list[tuple[int, int, int]]]:
        """Length of a message; packets of each part, bytes of one, and where they begin, aligned.

        Worked out once for each codec.
        """
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


class Mirror:
    """The owner's side of one lossy codec: what its replicas hold, and the encoder of what they lack."""

    def __init__(self, layout: MessageLayout, device: torch.device) -> None:
        self.layout = layout
        self.values = layout.new_values(device)
        self.states = layout.new_states(device)

    @property
    def step(self) -> int:
        """Messages encoded so far."""
        return self.states[0].step

    def assign(self, weights: Sequence[Tensor]) -> None:
        """Hold what was shipped exactly, [e, *shape] for each part."""
        for part, value, weight in zip(self.layout.parts, self.values, weights, strict=True):
            value.copy_(part.as_matrices(weight))

    def encode(self, weights: Sequence[Tensor]) -> Tensor:
        """The message that brings every replica closer to `weights` ([e, *shape] for each part); uint8."""
        step = self.step
        message = torch.empty(self.layout.num_bytes(step), dtype=torch.uint8, device=self.values[0].device)
        packets = self.layout.packets(message, step)
        for part, weight, value, state, out in zip(
            self.layout.parts, weights, self.values, self.states, packets, strict=True
        ):
            self.layout.codec.encode_update(part.as_matrices(weight), value, state, out=out)
        return message

    def tensors(self) -> list[Tensor]:
        """All that it holds."""
        return [*self.values, *(t for state in self.states for t in state.all_tensors())]

    def squared_distance(self, weights: Sequence[Tensor]) -> tuple[float, float]:
        """Sums over all elements of (weight - mirror)^2 and of weight^2."""
        wide = [part.as_matrices(w).double() for part, w in zip(self.layout.parts, weights, strict=True)]
        apart = sum(float((w - v).square().sum()) for w, v in zip(wide, self.values, strict=True))
        return apart, sum(float(w.square().sum()) for w in wide)

    def state_dict(self) -> dict[str, Any]:
        return {"values": [v.clone() for v in self.values], "states": [state.state_dict() for state in self.states]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for value, other in zip(self.values, saved["values"], strict=True):
            value.copy_(other)
        for state, other in zip(self.states, saved["states"], strict=True):
            state.load_state_dict(other)


class Replica:
    """One slot's weights on a rank that does not own them, as its owner's mirror has them."""

    def __init__(self, layout: MessageLayout, values: Sequence[Tensor]) -> None:
        """values: [e, rows, cols] fp32 for each part; may be views of weights that are computed with."""
        self.layout = layout
        self.values = list(values)
        self.order = PacketOrder()

    @property
    def step(self) -> int:
        """The encoder step of the next message."""
        return self.order.expected

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
        packets = self.layout.packets(message, self.step)
        if self.order.accept(packets[0]):
            for part, value in zip(packets, self.values, strict=True):
                self.layout.codec.decode_add(part, value)


class ResidualEncoder:
    """Sender of one slot's gradients over one level.

    What a packet left out is added to the next gradient.  Changes are provisional until the optimizer step was done:
    `commit` keeps them, `restore` undoes them.
    """

    def __init__(self, layout: MessageLayout, device: torch.device) -> None:
        self.layout = layout
        self.residuals = layout.new_values(device)
        self.states = layout.new_states(device)
        # As they were after the last optimizer step, while a later message is provisional.
        self._saved_residuals = layout.new_values(device)
        self._saved_states: list[dict[str, Any]] | None = None

    def encode(self, gradients: Sequence[Tensor], scale: float) -> Tensor:
        """The message of gradients ([e, *shape] fp32 for each part), divided by the loss scale; uint8."""
        if self._saved_states is None:
            for saved, residual in zip(self._saved_residuals, self.residuals, strict=True):
                saved.copy_(residual)
            self._saved_states = [state.state_dict() for state in self.states]
        step = self.states[0].step
        message = torch.empty(self.layout.num_bytes(step), dtype=torch.uint8, device=self.residuals[0].device)
        packets = self.layout.packets(message, step)
        for part, gradient, residual, state, out in zip(
            self.layout.parts, gradients, self.residuals, self.states, packets, strict=True
        ):
            unscaled = part.as_matrices(gradient)
            unscaled = unscaled / scale if scale != 1.0 else unscaled
            self.layout.codec.encode_with_residual(unscaled, residual, state, out=out)
        return message

    def commit(self) -> None:
        """The optimizer step was done."""
        self._saved_states = None

    def restore(self) -> None:
        """The optimizer step was skipped, or the gradients were dropped."""
        if self._saved_states is not None:
            for residual, saved in zip(self.residuals, self._saved_residuals, strict=True):
                residual.copy_(saved)
            for state, saved_state in zip(self.states, self._saved_states, strict=True):
                state.load_state_dict(saved_state)
            self._saved_states = None

    def tensors(self) -> list[Tensor]:
        """All that it holds."""
        return [*self.residuals, *self._saved_residuals, *(t for state in self.states for t in state.all_tensors())]

    def squared_residual(self) -> float:
        """Sum of squares of what was not delivered yet."""
        return sum(float(residual.double().square().sum()) for residual in self.residuals)

    def state_dict(self) -> dict[str, Any]:
        """As of the last optimizer step."""
        is_provisional = self._saved_states is not None
        residuals = self._saved_residuals if is_provisional else self.residuals
        return {
            "residuals": [residual.clone() for residual in residuals],
            "states": self._saved_states if is_provisional else [state.state_dict() for state in self.states],
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        for residual, other in zip(self.residuals, saved["residuals"], strict=True):
            residual.copy_(other)
        for state, other_state in zip(self.states, saved["states"], strict=True):
            state.load_state_dict(other_state)


class GradientDecoder:
    """Receiver of one sender's messages for one slot."""

    def __init__(self, layout: MessageLayout) -> None:
        self.layout = layout
        self._order = PacketOrder()
        self._saved: int | None = None

    @property
    def step(self) -> int:
        """The encoder step of the next message."""
        return self._order.expected

    @property
    def committed_step(self) -> int:
        """The encoder step of the next message as of the last optimizer step."""
        return self._order.expected if self._saved is None else self._saved

    def expect(self, step: int) -> None:
        """Go on with the sender's message of this step."""
        self._order.expected = step

    def add(self, message: Tensor, sums: Sequence[Tensor], scale: float) -> None:
        """Add what a message holds, times the loss scale, to `sums` ([e, *shape] fp32 for each part)."""
        if self._saved is None:
            self._saved = self._order.expected
        packets = self.layout.packets(message, self.step)
        if not self._order.accept(packets[0]):
            return
        for part, packet, total in zip(self.layout.parts, packets, sums, strict=True):
            matrices = total.view(part.num_experts, part.rows, part.cols)
            if scale == 1.0:
                self.layout.codec.decode_add(packet, matrices)
            else:
                matrices.add_(self.layout.codec.decode(packet, torch.empty_like(matrices)), alpha=scale)

    def commit(self) -> None:
        """The optimizer step was done."""
        self._saved = None

    def restore(self) -> None:
        """The sender goes back to where it was."""
        if self._saved is not None:
            self._order.expected, self._saved = self._saved, None


@dataclass
class Undelivered:
    """Gradients of the owned experts that earlier senders, now gone, had kept back; unscaled fp32 [e, *shape]."""

    parts: list[Tensor]
    is_added: bool = False  # to the gradients of the step that is under way


@dataclass
class CodecCounters:
    """What codecs of one layer did on this rank under one plan; sums, so that those of all ranks add up.

    Bytes are of encoded messages as they were sent, beside the fp32 bytes of what these held.  Seconds are the host's:
    on a device, where work is only queued, they say what queueing takes, and what was waited for.
    """

    weight_bytes: float = 0.0
    weight_fp32_bytes: float = 0.0
    gradient_bytes: float = 0.0
    gradient_fp32_bytes: float = 0.0
    encode_s: float = 0.0
    decode_s: float = 0.0
    exposed_s: float = 0.0

    def count(self, kind: Literal["weight", "gradient"], message: Tensor, layout: MessageLayout) -> None:
        """One message is sent."""
        for name, num_bytes in ((f"{kind}_bytes", message.nbytes), (f"{kind}_fp32_bytes", layout.fp32_bytes)):
            setattr(self, name, getattr(self, name) + num_bytes)

    @contextmanager
    def timing(self, name: Literal["encode_s", "decode_s", "exposed_s"]) -> Iterator[None]:
        """Count the seconds inside."""
        begin_s = time.perf_counter()
        yield
        setattr(self, name, getattr(self, name) + time.perf_counter() - begin_s)


@dataclass
class CodecSums(CodecCounters):
    """The counters, and sums of squares as they are now."""

    squared_error: float = 0.0  # of mirrors against weights
    squared_weight: float = 0.0  # of those weights
    squared_residual: float = 0.0  # of gradients not delivered yet

    def record(self, num_ranks: int = 1) -> dict[str, float]:
        """For `ds_hybridep.stats` and reports, of one rank or of sums over `num_ranks`; seconds are means over these.

        weight_bytes, gradient_bytes: encoded bytes sent under this plan.
        weight_ratio, gradient_ratio: fp32 bytes of what they held over those; 0 where nothing was sent.
        weight_error: relative L2 distance of the replicas from the weights that they stand for, seen by their owner.
        residual_norm: L2 norm of the gradients that were not delivered yet.
        encode_s, decode_s, exposed_s: seconds under this plan; exposed are those in which this layer's computation
            waited for weights or gradients, decoding meanwhile included.
        """
        return {
            "weight_bytes": self.weight_bytes,
            "weight_ratio": self.weight_fp32_bytes / self.weight_bytes if self.weight_bytes else 0.0,
            "weight_error": (self.squared_error / self.squared_weight) ** 0.5 if self.squared_weight else 0.0,
            "gradient_bytes": self.gradient_bytes,
            "gradient_ratio": self.gradient_fp32_bytes / self.gradient_bytes if self.gradient_bytes else 0.0,
            "residual_norm": self.squared_residual**0.5,
            "encode_s": self.encode_s / num_ranks,
            "decode_s": self.decode_s / num_ranks,
            "exposed_s": self.exposed_s / num_ranks,
        }


@dataclass
class LossyState:
    """All that lossy codecs keep for one layer on this rank; empty where everything is exact."""

    mirrors: dict[str, Mirror] = field(default_factory=dict)  # by codec settings
    replicas: dict[int, Replica] = field(default_factory=dict)  # by slot
    encoders: dict[tuple[int, int], ResidualEncoder] = field(default_factory=dict)  # by (level, slot)
    decoders: dict[tuple[int, int], GradientDecoder] = field(default_factory=dict)  # by (sender, slot)
    undelivered: "Undelivered | None" = None
    counters: "CodecCounters" = field(default_factory=lambda: CodecCounters())

    def encoder(self, level: int, slot: int, layout: MessageLayout, device: torch.device) -> ResidualEncoder:
        """The sender of a slot's gradients over a level."""
        if (level, slot) not in self.encoders:
            self.encoders[level, slot] = ResidualEncoder(layout, device)
        return self.encoders[level, slot]

    def decoder(self, sender: int, slot: int, layout: MessageLayout) -> GradientDecoder:
        """The receiver of a rank's messages for a slot."""
        if (sender, slot) not in self.decoders:
            self.decoders[sender, slot] = GradientDecoder(layout)
        return self.decoders[sender, slot]

    def commit(self) -> None:
        """The optimizer step was done."""
        for one in (*self.encoders.values(), *self.decoders.values()):
            one.commit()
        if self.undelivered is not None and self.undelivered.is_added:
            self.undelivered = None

    def restore(self) -> None:
        """The optimizer step was skipped, or the gradients were dropped."""
        for one in (*self.encoders.values(), *self.decoders.values()):
            one.restore()
        if self.undelivered is not None:
            self.undelivered.is_added = False

    def sums(self, weights: Sequence[Tensor]) -> CodecSums:
        """What codecs did, for owned weights [e, *shape] of each part; all zero where nothing is lossy."""
        distances = [mirror.squared_distance(weights) for mirror in self.mirrors.values()]
        return CodecSums(
            **asdict(self.counters),
            squared_error=sum(apart for apart, _ in distances),
            squared_weight=sum(whole for _, whole in distances),
            squared_residual=sum(encoder.squared_residual() for encoder in self.encoders.values()),
        )

    def num_bytes(self, weights: Sequence[Tensor]) -> int:
        """Bytes held beside weights and sums of the store; replicas that are views of `weights` are not counted."""
        shared = {tensor.untyped_storage()._cdata for tensor in weights}  # by identity: some have no address
        held = [tensor for mirror in self.mirrors.values() for tensor in mirror.tensors()]
        held += [
            value
            for replica in self.replicas.values()
            for value in replica.values
            if value.untyped_storage()._cdata not in shared
        ]
        held += [tensor for encoder in self.encoders.values() for tensor in encoder.tensors()]
        held += self.undelivered.parts if self.undelivered is not None else []
        return sum(tensor.nbytes for tensor in held)
