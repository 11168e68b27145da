# SPDX-License-Identifier: Apache-2.0
"""What codecs keep for one set of slots: mirrors and patches of weights, and residuals of gradients."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

from torch import Tensor, nn

from ds_hybridep.codecs import Codec, Patch
from ds_hybridep.sync.counters import CodecCounters, CodecSums
from ds_hybridep.sync.gradients import GradientMemory
from ds_hybridep.sync.messages import MessageLayout, PacketPart
from ds_hybridep.sync.mirrors import HeldSlot, Mirror, PatchSender, Replica


def no_master(_: nn.Parameter) -> Tensor | None:
    return None


def no_scale() -> float:
    return 1.0


@dataclass(frozen=True)
class Encoding:
    """How weights and gradients travel: codecs by level index, None for a level where they go as they are.

    master_of: returns the optimizer's fp32 copy of a parameter, flat or shaped; None if this rank lacks a part of it.
    is_on_host: True if what codecs keep between steps is in host memory.
    """

    weight_codecs: tuple[Codec | Patch | None, ...]
    gradient_codecs: tuple[Codec | None, ...]
    master_of: Callable[[nn.Parameter], Tensor | None] = field(default=no_master, compare=False)
    loss_scale: Callable[[], float] = field(default=no_scale, compare=False)
    is_on_host: bool = False


class Feedback:
    """All that codecs keep for one set of slots on this rank.

    Args:
        parts: the parts of each slot's messages.
        gradients: what is kept of gradients; other sets may share it.
        kind: what a gather of these slots brings, for the counters.
        counters: of these slots and others.
    """

    def __init__(
        self,
        parts: Sequence[tuple[PacketPart, ...]],
        gradients: GradientMemory,
        kind: Literal["weight", "gradient"] = "weight",
        counters: CodecCounters | None = None,
    ) -> None:
        self.parts, self.gradients = parts, gradients
        self.kind = kind
        self.home, self.changes = gradients.home, gradients.changes
        self.counters = counters or CodecCounters()
        self.mirrors: dict[str, Mirror] = {}  # by codec settings
        self.mirror_names: dict[int, str] = {}  # by level, the mirror that encodes owned weights
        self.patches: dict[int, PatchSender] = {}  # by level, if owned weights leave as patches
        self.replicas: dict[int, HeldSlot] = {}  # by slot of another rank, if its weights arrive encoded
        self._layouts: dict[tuple[int, int], MessageLayout] = {}  # of gradients, by level and slot

    # -- weights ----------------------------------------------------------------------------------------------------

    @property
    def has_patches(self) -> bool:
        """True if messages of a gather vary in length."""
        return bool(self.patches)

    @property
    def patch_senders(self) -> list[PatchSender]:
        """The one sender that all levels share, or an empty list."""
        return list(dict.fromkeys(self.patches.values()))

    @property
    def lossy_replicas(self) -> dict[int, Replica]:
        """Lossy replicas by slot."""
        return {slot: replica for slot, replica in self.replicas.items() if isinstance(replica, Replica)}

    def fp32_bytes(self, slot: int) -> int:
        """Return the fp32 bytes of what a slot's messages stand for."""
        return sum(part.fp32_bytes for part in self.parts[slot])

    # -- gradients --------------------------------------------------------------------------------------------------

    def layout(self, level: int, slot: int) -> MessageLayout | None:
        """Return the layout of a slot's messages of gradients over a level; None if they go as they are."""
        codec = self.gradients.codecs[level]
        if codec is None or not self.parts[slot]:
            return None
        if (level, slot) not in self._layouts:
            self._layouts[level, slot] = MessageLayout(codec, self.parts[slot])
        return self._layouts[level, slot]

    def make_senders(self, level: int, slot: int) -> None:
        """Make now what the sender of a slot's gradients keeps; otherwise it is made when it is first used."""
        for part in self.parts[slot] if self.gradients.codecs[level] is not None else ():
            self.gradients.sender(level, part)

    # -- numbers ----------------------------------------------------------------------------------------------------

    def sums(self, weights: Sequence[Tensor]) -> CodecSums:
        """Return what codecs did.  weights: the owned ones, [e, *shape] for each part."""
        distances = [mirror.squared_distance(weights) for mirror in self.mirrors.values()]
        return CodecSums(
            **asdict(self.counters),
            squared_error=sum(apart for apart, _ in distances),
            squared_weight=sum(whole for _, whole in distances),
            squared_residual=self.gradients.squared_residual(),
        )

    def num_bytes(self, weights: Iterable[Tensor]) -> tuple[int, int]:
        """Return the bytes on the device and in host memory, without weights and gradient sums.

        weights: tensors that are counted elsewhere; views of them are not counted again.
        """
        shared = {tensor.untyped_storage()._cdata for tensor in weights}  # by identity: some have no address
        lossy: list[Mirror | Replica] = [*self.mirrors.values(), *self.lossy_replicas.values()]
        kept = [value for one in lossy for value in one.values]
        kept += [tensor for piece in self.gradients.sent.values() for tensor in piece.tensors]
        sent = [tensor for sender in self.patch_senders for tensor in sender.sent]
        states = [piece.state for piece in self.gradients.sent.values()]
        states += [state for mirror in self.mirrors.values() for state in mirror.states]
        here = sum(tensor.nbytes for tensor in sent if tensor.untyped_storage()._cdata not in shared)
        here += sum(tensor.nbytes for state in states for tensor in state.tensors.values())
        at_home = sum(value.nbytes for value in kept if value.untyped_storage()._cdata not in shared)
        return (here, at_home) if self.home.is_host else (here + at_home, 0)
