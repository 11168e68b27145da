# SPDX-License-Identifier: Apache-2.0
"""Transfers of one layer's experts in stages, one per level: weights to the replicas, gradients to the owners."""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from ds_hybridep.errors import CommunicationError
from ds_hybridep.experts.replicas import Replicas
from ds_hybridep.transport.channels import Purpose, Transfer, Transport
from ds_hybridep.transport.staging import Part
from ds_hybridep.transport.streams import Mark

_NOTHING = nullcontext()


class StagedTransfer(ABC):
    """A transfer in stages; each starts when the one before has arrived.

    What it does on a device it does in the side stream; `join` is for those who use what it brought.
    """

    def __init__(self, replicas: Replicas, purpose: Purpose) -> None:
        self.replicas = replicas
        self.purpose = purpose
        self.stages_started = 0
        self.is_complete = False
        self._transfer: Transfer | None = None
        self._completed: Mark = None

    def can_advance(self) -> bool:
        return not self.is_complete and (self._transfer is None or self._transfer.is_done())

    def advance(self) -> None:
        """Wait for the stage under way, take in what arrived, and start the next one."""
        streams = self.replicas.streams
        with _NOTHING if streams is None else streams.aside():
            if self._transfer is not None:
                self._transfer.wait()
                self._take_in()
            if self.stages_started == len(self.replicas.stages):
                self._transfer = None
                self.is_complete = True
                self._completed = None if streams is None else streams.mark()
                return
            self._transfer = self._start_stage(self.stages_started)
            self.stages_started += 1

    def join(self) -> None:
        """The current stream goes on behind the completed transfer."""
        if self.replicas.streams is not None:
            self.replicas.streams.follow(self._completed)

    def describe_stall(self, timeout_s: float) -> str:
        if self._transfer is None:
            return f"{self.purpose}: its first stage did not start within the time limit of {timeout_s:g} s"
        return self._transfer.describe(f"passed the time limit of {timeout_s:g} s")

    def _timing(self, name: Literal["encode_s", "decode_s"]) -> AbstractContextManager[None]:
        feedback = self.replicas.feedback
        return _NOTHING if feedback is None else feedback.counters.timing(name)

    @abstractmethod
    def _start_stage(self, stage: int) -> Transfer: ...

    @abstractmethod
    def _take_in(self) -> None:
        """Use what the finished stage brought."""


class WeightShipment(StagedTransfer):
    """One gather of a layer's weights: from the owners to their replicas, slowest level first.

    An exact one ships every parameter as it is, frozen ones too, and begins the mirrors anew.  Otherwise trainable
    parameters go, as the codec of the slowest level between owner and replica has it; inside, packets are forwarded as
    they came.
    """

    def __init__(self, replicas: Replicas, *, is_exact: bool) -> None:
        super().__init__(replicas, Purpose("expert_weights", "shipping of expert weights", replicas.layer))
        self._is_exact = is_exact
        self._blocks = [i for i, block in enumerate(replicas.blocks) if block.is_trainable or is_exact]
        self._messages: dict[str, Tensor] = {}  # by codec: what the own experts' mirrors lack
        self._arrived: dict[int, Tensor] = {}  # messages by slot, kept until they were forwarded
        self._fresh: list[int] = []  # slots whose messages the stage under way brings

    def load(self) -> None:
        """Take the owned experts' weights as they are now, and encode them.  Comes before the first `advance`."""
        # In the current stream: under ZeRO-3 DeepSpeed gathers parameters for that.
        self.replicas.load_own_weights(trainable_only=not self._is_exact)
        feedback = self.replicas.feedback
        if feedback is None or not feedback.mirrors:
            return
        streams = self.replicas.streams
        with _NOTHING if streams is None else streams.aside(), feedback.counters.timing("encode_s"):
            if self._is_exact:
                sources = self.replicas.weight_parts[self.replicas.own_slot]
                for mirror in feedback.mirrors.values():
                    mirror.assign(sources)
            else:
                sources = self.replicas.source_weights()
                self._messages = {name: mirror.encode(sources) for name, mirror in feedback.mirrors.items()}

    def _start_stage(self, stage: int) -> Transfer:
        level = self.replicas.stages[stage]
        assert level.weights is not None, f"{self.replicas.layer}: level {level.level} has no channel"
        sends: list[Part] = []
        receives: list[Part] = []
        for peer in level.peers:
            for slot in peer.sends:
                sends += [(peer.rank, tensor) for tensor in self._outgoing(slot, level.level)]
            for slot in peer.receives:
                receives += [(peer.rank, tensor) for tensor in self._incoming(slot)]
        return level.weights.start(sends, receives, self.purpose)

    def _outgoing(self, slot: int, level: int) -> list[Tensor]:
        replicas, feedback = self.replicas, self.replicas.feedback
        if feedback is not None and slot in self._arrived:
            message, layout = self._arrived[slot], feedback.replicas[slot].layout
        elif feedback is not None and slot == replicas.own_slot and feedback.mirror_names.get(level) in self._messages:
            name = feedback.mirror_names[level]
            message, layout = self._messages[name], feedback.mirrors[name].layout
        else:
            return [replicas.weights[i][slot] for i in self._blocks]
        feedback.counters.count("weight", message.nbytes, layout.fp32_bytes)
        return [message]

    def _incoming(self, slot: int) -> list[Tensor]:
        replica = None if self.replicas.feedback is None else self.replicas.feedback.replicas.get(slot)
        if replica is not None:
            self._fresh.append(slot)
        if self._is_exact or replica is None:
            return [self.replicas.weights[i][slot] for i in self._blocks]
        num_bytes = replica.layout.num_bytes(replica.order.expected)
        self._arrived[slot] = torch.empty(num_bytes, dtype=torch.uint8, device=self.replicas.device)
        return [self._arrived[slot]]

    def _take_in(self) -> None:
        """Exact weights arrived in their slots; packets are added to their replicas."""
        feedback = self.replicas.feedback
        if feedback is None:
            return
        with self._timing("decode_s"):
            for slot in self._fresh:
                replica, places = feedback.replicas[slot], self.replicas.weight_parts[slot]
                if self._is_exact:
                    replica.assign(places)
                else:
                    replica.apply(self._arrived[slot])
                    replica.copy_to(places)
        self._fresh = []


