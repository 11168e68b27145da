# SPDX-License-Identifier: Apache-2.0
"""The migration manager: when weights and gradients of experts move.

Weights are shipped right after a successful optimizer step, and waited for by the layer that needs them.  Gradients of
replicas stay here, summed in fp32, until the accumulation boundary; then they return to their owners through a pair of
autograd nodes per layer:

    forward    prefetch(l+depth) ... acquire(l) -> experts of layer l
    backward   experts of layer l -> acquire(l): start the return ... prefetch(l): wait, add, hand to the parameter

Autograd runs the node made last first, so a prefetch made `depth` layers before its acquire waits `depth` later.
Forward and step communicate from the main thread, the backward from autograd's; no other thread starts anything.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ds_hybridep.errors import CommunicationError, GradientNotReturnedError, VerificationError
from ds_hybridep.experts import codec_checkpoint
from ds_hybridep.experts.changes import Versions, changed_outside, versions_of
from ds_hybridep.experts.hand_over import collect
from ds_hybridep.experts.partitioned import parameters_of, stand_in, take_away
from ds_hybridep.experts.replicas import GradientReturn, ReplicaStore, StagedOperation, WeightGather
from ds_hybridep.sync.feedback import CodecSums
from ds_hybridep.transport.channels import Purpose, Transport, profiler_range


class StagePipeline:
    """Multi-stage operations over one set of channels, kept in order.

    A stage is started only after every earlier operation has started the same stage, so all ranks start transfers on
    a channel in one order, whenever each of them gets to it.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._operations: deque[StagedOperation] = deque()

    def add(self, operation: StagedOperation) -> None:
        self._operations.append(operation)

    def progress(self) -> None:
        """Start every stage that can start.  Never blocks."""
        earlier: StagedOperation | None = None
        for operation in self._operations:
            while operation.can_advance() and (
                earlier is None or earlier.is_complete or earlier.stages_started > operation.stages_started
            ):
                operation.advance()
            earlier = operation
        while self._operations and self._operations[0].is_complete:
            self._operations.popleft()

    def wait(self, operation: StagedOperation) -> None:
        """Block until `operation` is complete, moving the others on meanwhile; what it brought can be used then.

        Raises:
            CommunicationError: nothing finished within the time limit, or a transfer failed.
        """
        with self._transport.exposed(operation.purpose):
            while True:
                seen = self._transport.num_finished
                self.progress()
                if operation.is_complete:
                    operation.join()
                    return
                if not self._transport.wait_for_more_than(seen):
                    raise CommunicationError(operation.describe_stall(self._transport.timeout_s))

    def drain(self) -> None:
        """Block until every operation is complete."""
        while self._operations:
            self.wait(self._operations[-1])


@dataclass
class ReturnHandle:
    """Shared by the two autograd nodes of one layer call: the return that acquire's backward started, if it did."""

    operation: GradientReturn | None = None


@dataclass
class LayerExperts:
    """One layer's store with the pipelines of its expert-parallel group."""

    store: ReplicaStore
    weights: StagePipeline
    gradients: StagePipeline
    gather: WeightGather | None = None
    is_in_graph: bool = False  # a forward since the last shipment entered autograd with the replicas as they are
    return_in_flight: GradientReturn | None = None
    prefetched: tuple[ReturnHandle, tuple[Tensor, ...]] | None = None
    seen: Versions | None = None  # owned parameters at the last shipment

    @property
    def owned(self) -> list[nn.Parameter]:
        """Owned parameters that only the optimizer and loads may change; none under ZeRO-3, which moves them."""
        if self.store.is_partitioned:
            return []
        return [parameter for expert in self.store.experts for parameter in expert.parameters()]


