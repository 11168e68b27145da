# SPDX-License-Identifier: Apache-2.0
"""TCP traffic between the hosts of an emulated network, as seen by the test or measurement that starts it."""

import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

TRAFFIC = str(Path(__file__).with_name("tcp_traffic.py"))


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
    """A sink that listens."""
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

    def wait_for_bytes(self, more=1, timeout_s=300.0):
        """Until `more` bytes than now have arrived."""
        goal, deadline_s = (self.read()[-1][1] if self.read() else 0) + more, time.monotonic() + timeout_s
        while not self.read() or self.samples[-1][1] < goal:
            assert time.monotonic() < deadline_s, f"{goal} bytes wanted, {self.samples[-1:]} arrived"
            time.sleep(0.02)


@contextmanager
def flowing(net, sender, receiver):
    with serving(net, receiver, "sink") as sink, running(net, sender, "source", net.topology.address_of(receiver)):
        flow = Flow(sink)
        flow.wait_for_bytes()
        yield flow
