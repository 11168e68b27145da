# SPDX-License-Identifier: Apache-2.0
"""What every codec can do.

A codec works on n tensors of one shape at a time (the same weight of n experts), [n, rows, cols] fp32; a vector is
[n, 1, cols].  Encoding gives [n, packet_bytes] uint8, one packet for each tensor.

Two promises carry the rest:

- What a packet decodes to is a fixed sequence of fp32 operations on its bytes, each rounded by itself.  It depends on
  nothing else: not on n, the number of threads, alignment, or whether compiled kernels are at hand.
- `decode_add` adds that value with one rounding, and `encode_update` does the same to the mirror.  So a replica that
  applies every packet once and in order equals its owner's mirror bit for bit.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor

from ds_hybridep.codecs.packet import (
    HEADER_BYTES,
    SEQUENCE_MODULUS,
    check_headers,
    non_finite,
    stamp_of,
    start_of,
    write_headers,
)
from ds_hybridep.errors import PacketError
from ds_hybridep.kernels import CompiledCodecs, Mode, Source, load_codec_kernels


@dataclass
class CodecState:
    """What an encoder remembers between steps.  Equal states and inputs give equal packets.

    step: packets encoded so far; the sequence number of the next one.
    tensors: for example the factors that the next step starts from; the experts are the first dimension.
    """

    step: int = 0
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def all_tensors(self) -> list[Tensor]:
        """What takes memory."""
        return list(self.tensors.values())

    def state_dict(self) -> dict[str, Any]:
        """Copy as plain dicts, ints and tensors, for a checkpoint or for a step that may be undone."""
        return {"step": self.step, "tensors": {name: tensor.clone() for name, tensor in self.tensors.items()}}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Become what `saved` was.

        Raises:
            PacketError: `saved` is of a codec with other settings or of another shape; nothing was changed.
        """
        mine, other = _shapes(self.tensors), _shapes(saved["tensors"])
        if mine != other:
            raise PacketError(f"codec state is {other}, wanted {mine}; load it with the settings that saved it")
        self.step = saved["step"]
        for name, tensor in saved["tensors"].items():
            self.tensors[name].copy_(tensor)


def _shapes(tensors: dict[str, Tensor]) -> dict[str, list[int]]:
    return {name: list(tensor.shape) for name, tensor in tensors.items()}


