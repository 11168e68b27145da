# SPDX-License-Identifier: Apache-2.0
"""Replicas of a domain's experts for one layer, and their gradients until these return to the owners.

    weights  M x [e * n]  slot i = the experts of the domain rank with offset index i
    sums     M x [e * n]  fp32 partial gradients since the last return (own slot: what came back)

Each row has one tensor for each block of `experts.slots`.  The own slot has weights only while they are sent.  Sums
have memory from a step's first gradients until they were sent, those of the own slot from the first arrival on.
"""

from collections.abc import Collection, Iterable, Sequence
from contextlib import nullcontext
from itertools import chain

import torch
from torch import Tensor, nn

from ds_hybridep.experts.away import Away
from ds_hybridep.experts.codecs import ExpertCodecs
from ds_hybridep.experts.hot import HotReplicas
from ds_hybridep.experts.slots import OwnSlot, Places, SlotLayout
from ds_hybridep.geometry.partition import Partition
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


class Replicas(Places):
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
        self.is_grouped, self.stages, self.encoding = is_grouped, stages, encoding
        self.device = next(experts[0].parameters()).device
        self.layout = SlotLayout(experts, self.device, is_grouped=is_grouped)
        self.trainable_names = tuple(piece.name for piece in self.layout.trainable)
        # 1. Slots.
        super().__init__(layer, partition, rank, self.layout.num_local, hot_level)
        self.slot_parts = _slot_parts(self, hot=())
        self.parts = self.slot_parts[self.own_slot]
        # 2. Weights, and views of them.
        self.streams = streams_of(self.device)  # None: there is no side stream
        self.own = OwnSlot(layer, experts, self.layout, encoding.master_of)
        self._weights = {slot: [*map(self.layout.new, self.layout.blocks)] for slot in self.replica_slots}
        self._views = {slot: self.layout.by_name(weights) for slot, weights in self._weights.items()}
        self.version = 0  # grows when slots change
        self.hot: HotReplicas | None = None
        if hot_level is not None:
            self.hot = HotReplicas(
                self.layout, [*map(self.expert_ids, range(len(self.domain_ranks)))], self.near_slots
            )
        # 3. Sums of gradients, by slot, for each trainable block.
        self._sums: dict[int, list[Tensor]] = {}
        self.away = Away(layer)
        self.feedback = _codecs_of(self, changes, rank)

    @property
    def weights(self) -> list[Tensor]:
        """All weights that are held, of all slots and blocks."""
        return [*self.own.held, *chain(*self._weights.values()), *(self.hot.held if self.hot else ())]

    def choose_hot(self, experts: Sequence[int]) -> None:
        """Replace the hot experts.  No gradients may wait, and weights must be shipped next."""
        assert self.hot is not None
        self.hot.choose(experts)
        self.slot_parts[:] = _slot_parts(self, experts)
        self.version += 1

    @property
    def hot_slots(self) -> tuple[int, ...]:
        return () if self.hot is None else self.hot.slots

    def _hot_of(self, slot: int) -> HotReplicas | None:
        """Return what has this slot, if it is one of hot experts."""
        return self.hot if slot >= len(self.domain_ranks) else None

    # -- what slots hold ----------------------------------------------------------------------------------------

    def values(self, slot: int, *, trainable_only: bool) -> list[Tensor]:
        """Return the weights of a slot, [e * n] for each block; the own slot must have been filled."""
        if slot == self.own_slot:
            return self.own.values(trainable_only=trainable_only)
        if (hot := self._hot_of(slot)) is not None:
            trainable_only = trainable_only and not hot.lacks_frozen
            if (near := slot - len(self.domain_ranks)) in self.replica_slots:  # what came over slower levels goes on
                return hot.copy(slot, self.weights_by_name(near), trainable_only=trainable_only)
            return hot.values(slot, trainable_only=trainable_only)
        pairs = zip(self.layout.blocks, self._weights[slot], strict=True)
        return [weights for block, weights in pairs if block.is_trainable or not trainable_only]

    def weight_parts(self, slot: int) -> list[Tensor]:
        """Return the trainable weights of a slot, [e, *shape] in the order of `parts`."""
        return self.layout.parts(self.values(slot, trainable_only=True))

    def weights_by_name(self, slot: int) -> list[dict[str, Tensor]]:
        """Return the weights of a slot by parameter name, for each module of `experts`."""
        if (hot := self._hot_of(slot)) is not None:
            return hot.weights_by_name(slot)
        return self.own.by_name() if slot == self.own_slot else self._views[slot]

    def sum_sizes(self, slot: int) -> list[tuple[int, torch.dtype]]:
        hot = self._hot_of(slot)
        sizes = self.layout.sum_sizes if hot is None else hot.sum_sizes(slot)
        return [(size, self.encoding.sum_dtype or dtype) for size, dtype in sizes]

    def make_sums(self) -> None:
        self._make_sums(self.own_slot)

    def sums(self, slot: int) -> list[Tensor]:
        """Return a slot's partial gradients, fp32 [e * n] for each trainable block."""
        if (hot := self._hot_of(slot)) is not None:
            return hot.sums(slot)
        self.sum_parts(slot)
        return self._sums[slot]

    def sum_parts(self, slot: int) -> list[Tensor]:
        if (hot := self._hot_of(slot)) is not None:
            return hot.sum_parts(slot)
        parts = self.layout.parts(self._sums[slot])
        if self.hot is not None:
            self.hot.add_returned(slot, parts)
        return parts

    def drop_sums(self, slot: int) -> None:
        hot = self._hot_of(slot)
        self.free_behind_side(self._sums.pop(slot) if hot is None else hot.drop_sums(slot))

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
        return given + self.trainable_weights([*self.replica_slots, *self.hot_slots])

    def by_slot(self, tensors: Iterable[Tensor]) -> list[list[dict[str, Tensor]]]:
        """Return weights by [slot][module], hot experts last; trainable ones are `tensors`, in order of `with_own`."""
        iterator = iter(tensors)
        slots: dict[int, list[dict[str, Tensor]]] = {slot: [] for slot in (*self.near_slots, *self.hot_slots)}
        for slot in (self.own_slot, *self.replica_slots, *self.hot_slots):
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
            self._make_sums(slot)
            for part in self.layout.by_module(self.sum_parts(slot)):
                part.add_(next(iterator))
        for part in () if self.hot is None else self.hot.all_sums():
            part.add_(next(iterator))

    def _make_sums(self, slot: int) -> None:
        if slot not in self._sums:
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
        if self.hot is not None:
            self.hot.clear_sums(forgets=not is_in_use)
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

    def sends_own_slot(self, *, is_exact: bool) -> bool:
        """Return True if any level carries the weights of the whole own slot unencoded."""
        stages = [stage for stage in self.stages if stage.level != self.hot_level]
        return any(is_exact or self.sender_over(stage) is None for stage in stages)

    def sender_over(self, stage: GatherStage) -> Mirror | PatchSender | None:
        """Return what encodes the owned weights for a stage; None if they go as they are."""
        sender = None if self.feedback is None else self.feedback.senders.get(stage.level)
        return None if sender is None or (sender.varies and needs_equal_lengths(stage)) else sender

    def make_senders(self) -> None:
        """Make now what is kept of all gradients that leave this rank; otherwise it is made at its first use."""
        if (feedback := self.feedback) is not None:
            for stage in (one for one in self.stages if feedback.gradients.codecs[one.level] is not None):
                for part in (part for peer in stage.peers for slot in peer.receives for part in feedback.parts[slot]):
                    feedback.gradients.sender(stage.level, part)

    def free_sent(self) -> None:
        """Free what only a shipment needed, once it has ended."""
        self.own.free()
        if self.hot is not None:
            self.hot.free()

    def release(self) -> None:
        self.own.release()
        self._weights, self._views, self._sums, self.feedback = {}, {}, {}, None
        if self.hot is not None:
            self.hot.release()
        self.version += 1


