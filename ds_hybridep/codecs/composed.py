# SPDX-License-Identifier: Apache-2.0
"""Codecs made of codecs: one after another on what is left, and one for the first steps, then another."""

import itertools
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from ds_hybridep.codecs.interface import Codec, CodecState
from ds_hybridep.codecs.packet import HEADER_BYTES, stamp_in, stamp_of
from ds_hybridep.kernels import Source


@dataclass(frozen=True, kw_only=True)
class Sum(Codec):
    """Each part encodes what the parts before it leave; the value is the sum of theirs, in order."""

    codec_id: ClassVar[int] = 4
    name: ClassVar[str] = "sum"

    parts: tuple[Codec, ...]
    # By shape: each part as it is resolved, and where its share of a payload begins and ends.
    _places: dict[tuple[int, int], list[tuple[Codec, int, int]]] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    def resolve(self, rows: int, cols: int) -> Codec:
        """See `Codec.resolve`.  A shape that the first part leaves to its fallback is left to that alone."""
        first = self.parts[0].resolve(rows, cols)
        return self if first is self.parts[0] else first

    def payload_bytes(self, rows: int, cols: int) -> int:
        """See `Codec.payload_bytes`."""
        return sum(part.resolve(rows, cols).payload_bytes(rows, cols) for part in self.parts)

    def initial_state(self, n: int, rows: int, cols: int, device: torch.device) -> CodecState:
        """See `Codec.initial_state`."""
        return CodecState(parts=[part.new_state(n, rows, cols, device=device) for part in self.parts])

    def encode_fused(
        self, source: Source, a: Tensor, other: Tensor | None, state: CodecState, payload: Tensor
    ) -> Tensor | None:
        """See `Codec.encode_fused`.  Where all parts have such a kernel: one call each."""
        slices = self._slices(payload, a.shape[1], a.shape[2])
        if self.compiled(a.device) is None or not all(part.is_fused for part, _ in slices):
            return None
        left = a.clone() if other is None else a - other if source == Source.UPDATE else a + other
        nothing, is_bad = torch.zeros_like(a), a.new_zeros(len(a), dtype=torch.uint8)
        for (part, part_payload), part_state in zip(slices, state.parts, strict=True):
            # `left` is to each part what a residual is to a codec.
            flags = part.encode_fused(Source.RESIDUAL, nothing, left, part_state, part_payload)
            assert flags is not None, f"{part.name} has no kernel but says so"
            is_bad |= flags
            part_state.step += 1
        if other is None:
            return is_bad
        # On an accelerator without a look, which would be a device-to-host sync.
        keep = is_bad.bool()[:, None, None] if a.device.type != "cpu" or bool(is_bad.any()) else None
        if source == Source.UPDATE:
            self.decode_add_payload(payload, other)
            if keep is not None:
                other.masked_fill_(keep, torch.nan)
        else:
            self.decode_payload(payload, left)
            rest = (a + other).sub_(left)
            other.copy_(rest if keep is None else torch.where(keep, other, rest))
        return is_bad

    def encode_payload(self, x: Tensor, state: CodecState, payload: Tensor, is_bad: Tensor) -> Tensor:
        """See `Codec.encode_payload`."""
        is_overflow = torch.zeros_like(is_bad)
        left = x.clone()
        value = torch.empty_like(x)
        slices = self._slices(payload, x.shape[1], x.shape[2])
        for (part, part_payload), part_state in zip(slices, state.parts, strict=True):
            is_overflow = is_overflow | part.encode_payload(left, part_state, part_payload, is_bad)
            part_state.step += 1
            part.decode_payload(part_payload, value)
            left -= value
        return is_overflow

    def decode_payload(self, payload: Tensor, out: Tensor) -> None:
        """See `Codec.decode_payload`."""
        (first, first_payload), *others = self._slices(payload, out.shape[1], out.shape[2])
        first.decode_payload(first_payload, out)
        for part, part_payload in others:
            part.decode_add_payload(part_payload, out)

    def decode_add_payload(self, payload: Tensor, into: Tensor) -> None:
        """See `Codec.decode_add_payload`.  One rounding for each part."""
        for part, part_payload in self._slices(payload, into.shape[1], into.shape[2]):
            part.decode_add_payload(part_payload, into)

    def _slices(self, payload: Tensor, rows: int, cols: int) -> list[tuple[Codec, Tensor]]:
        """Each part as it is resolved for this shape, with its share of the payload."""
        found = self._places.get((rows, cols))
        if found is None:
            parts = [part.resolve(rows, cols) for part in self.parts]
            stops = list(itertools.accumulate(part.payload_bytes(rows, cols) for part in parts))
            found = self._places[rows, cols] = list(zip(parts, [0, *stops], stops, strict=False))
        return [(part, payload[:, start:stop]) for part, start, stop in found]


