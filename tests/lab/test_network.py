# SPDX-License-Identifier: Apache-2.0
"""Emulated links do what they say: rate, delay, cut, counters, and nothing left behind.

Goodput is what a TCP receiver reads per second. It is compared with rate * 1448 / 1514: the rate counts Ethernet
frames of up to 1514 bytes, each of which carries 1448 bytes of the application (20 bytes of IP header, 20 of TCP, 12
of TCP timestamps and 14 of Ethernet are the rest). Other load on this machine stops a receiver for a while, which
makes one measurement too low and the next too high, and lengthens round trips. So a measurement that is off is
repeated; a link that is off stays off.
"""

import os
import signal
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from ds_hybridep.errors import ConfigError, LabError
from ds_hybridep.lab import delay, namespaces, network
from ds_hybridep.lab.namespaces import reap_orphans
from ds_hybridep.lab.network import EmulatedNetwork, why_not_permitted
from ds_hybridep.lab.topology import SEGMENT_FRAME_BYTES, SEGMENT_PAYLOAD_BYTES, LinkSpec, Topology

TRAFFIC = str(Path(__file__).with_name("tcp_traffic.py"))
REPOSITORY = Path(__file__).resolve().parents[2]
GOODPUT_SHARE = SEGMENT_PAYLOAD_BYTES / SEGMENT_FRAME_BYTES
MAX_ATTEMPTS = 6


@pytest.fixture(scope="module")
def permitted():
    if reason := why_not_permitted():
        pytest.skip(f"emulated networks are not permitted here: {reason}")


@contextmanager
def running(net, rank, *arguments, stdout=subprocess.PIPE):
    """A traffic process on the host of `rank`, killed in the end."""
    process = subprocess.Popen(net.command_on(rank, [sys.executable, "-IS", TRAFFIC, *arguments]), stdout=stdout)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@contextmanager
def serving(net, rank, role):
    """A sink or echo that listens."""
    with running(net, rank, role) as process:
        assert process.stdout.readline() == b"ready\n"
        os.set_blocking(process.stdout.fileno(), False)
        yield process


class Flow:
    """A source that sends for ever to a sink; how many bytes had arrived when."""

    def __init__(self, sink):
        self._sink, self._text, self.samples = sink, b"", []

    def read(self):
        self._text += self._sink.stdout.read() or b""
        *lines, self._text = self._text.split(b"\n")
        self.samples += [(float(time_s), int(total)) for time_s, total in map(bytes.split, lines)]
        return self.samples

    def wait_for_bytes(self, more=1, timeout_s=10.0):
        """Until `more` bytes than now have arrived."""
        goal, deadline_s = (self.read()[-1][1] if self.read() else 0) + more, time.monotonic() + timeout_s
        while not self.read() or self.samples[-1][1] < goal:
            assert time.monotonic() < deadline_s, f"{goal} bytes wanted, {self.samples[-1:]} arrived"
            time.sleep(0.02)

    def bits_per_s(self, seconds):
        """Goodput over the next `seconds`, from a first to a last arrival."""
        start_s = time.monotonic()
        time.sleep(seconds)
        inside = [sample for sample in self.read() if sample[0] >= start_s]
        return 8 * (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0]) if len(inside) > 1 else 0.0


class Together:
    """Two flows at the same time, as one."""

    def __init__(self, first, second):
        self._flows = first, second

    def bits_per_s(self, seconds):
        before = [flow.read()[-1] for flow in self._flows]
        time.sleep(seconds)
        return sum(
            8 * (flow.read()[-1][1] - total) / (flow.samples[-1][0] - time_s)
            for flow, (time_s, total) in zip(self._flows, before, strict=True)
        )


@contextmanager
def flowing(net, sender, receiver):
    with serving(net, receiver, "sink") as sink, running(net, sender, "source", net.topology.address_of(receiver)):
        flow = Flow(sink)
        flow.wait_for_bytes()
        yield flow


