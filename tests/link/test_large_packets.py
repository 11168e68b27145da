# SPDX-License-Identifier: Apache-2.0
"""Where large packets are lost, both sides say so; a way that is merely slow is waited for."""

import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from large_packets import lose_large_packets
from marks import slow

from ds_hybridep.lab.network import EmulatedNetwork
from ds_hybridep.lab.topology import LinkSpec, Topology
from ds_hybridep.link import BULK, URGENT

pytestmark = pytest.mark.dist
SCRIPT = Path(__file__).parents[1] / "support" / "link_host.py"


def run_pair(network, folder, sender, timeout_s, num_bytes, meanwhile=lambda: None, priorities=str(BULK)):
    """Return what both hosts print, once they are connected."""
    with ExitStack() as stack:
        hosts = []
        for rank in range(2):
            place = [rank, sender, network.topology.address_of(rank), folder, timeout_s, num_bytes, priorities]
            command = network.command_on(rank, [sys.executable, str(SCRIPT), *map(str, place)])
            hosts.append(stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True)))
            stack.callback(hosts[-1].kill)
        assert [host.stdout.readline() for host in hosts] == ["connected\n"] * 2
        meanwhile()
        (folder / "go").touch()
        return [host.communicate(timeout=500)[0] for host in hosts]


@pytest.mark.parametrize("sender", [slow(0), 1])  # 1 has dialled
def test_both_sides_say_that_large_packets_are_lost(permitted, tmp_path, sender):
    other = 1 - sender
    with EmulatedNetwork(Topology(2, 1), LinkSpec()) as network:
        said = run_pair(network, tmp_path, sender, 6, 200_000, meanwhile=partial(lose_large_packets, network, other))
    for one in said:
        assert f"large packets from rank {sender} to rank {other} (10.77.{other}.1:" in one
        assert "is the MTU too large somewhere on the way?" in one


@pytest.mark.slow
def test_who_is_stuck_on_all_lanes_ends_and_so_does_the_other_side(permitted, tmp_path):
    """Nothing can tell the other side but the refusal of its next connection."""
    with EmulatedNetwork(Topology(2, 1), LinkSpec()) as network:
        lose = partial(lose_large_packets, network, 1)
        said = run_pair(network, tmp_path, 0, 8, 200_000, meanwhile=lose, priorities=f"{URGENT}{BULK}")
    for one in said:
        assert "is the MTU too large somewhere on the way?" in one


@pytest.mark.slow
def test_who_is_stuck_on_all_lanes_and_dials_no_more_is_lost_for_the_other_side(permitted, tmp_path):
    with EmulatedNetwork(Topology(2, 1), LinkSpec()) as network:
        lose = partial(lose_large_packets, network, 0)
        said = run_pair(network, tmp_path, 1, 8, 200_000, meanwhile=lose, priorities=f"{URGENT}{BULK}")
    assert "is the MTU too large somewhere on the way?" in said[1]
    assert "failed" in said[0]


def test_what_is_small_arrives_all_the_same(permitted, tmp_path):
    with EmulatedNetwork(Topology(2, 1), LinkSpec()) as network:
        said = run_pair(network, tmp_path, 1, 6, 500, meanwhile=partial(lose_large_packets, network, 0))
    assert said == ["arrived 500\n"] * 2


@pytest.mark.slow
def test_a_slow_link_is_waited_for(permitted, tmp_path):
    with EmulatedNetwork(Topology(2, 1), LinkSpec(wan_bits_per_s=64e3)) as network:
        assert run_pair(network, tmp_path, 0, 20, 400_000) == ["arrived 400000\n"] * 2  # 50 s
