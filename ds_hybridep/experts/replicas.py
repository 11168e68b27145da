# SPDX-License-Identifier: Apache-2.0
"""Replicas of a domain's experts for one layer: weights M x [e * n], one tensor for each block of `experts.slots`.

Slot i has the experts of the domain rank with offset index i.  The own slot has weights only while they are sent.
What gradients need is in `experts.gradient_return`.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain

import torch
from torch import Tensor, nn

from ds_hybridep.experts.away import Away
from ds_hybridep.experts.codecs import ExpertCodecs
from ds_hybridep.experts.hot import HotReplicas
from ds_hybridep.experts.slots import OwnSlot, ParameterSlice, SlotLayout
from ds_hybridep.geometry.cluster import flatten, unflatten
from ds_hybridep.geometry.partition import Partition
from ds_hybridep.geometry.slots import Span
from ds_hybridep.sync.encoding import Encoding
from ds_hybridep.sync.error_feedback import ErrorFeedback
from ds_hybridep.sync.home import Home
from ds_hybridep.sync.messages import PacketPart
from ds_hybridep.sync.mirrors import Mirror, PatchSender
from ds_hybridep.sync.stages import HotSlot, SlotKey, Stage
from ds_hybridep.sync.transaction import Transaction
from ds_hybridep.sync.transfers import Gather, needs_equal_lengths
from ds_hybridep.sync.undelivered import stacked
from ds_hybridep.transport.channels import Purpose
from ds_hybridep.transport.streams import streams_of


@contextmanager
def outliving_inference() -> Iterator[None]:
    """Let what is made inside be used in training too, if the forward runs under `torch.inference_mode`."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class Replicas:
    """One layer's replicas on this rank (`sync.transfers.ValueSlots`).

    Args:
        name: of the layer.
        experts: this rank's e experts, one module each; if `is_grouped`, one module with parameters [e, *shape].
        partition: domains of the layer's expert-parallel group; with hot experts, those of a hot expert.
        transaction: of the optimizer step.
        hot_level: level over which only hot experts have replicas; None: there are no hot experts.

    near_slots: slots that this rank holds as a whole, the own one included; of all others it may have hot experts.
    is_lossy: codecs encode gradients, so that some of them arrive later.
    """

    def __init__(
        self,
        name: str,
        experts: Sequence[nn.Module],
        partition: Partition,
        stages: tuple[Stage, ...],
        *,
        rank: int,
        encoding: Encoding,
        transaction: Transaction,
        is_grouped: bool = False,
        hot_level: int | None = None,
    ) -> None:
        self.is_grouped, self.stages, self.encoding = is_grouped, stages, encoding
        self.device = next(experts[0].parameters()).device
        self.layout = SlotLayout(experts, self.device, is_grouped=is_grouped)
        self.trainable_names = tuple(piece.name for piece in self.layout.trainable)
        # 1. Slots.
        self.name, self.partition, self.hot_level = name, partition, hot_level
        self.domain_ranks = partition.domain_ranks(rank)
        self.own_slot = partition.offset_index(rank)
        self.near_slots = tuple(slot for slot in range(len(self.domain_ranks)) if self.are_near(slot, self.own_slot))
        self.replica_slots = tuple(slot for slot in self.near_slots if slot != self.own_slot)
        self.slot_parts = _slot_parts(self, hot=())
        self.parts = self.slot_parts[self.own_slot]
        # 2. Weights, and views of them.
        self.streams = streams_of(self.device)  # None: there is no side stream
        self.own = OwnSlot(name, experts, self.layout, encoding.master_of)
        self._weights = {slot: [*map(self.layout.new, self.layout.blocks)] for slot in self.replica_slots}
        self._views = {slot: self.layout.by_name(weights) for slot, weights in self._weights.items()}
        self.version = 0  # grows when slots change
        self.hot: HotReplicas | None = None
        if hot_level is not None:
            self.hot = HotReplicas(
                self.layout, [*map(self.expert_ids, range(len(self.domain_ranks)))], self.near_slots
            )
        # 3. Codecs, and what is in host memory.
        self.away = Away(name)
        self.codecs = _codecs_of(self, transaction, rank)
        self.is_lossy = self.codecs is not None and any(codec is not None for codec in encoding.gradient_codecs)

    @property
    def weights(self) -> list[Tensor]:
        """All weights that are held, of all slots and blocks."""
        return [*self.own.held, *chain(*self._weights.values()), *(self.hot.held if self.hot else ())]

    @property
    def kept_weights(self) -> list[Tensor]:
        """Those that are kept when nothing is under way, each with memory of its own."""
        return [*self.own.held, *chain(*self._weights.values()), *(self.hot.weights if self.hot else ())]

    def choose_hot(self, experts: Sequence[int]) -> None:
        """Replace the hot experts.  No gradients may wait, and weights must be shipped next."""
        assert self.hot is not None
        self.hot.choose(experts)
        self.slot_parts = _slot_parts(self, experts)
        if self.codecs is not None:
            self.codecs.replace_parts(self.slot_parts)
        self.version += 1

    @property
    def hot_slots(self) -> tuple[HotSlot, ...]:
        return () if self.hot is None else tuple(map(HotSlot, self.hot.slots))

    # -- who owns and holds what ---------------------------------------------------------------------------------

    def are_near(self, slot: int, other: int) -> bool:
        """Return True if the ranks of two slots hold each other's slots as a whole, not just their hot experts."""
        at, sizes = self.hot_level, self.partition.domain_sizes
        return at is None or unflatten(slot, sizes)[at] == unflatten(other, sizes)[at]

    def hot_source(self, slot: int, other: int) -> int:
        """Return the slot of the rank from which that of `other` gets the hot experts of `slot`.

        It differs from `other` at the hot level only, where it is as `slot`.
        """
        assert self.hot_level is not None
        sizes = self.partition.domain_sizes
        offset = list(unflatten(other, sizes))
        offset[self.hot_level] = unflatten(slot, sizes)[self.hot_level]
        return flatten(offset, sizes)

    def level_between(self, slot: int, other: int) -> int:
        """Return the slowest level between the ranks of two slots."""
        level = self.partition.cluster.level_between(self.domain_ranks[slot], self.domain_ranks[other])
        assert level is not None, f"{self.name}: slots {slot} and {other} are of one rank"
        return level

    def expert_ids(self, slot: int) -> range:
        """Return the global experts of a slot."""
        owner, num_local = self.partition.group_ranks.index(self.domain_ranks[slot]), self.layout.num_local
        return range(owner * num_local, (owner + 1) * num_local)

    # -- what slots hold ----------------------------------------------------------------------------------------

    def layout_of(self, slot: SlotKey) -> SlotLayout | None:
        """Return how the experts of a slot lie in memory; None if none of them is hot."""
        return self._hot.layout_of(slot.slot) if isinstance(slot, HotSlot) else self.layout

    def values(self, slot: SlotKey, *, trainable_only: bool) -> list[Tensor]:
        """Return the weights of a slot, [e * n] for each block; the own slot must have been filled."""
        if isinstance(slot, HotSlot):
            hot, of = self._hot, slot.slot
            trainable_only = trainable_only and not hot.lacks_frozen
            if of in self.replica_slots:  # what came over slower levels goes on
                return hot.copy(of, self.weights_by_name(of), trainable_only=trainable_only)
            return hot.values(of, trainable_only=trainable_only)
        if slot == self.own_slot:
            return self.own.values(trainable_only=trainable_only)
        pairs = zip(self.layout.blocks, self._weights[slot], strict=True)
        return [weights for block, weights in pairs if block.is_trainable or not trainable_only]

    def weight_parts(self, slot: int) -> list[Tensor]:
        """Return the trainable weights of a slot, [e, *shape] in the order of `parts`."""
        return self.layout.parts(self.values(slot, trainable_only=True))

    def weights_by_name(self, slot: SlotKey) -> list[dict[str, Tensor]]:
        """Return the weights of a slot by parameter name, for each module of `experts`."""
        if isinstance(slot, HotSlot):
            return self._hot.weights_by_name(slot.slot)
        return self.own.by_name() if slot == self.own_slot else self._views[slot]

    @property
    def _hot(self) -> HotReplicas:
        assert self.hot is not None, f"{self.name}: a hot expert travels, and none can be hot"
        return self.hot

    def trainable_weights(self, slots: Iterable[SlotKey]) -> list[Tensor]:
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
        held: tuple[SlotKey, ...] = (*self.near_slots, *self.hot_slots)
        in_order: tuple[SlotKey, ...] = (self.own_slot, *self.replica_slots, *self.hot_slots)
        slots: dict[SlotKey, list[dict[str, Tensor]]] = {slot: [] for slot in held}
        for slot in in_order:
            for named in self.weights_by_name(slot):
                # A grouped module gets all its weights: without them it would run with ZeRO-3's hooks.
                weights = {} if slot == self.own_slot and not self.is_grouped else dict(named)
                weights.update({name: next(iterator) for name in self.trainable_names})
                slots[slot].append(weights)
        return list(slots.values())

    # -- what was sent before, for patches -----------------------------------------------------------------------

    @property
    def sends_patches(self) -> bool:
        return self.codecs is not None and self.codecs.patch_sender is not None

    def remember_sent(self) -> None:
        """Keep what was sent last if patches need it; call before the step, while the parameters still equal it."""
        if self.codecs is not None and (sender := self.codecs.patch_sender) is not None:
            sender.sent = self.own.values(trainable_only=True) if self.own.is_partitioned else self.own.copy()

    @property
    def knows_sent(self) -> bool:
        """True unless patches need what was sent last, and it was not remembered."""
        sender = None if self.codecs is None else self.codecs.patch_sender
        return sender is None or bool(sender.sent)

    def forget_sent(self) -> None:
        if self.codecs is not None and (sender := self.codecs.patch_sender) is not None:
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
        """Bytes on the device, without sums of gradients."""
        weights = sum(tensor.untyped_storage().nbytes() for tensor in self.weights)
        return weights + (self.codecs.num_bytes(self.weights)[0] if self.codecs is not None else 0)

    @property
    def num_host_bytes(self) -> int:
        return 0 if self.codecs is None else self.codecs.num_bytes(self.weights)[1]

    def counting_wait(self) -> AbstractContextManager[None]:
        """Count the seconds inside as those in which the layer waits for weights or gradients."""
        return nullcontext() if self.codecs is None else self.codecs.counters.timing("exposed_s")

    def sends_own_slot(self, *, is_exact: bool) -> bool:
        """Return True if any level carries the weights of the whole own slot unencoded."""
        stages = [stage for stage in self.stages if stage.level != self.hot_level]
        return any(is_exact or self.weight_sender_over(stage) is None for stage in stages)

    def weight_sender_over(self, stage: Stage) -> Mirror | PatchSender | None:
        """Return what encodes the owned weights for a stage; None if they go as they are."""
        sender = None if self.codecs is None else self.codecs.weight_senders.get(stage.level)
        return None if sender is None or (sender.varies and needs_equal_lengths(stage)) else sender

    def free_sent(self) -> None:
        """Free what only a shipment needed, once it has ended."""
        self.own.free()
        if self.hot is not None:
            self.hot.free()

    def release(self) -> None:
        self.own.release()
        self._weights, self._views, self.codecs = {}, {}, None
        if self.hot is not None:
            self.hot.release()
        self.version += 1


