# SPDX-License-Identifier: Apache-2.0
"""Time of each CUDA kernel beside what the memory allows, and beside DeepSpeed, AutoEP and plain torch.

    python -m benchmarks kernels --out kernels.jsonl [--tokens 4096] [--top-k 8] [--experts 128] [--hidden 7168]

`min_bytes` counts each input and each output of the operation once; `of_copy` is the rate at which they moved,
relative to a large device-to-device copy measured in the same run (bytes read plus written).  Inputs rotate, so that
none is in the L2 cache when its turn comes.  Times are medians over calls between CUDA events; the queue is filled
while the device sleeps, so the host's time is not in them.

Where there is no GPU, or no CUDA kernels, the record says "not run" and why.
"""

import argparse
import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

import torch
from deepspeed.moe import ep_kernels
from deepspeed.moe.sharded_moe import _sparse_decode, _sparse_encode
from torch import Tensor

from benchmarks.common import Record, Records, codec_settings, table
from ds_hybridep.codecs import make_codec
from ds_hybridep.errors import KernelBuildError
from ds_hybridep.geometry.row_format import RowFormat, record_bytes
from ds_hybridep.kernels import Routes, load_kernels

COPY_BYTES = 2**31  # read, and as many written
WARM_UP, CALLS = 5, 30
COLD = 3  # the inputs of all turns together are so many times the L2 cache
SLEEP_CYCLES = 40_000_000  # some 20 ms, in which the host fills the queue
CODECS = {
    "int8": "int8",
    "int4": "int4",
    "int2": "int2",
    "low_rank_4": "low_rank",
    "low_rank_8": {"type": "low_rank", "rank": 8},
}


@dataclass(frozen=True)
class Case:
    """An operation: its variants by name, each a call with one of `turns` sets of inputs."""

    name: str
    params: dict[str, Any]
    variants: dict[str, Callable[[int], object]]
    turns: int
    min_bytes: int


def both(call: Callable[[Any, int], object], ours: Any, by_torch: Any) -> dict[str, Callable[[int], object]]:
    return {"ours": lambda turn: call(ours, turn), "torch": lambda turn: call(by_torch, turn)}


def num_turns(num_bytes: int) -> int:
    """Sets of inputs of `num_bytes` each that are more than the L2 cache holds."""
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    return max(2, -(-COLD * l2_bytes // num_bytes) + 1)


def times_us(call: Callable[[int], object], turns: int) -> list[float]:
    """Microseconds of each of CALLS calls on the device."""
    for turn in range(WARM_UP):
        call(turn % turns)
    torch.cuda.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(CALLS)]
    torch.cuda._sleep(SLEEP_CYCLES)
    for turn, (start, end) in enumerate(events):
        start.record()
        call(turn % turns)
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in events]


def copy_bytes_per_s() -> float:
    """Bytes read plus written each second by a large copy."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / (statistics.median(times_us(lambda turn: target.copy_(source), 1)) * 1e-6)


def deepspeed_slots(plan: Routes, capacity: int) -> Tensor:
    """The routes of `plan` as slot numbers of DeepSpeed's [E, capacity] buffer, [K, T] int64."""
    counts = torch.tensor(plan.rows_per_destination, device=plan.row_to_token.device)
    first_row = torch.cumsum(counts, 0) - counts
    destination = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    row = torch.arange(len(destination), device=counts.device)
    return (destination * capacity + row - first_row[destination])[plan.slot_to_row].t().contiguous()


def make_routes(options: argparse.Namespace, seed: int) -> tuple[Tensor, Tensor, int]:
    """Arguments of plan_routes: even routing, each expert its own destination."""
    generator = torch.Generator("cuda").manual_seed(seed)
    scores = torch.rand(options.tokens, options.experts, generator=generator, device="cuda")
    topk_idx = scores.topk(options.top_k).indices.to(torch.int32)
    return topk_idx, torch.arange(options.experts, dtype=torch.int32, device="cuda"), options.experts


def row_params(options: argparse.Namespace) -> dict[str, Any]:
    return {"T": options.tokens, "K": options.top_k, "E": options.experts, "D": options.hidden, "dtype": options.dtype}


def plan_cases(options: argparse.Namespace, kernels: Any) -> Iterator[Case]:
    """Route planning alone, with the wait for the split sizes."""
    routes = [make_routes(options, seed) for seed in range(4)]
    num_slots = options.tokens * options.top_k
    variants = both(lambda one, turn: one.plan_routes(*routes[turn]), kernels, load_kernels("reference"))
    yield Case("plan", row_params(options), variants, 4, num_slots * (4 + 8 + 8) + num_slots * (8 + 4 * options.top_k))


