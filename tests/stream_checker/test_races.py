# SPDX-License-Identifier: Apache-2.0
"""Training over fake streams has no race and the losses of a CPU, and every wait that is left out is found.

A new wait in `transport/`, `sync/` or `experts/` gets a row in WAITS.
"""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from moe_refs import open_transport
from parity import Case, levels_of
from process_pool import ProcessPool
from torch import distributed as dist
from toy_model import ToyConfig
from training import batch_of, block_with, engine_of, evaluate, runtime_of, train

import ds_hybridep
from ds_hybridep.geometry.cluster import Cluster, Level
from ds_hybridep.transport.channels import Purpose
from stream_checker import FakeCuda, StreamChecker, fake_device, fake_nccl

pytestmark = pytest.mark.dist

EXACT, LOSSY = ("identity", "identity"), ("int8", "int8")
LOW_RANK = {"type": "low_rank", "rank": 2, "weighting": "rms"}
CASE = Case(levels=levels_of((2,), (2,)), toy=ToyConfig(ep_size=2, num_experts=4), accumulation=2, zero_stage=1)

# All memory is kept track of byte by byte.
SMALL_BUCKETS = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 20_000, "allgather_bucket_size": 20_000}}


def train_over_fake_streams(
    case: Case,
    codecs: tuple[Any, Any],
    dropped: tuple[str, ...] = (),
    num_steps: int = 2,
    evaluates: bool = False,
    is_nccl: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Losses, and the races that were found on this rank.

    evaluates: between backward and step, too.
    is_nccl: over what stands in for NCCL, rather than through host memory.
    """
    cuda = FakeCuda(*dropped)
    checker = StreamChecker(cuda)
    settings = {"advanced": {"kernels": "reference"}, "report_interval": 1, **settings}
    block = block_with(case, [codecs] * len(case.levels), **settings)
    nccl = fake_nccl(cuda, checker) if is_nccl else nullcontext()
    with fake_device(cuda, checker), nccl, engine_of(case, with_block=True, hybridep=block, **SMALL_BUCKETS) as engine:
        with checker:
            losses = train(engine, case, 0, num_steps)
            if evaluates:
                engine.backward(engine(*batch_of(case, num_steps)))
                evaluate(engine, case)
                engine.step()
            if settings["report_interval"]:
                ds_hybridep.stats(engine)
                runtime_of(engine).statistics.local()  # as a report reads it, without the waits of checksums behind it
                for parameter in engine.module.parameters():  # a script may change weights after it
                    parameter.data.mul_(1.0)
            engine.destroy()  # while weights are on their way
            torch.zeros(1)
    return {"losses": losses, "races": sorted(set(checker.races)), "dropped": cuda.num_dropped}


def train_on_the_cpu(
    case: Case, codecs: tuple[Any, Any], num_steps: int = 2, is_nccl: bool = False, **settings: Any
) -> list[float]:
    settings = {"advanced": {"kernels": "reference"}, "report_interval": 1, **settings}
    block = block_with(case, [codecs] * len(case.levels), **settings)
    with engine_of(case, with_block=True, hybridep=block, **SMALL_BUCKETS) as engine:
        return train(engine, case, 0, num_steps)


WAYS = {
    "exact": (CASE, EXACT, {}),
    "lossy": (CASE, LOSSY, {}),
    "bf16": (replace(CASE, dtype="bf16", accumulation=1), LOSSY, {}),
    "host": (replace(CASE, dtype="bf16", accumulation=1), ("patch", LOW_RANK), {"state": "host"}),
    "low rank": (CASE, (LOW_RANK, LOW_RANK), {}),
    "without reports": (CASE, LOSSY, {"report_interval": 0}),
    "nccl": (CASE, LOSSY, {"is_nccl": True}),
    "nccl tokens": (Case(levels=levels_of((2,), (1,)), toy=CASE.toy), EXACT, {"is_nccl": True}),
    "tokens": (Case(levels=levels_of((2,), (1,)), toy=CASE.toy), EXACT, {}),
}


FAST = "lossy"  # the others take long together


@pytest.mark.parametrize("way", [pytest.param(way, marks=[] if way == FAST else pytest.mark.slow) for way in WAYS])
def test_training_over_streams_has_no_race_and_the_losses_of_a_cpu(pool2: ProcessPool, way: str) -> None:
    case, codecs, settings = WAYS[way]
    found = pool2.run(train_over_fake_streams, case=case, codecs=codecs, **settings)
    assert [one["races"] for one in found] == [[], []]
    assert [one["losses"] for one in found] == pool2.run(train_on_the_cpu, case=case, codecs=codecs, **settings)


WAITS = {
    "encode behind the copy of the weights": ("lossy", "make_shipment"),
    "send behind what made it": ("exact", "StagedTransfer.advance", "DeviceStreams.within", "!Pinned"),
    "forward behind the decoding": ("lossy", "StagedTransfer.wait_in_stream"),
    "report behind encoding": ("lossy", "RuntimeStatistics._codec_counters"),
    "release behind encoding": ("without reports", "LayerExperts.release"),
    "copy to the host behind what is sent": ("exact", "Pinned.__init__"),
    "send behind the copy to the host": ("exact", "Pinned.wait"),
    "end of a batch behind nccl": ("nccl", "NcclGroup.start", "FakeNccl.wait"),
    "use behind a batch": ("nccl", "NcclBatch.deliver"),
    "use behind the copy to the device": ("tokens", "Pinned.deliver", "DeviceStreams.follow"),
}


@pytest.mark.slow
@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_that_is_left_out_is_found(pool2: ProcessPool, wait: str) -> None:
    way, *dropped = WAITS[wait]
    case, codecs, settings = WAYS[way]
    found = pool2.run(train_over_fake_streams, case=case, codecs=codecs, dropped=tuple(dropped), **settings)
    assert all(one["dropped"] for one in found)
    assert any(one["races"] for one in found)


# -- one transfer -----------------------------------------------------------------------------------------------

TWO_DCS = Cluster((Level("dc", 2),))
ROWS = Purpose("tokens", "dispatch of rows", "blocks.3.moe")


def receive_where_something_was_read(is_background: bool, dropped: tuple[str, ...] = ()) -> tuple[list[str], bool]:
    """Rank 0 fills memory that it has just computed with; nothing that it sends makes the host wait for that."""
    cuda = FakeCuda(*dropped)
    checker = StreamChecker(cuda)
    with fake_device(cuda, checker):
        channel = open_transport(TWO_DCS, 100.0).channel("rows", (0, 1), background=is_background)
        with checker:
            rows = torch.zeros(64)
            sums = rows.sum()
            if dist.get_rank() == 1:
                rows = sums + torch.arange(64.0)
            parts = [(1 - dist.get_rank(), rows)]
            channel.start(*((parts, []) if dist.get_rank() == 1 else ([], parts)), ROWS).wait()
            is_there = torch.equal(rows, torch.arange(64.0))
        channel.transport.close()
    return sorted(set(checker.races)), is_there


@pytest.mark.parametrize("is_background", [False, True], ids=["foreground", "background"])
def test_a_copy_to_the_device_waits_for_earlier_uses_of_its_memory(pool2: ProcessPool, is_background: bool) -> None:
    assert pool2.run(receive_where_something_was_read, is_background=is_background) == [([], True), ([], True)]
    dropped = ("Pinned.deliver", "DeviceStreams.within")
    (races, _), _ = pool2.run(receive_where_something_was_read, is_background=is_background, dropped=dropped)
    assert "aten::copy_ in inbound writes what was read by compute" in races
