# SPDX-License-Identifier: Apache-2.0
"""Proof, by checksums, that every replica holds its owner's weights."""

import torch
from torch import Tensor

from ds_hybridep.errors import VerificationError
from ds_hybridep.experts.migration import MigrationManager
from ds_hybridep.experts.replicas import Replicas
from ds_hybridep.kernels import Kernels
from ds_hybridep.transport.channels import Purpose, Transport


def verify(migration: MigrationManager, transport: Transport, kernels: Kernels) -> None:
    """Raise VerificationError where replicas differ from their owners; all ranks must call at the same step."""
    migration.finish_shipments()
    if migration.is_stale:
        return
    for position, layer in enumerate(migration.layers):
        migration.hold(position)
        replicas = layer.replicas
        tables = _exchange(transport, replicas, checksums(replicas, kernels))
        for slot, owner in enumerate(replicas.domain_ranks):
            wrong = [
                rank
                for other, rank in enumerate(replicas.domain_ranks)
                if not torch.equal(tables[rank][slot], tables[owner][_owners_row(replicas, slot, other)])
            ]
            if wrong:
                raise VerificationError(
                    f"{replicas.layer}: the copies of the experts of rank {owner} on ranks {wrong} differ from the "
                    f"owner's weights; if they were changed outside engine.step(), call "
                    f"ds_hybridep.refresh(engine) on all ranks after the change"
                )
    migration.stamp()


def checksums(replicas: Replicas, kernels: Kernels) -> Tensor:
    """[M + C, 2] int64 on the CPU: two sums over the bits of each slot, then of the mirror of each lossy codec.

    The own slot is taken from the parameters.  A replica that comes encoded is compared with its owner's mirror.
    """
    replicas.load_own_weights(trainable_only=False)
    frozen = [
        tensor for block, tensor in zip(replicas.blocks, replicas.weights, strict=True) if not block.is_trainable
    ]
    lossy = {} if replicas.feedback is None else replicas.feedback.lossy_replicas
    mirrors = [] if replicas.feedback is None else list(replicas.feedback.mirrors.values())
    held = [
        [tensor[slot] for tensor in frozen] + lossy[slot].values
        if slot in lossy
        else [tensor[slot] for tensor in replicas.weights]
        for slot in range(len(replicas.domain_ranks))
    ]
    held += [[tensor[replicas.own_slot] for tensor in frozen] + mirror.values for mirror in mirrors]
    sums = [torch.stack([kernels.bit_sums(tensor.contiguous()) for tensor in tensors]).sum(0) for tensors in held]
    return torch.stack(sums).cpu()


def _owners_row(replicas: Replicas, slot: int, holder: int) -> int:
    """The row of the owner's checksums that the copy of `slot` on the rank of slot `holder` must equal."""
    if holder == slot or replicas.feedback is None:
        return slot
    name = replicas.feedback.mirror_names.get(replicas.level_between(slot, holder))
    return slot if name is None else len(replicas.domain_ranks) + list(replicas.feedback.mirrors).index(name)


def _exchange(transport: Transport, replicas: Replicas, own: Tensor) -> dict[int, Tensor]:
    """Checksums [M + C, 2] of every rank of the domain, by global rank."""
    tables = {rank: torch.empty_like(own) for rank in replicas.domain_ranks}
    tables[transport.rank] = own
    others = [rank for rank in replicas.domain_ranks if rank != transport.rank]
    channel = transport.channel("verify", replicas.domain_ranks)
    purpose = Purpose("control", "exchange of checksums", replicas.layer)
    channel.start([(r, own) for r in others], [(r, tables[r]) for r in others], purpose).wait()
    return tables
