# SPDX-License-Identifier: Apache-2.0
"""Which codecs a level has, and what codecs did."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from ds_hybridep.codecs import Codec, PatchCodec


def no_master(_: nn.Parameter) -> Tensor | None:
    return None


def no_scale() -> float:
    return 1.0


@dataclass(frozen=True)
class Encoding:
    """How weights and gradients travel: codecs by level index, None for a level where they go as they are.

    master_of: returns the optimizer's fp32 copy of a parameter, flat or shaped; None if this rank lacks a part of it.
    is_on_host: True if what codecs keep between steps is in host memory.
    sum_dtype: in which sums of gradients travel where no codec encodes them; None: that of the parameter.
    """

    weight_codecs: tuple[Codec | PatchCodec | None, ...]
    gradient_codecs: tuple[Codec | None, ...]
    master_of: Callable[[nn.Parameter], Tensor | None] = field(default=no_master, compare=False)
    loss_scale: Callable[[], float] = field(default=no_scale, compare=False)
    is_on_host: bool = False
    sum_dtype: torch.dtype | None = None


@dataclass
class CodecCounters:
    """What the codecs of one layer did on this rank under one plan, as sums that can be added over ranks.

    Bytes count encoded messages as they were sent, fp32 bytes what these hold.  Seconds are the host's: with a device,
    for which the host only queues work, they cover queueing and waiting.  Squares are of what is there now; whoever
    reports fills them in.
    """

    weight_bytes: float = 0.0
    weight_fp32_bytes: float = 0.0
    gradient_bytes: float = 0.0
    gradient_fp32_bytes: float = 0.0
    encode_s: float = 0.0
    decode_s: float = 0.0
    exposed_s: float = 0.0
    squared_error: float = 0.0  # of mirrors against weights
    squared_weight: float = 0.0  # of those weights
    squared_residual: float = 0.0  # of gradients not delivered yet

    def count(self, kind: Literal["weight", "gradient"], num_bytes: int, fp32_bytes: int) -> None:
        """Count one message that is sent."""
        if kind == "weight":
            self.weight_bytes += num_bytes
            self.weight_fp32_bytes += fp32_bytes
        else:
            self.gradient_bytes += num_bytes
            self.gradient_fp32_bytes += fp32_bytes

    @contextmanager
    def timing(self, name: Literal["encode_s", "decode_s", "exposed_s"]) -> Iterator[None]:
        """Count the seconds inside."""
        begin_s = time.perf_counter()
        yield
        setattr(self, name, getattr(self, name) + time.perf_counter() - begin_s)

    def record(self, num_ranks: int = 1) -> dict[str, float]:
        """Return a record for `ds_hybridep.stats` and reports, of one rank or of `num_ranks` with mean seconds.

        weight_ratio, gradient_ratio: fp32 bytes of the messages' content over their bytes; 0 if nothing was sent.
        weight_error: relative L2 distance of replicas from their weights, as the owner's mirrors show it.
        residual_norm: L2 norm of the gradients that were not delivered yet.
        exposed_s: seconds in which this layer's computation waited for weights or gradients, decoding included.
        """
        return {
            "weight_bytes": self.weight_bytes,
            "weight_ratio": self.weight_fp32_bytes / self.weight_bytes if self.weight_bytes else 0.0,
            "weight_error": (self.squared_error / self.squared_weight) ** 0.5 if self.squared_weight else 0.0,
            "gradient_bytes": self.gradient_bytes,
            "gradient_ratio": self.gradient_fp32_bytes / self.gradient_bytes if self.gradient_bytes else 0.0,
            "residual_norm": self.squared_residual**0.5,
            "encode_s": self.encode_s / num_ranks,
            "decode_s": self.decode_s / num_ranks,
            "exposed_s": self.exposed_s / num_ranks,
        }
