# SPDX-License-Identifier: Apache-2.0
"""Decides when weights and gradients of experts move.

Weights leave right after an applied optimizer step, and the layer that needs them waits for them.  This rank sums
gradients of replicas in fp32 until the accumulation boundary.  Then they return to their owners through a pair of
autograd nodes per layer:

    forward    FinishReturn(l+depth) ... StartReturn(l) -> experts of layer l
    backward   experts of layer l -> StartReturn(l): send ... FinishReturn(l): wait, add, hand to the parameter

In the forward both nodes only pass weights on.  Autograd runs the newest node first, so a FinishReturn that is made
`depth` layers before its StartReturn waits `depth` layers later.
Forward and step communicate from the main thread, the backward from autograd's; no other thread starts a transfer.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from ds_hybridep.errors import NO_SECOND_DERIVATIVES, GradientNotReturnedError, UnsupportedError, VerificationError
from ds_hybridep.experts.partitioned import take_away
from ds_hybridep.experts.replicas import Replicas, make_shipment
from ds_hybridep.sync.transaction import accumulates, is_in_backward
from ds_hybridep.sync.transfers import Gather, Reduce, StagedTransfer, StagePipeline
from ds_hybridep.transport.channels import Purpose, Transport, profiler_range


@contextmanager
def outliving_inference() -> Iterator[None]:
    """Let what is made inside be used in training too, if the forward runs under `torch.inference_mode`."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class Weights(Enum):
    """What a layer's replicas hold."""

    STALE = "not what the owners have"
    SHIPPING = "the owners' weights, which are on their way"
    FRESH = "the owners' weights"
    RELEASED = "nothing: another plan has taken over"


class Gradients(Enum):
    """Where gradients of a layer's replicas are."""

    EMPTY = "there are none"
    ACCUMULATING = "in the sums of this rank"
    RETURNING = "on their way to the owners"


@dataclass
class ReturnHandle:
    """Shared by the two autograd nodes of a layer call: the return that StartReturn starts, and its result."""

    reduce: Reduce | None = None  # None: not the accumulation boundary, FinishReturn gives the owner's part only
    collected: list[Tensor] | None = None
    # A leaf of the graph that is trained on all ranks, and that no script can ask for.
    always: Tensor = field(default_factory=partial(torch.empty, 0, requires_grad=True))