def check_goodput(flow, bits_per_s, seconds=0.8):
    """Within 5% of what the rate leaves for the application; says what was measured."""
    ratios = []
    while len(ratios) < MAX_ATTEMPTS and not (ratios and 0.95 < ratios[-1] < 1.05):
        ratios.append(flow.bits_per_s(seconds) / (bits_per_s * GOODPUT_SHARE))
    print(f"{bits_per_s / 1e6:.0f} Mbit/s: {[round(ratio, 4) for ratio in ratios]} of {GOODPUT_SHARE:.4f} of the rate")
    assert 0.95 < ratios[-1] < 1.05


def round_trips_ms(net, sender, receiver, count=10):
    with (
        serving(net, receiver, "echo"),
        running(net, sender, "ping", net.topology.address_of(receiver), str(count)) as ping,
    ):
        output, _ = ping.communicate(timeout=30)
    assert ping.returncode == 0
    return [float(line) for line in output.split()]


def check_round_trip(net, sender, receiver, expected_ms):
    """The median of ten is within 10%, none is too short; says what was measured."""
    medians = []
    for _ in range(4 * MAX_ATTEMPTS):
        time.sleep(0.5 if medians else 0.0)  # other processes may have kept both cores busy
        times_ms = round_trips_ms(net, sender, receiver)
        assert min(times_ms) >= expected_ms
        medians.append(statistics.median(times_ms))
        if medians[-1] < 1.1 * expected_ms:
            break
    print(f"round trip of {expected_ms} ms: {[round(median, 2) for median in medians]} ms")
    assert min(medians) < 1.1 * expected_ms


def lab_namespaces(pid):
    return [name for name in os.listdir("/run/netns") if name.startswith(f"hybridep-{pid}-")]


@pytest.mark.dist
@pytest.mark.parametrize(
    "wan_delay_s", [pytest.param(0.0, marks=pytest.mark.slow), pytest.param(0.010, marks=pytest.mark.slow)]
)
def test_goodput_is_the_rate_without_headers(permitted, wan_delay_s):
    with EmulatedNetwork(Topology(2, 1), LinkSpec(wan_bits_per_s=10e6, wan_delay_s=wan_delay_s)) as net:
        for mbit_per_s in (10, 50, 100, 500, 1000):
            net.set_wan_rate(mbit_per_s * 1e6)
            with flowing(net, 0, 1) as flow:
                time.sleep(0.3)
                check_goodput(flow, mbit_per_s * 1e6)


@pytest.mark.dist
def test_both_directions_have_the_whole_rate(permitted):
    """Without priority for acknowledgements each direction would hold up the other."""
    with EmulatedNetwork(Topology(2, 1), LinkSpec(wan_bits_per_s=100e6, wan_delay_s=0.005)) as net:
        with flowing(net, 0, 1) as there, serving(net, 0, "sink") as sink:
            with running(net, 1, "source", net.topology.address_of(0)):
                back = Flow(sink)
                back.wait_for_bytes()
                time.sleep(0.5)
                check_goodput(there, 100e6)
                check_goodput(back, 100e6)


@pytest.mark.dist
def test_hosts_of_one_dc_share_its_uplink(permitted):
    with EmulatedNetwork(Topology(2, 2), LinkSpec(wan_bits_per_s=50e6)) as net:
        with flowing(net, 0, 2) as first, flowing(net, 1, 3) as second:
            time.sleep(0.3)
            check_goodput(Together(first, second), 50e6)


@pytest.mark.dist
@pytest.mark.parametrize("delay_ms", [10, 50])
def test_a_round_trip_is_twice_the_delay(permitted, delay_ms):
    with EmulatedNetwork(Topology(2, 2), LinkSpec(wan_bits_per_s=100e6, wan_delay_s=delay_ms * 1e-3)) as net:
        check_round_trip(net, 0, 3, 2 * delay_ms)
        assert min(round_trips_ms(net, 0, 1)) < 0.1 * delay_ms  # inside a DC there is none


