# SPDX-License-Identifier: Apache-2.0
"""Options of the link's own sockets, and what the system knows about them."""

import contextlib
import socket
import struct
from dataclasses import dataclass

from ds_hybridep.errors import ConfigError

UNSENT_BYTES = 2**19  # what the system may hold beyond the congestion window; heartbeats wait behind it


@dataclass(frozen=True)
class Options:
    """How two ranks are connected.

    connections: for messages of each priority, so that urgent ones never wait behind bulk ones.
    congestion_control: of TCP, such as "bbr"; None leaves the system's choice.
    """

    connections: int = 1
    congestion_control: str | None = None

    def apply(self, sock: socket.socket) -> None:
        """Set them on a socket; ConfigError if the system refuses."""
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        if self.congestion_control is not None:
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, self.congestion_control.encode())
            except OSError as error:
                hint = "see `sysctl net.ipv4.tcp_available_congestion_control`"
                raise ConfigError(f"link: the system refuses {self}: {error}; {hint}") from error


def tcp_info(sock: socket.socket | None) -> tuple[float | None, int]:
    """Return TCP's smoothed round trip in seconds and the number of segments sent again; (None, 0) without one."""
    with contextlib.suppress(OSError):  # another thread may just have closed it
        if sock is not None:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
            return struct.unpack_from("=I", info, 68)[0] / 1e6, struct.unpack_from("=I", info, 100)[0]
    return None, 0
