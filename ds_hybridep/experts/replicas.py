# SPDX-License-Identifier: Apache-2.0
"""The exact way of an expert: working copies of a domain's experts on each of its ranks, and their gradients back.

One layer's `ReplicaStore` holds the weights of all M*e experts of the domain, one slot per owner:

    weights  [M, e * n]  slot i = the experts of the domain rank with offset index i (own slot: a staging copy)
    sums     [M, e * n]  fp32 partial gradients since the last return (own slot: what came back)

Within a slot parameter follows parameter, each as [e, *shape]: a slot is one message, and a parameter of all its
experts one contiguous tensor.

Weights travel level by level, slowest first, so that each byte crosses a slow link once per child and not once per
rank; gradients travel the opposite way, summed in fp32 inside the fast levels before they cross a slow one.

    domain sizes [2, 2], the rank at offset (0, 1) sends:
    weights      stage 0: slot 01 to (1, 1)               stage 1: slots 01, 11 to (0, 0)
    gradients    stage 0: slots 00, 10 to (0, 0)          stage 1: slot 11 to (1, 1)
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ds_hybridep.codecs import Codec
from ds_hybridep.errors import UnsupportedError
from ds_hybridep.experts.partitioned import full_shape, gathered, is_partitioned, parameters_of
from ds_hybridep.plan.cluster import flatten
from ds_hybridep.plan.partition import Partition
from ds_hybridep.sync.feedback import (
    LossyState,
    MessageLayout,
    Mirror,
    PacketPart,
    Replica,
    ResidualEncoder,
    Undelivered,
)
from ds_hybridep.transport.channels import Channel, Purpose, Transfer, Transport
from ds_hybridep.transport.streams import Mark, streams_of


@dataclass(frozen=True)
class ParameterSlice:
    """Where one parameter of an expert lies in its block."""

    name: str
    shape: torch.Size
    start: int
    stop: int


@dataclass(frozen=True)
class Block:
    """The parameters of an expert that share dtype and trainability, laid out one after the other."""

    dtype: torch.dtype
    is_trainable: bool
    slices: tuple[ParameterSlice, ...]

    @property
    def num_elements(self) -> int:
        return self.slices[-1].stop


def lay_out(expert: nn.Module, *, is_grouped: bool = False) -> tuple[Block, ...]:
    """Blocks of an expert, in the order of its parameters.

    is_grouped: the module's parameters hold several experts, [e, *shape].
    """
    members: dict[tuple[torch.dtype, bool], list[ParameterSlice]] = {}
    for name, parameter in expert.named_parameters():
        slices = members.setdefault((parameter.dtype, parameter.requires_grad), [])
        start = slices[-1].stop if slices else 0
        shape = full_shape(parameter)[1:] if is_grouped else full_shape(parameter)
        slices.append(ParameterSlice(name, shape, start, start + shape.numel()))
    return tuple(Block(dtype, trainable, tuple(slices)) for (dtype, trainable), slices in members.items())


def num_local_experts(experts: Sequence[nn.Module], *, is_grouped: bool) -> int:
    """How many experts the modules hold."""
    return full_shape(next(experts[0].parameters()))[0] if is_grouped else len(experts)


@dataclass(frozen=True)
class GatherLevel:
    """The ranks of this rank's domain that differ from it at one level only, in offset order.

    weights, gradients: channels; None where only memory is estimated.
    """

    level: int
    ranks: tuple[int, ...]
    own_offset: int
    weights: Channel | None = None
    gradients: Channel | None = None


def gather_levels(partition: Partition, rank: int) -> tuple[GatherLevel, ...]:
    """Levels at which the domain of `rank` has more than one member, slowest first; without channels."""
    peers = {
        level: partition.gather_peers(rank, level) for level, size in enumerate(partition.domain_sizes) if size > 1
    }
    return tuple(GatherLevel(level, ranks, ranks.index(rank)) for level, ranks in peers.items())


def build_gather_levels(
    partition: Partition, transport: Transport, group: str, device: torch.device
) -> tuple[GatherLevel, ...]:
    """The levels with their channels, ready for tensors of `device`.

    Each expert-parallel `group` has channels of its own: operations of groups with other levels would mix on them.
    """

    def channel(name: str, level: GatherLevel) -> Channel:
        made = transport.channel(f"{group}_{name}_{level.level}", level.ranks, background=True)
        made.prepare(device)
        return made

    return tuple(
        replace(level, weights=channel("weights", level), gradients=channel("gradients", level))
        for level in gather_levels(partition, transport.rank)
    )


def no_master(_: nn.Parameter) -> Tensor | None:
    """For optimizers that keep no copy of their own."""
    return None


def no_scale() -> float:
    """For losses that are not scaled."""
    return 1.0


@dataclass(frozen=True)
class Encoding:
    """How weights and gradients travel; codecs by level index, None where they go as they are.

    master_of: the optimizer's fp32 copy of a parameter, flat or shaped; None where this rank does not hold all of it.
    loss_scale: by which gradients are multiplied now.
    """

    weight_codecs: tuple[Codec | None, ...]
    gradient_codecs: tuple[Codec | None, ...]
    master_of: Callable[[nn.Parameter], Tensor | None] = field(default=no_master, compare=False)
    loss_scale: Callable[[], float] = field(default=no_scale, compare=False)


class ReplicaStore:
    """Working copies of a domain's experts for one layer, and the gradients that wait to return.

    Args:
        layer: name of the layer, for messages.
        experts: the e experts owned by this rank; grouped, one module for all of them.
        partition: of the layer's expert-parallel group.
        levels: from `build_gather_levels`.
        rank: global rank of this process.
        encoding: how weights and gradients travel; None for exactly, everywhere.
        is_grouped: `experts` is one module, whose parameters are [e, *shape].
        is_transient: weights have no memory until `TransientWeights` gives them some, and sums only while some wait to
            return; weights must travel as they are.
    """

    def __init__(
        self,
        layer: str,
        experts: Sequence[nn.Module],
        partition: Partition,
        levels: tuple[GatherLevel, ...],
        rank: int,
        encoding: Encoding | None = None,
        *,
        is_grouped: bool = False,
        is_transient: bool = False,
    ) -> None:
        self.layer = layer
        self.experts = tuple(experts)
        self.is_grouped = is_grouped
        self._is_transient = is_transient
        self.num_local = num_local_experts(experts, is_grouped=is_grouped)
        self.partition = partition
        self.levels = levels
        self.domain_ranks = partition.domain_ranks(rank)
        self.own_index = partition.offset_index(rank)
        self.blocks = lay_out(experts[0], is_grouped=is_grouped)
        device = next(experts[0].parameters()).device
        self.streams = streams_of(device)
        num_slots, num_local = len(self.domain_ranks), self.num_local
        new = torch.empty if is_transient else torch.zeros
        self.weights = [
            new(num_slots, num_local * block.num_elements, dtype=block.dtype, device=device) for block in self.blocks
        ]
        self.sums: list[Tensor | None] = []
        self.sum_parts: list[list[Tensor]] = []
        self.has_unreturned_sums = False
        self.is_released = False
        exact = (None,) * len(partition.domain_sizes)
        self.encoding = encoding or Encoding(exact, exact)
        self.parts = tuple(
            PacketPart(piece.name, piece.shape, num_local)
            for block in self.blocks
            if block.is_trainable
            for piece in block.slices
        )
        # Views [e, *shape] of each slot's trainable parameters, in the order of `parts`.
        self.weight_parts = [self._trainable_parts(self.weights, slot) for slot in range(num_slots)]
        if is_transient:
            for weights in self.weights:
                weights.untyped_storage().resize_(0)  # views cannot be made without memory, but stay
        else:
            self._make_sums()
        # By level, the mirror that owned weights leave by.
        self.mirror_names: dict[int, str] = {}
        self.lossy = self._build_lossy(device)
        # Messages of gradients by level, where they are encoded.
        self.gradient_layouts = {
            level: MessageLayout(codec, self.parts)
            for level, codec in enumerate(self.encoding.gradient_codecs)
            if codec is not None and self.parts
        }

    def _make_sums(self) -> None:
        num_slots, device = len(self.domain_ranks), self.weights[0].device
        self.sums = [
            torch.zeros(num_slots, self.num_local * block.num_elements, dtype=torch.float32, device=device)
            if block.is_trainable
            else None
            for block in self.blocks
        ]
        self.sum_parts = [self._trainable_parts(self.sums, slot) for slot in range(num_slots)]

    @property
    def is_lossy(self) -> bool:
        """Whether something of this layer travels encoded."""
        return bool(self.lossy.mirrors) or any(level.level in self.gradient_layouts for level in self.levels)

    def _build_lossy(self, device: torch.device) -> LossyState:
        """Mirrors of the codecs that owned weights leave by, and replicas of the slots that come encoded."""
        state = LossyState()
        if not self.parts:  # all frozen: nothing changes, and nothing travels but at the start
            return state
        codecs = {level.level: self.encoding.weight_codecs[level.level] for level in self.levels}
        for level, codec in codecs.items():
            if codec is not None:
                name = self.mirror_names[level] = codec.settings()
                if name not in state.mirrors:
                    state.mirrors[name] = Mirror(MessageLayout(codec, self.parts), device)
        for slot in self.replica_slots():
            codec = codecs[self.level_of_slot(slot)]
            if codec is not None:
                layout = MessageLayout(codec, self.parts)
                values = [
                    view.view(part.num_experts, part.rows, part.cols)
                    if view.dtype == torch.float32
                    else torch.zeros(part.num_experts, part.rows, part.cols, device=device)
                    for part, view in zip(self.parts, self.weight_parts[slot], strict=True)
                ]
                state.replicas[slot] = Replica(layout, values)
        return state

    def level_of_slot(self, slot: int) -> int:
        """The slowest level between this rank and the owner of a replica."""
        return self.level_between(self.domain_ranks[self.own_index], self.domain_ranks[slot])

    def level_between(self, rank: int, other: int) -> int:
        """The slowest level between two ranks of the domain."""
        level = self.partition.cluster.level_between(rank, other)
        assert level is not None, f"{self.layer}: rank {rank} holds its own experts and no copies of them"
        return level

    def _trainable_parts(self, tensors: Sequence[Tensor | None], slot: int) -> list[Tensor]:
        return [
            self.part(tensor, slot, piece)
            for block, tensor in zip(self.blocks, tensors, strict=True)
            if block.is_trainable and tensor is not None
            for piece in block.slices
        ]

    def source_weights(self) -> list[Tensor]:
        """Owned trainable weights as exact as this rank has them, [e, *shape], in the order of `parts`.

        The optimizer's fp32 masters where they are here; otherwise the staging copy.  Rounding noise of a bf16 weight
        does not compress.
        """
        staged = self.weight_parts[self.own_index]
        return [self._masters(part, view) for part, view in zip(self.parts, staged, strict=True)]

    def _masters(self, part: PacketPart, staged: Tensor) -> Tensor:
        if staged.dtype == torch.float32:
            return staged  # a master holds no more
        masters = [self.encoding.master_of(parameters_of(expert)[part.name]) for expert in self.experts]
        held = [master.detach().reshape(-1, *part.shape) for master in masters if master is not None]
        return torch.cat(held) if len(held) == len(masters) else staged

    def check_trainability(self) -> None:
        """Raise UnsupportedError where a parameter was unfrozen since the blocks were laid out."""
        frozen = [block for block in self.blocks if not block.is_trainable]
        for expert_idx, expert in enumerate(self.experts if frozen else ()):
            parameters = parameters_of(expert)
            for block in frozen:
                if any(parameters[piece.name].requires_grad for piece in block.slices):
                    raise UnsupportedError(
                        f"{self.layer}: a frozen parameter of local expert {expert_idx} became trainable; "
                        f"call ds_hybridep.detach(engine) before and ds_hybridep.attach(engine) after that"
                    )

    @property
    def is_partitioned(self) -> bool:
        """True where ZeRO-3 keeps a part of each owned expert here, and the own slot is what is computed with."""
        return any(is_partitioned(parameter) for parameter in self.experts[0].parameters())

    @property
    def replica_bytes(self) -> int:
        """Bytes that this store holds now."""
        weights = sum(tensor.untyped_storage().nbytes() for tensor in self.weights)
        sums = sum(tensor.nbytes for tensor in self.sums if tensor is not None)
        return weights + sums + self.lossy.num_bytes(self.weights)

    @property
    def deferred_bytes(self) -> int:
        """Bytes of exact weights that arrive beside those computed with, where replicas may be older than owners."""
        return sum(
            weights[slot].nbytes
            for slot in self.replica_slots()
            if slot not in self.lossy.replicas
            for block, weights in zip(self.blocks, self.weights, strict=True)
            if block.is_trainable
        )

    def load_own_weights(self, *, trainable_only: bool) -> None:
        """Copy the owned experts' parameters into the own slot.  Reads them afresh: ZeRO re-points parameters.

        Under ZeRO-3 the ranks that share them must call together.
        """
        named = [parameters_of(expert) for expert in self.experts]
        pairs = [
            (place, parameters[piece.name])
            for block, weights in zip(self.blocks, self.weights, strict=True)
            if block.is_trainable or not trainable_only
            for piece in block.slices
            for place, parameters in zip(self.views(weights, self.own_index, piece), named, strict=True)
        ]
        with gathered([parameter for _, parameter in pairs]):
            for place, parameter in pairs:
                place.copy_(parameter.detach())

    def part(self, tensor: Tensor, slot: int, piece: ParameterSlice) -> Tensor:
        """View [e, *shape] of one parameter of a slot's experts in `tensor`, one of `weights` or `sums`."""
        num_local = self.num_local
        return tensor[slot, num_local * piece.start : num_local * piece.stop].view(num_local, *piece.shape)

    def views(self, tensor: Tensor, slot: int, piece: ParameterSlice) -> tuple[Tensor, ...]:
        """`part` cut as the parameters of `experts` are: [*shape] for each of them, or one [e, *shape] if grouped."""
        part = self.part(tensor, slot, piece)
        return (part,) if self.is_grouped else part.unbind()

    def expert_weights(self, slot: int, module_idx: int) -> dict[str, Tensor]:
        """Views of weights in a slot by parameter name, for one of `experts`."""
        return {
            piece.name: self.views(weights, slot, piece)[module_idx]
            for block, weights in zip(self.blocks, self.weights, strict=True)
            for piece in block.slices
        }

    def trainable_names(self) -> tuple[str, ...]:
        """Names of an expert's trainable parameters, in block order."""
        return tuple(piece.name for block in self.blocks if block.is_trainable for piece in block.slices)

    def replica_slots(self) -> tuple[int, ...]:
        """Slots of experts owned by other ranks."""
        return tuple(slot for slot in range(len(self.domain_ranks)) if slot != self.own_index)

    def add_replica_gradients(self, gradients: Iterable[Tensor]) -> None:
        """Add one backward's gradients of all replicas to the fp32 sums.

        Args:
            gradients: in the order of `replica_slots`, then of `experts`, then `trainable_names`.
        """
        if not self.sums:
            self._make_sums()
        iterator = iter(gradients)
        for slot in self.replica_slots():
            for module_idx in range(len(self.experts)):
                for block, sums in zip(self.blocks, self.sums, strict=True):
                    if sums is not None:
                        for piece in block.slices:
                            self.views(sums, slot, piece)[module_idx].add_(next(iterator))
        self.has_unreturned_sums = True

    def expert_ids(self, slot: int) -> range:
        """Ids of a slot's experts in the layer."""
        owner = self.partition.group_ranks.index(self.domain_ranks[slot])
        return range(owner * self.num_local, (owner + 1) * self.num_local)

    def add_undelivered(self, local_idx: int, residuals: Sequence[Tensor]) -> float:
        """Keep what a sender that is gone had not delivered for an owned expert; returns its sum of squares.

        Args:
            local_idx: of the expert.
            residuals: [rows, cols] fp32 for each of `parts`.
        """
        if self.lossy.undelivered is None:
            device = self.weights[0].device
            self.lossy.undelivered = Undelivered(
                [torch.zeros(part.num_experts, *part.shape, device=device) for part in self.parts]
            )
        for part, residual in zip(self.lossy.undelivered.parts, residuals, strict=True):
            part[local_idx].add_(residual.to(part.device).view(part.shape[1:]))
        return sum(float(residual.double().square().sum()) for residual in residuals)

    def take_undelivered(self) -> None:
        """Add to what came back for the owned experts what earlier senders had kept, once per optimizer step."""
        undelivered = self.lossy.undelivered
        if undelivered is not None and not undelivered.is_added:
            for sums, part in zip(self.sum_parts[self.own_index], undelivered.parts, strict=True):
                sums.add_(part, alpha=self.encoding.loss_scale())
            undelivered.is_added = True

    def returned_gradients(self) -> list[Tensor]:
        """What came back for the owned experts, fp32, by `experts` and `trainable_names`."""
        return [
            self.views(sums, self.own_index, piece)[module_idx]
            for module_idx in range(len(self.experts))
            for block, sums in zip(self.blocks, self.sums, strict=True)
            if sums is not None
            for piece in block.slices
        ]

    def clear_sums(self) -> None:
        """Forget all partial gradients."""
        if self._is_transient:
            self.sums, self.sum_parts = [], []
        for sums in self.sums:
            if sums is not None:
                sums.zero_()
        self.has_unreturned_sums = False

    def release(self) -> None:
        """Give up all that the store holds; nothing can be done with it afterwards."""
        self.weights, self.sums, self.weight_parts, self.sum_parts = [], [], [], []
        self.lossy = LossyState()
        self.has_unreturned_sums = False
        self.is_released = True

    def checksums(self) -> Tensor:
        """[M + C, 2] int64 on the CPU: two sums over the bits of each slot, then of the mirror of each lossy codec.

        The own slot is taken from the parameters; a replica that comes encoded is compared with its owner's mirror.
        """
        self.load_own_weights(trainable_only=False)
        num_slots = len(self.domain_ranks)
        sums = torch.zeros(num_slots + len(self.lossy.mirrors), 2, dtype=torch.int64)
        for slot in range(num_slots):
            replica = self.lossy.replicas.get(slot)
            held = self._blocks_of(slot, frozen_only=replica is not None) + ([] if replica is None else replica.values)
            sums[slot] = sum(_bit_sums(tensor) for tensor in held)
        for index, mirror in enumerate(self.lossy.mirrors.values()):
            held = self._blocks_of(self.own_index, frozen_only=True) + mirror.values
            sums[num_slots + index] = sum(_bit_sums(tensor) for tensor in held)
        return sums

    def _blocks_of(self, slot: int, *, frozen_only: bool) -> list[Tensor]:
        return [
            weights[slot]
            for block, weights in zip(self.blocks, self.weights, strict=True)
            if not (frozen_only and block.is_trainable)
        ]

    def checksum_row(self, slot: int, rank: int) -> int:
        """The row of the owner's checksums that `rank`'s copy of its slot must equal."""
        owner = self.domain_ranks[slot]
        name = None if owner == rank else self.mirror_names.get(self.level_between(rank, owner))
        return slot if name is None else len(self.domain_ranks) + list(self.lossy.mirrors).index(name)

    def returning_slots(self, level_position: int) -> list[tuple[int, int]]:
        """(rank, slot) of the partial gradients that leave at `levels[level_position]`, in offset order."""
        level = self.levels[level_position]
        return [
            (rank, slot)
            for offset, rank in enumerate(level.ranks)
            if offset != level.own_offset
            for slot in self.slots_at(level_position, {level.level: offset})
        ]

    def gradient_encoder(self, level: int, slot: int) -> ResidualEncoder | None:
        """The sender of a slot's gradients over a level; None where they go as they are."""
        layout = self.gradient_layouts.get(level)
        return None if layout is None else self.lossy.encoder(level, slot, layout, self.weights[0].device)

    def make_encoders(self) -> None:
        """Have the senders of all gradients that leave here; otherwise each is made when it is first asked for."""
        for position, level in enumerate(self.levels):
            for _, slot in self.returning_slots(position):
                self.gradient_encoder(level.level, slot)

    def slots_at(self, level_position: int, own: Mapping[int, int] | None = None) -> list[int]:
        """Slots held before gather stage `level_position`: any offset at slower levels, the own one elsewhere.

        Args:
            level_position: index into `levels`.
            own: replaces this rank's offset at some levels (level -> offset).
        """
        sizes = self.partition.domain_sizes
        offsets = list(self.partition.offset_of(self.domain_ranks[self.own_index]))
        for level, offset in (own or {}).items():
            offsets[level] = offset
        slower = {stage.level for stage in self.levels[:level_position]}
        choices = [range(size) if level in slower else (offsets[level],) for level, size in enumerate(sizes)]
        return [flatten(place, sizes) for place in itertools.product(*choices)]


