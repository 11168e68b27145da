# SPDX-License-Identifier: Apache-2.0
"""Code that only handles tensors, run with all of them on another device than the CPU: nothing may mix the two.

The other device is "meta", which computes nothing and needs no driver.  FakeTensorMode with "cuda" would say more, but
a build of torch without CUDA refuses to index such tensors.
"""

import itertools
from contextlib import nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from codec_cases import make_codec
from marks import slow
from moe_refs import Expert
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_hybridep.deepspeed import supported
from ds_hybridep.errors import UnsupportedError
from ds_hybridep.experts.gradient_return import GradientSums
from ds_hybridep.experts.replicas import Replicas, make_shipment
from ds_hybridep.geometry.cluster import Cluster, Level
from ds_hybridep.geometry.partition import Partition
from ds_hybridep.geometry.slots import whole
from ds_hybridep.kernels import Routes, load_kernels
from ds_hybridep.runtime import log
from ds_hybridep.sync.encoding import Encoding
from ds_hybridep.sync.group_sync import GroupSync
from ds_hybridep.sync.stages import gather_stages
from ds_hybridep.sync.transaction import Transaction
from ds_hybridep.sync.transfers import Reduce
from ds_hybridep.tokens import exchange as row_exchange
from ds_hybridep.tokens.exchange import Exchange, _Dispatch, combine, exchange_rows, to_device
from ds_hybridep.tokens.layer import permute_to_experts, weigh_rows, weighted_sum
from ds_hybridep.transport import job as job_module
from ds_hybridep.transport.channels import Purpose, Traffic

DEVICE = torch.device("meta")
CODECS: tuple[Any, ...] = (
    "int8",
    "int2",
    {"type": "low_rank", "rank": 2},
    {"type": "low_rank", "rank": 2, "weighting": "rms"},
    {"type": "low_rank", "rest": "int4"},
)


