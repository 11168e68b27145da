# SPDX-License-Identifier: Apache-2.0
"""Gradients that are dropped before any step uses them: replicas drop theirs, and codecs undo what they noted.

engine.zero_grad, optimizer.zero_grad    if they drop what waits for the step: `EngineView.drops_gradients`
module.zero_grad                         the same, of any module that holds all experts of an engine (start.py)
`parameter.grad = None`                  found out before the next forward
a backward that replaces them            `EngineView.replaces_gradients`
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from ds_hybridep.deepspeed.engine_view import view_of
from ds_hybridep.deepspeed.patches import ENGINE, ZERO_OPTIMIZER, Patches
from ds_hybridep.runtime.runtime import HybridRuntime
from ds_hybridep.sync.transaction import is_in_backward


class DroppedGradients:
    """Follows what an engine drops.

    Args:
        engine: a weak proxy.
        layers: its MoE layers by name.
        runtime: of the present plan; whoever changes the plan sets it.
    """

    def __init__(self, engine: Any, layers: Mapping[str, Any], runtime: HybridRuntime) -> None:
        self._engine, self._layers, self.runtime = engine, layers, runtime

    def bind_engine(self, patches: Patches) -> None:
        """Follow `engine.zero_grad`."""
        patches.wrap(ENGINE, "zero_grad", self._engine, partial(self._zero_grad, by_optimizer=False))

    def bind_optimizer(self, patches: Patches, optimizer: Any) -> None:
        """Follow `zero_grad` of DeepSpeed's optimizer."""
        patches.wrap(ZERO_OPTIMIZER, "zero_grad", optimizer, partial(self._zero_grad, by_optimizer=True))

    def _zero_grad(self, original: Callable[..., Any], *args: Any, by_optimizer: bool, **kwargs: Any) -> Any:
        sets_to_none = bool(args[0] if args else kwargs.get("set_to_none", True))
        if view_of(self._engine).drops_gradients(by_optimizer=by_optimizer, sets_to_none=sets_to_none):
            self.clear()
        return original(*args, **kwargs)

    def clear(self) -> None:
        """Drop the gradients of replicas because their owners drop theirs."""
        # ZeRO 1 has copied the returned gradients, and its step applies the copy whoever calls zero_grad.
        self.runtime.clear_gradients(drops_returned=not view_of(self._engine).holds_averaged())

    def in_grad(self) -> list[nn.Parameter]:
        """Return trainable parameters of owned experts if their gradients stay in `.grad` until the step; else []."""
        if not view_of(self._engine).keeps_in_grad:
            return []
        return [p for layer in self._layers.values() for p in layer.experts.parameters() if p.requires_grad]

    def at_output(
        self, is_boundary: Callable[[], bool], original: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Undo what an earlier backward changed if this one, at an output of the model, replaces its gradients.

        is_boundary: returns True if this backward is the last before the optimizer step.
        """
        is_new = self.runtime.transaction.is_of_an_earlier_backward()
        if is_new and view_of(self._engine).replaces_gradients(is_boundary=is_boundary()):
            self.runtime.undo_gradients()
        return original(*args, **kwargs)


def before_forward(dropped: DroppedGradients) -> Callable[..., None]:
    """Return a hook of the model: if no owner has a gradient any more, sums of replicas are cleared too."""
    # A function, not a method: a deep copy of the model copies its hooks, and must not copy the engine's gradients.

    def notice(_module: nn.Module, _inputs: Any) -> None:
        if is_in_backward():
            return
        owned = dropped.in_grad()
        if owned and all(parameter.grad is None for parameter in owned):
            dropped.clear()

    return notice
