# SPDX-License-Identifier: Apache-2.0
"""The probe of links: what it sends to whom, what it makes of the times, and the file that it writes."""

import argparse
import json
from dataclasses import replace
from unittest import mock

import pytest
import torch
import yaml
from marks import slow
from process_pool import ProcessPool
from torch import distributed as dist

from ds_hybridep.adaptive.device import measure_device
from ds_hybridep.adaptive.probe import REPETITIONS, SHORT_S, WIRE_FACTOR, LinkProbe, probe_links
from ds_hybridep.commands.probe import better_of, cluster_file, read_levels, with_connections
from ds_hybridep.config import parse_config
from ds_hybridep.errors import ConfigError
from ds_hybridep.geometry.cluster import Cluster, Level, LinkSpeed
from ds_hybridep.plan.codec_costs import DeviceRates

SIZES = [(2, 2), slow((4, 1)), slow((1, 4)), (2, 1, 2)]


def cluster_of(sizes: tuple[int, ...]) -> Cluster:
    return Cluster(tuple(Level(f"level{index}", size) for index, size in enumerate(sizes)))


# -- in the workers ---------------------------------------------------------------------------------------------


def probe_of(sizes: tuple[int, ...], limit_s: float) -> list[tuple]:
    """What every level came out as, and the bytes that were sent over each."""
    from moe_refs import open_transport

    from ds_hybridep.adaptive import probe as probe_module

    transport = open_transport(cluster_of(sizes), 100.0)
    long_enough_s, probe_module.LONG_ENOUGH_S = probe_module.LONG_ENOUGH_S, 0.01
    found = probe_links(LinkProbe(transport), limit_s=limit_s)
    probe_module.LONG_ENOUGH_S = long_enough_s
    sent = [transport.traffic.sent_bytes.get((level, "control"), 0) for level in range(len(sizes))]
    transport.close()
    return [found, sent]


def timed_by_the_test(sizes: tuple[int, ...], level: int, slow_rank: int) -> float:
    """Rate of transfers that take 0.01 s on every rank, but 0.04 s on one."""
    from moe_refs import open_transport

    from ds_hybridep.adaptive import probe as probe_module

    transport = open_transport(cluster_of(sizes), 100.0)
    link_probe = LinkProbe(transport)
    link_probe._pass_on = lambda level, num_bytes: None
    seconds = 0.04 if dist.get_rank() == slow_rank else 0.01
    clock = iter(range(10**6))
    fake = argparse.Namespace(perf_counter=lambda: next(clock) * seconds)  # a tick is a transfer
    with mock.patch.object(probe_module, "time", fake):
        found = link_probe.burst(level, 1000, latency_s=0.0)
    transport.close()
    return found


# -- tests ------------------------------------------------------------------------------------------------------


@pytest.mark.dist
@pytest.mark.parametrize("sizes", SIZES)
def test_every_level_with_neighbours_is_measured_alike_on_all_ranks(pool4: ProcessPool, sizes: tuple[int, ...]):
    results = pool4.run(probe_of, sizes=sizes, limit_s=0.2)
    found, _ = results[0]
    assert all(other == found for other, _ in results)  # every rank has the same numbers
    for index, level in enumerate(found.levels):
        if sizes[index] == 1:
            assert level.link == LinkSpeed()
            assert all(sent[index] == 0 for _, sent in results)
            continue
        assert level.link.bandwidth_bytes_per_s > 0
        assert level.link.latency_s > 0
        assert all(sent[index] > 0 for _, sent in results)


@pytest.mark.dist
@pytest.mark.parametrize(
    ("level", "slow_rank", "expected"),
    [
        # Two ranks share an uplink of level 0, and the slowest of both ends counts.
        (0, 3, 2 * 1000 / 0.04),
        (0, 2, 2 * 1000 / 0.04),
        (1, 0, 1000 / 0.04),
    ],
)
def test_a_rate_is_of_the_slowest_uplink(pool4: ProcessPool, level: int, slow_rank: int, expected: float):
    for found in pool4.run(timed_by_the_test, sizes=(2, 2), level=level, slow_rank=slow_rank):
        assert found == pytest.approx(expected * WIRE_FACTOR)


class FakeProbe(LinkProbe):
    """Bursts that come out at given rates, the last of them for ever."""

    def __init__(self, *rates: float, latency: float = 0.0) -> None:
        self._rates, self.seconds, self._latency_s = list(rates), [], latency
        self.cluster = Cluster((Level("dc", 2), Level("gpu", 2)))

    def table(self, values: list[float]) -> list[list[float]]:
        return [values] * 4

    def latency_s(self, level: int) -> float:
        return self._latency_s

    def burst(self, level: int, num_bytes: int, latency_s: float) -> float:
        rate = self._rates.pop(0) if len(self._rates) > 1 else self._rates[0]
        self.seconds.append(2 * num_bytes / rate)  # two ranks share the uplink
        return rate


