# SPDX-License-Identifier: Apache-2.0
"""What codecs have kept back and no later packet will bring: added to the next gradients, once.

A residual goes into the next packet of the same sender.  Where there is no such packet, it becomes *undelivered*: a
run of a named parameter, in the units of the averaged gradient.

    another plan            of experts: senders give it to the owners (`collect`); of dense parameters: it stays here
    other hot experts       senders give owners what they have of those that are hot no more (`collect`)
    a checkpoint            holds it beside the residuals
    a load of another plan  residuals in the files become undelivered, whatever the number of ranks (`kept_back_in`)

From then on it waits at a parameter of this rank, and DeepSpeed sums it like any gradient:

    at the boundary         a hook adds it to this rank's own gradient of the parameter
    the step is applied     it is dropped            the step is skipped     it waits for the next gradient

An expert's parameter counts as a run of the stack of all experts of its layer, `stacked(layer, name)`, so that it has
the same name on every rank and in groups of every size.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ds_hybridep.geometry.slots import Span
from ds_hybridep.sync.error_feedback import residual_of
from ds_hybridep.sync.messages import PacketPart
from ds_hybridep.sync.stages import HotSlot, SlotKey
from ds_hybridep.sync.transaction import Transaction, accumulates
from ds_hybridep.sync.transfers import Slots
from ds_hybridep.transport.channels import Purpose, Transport


@dataclass(frozen=True, eq=False)
class Undelivered:
    """A run of what the averaged gradient of a parameter lacks: unscaled, fp32, flat.

    start: index of the first element in the flattened parameter.
    """

    name: str
    start: int
    values: Tensor


@dataclass(frozen=True, eq=False)
class GradientTarget:
    """A parameter of this rank that can take undelivered gradients: elements `start` to `stop` of `name`.

    share: one over the number of ranks that have the parameter and read all files of a checkpoint; None if each file
        is read by one rank.
    """

    name: str
    start: int
    stop: int
    parameter: nn.Parameter
    share: float | None = None


# Of a run (name, start, stop): the part of it that this rank takes over, 0 if other ranks do.
ShareOf = Callable[[str, int, int], float]
# By the name of a parameter in one rank's model: its name on all ranks, and its first element there.
Places = Mapping[str, tuple[str, int]]


def everything(_name: str, _start: int, _stop: int) -> float:
    """Take everything."""
    return 1.0


def stacked(layer: str, name: str) -> str:
    """Return the name of one parameter of all experts of a layer."""
    return f"{layer} {name}"


@dataclass(eq=False)
class _WaitingGradient:
    """What waits for the gradient of one parameter, until a step that uses it is applied.

    drop: removes this and its hook.
    """

    target: GradientTarget
    runs: list[Undelivered]
    drop: Callable[["_WaitingGradient"], None]
    is_added: bool = False  # to the gradient of the step that is under way
    rest: Tensor | None = None  # flat, what the gradient of that step had no room for
    handle: Any = None

    def add(self, run: Undelivered) -> None:
        """Let a run wait; with one of the same place it becomes one."""
        same = (one for one in self.runs if (one.start, one.values.numel()) == (run.start, run.values.numel()))
        if (known := next(same, None)) is not None:
            known.values.add_(run.values)
        else:
            self.runs.append(run)

    def commit(self) -> None:
        """The step was applied: only `rest` still waits."""
        if self.rest is None or not bool(self.rest.any()):
            self.drop(self)
        else:
            self.runs = [Undelivered(self.target.name, self.target.start, self.rest)]
            self.undo()

    def undo(self) -> None:
        self.is_added, self.rest = False, None


class UndeliveredGradients:
    """What waits at this rank's parameters; nothing at first.

    Args:
        targets: returns the parameters by their names in this rank's model.
        num_ranks: those over which DeepSpeed averages gradients.
        is_boundary: returns True if the running backward is the last before the optimizer step.
    """

    def __init__(
        self,
        targets: Callable[[], Mapping[str, GradientTarget]],
        num_ranks: int,
        is_boundary: Callable[[], bool],
        loss_scale: Callable[[], float],
        *,
        transaction: Transaction,
    ) -> None:
        self._find_targets, self._num_ranks, self._transaction = targets, num_ranks, transaction
        self._is_boundary, self._loss_scale = is_boundary, loss_scale
        self._waiting: list[_WaitingGradient] = []
        self.is_in_use = False  # equal on all ranks: whether anything was handed over

    def _targets(self) -> dict[str, list[GradientTarget]]:
        """Return this rank's parameters by name."""
        found: dict[str, list[GradientTarget]] = {}
        for target in self._find_targets().values():
            found.setdefault(target.name, []).append(target)
        return found

    def places(self) -> Places:
        """Return where parameters of this rank's model lie that have another name on all ranks."""
        targets = self._find_targets()
        return {name: (one.name, one.start) for name, one in targets.items() if name != one.name}

    def share_of(self, *, is_ours: bool) -> ShareOf:
        """Return what this rank takes of a file's residuals.  is_ours: what one rank takes, this one does."""
        targets = self._targets()

        def share_of(name: str, start: int, stop: int) -> float:
            shares = [one.share for one in targets.get(name, ()) if one.start < stop and start < one.stop]
            return (shares[0] or float(is_ours)) if shares else 0.0

        return share_of

    def records(self) -> list[Undelivered]:
        """Return what no applied step has used yet; the tensors are those in use."""
        return [run for waiting in self._waiting for run in waiting.runs]

    def add(self, records: Iterable[Undelivered]) -> None:
        """Let more wait for the next gradients; what is for parameters of other ranks is ignored."""
        self.is_in_use = True
        targets = self._targets()
        at = {(one.target.name, one.target.start): one for one in self._waiting if not one.is_added}
        for record in records:
            for target in targets.get(record.name, ()):
                first, last = max(record.start, target.start), min(record.start + record.values.numel(), target.stop)
                if first < last:
                    waiting = at.get((target.name, target.start)) or self._wait_at(target)
                    at[target.name, target.start] = waiting
                    values = record.values[first - record.start : last - record.start]
                    values = values.to(target.parameter.device, torch.float32, copy=True)
                    waiting.add(Undelivered(target.name, first, values))

    def _wait_at(self, target: GradientTarget) -> _WaitingGradient:
        parameter, waiting = target.parameter, _WaitingGradient(target, [], self._drop)
        is_trained = parameter.requires_grad
        parameter.requires_grad_(True)  # a frozen one takes no hook, and may be trained again
        waiting.handle = parameter.register_hook(partial(self._add_to, waiting))
        parameter.requires_grad_(is_trained)
        self._waiting.append(waiting)
        return waiting

    def _add_to(self, waiting: _WaitingGradient, gradient: Tensor) -> Tensor | None:
        if waiting.is_added or not self._is_boundary() or not accumulates(waiting.target.parameter):
            return None  # torch.autograd.grad, for one, returns a gradient that no step uses
        self._transaction.join(waiting)
        waiting.is_added = True
        scale = self._num_ranks * self._loss_scale()
        total = gradient.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        for run in waiting.runs:
            first = run.start - waiting.target.start
            total.view(-1)[first : first + run.values.numel()].add_(run.values, alpha=scale)
        if gradient.dtype == torch.float16:  # what does not fit waits for the next step
            limit = torch.finfo(torch.float16).max / 2
            fitting = torch.where(gradient.isfinite(), total.clamp(-limit, limit), total)
            waiting.rest, total = (total - fitting).nan_to_num(0.0, 0.0, 0.0).view(-1) / scale, fitting
        return total.to(gradient.dtype)

    def _drop(self, waiting: _WaitingGradient) -> None:
        waiting.handle.remove()
        if waiting in self._waiting:
            self._waiting.remove(waiting)

    def remove(self) -> list[Undelivered]:
        """Stop adding, and return what still waits."""
        records = self.records()
        for waiting in list(self._waiting):
            self._drop(waiting)
        return records


