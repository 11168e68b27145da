# SPDX-License-Identifier: Apache-2.0
"""Names, addresses, rates, schedules: text in, frozen values out, and errors that name the argument."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_hybridep.errors import ConfigError, LabError
from ds_hybridep.lab.modelled import modelled_wan
from ds_hybridep.lab.topology import (
    LinkSpec,
    ScheduleEvent,
    Topology,
    burst_bytes,
    format_rate,
    parse_duration,
    parse_rate,
    parse_schedule,
    parse_share,
    queue_bytes,
    segment_batch_bytes,
)

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


@pytest.mark.parametrize(
    "text", ["", "2", "2x", "x2", "2x2x2", "-1x2", "two x two", "0x2", "2x0", "201x1", "1x999999999"]
)
def test_a_wrong_topology_names_the_argument(text):
    with pytest.raises(ConfigError, match=r"--dcs: got .*2x2"):
        Topology.parse(text)


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_names_the_range(rank):
    with pytest.raises(ConfigError, match=rf"rank: got {rank}, wanted 0 to 3 in a lab of 2x2"):
        TWO_BY_TWO.address_of(rank)


def test_a_dc_outside_names_the_range():
    with pytest.raises(ConfigError, match=r"dc: got 2, wanted 0 to 1 in a lab of 2x2"):
        TWO_BY_TWO.ranks_in(2)


@pytest.mark.parametrize(
    ("text", "bits_per_s"),
    [("200mbit", 200e6), ("1gbit", 1e9), ("1.5 Gbit", 1.5e9), ("64kbit", 64e3), (".5mbit", 5e5), ("100000bit", 1e5)],
)
def test_rates(text, bits_per_s):
    assert parse_rate(text, "--wan") == bits_per_s


@given(st.integers(64_000, 10**11))
def test_a_formatted_rate_reads_back(bits_per_s):
    assert parse_rate(format_rate(bits_per_s), "--wan") == pytest.approx(bits_per_s, rel=1e-9)


@pytest.mark.parametrize("text", ["", "200", "mbit", "-1mbit", "1e3mbit", "200mbps", "200mb", "2 0mbit", "nan"])
def test_a_wrong_rate_names_the_argument(text):
    with pytest.raises(ConfigError, match=r"--lan: got '.*', wanted a number and bit, kbit, mbit or gbit"):
        parse_rate(text, "--lan")


def test_mbps_is_refused_with_the_right_word():
    with pytest.raises(ConfigError, match="write mbit for megabits"):
        parse_rate("200mbps", "--wan")


@pytest.mark.parametrize("text", ["0mbit", "1kbit", "101gbit"])
def test_a_rate_that_cannot_be_shaped_names_the_range(text):
    with pytest.raises(ConfigError, match=r"--wan: got .* bit/s, wanted 64kbit to 100gbit"):
        parse_rate(text, "--wan")


@pytest.mark.parametrize(
    ("text", "seconds"), [("10ms", 0.010), ("250us", 250e-6), ("1.5s", 1.5), ("2min", 120.0), ("0", 0.0), ("0ms", 0.0)]
)
def test_durations(text, seconds):
    assert parse_duration(text, "--delay") == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("text", ["", "10", "ms", "-10ms", "10 hours", "10m"])
def test_a_wrong_duration_names_the_argument(text):
    with pytest.raises(ConfigError, match=r"--delay: got '.*', wanted a number and us, ms, s or min"):
        parse_duration(text, "--delay")


def test_links_check_rates_and_delays():
    with pytest.raises(ConfigError, match="--wan: got 10 bit/s"):
        LinkSpec(wan_bits_per_s=10)
    with pytest.raises(ConfigError, match="--lan: got 10 bit/s"):
        LinkSpec(lan_bits_per_s=10)
    with pytest.raises(ConfigError, match="--delay: got 6.0 s"):
        LinkSpec(wan_delay_s=6.0)
    with pytest.raises(ConfigError, match="--lan-delay: got -1.0 s"):
        LinkSpec(lan_delay_s=-1.0)


def test_a_schedule_is_sorted_and_reads_back():
    schedule = parse_schedule("60s:500mbit, 30s:50mbit@1,45s:cut@0,46.5s:restore", TWO_BY_TWO)
    assert schedule == (
        ScheduleEvent(30.0, "rate", 50e6, 1),
        ScheduleEvent(45.0, "cut", dc=0),
        ScheduleEvent(46.5, "restore"),
        ScheduleEvent(60.0, "rate", 500e6),
    )
    assert parse_schedule(",".join(map(str, schedule)), TWO_BY_TWO) == schedule
    assert parse_schedule("", TWO_BY_TWO) == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("30s", r"--schedule: got '30s', wanted TIME:RATE"),
        ("30:50mbit", r"--schedule, event '30:50mbit': got '30', wanted a number and us"),
        ("30s:50", r"--schedule, event '30s:50': got '50', wanted a number and bit"),
        ("30s:stop", r"--schedule, event '30s:stop': got 'stop'"),
        ("30s:cut@x", r"--schedule: got '30s:cut@x', wanted"),
        ("30s:cut@2", r"dc: got 2, wanted 0 to 1"),
    ],
)
def test_a_wrong_schedule_names_the_event(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_schedule(text, TWO_BY_TWO)


@given(st.floats(64e3, 100e9))
def test_shaper_settings_hold_at_least_what_one_packet_needs(bits_per_s):
    batch = segment_batch_bytes(bits_per_s)
    assert 1514 <= batch <= 65536
    assert batch <= burst_bytes(bits_per_s) < queue_bytes(bits_per_s, 0.0) <= queue_bytes(bits_per_s, 0.2)


def test_modelled_seconds_are_bytes_over_rate_and_say_what_they_are():
    record = {"steps": 10, "levels": [{"name": "dc", "sent_bytes": {"tokens": 14_480_000, "control": 0}}]}
    links = LinkSpec(wan_bits_per_s=100e6, wan_delay_s=0.010)
    modelled = modelled_wan(record, TWO_BY_TWO, links, exchanges_per_step=4)
    assert modelled.bytes_per_step == 724_000
    assert modelled.transfer_s == pytest.approx(757_000 * 8 / 100e6)  # 500 segments of 1448 bytes in frames of 1514
    assert modelled.latency_s == pytest.approx(0.040)
    assert str(modelled).startswith("modelled: 0.1006 s per step")


@pytest.mark.parametrize("record", [{}, {"steps": 1}, {"steps": 1, "levels": []}, {"steps": 1, "levels": [{}]}])
def test_a_record_without_bytes_cannot_be_charged(record):
    with pytest.raises(LabError, match=r"run record has no steps and levels\[0\].sent_bytes"):
        modelled_wan(record, TWO_BY_TWO, LinkSpec())


def test_a_record_of_no_steps_cannot_be_charged():
    record = {"steps": 0, "levels": [{"sent_bytes": {"tokens": 1}}]}
    with pytest.raises(LabError, match="covers no step"):
        modelled_wan(record, TWO_BY_TWO, LinkSpec())


def test_shares_are_read_with_and_without_percent():
    assert [parse_share(text, "--loss") for text in ("1%", "0.01", "0", ".1 %")] == pytest.approx(
        [0.01, 0.01, 0, 0.001]
    )
    with pytest.raises(ConfigError, match="--loss: got 'much'"):
        parse_share("much", "--loss")
    with pytest.raises(ConfigError, match="--loss: got 60%"):
        LinkSpec(wan_loss=0.6)
