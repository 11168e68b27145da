# SPDX-License-Identifier: Apache-2.0
"""Decides when weights of experts move, and what must have returned before the optimizer step.

Weights leave right after an applied optimizer step, and the layer that needs them waits for them.  How gradients
return is in `experts.gradient_return`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from ds_hybridep.errors import GradientNotReturnedError, VerificationError
from ds_hybridep.experts.gradient_return import GradientReturn, ReturnState, weights_in_graph
from ds_hybridep.experts.replicas import Replicas, make_shipment, outliving_inference
from ds_hybridep.sync.transaction import is_in_backward
from ds_hybridep.sync.transfers import Gather, StagePipeline
from ds_hybridep.transport.channels import Transport


class Weights(Enum):
    """What a layer's replicas hold."""

    STALE = "not what the owners have"
    SHIPPING = "the owners' weights, which are on their way"
    FRESH = "the owners' weights"
    RELEASED = "nothing: another plan has taken over"


@dataclass
class LayerExperts:
    """What this rank has of one layer's experts: the replicas, what is on its way to them, and what returns.

    weights      STALE --ship--> SHIPPING --finish_shipment--> FRESH --after the step, ship--> SHIPPING ...
                 any --weights change outside a step--> STALE
    """

    replicas: Replicas
    pipeline: StagePipeline  # keeps shipments of all layers in order
    gradients: GradientReturn
    weights: Weights = Weights.STALE
    shipment: Gather | None = None  # until a wait for it has ended
    versions: list[tuple[int, int]] = field(default_factory=list)  # of the owned parameters at their last shipment

    @outliving_inference()
    def ship(self, *, is_exact: bool) -> None:
        """Go from any state to SHIPPING.  Does not block."""
        self.shipment = make_shipment(self.replicas, is_exact=is_exact)
        self.versions = self.replicas.own.versions()
        self.pipeline.start(self.shipment)
        self.weights = Weights.SHIPPING

    def choose_hot(self, experts: Sequence[int]) -> None:
        """Replace the hot experts.  Nothing may be under way, and weights must be shipped next."""
        assert self.shipment is None, f"{self.replicas.name}: weights are under way"
        assert self.gradients.state is ReturnState.EMPTY, f"{self.replicas.name}: gradients have not returned"
        self.replicas.choose_hot(experts)

    @outliving_inference()
    def finish_shipment(self) -> None:
        """Wait for the weights, and go from SHIPPING to FRESH."""
        if self.replicas.away.held:
            self.replicas.away.refuse()
        if self.shipment is None:
            return
        with self.replicas.counting_wait():
            self.pipeline.wait(self.shipment)
        self.shipment = None
        self.replicas.free_sent()
        if self.weights is Weights.SHIPPING:
            self.weights = Weights.FRESH

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
        self.shipment = None
        if self.replicas.streams is not None:
            self.replicas.streams.wait_for_side()  # the side stream must not be using what is freed
        self.gradients.release()
        self.replicas.release()
        self.weights = Weights.RELEASED


class MigrationManager:
    """Moves weights of all layers' experts at the right time, and knows whether gradients have returned.

    Args:
        layers: in the order in which the model runs them.
        return_depth: layers between a gradient's return and the wait for it.
    """

    def __init__(self, transport: Transport, layers: Sequence[LayerExperts], return_depth: int) -> None:
        self._transport, self.layers, self._return_depth = transport, list(layers), return_depth
        self._returns = [layer.gradients for layer in layers]
        used = (pipeline for one in layers for pipeline in (one.pipeline, one.gradients.pipeline))
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
            weights = weights_in_graph(self._returns, position, depth=self._return_depth, progress=self.progress)
            return replicas.by_slot(weights)
        layer.gradients.finish_node = None
        return replicas.by_slot(replicas.with_own(own))

    # -- in the forward and the backward -------------------------------------------------------------------------

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
        return [one.replicas.name for one in self._returns if one.state is not ReturnState.EMPTY]

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
        for one in self._returns:
            one.drop()

    def finish_returns(self) -> None:
        """Wait for returns under way; their gradients are not used."""
        for one in self._returns:
            one.finish_unused()

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
        return sum(layer.replicas.num_bytes + layer.gradients.sums.num_bytes for layer in self.layers)

    @property
    def host_bytes(self) -> int:
        """Bytes that codecs hold now in host memory."""
        return sum(layer.replicas.num_host_bytes for layer in self.layers)

    def _ship(self, *, is_exact: bool) -> None:
        for layer in self.layers:
            layer.gradients.finish_node = None  # a node that no forward took
            layer.ship(is_exact=is_exact)
