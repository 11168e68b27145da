# SPDX-License-Identifier: Apache-2.0
"""The messages that carry packets of fixed size.

A message holds one packet for each part of a slot, and e packets for a part of e tensors, for example e experts:

    [part 0, expert 0 | part 0, expert 1 | ... | padding | part 1, expert 0 | ...]

Parts of one shape are encoded and decoded together, in a *batch*: many small matrices cost about as much as one.
Packets, values and states are those of one part after the other, up to the rounding of an encoder.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ds_hybridep.codecs import Codec, CodecState
from ds_hybridep.geometry.packets import ALIGNMENT_BYTES
from ds_hybridep.geometry.slots import Span, shapes_of

BLOCK_ELEMENTS = 2**20  # converted at a time, because a copy of all may be too large
MOST_ELEMENTS = 2**21  # of a batch: larger ones need memory, and are no faster

# A patch can say how values of these types change.  Sums of such values are added up in fp32.
NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class PacketPart:
    """A matrix, or a stack of e matrices, or a vector, in a message: one packet for each matrix.

    spans: what it holds, by names that are the same in every run of the program; several, one after the other, only
        for a vector of dense parameters.
    dtype: of the weights or gradients before they are encoded.
    """

    shape: torch.Size
    num_experts: int
    spans: tuple[Span, ...]
    dtype: torch.dtype = torch.float32

    @cached_property
    def rows(self) -> int:
        """Rows as a codec sees them: 1 for vectors and scalars."""
        return self.shape[0] if len(self.shape) > 1 else 1

    @cached_property
    def cols(self) -> int:
        return math.prod(self.shape) // max(self.rows, 1)

    @property
    def matrices(self) -> tuple[int, int, int]:
        """[e, rows, cols], as a codec sees it."""
        return self.num_experts, self.rows, self.cols

    @property
    def fp32_bytes(self) -> int:
        return 4 * math.prod(self.matrices)

    def as_matrices(self, tensor: Tensor) -> Tensor:
        """Turn [e, *shape] into [e, rows, cols] fp32, as a codec wants it."""
        return tensor.float().reshape(self.matrices)


@dataclass(frozen=True)
class MessageLayout:
    """The packets of one slot, for one codec: where they lie in a message, and which of them form a batch.

    A batch is a list of places in `parts`.  Whoever keeps something of each part encodes or decodes batch by batch, so
    that no more than one batch of it is fp32 on the device.
    """

    codec: Codec
    parts: tuple[PacketPart, ...]

    @property
    def num_bytes(self) -> int:
        """The length of a message."""
        return self._places[0]

    @property
    def fp32_bytes(self) -> int:
        """The fp32 bytes of what a message stands for."""
        return sum(part.fp32_bytes for part in self.parts)

    def new_message(self, device: torch.device) -> Tensor:
        """Return uint8 memory for a message to send."""
        return torch.zeros(self.num_bytes, dtype=torch.uint8, device=device)  # nobody gets to see what was there

    def room(self, device: torch.device) -> Tensor:
        """Return uint8 memory for a message to receive."""
        return torch.empty(self.num_bytes, dtype=torch.uint8, device=device)

    def packets(self, message: Tensor, batch: Iterable[int]) -> list[Tensor]:
        """Return views of a message, [e, packet_bytes] uint8 for each part of a batch."""
        offset, places = message.storage_offset(), self._places[1]
        return [
            message.as_strided((num_experts, num_bytes), (num_bytes, 1), offset + start)
            for num_experts, num_bytes, start in (places[at] for at in batch)
        ]

    def batches_to_encode(self, states: Sequence[CodecState]) -> list[list[int]]:
        """Return the batches of parts of which the encoders, whose states these are, have made as many steps."""
        return batches([part.matrices for part in self.parts], [state.step for state in states])

    @cached_property
    def batches(self) -> list[list[int]]:
        """All batches to decode."""
        return batches([part.matrices for part in self.parts])

    def decode_add(self, message: Tensor, sums: Sequence[Tensor], factor: float = 1.0) -> None:
        """Decode a message, and add what it holds, times `factor`, to `sums` ([e, *shape] fp32 for each part)."""
        matrices = [total.view(part.matrices) for part, total in zip(self.parts, sums, strict=True)]
        for batch in self.batches:
            self.codec.decode_add_batch(self.packets(message, batch), [matrices[at] for at in batch], factor)

    @cached_property
    def _places(self) -> tuple[int, list[tuple[int, int, int]]]:
        """A message's length, and for each part (packets, bytes of one packet, aligned start)."""
        places, start = [], 0
        for part in self.parts:
            num_bytes = self.codec.packet_bytes(part.rows, part.cols)
            places.append((part.num_experts, num_bytes, start))
            start += math.ceil(part.num_experts * num_bytes / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        return start, places


# -- batches ------------------------------------------------------------------------------------------------------


def batches(tensors: Sequence[tuple[int, int, int]], steps: Sequence[int] | None = None) -> list[list[int]]:
    """Return the places of tensors [n, rows, cols] that go together, in the order of the first of each.

    steps: that the encoder of each has made, which must be equal.
    """
    found: list[list[int]] = []
    open_batches: dict[tuple[int, int, int], tuple[list[int], int]] = {}
    for place, (n, rows, cols) in enumerate(tensors):
        key = rows, cols, 0 if steps is None else steps[place]
        batch, held = open_batches.get(key, ([], MOST_ELEMENTS))
        if held + n * rows * cols > MOST_ELEMENTS:
            batch, held = [], 0
            found.append(batch)
        batch.append(place)
        open_batches[key] = batch, held + n * rows * cols
    return found


# -- parts and tensors --------------------------------------------------------------------------------------------


def packet_parts(spans: Iterable[Span], dtype: torch.dtype = torch.float32) -> tuple[PacketPart, ...]:
    """Return the parts of a slot's message, in the order of its elements; neighbouring vectors form one part.

    Whole rows of a span's tensor form a matrix, and whole matrices a stack.  Rows that it has in part are vectors, and
    so are very small matrices (`geometry.slots.shapes_of`).
    """
    parts: list[PacketPart] = []
    for span in spans:
        start = span.start
        for shape in shapes_of(span.shape, span.start, span.num_elements):
            num_elements = math.prod(shape)
            spans_of: tuple[Span, ...] = (Span(span.name, span.shape, start, num_elements),)
            start += num_elements
            if len(shape) == 1 and parts and len(parts[-1].shape) == 1:
                before = parts.pop()
                shape, spans_of = (before.shape.numel() + num_elements,), before.spans + spans_of
            num_experts, *matrix = shape if len(shape) == 3 else (1, *shape)
            parts.append(PacketPart(torch.Size(matrix), num_experts, spans_of, dtype))
    return tuple(parts)


def split(flat: Tensor, parts: Sequence[PacketPart]) -> list[Tensor]:
    """Return views [e, *shape] of a flat slot, one for each part."""
    sizes = [math.prod(part.matrices) for part in parts]
    pieces = zip(flat.split(sizes) if parts else (), parts, strict=True)
    return [piece.view(part.num_experts, *part.shape) for piece, part in pieces]


def squared_norm(values: Tensor) -> float:
    """Return the sum of squares in fp64, without a copy of all values."""
    flat = values.reshape(-1)
    return sum(float(block.double().square().sum()) for block in flat.split(BLOCK_ELEMENTS))


def copy_to(places: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for place, value in zip(places, values, strict=True):
        place.copy_(value)


def load_states(states: Sequence[CodecState], saved: Sequence[dict[str, Any]]) -> None:
    for state, other in zip(states, saved, strict=True):
        state.load_state_dict(other)