class StagedOperation(ABC):
    """A transfer in stages, one per level; `advance` starts the next stage when the previous one has arrived.

    What it does on a device it does aside; `join` is for those who use what it brought.
    """

    def __init__(self, store: ReplicaStore, purpose: Purpose) -> None:
        self.store = store
        self.purpose = purpose
        self.stages_started = 0
        self.is_complete = False
        self._transfer: Transfer | None = None
        self._completed: Mark = None
        self.advance()

    def can_advance(self) -> bool:
        """True when `advance` would not block."""
        return not self.is_complete and (self._transfer is None or self._transfer.is_done())

    def advance(self) -> None:
        """Wait for the stage under way, take in what arrived, and start the next one.

        Raises:
            CommunicationError: the stage under way failed or passed the time limit.
        """
        with self.store.streams.aside():
            if self._transfer is not None:
                self._transfer.wait()
                self._take_in()
            if self.stages_started == len(self.store.levels):
                self._transfer = None
                self.is_complete = True
                self._completed = self.store.streams.mark()
                return
            self._transfer = self._start_stage(self.stages_started)
            self.stages_started += 1

    def join(self) -> None:
        """The current stream goes on behind the completed operation."""
        self.store.streams.follow(self._completed)

    def describe_stall(self, timeout_s: float) -> str:
        """For the error when nothing finished within the time limit."""
        if self._transfer is None:
            return f"{self.purpose}: its first stage did not start within the time limit of {timeout_s:g} s"
        return self._transfer.describe(f"passed the time limit of {timeout_s:g} s")

    @abstractmethod
    def _start_stage(self, stage: int) -> Transfer: ...

    @abstractmethod
    def _take_in(self) -> None:
        """Use what the finished stage brought."""


