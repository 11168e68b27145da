# SPDX-License-Identifier: Apache-2.0
"""Moves tensors to host memory and back; views of them stay valid, since only the memory below them goes."""

from collections.abc import Iterable, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from ds_hybridep.errors import UnsupportedError


class Away:
    """What a layer has moved to host memory.

    held: by name, (tensor without memory, its copy).
    """

    def __init__(self, layer: str) -> None:
        self._layer = layer
        self.held: dict[str, list[tuple[Tensor, Tensor]]] = {}
        self._coming: list[list[tuple[Tensor, Tensor]]] = []  # what a device may still be copying

    def put(self, what: str, tensors: Sequence[Tensor], *, is_pinned: bool, non_blocking: bool) -> None:
        """Copy tensors, of which no view is in use, and free their memory; what is away already stays so."""
        if what not in self.held:
            self.held[what] = [*_copies(tensors, is_pinned, non_blocking)]
            for tensor in tensors:  # the device reuses memory behind the copies that are queued
                tensor.untyped_storage().resize_(0)

    def bring_back(self, *, non_blocking: bool) -> None:
        """Give all tensors their memory and contents back."""
        for tensor, host in (pair for pairs in self.held.values() for pair in pairs):
            tensor.untyped_storage().resize_(tensor.nbytes)
            tensor.copy_(host, non_blocking=non_blocking)
        self._coming, self.held = [*self.held.values()] if non_blocking else [], {}

    def refuse(self) -> NoReturn:
        """Raise UnsupportedError, which says what is away."""
        raise UnsupportedError(
            f"{self._layer}: {' and '.join(self.held)} of its replicas are in host memory since "
            f"engine.offload_states(); call engine.reload_states() on all ranks before the model is used or saved"
        )


def _copies(tensors: Iterable[Tensor], is_pinned: bool, non_blocking: bool) -> Iterable[tuple[Tensor, Tensor]]:
    for tensor in tensors:
        host = torch.empty_like(tensor, device="cpu", pin_memory=is_pinned and tensor.device.type == "cuda")
        yield tensor, host.copy_(tensor, non_blocking=non_blocking)
