# SPDX-License-Identifier: Apache-2.0
"""Which layers' replicas a rank holds where it does not hold all: bookkeeping shared by the runtime and the planner.

A pool has room for the layer that computes and the `depth` layers that follow it, in the direction of the pass.
Replicas stay until their room is needed, so where a pass turns round nothing travels again.  Four layers, depth 1:

    forward    0: gather 0 1    1: gather 2 for 0    2: gather 3 for 1    3: -
    backward   3: -             2: gather 1 for 3    1: gather 0 for 2    0: -

The next forward, if weights have not changed, finds 0 and 1.
"""

RETURNING_BYTES = 2**28  # of returned gradients: more than fits on a long link at a time


def return_depth(num_layers: int, layer_bytes: float, prefetch_depth: int) -> int:
    """Layers between the start of a gradient's return and the wait for it, where all replicas stay.

    What is on its way at a time shares one delay of the link.  Until it is waited for, every layer has room for what
    returns: `layer_bytes`, fp32.
    """
    return max(prefetch_depth, min(num_layers, int(RETURNING_BYTES // max(layer_bytes, 1))))


def leaving_depth(num_levels: int, depth: int, prefetch_depth: int) -> int:
    """Layers beside one whose sums of replicas' gradients are there at a time, with one micro-step.

    Where a domain spans one level, sums are in a message as soon as their return starts.  What crosses several levels
    may wait for earlier layers, of which there are at most `depth`.
    """
    return prefetch_depth if num_levels == 1 else depth


class ReplicaPool:
    """Layers whose replicas are held or on their way, by position, oldest first; nothing in it knows of tensors."""

    def __init__(self, num_layers: int, depth: int) -> None:
        self.num_layers = num_layers
        self.capacity = depth + 1
        self.held: list[int] = []

    def request(self, position: int, *, is_backward: bool) -> tuple[list[int], list[int]]:
        """Make room for a layer and those that follow it; returns (given back, to be gathered), each in order."""
        step = -1 if is_backward else 1
        following = range(position, position + step * self.capacity, step)
        wanted = [layer for layer in following if 0 <= layer < self.num_layers]
        gathered = [layer for layer in wanted if layer not in self.held]
        spare = [layer for layer in self.held if layer not in wanted]
        given_back = spare[: max(len(self.held) + len(gathered) - self.capacity, 0)]
        self.held = [layer for layer in self.held if layer not in given_back] + gathered
        return given_back, gathered


def num_gathers(num_layers: int, depth: int, micro_steps: int) -> int:
    """Gathers of one layer's weights in a step: all layers once, and in later passes those without room."""
    return num_layers + (2 * micro_steps - 1) * max(num_layers - depth - 1, 0)
