# SPDX-License-Identifier: Apache-2.0
"""Time of each routing kernel: compiled, reference, and what DeepSpeed does in its place.

    python benchmarks/rows.py [--tokens 2048] [--top-k 2] [--experts 8] [--hidden 512] [--blocks 21] [--threads N]

The variants of a case take turns in short blocks, so that whatever else the machine does falls on all of them, and the
time of a variant is the median over blocks.  One JSON line per case and variant, then a table.  `bound_us` is the
time in which the bytes that the operation must read and write could be copied, measured in the same way.

DeepSpeed's `_sparse_encode` and `_sparse_decode` are given the same routes with capacity for all of them.  They work
on slot numbers that the gate has made, so `plan` has no counterpart there, and on the backward pass they run autograd.
Rows of one byte an element have none either.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

if not __package__ and str(Path(__file__).resolve().parent.parent) not in sys.path:
    sys.path.append(str(Path(__file__).resolve().parent.parent))  # run from a checkout

import deepspeed
from deepspeed.moe.sharded_moe import _sparse_decode, _sparse_encode

from ds_hybridep.kernels import Kernels, RoutePlan, load_kernels
from ds_hybridep.plan.row_format import RowFormat, record_bytes
from ds_hybridep.version import __version__

BLOCK_S = 0.01  # long beside the clock, short beside the noise of the machine


@dataclass(frozen=True, kw_only=True)
class Case:
    """One operation on one size: its variants by name, and the bytes that any of them has to move."""

    name: str
    dtype: torch.dtype
    variants: dict[str, Callable[[], object]]
    min_bytes: int


def interleaved_medians_us(variants: dict[str, Callable[[], object]], num_blocks: int) -> dict[str, dict[str, float]]:
    """Microseconds per call of each variant: median, 10th and 90th percentile over blocks that take turns."""
    calls_per_block = {}
    for name, call in variants.items():
        for _ in range(3):
            call()
        start_s = time.perf_counter()
        call()
        calls_per_block[name] = max(1, round(BLOCK_S / max(time.perf_counter() - start_s, 1e-7)))
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(num_blocks):
        for name, call in variants.items():
            start_s = time.perf_counter()
            for _ in range(calls_per_block[name]):
                call()
            samples[name].append((time.perf_counter() - start_s) / calls_per_block[name] * 1e6)
    return {
        name: {
            "median_us": statistics.median(times),
            "p10_us": statistics.quantiles(times, n=10)[0],
            "p90_us": statistics.quantiles(times, n=10)[8],
        }
        for name, times in samples.items()
    }


def deepspeed_slots(plan: RoutePlan, capacity: int) -> Tensor:
    """The same routes as slot numbers of DeepSpeed's [E, capacity] buffer, [K, T] int64."""
    first_row = torch.cumsum(plan.rows_per_destination, 0) - plan.rows_per_destination
    destination = torch.repeat_interleave(torch.arange(len(first_row)), plan.rows_per_destination)
    slot_of_row = destination * capacity + torch.arange(len(destination)) - first_row[destination]
    return slot_of_row[plan.slot_to_row].t().contiguous()


