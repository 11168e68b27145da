# SPDX-License-Identifier: Apache-2.0
"""Packets that depart before the exchange, between sites of one rank in threads."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_hybridep.errors import CommunicationError
from ds_hybridep.sites.exchange import Counters, Crossing

NAMES = ["a", "b", "c"]
SIZES = [5, 3, 70_000]


class Sites:
    """The connections of all sites in one epoch."""

    def __init__(self, names: Sequence[str], observers: Sequence[str] = ()) -> None:
        self.counters = {name: {other: Counters() for other in names} for name in names}
        self.crossings = {
            name: Crossing(
                names, name, 0, b"a secret of sixteen", host="127.0.0.1", timeout_s=10.0, counters=self.counters[name]
            )
            for name in names
        }
        addresses = {name: one.address for name, one in self.crossings.items()}
        members = [name for name in names if name not in observers]
        self.together(lambda one: one.open(1, members, list(observers), addresses))

    def together(self, run: Callable[[Crossing], Any], names: Sequence[str] = ()) -> list[Any]:
        with ThreadPoolExecutor() as pool:
            return list(pool.map(run, [self.crossings[name] for name in names or self.crossings]))


@pytest.fixture
def sites() -> Iterator[Sites]:
    made = Sites(NAMES)
    yield made
    made.together(Crossing.close)


def packets_of(site: int, step: int) -> list[Tensor]:
    return [torch.full((size,), 10 * site + step, dtype=torch.uint8) for size in SIZES]


def whole(step: int) -> list[Tensor]:
    return [torch.cat(packets_of(site, step)) for site in range(len(NAMES))]


def test_packets_may_depart_early_and_in_any_order(sites: Sites) -> None:
    def step(crossing: Crossing, number: int) -> list[Tensor]:
        ours = packets_of(NAMES.index(crossing._site), number)
        for index in {"a": [2, 0], "b": [1], "c": []}[crossing._site]:
            crossing.begin(SIZES)
            crossing.depart(index, ours[index])
        return crossing.swap(ours)

    for number in range(3):
        for got in sites.together(lambda one, number=number: step(one, number)):
            assert all(map(torch.equal, got, whole(number)))
    assert sites.counters["a"]["b"].early_bytes == 3 * (SIZES[2] + SIZES[0])
    assert sites.counters["a"]["b"].sent_bytes == 3 * (sum(SIZES) + 1), "and the verdicts"
    assert sites.counters["c"]["b"].early_bytes == 0


def test_packets_that_departed_and_changed_since_do_not_count(sites: Sites) -> None:
    def step(crossing: Crossing, number: int) -> list[Tensor]:
        site = NAMES.index(crossing._site)
        if site == 0:
            crossing.begin(SIZES)
            crossing.depart(1, packets_of(site, 9)[1])
        return crossing.swap(packets_of(site, number))

    for number in range(2):
        for got in sites.together(lambda one, number=number: step(one, number)):
            assert all(map(torch.equal, got, whole(number)))
    assert sites.counters["a"]["b"].sent_bytes == sites.counters["b"]["a"].received_bytes + 2


def test_who_vanishes_after_some_packets_have_departed_is_missed_by_all(sites: Sites) -> None:
    gone = sites.crossings["c"]
    gone.begin(SIZES)
    gone.depart(0, packets_of(2, 0)[0])
    gone._link.last_words = ("failed", "it was killed")
    gone.close()

    def swap(crossing: Crossing) -> set[str]:
        with pytest.raises(CommunicationError, match="lacks packets"):
            crossing.swap(packets_of(NAMES.index(crossing._site), 0))
        return crossing.missed

    assert sites.together(swap, "ab") == [{"c"}, {"c"}]


@pytest.mark.parametrize("misses", ["", "b"])
def test_an_observer_knows_whether_an_exchange_counts(misses: str) -> None:
    sites = Sites(NAMES, observers="c")
    try:
        waiting = sites.crossings["c"].observe(SIZES)

        def exchange(crossing: Crossing) -> bool:
            crossing.swap(packets_of(NAMES.index(crossing._site), 1))
            return crossing.agree(crossing._site != misses, False, bytes(8))[0]

        assert sites.together(exchange, "ab") == [not misses] * 2
        assert [one.finish() for one in waiting.values()] == [sum(SIZES)] * 2, "all packets have come"
        deadline = time.monotonic() + (0.3 if misses else 100.0)
        while not any(one.is_agreed() for one in waiting.values()) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert any(one.is_agreed() for one in waiting.values()) != bool(misses), "else it will be repeated"
        sites.together(Crossing.close, "ab")
        while misses and not all(one.has_failed() for one in waiting.values()):
            assert time.monotonic() < deadline + 100.0
            time.sleep(0.01)
    finally:
        sites.together(Crossing.close)
