# SPDX-License-Identifier: Apache-2.0
"""Lays out a layer's experts in memory, and holds the slot of the experts that this rank owns.

A *slot* holds the experts of one rank of the domain.  Each of its blocks stores one parameter after the other, as
[e, *shape].  So a block is one message, and each parameter of all e experts is one contiguous tensor.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from ds_hybridep.errors import UnsupportedError
from ds_hybridep.experts.partitioned import full_shape, gathered, give_full_shapes


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
    """Return the blocks of an expert, in the order of its parameters, which are [e, *shape] if `is_grouped`."""
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
    """The layout of a slot of e experts, and views of tensors with this layout.

    experts: e modules; if `is_grouped`, one module with parameters [e, *shape].
    """

    def __init__(self, experts: Sequence[nn.Module], device: torch.device, *, is_grouped: bool) -> None:
        self.is_grouped, self.num_modules, self.device = is_grouped, len(experts), device
        self.num_local = num_local_experts(experts, is_grouped=is_grouped)
        self.blocks = lay_out(experts[0], is_grouped=is_grouped)
        self.trainable_blocks = tuple(block for block in self.blocks if block.is_trainable)
        self.trainable = tuple(piece for block in self.trainable_blocks for piece in block.slices)

    def resized(self, num_local: int) -> "SlotLayout":
        """Return the layout of a slot of other experts of the same kind."""
        other = copy.copy(self)
        other.num_local, other.num_modules = num_local, 1 if self.is_grouped else num_local
        return other

    @property
    def sum_bytes(self) -> int:
        """Bytes of the fp32 gradient sums of a slot."""
        return 4 * self.num_local * sum(block.num_elements for block in self.trainable_blocks)

    @property
    def sum_sizes(self) -> list[tuple[int, torch.dtype]]:
        """Elements of each trainable block of a slot, and their type."""
        return [(self.num_local * block.num_elements, block.dtype) for block in self.trainable_blocks]

    def new(self, block: Block, dtype: torch.dtype | None = None) -> Tensor:
        """Return zeros [e * n] for a block, by default in its dtype."""
        return torch.zeros(self.num_local * block.num_elements, dtype=dtype or block.dtype, device=self.device)

    def parts(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return views [e, *shape] of trainable parameters, in tensors [e * n] for each trainable block."""
        pairs = zip(self.trainable_blocks, tensors, strict=True)
        return [self._part(tensor, piece) for block, tensor in pairs for piece in block.slices]

    def by_module(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Return `parts` ordered by module of `experts`, then by parameter."""
        if self.is_grouped:
            return list(parts)
        return [part[module_idx] for module_idx in range(self.num_modules) for part in parts]

    def by_name(self, tensors: Sequence[Tensor], *, trainable_only: bool = False) -> list[dict[str, Tensor]]:
        """Return views by parameter name for each of `experts`, in tensors [e * n] for each (trainable) block."""
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


class OwnSlot:
    """The slot of this rank's own experts in one layer.  It has memory between `fill` or `adopt` and `free`.

    Args:
        experts: as in `SlotLayout`.
        master_of: returns the optimizer's fp32 copy of a parameter; None if this rank does not have it.
    """

    def __init__(
        self,
        layer: str,
        experts: Sequence[nn.Module],
        layout: SlotLayout,
        master_of: Callable[[nn.Parameter], Tensor | None],
    ) -> None:
        self.layer, self.experts, self._layout, self._master_of = layer, tuple(experts), layout, master_of
        self._weights: list[Tensor | None] = [None for _ in layout.blocks]
        self._trainable_names = tuple(piece.name for piece in layout.trainable)

    # -- parameters ----------------------------------------------------------------------------------------------

    @cached_property  # asked 200 times a step
    def is_partitioned(self) -> bool:
        """True if ZeRO-3 keeps only a part of each owned expert here; then experts compute with the slot."""
        return any(hasattr(parameter, "ds_id") for parameter in self.experts[0].parameters())

    def parameters(self) -> list[nn.Parameter]:
        """Return trainable parameters, by `experts` and name; ZeRO-3 does not gather them for this."""
        named = [dict(expert.named_parameters()) for expert in self.experts]
        return [parameters[name] for parameters in named for name in self._trainable_names]

    def give_full_shapes(self) -> list[nn.Parameter]:
        """Give parameters that ZeRO-3 has taken away their full shape, for autograd, and return them."""
        return give_full_shapes(self.parameters()) if self.is_partitioned else []

    def check_trainability(self) -> None:
        """Raise UnsupportedError if a parameter was unfrozen since the blocks were laid out."""
        if all(block.is_trainable for block in self._layout.blocks):
            return
        for expert_idx, expert in enumerate(self.experts):
            for name, parameter in expert.named_parameters():
                if parameter.requires_grad and name not in self._trainable_names:
                    raise UnsupportedError(
                        f"{self.layer}: a frozen parameter of local expert {expert_idx} became trainable; "
                        f"call ds_hybridep.detach(engine) before and ds_hybridep.attach(engine) after that"
                    )

    def sources(self) -> list[Tensor]:
        """Return trainable weights as exact as this rank has them, [e, *shape] in the order of the layout.

        These are the optimizer's fp32 masters if they are here; otherwise the parameters, or under ZeRO-3 the slot.
        Masters are better because the rounding noise of a bf16 weight does not compress.
        """
        named = [dict(expert.named_parameters()) for expert in self.experts]  # once, as it is slow
        held = self.by_name() if self.is_partitioned else named
        return [
            self._source(piece, [one[piece.name] for one in named], [one[piece.name] for one in held])
            for piece in self._layout.trainable
        ]

    def _source(self, piece: ParameterSlice, parameters: Sequence[nn.Parameter], held: Sequence[Tensor]) -> Tensor:
        if held[0].dtype != torch.float32:  # an fp32 weight is as exact as its master
            masters = [master for parameter in parameters if (master := self._master_of(parameter)) is not None]
            held = masters if len(masters) == len(parameters) else held
        shaped = [one.detach().reshape(-1, *piece.shape) for one in held]
        return shaped[0] if len(shaped) == 1 else torch.cat(shaped)

    def versions(self) -> list[tuple[int, int]]:
        """Return values that change when torch writes to a parameter, or when its memory is replaced."""
        if self.is_partitioned:
            return []
        return [(p._version, p.data_ptr()) for expert in self.experts for p in expert.parameters()]

    # -- the slot ------------------------------------------------------------------------------------------------

    @property
    def held(self) -> list[Tensor]:
        """Blocks that have memory now."""
        return [weights for weights in self._weights if weights is not None]

    def values(self, *, trainable_only: bool) -> list[Tensor]:
        """Return [e * n] for each block; the slot must have been filled."""
        pairs = zip(self._layout.blocks, self._weights, strict=True)
        wanted = [weights for block, weights in pairs if block.is_trainable or not trainable_only]
        values = [weights for weights in wanted if weights is not None]
        assert len(values) == len(wanted), f"{self.layer}: the own slot is not filled"
        return values

    def by_name(self) -> list[dict[str, Tensor]]:
        """Return the weights to compute with, by name for each of `experts`: parameters, or under ZeRO-3 the slot."""
        if self.is_partitioned:
            return self._layout.by_name(self.values(trainable_only=False))
        return [dict(expert.named_parameters()) for expert in self.experts]

    def fill(self, *, trainable_only: bool) -> None:
        """Copy the parameters into the slot; under ZeRO-3 the ranks that share them must call together."""
        self.make_room(trainable_only=trainable_only)
        self._load(self.values(trainable_only=trainable_only), trainable_only=trainable_only)

    def make_room(self, *, trainable_only: bool) -> None:
        """Allocate memory for the slot."""
        self._weights = [
            self._layout.new(block) if held is None and (block.is_trainable or not trainable_only) else held
            for held, block in zip(self._weights, self._layout.blocks, strict=True)
        ]

    def adopt(self, values: Sequence[Tensor]) -> None:
        """Use these tensors as the slot's trainable blocks.  They must hold its values, in the order of `values`."""
        iterator = iter(values)
        pairs = zip(self._layout.blocks, self._weights, strict=True)
        self._weights = [next(iterator) if block.is_trainable else held for block, held in pairs]

    def free(self) -> None:
        """Free the slot once it was sent.  Under ZeRO-3 it stays."""
        if not self.is_partitioned:
            self._weights = [None for _ in self._weights]

    def copy(self) -> list[Tensor]:
        """Return a copy of the trainable parameters in the form of `values`, without changing the slot."""
        values = [self._layout.new(block) for block in self._layout.trainable_blocks]
        self._load(values, trainable_only=True)
        return values

    def _load(self, values: Sequence[Tensor], *, trainable_only: bool) -> None:
        """Copy the parameters into `values`.  ZeRO moves their memory, so look them up every time."""
        places_of = self._layout.by_name(values, trainable_only=trainable_only)
        pairs = [
            (places[name], parameter)
            for expert, places in zip(self.experts, places_of, strict=True)
            for name, parameter in expert.named_parameters()
            if name in places
        ]
        with gathered([parameter for _, parameter in pairs]) if self.is_partitioned else nullcontext():
            for place, parameter in pairs:
                place.copy_(parameter.detach())

    def release(self) -> None:
        self._weights = []
