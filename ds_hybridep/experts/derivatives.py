# SPDX-License-Identifier: Apache-2.0
"""First derivatives only: gradients that other ranks have sent have no graph here."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from ds_hybridep.errors import UnsupportedError


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Make the backward of an autograd function raise UnsupportedError where a graph of it is asked for.

    torch's own decorator of this name raises its error later, and only if the gradients that come in have a graph:
    those of a plain sum have none, and second derivatives would lack a part without a word.
    """

    @functools.wraps(backward)
    def call(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise UnsupportedError(
                "MoE layers have no second derivatives while hybridep is attached (create_graph=True, as for a "
                'gradient penalty); leave MoE layers out of it, or set "hybridep": {"enabled": false}'
            )
        return backward(ctx, *gradients)

    return call
