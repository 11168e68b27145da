# SPDX-License-Identifier: Apache-2.0
"""A port that is held goes to who asks for it by its number, and to nobody else."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ds_hybridep.lab.network import EmulatedNetwork
from ds_hybridep.lab.ports import hold_port
from ds_hybridep.lab.topology import LinkSpec, Topology

REPOSITORY = Path(__file__).resolve().parents[2]
TAKES_ALL_PORTS = """
import json, socket
from contextlib import suppress
from ds_hybridep.lab.ports import hold_port

with open("/proc/sys/net/ipv4/ip_local_port_range", "w") as file:
    file.write("40000 40007")
holder, taken = hold_port(), []
with socket.create_server(("127.0.0.1", 30000)):
    for family, address in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, ""), (socket.AF_INET6, "::1")):
        for reuse in (0, 1):
            open_ones = []
            with suppress(OSError):
                while True:
                    open_ones.append(socket.socket(family))
                    open_ones[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
                    open_ones[-1].bind((address, 0))
                    open_ones[-1].listen()
                    taken.append(open_ones[-1].getsockname()[1])
            for one in open_ones:
                one.close()
    open_ones = []
    with suppress(OSError):
        while True:
            open_ones.append(socket.create_connection(("127.0.0.1", 30000)))
            taken.append(open_ones[-1].getsockname()[1])
print(json.dumps([holder.getsockname()[1], taken]))
"""


def test_a_held_port_is_for_who_asks_for_it() -> None:
    with hold_port() as holder:
        port = holder.getsockname()[1]
        for _ in range(2):  # a program that starts again, too
            with socket.create_server(("127.0.0.1", port)) as server:
                with socket.create_connection(("127.0.0.1", port)), server.accept()[0]:
                    pass
                with pytest.raises(OSError, match="in use"):
                    socket.create_server(("127.0.0.1", port))


@pytest.mark.dist
@pytest.mark.usefixtures("permitted")
def test_a_held_port_is_given_to_nobody_who_asks_for_any() -> None:
    with EmulatedNetwork(Topology(1, 1), LinkSpec()) as network:
        command = network.command_on(0, [sys.executable, "-c", TAKES_ALL_PORTS])
        run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr
    held, taken = json.loads(run.stdout)
    assert set(taken) == set(range(40000, 40008)) - {held}
