# SPDX-License-Identifier: Apache-2.0
"""The experts that this rank owns: their parameters, and the slot in which they are sent as they are."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from ds_hybridep.errors import UnsupportedError
from ds_hybridep.experts.layout import ParameterSlice, SlotLayout
from ds_hybridep.experts.partitioned import gathered


class OwnSlot:
    """The own slot of one layer.  It has memory between `stage` and `unstage`; some blocks' memory lasts.

    Args:
        experts: as in `SlotLayout`.
        lasting: by block, whether its memory lasts.
        master_of: the optimizer's fp32 copy of a parameter; None where it is not here.
    """

    def __init__(
        self,
        layer: str,
        experts: Sequence[nn.Module],
        layout: SlotLayout,
        lasting: Sequence[bool],
        master_of: Callable[[nn.Parameter], Tensor | None],
    ) -> None:
        self.layer, self.experts, self._layout, self._master_of = layer, tuple(experts), layout, master_of
        pairs = zip(layout.blocks, lasting, strict=True)
        self._lasting = [layout.new(block) if lasts else None for block, lasts in pairs]
        self._weights = list(self._lasting)
        self._trainable_names = tuple(piece.name for piece in layout.trainable)

    # -- parameters ----------------------------------------------------------------------------------------------

    @property
    def is_partitioned(self) -> bool:
        """True where ZeRO-3 keeps a part of each owned expert here, and the slot is what is computed with."""
        return any(hasattr(parameter, "ds_id") for parameter in self.experts[0].parameters())

    def parameters(self) -> list[nn.Parameter]:
        """Trainable ones, by `experts` and name; ZeRO-3 does not gather them."""
        named = [dict(expert.named_parameters()) for expert in self.experts]
        return [parameters[name] for parameters in named for name in self._trainable_names]

    def check_trainability(self) -> None:
        """Raise UnsupportedError where a parameter was unfrozen since the blocks were laid out."""
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
        """Trainable weights as exact as this rank has them, [e, *shape] by name.

        The optimizer's fp32 masters where they are here; otherwise the parameters, or under ZeRO-3 the slot.
        Rounding noise of a bf16 weight does not compress.
        """
        return [self._source(piece) for piece in self._layout.trainable]

    def _source(self, piece: ParameterSlice) -> Tensor:
        parameters = [dict(expert.named_parameters())[piece.name] for expert in self.experts]
        held: list[Tensor] = [weights[piece.name] for weights in self.by_name()]
        if held[0].dtype != torch.float32:  # otherwise a master holds no more
            masters = [master for parameter in parameters if (master := self._master_of(parameter)) is not None]
            held = masters if len(masters) == len(parameters) else held
        shaped = [one.detach().reshape(-1, *piece.shape) for one in held]
        return shaped[0] if len(shaped) == 1 else torch.cat(shaped)

    # -- the slot ------------------------------------------------------------------------------------------------

    @property
    def held(self) -> list[Tensor]:
        """Blocks that have memory now."""
        return [weights for weights in self._weights if weights is not None]

    def values(self, *, trainable_only: bool) -> list[Tensor]:
        """[e * n] for each block; it must have been staged."""
        pairs = zip(self._layout.blocks, self._weights, strict=True)
        wanted = [weights for block, weights in pairs if block.is_trainable or not trainable_only]
        values = [weights for weights in wanted if weights is not None]
        assert len(values) == len(wanted), f"{self.layer}: the own slot is not staged"
        return values

    def by_name(self) -> list[dict[str, Tensor]]:
        """What is computed with, by parameter name for each of `experts`: parameters, or under ZeRO-3 the slot."""
        if self.is_partitioned:
            return self._layout.by_name(self.values(trainable_only=False))
        return [dict(expert.named_parameters()) for expert in self.experts]

    def stage(self, *, trainable_only: bool) -> None:
        """Have the parameters in the slot; under ZeRO-3 the ranks that share them must call together."""
        self.make_room(trainable_only=trainable_only)
        self._load(self.values(trainable_only=trainable_only), trainable_only=trainable_only)

    def make_room(self, *, trainable_only: bool) -> None:
        """Memory for the slot."""
        self._weights = [
            self._layout.new(block) if held is None and (block.is_trainable or not trainable_only) else held
            for held, block in zip(self._weights, self._layout.blocks, strict=True)
        ]

    def unstage(self) -> None:
        """The slot was sent.  Under ZeRO-3 it stays."""
        if not self.is_partitioned:
            self._weights = list(self._lasting)

    def copy(self) -> list[Tensor]:
        """Trainable parameters as `values` has those of the slot, which stays as it is."""
        values = [self._layout.new(block) for block in self._layout.trainable_blocks]
        self._load(values, trainable_only=True)
        return values

    def _load(self, values: Sequence[Tensor], *, trainable_only: bool) -> None:
        """Reads parameters afresh: ZeRO re-points them."""
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
        self._lasting, self._weights = [], []
