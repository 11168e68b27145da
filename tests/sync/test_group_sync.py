# SPDX-License-Identifier: Apache-2.0
"""Encoded sums and gathers of one group, without DeepSpeed: against exact ones, and bit-equal on all ranks."""

import math
from typing import Any

import pytest
import torch
from codec_cases import make_codec
from marks import slow
from moe_refs import open_transport
from process_pool import Pools, ProcessPool
from torch import distributed as dist

from ds_hybridep.codecs import PatchCodec
from ds_hybridep.geometry.cluster import Cluster, Level
from ds_hybridep.geometry.slots import cut, even_bounds, whole
from ds_hybridep.sync.encoding import Encoding
from ds_hybridep.sync.group_sync import GroupSync
from ds_hybridep.sync.transaction import Transaction
from ds_hybridep.sync.undelivered import kept_back_in

pytestmark = pytest.mark.dist

SPANS = (whole("embedding", (40, 32)), whole("norm", (32,)), whole("experts", (4, 32, 40)))
TOTAL = sum(span.num_elements for span in SPANS)
CPU = torch.device("cpu")


def open_group(
    sizes: tuple[int, ...], weights: list[Any], gradients: list[Any], backends: Any = ()
) -> tuple[GroupSync, Transaction]:
    transport = open_transport(
        Cluster(tuple(Level(f"level {at}", size) for at, size in enumerate(sizes))), timeout_s=100
    )
    transport.backends = tuple(backends) or transport.backends
    made = [None if name is None else PatchCodec() if name == "patch" else make_codec(name) for name in weights]
    sums = [None if name is None else make_codec(name) for name in gradients]
    encoding, transaction = Encoding(tuple(made), tuple(sums)), Transaction()
    return GroupSync(
        transport, range(math.prod(sizes)), "test", encoding, transaction=transaction, device=CPU
    ), transaction


def gather_changes(sizes: tuple[int, ...], dtype: str, codecs: list[Any], backends: Any = ()) -> dict[str, Any]:
    """Parameters after each of four gathers, and what they should be; the owners' values drift."""
    group, transaction = open_group(sizes, codecs, [None] * len(sizes), backends)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    size = math.ceil(TOTAL / world_size) * world_size
    spans = (*SPANS, whole("padding", (size - TOTAL,)))
    generator = torch.Generator().manual_seed(3)
    masters = torch.randn(size, generator=generator)
    flat = masters.to(getattr(torch, dtype), copy=True)
    own = flat.view(world_size, -1)[rank]
    errors, equal = [], []
    for _ in range(4):
        masters += 0.01 * torch.randn(size, generator=generator)
        before = own.clone()
        own.copy_(masters.view(world_size, -1)[rank])
        group.start_all_gather(flat, own, before, spans)()
        exact = masters.to(flat.dtype)
        errors.append(float((flat.float() - exact.float()).norm() / exact.float().norm()))
        equal.append(torch.equal(flat, exact))
    sent = dict(group.transport.traffic.sent_bytes)
    received = dict(group.transport.traffic.received_bytes)
    group.transport.close()
    return {"errors": errors, "equal": equal, "bits": flat.view(torch.uint8).numpy().tobytes(), "sent": sent,
            "received": received}  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "codecs", "backends"),
    [
        ((2, 2), ["patch", None], ()),
        ((4,), ["patch"], ()),
        ((2, 2), ["patch", "patch"], ()),
        ((2, 2), ["patch", None], ("gloo", "nccl")),  # whose messages must be as long as their room
    ],
)
def test_patches_bring_the_very_values(pool4: ProcessPool, sizes: Any, codecs: Any, backends: Any) -> None:
    found = pool4.run(gather_changes, sizes=sizes, dtype="bfloat16", codecs=codecs, backends=backends)
    assert all(all(one["equal"]) for one in found)
    slow = (0, "dense")
    assert sum(one["sent"][slow] for one in found) == sum(one["received"][slow] for one in found)