def row_cases(options: argparse.Namespace, kernels: Any) -> Iterator[Case]:
    """Dispatch, combine and its backward."""
    dtype, hidden, params = getattr(torch, options.dtype), options.hidden, row_params(options)
    plan = kernels.plan_routes(*make_routes(options, 0))
    num_rows, num_slots = plan.num_rows, options.tokens * options.top_k
    row_bytes = hidden * dtype.itemsize
    few, on_few = load_kernels("compiled", "cuda", options.sms), f"ours, {options.sms} SMs"
    turns = num_turns(options.tokens * row_bytes)
    x = [torch.randn(options.tokens, hidden, device="cuda").to(dtype) for _ in range(turns)]
    weights = torch.rand(options.tokens, options.top_k, device="cuda")
    capacity = max(plan.rows_per_destination)
    slots = deepspeed_slots(plan, capacity)
    places = plan.first_slot_to_row, num_rows
    rows = kernels.dispatch_rows(x[0], *places)
    assert torch.equal(rows, x[0][plan.row_to_token]), "dispatched rows differ from those of torch"
    assert torch.equal(rows, few.dispatch_rows(x[0], *places))
    variants: dict[str, Callable[[int], object]] = {
        "ours": lambda turn: kernels.dispatch_rows(x[turn], *places),
        on_few: lambda turn: few.dispatch_rows(x[turn], *places),
        "torch index_select": lambda turn: x[turn].index_select(0, plan.row_to_token),
        "deepspeed _sparse_encode": lambda turn: _sparse_encode(x[turn], slots, options.experts, capacity),
        "autoep gather_rows": lambda turn: ep_kernels.gather_rows(x[turn], plan.row_to_token),
    }
    yield Case("dispatch", params, variants, len(x), (options.tokens + num_rows) * row_bytes + num_slots * 8)

    many = [rows.clone() for _ in range(num_turns(num_rows * row_bytes))]
    encoded = torch.zeros(options.experts * capacity, hidden, dtype=dtype, device="cuda")
    is_row = plan.slot_to_row >= 0
    encoded[slots.t()[is_row]] = rows[plan.slot_to_row[is_row]]
    gates = weights.t().contiguous()
    wanted = _sparse_decode(encoded, slots, gates, options.tokens)
    for one in (kernels, few):
        found = one.combine_rows(rows, plan.slot_to_row, weights)
        torch.testing.assert_close(found.float(), wanted.float(), rtol=1e-2, atol=1e-2)

    def by_torch(turn: int) -> Tensor:
        picked = many[turn].index_select(0, plan.slot_to_row.flatten()).view(options.tokens, options.top_k, hidden)
        return (picked * weights.unsqueeze(-1)).sum(1).to(dtype)

    combine_bytes = (options.tokens + num_rows) * row_bytes + num_slots * (8 + 4)
    variants = {
        "ours": lambda turn: kernels.combine_rows(many[turn], plan.slot_to_row, weights),
        on_few: lambda turn: few.combine_rows(many[turn], plan.slot_to_row, weights),
        "torch": by_torch,
        "deepspeed _sparse_decode": lambda turn: _sparse_decode(encoded, slots, gates, options.tokens),
    }
    yield Case("combine", params, variants, len(many), combine_bytes)

    grad = torch.randn(options.tokens, hidden, device="cuda").to(dtype)
    leaf, leaf_gates = encoded.requires_grad_(), gates.requires_grad_()
    decoded = _sparse_decode(leaf, slots, leaf_gates, options.tokens)
    variants = {
        "ours": lambda turn: kernels.combine_rows_backward(grad, many[turn], plan.slot_to_row, weights),
        "deepspeed": lambda turn: torch.autograd.grad(decoded, (leaf, leaf_gates), grad, retain_graph=True),
    }
    yield Case("combine backward", params, variants, len(many), combine_bytes + num_rows * row_bytes + num_slots * 4)