def parts_of_hot(replicas: Replicas, experts: Collection[int]) -> dict[SlotKey, tuple[PacketPart, ...]]:
    """Return by slot the parts of messages of hot experts; none if their gradients go as they are.

    Each expert has its own: what codecs keep of it must not depend on which others are hot.
    """
    at, codecs = replicas.hot_level, replicas.encoding.gradient_codecs
    if at is None or not any(codecs[stage.level] for stage in replicas.stages if stage.level >= at):
        return {}
    return {
        HotSlot(slot): _parts_of(
            replicas, [range(one, one + 1) for one in replicas.expert_ids(slot) if one in experts]
        )
        for slot in range(len(replicas.domain_ranks))
    }


def _slot_parts(replicas: Replicas, hot: Collection[int]) -> dict[SlotKey, tuple[PacketPart, ...]]:
    """Return by slot the parts of its messages; none for what this rank does not hold."""
    slots = range(len(replicas.domain_ranks))
    parts: dict[SlotKey, tuple[PacketPart, ...]] = dict.fromkeys([*slots, *map(HotSlot, slots)], ())
    parts |= {slot: _parts_of(replicas, [replicas.expert_ids(slot)]) for slot in replicas.near_slots}
    return parts | parts_of_hot(replicas, hot)


def _parts_of(replicas: Replicas, stacks: Sequence[range]) -> tuple[PacketPart, ...]:
    """Return the parts of a message with these stacks of experts."""
    return tuple(
        PacketPart(piece.shape, len(experts), (_span_of(replicas, piece, experts),), block.dtype)
        for block in replicas.layout.trainable_blocks
        for piece in block.slices
        for experts in stacks
    )


