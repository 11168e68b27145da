# SPDX-License-Identifier: Apache-2.0
"""Transfers of a device without a GPU: over fake streams (see stream_checker), and what stands in for NCCL."""

import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from moe_refs import open_transport
from parity import Case, levels_of
from process_pool import ProcessPool
from stream_checker import FakeCuda, FakeStreams, StreamChecker, fake_device, fake_nccl
from torch import distributed as dist
from toy_model import ToyConfig
from training import engine_of

from ds_hybridep.adaptive.probe import LinkProbe
from ds_hybridep.errors import CommunicationError
from ds_hybridep.geometry.cluster import Cluster, Level
from ds_hybridep.transport import nccl
from ds_hybridep.transport.agreement import agree
from ds_hybridep.transport.channels import Purpose, Transport
from ds_hybridep.transport.nccl import NcclBatch, NcclGroup

pytestmark = pytest.mark.dist

CASE = Case(levels=levels_of((2,), (2,)), toy=ToyConfig(ep_size=2, num_experts=4), accumulation=2, zero_stage=1)
TWO_DCS = Cluster((Level("dc", 2),))
ROWS = Purpose("tokens", "dispatch of rows", "blocks.3.moe")


@pytest.fixture
def own_pool2() -> Iterator[ProcessPool]:
    """Two ranks of one test: what a failed transfer leaves behind must not reach others."""
    with ProcessPool(2) as pool:
        yield pool


def connect_for_training(case: Case) -> list[str]:
    """Channels that NCCL has connected when an engine is there that has not trained yet."""
    cuda, connected = FakeCuda(), []
    checker = StreamChecker(cuda)
    with fake_device(cuda, checker), fake_nccl(cuda, checker):
        connect = nccl.connect_nccl

        def note(name: str, *args: Any, **more: Any) -> Any:
            connected.append(name)
            return connect(name, *args, **more)

        with mock.patch.object(nccl, "connect_nccl", note), engine_of(case, with_block=True):
            return sorted(name.split("_")[-2] for name in connected)


def test_nccl_connects_background_channels_before_the_first_step(pool2: ProcessPool) -> None:
    """A first transfer that waited for the others would hold up a rank for whose tokens they wait."""
    assert (
        pool2.run(connect_for_training, case=CASE) == [["gradients", "gradients", "weights", "weights"]] * 2
    )  # of dense parameters, too


def probe_latency_over_nccl() -> float:
    cuda = FakeCuda()
    checker = StreamChecker(cuda)
    with fake_device(cuda, checker), fake_nccl(cuda, checker):
        transport = Transport(Cluster((Level("dc", 3),)), 100.0, agree({}, 60.0), ("nccl",))
        latency = LinkProbe(transport).latency_s(0)
        transport.close()
    return latency


def test_a_probe_in_pairs_over_nccl_connects_those_in_no_pair() -> None:
    with ProcessPool(3) as pool:
        first, *others = pool.run(probe_latency_over_nccl)
    assert first > 0
    assert others == [first, first]


class SlowCuda(FakeCuda):
    """Copies to the host come late, the first ones latest; one of them never, if so wanted."""

    def __init__(self, failing: int | None = None) -> None:
        super().__init__()
        self.failing, self.num_slept = failing, 0

    def on_sleep(self) -> None:
        self.num_slept += 1
        if self.num_slept == self.failing:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        time.sleep(0.2 / self.num_slept)


def test_a_batch_in_nccl_that_does_not_end_passes_the_time_limit() -> None:
    looks = iter(range(10_000_000))
    batch = NcclBatch(mock.Mock(), mock.Mock(query=lambda: next(looks) < 0), [])
    with pytest.raises(RuntimeError, match="passed the time limit of 0.05 s"):
        batch.wait(0.05)
    assert next(looks) > 1


class SlowGroup:
    """In the place of an NCCL process group: notes what it is asked for, and takes its time."""

    def __init__(self, name: str, log: list[tuple[str, str]]) -> None:
        self._name, self._log = name, log

    def __getattr__(self, call: str) -> Any:
        def note(*_: Any) -> Any:
            self._log.append((self._name, call))
            time.sleep(0.002)
            return mock.Mock()

        return note


def test_batches_in_nccl_of_two_threads_do_not_mix() -> None:
    """NCCL puts what two threads start meanwhile into one batch, or launches it in another order on each rank."""
    streams, log = FakeStreams(FakeCuda(), None), []
    with mock.patch.object(nccl, "connect_nccl", lambda name, *_, **__: SlowGroup(name, log)):
        groups = [
            NcclGroup(name, (0, 1), streams, rank=0, generation=0, timeout_s=60.0) for name in ("weights", "tokens")
        ]
    log.clear()
    parts = [(1, torch.ones(1))] * 2

    def start_three(group: NcclGroup) -> None:
        for _ in range(3):
            group.start(parts, parts)

    threads = [threading.Thread(target=start_three, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    batches = [log[first : first + 6] for first in range(0, len(log), 6)]
    assert len(batches) == 6
    for batch in batches:
        assert [call for _, call in batch] == ["_start_coalescing", "recv", "recv", "send", "send", "_end_coalescing"]
        assert len({name for name, _ in batch}) == 1


def start_many(num_transfers: int, failing: int | None = None) -> dict[str, Any]:
    """Background transfers that are all started before the first can leave."""
    rank = dist.get_rank()
    cuda = SlowCuda(failing if rank == 0 else None)
    with fake_device(cuda):
        channel = open_transport(TWO_DCS, 20.0).channel("rows", (0, 1), background=True)
        places = [torch.full((5,), -1.0) for _ in range(num_transfers)]
        transfers = [
            channel.start([(1 - rank, torch.full((5,), 10.0 * rank + index))], [(1 - rank, place)], ROWS)
            for index, place in enumerate(places)
        ]
        before = [transfer.is_done() for transfer in transfers]
        failures = []
        for transfer in transfers:
            try:
                transfer.wait()
            except CommunicationError as error:
                failures.append(str(error))
        channel.transport.close()
    return {
        "values": [place[0].item() for place in places],
        "before": any(before),
        "failures": failures,
    }


def test_background_transfers_start_at_once_and_leave_in_order(pool2: ProcessPool) -> None:
    for rank, found in enumerate(pool2.run(start_many, num_transfers=4)):
        assert found["values"] == [10.0 * (1 - rank) + index for index in range(4)]
        assert not found["before"]
        assert found["failures"] == []


def test_a_device_that_fails_under_a_transfer_is_told_by_the_wait_for_it(own_pool2: ProcessPool) -> None:
    ours, theirs = own_pool2.run(start_many, num_transfers=3, failing=2)
    # The third is not sent either: it would arrive in the place of the second.
    assert len(ours["failures"]) == len(theirs["failures"]) == 2
    for message in ours["failures"]:
        assert message.startswith("rank 0: dispatch of rows of blocks.3.moe over level 'dc' (40 bytes, ")
        assert "failed: CUDA error: an illegal memory access was encountered" in message
    assert theirs["values"] == [0.0, -1.0, -1.0]
