# SPDX-License-Identifier: Apache-2.0
"""X ~ P Q^T with few columns, found by power iteration from the previous step's Q.

One step, X [rows, cols], Q [cols, rank]:

1. P = X Q, orthogonalised; then quantised as it will be sent.
2. Q = X^T P (P^T P)^-1, the best Q for that very P; quantised.  It is the start of the next step.

Before every `refresh_interval`-th step Q starts anew from a fixed random matrix: directions that Q has become
orthogonal to would otherwise never be found.

Payload: P^T, then Q^T, row by row, in fp32, bf16, or as `blockwise` payloads of one factor column each.  The value is

    ((p0 q0 + p1 q1) + p2 q2) + ...        every product and sum rounded by itself

Source: the scheme is PowerSGD's (arXiv 1905.13727), with the refresh and the projection onto quantised factors added.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ds_hybridep.codecs.blockwise import Blockwise, quantised_bytes, read_quantised, write_quantised
from ds_hybridep.codecs.interface import Codec, CodecState, round_up

FACTOR_BLOCK = 256  # elements of a factor column that share a scale
FACTOR_BITS = {"int8": 8, "int4": 4}
FACTOR_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class LowRank(Codec):
    """Factors of rank `rank`, `factors` telling how they are sent; vectors and small matrices go to `fallback`.

    Small means that the fallback's packet is not longer.  `iterations` power iterations are made each step.

    Error: the sum of squares left is never more than there was by more than the rounding of Q; with fp32 factors it is
    that of a projection onto `rank` directions near the largest.
    """

    codec_id: ClassVar[int] = 3
    name: ClassVar[str] = "low_rank"

    rank: int = 4
    factors: Literal["fp32", "bf16", "int8", "int4"] = "int8"
    iterations: int = 1
    refresh_interval: int = 64
    fallback: Codec = Blockwise(bits=4)

    def resolve(self, rows: int, cols: int) -> Codec:
        """See `Codec.resolve`."""
        is_small = self.payload_bytes(rows, cols) >= self.fallback.payload_bytes(rows, cols)
        return self.fallback if min(rows, cols) <= 1 or is_small else self

    def effective_rank(self, rows: int, cols: int) -> int:
        """Columns of the factors: no more than the matrix has."""
        return min(self.rank, rows, cols)

    def payload_bytes(self, rows: int, cols: int) -> int:
        """See `Codec.payload_bytes`."""
        return round_up(self.effective_rank(rows, cols) * (self._column_bytes(rows) + self._column_bytes(cols)))

    def header_number(self, rows: int, cols: int) -> int:
        """The effective rank."""
        return self.effective_rank(rows, cols)

    def initial_state(self, n: int, rows: int, cols: int, device: torch.device) -> CodecState:
        """See `Codec.initial_state`."""
        return CodecState(tensors={"q": torch.zeros(n, cols, self.effective_rank(rows, cols), device=device)})

    def encode_payload(self, x: Tensor, state: CodecState, payload: Tensor, is_bad: Tensor) -> Tensor:
        """See `Codec.encode_payload`."""
        n, rows, cols = x.shape
        rank = self.effective_rank(rows, cols)
        p_bytes, q_bytes = rank * self._column_bytes(rows), rank * self._column_bytes(cols)
        q = state.tensors["q"]
        if state.step % self.refresh_interval == 0:
            q = _random_start(cols, rank, state.step).to(x.device).expand(n, cols, rank)
        p_payload = payload[:, :p_bytes].unflatten(1, (rank, self._column_bytes(rows)))
        q_payload = payload[:, p_bytes : p_bytes + q_bytes].unflatten(1, (rank, self._column_bytes(cols)))
        payload[:, p_bytes + q_bytes :] = 0

        # 1. Each tensor by its own products, so that results do not depend on n.
        for _ in range(self.iterations):
            p = orthonormal(_each_product(x, q))
            q = _each_product(x.transpose(1, 2), p)
        self._write(p.transpose(1, 2), p_payload)

        # 2. P is what the decoder will see from here on.
        p = self._read(p_payload, rows).transpose(1, 2)
        q = _each_product(x.transpose(1, 2), p)
        q = _divide_by_gram(q, p)
        self._write(q.transpose(1, 2), q_payload)
        is_overflow = ~q.isfinite().all(dim=(1, 2))
        keep = (is_bad | is_overflow)[:, None, None]
        state.tensors["q"] = torch.where(keep, state.tensors["q"], q)
        return is_overflow

    def decode_payload(self, payload: Tensor, out: Tensor) -> None:
        """See `Codec.decode_payload`."""
        p, q = self._factors(payload, out.shape[1], out.shape[2])
        out.zero_()
        for column in range(p.shape[1]):
            # The outer product is a tensor of its own: fused with the sum it would be rounded once instead of twice.
            product = p[:, column, :, None] * q[:, column, None, :]
            if column:
                out += product
            else:
                out.copy_(product)

    def _factors(self, payload: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
        """P^T [n, rank, rows] and Q^T [n, rank, cols] as sent, fp32."""
        rank = self.effective_rank(rows, cols)
        p_bytes, q_bytes = rank * self._column_bytes(rows), rank * self._column_bytes(cols)
        p = self._read(payload[:, :p_bytes].unflatten(1, (rank, self._column_bytes(rows))), rows)
        return p, self._read(
            payload[:, p_bytes : p_bytes + q_bytes].unflatten(1, (rank, self._column_bytes(cols))), cols
        )

    def _column_bytes(self, length: int) -> int:
        """Bytes of one factor column."""
        if self.factors in FACTOR_BITS:
            return round_up(quantised_bytes(length, FACTOR_BITS[self.factors], FACTOR_BLOCK), 2)
        return length * FACTOR_DTYPES[self.factors].itemsize

    def _write(self, columns: Tensor, payload: Tensor) -> None:
        """Encode columns [n, rank, length] into payload [n, rank, bytes]."""
        n, rank, length = columns.shape
        if self.factors in FACTOR_BITS:
            bits = FACTOR_BITS[self.factors]
            encoded = payload.new_zeros(n * rank, payload.shape[2])
            exact = quantised_bytes(length, bits, FACTOR_BLOCK)
            write_quantised(columns.reshape(n * rank, length), encoded[:, :exact], bits, FACTOR_BLOCK)
            payload.copy_(encoded.view(payload.shape))
        else:
            payload.copy_(columns.contiguous().to(FACTOR_DTYPES[self.factors]).view(torch.uint8))

    def _read(self, payload: Tensor, length: int) -> Tensor:
        """The inverse of `_write`: fp32 [n, rank, length]."""
        n, rank, _ = payload.shape
        if self.factors in FACTOR_BITS:
            bits = FACTOR_BITS[self.factors]
            exact = quantised_bytes(length, bits, FACTOR_BLOCK)
            flat = payload.reshape(n * rank, payload.shape[2])[:, :exact]
            return read_quantised(flat, length, bits, FACTOR_BLOCK).view(n, rank, length)
        return payload.contiguous().view(FACTOR_DTYPES[self.factors]).float()


def _each_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b for each of n tensors by itself."""
    return torch.stack([one @ other for one, other in zip(a, b, strict=True)]) if len(a) else torch.bmm(a, b)


