# SPDX-License-Identifier: Apache-2.0
"""Keeps ranks in step that would call the model unequally often."""

from collections.abc import Sequence

import torch

from ds_hybridep.transport.channels import Purpose, Transport


def any_of(transport: Transport, ranks: Sequence[int], is_one: bool, name: str) -> bool:
    """Return True if `is_one` is True on any of `ranks`, which all call, this one among them."""
    hub, others = ranks[0], [rank for rank in ranks if rank != transport.rank]
    channel, purpose = transport.channel(name, ranks, hub=hub), Purpose("control", name)
    own, said = torch.tensor([is_one]), torch.zeros(len(others), dtype=torch.bool)
    if transport.rank != hub:
        channel.start([(hub, own)], [], purpose).wait()
        channel.start([], [(hub, own)], purpose).wait()
    else:
        channel.start([], list(zip(others, said.split(1), strict=True)), purpose).wait()
        own |= said.any()
        channel.start([(rank, own) for rank in others], [], purpose).wait()
    return bool(own)