@dataclass
class LayerExperts:
    """What this rank has of one layer's experts: the replicas, what is on its way to them, and what returns.

    weights      STALE --ship--> SHIPPING --finish_shipment--> FRESH --after the step, ship--> SHIPPING ...
                 any --weights change outside a step--> STALE
    gradients    EMPTY --add_gradients--> ACCUMULATING --start_return--> RETURNING --finish_return--> EMPTY
                 ACCUMULATING or RETURNING --drop_gradients--> EMPTY
                 RETURNING --finish_unused_return--> EMPTY
    """

    replicas: Replicas
    weight_pipeline: StagePipeline
    gradient_pipeline: StagePipeline
    weights: Weights = Weights.STALE
    gradients: Gradients = Gradients.EMPTY
    shipment: Gather | None = None  # until a wait for it has ended
    returning: ReturnHandle | None = None
    finish_node: tuple[ReturnHandle, tuple[Tensor, ...]] | None = None  # made ahead for the next call of the layer
    versions: list[tuple[int, int]] = field(default_factory=list)  # of the owned parameters at their last shipment

    @outliving_inference()
    def ship(self, *, is_exact: bool) -> None:
        """Go from any state to SHIPPING.  Does not block."""
        self.shipment = make_shipment(self.replicas, is_exact=is_exact)
        self.versions = self.replicas.own.versions()
        self.weight_pipeline.start(self.shipment)
        self.weights = Weights.SHIPPING

    def choose_hot(self, experts: Sequence[int]) -> None:
        """Replace the hot experts.  Nothing may be under way, and weights must be shipped next."""
        assert self.shipment is None, f"{self.replicas.name}: weights are under way"
        assert self.returning is None, f"{self.replicas.name}: gradients are under way"
        self.replicas.choose_hot(experts)

    @outliving_inference()
    def finish_shipment(self) -> None:
        """Wait for the weights, and go from SHIPPING to FRESH."""
        if self.replicas.away.held:
            self.replicas.away.refuse()
        if self.shipment is None:
            return
        self._wait(self.weight_pipeline, self.shipment)
        self.shipment = None
        self.replicas.free_sent()
        if self.weights is Weights.SHIPPING:
            self.weights = Weights.FRESH

    def add_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Add to the sums, and go from EMPTY or ACCUMULATING to ACCUMULATING."""
        if self.returning is not None:  # the layer ran twice in this backward, or an earlier backward failed
            self.finish_return(self.returning)
        self.replicas.add_gradients(gradients)
        self.gradients = Gradients.ACCUMULATING

    def start_return(self, handle: ReturnHandle) -> None:
        """Go from ACCUMULATING to RETURNING.  Does not block."""
        purpose = Purpose("expert_gradients", "return of expert gradients", self.replicas.name)
        handle.reduce, handle.collected = Reduce(self.replicas, purpose), None
        self.gradient_pipeline.start(handle.reduce)
        self.returning, self.gradients = handle, Gradients.RETURNING

    @outliving_inference()
    def finish_return(self, handle: ReturnHandle) -> list[Tensor]:
        """Go from RETURNING to EMPTY.  Returns what came back for the owned experts, fp32."""
        if handle.collected is None:
            assert handle.reduce is not None, f"{self.replicas.name}: no return was started"
            self._wait(self.gradient_pipeline, handle.reduce)
            handle.collected = self.replicas.take_returned()
            self.returning, self.gradients = None, Gradients.EMPTY
        return handle.collected

    def drop_gradients(self) -> None:
        """Go from any state to EMPTY: no optimizer step will use the gradients.

        Waits for a return under way, which a backward that failed has left, since its other ranks go on with it.
        """
        self.finish_unused_return()
        if self.gradients is Gradients.ACCUMULATING:
            self.replicas.drop_all_sums()
            self.gradients = Gradients.EMPTY

    def finish_unused_return(self) -> None:
        """Go from RETURNING to EMPTY: wait, and forget what came back.  CommunicationError if it does not come."""
        if (handle := self.returning) is not None:
            self.finish_return(handle)
            handle.reduce = handle.collected = None  # the graph of a backward that failed may live on

    def refuse_changed(self) -> None:
        """Raise VerificationError if torch has counted a write to owned parameters since they were shipped.

        Misses writes to `parameter.data` or to a flat buffer, and all writes under ZeRO-3.
        """
        if self.weights in (Weights.SHIPPING, Weights.FRESH) and self.versions != self.replicas.own.versions():
            # The other ranks do not know of the write: a shipment that this rank starts alone would never end.
            raise VerificationError(
                f"{self.replicas.name}: parameters of this rank's experts were changed outside engine.step() and "
                f"loading, so their replicas are old; call ds_hybridep.refresh(engine) on all ranks after that"
            )

    def release(self) -> None:
        """Go from any state to RELEASED.  Frees memory that an earlier graph, which a layer may keep, would hold."""
        self.shipment = self.returning = self.finish_node = None
        if self.replicas.streams is not None:
            self.replicas.streams.join()  # the side stream must not be using what is freed
        self.replicas.release()
        self.weights, self.gradients = Weights.RELEASED, Gradients.EMPTY

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

    def _wait(self, pipeline: StagePipeline, transfer: StagedTransfer) -> None:
        codecs = self.replicas.codecs
        with nullcontext() if codecs is None else codecs.counters.timing("exposed_s"):
            pipeline.wait(transfer)


class MigrationManager:
    """Moves weights and gradients of all layers' experts at the right time.

    Args:
        layers: in the order in which the model runs them.
        return_depth: layers between a gradient's return and the wait for it.
        is_boundary: returns True if the running backward is the last before the optimizer step.
    """

    def __init__(
        self,
        transport: Transport,
        layers: Sequence[LayerExperts],
        return_depth: int,
        is_boundary: Callable[[], bool],
    ) -> None:
        self._transport, self.layers = transport, list(layers)
        self._return_depth, self._is_boundary = return_depth, is_boundary
        self.before_return: Callable[[], None] = lambda: None  # in the backward, before gradients of a layer return
        used = (pipeline for one in layers for pipeline in (one.weight_pipeline, one.gradient_pipeline))
        self._pipelines = list(dict.fromkeys(used))

    @property
    def is_stale(self) -> bool:
        """True if the next forward ships all weights."""
        return any(layer.weights is Weights.STALE for layer in self.layers)

    # -- forward -------------------------------------------------------------------------------------------------

    def acquire(self, position: int) -> list[list[dict[str, Tensor]]]:
        """Return weights of the domain's experts by [slot][module of the layer's `experts`], as part of the graph.

        The values are valid after `finish_shipment`.  Slots of other ranks are views of the replicas; under ZeRO-3
        the own slot is a view of its copy.  The own slot has only trainable parameters, unless the module is grouped.
        """
        layer = self.layers[position]
        replicas = layer.replicas
        replicas.own.check_trainability()
        if not is_in_backward():
            if layer.weights is Weights.STALE:
                self.refresh(wait=False)
            layer.refuse_changed()
        self.progress()
        own = replicas.own.parameters()
        if own and torch.is_grad_enabled():
            handle, aliases = self._finish_node(position)
            return replicas.by_slot(_StartReturn.apply(self, layer, handle, *aliases))
        layer.finish_node = None
        return replicas.by_slot(replicas.with_own(own))

    def _finish_node(self, position: int) -> tuple[ReturnHandle, tuple[Tensor, ...]]:
        """Return the FinishReturn node of this call's layer.  A recomputation makes its own, right before it is used.

        A re-entrant recomputation runs the backward of the graph that it builds; a non-re-entrant one discards its
        graph.  Neither may touch the nodes of the first forward.
        """
        layer = self.layers[position]
        if is_in_backward():
            return _make_finish_node(layer)
        for later in self.layers[position + 1 : position + 1 + self._return_depth]:
            if later.finish_node is None and later.replicas.trainable_names:
                later.finish_node = _make_finish_node(later)
        made, layer.finish_node = layer.finish_node, None
        return made if made is not None else _make_finish_node(layer)

    # -- backward ------------------------------------------------------------------------------------------------

    def take_gradients(self, layer: LayerExperts, handle: ReturnHandle, gradients: Sequence[Tensor]) -> None:
        """Add replica gradients to the sums; at the boundary start their return."""
        is_lossy = (codecs := layer.replicas.codecs) is not None and codecs.feedback.is_lossy
        if is_lossy or layer.gradients is Gradients.ACCUMULATING or not self._is_boundary():
            layer.refuse_partial(handle)  # what waits must be for the optimizer step
        layer.add_gradients(gradients)
        handle.reduce = None
        if self._is_boundary():
            self.before_return()
            layer.start_return(handle)
        self.progress()

    @outliving_inference()
    def progress(self) -> None:
        """Start what can start in the background.  Never blocks."""
        for pipeline in self._pipelines:
            pipeline.progress()

    # -- around the optimizer step -------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Make sure that nothing is under way; raise GradientNotReturnedError if a gradient was left behind."""
        self.check_returned("step()")
        self.finish_shipments()
        if self.is_stale and any(layer.replicas.sends_patches for layer in self.layers):
            self.refresh()  # patches say how weights differ from what other ranks hold

    def remember_sent(self) -> None:
        """Call right before the optimizer changes the weights."""
        for layer in self.layers:
            layer.replicas.remember_sent()

    def skip_step(self) -> None:
        """Call if the step that `before_step` announced did not change the weights."""
        for layer in self.layers:
            layer.replicas.forget_sent()

    def after_step(self, *, ships: bool) -> None:
        """Call after an applied optimizer step: ship the new weights in the background.

        ships: False if the next forward, or another plan, ships all weights.
        """
        # An optimizer with a step of its own does not say when it begins.
        if ships and all(layer.replicas.knows_sent for layer in self.layers):
            self._ship(is_exact=False)
        else:
            self.skip_step()
            self.mark_weights_changed()

    def mark_weights_changed(self) -> None:
        """Call after weights changed outside the optimizer step: the next forward ships everything."""
        for layer in self.layers:
            layer.weights = Weights.STALE

    def refresh(self, *, wait: bool = True) -> None:
        """Ship all weights, frozen ones too; all ranks must call.  Returns when they have arrived if `wait`."""
        self.finish_shipments()
        self._ship(is_exact=True)
        if wait:
            self.finish_shipments()

    @property
    def not_returned(self) -> list[str]:
        """Layers whose replicas hold gradients."""
        waiting = (Gradients.ACCUMULATING, Gradients.RETURNING)
        return [layer.replicas.name for layer in self.layers if layer.gradients in waiting]

    def check_returned(self, before: str) -> None:
        """Raise GradientNotReturnedError if replicas hold gradients; `before` says what is about to happen."""
        if left := self.not_returned:
            raise GradientNotReturnedError(
                f"rank {self._transport.rank}: replica gradients of {left} were not returned to their owners before "
                f"{before}: these layers did not run in the last backward before it (the accumulation boundary); "
                f"run every MoE layer in that micro-batch, drop them with engine.zero_grad() (below ZeRO 2), set "
                f"managed_gradient_accumulation in ds_config to false (for LayerDrop), or every domain_size to 1"
            )

    def drop_gradients(self) -> None:
        """Drop replica gradients that have not returned, once nothing of them is under way."""
        for layer in self.layers:
            layer.drop_gradients()

    def finish_returns(self) -> None:
        """Wait for returns under way; their gradients are not used."""
        for layer in self.layers:
            layer.finish_unused_return()

    def finish_shipments(self) -> None:
        for layer in self.layers:
            layer.finish_shipment()

    def finish(self) -> None:
        """Wait for everything under way."""
        self.finish_shipments()
        for pipeline in self._pipelines:
            pipeline.drain()

    def release(self) -> None:
        for layer in self.layers:
            layer.release()

    @property
    def replica_bytes(self) -> int:
        """Bytes held now for replicas and their gradient sums on this rank's device."""
        return sum(layer.replicas.num_bytes for layer in self.layers)

    @property
    def host_bytes(self) -> int:
        """Bytes that codecs hold now in host memory."""
        return sum(layer.replicas.num_host_bytes for layer in self.layers)

    def _ship(self, *, is_exact: bool) -> None:
        for layer in self.layers:
            layer.finish_node = None  # a node that no forward took
            layer.ship(is_exact=is_exact)