class WeightGather(StagedOperation):
    """One shipment of a layer's weights to their replicas, slowest level first.

    An exact one ships every parameter as it is, frozen ones too, and begins the mirrors anew.  Otherwise trainable
    parameters go, as the codec of the slowest level between owner and replica has it; inside, packets are forwarded as
    they came.

    A deferred one leaves replicas as they are until `apply`.
    """

    def __init__(self, store: ReplicaStore, *, is_exact: bool, is_deferred: bool = False) -> None:
        self._is_exact = is_exact
        self.is_deferred = is_deferred
        self._staged: dict[int, list[Tensor]] = {}  # deferred: exact weights by slot, one for each block
        self._blocks = [i for i, block in enumerate(store.blocks) if block.is_trainable or is_exact]
        self._messages: dict[str, Tensor] = {}  # by codec: what the own experts' mirrors lack
        self._arrived: dict[int, Tensor] = {}  # messages by slot, kept until they were forwarded
        self._fresh: list[int] = []  # slots whose messages the stage under way brings
        # Not aside: under ZeRO-3 DeepSpeed gathers parameters, for the current stream.
        store.load_own_weights(trainable_only=not is_exact)
        if store.lossy.mirrors:
            with store.streams.aside(), store.lossy.counters.timing("encode_s"):
                sources = store.weight_parts[store.own_index] if is_exact else store.source_weights()
                for name, mirror in store.lossy.mirrors.items():
                    if is_exact:
                        mirror.assign(sources)
                    else:
                        self._messages[name] = mirror.encode(sources)
        super().__init__(store, Purpose("expert_weights", "shipping of expert weights", store.layer))

    def _start_stage(self, stage: int) -> Transfer:
        store, level = self.store, self.store.levels[stage]
        held = store.slots_at(stage)
        sends, receives = [], []
        for offset, rank in enumerate(level.ranks):
            if offset != level.own_offset:
                for slot in held:
                    sends += [(rank, tensor) for tensor in self._outgoing(slot, level.level)]
                for slot in store.slots_at(stage, {level.level: offset}):
                    receives += [(rank, tensor) for tensor in self._incoming(slot)]
        return level.weights.start(sends, receives, self.purpose)

    def _outgoing(self, slot: int, level: int) -> list[Tensor]:
        store = self.store
        if slot in self._arrived:
            message, layout = self._arrived[slot], store.lossy.replicas[slot].layout
        elif slot == store.own_index and store.mirror_names.get(level) in self._messages:
            name = store.mirror_names[level]
            message, layout = self._messages[name], store.lossy.mirrors[name].layout
        elif slot in self._staged:
            return self._staged[slot]
        else:
            return [store.weights[i][slot] for i in self._blocks]
        store.lossy.counters.count("weight", message, layout)
        return [message]

    def _incoming(self, slot: int) -> list[Tensor]:
        store, replica = self.store, self.store.lossy.replicas.get(slot)
        self._fresh.append(slot)
        if self._is_exact or replica is None:
            places = [store.weights[i][slot] for i in self._blocks]
            if not self.is_deferred:
                return places
            self._staged[slot] = [torch.empty_like(place) for place in places]
            return self._staged[slot]
        num_bytes = replica.layout.num_bytes(replica.step)
        self._arrived[slot] = torch.empty(num_bytes, dtype=torch.uint8, device=store.weights[0].device)
        return [self._arrived[slot]]

    def _take_in(self) -> None:
        if not self.is_deferred:
            self.apply()

    def apply(self) -> None:
        """Exact weights arrived in their slots; packets are added to their replicas."""
        with self.store.streams.aside():
            self._apply()

    def _apply(self) -> None:
        store = self.store
        for slot, staged in self._staged.items():
            for i, tensor in zip(self._blocks, staged, strict=True):
                store.weights[i][slot].copy_(tensor)
        with store.lossy.counters.timing("decode_s"):
            for slot in self._fresh:
                replica = store.lossy.replicas.get(slot)
                if replica is None:
                    continue
                places = store.weight_parts[slot]
                if self._is_exact:
                    replica.assign(places)
                else:
                    replica.apply(self._arrived[slot])
                    replica.copy_to(places)
                if self.is_deferred:
                    # Kernels write without autograd's knowledge: a graph that has saved these must fail, not go on.
                    torch.autograd.graph.increment_version(places)
        self._fresh = []


