# SPDX-License-Identifier: Apache-2.0
"""Exchanges the norms and overflow flags of a step in one message per level.

DeepSpeed asks for them one by one: a maximum to learn whether gradients overflowed, then a sum for each group of
parameters.  No question depends on an answer, so the code that asks runs twice.  The first run only notes its
questions.  Then the ranks exchange all of them together, and the second run gets the results.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ds_hybridep.sync.dense import GroupSync


class Agreements:
    """Numbers that the ranks of one optimizer agree on; all ranks ask the same questions in the same order."""

    def __init__(self) -> None:
        self._noted: list[tuple[GroupSync, Tensor, bool]] | None = None
        self._results: deque[tuple[tuple[GroupSync, bool, int], Tensor]] = deque()  # question, answer

    @property
    def is_under_way(self) -> bool:
        """True while questions are being noted, or while results wait for their questions."""
        return self._noted is not None or bool(self._results)

    def ask(self, sync: GroupSync, tensor: Tensor, is_max: bool) -> None:
        """Replace a few numbers by their sums or maxima.  While `prepare` notes questions, leave the numbers alone."""
        if self._noted is not None:
            self._noted.append((sync, tensor.detach().clone(), is_max))
            return
        if self._results and self._results[0][0] == (sync, is_max, tensor.numel()):
            _, result = self._results.popleft()
        else:
            self._results.clear()  # these answer other questions; all ranks clear them here
            (result,) = _exchange([(sync, tensor, is_max)])
        tensor.copy_(result.view_as(tensor))

    def prepare(self, *askers: Callable[[], Any]) -> None:
        """Run the askers to note their questions, and get the results for their second run in the same order."""
        self._noted = []
        try:
            for ask in askers:
                ask()
            noted = self._noted
        finally:
            self._noted = None
        answers = zip(noted, _exchange(noted), strict=True)
        self._results = deque(((sync, is_max, one.numel()), one) for (sync, _, is_max), one in answers)

    def forget(self) -> None:
        """Drop results that nobody has asked for: after an overflow, nobody needs norms."""
        self._results.clear()


def _exchange(noted: list[tuple[GroupSync, Tensor, bool]]) -> list[Tensor]:
    """Return the results in the order of the questions.  Questions of one group travel together."""
    results: dict[int, Tensor] = {}
    for group in dict.fromkeys(sync for sync, _, _ in noted):
        places = [at for at, (sync, _, _) in enumerate(noted) if sync is group]
        tensors = [noted[at][1].detach().reshape(-1).to("cpu", torch.float64) for at in places]
        sizes = [tensor.numel() for tensor in tensors]
        is_max = [torch.full((size,), noted[at][2]) for at, size in zip(places, sizes, strict=True)]
        found = group.reduce_numbers(torch.cat(tensors), torch.cat(is_max)).split(sizes)
        results |= zip(places, found, strict=True)
    return [results[at] for at in range(len(noted))]