@dataclass(frozen=True, kw_only=True)
class WarmUp(Codec):
    """`first` for `steps` steps, then `then`: weights move fast at the start, and a mild codec keeps up.

    The length of a packet depends on the step, which sender and receiver both know.
    """

    codec_id: ClassVar[int] = 5
    name: ClassVar[str] = "warm_up"

    steps: int
    first: Codec
    then: Codec

    def at(self, step: int) -> Codec:
        """See `Codec.at`."""
        return self.first if step < self.steps else self.then

    def packet_bytes(self, rows: int, cols: int, *, step: int | None = None) -> int:
        """See `Codec.packet_bytes`."""
        if step is not None:
            return self.at(step).packet_bytes(rows, cols, step=step)
        return max(self.first.packet_bytes(rows, cols), self.then.packet_bytes(rows, cols))

    def new_state(self, n: int, rows: int, cols: int, *, device: torch.device | str = "cpu") -> CodecState:
        """See `Codec.new_state`."""
        return CodecState(parts=[codec.new_state(n, rows, cols, device=device) for codec in (self.first, self.then)])

    def _encode(
        self,
        source: Source,
        a: Tensor,
        other: Tensor | None,
        state: CodecState,
        out: Tensor | None,
        sequence: int | None,
    ) -> Tensor:
        """See `Codec._encode`."""
        part = state.parts[0 if state.step < self.steps else 1]
        sequence = state.step if sequence is None else sequence
        packets = self.at(state.step)._encode(source, a, other, part, out, sequence)
        state.step += 1
        return packets

    def decode(self, packets: Tensor, out: Tensor) -> Tensor:
        """See `Codec.decode`."""
        return self._maker(packets, out).decode(packets, out)

    def decode_add(self, packets: Tensor, into: Tensor) -> Tensor:
        """See `Codec.decode_add`."""
        return self._maker(packets, into).decode_add(packets, into)

    def _maker(self, packets: Tensor, target: Tensor) -> Codec:
        """The one of the two codecs that made the packets: told by their length, or else by their stamp."""
        rows, cols = target.shape[-2:]
        first, then = (codec.resolve(rows, cols) for codec in (self.first, self.then))
        if first.packet_bytes(rows, cols) == then.packet_bytes(rows, cols) and len(packets):
            is_first = stamp_in(packets) == stamp_of(first.settings(), rows, cols)
        else:
            is_first = packets.shape[-1] == first.packet_bytes(rows, cols)
        return self.first if is_first else self.then

    def payload_bytes(self, rows: int, cols: int) -> int:
        """See `Codec.payload_bytes`.  The largest."""
        return self.packet_bytes(rows, cols) - HEADER_BYTES

    def encode_payload(self, x: Tensor, state: CodecState, payload: Tensor, is_bad: Tensor) -> Tensor:
        """Not asked for: packets are made by the codec of the step."""
        raise AssertionError("a warm-up stands outermost; make_codec refuses it inside other codecs")

    def decode_payload(self, payload: Tensor, out: Tensor) -> None:
        """Not asked for, as above."""
        raise AssertionError("a warm-up stands outermost; make_codec refuses it inside other codecs")
