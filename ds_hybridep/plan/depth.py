# SPDX-License-Identifier: Apache-2.0
"""How many layers' gradients are on their way at a time; the runtime and the planner share this."""

RETURNING_BYTES = 2**28  # of gradients on their way back: more than fits on a long link at a time


def return_depth(num_layers: int, layer_bytes: float, prefetch_depth: int) -> int:
    """Layers between the start of a gradient's return and the wait for it, if all replicas stay.

    Gradients that are on their way at the same time share one delay of the link.  Until the rank has waited for them,
    each layer needs `layer_bytes`, fp32, for the gradients that return.
    """
    return max(prefetch_depth, min(num_layers, int(RETURNING_BYTES // max(layer_bytes, 1))))