class MigrationManager:
    """Moves weights and gradients of all layers' experts at the right time.

    Args:
        transport: counters, time limit and the end of background transfers.
        layers: stores in the order in which the model runs its layers.
        prefetch_depth: layers between a gradient's return and the wait for it.
        is_boundary: True when the backward that runs is the last before the optimizer step.
        max_staleness: 1: a step computes with replicas as they were one step before, and the weights shipped after
            that step have until its end to arrive.
    """

    def __init__(
        self,
        transport: Transport,
        layers: Sequence[LayerExperts],
        prefetch_depth: int,
        is_boundary: Callable[[], bool],
        max_staleness: int = 0,
    ) -> None:
        self._transport = transport
        self._layers = list(layers)
        self._depth = prefetch_depth
        self._is_boundary = is_boundary
        self._max_staleness = max_staleness
        self._are_replicas_stale = True
        self._is_stepping = False
        pipelines = [pipeline for layer in layers for pipeline in (layer.weights, layer.gradients)]
        self._pipelines = list(dict.fromkeys(pipelines))

    # -- forward ----------------------------------------------------------------------------------------------------

    def acquire(self, position: int) -> list[list[dict[str, Tensor]]]:
        """Weights of the domain's experts by [slot][module of the store's `experts`], entered into autograd.

        The values are valid after `wait_for_weights`; slots of other ranks are views of the store, and under ZeRO-3
        the own slot too.  For the own slot only trainable parameters are given, unless the module is grouped.
        """
        layer = self._layers[position]
        store = layer.store
        store.check_trainability()
        if self._are_replicas_stale and not is_in_backward():
            self.refresh(wait=False)
        elif changed_outside(layer.owned, layer.seen):
            # The other ranks do not know: a shipment that this one starts alone would never end.
            raise VerificationError(
                f"{store.layer}: parameters of this rank's experts were changed outside engine.step() and loading, so "
                f"their replicas are old; call ds_hybridep.refresh(engine) on all ranks after such a change"
            )
        self.progress()
        own = _trainable_parameters(store)
        layer.is_in_graph |= torch.is_grad_enabled()
        if own and torch.is_grad_enabled():
            handle, aliases = self._take_prefetched(position)
            outputs = _Acquire.apply(self, layer, handle, *aliases)
        else:
            layer.prefetched = None
            outputs = (*_own_weights(store, own), *_views(store, store.replica_slots()))
        return _by_slot(store, iter(outputs))

    def wait_for_weights(self, position: int) -> None:
        """Block until the layer's replicas hold the weights to compute with.

        Deferred ones are waited for in an evaluation, but not where a backward may still need what replicas hold now.
        """
        layer = self._layers[position]
        if layer.gather is not None and not (layer.gather.is_deferred and layer.is_in_graph):
            self._finish_gather(layer)

    def watch_backward(self, _position: int, outputs: Tensor) -> Tensor:
        """The outputs of a layer's experts, [R, D] -> [R, D]; for managers that must know when a backward begins."""
        return outputs

    def hold(self, position: int) -> None:
        """Have the layer's replicas to look at; all ranks must call, with nothing under way."""

    def _finish_gather(self, layer: LayerExperts) -> None:
        """Block until the layer's replicas hold the owners' current weights."""
        if layer.gather is not None:
            with layer.store.lossy.counters.timing("exposed_s"):
                layer.weights.wait(layer.gather)
                if layer.gather.is_deferred:
                    layer.gather.apply()
                    layer.store.streams.join()
            layer.gather = None

    def _take_prefetched(self, position: int) -> tuple[ReturnHandle, tuple[Tensor, ...]]:
        """The prefetch node of this call's layer.  In a recomputation it is made on the spot, adjacent to acquire.

        A re-entrant recomputation runs the backward of what it builds; a non-re-entrant one discards it.  Neither may
        touch the nodes of the first forward.
        """
        if is_in_backward():
            return _prefetch(self, self._layers[position])
        for later in self._layers[position + 1 : position + 1 + self._depth]:
            if later.prefetched is None and _trainable_parameters(later.store):
                later.prefetched = _prefetch(self, later)
        layer = self._layers[position]
        prefetched, layer.prefetched = layer.prefetched, None
        return prefetched if prefetched is not None else _prefetch(self, layer)

    # -- backward ---------------------------------------------------------------------------------------------------

    def take_gradients(self, layer: LayerExperts, handle: ReturnHandle, gradients: Sequence[Tensor]) -> None:
        """Add replica gradients to the sums; at the boundary start their return.

        Raises:
            GradientNotReturnedError: the forward ran before another plan took over.
        """
        refuse_released(layer.store)
        if layer.return_in_flight is not None:  # the layer ran twice in this backward
            self.finish_return(layer, layer.return_in_flight)
        layer.store.add_replica_gradients(gradients)
        handle.operation = None
        if self._is_boundary():
            handle.operation = layer.return_in_flight = GradientReturn(layer.store)
            layer.gradients.add(handle.operation)
        self.progress()

    def finish_return(self, layer: LayerExperts, operation: GradientReturn) -> list[Tensor]:
        """The gradients that came back for the owned experts, fp32; clears the sums at the first call."""
        if operation.collected is None:
            with layer.store.lossy.counters.timing("exposed_s"):
                layer.gradients.wait(operation)
            layer.store.take_undelivered()
            operation.collected = [gradient.clone() for gradient in layer.store.returned_gradients()]
            layer.store.clear_sums()
            layer.return_in_flight = None
        return operation.collected

    def progress(self) -> None:
        """Start whatever can start in the background.  Never blocks."""
        for pipeline in self._pipelines:
            pipeline.progress()

    # -- around the optimizer step ----------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Make sure that nothing is under way and no gradient was left behind.

        Raises:
            GradientNotReturnedError: a layer did not run in the boundary backward but holds gradients of earlier ones.
        """
        self.check_returned("step()")
        self._drain_weights()
        self._is_stepping = True

    def abandon_step(self) -> None:
        """The optimizer failed in the step that `before_step` announced."""
        self._is_stepping = False

    def after_step(self, *, was_applied: bool, ships: bool = True) -> None:
        """Ship the new weights in the background.  A step that was skipped never was: residuals go back.

        ships: False where nobody will compute with these replicas any more.
        """
        self._is_stepping = False
        for layer in self._layers:
            if was_applied:
                layer.store.lossy.commit()
            else:
                layer.store.lossy.restore()
        if was_applied and ships:
            self._ship(is_exact=False)
        elif was_applied:
            self._are_replicas_stale = True  # where the other plan fails, these replicas go on

    def mark_weights_changed(self) -> None:
        """Weights changed outside the optimizer step: the next forward ships everything."""
        self._are_replicas_stale = True

    def refresh(self, *, wait: bool = True) -> None:
        """Ship all weights, frozen ones too; all ranks must call.  Returns when they have arrived if `wait`.

        Without an engine this is what follows an optimizer step, so residuals of gradients are kept.
        """
        for layer in self._layers:
            layer.store.lossy.commit()
        self._drain_weights()
        self._ship(is_exact=True)
        self._are_replicas_stale = False
        if wait:
            self._drain_weights()

    def refresh_stale(self) -> None:
        """`refresh` now rather than in the next forward, if weights have changed; all ranks must call."""
        if self._are_replicas_stale:
            self.refresh()

    def check_returned(self, before: str) -> None:
        """Raise GradientNotReturnedError if replicas hold gradients; `before` says what is about to happen."""
        left = [layer.store.layer for layer in self._layers if layer.store.has_unreturned_sums]
        if left:
            raise GradientNotReturnedError(
                f"rank {self._transport.rank}: replica gradients of {left} were not returned to their owners before "
                f"{before}: these layers did not run in the last backward before it (the accumulation boundary); "
                f"run every MoE layer in that micro-batch, drop them with engine.zero_grad() (below ZeRO 2), or "
                f"set every domain_size to 1"
            )

    def clear_gradients(self, *, drops_returned: bool) -> None:
        """Forget replica gradients, as zero_grad does for the owners'.

        drops_returned: those that were returned to their owners are forgotten there too.
        """
        for layer in self._layers:
            if layer.store.has_unreturned_sums:
                layer.store.clear_sums()
            if drops_returned and not self._is_stepping:  # the step's own zero_grad comes after they were used
                layer.store.lossy.restore()

    def finish(self) -> None:
        """Wait for everything under way."""
        self._drain_weights()
        for pipeline in self._pipelines:
            pipeline.drain()

    def release(self) -> None:
        """Free replicas and sums: a graph of an earlier forward, which a layer may keep, keeps this manager."""
        for layer in self._layers:
            layer.gather = layer.return_in_flight = layer.prefetched = None
            layer.store.streams.join()  # what is freed must not be in use aside
            layer.store.release()

    def drop_prefetched(self) -> None:
        """Forget prefetch nodes that no forward took."""
        for layer in self._layers:
            layer.prefetched = None

    def verify(self) -> None:
        """Prove that every replica holds its owner's weights; all ranks must call at the same step.

        Raises:
            VerificationError: names layer, expert owner and the ranks that differ.
        """
        self._drain_weights()
        if self._are_replicas_stale:
            return
        for position, layer in enumerate(self._layers):
            self.hold(position)
            store = layer.store
            tables = _exchange_checksums(self._transport, store)
            for slot, owner in enumerate(store.domain_ranks):
                wrong = [
                    rank
                    for rank, table in tables.items()
                    if not torch.equal(table[slot], tables[owner][store.checksum_row(slot, rank)])
                ]
                if wrong:
                    raise VerificationError(
                        f"{store.layer}: the copies of the experts of rank {owner} on ranks {wrong} differ from the "
                        f"owner's weights; if they were changed outside engine.step(), call "
                        f"ds_hybridep.refresh(engine) on all ranks after the change"
                    )

    def capture_codecs(self, plan: str, step: int) -> dict[str, Any]:
        """What lossy codecs keep on this rank, for a checkpoint of `plan` at `step`.

        All ranks must call where there are codecs, since replicas must hold the weights.
        """
        if self.has_codecs and self._are_replicas_stale:
            self.refresh()
        self._drain_weights()
        return codec_checkpoint.capture(self._stores, plan, step)

    def forget_codecs(self) -> None:
        """Drop residuals: they belong to gradients of before a load."""
        codec_checkpoint.forget(self._stores)

    def restore_codecs(self, saved: Mapping[str, Any]) -> None:
        """Become what `capture_codecs` saw at the same plan; all ranks must call, after the weights were loaded."""
        self.refresh()
        codec_checkpoint.restore(self._stores, saved)

    def collect_undelivered(self) -> dict[str, list[Tensor]]:
        """By layer the gradients of the owned experts that no rank of their domain has delivered yet.

        All ranks must call, with nothing under way, after the optimizer step.  fp32 [e, *shape] for each trainable
        parameter, without the loss scale; layers without lossy codecs are left out.
        """
        purpose = Purpose("expert_gradients", "hand-over of residuals")
        return {
            store.layer: collect(store, self._transport, purpose)
            for store in self._stores
            if store.gradient_layouts or store.lossy.undelivered is not None
        }

    def take_over(self, undelivered: Mapping[str, list[Tensor]]) -> dict[str, list[Tensor]]:
        """Add to the next gradients what `collect_undelivered` of another plan has found.

        Returns:
            What belongs to layers that have no replicas.
        """
        for store in self._stores:
            for local_idx in range(store.num_local):
                if store.layer in undelivered:
                    store.add_undelivered(local_idx, [part[local_idx] for part in undelivered[store.layer]])
        own = {store.layer for store in self._stores}
        return {layer: parts for layer, parts in undelivered.items() if layer not in own}

    @property
    def codec_s(self) -> float:
        """Seconds spent on encoding and decoding so far."""
        return sum(store.lossy.counters.encode_s + store.lossy.counters.decode_s for store in self._stores)

    @property
    def undelivered_norm(self) -> float:
        """L2 norm of the gradients that this rank has kept back."""
        encoders = [encoder for store in self._stores for encoder in store.lossy.encoders.values()]
        return sum(encoder.squared_residual() for encoder in encoders) ** 0.5

    @property
    def _stores(self) -> list[ReplicaStore]:
        return [layer.store for layer in self._layers]

    @property
    def has_codecs(self) -> bool:
        """True where something is lossy."""
        return any(
            codec is not None
            for layer in self._layers
            for codec in (*layer.store.encoding.weight_codecs, *layer.store.encoding.gradient_codecs)
        )

    @property
    def has_undelivered(self) -> bool:
        """True where an earlier plan's gradients wait for the next step."""
        return any(store.lossy.undelivered is not None for store in self._stores)

    def codec_sums(self, position: int) -> CodecSums | None:
        """What lossy codecs do in one layer; None where it has none.  Reads all owned weights."""
        store = self._layers[position].store
        store.streams.join()  # the next weights may be encoded already, which changes mirrors
        return store.lossy.sums(store.source_weights()) if store.is_lossy else None

    def describe_memory(self) -> str:
        """What replicas take on this rank, for the log."""
        return f"replicas and their gradients {self.replica_bytes / 2**20:.1f} MiB per rank"

    @property
    def replica_bytes(self) -> int:
        """Bytes held now for replicas and their gradient sums on this rank."""
        deferred = sum(layer.store.deferred_bytes for layer in self._layers) if self._max_staleness else 0
        return sum(layer.store.replica_bytes for layer in self._layers) + deferred

    def _ship(self, *, is_exact: bool) -> None:
        self.drop_prefetched()
        for layer in self._layers:
            is_deferred = not is_exact and self._max_staleness > 0
            layer.gather = WeightGather(layer.store, is_exact=is_exact, is_deferred=is_deferred)
            layer.weights.add(layer.gather)
            layer.is_in_graph = False
            layer.seen = versions_of(layer.owned)

    def _drain_weights(self) -> None:
        for layer in self._layers:
            self._finish_gather(layer)


