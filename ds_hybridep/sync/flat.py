# SPDX-License-Identifier: Apache-2.0
"""The parts of messages in flat buffers of several tensors; `geometry.slots` says how these are cut into slots."""

import hashlib
import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ds_hybridep.geometry.slots import Span, shapes_of
from ds_hybridep.sync.messages import PacketPart


def parts_of(spans: Iterable[Span], dtype: torch.dtype = torch.float32) -> tuple[PacketPart, ...]:
    """Return the parts of a slot's message, in the order of its elements; neighbouring vectors form one part."""
    parts: list[PacketPart] = []
    for span in spans:
        start = span.start
        for shape in shapes_of(span.shape, span.start, span.num_elements):
            num_elements = math.prod(shape)
            spans_of: tuple[Span, ...] = (Span(span.name, span.shape, start, num_elements),)
            start += num_elements
            if len(shape) == 1 and parts and len(parts[-1].shape) == 1:
                before = parts.pop()
                shape, spans_of = (before.shape.numel() + num_elements,), before.spans + spans_of
            num_experts, *matrix = shape if len(shape) == 3 else (1, *shape)
            parts.append(PacketPart(torch.Size(matrix), num_experts, spans_of, dtype))
    return tuple(parts)


def split(flat: Tensor, parts: Sequence[PacketPart]) -> list[Tensor]:
    """Return views [e, *shape] of a flat slot, one for each part."""
    sizes = [part.num_experts * part.rows * part.cols for part in parts]
    pieces = zip(flat.split(sizes) if parts else (), parts, strict=True)
    return [piece.view(part.num_experts, *part.shape) for piece, part in pieces]


def hash_of(slots: Sequence[Sequence[Span]]) -> str:
    """Return a hash that is the same for the same spans in every process."""
    return hashlib.sha1(repr([tuple(slot) for slot in slots]).encode(), usedforsecurity=False).hexdigest()[:16]
