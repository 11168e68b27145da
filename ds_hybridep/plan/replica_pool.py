# SPDX-License-Identifier: Apache-2.0
"""Layers whose replicas a rank holds if it does not hold all; the runtime and the planner share this bookkeeping.

A pool has room for the layer that computes and the `depth` layers that follow it, in the direction of the pass.
Replicas stay until their room is needed, so nothing travels again when a pass turns round.  Four layers, depth 1:

    forward    0: gather 0 1    1: gather 2 for 0    2: gather 3 for 1    3: -
    backward   3: -             2: gather 1 for 3    1: gather 0 for 2    0: -

If weights have not changed, the next forward finds 0 and 1.
"""

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


class ReplicaPool:
    """Positions of layers whose replicas are held or on their way, oldest first.  The pool knows no tensors."""

    def __init__(self, num_layers: int, depth: int) -> None:
        self.num_layers = num_layers
        self.capacity = depth + 1
        self.held: list[int] = []

    def request(self, position: int, *, is_backward: bool) -> tuple[list[int], list[int]]:
        """Make room for a layer and those that follow it.  Returns (layers given back, layers to gather), in order."""
        step = -1 if is_backward else 1
        following = range(position, position + step * self.capacity, step)
        wanted = [layer for layer in following if 0 <= layer < self.num_layers]
        gathered = [layer for layer in wanted if layer not in self.held]
        spare = [layer for layer in self.held if layer not in wanted]
        given_back = spare[: max(len(self.held) + len(gathered) - self.capacity, 0)]
        self.held = [layer for layer in self.held if layer not in given_back] + gathered
        return given_back, gathered


def num_gathers(num_layers: int, depth: int, micro_steps: int) -> int:
    """Gathers in a step, one layer's weights each: all layers once, and in each later pass the layers without room."""
    return num_layers + (2 * micro_steps - 1) * max(num_layers - depth - 1, 0)
