# SPDX-License-Identifier: Apache-2.0
"""Refuses activation checkpointing inside an expert.

One expert module runs with the weights of each replica in turn, and holds them only during that call.  A checkpoint
inside it would recompute in the backward with other weights, and give wrong gradients without an error.
Checkpointing around the MoE layer is fine: the recomputation goes through the layer again.
"""

import sys
from collections.abc import Callable
from typing import Any

from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint as torch_checkpoint

from ds_hybridep.errors import UnsupportedError
from ds_hybridep.integration.patches import DEEPSPEED_CHECKPOINTING, TORCH_CHECKPOINTING, Patches
from ds_hybridep.tokens.layer import computing_layer


def install(patches: Patches) -> None:
    """Refuse checkpoints in threads that compute experts, while any engine is attached."""
    patches.share("torch.autograd.graph:saved_tensors_hooks", "__enter__", _enter)
    patches.share(f"{TORCH_CHECKPOINTING}:CheckpointFunction", "apply", _apply)
    if DEEPSPEED_CHECKPOINTING in sys.modules:
        patches.share(f"{DEEPSPEED_CHECKPOINTING}:CheckpointFunction", "apply", _apply)


def _enter(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse non-re-entrant checkpoints of torch and DeepSpeed, which enter hooks for saved tensors."""

    def enter(hooks: saved_tensors_hooks) -> Any:
        is_torchs = isinstance(hooks, torch_checkpoint._checkpoint_hook)
        if is_torchs or getattr(hooks.pack_hook, "__module__", "") == DEEPSPEED_CHECKPOINTING:
            _refuse()
        return original(hooks)

    return enter


def _apply(original: Callable[..., Any]) -> Callable[..., Any]:
    """Refuse re-entrant checkpoints, which apply a function; `kind` may be a user's own subclass."""

    def apply(kind: type, *args: Any, **kwargs: Any) -> Any:
        _refuse()
        return original(kind, *args, **kwargs)

    return apply


def _refuse() -> None:
    layer = computing_layer()
    if layer is not None:
        raise UnsupportedError(
            f"{layer}: an expert uses activation checkpointing inside itself, which would recompute with the weights "
            f"of another expert; checkpoint around the MoE layer instead, or set every hybridep domain_size to 1"
        )
