# SPDX-License-Identifier: Apache-2.0
"""Measures what codecs reach on the device of a rank: the rates that `plan` prices them with."""

import statistics
import time
from collections.abc import Callable

import torch

from ds_hybridep.geometry.packets import FP32_BYTES
from ds_hybridep.plan.codec_costs import DeviceRates

NUM_ELEMENTS = 2**24  # of a tensor that is copied: more than caches hold
MATRICES, ROWS, COLS, RANK = 8, 2048, 768, 36  # experts of Qwen3-30B-A3B at the recommended ratio
REPETITIONS = 5


def measure_device(device: torch.device) -> DeviceRates:
    """Times an addition to memory and the products of low rank.  Takes about a second."""
    ones = torch.ones(NUM_ELEMENTS, device=device)
    added = torch.empty_like(ones)
    factors = torch.ones(MATRICES, RANK, ROWS, device=device)
    matrices = torch.ones(MATRICES, ROWS, COLS, device=device)
    add_s = _median_s(lambda: torch.add(ones, 1.0, out=added), device)
    product_s = _median_s(lambda: torch.bmm(factors, matrices), device)
    return DeviceRates(
        memory_bytes_per_s=2 * FP32_BYTES * NUM_ELEMENTS / add_s,
        product_flops_per_s=2 * MATRICES * RANK * ROWS * COLS / product_s,
    )


def _median_s(work: Callable[[], object], device: torch.device) -> float:
    seconds = []
    for _ in range(REPETITIONS + 1):  # the first one does not count
        begin_s = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin_s)
    return statistics.median(seconds[1:])