DATAGRAM_SENDER = """
import socket, sys, time
out = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for number in range(int(sys.argv[2])):
    out.sendto(f"{number} {time.monotonic_ns()}".encode(), (sys.argv[1], 7777))
    time.sleep(0.0005)
"""
DATAGRAM_RECEIVER = """
import socket, time
into = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
into.bind(("0.0.0.0", 7777))
print("ready", flush=True)
into.settimeout(5)
try:
    while True:
        number, sent_ns = into.recv(100).split()
        print(int(number), time.monotonic_ns() - int(sent_ns), flush=True)
        into.settimeout(1)
except TimeoutError:
    pass
"""


@pytest.mark.dist
def test_frames_are_lost_and_jitter_but_stay_in_order(permitted):
    count, loss = 1500, 0.05
    links = LinkSpec(wan_bits_per_s=1e9, wan_delay_s=0.010, wan_jitter_s=0.005, wan_loss=loss)
    with EmulatedNetwork(Topology(2, 1), links) as net:
        python = [sys.executable, "-IS", "-c"]
        with subprocess.Popen(
            net.command_on(1, [*python, DATAGRAM_RECEIVER]), stdout=subprocess.PIPE, text=True
        ) as receiver:
            assert receiver.stdout.readline() == "ready\n"
            sender = [*python, DATAGRAM_SENDER, net.topology.address_of(1), str(count)]
            subprocess.run(net.command_on(0, sender), check=True, timeout=30)
            arrived = [tuple(map(int, line.split())) for line in receiver.stdout]
    numbers, times_ms = zip(*((number, time_ns / 1e6) for number, time_ns in arrived), strict=True)
    assert list(numbers) == sorted(numbers)
    assert 0.5 * loss < 1 - len(numbers) / count < 2 * loss  # 4 standard deviations and more
    assert min(times_ms) >= 10
    # Frames 0.5 ms apart wait for each other: most take close to the longest time.
    assert 13 < statistics.median(times_ms) < 20


@pytest.mark.dist
def test_delay_and_loss_change_while_frames_flow(permitted):
    with EmulatedNetwork(Topology(2, 1), LinkSpec(wan_delay_s=0.001)) as net:
        check_round_trip(net, 0, 1, 2)
        net.set_wan_path(0.02, dc=0)
        check_round_trip(net, 0, 1, 21)
        net.set_wan_path(0.0)
        assert min(round_trips_ms(net, 0, 1)) < 1
        with flowing(net, 0, 1) as flow:
            flow.wait_for_bytes(1_000_000)
            net.set_wan_path(0.0, loss=1.0, dc=0)
            time.sleep(0.2)
            quiet_from = flow.read()[-1]
            time.sleep(0.4)
            assert flow.read()[-1] == quiet_from
    with EmulatedNetwork(Topology(2, 1), LinkSpec()) as net, pytest.raises(LabError, match="no delay line"):
        net.set_wan_path(0.02)


@pytest.mark.dist
def test_lan_rate_and_delay_hold_inside_a_dc(permitted):
    links = LinkSpec(wan_bits_per_s=1e9, lan_bits_per_s=100e6, lan_delay_s=0.005)
    with EmulatedNetwork(Topology(1, 2), links) as net:
        check_round_trip(net, 0, 1, 10)
        with flowing(net, 1, 0) as flow:
            time.sleep(0.3)
            check_goodput(flow, 100e6)


@pytest.mark.slow
@pytest.mark.dist
def test_the_rate_changes_under_a_running_flow(permitted):
    with EmulatedNetwork(Topology(2, 1), LinkSpec(wan_bits_per_s=200e6)) as net, flowing(net, 0, 1) as flow:
        time.sleep(0.3)
        check_goodput(flow, 200e6, 0.5)
        net.set_wan_rate(20e6)
        time.sleep(2.5)  # the queue of the old rate drains: 200 ms at 200 Mbit/s are 2 s at 20
        check_goodput(flow, 20e6, 0.5)
        net.set_wan_rate(100e6, dc=0)
        assert (net.wan_rate(0), net.wan_rate(1)) == (100e6, 20e6)
        time.sleep(0.3)
        check_goodput(flow, 20e6, 0.5)  # DC 1 takes no more than before
        with pytest.raises(ConfigError, match="bits_per_s: got 1 bit/s"):
            net.set_wan_rate(1)


