# SPDX-License-Identifier: Apache-2.0
"""Encodes and decodes tensors of one shape together: many small matrices cost about as much as one.

Packets, values and states are those of one tensor after the other, up to the rounding of an encoder.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ds_hybridep.codecs.interface import Codec, CodecState

MOST_ELEMENTS = 2**21  # of a batch: larger ones need memory, and are no faster


def batches(tensors: Sequence[tuple[int, int, int]], steps: Sequence[int] | None = None) -> list[list[int]]:
    """Return the places of tensors [n, rows, cols] that go together, in the order of the first of each.

    steps: that the encoder of each has made, which must be equal.
    """
    found: list[list[int]] = []
    open_batches: dict[tuple[int, int, int], tuple[list[int], int]] = {}
    for place, (n, rows, cols) in enumerate(tensors):
        key = rows, cols, 0 if steps is None else steps[place]
        batch, held = open_batches.get(key, ([], MOST_ELEMENTS))
        if held + n * rows * cols > MOST_ELEMENTS:
            batch, held = [], 0
            found.append(batch)
        batch.append(place)
        open_batches[key] = batch, held + n * rows * cols
    return found


def encode_batch(
    encode: Callable[..., Tensor], tensors: Sequence[Tensor], others: Sequence[Tensor], states: Sequence[CodecState],
    packets: Sequence[Tensor],
) -> None:  # fmt: skip
    """Encode tensors of a batch to packets.  `others`, which are mirrors or residuals, and states change in place.

    encode: `encode_update` or `encode_with_residual` of a codec.
    """
    if len(tensors) == 1:
        encode(tensors[0], others[0], states[0], out=packets[0])
        return
    state, other = CodecState.cat(states), torch.cat(list(others))
    found = encode(torch.cat(list(tensors)), other, state)
    state.split_into(states)
    sizes = [len(one) for one in tensors]
    torch._foreach_copy_(list(others), list(other.split(sizes)))
    torch._foreach_copy_(list(packets), list(found.split(sizes)))


def decode_add_batch(codec: Codec, packets: Sequence[Tensor], sums: Sequence[Tensor], factor: float) -> None:
    """Add what packets of a batch hold, times `factor`, to `sums` [n, rows, cols]."""
    if len(sums) == 1 and factor == 1.0:
        codec.decode_add(packets[0], sums[0])
        return
    sizes, joined = [len(one) for one in sums], torch.cat(list(packets))
    if factor == 1.0:
        total = codec.decode_add(joined, torch.cat(list(sums)))
        torch._foreach_copy_(list(sums), list(total.split(sizes)))
        return
    found = codec.decode(joined, sums[0].new_empty(sum(sizes), *sums[0].shape[1:]))
    torch._foreach_add_(list(sums), list(found.split(sizes)), alpha=factor)
