# SPDX-License-Identifier: Apache-2.0
"""What only the CUDA kernels have: a few multiprocessors, streams, devices.

Those that need a GPU are marked; the others run the same sources on the CPU (see cuda_emulation).
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cuda_emulation import largest_grid, load_emulated
from kernel_refs import PLAN_FIELDS, large_routes, payload

from ds_hybridep.kernels import load_kernels

reference = load_kernels("reference")


def test_wrong_ids_are_named_destinations_before_experts():
    topk_idx = torch.tensor([[0, 5], [9, -1]], dtype=torch.int32)
    with pytest.raises(ValueError, match="topk_idx: holds 5, but there are 2 experts: wanted ids below 2"):
        load_emulated().plan_routes(topk_idx, torch.zeros(2, dtype=torch.int32), 1)
    with pytest.raises(ValueError, match="expert_to_destination: holds 4, but there are 1 destinations"):
        load_emulated().plan_routes(topk_idx, torch.tensor([0, 4], dtype=torch.int32), 1)
    with pytest.raises(IndexError, match="slot_to_row: holds 7, but there are 3 rows"):
        load_emulated(dispatch_sms=2).dispatch_rows(payload(3, 8), torch.tensor([[0], [1], [7]]), 3)


def test_addresses_between_the_pieces_of_16_bytes():
    """Rows of whole pieces of 16 bytes that do not begin at one are moved another way."""
    for kernels in (load_emulated(), load_emulated(dispatch_sms=2)):
        for dtype in (torch.float32, torch.bfloat16):
            base = payload(1, 5 * 16 + 1, dtype).flatten()
            x = base[1:].view(5, 16)
            places = torch.tensor([[1, 2], [-1, -1], [-1, 3], [-1, -1], [0, -1]]), 4
            slot_to_row = torch.tensor([[1, 2], [-1, -1], [3, -1], [-1, -1], [0, -1]])
            assert torch.equal(kernels.dispatch_rows(x, *places), x[torch.tensor([4, 0, 0, 2])])
            assert torch.equal(kernels.combine_rows(x, slot_to_row), reference.combine_rows(x, slot_to_row))
            records = kernels.quantise_rows(x, *places, "int8")
            assert torch.equal(records, reference.quantise_rows(x, *places, "int8"))
            moved = torch.cat([records.new_zeros(1), records.flatten()])[1:].view(records.shape)
            rows = kernels.dequantise_rows(moved, 16, "int8", dtype)
            assert torch.equal(rows, reference.dequantise_rows(records, 16, "int8", dtype))


def test_more_slots_than_a_warp_has_lanes():
    """Then sums do not go through bulk copies."""
    slot_to_row = torch.randperm(3 * 70, generator=torch.Generator().manual_seed(0)).view(3, 70)
    slot_to_row[:, ::7] = -1
    rows, weights, x = payload(210, 32), payload(3, 70, salt=1), payload(3, 32, salt=2)
    compact = slot_to_row.where(slot_to_row >= 0, 210).flatten().argsort().argsort().view(3, 70)
    places = compact.where(slot_to_row >= 0, -1), int((slot_to_row >= 0).sum())
    for kernels in (load_emulated(), load_emulated(dispatch_sms=2)):
        found, wanted = (k.combine_rows(rows, slot_to_row, weights) for k in (kernels, reference))
        assert torch.equal(found, wanted)
        assert torch.equal(kernels.dispatch_rows(x, *places), reference.dispatch_rows(x, *places))
        records, wanted = (k.quantise_rows(x, *places, "fp8") for k in (kernels, reference))
        assert torch.equal(records, wanted)


@pytest.mark.parametrize("row_bytes", [16, 16 * 1024, 16 * 1024 + 16, 40 * 1024])
@pytest.mark.parametrize("num_tokens", [0, 1, 33, 100])
def test_tokens_on_a_few_multiprocessors_go_through_all_stages(num_tokens, row_bytes):
    """More tokens than stages and than lanes, and tokens that are one stage, a little more, and several."""
    x = payload(num_tokens, row_bytes // 4)
    slots = torch.randperm(num_tokens * 3, generator=torch.Generator().manual_seed(num_tokens)).view(num_tokens, 3)
    places = slots.where(slots < num_tokens * 2, -1), num_tokens * 2
    for num_sms in (1, 3):
        rows = load_emulated(dispatch_sms=num_sms).dispatch_rows(x, *places)
        assert torch.equal(rows, reference.dispatch_rows(x, *places))


def test_no_operation_on_rows_takes_more_than_its_multiprocessors():
    """dispatch_sms keeps the others free for kernels that run at the same time."""
    num_tokens, top_k, num_sms = 600, 2, 3
    x, weights = payload(num_tokens, 256), payload(num_tokens, top_k, salt=1)
    slot_to_row = torch.arange(num_tokens * top_k).view(num_tokens, top_k)
    places = slot_to_row, num_tokens * top_k
    kernels, all_sms = load_emulated(dispatch_sms=num_sms), load_emulated()
    records, rows = all_sms.quantise_rows(x, *places, "int8"), all_sms.dispatch_rows(x, *places)
    operations = {
        "dispatch": lambda k: k.dispatch_rows(x, *places),
        "quantise": lambda k: k.quantise_rows(x, *places, "int8"),
        "dequantise": lambda k: k.dequantise_rows(records, 256, "int8", torch.float32),
        "combine": lambda k: k.combine_rows(rows, slot_to_row, weights),
        "backward of combine": lambda k: k.combine_rows_backward(x, rows, slot_to_row, weights),
    }
    for name, operation in operations.items():
        largest_grid()
        wanted = operation(all_sms)
        assert largest_grid() > num_sms, name
        torch.testing.assert_close(operation(kernels), wanted, rtol=0, atol=0)
        assert largest_grid() <= num_sms, name


def test_threads_launch_a_kernel_with_different_sizes_of_shared_memory():
    """A kernel's limit of shared memory is one for all threads, and the GIL is not held."""
    kernels, rows = load_emulated(dispatch_sms=1), payload(6, 1024)

    def combine(slot_to_row):
        wanted = reference.combine_rows(rows, slot_to_row)
        return [torch.equal(kernels.combine_rows(rows, slot_to_row), wanted) for _ in range(20)]

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(combine, 2 * [torch.tensor([[0], [1]]), torch.tensor([[2, 3, 5], [4, 1, -1]])]))
    assert all(map(all, results))


