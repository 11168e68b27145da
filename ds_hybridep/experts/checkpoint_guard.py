# SPDX-License-Identifier: Apache-2.0
"""Refuses activation checkpointing inside an expert.

An expert runs with the weights of each replica in turn, put into one module for the length of the call.  A checkpoint
inside it would recompute in the backward, with whatever weights the module holds then: wrong gradients, no error.
Checkpointing around the MoE layer is fine: the recomputation goes through the layer again.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as torch_checkpoint

from ds_hybridep.errors import UnsupportedError

DEEPSPEED_CHECKPOINTING = "deepspeed.runtime.activation_checkpointing.checkpointing"


@contextmanager
def refuse_checkpoints(layer: str) -> Iterator[None]:
    """Raise UnsupportedError if a checkpoint begins inside the body."""

    def refuse(*_args: Any, **_kwargs: Any) -> Any:
        raise UnsupportedError(
            f"{layer}: an expert uses activation checkpointing inside itself, which would recompute with the weights "
            f"of another expert; checkpoint around the MoE layer instead, or set every hybridep domain_size to 1"
        )

    def enter(hooks: saved_tensors_hooks) -> Any:
        is_torchs = isinstance(hooks, torch_checkpoint._checkpoint_hook)
        if is_torchs or getattr(hooks.pack_hook, "__module__", "") == DEEPSPEED_CHECKPOINTING:
            refuse()
        return original_enter(hooks)

    # Non-re-entrant checkpoints enter hooks for saved tensors, re-entrant ones apply a function; DeepSpeed has both.
    original_enter: Callable[[saved_tensors_hooks], Any] = saved_tensors_hooks.__enter__
    deepspeed_checkpoint = sys.modules.get(DEEPSPEED_CHECKPOINTING)
    functions = [m.CheckpointFunction for m in (torch_checkpoint, deepspeed_checkpoint) if m is not None]
    original_apply = [vars(function).get("apply") for function in functions]
    saved_tensors_hooks.__enter__ = enter
    for function in functions:
        function.apply = refuse
    try:
        yield
    finally:
        saved_tensors_hooks.__enter__ = original_enter
        for function, apply in zip(functions, original_apply, strict=True):
            if apply is None:
                del function.apply  # what remains is the inherited one
            else:
                function.apply = apply
