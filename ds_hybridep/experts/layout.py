# SPDX-License-Identifier: Apache-2.0
"""How a layer's experts lie in memory.

A *slot* holds the experts of one rank of the domain.  Within a slot parameter follows parameter, each as [e, *shape]:
a slot is one message, and a parameter of all its experts is one contiguous tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

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


class SlotLayout:
    """A slot of e experts of this kind, and views of tensors that are laid out like it.

    experts: e modules; `is_grouped`: one, with parameters [e, *shape].
    """

    def __init__(self, experts: Sequence[nn.Module], device: torch.device, *, is_grouped: bool) -> None:
        self.is_grouped, self.num_modules, self.device = is_grouped, len(experts), device
        self.num_local = num_local_experts(experts, is_grouped=is_grouped)
        self.blocks = lay_out(experts[0], is_grouped=is_grouped)
        self.trainable_blocks = tuple(block for block in self.blocks if block.is_trainable)
        self.trainable = tuple(piece for block in self.trainable_blocks for piece in block.slices)

    @property
    def sum_bytes(self) -> int:
        """Of an fp32 sum of gradients."""
        return 4 * self.num_local * sum(block.num_elements for block in self.trainable_blocks)

    def new(self, block: Block, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros [e * n] for a block, by default in its type."""
        return torch.zeros(self.num_local * block.num_elements, dtype=dtype or block.dtype, device=self.device)

    def parts(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Views [e, *shape] of trainable parameters, in tensors [e * n] for each trainable block."""
        pairs = zip(self.trainable_blocks, tensors, strict=True)
        return [self._part(tensor, piece) for block, tensor in pairs for piece in block.slices]

    def by_module(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The same by module of `experts`, then parameter."""
        if self.is_grouped:
            return list(parts)
        return [part[module_idx] for module_idx in range(self.num_modules) for part in parts]

    def by_name(self, tensors: Sequence[Tensor], *, trainable_only: bool = False) -> list[dict[str, Tensor]]:
        """Views by parameter name for each of `experts`, in tensors [e * n] for each block or trainable block."""
        parts = {
            piece.name: self._part(tensor, piece)
            for block, tensor in zip(self.trainable_blocks if trainable_only else self.blocks, tensors, strict=True)
            for piece in block.slices
        }
        return [
            {name: part if self.is_grouped else part[module_idx] for name, part in parts.items()}
            for module_idx in range(self.num_modules)
        ]

    def _part(self, tensor: Tensor, piece: ParameterSlice) -> Tensor:
        start, stop = self.num_local * piece.start, self.num_local * piece.stop
        return tensor[start:stop].view(self.num_local, *piece.shape)
