# SPDX-License-Identifier: Apache-2.0
"""Where codecs keep what they need between steps: on the device that computes, or in host memory.

    home.zeros(...)                    memory that lasts
    work = home.fetch(kept)            on the device, to read and to change
    home.put(kept, work)               what was changed

Host memory is pinned for a GPU, and copies go in the current stream: whoever reads it on the host calls `wait` before.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Home:
    """device: which computes."""

    device: torch.device
    is_host: bool = False

    def zeros(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        if not self.is_host or self.device.type == "meta":
            return torch.zeros(shape, dtype=dtype, device=self.device)
        return torch.zeros(shape, dtype=dtype, pin_memory=self.device.type == "cuda")

    def fetch(self, kept: Tensor) -> Tensor:
        """What is kept, on the device: the same tensor, or a copy of one in host memory."""
        if not self.is_host or kept.device.type == "meta":
            return kept
        return kept.to(self.device, non_blocking=True, copy=True)

    def put(self, kept: Tensor, work: Tensor) -> None:
        """Keep what was changed on the device; does nothing where that is the same tensor."""
        if work is not kept:
            kept.copy_(work, non_blocking=True)

    def keep(self, work: Tensor) -> Tensor:
        """A new tensor of the device, kept from now on."""
        if not self.is_host:
            return work
        kept = torch.empty_like(work, device="cpu", pin_memory=self.device.type == "cuda")
        kept.copy_(work, non_blocking=True)
        return kept

    def wait(self) -> None:
        """The host may read what is kept."""
        if self.is_host and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
