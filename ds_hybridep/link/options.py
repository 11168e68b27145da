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
    """How two ranks are connected; None leaves the system's choice.

    connections: for messages of each priority, so that urgent ones never wait behind bulk ones.
    congestion_control: such as "bbr".
    user_timeout_s: how long data may stay unacknowledged by the other side's system before a connection is reset.
    buffer_bytes: of the system, in each direction; without it the system adapts them.
    keepalive_s: between probes of an idle connection, beside the link's own heartbeats.
    """

    connections: int = 1
    congestion_control: str | None = None
    user_timeout_s: float | None = None
    buffer_bytes: int | None = None
    keepalive_s: int | None = None

    def apply(self, sock: socket.socket) -> None:
        """Set them on a socket; ConfigError if the system refuses one."""
        control, limit_s = self.congestion_control, self.user_timeout_s
        wanted: list[tuple[int, int, int | bytes | None]] = [
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES),
            (socket.IPPROTO_TCP, socket.TCP_CONGESTION, None if control is None else control.encode()),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, None if limit_s is None else round(limit_s * 1000)),
            (socket.SOL_SOCKET, socket.SO_SNDBUF, self.buffer_bytes),
            (socket.SOL_SOCKET, socket.SO_RCVBUF, self.buffer_bytes),
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, None if self.keepalive_s is None else 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, self.keepalive_s),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, self.keepalive_s),
        ]
        try:
            for level, name, value in wanted:
                if value is not None:
                    sock.setsockopt(level, name, value)
        except OSError as error:
            hint = "see `sysctl net.ipv4.tcp_available_congestion_control`"
            raise ConfigError(f"link: the system refuses one of {self}: {error}; {hint}") from error


def tcp_info(sock: socket.socket | None) -> tuple[float | None, int]:
    """Return TCP's smoothed round trip in seconds and the number of segments sent again; (None, 0) without one."""
    with contextlib.suppress(OSError):  # another thread may just have closed it
        if sock is not None:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
            return struct.unpack_from("=I", info, 68)[0] / 1e6, struct.unpack_from("=I", info, 100)[0]
    return None, 0
