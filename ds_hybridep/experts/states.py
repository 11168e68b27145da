# SPDX-License-Identifier: Apache-2.0
"""The states of a layer's replicas."""

from enum import Enum


class Weights(Enum):
    """What a layer's replicas hold."""

    STALE = "not what the owners have"
    SHIPPING = "the owners' weights, which are on their way"
    FRESH = "the owners' weights"
    RELEASED = "nothing: another plan has taken over"


class Gradients(Enum):
    """Where gradients of a layer's replicas are."""

    EMPTY = "there are none"
    ACCUMULATING = "in the sums of this rank"
    RETURNING = "on their way to the owners"