class GradientReturn(StagedTransfer):
    """One reduce of a layer's gradients: from the replicas to their owners, fastest level first.

    Leaves the sum of what the other ranks computed in the own slot of the sums.
    """

    def __init__(self, replicas: Replicas) -> None:
        super().__init__(replicas, Purpose("expert_gradients", "return of expert gradients", replicas.layer))
        self._arrivals: list[Callable[[], Any]] = []  # what adds each message received to its sum
        self._sent: list[Tensor] = []  # keeps messages alive until they have been sent
        self._scale = replicas.encoding.loss_scale()

    def _start_stage(self, stage: int) -> Transfer:
        level = self.replicas.stages[len(self.replicas.stages) - 1 - stage]
        assert level.gradients is not None, f"{self.replicas.layer}: level {level.level} has no channel"
        sends: list[Part] = []
        receives: list[Part] = []
        for peer in level.peers:
            for slot in peer.receives:
                sends += [(peer.rank, message) for message in self._outgoing(slot, level.level)]
            for slot in peer.sends:
                receives += [(peer.rank, message) for message in self._incoming(slot, level.level, peer.rank)]
        self._sent = [message for _, message in sends]
        return level.gradients.start(sends, receives, self.purpose)

    def _outgoing(self, slot: int, level: int) -> list[Tensor]:
        replicas, feedback = self.replicas, self.replicas.feedback
        encoder = None if feedback is None else feedback.encoder(level, slot)
        if feedback is None or encoder is None:
            pairs = zip(replicas.blocks, replicas.sums, strict=True)
            return [sums[slot].to(block.dtype) for block, sums in pairs if sums is not None]
        with self._timing("encode_s"):
            message = encoder.encode(replicas.sum_parts[slot], self._scale)
        feedback.counters.count("gradient", message.nbytes, encoder.layout.fp32_bytes)
        return [message]

    def _incoming(self, slot: int, level: int, sender: int) -> list[Tensor]:
        replicas, feedback = self.replicas, self.replicas.feedback
        decoder = None if feedback is None else feedback.decoder(level, sender, slot)
        if decoder is None:
            messages = []
            for block, sums in zip(replicas.blocks, replicas.sums, strict=True):
                if sums is not None:
                    messages.append(torch.empty_like(sums[slot], dtype=block.dtype))
                    self._arrivals.append(partial(sums[slot].add_, messages[-1]))
            return messages
        num_bytes = decoder.layout.num_bytes(decoder.order.expected)
        message = torch.empty(num_bytes, dtype=torch.uint8, device=replicas.device)
        self._arrivals.append(partial(decoder.add, message, replicas.sum_parts[slot], self._scale))
        return [message]

    def _take_in(self) -> None:
        with self._timing("decode_s"):
            for add in self._arrivals:
                add()
        self._arrivals, self._sent = [], []


class StagePipeline:
    """Staged transfers over one set of channels, kept in order.

    A stage is started only after every earlier transfer has started the same stage, so all ranks start transfers on a
    channel in one order, whenever each of them gets to it.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._under_way: deque[StagedTransfer] = deque()

    def start(self, transfer: StagedTransfer) -> None:
        """Never blocks."""
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
        """Block until `transfer` is complete, moving the others on meanwhile; what it brought can be used then.

        Raises:
            CommunicationError: nothing finished within the time limit, or a transfer failed.
        """
        with self._transport.exposed(transfer.purpose):
            while True:
                seen = self._transport.num_finished
                self.progress()
                if transfer.is_complete:
                    transfer.join()
                    return
                if not self._transport.wait_for_more_than(seen):
                    raise CommunicationError(transfer.describe_stall(self._transport.timeout_s))

    def drain(self) -> None:
        while self._under_way:
            self.wait(self._under_way[-1])
