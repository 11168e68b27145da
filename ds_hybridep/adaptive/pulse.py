# SPDX-License-Identifier: Apache-2.0
"""Notices that a job's steps have become longer or shorter, and tells all ranks without making them wait.

Steps of all ranks end together, so rank 0 watches its own.  What it finds after one optimizer step travels while the
next one computes, and all ranks read it before that one's optimizer.
"""

import statistics
from collections import deque

import torch

from ds_hybridep.transport.channels import Purpose, Transfer, Transport

WINDOW = 9  # steps that say what is usual
LEAST_STEPS = 3  # that must have been seen before one can be unusual
FAR, NEAR = 1.6, 1.25  # a step longer or shorter by the first factor, or two in a row by the second


class StepWatch:
    """Says when steps are not what they were."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=WINDOW)
        self._before = 1.0  # the last step over the usual one

    def note(self, step_s: float) -> bool:
        """One step took `step_s`; True where this is a change.  What is usual is learnt anew after one."""
        if len(self._recent) < LEAST_STEPS:
            self._recent.append(step_s)
            self._before = 1.0
            return False
        now = step_s / statistics.median(self._recent)
        is_longer, is_shorter = min(now, self._before) > NEAR, max(now, self._before) < 1 / NEAR
        if is_longer or is_shorter or not 1 / FAR < now < FAR:
            self.forget()
            return True
        self._recent.append(step_s)
        self._before = now
        return False

    def forget(self) -> None:
        """Other steps are to be expected from now on."""
        self._recent.clear()


class Pulse:
    """One bit from rank 0 to all others for each optimizer step; all ranks must make the same calls."""

    def __init__(self, transport: Transport) -> None:
        self._is_source = transport.rank == 0
        self._others = [rank for rank in range(transport.world_size) if rank != transport.rank]
        self._channel = (
            transport.channel("pulse", range(transport.world_size), background=True) if self._others else None
        )
        self._value = torch.zeros(1, dtype=torch.uint8)
        self._transfer: Transfer | None = None

    def send(self, is_set: bool) -> None:
        """Start the step's bit on its way; what ranks other than 0 give is not looked at.  Never blocks."""
        self.take()
        if self._is_source:
            self._value = torch.tensor([is_set], dtype=torch.uint8)
        if self._channel is not None:
            sends = [(rank, self._value) for rank in self._others] if self._is_source else []
            receives = [] if self._is_source else [(0, self._value)]
            self._transfer = self._channel.start(sends, receives, Purpose("control", "notice of changed steps"))

    def take(self) -> bool:
        """The bit that was sent last, once.

        Raises:
            CommunicationError: it did not come within the time limit.
        """
        transfer, self._transfer = self._transfer, None
        if transfer is not None:
            transfer.wait()
        is_set = bool(self._value.item())
        self._value.zero_()
        return is_set
