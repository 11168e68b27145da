# SPDX-License-Identifier: Apache-2.0
"""Which codecs a level has, and how the slots of one layer or buffer travel encoded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from ds_hybridep.codecs import Codec, PatchCodec
from ds_hybridep.sync.counters import CodecSums
from ds_hybridep.sync.error_feedback import ErrorFeedback
from ds_hybridep.sync.messages import MessageLayout, PacketPart
from ds_hybridep.sync.stages import SlotKey


def no_master(_: nn.Parameter) -> Tensor | None:
    return None


def no_scale() -> float:
    return 1.0


@dataclass(frozen=True)
class Encoding:
    """How weights and gradients travel: codecs by level index, None for a level where they go as they are.

    master_of: returns the optimizer's fp32 copy of a parameter, flat or shaped; None if this rank lacks a part of it.
    is_on_host: True if what codecs keep between steps is in host memory.
    sum_dtype: in which sums of gradients travel where no codec encodes them; None: that of the parameter.
    """

    weight_codecs: tuple[Codec | PatchCodec | None, ...]
    gradient_codecs: tuple[Codec | None, ...]
    master_of: Callable[[nn.Parameter], Tensor | None] = field(default=no_master, compare=False)
    loss_scale: Callable[[], float] = field(default=no_scale, compare=False)
    is_on_host: bool = False
    sum_dtype: torch.dtype | None = None


class SlotCodecs:
    """How the slots of one layer or buffer travel encoded.

    Args:
        parts: by slot, the parts of its messages.
        feedback: who encodes and decodes gradients; other slots may share it.
        counters: of these slots and others.
        kind: what a gather of these slots brings, for the counters.
    """

    def __init__(
        self,
        parts: Mapping[SlotKey, tuple[PacketPart, ...]],
        feedback: ErrorFeedback,
        counters: CodecSums | None = None,
        kind: Literal["weight", "gradient"] = "gradient",
    ) -> None:
        self.parts, self.feedback, self.kind = parts, feedback, kind
        self.counters = counters or CodecSums()
        self._layouts: dict[tuple[int, SlotKey], MessageLayout] = {}  # of gradients, by level and slot

    def replace_parts(self, parts: Mapping[SlotKey, tuple[PacketPart, ...]]) -> None:
        """Let messages have other parts from now on: other experts are hot."""
        self.parts, self._layouts = parts, {}

    def fp32_bytes(self, slot: SlotKey) -> int:
        """Return the fp32 bytes of what a slot's messages stand for."""
        return sum(part.fp32_bytes for part in self.parts[slot])

    def layout(self, level: int, slot: SlotKey) -> MessageLayout | None:
        """Return the layout of a slot's messages of gradients over a level; None if they go as they are."""
        codec = self.feedback.codecs[level]
        if codec is None or not self.parts[slot]:
            return None
        if (level, slot) not in self._layouts:
            self._layouts[level, slot] = MessageLayout(codec, self.parts[slot])
        return self._layouts[level, slot]
