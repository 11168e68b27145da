# SPDX-License-Identifier: Apache-2.0
"""The two moves of parameters: `Gather` brings values from owners to holders, `Reduce` sums gradients at owners.

Both move slots in stages, one per level (see `sync.stages`).  Where a level has a codec, `sync.mirrors` makes and
takes messages of values, and `sync.error_feedback` those of sums.
"""

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from ds_hybridep.errors import CommunicationError, PacketError
from ds_hybridep.sync.error_feedback import SlotCodecs
from ds_hybridep.sync.mirrors import HeldSlot
from ds_hybridep.sync.stages import SlotKey, Stage
from ds_hybridep.transport.channels import Purpose, Transfer, Transport
from ds_hybridep.transport.streams import DeviceStreams, Mark, PeerTensor

_NOTHING = nullcontext()
logger = logging.getLogger(__name__)


class Slots(Protocol):
    """What this rank knows of the data that a group of ranks shares: one slot for each owner."""

    name: str
    stages: tuple[Stage, ...]
    own_slot: int
    device: torch.device
    streams: DeviceStreams | None  # None: work runs in the caller's stream

    @property
    def codecs(self) -> SlotCodecs | None:
        """How the slots travel encoded; None if everything travels as it is."""
        ...


class ValueSlots(Slots, Protocol):
    """What a gather asks for."""

    def values(self, slot: SlotKey, *, trainable_only: bool) -> list[Tensor]:
        """Return the slot's values as they are held, one contiguous tensor for each message."""
        ...


class SumSlots(Slots, Protocol):
    """What a reduce asks for."""

    def sum_sizes(self, slot: SlotKey) -> list[tuple[int, torch.dtype]]:
        """Return the elements of each message of sums, and the type in which they go unencoded."""
        ...

    def make_sums(self) -> None:
        """Make the sums of the own slot, unless they are there; called before anything is added to them."""
        ...

    def sums(self, slot: SlotKey) -> list[Tensor]:
        """Return the slot's sums, one contiguous tensor for each message."""
        ...

    def sum_parts(self, slot: SlotKey) -> list[Tensor]:
        """Return the slot's sums, fp32 [e, *shape] for each part of a message."""
        ...

    def drop_sums(self, slot: SlotKey) -> None:
        """Drop the slot's sums, which a message now holds."""
        ...


class StagedTransfer(ABC):
    """A transfer in stages; each stage starts when the one before it has arrived.

    A `StagePipeline` calls `advance`.  Its `progress` does so in the forward and the backward of every layer, once the
    stage under way has arrived; else its `wait` does.  Work on a device runs in the side stream.
    """

    def __init__(self, slots: Slots, purpose: Purpose, stages: Sequence[Stage]) -> None:
        self.slots = slots
        self.purpose = purpose
        self.stages = tuple(stages)
        self.stages_started = 0
        self.is_complete = False
        self.crossed: list[Transfer] = []  # transfers of the stages that have ended
        self._transfer: Transfer | None = None
        self._completed: Mark = None

    def can_advance(self) -> bool:
        return not self.is_complete and (self._transfer is None or self._transfer.is_done())

    def advance(self) -> None:
        """Wait for the stage under way, take in what arrived, and start the next one."""
        streams, codecs = self.slots.streams, self.slots.codecs
        self._make_room()  # in the current stream, which also frees it
        with _NOTHING if streams is None else streams.aside():
            if self._transfer is not None:
                self._transfer.wait()
                self.crossed.append(self._transfer)
                with _NOTHING if codecs is None else codecs.counters.timing("decode_s"):
                    self._finish_stage()
            if self.stages_started == len(self.stages):
                self._transfer = None
                self.is_complete = True
                self._completed = None if streams is None else streams.mark()
                return
            self._transfer = self._start_stage(self.stages[self.stages_started])
            self.stages_started += 1

    def wait_in_stream(self) -> None:
        """Make the current stream wait for the completed transfer.  Does not block."""
        if self.slots.streams is not None:
            self.slots.streams.follow(self._completed)

    def describe(self, what: str) -> str:
        """Say what has become of it."""
        if self._transfer is None:
            return f"{self.purpose} {what} before its first stage"
        return self._transfer.describe(what)

    @abstractmethod
    def _start_stage(self, stage: Stage) -> Transfer: ...

    def _make_room(self) -> None:  # noqa: B027 (a gather needs none)
        """Make memory for what the finished stage brought, and for what the next one leaves behind."""

    @abstractmethod
    def _finish_stage(self) -> None:
        """Use what the finished stage brought."""


