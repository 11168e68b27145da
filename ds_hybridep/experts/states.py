# SPDX-License-Identifier: Apache-2.0
"""The states of a layer's replicas, and where what they keep may be changed."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum

import torch


@contextmanager
def outliving_inference() -> Iterator[None]:
    """Let what is made inside be used in training too, if the forward runs under `torch.inference_mode`."""
    with torch.inference_mode(False), torch.no_grad():
        yield


def is_in_backward() -> bool:
    """True inside a running backward: a forward that runs there is a recomputation."""
    return torch._C._current_graph_task_id() != -1


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
    DROPPED = "on their way to the owners, who will not use them"
    UNDONE = "the same, and codecs forget that they were sent"
