# SPDX-License-Identifier: Apache-2.0
"""Gradients that lossy codecs keep back, on their way to the owners of the experts when the plan changes.

The senders of a layer's gradients, and what each has not delivered of the others' experts, differ from plan to plan.
So before a change every rank sends what it has kept to the owners, exactly, and they add it to the next gradients:

    before    rank 1: residual of expert 0      rank 0, owner of expert 0: parameter, gradient
    after     rank 1: nothing                   rank 0: ..., and what rank 1 had kept
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ds_hybridep.experts.partitioned import full_shape, parameters_of
from ds_hybridep.experts.replicas import ReplicaStore, lay_out
from ds_hybridep.transport.channels import Purpose, Transport


def collect(store: ReplicaStore, transport: Transport, purpose: Purpose) -> list[Tensor]:
    """What no rank of the domain has delivered of this rank's experts, fp32 [e, *shape] for each of `store.parts`.

    All ranks of the domain must call.  The kept residuals are gone from the store afterwards.  What was added already
    to gradients that no step has used yet is left out.
    """
    lossy = store.lossy
    shapes = [(part.num_experts, *part.shape) for part in store.parts]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    device = store.weights[0].device
    kept = torch.zeros(len(store.domain_ranks), sum(sizes), device=device)
    for (_, slot), encoder in lossy.encoders.items():
        kept[slot] += torch.cat([residual.reshape(-1) for residual in encoder.residuals])
    if lossy.undelivered is not None and not lossy.undelivered.is_added:
        kept[store.own_index] += torch.cat([part.reshape(-1) for part in lossy.undelivered.parts])
    lossy.encoders.clear()
    lossy.decoders.clear()
    lossy.undelivered = None

    # Where gradients go as they are, nobody has kept anything for others.
    others = [(slot, store.domain_ranks[slot]) for slot in store.replica_slots()] if store.gradient_layouts else []
    arrived = {slot: torch.empty(sum(sizes), device=device) for slot, _ in others}
    if others:
        channel = transport.channel("hand_over", store.domain_ranks)
        sends = [(rank, kept[slot]) for slot, rank in others]
        channel.start(sends, [(rank, arrived[slot]) for slot, rank in others], purpose).wait()
    total = kept[store.own_index]
    for slot, _ in others:  # in the order of ranks: the same sum every time
        total = total + arrived[slot]
    return [piece.view(shape) for piece, shape in zip(total.split(sizes), shapes, strict=True)]


def trainable_in_order(expert: nn.Module) -> list[nn.Parameter]:
    """Trainable parameters of an expert, in the order of `ReplicaStore.parts`."""
    blocks = [block for block in lay_out(expert) if block.is_trainable]
    parameters = parameters_of(expert)
    return [parameters[piece.name] for block in blocks for piece in block.slices]


@dataclass
class _Waiting:
    """What waits for the gradient of one parameter."""

    values: Tensor  # view of what is carried, of the parameter's shape
    is_added: bool = False  # to the gradient of the step that is under way
    handle: Any = None


class CarriedGradients:
    """Gradients that an earlier plan had not delivered, for experts that have no replicas now.

    Each is added once, to the first gradient that its parameter gets at an accumulation boundary, and is kept until
    the step that uses it is applied.

    Args:
        experts: by layer the modules with those that this rank owns, one each or one for all.
        undelivered: by layer, from `collect`; changed in place.
        is_boundary: True when the backward that runs is the last before the optimizer step.
        loss_scale: by which gradients are multiplied now.
    """

    def __init__(
        self,
        experts: Mapping[str, Sequence[nn.Module]],
        undelivered: Mapping[str, Sequence[Tensor]],
        is_boundary: Callable[[], bool],
        loss_scale: Callable[[], float],
    ) -> None:
        self._is_boundary, self._loss_scale = is_boundary, loss_scale
        self.parts = {layer: list(parts) for layer, parts in undelivered.items()}
        self._waiting: list[_Waiting] = []
        for layer, parts in self.parts.items():
            for local_idx, expert in enumerate(experts[layer]):
                for part, parameter in zip(parts, trainable_in_order(expert), strict=True):
                    waiting = _Waiting(part if part.shape == full_shape(parameter) else part[local_idx])
                    waiting.handle = parameter.register_hook(partial(self._add, waiting))
                    self._waiting.append(waiting)

    def _add(self, waiting: _Waiting, gradient: Tensor) -> Tensor | None:
        if waiting.is_added or not self._is_boundary():
            return None
        waiting.is_added = True
        return (gradient.float() + waiting.values * self._loss_scale()).to(gradient.dtype)

    @property
    def is_done(self) -> bool:
        """Nothing waits any more."""
        return not self._waiting

    def commit(self) -> None:
        """The optimizer step was done: what was added to its gradients is delivered."""
        for waiting in self._waiting:
            if waiting.is_added:
                waiting.values.zero_()
                waiting.handle.remove()
        self._waiting = [waiting for waiting in self._waiting if not waiting.is_added]

    def restore(self) -> None:
        """The optimizer step was skipped, or the gradients were dropped."""
        for waiting in self._waiting:
            waiting.is_added = False

    def remove(self) -> dict[str, list[Tensor]]:
        """Stop adding, for another plan takes them.  Returns what was not added yet."""
        self.commit()  # gradients that are there go on to their step
        for waiting in self._waiting:
            waiting.handle.remove()
        self._waiting = []
        return self.parts
