# SPDX-License-Identifier: Apache-2.0
"""What codecs keep of one layer's experts between steps: mirrors of weights, and residuals of gradients."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ds_hybridep.codecs import Codec, PatchCodec
from ds_hybridep.sync.encoding import CodecCounters
from ds_hybridep.sync.error_feedback import ErrorFeedback, SlotCodecs
from ds_hybridep.sync.messages import MessageLayout, PacketPart
from ds_hybridep.sync.mirrors import HeldSlot, Mirror, PatchReplica, PatchSender, Replica
from ds_hybridep.sync.stages import SlotKey


class ExpertCodecs(SlotCodecs):
    """How the weights and gradients of one layer's experts travel encoded.

    weight_senders: by level, what encodes the owned weights.  Levels with the same codec share one.
    replicas: by slot of another rank, what takes its weights where they arrive encoded.
    """

    def __init__(
        self,
        parts: Mapping[SlotKey, tuple[PacketPart, ...]],
        feedback: ErrorFeedback,
        loss_scale: Callable[[], float],
    ) -> None:
        super().__init__(parts, feedback, kind="weight", loss_scale=loss_scale)
        self.weight_senders: dict[int, Mirror | PatchSender] = {}
        self.replicas: dict[SlotKey, HeldSlot] = {}

    def make_sender(self, level: int, codec: Codec | PatchCodec, parts: tuple[PacketPart, ...]) -> None:
        """Let the owned weights, which have these parts, cross a level by this codec."""
        for made in self.weight_senders.values():
            if type(made.codec) is type(codec) and made.codec.settings() == codec.settings():
                self.weight_senders[level] = made
                return
        home = self.feedback.home
        made = PatchSender(codec) if isinstance(codec, PatchCodec) else Mirror(MessageLayout(codec, parts), home)
        self.weight_senders[level] = made

    def make_replica(
        self, slot: int, codec: Codec | PatchCodec, values: Sequence[Tensor], parts: Sequence[Tensor]
    ) -> None:
        """Let the weights of a slot arrive by this codec.  values, parts: their memory, cut by message and by part."""
        if isinstance(codec, PatchCodec):
            self.replicas[slot] = PatchReplica(codec, values)
        else:
            self.replicas[slot] = Replica(MessageLayout(codec, self.parts[slot]), parts, self.feedback.home)

    # -- weights ----------------------------------------------------------------------------------------------------

    @property
    def mirrors(self) -> list[Mirror]:
        return [sender for sender in dict.fromkeys(self.weight_senders.values()) if isinstance(sender, Mirror)]

    @property
    def patch_sender(self) -> PatchSender | None:
        return next((sender for sender in self.weight_senders.values() if isinstance(sender, PatchSender)), None)

    @property
    def lossy_replicas(self) -> dict[SlotKey, Replica]:
        return {slot: replica for slot, replica in self.replicas.items() if isinstance(replica, Replica)}

    # -- numbers ----------------------------------------------------------------------------------------------------

    def stats(self, weights: Sequence[Tensor]) -> CodecCounters:
        """Return what codecs did.  weights: the owned ones, [e, *shape] for each part."""
        distances = [mirror.squared_distance(weights) for mirror in self.mirrors]
        return replace(
            self.counters,
            squared_error=sum(apart for apart, _ in distances),
            squared_weight=sum(whole for _, whole in distances),
            squared_residual=self.feedback.squared_residual(),
        )

    def num_bytes(self, weights: Iterable[Tensor]) -> tuple[int, int]:
        """Return the bytes on the device and in host memory, without weights and gradient sums.

        weights: tensors that are counted elsewhere; views of them are not counted again.
        """
        shared = {tensor.untyped_storage()._cdata for tensor in weights}  # by identity: some have no address

        def count(tensors: Iterable[Tensor]) -> int:
            return sum(tensor.nbytes for tensor in tensors if tensor.untyped_storage()._cdata not in shared)

        lossy: list[Mirror | Replica] = [*self.mirrors, *self.lossy_replicas.values()]
        senders = self.feedback.senders
        at_home = count(value for one in lossy for value in one.values)
        at_home += count(self.feedback.residuals)
        states = [state for sender in senders for state in sender.states] + [
            state for mirror in self.mirrors for state in mirror.states
        ]
        here = count(tensor for state in states for tensor in state.tensors.values())
        here += count(() if self.patch_sender is None else self.patch_sender.sent)
        return (here, at_home) if self.feedback.home.is_host else (here + at_home, 0)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return what is kept; nothing may be under way, and replicas must hold weights."""
        return {
            "mirrors": [mirror.state_dict() for mirror in self.mirrors],
            "replicas": {slot: replica.state_dict() for slot, replica in self.lossy_replicas.items()},
            "gradients": self.feedback.state_dict(),
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned under the same plan; replicas must already hold exact weights."""
        for mirror, kept in zip(self.mirrors, saved["mirrors"], strict=True):
            mirror.load_state_dict(kept)
        for slot, replica in self.lossy_replicas.items():
            replica.load_state_dict(saved["replicas"][slot])
        self.feedback.load_state_dict(saved["gradients"])