def test_a_few_multiprocessors_combine_eight_rows_of_a_token():
    """With 227 KiB of shared memory (the test below) this takes bulk copies in a deep pipeline, with 64 it cannot."""
    num_tokens, top_k = 40, 8
    rows, weights = payload(num_tokens * top_k, 2048), payload(num_tokens, top_k, salt=1)
    slot_to_row = torch.randperm(num_tokens * top_k, generator=torch.Generator().manual_seed(0)).view(-1, top_k)
    slot_to_row[3, 2:], slot_to_row[7] = -1, -1
    wanted = reference.combine_rows(rows, slot_to_row, weights)
    assert torch.equal(load_emulated(dispatch_sms=3).combine_rows(rows, slot_to_row, weights), wanted)


@pytest.mark.slow
def test_undefined_behaviour_and_as_much_shared_memory_as_an_h100_has():
    """All emulated tests of kernels once more, where sanitizers end the process, and top-8 and deep pipelines fit."""
    environment = {**os.environ, "EMULATION_SANITIZES": "1", "EMULATED_SHARED_KIB": "227"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow and not gpu", "-k", "emulated or emulation"]
    folders = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "codecs")]
    run = subprocess.run([*command, *folders], env=environment, capture_output=True, text=True, timeout=3600)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-4000:]
    assert "runtime error" not in run.stdout + run.stderr


# --- On a GPU --------------------------------------------------------------------------------------------------------


@pytest.fixture
def cuda():
    return load_kernels("compiled", "cuda")


def on_gpu(*tensors):
    return [tensor.cuda() if isinstance(tensor, torch.Tensor) else tensor for tensor in tensors]


