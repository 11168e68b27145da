# SPDX-License-Identifier: Apache-2.0
"""Where a call of the extension runs: on a number of threads, or in a CUDA stream.

The extension has one argument for it, the lane.

    with lane(device) as value:
        extension.dispatch_rows(..., value, ...)
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

Lane = Callable[[torch.device], AbstractContextManager[int]]


def threads_of(device: torch.device) -> AbstractContextManager[int]:
    """The threads that torch would use."""
    return nullcontext(torch.get_num_threads())


class stream_of(AbstractContextManager[int]):
    """The current stream of a CUDA device, which is the current device meanwhile: kernels are launched there."""

    def __init__(self, device: torch.device) -> None:
        self._guard: Any = torch.cuda.device(device)
        self._device = device

    def __enter__(self) -> int:
        self._guard.__enter__()
        return int(torch.cuda.current_stream(self._device).cuda_stream)

    def __exit__(self, *exception: Any) -> None:
        self._guard.__exit__(*exception)
