# SPDX-License-Identifier: Apache-2.0
"""Dense gradients that codecs have not delivered: in checkpoints, and under another plan.

Every rank of a data-parallel group adds to the same sum.  So what a rank has kept back under one plan, it adds to its
own gradients under the next, and nothing has to be sent.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_hybridep.sync.buffers import Buffer, ParameterCodecs
from ds_hybridep.sync.feedback import StepChanges
from ds_hybridep.sync.flat import Span

ALL_REDUCE = "all_reduce"  # keys of buffers whose sums all ranks get begin with it


@dataclass(eq=False)
class Kept:
    """Mean gradients of a run of one parameter's elements that wait for the next sum; unscaled, fp32, flat."""

    name: str
    start: int
    values: Tensor


class Residuals:
    """What one group's codecs have kept back, before this plan or in a checkpoint."""

    def __init__(self, changes: StepChanges) -> None:
        self.changes = changes
        self.kept: list[Kept] = []
        self._saved = _nothing()  # of buffers that were not asked for yet

    def add_kept(self, spans: Sequence[Sequence[Span]], sums: Sequence[Tensor], scale: float) -> None:
        """Add what waits for these spans, by slot, to this rank's part of the sums, times the loss scale."""
        if not self.kept:
            return
        for slot, slot_spans in enumerate(spans):
            position = 0
            for span in slot_spans:
                for one in self.kept:
                    if one.name == span.name:
                        self._add(one, span, sums[slot][position : position + span.num_elements], scale)
                position += span.num_elements
        self.kept = [one for one in self.kept if bool(one.values.any())]

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

    def clear(self) -> None:
        """Forget everything."""
        self.kept, self._saved = [], _nothing()

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def capture(self, buffers: Iterable[Buffer], parameters: Mapping[str, ParameterCodecs]) -> dict[str, Any]:
        """All that codecs keep, as of the last applied step."""
        held = {
            buffer.key: {
                "spans": [[(s.name, s.start, s.num_elements) for s in slot] for slot in buffer.spans],
                **{name: feedback.gradient_state() for name, feedback in buffer.feedbacks.items()},
            }
            for buffer in buffers
            if buffer.feedbacks
        }
        states = {key: codecs.state_dict() for key, codecs in parameters.items()}
        return {
            "buffers": {**self._saved["buffers"], **held},
            "parameters": {**self._saved["parameters"], **states},
            "kept": [(one.name, one.start, one.values) for one in self.kept],
        }

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Go on with what `capture` saw under the same plan, as soon as each buffer is asked for."""
        self._saved = {name: dict(saved[name]) for name in ("buffers", "parameters")}
        self.kept = [Kept(name, start, values.clone()) for name, start, values in saved["kept"]]

    def restore(self, buffer: Buffer) -> None:
        """For a new buffer."""
        saved = self._saved["buffers"].pop(buffer.key, {})
        for name, feedback in buffer.feedbacks.items():
            if name in saved:
                feedback.load_gradient_state(saved[name])

    def restore_parameters(self, key: str, codecs: ParameterCodecs) -> bool:
        """False where nothing was saved."""
        saved = self._saved["parameters"].pop(key, None)
        if saved is not None:
            codecs.load_state_dict(saved)
        return saved is not None

    def settle(self, num_ranks: int) -> None:
        """A step was applied: what was loaded and no buffer has asked for waits for the next sums."""
        if self._saved["buffers"]:
            self.kept += undelivered({**self._saved, "kept": []}, num_ranks)
        self._saved = _nothing()


def _nothing() -> dict[str, dict[str, Any]]:
    return {"buffers": {}, "parameters": {}}


def undelivered(saved: Mapping[str, Any], num_ranks: int) -> list[Kept]:
    """What a rank had kept back in all, from what `GroupSync.capture` saw, as part of a mean.

    num_ranks: by which sums for all ranks were divided afterwards; ZeRO divides before.
    """
    found = [Kept(name, start, values.clone()) for name, start, values in saved["kept"]]
    for key, buffer in saved["buffers"].items():
        is_mean = saved.get("is_prescaled", False) or not key.startswith(ALL_REDUCE)
        scale = 1.0 if is_mean else 1.0 / num_ranks
        for feedback in (buffer.get("sums"), buffer.get("results")):
            for encoder in feedback["encoders"] if feedback is not None else ():
                flat = torch.cat([residual.reshape(-1) for residual in encoder["residuals"]]) * scale
                position = 0
                for name, start, num_elements in buffer["spans"][encoder["slot"]]:
                    values = flat[position : position + num_elements]
                    if bool(values.any()):
                        found.append(Kept(name, start, values.clone()))
                    position += num_elements
    return found
