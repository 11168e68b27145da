# SPDX-License-Identifier: Apache-2.0
"""Time of each CUDA kernel beside what the memory allows, and beside DeepSpeed, AutoEP, plain torch and Triton.

    python -m benchmarks kernels --out kernels.jsonl [--tokens 4096] [--top-k 8] [--experts 128] [--hidden 7168]

`min_bytes` counts each input and each output of the operation once; `of_copy` is the rate at which they moved,
relative to a large device-to-device copy measured in the same run (bytes read plus written).  Inputs rotate, so that
none is in the L2 cache when its turn comes.  Times are medians.

Where there is no GPU, or no CUDA kernels, the record says "not run" and why.  --pretend takes a CPU in its place.
"""

import argparse
import importlib
import importlib.util
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, get_args

import torch
from deepspeed.moe import ep_kernels
from deepspeed.moe.sharded_moe import _sparse_decode, _sparse_encode
from torch import Tensor

from benchmarks.common import Record, Records, codec_settings, table
from benchmarks.on_device import copy_bytes_per_s, device_for, name_of, num_turns, times_us
from ds_hybridep.codecs import Codec, CodecState, PatchCodec, make_codec
from ds_hybridep.codecs.compact import compact, expand
from ds_hybridep.config_codecs import recommended_codecs
from ds_hybridep.errors import KernelBuildError
from ds_hybridep.geometry.row_format import RowFormat, record_bytes
from ds_hybridep.kernels import Mode, Routes, load_kernels

PRETENDED = {"tokens": 64, "top_k": 2, "experts": 8, "hidden": 64}
EXPERTS = {"cuda": (16, 2048, 768), "cpu": (2, 64, 48)}  # fp32 [n, rows, cols]: a rank's share of Qwen3-30B-A3B
CHANGED = 0.006  # share of bf16 weights that a patch changes: about that of a step of AdamW at 1e-5
BLOCKWISE = {name: codec_settings(name) for name in ("int8", "int4", "int2")}
# The recommended ones of experts; their products are torch's.
LOW_RANK = {one.name: one for one in (recommended_codecs(4).weight, recommended_codecs(4).gradient)}


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


def has_triton(device: torch.device) -> bool:
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def deepspeed_slots(plan: Routes, capacity: int) -> Tensor:
    """The routes of `plan` as slot numbers of DeepSpeed's [E, capacity] buffer, [K, T] int64."""
    counts = torch.tensor(plan.rows_per_destination, device=plan.row_to_token.device)
    first_row = torch.cumsum(counts, 0) - counts
    destination = torch.repeat_interleave(torch.arange(len(counts), device=counts.device), counts)
    row = torch.arange(len(destination), device=counts.device)
    return (destination * capacity + row - first_row[destination])[plan.slot_to_row].t().contiguous()


