# SPDX-License-Identifier: Apache-2.0
"""What codecs keep of gradients from step to step: one record for each *piece* of a parameter and each level.

A piece is a run of elements of one parameter, or of one parameter of several experts.  Its *residual* is what earlier
packets left out; the sender adds it to the next gradient of the same piece.  A piece that is not sent in a step keeps
its residual.  So the sum of what arrives, and of what waits, is the sum of the gradients.

A step writes new residuals beside the old ones.  They replace the old ones if the step is applied, and are dropped if
it is skipped.  Nothing here communicates: `GradientMemory.encode` makes a message, and `add` reads one.
"""

import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ds_hybridep.codecs import Codec, CodecState, PacketOrder
from ds_hybridep.codecs.compact import compact, compact_shape, expand, mix
from ds_hybridep.sync.home import Home
from ds_hybridep.sync.messages import MessageLayout, PacketPart, Piece, squared_norm

MIN_COMPACT = 1024  # elements; a smaller residual stays in fp32


class StepChanges:
    """What the optimizer step under way has changed, and how to undo it if the step is skipped."""

    def __init__(self) -> None:
        self.notes: dict[Any, tuple[Callable[[], None], Callable[[], None]]] = {}
        self._backward = -1  # autograd's number of the backward that began to change things

    def __contains__(self, changed: object) -> bool:
        return changed in self.notes

    def note(self, changed: object, undo: Callable[[], None], commit: Callable[[], None] = lambda: None) -> None:
        """Note that `changed` changes: `undo` restores it, `commit` makes it final.  A step's first note counts."""
        if not self.notes:
            self._backward = torch._C._current_graph_task_id()
        self.notes.setdefault(changed, (undo, commit))

    def commit(self) -> None:
        """Make all changes final: the optimizer step is being applied."""
        for _, commit in self.notes.values():
            commit()
        self.notes.clear()

    def undo(self) -> None:
        """Undo all changes: the optimizer step was skipped, or its gradients were dropped."""
        self.undo_of(list(self.notes))

    def before_backward(
        self, undo_replaced: Callable[[], None], original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Call `undo_replaced` if there are changes of an earlier backward; then call `original`.

        Call this at each output of the model in a backward.
        """
        # Numbers grow, so a backward inside another one, as re-entrant checkpointing has it, is no earlier one.
        if self.notes and self._backward < torch._C._current_graph_task_id():
            undo_replaced()
        return original(*args, **kwargs)

    def undo_of(self, changed: Iterable[object]) -> None:
        """Undo the changes of these objects only."""
        for one in changed:
            if one in self.notes:
                undo, _ = self.notes.pop(one)
                undo()


class SentPiece:
    """What the sender of one piece keeps: its residual, and the state of the encoder.

    Residuals of 16-bit parameters are in the form of `codecs.compact`, int16; others are fp32 [n, rows, cols].
    """

    def __init__(self, shape: tuple[int, int, int], state: CodecState, residual: Tensor, place: int) -> None:
        self.shape, self.state = shape, state
        self._applied = residual  # as of the last applied step
        self._place, self._count = place, 0  # numbers for the random rounding: whose, and how many there were
        # The residual of the step under way, and what there was before it, while the step is noted.
        self._pending: Tensor | None = None
        self._saved: dict[str, Any] | None = None

    def begin(self, changes: StepChanges) -> None:
        """Call before each encoding."""
        if self not in changes:
            self._saved = self._numbers()
            changes.note(self, self._undo, self._commit)

    @property
    def residual(self) -> Tensor:
        """What was not delivered yet, the step under way included, as it is stored."""
        return self._applied if self._pending is None else self._pending

    @property
    def tensors(self) -> list[Tensor]:
        """Residuals: of the last applied step, and of the step under way."""
        return [self._applied] if self._pending is None else [self._applied, self._pending]

    def stored(self, left: Tensor) -> Tensor:
        """Return the next residual, fp32 of this shape, as it is stored."""
        is_compact = self._applied.dtype == torch.int16
        return compact(left, mix(self._place ^ mix(self._count & 0xFFFFFFFF))) if is_compact else left

    def put(self, stored: Tensor) -> None:
        self._pending = stored
        self._count += 1

    def _commit(self) -> None:
        self._applied, self._pending, self._saved = self.residual, None, None

    def _undo(self) -> None:
        assert self._saved is not None, "a step was undone that had not begun"
        self._load(self._saved)
        self._pending = self._saved = None

    def _numbers(self) -> dict[str, Any]:
        return {"state": self.state.state_dict(), "count": self._count}

    def _load(self, numbers: Mapping[str, Any]) -> None:
        self.state.load_state_dict(numbers["state"])
        self._count = numbers["count"]

    def state_dict(self) -> dict[str, Any]:
        """The state after the last applied step; tensors of residuals are those in use, not copies."""
        return {"shape": list(self.shape), "residual": self._applied, **(self._saved or self._numbers())}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        self._applied.copy_(saved["residual"])
        self._load(saved)


class ReceivedPiece:
    """What the receiver of one piece keeps: the number of the sender's next packet."""

    def __init__(self) -> None:
        self.order = PacketOrder()
        self._applied: int | None = None

    def begin(self, changes: StepChanges) -> None:
        """Call before each decoding."""
        if self not in changes:
            self._applied = self.order.expected
            changes.note(self, self._undo, self._commit)

    @property
    def expected(self) -> int:
        """The number of the next packet as of the last applied step."""
        return self.order.expected if self._applied is None else self._applied

    def _commit(self) -> None:
        self._applied = None

    def _undo(self) -> None:
        self.order.expected, self._applied = self.expected, None


class GradientMemory:
    """What codecs keep of the gradients that this rank sends and receives, as far as they belong together.

    Args:
        name: of the layer or group, for the random rounding.
        codecs: by level; None for a level where gradients go as they are.
        rank: this rank.
        changes: shared by all that a skipped step undoes.
    """

    def __init__(self, name: str, codecs: Sequence[Codec | None], home: Home, changes: StepChanges, rank: int) -> None:
        self.codecs, self.home, self.changes = tuple(codecs), home, changes
        self._place = f"{name} {rank}"
        self.sent: dict[tuple[int, Piece], SentPiece] = {}  # by level
        self.received: dict[tuple[int, int, Piece], ReceivedPiece] = {}  # by level and sender

    @property
    def is_lossy(self) -> bool:
        return any(codec is not None for codec in self.codecs)

    # -- messages ---------------------------------------------------------------------------------------------------

    def encode(self, level: int, layout: MessageLayout, gradients: Sequence[Tensor], scale: float) -> Tensor:
        """Return the uint8 message of gradients ([e, *shape] fp32 for each part), divided by the loss scale."""
        message, packets = layout.new_message(self.home.device)
        written: list[tuple[SentPiece, Tensor]] = []
        for part, gradient, out in zip(layout.parts, gradients, packets, strict=True):
            pieces = self._begin(level, part)
            unscaled = part.as_matrices(gradient)
            unscaled = unscaled / scale if scale != 1.0 else unscaled
            left = self._left(part, pieces)
            layout.codec.encode_with_residual(unscaled, left, pieces[0].state, out=out)
            for piece in pieces[1:]:
                piece.state.step += 1
            written += self._stored(part, pieces, left)
        for piece, stored in written:
            piece.put(stored)
        return message

    def add(
        self, level: int, sender: int, layout: MessageLayout, message: Tensor, sums: Sequence[Tensor], scale: float
    ) -> None:
        """Add what a sender's message holds, times the loss scale, to `sums` ([e, *shape] fp32 for each part).

        Raises PacketError, and changes nothing, if it is not the sender's next message.
        """
        packets = layout.packets(message)
        pieces = [
            self.received.setdefault((level, sender, piece), ReceivedPiece())
            for part in layout.parts
            for piece, _ in part.pieces
        ]
        pieces[0].order.check(packets[0])
        for piece in pieces:
            piece.begin(self.changes)
            piece.order.advance()
        for part, packet, total in zip(layout.parts, packets, sums, strict=True):
            matrices = total.view(part.num_experts, part.rows, part.cols)
            if scale == 1.0:
                layout.codec.decode_add(packet, matrices)
            else:
                matrices.add_(layout.codec.decode(packet, torch.empty_like(matrices)), alpha=scale)

    def take(self, level: int, parts: Sequence[PacketPart], sums: Sequence[Tensor], scale: float) -> None:
        """Move residuals, times the loss scale, to `sums` ([e, *shape] fp32 for each part)."""
        for part, total in zip(parts, sums, strict=True):
            pieces = self._begin(level, part)
            left = self._left(part, pieces)
            total.view(left.shape).add_(left, alpha=scale)
            for piece in pieces:
                piece.put(self.home.store(torch.zeros_like(piece.residual)))

    def leave_out(self, level: int, parts: Sequence[PacketPart], lost: Sequence[Tensor], scale: float) -> None:
        """Add to residuals what was lost behind the codec, times the loss scale ([e, *shape] fp32 for each part)."""
        for part, more in zip(parts, lost, strict=True):
            pieces = self._begin(level, part)
            left = self._left(part, pieces)
            left += torch.where(more.isfinite(), more, 0.0).view(left.shape) / scale
            for piece, stored in self._stored(part, pieces, left):
                piece.put(stored)

    def _begin(self, level: int, part: PacketPart) -> list[SentPiece]:
        """Return what is kept of a part's pieces, before it changes."""
        pieces = [self.sender(level, part, at) for at in range(len(part.pieces))]
        for piece in pieces:
            piece.begin(self.changes)
        return pieces

    def _stored(self, part: PacketPart, pieces: Sequence[SentPiece], left: Tensor) -> list[tuple[SentPiece, Tensor]]:
        """Return a part's pieces with their new residuals, of which `left` [e, rows, cols] fp32 consists."""
        split = left.view(-1).split([size for _, size in part.pieces]) if len(pieces) > 1 else (left,)
        return [
            (piece, self.home.store(piece.stored(one.view(piece.shape))))
            for piece, one in zip(pieces, split, strict=True)
        ]

    def _left(self, part: PacketPart, pieces: Sequence[SentPiece]) -> Tensor:
        """Return the residuals of a part's pieces on the device, fp32 [e, rows, cols], to be changed."""
        found = [self.value(piece) for piece in pieces]
        shape = part.num_experts, part.rows, part.cols
        return found[0].view(shape) if len(found) == 1 else torch.cat([one.view(-1) for one in found]).view(shape)

    # -- pieces -----------------------------------------------------------------------------------------------------

    def sender(self, level: int, part: PacketPart, at: int = 0) -> SentPiece:
        """Return what is kept of the part's piece number `at`, made at the first call."""
        piece, num_elements = part.pieces[at]
        if (found := self.sent.get((level, piece))) is not None:
            return found
        shape = (part.num_experts, part.rows, part.cols) if len(part.pieces) == 1 else (1, 1, num_elements)
        is_compact = part.dtype.itemsize == 2 and num_elements >= MIN_COMPACT
        stored = compact_shape(shape[0], shape[1] * shape[2]) if is_compact else shape
        return self._make(level, piece, shape, stored, torch.int16 if is_compact else torch.float32)

    def _make(
        self, level: int, piece: Piece, shape: tuple[int, int, int], stored: Sequence[int], dtype: torch.dtype
    ) -> SentPiece:
        codec = self.codecs[level]
        state = CodecState() if codec is None else codec.new_state(*shape, device=self.home.device)
        place = zlib.crc32(f"{self._place} {level} {piece}".encode())
        made = self.sent[level, piece] = SentPiece(shape, state, self.home.zeros(*stored, dtype=dtype), place)
        return made

    def value(self, piece: SentPiece) -> Tensor:
        """Return a copy of a residual on the device, fp32 [n, rows, cols]."""
        stored = self.home.fetch(piece.residual)
        if stored.dtype == torch.int16:
            return expand(stored, torch.empty(piece.shape, device=stored.device))
        return stored.clone() if stored is piece.residual else stored

    def squared_residual(self) -> float:
        """Return the sum of squares of what was not delivered yet."""
        self.home.wait()
        return sum(squared_norm(self.value(piece)) for piece in self.sent.values())

    def noted(self) -> Iterator[object]:
        """Yield all that `changes` may have a note of."""
        yield from self.sent.values()
        yield from self.received.values()

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def forget(self, pieces: Collection[tuple[int, Piece]] | None = None) -> None:
        """Drop residuals and the numbers of the senders' next packets, of all pieces or of these, by level."""
        for sent in [one for one in self.sent if pieces is None or one in pieces]:
            del self.sent[sent]
        for level, sender, piece in [one for one in self.received if pieces is None or (one[0], one[2]) in pieces]:
            del self.received[level, sender, piece]

    def state_dict(self) -> dict[str, list[dict[str, Any]]]:
        """Return everything as of the last applied step."""
        self.home.wait()
        return {
            "sent": [
                {"level": level, "piece": list(piece), **one.state_dict()} for (level, piece), one in self.sent.items()
            ],
            "received": [
                {"level": level, "sender": sender, "piece": list(piece), "expected": one.expected}
                for (level, sender, piece), one in self.received.items()
            ],
        }

    def load_state_dict(self, saved: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Restore what `state_dict` returned under the same codecs."""
        self.forget()
        for one in saved["sent"]:
            name, start = one["piece"]
            rows = one["shape"]
            stored = one["residual"]
            made = self._make(one["level"], (name, start), (rows[0], rows[1], rows[2]), stored.shape, stored.dtype)
            made.load_state_dict(one)
        for one in saved["received"]:
            name, start = one["piece"]
            piece = self.received[one["level"], one["sender"], (name, start)] = ReceivedPiece()
            piece.order.expected = one["expected"]


def residual_of(saved: Mapping[str, Any]) -> Tensor:
    """Return a residual that `SentPiece.state_dict` has saved, fp32 [n, rows, cols] on the host."""
    stored: Tensor = saved["residual"].cpu()
    if stored.dtype == torch.int16:
        return expand(stored, torch.empty(saved["shape"]))
    return stored
