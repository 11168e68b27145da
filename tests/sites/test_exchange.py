# SPDX-License-Identifier: Apache-2.0
"""Packets that depart before the exchange, between sites of one rank in threads."""

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from ds_hybridep.errors import CommunicationError
from ds_hybridep.sites import exchange
from ds_hybridep.sites.exchange import Counters, Header, Packet, SiteConnections, weights_of

NAMES = ["a", "b", "c"]
SIZES = [5, 3, 70_000]


class Sites:
    """The connections of all sites in one epoch."""

    def __init__(self, names: Sequence[str], joiners: Sequence[str] = (), reaches: str | None = None) -> None:
        self.counters = {name: {other: Counters() for other in names} for name in names}
        self.connections = {
            name: SiteConnections(
                names, name, 0, b"a secret of sixteen", host="127.0.0.1", timeout_s=10.0, counters=self.counters[name]
            )
            for name in names
        }
        addresses = {name: one.address for name, one in self.connections.items()}
        members = [name for name in names if name not in joiners]
        opening = names if reaches is None else members
        self.together(lambda one: one.open(1, members, list(joiners), addresses), opening)

    def together(self, run: Callable[[SiteConnections], Any], names: Sequence[str] = ()) -> list[Any]:
        with ThreadPoolExecutor() as pool:
            return list(pool.map(run, [self.connections[name] for name in names or self.connections]))


@pytest.fixture
def sites() -> Iterator[Sites]:
    made = Sites(NAMES)
    yield made
    made.together(SiteConnections.close)


def packets_of(site: int, step: int) -> list[Tensor]:
    return [torch.full((size,), 10 * site + step, dtype=torch.uint8) for size in SIZES]


def whole(step: int) -> list[Tensor]:
    return [torch.cat(packets_of(site, step)) for site in range(len(NAMES))]


def header_of(step: int, weight: float = 1.0) -> Header:
    return Header(step, 1.0, weight, (0.5, 0.25))


def swapped(one_site: SiteConnections, packets: list[Tensor], step: int = 0) -> list[Tensor]:
    received = one_site.swap(packets, header_of(step))
    assert {one.header for one in received.values()} == {header_of(step)}
    return [one.data for one in received.values()]


def test_packets_may_depart_early_and_in_any_order(sites: Sites) -> None:
    def step(one_site: SiteConnections, number: int) -> list[Tensor]:
        ours = packets_of(NAMES.index(one_site._site), number)
        for index in {"a": [2, 0], "b": [1], "c": []}[one_site._site]:
            one_site.begin(SIZES)
            one_site.depart(index, ours[index])
        return swapped(one_site, ours, number)

    for number in range(3):
        for got in sites.together(lambda one, number=number: step(one, number)):
            assert all(map(torch.equal, got, whole(number)))
    assert sites.counters["a"]["b"].early_bytes == 3 * (SIZES[2] + SIZES[0])
    assert sites.counters["a"]["b"].sent_bytes == 3 * (sum(SIZES) + len(header_of(0).pack(replaces=False)))
    assert sites.counters["c"]["b"].early_bytes == 0


def test_packets_that_departed_and_changed_since_do_not_count(sites: Sites) -> None:
    def step(one_site: SiteConnections, number: int) -> list[Tensor]:
        site = NAMES.index(one_site._site)
        if site == 0:
            one_site.begin(SIZES)
            one_site.depart(1, packets_of(site, 9)[1])
        return swapped(one_site, packets_of(site, number), number)

    for number in range(2):
        for got in sites.together(lambda one, number=number: step(one, number)):
            assert all(map(torch.equal, got, whole(number)))
    assert sites.counters["a"]["b"].sent_bytes == sites.counters["b"]["a"].received_bytes


def test_a_site_that_announces_its_own_loopback_address_is_told_what_to_set() -> None:
    with socket.socket() as silent:  # nobody listens there
        silent.bind(("127.0.0.1", 0))
        b = SiteConnections(
            ["a", "b"], "b", 0, b"a secret of sixteen", host="127.0.0.1", timeout_s=1.0, counters={"a": Counters()}
        )
        b.open(1, ["a", "b"], [], {"a": silent.getsockname(), "b": b.address})
        assert "site 'a' announces 127.0.0.1, its own machine: set its sites.host" in b.missed["a"]
        b.close()


