# SPDX-License-Identifier: Apache-2.0
"""Phase "definitions": each kernel beside its definition in PyTorch on the CPU, at sizes that fill a GPU.

    python -m benchmarks.gpu.definitions [--pretend] [--small] [--in-one] [GROUP ...]

Groups run in processes of their own, since one error of the device ends all work of its process.  Results are equal
bit for bit, but for the gradient of gates, whose sums have another order, and for what low rank encodes.
"""

import argparse
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.common import codec_settings
from benchmarks.on_device import device_for, wait
from ds_hybridep.codecs import Codec, PatchCodec, make_codec
from ds_hybridep.codecs.compact import compact, expand
from ds_hybridep.config_codecs import recommended_codecs
from ds_hybridep.kernels import Kernels, Mode, Routes, load_kernels

GATE_TOLERANCE = 1e-5  # relative L2: sums of some thousand products in fp32, in another order
SUM_TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}  # one rounding more, of the sum
LOW_RANK_TOLERANCE = 0.02  # of the residual's size: the directions that are found hang on the order of sums
FEW_SMS = (1, 8, 24)
BLOCKWISE = (
    "int8", "int4", "int2", {"type": "int4", "block": 8}, {"type": "int4", "block": 32}, {"type": "int2", "block": 64},
    {"type": "int2", "block": 512}, {"type": "int8", "block": 1024},
)  # fmt: skip
LOW_RANK = (
    *(recommended_codecs(4)[at] for at in (0, 1, 3)),  # of weights, gradients and dense gradients
    codec_settings({"type": "low_rank", "rank": 35}),
)
POISON_BYTES = (2**28, 2**22, 2**20 - 512, 2**16, 2**12, 512)
LIMIT_S = 220  # of all groups; the phase has a little more
LINES = 12  # of the output of a group that failed


class Rows(NamedTuple):
    """Sizes of a routing."""

    dtype: torch.dtype
    tokens: int
    hidden: int
    top_k: int
    experts: int


