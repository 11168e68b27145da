# SPDX-License-Identifier: Apache-2.0
"""X ~ P^T Q with few rows in P and Q, found by power iteration from the previous step's Q.

One step, X [rows, cols], P [rank, rows], Q [rank, cols]:

1. P = Q X^T, made orthonormal, and Q = P X; twice.
2. P is rounded as it will be sent.  Q = (P P^T)^-1 P X is the best Q for this P.  The next step starts from it; what
   is sent is rounded, too.

Every REFRESH_INTERVAL steps, Q starts again from a random matrix that is fixed for the step.  Otherwise, directions
that Q has become orthogonal to would never be found.

`integer_factors` says how factors are rounded, and what the payload is.  That of `rest` follows it.

With weighting, X has each row and each column divided by its running root mean square; the scales of rows and columns
in the payload bring that back.  This is the best approximation if an error counts relative to the size of its row and
column, as with an optimizer such as Adam, which divides each element by its size.  If X is a gradient and its
residual, the sizes are those of the gradient alone.  Otherwise an element that is much larger than its row and column
would count less the more of it waits, and never arrive.

All of it is products and small solutions of torch, for n matrices at once, and waits for nothing on an accelerator.

Source: the scheme is PowerSGD's (arXiv 1905.13727), with the refresh and the projection onto rounded factors added.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from ds_hybridep.codecs.blockwise import Blockwise
from ds_hybridep.codecs.integer_factors import (
    SMALLEST_UNIT,
    Divided,
    cholesky,
    fixed_normal,
    read_integers,
    rotation,
    write_integers,
)
from ds_hybridep.codecs.interface import Codec, CodecState
from ds_hybridep.config_codecs import BlockwiseConfig, LowRankConfig
from ds_hybridep.geometry.packets import ITERATIONS, LowRankSizes, packets_of
from ds_hybridep.kernels import CompiledCodecs, Source

FALLBACK_CONFIG = BlockwiseConfig(type="int4")
REFRESH_INTERVAL = 64  # steps
RMS_DECAY = 0.95  # of the mean of squares, each step
SMALLEST_RMS = 1e-3  # of the largest: smaller rows and columns count as if they had this
LARGEST_RMS = 1e30  # what is larger counts as this
START = 0x5EED  # of random numbers
SMALL = 2**17  # elements of a matrix up to which a compiled kernel is faster than products of torch
MOST_ELEMENTS = 2**25  # that are encoded at once; it takes about four times their memory
RIDGE = 3e-5  # by this share the diagonal of a Gram matrix grows: more than rounding can take away


@dataclass(frozen=True, kw_only=True)
class LowRank(Codec):
    """Two thin factors, and perhaps what they leave out.

    With a ratio, a matrix gets the largest rank, from 1 to LARGEST_RANK, at which its fp32 bytes are at least this
    many times those of its packet.  Vectors, and matrices for which factors would be longer, are encoded with int4.
    The payload of `rest` follows that of the factors, and does not count for the ratio.

    Error: that of a projection onto `rank` directions near the largest, and of rounding factors to 16 levels.  With
    weighting, this holds for the divided matrix.
    """

    codec_id: ClassVar[int] = 3

    config: LowRankConfig

    @cached_property
    def sizes(self) -> LowRankSizes:
        """What says how long packets are, and how many rows factors have."""
        found = packets_of(self.config.model_dump())
        assert isinstance(found, LowRankSizes)
        return found

    @cached_property
    def rest(self) -> Blockwise | None:
        return None if self.config.rest is None else Blockwise(config=self.config.rest, kernels=self.kernels)

    def resolve(self, rows: int, cols: int) -> Codec:
        if self.sizes.is_left_to_fallback(rows, cols):
            return Blockwise(config=FALLBACK_CONFIG, kernels=self.kernels)
        # Put a rank in place of the ratio: state and payload depend on the rank only.
        if self.config.rank is not None:
            return self
        ranked = self.config.model_copy(update={"ratio": None, "rank": self.effective_rank(rows, cols)})
        return LowRank(config=ranked, kernels=self.kernels)

    def effective_rank(self, rows: int, cols: int) -> int:
        return self.sizes.effective_rank(rows, cols)

    def header_number(self, rows: int, cols: int) -> int:
        return self.effective_rank(rows, cols)

    def initial_tensors(self, n: int, rows: int, cols: int, device: torch.device) -> dict[str, Tensor]:
        made = {"q": fixed_normal(START, self.effective_rank(rows, cols), cols, device).repeat(n, 1, 1)}
        if self.config.weighting == "rms":
            for name, size in (("row_rms", rows), ("col_rms", cols)):
                made[name] = torch.zeros(n, size, dtype=torch.float32, device=device)
        return made

    def encode_payload(
        self, x: Tensor, state: CodecState, payload: Tensor, is_bad: Tensor, *, gradient: Tensor | None
    ) -> Tensor:
        """Encode, and update `state` except where x is bad or overflows."""
        found = []
        end = self.sizes.factors_bytes(x.shape[1], x.shape[2])
        with _in_fp32(x.device):
            for some in _chunks(x):
                part = CodecState(state.step, {name: tensor[some] for name, tensor in state.tensors.items()})
                factors, weighed = payload[some, :end], (x if gradient is None else gradient)[some]
                found.append(self._write_factors(x[some], weighed, part, factors, is_bad[some]))
                if self.rest is not None:
                    left = read_integers(factors, self.effective_rank(*x.shape[1:]), torch.empty_like(x[some]))
                    left = torch.sub(x[some], left, out=left)
                    found[-1] |= self.rest.encode_payload(left, part, payload[some, end:], is_bad[some], gradient=None)
        return torch.cat(found)

    def encode_fused(
        self, source: Source, a: Tensor, other: Tensor | None, state: CodecState, *, payload: Tensor
    ) -> Tensor | None:
        _, rows, cols = a.shape
        if (kernels := self._kernels_for(rows, cols, a.device)) is None:
            return None
        start, mix = self._start(state, a.shape[0]), rotation(self.effective_rank(rows, cols), a.device)
        layout = self._layout_of(rows, cols)
        return kernels.encode_factors(source, a, other, state.tensors, payload, start=start, mix=mix, layout=layout)

    def _kernels_for(self, rows: int, cols: int, device: torch.device) -> CompiledCodecs | None:
        """Return kernels for matrices so small that operations of torch would take longer than what they do."""
        kernels = self.compiled(device) if rows * cols <= SMALL else None
        return kernels if kernels is not None and kernels.has_factors else None

    def _layout_of(self, rows: int, cols: int) -> tuple[int, int, int, int]:
        """Return what compiled kernels have to know of a payload."""
        rest = (0, 0) if self.rest is None else (self.rest.layout["bits"], self.rest.layout["block"])
        return self.effective_rank(rows, cols), self.sizes.factors_bytes(rows, cols), *rest

    def _write_factors(self, x: Tensor, weighed: Tensor, state: CodecState, payload: Tensor, is_bad: Tensor) -> Tensor:
        """Encode factors, and update `state` except where x is bad or overflows."""
        is_overflow, is_zero, found = self._encode_factors(x, weighed, state, payload)
        keeps = is_bad | is_overflow
        for name, tensor in found.items():
            # Nothing can be found from zeros, which a tensor of zeros leaves.
            keeps_this = (keeps | is_zero).unsqueeze(1).unsqueeze(2) if name == "q" else keeps.unsqueeze(1)
            # In place: memory of another stream must not be freed in this one.
            torch.where(keeps_this, state.tensors[name], tensor, out=state.tensors[name])
        return is_overflow

    def _encode_factors(
        self, x: Tensor, weighed: Tensor, state: CodecState, payload: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Write the factors of x to payload; the sizes of `weighed` say what counts.

        Returns [n] bool, tensors that overflow; [n] bool, those whose q is zero; and the next tensors of the state.
        """
        row_weight, col_weight, found = self._weights(weighed, state)
        divided = Divided(x, row_weight, col_weight)
        q = self._start(state, len(x))
        for _ in range(ITERATIONS):
            p = orthonormal(divided.times_rows(q))
            q = divided.times_cols(p)
        q, bound = write_integers(p, q, divided, payload=payload)
        largest = q.flatten(1).abs().amax(dim=1)
        is_overflow = ~(bound + largest).isfinite()
        payload.masked_fill_(is_overflow[:, None], 0)  # what it leaves to `rest` must be finite
        return is_overflow, largest == 0, {"q": q, **found}

    def _weights(self, weighed: Tensor, state: CodecState) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return sizes of rows [n, rows] and columns [n, cols] relative to the largest, and their next means."""
        n, rows, cols = weighed.shape
        if self.config.weighting == "none":
            return weighed.new_ones(n, rows), weighed.new_ones(n, cols), {}
        squares = weighed.square()
        now = torch.cat([squares.mean(2), squares.mean(1)], dim=1).mul_(1 - RMS_DECAY).sqrt_()
        before = torch.cat([state.tensors["row_rms"], state.tensors["col_rms"]], dim=1)
        rms = torch.hypot(before.mul_(RMS_DECAY**0.5), now).clamp_(max=LARGEST_RMS)
        row_rms, col_rms = rms.split([rows, cols], dim=1)
        row_weight, col_weight = (
            (one / one.amax(dim=1, keepdim=True).clamp_(min=SMALLEST_UNIT)).clamp_(min=SMALLEST_RMS)
            for one in (row_rms, col_rms)
        )
        return row_weight, col_weight, {"row_rms": row_rms, "col_rms": col_rms}

    def _start(self, state: CodecState, n: int) -> Tensor:
        """Return the q [n, rank, cols] to start from: that of the step before, or one that is fixed for the step."""
        q = state.tensors["q"]
        if state.step % REFRESH_INTERVAL:
            return q
        return fixed_normal(START + state.step, q.shape[1], q.shape[2], q.device).repeat(n, 1, 1)

    def decode_payload(self, payload: Tensor, out: Tensor, *, is_add: bool) -> None:
        """Decode; the value is that of the factors, and that of the rest added to it."""
        _, rows, cols = out.shape
        if (kernels := self._kernels_for(rows, cols, out.device)) is not None:
            kernels.decode_factors(payload, out, layout=self._layout_of(rows, cols), is_add=is_add)
            return
        end, rank = self.sizes.factors_bytes(rows, cols), self.effective_rank(rows, cols)
        with _in_fp32(out.device):
            for some in _chunks(out):
                value = read_integers(payload[some, :end], rank, torch.empty_like(out[some]) if is_add else out[some])
                if self.rest is not None:
                    self.rest.decode_payload(payload[some, end:], value, is_add=True)
                if is_add:
                    out[some].add_(value)


def _chunks(x: Tensor) -> list[slice]:
    """Return parts of x [n, rows, cols] that leave room in memory for a few copies."""
    n, rows, cols = x.shape
    size = max(MOST_ELEMENTS // (rows * cols), 1)
    return [slice(begin, begin + size) for begin in range(0, n, size)]


def _in_fp32(device: torch.device) -> AbstractContextManager[Any]:
    """Let products be what they say, whatever `autocast` the caller runs in."""
    is_needed = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if is_needed else nullcontext()


def orthonormal(p: Tensor) -> Tensor:
    """Return rows that span those of p [n, rank, rows] and are close to orthonormal; zeros stay zeros.

    This is Cholesky's method.  Rows that depend on others become shorter: they are what rounding has left of them.
    """
    found: Tensor = torch.linalg.solve_triangular(cholesky(torch.bmm(p, p.mT), RIDGE), p, upper=False)
    return found
