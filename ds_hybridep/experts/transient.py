# SPDX-License-Identifier: Apache-2.0
"""Holds replicas only around their use: gathers them ahead of a forward, and again ahead of a backward.

    forward    acquire(l): gather l+1 .. l+depth    experts of layer l
    backward   hold(l): gather l-1 .. l-depth, wait for l    experts of layer l    acquire(l)

`ReplicaPool` decides what is gathered and given back.  It follows calls alone, not times, so all ranks start the same
transfers in the same order.  The optimizer step makes all held replicas old.  Between steps weights do not change, so
a second gather brings the same bits.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from ds_hybridep.experts.migration import LayerExperts, MigrationManager, Weights, is_in_backward
from ds_hybridep.plan.replica_pool import ReplicaPool
from ds_hybridep.transport.channels import Transport, profiler_range


class TransientWeights:
    """The memory of one layer's replica weights, which comes and goes while its tensors stay.

    Graphs save views of these tensors, so memory must come back to the same tensors.  Weights that are not held have
    an odd version: autograd takes them as modified, and a backward that would read them raises.  Held weights have the
    even version of their epoch, so graphs from before an optimizer step raise too.

    Args:
        tensors: one for each block, each with its own memory, which is given back at once.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tuple(tensors)
        self._num_bytes = [tensor.nbytes for tensor in tensors]
        self._epoch = 0
        self.give_back()

    @property
    def num_bytes(self) -> int:
        """Bytes while held."""
        return sum(self._num_bytes)

    def take(self) -> None:
        """Allocate the memory again; its content is undefined."""
        self._resize(self._num_bytes)
        self._is_held = True

    def give_back(self) -> None:
        """Free the memory; nothing may be under way to or from it."""
        self._resize([0] * len(self._tensors))
        self._is_held = False
        self.stamp()

    def renew(self) -> None:
        """Call after weights changed: the next gather brings other values than graphs have saved."""
        self._epoch += 1
        self.stamp()

    def stamp(self) -> None:
        """Set the version; call after the last write that autograd sees."""
        version = 2 * self._epoch + (not self._is_held)
        torch._C._autograd._unsafe_set_version_counter(self._tensors, (version,) * len(self._tensors))

    def _resize(self, sizes: Sequence[int]) -> None:
        for tensor, num_bytes in zip(self._tensors, sizes, strict=True):
            tensor.untyped_storage().resize_(num_bytes)


class TransientMigration(MigrationManager):
    """Holds replica weights of at most `prefetch_depth` + 1 layers.

    prefetch_depth: also the number of layers that are gathered ahead.
    """

    def __init__(
        self,
        transport: Transport,
        layers: Sequence[LayerExperts],
        prefetch_depth: int,
        is_boundary: Callable[[], bool],
    ) -> None:
        super().__init__(transport, layers, prefetch_depth, is_boundary)
        self._pool = ReplicaPool(len(layers), prefetch_depth)
        self._memory = [TransientWeights(layer.replicas.weights) for layer in layers]

    def acquire(self, position: int) -> list[list[dict[str, Tensor]]]:
        """As in `MigrationManager`, but give the weights memory first: without it they have no views."""
        if self.is_stale and not is_in_backward():
            self.refresh(wait=False)
        self._request(position)
        return super().acquire(position)

    def watch_backward(self, position: int, outputs: Tensor) -> Tensor:
        """Return the same outputs of a layer's experts; their backward first gathers the replicas again."""
        return _WatchBackward.apply(self, position, outputs) if outputs.requires_grad else outputs

    def hold(self, position: int) -> None:
        """Gather a layer's replicas, and keep them until a request for another layer needs their room."""
        self.layers[position].refuse_released()
        self._request(position)
        self.progress()
        self.wait_for_weights(position)

    def stamp(self) -> None:
        for memory in self._memory:
            memory.stamp()

    def release(self) -> None:
        self._memory = []
        super().release()

    def describe_memory(self) -> str:
        """Describe the memory of replicas, for the log."""
        return (
            f"transient replicas of at most {self._pool.capacity} layers, {self.most_weight_bytes / 2**20:.1f} MiB "
            f"per rank beside their gradients"
        )

    @property
    def most_weight_bytes(self) -> int:
        """The most bytes that weights of replicas ever take on this rank."""
        sizes = [memory.num_bytes for memory in self._memory]
        return max(sum(sizes[first : first + self._pool.capacity]) for first in range(len(sizes)))

    def _request(self, position: int) -> None:
        given_back, gathered = self._pool.request(position, is_backward=is_in_backward())
        for other in given_back:
            self._give_back(other)
        for other in gathered:
            self._memory[other].take()
            self.layers[other].ship(is_exact=True)
            self._memory[other].stamp()

    def _give_back(self, position: int) -> None:
        layer = self.layers[position]
        layer.finish_shipment()  # one that nobody waited for
        self._memory[position].give_back()
        if layer.weights is Weights.FRESH:
            layer.weights = Weights.AWAY

    def _ship(self, *, is_exact: bool) -> None:
        """Drop all replicas, which are old now, and gather those that the next forward needs first.

        Later stages start only in that forward: after the last step of a job other ranks may be gone already.
        """
        for position in self._pool.held:
            self._give_back(position)
        self._pool.held = []
        for layer, memory in zip(self.layers, self._memory, strict=True):
            layer.prefetched = None  # a node that no forward took
            layer.weights = Weights.AWAY
            memory.renew()
        self._request(0)


class _WatchBackward(Function):
    """Identity on the outputs of a layer's experts; its backward runs before theirs."""

    @staticmethod
    def forward(ctx: Any, manager: TransientMigration, position: int, outputs: Tensor) -> Tensor:
        ctx.manager, ctx.position = manager, position
        return outputs.view_as(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, Tensor]:
        with profiler_range("gather_for_backward", ctx.manager.layers[ctx.position].replicas.layer):
            ctx.manager.hold(ctx.position)
        return None, None, gradient
