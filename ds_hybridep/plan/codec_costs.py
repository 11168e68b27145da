# SPDX-License-Identifier: Apache-2.0
"""Costs of codecs without measurements: exact bytes, a table for patches, and estimated seconds on a GPU.

The estimate has not been compared with a GPU.  It is the larger of two times: memory traffic, and the matrix products
of low rank.  Rates of a device are half of its data sheet's, or what `ds_hybridep probe` has measured.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ds_hybridep.errors import PlanError
from ds_hybridep.geometry.packets import (
    FP32_BYTES,
    ITERATIONS,
    LowRankSizes,
    Packets,
    Part,
    PatchSizes,
    packets_of,
    part_elements,
)
from ds_hybridep.geometry.row_format import RowFormat, record_bytes
from ds_hybridep.plan.rates import IDENTITY, CodecCost

PATCHED_BYTES = 2  # bytes of a weight that a patch changes

# (learning rate of AdamW, bits of a 16-bit weight over bits of its patch).  The bits of a patch are the entropy of the
# changes, measured on a small model (docs/planning.md).
PATCH_RATIOS = ((1e-6, 202.0), (1e-5, 47.0), (3e-5, 32.0), (1e-4, 16.0), (3e-4, 9.0), (1e-3, 4.7))
DEFAULT_LEARNING_RATE = 1e-5  # as in fine-tuning
DEFAULT_ADAPTER_RATE = 1e-4  # of adapters

# Memory traffic in bytes per element, fp32: encode reads a value, reads and writes a residual; decode adds to a sum.
ENCODE_TRAFFIC = 3 * FP32_BYTES
DECODE_TRAFFIC = 2 * FP32_BYTES
# Low rank reads and writes tensors so many times, and multiplies them by one factor so many times: counted in a test.
LOW_RANK_ENCODE_TRAFFIC, LOW_RANK_ENCODE_PRODUCTS = 22 * FP32_BYTES, 2 * ITERATIONS + 2
LOW_RANK_DECODE_TRAFFIC, LOW_RANK_DECODE_PRODUCTS = 8 * FP32_BYTES, 1
# Patches: encoding passes over values to count, to code and to remember them; decoding reads, changes and checks them.
PATCH_ENCODE_TRAFFIC = 8 * PATCHED_BYTES
PATCH_DECODE_TRAFFIC = 4 * PATCHED_BYTES


@dataclass(frozen=True)
class DeviceRates:
    """What a device reaches in codecs: bytes per second of its memory, operations per second of fp32 products."""

    memory_bytes_per_s: float
    product_flops_per_s: float


H100_RATES = DeviceRates(0.5 * 3.35e12, 0.5 * 67e12)


def patch_ratio(learning_rate: float) -> float:
    """Bytes of 16-bit weights over bytes of their patch after one optimizer step, from a table.

    Between two entries, the logarithm of the ratio is linear in the logarithm of the rate.  Below the first entry, its
    ratio holds.  Above the last entry, the line continues down to 1.  Raises PlanError for a rate that is not > 0.
    """
    if not (math.isfinite(learning_rate) and learning_rate > 0):
        raise PlanError(f"learning_rate is {learning_rate}, but must be a finite number > 0")
    if learning_rate <= PATCH_RATIOS[0][0]:
        return PATCH_RATIOS[0][1]
    pairs = list(zip(PATCH_RATIOS, PATCH_RATIOS[1:], strict=False))
    (low, first), (high, last) = next((pair for pair in pairs if learning_rate <= pair[1][0]), pairs[-1])
    share = math.log(learning_rate / low) / math.log(high / low)
    return max(float(first * (last / first) ** share), 1.0)


def patch_cost(learning_rate: float, rates: DeviceRates = H100_RATES) -> CodecCost:
    """Cost of patches of 16-bit weights that AdamW trains at this learning rate."""
    return CodecCost(
        "patch",
        encode_bytes_per_s=rates.memory_bytes_per_s * PATCHED_BYTES / PATCH_ENCODE_TRAFFIC,
        decode_bytes_per_s=rates.memory_bytes_per_s * PATCHED_BYTES / PATCH_DECODE_TRAFFIC,
        is_lossy=False,
        packets=PatchSizes(8 * PATCHED_BYTES / patch_ratio(learning_rate)),
    )


def codec_cost(
    settings: Mapping[str, Any], parts: Iterable[Part], element_bytes: int, rates: DeviceRates = H100_RATES
) -> CodecCost:
    """Cost of tensors like `parts`; without a codec, an element takes `element_bytes`.

    settings: settings of a codec in a "hybridep" block, with all defaults; a patch is not allowed.
    """
    packets = packets_of(settings)
    encode_s = decode_s = 0.0
    num_bytes = 0
    for part in parts:
        times = _seconds_per_element(packets, part, rates)
        encode_s += part_elements(part) * times[0]
        decode_s += part_elements(part) * times[1]
        num_bytes += part_elements(part) * element_bytes
    return CodecCost(
        settings["type"],
        encode_bytes_per_s=num_bytes / encode_s if encode_s else math.inf,
        decode_bytes_per_s=num_bytes / decode_s if decode_s else math.inf,
        packets=packets,
    )


def token_codec(row_format: RowFormat | None, hidden: int, element_bytes: int) -> CodecCost:
    """Cost of a row format for the stream model; None: rows of `hidden` elements travel unchanged."""
    if row_format is None:
        return IDENTITY
    return CodecCost(row_format, ratio=hidden * element_bytes / record_bytes(hidden))


def _seconds_per_element(packets: Packets, part: Part, rates: DeviceRates) -> tuple[float, float]:
    """Seconds per element to encode and to decode."""
    _, rows, cols = part
    if not isinstance(packets, LowRankSizes) or packets.is_left_to_fallback(rows, cols):
        return ENCODE_TRAFFIC / rates.memory_bytes_per_s, DECODE_TRAFFIC / rates.memory_bytes_per_s
    encode_traffic, decode_traffic = LOW_RANK_ENCODE_TRAFFIC, LOW_RANK_DECODE_TRAFFIC
    if packets.rest is not None:
        encode_traffic += ENCODE_TRAFFIC
        decode_traffic += DECODE_TRAFFIC
    product_s = 2 * packets.effective_rank(rows, cols) / rates.product_flops_per_s  # of the matrix and one factor
    return (
        max(encode_traffic / rates.memory_bytes_per_s, LOW_RANK_ENCODE_PRODUCTS * product_s),
        max(decode_traffic / rates.memory_bytes_per_s, LOW_RANK_DECODE_PRODUCTS * product_s),
    )
