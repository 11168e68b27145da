# SPDX-License-Identifier: Apache-2.0
"""Gets the overflow flag and the gradient norms of a step in one message per level.

DeepSpeed asks for them one by one, over all ranks: a maximum to learn whether gradients overflowed, then a sum for
each parameter group, then means over the copies of experts.  Here the first question brings the answers to all.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ds_hybridep.deepspeed.engine_view import Zero12View
from ds_hybridep.deepspeed.patches import ZERO_OPTIMIZER, Patches
from ds_hybridep.sync.group_sync import GroupSync


class GradientNorms:
    """Answers what an optimizer of ZeRO 1 or 2 asks about the averaged gradients.  group: all ranks."""

    def __init__(self, view: Zero12View, group: GroupSync, patches: Patches) -> None:
        self._view, self._optimizer, self._group = view, view.optimizer, group
        self._squares: Tensor | None = None  # of norms over all ranks, by parameter group, until they are asked for
        for name, replacement in (
            ("has_overflow", self._has_overflow),
            ("scaled_global_norm", self._global_norm),
            ("get_grad_norm_direct", self._norm),
            ("complete_grad_norm_calculation_for_cpu_offload", self._norm_on_host),
            ("_average_expert_grad_norms", self._average),
        ):
            patches.wrap(ZERO_OPTIMIZER, name, self._optimizer, replacement)

    def forget(self) -> None:
        """Call after a step: after an overflow, nobody has asked for norms."""
        self._squares = None

    def _has_overflow(self, _original: Callable[..., Any], *_args: Any, **_kwargs: Any) -> bool:
        """Return True if a gradient is inf or nan on any rank."""
        flag, squares = self._view.local_squares()
        numbers = torch.stack([flag, *(square.to(flag) for square in squares)]).cpu()
        found = self._group.reduce_numbers(numbers, is_max=torch.arange(len(numbers)) == 0)
        self._squares = found[1:].float()
        return bool(found[0])

    def _global_norm(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        changes_host_norms = self._view.is_on_host and self._has_muon
        if self._squares is None or changes_host_norms:  # nobody has asked for the flag, or norms have changed since
            self._has_overflow(original)
        try:
            return original(*args, **kwargs)
        finally:
            self._squares = None

    def _norm(self, original: Callable[..., Any], gradients: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the norm of one parameter group over all ranks; -1 if it is inf or nan, as DeepSpeed wants it."""
        at = next((at for at, one in self._optimizer.averaged_gradients.items() if one is gradients), None)
        return original(gradients, *args, **kwargs) if self._squares is None or at is None else self._answer(at)

    def _norm_on_host(self, original: Callable[..., Any], parameters: Any) -> Any:
        """Return the same, of the gradients of a list of `params_in_partition`."""
        at = next((at for at, one in enumerate(self._optimizer.params_in_partition) if one is parameters), None)
        return original(parameters) if self._squares is None or at is None else self._answer(at)

    def _answer(self, at: int) -> Tensor:
        assert self._squares is not None
        norm = self._squares[at].to(self._optimizer.device).pow(0.5)
        return norm.where(norm.isfinite(), -1.0)

    @property
    def _has_muon(self) -> bool:
        """True if gradients on the host change after DeepSpeed has asked for the flag."""
        return any(getattr(one, "use_muon", False) for group in self._optimizer.bit16_groups for one in group)

    def _average(self, _original: Callable[..., Any], _norms: Any) -> None:
        """Do nothing: all ranks have the same norms of experts."""