@pytest.mark.parametrize(("sizes", "codec"), [((2, 2), "int8"), ((2, 1, 2), {"type": "low_rank", "ratio": 8})])
def test_lossy_gathers_give_all_ranks_the_same_bits(pool4: ProcessPool, sizes: Any, codec: Any) -> None:
    codecs = [codec, *[None] * (len(sizes) - 1)]
    found = pool4.run(gather_changes, sizes=sizes, dtype="float32", codecs=codecs)
    assert len({one["bits"] for one in found}) == 1
    assert 0 < found[0]["errors"][-1] < 0.05
    # Wide parameters are not patched, and 16-bit ones never lossy.
    assert all(all(one["equal"]) for one in pool4.run(gather_changes, sizes=sizes, dtype="bfloat16", codecs=codecs))
    patched = ["patch", *[None] * (len(sizes) - 1)]
    assert all(all(one["equal"]) for one in pool4.run(gather_changes, sizes=sizes, dtype="float32", codecs=patched))


def sum_repeatedly(
    sizes: tuple[int, ...], codecs: list[Any], num_sums: int, dtype: str, owners: bool
) -> dict[str, Any]:
    """The mean over several sums of the same gradients, beside the exact one: what is left out comes later."""
    group, transaction = open_group(sizes, [None] * len(sizes), codecs)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    parts = [torch.randn(TOTAL, generator=torch.Generator().manual_seed(11 + one)) for one in range(world_size)]
    parts = [part.to(getattr(torch, dtype)) for part in parts]
    exact = sum(part.double() for part in parts)
    total = torch.zeros(TOTAL, dtype=torch.float64)
    slots = cut(SPANS, even_bounds(SPANS, world_size))
    slices = [(owner, span) for owner, slot in enumerate(slots) for span in slot]
    mine = torch.cat([torch.full((span.num_elements,), owner == rank) for owner, span in slices])
    last = torch.zeros(0)
    for _ in range(num_sums):
        last = parts[rank].clone()
        if owners:
            group.reduce_to_owners(last, slices)
        else:
            group.all_reduce(last, SPANS)
        transaction.commit()
        total += last.double()
    mean = total / num_sums
    wanted = mine if owners else torch.ones_like(mine)
    group.transport.close()
    return {
        "first": float((last.double() - exact)[wanted].norm() / exact[wanted].norm()),
        "mean": float((mean - exact)[wanted].norm() / exact[wanted].norm()),
        "bits": last.view(torch.uint8).numpy().tobytes(),
        "untouched": torch.equal(last[~wanted], parts[rank][~wanted]),
    }


@pytest.mark.parametrize(
    ("sizes", "codecs", "dtype", "owners"),
    [
        ((2, 2), ["int4", None], "float32", True),
        ((2, 2), ["int4", "int8"], "bfloat16", False),
        ((4,), ["int2"], "float32", False),
        ((4,), ["int2"], "bfloat16", True),
    ],
)
def test_what_sums_leave_out_comes_later(
    pool4: ProcessPool, sizes: Any, codecs: Any, dtype: str, owners: bool
) -> None:
    found = pool4.run(sum_repeatedly, sizes=sizes, codecs=codecs, num_sums=12, dtype=dtype, owners=owners)
    for one in found:
        assert one["untouched"]
        assert one["mean"] < 0.25 * one["first"] + (0.004 if dtype == "bfloat16" else 0.0)
    if not owners:
        assert len({one["bits"] for one in found}) == 1


def sum_of_unknown(sizes: tuple[int, ...]) -> tuple[bool, int]:
    group, transaction = open_group(sizes, [None] * len(sizes), ["int4", *[None] * (len(sizes) - 1)])
    total = torch.full((3, 50), dist.get_rank() + 1.001)
    group.all_reduce(total)
    kept = len(group.memory.sums.residuals)
    group.transport.close()
    expected = sum(rank + 1.001 for rank in range(math.prod(sizes)))
    return bool(torch.allclose(total, torch.full((3, 50), expected), rtol=1e-6)), kept


def test_sums_of_unknown_tensors_are_exact_because_residuals_would_have_no_owner(pool4: ProcessPool) -> None:
    assert pool4.run(sum_of_unknown, sizes=(2, 2)) == [(True, 0)] * 4


