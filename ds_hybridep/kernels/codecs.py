# SPDX-License-Identifier: Apache-2.0
"""The codec kernels of csrc/.  Their definitions are in `ds_hybridep.codecs`.

Callers check shapes: payloads are [n, bytes] uint8 with dense rows; other tensors are contiguous, and fp32 unless a
method says otherwise.  ValueError if the tensors of a call are on more than one device, or not on that of the kernels.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum

import torch
from torch import Tensor

from ds_hybridep.kernels.compiled import CompiledKernels, call, device_of

# In the order of `enum class Damage` in csrc/include/hybridep_patch.h.
PATCH_DAMAGES = (
    "",
    "its segments have other lengths",
    "a segment has another length",
    "a segment is of an unknown kind",
    "a code is cut off or has unknown symbols",
    "a code has words of impossible lengths",
    "a code is not followed by zeros",
    "blocks have other lengths",
    "a block is too long",
    "a code word is not in use",
    "a token leads out of its block",
    "a size has another form",
    "a block has another length",
)


class Source(IntEnum):
    """What is encoded; equal to `enum class Source` in csrc/include/hybridep_codecs.h."""

    ENCODE = 0  # a
    UPDATE = 1  # a - other; the packet's value is added to other
    RESIDUAL = 2  # a + other; other becomes what the packet leaves out


class CompiledCodecs:
    """Kernels of the same extension as `kernels`, for the same devices.

    Results depend neither on the number of threads nor on n.
    """

    def __init__(self, kernels: CompiledKernels) -> None:
        self._extension, self._lane, self._device_type = kernels.extension, kernels.lane, kernels.device_type

    @property
    def has_factors(self) -> bool:
        """True for the CPU: on accelerators, torch's operations are few launches for many matrices."""
        return hasattr(self._extension, "encode_factors")

    def prepare(self, source: Source, a: Tensor, other: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return what is encoded, like a [n, ...], and [n] bool: the tensors with inf or nan, which become zeros."""
        device = self._device_of(a=a, other=other)
        x, is_bad = torch.empty_like(a), _bytes(len(a), device)
        with self._lane(device) as lane:
            scratch = _bytes(self._extension.flags_scratch_bytes(a.shape[0]), device)
            call(self._extension.prepare, source, a, other, *_size(a), lane, scratch, x, is_bad)
        return x, is_bad.bool()

    def blockwise_encode(
        self, source: Source, a: Tensor, other: Tensor | None, payload: Tensor, *, bits: int, block: int
    ) -> Tensor:
        """Quantise a [n, ...] into payload [n, bytes].  Returns [n] uint8: 1 for inf, nan or an overflow, else 0."""
        device = self._device_of(a=a, other=other, payload=payload)
        is_bad = _bytes(a.shape[0], device)
        with self._lane(device) as lane:
            scratch = _bytes(self._extension.flags_scratch_bytes(a.shape[0]), device)
            settings = (bits, block, lane, scratch)
            call(self._extension.blockwise_encode, source, a, other, *_size(a), *settings, *_place(payload), is_bad)
        return is_bad

    def blockwise_decode(self, payload: Tensor, out: Tensor, *, bits: int, block: int, is_add: bool) -> None:
        """Assign or add the values of payload [n, bytes] to out [n, ...]."""
        with self._lane(self._device_of(out=out, payload=payload)) as lane:
            call(self._extension.blockwise_decode, *_place(payload), *_size(out), bits, block, is_add, lane, out)

    def encode_factors(
        self, source: Source, a: Tensor, other: Tensor | None, state: Mapping[str, Tensor], payload: Tensor, *,
        start: Tensor, mix: Tensor, layout: Sequence[int],
    ) -> Tensor:  # fmt: skip
        """Write integer factors, and what they leave out, to payload; update `other` and `state`.

        Only if `has_factors`.

        a, other: [n, rows, cols].
        state: that of `LowRank`.
        start: [n, rank, cols], the q to start from.
        mix: [rank, rank], orthogonal.
        layout: the rank, the bytes of factors, bits and block of the rest (bits 0: there is none).

        Returns [n] uint8: 1 for inf, nan or an overflow, else 0.
        """
        kept = (state["q"], state.get("row_rms"), state.get("col_rms"))
        assert all(one.is_contiguous() for one in (start, mix, *state.values()))
        device = self._device_of(a=a, other=other, payload=payload, start=start, mix=mix, **state)
        is_bad = _bytes(a.shape[0], device)
        with self._lane(device) as lane:
            sizes = (*a.shape, *layout, lane)
            call(self._extension.encode_factors, source, a, other, start, mix, *sizes, *kept, *_place(payload), is_bad)
        return is_bad

    def decode_factors(self, payload: Tensor, out: Tensor, *, layout: Sequence[int], is_add: bool) -> None:
        """Assign or add to out [n, rows, cols] what `encode_factors` has written.  Only if `has_factors`."""
        with self._lane(self._device_of(out=out, payload=payload)) as lane:
            call(self._extension.decode_factors, *_place(payload), *out.shape, *layout, lane, is_add, out)

    def compact(self, values: Tensor, words: Tensor, seed: int) -> None:
        """Write the compact form of values [n, length] to words [n, blocks, words of a block] int16."""
        with self._lane(self._device_of(values=values, words=words)) as lane:
            call(self._extension.compact_encode, values, *values.shape, seed, lane, words)

    def expand(self, words: Tensor, out: Tensor) -> None:
        """Assign to out [n, ...] what its compact form holds."""
        with self._lane(self._device_of(words=words, out=out)) as lane:
            call(self._extension.compact_decode, words, *_size(out), lane, out)

    def patch_encode(self, new: Tensor, sent: Tensor, payload: Tensor, *, mantissa_bits: int) -> tuple[int, int]:
        """Write to payload [bytes] what turns `sent` into `new`, both [n] of 16 bits, and set sent to new.

        Returns the number of bytes written and a checksum of `new`: a device-to-host sync on an accelerator.
        """
        device = self._device_of(new=new, sent=sent, payload=payload)
        results = torch.empty(2, dtype=torch.int64, device=device)
        with self._lane(device) as lane:
            scratch = _bytes(self._extension.patch_encode_scratch_bytes(len(new)), device)
            call(self._extension.patch_encode, new, sent, len(new), mantissa_bits, lane, scratch, payload, results)
        num_bytes, checksum = results.tolist()
        return num_bytes, checksum

    def patch_decode(self, payload: Tensor, held: Tensor, *, mantissa_bits: int) -> tuple[str, int]:
        """Turn `held` [n] of 16 bits into the values that were encoded in payload [bytes].

        Returns what is wrong with the payload ("" if nothing) and a checksum of the values, after a sync as above.
        """
        device = self._device_of(held=held, payload=payload)
        results = torch.empty(2, dtype=torch.int64, device=device)
        with self._lane(device) as lane:
            scratch = _bytes(self._extension.patch_decode_scratch_bytes(len(held)), device)
            sizes = (len(payload), len(held), mantissa_bits)
            call(self._extension.patch_decode, payload, *sizes, lane, scratch, held, results)
        damage, checksum = results.tolist()
        return PATCH_DAMAGES[damage], checksum

    def write_headers(
        self, packets: Tensor, *, start: int, number: int, sequence: int, stamp: int, is_bad: Tensor
    ) -> None:
        place = (packets.data_ptr(), packets.stride(0), packets.shape[0])
        with self._lane(self._device_of(packets=packets, is_bad=is_bad)) as lane:
            self._extension.write_headers(*place, start, number, sequence, stamp, is_bad.data_ptr(), lane)

    def check_headers(self, packets: Tensor, *, start: int, stamp: int) -> int:
        """Return all packets' flags, or-ed; -1 if a packet begins otherwise or has another stamp.

        On CUDA devices reading them would be a wait.  There a wrong packet ends the kernel with a message, and 1 is
        returned: some packet may be flagged.
        """
        with self._lane(self._device_of(packets=packets)) as lane:
            place = (packets.data_ptr(), packets.stride(0), packets.shape[0])
            found: int = self._extension.check_headers(*place, start, stamp, lane)
        return found

    def _device_of(self, **tensors: Tensor | None) -> torch.device:
        return device_of(self._device_type, tensors)


def _bytes(number: int, device: torch.device) -> Tensor:
    """Return memory, for scratch from torch too: it is used again in the order of the stream."""
    return torch.empty(number, dtype=torch.uint8, device=device)


def _size(tensor: Tensor) -> tuple[int, int]:
    """Return n and the number of elements of one tensor."""
    number = tensor.shape[0]  # len() of a tensor is slow
    return number, tensor.numel() // max(number, 1)


def _place(payload: Tensor) -> tuple[int, int, int]:
    """Return the address, the row stride and the row length of payload [n, bytes]."""
    require_dense_rows("payload", payload)
    return payload.data_ptr(), payload.stride(0), payload.shape[1]


def require_dense_rows(name: str, packets: Tensor) -> None:
    """Raise ValueError unless the bytes of each row of packets [n, bytes] lie side by side."""
    if packets.shape[1] > 1 and packets.stride(1) != 1:
        raise ValueError(f"{name}: strides {packets.stride()}, wanted bytes side by side; pass {name}.contiguous()")
