# SPDX-License-Identifier: Apache-2.0
"""The tensor itself, in fp32, bf16 or fp16."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from ds_hybridep.codecs.interface import Codec, CodecState, assign_or_add, round_up

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Identity(Codec):
    """Elements as they are, rounded to `dtype`.  Error: none in fp32; else half a unit in the last place.

    It sends values.  As the codec of a mirror it is not exact, because mirror + (weight - mirror) rounds.
    """

    codec_id: ClassVar[int] = 0
    name: ClassVar[str] = "identity"

    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"

    def payload_bytes(self, rows: int, cols: int) -> int:
        return round_up(rows * cols * DTYPES[self.dtype].itemsize)

    def encode_payload(
        self, x: Tensor, state: CodecState, payload: Tensor, is_bad: Tensor, sizes: Tensor | None
    ) -> Tensor:
        """Encode; elements that overflow fp16 count as not finite."""
        values = x.flatten(1).to(DTYPES[self.dtype])
        num_bytes = values.shape[1] * values.element_size()
        payload[:, :num_bytes] = values.view(torch.uint8)
        payload[:, num_bytes:] = 0
        return ~values.isfinite().all(dim=1)

    def decode_payload(self, payload: Tensor, out: Tensor, *, is_add: bool) -> None:
        dtype = DTYPES[self.dtype]
        num_bytes = out.shape[1] * out.shape[2] * dtype.itemsize
        values = payload[:, :num_bytes].contiguous().view(dtype).view(out.shape)
        assign_or_add(out, values, is_add=is_add)