# -- autograd -----------------------------------------------------------------------------------------------------


def _make_finish_node(layer: LayerExperts) -> tuple[ReturnHandle, tuple[Tensor, ...]]:
    handle, own = ReturnHandle(), layer.replicas.own
    away = own.give_full_shapes()
    # If only some ranks have frozen their experts, all must run the backward.
    aliases = _FinishReturn.apply(layer, handle, handle.always, *own.parameters())
    if away:
        take_away(away)
    return handle, aliases


class _FinishReturn(Function):
    """Identity on the owned parameters; its backward waits for the other ranks' gradients and adds them."""

    @staticmethod
    def forward(ctx: Any, layer: LayerExperts, handle: ReturnHandle, _: Tensor, *own: Tensor) -> tuple[Tensor, ...]:
        ctx.layer, ctx.handle = layer, handle
        return tuple(parameter.detach() for parameter in own)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedError(NO_SECOND_DERIVATIVES)
        # Autograd accumulates these gradients before it does anything else, and then needs the parameters' shapes.
        if away := ctx.layer.replicas.own.give_full_shapes():
            torch.autograd.Variable._execution_engine.queue_callback(partial(take_away, away))
        if ctx.handle.reduce is None:  # not the accumulation boundary: the owner's own part only
            return None, None, None, *gradients
        with profiler_range("finish_return", ctx.layer.replicas.name):
            returned = ctx.layer.finish_return(ctx.handle)
            ctx.handle.reduce = ctx.handle.collected = None  # the graph may live on
            summed = [other.add_(own).to(own.dtype) for own, other in zip(gradients, returned, strict=True)]
            return None, None, None, *summed


class _StartReturn(Function):
    """Gives experts the owned parameters and replicas; its backward sums or returns the replicas' gradients."""

    @staticmethod
    def forward(
        ctx: Any, manager: MigrationManager, layer: LayerExperts, handle: ReturnHandle, *aliases: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.manager, ctx.layer, ctx.handle, ctx.num_own = manager, layer, handle, len(aliases)
        ctx.version = layer.replicas.version
        return tuple(weight.detach() for weight in layer.replicas.with_own(aliases))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise UnsupportedError(NO_SECOND_DERIVATIVES)
        with profiler_range("start_return", ctx.layer.replicas.name):
            ctx.layer.refuse_old(ctx.version)
            ctx.manager.take_gradients(ctx.layer, ctx.handle, gradients[ctx.num_own :])
        return None, None, None, *gradients[: ctx.num_own]
