# SPDX-License-Identifier: Apache-2.0
"""How TCP sends over long links: connections with a round trip of 1 ms or more use BBR where the system permits it.

Linux's default, CUBIC, takes every lost frame for a full link: on 1 Gbit/s with 50 ms one way and 1% loss, one
connection carries 1 Mbit/s.  BBR measures the link's rate and sends at it: 150 Mbit/s.  Gloo makes the sockets and has
no option for this, so they are found among the files of this process.
"""

import contextlib
import os
import socket
import struct
from collections.abc import Iterator

CONGESTION_CONTROL = b"bbr"
LEAST_ROUND_TRIP_S = 1e-3
FILES = "/proc/self/fd"
TCPI_RTT = 68  # offset of this field in Linux's `struct tcp_info`


@contextlib.contextmanager
def for_long_links() -> Iterator[None]:
    """Set BBR for TCP connections over a long link that this process opens inside.

    Does nothing where the system has no BBR or does not permit it to this user
    (`net.ipv4.tcp_allowed_congestion_control`), and outside Linux.
    """
    before = set(_sockets())
    yield
    for inode, descriptor in _sockets().items():
        if inode not in before:
            # Another thread may close the file, or the number may belong to something else by now.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as opened:
                if round_trip_s(opened) >= LEAST_ROUND_TRIP_S:
                    opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, CONGESTION_CONTROL)


def round_trip_s(connection: socket.socket) -> float:
    """Return how long an answer takes over a TCP connection, as Linux has measured it; OSError for other sockets."""
    connection.getpeername()  # a socket that listens has measured nothing
    rtt_us = struct.unpack_from("I", connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104), TCPI_RTT)[0]
    return float(rtt_us) * 1e-6


def _sockets() -> dict[str, int]:
    """Return the descriptor of every open socket, by the name under which Linux lists it."""
    found = {}
    with contextlib.suppress(FileNotFoundError):  # not Linux
        for descriptor in os.listdir(FILES):
            with contextlib.suppress(OSError):  # closed since, as the descriptor of the listing itself
                if (name := os.readlink(f"{FILES}/{descriptor}")).startswith("socket:"):
                    found[name] = int(descriptor)
    return found
