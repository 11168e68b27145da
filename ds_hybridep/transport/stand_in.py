# SPDX-License-Identifier: Apache-2.0
"""A process group that replaces another one in code that calls torch's collectives."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_ProcessGroup: Any = dist.ProcessGroup  # its stub lacks this constructor and asks for other overloads

# All names that torch has had since 2.5 for a process group's collectives, except the two that are replaced here.
_FORWARDED = (
    "_reduce_scatter_base", "all_gather_single_coalesced", "all_to_all_single", "allgather", "allgather_coalesced",
    "allgather_into_tensor_coalesced", "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast",
    "gather", "monitored_barrier", "recv", "recv_anysource", "reduce", "reduce_scatter", "reduce_scatter_single",
    "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", "scatter", "send",
)  # fmt: skip


class StandInGroup(_ProcessGroup):  # type: ignore[misc]
    """Like `group`, but sums, maxima of a few numbers, and a gather into one tensor call other functions.

    The other collectives are the methods of `group` itself.  Inherited ones may deadlock: they reach torch through the
    layer that looks for overrides in Python, which keeps the interpreter's lock while it enters gloo.  Gloo's own
    thread may hold gloo's lock at that time and wait for the interpreter's lock to free a tensor.

    Args:
        group: a group over gloo, or on GPUs over NCCL.
        all_reduce: replaces a contiguous tensor of at least one element per rank by its sum over the ranks.
        all_gather: (output, own) fills `output` with the tensors `own` of all ranks, in rank order.
        agree: (tensor, is_max) replaces numbers, fewer than there are ranks, by their sums or maxima.
    """

    def __init__(
        self,
        group: Any,
        all_reduce: Callable[[Tensor], None],
        all_gather: Callable[[Tensor, Tensor], None],
        agree: Callable[[Tensor, bool], None],
    ) -> None:
        super().__init__(group.rank(), group.size())
        for device_type, name in _backends_of(group).items():
            device, kind = torch.device(device_type), getattr(dist.ProcessGroup.BackendType, name.upper())
            self._register_backend(device, kind, group._get_backend(device))
            self._set_default_backend(kind)
        self._original = group
        self.__dict__.update({name: getattr(group, name) for name in _FORWARDED if hasattr(group, name)})
        self._all_reduce = all_reduce
        self._all_gather = all_gather
        self._agree = agree
        for table in _tables():
            table[self] = table[group]

    def unregister(self) -> None:
        """Make torch forget this group."""
        for table in _tables():
            table.pop(self, None)

    def allreduce(self, tensors: list[Tensor], options: Any) -> Any:
        operation = options.reduceOp
        is_max = operation == dist.ReduceOp.MAX
        if len(tensors) != 1 or not (is_max or operation == dist.ReduceOp.SUM):
            return self._original.allreduce(tensors, options)
        if tensors[0].numel() < self.size():
            if tensors[0].dtype == torch.int64:  # may hold integers that a double cannot
                return self._original.allreduce(tensors, options)
            self._agree(tensors[0], is_max)
        elif is_max:
            return self._original.allreduce(tensors, options)
        else:
            self._all_reduce(tensors[0])
        return _finished_work(tensors)

    def all_gather_single(self, output: Tensor, own: Tensor, options: Any) -> Any:
        self._all_gather(output, own)
        return _finished_work([output])

    _allgather_base = all_gather_single  # its name before torch 2.13


def _tables() -> tuple[dict[Any, Any], ...]:
    """Return torch's tables of its groups' backends and ranks; its profiler looks up each group in all of them."""
    world = dist.distributed_c10d._world
    return world.pg_map, world.pg_group_ranks, world.pg_backend_config


def _backends_of(group: Any) -> dict[str, str]:
    pairs = dict(pair.split(":") for pair in str(dist.get_backend_config(group)).split(","))
    return {device: name for device, name in pairs.items() if device == "cpu" or torch.cuda.is_available()}


def _finished_work(result: list[Tensor]) -> Any:
    devices = sorted({str(tensor.device) for tensor in result if tensor.is_cuda})
    future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=list(devices))
    future.set_result(result)
    c10d: Any = torch._C._distributed_c10d  # its stub lacks the function
    return c10d._create_work_from_future(future)