@pytest.mark.dist
@pytest.mark.parametrize("wan_delay_s", [pytest.param(0.0, marks=pytest.mark.slow), 0.005])
def test_a_cut_link_carries_nothing_until_it_is_restored(permitted, wan_delay_s):
    with EmulatedNetwork(Topology(2, 1), LinkSpec(wan_bits_per_s=100e6, wan_delay_s=wan_delay_s)) as net:
        with flowing(net, 0, 1) as flow:
            time.sleep(0.2)
            net.cut(1)
            time.sleep(0.4)  # what stood in the queue of DC 1 may still arrive
            quiet_from = flow.read()[-1]
            time.sleep(0.4)
            assert flow.read()[-1] == quiet_from
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
                    source.wait(30)
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
@pytest.mark.parametrize("text", ["2x2", pytest.param("4x1", marks=pytest.mark.slow), "3x1", "1x2"])
def test_every_host_reaches_every_other(permitted, text):
    with EmulatedNetwork(Topology.parse(text), LinkSpec(wan_bits_per_s=1e9, wan_delay_s=0.001)) as net:
        num_ranks = net.topology.num_ranks
        assert len(lab_namespaces(os.getpid())) == 1 + 2 * net.topology.num_dcs + num_ranks
        for receiver in range(num_ranks):
            with serving(net, receiver, "echo"):
                for sender in range(num_ranks):
                    with running(net, sender, "ping", net.topology.address_of(receiver), "1") as ping:
                        ping.communicate(timeout=20)
                    assert ping.returncode == 0
    assert lab_namespaces(os.getpid()) == []


@pytest.mark.dist
def test_killing_a_host_ends_all_its_processes_and_no_others(permitted):
    with EmulatedNetwork(Topology(2, 1), LinkSpec(wan_bits_per_s=1e9)) as net:
        # The second process of host 0 belongs to a session of its own, as daemons do.
        doomed = subprocess.Popen(net.command_on(0, ["sh", "-c", "setsid sleep 300 & sleep 300"]))
        other = subprocess.Popen(net.command_on(1, ["sleep", "300"]))
        deadline_s = time.monotonic() + 10
        while len(namespaces.processes_in(net.namespace_of(0))) < 3 and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert net.kill_processes(0) == 3
        # The shell may see the end of its child, and say so, before its own.
        assert doomed.wait(5) in (-signal.SIGKILL, 128 + signal.SIGKILL)
        assert other.poll() is None
    assert other.wait(5) == -signal.SIGKILL  # leaving the network ends the rest
    assert lab_namespaces(os.getpid()) == []


@pytest.mark.dist
def test_nothing_is_left_after_an_error_inside_or_while_entering(permitted, monkeypatch):
    with pytest.raises(ZeroDivisionError), EmulatedNetwork(Topology(2, 1), LinkSpec(wan_delay_s=0.001)):
        raise ZeroDivisionError
    monkeypatch.setattr(EmulatedNetwork, "_fill_tables", lambda self: namespaces.run_tool(["false"]))
    with pytest.raises(LabError, match="`false`: exit code 1"), EmulatedNetwork(Topology(2, 1), LinkSpec()):
        pass
    assert lab_namespaces(os.getpid()) == []


@pytest.mark.dist
def test_a_delay_line_that_died_is_not_passed_over(permitted):
    net = EmulatedNetwork(Topology(2, 1), LinkSpec(wan_delay_s=0.001))
    net.__enter__()
    net._delay_lines[0]._process.kill()
    net._delay_lines[0]._process.wait(5)
    with pytest.raises(LabError, match="links were not what they should have been: a delay line ended with code -9"):
        net.__exit__(None, None, None)
    assert lab_namespaces(os.getpid()) == []