def sum_small_numbers(sizes: tuple[int, ...], codec: Any, owners: bool, num_sums: int) -> list[float]:
    """How far what has arrived and what waits is from the sum of constant gradients, relative to each element.

    Returns the largest distance, the mean of all, and the mean of elements below 3e-4 of the largest.
    """
    group, transaction = open_group(sizes, [None] * len(sizes), [codec, *[None] * (len(sizes) - 1)])
    rank, world_size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(5)
    size = torch.exp(torch.rand(TOTAL, generator=generator) * math.log(1e-4))
    own = (size * (1 + 0.1 * rank)).bfloat16()
    exact = sum((size * (1 + 0.1 * other)).bfloat16().double() for other in range(world_size))
    slots = cut(SPANS, even_bounds(SPANS, world_size))
    slices = [(owner, span) for owner, slot in enumerate(slots) for span in slot]
    mine = torch.cat([torch.full((span.num_elements,), owner == rank or not owners) for owner, span in slices])
    found = torch.zeros(TOTAL, dtype=torch.float64)
    for _ in range(num_sums):
        last = own.clone()
        if owners:
            group.reduce_to_owners(last, slices)
        else:
            group.all_reduce(last, SPANS)
        transaction.commit()
        found += torch.where(mine, last.double(), 0.0)
    waiting = torch.zeros(TOTAL, dtype=torch.float64)
    starts = {span.name: start for span, start in zip(SPANS, (0, 1280, 1312), strict=True)}
    saved = {"experts": {}, "synchronised": {"all": group.memory.state_dict()}, "undelivered": [], "places": {}}
    for one in kept_back_in(saved, world_size):
        first = starts[one.name] + one.start
        waiting[first : first + one.values.numel()] += one.values.double() * world_size  # of a mean over all ranks
    dist.all_reduce(waiting)
    group.transport.close()
    error = ((found + waiting) / (num_sums * exact) - 1)[mine]
    return [float(error.abs().max()), float(error.mean()), float(error[size[mine] < 3e-4].mean())]


@pytest.mark.parametrize(
    ("sizes", "codec", "owners"),
    [
        ((2,), "int4", True),
        slow((2, 2), "int4", True),
        slow((2, 2), {"type": "low_rank", "ratio": 8, "weighting": "rms"}, False),
        slow((2, 2), "int4", False),
        slow((2, 2), {"type": "low_rank", "ratio": 8}, True),
    ],
    ids=str,
)
def test_small_gradients_of_16_bits_arrive(pool_of: Pools, sizes: tuple[int, ...], codec: Any, owners: bool) -> None:
    """Rounding to nearest would lose those below a 256th of a residual for good."""
    pool = pool_of(math.prod(sizes))
    for largest, mean, of_small in pool.run(sum_small_numbers, sizes=sizes, codec=codec, owners=owners, num_sums=300):
        assert largest < 0.02 * math.sqrt(5000 / 300)  # the noise of rounding falls with the root of their number
        assert abs(mean) < 0.002
        assert abs(of_small) < 0.004


def sum_in_micro_steps(sizes: tuple[int, ...], num_micro_steps: int) -> dict[str, Any]:
    """Sums of several micro-steps, crossing the slow level once, and bytes."""
    group, transaction = open_group(sizes, [None] * len(sizes), [None] * len(sizes))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    slots = cut(SPANS, even_bounds(SPANS, world_size))
    slices = [(owner, span) for owner, slot in enumerate(slots) for span in slot]
    mine = torch.cat([torch.full((span.num_elements,), owner == rank) for owner, span in slices])
    total = torch.zeros(TOTAL)
    exact = torch.zeros(TOTAL, dtype=torch.float64)
    for micro_step in range(num_micro_steps):
        for other in range(world_size):
            part = torch.randn(TOTAL, generator=torch.Generator().manual_seed(100 * micro_step + other))
            exact += part.double()
            if other == rank:
                own = part.clone()
        group.reduce_to_owners(own, slices, is_last=micro_step == num_micro_steps - 1)
        total += torch.where(mine, own, 0.0)
    sent = dict(group.transport.traffic.sent_bytes)
    group.transport.close()
    return {"error": float((total.double() - exact)[mine].norm() / exact[mine].norm()), "sent": sent}


@pytest.mark.parametrize("sizes", [(2, 2), (4,)])
def test_micro_steps_cross_slow_levels_once(pool4: ProcessPool, sizes: Any) -> None:
    once = pool4.run(sum_in_micro_steps, sizes=sizes, num_micro_steps=1)
    often = pool4.run(sum_in_micro_steps, sizes=sizes, num_micro_steps=3)
    assert all(one["error"] < 1e-6 for one in often)
    levels = [level for level, size in enumerate(sizes) if size > 1]
    for level in levels:
        times = 3 if level == levels[-1] else 1
        for one, other in zip(once, often, strict=True):
            assert other["sent"].get((level, "dense"), 0) == times * one["sent"].get((level, "dense"), 0)
