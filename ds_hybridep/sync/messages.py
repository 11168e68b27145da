# SPDX-License-Identifier: Apache-2.0
"""The messages that carry packets of fixed size.

A message holds one packet for each part of a slot, and e packets for a part of e tensors, for example e experts:

    [part 0, expert 0 | part 0, expert 1 | ... | padding | part 1, expert 0 | ...]
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ds_hybridep.codecs import Codec, CodecState
from ds_hybridep.sync.home import Home

ALIGNMENT_BYTES = 16
BLOCK_ELEMENTS = 2**20  # converted at a time, because a copy of all may be too large


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

    @property
    def fp32_bytes(self) -> int:
        return 4 * self.num_experts * self.rows * self.cols

    def as_matrices(self, tensor: Tensor) -> Tensor:
        """Turn [e, *shape] into [e, rows, cols] fp32, as a codec wants it."""
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
        """Return the length in bytes of the message of encoder step `step`."""
        return self._lay_out(step)[0]

    @property
    def fp32_bytes(self) -> int:
        """The fp32 bytes of what a message stands for."""
        return sum(part.fp32_bytes for part in self.parts)

    def new_message(self, step: int, device: torch.device) -> tuple[Tensor, list[Tensor]]:
        """Return uint8 memory for the message of encoder step `step`, and the message's packets."""
        message = torch.empty(self.num_bytes(step), dtype=torch.uint8, device=device)
        return message, self.packets(message, step)

    def packets(self, message: Tensor, step: int) -> list[Tensor]:
        """Return views of a message, [e, packet_bytes] uint8 for each part."""
        offset = message.storage_offset()
        return [
            message.as_strided((num_experts, num_bytes), (num_bytes, 1), offset + start)
            for num_experts, num_bytes, start in self._lay_out(step)[1]
        ]

    def new_states(self, device: torch.device) -> list[CodecState]:
        return [self.codec.new_state(part.num_experts, part.rows, part.cols, device=device) for part in self.parts]

    def new_values(self, home: Home, dtype: torch.dtype = torch.float32) -> list[Tensor]:
        """Return zeros, [e, rows, cols] for each part."""
        return [home.zeros(part.num_experts, part.rows, part.cols, dtype=dtype) for part in self.parts]

    def _lay_out(self, step: int) -> tuple[int, list[tuple[int, int, int]]]:
        """Return a message's length, and for each part (packets, bytes of one packet, aligned start)."""
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