def record_cases(options: argparse.Namespace, kernels: Any) -> Iterator[Case]:
    """Dispatch to rows of one byte an element, and back to whole ones."""
    dtype, hidden, params = getattr(torch, options.dtype), options.hidden, row_params(options)
    pair = {"ours": kernels, "torch": load_kernels("reference")}
    plan = kernels.plan_routes(*make_routes(options, 0))
    places, num_rows = plan.first_slot_to_row, plan.num_rows
    row_bytes = hidden * dtype.itemsize
    turns = num_turns(options.tokens * row_bytes)
    x = [torch.randn(options.tokens, hidden, device="cuda").to(dtype) for _ in range(turns)]
    for kind in get_args(RowFormat):
        made = {name: one.quantise_rows(x[0], places, num_rows, kind) for name, one in pair.items()}
        read = {name: one.dequantise_rows(made["ours"], hidden, kind, dtype) for name, one in pair.items()}
        assert torch.equal(made["ours"], made["torch"]), "records differ"
        assert torch.equal(read["ours"], read["torch"]), "rows differ"
        many = [made["ours"].clone() for _ in range(num_turns(made["ours"].numel()))]
        del made, read
        variants = both(
            lambda one, turn, kind=kind: one.quantise_rows(x[turn], places, num_rows, kind), *pair.values()
        )
        num_bytes = options.tokens * row_bytes + num_rows * record_bytes(hidden) + places.numel() * 8
        yield Case(f"dispatch to {kind}", params, variants, len(x), num_bytes)
        variants = both(
            lambda one, turn, kind=kind, many=many: one.dequantise_rows(many[turn], hidden, kind, dtype),
            *pair.values(),
        )
        yield Case(f"rows from {kind}", params, variants, len(many), num_rows * (record_bytes(hidden) + row_bytes))


def codec_cases(options: argparse.Namespace, kernels: Any) -> Iterator[Case]:
    """Encoding with the mirror's update, and decoding onto a replica, of 16 experts of 2048 x 1536."""
    shape = (16, 2048, 1536)
    num_elements, params = math.prod(shape), dict(zip(("n", "rows", "cols"), shape, strict=True))
    weights = [torch.randn(shape, device="cuda") for _ in range(num_turns(num_elements * 8))]
    mirrors = [weight + 0.01 * torch.randn_like(weight) for weight in weights]
    for name, spec in CODECS.items():
        pair = [make_codec(codec_settings(spec), kernels=kind) for kind in ("compiled", "reference")]
        states = {id(codec): codec.new_state(*shape, device="cuda") for codec in pair}
        # The fresh start of low rank comes once in many steps.
        packets, _ = (codec.encode(weights[0], states[id(codec)]) for codec in pair)
        variants = both(
            lambda one, turn, states=states: one.encode_update(weights[turn], mirrors[turn], states[id(one)]), *pair
        )
        yield Case(f"encode {name}", params, variants, len(weights), num_elements * 12 + packets.numel())
        variants = both(lambda one, turn, packets=packets: one.decode_add(packets, mirrors[turn]), *pair)
        yield Case(f"decode {name}", params, variants, len(weights), num_elements * 8 + packets.numel())


CASES = {"plan": plan_cases, "rows": row_cases, "records": record_cases, "codecs": codec_cases}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--sms", type=int, default=8, help="multiprocessors for the persistent variants")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))


def run(args: argparse.Namespace, records: Records) -> None:
    if reason := why_not():
        records.add({}, status="not run", reason=reason)
        return
    records.device = torch.cuda.get_device_name()
    kernels, copy = load_kernels("compiled", "cuda"), copy_bytes_per_s()
    records.add({"kernel": "copy", "variant": "torch"}, gb_per_s=round(copy / 1e9, 1), cuda=torch.version.cuda)
    for case in itertools.chain.from_iterable(CASES[name](args, kernels) for name in args.only):
        for variant, call in case.variants.items():
            about = {"kernel": case.name, "variant": variant, **case.params}
            try:
                times = times_us(call, case.turns)
            except torch.cuda.OutOfMemoryError as error:
                records.add(about, status="not run", reason=str(error))
                continue
            deciles, median_us = statistics.quantiles(times, n=10), statistics.median(times)
            records.add(
                about, median_us=round(median_us, 2), p10_us=round(deciles[0], 2), p90_us=round(deciles[8], 2),
                min_bytes=case.min_bytes, floor_us=round(case.min_bytes / copy * 1e6, 2),
                gb_per_s=round(case.min_bytes / median_us / 1e3, 1),
                of_copy=round(case.min_bytes / (median_us * 1e-6) / copy, 3),
            )  # fmt: skip


def why_not() -> str | None:
    """Why nothing can be measured here."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    try:
        load_kernels("compiled", "cuda")
    except KernelBuildError as error:
        return str(error)
    return None


def report(records: list[Record], args: argparse.Namespace) -> str:
    rows = []
    for record in records:
        names = [record["params"].get("kernel", "all"), record["params"].get("variant", "")]
        if "median_us" in record:
            numbers = [f"{record['median_us']:.1f}", f"{record['floor_us']:.1f}", f"{record['gb_per_s']:.0f}"]
            rows.append([*names, *numbers, f"{record['of_copy']:.1%}"])
        elif "reason" in record:
            rows.append([*names, f"not run: {record['reason']}", "", "", ""])
    return table(("kernel", "variant", "us", "floor", "GB/s", "of copy"), rows)
