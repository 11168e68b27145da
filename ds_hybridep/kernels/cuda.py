# SPDX-License-Identifier: Apache-2.0
"""The routing kernels of csrc/ on CUDA tensors.  They queue work on the current stream; only `plan_routes` waits, for
the number of rows.  Of codecs, only patches wait.

The device finds an index that is out of range, and a packet of other settings.  `plan_routes` then raises ValueError,
as on the CPU.  The other operations print a line on standard output and cause a CUDA error at the next
synchronisation; after that the process cannot use its device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ds_hybridep.kernels.compiled import CompiledKernels, Lane, Routes, call, sizes_of

ROW_OPERATIONS = ("dispatch_rows", "quantise_rows", "dequantise_rows", "combine_rows", "combine_rows_backward")


@contextmanager
def current_stream(device: torch.device) -> Iterator[int]:
    """Yield the current stream of a CUDA device, and make it the current device inside."""
    with torch.cuda.device(device):
        yield int(torch.cuda.current_stream(device).cuda_stream)


class CudaKernels(CompiledKernels):
    """Like `CompiledKernels`, on CUDA devices of compute capability 8.0 and later."""

    name = "cuda"
    device_type: ClassVar[str] = "cuda"

    def __init__(self, extension: Any, *, lane: Lane = current_stream, dispatch_sms: int | None = None) -> None:
        """Wrap `extension`, the module that HybridEPBuilder("cuda") loads; `dispatch_sms` as in `load_kernels`."""
        super().__init__(extension)
        self.lane = lane
        if dispatch_sms is not None:
            self.name = f"{self.name}, dispatch on {dispatch_sms} SMs"
            on_few = {name: partial(getattr(extension, f"{name}_on"), dispatch_sms) for name in ROW_OPERATIONS}
            self._rows = SimpleNamespace(**on_few)

    def plan_routes(self, topk_idx: Tensor, expert_to_destination: Tensor, num_destinations: int) -> Routes:
        """Make the plan on the device, with room for the most rows there can be; only counts go to the host."""
        sizes = sizes_of("plan_routes", *"TKE", topk_idx=topk_idx, expert_to_destination=expert_to_destination)
        num_tokens, top_k, num_experts = sizes
        device = self._device_of(topk_idx=topk_idx, expert_to_destination=expert_to_destination)
        room = num_tokens * min(top_k, num_destinations)
        counts = torch.empty(num_destinations + 2, dtype=torch.int64, device=device)
        scratch_bytes = self.extension.plan_scratch_bytes(num_tokens, num_destinations)
        scratch = torch.empty(scratch_bytes, dtype=torch.uint8, device=device)
        row_to_token = torch.empty(room, dtype=torch.int64, device=device)
        row_topk_idx = torch.empty(room, top_k, dtype=torch.int32, device=device)
        slot_to_row = torch.empty(num_tokens, top_k, dtype=torch.int64, device=device)
        first_slot_to_row = torch.empty(num_tokens, top_k, dtype=torch.int64, device=device)
        given = (topk_idx, expert_to_destination, *sizes, num_destinations)
        filled = (row_to_token, row_topk_idx, slot_to_row, first_slot_to_row)
        with self.lane(device) as lane:
            call(self.extension.plan_routes, *given, lane, scratch, counts, *filled)
        # Device-to-host sync: R is the size of tensors that follow.
        *splits, wrong_expert, wrong_destination = counts.tolist()
        for name, mark, limit, of_what in (
            ("expert_to_destination", wrong_destination, num_destinations, "destinations"),
            ("topk_idx", wrong_expert, num_experts, "experts"),
        ):
            if mark != self.extension.NONE_WRONG:  # the device has marked an id
                found = mark & 0xFFFFFFFF
                raise ValueError(f"{name}: holds {found}, but there are {limit} {of_what}: wanted ids below {limit}")
        num_rows = sum(splits)
        return Routes(
            rows_per_destination=tuple(splits),
            row_to_token=row_to_token[:num_rows],
            row_topk_idx=row_topk_idx[:num_rows],
            slot_to_row=slot_to_row,
            first_slot_to_row=first_slot_to_row,
        )
