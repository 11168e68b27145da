# SPDX-License-Identifier: Apache-2.0
"""The two factors of low rank as small odd integers, which every library multiplies without rounding.

P and Q have few rows here, [rank, rows] and [rank, cols].  A rotation H of the rank changes nothing in their product:

    X ~ P^T Q = (H P)^T (H Q)

Once sizes are shared out between P and Q and mixed by H, all rows of a factor are about the same size.  Then 16 levels
do, -15, -13, ... 15, with a scale for each row and each column of X:

    X[i, j] ~ (p0 q0 + p1 q1 + ...) * scale of row i * scale of column j

The sum is a whole number of at most 256 * 225 < 2^24, so it is exact in fp32, in TF32 and in int8 with sums of 32
bits, in any order.  The two products are rounded one after the other.  So packets decode to the same bits everywhere.

The payload, of 4 + (rank / 2 + 1) * (rows + cols) bytes, the first part rounded up:

    codes of P, then of Q, two in a byte: code c stands for 2 c - 15
    the base of the scales of rows and that of columns, two bytes each, the low byte first
    a byte for each row, then one for each column: 0 for a scale of 0, else the scale's code minus its base

The code of a scale is the first 13 bits of its fp32 form: sign, exponent, and 4 bits of mantissa.  Scales that are too
small for a byte become 0, so a row of zeros stays one.
"""

from functools import lru_cache

import torch
from torch import Tensor

from ds_hybridep.geometry.packets import LARGEST_RANK

LEVELS = 16
LARGEST = LEVELS - 1
HALF_STEP = 0.1676  # of the rms: the best for 16 equal steps of normally distributed values
STRETCHES = (0.75, 0.87, 1.0, 1.15, 1.32)  # of steps that are tried for each row and column
SHIFT = 19  # of the 13 bits of a scale in fp32
LARGEST_CODE = (0x7F800000 >> SHIFT) - 1  # of a finite scale
BASES_BYTES = 4
SMALLEST_SIZE = 1e-3  # of the largest: what is smaller is not made larger when sizes are shared out


def write_integers(
    p: Tensor, q: Tensor, x: Tensor, *, row_weight: Tensor, col_weight: Tensor, payload: Tensor
) -> Tensor:
    """Write factors of x, and return the q [n, rank, cols] from which the next step starts.

    p, q: orthonormal rows [n, rank, rows], and p x [n, rank, cols].
    x: [n, rows, cols] fp32, divided by the weights [n, 1, rows] and [n, 1, cols], its largest element about 1.
    payload: [n, bytes] uint8.
    """
    n, rank, rows = p.shape
    size = q.norm(dim=2, keepdim=True)
    largest = size.amax(dim=1, keepdim=True)
    size = torch.where(largest > 0, size.maximum(SMALLEST_SIZE * largest), 1.0).sqrt()
    mix = _rotation(rank).to(x.device)
    p, q = _times(mix, p * size), _times(mix, q / size)
    p_codes, p_scales, p = _quantise(p, row_weight, _gram(q))
    # The best Q for this P.  Quantised rows can be dependent: a little on the diagonal keeps the solution finite.
    gram = _gram(p)
    diagonal = gram.diagonal(dim1=1, dim2=2)
    q = torch.linalg.solve(
        gram + torch.diag_embed(1e-6 * diagonal.mean(dim=1, keepdim=True).clamp(min=1e-30).expand(n, rank)),
        torch.stack([one @ other for one, other in zip(p, x, strict=True)]),
    )
    q_codes, q_scales, _ = _quantise(q, col_weight, gram)
    codes = torch.cat([p_codes.flatten(1), q_codes.flatten(1)], dim=1)
    codes = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    bases, scales = zip(*(_based(one) for one in (p_scales, q_scales)), strict=True)
    said = torch.cat([codes[:, ::2] | codes[:, 1::2] << 4, *bases, *scales], dim=1)
    payload.zero_()
    payload[:, : said.shape[1]] = said
    return q.contiguous()


