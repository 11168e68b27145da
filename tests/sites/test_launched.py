# SPDX-License-Identifier: Apache-2.0
"""Sites that `deepspeed` starts: behind a firewall, and stopped by a user."""

import re
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from site_jobs import ForkedJob, Job, Launched, Meeting, block, end_together

from ds_hybridep.errors import LabError
from ds_hybridep.lab.namespaces import run_tool
from ds_hybridep.lab.network import EmulatedNetwork
from ds_hybridep.lab.topology import LinkSpec, Topology

pytestmark = [pytest.mark.dist, pytest.mark.slow]
needs_firewall = pytest.mark.skipif(shutil.which("nft") is None, reason="nft not found: apt-get install nftables")
LINK_PORTS = [29600, 29619]
TIMEOUT_S = 20
RULES = """
table ip hybridep {{
    chain coming {{
        type filter hook input priority 0; policy accept;
        iifname "lo" accept
        ct state established accept
        tcp dport {{ {ports} }} accept
        counter drop
    }}
    chain leaving {{
        type filter hook output priority 0; policy accept;
        oifname "lo" accept
        ct state established accept
        tcp dport {{ {ports} }} accept
        counter drop
    }}
}}
"""


@contextmanager
def firewalled(ports: str) -> Iterator[EmulatedNetwork]:
    """Three hosts, between which only connections to these TCP ports pass."""
    with EmulatedNetwork(Topology(3, 1), LinkSpec()) as network:
        for host in range(3):
            run_tool(network.command_on(host, ["nft", "-f", "-"]), stdin=RULES.format(ports=ports))
        yield network


def dropped(network: EmulatedNetwork) -> list[int]:
    """How many packets the firewall of each host has dropped."""
    said = [run_tool(network.command_on(host, ["nft", "list", "ruleset"])) for host in range(3)]
    return [sum(map(int, re.findall(r"counter packets (\d+)", one))) for one in said]


@needs_firewall
@pytest.mark.usefixtures("permitted_without_delay")
def test_two_jobs_behind_a_firewall_train_as_one_over_all_ranks(tmp_path: Path) -> None:
    options: dict[str, Any] = {"ep_size": 2, "zero": 2, "accumulation": 2, "clip": 0.5, "bucket": 2000}
    port = 29500
    with firewalled(f"{LINK_PORTS[0]}-{LINK_PORTS[1]}, {port}") as network:
        point = Meeting(tmp_path, network.topology.address_of(2), network.command_on(2, []), port)
        with point as meeting:
            both = block(meeting, tmp_path, link={"ports": LINK_PORTS})
            jobs = [
                Launched(
                    tmp_path, name, 2, network.command_on(host, []), site=name, first_rank=2 * host, block=both,
                    **options,
                )
                for host, name in enumerate("ab")
            ]  # fmt: skip
            try:
                sites = [record for job in jobs for record in job.records()]
            finally:
                for job in jobs:
                    job.kill()
        assert dropped(network) == [0, 0, 0], "nothing else was tried"
        elsewhere = f"import socket; socket.create_connection(({network.topology.address_of(1)!r}, 29400), 1)"
        tried = network.command_on(0, ["python3", "-c", elsewhere])
        with pytest.raises(LabError, match="timed out"):
            run_tool(tried)
        assert dropped(network)[0] > 0
    one = Launched(tmp_path, "one", 4, **options).records()
    for got, wanted in zip(sites, one, strict=True):
        assert got["losses"] == pytest.approx(wanted["losses"], abs=2e-6), "fp32, up to the order of sums"
    assert [one["weights"] for one in sites[:2]] == [one["weights"] for one in sites[2:]]


@needs_firewall
@pytest.mark.usefixtures("permitted_without_delay")
def test_two_ports_for_each_rank_are_enough_however_often_sites_come_and_go(tmp_path: Path) -> None:
    options = {"until": str(tmp_path / "until"), "steps": 10**6, "pause_s": 0.02, "ep_size": 1}
    with firewalled("29600-29601, 29500") as network:
        point = Meeting(tmp_path, network.topology.address_of(2), network.command_on(2, []), 29500)
        with point as meeting:
            options["block"] = block(meeting, tmp_path, timeout_s=TIMEOUT_S, link={"ports": [29600, 29601]})

            def start(name: str, site: str) -> Job:
                before = network.command_on("ab".index(site), [])
                return ForkedJob(tmp_path, name, 1, before, site=site, first_rank="ab".index(site), **options)

            a, b = start("a", "a"), start("b", "b")
            try:
                for number in range(2):
                    b.wait_for_step(3 if number == 0 else a.step())
                    b.kill()
                    at = a.step()
                    b = start(f"b{number}", "b")
                    b.wait_for_step(at + 3)
                records = end_together(tmp_path, [a, b])
            finally:
                a.kill()
                b.kill()
        assert dropped(network) == [0, 0, 0]
    assert records[0][0]["weights"] == records[1][0]["weights"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])
@pytest.mark.parametrize(("kind", "ranks"), [(Launched, 2), (Job, 1)], ids=["deepspeed", "python"])
def test_a_site_that_is_stopped_ends_as_without_sites_and_the_other_goes_on(
    tmp_path: Path, kind: type[Job], ranks: int, number: int
) -> None:
    options = {"until": str(tmp_path / "until"), "steps": 10**6, "pause_s": 0.02, "ep_size": ranks}
    alone = kind(tmp_path, "alone", ranks, **options)
    try:
        alone.wait_for_step(3)
        alone.kill(number)
        expected = alone.wait()
    finally:
        alone.kill()
    with Meeting(tmp_path) as meeting:
        options["block"] = block(meeting, tmp_path, timeout_s=TIMEOUT_S)
        a, b = (
            kind(tmp_path, name, ranks, site=name, first_rank=index * ranks, **options)
            for index, name in enumerate("ab")
        )
        try:
            b.wait_for_step(3)
            b.kill(number)
            time.sleep(0.5)  # what was on its way is done
            a.wait_for_step(a.step() + 3, TIMEOUT_S + 5)
            assert b.wait() == expected
            if kind is Job and number == signal.SIGINT:  # an exception, which is announced
                assert "site 'b' has left" in meeting.log.read_text()
            (records,) = end_together(tmp_path, [a])
        finally:
            a.kill()
            b.kill()
    assert sorted(map(int, records[0]["losses"])) == list(range(len(records[0]["losses"]))), "no step is lost"
