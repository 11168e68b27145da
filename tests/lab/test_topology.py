# SPDX-License-Identifier: Apache-2.0
"""Names, addresses, rates: text in, frozen values out, and errors that name the argument."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hybridep.errors import ConfigError
from ds_hybridep.lab.shaper import burst_bytes, queue_bytes, segment_batch_bytes
from ds_hybridep.lab.topology import LinkSpec, Topology, parse_duration, parse_rate, parse_share

TWO_BY_TWO = Topology(2, 2)


def test_ranks_are_counted_dc_by_dc():
    topology = Topology.parse("2x3")
    assert topology == Topology(2, 3)
    assert topology.num_ranks == 6
    assert [topology.dc_of(rank) for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    assert list(topology.ranks_in(1)) == [3, 4, 5]
    assert topology.address_of(4) == "10.77.1.2"
    assert topology.mac_of(4) == "02:4d:00:00:01:02"
    assert str(topology) == "2x3"


@given(st.integers(1, 200), st.integers(1, 200))
def test_no_two_hosts_share_an_address(num_dcs, hosts_per_dc):
    topology = Topology(num_dcs, hosts_per_dc)
    last = topology.num_ranks - 1
    ranks = sorted({0, last, last // 2, *range(min(last, 300))})
    assert len({topology.address_of(rank) for rank in ranks}) == len(ranks)
    assert len({topology.mac_of(rank) for rank in ranks}) == len(ranks)
    assert all(rank in topology.ranks_in(topology.dc_of(rank)) for rank in ranks)
    assert Topology.parse(str(topology)) == topology


@pytest.mark.parametrize("text", ["", "2", "2x", "x2", "2x2x2", "-1x2", "two x two", "0x2", "201x1", "1x999999999"])
def test_a_wrong_topology_names_the_argument(text):
    with pytest.raises(ConfigError, match=r"--dcs: got .*2x2"):
        Topology.parse(text)


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        *((parse_rate, *pair) for pair in (("200mbit", 200e6), ("1.5 Gbit", 1.5e9), (".5mbit", 5e5))),
        *((parse_duration, *pair) for pair in (("10ms", 0.010), ("250us", 250e-6), ("2min", 120.0), ("0", 0.0))),
        (parse_share, "1%", 0.01),
    ],
)
def test_rates_and_durations_are_read(parse, text, value):
    assert parse(text, "--option") == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        *((lambda text=text: parse_rate(text, "--wan"), r"--wan: got '.*', wanted a number and bit, kbit, mbit")
          for text in ("", "200", "mbit", "-1mbit", "1e3mbit", "200mbps", "2 0mbit", "nan")),
        *((lambda text=text: parse_rate(text, "--wan"), r"--wan: got .* bit/s, wanted 64kbit to 100gbit")
          for text in ("0mbit", "1kbit", "101gbit")),
        *((lambda text=text: parse_duration(text, "--delay"), r"--delay: got '.*', wanted a number and us, ms")
          for text in ("", "10", "ms", "-10ms", "10 hours", "10m")),
        (lambda: LinkSpec(wan_bits_per_s=10), "--wan: got 10 bit/s"),
        (lambda: LinkSpec(wan_delay_s=6.0), "--delay: got 6.0 s"),
        (lambda: LinkSpec(wan_loss=1.6), "--loss: got 160%"),
        (lambda: parse_share("0.01", "--loss"), "--loss: got '0.01', wanted a percentage"),
        (lambda: TWO_BY_TWO.ranks_in(2), r"dc: got 2, wanted 0 to 1 in a lab of 2x2"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_named(wrong, message):
    with pytest.raises(ConfigError, match=message):
        wrong()


@given(st.floats(64e3, 100e9))
def test_shaper_settings_hold_at_least_what_one_packet_needs(bits_per_s):
    batch = segment_batch_bytes(bits_per_s)
    assert 1514 <= batch <= 65536
    assert batch <= burst_bytes(bits_per_s) < queue_bytes(bits_per_s, 0.0) <= queue_bytes(bits_per_s, 0.2)
    assert queue_bytes(bits_per_s, 0.0) >= 4 * 2**20
