# SPDX-License-Identifier: Apache-2.0
"""Sends and receives between devices over NCCL.  Written without a GPU: nothing here has ever run on one.

Order of batches.  NCCL may deadlock if ranks launch batches of several communicators in different orders.  Guaranteed:

    - Each channel has a communicator of its own, and its batches start in program order, which is the same on all of
      its ranks.
    - One lock for the whole process keeps batches apart: none starts while another one is being put together.
    - The thread that runs the forward, the backward or the step starts everything.  Threads of background channels
      only look whether a batch is over.  So if every domain spans one level only, all channels of a rank start their
      batches in the order of the program.

Not guaranteed: if a domain spans several levels, a level's batch starts when that of the level before it has arrived.
Its place among batches of other channels depends on timing and may differ between ranks.  The order relative to
DeepSpeed's own communicators may differ too.  So the device must run kernels of several communicators side by side:
leave NCCL_LAUNCH_ORDER_IMPLICIT at 0 and CUDA_DEVICE_MAX_CONNECTIONS above 1, or choose "gloo" for the outer levels.
"""

import hashlib
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ds_hybridep.errors import CommunicationError
from ds_hybridep.transport.job import first_line, job_store
from ds_hybridep.transport.streams import DeviceStreams, Mark, PeerTensor
from ds_hybridep.transport.waits import waiting

NCCL_LOOK_S = 2e-4  # between two looks at a batch under way
_ONE_BATCH_AT_A_TIME = threading.Lock()


class NcclBatch:
    """One batch under way; methods as those of `Pinned`."""

    sends: Sequence[PeerTensor] = ()  # for the link

    def __init__(self, streams: DeviceStreams, arrived: Mark, tensors: Sequence[Tensor]) -> None:
        self._streams, self._arrived, self._tensors = streams, arrived, tensors

    def wait(self, timeout_s: float) -> None:
        """Block until the batch is over.  Polls, because a wait for the device itself has no time limit."""
        deadline = time.monotonic() + timeout_s
        while not self._arrived.query():
            if time.monotonic() > deadline:
                raise RuntimeError(f"passed the time limit of {timeout_s:g} s")
            time.sleep(NCCL_LOOK_S)

    def release_sends(self) -> None:
        self._tensors = ()

    def deliver(self) -> None:
        """Make the current stream wait for the batch."""
        self._streams.follow(self._arrived)


class NcclGroup:
    """Connects `ranks` over NCCL, or raises CommunicationError, and starts batches between them.

    NCCL starts a batch after the work that is queued on the current stream, and runs it in a stream of its own.
    """

    def __init__(
        self,
        name: str,
        ranks: tuple[int, ...],
        streams: DeviceStreams,
        *,
        rank: int,
        generation: int,
        timeout_s: float,
    ) -> None:
        self._streams, self._device = streams, streams.device
        self._index_of_rank = {rank: index for index, rank in enumerate(ranks)}
        self._watching = streams.new_stream()
        others = [one for one in ranks if one != rank]
        try:
            with waiting(for_all=True):
                self._group = connect_nccl(
                    f"{generation}/nccl/{name}", ranks, rank, timeout_s=timeout_s, device=streams.device
                )
                # NCCL connects two ranks in the first batch that they share, and the host waits: no transfer may.
                there, here = (torch.zeros(len(others), 1, dtype=torch.uint8, device=streams.device) for _ in range(2))
                greeting = self.start(list(zip(others, there, strict=True)), list(zip(others, here, strict=True)))
                greeting.wait(timeout_s)
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {rank}: connecting ranks {list(ranks)} for {name} over NCCL failed within the time "
                f"limit of {timeout_s:g} s: {first_line(error)}; look at the log of those ranks for the "
                "first error, and at NCCL_DEBUG=INFO"
            ) from error

    def start(self, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor]) -> NcclBatch:
        """Start one batch.  The other ranks must start their batches with this one in the same order."""
        with _ONE_BATCH_AT_A_TIME:
            self._group._start_coalescing(self._device)
            for rank, tensor in receives:
                self._group.recv([tensor], self._index_of_rank[rank], 0)
            for rank, tensor in sends:
                self._group.send([tensor], self._index_of_rank[rank], 0)
            work = self._group._end_coalescing(self._device)
        with self._streams.within(self._watching):
            work.wait()  # this stream waits, not the host
            arrived = self._streams.mark()
        return NcclBatch(self._streams, arrived, [tensor for _, tensor in (*sends, *receives)])


def connect_nccl(name: str, ranks: tuple[int, ...], rank: int, *, timeout_s: float, device: torch.device) -> Any:
    """Return a process group over some ranks of the job, made by these ranks alone.

    `dist.new_group` would not do: if all ranks call it, each group costs a barrier over the job; if only members do,
    it names the group by the number of groups that a rank knows, which differs once users make groups.
    """
    members = hashlib.sha256("-".join(map(str, ranks)).encode()).hexdigest()[:16]
    store = job_store(f"{name}/{members}")
    index = ranks.index(rank)
    kind, options = dist.ProcessGroup.BackendType.NCCL, dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    options.global_ranks_in_group, options.group_name = list(ranks), store.prefix
    backend = dist.ProcessGroupNCCL(store, index, len(ranks), options)
    group = dist.ProcessGroup(store, index, len(ranks))
    group._set_default_backend(kind)
    group._register_backend(torch.device("cuda"), kind, backend)
    # Without this, all members would have to take part in the first batch.
    backend.eager_connect_single_device(device)
    return group
