# SPDX-License-Identifier: Apache-2.0
"""The congestion control of TCP connections that gloo makes.

Linux's default, CUBIC, takes every lost frame for a full link: on 1 Gbit/s with 50 ms one way and 1% loss, one
connection carries 1 Mbit/s.  BBR measures the link's rate and sends at it: 190 Mbit/s.  Where nothing gets lost CUBIC
is the better one, because after a pause BBR sends a short message slowly.  Gloo has no option for this, so its sockets
are found among the files of this process.
"""

import contextlib
import os
import socket
from collections.abc import Iterator

from ds_hybridep.errors import UnsupportedError

FILES = "/proc/self/fd"


def check_congestion_control(control: str, where: str = "congestion_control") -> None:
    """Raise UnsupportedError, which names `where`, if this system lacks this control or forbids it to this user."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as one:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())
    except (OSError, AttributeError) as error:
        raise UnsupportedError(
            f'{where} is "{control}", but this system does not permit it ({error}); load the module tcp_{control} and '
            f"add {control} to net.ipv4.tcp_allowed_congestion_control on every node, or leave the key out"
        ) from error


def is_permitted(control: str) -> bool:
    """Return whether connections of this process may have this congestion control."""
    try:
        check_congestion_control(control)
    except UnsupportedError:
        return False
    return True


@contextlib.contextmanager
def congestion_control(control: str | None) -> Iterator[None]:
    """Give TCP connections that this process opens inside this congestion control; None: the system's.

    Raises UnsupportedError as `check_congestion_control`.
    """
    if control is None:
        yield
        return
    check_congestion_control(control)
    before = set(_sockets())
    yield
    for name, descriptor in _sockets().items():
        if name not in before:
            # Another thread may have closed the file, and sockets of other kinds refuse.
            with contextlib.suppress(OSError), socket.fromfd(descriptor, socket.AF_INET, socket.SOCK_STREAM) as opened:
                opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, control.encode())


def _sockets() -> dict[str, int]:
    """Return the descriptor of every open socket, by the name under which Linux lists it."""
    found = {}
    for descriptor in os.listdir(FILES):
        with contextlib.suppress(OSError):  # closed since, as the descriptor of the listing itself
            if (name := os.readlink(f"{FILES}/{descriptor}")).startswith("socket:"):
                found[name] = int(descriptor)
    return found