def collect(
    slots: Slots,
    ranks: Sequence[int],
    transport: Transport,
    num_ranks: int,
    *,
    parts: Mapping[SlotKey, Sequence[PacketPart]] | None = None,
) -> Callable[[], list[Undelivered]]:
    """Send what codecs have not delivered of the domain's experts to their owners; senders keep no residuals of it.

    All ranks of the domain must call, with nothing under way.

    Args:
        ranks: by slot, the rank that owns it.
        num_ranks: those over which DeepSpeed averages: residuals are parts of sums.
        parts: by slot as in `SlotCodecs.parts`, what to send; None: everything.

    Returns:
        A function that waits for what others have sent of this rank's experts, and returns it.
    """
    assert (codecs := slots.codecs) is not None, f"{slots.name}: nothing is lossy"
    gradients, own, sent_parts = codecs.feedback, slots.own_slot, codecs.parts if parts is None else parts
    others = [slot for slot in range(len(ranks)) if slot != own]
    # Two ranks hold each other's slots as a whole, or only the hot experts.
    is_far = {slot: not codecs.parts[slot] for slot in others}
    of_own = {far: sent_parts.get(HotSlot(own) if far else own, ()) for far in (False, True)}
    gradients.home.wait()
    sent = [
        (ranks[slot], _residuals(slots, sent_parts.get(HotSlot(slot) if is_far[slot] else slot, ())))
        for slot in others
    ]
    arrived = {slot: _zeros(slots, of_own[is_far[slot]]) for slot in others}
    gradients.forget(None if parts is None else _crossing(slots, parts))
    purpose = Purpose("expert_gradients", "hand-over of residuals", slots.name)
    receives = [(ranks[slot], one) for slot, one in arrived.items()]
    transfer = transport.channel("hand_over", ranks).start(sent, receives, purpose)

    def finish() -> list[Undelivered]:
        transfer.wait()
        found: list[Undelivered] = []
        for far in sorted(set(is_far.values())):
            spans = [span for part in of_own[far] for span in part.spans]
            # In the order of ranks: the same sum every time.
            total = sum((arrived[slot] for slot in others if is_far[slot] == far), torch.zeros(())) / num_ranks
            values = total.split([span.num_elements for span in spans]) if spans else ()
            found += [Undelivered(span.name, span.start, one) for span, one in zip(spans, values, strict=True)]
        return found

    return finish


