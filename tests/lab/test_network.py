# SPDX-License-Identifier: Apache-2.0
"""Emulated links do what they say: order, loss, cut, counters, and nothing left behind."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from traffic import flowing, running, serving

from ds_hybridep.errors import ConfigError, LabError
from ds_hybridep.lab import delay, namespaces, network
from ds_hybridep.lab.network import EmulatedNetwork, why_not_permitted
from ds_hybridep.lab.topology import SEGMENT_FRAME_BYTES, LinkSpec, Topology

REPOSITORY = Path(__file__).resolve().parents[2]
GOODPUT_SHARE = 1448 / SEGMENT_FRAME_BYTES  # 1500 - 20 (IP) - 20 (TCP) - 12 (TCP timestamps)


DATAGRAM_SENDER = """
import socket, sys, time
out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for number in range(int(sys.argv[2])):
    out.sendto(f"{number} {time.monotonic_ns()}".encode(), (sys.argv[1], 7777))
    time.sleep(0.002)
for _ in range(20):  # the end, of which some may be lost
    out.sendto(b"-1 0", (sys.argv[1], 7777))
"""
DATAGRAM_RECEIVER = """
import socket, time
into = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
into.bind(("0.0.0.0", 7777))
print("ready", flush=True)
arrived = []  # printed at the end: what waits for a slow reader meanwhile would be lost
while (said := into.recv(100).split())[0] != b"-1":
    arrived.append((int(said[0]), time.monotonic_ns() - int(said[1])))
for number, took_ns in arrived:
    print(number, took_ns)
