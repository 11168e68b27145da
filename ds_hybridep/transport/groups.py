# SPDX-License-Identifier: Apache-2.0
"""Process groups over some ranks of the job, made by these ranks alone.

They do not use `dist.new_group`: if all ranks call it, each group costs a barrier over the job; if only members do, it
names the group by the number of groups that a rank knows, which differs between ranks once users make groups.
"""

import contextlib
import hashlib
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ds_hybridep.errors import CommunicationError
from ds_hybridep.transport.job import job_store
from ds_hybridep.transport.waits import waiting

if TYPE_CHECKING:
    from ds_hybridep.transport.channels import Transport


def connect_nccl(name: str, ranks: tuple[int, ...], transport: "Transport", device: torch.device) -> Any:
    store, index = _store(f"nccl/{name}", ranks, transport), ranks.index(transport.rank)
    kind, options = dist.ProcessGroup.BackendType.NCCL, dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=transport.timeout_s)
    options.global_ranks_in_group, options.group_name = list(ranks), store.prefix
    backend = dist.ProcessGroupNCCL(store, index, len(ranks), options)
    group = dist.ProcessGroup(store, index, len(ranks))
    group._set_default_backend(kind)
    group._register_backend(torch.device("cuda"), kind, backend)
    # Without this, all members would have to take part in the first batch.
    backend.eager_connect_single_device(device)
    return group


@contextlib.contextmanager
def naming_ranks(name: str, ranks: tuple[int, ...], transport: "Transport", hint: str) -> Iterator[None]:
    try:
        with waiting(for_all=True):
            yield
    except RuntimeError as error:
        raise CommunicationError(
            f"rank {transport.rank}: connecting ranks {list(ranks)} for {name} failed within the time limit of "
            f"{transport.timeout_s:g} s: {first_line(error)}; look at the log of those ranks for the first error, and "
            f"at {hint}"
        ) from error


def first_line(error: Exception) -> str:
    """Return the first line of the message; the other lines hold a C++ stack."""
    return str(error).splitlines()[0]


def _store(name: str, ranks: tuple[int, ...], transport: "Transport") -> Any:
    """Return a part of the job's store that no other group uses."""
    members = hashlib.sha256("-".join(map(str, ranks)).encode()).hexdigest()[:16]
    path = f"ds_hybridep/{transport.generation}/{name}/{members}"
    return dist.distributed_c10d.PrefixStore(path, job_store())
