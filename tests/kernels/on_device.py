# SPDX-License-Identifier: Apache-2.0
"""Kernels of a GPU called with CPU tensors, so that one test serves both."""

from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor


class on_cuda:
    """`kernels` whose methods take and return CPU tensors, and compute on the GPU."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._kernels, name)
        if not callable(value):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            moved = [_to("cuda", arg) for arg in args]
            result = value(*moved, **{key: _to("cuda", arg) for key, arg in kwargs.items()})
            torch.cuda.synchronize()
            for arg, on_device in zip(args, moved, strict=True):  # what was changed in place
                if isinstance(arg, Tensor):
                    arg.copy_(on_device)
            return _to("cpu", result)

        return call


def _to(device: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple | list):
        return type(value)(_to(device, part) for part in value)
    if is_dataclass(value):
        return replace(value, **{field.name: _to(device, getattr(value, field.name)) for field in fields(value)})
    return value
