# SPDX-License-Identifier: Apache-2.0
"""Parameters of which ZeRO-3 keeps only a part on this rank.

DeepSpeed puts what it knows of such a parameter, and what it does with it, on the parameter itself; others have none
of that, and everything here takes them as they are.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def full_shape(parameter: nn.Parameter) -> torch.Size:
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def is_partitioned(parameter: nn.Parameter) -> bool:
    return hasattr(parameter, "ds_id")


@contextmanager
def gathered(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Context in which parameters are whole; the ranks that share them must enter it together."""
    away: list[Any] = [parameter for parameter in parameters if _is_away(parameter)]
    if away:
        away[0].all_gather(param_list=away)
    try:
        yield
    finally:
        if away:
            away[0].partition(param_list=away)


def stand_in(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Give parameters that are away their whole shape, over one element of memory, and return them.

    Autograd asks for the shape twice: when a parameter enters a graph, and when its gradient is accumulated.
    """
    away = [parameter for parameter in parameters if _is_away(parameter)]
    for parameter in away:
        parameter.data = parameter.data.new_zeros(1).expand(full_shape(parameter))
    return away


def take_away(parameters: Sequence[nn.Parameter]) -> None:
    """The end of `stand_in`: no data, as ZeRO-3 leaves it."""
    for parameter in parameters:
        if _is_away(parameter):
            parameter.data = parameter.data.new_empty(0)


def _is_away(parameter: Any) -> bool:
    # Neither whole nor on its way: ZeRO-3 fetches ahead for modules that ran in earlier forwards.
    return is_partitioned(parameter) and bool(parameter.ds_status.name != "AVAILABLE")