def test_packets_of_another_size_are_named(sites: Sites) -> None:
    def step(one_site: SiteConnections) -> str:
        ours = packets_of(NAMES.index(one_site._site), 0)
        if one_site._site == "c":
            ours[1] = ours[1][:-1]
        with pytest.raises(CommunicationError):
            one_site.swap(ours, header_of(0))
        return one_site.missed.get("c", "")

    a, b, _ = sites.together(step)
    assert a == b
    assert f"packets of {[SIZES[0], SIZES[1] - 1, SIZES[2]]} bytes came instead of {list(SIZES)}" in a


def test_who_vanishes_after_some_packets_have_departed_is_missed_by_all(sites: Sites) -> None:
    gone = sites.connections["c"]
    gone.begin(SIZES)
    gone.depart(0, packets_of(2, 0)[0])
    gone._link.last_words = ("failed", "it was killed")
    gone.close()

    def swap(one_site: SiteConnections) -> set[str]:
        with pytest.raises(CommunicationError, match="lacks packets"):
            swapped(one_site, packets_of(NAMES.index(one_site._site), 0))
        return set(one_site.missed)

    assert sites.together(swap, "ab") == [{"c"}, {"c"}]


@pytest.mark.parametrize("misses", ["", "b"])
def test_a_joiner_gets_all_packets_and_knows_whether_they_count(misses: str) -> None:
    sites = Sites(NAMES, joiners="c")
    try:

        def exchange(one_site: SiteConnections) -> tuple[list[Tensor], tuple[bool, bool]]:
            if one_site.is_joiner:
                received = one_site.observe(SIZES)
            else:
                received = one_site.swap(packets_of(NAMES.index(one_site._site), 1), header_of(1))
            return [one.data for one in received.values()], one_site.agree(one_site._site != misses, False)

        for got, (is_agreed, _) in sites.together(exchange):
            assert all(map(torch.equal, got, whole(1)[:2]))
            assert is_agreed is not bool(misses)
    finally:
        sites.together(SiteConnections.close)


@pytest.mark.parametrize("says", [(True, True), (False, False)])
def test_a_joiner_decides_nothing_but_may_ask_for_another_epoch(says: tuple[bool, bool]) -> None:
    sites = Sites(NAMES, joiners="c")
    try:

        def exchange(one_site: SiteConnections) -> tuple[bool, bool]:
            if one_site.is_joiner:
                one_site.observe(SIZES)
                return one_site.agree(*says)
            one_site.swap(packets_of(NAMES.index(one_site._site), 1), header_of(1))
            return one_site.agree(True, False)

        assert sites.together(exchange)[:2] == [(True, True)] * 2
    finally:
        sites.together(SiteConnections.close)


def test_members_go_on_without_a_joiner_that_is_not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its port takes no connections: no exchange waits for it, and after some seconds it is missed."""
    monkeypatch.setattr(exchange, "CONNECT_S", 3.0)  # no key sets it; they wait for all of it
    sites = Sites(["a", "c"], joiners="c", reaches="")
    try:
        member = sites.connections["a"]
        wants, number = False, 0
        while not wants:
            member.swap(packets_of(0, number), header_of(number))
            is_agreed, wants = member.agree(True, False)
            assert is_agreed
            number += 1
            time.sleep(0.1)
        assert number > 5
        assert "no connection" in member.missed["c"]
        member.swap(packets_of(0, number), header_of(number))
        assert member.agree(True, False) == (True, False), "it is forgotten"
    finally:
        sites.together(SiteConnections.close)


def test_what_sites_weigh_is_relative_to_the_heaviest() -> None:
    packets = {
        name: Packet(header_of(1, weight), torch.empty(0)) for name, weight in zip("abc", (4, 0, 2), strict=True)
    }
    assert weights_of(packets) == [1.0, 0.0, 0.5]
    assert weights_of({"a": Packet(header_of(1, 0.0), torch.empty(0))}) == [0.0]
