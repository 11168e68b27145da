# SPDX-License-Identifier: Apache-2.0
"""What the codecs of one data-parallel group keep: in use, in checkpoints, and under another plan.

All ranks of a data-parallel group add to the same sum.  So a rank can add what it kept back under one plan to its own
gradients under the next plan, without sending it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ds_hybridep.sync.buffers import Buffer, ParameterCodecs, SumFeedback
from ds_hybridep.sync.counters import CodecCounters, CodecSums
from ds_hybridep.sync.feedback import Encoding, Feedback
from ds_hybridep.sync.flat import Span, cut, even_bounds, hash_of, parts_of
from ds_hybridep.sync.gradients import GradientMemory, StepChanges, residual_of
from ds_hybridep.sync.home import Home
from ds_hybridep.sync.mirrors import is_patched

MOST_BUFFERS = 64  # whose layouts are remembered; they follow from their spans


@dataclass(eq=False)
class Kept:
    """Mean gradients of a run of one parameter's elements that wait for the next sum; unscaled, fp32, flat.

    is_added: they are in the sums of the step under way.
    """

    name: str
    start: int
    values: Tensor
    is_added: bool = False


class CodecMemory:
    """All that the codecs of one group keep, and what earlier plans and checkpoints have left.

    num_ranks: the size of the group.  levels: those that the group crosses, slowest first.
    """

    def __init__(
        self, name: str, rank: int, changes: StepChanges, num_ranks: int, encoding: Encoding, levels: Sequence[int],
        device: torch.device,
    ) -> None:  # fmt: skip
        self.changes, self._encoding, self._levels = changes, encoding, tuple(levels)
        self.is_mean = False  # True if the sums are means: DeepSpeed divides before it sums
        self.sums_for = ""  # whom DeepSpeed's sums are for, and their type: with others, what is kept has other pieces
        codecs = encoding.gradient_codecs
        slowest = next((codecs[level] for level in levels if codecs[level] is not None), None)
        home = Home(device, encoding.is_on_host)
        # What is kept on the sums' way to the owners, on their way to all ranks, and of sums that the owner rounds.
        self.sums = GradientMemory(f"{name}, sums", codecs, home, changes, rank)
        self.results = GradientMemory(f"{name}, results", (slowest,), home, changes, rank)
        self.rounded = GradientMemory(f"{name}, rounded", (None,), home, changes, rank)
        self.parameters: dict[str, ParameterCodecs] = {}  # by dtype and spans
        self.kept: dict[str, list[Kept]] = {}  # by name
        self._counters = CodecCounters()  # of gradients
        self._past = CodecCounters()  # counters of parameters that were forgotten
        self._buffers: dict[str, Buffer] = {}  # by operation, dtype and spans, the latest ones
        self._slices: dict[Span, list[tuple[int, Span]]] = {}  # of sums for all ranks: (slot, part of the span)
        self._saved_parameters: dict[str, Any] = {}  # states of buffers that were not asked for yet
        self._num_ranks = num_ranks

    @property
    def counters(self) -> CodecCounters:
        """What codecs did."""
        counters = [self._counters, self._past, *(codecs.feedback.counters for codecs in self.parameters.values())]
        return CodecCounters(*[sum(column) for column in zip(*map(astuple, counters), strict=True)])

    @property
    def squared_residual(self) -> float:
        """The sum of squares of the gradients that were not delivered yet."""
        return sum(one.squared_residual() for one in (self.sums, self.results, self.rounded))

    def stats(self) -> CodecSums:
        """Return what codecs did, and how much of the gradients they have not delivered."""
        return CodecSums(**asdict(self.counters), squared_residual=self.squared_residual)

    def forget(self) -> None:
        """Drop everything but the counters; all ranks must call."""
        for one in (self.sums, self.results, self.rounded):
            one.forget()
        self.gather_exactly()
        self.kept, self._slices = {}, {}

    def gather_exactly(self) -> None:
        """Make the next gathers send every parameter as it is, because parameters may have changed on any rank."""
        counters = [self._past, *(codecs.feedback.counters for codecs in self.parameters.values())]
        self._past = CodecCounters(*[sum(column) for column in zip(*map(astuple, counters), strict=True)])
        self.parameters.clear()
        self._saved_parameters = {}

    # -- buffers ----------------------------------------------------------------------------------------------------

    def buffer(self, operation: str, spans: Sequence[tuple[Span, ...]], like: Tensor) -> Buffer:
        """Return the layout of a flat buffer of gradients.  spans: by slot; without a name they travel as they are."""
        key = f"{operation} {like.dtype} {hash_of(spans)}"
        found = self._buffers.pop(key, None)
        if found is None:
            found = Buffer(key, tuple(spans))
            is_known = all(span.name for slot in spans for span in slot)
            if is_known and like.dtype != torch.float64 and self.results.is_lossy:
                parts = [parts_of(slot, like.dtype) for slot in spans]
                found.sums = Feedback(parts, self.sums, "gradient", self._counters)
                found.results = SumFeedback(parts, self.results, "gradient", self._counters)
                if is_patched(like):
                    found.rounded = Feedback(parts, self.rounded, "gradient", self._counters)
        self._buffers[key] = found
        while len(self._buffers) > MOST_BUFFERS:
            self._buffers.pop(next(iter(self._buffers)))
        return found

    def slices(self, spans: Sequence[Span]) -> list[tuple[int, Span]]:
        """Cut the spans of a flat buffer into (slot, span), so that slots get equal shares.

        A tensor is cut as it was the first time, whatever buffer it is in: then its residuals fit.
        """
        new = [span for span in spans if span not in self._slices]
        by_slot = cut(new, even_bounds(new, self._num_ranks))
        sliced = [(slot, part) for slot, parts in enumerate(by_slot) for part in parts]
        for span in new:
            rest = span.num_elements
            self._slices[span] = []
            while rest:
                slot, part = sliced.pop(0)
                self._slices[span].append((slot, part))
                rest -= part.num_elements
        return [one for span in spans for one in self._slices[span]]

    def parameter_codecs(
        self, spans: Sequence[tuple[Span, ...]], like: Tensor, level_to: Sequence[int | None], own_slot: int
    ) -> tuple[ParameterCodecs, bool]:
        """Return what is kept of one flat buffer of parameters, and whether it is new.  spans: by slot."""
        key = f"parameters {like.dtype} {hash_of(spans)}"
        if (known := self.parameters.get(key)) is not None:
            return known, False
        codecs = self._encoding.weight_codecs
        nothing = GradientMemory("", (None,) * len(codecs), Home(like.device), self.changes, 0)
        feedback = Feedback([parts_of(slot) for slot in spans], nothing)
        made = ParameterCodecs(feedback, codecs, self._levels, level_to, own_slot, like.dtype)
        self.parameters[key] = made
        saved = self._saved_parameters.pop(key, None)
        if saved is not None:
            made.load_state_dict(saved)
        return made, saved is None

    # -- what waits for the next sums -------------------------------------------------------------------------------

    def take_over(self, saved: Mapping[str, Any]) -> None:
        """Add to the next sums what codecs had kept back.  saved: from `capture`, under any plan."""
        self._wait_for_sums(undelivered(saved))

    def add_kept(self, buffer: Buffer, sums: Sequence[Tensor], scale: float) -> None:
        """Add what waits for a buffer's spans, times the loss scale, to this rank's part of the sums by slot."""
        if not self.kept:
            return
        scale *= 1 if self.is_mean else self._num_ranks
        for slot, slot_spans in enumerate(buffer.spans):
            position = 0
            for span in slot_spans:
                place = sums[slot][position : position + span.num_elements]
                for one in [one for one in self.kept.get(span.name, ()) if not one.is_added]:
                    self._add(one, span, place, scale)
                position += span.num_elements

    def _add(self, one: Kept, span: Span, place: Tensor, scale: float) -> None:
        first = max(one.start, span.start)
        last = min(one.start + one.values.numel(), span.start + span.num_elements)
        if first >= last:
            return
        # The rest goes on waiting.
        sizes = [first - one.start, last - first, one.start + one.values.numel() - last]
        before, inside, behind = one.values.split(sizes)
        added = Kept(one.name, first, inside, is_added=True)
        rest = [Kept(one.name, start, values) for start, values in ((one.start, before), (last, behind))]
        self.kept[one.name].remove(one)
        self.kept[one.name] += [added, *(left for left in rest if left.values.numel())]
        place[first - span.start : last - span.start].add_(inside.to(place.device), alpha=scale)
        self.changes.note(added, partial(setattr, added, "is_added", False), partial(self._drop, added))

    def _drop(self, added: Kept) -> None:
        waiting = self.kept.get(added.name, [])
        if added in waiting:
            waiting.remove(added)
            if not waiting:
                del self.kept[added.name]

    def _wait_for_sums(self, found: Sequence[Kept]) -> None:
        for one in found:
            self.kept.setdefault(one.name, []).append(one)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def capture(self) -> dict[str, Any]:
        """Return everything as of the last applied step, for a checkpoint or the next plan."""
        states = {key: codecs.state_dict() for key, codecs in self.parameters.items()}
        return {
            "sums": self.sums.state_dict(),
            "results": self.results.state_dict(),
            "rounded": self.rounded.state_dict(),
            "parameters": {**self._saved_parameters, **states},
            "slices": [
                [*astuple(span), [[slot, part.start, part.num_elements] for slot, part in parts]]
                for span, parts in self._slices.items()
            ],
            "kept": [(one.name, one.start, one.values) for waiting in self.kept.values() for one in waiting],
            "is_mean": self.is_mean,
            "num_ranks": self._num_ranks,
        }

    def resume(self, saved: Mapping[str, Any]) -> None:
        """Restore what `capture` returned under the same plan; each piece is restored when it is asked for."""
        self.forget()
        self.sums.load_state_dict(saved["sums"])
        self.results.load_state_dict(saved["results"])
        self.rounded.load_state_dict(saved["rounded"])
        self._saved_parameters = dict(saved["parameters"])
        for name, shape, *run, parts in saved["slices"]:
            found = [(slot, Span(name, tuple(shape), start, num_elements)) for slot, start, num_elements in parts]
            self._slices[Span(name, tuple(shape), *run)] = found
        self._wait_for_sums([Kept(name, start, values.clone()) for name, start, values in saved["kept"]])


def undelivered(saved: Mapping[str, Any]) -> list[Kept]:
    """Return all that a rank had kept back according to `CodecMemory.capture`, as parts of a mean."""
    found = [Kept(name, start, values.clone()) for name, start, values in saved["kept"]]
    scale = 1.0 if saved["is_mean"] else 1.0 / saved["num_ranks"]
    for piece in (piece for kept in ("sums", "results", "rounded") for piece in saved[kept]["sent"]):
        values = residual_of(piece).reshape(-1) * scale
        if bool(values.any()):
            name, start = piece["piece"]
            found.append(Kept(name, start, values))
    return found
