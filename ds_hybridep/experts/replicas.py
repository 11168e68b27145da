# SPDX-License-Identifier: Apache-2.0
"""Replicas of a domain's experts for one layer, and their gradients until these return to the owners.

    weights  M x [e * n]  slot i = the experts of the domain rank with offset index i
    sums     M x [e * n]  fp32 partial gradients since the last return (own slot: what came back)

Each row has one tensor for each block of `experts.slots`.  The own slot has weights only while they are sent.  Sums
have memory from a step's first gradients until they were sent, those of the own slot from the first arrival on.
"""

from collections.abc import Iterable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from ds_hybridep.experts.codecs import ExpertCodecs
from ds_hybridep.experts.hot import HotReplicas
from ds_hybridep.experts.slots import OwnSlot, SlotLayout
from ds_hybridep.plan.cluster import flatten, unflatten
from ds_hybridep.plan.partition import Partition
from ds_hybridep.sync.feedback import Encoding
from ds_hybridep.sync.gradients import GradientMemory, StepChanges
from ds_hybridep.sync.home import Home
from ds_hybridep.sync.messages import PacketPart
from ds_hybridep.sync.mirrors import Mirror, PatchSender
from ds_hybridep.sync.stages import GatherStage
from ds_hybridep.sync.transfers import Gather, needs_equal_lengths
from ds_hybridep.sync.undelivered import stacked
from ds_hybridep.transport.channels import Purpose
from ds_hybridep.transport.streams import streams_of