def make_routes(options: argparse.Namespace, seed: int) -> tuple[Tensor, Tensor, int]:
    """Arguments of plan_routes: even routing, each expert its own destination."""
    generator = torch.Generator(options.device).manual_seed(seed)
    scores = torch.rand(options.tokens, options.experts, generator=generator, device=options.device)
    topk_idx = scores.topk(options.top_k).indices.to(torch.int32)
    return topk_idx, torch.arange(options.experts, dtype=torch.int32, device=options.device), options.experts


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
    device = options.device
    plan = kernels.plan_routes(*make_routes(options, 0))
    num_rows, num_slots = plan.num_rows, options.tokens * options.top_k
    row_bytes = hidden * dtype.itemsize
    few, on_few = load_kernels("compiled", device, options.sms), f"ours, {options.sms} SMs"
    turns = num_turns(options.tokens * row_bytes, device)
    x = [torch.randn(options.tokens, hidden, device=device).to(dtype) for _ in range(turns)]
    weights = torch.rand(options.tokens, options.top_k, device=device)
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
    if has_triton(device):
        scatter_rows = importlib.import_module("benchmarks.triton_kernels").scatter_rows
        by_token = plan.first_slot_to_row
        variants["Triton, by token"] = lambda turn: scatter_rows(x[turn], by_token, num_rows)
    yield Case("dispatch", params, variants, len(x), (options.tokens + num_rows) * row_bytes + num_slots * 8)

    many = [rows.clone() for _ in range(num_turns(num_rows * row_bytes, device))]
    encoded = torch.zeros(options.experts * capacity, hidden, dtype=dtype, device=device)
    is_row = plan.slot_to_row >= 0
    encoded[slots.t()[is_row]] = rows[plan.slot_to_row[is_row]]
    gates = weights.t().contiguous()
    wanted = _sparse_decode(encoded, slots, gates, options.tokens)
    for one in (kernels, few):
        found = one.combine_rows(rows, plan.slot_to_row, weights)
        torch.testing.assert_close(found.float(), wanted.float(), rtol=1e-2, atol=1e-2)

    def by_torch(turn: int) -> Tensor:
        picked = many[turn].index_select(0, plan.slot_to_row.flatten()).view(options.tokens, options.top_k, hidden)
        total: Tensor = (picked * weights.unsqueeze(-1)).sum(1)
        return total.to(dtype)

    combine_bytes = (options.tokens + num_rows) * row_bytes + num_slots * (8 + 4)
    variants = {
        "ours": lambda turn: kernels.combine_rows(many[turn], plan.slot_to_row, weights),
        on_few: lambda turn: few.combine_rows(many[turn], plan.slot_to_row, weights),
        "torch": by_torch,
        "deepspeed _sparse_decode": lambda turn: _sparse_decode(encoded, slots, gates, options.tokens),
    }
    yield Case("combine", params, variants, len(many), combine_bytes)

    grad = torch.randn(options.tokens, hidden, device=device).to(dtype)
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
    device = options.device
    turns = num_turns(options.tokens * row_bytes, device)
    x = [torch.randn(options.tokens, hidden, device=device).to(dtype) for _ in range(turns)]

    def quantise(kind: RowFormat, one: Any, turn: int) -> object:
        return one.quantise_rows(x[turn], places, num_rows, kind)

    def dequantise(kind: RowFormat, many: Sequence[Tensor], one: Any, turn: int) -> object:
        return one.dequantise_rows(many[turn], hidden, kind, dtype)

    for kind in get_args(RowFormat):
        made = {name: one.quantise_rows(x[0], places, num_rows, kind) for name, one in pair.items()}
        read = {name: one.dequantise_rows(made["ours"], hidden, kind, dtype) for name, one in pair.items()}
        assert torch.equal(made["ours"], made["torch"]), "records differ"
        assert torch.equal(read["ours"], read["torch"]), "rows differ"
        many = [made["ours"].clone() for _ in range(num_turns(made["ours"].numel(), device))]
        del made, read
        variants = both(partial(quantise, kind), *pair.values())
        num_bytes = options.tokens * row_bytes + num_rows * record_bytes(hidden) + places.numel() * 8
        yield Case(f"dispatch to {kind}", params, variants, len(x), num_bytes)
        variants = both(partial(dequantise, kind, many), *pair.values())
        yield Case(f"rows from {kind}", params, variants, len(many), num_rows * (record_bytes(hidden) + row_bytes))


def codec_cases(options: argparse.Namespace, kernels: Any) -> Iterator[Case]:
    """Of fp32 experts: encoding with the mirror's update, or with a residual, and decoding onto a replica."""
    device, shape = options.device, EXPERTS[options.device.type]
    num_elements, params = math.prod(shape), dict(zip(("n", "rows", "cols"), shape, strict=True))
    a = [torch.randn(shape, device=device) for _ in range(num_turns(num_elements * 8, device))]
    other = [one + 0.01 * torch.randn_like(one) for one in a]

    def with_mirror(codec: Codec, state: CodecState, turn: int) -> Tensor:
        return codec.encode_update(a[turn], other[turn], state)

    def with_residual(codec: Codec, state: CodecState, turn: int) -> Tensor:
        return codec.encode_with_residual(a[turn], other[turn], state)

    def decode(codec: Codec, packets: Tensor, turn: int) -> Tensor:
        return codec.decode_add(packets, other[turn])

    for name, settings in (BLOCKWISE | LOW_RANK).items():
        modes: dict[str, Mode] = {"ours": "compiled"}
        if name in BLOCKWISE:
            modes["torch"] = "reference"
        codecs = {label: make_codec(settings, kernels=mode) for label, mode in modes.items()}
        states = {label: codec.new_state(*shape, device=device) for label, codec in codecs.items()}
        # The fresh start of low rank comes once in many steps.
        packets = [codec.encode(a[0], states[label]) for label, codec in codecs.items()][0]
        num_bytes = num_elements * 12 + packets.numel()
        for way, encode in {"mirror": with_mirror, "residual": with_residual}.items():
            variants: dict[str, Callable[[int], object]] = {
                label: partial(encode, codec, states[label]) for label, codec in codecs.items()
            }
            if name == "int8" and way == "mirror" and has_triton(device):
                simple = importlib.import_module("benchmarks.triton_kernels").Int8(num_elements, device)
                variants["Triton, simple"] = partial(
                    lambda simple, turn: simple.encode_update(a[turn], other[turn]), simple
                )
            yield Case(f"encode {name}, {way}", params, variants, len(a), num_bytes)
        variants = {label: partial(decode, codec, packets) for label, codec in codecs.items()}
        yield Case(f"decode {name}", params, variants, len(a), num_bytes - num_elements * 4)


