# SPDX-License-Identifier: Apache-2.0
"""Patches: exact for all bits, equal in all kernels, within their bounds, and safe against damage."""

import pytest
import torch

from ds_hybridep.codecs import Patch

DTYPES = [torch.bfloat16, torch.float16]
BLOCK, SEGMENT = 4096, 2**20


def bits_of(weights):
    return weights.view(torch.int16)


def from_bits(bits, dtype):
    """Weights with these bits, of which the low 16 count."""
    return (bits & 0xFFFF).to(torch.int16).view(dtype)


def encoded(patch, new, old, sequence=0):
    """The packet that turns `old` into `new`, after checks of what encoding must leave behind."""
    sent, out = old.clone(), torch.full((patch.max_bytes(len(new)) + 8,), 0xA5, dtype=torch.uint8)
    length = patch.encode(new, sent, out, sequence)
    assert torch.equal(bits_of(sent), bits_of(new))
    assert length <= patch.max_bytes(len(new))
    assert torch.equal(out[-8:], torch.full((8,), 0xA5, dtype=torch.uint8))
    assert patch.length(out) == length
    assert patch.sequence(out) == sequence % 2**32
    return out[:length].clone()


def assert_round_trip(patch, new, old):
    held = old.clone()
    packet = encoded(patch, new, old)
    patch.decode(packet, held)
    assert torch.equal(bits_of(held), bits_of(new))
    return packet


@pytest.mark.parametrize("kernels", ["compiled", "reference"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_can_be_old_and_new(kernels, dtype):
    every = torch.arange(2**16)
    generator = torch.Generator().manual_seed(0)
    for new in (every, every.flip(0), every[torch.randperm(2**16, generator=generator)], every ^ 0x8000, every + 1):
        assert_round_trip(Patch(kernels=kernels), from_bits(new, dtype), from_bits(every, dtype))
