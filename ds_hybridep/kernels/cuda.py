# SPDX-License-Identifier: Apache-2.0
"""The routing kernels of csrc/ on CUDA tensors.  Work is queued on the current stream and never waited for, but that
`plan_routes` waits for the number of rows; `start_plan` does not.

An index out of range is found on the device: where a plan is made, by a ValueError as elsewhere; in the other
operations by a line on standard output and a CUDA error at the next synchronisation, after which the process cannot
use its device.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from typing_extensions import Self

from ds_hybridep.kernels.codecs import CudaCodecs
from ds_hybridep.kernels.compiled import CompiledKernels
from ds_hybridep.kernels.interface import RoutePlan, plan_sizes
from ds_hybridep.kernels.lanes import Lane, stream_of


@dataclass(frozen=True, kw_only=True)
class StartedPlan:
    """A plan that the device is making.  `splits()` and `plan()` wait for it; all else can be queued behind it."""

    padded: RoutePlan  # with room for T * min(K, N) rows; those past the last row of the plan hold anything
    counts: Tensor  # [N + 2] int64 on the host, pinned: rows per destination, then two marks of wrong ids
    none_wrong: int
    limits: tuple[int, int]  # E, N
    wait: Callable[[], None]  # until `counts` is there

    def splits(self) -> list[int]:
        """Rows for each destination, after a wait for the device.

        Raises:
            ValueError: an expert id is E or more, or a destination is N or more.
        """
        self.wait()
        *splits, wrong_expert, wrong_destination = self.counts.tolist()
        num_experts, num_destinations = self.limits
        for name, wrong, limit, of_what in (
            ("expert_to_destination", wrong_destination, num_destinations, "destinations"),
            ("topk_idx", wrong_expert, num_experts, "experts"),
        ):
            if wrong != self.none_wrong:
                found = wrong & 0xFFFFFFFF
                raise ValueError(f"{name}: holds {found}, but there are {limit} {of_what}: wanted ids below {limit}")
        return splits

    def plan(self) -> RoutePlan:
        """The plan, after a wait for the device.  Raises as `splits`."""
        num_rows = sum(self.splits())
        return RoutePlan(
            rows_per_destination=self.padded.rows_per_destination,
            row_to_token=self.padded.row_to_token[:num_rows],
            row_topk_idx=self.padded.row_topk_idx[:num_rows],
            slot_to_row=self.padded.slot_to_row,
            first_slot_to_row=self.padded.first_slot_to_row,
        )


class CudaKernels(CompiledKernels):
    """As `CompiledKernels`, on CUDA devices of compute capability 8.0 and later."""

    name: str = "cuda"
    device_type: ClassVar[str] = "cuda"
    dispatch_key: ClassVar[str | None] = "CUDA"

    def __init__(self, extension: Any, lane: Lane = stream_of) -> None:
        """Wrap `extension`, the module that HybridEPBuilder("cuda") loads; `lane` says where its calls run."""
        super().__init__(extension, lane)
        self.codecs = CudaCodecs(extension, lane)

    def on_sms(self, num_sms: int) -> Self:
        """These kernels with rows dispatched, scattered and combined on at most `num_sms` of the multiprocessors.

        The others stay free for kernels that run at the same time.  Results are the same.  Raises ValueError for fewer
        than 1.
        """
        if num_sms < 1:
            raise ValueError(f"num_sms: got {num_sms}, wanted 1 or more")
        kernels = copy.copy(self)
        kernels.name = f"{self.name} on {num_sms} SMs"
        kernels._extension = _OnSms(self._extension, num_sms)
        return kernels

    def plan_routes(self, topk_idx: Tensor, expert_to_destination: Tensor, num_destinations: int) -> RoutePlan:
        """See `Kernels.plan_routes`."""
        return self.start_plan(topk_idx, expert_to_destination, num_destinations).plan()

    def start_plan(self, topk_idx: Tensor, expert_to_destination: Tensor, num_destinations: int) -> StartedPlan:
        """As `plan_routes`, without a wait.  Nothing but the counts goes to the host, into pinned memory."""
        padded, counts = self._queue_plan(topk_idx, expert_to_destination, num_destinations)
        with self._lane(topk_idx.device):
            host_counts, wait = _to_host(counts)
        return StartedPlan(
            padded=padded,
            counts=host_counts,
            none_wrong=self._extension.NONE_WRONG,
            limits=(len(expert_to_destination), num_destinations),
            wait=wait,
        )

    def plan_on_device(self, topk_idx: Tensor, expert_to_destination: Tensor, num_destinations: int) -> RoutePlan:
        """As `plan_routes`, with room for T * min(K, N) rows and counts that stay on the device.

        Sizes follow from those of the arguments, and nothing is waited for, so that a CUDA graph can capture it, with
        `scatter_rows` by first_slot_to_row, `combine_rows` and `combine_rows_backward` behind it.  What stands past
        the last row is not defined, so `dispatch_rows` cannot be used.  An id that is out of range is not told, and
        counts as not routed.
        """
        return self._queue_plan(topk_idx, expert_to_destination, num_destinations)[0]

    def _queue_plan(
        self, topk_idx: Tensor, expert_to_destination: Tensor, num_destinations: int
    ) -> tuple[RoutePlan, Tensor]:
        """A plan with room for all rows, and its counts as in `StartedPlan`, both on the device."""
        num_tokens, top_k, num_experts = plan_sizes(topk_idx, expert_to_destination, num_destinations)
        device = self._device_of(topk_idx=topk_idx, expert_to_destination=expert_to_destination)
        room = num_tokens * min(top_k, num_destinations)
        counts = torch.empty(num_destinations + 2, dtype=torch.int64, device=device)
        scratch_bytes = self._extension.plan_scratch_bytes(num_tokens, num_destinations)
        scratch = torch.empty(scratch_bytes, dtype=torch.uint8, device=device)
        padded = RoutePlan(
            rows_per_destination=counts[:num_destinations],
            row_to_token=torch.empty(room, dtype=torch.int64, device=device),
            row_topk_idx=torch.empty(room, top_k, dtype=torch.int32, device=device),
            slot_to_row=torch.empty(num_tokens, top_k, dtype=torch.int64, device=device),
            first_slot_to_row=torch.empty(num_tokens, top_k, dtype=torch.int64, device=device),
        )
        with self._lane(device) as lane:
            self._extension.plan_routes(
                topk_idx.data_ptr(),
                expert_to_destination.data_ptr(),
                num_tokens,
                top_k,
                num_experts,
                num_destinations,
                lane,
                scratch.data_ptr(),
                counts.data_ptr(),
                padded.row_to_token.data_ptr(),
                padded.row_topk_idx.data_ptr(),
                padded.slot_to_row.data_ptr(),
                padded.first_slot_to_row.data_ptr(),
            )
        return padded, counts


class _OnSms:
    """The extension, with the functions that have a variant for a few multiprocessors replaced by it."""

    def __init__(self, extension: Any, num_sms: int) -> None:
        self._extension = extension
        self.dispatch_rows = partial(extension.dispatch_rows_on, num_sms)
        self.scatter_rows = partial(extension.scatter_rows_on, num_sms)
        self.combine_rows = partial(extension.combine_rows_on, num_sms)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._extension, name)


def _to_host(counts: Tensor) -> tuple[Tensor, Callable[[], None]]:
    """`counts` in pinned memory once the second result has been called."""
    if not counts.is_cuda:  # kernels under emulation
        return counts, lambda: None
    host = torch.empty(counts.shape, dtype=counts.dtype, pin_memory=True)
    host.copy_(counts, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return host, copied.synchronize
