# SPDX-License-Identifier: Apache-2.0
"""How many layers' gradients are on their way at a time; the runtime and the planner share this."""

RETURNING_BYTES = 2**28  # of gradients on their way back: more than fits on a long link at a time


def return_depth(num_layers: int, layer_bytes: float, prefetch_depth: int) -> int:
    """Layers between the start of a gradient's return and the wait for it, if all replicas stay.

    Gradients that are on their way at the same time share one delay of the link.  Until the rank has waited for them,
    each layer needs `layer_bytes`, fp32, for the gradients that return.
    """
    return max(prefetch_depth, min(num_layers, int(RETURNING_BYTES // max(layer_bytes, 1))))


def leaving_depth(num_levels: int, depth: int, prefetch_depth: int) -> int:
    """Number of layers, beside the current one, that hold sums of replicas' gradients at a time, with one micro-step.

    If a domain spans one level, sums are in a message as soon as their return starts.  Sums that cross several levels
    may wait for earlier layers, at most `depth` of them.
    """
    return prefetch_depth if num_levels == 1 else depth
