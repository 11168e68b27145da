# SPDX-License-Identifier: Apache-2.0
"""Checks with checksums that every replica holds its owner's weights."""

import itertools
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from ds_hybridep.errors import VerificationError
from ds_hybridep.experts.migration import MigrationManager
from ds_hybridep.experts.partitioned import gathered
from ds_hybridep.experts.replicas import Replicas
from ds_hybridep.kernels import Kernels
from ds_hybridep.sync.mirrors import Mirror, Replica
from ds_hybridep.sync.stages import HotSlot, SlotKey
from ds_hybridep.transport.channels import Purpose, Transport


def verify(migration: MigrationManager, transport: Transport, kernels: Kernels) -> None:
    """Raise VerificationError if replicas differ from their owners; all ranks must call at the same step."""
    migration.finish_shipments()
    if migration.is_stale:
        return
    for layer in migration.layers:
        replicas = layer.replicas
        tables = _exchange(transport, replicas, checksums(replicas, kernels))
        for slot, owner in enumerate(replicas.domain_ranks):
            wrong = [
                rank
                for other, rank in enumerate(replicas.domain_ranks)
                if not _is_right(replicas, tables, slot, other)
            ]
            if wrong:
                raise VerificationError(
                    f"{replicas.name}: the copies of the experts of rank {owner} on ranks {wrong} differ from the "
                    f"owner's weights; if they were changed outside engine.step(), call "
                    f"ds_hybridep.refresh(engine) on all ranks after the change"
                )


def _num_rows(replicas: Replicas) -> int:
    """Return the number of slots, those of hot experts included where there can be some."""
    return len(replicas.domain_ranks) * (1 if replicas.hot is None else 2)


def _is_right(replicas: Replicas, tables: dict[int, Tensor], slot: int, other: int) -> bool:
    """Return True if the rank of slot `other` holds the owner's weights of `slot`.

    Of slots that are not near to it, it holds the hot experts of a rank to which they are near.
    """
    ranks, num_slots = replicas.domain_ranks, len(replicas.domain_ranks)
    if replicas.are_near(slot, other):
        return torch.equal(tables[ranks[other]][slot], tables[ranks[slot]][_owners_row(replicas, slot, other)])
    source = replicas.hot_source(slot, other)
    return torch.equal(tables[ranks[other]][slot + num_slots], tables[ranks[source]][slot + num_slots])


def checksums(replicas: Replicas, kernels: Kernels) -> Tensor:
    """Return sums over the bits of each slot, of its hot experts if there can be some, and of lossy mirrors.

    The result is [M + C, 2] or [2M + C, 2] int64 on the CPU.

    The own slot is read from the parameters.  A replica that arrives encoded is compared with its owner's mirror.
    The function reads one parameter after the other, in place.  Slots that are not here have zeros.
    """
    codecs = replicas.codecs
    lossy = {} if codecs is None else codecs.lossy_replicas
    slots = range(len(replicas.domain_ranks))
    rows_of: list[SlotKey] = [*slots, *(() if replicas.hot is None else map(HotSlot, slots))]
    encoded_of: list[tuple[SlotKey, Replica | Mirror | None]] = [(slot, lossy.get(slot)) for slot in rows_of]
    encoded_of += [(replicas.own_slot, mirror) for mirror in (() if codecs is None else codecs.mirrors)]
    rows = []
    for slot, encoded in encoded_of:
        tensors = _weights_of(replicas, slot, frozen_only=encoded is not None)
        if encoded is not None:
            tensors = itertools.chain(tensors, map(encoded.home.fetch, encoded.values))
        total = torch.zeros(2, dtype=torch.int64, device=replicas.device)
        for weight, tensor in zip(itertools.count(1, 2), tensors):  # sums depend on the order of the tensors
            total += kernels.bit_sums(tensor.contiguous()) * weight
        rows.append(total)
    return torch.stack(rows).cpu()


def _weights_of(replicas: Replicas, slot: SlotKey, *, frozen_only: bool) -> Iterator[Tensor]:
    """Yield the weights of a slot; of the own slot its parameters, which ZeRO-3 gathers one by one."""
    if isinstance(slot, HotSlot):
        yield from _hot_weights_of(replicas, slot.slot)
        return
    if slot not in replicas.near_slots:
        return
    names = [piece.name for block in replicas.layout.blocks for piece in block.slices]
    names = [name for name in names if not frozen_only or name not in replicas.trainable_names]
    is_own = slot == replicas.own_slot
    experts: list[dict[str, Any]] = (
        [dict(expert.named_parameters()) for expert in replicas.own.experts]
        if is_own
        else replicas.weights_by_name(slot)
    )
    for weights in experts:
        for name in names:
            with gathered([weights[name]]) if is_own else nullcontext():
                yield weights[name].detach()


def _hot_weights_of(replicas: Replicas, slot: int) -> Iterator[Tensor]:
    """Yield the weights of a slot's hot experts, expert by expert: of a near slot those of the whole slot."""
    if replicas.hot is None:
        return
    if slot in replicas.near_slots:
        replicas.hot.make_room(trainable_only=False)
        yield from replicas.hot.copy(slot, replicas.weights_by_name(slot), trainable_only=False)
        replicas.hot.free()
    else:
        yield from replicas.hot.values(slot, trainable_only=False)


def _owners_row(replicas: Replicas, slot: int, holder: int) -> int:
    """Return the row of the owner's checksums that the copy of `slot` on the rank of slot `holder` must equal."""
    if holder == slot or replicas.codecs is None:
        return slot
    sender = replicas.codecs.weight_senders.get(replicas.level_between(slot, holder))
    return _num_rows(replicas) + replicas.codecs.mirrors.index(sender) if isinstance(sender, Mirror) else slot


def _exchange(transport: Transport, replicas: Replicas, own: Tensor) -> dict[int, Tensor]:
    """Return the checksums [M + C, 2] of every rank of the domain, by global rank."""
    tables = {rank: torch.empty_like(own) for rank in replicas.domain_ranks}
    tables[transport.rank] = own
    others = [rank for rank in replicas.domain_ranks if rank != transport.rank]
    channel = transport.channel("verify", replicas.domain_ranks)
    purpose = Purpose("control", "exchange of checksums", replicas.name)
    channel.start([(r, own) for r in others], [(r, tables[r]) for r in others], purpose).wait()
    return tables
