# SPDX-License-Identifier: Apache-2.0
"""X ~ P Q^T with few columns, found by power iteration from the previous step's Q.

One step, X [rows, cols], Q [cols, rank]:

1. P = X Q, orthogonalised; then quantised as it will be sent.
2. Q = X^T P (P^T P)^-1, the best Q for this quantised P.  The next step starts from this Q; what is sent is quantised.

Every REFRESH_INTERVAL steps, Q starts again from a random matrix that is fixed for the step.  Otherwise, directions
that Q has become orthogonal to would never be found.

The payload: the columns of P, then those of Q, as `blockwise` payloads, one for each column.  Its value is

    ((p0 q0 + p1 q1) + p2 q2) + ...        every product and sum rounded by itself

log4 is laid out like int4, but its steps grow with the magnitude.  Codes 0-7 stand for LOG_VALUES times the scale,
codes 8-15 for their negatives.  The scale is the largest magnitude / 32, rounded up.

With weighting, steps 1 and 2 work on X with each row and each column divided by its running root mean square.  The
factors are multiplied by those again before they are sent.  This is the best approximation if an error counts relative
to the size of its row and column, as with an optimizer such as Adam, which divides each element by its size.  If X is
a gradient and its residual, the sizes are those of the gradient alone.  Otherwise an element that is much larger than
its row and column would count less the more of it waits, and never arrive.

Source: the scheme is PowerSGD's (arXiv 1905.13727), with the refresh and the projection onto quantised factors added.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from ds_hybridep.codecs.blockwise import (
    Blockwise,
    divisor,
    read_codes,
    read_quantised,
    times_scales,
    to_bf16_up,
    to_blocks,
    write_codes,
    write_quantised,
)
from ds_hybridep.codecs.integer_factors import integers_overflow, read_integers, write_integers
from ds_hybridep.codecs.interface import Codec, CodecState, assign_or_add
from ds_hybridep.config_codecs import BlockwiseConfig, LowRankConfig
from ds_hybridep.geometry.packets import (
    FACTOR_BITS,
    FACTOR_BLOCK,
    ITERATIONS,
    LowRankSizes,
    factor_bytes,
    packets_of,
    quantised_bytes,
)
from ds_hybridep.kernels import Source

FALLBACK_CONFIG = BlockwiseConfig(type="int4")
REFRESH_INTERVAL = 64  # steps
FACTOR_CODES = {"int4": 3, "log4": 5}  # as in csrc
LOG_VALUES = (0.0, 2.0, 4.0, 6.0, 10.0, 15.0, 22.0, 32.0)
LOG_BETWEEN = (1.0, 3.0, 5.0, 8.0, 12.5, 18.5, 27.0)
RMS_DECAY = 0.95  # of the mean of squares, each step
SMALLEST_RMS = 1e-3  # of the largest: smaller rows and columns count as if they had this


@dataclass(frozen=True, kw_only=True)
class LowRank(Codec):
    """Two thin factors, and perhaps what they leave out.

    With a ratio, a matrix gets the largest rank, from 1 to LARGEST_RANK, at which its fp32 bytes are at least this
    many times those of its packet.  Vectors, and matrices for which factors would be longer, are encoded with int4.
    The payload of `rest` follows that of the factors, and does not count for the ratio.

    Error: the sum of squares left exceeds the one before by the rounding of Q at most.  Without rounding, it is that
    of a projection onto `rank` directions near the largest.  With weighting, this holds for the divided matrix.
    """

    codec_id: ClassVar[int] = 3

    config: LowRankConfig

    @cached_property
    def sizes(self) -> LowRankSizes:
        """What says how long packets are, and how many columns factors have."""
        found = packets_of(self.config.model_dump())
        assert isinstance(found, LowRankSizes)
        return found

    @cached_property
    def factors_alone(self) -> "LowRank":
        return LowRank(config=self.config.model_copy(update={"rest": None}), kernels=self.kernels)

    @cached_property
    def rest(self) -> Blockwise | None:
        return None if self.config.rest is None else Blockwise(config=self.config.rest, kernels=self.kernels)

    @property
    def _has_integers(self) -> bool:
        return self.config.factors == "integer"

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
        shapes: dict[str, tuple[int, ...]] = {"q": (n, self.effective_rank(rows, cols), cols)}
        if self.config.weighting == "rms":
            shapes |= {"row_rms": (n, rows), "col_rms": (n, cols)}
        return {name: torch.zeros(shape, device=device) for name, shape in shapes.items()}

    def encode_fused(
        self, source: Source, a: Tensor, other: Tensor | None, state: CodecState, *, payload: Tensor
    ) -> Tensor | None:
        return self._encode_compiled(
            source, a, other, state, payload=payload, sizes=a if source == Source.RESIDUAL else None
        )

    def _encode_compiled(
        self,
        source: Source,
        a: Tensor,
        other: Tensor | None,
        state: CodecState,
        *,
        payload: Tensor,
        sizes: Tensor | None,
    ) -> Tensor | None:
        kernels = self.compiled(a.device)
        if kernels is None or self.rest is not None or self._has_integers:
            return None
        q = state.tensors["q"]
        wanted = (len(a), self.effective_rank(a.shape[1], a.shape[2]), a.shape[2])
        assert q.shape == wanted, f"state: holds q of shape {tuple(q.shape)}, wanted {wanted}; make it with new_state"
        return kernels.low_rank_encode(
            source,
            a,
            other,
            payload,
            sizes=sizes,
            q=q,
            row_rms=state.tensors.get("row_rms"),
            col_rms=state.tensors.get("col_rms"),
            start=self._fresh_start(state.step, q),
            factor=FACTOR_CODES[self.config.factors],
            iterations=ITERATIONS,
        )

    def encode_payload(
        self, x: Tensor, state: CodecState, payload: Tensor, is_bad: Tensor, *, sizes: Tensor | None
    ) -> Tensor:
        """Encode; the columns of factors are rows here, [n, rank, rows or cols]."""
        if self.rest is not None:
            end = self.sizes.factors_bytes(x.shape[1], x.shape[2])
            is_overflow = self.factors_alone.encode_payload(x, state, payload[:, :end], is_bad, sizes=sizes)
            value = torch.empty_like(x)
            self.factors_alone.decode_payload(payload[:, :end], value, is_add=False)
            return is_overflow | self.rest.encode_payload(x - value, state, payload[:, end:], is_bad, sizes=None)
        mine = {name: state.tensors[name] for name in self.initial_tensors(0, x.shape[1], x.shape[2], x.device)}
        before = {name: tensor.clone() for name, tensor in mine.items()}
        if sizes is not None:
            sizes = torch.where(is_bad.view(-1, 1, 1), x, sizes)
        flags = self._encode_compiled(Source.ENCODE, x, None, state, payload=payload, sizes=sizes)
        is_overflow = self._encode_by_definition(x, state, payload, sizes) if flags is None else flags.bool()
        for name, tensor in mine.items():
            keep = (is_bad | is_overflow).view(-1, *[1] * (tensor.dim() - 1))
            tensor.copy_(torch.where(keep, before[name], tensor))
        return is_overflow

    def _encode_by_definition(self, x: Tensor, state: CodecState, payload: Tensor, sizes: Tensor | None) -> Tensor:
        n, rows, cols = x.shape
        q = state.tensors["q"]
        start = self._fresh_start(state.step, q)
        q = q if start is None else start.repeat(n, 1, 1)
        row_weight, col_weight = self._weights(x if sizes is None else sizes, state)
        x = x / col_weight / row_weight.transpose(1, 2)
        if self._has_integers:  # squares of products must stay within fp32; a power of two changes no bits
            largest = x.abs().amax(dim=(1, 2), keepdim=True)
            unit = torch.where(largest > 0, largest, 1.0).log2().floor().exp2()
            x, row_weight = x / unit, row_weight * unit

        for _ in range(ITERATIONS - 1):
            q = _times_rows(x, orthonormal(_times_columns(x, q)))
        if self._has_integers:
            p = orthonormal(_times_columns(x, q))
            q = write_integers(p, _times_rows(x, p), x, row_weight=row_weight, col_weight=col_weight, payload=payload)
            state.tensors["q"].copy_(q)
            is_overflow = integers_overflow(payload, p.shape[1], rows, cols)
            is_overflow |= ~q.isfinite().flatten(1).all(dim=1)
            payload.masked_fill_(is_overflow[:, None], 0)  # what it leaves to `rest` must be finite
            return is_overflow

        # 1. P, as the decoder will see it.
        p_payload, q_payload = self._split(payload, rows, cols)
        payload[:, p_payload[0].numel() + q_payload[0].numel() :] = 0
        self._write(orthonormal(_times_columns(x, q)) * row_weight, p_payload)
        p = self._read(p_payload, rows) / row_weight

        # 2. Q for that P.
        q = divide_by_gram(_times_rows(x, p), p)
        # Copy in place: memory of another stream must not be freed in this one.
        state.tensors["q"].copy_(q)
        self._write(q * col_weight, q_payload)
        return ~self._read(q_payload, cols).isfinite().flatten(1).all(dim=1)

    def _weights(self, x: Tensor, state: CodecState) -> tuple[Tensor, Tensor]:
        """Update the state; return sizes of x's rows [n, 1, rows] and columns [n, 1, cols] relative to the largest."""
        if self.config.weighting == "none":
            return x.new_ones(()).expand(len(x), 1, x.shape[1]), x.new_ones(()).expand(len(x), 1, x.shape[2])
        weights = []
        for name, dim in (("row_rms", 2), ("col_rms", 1)):
            rms = state.tensors[name]
            mean = RMS_DECAY * rms.double().square() + (1 - RMS_DECAY) * x.double().square().mean(dim)
            rms.copy_(mean.sqrt())
            largest = rms.amax(dim=1, keepdim=True)
            weights.append(torch.where(largest > 0, (rms / largest).clamp(min=SMALLEST_RMS), 1.0).unsqueeze(1))
        return weights[0], weights[1]

    def decode_payload(self, payload: Tensor, out: Tensor, *, is_add: bool) -> None:
        """Decode; the value of the factors is added first, then the value of the rest."""
        if self.rest is not None:
            end = self.sizes.factors_bytes(out.shape[1], out.shape[2])
            self.factors_alone.decode_payload(payload[:, :end], out, is_add=is_add)
            self.rest.decode_payload(payload[:, end:], out, is_add=True)
            return
        rank = self.effective_rank(out.shape[1], out.shape[2])
        if self._has_integers:
            assign_or_add(out, read_integers(payload, rank, out.shape[1], out.shape[2]), is_add=is_add)
            return
        kernels = self.compiled(out.device)
        if kernels is not None:
            kernels.low_rank_decode(payload, out, rank=rank, factor=FACTOR_CODES[self.config.factors], is_add=is_add)
            return
        p_payload, q_payload = self._split(payload, out.shape[1], out.shape[2])
        p, q = self._read(p_payload, out.shape[1]), self._read(q_payload, out.shape[2])
        # The outer product is a tensor of its own: fused with the sum it would be rounded once instead of twice.
        value = p[:, 0, :, None] * q[:, 0, None, :]
        for column in range(1, p.shape[1]):
            value += p[:, column, :, None] * q[:, column, None, :]
        assign_or_add(out, value, is_add=is_add)

    def _fresh_start(self, step: int, q: Tensor) -> Tensor | None:
        """Return a start [rank, cols] that depends on the step only; None: start from the q [n, rank, cols] before."""
        if step % REFRESH_INTERVAL:
            return None
        generator = torch.Generator().manual_seed(0x5EED + step)
        return torch.randn(q.shape[1], q.shape[2], generator=generator).to(q.device)

    def _split(self, payload: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
        """Return the parts of P and of Q, [n, rank, bytes of a column] each."""
        rank = self.effective_rank(rows, cols)
        p_bytes, q_bytes = factor_bytes(rows), factor_bytes(cols)
        p_end = rank * p_bytes
        p_payload = payload[:, :p_end].unflatten(1, (rank, p_bytes))
        return p_payload, payload[:, p_end : p_end + rank * q_bytes].unflatten(1, (rank, q_bytes))

    def _write(self, columns: Tensor, payload: Tensor) -> None:
        """Encode columns [n, rank, length] into payload [n, rank, bytes]."""
        length = columns.shape[2]
        flat, encoded = columns.reshape(-1, length), payload.new_zeros(payload.shape).flatten(0, 1)
        place = encoded[:, : quantised_bytes(length, FACTOR_BITS, FACTOR_BLOCK)]
        if self.config.factors == "log4":
            write_log4(flat, place)
        else:
            write_quantised(flat, place, FACTOR_BITS, FACTOR_BLOCK)
        payload.copy_(encoded.view(payload.shape))

    def _read(self, payload: Tensor, length: int) -> Tensor:
        """The inverse of `_write`: fp32 [n, rank, length]."""
        flat = payload.flatten(0, 1)[:, : quantised_bytes(length, FACTOR_BITS, FACTOR_BLOCK)]
        if self.config.factors == "log4":
            return read_log4(flat, length).view(*payload.shape[:2], length)
        return read_quantised(flat, length, FACTOR_BITS, FACTOR_BLOCK).view(*payload.shape[:2], length)


def write_log4(x: Tensor, payload: Tensor) -> None:
    """Quantise x [N, L] fp32 into payload [N, bytes]."""
    blocks = to_blocks(x, FACTOR_BLOCK)
    scales = to_bf16_up(blocks.abs().amax(dim=-1) / LOG_VALUES[-1])
    codes = torch.bucketize(blocks.abs() / divisor(scales), x.new_tensor(LOG_BETWEEN), right=True)
    codes += len(LOG_VALUES) * ((codes > 0) & (blocks < 0))
    write_codes(codes.to(torch.uint8).flatten(-2)[..., : x.shape[-1]], scales, payload, 4)


def read_log4(payload: Tensor, length: int) -> Tensor:
    """The inverse of `write_log4`: fp32 [N, length]."""
    codes, scales = read_codes(payload, length, 4, FACTOR_BLOCK)
    levels = torch.tensor([*LOG_VALUES, *(-value for value in LOG_VALUES)], device=payload.device)
    return times_scales(levels[codes.long()], scales, FACTOR_BLOCK)


def _times_columns(x: Tensor, q: Tensor) -> Tensor:
    """Return x [n, rows, cols] times q [n, rank, cols], [n, rank, rows]; one by one, so that n changes nothing."""
    return torch.stack([other @ one.T for one, other in zip(x, q, strict=True)])


def _times_rows(x: Tensor, p: Tensor) -> Tensor:
    """Return p [n, rank, rows] times x [n, rows, cols], [n, rank, cols]; one by one too."""
    return torch.stack([other @ one for one, other in zip(x, p, strict=True)])


def orthonormal(p: Tensor) -> Tensor:
    """Return orthonormal rows that span the rows of p [n, rank, rows], dependent or not; zeros give unit vectors."""
    # Scale rows to the largest element 1: a product of numbers near the ends of fp32 would over- or underflow.
    largest = p.abs().amax(dim=2, keepdim=True)
    factor: Tensor = torch.linalg.qr((p / torch.where(largest > 0, largest, 1.0)).transpose(1, 2)).Q
    return factor.transpose(1, 2).contiguous()


def divide_by_gram(q: Tensor, p: Tensor) -> Tensor:
    """Return (P P^T)^-1 q [n, rank, cols] for rows p [n, rank, rows] that are orthonormal up to quantisation."""
    gram = torch.stack([one @ one.T for one in p])
    # Quantised rows can be dependent.  A little on the diagonal keeps the solution finite, and barely changes others.
    diagonal = gram.diagonal(dim1=1, dim2=2)
    gram = gram + torch.diag_embed(1e-6 * diagonal.clamp(min=1e-3))
    solution: Tensor = torch.linalg.solve(gram, q)
    return solution.contiguous()