class GradientReturn(StagedOperation):
    """One return of a layer's replica gradients to their owners, fastest level first.

    Leaves the sum of what the other ranks computed in the own slot of `store.sums`.
    """

    def __init__(self, store: ReplicaStore) -> None:
        self.collected: list[Tensor] | None = None  # set once by the migration manager
        self._arrivals: list[Callable[[], Any]] = []  # what adds each message received to its sum
        self._sent: list[Tensor] = []  # keeps messages alive until they have been sent
        self._scale = store.encoding.loss_scale()
        store.make_encoders()  # not aside: what they hold stays, and belongs to the stream that frees it
        super().__init__(store, Purpose("expert_gradients", "return of expert gradients", store.layer))

    def _start_stage(self, stage: int) -> Transfer:
        store = self.store
        position = len(store.levels) - 1 - stage
        level = store.levels[position]
        layout = store.gradient_layouts.get(level.level)
        sends = [
            (rank, message)
            for rank, slot in store.returning_slots(position)
            for message in self._outgoing(slot, level.level)
        ]
        receives = [
            (rank, message)
            for offset, rank in enumerate(level.ranks)
            if offset != level.own_offset
            for slot in store.slots_at(position)
            for message in self._incoming(slot, rank, layout)
        ]
        self._sent = [message for _, message in sends]
        return level.gradients.start(sends, receives, self.purpose)

    def _outgoing(self, slot: int, level: int) -> list[Tensor]:
        store = self.store
        encoder = store.gradient_encoder(level, slot)
        if encoder is None:
            return [
                sums[slot].to(block.dtype)
                for block, sums in zip(store.blocks, store.sums, strict=True)
                if sums is not None
            ]
        with store.lossy.counters.timing("encode_s"):
            message = encoder.encode(store.sum_parts[slot], self._scale)
        store.lossy.counters.count("gradient", message, encoder.layout)
        return [message]

    def _incoming(self, slot: int, rank: int, layout: MessageLayout | None) -> list[Tensor]:
        store = self.store
        if layout is None:
            messages = []
            for block, sums in zip(store.blocks, store.sums, strict=True):
                if sums is not None:
                    messages.append(torch.empty_like(sums[slot], dtype=block.dtype))
                    self._arrivals.append(partial(sums[slot].add_, messages[-1]))
            return messages
        decoder = store.lossy.decoder(rank, slot, layout)
        num_bytes = decoder.layout.num_bytes(decoder.step)
        message = torch.empty(num_bytes, dtype=torch.uint8, device=store.weights[0].device)
        self._arrivals.append(partial(decoder.add, message, store.sum_parts[slot], self._scale))
        return [message]

    def _take_in(self) -> None:
        with self.store.lossy.counters.timing("decode_s"):
            for add in self._arrivals:
                add()
        self._arrivals, self._sent = [], []


def _bit_sums(tensor: Tensor) -> Tensor:
    """[2] int64 on the CPU: sum and index-weighted sum (mod 2^64) of a tensor's words."""
    word = torch.int16 if tensor.element_size() > 1 else torch.uint8
    wide = tensor.reshape(-1).view(word).to(torch.int64)
    positions = torch.arange(wide.numel(), device=wide.device) % 65521 + 1
    return torch.stack([wide.sum(), (wide * positions).sum()]).cpu()