def kept_of(replicas: Replicas, *, are_weights: bool) -> list[Tensor]:
    """Return weights or sums that are kept now, each with memory of its own; nothing may be under way."""
    of_hot, slots = replicas.hot, replicas._weights if are_weights else replicas._sums
    held = [*(replicas.own.held if are_weights else ()), *chain(*slots.values())]
    return held if of_hot is None else held + (of_hot.weights if are_weights else of_hot.kept_sums)


def parts_of_hot(replicas: Replicas, experts: Collection[int]) -> list[tuple[PacketPart, ...]]:
    """Return by slot the parts of messages of hot experts; none if their gradients go as they are.

    Each expert has its own: what codecs keep of it must not depend on which others are hot.
    """
    at, codecs, num_slots = replicas.hot_level, replicas.encoding.gradient_codecs, len(replicas.domain_ranks)
    parts: list[tuple[PacketPart, ...]] = [()] * (2 * num_slots)
    if at is not None and any(codecs[stage.level] for stage in replicas.stages if stage.level >= at):
        for slot in range(num_slots):
            alone = [range(one, one + 1) for one in replicas.expert_ids(slot) if one in experts]
            parts[num_slots + slot] = _parts_of(replicas, alone)
    return parts


def _slot_parts(replicas: Replicas, hot: Collection[int]) -> list[tuple[PacketPart, ...]]:
    parts = parts_of_hot(replicas, hot)
    for slot in replicas.near_slots:
        parts[slot] = _parts_of(replicas, [replicas.expert_ids(slot)])
    return parts


def _parts_of(replicas: Replicas, stacks: Sequence[range]) -> tuple[PacketPart, ...]:
    """Return the parts of a message with these stacks of experts."""
    return tuple(
        PacketPart(piece.shape, len(experts), (((name, experts.start * size), len(experts) * size),), block.dtype)
        for block in replicas.layout.trainable_blocks
        for piece in block.slices
        for name, size in [(stacked(replicas.layer, piece.name), piece.shape.numel())]
        for experts in stacks
    )


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
        is_sent = replicas.sends_own_slot(is_exact=self._is_exact)
        # In the current stream, because under ZeRO-3 DeepSpeed gathers parameters for this.
        weights = replicas.own.copy() if patches is not None else []
        if patches is None and (is_sent or replicas.own.is_partitioned):
            replicas.own.fill(trainable_only=not self._is_exact)
        self._copy_hot(weights)
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

    def _copy_hot(self, weights: Sequence[Tensor]) -> None:
        """Copy the owned hot experts.  weights: as `OwnSlot.copy`, if the own slot has older ones; else empty."""
        replicas = self._replicas_of_layer
        if (hot := replicas.hot) is None:
            return
        trainable_only = not (self._is_exact or hot.lacks_frozen)
        held = replicas.own.by_name()
        if weights:
            newer = replicas.layout.by_name(weights, trainable_only=True)
            held = [{**one, **new} for one, new in zip(held, newer, strict=True)]
        hot.make_room(trainable_only=trainable_only)
        hot.copy(replicas.own_slot + len(replicas.domain_ranks), held, trainable_only=trainable_only)
