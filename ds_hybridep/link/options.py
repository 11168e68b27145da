# SPDX-License-Identifier: Apache-2.0
"""Options of the link's own sockets, and what the system knows about them."""

import contextlib
import socket
import struct
from dataclasses import dataclass

from ds_hybridep.errors import ConfigError

UNSENT_BYTES = 2**19  # what the system may hold beyond the congestion window; heartbeats wait behind it
_RTT, _RETRANSMITTED = 68, 100  # offsets in struct tcp_info


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
        wanted: list[tuple[int, int, int | bytes]] = [
            (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
            (socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES),
        ]
        if self.congestion_control is not None:
            wanted.append((socket.IPPROTO_TCP, socket.TCP_CONGESTION, self.congestion_control.encode()))
        if self.user_timeout_s is not None:
            wanted.append((socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(self.user_timeout_s * 1000)))
        if self.buffer_bytes is not None:
            wanted += [(socket.SOL_SOCKET, name, self.buffer_bytes) for name in (socket.SO_SNDBUF, socket.SO_RCVBUF)]
        if self.keepalive_s is not None:
            wanted.append((socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1))
            for name in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                wanted.append((socket.IPPROTO_TCP, name, self.keepalive_s))
        for level, name, value in wanted:
            try:
                sock.setsockopt(level, name, value)
            except OSError as error:
                raise ConfigError(
                    f"the system refuses {self} ({error}); for congestion control see "
                    f"`sysctl net.ipv4.tcp_available_congestion_control`"
                ) from error


def round_trip_s(sock: socket.socket | None) -> float | None:
    """Return the smoothed round trip that TCP has measured; None without a connection."""
    value = _tcp_info(sock, _RTT)
    return None if value is None else value / 1e6


def num_retransmitted(sock: socket.socket | None) -> int:
    """Return how many segments TCP has sent again."""
    return _tcp_info(sock, _RETRANSMITTED) or 0


def _tcp_info(sock: socket.socket | None, offset: int) -> int | None:
    with contextlib.suppress(OSError, struct.error):  # another thread may just have closed it
        if sock is not None:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RETRANSMITTED + 4)
            return int(struct.unpack_from("=I", info, offset)[0])
    return None