def _zeros(slots: Slots, parts: Sequence[PacketPart]) -> Tensor:
    return torch.zeros(sum(part.fp32_bytes for part in parts) // 4, device=slots.device)


def _residuals(slots: Slots, parts: Sequence[PacketPart]) -> Tensor:
    """Return what this rank has left out of parts, flat, fp32."""
    assert (codecs := slots.codecs) is not None
    found = _zeros(slots, parts)
    for total, part in zip(found.split([part.fp32_bytes // 4 for part in parts]) if parts else (), parts, strict=True):
        for stage in slots.stages:
            residual = codecs.feedback.senders[stage.level].residual(part.spans[0])
            if residual is not None:
                total += residual.view(-1)
    return found


def _crossing(slots: Slots, parts: Mapping[SlotKey, Sequence[PacketPart]]) -> set[tuple[int, Span]]:
    """Return the spans of parts, by slot, with each level over which this rank sends or receives them."""
    return {
        (stage.level, span)
        for stage in slots.stages
        for peer in stage.peers
        for slot in (*peer.slots_here, *peer.slots_there)
        for part in parts.get(slot, ())
        for span in part.spans
    }


def kept_back(saved: Mapping[str, Any], scale: float, share_of: ShareOf, places: Places) -> Iterator[Undelivered]:
    """Yield the residuals of `ErrorFeedback.state_dict`, times `scale` and their share."""
    for sent in saved["sent"]:
        name, start = sent["piece"]
        name, first = places.get(name, (name, 0))
        if share := share_of(name, first + start, first + start + math.prod(sent["shape"])):
            yield Undelivered(name, first + start, residual_of(sent).reshape(-1) * (scale * share))


def kept_back_in(saved: Mapping[str, Any], num_ranks: int, share_of: ShareOf = everything) -> Iterator[Undelivered]:
    """Yield what a rank has not delivered according to its file.

    num_ranks: as for `collect`, of the job that saved the file: residuals of experts are parts of sums.
    """
    places = saved["places"]
    for layer in saved["experts"].values():
        yield from kept_back(layer["gradients"], 1.0 / num_ranks, share_of, places)
    for group in saved["synchronised"].values():
        for kind in ("sums", "results", "rounded"):
            yield from kept_back(group[kind], 1.0 if group["is_mean"] else 1.0 / num_ranks, share_of, places)
    for name, start, values in saved["undelivered"]:
        if share := share_of(name, start, start + values.numel()):
            yield Undelivered(name, start, values * share)
