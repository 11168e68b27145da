# SPDX-License-Identifier: Apache-2.0
"""Handles parameters of which ZeRO-3 keeps only a part on this rank.

DeepSpeed stores its data and methods for such a parameter on the parameter itself.  Other parameters have none of
these attributes, and the functions here leave them as they are.
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


def give_full_shapes(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Give parameters that are not whole here their full shape, over one element of memory, and return them.

    Autograd asks for the shape twice: when a parameter enters a graph, and when its gradient is accumulated.
    """
    away = [parameter for parameter in parameters if _is_away(parameter)]
    for parameter in away:
        parameter.data = parameter.data.new_zeros(1).expand(full_shape(parameter))
    return away


def drop_full_shapes(parameters: Sequence[nn.Parameter]) -> None:
    """Undo `give_full_shapes`: leave parameters without data, as ZeRO-3 does."""
    for parameter in parameters:
        if _is_away(parameter):
            parameter.data = parameter.data.new_empty(0)


def _is_away(parameter: Any) -> bool:
    # True in any state but whole.  ZeRO-3 may have fetched it ahead, for modules that ran in earlier forwards.
    return is_partitioned(parameter) and bool(parameter.ds_status.name != "AVAILABLE")