def measured_again(*rates: float, known: float = 1e8) -> tuple[float, list[float]]:
    """The rate that is taken for a link, and how long each burst took."""
    probe = FakeProbe(*rates)
    return probe.measure_again(0, known, 0.0), probe.seconds


@pytest.mark.parametrize(("fixed_s", "factor"), [(0.0, 1.0), (0.1, 1.0), (0.1, 3.0)])
def test_the_first_measurement_leaves_out_the_fixed_cost_of_a_transfer(fixed_s: float, factor: float):
    probe, factors = FakeProbe(3e6, latency=0.01), iter([factor, factor, *[1.0] * 2 * REPETITIONS])
    # A pause hits the first two transfers: then others are the fastest.
    probe._transfer_s = lambda level, num_bytes: (fixed_s + 2 * num_bytes * WIRE_FACTOR / 1e6) * next(factors)
    found = probe.measure(0, limit_s=60.0).link
    assert found.bandwidth_bytes_per_s == pytest.approx(1e6)
    assert found.latency_s == 0.01


def test_a_link_is_another_one_only_where_no_burst_is_about_as_fast_as_before():
    assert measured_again(0.9e8) == (1e8, pytest.approx([SHORT_S / 4 / 0.9, SHORT_S / 0.9]))
    assert measured_again(0.3e8, 0.5e8, 0.95e8)[0] == 1e8
    rate, seconds = measured_again(4e6)
    assert rate == 4e6
    assert len(seconds) == REPETITIONS
    assert sum(seconds) < 0.6  # of a link that has become 25 times slower
    rate, seconds = measured_again(1e10)
    assert rate == 1e10
    assert seconds[-1] >= SHORT_S / 2


FOUND = Cluster((Level("dc", 2, LinkSpeed(12_500_000.0, 0.01)), Level("gpu", 1)))
DEVICE = DeviceRates(1.675e12, 33.5e12)


def test_a_device_has_rates():
    found = measure_device(torch.device("cpu"))
    assert 1e6 < found.memory_bytes_per_s < 1e13
    assert 1e6 < found.product_flops_per_s < 1e15


@pytest.mark.parametrize(("name", "load"), [("cluster.yaml", yaml.safe_load), ("cluster.json", json.loads)])
def test_the_file_is_a_cluster_file(tmp_path, name, load):
    path = tmp_path / name
    path.write_text(cluster_file(FOUND, DEVICE))
    written = load(path.read_text())
    assert list(written) == ["levels", "device"]
    assert written["device"] == {"memory_gb_per_s": 1675.0, "product_tflops": 33.5}
    config = parse_config({"levels": name}, world_size=2, base_dir=tmp_path)
    assert [(level.name, level.size) for level in config.levels] == [("dc", 2), ("gpu", 1)]
    assert config.levels[0].bandwidth_gbps == 0.1
    assert config.levels[0].latency_ms == 10.0
    assert config.levels[1].bandwidth_gbps is None


@pytest.mark.parametrize("other", [LinkSpeed(connections=8), LinkSpeed(congestion_control="bbr")])
def test_other_connections_are_chosen_for_long_links_that_gain_by_them(tmp_path, other):
    long, short = Level("dc", 2, LinkSpeed(1e6, 0.05)), Level("gpu", 2, LinkSpeed(1e9, 0.0001))
    tried = with_connections(Cluster((long, short)), other)
    assert [level.link.connections for level in tried.levels] == [other.connections, 1]
    assert [level.link.congestion_control for level in tried.levels] == [other.congestion_control, None]
    fast = Cluster((replace(tried.levels[0], link=replace(tried.levels[0].link, bandwidth_bytes_per_s=5e6)), short))
    chosen = better_of(Cluster((long, short)), fast)
    assert chosen == fast
    assert better_of(Cluster((long, short)), tried) == Cluster((long, short))  # no faster
    (tmp_path / "cluster.json").write_text(cluster_file(chosen, DEVICE))
    config = parse_config({"levels": "cluster.json"}, world_size=4, base_dir=tmp_path)
    assert config.cluster() == fast


@pytest.mark.parametrize("text", ["dc", "dc=0", "dc=2,gpu", "dc=x", ""])
def test_levels_are_read_or_refused(text):
    assert [(level.name, level.size) for level in read_levels("2,gpu=3").levels] == [("level0", 2), ("gpu", 3)]
    with pytest.raises(ConfigError, match="--levels: got .*dc=2,gpu=8"):
        read_levels(text)
