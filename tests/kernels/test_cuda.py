# SPDX-License-Identifier: Apache-2.0
"""What only the CUDA kernels have: plans that are started and not waited for, streams, devices.

Those that need a GPU are marked; the others run the same sources on the CPU (see cuda_emulation).
"""

import pytest
import torch
from cuda_emulation import load_emulated
from kernels.refs import PLAN_FIELDS, assert_same_plan, large_routes, payload

from ds_hybridep.kernels import load_kernels

pytestmark = pytest.mark.timeout(300)

reference = load_kernels("reference")


def test_a_started_plan_has_room_for_all_rows_and_tells_its_splits():
    topk_idx, destinations, num_destinations = large_routes(num_tokens=500)
    started = load_emulated().start_plan(topk_idx, destinations, num_destinations)
    wanted = reference.plan_routes(topk_idx, destinations, num_destinations)
    num_rows = len(wanted.row_to_token)
    assert started.splits() == wanted.rows_per_destination.tolist()
    assert num_rows < len(started.padded.row_to_token) == 500 * min(4, num_destinations)
    assert torch.equal(started.padded.row_to_token[:num_rows], wanted.row_to_token)
    assert_same_plan(started.plan(), wanted)


def test_rows_can_be_scattered_before_their_number_is_known():
    """What the device does behind a started plan needs no number from the host."""
    kernels = load_emulated()
    topk_idx, destinations, num_destinations = large_routes(num_tokens=100)
    started = kernels.start_plan(topk_idx, destinations, num_destinations)
    x, room = payload(100, 24), len(started.padded.row_to_token)
    rows = kernels.scatter_rows(x, started.padded.first_slot_to_row, room)
    plan = started.plan()
    assert torch.equal(rows[: len(plan.row_to_token)], x[plan.row_to_token])


def static_layer(kernels, topk_idx, destinations, num_destinations, x, weights, grad):
    """Rows to their places, doubled there, and back; then their gradients.  Its sizes follow from those given."""
    plan = kernels.plan_on_device(topk_idx, destinations, num_destinations)
    rows = kernels.scatter_rows(x, plan.first_slot_to_row, len(plan.row_to_token)) * 2
    output = kernels.combine_rows(rows, plan.slot_to_row, weights)
    grad_rows, grad_weights = kernels.combine_rows_backward(grad, rows, plan.slot_to_row, weights)
    return plan.rows_per_destination, output, kernels.combine_rows(grad_rows, plan.first_slot_to_row), grad_weights


def by_definition(topk_idx, destinations, num_destinations, x, weights, grad):
    plan = reference.plan_routes(topk_idx, destinations, num_destinations)
    rows = reference.dispatch_rows(x, plan.row_to_token) * 2
    output = reference.combine_rows(rows, plan.slot_to_row, weights)
    grad_rows, grad_weights = reference.combine_rows_backward(grad, rows, plan.slot_to_row, weights)
    return plan.rows_per_destination, output, reference.combine_rows(grad_rows, plan.first_slot_to_row), grad_weights


def assert_same_layer(found, wanted):
    *exact, grad_weights = found
    for one, other in zip(exact, wanted, strict=False):
        assert torch.equal(one, other)
    torch.testing.assert_close(grad_weights, wanted[-1], rtol=1e-5, atol=1e-5)  # dot products, in another order


def layer_inputs(num_tokens, hidden, salt=0):
    topk_idx, destinations, num_destinations = large_routes(num_tokens=num_tokens)
    topk_idx = topk_idx.roll(salt, dims=0)
    inputs = (payload(num_tokens, hidden, salt=salt), payload(num_tokens, 4, salt=salt + 1))
    return topk_idx, destinations, num_destinations, *inputs, payload(num_tokens, hidden, salt=salt + 2)


def test_a_layer_of_static_sizes_needs_nothing_from_the_host():
    inputs = layer_inputs(100, 24)
    for kernels in (load_emulated(), load_emulated().on_sms(2)):
        assert_same_layer(static_layer(kernels, *inputs), by_definition(*inputs))


def test_a_plan_on_the_device_takes_a_wrong_id_as_not_routed():
    topk_idx = torch.tensor([[0, 5], [1, -1]], dtype=torch.int32)
    plan = load_emulated().plan_on_device(topk_idx, torch.zeros(2, dtype=torch.int32), 1)
    assert plan.rows_per_destination.tolist() == [2]
    assert plan.slot_to_row.tolist() == [[0, -1], [1, -1]]


