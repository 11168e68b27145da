# SPDX-License-Identifier: Apache-2.0
"""The return of gradients: from the backward of a layer's replicas to the parameters of the experts' owners.

Each call of a layer has two autograd nodes.  In the forward both only pass weights on.  In the backward:

    experts of layer l -> _StartReturn(l)  adds gradients of replicas to this rank's sums; at the boundary these leave
                          ...              other layers run, and transfers go on meanwhile
                          _FinishReturn(l) waits for what comes back, adds it to the gradient of the own experts
                          -> the parameters of these

Own gradients pass from the first node to the second.  Autograd runs the newest node first.  So layer l's _FinishReturn
is made by the forward of layer l - depth, and its backward runs `depth` layers after that of _StartReturn.

Until the accumulation boundary, gradients stay in the sums.  Then a `sync.transfers.Reduce` takes these to the owners.
DeepSpeed takes the mean over ranks, here as for all gradients.  The optimizer step begins with
`experts.migration.MigrationManager.check_returned`.

Forward and step communicate from the main thread, the backward from autograd's; no other thread starts a transfer.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ds_hybridep.errors import NO_SECOND_DERIVATIVES, GradientNotReturnedError, UnsupportedError
from ds_hybridep.experts.partitioned import drop_full_shapes
from ds_hybridep.experts.replicas import Replicas, outliving_inference
from ds_hybridep.experts.slots import SlotLayout
from ds_hybridep.sync.error_feedback import SlotCodecs
from ds_hybridep.sync.stages import HotSlot, SlotKey
from ds_hybridep.sync.transaction import accumulates, is_in_backward
from ds_hybridep.sync.transfers import Reduce, StagePipeline
from ds_hybridep.transport.channels import Purpose, profiler_range

# -- sums ---------------------------------------------------------------------------------------------------------


class GradientSums:
    """Sums of one layer's gradients by slot, fp32 [e * n] for each trainable block (`sync.transfers.SumSlots`).

    of a replica     this rank's gradients, and those that it sends on; from the first one until a message has them
    of the own slot  what comes back; from the first arrival until it goes to the parameters
    of a `HotSlot`   of its h hot experts, [h * n], in the same way; where the whole slot is here, it is added to that
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self.name, self.stages, self.own_slot = replicas.name, replicas.stages, replicas.own_slot
        self.device, self.streams = replicas.device, replicas.streams
        self._sums: dict[SlotKey, list[Tensor]] = {}

    @property
    def codecs(self) -> SlotCodecs | None:
        return self._replicas.codecs

    def add(self, gradients: Iterable[Tensor]) -> None:
        """Add one backward's gradients of all replicas.

        gradients: ordered by `replica_slots` and slots of hot experts, then `experts`, then `trainable_names`.
        """
        iterator = iter(gradients)
        replicas = self._replicas
        groups: list[Sequence[SlotKey]] = [*([slot] for slot in replicas.replica_slots), replicas.hot_slots]
        for slots in groups:  # whose sums are made together
            for total in [one for slot in slots for one in self._by_module(slot)]:
                total.add_(next(iterator))

    def pop_returned(self) -> list[Tensor]:
        """Return what came back for the owned experts, fp32, by `experts` and `trainable_names`, and drop all sums."""
        self.make_sums()
        returned = self._by_module(self.own_slot)
        self.drop_all()
        return returned

    # -- what a reduce asks for -------------------------------------------------------------------------------------

    def sum_sizes(self, slot: SlotKey) -> list[tuple[int, torch.dtype]]:
        layout, sum_dtype = self._replicas.layout_of(slot), self._replicas.encoding.sum_dtype
        return [] if layout is None else [(size, sum_dtype or dtype) for size, dtype in layout.sum_sizes]

    def make_sums(self) -> None:
        self._made(self.own_slot)

    def sums(self, slot: SlotKey) -> list[Tensor]:
        """Return a slot's sums, zeros at first.  What came back for its hot experts is added when it is asked for."""
        sums = self._made(slot)
        if not isinstance(slot, HotSlot) and (returned := self._sums.pop(HotSlot(slot), None)):
            hot, totals = self._replicas.hot, self._layout(slot).parts(sums)
            assert hot is not None
            for total, part in zip(totals, self._layout(HotSlot(slot)).parts(returned), strict=True):
                total.index_add_(0, hot.places_in(slot), part)
        return sums

    def sum_parts(self, slot: SlotKey) -> list[Tensor]:
        """Return a slot's sums, [e, *shape] for each part of its messages; of hot experts, each expert has its own."""
        if not (sums := self.sums(slot)):
            return []
        parts = self._layout(slot).parts(sums)
        return [one for part in parts for one in part.split(1)] if isinstance(slot, HotSlot) else parts

    def drop_sums(self, slot: SlotKey) -> None:
        self._replicas.free_behind_side(self._sums.pop(slot, []))

    # -- memory -----------------------------------------------------------------------------------------------------

    def drop_all(self) -> None:
        """Drop the sums of all slots; nothing may be under way."""
        self._sums = {}

    @property
    def kept(self) -> list[Tensor]:
        """All sums that there are now, each with memory of its own."""
        return [tensor for sums in self._sums.values() for tensor in sums]

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.kept)

    def _layout(self, slot: SlotKey) -> SlotLayout:
        layout = self._replicas.layout_of(slot)
        assert layout is not None, f"{self.name}: {slot} has no hot experts"
        return layout

    def _made(self, slot: SlotKey) -> list[Tensor]:
        layout = self._replicas.layout_of(slot)
        if layout is not None and slot not in self._sums:
            self._sums[slot] = [layout.new(block, torch.float32) for block in layout.trainable_blocks]
        return self._sums.get(slot, [])

    def _by_module(self, slot: SlotKey) -> list[Tensor]:
        """Return views of a slot's sums, in the order of gradients."""
        sums, layout = self.sums(slot), self._layout(slot)
        return layout.by_module(layout.parts(sums))


