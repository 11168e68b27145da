# SPDX-License-Identifier: Apache-2.0
"""Replicas of hot experts: those experts of other ranks of a level that this rank computes for its own tokens.

A layer has a `HotSlot(s)` for the h hot experts of slot s, weights [h * n] for each block of `experts.slots`.  If this
rank holds slot s as a whole (it is *near*), that is a copy on its way to other ranks.  Else it is the replica.
"""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from ds_hybridep.experts.slots import SlotLayout


class HotReplicas:
    """The hot experts of one layer on this rank; there are none at first.

    Args:
        layout: of a whole slot.
        experts: by slot, the global experts in it.
        near: the slots that this rank holds as a whole.
    """

    def __init__(self, layout: SlotLayout, experts: Sequence[range], near: Collection[int]) -> None:
        self._layout, self._experts, self._near = layout, experts, near
        self.experts: tuple[int, ...] = ()
        self.lacks_frozen = False  # until frozen parameters of the present experts have travelled
        self._local: dict[int, Tensor] = {}  # by slot, places of the hot experts in its whole slot
        self._layouts: dict[int, SlotLayout] = {}
        self._weights: dict[int, list[Tensor]] = {}
        self._views: dict[int, list[dict[str, Tensor]]] = {}
        self._copies: dict[int, list[Tensor]] = {}
        self._filled: set[int] = set()  # copies that have their values

    def choose(self, experts: Sequence[int]) -> None:
        """Make these experts of the slots the hot ones.  No gradients may wait, and their weights must come next."""
        self.experts = tuple(experts)
        self.lacks_frozen = not all(block.is_trainable for block in self._layout.blocks)
        hot = set(experts)
        local = {
            slot: [at for at, expert in enumerate(ids) if expert in hot] for slot, ids in enumerate(self._experts)
        }
        device = self._layout.device
        self._copies, self._filled = {}, set()
        self._local = {slot: torch.tensor(places, device=device) for slot, places in local.items() if places}
        self._layouts = {slot: self._layout.resized(len(places)) for slot, places in self._local.items()}
        far = [slot for slot in self._local if slot not in self._near]
        self._weights = {slot: [*map(self._layouts[slot].new, self._layout.blocks)] for slot in far}
        self._views = {slot: self._layouts[slot].by_name(weights) for slot, weights in self._weights.items()}

    # -- what a rank computes ---------------------------------------------------------------------------------------

    @property
    def slots(self) -> tuple[int, ...]:
        """Slots of which there are replicas, in ascending order."""
        return tuple(self._weights)

    def experts_in(self, slot: int) -> list[int]:
        """Return the hot experts of a slot, in the order of their weights."""
        return [self._experts[slot][at] for at in self._local[slot].tolist()]

    def layout_of(self, slot: int) -> SlotLayout | None:
        """Return the layout of a slot's hot experts; None if it has none."""
        return self._layouts.get(slot)

    def places_in(self, slot: int) -> Tensor:
        """Return the places of the hot experts of a slot in the whole slot, int64 [h]."""
        return self._local[slot]

    def weights_by_name(self, slot: int) -> list[dict[str, Tensor]]:
        """Return the weights of a replica by parameter name: for each expert, or once if experts are grouped."""
        return self._views[slot]

    # -- weights that travel ----------------------------------------------------------------------------------------

    def make_room(self, *, trainable_only: bool) -> None:
        """Allocate the copies of the hot experts of near slots."""
        self._copies, self._filled = {}, set()
        for slot, layout in self._layouts.items():
            if slot not in self._weights:
                blocks = layout.trainable_blocks if trainable_only else layout.blocks
                self._copies[slot] = [*map(layout.new, blocks)]

    def copy(self, slot: int, weights: Sequence[Mapping[str, Tensor]], *, trainable_only: bool) -> list[Tensor]:
        """Fill and return the copy of the hot experts of a near slot, [h * n] for each block, kept until `free`.

        weights: of the whole slot, as `Replicas.weights_by_name` returns them.
        """
        if slot not in self._copies or slot in self._filled:
            return self._copies.get(slot, [])
        layout, places, copied = self._layouts[slot], self._local[slot], self._copies[slot]
        into = layout.by_name(copied, trainable_only=trainable_only)
        if layout.is_grouped:
            for name, place in into[0].items():
                torch.index_select(weights[0][name].detach(), 0, places, out=place)
        else:
            for one, at in zip(into, places.tolist(), strict=True):
                for name, place in one.items():
                    place.copy_(weights[at][name].detach())
        self._filled.add(slot)
        return copied

    def values(self, slot: int, *, trainable_only: bool) -> list[Tensor]:
        """Return the weights of a slot's hot experts, [h * n] for each block; of a near one, the copy."""
        if slot in self._weights:
            pairs = zip(self._layout.blocks, self._weights[slot], strict=True)
            return [weights for block, weights in pairs if block.is_trainable or not trainable_only]
        return self._copies.get(slot, [])

    def free(self) -> None:
        """Free the copies once they were sent."""
        self._copies, self._filled, self.lacks_frozen = {}, set(), False

    # -- memory -----------------------------------------------------------------------------------------------------

    @property
    def weights(self) -> list[Tensor]:
        return [tensor for slot in self._weights.values() for tensor in slot]

    @property
    def held(self) -> list[Tensor]:
        """All tensors that have memory now."""
        groups = (*self._weights.values(), *self._copies.values())
        return [tensor for group in groups for tensor in group]

    def release(self) -> None:
        """Free everything."""
        self.choose(())
