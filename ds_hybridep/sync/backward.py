# SPDX-License-Identifier: Apache-2.0
"""Tells a backward whose gradients the optimizer step uses from one that returns them to its caller."""

import torch
from torch import Tensor

from ds_hybridep.errors import UnsupportedError


def accumulates(leaf: Tensor) -> bool:
    """Return True if the running backward, inside which it is called, adds to `leaf.grad`.

    False if `torch.autograd.grad` returns the gradient of this leaf instead, or if it is not one of `inputs`.

    leaf: a tensor without history.
    """
    if not leaf.requires_grad:  # since the forward
        return False
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:  # torch has no answer for a leaf whose gradient is returned
        return False


def refuse_partial(layer: str, leaf: Tensor) -> None:
    """Raise UnsupportedError unless the running backward is for all parameters.

    leaf: a leaf of the graph that nobody can ask for.
    """
    if not accumulates(leaf):
        raise UnsupportedError(
            f"{layer}: torch.autograd.grad (or a backward with `inputs`) asks for gradients of experts with copies on "
            f"other ranks, which works only without gradient codecs, and at an accumulation boundary without "
            f"micro-steps before it; leave these experts out of it, read `.grad` after engine.backward, or set every "
            f"domain_size to 1 and use no hot experts"
        )