"""


@pytest.mark.dist
def test_frames_are_held_back_and_lost_but_stay_in_order(permitted):
    count, loss = 1500, 0.05
    links = LinkSpec(wan_bits_per_s=1e9, wan_delay_s=0.010, wan_loss=loss)
    with EmulatedNetwork(Topology(2, 1), links) as net:
        python = [sys.executable, "-IS", "-c"]
        with subprocess.Popen(
            net.command_on(1, [*python, DATAGRAM_RECEIVER]), stdout=subprocess.PIPE, text=True
        ) as receiver:
            assert receiver.stdout.readline() == "ready\n"
            sender = [*python, DATAGRAM_SENDER, net.topology.address_of(1), str(count)]
            subprocess.run(net.command_on(0, sender), check=True, timeout=500)
            arrived = [tuple(map(int, line.split())) for line in receiver.stdout]
    numbers, times_ns = zip(*arrived, strict=True)
    assert list(numbers) == sorted(numbers)
    assert 0.2 * loss < 1 - len(numbers) / count < 2 * loss  # 7 standard deviations and more
    assert min(times_ns) >= 10e6  # the one time that holds on any machine: no frame comes early


@pytest.mark.dist
def test_delay_and_loss_change_while_frames_flow(permitted):
    with EmulatedNetwork(Topology(2, 1), LinkSpec(wan_delay_s=0.001)) as net:
        with flowing(net, 0, 1) as flow:
            net.set_wan_path(0.02, dc=0)
            flow.wait_for_bytes(1_000_000)
            net.set_wan_path(0.0, loss=1.0, dc=0)
            assert_quiet(flow)
    with EmulatedNetwork(Topology(2, 1), LinkSpec()) as net, pytest.raises(LabError, match="no delay line"):
        net.set_wan_path(0.02)


def assert_quiet(flow):
    time.sleep(0.4)  # what stood in a queue may still arrive
    quiet_from = flow.read()[-1]
    time.sleep(0.4)
    assert flow.read()[-1] == quiet_from


@pytest.mark.dist
def test_the_rate_changes_under_a_running_flow(permitted):
    with EmulatedNetwork(Topology(2, 1), LinkSpec(wan_bits_per_s=200e6)) as net, flowing(net, 0, 1) as flow:
        net.set_wan_rate(20e6)
        net.set_wan_rate(100e6, dc=0)
        set_to = [namespaces.run_tool(["tc", "-n", *place[:1], "class", "show", "dev", place[1]])
                  for dc in range(2) for place in net._uplink_shapers(dc)]  # fmt: skip
        assert ["rate 100Mbit" in text for text in set_to] == [True, True, False, False]
        flow.wait_for_bytes(100_000)
        with pytest.raises(ConfigError, match="bits_per_s: got 1 bit/s"):
            net.set_wan_rate(1)


@pytest.mark.dist
@pytest.mark.parametrize("wan_delay_s", [pytest.param(0.0, marks=pytest.mark.slow), 0.005])
def test_a_cut_link_carries_nothing_until_it_is_restored(permitted, wan_delay_s):
    with EmulatedNetwork(Topology(2, 1), LinkSpec(wan_bits_per_s=100e6, wan_delay_s=wan_delay_s)) as net:
        with flowing(net, 0, 1) as flow:
            net.cut(1)
            assert_quiet(flow)
            net.restore(1)
            flow.wait_for_bytes(1_000_000)
        with pytest.raises(ConfigError, match="dc: got 2"):
            net.cut(2)


@pytest.mark.dist
def test_counters_count_what_was_sent_where_it_was_sent(permitted):
    num_bytes = 5_000_000
    with EmulatedNetwork(Topology(3, 2), LinkSpec(wan_bits_per_s=500e6, wan_delay_s=0.002)) as net:

        def send(sender, receiver):
            before = net.counters()
            with serving(net, receiver, "sink"):
                with running(net, sender, "source", net.topology.address_of(receiver), str(num_bytes)) as source:
                    source.wait(300)
            return [now.since(then) for now, then in zip(net.counters(), before, strict=True)]

        inside = send(0, 1)
        assert [(uplink.out_bytes, uplink.in_bytes) for uplink in inside] == [(0, 0)] * 3
        across = send(1, 4)
    frame_bytes = num_bytes / GOODPUT_SHARE
    assert across[0].out_bytes == pytest.approx(frame_bytes, rel=0.05)
    assert across[2].in_bytes == across[0].out_bytes
    assert across[0].in_bytes == across[2].out_bytes < 0.1 * frame_bytes  # acknowledgements
    assert (across[1].out_bytes, across[1].in_bytes) == (0, 0)


@pytest.mark.dist
@pytest.mark.parametrize(
    "text", ["2x2", *(pytest.param(text, marks=pytest.mark.slow) for text in ("4x1", "3x1", "1x2"))]
)
def test_every_host_reaches_every_other(permitted, lab_namespaces, text):
    with EmulatedNetwork(Topology.parse(text), LinkSpec(wan_bits_per_s=1e9, wan_delay_s=0.001)) as net:
        num_ranks = net.topology.num_ranks
        assert len(lab_namespaces(os.getpid())) == 1 + 2 * net.topology.num_dcs + num_ranks
        for receiver in range(num_ranks):
            for sender in range(num_ranks):
                with serving(net, receiver, "sink"):
                    with running(net, sender, "source", net.topology.address_of(receiver), "1") as source:
                        assert source.wait(300) == 0
    assert lab_namespaces(os.getpid()) == []


@pytest.mark.dist
def test_processes_on_hosts_end_with_the_network(permitted, lab_namespaces):
    with EmulatedNetwork(Topology(2, 1), LinkSpec(wan_bits_per_s=1e9)) as net:
        # The second process of host 0 belongs to a session of its own, as daemons do.
        first = subprocess.Popen(net.command_on(0, ["sh", "-c", "setsid sleep 300 & sleep 300"]))
        other = subprocess.Popen(net.command_on(1, ["sleep", "300"]))
        deadline_s = time.monotonic() + 100
        while len(namespaces.processes_in(net.namespace_of(0))) < 3 and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert len(namespaces.kill_processes_in(net.namespace_of(0))) == 3
        # The shell may see the end of its child, and say so, before its own.
        assert first.wait(300) in (-signal.SIGKILL, 128 + signal.SIGKILL)
        assert other.poll() is None
    assert other.wait(300) == -signal.SIGKILL
    assert lab_namespaces(os.getpid()) == []


@pytest.mark.dist
def test_nothing_is_left_after_an_error_inside_or_while_entering(permitted, lab_namespaces, monkeypatch):
    with pytest.raises(ZeroDivisionError), EmulatedNetwork(Topology(2, 1), LinkSpec(wan_delay_s=0.001)):
        raise ZeroDivisionError
    monkeypatch.setattr(EmulatedNetwork, "_limit_segment_batches", lambda self: namespaces.run_tool(["false"]))
    with pytest.raises(LabError, match="`false`: exit code 1"), EmulatedNetwork(Topology(2, 1), LinkSpec()):
        pass
    assert lab_namespaces(os.getpid()) == []


@pytest.mark.dist
def test_a_delay_line_that_died_is_not_passed_over(permitted, lab_namespaces):
    net = EmulatedNetwork(Topology(2, 1), LinkSpec(wan_delay_s=0.001))
    net.__enter__()
    net._delay_lines[0].process.kill()
    net._delay_lines[0].process.wait(300)
    with pytest.raises(LabError, match="links were not what they should have been: a delay line ended with code -9"):
        net.__exit__(None, None, None)
    assert lab_namespaces(os.getpid()) == []


OWNER = """
import subprocess, sys, time
from ds_hybridep.lab.network import EmulatedNetwork
from ds_hybridep.lab.topology import LinkSpec, Topology
with EmulatedNetwork(Topology(2, 1), LinkSpec(wan_bits_per_s=1e8, wan_delay_s=0.001)) as net:
    child = subprocess.Popen(net.command_on(0, ["sleep", "300"]), stdout=subprocess.DEVNULL)
    print(child.pid, net._delay_lines[0].process.pid, flush=True)
    time.sleep(300)
