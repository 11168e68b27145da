# SPDX-License-Identifier: Apache-2.0
"""Which codecs a level has, how the slots of one layer or buffer travel encoded, and what that came to."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from ds_hybridep.codecs import Codec, PatchCodec
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


@dataclass
class CodecCounters:
    """What the codecs of one layer did on this rank under one plan, as sums that can be added over ranks.

    Bytes count encoded messages as they were sent, fp32 bytes what these hold.  Seconds are the host's: with a device,
    for which the host only queues work, they cover queueing and waiting.  Squares are of what is there now; whoever
    reports fills them in.
    """

    weight_bytes: float = 0.0
    weight_fp32_bytes: float = 0.0
    gradient_bytes: float = 0.0
    gradient_fp32_bytes: float = 0.0
    encode_s: float = 0.0
    decode_s: float = 0.0
    exposed_s: float = 0.0
    squared_error: float = 0.0  # of mirrors against weights
    squared_weight: float = 0.0  # of those weights
    squared_residual: float = 0.0  # of gradients not delivered yet

    def count(self, kind: Literal["weight", "gradient"], num_bytes: int, fp32_bytes: int) -> None:
        """Count one message that is sent."""
        if kind == "weight":
            self.weight_bytes += num_bytes
            self.weight_fp32_bytes += fp32_bytes
        else:
            self.gradient_bytes += num_bytes
            self.gradient_fp32_bytes += fp32_bytes

    @contextmanager
    def timing(self, name: Literal["encode_s", "decode_s", "exposed_s"]) -> Iterator[None]:
        """Count the seconds inside."""
        begin_s = time.perf_counter()
        yield
        setattr(self, name, getattr(self, name) + time.perf_counter() - begin_s)

    def record(self, num_ranks: int = 1) -> dict[str, float]:
        """Return a record for `ds_hybridep.stats` and reports, of one rank or of `num_ranks` with mean seconds.

        weight_ratio, gradient_ratio: fp32 bytes of the messages' content over their bytes; 0 if nothing was sent.
        weight_error: relative L2 distance of replicas from their weights, as the owner's mirrors show it.
        residual_norm: L2 norm of the gradients that were not delivered yet.
        exposed_s: seconds in which this layer's computation waited for weights or gradients, decoding included.
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
        return self.feedback.codecs[level] is not None and bool(self.parts[slot])

    def layout(self, slot: SlotKey, level: int) -> MessageLayout:
        """Return the layout of a slot's messages over a level that encodes it."""
        if (level, slot) not in self._layouts:
            codec = self.feedback.codecs[level]
            assert codec is not None, f"slot {slot} goes as it is over level {level}"
            self._layouts[level, slot] = MessageLayout(codec, self.parts[slot])
        return self._layouts[level, slot]

    def make_residuals(self, slot: SlotKey, level: int) -> None:
        """Make now what is kept of a slot's gradients over a level; otherwise their first message does."""
        for part in self.parts[slot] if self.encodes(slot, level) else ():
            self.feedback.senders[level].prepare(part)

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

    def add(self, slot: SlotKey, level: int, message: Tensor, *, sender: int, sums: Sequence[Tensor]) -> None:
        """Add what a message from the rank `sender` holds to a slot's sums (fp32 [e, *shape] for each part).

        Raises PacketError, and changes nothing, if it is not the sender's next message.
        """
        self.feedback.receiver(level, sender).add(self.layout(slot, level), message, sums, self.loss_scale())