class Replicas:
    """One layer's replicas on this rank.

    Args:
        experts: this rank's e experts, one module each; if `is_grouped`, one module with parameters [e, *shape].
        partition: domains of the layer's expert-parallel group; with hot experts, those of a hot expert.
        changes: shared by all layers.
        hot_level: level over which only hot experts have replicas; None: there are no hot experts.
    """

    def __init__(
        self,
        layer: str,
        experts: Sequence[nn.Module],
        partition: Partition,
        stages: tuple[GatherStage, ...],
        rank: int,
        encoding: Encoding,
        changes: StepChanges,
        *,
        is_grouped: bool = False,
        hot_level: int | None = None,
    ) -> None:
        self.layer, self.is_grouped, self.hot_level = layer, is_grouped, hot_level
        self.partition, self.stages, self.encoding = partition, stages, encoding
        self.device = next(experts[0].parameters()).device
        self.layout = SlotLayout(experts, self.device, is_grouped=is_grouped)
        self.trainable_names = tuple(piece.name for piece in self.layout.trainable)
        # 1. Slots.
        self.domain_ranks = partition.domain_ranks(rank)
        self.own_slot = partition.offset_index(rank)
        self.near_slots = tuple(slot for slot in range(len(self.domain_ranks)) if self.are_near(slot, self.own_slot))
        self.replica_slots = tuple(slot for slot in self.near_slots if slot != self.own_slot)
        self.slot_parts = [
            self._parts(slot) if slot in self.near_slots else () for slot in range(2 * len(self.domain_ranks))
        ]
        self.parts = self.slot_parts[self.own_slot]
        # 2. Weights, and views of them.
        self.streams = streams_of(self.device)  # None: there is no side stream
        self.own = OwnSlot(layer, experts, self.layout, encoding.master_of)
        self._weights = {slot: [*map(self.layout.new, self.layout.blocks)] for slot in self.replica_slots}
        self._views = {slot: self.layout.by_name(weights) for slot, weights in self._weights.items()}
        experts_of = [self.expert_ids(slot) for slot in range(len(self.domain_ranks))]
        self.hot = HotReplicas(self.layout, experts_of, self.near_slots)
        # 3. Sums of gradients, by slot, for each trainable block.
        self._sums: dict[int, list[Tensor]] = {}
        # 4. What lossy codecs keep.
        self.feedback = _codecs_of(self, changes, rank)

    def _parts(self, slot: int) -> tuple[PacketPart, ...]:
        """Return the parts of the messages of a slot."""
        num_local, first = self.layout.num_local, self.expert_ids(slot).start
        return tuple(
            PacketPart(
                piece.shape,
                num_local,
                (((stacked(self.layer, piece.name), first * piece.shape.numel()), num_local * piece.shape.numel()),),
                block.dtype,
            )
            for block in self.layout.trainable_blocks
            for piece in block.slices
        )

    @property
    def weights(self) -> list[Tensor]:
        """All weights that are held, of all slots and blocks."""
        return [*self.own.held, *(weights for slot in self._weights.values() for weights in slot), *self.hot.held]

    def are_near(self, slot: int, other: int) -> bool:
        """Return True if the ranks of two slots hold each other's slots as a whole, not just their hot experts."""
        sizes = self.partition.domain_sizes
        return (
            self.hot_level is None
            or unflatten(slot, sizes)[self.hot_level] == (unflatten(other, sizes)[self.hot_level])
        )

    def near_to(self, slot: int, other: int) -> int:
        """Return the slot of the rank that differs from `other` at the hot level only, where it is as `slot`."""
        assert self.hot_level is not None
        sizes = self.partition.domain_sizes
        place = list(unflatten(other, sizes))
        place[self.hot_level] = unflatten(slot, sizes)[self.hot_level]
        return flatten(place, sizes)

    @property
    def held_experts(self) -> list[list[int]]:
        """The global experts that this rank computes, by slot in the order of `by_slot`."""
        return [list(self.expert_ids(slot)) for slot in self.near_slots] + [
            self.hot.experts_in(slot) for slot in self.hot.slots
        ]

    def level_between(self, slot: int, other: int) -> int:
        """Return the slowest level between the ranks of two slots."""
        level = self.partition.cluster.level_between(self.domain_ranks[slot], self.domain_ranks[other])
        assert level is not None, f"{self.layer}: slots {slot} and {other} are of one rank"
        return level

    # -- what slots hold ----------------------------------------------------------------------------------------

    def values(self, slot: int, *, trainable_only: bool) -> list[Tensor]:
        """Return the weights of a slot, [e * n] for each block; the own slot must have been filled."""
        if slot == self.own_slot:
            return self.own.values(trainable_only=trainable_only)
        if slot >= len(self.domain_ranks):
            near = slot - len(self.domain_ranks)
            if near in self.replica_slots:  # what came over slower levels goes on
                return self.hot.copy(slot, self.weights_by_name(near), trainable_only=trainable_only)
            return self.hot.values(slot, trainable_only=trainable_only)
        pairs = zip(self.layout.blocks, self._weights[slot], strict=True)
        return [weights for block, weights in pairs if block.is_trainable or not trainable_only]

    def weight_parts(self, slot: int) -> list[Tensor]:
        """Return the trainable weights of a slot, [e, *shape] in the order of `parts`."""
        return self.layout.parts(self.values(slot, trainable_only=True))

    def weights_by_name(self, slot: int) -> list[dict[str, Tensor]]:
        """Return the weights of a slot by parameter name, for each module of `experts`."""
        if slot >= len(self.domain_ranks):
            return self.hot.weights_by_name(slot)
        return self.own.by_name() if slot == self.own_slot else self._views[slot]

    def sum_sizes(self, slot: int) -> list[tuple[int, torch.dtype]]:
        if slot >= len(self.domain_ranks):
            return self.hot.sum_sizes(slot)
        return [(self.layout.num_local * one.num_elements, one.dtype) for one in self.layout.trainable_blocks]

    def make_sums(self) -> None:
        if self.own_slot not in self._sums:
            self._make_sums(self.own_slot)

    def sums(self, slot: int) -> list[Tensor]:
        """Return a slot's partial gradients, fp32 [e * n] for each trainable block."""
        if slot >= len(self.domain_ranks):
            return self.hot.sums(slot)
        self.sum_parts(slot)
        return self._sums[slot]

    def sum_parts(self, slot: int) -> list[Tensor]:
        parts = self.layout.parts(self._sums[slot])
        self.hot.add_returned(slot, parts)
        return parts

    def drop_sums(self, slot: int) -> None:
        is_hot = slot >= len(self.domain_ranks)
        self.free_behind_side(self.hot.drop_sums(slot) if is_hot else self._sums.pop(slot))

    def loss_scale(self) -> float:
        return self.encoding.loss_scale()

    def trainable_weights(self, slots: Iterable[int]) -> list[Tensor]:
        """Return trainable weights, ordered by slot, then `experts`, then `trainable_names`."""
        return [
            weights[name] for slot in slots for weights in self.weights_by_name(slot) for name in self.trainable_names
        ]

    def with_own(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Return trainable weights: first `own`, or under ZeRO-3 the copy of the last shipment; then the replicas'."""
        given = self.trainable_weights([self.own_slot]) if self.own.is_partitioned else list(own)
        return given + self.trainable_weights([*self.replica_slots, *self.hot.slots])

    def by_slot(self, tensors: Iterable[Tensor]) -> list[list[dict[str, Tensor]]]:
        """Return weights by [slot][module], hot experts last; trainable ones are `tensors`, in order of `with_own`."""
        iterator = iter(tensors)
        slots: dict[int, list[dict[str, Tensor]]] = {slot: [] for slot in (*self.near_slots, *self.hot.slots)}
        for slot in (self.own_slot, *self.replica_slots, *self.hot.slots):
            for held in self.weights_by_name(slot):
                # A grouped module gets all its weights: without them it would run with ZeRO-3's hooks.
                weights = {} if slot == self.own_slot and not self.is_grouped else dict(held)
                weights.update({name: next(iterator) for name in self.trainable_names})
                slots[slot].append(weights)
        return list(slots.values())

    # -- gradients of the replicas -------------------------------------------------------------------------------

    def add_gradients(self, gradients: Iterable[Tensor]) -> None:
        """Add one backward's gradients of all replicas to the fp32 sums.

        gradients: ordered by `replica_slots` and slots of hot experts, then `experts`, then `trainable_names`.
        """
        iterator = iter(gradients)
        for slot in self.replica_slots:
            if slot not in self._sums:
                self._make_sums(slot)
            for part in self.layout.by_module(self.sum_parts(slot)):
                part.add_(next(iterator))
        for part in (part for slot in self.hot.slots for part in self.hot.sums_by_module(slot)):
            part.add_(next(iterator))

    def _make_sums(self, slot: int) -> None:
        self._sums[slot] = [self.layout.new(block, torch.float32) for block in self.layout.trainable_blocks]

    def take_returned(self) -> list[Tensor]:
        """Return what came back for the owned experts, fp32, by `experts` and `trainable_names`, and drop all sums."""
        self.make_sums()
        returned = self.layout.by_module(self.sum_parts(self.own_slot))
        self.clear_sums()
        return returned

    def clear_sums(self, *, is_in_use: bool = False) -> None:
        """Drop all partial gradients; is_in_use: a return is under way, and goes on with zeros."""
        if not is_in_use:
            self._sums = {}
            self.hot.forget_sums()
        self.hot.clear_sums()
        for sums in (one for slot in self._sums.values() for one in slot):
            sums.zero_()

    # -- what was sent before, for patches -----------------------------------------------------------------------

    @property
    def sends_patches(self) -> bool:
        return self.feedback is not None and self.feedback.patch_sender is not None

    def remember_sent(self) -> None:
        """Keep what was sent last if patches need it; call before the step, while the parameters still equal it."""
        if self.feedback is not None and (sender := self.feedback.patch_sender) is not None:
            sender.sent = self.own.values(trainable_only=True) if self.own.is_partitioned else self.own.copy()

    @property
    def knows_sent(self) -> bool:
        """True unless patches need what was sent last, and it was not remembered."""
        sender = None if self.feedback is None else self.feedback.patch_sender
        return sender is None or bool(sender.sent)

    def forget_sent(self) -> None:
        if self.feedback is not None and (sender := self.feedback.patch_sender) is not None:
            self.free_behind_side(sender.sent)
            sender.sent = []

    def free_behind_side(self, tensors: Iterable[Tensor]) -> None:
        """Call before tensors are freed that the side stream may be using."""
        if self.streams is not None:
            for tensor in tensors:
                self.streams.free_behind_side(tensor)

    # -- memory --------------------------------------------------------------------------------------------------

    @property
    def num_bytes(self) -> int:
        """Bytes on the device."""
        weights = sum(tensor.untyped_storage().nbytes() for tensor in self.weights)
        sums = sum(tensor.nbytes for slot in self._sums.values() for tensor in slot)
        return weights + sums + (self.feedback.num_bytes(self.weights)[0] if self.feedback is not None else 0)

    @property
    def num_host_bytes(self) -> int:
        return 0 if self.feedback is None else self.feedback.num_bytes(self.weights)[1]

    @property
    def sends_own_slot(self) -> bool:
        """True if any level carries the weights of the whole own slot unencoded."""
        return any(self.sender_over(stage) is None for stage in self.stages if stage.level != self.hot_level)

    def sender_over(self, stage: GatherStage) -> Mirror | PatchSender | None:
        """Return what encodes the owned weights for a stage; None if they go as they are."""
        sender = None if self.feedback is None else self.feedback.senders.get(stage.level)
        return None if sender is None or (sender.varies and needs_equal_lengths(stage)) else sender

    def make_senders(self) -> None:
        """Make now what is kept of all gradients that leave this rank; otherwise it is made at its first use."""
        if (feedback := self.feedback) is not None:
            for stage in self.stages if feedback.gradients.is_lossy else ():
                slots = [slot for peer in stage.peers for slot in peer.receives]
                for part in (part for slot in slots for part in feedback.parts[slot]):
                    if feedback.gradients.codecs[stage.level] is not None:
                        feedback.gradients.sender(stage.level, part)

    def free_sent(self) -> None:
        """Free what only a shipment needed, once it has ended."""
        self.own.free()
        self.hot.free()

    def release(self) -> None:
        self.own.release()
        self.hot.release()
        self._weights, self._views, self._sums, self.feedback = {}, {}, {}, None

    def expert_ids(self, slot: int) -> range:
        owner = self.partition.group_ranks.index(self.domain_ranks[slot])
        return range(owner * self.layout.num_local, (owner + 1) * self.layout.num_local)


def _codecs_of(replicas: Replicas, changes: StepChanges, rank: int) -> ExpertCodecs | None:
    """Return the codecs' state; None if nothing is encoded, or if all is frozen and travels only at the start."""
    levels = [stage.level for stage in replicas.stages]
    weights, gradients = replicas.encoding.weight_codecs, replicas.encoding.gradient_codecs
    if not replicas.parts or not any(weights[level] or gradients[level] for level in levels):
        return None
    home = Home(replicas.device, replicas.encoding.is_on_host)
    codecs = ExpertCodecs(replicas.slot_parts, GradientMemory(replicas.layer, gradients, home, changes, rank))
    for level in levels:
        if (codec := weights[level]) is not None and level != replicas.hot_level:
            codecs.make_sender(level, codec, replicas.parts)
    for slot in replicas.replica_slots:
        if (codec := weights[replicas.level_between(replicas.own_slot, slot)]) is not None:
            codecs.make_replica(slot, codec, replicas.values(slot, trainable_only=True), replicas.weight_parts(slot))
    return codecs


class WeightShipment(Gather):
    """One gather of a layer's weights.

    An exact gather ships every parameter unencoded, frozen ones too, and resets the mirrors.  Other gathers ship
    trainable parameters, encoded by the codec of the slowest level between owner and replica.
    """

    def __init__(self, replicas: Replicas, *, is_exact: bool) -> None:
        self._messages: dict[int, list[Tensor]] = {}
        purpose = Purpose("expert_weights", "shipping of expert weights", replicas.layer)
        held = {} if replicas.feedback is None else replicas.feedback.replicas
        super().__init__(replicas, purpose, self._messages, held, is_exact=is_exact)
        self._replicas_of_layer = replicas

    def load(self) -> None:
        """Read the owned experts' current weights and encode them.  Call before the first `advance`."""
        replicas = self._replicas_of_layer
        feedback, streams = replicas.feedback, replicas.streams
        patches = None if feedback is None or self._is_exact else feedback.patch_sender
        is_sent = self._is_exact or replicas.sends_own_slot
        # In the current stream, because under ZeRO-3 DeepSpeed gathers parameters for this.
        weights = replicas.own.copy() if patches is not None else []
        if patches is None and (is_sent or replicas.own.is_partitioned):
            replicas.own.fill(trainable_only=not self._is_exact)
        own_hot = replicas.own_slot + len(replicas.domain_ranks)
        replicas.hot.copy(own_hot, replicas.own.by_name(), trainable_only=not self._is_exact)
        if feedback is None or not feedback.senders:
            return
        with nullcontext() if streams is None else streams.aside(), feedback.counters.timing("encode_s"):
            if self._is_exact:
                for mirror in feedback.mirrors:
                    mirror.assign(replicas.weight_parts(replicas.own_slot))
                return
            encoded: dict[Mirror | PatchSender, list[Tensor]] = {}
            if patches is not None:
                assert patches.sent, f"{replicas.layer}: what was sent last was not remembered before the step"
                encoded[patches] = patches.encode(weights)
                replicas.own.adopt(patches.sent)
            sources = replicas.own.sources() if feedback.mirrors else []
            encoded.update((mirror, mirror.encode(sources)) for mirror in feedback.mirrors)
            for stage in self.stages:
                if (sender := replicas.sender_over(stage)) is not None:
                    self._messages[stage.level] = encoded[sender]
        replicas.free_behind_side(weights)
        replicas.forget_sent()
        if not is_sent:
            replicas.own.free()