# -- one layer ----------------------------------------------------------------------------------------------------


class ReturnState(Enum):
    """Where gradients of a layer's replicas are."""

    EMPTY = "there are none"
    ACCUMULATING = "in the sums of this rank"
    RETURNING = "on their way to the owners"


@dataclass
class ReturnHandle:
    """Shared by the two autograd nodes of a layer call: the return that _StartReturn starts, and its result."""

    reduce: Reduce | None = None  # None: not the accumulation boundary, _FinishReturn gives the owner's part only
    returned: list[Tensor] | None = None
    # A leaf of the graph that is trained on all ranks, and that no script can ask for.
    always: Tensor = field(default_factory=partial(torch.empty, 0, requires_grad=True))


class GradientReturn:
    """What this rank has of the gradients of one layer's experts, and how far they are on their way.

    EMPTY --add--> ACCUMULATING --add, in later micro-steps--> ACCUMULATING --start--> RETURNING --finish--> EMPTY
    ACCUMULATING or RETURNING --drop--> EMPTY
    RETURNING --finish_unused--> EMPTY

    Args:
        pipeline: keeps returns of all layers in order.
        is_boundary: returns True if the running backward is the last before the optimizer step.

    before_start: is called in the backward, at the boundary, before gradients leave; `HotExperts.send_counts`, if
        there are hot experts.
    """

    def __init__(self, replicas: Replicas, pipeline: StagePipeline, is_boundary: Callable[[], bool]) -> None:
        self.replicas, self.pipeline, self.is_boundary = replicas, pipeline, is_boundary
        self.before_start: Callable[[], None] = lambda: None
        self.sums = GradientSums(replicas)
        self.state = ReturnState.EMPTY
        self.returning: ReturnHandle | None = None  # of the return under way
        self.finish_node: tuple[ReturnHandle, tuple[Tensor, ...]] | None = None  # made ahead for the layer's next call

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Add to the sums, and go from EMPTY or ACCUMULATING to ACCUMULATING."""
        if self.returning is not None:  # the layer ran twice in this backward, or an earlier backward failed
            self.finish(self.returning)
        self.sums.add(gradients)
        self.state = ReturnState.ACCUMULATING

    def start(self, handle: ReturnHandle) -> None:
        """Go from ACCUMULATING to RETURNING.  Does not block."""
        purpose = Purpose("expert_gradients", "return of expert gradients", self.replicas.name)
        handle.reduce, handle.returned = Reduce(self.sums, purpose), None
        self.pipeline.start(handle.reduce)
        self.returning, self.state = handle, ReturnState.RETURNING

    @outliving_inference()
    def finish(self, handle: ReturnHandle) -> list[Tensor]:
        """Go from RETURNING to EMPTY.  Returns what came back for the owned experts, fp32."""
        if handle.returned is None:
            assert handle.reduce is not None, f"{self.replicas.name}: no return was started"
            with self.replicas.counting_wait():
                self.pipeline.wait(handle.reduce)
            handle.returned = self.sums.pop_returned()
            self.returning, self.state = None, ReturnState.EMPTY
        return handle.returned

    def drop(self) -> None:
        """Go from any state to EMPTY: no optimizer step will use the gradients.

        Waits for a return under way, which a backward that failed has left, since its other ranks go on with it.
        """
        self.finish_unused()
        if self.state is ReturnState.ACCUMULATING:
            self.sums.drop_all()
            self.state = ReturnState.EMPTY

    def finish_unused(self) -> None:
        """Go from RETURNING to EMPTY: wait, and forget what came back.  CommunicationError if it does not come."""
        if (handle := self.returning) is not None:
            self.finish(handle)
            handle.reduce = handle.returned = None  # the graph of a backward that failed may live on

    def release(self) -> None:
        """Go from any state to EMPTY without a wait.  The side stream must not be using the sums."""
        self.returning = self.finish_node = None
        self.sums.drop_all()
        self.state = ReturnState.EMPTY

    def refuse_old(self, version: int) -> None:
        """Raise GradientNotReturnedError if another plan, or other hot experts, have taken over since the forward."""
        if version != self.replicas.version:
            raise GradientNotReturnedError(
                f"{self.replicas.name}: this backward belongs to a forward that ran before hybridep changed its plan "
                f"or its hot experts, or was detached; run both before the change, or both after it"
            )

    def refuse_partial(self, handle: ReturnHandle) -> None:
        """Raise UnsupportedError unless the running backward is for all parameters."""
        if not accumulates(handle.always):
            raise UnsupportedError(
                f"{self.replicas.name}: torch.autograd.grad (or a backward with `inputs`) asks for gradients of "
                f"experts with copies on other ranks, which works only without gradient codecs, and at an "
                f"accumulation boundary without micro-steps before it; leave these experts out of it, read `.grad` "
                f"after engine.backward, or set every domain_size to 1 and use no hot experts"
            )


# -- autograd -----------------------------------------------------------------------------------------------------


def weights_in_graph(
    layers: Sequence[GradientReturn], position: int, *, depth: int, progress: Callable[[], None]
) -> tuple[Tensor, ...]:
    """Return the trainable weights for one call of a layer, as `Replicas.with_own` orders them, as part of the graph.

    Args:
        layers: in the order in which the model runs them.
        depth: layers between the start of a return and the wait for it.
        progress: starts in the background what can start of all layers' transfers; the backward calls it.
    """
    layer, made = layers[position], None
    # A recomputation makes its own _FinishReturn, right before it is used.  A re-entrant one runs the backward of the
    # graph that it builds; a non-re-entrant one discards its graph.  Neither may touch nodes of the first forward.
    if not is_in_backward():
        for later in layers[position + 1 : position + 1 + depth]:
            if later.finish_node is None and later.replicas.trainable_names:
                later.finish_node = _make_finish_node(later)
        made, layer.finish_node = layer.finish_node, None
    handle, aliases = made or _make_finish_node(layer)
    weights: tuple[Tensor, ...] = _StartReturn.apply(layer, handle, progress, *aliases)
    return weights


def _make_finish_node(layer: GradientReturn) -> tuple[ReturnHandle, tuple[Tensor, ...]]:
    handle, own = ReturnHandle(), layer.replicas.own
    partitioned = own.give_full_shapes()
    # If only some ranks have frozen their experts, all must run the backward.
    aliases = _FinishReturn.apply(layer, handle, handle.always, *own.parameters())
    if partitioned:
        drop_full_shapes(partitioned)
    return handle, aliases


class _StartReturn(Function):
    """Gives experts the owned parameters and replicas; its backward sums or returns the replicas' gradients."""

    @staticmethod
    def forward(
        ctx: Any, layer: GradientReturn, handle: ReturnHandle, progress: Callable[[], None], *aliases: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.layer, ctx.handle, ctx.progress, ctx.num_own = layer, handle, progress, len(aliases)
        ctx.version = layer.replicas.version
        return tuple(weight.detach() for weight in layer.replicas.with_own(aliases))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedError(NO_SECOND_DERIVATIVES)
        layer: GradientReturn = ctx.layer
        with profiler_range("start_return", layer.replicas.name):
            layer.refuse_old(ctx.version)
            is_boundary = layer.is_boundary()
            if layer.replicas.is_lossy or layer.state is ReturnState.ACCUMULATING or not is_boundary:
                layer.refuse_partial(ctx.handle)  # what waits must be for the optimizer step
            layer.add(gradients[ctx.num_own :])
            ctx.handle.reduce = None
            if is_boundary:
                layer.before_start()
                layer.start(ctx.handle)
            ctx.progress()
        return None, None, None, *gradients[: ctx.num_own]


class _FinishReturn(Function):
    """Identity on the owned parameters; its backward waits for the other ranks' gradients and adds them."""

    @staticmethod
    def forward(ctx: Any, layer: GradientReturn, handle: ReturnHandle, _: Tensor, *own: Tensor) -> tuple[Tensor, ...]:
        ctx.layer, ctx.handle = layer, handle
        return tuple(parameter.detach() for parameter in own)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedError(NO_SECOND_DERIVATIVES)
        layer: GradientReturn = ctx.layer
        # Autograd accumulates these gradients before it does anything else, and then needs the parameters' shapes.
        if partitioned := layer.replicas.own.give_full_shapes():
            torch.autograd.Variable._execution_engine.queue_callback(partial(drop_full_shapes, partitioned))
        if ctx.handle.reduce is None:  # not the accumulation boundary: the owner's own part only
            return None, None, None, *gradients
        with profiler_range("finish_return", layer.replicas.name):
            returned = layer.finish(ctx.handle)
            ctx.handle.reduce = ctx.handle.returned = None  # the graph may live on
            summed = [other.add_(own).to(own.dtype) for own, other in zip(gradients, returned, strict=True)]
            return None, None, None, *summed