class Gather(StagedTransfer):
    """One gather of values, slowest level first.

    Encoded messages are forwarded as they came, so all holders decode the same bytes.  If a channel cannot carry
    messages of varying length, it carries values instead of patches.

    Args:
        messages: by level, what is sent in place of the values of this rank's own slot.
        replicas: by slot of another rank, what takes its messages; without one, values arrive as they are.
        is_exact: True sends everything as it is, also what is not trained; replicas start again from that.
    """

    slots: ValueSlots

    def __init__(
        self,
        slots: ValueSlots,
        purpose: Purpose,
        messages: Mapping[int, Sequence[Tensor]],
        replicas: Mapping[SlotKey, HeldSlot],
        *,
        is_exact: bool,
    ) -> None:
        super().__init__(slots, purpose, slots.stages)
        self._messages, self._replicas = messages, replicas
        self._is_exact = is_exact
        self._arrived: dict[SlotKey, list[Tensor]] = {}  # encoded messages by slot, kept for forwarding
        self._fresh: list[tuple[SlotKey, int]] = []  # (slot, rank) of what the stage under way brings

    def _start_stage(self, stage: Stage) -> Transfer:
        assert stage.weights is not None, f"{self.slots.name}: level {stage.level} has no channel"
        sends: list[PeerTensor] = []
        receives: list[PeerTensor] = []
        for peer in stage.peers:
            for slot in peer.slots_here:
                sends += [(peer.rank, tensor) for tensor in self._outgoing(slot, stage)]
            for slot in peer.slots_there:
                self._fresh.append((slot, peer.rank))
                receives += [(peer.rank, tensor) for tensor in self._incoming(slot, stage)]
        return stage.weights.start(sends, receives, self.purpose)

    def _outgoing(self, slot: SlotKey, stage: Stage) -> Sequence[Tensor]:
        codecs, is_own = self.slots.codecs, slot == self.slots.own_slot
        messages = self._messages.get(stage.level) if is_own else self._arrived.get(slot)
        if codecs is None or messages is None or not (is_own or self._replica(slot, stage)) or self._is_exact:
            return self.slots.values(slot, trainable_only=not self._is_exact)
        codecs.count_gathered(slot, messages)
        return messages

    def _incoming(self, slot: SlotKey, stage: Stage) -> Sequence[Tensor]:
        replica = self._replica(slot, stage)
        if replica is None or self._is_exact:
            return self.slots.values(slot, trainable_only=not self._is_exact)
        self._arrived[slot] = replica.new_messages()
        return self._arrived[slot]

    def _replica(self, slot: SlotKey, stage: Stage) -> HeldSlot | None:
        """Return what takes the slot's messages over this stage; None if the slot goes as it is."""
        replica = self._replicas.get(slot)
        return None if replica is None or (replica.varies and needs_equal_lengths(stage)) else replica

    def _finish_stage(self) -> None:
        for slot, src in self._fresh:
            replica, arrived = self._replicas.get(slot), self._arrived.get(slot)
            if replica is not None and arrived:
                with _naming(src, self.purpose):
                    self._arrived[slot] = replica.apply(arrived)
            elif replica is not None:
                replica.assign(instead_of_messages=not self._is_exact)
        self._fresh = []


@contextmanager
def _naming(src: int, purpose: Purpose) -> Iterator[None]:
    """Name the rank that has sent a packet that cannot be applied, which ends the job."""
    try:
        yield
    except PacketError as error:
        raise CommunicationError(f"{purpose} from rank {src}: {error}") from error


def needs_equal_lengths(stage: Stage) -> bool:
    return stage.weights is not None and stage.weights.has_equal_lengths


