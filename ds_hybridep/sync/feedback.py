# SPDX-License-Identifier: Apache-2.0
"""What encoding needs from step to step: mirrors of weights, residuals of gradients, and how to undo a step.

A sender adds to each gradient what its earlier packets left out: its residual.  A step writes new residuals beside the
old ones.  They replace the old ones if the step is applied, and are dropped if it is skipped.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ds_hybridep.codecs import Codec, PacketOrder, Patch
from ds_hybridep.sync.counters import CodecCounters, CodecSums
from ds_hybridep.sync.home import Home
from ds_hybridep.sync.messages import MessageLayout, PacketPart, copy_to, load_states, squared_norm
from ds_hybridep.sync.mirrors import HeldSlot, Mirror, PatchSender, Replica


class StepChanges:
    """What the optimizer step under way has changed, and how to undo it if the step is skipped."""

    def __init__(self) -> None:
        self.notes: dict[Any, tuple[Callable[[], None], Callable[[], None]]] = {}

    def __contains__(self, changed: object) -> bool:
        return changed in self.notes

    def note(self, changed: object, undo: Callable[[], None], keep: Callable[[], None] = lambda: None) -> None:
        """Note that `changed` changes: `undo` restores it, `keep` makes it final.  A step's first note counts."""
        self.notes.setdefault(changed, (undo, keep))

    def keep(self) -> None:
        """Make all changes final: the optimizer step was applied."""
        for _, keep in self.notes.values():
            keep()
        self.notes.clear()

    def undo(self) -> None:
        """Undo all changes: the optimizer step was skipped, or its gradients were dropped."""
        self.undo_of(list(self.notes))

    def undo_of(self, changed: Iterable[object]) -> None:
        """Undo the changes of these objects only."""
        for one in changed:
            if one in self.notes:
                undo, _ = self.notes.pop(one)
                undo()