OWNER = """
import subprocess, sys, time
from ds_hybridep.lab.network import EmulatedNetwork
from ds_hybridep.lab.topology import LinkSpec, Topology
with EmulatedNetwork(Topology(2, 1), LinkSpec(wan_bits_per_s=1e8, wan_delay_s=0.001)) as net:
    child = subprocess.Popen(net.command_on(0, ["sleep", "300"]), stdout=subprocess.DEVNULL)
    print(child.pid, net._delay_lines[0]._process.pid, flush=True)
    time.sleep(300)
"""


@pytest.mark.dist
def test_what_a_killed_owner_left_is_removed_by_the_next_start(permitted):
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, cwd=REPOSITORY)
    sleeper, delay_line = map(int, owner.stdout.readline().split())
    # From here on any other lab that starts on this machine may remove them first.
    assert len(lab_namespaces(owner.pid)) == 7
    assert namespaces.start_time(sleeper) is not None
    owner.kill()
    owner.communicate()
    wait_until_gone(delay_line)  # by itself
    with EmulatedNetwork(Topology(1, 1), LinkSpec()):
        assert lab_namespaces(owner.pid) == []
    wait_until_gone(sleeper)


@pytest.mark.dist
def test_reaping_leaves_living_owners_alone(permitted):
    with EmulatedNetwork(Topology(1, 1), LinkSpec()) as net:
        assert net.namespace_of(0) not in reap_orphans()
        assert len(lab_namespaces(os.getpid())) == 4


def wait_until_gone(pid, timeout_s=10.0):
    deadline_s = time.monotonic() + timeout_s
    while namespaces.start_time(pid) is not None:
        assert time.monotonic() < deadline_s, f"process {pid} is still there"
        time.sleep(0.02)


def test_a_reused_pid_is_not_the_owner():
    """A namespace names its owner by PID and start time; this process has the PID of one that started earlier."""
    start = namespaces.start_time(os.getpid())
    assert start is not None
    match = namespaces.NAMESPACE_NAME.fullmatch(f"hybridep-{os.getpid()}-{start - 1}-0-core")
    assert namespaces.start_time(int(match["pid"])) != int(match["start"])
    assert namespaces.NAMESPACE_NAME.fullmatch("hybridep-of-someone-else") is None


def test_without_root_the_reason_is_said(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "need root" in why_not_permitted()


def test_without_iproute2_the_reason_is_said(monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(network.shutil, "which", lambda tool: None)
    assert why_not_permitted() == "ip and tc and bridge not found: install iproute2"


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


def test_a_missing_tun_device_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(delay, "TUN_DEVICE", tmp_path / "tun")
    assert "tun is missing (modprobe tun" in delay.why_no_delay()


def test_a_missing_compiler_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(delay.shutil, "which", lambda tool: None)
    with pytest.raises(LabError, match="needs a C compiler"):
        delay.build_delay_line(tmp_path)


def test_the_delay_line_is_compiled_once(tmp_path):
    if delay.shutil.which("cc") is None:
        pytest.skip("no C compiler")
    program = delay.build_delay_line(tmp_path)
    built_ns = program.stat().st_mtime_ns
    assert delay.build_delay_line(tmp_path) == program
    assert program.stat().st_mtime_ns == built_ns
    assert list(tmp_path.iterdir()) == [program]


def test_a_delay_line_that_cannot_compile_shows_why(monkeypatch, tmp_path):
    if delay.shutil.which("cc") is None:
        pytest.skip("no C compiler")
    broken = tmp_path / "broken.c"
    broken.write_text("int main(void) { return nothing; }\n")
    monkeypatch.setattr(delay, "SOURCE", broken)
    with pytest.raises(LabError, match=r"could not compile broken.c:(.|\n)*nothing"):
        delay.build_delay_line(tmp_path / "cache")
