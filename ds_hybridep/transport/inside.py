# SPDX-License-Identifier: Apache-2.0
"""Small agreements between all ranks of one site, over gloo, and shares of flat buffers."""

import json
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hybridep.transport.waits import waiting

LIMIT = timedelta(days=1)


class Inside:
    """The ranks of this site.  All ranks must make it, and call the same methods in the same order.

    A call may wait for a rank that lives for up to LIMIT: each of them may have to wait for bytes from another site.
    The watch ends waits for a rank that does not live.
    """

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._group = dist.new_group(backend="gloo", timeout=LIMIT)

    def gather(self, said: Any) -> list[Any]:
        """Return what all ranks say (JSON-able), by rank; on other ranks than 0 an empty list."""
        body = _packed(said)
        size = torch.tensor([len(body)])
        sizes = [torch.empty_like(size) for _ in range(self.size)]
        with waiting(size, *sizes):
            dist.all_gather(sizes, size, group=self._group)
        longest = max(map(int, sizes))
        body = torch.nn.functional.pad(body, (0, longest - len(body)))
        bodies = [torch.empty_like(body) for _ in sizes] if self.rank == 0 else []
        with waiting(body, *bodies):
            dist.gather(body, bodies or None, dst=0, group=self._group)
        return [_unpacked(one[: int(size)]) for one, size in zip(bodies, sizes, strict=False)]

    def broadcast(self, said: Any) -> Any:
        """Return what rank 0 says (JSON-able)."""
        body = _packed(said)
        size = torch.tensor([len(body)])
        with waiting(size):
            dist.broadcast(size, src=0, group=self._group)
        body = body if self.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
        with waiting(body):
            dist.broadcast(body, src=0, group=self._group)
        return _unpacked(body)

    def all(self, is_true: bool) -> bool:
        """Return True if it is true on all ranks."""
        flag = torch.tensor([is_true], dtype=torch.int32)
        with waiting(flag):
            dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=self._group)
        return bool(flag.item())

    def mean(self, number: float) -> float:
        """Return the mean of what all ranks give."""
        total = torch.tensor([number], dtype=torch.float64)
        with waiting(total):
            dist.all_reduce(total, group=self._group)
        return float(total) / self.size

    def any_of(self, said: list[str]) -> list[str]:
        """Return what any rank says, sorted, on all ranks."""
        found: list[str] = self.broadcast(sorted({one for names in self.gather(said) for one in names}))
        return found

    def close(self) -> None:
        """Give this rank's part of the group up; a second call does nothing."""
        with suppress(ValueError):  # it is gone, perhaps with all groups of the script
            dist.destroy_process_group(self._group)


def _packed(said: Any) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(said).encode()), dtype=torch.uint8)


def _unpacked(body: Tensor) -> Any:
    return json.loads(bytes(body.tolist()))


def share(flat: Tensor, own: Tensor, group: Any) -> None:
    """Fill `flat` with the parts of all ranks of a group, in group-rank order; all parts are as long as `own`."""
    parts, own = flat.split(own.numel()), own.clone()
    with waiting(own, *parts):
        dist.all_gather(list(parts), own, group=group)
