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
small become 0, so a row of zeros stays one, and no value is a subnormal number, which some machines take for 0.
"""

from functools import lru_cache

import torch
from torch import Tensor

from ds_hybridep.geometry.packets import LARGEST_RANK

LARGEST = 15  # of the odd integers
STEP = 0.335  # of the rms: the best for 16 equal steps of normally distributed values
SHIFT = 19  # of the 13 bits of a scale in fp32
LARGEST_CODE = (0x7F800000 >> SHIFT) - 1  # of a finite scale
BASES_BYTES = 4
SMALLEST_ROW_SCALE, SMALLEST_COL_SCALE = 2.0**-98, 2.0**-28  # their products are no subnormal numbers
LARGEST_BYTE = 255
EXPONENT = 0x7F800000  # bits of an fp32 number
SMALLEST_UNIT = 2.0**-100  # in place of zero; far from numbers that some machines take for zero
LARGEST_UNIT = 2.0**60  # more would make subnormal numbers
SMALLEST_SIZE = 1e-3  # of the largest: what is smaller is not made larger when sizes are shared out
TINY = 1e-30  # in place of zero in a division
RIDGE = 1e-3  # by this share the diagonal of P P^T grows before Q is solved for


class Divided:
    """A matrix x [n, rows, cols] with rows and columns divided by their weights [n, rows] and [n, cols].

    Factors are divided in place of x, as they are smaller.  `row_weight` also has a power of two, which makes the
    largest element of x about 1: so squares of products stay within fp32.
    """

    def __init__(self, x: Tensor, row_weight: Tensor, col_weight: Tensor) -> None:
        flat = x.flatten(1)
        largest = flat.amax(dim=1, keepdim=True).maximum(-flat.amin(dim=1, keepdim=True)).clamp_(min=SMALLEST_UNIT)
        unit = (largest.view(torch.int32) & EXPONENT).view(torch.float32)
        # What is large is divided before it is multiplied, what is small after it.
        before = unit.clamp(min=1.0, max=LARGEST_UNIT)
        after = unit / before
        self._x, self.row_weight, self.col_weight = x, row_weight * unit, col_weight
        self._rows = (row_weight * before).unsqueeze(1), (row_weight * after).unsqueeze(1)
        self._cols = (col_weight * before).unsqueeze(1), (col_weight * after).unsqueeze(1)

    def times_rows(self, q: Tensor) -> Tensor:
        """Return the product [n, rank, rows] of q [n, rank, cols] and the transposed matrix."""
        before, (_, after) = self._cols[0], self._rows
        return torch.bmm(q / before, self._x.mT).div_(after)

    def times_cols(self, p: Tensor) -> Tensor:
        """Return the product [n, rank, cols] of p [n, rank, rows] and the matrix."""
        before, (_, after) = self._rows[0], self._cols
        return torch.bmm(p / before, self._x).div_(after)


def write_integers(p: Tensor, q: Tensor, x: Divided, *, payload: Tensor) -> tuple[Tensor, Tensor]:
    """Write factors of x.

    Returns the q [n, rank, cols] from which the next step starts, and [n] fp32: no value is larger than this.

    p, q: orthonormal rows [n, rank, rows], and the product [n, rank, cols] of p and x.
    payload: [n, bytes] uint8.
    """
    _, rank, rows = p.shape
    mix = rotation(rank, p.device)
    size = q.square().sum(dim=2, keepdim=True).sqrt_()
    size = size.maximum(SMALLEST_SIZE * size.amax(dim=1, keepdim=True)).clamp_(min=TINY).sqrt_()
    p, q = torch.bmm(mix * size.mT, p), torch.bmm(mix / size.mT, q)
    p_odd, p_scales = _quantise(p, x.row_weight, torch.bmm(q, q.mT), SMALLEST_ROW_SCALE)
    # The best Q for this P.
    p = p_odd * (_scale(p_scales) / x.row_weight).unsqueeze(1)
    gram = torch.bmm(p, p.mT)
    q = _solve(gram, x.times_cols(p))
    q_odd, q_scales = _quantise(q, x.col_weight, gram, SMALLEST_COL_SCALE)
    codes = torch.cat([p_odd.flatten(1), q_odd.flatten(1)], dim=1).add_(LARGEST).div_(2).to(torch.uint8)
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    largest = torch.cat([p_scales.amax(dim=1, keepdim=True), q_scales.amax(dim=1, keepdim=True)], dim=1)
    bases = (largest - LARGEST_BYTE).clamp_(min=0)
    scales = torch.cat([p_scales - bases[:, :1], q_scales - bases[:, 1:]], dim=1).clamp_(min=0).to(torch.uint8)
    words = bases.to(torch.int16).view(torch.uint8)
    said = torch.cat([codes[:, ::2] | codes[:, 1::2] << 4, words, scales], dim=1)
    payload[:, : said.shape[1]] = said
    if said.shape[1] < payload.shape[1]:
        payload[:, said.shape[1] :] = 0
    row_scale, col_scale = _scale(largest).unbind(dim=1)
    return q, row_scale * (rank * LARGEST**2) * col_scale.clamp(min=1.0)


def read_integers(payload: Tensor, rank: int, out: Tensor) -> Tensor:
    """Assign the value of a payload to out [n, rows, cols] fp32; returns out."""
    _, rows, cols = out.shape
    num_codes = rank * (rows + cols)
    end = -(-num_codes // 2)
    packed = payload[:, :end]
    codes = torch.stack([packed & 15, packed >> 4], dim=2).flatten(1)[:, :num_codes]
    odd = codes.float().mul_(2).sub_(LARGEST)
    p, q = odd[:, : rank * rows].view(-1, rank, rows), odd[:, rank * rows :].view(-1, rank, cols)
    row_scale, col_scale = _read_scales(payload[:, end:], rows, cols)
    return torch.bmm(p.mT, q, out=out).mul_(row_scale.unsqueeze(2)).mul_(col_scale.unsqueeze(1))


def _read_scales(payload: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
    """Return the scales of rows [n, rows] and of columns [n, cols]; payload: what follows the codes."""
    wide = payload[:, : BASES_BYTES + rows + cols].int()
    bases, scales = wide[:, :BASES_BYTES:2] | wide[:, 1:BASES_BYTES:2] << 8, wide[:, BASES_BYTES:]
    row_scales, col_scales = scales[:, :rows], scales[:, rows:]
    row_codes = (row_scales + bases[:, :1]).mul_(row_scales > 0)  # a byte of 0 is a scale of 0
    return _scale(row_codes), _scale((col_scales + bases[:, 1:]).mul_(col_scales > 0))


def _quantise(v: Tensor, weight: Tensor, gram: Tensor, smallest: float) -> tuple[Tensor, Tensor]:
    """Return odd integers [n, rank, m] fp32 for v, and codes [n, m] of their scales times `weight` [n, m].

    gram: of the other factor, [n, rank, rank].  smallest: smaller scales become 0.

    Scales make the error of the product least: those that make the error of this factor least shrink all values by 1%
    to 4%, and over the rank this adds up, unlike other rounding.
    """
    rms = v.square().mean(dim=1, keepdim=True).sqrt()
    step = (STEP * rms).minimum(v.abs().amax(dim=1, keepdim=True) / (LARGEST / 2))
    odd = (v / step.clamp(min=TINY)).floor_().mul_(2).add_(1).clamp_(-LARGEST, LARGEST)
    across = torch.bmm(gram, odd)
    linear, square = (across * v).sum(dim=1, keepdim=True), (across * odd).sum(dim=1, keepdim=True)
    scale = linear / square.clamp(min=TINY)
    scale = scale.clamp(min=step / 4, max=step).squeeze(1)  # half a step is what plain rounding would take
    scale *= weight
    return odd, _code(scale).mul_(scale >= smallest)


def _solve(gram: Tensor, q: Tensor) -> Tensor:
    """Return gram^-1 q for [n, rank, rank] and [n, rank, cols]; where that cannot be, q over the diagonal of gram.

    Rows of P are nearly dependent where the matrix has fewer directions than `rank`, such as an expert's gradient of
    few tokens.  Without the ridge, Q then has large parts that cancel, and rounding them leaves more than was there:
    30 times in a matrix of rank 1.
    """
    factor = cholesky(gram.clone(), RIDGE)  # not `cholesky_solve`, which lets the host wait in some versions
    half = torch.linalg.solve_triangular(factor, q, upper=False)
    found: Tensor = torch.linalg.solve_triangular(factor.mT, half, upper=True)
    return found


def cholesky(gram: Tensor, ridge: float) -> Tensor:
    """Return Cholesky factors of gram [n, rank, rank], whose diagonal grows by the share `ridge`.

    Where rounding has made it indefinite, they are the roots of the diagonal.
    """
    diagonal = gram.diagonal(dim1=1, dim2=2).mul_(1 + ridge).clamp_(min=TINY)
    factor: Tensor
    factor, info = torch.linalg.cholesky_ex(gram)
    if gram.device.type == "cpu" and not info.any():  # elsewhere, looking would be a device-to-host sync
        return factor
    has_failed = info.bool()
    factor = factor.masked_fill(has_failed.view(-1, 1, 1), 0.0)
    factor.diagonal(dim1=1, dim2=2).add_(diagonal.sqrt() * has_failed.unsqueeze(1))
    return factor


def _code(scale: Tensor) -> Tensor:
    """Return the code of scales >= 0, rounded to the nearest."""
    bits = scale.contiguous().view(torch.int32)
    return ((bits + (1 << (SHIFT - 1))) >> SHIFT).clamp(max=LARGEST_CODE)


def _scale(codes: Tensor) -> Tensor:
    return (codes << SHIFT).view(torch.float32)


@lru_cache(maxsize=LARGEST_RANK)
def rotation(rank: int, device: torch.device) -> Tensor:
    """Return an orthogonal matrix; only encoders use it."""
    factor: Tensor = torch.linalg.qr(fixed_normal(rank, rank, rank, torch.device("cpu"))).Q
    return factor.contiguous().to(device)


def fixed_normal(seed: int, rows: int, cols: int, device: torch.device) -> Tensor:
    """Return normally distributed fp32 values [rows, cols], the same each time on one kind of device."""
    made_on = device if device.type == "cuda" else torch.device("cpu")  # a user may have set another default
    generator = torch.Generator(made_on).manual_seed(seed)
    return torch.randn(rows, cols, generator=generator, dtype=torch.float32, device=made_on).to(device)
