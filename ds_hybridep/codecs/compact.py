# SPDX-License-Identifier: Apache-2.0
"""fp32 tensors in 20 bits per element, for what is kept between steps.

BLOCK consecutive elements share a power of two, the unit, and become multiples of it:

    unit = 2^(e - 19), where every magnitude of the block is below 2^e
    element = q * unit, q an integer from -2^19 to 2^19 - 1

An element between two multiples becomes one or the other at random, the nearer one more often, so that its mean is
right.  Rounding to the nearest would lose for good what is added in steps below half a unit.  The random numbers
depend on a seed and the element's place only, and all kernels give the same bits.

A block takes BLOCK_WORDS words of 16 bits:

    words 0 .. 127     q >> 4 of each element
    words 128 .. 159   word 128 + j: the low four bits of elements j, j + 32, j + 64 and j + 96, the first one lowest
    word 160           e + 127, or 0 if all elements are zero

The last block of a tensor is filled up with zeros.  Magnitudes below 2^-126 count as 0, units below that as 2^-126.
"""

import torch
from torch import Tensor

from ds_hybridep.kernels import Mode, load_codec_kernels

BLOCK = 128
BLOCK_WORDS = 161
_LANES = 32  # elements that are BLOCK / 4 apart share a word of low bits
_LARGEST = 2.0**19 - 1
_SMALLEST_EXPONENT = -107  # of 2^e: the unit is then the smallest normal number
_MASK = 0xFFFFFFFF


def mix(number: int) -> int:
    """Return 32 bits that look random, for 32 bits."""
    number ^= number >> 16
    number = number * 0x7FEB352D & _MASK
    number ^= number >> 15
    number = number * 0x846CA68B & _MASK
    return number ^ number >> 16


def compact_shape(n: int, length: int) -> tuple[int, int, int]:
    """Return the shape of n compact tensors of `length` elements, int16 [n, blocks, BLOCK_WORDS]."""
    return n, -(-length // BLOCK), BLOCK_WORDS


def compact(values: Tensor, seed: int, kernels: Mode = "auto") -> Tensor:
    """Return the compact form of finite values [n, ...] fp32, int16 [n, blocks, BLOCK_WORDS].  seed: 32 bits."""
    flat = values.flatten(1)
    words = torch.empty(compact_shape(*flat.shape), dtype=torch.int16, device=values.device)
    compiled = load_codec_kernels(kernels, values.device.type)
    if compiled is not None:
        compiled.compact(flat, words, seed)
        return words
    n, num_blocks, _ = words.shape
    blocks = torch.nn.functional.pad(flat, (0, num_blocks * BLOCK - flat.shape[1])).view(n, num_blocks, BLOCK)
    # 1. Units.  frexp gives magnitudes in [0.5, 1) times 2^e.
    largest = blocks.abs().amax(-1)
    exponent = torch.frexp(largest).exponent.clamp(min=_SMALLEST_EXPONENT)
    exponent += (largest * _power(19 - exponent) > _LARGEST).int()
    is_zero = largest < 2.0**-126
    # 2. Multiples, rounded at random.
    scaled = blocks * _power(19 - exponent)[..., None]
    below = scaled.floor()
    at = torch.arange(n * num_blocks * BLOCK, device=values.device).view(blocks.shape)
    chance = ((_mixed((at * 0x9E3779B9 & _MASK) ^ seed) >> 9).float() + 0.5) * 2.0**-23
    q = (below + (chance < scaled - below)).int()
    q = torch.where(is_zero[..., None], 0, q)
    # 3. Words.
    low = (q & 15).view(n, num_blocks, 4, _LANES)
    words[..., :BLOCK] = (q >> 4).to(torch.int16)
    shifts = torch.arange(0, 16, 4, device=values.device, dtype=torch.int32)[:, None]
    words[..., BLOCK:-1] = (low << shifts).sum(-2).to(torch.int16)
    words[..., -1] = torch.where(is_zero, 0, exponent + 127).to(torch.int16)
    return words


def expand(words: Tensor, out: Tensor, kernels: Mode = "auto") -> Tensor:
    """Assign to out [n, ...] fp32 what its compact form `words` holds; returns it."""
    compiled = load_codec_kernels(kernels, out.device.type)
    if compiled is not None:
        compiled.expand(words, out)
        return out
    wide = words.int()
    shifts = torch.arange(0, 16, 4, device=words.device, dtype=torch.int32)[:, None]
    low = (wide[..., BLOCK:-1].unsqueeze(-2) >> shifts & 15).flatten(-2)
    q = wide[..., :BLOCK] * 16 + low
    values = q.float() * _power(wide[..., -1] - 127 - 19)[..., None]
    return out.copy_(values.flatten(1)[:, : out.shape[1:].numel()].view(out.shape))


def _power(exponent: Tensor) -> Tensor:
    """Return 2^exponent as fp32, for exponents from -126 to 127; below them, 0."""
    return ((exponent + 127).clamp(min=0) << 23).int().view(torch.float32)


def _mixed(numbers: Tensor) -> Tensor:
    """`mix` for each of [...] int64."""
    numbers = numbers ^ numbers >> 16
    numbers = numbers * 0x7FEB352D & _MASK
    numbers = numbers ^ numbers >> 15
    numbers = numbers * 0x846CA68B & _MASK
    return numbers ^ numbers >> 16
