# SPDX-License-Identifier: Apache-2.0
"""Holds gradients that an earlier plan's codecs had kept back, until an optimizer step has used them.

Each plan has other senders of a layer's gradients, and each sender keeps back other gradients.  So before a change,
every rank sends what it has kept back to the owners, unencoded.  The owners add it to the next gradients:

    before    rank 1: residual of expert 0      rank 0, owner of expert 0: parameter, gradient
    after     rank 1: nothing                   rank 0: ..., and what rank 1 had kept
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ds_hybridep.experts.partitioned import full_shape
from ds_hybridep.experts.replicas import Replicas
from ds_hybridep.experts.slots import lay_out
from ds_hybridep.sync.gradients import StepChanges
from ds_hybridep.transport.channels import Purpose, Transport


def collect(replicas: Replicas, transport: Transport) -> list[Tensor]:
    """Return gradients of this rank's experts that the domain has not delivered, fp32 [e, *shape] for each of `parts`.

    All ranks of the domain must call, with nothing under way.  Afterwards senders have no residuals.
    """
    assert replicas.feedback is not None, f"{replicas.layer}: nothing is lossy"
    gradients = replicas.feedback.gradients
    shapes = [(part.num_experts, *part.shape) for part in replicas.parts]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    kept = torch.zeros(len(replicas.domain_ranks), sum(sizes), device=replicas.device)
    gradients.home.wait()
    for stage in replicas.stages:
        for slot, parts in enumerate(replicas.slot_parts):
            for place, part in zip(kept[slot].split(sizes), parts, strict=True):
                if (kept_back := gradients.kept(stage.level, part)) is not None:
                    place += gradients.value(kept_back).view(-1).to(kept.device)
    gradients.forget()
    total = kept[replicas.own_slot]
    if gradients.is_lossy:  # otherwise no rank has kept anything back
        ranks = [replicas.domain_ranks[slot] for slot in replicas.replica_slots]
        sent = [kept[slot] for slot in replicas.replica_slots]
        arrived = [torch.empty_like(total) for _ in ranks]
        channel = transport.channel("hand_over", replicas.domain_ranks)
        purpose = Purpose("expert_gradients", "hand-over of residuals", replicas.layer)
        channel.start(list(zip(ranks, sent, strict=True)), list(zip(ranks, arrived, strict=True)), purpose).wait()
        total = sum(arrived, total)  # in the order of ranks: the same sum every time
    return [piece.view(shape) for piece, shape in zip(total.split(sizes), shapes, strict=True)]


@dataclass(eq=False)
class _Waiting:
    """What waits for the gradient of one parameter."""

    values: Tensor  # view of the kept gradients, in the parameter's shape
    is_added: bool = False  # to the gradient of the step that is under way
    handle: Any = None


class UndeliveredGradients:
    """Gradients of the owned experts that wait for the next step; none at first.

    Each is added once, to the first gradient that its parameter gets at an accumulation boundary.  It is kept until
    the step that uses it was applied.

    experts: by layer, the modules of the experts that this rank owns, one module each or one for all.
    """

    def __init__(
        self,
        experts: Mapping[str, Sequence[nn.Module]],
        is_boundary: Callable[[], bool],
        loss_scale: Callable[[], float],
        changes: StepChanges,
    ) -> None:
        self._experts, self._changes = experts, changes
        self._is_boundary, self._loss_scale = is_boundary, loss_scale
        self.parts: Mapping[str, Sequence[Tensor]] = {}
        self._waiting: list[_Waiting] = []

    def take_over(self, parts: Mapping[str, Sequence[Tensor]]) -> None:
        """Add `parts` to the next gradients: by layer, unscaled fp32 [e, *shape] for each trainable parameter in block
        order.  `parts` replace what waited before, and are changed in place.
        """
        self.remove()
        self.parts = parts
        for layer, tensors in parts.items():
            for local_idx, expert in enumerate(self._experts[layer]):
                for part, parameter in zip(tensors, _trainable_in_order(expert), strict=True):
                    waiting = _Waiting(part if part.shape == full_shape(parameter) else part[local_idx])
                    waiting.handle = parameter.register_hook(partial(self._add, waiting))
                    self._waiting.append(waiting)

    def _add(self, waiting: _Waiting, gradient: Tensor) -> Tensor | None:
        if waiting.is_added or not self._is_boundary():
            return None
        waiting.is_added = True
        self._changes.note(waiting, lambda: setattr(waiting, "is_added", False))
        return (gradient.float() + waiting.values * self._loss_scale()).to(gradient.dtype)

    def deliver(self) -> None:
        """Call after an applied optimizer step: drop what was added to its gradients."""
        for waiting in self._waiting:
            if waiting.is_added:
                waiting.values.zero_()
                waiting.handle.remove()
        self._waiting = [waiting for waiting in self._waiting if not waiting.is_added]
        if not self._waiting:
            self.parts = {}

    def remove(self) -> Mapping[str, Sequence[Tensor]]:
        """Stop adding because another plan takes over.  Returns what was not added yet."""
        self.deliver()  # what was added stays in the gradients of the next step
        for waiting in self._waiting:
            waiting.handle.remove()
        left, self.parts, self._waiting = self.parts, {}, []
        return left


def _trainable_in_order(expert: nn.Module) -> list[nn.Parameter]:
    """Return trainable parameters in the order of `Replicas.parts`."""
    parameters = dict(expert.named_parameters())
    return [parameters[piece.name] for block in lay_out(expert) if block.is_trainable for piece in block.slices]
