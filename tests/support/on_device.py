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
            moved, moved_by_name = _to("cuda", args), {name: _to("cuda", arg) for name, arg in kwargs.items()}
            result = value(*moved, **moved_by_name)
            torch.cuda.synchronize()
            pairs = [*zip(args, moved, strict=True), *((kwargs[name], arg) for name, arg in moved_by_name.items())]
            for arg, on_device in pairs:  # what was changed in place
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