def _span_of(replicas: Replicas, piece: ParameterSlice, experts: range) -> Span:
    """Return what a parameter of these experts is of the stack of all experts of the layer."""
    size, num_experts = piece.shape.numel(), len(replicas.partition.group_ranks) * replicas.layout.num_local
    name = stacked(replicas.name, piece.name)
    return Span(name, (num_experts, *piece.shape), experts.start * size, len(experts) * size)


def _codecs_of(replicas: Replicas, transaction: Transaction, rank: int) -> ExpertCodecs | None:
    """Return the codecs' state; None if nothing is encoded, or if all is frozen and travels only at the start."""
    levels = [stage.level for stage in replicas.stages]
    weights, gradients = replicas.encoding.weight_codecs, replicas.encoding.gradient_codecs
    if not replicas.parts or not any(weights[level] or gradients[level] for level in levels):
        return None
    home = Home(replicas.device, replicas.encoding.is_on_host)
    feedback = ErrorFeedback(replicas.name, gradients, home, transaction, rank=rank)
    codecs = ExpertCodecs(replicas.slot_parts, feedback, replicas.encoding.loss_scale)
    for level in levels:
        if (codec := weights[level]) is not None and level != replicas.hot_level:
            codecs.make_sender(level, codec, replicas.parts)
    for slot in replicas.replica_slots:
        if (codec := weights[replicas.level_between(replicas.own_slot, slot)]) is not None:
            codecs.make_replica(slot, codec, replicas.values(slot, trainable_only=True), replicas.weight_parts(slot))
    return codecs


