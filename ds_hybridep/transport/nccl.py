# SPDX-License-Identifier: Apache-2.0
"""Sends and receives between devices over NCCL.  Written without a GPU, and never run on one."""

import hashlib
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hybridep.transport.staging import Part
from ds_hybridep.transport.streams import DeviceStreams, Mark

if TYPE_CHECKING:
    from ds_hybridep.transport.channels import Transport

NCCL_LOOK_S = 2e-4  # between two looks at a batch under way


class BatchInNccl:
    """One batch under way over NCCL; in the place of `Staging`, and of a work for the thread that waits for it."""

    def __init__(self, streams: DeviceStreams, arrived: Mark, tensors: Sequence[Tensor]) -> None:
        self._streams, self._arrived, self._tensors = streams, arrived, tensors

    def wait(self, limit: timedelta) -> None:
        """Block until the batch is over.  Looks now and then: a wait for the device itself has no time limit."""
        deadline = time.monotonic() + limit.total_seconds()
        while not self._arrived.query():
            if time.monotonic() > deadline:
                raise RuntimeError(f"passed the time limit of {limit.total_seconds():g} s")
            time.sleep(NCCL_LOOK_S)

    def forget_sends(self) -> None:
        """The batch is over: its tensors may be freed."""
        self._tensors = ()

    def deliver(self) -> None:
        """The current stream goes on behind the batch."""
        self._streams.follow(self._arrived)


class NcclGroup:
    """Sends and receives between devices over NCCL, a batch at a time.  Written without a GPU, and never run.

    NCCL starts a batch behind what the current stream was given so far, and runs it in a stream of its own.
    """

    def __init__(self, name: str, ranks: tuple[int, ...], transport: "Transport", streams: DeviceStreams) -> None:
        self._streams, self._device = streams, streams.device
        self._index_of_rank = {rank: index for index, rank in enumerate(ranks)}
        self._watching = streams.another()
        self._group = _connect_nccl(name, ranks, transport, streams.device)
        # NCCL connects two ranks in the first batch that they share, and the host waits: here, not in a transfer.
        others = [rank for rank in ranks if rank != transport.rank]
        there, here = (torch.zeros(len(others), 1, dtype=torch.uint8, device=streams.device) for _ in range(2))
        greeting = self.start(list(zip(others, there, strict=True)), list(zip(others, here, strict=True)))
        greeting.wait(timedelta(seconds=transport.timeout_s))

    def start(self, sends: Sequence[Part], receives: Sequence[Part]) -> BatchInNccl:
        """One batch.  Other ranks must start theirs with this one in the same order."""
        self._group._start_coalescing(self._device)
        for rank, tensor in receives:
            self._group.recv([tensor], self._index_of_rank[rank], 0)
        for rank, tensor in sends:
            self._group.send([tensor], self._index_of_rank[rank], 0)
        work = self._group._end_coalescing(self._device)
        with self._streams.within(self._watching):
            work.wait()  # of this stream, not of the host
            arrived = self._streams.mark()
        return BatchInNccl(self._streams, arrived, [tensor for _, tensor in (*sends, *receives)])


def _connect_nccl(name: str, ranks: tuple[int, ...], transport: "Transport", device: torch.device) -> Any:
    """An NCCL process group over `ranks`, connected by all of its members together."""
    members = hashlib.sha256("-".join(map(str, ranks)).encode()).hexdigest()[:16]
    path = f"ds_hybridep/{transport.generation}/nccl/{name}/{members}"
    store = dist.PrefixStore(path, dist.distributed_c10d._get_default_store())
    index, kind = ranks.index(transport.rank), dist.ProcessGroup.BackendType.NCCL
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=transport.timeout_s)
    options.global_ranks_in_group, options.group_name = list(ranks), path
    backend = dist.ProcessGroupNCCL(store, index, len(ranks), options)
    group = dist.ProcessGroup(store, index, len(ranks))
    group._set_default_backend(kind)
    group._register_backend(torch.device("cuda"), kind, backend)
    # Else the first batch would have to be one in which all members take part.
    backend.eager_connect_single_device(device)
    return group
