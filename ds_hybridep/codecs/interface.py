# SPDX-License-Identifier: Apache-2.0
"""What every codec can do.

A codec works on n tensors of one shape at a time (the same weight of n experts), [n, rows, cols] fp32; a vector is
[n, 1, cols].  Encoding gives [n, packet_bytes] uint8, one packet for each tensor.

The rest depends on two promises:

- A packet is decoded by a fixed sequence of fp32 operations on its bytes, each rounded by itself.  The value depends
  on nothing else: not on n, the number of threads, alignment, or whether there are compiled kernels.
- `decode_add` adds that value with one rounding, and `encode_update` does the same to the mirror.  So a replica that
  applies every packet once and in order equals its owner's mirror bit for bit.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from ds_hybridep.codecs.packet import (
    MAGIC,
    SEQUENCE_MODULUS,
    VERSION,
    check_headers,
    header_words,
    non_finite,
    stamp_of,
    write_headers,
)
from ds_hybridep.config_codecs import CodecConfig
from ds_hybridep.errors import PacketError
from ds_hybridep.geometry.packets import HEADER_BYTES, PacketSizes, packets_of
from ds_hybridep.kernels import CompiledCodecs, Mode, Source, load_codec_kernels, require_dense_rows


@dataclass
class CodecState:
    """What an encoder remembers between steps.  Equal states and inputs give equal packets."""

    step: int = 0  # packets encoded so far; the sequence number of the next one
    tensors: dict[str, Tensor] = field(default_factory=dict)  # the experts are the first dimension

    def copy(self) -> "CodecState":
        """Return a copy that the encoder does not change."""
        return CodecState(self.step, {name: tensor.clone() for name, tensor in self.tensors.items()})

    @classmethod
    def cat(cls, states: Sequence["CodecState"]) -> "CodecState":
        """Return the state of an encoder of all the tensors of several, which have made as many steps."""
        names = states[0].tensors
        return cls(states[0].step, {name: torch.cat([one.tensors[name] for one in states]) for name in names})

    def split_into(self, states: Sequence["CodecState"]) -> None:
        """Copy what has become of `cat` of these states into each of them."""
        for name, tensor in self.tensors.items():
            sizes = [len(one.tensors[name]) for one in states]
            for one, mine in zip(states, tensor.split(sizes), strict=True):
                one.tensors[name].copy_(mine)
        for one in states:
            one.step = self.step

    def state_dict(self) -> dict[str, Any]:
        """Return a copy as plain dicts, ints and tensors."""
        return {"step": self.step, "tensors": {name: tensor.clone() for name, tensor in self.tensors.items()}}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load a saved state.  PacketError, and no change, if it has other settings or shapes."""
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
    """Encodes by settings in `config`.  Frozen: what changes is in a CodecState.

    All `kernels` give the same bytes and values, except that low-rank encoding may round differently.
    """

    config: CodecConfig
    kernels: Mode = field(default="auto", compare=False, repr=False)
    _layouts: dict[tuple[int, int], "_Layout"] = field(default_factory=dict, init=False, compare=False, repr=False)

    codec_id: ClassVar[int]

    @cached_property
    def sizes(self) -> PacketSizes:
        """What says how long packets are."""
        return packets_of(self.config.model_dump())

    # ---- what a codec is asked ----

    def packet_bytes(self, rows: int, cols: int) -> int:
        """Return the bytes of one packet, header included."""
        return self._layout(rows, cols).num_bytes

    def resolve(self, rows: int, cols: int) -> "Codec":
        """Return the codec that really encodes this shape: this one, or its fallback for small tensors."""
        return self

    def new_state(self, n: int, rows: int, cols: int, *, device: torch.device | str = "cpu") -> CodecState:
        """Return the state of an encoder of [n, rows, cols] that has encoded nothing yet."""
        return CodecState(tensors=self.resolve(rows, cols).initial_tensors(n, rows, cols, torch.device(device)))

    def encode(self, x: Tensor, state: CodecState, *, out: Tensor | None = None) -> Tensor:
        """Return packets [n, packet_bytes] uint8 of x [n, rows, cols] fp32, in `out` if given.

        Advances `state` by one step.  A tensor with inf or nan keeps its part of the state and gives a flagged packet,
        which decodes to nan throughout.
        """
        return self._encode(Source.ENCODE, x, None, state, out=out)

    def decode(self, packets: Tensor, out: Tensor) -> Tensor:
        """Assign what packets [n, packet_bytes] hold to out [n, rows, cols] fp32; returns it.

        Raises PacketError for packets of other settings or of another shape.
        """
        return self._decode(packets, "out", out, is_add=False)

    def decode_add(self, packets: Tensor, into: Tensor) -> Tensor:
        """Like `decode`, but adds; a flagged packet assigns nan."""
        return self._decode(packets, "into", into, is_add=True)

    def encode_update(
        self, weights: Tensor, mirror: Tensor, state: CodecState, *, out: Tensor | None = None
    ) -> Tensor:
        """Encode weights - mirror, and add the packets to the mirror as replicas do.  All [n, rows, cols] fp32."""
        return self._encode(Source.UPDATE, weights, mirror, state, out=out)

    def encode_with_residual(
        self, x: Tensor, residual: Tensor, state: CodecState, *, out: Tensor | None = None
    ) -> Tensor:
        """Encode x + residual; the residual becomes what packets leave out.  Tensors with inf or nan keep theirs."""
        return self._encode(Source.RESIDUAL, x, residual, state, out=out)

    # ---- several tensors of the same rows and cols at once ----

    def encode_batch(
        self, source: Source, tensors: Sequence[Tensor], others: Sequence[Tensor], states: Sequence[CodecState],
        packets: Sequence[Tensor],
    ) -> None:  # fmt: skip
        """Encode tensors, each [n, rows, cols] with its n, to `packets`, each [n, packet_bytes] uint8.

        others: what `source` wants, mirrors or residuals.  They become what `encode_update` and `encode_with_residual`
            make of them, in place.
        states: of encoders that have made as many steps; each advances by one.
        """
        if len(tensors) == 1:
            self._encode(source, tensors[0], others[0], states[0], out=packets[0])
            return
        state, other = CodecState.cat(states), torch.cat(list(others))
        found = self._encode(source, torch.cat(list(tensors)), other, state, out=None)
        state.split_into(states)
        lengths = [len(one) for one in tensors]
        torch._foreach_copy_(list(others), list(other.split(lengths)))
        torch._foreach_copy_(list(packets), list(found.split(lengths)))

    def decode_add_batch(self, packets: Sequence[Tensor], sums: Sequence[Tensor], factor: float = 1.0) -> None:
        """Add what packets hold, times `factor`, to `sums`, each [n, rows, cols] with its n; as `decode_add` does."""
        if len(sums) == 1 and factor == 1.0:
            self.decode_add(packets[0], sums[0])
            return
        lengths, joined = [len(one) for one in sums], torch.cat(list(packets))
        if factor == 1.0:
            total = self.decode_add(joined, torch.cat(list(sums)))
            torch._foreach_copy_(list(sums), list(total.split(lengths)))
            return
        found = self.decode(joined, sums[0].new_empty(sum(lengths), *sums[0].shape[1:]))
        torch._foreach_add_(list(sums), list(found.split(lengths)), alpha=factor)

    # ---- what a subclass says ----

    @abstractmethod
    def encode_payload(
        self, x: Tensor, state: CodecState, payload: Tensor, is_bad: Tensor, *, gradient: Tensor | None
    ) -> Tensor:
        """Write finite x [n, rows, cols] to payload [n, payload_bytes], and update `state` except where is_bad [n].

        gradient: the gradient alone, if x is the gradient and its residual.

        Returns [n] bool: tensors that overflowed in the encoding.
        """

    @abstractmethod
    def decode_payload(self, payload: Tensor, out: Tensor, *, is_add: bool) -> None:
        """Assign or add, with one rounding each, the values of payload [n, payload_bytes] to out [n, rows, cols]."""

    def encode_fused(
        self, source: Source, a: Tensor, other: Tensor | None, state: CodecState, *, payload: Tensor
    ) -> Tensor | None:
        """Encode, and update `other` and `state`, in one call of a compiled kernel.

        Returns [n] uint8, 1 for tensors that are not finite or overflowed; None if there is no such kernel.
        """
        return None

    def initial_tensors(self, n: int, rows: int, cols: int, device: torch.device) -> dict[str, Tensor]:
        """Return the tensors of the state before the first step."""
        return {}

    def header_number(self, rows: int, cols: int) -> int:
        """Return the codec's own number in the header."""
        return 0

    def settings(self) -> str:
        """Return name and options as text for the stamp.  Options that are None are left out."""
        return settings_of(self.config)

    # ---- one encoding ----

    def _encode(
        self, source: Source, a: Tensor, other: Tensor | None, state: CodecState, *, out: Tensor | None
    ) -> Tensor:
        """Encode what `source` makes of a and other [n, rows, cols], and update other."""
        n, rows, cols = _sizes_of("x", a)
        assert other is None or _sizes_of("mirror or residual", other) == (n, rows, cols), f"{other.shape}, {a.shape}"
        layout = self._layout(rows, cols)
        codec = layout.codec
        packets = a.new_empty((n, layout.num_bytes), dtype=torch.uint8) if out is None else out
        assert (packets.shape, packets.dtype) == ((n, layout.num_bytes), torch.uint8), "ask packet_bytes(rows, cols)"
        payload = packets[:, HEADER_BYTES:]
        if a.numel():
            is_bad = codec.encode_fused(source, a, other, state, payload=payload)
        else:
            is_bad = a.new_zeros(n, dtype=torch.uint8)
        is_done = is_bad is not None
        if is_bad is None:
            x, is_bad = codec._prepare(source, a, other)
            gradient = a if source == Source.RESIDUAL else None
            is_bad = is_bad | codec.encode_payload(x, state, payload, is_bad, gradient=gradient)
        codec._write_headers(packets, layout, state.step, is_bad)
        state.step += 1
        if is_done or other is None:
            return packets
        # Like decode_add and decode, without the checks that packets from elsewhere need.
        if source == Source.UPDATE:
            codec.decode_payload(payload, other, is_add=True)
            _poison(packets, other)
        else:
            value = torch.empty_like(x)
            codec.decode_payload(payload, value, is_add=False)
            if a.device.type == "cpu" and not is_bad.any():  # elsewhere, looking would be a device-to-host sync
                torch.sub(x, value, out=other)
            else:
                other.copy_(torch.where(is_bad[:, None, None], other, torch.sub(x, value, out=value)))
        return packets

    def _decode(self, packets: Tensor, name: str, target: Tensor, *, is_add: bool) -> Tensor:
        codec, has_bad = self._open(packets, name, target)
        if target.numel():
            codec.decode_payload(packets[:, HEADER_BYTES:], target, is_add=is_add)
        return _poison(packets, target) if has_bad else target

    def _prepare(self, source: Source, a: Tensor, other: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what `source` makes of a and other, and [n] bool: tensors that are not finite, which become zeros."""
        kernels = self.compiled(a.device)
        if kernels is not None:
            return kernels.prepare(source, a, other)
        x = a if other is None else a - other if source == Source.UPDATE else a + other
        is_bad = ~x.isfinite().flatten(1).all(dim=1)
        return torch.where(is_bad[:, None, None], 0.0, x), is_bad

    def compiled(self, device: torch.device) -> CompiledCodecs | None:
        """Return compiled kernels for tensors on `device`, or None: use PyTorch."""
        return load_codec_kernels(self.kernels, device)

    # ---- checks ----

    def _open(self, packets: Tensor, name: str, target: Tensor) -> tuple["Codec", bool]:
        """Return the codec that made packets of a tensor like `target`, and whether some may be flagged."""
        n, rows, cols = _sizes_of(name, target)
        layout = self._layout(rows, cols)
        if packets.shape != (n, layout.num_bytes) or packets.dtype != torch.uint8:
            raise PacketError(
                f"packets: got {packets.dtype} {tuple(packets.shape)}, wanted torch.uint8 {(n, layout.num_bytes)} for "
                f"{layout.codec.settings()} on [{n}, {rows}, {cols}]; encode and decode with equal settings and shapes"
            )
        assert packets.device == target.device, f"packets: on {packets.device}, wanted {target.device}"
        require_dense_rows("packets", packets)
        kernels = self.compiled(target.device)
        if kernels is not None:
            flags = kernels.check_headers(packets, start=layout.start, stamp=layout.stamp)
            if flags >= 0:
                return layout.codec, flags > 0
        check_headers(packets, start=layout.start, stamp=layout.stamp, what=layout.codec.settings())
        return layout.codec, True

    def _write_headers(self, packets: Tensor, layout: "_Layout", step: int, is_bad: Tensor) -> None:
        kernels = self.compiled(packets.device)
        write = write_headers if kernels is None else kernels.write_headers
        words = {"number": layout.number, "sequence": step % SEQUENCE_MODULUS, "stamp": layout.stamp}
        write(packets, start=layout.start, **words, is_bad=is_bad.to(torch.uint8))

    def _layout(self, rows: int, cols: int) -> "_Layout":
        found = self._layouts.get((rows, cols))
        if found is None:
            codec = self.resolve(rows, cols)
            settings = (self if type(codec) is type(self) else codec).settings()
            found = self._layouts[rows, cols] = _Layout(
                codec=codec,
                num_bytes=codec.sizes.packet_bytes(rows, cols),
                start=MAGIC | VERSION << 8 | codec.codec_id << 16,
                number=codec.header_number(rows, cols),
                stamp=stamp_of(settings, rows, cols),
            )
        return found


@dataclass(frozen=True, kw_only=True)
class _Layout:
    codec: Codec  # the one that really encodes this shape
    num_bytes: int
    start: int  # the first three bytes of the header as a number
    number: int  # the codec's own number in the header
    stamp: int


def _sizes_of(name: str, tensor: Tensor) -> tuple[int, int, int]:
    """Return n, rows and cols of a contiguous fp32 tensor."""
    assert (tensor.dim(), tensor.dtype, tensor.is_contiguous()) == (3, torch.float32, True), (
        f"{name}: got {tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}, wanted contiguous "
        f"torch.float32 [n, rows, cols]; a vector is [n, 1, cols]"
    )
    n, rows, cols = tensor.shape
    return n, rows, cols


def settings_of(config: CodecConfig) -> str:
    """Return a codec's name and options as text.  Options that are None are left out."""
    parts = [
        f"{key}={settings_of(value) if isinstance(value, CodecConfig) else repr(value)}"
        for key, value in config
        if key != "type" and value is not None
    ]
    return f"{config.type}({', '.join(parts)})"


def assign_or_add(out: Tensor, values: Tensor, *, is_add: bool) -> None:
    if is_add:
        out += values
    else:
        out.copy_(values)


def _poison(packets: Tensor, values: Tensor) -> Tensor:
    """Assign nan where packets are flagged: the same nan everywhere, so that bits stay equal."""
    is_bad = non_finite(packets)
    if packets.device.type != "cpu" or bool(is_bad.any()):  # no device-to-host sync on an accelerator
        values.masked_fill_(is_bad[:, None, None], math.nan)
    return values


class PacketOrder:
    """The number of the packet that comes next from one sender, so that a lost or a repeated one is found.

    Nothing is checked on an accelerator, where reading a packet's number would be a device-to-host sync.
    """

    def __init__(self, expected: int = 0) -> None:
        self.expected = expected % SEQUENCE_MODULUS

    def check(self, packets: Tensor) -> None:
        """Raise PacketError unless packets [n, packet_bytes] are the ones that come next."""
        if packets.device.type != "cpu":
            return
        numbers = {number % SEQUENCE_MODULUS for number in header_words(packets)[:, 2].tolist()}
        if wrong := numbers - {self.expected}:
            raise PacketError(
                f"packet has sequence number {min(wrong)}, wanted {self.expected}: one before it was lost, or it came "
                f"twice; load the last checkpoint"
            )

    def advance(self) -> None:
        """Call once for each packet."""
        self.expected = (self.expected + 1) % SEQUENCE_MODULUS