class Bench(NamedTuple):
    """Where groups run."""

    device: torch.device
    is_small: bool

    def kernels(self, num_sms: int | None = None) -> Kernels:
        """Compiled kernels; a CPU has no multiprocessors to choose."""
        return load_kernels("compiled", self.device, num_sms if self.device.type == "cuda" else None)

    def rows(self) -> list[Rows]:
        """Whole and odd rows, in each dtype."""
        bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
        if self.is_small:
            return [Rows(bf16, 37, 64, 4, 9), Rows(fp32, 33, 20, 2, 5), Rows(fp16, 40, 33, 3, 6)]
        return [
            Rows(bf16, 4096, 7168, 8, 128), Rows(bf16, 5000, 2048, 8, 128), Rows(fp32, 3001, 1000, 4, 33),
            Rows(fp16, 2047, 2050, 6, 64), Rows(bf16, 1025, 33, 2, 8),
        ]  # fmt: skip

    def tensors(self) -> list[tuple[int, int, int]]:
        """Experts, vectors, odd sizes and a matrix, [n, rows, cols]."""
        if self.is_small:
            return [(2, 33, 40), (3, 1, 70), (1, 20, 130)]
        return [(4, 2048, 768), (3, 1, 100_001), (1, 4097, 1030), (1, 1536, 4096)]

    def put(self, value: Tensor) -> Tensor:
        """A copy on the device, even if that is a CPU."""
        return value.to(self.device, copy=True)

    def poison(self) -> None:
        """What torch.empty gives next is full of nan, so an element that is not written shows."""
        for num_bytes in () if self.is_small or self.device.type == "cpu" else POISON_BYTES:
            torch.full((num_bytes // 4,), float("nan"), device=self.device)


# ---- groups ----


def plan(bench: Bench) -> None:
    reference = load_kernels("reference")
    for sizes in bench.rows():
        for num_destinations in (sizes.experts, 2):
            topk = routing(sizes)
            places = (torch.arange(sizes.experts) % num_destinations).to(torch.int32)
            bench.poison()
            found = bench.kernels().plan_routes(bench.put(topk), bench.put(places), num_destinations)
            wanted = reference.plan_routes(topk, places, num_destinations)
            what = f"{sizes}, {num_destinations} destinations"
            assert found.rows_per_destination == wanted.rows_per_destination, what
            for name in ("row_to_token", "row_topk_idx", "slot_to_row", "first_slot_to_row"):
                require_equal(f"{name} of {what}", getattr(found, name), getattr(wanted, name))


def rows(bench: Bench, sms: Sequence[int | None] = (None,)) -> None:
    """Dispatch, combine and its backward."""
    reference = load_kernels("reference")
    for sizes in bench.rows():
        plan = planned(sizes, sizes.experts)
        x = normal(sizes.tokens, sizes.hidden, seed=1).to(sizes.dtype)
        weights = torch.rand(sizes.tokens, sizes.top_k, generator=generator(2))
        grad = normal(sizes.tokens, sizes.hidden, seed=3).to(sizes.dtype)
        wanted = reference.dispatch_rows(x, plan.first_slot_to_row, plan.num_rows)
        sums = reference.combine_rows(wanted, plan.slot_to_row, weights)
        plain = reference.combine_rows(wanted, plan.first_slot_to_row, out_dtype=torch.float32)
        back = reference.combine_rows_backward(grad, wanted, plan.slot_to_row, weights)
        shared = planned(sizes, (sizes.experts + 1) // 2)  # slots share rows
        shared_rows = reference.dispatch_rows(x, shared.first_slot_to_row, shared.num_rows)
        shared_back = reference.combine_rows_backward(grad, shared_rows, shared.slot_to_row, weights)
        for num_sms in sms:
            ours, what = bench.kernels(num_sms), f"{sizes}, {num_sms or 'all'} SMs"
            gates, slots, put = bench.put(weights), bench.put(plan.slot_to_row), bench.put
            bench.poison()
            found = ours.dispatch_rows(put(x), put(plan.first_slot_to_row), plan.num_rows)
            require_equal(f"dispatch of {what}", found, wanted)
            bench.poison()
            require_equal(f"combine of {what}", ours.combine_rows(found, slots, gates), sums)
            bench.poison()
            mine = ours.combine_rows(found, put(plan.first_slot_to_row), out_dtype=torch.float32)
            require_equal(f"combine without weights of {what}", mine, plain)
            bench.poison()
            of_rows, of_gates = ours.combine_rows_backward(put(grad), found, slots, gates)
            require_equal(f"backward to rows of {what}", of_rows, back[0])
            require_near(f"backward to gates of {what}", of_gates, back[1], GATE_TOLERANCE)
            bench.poison()
            of_rows, of_gates = ours.combine_rows_backward(put(grad), put(shared_rows), put(shared.slot_to_row), gates)
            require_near(f"backward to shared rows of {what}", of_rows, shared_back[0], SUM_TOLERANCE[sizes.dtype])
            require_near(f"backward to shared gates of {what}", of_gates, shared_back[1], GATE_TOLERANCE)


def few_sms(bench: Bench) -> None:
    rows(bench, FEW_SMS)


def records(bench: Bench) -> None:
    """Rows of a byte an element."""
    reference = load_kernels("reference")
    for sizes in bench.rows():
        x = normal(sizes.tokens, sizes.hidden, seed=1).to(sizes.dtype)
        x[3, 5] = float("inf")
        routes = planned(sizes, sizes.experts)
        places, num_rows = routes.first_slot_to_row, routes.num_rows
        for kind in ("int8", "fp8"):
            wanted = reference.quantise_rows(x, places, num_rows, kind)
            whole = reference.dequantise_rows(wanted, sizes.hidden, kind, sizes.dtype)
            for num_sms in (None, 8):
                ours, what = bench.kernels(num_sms), f"{kind}, {sizes}, {num_sms or 'all'} SMs"
                bench.poison()
                found = ours.quantise_rows(bench.put(x), bench.put(places), num_rows, kind)
                require_equal(f"records of {what}", found, wanted)
                bench.poison()
                again = ours.dequantise_rows(found, sizes.hidden, kind, sizes.dtype)
                require_equal(f"rows of {what}", again, whole)


def blockwise(bench: Bench) -> None:
    """Packets, mirrors and residuals."""
    for shape in bench.tensors():
        x = normal(*shape, seed=4)
        other = x + 0.01 * normal(*shape, seed=5)
        bad = x.clone()
        bad.view(-1)[7] = float("nan")
        for spec in BLOCKWISE:
            ours, theirs = (codec_of(spec, mode) for mode in ("compiled", "reference"))
            for a in (x, bad):
                for method in ("encode_update", "encode_with_residual"):
                    mine, wanted, what = bench.put(other), other.clone(), f"{method}, {spec}, {shape}"
                    bench.poison()
                    found = getattr(ours, method)(bench.put(a), mine, ours.new_state(*shape, device=bench.device))
                    packets = getattr(theirs, method)(a, wanted, theirs.new_state(*shape))
                    require_equal(f"packets of {what}", found, packets)
                    require_equal(f"mirror or residual of {what}", mine, wanted)
                into = ours.decode_add(found, bench.put(other))
                require_equal(f"decoded {spec}, {shape}", into, theirs.decode_add(packets, other.clone()))


def low_rank(bench: Bench) -> None:
    """Decoding to the bit, with TF32 as well; of encoding, the size of what is left out."""
    for shape in bench.tensors():
        n, num_rows, num_cols = shape
        x = normal(n, num_rows, 8, seed=6) @ normal(n, 8, num_cols, seed=7) + 0.3 * normal(*shape, seed=8)
        for settings in LOW_RANK:
            left = {}
            for device in dict.fromkeys((bench.device, torch.device("cpu"))):
                codec = make_codec(settings, kernels="compiled")
                state, residual = codec.new_state(*shape, device=device), torch.zeros(shape, device=device)
                for _ in range(2):
                    bench.poison()
                    packets = codec.encode_with_residual(x.to(device), residual, state)
                left[device.type] = float(residual.double().norm())
                if device == bench.device:
                    wanted = make_codec(settings, kernels="reference").decode(packets.cpu(), torch.empty(shape))
                    for allows_tf32 in (False, True):
                        torch.backends.cuda.matmul.allow_tf32 = allows_tf32
                        found = codec.decode(packets, torch.empty(shape, device=device))
                        require_equal(f"decoded {settings.name}, {shape}, TF32 {allows_tf32}", found, wanted)
                    torch.backends.cuda.matmul.allow_tf32 = False
            here, there = left[bench.device.type], left["cpu"]
            what = f"{settings.name}, {shape}: leaves {here:.5g}, on the CPU {there:.5g}"
            assert abs(here - there) <= LOW_RANK_TOLERANCE * there + 1e-6, what


def patch(bench: Bench) -> None:
    for dtype, size in ((torch.bfloat16, 3_000_017), (torch.float16, 1_100_000)):
        size = 5001 if bench.is_small else size
        for share in (0.0, 0.04, 1.0):
            sent = (0.02 * normal(size, seed=9)).to(dtype)
            is_changed = torch.rand(size, generator=generator(10)) < share
            new = torch.where(is_changed, (sent.float() * 1.01 + 1e-5).to(dtype), sent)
            packets = []
            for device in (bench.device, torch.device("cpu")):
                codec, held, kept = PatchCodec(kernels="compiled"), *(sent.to(device, copy=True) for _ in range(2))
                room = torch.empty(codec.max_bytes(size), dtype=torch.uint8, device=device)
                length = codec.encode(new.to(device), kept, room, 3)
                codec.decode(room[:length].clone(), held)
                require_equal(f"decoded patch, {dtype}, {share}", held, new)
                require_equal(f"kept patch, {dtype}, {share}", kept, new)
                packets.append(room[:length].cpu())
            require_equal(f"bytes of a patch, {dtype}, {share}", *packets)


def others(bench: Bench) -> None:
    """Values of 13 bits that sites send, and sums that tell whether copies are equal."""
    reference = load_kernels("reference")
    for shape in bench.tensors():
        x = normal(*shape, seed=11)
        bench.poison()
        found, wanted = compact(bench.put(x), 12345, "compiled"), compact(x, 12345, "reference")
        require_equal(f"compact {shape}", found, wanted)
        whole = expand(wanted, torch.empty(shape), "reference")
        require_equal(f"expand {shape}", expand(found, torch.empty(shape, device=bench.device), "compiled"), whole)
    for dtype in (torch.bfloat16, torch.float32, torch.uint8):
        x = (100 * normal(1000 if bench.is_small else 3_000_001, seed=12)).abs().to(dtype)
        require_equal(f"sums of {dtype}", bench.kernels().bit_sums(bench.put(x)), reference.bit_sums(x))


def streams(bench: Bench) -> None:
    """Work is queued on the current stream, can be captured in a graph, and is the same each time."""
    if bench.device.type != "cuda":
        return
    sizes, ours = bench.rows()[0], bench.kernels()
    plan = ours.plan_routes(bench.put(routing(sizes)), torch.arange(sizes.experts).int().cuda(), sizes.experts)
    late = bench.put(normal(sizes.tokens, sizes.hidden, seed=1).to(sizes.dtype))
    x, gates = torch.zeros_like(late), torch.rand(sizes.tokens, sizes.top_k, device=bench.device)

    def step() -> Tensor:
        return ours.combine_rows(ours.dispatch_rows(x, plan.first_slot_to_row, plan.num_rows), plan.slot_to_row, gates)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # code is loaded and memory allocated, which waits for the device
        torch.cuda.synchronize()
        torch.cuda._sleep(50_000_000)
        x.copy_(late)
        found = step()
        assert not stream.query(), "a call has waited for the device"
    torch.cuda.synchronize()
    require_equal("rows that were written late on the same stream", found, step())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    x.mul_(2)
    graph.replay()
    torch.cuda.synchronize()
    for _ in range(5):
        require_equal("a captured graph", captured, step())


GROUPS: dict[str, Callable[[Bench], None]] = {
    one.__name__: one for one in (plan, rows, few_sms, records, blockwise, low_rank, patch, others, streams)
}


# ---- what groups share ----


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int) -> Tensor:
    """Normally distributed values, fp32 on the CPU."""
    return torch.randn(shape, generator=generator(seed))


def routing(sizes: Rows) -> Tensor:
    """Experts of each token, [T, K] int32; some slots were dropped."""
    scores = torch.rand(sizes.tokens, sizes.experts, generator=generator(0))
    topk = scores.topk(sizes.top_k).indices.to(torch.int32).contiguous()
    topk[::7, -1] = -1
    return topk


def planned(sizes: Rows, num_destinations: int) -> Routes:
    """Neighbouring experts go to the same destination."""
    each = -(-sizes.experts // num_destinations)
    places = (torch.arange(sizes.experts) // each).to(torch.int32)
    return load_kernels("reference").plan_routes(routing(sizes), places, num_destinations)


def codec_of(spec: Any, mode: Mode) -> Codec:
    return make_codec(codec_settings(spec), kernels=mode)


def require_equal(what: str, found: Tensor, wanted: Tensor) -> None:
    """AssertionError unless all elements are equal; nan counts as equal to nan."""
    found, wanted = found.detach().cpu(), wanted.detach().cpu()
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype), f"{what}: {found.shape}, {found.dtype}"
    if torch.equal(found, wanted):
        return
    is_other = (found != wanted) & ~((found != found) & (wanted != wanted))
    places = is_other.flatten().nonzero()
    assert not len(places), f"{what}: {len(places)} of {found.numel()} differ, the first at {int(places[0])}"


def require_near(what: str, found: Tensor, wanted: Tensor, tolerance: float) -> None:
    found, wanted = found.detach().cpu().double(), wanted.detach().cpu().double()
    apart = float((found - wanted).norm() / wanted.norm().clamp(min=1e-30))
    assert apart <= tolerance, f"{what}: {apart:.1e} apart, at most {tolerance:g} wanted"


# ---- the phase ----


def check(name: str, bench: Bench) -> bool:
    """Run one group in this process; prints a line, and the error of one that fails."""
    begin_s = time.perf_counter()
    try:
        GROUPS[name](bench)
        wait(bench.device)
        result = "equal"
    except Exception as error:  # noqa: BLE001 (the line names it, and the other groups go on)
        traceback.print_exc()
        result = f"FAILED: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    print(f"- {name}: {result}, {time.perf_counter() - begin_s:.1f} s", flush=True)
    return result == "equal"


def check_apart(shares: Sequence[Sequence[str]], command: Sequence[str]) -> list[str]:
    """Run each share of the groups in a process of its own.  Returns the groups that are not equal."""
    failed, deadline_s = [], time.monotonic() + LIMIT_S
    with tempfile.TemporaryDirectory() as scratch:
        running = []
        for at, names in enumerate(shares):
            with (Path(scratch) / f"{at}").open("w") as log:
                process = subprocess.Popen([*command, "--in-one", *names], stdout=log, stderr=subprocess.STDOUT)
            running.append((process, Path(log.name), names))
        for process, path, names in running:
            try:
                process.wait(max(deadline_s - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            lines = path.read_text(errors="replace").splitlines()
            for name in names:
                line = next((line for line in lines if line.startswith(f"- {name}: ")), f"- {name}: FAILED: no result")
                print(line)
                if ": equal" not in line:
                    failed.append(name)
            if set(names) & set(failed):
                print("\n".join(["````", *lines[-LINES:], "````"]))
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.definitions", description=__doc__)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}; default: all")
    parser.add_argument("--pretend", action="store_true", help="small sizes on a CPU")
    parser.add_argument("--small", action="store_true", help="small sizes on the GPU")
    parser.add_argument("--in-one", action="store_true", help="all in this process")
    args = parser.parse_args(arguments)
    names = args.groups or list(GROUPS)
    if args.in_one:
        bench = Bench(device_for(args.pretend), args.small or args.pretend)
        results = [check(name, bench) for name in names]  # all, whatever the first one gives
        return 0 if all(results) else 1
    options = [f"--{word}" for word in ("pretend", "small") if getattr(args, word)]
    shares = [names[::2], names[1::2]] if args.pretend else [[name] for name in names]
    failed = check_apart(
        [share for share in shares if share], [sys.executable, "-m", "benchmarks.gpu.definitions", *options]
    )
    print(f"\n{len(names) - len(failed)} of {len(names)} groups of kernels equal their definitions", end="")
    print(f"; not {', '.join(failed)}" if failed else "")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
