# SPDX-License-Identifier: Apache-2.0
"""Ports of this machine for programs that must be told a number before they listen."""

import socket
from contextlib import suppress


def hold_port() -> socket.socket:
    """Return a socket that is bound to a free port and does not listen; its name has the number.

    Until it is closed, the system gives this port to nobody who asks for any port, and to no connection.  A program
    that asks for it by number and sets SO_REUSEADDR gets it, as often as it starts again: torch's store, the meeting
    point of sites, and all servers in Python do so.
    """
    with suppress(OSError):  # without IPv6
        return _bound(socket.AF_INET6, "::")
    return _bound(socket.AF_INET, "0.0.0.0")


def _bound(family: int, address: str) -> socket.socket:
    holder = socket.socket(family)
    try:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # for addresses of IPv4 too
        holder.bind((address, 0))
    except OSError:
        holder.close()
        raise
    return holder
