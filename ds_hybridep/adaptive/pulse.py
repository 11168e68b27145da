# SPDX-License-Identifier: Apache-2.0
"""Decides when to look at the plan: rank 0 watches its steps, and tells all ranks without making them wait.

Rank 0 sends its verdict as one bit during the next step.  All ranks read the bit before that step's optimizer.
"""

import statistics
from typing import Literal

import torch

from ds_hybridep.transport.channels import Purpose, Transfer, Transport

WARM_UP_STEPS = 2  # not measured: first calls and new connections are slow
TRIAL_STEPS = 3  # measured before a plan is judged
WINDOW = 9  # steps whose median is the usual step
FAR, NEAR = 1.6, 1.25  # a step longer or shorter by the first factor, or two in a row by the second, is a change


class StepWatch:
    """Says when it is time to look at the plan.

    For a plan on "trial", that is after TRIAL_STEPS steps.  For a "settled" plan, it is when steps differ from those
    of its first WINDOW steps.  A watch that is "off" never says so.
    """

    def __init__(self) -> None:
        self.try_plan(WARM_UP_STEPS)

    def try_plan(self, skipped: int = 0) -> None:
        """Measure the coming steps, except the first `skipped`."""
        self.mode: Literal["trial", "settled", "off"] = "trial"
        self._steps: list[float] = []
        self._skipped = skipped
        self._before = 1.0  # the last step divided by the usual one

    @property
    def step_s(self) -> float | None:
        """The usual step: the median of the steps kept so far; None before the first."""
        return statistics.median(self._steps) if self._steps else None

    def note(self, step_s: float) -> bool:
        """Note that a step took `step_s`.  Returns True if it is time to look at the plan."""
        if self._skipped > 0:
            self._skipped -= 1
            return False
        usual_s = self.step_s
        if self.mode != "settled" or usual_s is None or len(self._steps) < TRIAL_STEPS:
            self._steps = [*self._steps, step_s][-WINDOW:]
            return self.mode == "trial" and len(self._steps) >= TRIAL_STEPS
        now, before = step_s / usual_s, self._before
        is_longer, is_shorter = min(now, before) > NEAR, max(now, before) < 1 / NEAR
        if is_longer or is_shorter or not 1 / FAR < now < FAR:
            self._steps, self._before = [step_s], 1.0  # the first of the new usual steps
            return True
        if len(self._steps) < WINDOW:
            self._steps.append(step_s)
        self._before = now
        return False


class Pulse:
    """One bit from rank 0 to all others for each optimizer step; all ranks must make the same calls."""

    def __init__(self, transport: Transport) -> None:
        self._is_source = transport.rank == 0
        self._others = [rank for rank in range(transport.world_size) if rank != transport.rank]
        self._channel = (
            transport.channel("pulse", range(transport.world_size), background=True, hub=0) if self._others else None
        )
        self._value = torch.zeros(1, dtype=torch.uint8)
        self._transfer: Transfer | None = None

    def send(self, is_set: bool) -> None:
        """Start to send the step's bit; only rank 0's `is_set` counts.  Does not block if `take` was called before."""
        self.take()
        if self._is_source:
            self._value = torch.tensor([is_set], dtype=torch.uint8)
        if self._channel is not None:
            sends = [(rank, self._value) for rank in self._others] if self._is_source else []
            receives = [] if self._is_source else [(0, self._value)]
            self._transfer = self._channel.start(sends, receives, Purpose("control", "notice to look at the plan"))

    def take(self) -> bool:
        """The bit sent last, only once: then False.  Raises CommunicationError if it did not arrive in time."""
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.wait()
        is_set = bool(self._value.item())
        self._value.zero_()
        return is_set