def read_integers(payload: Tensor, rank: int, rows: int, cols: int) -> Tensor:
    """Return the value [n, rows, cols] fp32 of a payload."""
    num_codes = rank * (rows + cols)
    end = -(-num_codes // 2)
    packed = payload[:, :end]
    codes = torch.stack([packed & 15, packed >> 4], dim=2).flatten(1)[:, :num_codes]
    odd = codes.float() * 2 - LARGEST
    p, q = odd[:, : rank * rows].view(-1, rank, rows), odd[:, rank * rows :].view(-1, rank, cols)
    row_scale, col_scale = _read_scales(payload[:, end:], rows, cols)
    return torch.bmm(p.transpose(1, 2), q) * row_scale[:, :, None] * col_scale[:, None, :]


def integers_overflow(payload: Tensor, rank: int, rows: int, cols: int) -> Tensor:
    """Return [n] bool: values might leave fp32."""
    scales = _read_scales(payload[:, -(-rank * (rows + cols) // 2) :], rows, cols)
    row_scale, col_scale = (one.amax(dim=1) for one in scales)
    return ~(row_scale * (rank * LARGEST**2) * col_scale.clamp(min=1.0)).isfinite()


def _read_scales(payload: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """Return the scales of rows [n, rows] and of columns [n, cols]; payload: what follows the codes."""
    wide = payload[:, : BASES_BYTES + rows + cols].int()
    bases, scales = wide[:, :BASES_BYTES:2] | wide[:, 1:BASES_BYTES:2] << 8, wide[:, BASES_BYTES:]
    return _scale(scales[:, :rows], bases[:, :1]), _scale(scales[:, rows:], bases[:, 1:])


def _quantise(v: Tensor, weight: Tensor, gram: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return codes [n, rank, m] uint8 of v, codes [n, m] of scales times `weight` [n, 1, m], and the value of codes.

    gram: of the other factor, [n, rank, rank].  Scales make the error of the product least: those that make the error
    of this factor least shrink all values by 1% to 4%, and over the rank this adds up, unlike other rounding.
    """
    step = HALF_STEP * v.square().mean(dim=1, keepdim=True).sqrt()
    across = torch.bmm(gram, v)
    least: Tensor | None = None
    for stretch in STRETCHES:
        codes = (v / torch.where(step > 0, 2 * stretch * step, 1.0) + LEVELS / 2).floor().clamp(0, LARGEST)
        odd = codes * 2 - LARGEST
        linear = (odd * across).sum(dim=1, keepdim=True)
        square = (odd * torch.bmm(gram, odd)).sum(dim=1, keepdim=True)
        scale = linear / torch.where(square > 0, square, 1.0)
        scale = scale.maximum(0.5 * stretch * step).minimum(2 * stretch * step)
        scale_codes = _code(scale * weight)
        scale = _scale(scale_codes) / weight
        error = scale * (scale * square - 2 * linear)
        tried = codes, scale_codes, odd * scale
        if least is None:
            least, best = error, tried
        else:
            for old, new in zip(best, tried, strict=True):
                old.copy_(torch.where(error < least, new, old))
            least = error.minimum(least)
    codes, scale_codes, value = best
    return codes.to(torch.uint8), scale_codes.squeeze(1), value


def _code(scale: Tensor) -> Tensor:
    """Return the code of scales >= 0, rounded to the nearest."""
    bits = scale.contiguous().view(torch.int32)
    return ((bits + (1 << (SHIFT - 1))) >> SHIFT).clamp(max=LARGEST_CODE)


def _scale(codes: Tensor, base: Tensor | int = 0) -> Tensor:
    return torch.where(codes > 0, (codes + base) << SHIFT, 0).view(torch.float32)


def _based(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the base [n, 2] of codes [n, m] as two bytes, and what is left of codes, uint8."""
    base = (codes.amax(dim=1, keepdim=True) - 255).clamp(min=0)
    return torch.cat([base & 255, base >> 8], dim=1).to(torch.uint8), (codes - base).clamp(min=0).to(torch.uint8)


@lru_cache(maxsize=LARGEST_RANK)
def _rotation(rank: int) -> Tensor:
    """Return an orthogonal matrix; only encoders use it."""
    factor: Tensor = torch.linalg.qr(torch.randn(rank, rank, generator=torch.Generator().manual_seed(rank))).Q
    return factor


def _times(mix: Tensor, factor: Tensor) -> Tensor:
    return torch.stack([mix @ one for one in factor])


def _gram(factor: Tensor) -> Tensor:
    return torch.stack([one @ one.T for one in factor])
