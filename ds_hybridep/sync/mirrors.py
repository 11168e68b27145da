# SPDX-License-Identifier: Apache-2.0
"""Weights in encoded form: what the owner of a slot sends, and what a holder does with it.

lossy codecs    The owner keeps a mirror of what its replicas hold.  It encodes weight - mirror, and adds to the mirror
                what it has encoded; a replica adds the same.  What a codec leaves out is still in weight - mirror
                the next time.
patches         The owner sends how its 16-bit values have changed since it sent them last.  A holder makes the same
                changes and then has the owner's values bit for bit.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ds_hybridep.codecs import Codec, PacketOrder, PatchCodec, Source
from ds_hybridep.errors import PacketError
from ds_hybridep.sync.home import Home
from ds_hybridep.sync.messages import NARROW, MessageLayout, copy_to, load_states


class HeldSlot(Protocol):
    """A slot of another rank that arrives encoded."""

    varies: bool  # messages vary in length

    def new_messages(self) -> list[Tensor]:
        """Return memory for the next messages, in the order in which the owner sends them."""
        ...

    def apply(self, messages: Sequence[Tensor]) -> list[Tensor]:
        """Take over what arrived in this memory, and return it as it was sent: it may be shorter than the memory.

        Raises PacketError if an earlier message is missing.
        """
        ...

    def assign(self, *, instead_of_messages: bool) -> None:
        """Note that the slot's values have arrived as they are: in place of messages, or in an exact gather."""
        ...