def orthonormal(p: Tensor) -> Tensor:
    """Orthonormal columns that span those of p [n, rows, rank], whatever p's own rank; zeros give unit vectors."""
    # Columns of length 1 first: a product of lengths near the ends of the fp32 range would over- or underflow.
    largest = p.abs().amax(dim=1, keepdim=True)
    factor: Tensor = torch.linalg.qr(p / torch.where(largest > 0, largest, 1.0)).Q
    return factor


def _divide_by_gram(q: Tensor, p: Tensor) -> Tensor:
    """q (P^T P)^-1 for p [n, rows, rank], near-orthonormal but for its quantisation."""
    gram = torch.bmm(p.transpose(1, 2), p)
    # Quantised columns can be dependent; a little on the diagonal keeps the solution finite and barely moves others.
    diagonal = gram.diagonal(dim1=1, dim2=2)
    gram = gram + torch.diag_embed(1e-6 * diagonal.clamp(min=1e-3))
    solution: Tensor = torch.linalg.solve(gram, q.transpose(1, 2))
    return solution.transpose(1, 2)


def _random_start(cols: int, rank: int, step: int) -> Tensor:
    """Normal numbers [cols, rank], a function of the step alone, so equal in every run and for every tensor."""
    generator = torch.Generator().manual_seed(0x5EED + step)
    return torch.randn(cols, rank, generator=generator)
