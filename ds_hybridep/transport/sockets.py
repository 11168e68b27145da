# SPDX-License-Identifier: Apache-2.0
"""Options of TCP connections that others make: gloo, NCCL, DeepSpeed.

Congestion control.  Linux's default, CUBIC, takes every lost frame for a full link: on 1 Gbit/s with 50 ms one way and
1% loss, one connection carries 1 Mbit/s.  BBR measures the link's rate and sends at it: 190 Mbit/s.  Where nothing
gets lost CUBIC is the better one, because after a pause BBR sends a short message slowly.

Retransmission.  While a link is cut, TCP doubles the time until it sends again, up to 2 minutes: after a cut of a
minute, training stood still for two.  Linux 6.15 can bound that time for a connection.

Gloo has no option for either, so sockets are found among the files of this process.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Iterator, Mapping

from ds_hybridep.errors import UnsupportedError

FILES = "/proc/self/fd"
TCP_RTO_MAX_MS = 44  # Linux's number for it, which Python's socket module lacks
RETRANSMIT_S = 10.0  # above what a full queue of a slow link adds to the round trip, or TCP would send things twice
# With a bounded time, Linux would give a connection up sooner.  Ranks end a job themselves long before this.
GIVE_UP_S = 7200.0


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
            _set(descriptor, {socket.TCP_CONGESTION: control.encode()})


def bound_retransmission(hosts: frozenset[str]) -> None:
    """Let this process's TCP connections with these IP addresses wait at most RETRANSMIT_S before they send again.

    Does nothing where Linux is older than 6.15.
    """
    if sys.platform != "linux":
        return
    options = {TCP_RTO_MAX_MS: int(1000 * RETRANSMIT_S), socket.TCP_USER_TIMEOUT: int(1000 * GIVE_UP_S)}
    for descriptor in _sockets().values():
        _set(descriptor, options, hosts)


def _set(descriptor: int, options: Mapping[int, int | bytes], hosts: frozenset[str] | None = None) -> None:
    """Set options of a TCP connection with one of these addresses (None: any); leave other sockets alone."""
    # Another thread may have closed the file, some sockets are not connected, and Linux may lack an option.
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as opened:
        if opened.family in (socket.AF_INET, socket.AF_INET6) and opened.type == socket.SOCK_STREAM:
            if hosts is None or opened.getpeername()[0].removeprefix("::ffff:") in hosts:
                for option, value in options.items():
                    opened.setsockopt(socket.IPPROTO_TCP, option, value)


def _sockets() -> dict[str, int]:
    """Return the descriptor of every open socket, by the name under which Linux lists it."""
    found = {}
    for descriptor in os.listdir(FILES):
        with contextlib.suppress(OSError):  # closed since, as the descriptor of the listing itself
            if (name := os.readlink(f"{FILES}/{descriptor}")).startswith("socket:"):
                found[name] = int(descriptor)
    return found
