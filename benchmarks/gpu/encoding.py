# SPDX-License-Identifier: Apache-2.0
"""Phase "encoding": what the recommended codecs of gradients take, alone and beside the computing that hides them.

    python -m benchmarks.gpu.encoding [--pretend] [--out FILE]

For each shape: encoding with a residual, decoding, and what computes meanwhile in a step, an expert's forward and
backward, or that of the output layer.  "Both" runs the encoding in a stream of its own beside the computing: the time
until both are done, over the computing alone.  `plan` assumes that most of an encoding hides like this.
"""

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.common import Record, Records, table
from benchmarks.on_device import copy_bytes_per_s, device_for, median_us, name_of, queueing_us, wait
from ds_hybridep.codecs import Codec, make_codec
from ds_hybridep.config_codecs import recommended_codecs
from ds_hybridep.geometry.packets import FP32_BYTES
from ds_hybridep.plan.codec_costs import codec_cost

TOKENS = 8192  # of a rank and micro-step
GRADIENT, DENSE_GRADIENT = recommended_codecs(2).gradient, recommended_codecs(2).dense_gradient
NUM_KERNELS = 6  # the longest of an encoding that are listed
ENCODES = 3  # beside one computing, so that the shorter one is not over at once


class Work(NamedTuple):
    """A gradient, and what computes while it is encoded."""

    title: str
    shape: tuple[int, int, int]  # [n, rows, cols]
    settings: Any  # of the codec
    computing: str
    tokens: int  # rows that each of the n matrices computes with