class OneDevice(TorchDispatchMode):
    """Raises where an operation takes tensors of the CPU and of the device, or brings the device's to the CPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        devices = {tensor.device.type for tensor in given if tensor.dim()}  # scalars of the CPU may join in
        is_copy = func._schema.name in ("aten::copy_", "aten::_to_copy")
        assert len(devices) <= 1 or is_copy, f"{func} on {devices}"
        return func(*args, **kwargs)


class NoChannel:
    """In the place of a channel: notes where the tensors are that it is given."""

    def __init__(self) -> None:
        self.transport, self.has_equal_lengths = mock.Mock(traffic=Traffic(), timeout_s=1.0), False
        self.num_bytes: list[tuple[int, int]] = []

    def prepare(self, device: Any) -> None:
        pass

    def start(self, sends: Any, receives: Any, purpose: Any, **_: Any) -> Any:
        assert all(tensor.device == DEVICE and tensor.is_contiguous() for _, tensor in (*sends, *receives))
        self.num_bytes.append((sum(t.nbytes for _, t in sends), sum(t.nbytes for _, t in receives)))
        return mock.Mock(is_done=lambda: True)


@pytest.mark.parametrize("spec", CODECS, ids=str)
def test_a_codec_stays_on_the_device(spec: Any) -> None:
    codec = make_codec(spec, kernels="reference")
    for rows, cols in ((48, 40), (1, 40)):
        with OneDevice():
            weights, mirror = (torch.empty(2, rows, cols, device=DEVICE) for _ in range(2))
            state = codec.new_state(2, rows, cols, device=DEVICE)
            for _ in range(2):
                packets = codec.encode_update(weights, mirror, state)
                assert packets.device == codec.decode_add(packets, mirror).device == DEVICE
                packets = codec.encode_with_residual(weights, mirror, state)
                assert codec.decode(packets, mirror).device == DEVICE
        assert all(tensor.device == DEVICE for tensor in state.tensors.values())


@pytest.mark.parametrize(
    ("dtype", "gradient_codec", "weights_codec"),
    [
        one if one[1] == "identity" or one == ("bfloat16", "low_rank", "int8") else slow(*one)
        for one in itertools.product(("float32", "bfloat16"), ("identity", "low_rank"), ("identity", "int8"))
    ],
)
def test_migration_of_a_layer_stays_on_the_device(dtype: str, gradient_codec: str, weights_codec: str) -> None:
    experts = [Expert(0, index, dtype=dtype).to(DEVICE) for index in range(2)]
    partition = Partition.build(Cluster((Level("dc", 2), Level("gpu", 2))), tuple(range(4)), (2, 2))
    codecs = [
        None if name == "identity" else make_codec(name, kernels="reference")
        for name in (weights_codec, gradient_codec)
    ]
    encoding = Encoding(weight_codecs=(codecs[0],) * 2, gradient_codecs=(codecs[1],) * 2, loss_scale=lambda: 8.0)
    channel = NoChannel()
    stages = tuple(replace(stage, weights=channel, gradients=channel) for stage in gather_stages(partition, 1))
    transaction = Transaction()
    with OneDevice():
        replicas = Replicas("layer", experts, partition, stages, rank=1, encoding=encoding, transaction=transaction)
        for is_exact in (True, False, False):
            shipment = make_shipment(replicas, is_exact=is_exact)
            sums = GradientSums(replicas)
            sums.add(map(torch.empty_like, replicas.trainable_weights(replicas.replica_slots)))
            for transfer in (shipment, Reduce(sums, Purpose("expert_gradients", "return"))):
                while not transfer.is_complete:
                    transfer.advance()
            sums.pop_returned()
            replicas.own.free()
            transaction.undo()
    assert all(sent == received for sent, received in channel.num_bytes)


def test_the_way_of_a_token_stays_on_the_device() -> None:
    num_tokens, hidden, top_k, send_splits, recv_splits = 6, 8, 2, (4, 5), (4, 7)
    kernels, channel = load_kernels("reference"), NoChannel()
    places = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    exchange = Exchange("layer", (0, 1), 0, places, channel, kernels, (None,) * 2, [0, 3], [0, 4])
    x = torch.empty(num_tokens, hidden, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.empty(num_tokens, top_k, device=DEVICE, requires_grad=True)
    routes = Routes(
        rows_per_destination=send_splits,
        row_to_token=torch.empty(sum(send_splits), dtype=torch.int64, device=DEVICE),
        row_topk_idx=torch.empty(sum(send_splits), top_k, dtype=torch.int32, device=DEVICE),
        slot_to_row=torch.empty(num_tokens, top_k, dtype=torch.int64, device=DEVICE),
        first_slot_to_row=torch.empty(num_tokens, top_k, dtype=torch.int64, device=DEVICE),
    )
    with OneDevice(), mock.patch.object(row_exchange, "row_counts", return_value=[7]):  # the one wait for the device
        with torch.no_grad():
            state, arrived_rows, _, arrived_weights = exchange_rows(exchange, routes, x, weights)
        assert (state.send_splits, state.recv_splits) == (send_splits, recv_splits)
        rows, row_weights = _Dispatch.apply(x, weights, [arrived_rows, arrived_weights], state)
        local = Routes(
            rows_per_destination=routes.rows_per_destination,
            row_to_token=torch.empty(9, dtype=torch.int64, device=DEVICE),
            row_topk_idx=torch.empty(9, top_k, dtype=torch.int32, device=DEVICE),
            slot_to_row=torch.empty(11, top_k, dtype=torch.int64, device=DEVICE),
            first_slot_to_row=torch.empty(11, top_k, dtype=torch.int64, device=DEVICE),
        )
        expert_rows = weigh_rows(permute_to_experts(rows, local, kernels), row_weights, local)
        output = combine(weighted_sum(expert_rows, row_weights, local, kernels), state)
        output.sum().backward()
    assert output.shape == x.shape
    assert x.grad.device == weights.grad.device == DEVICE
    with OneDevice(), torch.no_grad():
        assert state.send_back([rows], "rows")[0].shape == (9, hidden)


def test_the_host_waits_for_no_copy_to_a_device() -> None:
    tensor, device = mock.Mock(), torch.device("cuda")
    copy = to_device(tensor, device)
    assert copy is tensor.pin_memory.return_value.to.return_value
    tensor.pin_memory.return_value.to.assert_called_once_with(device, non_blocking=True)
    counts = torch.tensor([3, 0])
    assert to_device(counts, torch.device("cpu")) is counts


@pytest.mark.gpu
def test_a_copy_to_a_gpu_is_queued() -> None:
    device, counts = torch.device("cuda"), torch.tensor([3, 0, 5])
    to_device(counts, device)  # the first one allocates pinned memory, which waits
    torch.cuda.synchronize()
    torch.cuda._sleep(50_000_000)
    copy = to_device(counts, device)
    assert not torch.cuda.current_stream().query()
    assert torch.equal(copy.cpu(), counts)


def test_messages_are_filled_up_where_lengths_must_be_equal() -> None:
    channel, peers = NoChannel(), [0, 5]
    channel.has_equal_lengths = True
    places = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    exchange = Exchange("layer", (0, 1), 0, places, channel, load_kernels("reference"), (None,) * 2, peers, peers)
    routes = mock.Mock(
        num_rows=4,
        rows_per_destination=(1, 3),
        row_to_token=torch.empty(4, dtype=torch.int64, device=DEVICE),
        row_topk_idx=torch.empty(4, 2, dtype=torch.int32, device=DEVICE),
        first_slot_to_row=torch.empty(4, 2, dtype=torch.int64, device=DEVICE),
    )
    with mock.patch.object(row_exchange, "row_counts", return_value=[1]):
        exchange_rows(exchange, routes, torch.empty(4, 8, device=DEVICE), torch.empty(4, 2, device=DEVICE))
    room_bytes = 16 + 5 * (4 * 4 + 4 * 8)  # header; ids and gate weights, elements of 5 rows
    assert channel.num_bytes == [(room_bytes, room_bytes), (0, 0)]  # first messages, and no surplus


@pytest.mark.parametrize("codec", [None, "int4"])
def test_sums_by_level_stay_on_the_device(codec: str | None) -> None:
    channel, cluster = NoChannel(), Cluster((Level("dc", 2), Level("gpu", 2)))
    transport = mock.Mock(rank=1, world_size=4, cluster=cluster, exposed=lambda _: nullcontext())
    transport.level_to.side_effect = lambda rank: cluster.level_between(1, rank)
    transport.channel.return_value = channel
    made = None if codec is None else make_codec(codec, kernels="reference")
    encoding = Encoding((made, None), (made, None))
    group = GroupSync(transport, range(4), "dense", encoding, transaction=Transaction(), device=DEVICE)
    with OneDevice():
        group.all_reduce(torch.empty(10, device=DEVICE, dtype=torch.bfloat16))
        group.reduce_to_owners(
            torch.empty(9, device=DEVICE), [(0, whole("a", (4,))), (1, whole("b", (3,))), (3, whole("c", (2,)))]
        )
        before = torch.empty(2, device=DEVICE)
        group.start_all_gather(torch.empty(8, device=DEVICE), torch.empty(2, device=DEVICE), before)()
    assert len(channel.num_bytes) == 8


# -- what is taken, and what is refused -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "device", "job", "backend"),
    [
        ("auto", "cpu", "gloo", "gloo"),
        ("auto", "cuda", "gloo", "gloo"),
        ("auto", "cuda", "cpu:gloo,cuda:nccl", "nccl"),
        ("gloo", "cuda", "nccl", "gloo"),
        ("nccl", "cuda", "gloo", "nccl"),
    ],
)
def test_a_level_has_the_backend_of_the_job_or_its_own(wanted: str, device: str, job: str, backend: str) -> None:
    with mock.patch.object(job_module, "backend_name", return_value=job):
        with mock.patch.object(job_module.dist, "is_nccl_available", return_value=True):
            assert job_module.backend_for(wanted, torch.device(device), "hybridep.levels[0].backend") == backend


@pytest.mark.parametrize(("device", "reason"), [("cpu", "the model is on 'cpu'"), ("cuda", "this build of torch")])
def test_nccl_that_cannot_be_had_is_refused(device: str, reason: str) -> None:
    with mock.patch.object(job_module.dist, "is_nccl_available", return_value=False):
        with pytest.raises(UnsupportedError, match=rf'hybridep.levels\[1\].backend is "nccl", but {reason}'):
            job_module.backend_for("nccl", torch.device(device), "hybridep.levels[1].backend")


def test_other_devices_are_refused_and_gpus_are_warned_of() -> None:
    def refuse(device: str, job: str) -> None:
        with mock.patch.object(supported, "backend_name", return_value=job):
            supported.refuse_devices([mock.Mock(sample=mock.Mock(device=torch.device(device)))])

    for device, job in (("xpu", "xccl"), ("cuda", "mpi"), ("cpu", "mpi")):
        with pytest.raises(
            UnsupportedError, match=rf"the model is on \['{device}'\] and the job's backend is '{job}'"
        ):
            refuse(device, job)
    refuse("cpu", "gloo")
    log.warn_once.cache_clear()
    with mock.patch.object(log, "log_dist") as logged:
        for job in ("gloo", "nccl"):
            refuse("cuda", job)
    ((message,), _) = logged.call_args
    assert logged.call_count == 1
    assert "never run on a GPU" in message