@dataclass(frozen=True, kw_only=True)
class Codec(ABC):
    """Settings of one way to encode, and the encoding itself.  Frozen: what changes is in a CodecState.

    Subclasses say how long a payload is, and encode and decode payloads; headers, checks, inf and nan are done here.
    `kernels` chooses the implementation; all give the same bytes and values (encoding of low rank apart, which may
    round differently).
    """

    kernels: Mode = field(default="auto", compare=False, repr=False)
    # By shape and codec of the step.
    _layouts: dict[tuple[int, int, int], "_Layout"] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    codec_id: ClassVar[int]
    name: ClassVar[str]

    # ---- what a codec is asked ----

    def packet_bytes(self, rows: int, cols: int, *, step: int | None = None) -> int:
        """Bytes of one packet at encoder step `step`, exact and known before encoding.

        Without `step` the largest over all steps, for buffers.  Only a codec with `first_steps` depends on the step.
        """
        codecs = self.stages if step is None else (self.at(step),)
        return max(self._layout(rows, cols, codec).num_bytes for codec in codecs)

    def ratio(self, rows: int, cols: int, dtype: torch.dtype = torch.float32) -> float:
        """Bytes of [rows, cols] in `dtype` over those of its packet, headers included, after the first steps."""
        return rows * cols * dtype.itemsize / self._layout(rows, cols, self.stages[-1]).num_bytes

    @property
    def stages(self) -> tuple["Codec", ...]:
        """The codecs of the first steps and of all later ones; one where no step differs."""
        return (self,)

    def at(self, step: int) -> "Codec":
        """The codec of encoder step `step`."""
        return self

    def resolve(self, rows: int, cols: int) -> "Codec":
        """The codec that really encodes this shape: this one, or the one that it leaves small tensors to."""
        return self

    def new_state(self, n: int, rows: int, cols: int, *, device: torch.device | str = "cpu") -> CodecState:
        """The state of an encoder of [n, rows, cols] that has encoded nothing yet."""
        tensors: dict[str, Tensor] = {}
        for codec in self.stages:
            tensors |= codec.resolve(rows, cols).initial_tensors(n, rows, cols, torch.device(device))
        return CodecState(tensors=tensors)

    def encode(
        self, x: Tensor, state: CodecState, *, out: Tensor | None = None, sequence: int | None = None
    ) -> Tensor:
        """Packets [n, packet_bytes] uint8 of x [n, rows, cols] fp32; `state` advances by one step.

        A tensor with inf or nan gives a flagged packet, which decodes to nan throughout, and leaves its part of the
        state alone.

        out: memory for the packets. sequence: goes into the header instead of the state's step.
        """
        return self._encode(Source.ENCODE, x, None, state, out, sequence)

    def decode(self, packets: Tensor, out: Tensor) -> Tensor:
        """Assign what packets [n, packet_bytes] hold to out [n, rows, cols] fp32; returns it.

        Raises:
            PacketError: the packets were made with other settings or for another shape.
        """
        codec, has_bad = self._open(packets, "out", out)
        if out.numel():
            codec.decode_payload(packets[:, HEADER_BYTES:], out)
        return _poison(packets, out) if has_bad else out

    def decode_add(self, packets: Tensor, into: Tensor) -> Tensor:
        """Add what packets [n, packet_bytes] hold to `into` [n, rows, cols] fp32; returns it.

        A flagged packet assigns nan.

        Raises:
            PacketError: as `decode`.
        """
        codec, has_bad = self._open(packets, "into", into)
        if into.numel():
            codec.decode_add_payload(packets[:, HEADER_BYTES:], into)
        return _poison(packets, into) if has_bad else into

    def encode_update(
        self,
        weights: Tensor,
        mirror: Tensor,
        state: CodecState,
        *,
        out: Tensor | None = None,
        sequence: int | None = None,
    ) -> Tensor:
        """Packets of weights - mirror, added to the mirror as every replica adds them.  All [n, rows, cols] fp32.

        What the packets leave out stays in weights - mirror and goes out later.
        """
        return self._encode(Source.UPDATE, weights, mirror, state, out, sequence)

    def encode_with_residual(
        self,
        x: Tensor,
        residual: Tensor,
        state: CodecState,
        *,
        out: Tensor | None = None,
        sequence: int | None = None,
    ) -> Tensor:
        """Packets of x + residual; `residual` becomes what they leave out.  All [n, rows, cols] fp32.

        The residual of a tensor with inf or nan stays as it was.
        """
        return self._encode(Source.RESIDUAL, x, residual, state, out, sequence)

    # ---- what a subclass says ----

    @abstractmethod
    def payload_bytes(self, rows: int, cols: int) -> int:
        """Bytes of one payload."""

    @abstractmethod
    def encode_payload(self, x: Tensor, state: CodecState, payload: Tensor, is_bad: Tensor) -> Tensor:
        """Write finite x [n, rows, cols] to payload [n, payload_bytes] and update `state` except where is_bad [n].

        Returns [n] bool: tensors that overflowed in the encoding.
        """

    @abstractmethod
    def decode_payload(self, payload: Tensor, out: Tensor) -> None:
        """Assign the values of payload [n, payload_bytes] to out [n, rows, cols]."""

    def decode_add_payload(self, payload: Tensor, into: Tensor) -> None:
        """Add the values of payload [n, payload_bytes] to into [n, rows, cols], one rounding each."""
        value = torch.empty_like(into)
        self.decode_payload(payload, value)
        into += value

    def encode_fused(
        self, source: Source, a: Tensor, other: Tensor | None, state: CodecState, payload: Tensor
    ) -> Tensor | None:
        """Encode and update `other` and `state` in one call of a compiled kernel, for codecs that have one.

        Returns [n] uint8, 1 for tensors that are not finite or overflowed, else 0; None: nothing was done, there is no
        such kernel.
        """
        return None

    def initial_tensors(self, n: int, rows: int, cols: int, device: torch.device) -> dict[str, Tensor]:
        """Tensors of the state before the first step."""
        return {}

    def header_number(self, rows: int, cols: int) -> int:
        """The codec's own number in the header."""
        return 0

    def settings(self) -> str:
        """Name and options in one form, for the stamp.  Options that are not in use are left out."""
        options = {item.name: getattr(self, item.name) for item in fields(self) if item.compare}
        parts = ", ".join(
            f"{name}={value.settings() if isinstance(value, Codec) else value!r}"
            for name, value in options.items()
            if value is not None
        )
        return f"{self.name}({parts})"

    # ---- one encoding ----

    def _encode(
        self,
        source: Source,
        a: Tensor,
        other: Tensor | None,
        state: CodecState,
        out: Tensor | None,
        sequence: int | None,
    ) -> Tensor:
        """Packets of what `source` says of a and other [n, rows, cols]; then other is updated."""
        n, rows, cols = require_tensors("x", a)
        if other is not None and require_tensors("mirror or residual", other) != (n, rows, cols):
            raise ValueError(f"mirror or residual: got shape {tuple(other.shape)}, wanted that of x, {tuple(a.shape)}")
        layout = self._layout(rows, cols, self.at(state.step))
        codec = layout.codec
        packets = codec._packets_for(a, layout.num_bytes, out)
        payload = packets[:, HEADER_BYTES:]
        if a.numel():
            is_bad = codec.encode_fused(source, a, other, state, payload)
        else:
            is_bad = a.new_zeros(n, dtype=torch.uint8)
        is_done = is_bad is not None
        if is_bad is None:
            x, is_bad = codec._prepare(source, a, other)
            is_bad = is_bad | codec.encode_payload(x, state, payload, is_bad)
        codec._write_headers(packets, layout, state.step if sequence is None else sequence, is_bad)
        state.step += 1
        if is_done or other is None:
            return packets
        # As decode_add and decode, without the checks of packets that come from elsewhere.
        if source == Source.UPDATE:
            codec.decode_add_payload(payload, other)
            _poison(packets, other)
        else:
            value = torch.empty_like(x)
            codec.decode_payload(payload, value)
            x = x - value
            # On an accelerator without a look, which would be a device-to-host sync.
            keeps = a.device.type != "cpu" or bool(is_bad.any())
            other.copy_(torch.where(is_bad[:, None, None], other, x) if keeps else x)
        return packets

    def _prepare(self, source: Source, a: Tensor, other: Tensor | None) -> tuple[Tensor, Tensor]:
        """What `source` says of a and other, zeros in tensors that are not finite; and [n] bool, which those are."""
        kernels = self.compiled(a.device)
        if kernels is not None:
            return kernels.prepare(source, a, other)
        x = a if other is None else a - other if source == Source.UPDATE else a + other
        is_bad = ~x.isfinite().flatten(1).all(dim=1)
        return torch.where(is_bad[:, None, None], 0.0, x), is_bad

    def compiled(self, device: torch.device) -> CompiledCodecs | None:
        """Compiled kernels for tensors on `device`; None: use PyTorch."""
        return load_codec_kernels(self.kernels, device.type)

    # ---- checks ----

    def _packets_for(self, x: Tensor, num_bytes: int, out: Tensor | None) -> Tensor:
        wanted = (len(x), num_bytes)
        if out is None:
            return torch.empty(wanted, dtype=torch.uint8, device=x.device)
        if out.shape != wanted or out.dtype != torch.uint8 or not out.is_contiguous():
            raise ValueError(
                f"out: got {out.dtype} {tuple(out.shape)}, wanted contiguous torch.uint8 {wanted}; "
                "ask packet_bytes(rows, cols, step=state.step)"
            )
        return out

    def _open(self, packets: Tensor, name: str, target: Tensor) -> tuple["Codec", bool]:
        """The codec that made the packets of a tensor like `target`, and whether some may be flagged."""
        n, rows, cols = require_tensors(name, target)
        layout = self._layout(rows, cols, self.stages[-1])
        for codec in self.stages[:-1]:
            # Where both stages make packets of one length, they lay them out in one way.
            other = self._layout(rows, cols, codec)
            layout = other if packets.shape[-1] == other.num_bytes else layout
        if packets.shape != (n, layout.num_bytes) or packets.dtype != torch.uint8:
            raise PacketError(
                f"packets: got {packets.dtype} {tuple(packets.shape)}, wanted torch.uint8 {(n, layout.num_bytes)} for "
                f"{layout.codec.settings()} on [{n}, {rows}, {cols}]; encode and decode with equal settings and shapes"
            )
        kernels = self.compiled(target.device)
        if kernels is not None and packets.stride(1) == 1:
            flags = kernels.check_headers(packets, start=start_of(layout.codec.codec_id), stamp=layout.stamp)
            if flags >= 0:
                return layout.codec, flags > 0
        check_headers(packets, codec_id=layout.codec.codec_id, stamp=layout.stamp, what=layout.codec.settings())
        return layout.codec, True

    def _write_headers(self, packets: Tensor, layout: "_Layout", sequence: int, is_bad: Tensor) -> None:
        kernels = self.compiled(packets.device)
        words = {"number": layout.number, "sequence": sequence % SEQUENCE_MODULUS, "stamp": layout.stamp}
        if kernels is not None:
            kernels.write_headers(packets, start=start_of(self.codec_id), **words, is_bad=is_bad.to(torch.uint8))
        else:
            write_headers(packets, codec_id=self.codec_id, **words, is_bad=is_bad)

    def _layout(self, rows: int, cols: int, stage: "Codec") -> "_Layout":
        """What packets of this shape look like at one stage of this codec; worked out once."""
        key = (rows, cols, id(stage))
        found = self._layouts.get(key)
        if found is None:
            codec = stage.resolve(rows, cols)
            settings = (self if codec is stage else codec).settings()
            found = self._layouts[key] = _Layout(
                codec=codec,
                num_bytes=HEADER_BYTES + codec.payload_bytes(rows, cols),
                number=codec.header_number(rows, cols),
                stamp=stamp_of(settings, rows, cols),
            )
        return found


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """Packets of one codec and shape."""

    codec: Codec  # the one that really encodes this shape
    num_bytes: int
    number: int  # the codec's own in the header
    stamp: int


def require_tensors(name: str, tensor: Tensor) -> tuple[int, int, int]:
    """n, rows and cols of a contiguous fp32 tensor.  Raises ValueError or TypeError for any other."""
    if tensor.dim() != 3:
        raise ValueError(f"{name}: got shape {tuple(tensor.shape)}, wanted [n, rows, cols]; a vector is [n, 1, cols]")
    if tensor.dtype != torch.float32:
        raise TypeError(f"{name}: got {tensor.dtype}, wanted torch.float32; convert it with {name}.float()")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: strides {tensor.stride()} are not contiguous; pass {name}.contiguous()")
    n, rows, cols = tensor.shape
    return n, rows, cols


def round_up(num_bytes: int, multiple: int = 4) -> int:
    """The next multiple: payloads keep packets aligned to 4 bytes."""
    return math.ceil(num_bytes / multiple) * multiple


def _poison(packets: Tensor, values: Tensor) -> Tensor:
    """Assign nan where packets are flagged: the same nan everywhere, so that bits stay equal."""
    is_bad = non_finite(packets)
    if packets.device.type != "cpu" or bool(is_bad.any()):  # no device-to-host sync on an accelerator
        values.masked_fill_(is_bad[:, None, None], math.nan)
    return values
