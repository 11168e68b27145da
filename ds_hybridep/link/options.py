# SPDX-License-Identifier: Apache-2.0
"""The link's own sockets: addresses, options, and what the system knows about them."""

import contextlib
import socket
import struct
from typing import NamedTuple

from ds_hybridep.errors import CommunicationError

Address = tuple[str, int]
Resolved = tuple[int, tuple[object, ...]]  # address family and address, for a socket
UNSENT_BYTES = 2**19  # what the system may hold beyond the congestion window; heartbeats wait behind it


class LinkOptions(NamedTuple):
    """How two ranks are connected.

    connections: for messages of each priority, so that urgent ones never wait behind bulk ones.
    congestion_control: of TCP, such as "bbr"; None leaves the system's choice.
    """

    connections: int = 1
    congestion_control: str | None = None

    def apply(self, sock: socket.socket) -> None:
        """Set them on a socket; OSError if the system refuses."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        if self.congestion_control is not None:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, self.congestion_control.encode())

    def why_refused(self) -> str:
        """Return why the system does not let this process set them; empty if it does."""
        try:
            with socket.socket() as trial:
                self.apply(trial)
        except OSError as error:
            return str(error)
        return ""


class TCPInfo(NamedTuple):
    """What the system knows about a connection (`struct tcp_info` of Linux)."""

    round_trip_s: float | None = None  # smoothed
    retransmissions: int = 0  # segments that were sent again
    segment_bytes: int = 0  # largest segment that is sent
    segments_under_way: int = 0  # sent and not acknowledged
    takes_more: bool = True  # False: the other system's memory for this connection is full
    acknowledged_bytes: int = 0


def tcp_info(sock: socket.socket | None) -> TCPInfo:
    """Return what the system knows; nothing without a connection."""
    with contextlib.suppress(OSError):  # another thread may just have closed it
        if sock is not None:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
            segment_bytes, under_way, round_trip_us, retransmissions = (
                struct.unpack_from("=I", info, at)[0] for at in (16, 24, 68, 100)
            )
            acknowledged_bytes = struct.unpack_from("=Q", info, 120)[0] if len(info) >= 128 else 0
            window_bytes = struct.unpack_from("=I", info, 228)[0] if len(info) >= 232 else 1  # from Linux 5.4 on
            return TCPInfo(
                round_trip_us / 1e6, retransmissions, segment_bytes, under_way, window_bytes > 0, acknowledged_bytes
            )
    return TCPInfo()


def resolve(host: str, port: int) -> Resolved:
    try:
        family, _, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise CommunicationError(f"the address '{host}' is not found: {error}; give another one") from error
    return family, place


def listen(host: str, ports: tuple[int, int] | None) -> socket.socket:
    """Return a listening socket on the first free port."""
    low, high = ports or (0, 0)
    for port in range(low, high + 1):
        try:
            sock = socket.create_server((host, port), family=resolve(host, port)[0], backlog=64)
        except OSError as error:
            trouble = error
        else:
            sock.setblocking(False)
            return sock
    raise CommunicationError(f"cannot listen on {host}, ports {low} to {high}: {trouble}; give other ports")