def is_in_backward() -> bool:
    """True inside a running backward: a forward that runs there is a recomputation."""
    return torch._C._current_graph_task_id() != -1


def refuse_released(store: ReplicaStore) -> None:
    """Raise GradientNotReturnedError where another plan has taken over from the one of this store."""
    if store.is_released:
        raise GradientNotReturnedError(
            f"{store.layer}: this backward belongs to a forward that ran before hybridep changed its plan or was "
            f"detached; run both before the change, or both after it"
        )


def _exchange_checksums(transport: Transport, store: ReplicaStore) -> dict[int, Tensor]:
    """Checksums [M + C, 2] of every rank of the domain, by global rank."""
    own = store.checksums()
    tables = {rank: torch.empty_like(own) for rank in store.domain_ranks}
    tables[transport.rank] = own
    others = [rank for rank in store.domain_ranks if rank != transport.rank]
    channel = transport.channel("verify", store.domain_ranks)
    purpose = Purpose("control", "exchange of checksums", store.layer)
    channel.start([(r, own) for r in others], [(r, tables[r]) for r in others], purpose).wait()
    return tables


def _trainable_parameters(store: ReplicaStore) -> list[nn.Parameter]:
    """The owned experts' trainable parameters, by `experts` and `trainable_names`."""
    names = store.trainable_names()
    return [parameters[name] for parameters in map(parameters_of, store.experts) for name in names]


