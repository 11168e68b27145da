# SPDX-License-Identifier: Apache-2.0
"""Where codecs keep what they need between steps: on the device that computes, or in host memory.

    kept = home.zeros(...)             memory that is kept between steps
    work = home.fetch(kept)            on the device, to read and to change
    home.put(kept, work)               stores the changes

Host memory is pinned for a GPU, and copies run in the current stream: call `wait` before the host reads it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Home:
    """A place to keep tensors.  device: the one that computes."""

    device: torch.device
    is_host: bool = False

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        if not self.is_host or self.device.type == "meta":
            return torch.zeros(shape, dtype=dtype, device=self.device)
        return torch.zeros(shape, dtype=dtype, pin_memory=self.device.type == "cuda")

    def fetch(self, kept: Tensor) -> Tensor:
        """Return a kept tensor on the device: the same tensor, or a copy if it is in host memory."""
        if not self.is_host or kept.device.type == "meta":
            return kept
        return kept.to(self.device, non_blocking=True, copy=True)

    def put(self, kept: Tensor, work: Tensor) -> None:
        """Keep what was changed on the device; does nothing if `work` is `kept` itself."""
        if work is not kept:
            kept.copy_(work, non_blocking=True)

    def store(self, work: Tensor) -> Tensor:
        """Return what is kept of a new tensor on the device: itself, or a copy in host memory."""
        if not self.is_host:
            return work
        kept = torch.empty_like(work, device="cpu", pin_memory=self.device.type == "cuda")
        kept.copy_(work, non_blocking=True)
        return kept

    def wait(self) -> None:
        """Wait until the host may read what is kept."""
        if self.is_host and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
