# SPDX-License-Identifier: Apache-2.0
"""Refuses activation checkpointing inside an expert.

One expert module runs with the weights of each replica in turn, and holds them only during that call.  A checkpoint
inside it would recompute in the backward with other weights, and give wrong gradients without an error.
Checkpointing around the MoE layer is fine: the recomputation goes through the layer again.
"""

import sys
from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint as torch_checkpoint

from ds_hybridep.deepspeed import patches
from ds_hybridep.errors import UnsupportedError
from ds_hybridep.tokens.layer import computing_layer

_DEEPSPEED = patches.DEEPSPEED_CHECKPOINTING.partition(":")[0]


def install(changes: patches.Patches) -> None:
    """Refuse checkpoints in threads that compute experts, while any engine is attached."""
    # Non-re-entrant ones enter hooks for saved tensors.  Re-entrant ones apply a function, maybe a user's subclass.
    changes.share(patches.SAVED_TENSORS, "__enter__", _refusing(_is_checkpoint))
    changes.share(patches.TORCH_CHECKPOINTING, "apply", _refusing(lambda kind: True))
    if _DEEPSPEED in sys.modules:
        changes.share(patches.DEEPSPEED_CHECKPOINTING, "apply", _refusing(lambda kind: True))


def _is_checkpoint(hooks: Any) -> bool:
    is_torchs = isinstance(hooks, torch_checkpoint._checkpoint_hook)
    return is_torchs or getattr(hooks.pack_hook, "__module__", "") == _DEEPSPEED


def _refusing(is_checkpoint: Callable[[Any], bool]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, *args: Any, **kwargs: Any) -> Any:
            layer = computing_layer()
            if layer is not None and is_checkpoint(first):
                raise UnsupportedError(
                    f"{layer}: an expert uses activation checkpointing inside itself, which would recompute with the "
                    f"weights of another expert; checkpoint around the MoE layer instead, or set every hybridep "
                    f"domain_size to 1"
                )
            return original(first, *args, **kwargs)

        return call

    return wrap