"""


@pytest.mark.dist
def test_what_a_killed_owner_left_is_removed_by_the_next_start(permitted, lab_namespaces, wait_until_gone):
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, cwd=REPOSITORY)
    sleeper, delay_line = map(int, owner.stdout.readline().split())
    # From here on any other lab that starts on this machine may remove them first.
    assert len(lab_namespaces(owner.pid)) == 7
    assert namespaces.start_time(sleeper) is not None
    owner.kill()
    owner.communicate()
    wait_until_gone(delay_line)  # by itself
    with EmulatedNetwork(Topology(1, 1), LinkSpec()) as net:
        assert lab_namespaces(owner.pid) == []
        assert net.namespace_of(0) not in namespaces.reap_orphans()  # its owner lives
        assert len(lab_namespaces(os.getpid())) == 4
    wait_until_gone(sleeper)


def test_a_reused_pid_is_not_the_owner():
    """A namespace names its owner by PID and start time; this process has the PID of one that started earlier."""
    start = namespaces.start_time(os.getpid())
    assert start is not None
    match = namespaces.NAMESPACE_NAME.fullmatch(f"hybridep-{os.getpid()}-{start - 1}-0-core")
    assert namespaces.start_time(int(match["pid"])) != int(match["start"])
    assert namespaces.NAMESPACE_NAME.fullmatch("hybridep-of-someone-else") is None


def test_what_is_missing_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "need root" in why_not_permitted()
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(network.shutil, "which", lambda tool: None)
    assert why_not_permitted() == "ip and tc and bridge not found: install iproute2"
    with pytest.raises(LabError, match=r"needs a C\+\+ compiler"):
        delay.build_delay_line(tmp_path)


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("RTNETLINK answers: Operation not permitted", "CAP_NET_ADMIN"),
        ("Error: Specified qdisc kind is unknown.", "sch_htb"),
        ("Error: Unknown device type.", "veth"),
    ],
)
def test_what_the_kernel_lacks_is_said(said, hint):
    with pytest.raises(LabError, match=f"{said}.*; .*{hint}"):
        namespaces.run_tool(["sh", "-c", f"echo '{said}' >&2; exit 2"])


@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_the_delay_line_is_compiled_once_or_says_why_not(monkeypatch, tmp_path):
    program = delay.build_delay_line(tmp_path)
    built_ns = program.stat().st_mtime_ns
    assert delay.build_delay_line(tmp_path) == program
    assert program.stat().st_mtime_ns == built_ns
    assert list(tmp_path.iterdir()) == [program]
    broken = tmp_path / "broken.cpp"
    broken.write_text("int main() { return nothing; }\n")
    monkeypatch.setattr(delay, "SOURCE", broken)
    with pytest.raises(LabError, match=r"could not compile broken.cpp:(.|\n)*nothing"):
        delay.build_delay_line(tmp_path / "cache")