def _own_weights(store: ReplicaStore, given: Sequence[Tensor]) -> Sequence[Tensor]:
    """What the owned experts compute with: `given`, or under ZeRO-3 the copy of the last shipment."""
    return _views(store, (store.own_index,)) if store.is_partitioned else given


def _views(store: ReplicaStore, slots: Sequence[int]) -> list[Tensor]:
    """Trainable weights as the store holds them, by slot, `experts` and `trainable_names`."""
    names = store.trainable_names()
    return [
        weights[name]
        for slot in slots
        for module_idx in range(len(store.experts))
        for weights in [store.expert_weights(slot, module_idx)]
        for name in names
    ]


def _by_slot(store: ReplicaStore, tensors: Any) -> list[list[dict[str, Tensor]]]:
    """Weights by [slot][module]: own ones first in `tensors`, then the replicas' in slot order."""
    names = store.trainable_names()
    slots: list[list[dict[str, Tensor]]] = [[] for _ in store.domain_ranks]
    for slot in (store.own_index, *store.replica_slots()):
        for module_idx in range(len(store.experts)):
            # A grouped module gets all its weights: called as it is, it would run ZeRO-3's hooks.
            is_own = slot == store.own_index and not store.is_grouped
            weights = {} if is_own else store.expert_weights(slot, module_idx)
            weights.update({name: next(tensors) for name in names})
            slots[slot].append(weights)
    return slots