def cases(num_tokens: int, top_k: int, num_experts: int, hidden: int, dtype: torch.dtype) -> Iterator[Case]:
    """All operations on one size, each expert its own destination."""
    compiled, reference = load_kernels("compiled"), load_kernels("reference")
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(num_tokens, num_experts, generator=generator)
    topk_idx = scores.topk(top_k).indices.to(torch.int32)
    destinations = torch.arange(num_experts, dtype=torch.int32)
    plan = compiled.plan_routes(topk_idx, destinations, num_experts)
    x = torch.randn(num_tokens, hidden, generator=generator).to(dtype)
    grad = torch.randn(num_tokens, hidden, generator=generator).to(dtype)
    weights = torch.rand(num_tokens, top_k, generator=generator)
    rows = compiled.dispatch_rows(x, plan.row_to_token)
    capacity = int(plan.rows_per_destination.max())
    slots = deepspeed_slots(plan, capacity)
    encoded = _sparse_encode(x, slots, num_experts, capacity).view(-1, hidden)
    leaf_rows, leaf_weights = encoded.clone().requires_grad_(), weights.t().contiguous().requires_grad_()
    decoded = _sparse_decode(leaf_rows, slots, leaf_weights, num_tokens)
    leaf_x = x.clone().requires_grad_()
    encoded_with_graph = _sparse_encode(leaf_x, slots, num_experts, capacity)
    grad_encoded = torch.randn_like(encoded_with_graph)

    # What the two compute is the same; a benchmark of different work would say nothing.
    torch.testing.assert_close(decoded.detach(), compiled.combine_rows(rows, plan.slot_to_row, weights))

    def both(call: Callable[[Kernels], object]) -> dict[str, Callable[[], object]]:
        return {"compiled": lambda: call(compiled), "reference": lambda: call(reference)}

    row_bytes = hidden * dtype.itemsize
    num_rows = len(rows)
    index_bytes = topk_idx.numel() * 8
    yield Case(
        name="plan",
        dtype=torch.int32,
        variants=both(lambda k: k.plan_routes(topk_idx, destinations, num_experts)),
        min_bytes=topk_idx.numel() * 4 + num_rows * (8 + 4 * top_k) + 2 * index_bytes,
    )
    yield Case(
        name="dispatch",
        dtype=dtype,
        variants=both(lambda k: k.dispatch_rows(x, plan.row_to_token))
        | {"deepspeed": lambda: _sparse_encode(x, slots, num_experts, capacity)},
        min_bytes=(num_tokens + num_rows) * row_bytes + num_rows * 8,
    )
    for row_format in get_args(RowFormat):
        records = compiled.quantise_rows(x, plan.row_to_token, row_format)
        yield Case(
            name=f"dispatch to {row_format}",
            dtype=dtype,
            variants=both(lambda k, f=row_format: k.quantise_rows(x, plan.row_to_token, f)),
            min_bytes=num_tokens * row_bytes + num_rows * (record_bytes(hidden) + 8),
        )
        yield Case(
            name=f"rows from {row_format}",
            dtype=dtype,
            variants=both(lambda k, f=row_format, of=records: k.dequantise_rows(of, hidden, f, dtype)),
            min_bytes=num_rows * (record_bytes(hidden) + row_bytes),
        )
    yield Case(
        name="dispatch backward",
        dtype=dtype,
        variants=both(lambda k: k.combine_rows(rows, plan.first_slot_to_row))
        | {"deepspeed": lambda: torch.autograd.grad(encoded_with_graph, leaf_x, grad_encoded, retain_graph=True)},
        min_bytes=(num_tokens + num_rows) * row_bytes + index_bytes,
    )
    yield Case(
        name="combine",
        dtype=dtype,
        variants=both(lambda k: k.combine_rows(rows, plan.slot_to_row, weights))
        | {"deepspeed": lambda: _sparse_decode(encoded, slots, weights.t(), num_tokens)},
        min_bytes=(num_tokens + num_rows) * row_bytes + index_bytes + weights.numel() * 4,
    )
    yield Case(
        name="combine backward",
        dtype=dtype,
        variants=both(lambda k: k.combine_rows_backward(grad, rows, plan.slot_to_row, weights))
        | {"deepspeed": lambda: torch.autograd.grad(decoded, (leaf_rows, leaf_weights), grad, retain_graph=True)},
        min_bytes=(num_tokens + 2 * num_rows) * row_bytes + index_bytes + 2 * weights.numel() * 4,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="time of each routing kernel")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=21)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    params = {"T": options.tokens, "K": options.top_k, "E": options.experts, "D": options.hidden}
    versions = {
        "ds_hybridep": __version__,
        "torch": torch.__version__,
        "deepspeed": deepspeed.__version__,
        "python": platform.python_version(),
    }
    table = []
    for dtype in (torch.float32, torch.bfloat16):
        for case in cases(options.tokens, options.top_k, options.experts, options.hidden, dtype):
            if case.name == "plan" and dtype != torch.float32:
                continue  # it moves no rows
            source = torch.zeros(max(case.min_bytes // 2, 1), dtype=torch.uint8)
            target = torch.empty_like(source)
            copy = {"copy": lambda target=target, source=source: target.copy_(source)}
            times = interleaved_medians_us(case.variants | copy, options.blocks)
            bound_us = times.pop("copy")["median_us"]
            for variant, of_variant in times.items():
                record = {
                    "case": case.name,
                    "variant": variant,
                    "dtype": str(case.dtype).removeprefix("torch."),
                    "params": params,
                    "threads": options.threads,
                    "device": "cpu",
                    "min_bytes": case.min_bytes,
                    "bound_us": round(bound_us, 1),
                    **{key: round(value, 1) for key, value in of_variant.items()},
                    "versions": versions,
                }
                print(json.dumps(record), flush=True)
            table.append((case, bound_us, {name: of_variant["median_us"] for name, of_variant in times.items()}))

    print(f"\n{'us, median':<20}{'dtype':<10}{'bound':>9}{'compiled':>10}{'reference':>11}{'deepspeed':>11}{'x':>7}")
    for case, bound_us, medians in table:
        deepspeed_us = medians.get("deepspeed")
        against = f"{deepspeed_us:11.0f}{deepspeed_us / medians['compiled']:7.1f}" if deepspeed_us else f"{'-':>11}"
        print(
            f"{case.name:<20}{str(case.dtype).removeprefix('torch.'):<10}{bound_us:9.0f}"
            f"{medians['compiled']:10.0f}{medians['reference']:11.0f}{against}"
        )
    print("x: DeepSpeed's time over the compiled one")


if __name__ == "__main__":
    main()
