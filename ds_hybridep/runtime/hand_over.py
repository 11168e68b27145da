# SPDX-License-Identifier: Apache-2.0
"""Gradients that lossy codecs keep back, on their way to the owners of the experts when the plan changes.

The senders of a layer's gradients, and what each has not delivered of the others' experts, differ from plan to plan.
So before a change every rank sends what it has kept to the owners, exactly, and they add it to the next gradients:

    before    rank 1: residual of expert 0      rank 0, owner of expert 0: parameter, gradient
    after     rank 1: nothing                   rank 0: ..., and what rank 1 had kept
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ds_hybridep.runtime.comm import Purpose, Transport
from ds_hybridep.runtime.expert_gather import ReplicaStore, lay_out


def collect(store: ReplicaStore, transport: Transport, purpose: Purpose) -> list[Tensor]:
    """What no rank of the domain has delivered of this rank's experts, fp32 [e, *shape] for each of `store.parts`.

    All ranks of the domain must call.  The kept residuals are gone from the store afterwards.
    """
    lossy = store.lossy
    shapes = [(part.num_experts, *part.shape) for part in store.parts]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    device = store.weights[0].device
    kept = torch.zeros(len(store.domain_ranks), sum(sizes), device=device)
    for (_, slot), encoder in lossy.encoders.items():
        kept[slot] += torch.cat([residual.reshape(-1) for residual in encoder.residuals])
    if lossy.undelivered is not None:
        kept[store.own_index] += torch.cat([part.reshape(-1) for part in lossy.undelivered.parts])
    lossy.encoders.clear()
    lossy.decoders.clear()
    lossy.undelivered = None

    others = [(slot, store.domain_ranks[slot]) for slot in store.replica_slots()]
    arrived = {slot: torch.empty(sum(sizes), device=device) for slot, _ in others}
    channel = transport.channel("hand_over", store.domain_ranks)
    channel.start(
        [(rank, kept[slot]) for slot, rank in others], [(rank, arrived[slot]) for slot, rank in others], purpose
    ).wait()
    total = kept[store.own_index]
    for slot, _ in others:  # in the order of ranks: the same sum every time
        total = total + arrived[slot]
    return [piece.view(shape) for piece, shape in zip(total.split(sizes), shapes, strict=True)]


def trainable_in_order(expert: nn.Module) -> list[nn.Parameter]:
    """Trainable parameters of an expert, in the order of `ReplicaStore.parts`."""
    blocks = [block for block in lay_out(expert) if block.is_trainable]
    return [expert.get_parameter(piece.name) for block in blocks for piece in block.slices]


class CarriedGradients:
    """Gradients that an earlier plan had not delivered, for experts that have no replicas now.

    They are added once, to the gradients of the first optimizer step that is applied.

    Args:
        experts: by layer the modules with those that this rank owns, one each or one for all.
        undelivered: from `collect`.
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
        self._undelivered = dict(undelivered)
        self._handles = [
            parameter.register_hook(self._adder(part if part.shape == parameter.shape else part[local_idx]))
            for layer, parts in undelivered.items()
            for local_idx, expert in enumerate(experts[layer])
            for part, parameter in zip(parts, trainable_in_order(expert), strict=True)
        ]

    def _adder(self, carried: Tensor) -> Callable[[Tensor], Tensor | None]:
        def add(gradient: Tensor) -> Tensor | None:
            if not self._is_boundary():
                return None
            return (gradient.float() + carried * self._loss_scale()).to(gradient.dtype)

        return add

    def remove(self) -> dict[str, list[Tensor]]:
        """Stop adding: the step was applied, or another plan takes them.  Returns what was carried."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        return {layer: list(parts) for layer, parts in self._undelivered.items()}