def _prefetch(manager: MigrationManager, layer: LayerExperts) -> tuple[ReturnHandle, tuple[Tensor, ...]]:
    handle, parameters = ReturnHandle(), _trainable_parameters(layer.store)
    away = stand_in(parameters)
    aliases = _Prefetch.apply(manager, layer, handle, *parameters)
    take_away(away)
    return handle, aliases


class _Prefetch(Function):
    """Identity on the owned parameters; its backward waits for what the other ranks computed, and adds it."""

    @staticmethod
    def forward(
        ctx: Any, manager: MigrationManager, layer: LayerExperts, handle: ReturnHandle, *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.manager, ctx.layer, ctx.handle = manager, layer, handle
        return tuple(parameter.detach() for parameter in parameters)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        # Autograd accumulates what is returned here before anything else.
        away = stand_in(_trainable_parameters(ctx.layer.store))
        if away:
            torch.autograd.Variable._execution_engine.queue_callback(partial(take_away, away))
        operation = ctx.handle.operation
        if operation is None:  # not the accumulation boundary: the owner's own part only
            return None, None, None, *gradients
        with profiler_range("prefetch_backward", ctx.layer.store.layer):
            returned = ctx.manager.finish_return(ctx.layer, operation)
            return (
                None,
                None,
                None,
                *((own.float() + other).to(own.dtype) for own, other in zip(gradients, returned, strict=True)),
            )


class _Acquire(Function):
    """Owned parameters and replicas for the experts; its backward keeps or returns the replicas' gradients."""

    @staticmethod
    def forward(
        ctx: Any, manager: MigrationManager, layer: LayerExperts, handle: ReturnHandle, *aliases: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.manager, ctx.layer, ctx.handle, ctx.num_own = manager, layer, handle, len(aliases)
        store = layer.store
        held = (*_own_weights(store, aliases), *_views(store, store.replica_slots()))
        return tuple(weight.detach() for weight in held)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        with profiler_range("acquire_backward", ctx.layer.store.layer):
            ctx.manager.take_gradients(ctx.layer, ctx.handle, gradients[ctx.num_own :])
        return None, None, None, *gradients[: ctx.num_own]