@pytest.mark.gpu
def test_work_is_queued_on_the_current_stream(cuda):
    """Inputs are written late on the same stream, so kernels on another one would read what was there before."""
    topk_idx, destinations, num_destinations = on_gpu(*large_routes())
    x, late = torch.zeros(6000, 512, device="cuda"), payload(6000, 512).cuda()
    stream = torch.cuda.Stream()

    plan = cuda.plan_routes(topk_idx, destinations, num_destinations)
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        cuda.dispatch_rows(
            x, plan.first_slot_to_row, plan.num_rows
        )  # code is loaded and memory allocated, which waits for the device
        torch.cuda.synchronize()
        torch.cuda._sleep(50_000_000)
        x.copy_(late)
        rows = cuda.dispatch_rows(x, plan.first_slot_to_row, plan.num_rows)
        sums = cuda.bit_sums(x)
        assert not stream.query()  # nothing has waited
    torch.cuda.synchronize()
    assert torch.equal(rows, x[plan.row_to_token])
    assert torch.equal(sums, reference.bit_sums(x))
    wanted = reference.plan_routes(topk_idx, destinations, num_destinations)
    assert plan.rows_per_destination == wanted.rows_per_destination
    for field in PLAN_FIELDS:
        assert torch.equal(getattr(plan, field), getattr(wanted, field)), field


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_combine_against_fp64(cuda, dtype, tolerance):
    topk_idx, destinations, num_destinations = on_gpu(*large_routes())
    plan = cuda.plan_routes(topk_idx, destinations, num_destinations)
    x, weights = on_gpu(payload(6000, 1024, dtype), payload(6000, 4, salt=1))
    rows = cuda.dispatch_rows(x, plan.first_slot_to_row, plan.num_rows)
    weight = torch.where(plan.slot_to_row >= 0, weights, 0.0).double().sum(dim=1, keepdim=True)
    wanted = x.double() * weight
    for kernels in (cuda, load_kernels("compiled", "cuda", 8)):
        out = kernels.combine_rows(rows, plan.slot_to_row, weights)
        assert float((out.double() - wanted).norm() / wanted.norm()) < tolerance


@pytest.mark.gpu
def test_results_are_the_same_in_every_run(cuda):
    plan = cuda.plan_routes(*on_gpu(*large_routes()))
    x, weights, grad = on_gpu(payload(6000, 768), payload(6000, 4, salt=1), payload(6000, 768, salt=2))
    runs = []
    for _ in range(5):
        rows = cuda.dispatch_rows(x, plan.first_slot_to_row, plan.num_rows)
        out = cuda.combine_rows(rows, plan.slot_to_row, weights)
        runs.append([rows, out, *cuda.combine_rows_backward(grad, rows, plan.slot_to_row, weights)])
    for run in runs[1:]:
        assert all(torch.equal(one, first) for one, first in zip(run, runs[0], strict=True))


@pytest.mark.gpu
def test_rows_beyond_2_to_the_31_elements(cuda):
    num_rows, hidden = 2**19 + 3, 4096
    slot = torch.tensor([[num_rows - 1], [0]], device="cuda")
    x = payload(2, hidden, torch.bfloat16).cuda()
    rows = torch.zeros(num_rows, hidden, dtype=torch.bfloat16, device="cuda")
    rows[num_rows - 1], rows[0] = x[0], x[1]
    assert torch.equal(cuda.combine_rows(rows, slot), x)
    places = torch.full((num_rows, 1), -1, device="cuda")
    places[num_rows - 1] = 0
    assert torch.equal(cuda.dispatch_rows(rows, places, 1), x[:1])
    places = torch.arange(num_rows - 1, -1, -1, device="cuda")[:, None]
    assert torch.equal(cuda.dispatch_rows(rows, places, num_rows)[[0, -1]], x)


@pytest.mark.gpu
def test_rows_are_moved_in_a_captured_graph(cuda):
    plan = cuda.plan_routes(*on_gpu(*large_routes()))
    x, weights = on_gpu(payload(6000, 256), payload(6000, 4, salt=1))

    def step():
        rows = cuda.dispatch_rows(x, plan.first_slot_to_row, plan.num_rows)
        return cuda.combine_rows(rows, plan.slot_to_row, weights)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    x.copy_(payload(6000, 256, salt=3))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, step())