def test_a_wrong_id_is_named_when_the_splits_are_asked_for():
    topk_idx = torch.tensor([[0, 5], [9, -1]], dtype=torch.int32)
    started = load_emulated().start_plan(topk_idx, torch.zeros(2, dtype=torch.int32), 1)
    with pytest.raises(ValueError, match="topk_idx: holds 5, but there are 2 experts: wanted ids below 2"):
        started.splits()


def test_tensors_on_two_devices_are_refused():
    with pytest.raises(ValueError, match="row_to_token: on device meta, wanted cpu"):
        load_emulated().dispatch_rows(torch.ones(2, 2), torch.zeros(1, dtype=torch.int64, device="meta"))


def test_addresses_between_the_pieces_of_16_bytes():
    """Rows of whole pieces of 16 bytes that do not begin at one are moved another way."""
    for kernels in (load_emulated(), load_emulated().on_sms(2)):
        for dtype in (torch.float32, torch.bfloat16):
            base = payload(1, 5 * 16 + 1, dtype).flatten()
            x = base[1:].view(5, 16)
            row_to_token = torch.tensor([4, 0, 0, 2])
            slot_to_row = torch.tensor([[1, 2], [-1, -1], [3, -1], [-1, -1], [0, -1]])
            assert torch.equal(kernels.dispatch_rows(x, row_to_token), x[row_to_token])
            assert torch.equal(kernels.scatter_rows(x, slot_to_row, 4), x[row_to_token])
            assert torch.equal(kernels.combine_rows(x, slot_to_row), reference.combine_rows(x, slot_to_row))
            records = kernels.quantise_rows(x, row_to_token, "int8")
            assert torch.equal(records, reference.quantise_rows(x, row_to_token, "int8"))
            moved = torch.cat([records.new_zeros(1), records.flatten()])[1:].view(records.shape)
            rows = kernels.dequantise_rows(moved, 16, "int8", dtype)
            assert torch.equal(rows, reference.dequantise_rows(records, 16, "int8", dtype))


def test_more_slots_than_a_warp_has_lanes():
    """Then a lane stores several rows of a token, and sums do not go through bulk copies."""
    slot_to_row = torch.randperm(3 * 70, generator=torch.Generator().manual_seed(0)).view(3, 70)
    slot_to_row[:, ::7] = -1
    x, weights = payload(3, 32), payload(3, 70, salt=1)
    for kernels in (load_emulated(), load_emulated().on_sms(2)):
        rows = kernels.scatter_rows(x, slot_to_row, 210)
        for token, slots in enumerate(slot_to_row.tolist()):
            assert all(torch.equal(rows[row], x[token]) for row in slots if row >= 0)
        named = torch.zeros(210, dtype=torch.bool)
        named[slot_to_row[slot_to_row >= 0]] = True
        rows[~named] = 0  # they may hold anything
        found, wanted = (k.combine_rows(rows, slot_to_row, weights) for k in (kernels, reference))
        assert torch.equal(found, wanted)


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

    def plan_and_scatter():
        started = cuda.start_plan(topk_idx, destinations, num_destinations)
        return started, cuda.scatter_rows(x, started.padded.first_slot_to_row, len(started.padded.row_to_token))

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        plan_and_scatter()  # code is loaded and memory allocated, which waits for the device
        torch.cuda.synchronize()
        torch.cuda._sleep(50_000_000)
        x.copy_(late)
        started, rows = plan_and_scatter()
        assert not stream.query()  # nothing has waited
        plan = started.plan()
    torch.cuda.synchronize()
    assert torch.equal(rows[: len(plan.row_to_token)], x[plan.row_to_token])
    wanted = reference.plan_routes(topk_idx, destinations, num_destinations)
    for field in PLAN_FIELDS:
        assert torch.equal(getattr(plan, field), getattr(wanted, field)), field