def make_shipment(replicas: Replicas, *, is_exact: bool) -> Gather:
    """Return a gather of a layer's weights, to be started: the owned experts' current weights are read and encoded.

    An exact gather ships every parameter unencoded, frozen ones too, and resets the mirrors.  Other gathers ship
    trainable parameters, encoded by the codec of the slowest level between owner and replica.
    """
    messages: dict[int, list[Tensor]] = {}
    purpose = Purpose("expert_weights", "shipping of expert weights", replicas.name)
    held = {} if replicas.codecs is None else replicas.codecs.replicas
    shipment = Gather(replicas, purpose, messages, held, is_exact=is_exact)
    codecs, own = replicas.codecs, replicas.own
    patches = None if codecs is None or is_exact else codecs.patch_sender
    is_sent = replicas.sends_own_slot(is_exact=is_exact)
    # 1. Read the weights: in the current stream, because under ZeRO-3 DeepSpeed gathers parameters for this.
    weights = own.copy() if patches is not None else []
    if patches is None and (is_sent or own.is_partitioned):
        own.fill(trainable_only=not is_exact)
    _copy_hot(replicas, weights, is_exact=is_exact)
    if codecs is None or not codecs.weight_senders:
        return shipment
    # 2. Encode them.
    with nullcontext() if replicas.streams is None else replicas.streams.aside(), codecs.counters.timing("encode_s"):
        if is_exact:
            for mirror in codecs.mirrors:
                mirror.assign(replicas.weight_parts(replicas.own_slot))
            return shipment
        encoded: dict[Mirror | PatchSender, list[Tensor]] = {}
        if patches is not None:
            assert patches.sent, f"{replicas.name}: what was sent last was not remembered before the step"
            encoded[patches] = patches.encode(weights)
            own.adopt(patches.sent)
        sources = own.sources() if codecs.mirrors else []
        encoded.update((mirror, mirror.encode(sources)) for mirror in codecs.mirrors)
        for stage in replicas.stages:
            if (sender := replicas.weight_sender_over(stage)) is not None:
                messages[stage.level] = encoded[sender]
    # 3. Free what only the encoding needed.
    replicas.free_behind_side(weights)
    replicas.forget_sent()
    if not is_sent:
        own.free()
    return shipment


def _copy_hot(replicas: Replicas, weights: Sequence[Tensor], *, is_exact: bool) -> None:
    """Copy the owned hot experts.  weights: as `OwnSlot.copy`, if the own slot has older ones; else empty."""
    if (hot := replicas.hot) is None:
        return
    trainable_only = not (is_exact or hot.lacks_frozen)
    held = replicas.own.by_name()
    if weights:
        newer = replicas.layout.by_name(weights, trainable_only=True)
        held = [{**one, **new} for one, new in zip(held, newer, strict=True)]
    hot.make_room(trainable_only=trainable_only)
    hot.copy(replicas.own_slot, held, trainable_only=trainable_only)