class Reduce(StagedTransfer):
    """One reduce of gradients, fastest level first.

    Adds what arrives to the sums of its slot: of the own one, and of those that a slower stage sends on.  Where a
    level has a codec, `codecs.encode` encodes a sum, divided by the loss scale, with the residual of this rank and
    level, and keeps what the message leaves out.  `codecs.decode_add` adds what a message holds, times the loss scale.

    With two levels, the gradient of a replica at (0, 0) reaches an owner at (1, 1) by way of (0, 1).  That rank
    decodes it, adds it to its own sum in fp32, and encodes the sum anew, with its own residual.  Its own gradient is
    in that sum by then: it was added before this reduce began.

    Args:
        stages: those of the group's stages to cross, by default all.
    """

    slots: SumSlots

    def __init__(self, slots: SumSlots, purpose: Purpose, stages: Sequence[Stage] | None = None) -> None:
        super().__init__(slots, purpose, (slots.stages if stages is None else stages)[::-1])
        self._arrivals: list[tuple[SlotKey, int, int, list[Tensor]]] = []  # (slot, level, rank, messages)
        self._sent: list[Tensor] = []  # keeps messages alive until they have been sent

    def _start_stage(self, stage: Stage) -> Transfer:
        assert stage.gradients is not None, f"{self.slots.name}: level {stage.level} has no channel"
        sends: list[PeerTensor] = []
        receives: list[PeerTensor] = []
        for peer in stage.peers:
            for slot in peer.slots_there:
                sends += [(peer.rank, message) for message in self._outgoing(slot, stage.level)]
            for slot in peer.slots_here:
                messages = self._incoming(slot, stage.level)
                self._arrivals.append((slot, stage.level, peer.rank, messages))
                receives += [(peer.rank, message) for message in messages]
        self._sent = [message for _, message in sends]
        return stage.gradients.start(sends, receives, self.purpose)

    def _codecs_of(self, slot: SlotKey, level: int) -> SlotCodecs | None:
        """Return what encodes a slot's sums over a level; None if they go as they are."""
        codecs = self.slots.codecs
        return codecs if codecs is not None and codecs.encodes(slot, level) else None

    def _outgoing(self, slot: SlotKey, level: int) -> list[Tensor]:
        if (codecs := self._codecs_of(slot, level)) is not None:
            messages = [codecs.encode(slot, level, self.slots.sum_parts(slot))]
        else:
            sizes = self.slots.sum_sizes(slot)
            messages = [total.to(dtype) for total, (_, dtype) in zip(self.slots.sums(slot), sizes, strict=True)]
        self.slots.drop_sums(slot)
        return messages

    def _incoming(self, slot: SlotKey, level: int) -> list[Tensor]:
        if (codecs := self._codecs_of(slot, level)) is not None:
            return [codecs.room(slot, level)]
        return [torch.empty(size, dtype=dtype, device=self.slots.device) for size, dtype in self.slots.sum_sizes(slot)]

    def _make_room(self) -> None:
        if self._transfer is not None:
            self.slots.make_sums()
        if self.slots.codecs is not None and self.stages_started < len(self.stages):
            stage = self.stages[self.stages_started]
            for slot in (slot for peer in stage.peers for slot in peer.slots_there):
                self.slots.codecs.make_residuals(slot, stage.level)

    def _finish_stage(self) -> None:
        for slot, level, src, messages in self._arrivals:
            with _naming(src, self.purpose):
                self._add(slot, level, src, messages)
        self._arrivals, self._sent = [], []

    def _add(self, slot: SlotKey, level: int, src: int, messages: Sequence[Tensor]) -> None:
        if (codecs := self._codecs_of(slot, level)) is not None:
            codecs.decode_add(slot, level, messages[0], src=src, sums=self.slots.sum_parts(slot))
        else:
            for total, message in zip(self.slots.sums(slot), messages, strict=True):
                total.add_(message)


class StagePipeline:
    """Staged transfers over one set of channels, kept in order.

    A stage is started only after every earlier transfer has started the same stage.  So all ranks start transfers on a
    channel in one order, no matter when each of them gets to it.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._under_way: deque[StagedTransfer] = deque()

    def start(self, transfer: StagedTransfer) -> None:
        """Start the first stage.  Never blocks."""
        transfer.advance()
        self._under_way.append(transfer)

    def progress(self) -> None:
        """Start every stage that can start.  Never blocks."""
        earlier: StagedTransfer | None = None
        for transfer in self._under_way:
            while transfer.can_advance() and (
                earlier is None or earlier.is_complete or earlier.stages_started > transfer.stages_started
            ):
                transfer.advance()
            earlier = transfer
        while self._under_way and self._under_way[0].is_complete:
            self._under_way.popleft()

    def wait(self, transfer: StagedTransfer) -> None:
        """Block until `transfer` is complete and what it brought can be used; move the others on meanwhile.

        Raises:
            CommunicationError: nothing finished within the time limit, or a transfer failed.
        """
        timeout_s, notice_s = self._transport.timeout_s, self._transport.notice_s
        with self._transport.exposed(transfer.purpose):
            while True:
                seen = self._transport.num_finished
                self.progress()
                if transfer.is_complete:
                    transfer.wait_in_stream()
                    self._transport.count_waits(transfer.crossed)
                    return
                if not self._transport.wait_for_more_than(seen, notice_s):
                    logger.warning("%s", transfer.describe(f"has waited {notice_s:.0f} s for other ranks"))
                    if not self._transport.wait_for_more_than(seen, timeout_s - notice_s):
                        raise CommunicationError(transfer.describe(self._transport.passed_limit()))

    def drain(self) -> None:
        while self._under_way:
            self.wait(self._under_way[-1])
