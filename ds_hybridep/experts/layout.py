# SPDX-License-Identifier: Apache-2.0
"""How a layer's experts lie in memory.

A *slot* holds the experts of one rank of the domain.  Within a slot parameter follows parameter, each as [e, *shape]:
a slot is one message, and a parameter of all its experts is one contiguous tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ds_hybridep.experts.partitioned import full_shape


@dataclass(frozen=True)
class ParameterSlice:
    """Where one parameter of an expert lies in its block."""

    name: str
    shape: torch.Size
    start: int
    stop: int


@dataclass(frozen=True)
class Block:
    """The parameters of an expert that share dtype and trainability, one after the other."""

    dtype: torch.dtype
    is_trainable: bool
    slices: tuple[ParameterSlice, ...]

    @property
    def num_elements(self) -> int:
        return self.slices[-1].stop


def lay_out(expert: nn.Module, *, is_grouped: bool = False) -> tuple[Block, ...]:
    """Blocks of an expert, in the order of its parameters; `is_grouped`: these are [e, *shape]."""
    members: dict[tuple[torch.dtype, bool], list[ParameterSlice]] = {}
    for name, parameter in expert.named_parameters():
        slices = members.setdefault((parameter.dtype, parameter.requires_grad), [])
        start = slices[-1].stop if slices else 0
        shape = full_shape(parameter)[1:] if is_grouped else full_shape(parameter)
        slices.append(ParameterSlice(name, shape, start, start + shape.numel()))
    return tuple(Block(dtype, trainable, tuple(slices)) for (dtype, trainable), slices in members.items())


def num_local_experts(experts: Sequence[nn.Module], *, is_grouped: bool) -> int:
    return full_shape(next(experts[0].parameters()))[0] if is_grouped else len(experts)