class Mirror:
    """The owner's side of one lossy codec: what its replicas hold, and the encoder of what they lack.

    values: [e, rows, cols] fp32 for each part, by default zeros.
    """

    varies = False

    @property
    def codec(self) -> Codec:
        return self.layout.codec

    def __init__(self, layout: MessageLayout, home: Home, values: Sequence[Tensor] | None = None) -> None:
        self.layout, self.home = layout, home
        shapes = [part.matrices for part in layout.parts]
        self.values = [home.zeros(*shape) for shape in shapes] if values is None else list(values)
        self.states = [layout.codec.new_state(*shape, device=home.device) for shape in shapes]

    def assign(self, weights: Sequence[Tensor]) -> None:
        """Take over weights that were sent exactly, [e, *shape] for each part."""
        for part, value, weight in zip(self.layout.parts, self.values, weights, strict=True):
            value.copy_(part.as_matrices(weight))

    def encode(self, weights: Sequence[Tensor]) -> list[Tensor]:
        """Return the uint8 message that brings every replica closer to `weights` ([e, *shape] for each part)."""
        layout, message = self.layout, self.layout.new_message(self.home.device)
        for batch in layout.batches_to_encode(self.states):
            matrices = [layout.parts[at].as_matrices(weights[at]) for at in batch]
            mirrors = [self.home.fetch(self.values[at]) for at in batch]
            packets, states = layout.packets(message, batch), [self.states[at] for at in batch]
            layout.codec.encode_batch(Source.UPDATE, matrices, mirrors, states, packets)
            for at, mirror in zip(batch, mirrors, strict=True):  # mirrors and states have changed
                self.home.put(self.values[at], mirror)
        return [message]

    def squared_distance(self, weights: Sequence[Tensor]) -> tuple[float, float]:
        """Return the sums over all elements of (weight - mirror)^2 and of weight^2."""
        apart = whole = 0.0
        for part, weight, value in zip(self.layout.parts, weights, self.values, strict=True):
            for one, other in zip(part.as_matrices(weight), value, strict=True):
                wide = one.double()
                whole += float(wide.square().sum())
                apart += float((wide - self.home.fetch(other)).square().sum())
        return apart, whole

    def state_dict(self) -> dict[str, Any]:
        """Return the present state; its tensors are those in use, not copies."""
        self.home.wait()
        return {"values": list(self.values), "states": [state.state_dict() for state in self.states]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        copy_to(self.values, saved["values"])
        load_states(self.states, saved["states"])


class Replica:
    """One slot's weights on a rank that does not own them, as its owner's mirror has them.

    Args:
        weights: the tensors to compute with, [e, *shape] for each part.  fp32 tensors are the replica itself.
    """

    varies = False

    def __init__(self, layout: MessageLayout, weights: Sequence[Tensor], home: Home | None = None) -> None:
        self.layout = layout
        self._weights = list(weights)
        self.home = home or Home(weights[0].device)
        self.values = [
            weight.view(part.matrices) if weight.dtype == torch.float32 else self.home.zeros(*part.matrices)
            for part, weight in zip(layout.parts, weights, strict=True)
        ]
        self.order = PacketOrder()  # its `expected` is the encoder step of the next message

    def new_messages(self) -> list[Tensor]:
        return [self.layout.room(self._weights[0].device)]

    def assign(self, *, instead_of_messages: bool) -> None:
        assert not instead_of_messages, "packets of lossy codecs are forwarded as they are"
        for part, value, weight in zip(self.layout.parts, self.values, self._weights, strict=True):
            if value.data_ptr() != weight.data_ptr():
                value.copy_(part.as_matrices(weight))

    def apply(self, messages: Sequence[Tensor]) -> list[Tensor]:
        (first,) = self.layout.packets(messages[0], [0])
        self.order.check(first)
        self.order.advance()
        for batch in self.layout.batches:
            shared = {at for at in batch if self.values[at].data_ptr() == self._weights[at].data_ptr()}
            work = {at: self.values[at] if at in shared else self.home.fetch(self.values[at]) for at in batch}
            self.layout.codec.decode_add_batch(self.layout.packets(messages[0], batch), list(work.values()))
            for at, value in work.items():
                if at not in shared:
                    self.home.put(self.values[at], value)
                    self._weights[at].copy_(value.view(self._weights[at].shape))
        return list(messages)

    def state_dict(self) -> dict[str, Any]:
        return {"values": list(self.values), "expected": self.order.expected}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        copy_to(self.values, saved["values"])
        self.order.expected = saved["expected"]
        for value, weight in zip(self.values, self._weights, strict=True):
            if value.data_ptr() != weight.data_ptr():
                weight.copy_(value.view(weight.shape))


class PatchSender:
    """The owner's side of patches.

    sent: what holders have, one flat contiguous tensor for each message.  bf16 and fp16 tensors travel as patches, all
        others as they are.
    """

    varies = True

    def __init__(self, codec: PatchCodec, sent: Sequence[Tensor] = (), step: int = 0) -> None:
        self.codec, self.sent = codec, list(sent)
        self._step = step

    def encode(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Return messages that make the holders' values equal to `values`; `sent` becomes equal too."""
        messages = []
        for value, sent in zip(values, self.sent, strict=True):
            if sent.dtype in NARROW:
                room = torch.empty(self.codec.max_bytes(sent.numel()), dtype=torch.uint8, device=value.device)
                num_bytes = self.codec.encode(value, sent, room, self._step)
                messages.append(room[:num_bytes].clone())  # frees the room, which is many times larger
            else:
                sent.copy_(value)
                messages.append(sent)
        self._step += 1
        return messages


class PatchReplica:
    """One slot on a rank that does not own it, bit for bit as its owner's.

    values: the tensors to compute with, like `sent` of `PatchSender`.
    """

    varies = True

    def __init__(self, codec: PatchCodec, values: Sequence[Tensor], step: int = 0) -> None:
        self._codec, self._values = codec, list(values)
        self._step = step

    def new_messages(self) -> list[Tensor]:
        return [
            torch.empty(self._codec.max_bytes(value.numel()), dtype=torch.uint8, device=value.device)
            if value.dtype in NARROW
            else value
            for value in self._values
        ]

    def assign(self, *, instead_of_messages: bool) -> None:
        self._step += instead_of_messages

    def apply(self, messages: Sequence[Tensor]) -> list[Tensor]:
        arrived = [
            # A copy frees most of the room.
            message[: self._codec.length(message)].clone() if value.dtype in NARROW else message
            for message, value in zip(messages, self._values, strict=True)
        ]
        for message, value in zip(arrived, self._values, strict=True):
            if value.dtype in NARROW:
                sequence = self._codec.sequence(message)
                if sequence != self._step:
                    raise PacketError(
                        f"patch has sequence number {sequence}, wanted {self._step}: one before it was lost, or is "
                        f"late; load the last checkpoint"
                    )
                self._codec.decode(message, value)
        self._step += 1
        return arrived