@pytest.mark.gpu
@pytest.mark.parametrize("num_sms", [None, 8])
def test_a_captured_layer_follows_its_inputs(cuda, num_sms):
    """A CUDA graph of a whole layer, with other tokens and other routes put into its inputs."""
    kernels = cuda if num_sms is None else cuda.on_sms(num_sms)
    inputs = on_gpu(*layer_inputs(3000, 512))
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):  # code is loaded
        static_layer(kernels, *inputs)
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = static_layer(kernels, *inputs)
    for salt in (0, 7):
        others = layer_inputs(3000, 512, salt=salt)
        for place, other in zip(inputs, others, strict=True):
            if isinstance(place, torch.Tensor):
                place.copy_(other)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_layer([output.cpu() for output in outputs], by_definition(*others))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
def test_combine_against_fp64(cuda, dtype, tolerance):
    topk_idx, destinations, num_destinations = on_gpu(*large_routes())
    plan = cuda.plan_routes(topk_idx, destinations, num_destinations)
    x, weights = on_gpu(payload(6000, 1024, dtype), payload(6000, 4, salt=1))
    rows = cuda.dispatch_rows(x, plan.row_to_token)
    weight = torch.where(plan.slot_to_row >= 0, weights, 0.0).double().sum(dim=1, keepdim=True)
    wanted = x.double() * weight
    for kernels in (cuda, cuda.on_sms(8)):
        out = kernels.combine_rows(rows, plan.slot_to_row, weights)
        assert float((out.double() - wanted).norm() / wanted.norm()) < tolerance


@pytest.mark.gpu
def test_results_are_the_same_in_every_run(cuda):
    plan = cuda.plan_routes(*on_gpu(*large_routes()))
    x, weights, grad = on_gpu(payload(6000, 768), payload(6000, 4, salt=1), payload(6000, 768, salt=2))
    runs = []
    for _ in range(5):
        rows = cuda.scatter_rows(x, plan.first_slot_to_row, len(plan.row_to_token))
        out = cuda.combine_rows(rows, plan.slot_to_row, weights)
        runs.append([rows, out, *cuda.combine_rows_backward(grad, rows, plan.slot_to_row, weights)])
    for run in runs[1:]:
        assert all(torch.equal(one, first) for one, first in zip(run, runs[0], strict=True))


@pytest.mark.gpu
def test_rows_beyond_2_to_the_31_elements(cuda):
    num_rows, hidden = 2**19 + 3, 4096
    slot = torch.tensor([[num_rows - 1], [0]], device="cuda")
    x = payload(2, hidden, torch.bfloat16).cuda()
    rows = cuda.scatter_rows(x, slot, num_rows)
    assert torch.equal(rows[num_rows - 1], x[0])
    assert torch.equal(cuda.combine_rows(rows, slot), x)
    assert torch.equal(cuda.dispatch_rows(rows, torch.tensor([num_rows - 1], device="cuda")), x[:1])


@pytest.mark.gpu
def test_ops_on_the_gpu_pass_opcheck(cuda):
    slot_to_row, rows, grad, weights = on_gpu(
        torch.tensor([[2, 0], [-1, 1]]), payload(3, 4), payload(2, 4), torch.ones(2, 2)
    )
    ops = torch.ops.ds_hybridep
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for op, arguments in (
        (ops.dispatch_rows.default, (grad, torch.zeros(3, dtype=torch.int64, device="cuda"))),
        (ops.quantise_rows.default, (grad, torch.zeros(3, dtype=torch.int64, device="cuda"), "fp8")),
        (ops.dequantise_rows.default, (rows.new_zeros(3, 16).byte(), 4, "fp8", torch.float32)),
        (ops.scatter_rows.default, (grad, slot_to_row, 3)),
        (ops.combine_rows.default, (rows, slot_to_row, weights)),
        (ops.combine_rows_backward.default, (grad, rows, slot_to_row, weights)),
    ):
        assert set(torch.library.opcheck(op, arguments, test_utils=tests).values()) == {"SUCCESS"}


@pytest.mark.gpu
def test_rows_are_moved_in_a_captured_graph(cuda):
    plan = cuda.plan_routes(*on_gpu(*large_routes()))
    x, weights = on_gpu(payload(6000, 256), payload(6000, 4, salt=1))

    def step():
        rows = cuda.scatter_rows(x, plan.first_slot_to_row, len(plan.row_to_token))
        return cuda.combine_rows(rows, plan.slot_to_row, weights)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    x.copy_(payload(6000, 256, salt=3))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, step())