def patch_cases(options: argparse.Namespace, kernels: Any) -> Iterator[Case]:
    """Exact changes of bf16 weights, and the 13 of 16 bits that sites keep of a value (`codecs.compact`)."""
    device, size = options.device, math.prod(EXPERTS[options.device.type])
    turns, params, patch = num_turns(4 * size, device), {"n": size}, PatchCodec(kernels="compiled")
    sent = (0.02 * torch.randn(size, device=device)).bfloat16()
    new = torch.where(torch.rand(size, device=device) < CHANGED, (sent.float() * 1.006).bfloat16(), sent)
    held, kept = ([sent.clone() for _ in range(turns)] for _ in range(2))
    packets, goals = [], (new, sent)  # there and back
    for start, goal in ((sent, new), (new, sent)):
        room = torch.empty(patch.max_bytes(size), dtype=torch.uint8, device=device)
        packets.append(room[: patch.encode(goal, start.clone(), room, 0)])

    def there_and_back(step: Callable[[int, bool], object]) -> Callable[[int], object]:
        """A call needs what the one before it has left: every second one with the same inputs goes back."""
        is_back = [False] * turns

        def call(turn: int) -> None:
            step(turn, is_back[turn])
            is_back[turn] = not is_back[turn]

        return call

    encode = there_and_back(lambda turn, is_back: patch.encode(goals[is_back], kept[turn], room, 0))
    decode = there_and_back(lambda turn, is_back: patch.decode(packets[is_back], held[turn]))
    length = len(packets[0])
    packets = [packet.clone() for packet in packets]  # the room is written again
    yield Case("encode patch", params, {"ours": encode}, turns, 6 * size + length)
    yield Case("decode patch", params, {"ours": decode}, turns, 4 * size + length)
    x = [torch.randn(1, size, device=device) for _ in range(turns)]
    words = compact(x[0], 1, "compiled")
    num_bytes = x[0].nbytes + words.nbytes
    yield Case("compact", params, {"ours": lambda turn: compact(x[turn], 1, "compiled")}, turns, num_bytes)
    yield Case("expand", params, {"ours": lambda turn: expand(words, x[turn], "compiled")}, turns, num_bytes)


CASES = {"plan": plan_cases, "rows": row_cases, "records": record_cases, "codecs": codec_cases, "patches": patch_cases}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--sms", type=int, default=8, help="multiprocessors for the persistent variants")
    parser.add_argument("--only", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--pretend", action="store_true", help="small sizes on a CPU, to try this program itself")


def run(args: argparse.Namespace, records: Records) -> int:
    if args.pretend:
        vars(args).update(PRETENDED)
    elif reason := why_not():
        records.add({}, status="not run", reason=reason)
        return 0
    args.device = device_for(args.pretend)
    records.device = name_of(args.device)
    kernels, copy = load_kernels("compiled", args.device), copy_bytes_per_s(args.device)
    records.add({"kernel": "copy", "variant": "torch"}, gb_per_s=round(copy / 1e9, 1), cuda=torch.version.cuda)
    for name in args.only:
        try:
            for case in CASES[name](args, kernels):
                for variant, call in case.variants.items():
                    measure(case, variant, call, copy, args.device, records)
        except Exception as error:  # noqa: BLE001 (the others go on, and the table has it)
            records.add({"kernel": name}, status="failed", reason=reason_of(error))
    return int(any(record.get("status") == "failed" for record in records.rows))


def measure(
    case: Case, variant: str, call: Callable[[int], object], copy: float, device: torch.device, records: Records
) -> None:
    """Add a record of one variant of a case; `copy`: bytes per second of a copy."""
    about = {"kernel": case.name, "variant": variant, **case.params}
    try:
        times = times_us(call, case.turns, device)
    except torch.cuda.OutOfMemoryError as error:
        records.add(about, status="not run", reason=reason_of(error))
        return
    except Exception as error:  # noqa: BLE001 (rivals may lack a kernel for this device; ours are to be seen, too)
        status = "failed" if variant.startswith("ours") else "not run"
        records.add(about, status=status, reason=reason_of(error))
        return
    deciles, median_us = statistics.quantiles(times, n=10), statistics.median(times)
    records.add(
        about, median_us=round(median_us, 2), p10_us=round(deciles[0], 2), p90_us=round(deciles[8], 2),
        min_bytes=case.min_bytes, floor_us=round(case.min_bytes / copy * 1e6, 2),
        gb_per_s=round(case.min_bytes / median_us / 1e3, 1),
        of_copy=round(case.min_bytes / (median_us * 1e-6) / copy, 3),
    )  # fmt: skip


def reason_of(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:200]}"


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
            rows.append([*names, f"{record['status']}: {record['reason']}", "", "", ""])
    copies = [f"; a copy moves {one['gb_per_s']:.0f} GB/s" for one in records if "gb_per_s" in one][:1]
    failed = [str(one["params"].get("kernel")) for one in records if one.get("status") == "failed"]
    end = f"{sum('median_us' in one for one in records)} variants measured{''.join(copies)}"
    end += f"; failed: {', '.join(failed)}" if failed else ""
    return f"{table(('kernel', 'variant', 'us', 'floor', 'GB/s', 'of copy'), rows)}\n\n{end}"