def residual_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the dtype of residuals: bf16 if all trained parameters have 16 bits, otherwise fp32."""
    return torch.bfloat16 if all(dtype.itemsize == 2 for dtype in dtypes) else torch.float32


class ResidualEncoder:
    """Sender of one slot's gradients over one level; adds to each gradient what earlier packets left out.

    dtype: the type in which residuals are kept.
    """

    def __init__(
        self, layout: MessageLayout, home: Home, changes: StepChanges, dtype: torch.dtype = torch.float32
    ) -> None:
        self.layout, self._home = layout, home
        self._applied = layout.new_values(home, dtype)  # residuals as of the last applied step
        self.states = layout.new_states(home.device)
        self._changes = changes
        # Residuals of the step under way, and the codecs' states before it, while `changes` has a note of this one.
        self._pending: list[Tensor] | None = None
        self._saved_states: list[dict[str, Any]] = []

    def encode(self, gradients: Sequence[Tensor], scale: float) -> Tensor:
        """Return the uint8 message of gradients ([e, *shape] fp32 for each part), divided by the loss scale."""
        if self not in self._changes:
            self._saved_states = [state.state_dict() for state in self.states]
            self._changes.note(self, self._undo, self._keep)
        message, packets = self.layout.new_message(self.states[0].step, self._home.device)
        pending: list[Tensor] = []
        for part, gradient, residual, state, out in zip(
            self.layout.parts, gradients, self.residuals, self.states, packets, strict=True
        ):
            unscaled = part.as_matrices(gradient)
            unscaled = unscaled / scale if scale != 1.0 else unscaled
            left = self._home.fetch(residual).to(torch.float32)
            left = left.clone() if left is residual else left
            self.layout.codec.encode_with_residual(unscaled, left, state, out=out)
            pending.append(self._home.keep(left.to(residual.dtype)))
        self._pending = pending
        return message

    @property
    def residuals(self) -> list[Tensor]:
        """What was not delivered yet, [e, rows, cols] for each part, the step under way included."""
        return self._applied if self._pending is None else self._pending

    def _keep(self) -> None:
        self._applied, self._pending, self._saved_states = self.residuals, None, []

    def _undo(self) -> None:
        self._pending = None
        load_states(self.states, self._saved_states)

    @property
    def values(self) -> list[Tensor]:
        """All tensors of residuals: those of the last applied step, and those of the step under way."""
        return [*self._applied, *(self._pending or ())]

    def squared_residual(self) -> float:
        """Sum of squares of what was not delivered yet."""
        self._home.wait()
        return sum(squared_norm(residual) for residual in self.residuals)

    def state_dict(self) -> dict[str, Any]:
        """The state after the last applied step; its tensors are those in use, not copies."""
        self._home.wait()
        states = self._saved_states if self in self._changes else [state.state_dict() for state in self.states]
        return {"residuals": list(self._applied), "states": states}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        copy_to(self._applied, saved["residuals"])
        load_states(self.states, saved["states"])


class GradientDecoder:
    """Receiver of one sender's gradients for one slot."""

    def __init__(self, layout: MessageLayout, changes: StepChanges) -> None:
        self.layout = layout
        self.order = PacketOrder()  # its `expected` is the encoder step of the next message
        self._changes = changes
        self._saved = 0

    @property
    def committed_step(self) -> int:
        """The encoder step of the next message as of the last applied step."""
        return self._saved if self in self._changes else self.order.expected

    def add(self, message: Tensor, sums: Sequence[Tensor], scale: float) -> None:
        """Add what a message holds, times the loss scale, to `sums` ([e, *shape] fp32 for each part)."""
        if self not in self._changes:
            self._saved = self.order.expected
            self._changes.note(self, lambda: setattr(self.order, "expected", self._saved))
        packets = self.layout.packets(message, self.order.expected)
        if not self.order.accept(packets[0]):
            return
        for part, packet, total in zip(self.layout.parts, packets, sums, strict=True):
            matrices = total.view(part.num_experts, part.rows, part.cols)
            if scale == 1.0:
                self.layout.codec.decode_add(packet, matrices)
            else:
                matrices.add_(self.layout.codec.decode(packet, torch.empty_like(matrices)), alpha=scale)


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
        changes: shared by all sets.
        kind: what a gather of these slots brings, for the counters.
        residuals: the type in which they are kept.
    """

    def __init__(
        self,
        parts: Sequence[tuple[PacketPart, ...]],
        gradient_codecs: Sequence[Codec | None],
        home: Home,
        changes: StepChanges,
        kind: Literal["weight", "gradient"] = "weight",
        residuals: torch.dtype = torch.float32,
    ) -> None:
        self.parts = parts
        self.residuals = residuals
        self.changes = changes
        self.kind = kind
        self.counters = CodecCounters()
        self.mirrors: dict[str, Mirror] = {}  # by codec settings
        self.mirror_names: dict[int, str] = {}  # by level, the mirror that encodes owned weights
        self.patches: dict[int, PatchSender] = {}  # by level, if owned weights leave as patches
        self.replicas: dict[int, HeldSlot] = {}  # by slot of another rank, if its weights arrive encoded
        self.encoders: dict[tuple[int, int], ResidualEncoder] = {}  # by (level, slot)
        self.decoders: dict[tuple[int, int, int], GradientDecoder] = {}  # by (level, sender, slot)
        self.gradient_codecs = gradient_codecs  # by level
        self.home = home

    @property
    def has_patches(self) -> bool:
        """True if messages of a gather vary in length."""
        return bool(self.patches)

    @property
    def patch_senders(self) -> list[PatchSender]:
        """The one sender that all levels share, or an empty list."""
        return list(dict.fromkeys(self.patches.values()))

    @property
    def is_lossy_for_gradients(self) -> bool:
        return any(codec is not None for codec in self.gradient_codecs)

    @property
    def lossy_replicas(self) -> dict[int, Replica]:
        """Lossy replicas by slot."""
        return {slot: replica for slot, replica in self.replicas.items() if isinstance(replica, Replica)}

    def fp32_bytes(self, slot: int) -> int:
        """Return the fp32 bytes of what a slot's messages stand for."""
        return sum(part.fp32_bytes for part in self.parts[slot])

    def encoder(self, level: int, slot: int) -> ResidualEncoder | None:
        """Return the encoder, made at the first call; None if gradients go as they are."""
        codec = self.gradient_codecs[level]
        if (level, slot) not in self.encoders and codec is not None and self.parts[slot]:
            layout = MessageLayout(codec, self.parts[slot])
            self.encoders[level, slot] = ResidualEncoder(layout, self.home, self.changes, self.residuals)
        return self.encoders.get((level, slot))

    def decoder(self, level: int, sender: int, slot: int) -> GradientDecoder | None:
        """Return the decoder, made at the first call; None if gradients go as they are."""
        codec = self.gradient_codecs[level]
        if (level, sender, slot) not in self.decoders and codec is not None and self.parts[slot]:
            self.decoders[level, sender, slot] = GradientDecoder(MessageLayout(codec, self.parts[slot]), self.changes)
        return self.decoders.get((level, sender, slot))

    def gradient_state(self) -> dict[str, list[dict[str, Any]]]:
        """Return the state of gradient encoders and decoders as of the last applied step."""
        return {
            "encoders": [
                {"level": level, "slot": slot, **encoder.state_dict()}
                for (level, slot), encoder in self.encoders.items()
            ],
            "decoders": [
                {"level": level, "sender": sender, "slot": slot, "expected": decoder.committed_step}
                for (level, sender, slot), decoder in self.decoders.items()
            ],
        }

    def load_gradient_state(self, saved: Mapping[str, list[dict[str, Any]]]) -> None:
        """Restore what `gradient_state` returned under the same codecs."""
        for record in saved["encoders"]:
            encoder = self.encoder(record["level"], record["slot"])
            assert encoder is not None, f"level {record['level']} has no gradient codec"
            encoder.load_state_dict(record)
        for record in saved["decoders"]:
            decoder = self.decoder(record["level"], record["sender"], record["slot"])
            assert decoder is not None, f"level {record['level']} has no gradient codec"
            decoder.order.expected = record["expected"]

    def forget_gradients(self) -> None:
        """Drop residuals, and the steps that are expected from other ranks' encoders."""
        self.encoders.clear()
        self.decoders.clear()

    def sums(self, weights: Sequence[Tensor]) -> CodecSums:
        """Return what codecs did.  weights: the owned ones, [e, *shape] for each part."""
        distances = [mirror.squared_distance(weights) for mirror in self.mirrors.values()]
        return CodecSums(
            **asdict(self.counters),
            squared_error=sum(apart for apart, _ in distances),
            squared_weight=sum(whole for _, whole in distances),
            squared_residual=sum(encoder.squared_residual() for encoder in self.encoders.values()),
        )

    def num_bytes(self, weights: Iterable[Tensor]) -> tuple[int, int]:
        """Return the bytes on the device and in host memory, without weights and gradient sums.

        weights: tensors that are counted elsewhere; views of them are not counted again.
        """
        shared = {tensor.untyped_storage()._cdata for tensor in weights}  # by identity: some have no address
        senders: list[Mirror | ResidualEncoder] = [*self.mirrors.values(), *self.encoders.values()]
        kept = [value for one in (*senders, *self.lossy_replicas.values()) for value in one.values]
        sent = [tensor for sender in self.patch_senders for tensor in sender.sent]
        states = sum(tensor.nbytes for tensor in sent if tensor.untyped_storage()._cdata not in shared)
        at_home = sum(value.nbytes for value in kept if value.untyped_storage()._cdata not in shared)
        states += sum(t.nbytes for sender in senders for state in sender.states for t in state.tensors.values())
        return (states, at_home) if self.home.is_host else (states + at_home, 0)
