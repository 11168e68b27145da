# SPDX-License-Identifier: Apache-2.0
"""Dense gradients that codecs have not delivered: in checkpoints, and under another plan.

All ranks of a data-parallel group add to the same sum.  So a rank can add what it kept back under one plan to its own
gradients under the next plan, without sending it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from ds_hybridep.sync.buffers import Buffer, ParameterCodecs
from ds_hybridep.sync.counters import CodecCounters, CodecSums
from ds_hybridep.sync.feedback import Encoding, Feedback, StepChanges
from ds_hybridep.sync.flat import Span, hash_of, parts_of
from ds_hybridep.sync.home import Home

ALL_REDUCE = "all_reduce"  # the start of the keys of buffers whose sums all ranks get


@dataclass(eq=False)
class Kept:
    """Mean gradients of a run of one parameter's elements that wait for the next sum; unscaled, fp32, flat."""

    name: str
    start: int
    values: Tensor


class CodecMemory:
    """All that the codecs of one group keep, and what earlier plans and checkpoints have left.

    num_ranks: the size of the group.  levels: those that the group crosses, slowest first.
    """

    def __init__(self, changes: StepChanges, num_ranks: int, encoding: Encoding, levels: Sequence[int]) -> None:
        self.changes, self._encoding, self._levels = changes, encoding, tuple(levels)
        self.is_prescaled = False  # True if sums that all ranks get are means too
        self.buffers: dict[str, Buffer] = {}  # by operation, dtype and spans
        self.parameters: dict[str, ParameterCodecs] = {}  # by dtype and spans
        self.kept: list[Kept] = []
        self._num_ranks = num_ranks
        self._past = CodecCounters()  # counters of what was forgotten
        self._saved = _nothing()  # states of buffers that were not asked for yet

    @property
    def feedbacks(self) -> list[Feedback]:
        """Feedbacks of gradients."""
        return [one for buffer in self.buffers.values() for one in buffer.feedbacks.values()]

    @property
    def counters(self) -> CodecCounters:
        """What codecs did."""
        kept = [*self.feedbacks, *(codecs.feedback for codecs in self.parameters.values())]
        counters = [self._past, *(one.counters for one in kept)]
        return CodecCounters(*[sum(column) for column in zip(*map(astuple, counters), strict=True)])

    def sums(self) -> CodecSums:
        """Return what codecs did, and how much of the gradients they have not delivered."""
        encoders = [encoder for feedback in self.feedbacks for encoder in feedback.encoders.values()]
        undelivered = sum(encoder.squared_residual() for encoder in encoders)
        return CodecSums(**asdict(self.counters), squared_residual=undelivered)

    def forget(self) -> None:
        """Drop everything but the counters; all ranks must call."""
        self._past = self.counters
        self.buffers, self.parameters, self.kept, self._saved = {}, {}, [], _nothing()

    def gather_exactly(self) -> None:
        """Make the next gathers send every parameter as it is, because parameters may have changed on any rank."""
        self.parameters.clear()

    def buffer(self, operation: str, spans: Sequence[tuple[Span, ...]], like: Tensor) -> Buffer:
        """Return what is kept of one flat buffer of gradients.  spans: by slot."""
        key = f"{operation} {like.dtype} {hash_of(spans)}"
        if key not in self.buffers:
            codecs, is_on_host = self._encoding.gradient_codecs, self._encoding.is_on_host
            buffer = self.buffers[key] = Buffer(key, tuple(spans))
            if like.dtype != torch.float64 and any(codecs[level] for level in self._levels):
                gathers = operation == ALL_REDUCE
                buffer.encode(codecs, self._levels, like, is_on_host, self.changes, gathers=gathers)
                self._restore(buffer)
        return self.buffers[key]

    def parameter_codecs(
        self, spans: Sequence[tuple[Span, ...]], like: Tensor, level_to: Sequence[int | None], own_slot: int
    ) -> tuple[ParameterCodecs, bool]:
        """Return what is kept of one flat buffer of parameters, and whether it is new.  spans: by slot."""
        key = f"parameters {like.dtype} {hash_of(spans)}"
        if (known := self.parameters.get(key)) is not None:
            return known, False
        codecs = self._encoding.weight_codecs
        feedback = Feedback([parts_of(slot) for slot in spans], (None,) * len(codecs), Home(like.device), self.changes)
        made = ParameterCodecs(feedback, codecs, self._levels, level_to, own_slot, like.dtype)
        self.parameters[key] = made
        saved = self._saved["parameters"].pop(key, None)
        if saved is not None:
            made.load_state_dict(saved)
        return made, saved is None

    # -- what waits for the next sums -------------------------------------------------------------------------------

    def take_over(self, saved: Mapping[str, Any]) -> None:
        """Add to the next sums what codecs had kept back.  saved: from `capture`, under any plan."""
        self.kept += undelivered(saved)

    def add_kept(self, buffer: Buffer, sums: Sequence[Tensor], scale: float) -> None:
        """Add what waits for a buffer's spans, times the loss scale, to this rank's part of the sums by slot."""
        if not self.kept:
            return
        scale *= 1 if self.is_prescaled or not buffer.key.startswith(ALL_REDUCE) else self._num_ranks
        for slot, slot_spans in enumerate(buffer.spans):
            position = 0
            for span in slot_spans:
                for one in self.kept:
                    if one.name == span.name:
                        self._add(one, span, sums[slot][position : position + span.num_elements], scale)
                position += span.num_elements
        self.kept = [one for one in self.kept if bool(one.values.any())]

    def settle(self) -> None:
        """After an applied step, let loaded states that no buffer has asked for wait for the next sums."""
        if self._saved["buffers"]:
            self.take_over({**self.capture(), "buffers": self._saved["buffers"], "kept": []})
        self._saved = _nothing()

    def _add(self, one: Kept, span: Span, total: Tensor, scale: float) -> None:
        first = max(one.start, span.start)
        last = min(one.start + one.values.numel(), span.start + span.num_elements)
        if first >= last:
            return
        piece = one.values[first - one.start : last - one.start]
        total[first - span.start : last - span.start].add_(piece.to(total.device), alpha=scale)
        before = piece.clone()

        def undo() -> None:
            piece.copy_(before)
            if one not in self.kept:
                self.kept.append(one)

        self.changes.note((one, first), undo)
        piece.zero_()

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def capture(self) -> dict[str, Any]:
        """Return everything as of the last applied step, for a checkpoint or the next plan."""
        held = {
            buffer.key: {
                "spans": [[(s.name, s.start, s.num_elements) for s in slot] for slot in buffer.spans],
                **{name: feedback.gradient_state() for name, feedback in buffer.feedbacks.items()},
            }
            for buffer in self.buffers.values()
            if buffer.feedbacks
        }
        states = {key: codecs.state_dict() for key, codecs in self.parameters.items()}
        return {
            "buffers": {**self._saved["buffers"], **held},
            "parameters": {**self._saved["parameters"], **states},
            "kept": [(one.name, one.start, one.values) for one in self.kept],
            "is_prescaled": self.is_prescaled,
            "num_ranks": self._num_ranks,
        }

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Restore what `capture` returned under the same plan; each buffer is restored when it is asked for."""
        self._saved = {name: dict(saved[name]) for name in ("buffers", "parameters")}
        self.kept = [Kept(name, start, values.clone()) for name, start, values in saved["kept"]]

    def _restore(self, buffer: Buffer) -> None:
        saved = self._saved["buffers"].pop(buffer.key, {})
        for name, feedback in buffer.feedbacks.items():
            if name in saved:
                feedback.load_gradient_state(saved[name])


def _nothing() -> dict[str, dict[str, Any]]:
    return {"buffers": {}, "parameters": {}}


def undelivered(saved: Mapping[str, Any]) -> list[Kept]:
    """Return all that a rank had kept back according to `CodecMemory.capture`, as parts of a mean.

    Sums that all ranks get are divided by the number of ranks after the sum, ZeRO's before it.
    """
    found = [Kept(name, start, values.clone()) for name, start, values in saved["kept"]]
    for key, buffer in saved["buffers"].items():
        is_mean = saved["is_prescaled"] or not key.startswith(ALL_REDUCE)
        scale = 1.0 if is_mean else 1.0 / saved["num_ranks"]
        for feedback in (buffer.get("sums"), buffer.get("results")):
            for encoder in feedback["encoders"] if feedback is not None else ():
                flat = torch.cat([residual.reshape(-1).float() for residual in encoder["residuals"]]) * scale
                position = 0
                for name, start, num_elements in buffer["spans"][encoder["slot"]]:
                    values = flat[position : position + num_elements]
                    if bool(values.any()):
                        found.append(Kept(name, start, values.clone()))
                    position += num_elements
    return found