WORKS = (
    Work("experts of Qwen3-30B-A3B", (16, 2048, 768), GRADIENT, "16 experts' forward and backward", TOKENS // 2),
    Work("an expert of Mixtral-8x7B", (1, 14336, 4096), GRADIENT, "an expert's forward and backward", TOKENS * 2),
    Work("an eighth of Qwen3's embedding", (1, 18992, 2048), DENSE_GRADIENT, "its product as output layer", TOKENS),
)
PRETENDED = tuple(
    work._replace(shape=shape, tokens=8)
    for work, shape in zip(WORKS, ((2, 64, 48), (1, 96, 64), (1, 200, 64)), strict=True)
)


def computing_of(work: Work, device: torch.device) -> Callable[[int], object]:
    """Forward and backward in bf16: of a gated expert with three matrices, or of one matrix for a dense gradient."""
    n, rows, cols = work.shape
    shapes = [(n, rows, cols)] * (1 if work.settings is DENSE_GRADIENT else 3)
    weights = [(0.02 * torch.randn(shape, device=device)).bfloat16().requires_grad_() for shape in shapes]
    x = torch.randn(n, work.tokens, cols, device=device).bfloat16().requires_grad_()

    def forward() -> Tensor:
        if len(weights) == 1:
            return torch.bmm(x, weights[0].mT)
        gate, up, down = weights
        return torch.bmm(torch.nn.functional.silu(torch.bmm(x, gate.mT)) * torch.bmm(x, up.mT), down)

    grad = torch.randn_like(forward())
    return lambda _: torch.autograd.grad(forward(), (x, *weights), grad)


def planned_ms(work: Work) -> tuple[float, float]:
    """Milliseconds of encoding and decoding that `plan` assumes, for an H100."""
    cost = codec_cost(work.settings.model_dump(), [work.shape], FP32_BYTES)
    num_bytes = math.prod(work.shape) * FP32_BYTES
    return num_bytes / cost.encode_bytes_per_s * 1e3, num_bytes / cost.decode_bytes_per_s * 1e3


def beside(encode: Callable[[int], object], compute: Callable[[int], object], device: torch.device) -> float:
    """Both together over the computing alone: ENCODES encodings, and about as much computing as takes as long."""
    each_us = median_us(encode, device), median_us(compute, device)
    num_computes = max(round(ENCODES * each_us[0] / each_us[1]), 1)

    def compute_long(turn: int) -> None:
        for _ in range(num_computes):
            compute(turn)

    def both(turn: int) -> None:
        stream = torch.cuda.current_stream()
        other.wait_stream(stream)
        with torch.cuda.stream(other):
            for _ in range(ENCODES):
                encode(turn)
        compute_long(turn)
        stream.wait_stream(other)

    other = torch.cuda.Stream(device)
    return median_us(both, device) / median_us(compute_long, device)


def extra_bytes(call: Callable[[int], object], device: torch.device) -> int:
    """Memory of the device that a call takes while it runs."""
    wait(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call(0)
    return torch.cuda.max_memory_allocated(device) - before


def longest_kernels(call: Callable[[int], object], device: torch.device) -> list[tuple[str, int, float]]:
    """(name, launches, milliseconds) of the kernels of one call, the longest first; [] where nothing can tell."""
    if device.type == "cpu":
        return []
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call(0)
        wait(device)
    found: dict[str, tuple[int, float]] = {}
    for event in seen.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            launches, spent_ms = found.get(event.name, (0, 0.0))
            found[event.name] = launches + 1, spent_ms + event.time_range.elapsed_us() / 1e3
    return sorted(((name, *rest) for name, rest in found.items()), key=lambda one: -one[2])


def measure(work: Work, device: torch.device, records: Records) -> None:
    """Add a record of one kind of gradients."""
    codec: Codec = make_codec(work.settings, kernels="compiled")
    a, residual, into = (torch.randn(work.shape, device=device) for _ in range(3))
    state = codec.new_state(*work.shape, device=device)
    packets = codec.encode_with_residual(a, residual, state)  # the fresh start comes once in many steps
    compute = computing_of(work, device)

    def encode(_: int) -> Tensor:
        return codec.encode_with_residual(a, residual, state)

    def decode(_: int) -> Tensor:
        return codec.decode_add(packets, into)

    planned = planned_ms(work)
    measured: dict[str, Any] = {
        "ratio": math.prod(work.shape) * FP32_BYTES / packets.numel(),
        "encode_ms": median_us(encode, device) / 1e3, "planned_encode_ms": planned[0],
        "decode_ms": median_us(decode, device) / 1e3, "planned_decode_ms": planned[1],
        "host_ms": queueing_us(lambda: encode(0), device) / 1e3,
        "computing_ms": median_us(compute, device) / 1e3,
    }  # fmt: skip
    if device.type == "cuda":
        measured["extra_mb"] = extra_bytes(encode, device) / 1e6
        measured["both_over_computing"] = beside(encode, compute, device)
    measured = {name: round(value, 4) for name, value in measured.items()}
    try:
        measured["kernels"] = longest_kernels(encode, device)
    except RuntimeError as error:  # the driver may forbid it
        measured["kernels"], measured["why_no_kernels"] = [], str(error).splitlines()[0][:200]
    n, rows, cols = work.shape
    about = {"work": work.title, "n": n, "rows": rows, "cols": cols, "codec": work.settings.name}
    records.add({**about, "computing": work.computing}, **measured)


def report(rows: Sequence[Record], copy: float) -> str:
    """Markdown; `copy`: bytes each second."""
    header = (
        "gradient", "ratio", "encode ms", "planned", "decode ms", "planned", "host ms", "extra MB", "computing ms",
        "both / computing",
    )  # fmt: skip
    columns = (
        "ratio", "encode_ms", "planned_encode_ms", "decode_ms", "planned_decode_ms", "host_ms", "extra_mb",
        "computing_ms", "both_over_computing",
    )  # fmt: skip
    lines, parts = [], []
    for row in rows:
        about = row["params"]
        name = f"{about['work']}, {about['n']} x {about['rows']} x {about['cols']}; beside {about['computing']}"
        lines.append([name, *(row.get(column, "-") for column in columns)])
        kernels = row["kernels"]
        if kernels:
            launches, spent_ms = sum(one[1] for one in kernels), sum(one[2] for one in kernels)
            longest = [f"{ms:8.3f} ms {count:4d} x {name[:90]}" for name, count, ms in kernels[:NUM_KERNELS]]
            head = f"Encoding {about['work']}: {launches} launches, {spent_ms:.3f} ms. The longest:"
            parts.append("\n".join([head, "", "````", *longest, "````"]))
    notes = f"A copy moves {copy / 1e9:.0f} GB/s. `planned` is what `plan` assumes for an H100."
    return "\n\n".join([notes, table(header, lines), *parts])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.encoding", description=__doc__)
    parser.add_argument("--pretend", action="store_true", help="small sizes on a CPU")
    parser.add_argument("--out", type=Path, help="JSON lines are appended here")
    args = parser.parse_args(arguments)
    device = device_for(args.pretend)
    records, copy, failed = Records("encoding", args.out, name_of(device)), copy_bytes_per_s(device), []
    for work in PRETENDED if args.pretend else WORKS:
        try:
            measure(work, device, records)
        except Exception as error:  # noqa: BLE001 (the others go on)
            failed.append(f"{work.title}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")
    print(report(records.rows, copy))
    said = ", ".join(f"{one['encode_ms']:.2f} ms for {one['params']['work']}" for one in records.rows)
    print("\nencoding takes " + "; ".join([said, *(f"FAILED: {one}" for one in failed)]))
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
