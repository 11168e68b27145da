# SPDX-License-Identifier: Apache-2.0
"""Agreements between the ranks of a site leave nothing with gloo's threads: these abort a process that ends then."""

from typing import Any

import pytest
import torch
from process_pool import ProcessPool
from torch import distributed as dist

pytestmark = pytest.mark.dist


def agree_often(times: int) -> list[Any]:
    """Return what the last agreements said, and how many tensors gloo still had when an agreement returned."""
    from ds_hybridep.transport.inside import Inside, share

    given: list[torch.Tensor] = []
    originals = {name: getattr(dist, name) for name in ("all_gather", "gather", "broadcast", "all_reduce")}

    def noting(name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            for one in args:
                given.extend(one if isinstance(one, list) else [one] if isinstance(one, torch.Tensor) else [])
            return originals[name](*args, **kwargs)

        return call

    inside, held = Inside(), 0
    flat, own = torch.zeros(2 * inside.size), torch.full((2,), float(inside.rank))
    calls = (
        lambda: inside.gather(["rank", inside.rank]),
        lambda: inside.broadcast(f"rank {inside.rank}"),
        lambda: inside.all(inside.rank > 0),
        lambda: share(flat, own, dist.group.WORLD),
    )
    try:
        for name in originals:
            setattr(dist, name, noting(name))
        said: list[Any] = []
        for _ in range(times):
            said = []
            for call in calls:
                given.clear()
                said.append(call())
                held += sum(one._use_count() > 1 for one in given)
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
        inside.close()
    return [*said, flat.tolist(), held]


def test_an_agreement_returns_when_gloo_has_dropped_its_tensors(pool2: ProcessPool) -> None:
    first, second = pool2.run(agree_often, times=100)
    assert first == [[["rank", 0], ["rank", 1]], "rank 0", False, None, [0.0, 0.0, 1.0, 1.0], 0]
    assert second == [[], "rank 0", False, None, [0.0, 0.0, 1.0, 1.0], 0]
