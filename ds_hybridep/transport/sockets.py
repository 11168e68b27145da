# SPDX-License-Identifier: Apache-2.0
"""Options of TCP connections that others make: gloo, NCCL, DeepSpeed.

Congestion control.  Linux's default, CUBIC, takes every lost frame for a full link: on 1 Gbit/s with 50 ms one way and
1% loss, one connection carries 1 Mbit/s.  BBR measures the link's rate and sends at it: 190 Mbit/s.  Where nothing
gets lost CUBIC is the better one, because after a pause BBR sends a short message slowly.

Retransmission.  While a link is cut, TCP doubles the time until it sends again, up to 2 minutes: after a cut of a
minute, training stood still for two.  Linux 6.15 can bound that time for a connection.  But while the receiver's
buffer is full, Linux gives a connection up after 15 tries, which then come sooner.  So the bound is large enough for
15 tries to take half of timeout_s.

Gloo has no option for either, so sockets are found among the files of this process.
"""

import contextlib
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping

from ds_hybridep.errors import UnsupportedError

FILES = "/proc/self/fd"
TCP_RTO_MAX_MS = 44  # Linux's number for it, which Python's socket module lacks
TRIES = 15  # net.ipv4.tcp_retries2 of most systems
SHORTEST_S = 10.0  # above what a full queue of a slow link adds to the round trip, or TCP would send things twice
# Else Linux gives a connection up after TRIES, too.  Longer than its own limit, 924 s; 2148 could overflow.
GIVE_UP_S = 2000.0
STALL_S = 2.0  # a wait after which a link may be cut
Options = Mapping[int, int | bytes]


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


class Retransmission:
    """Sees to it, during long waits, that a link that was cut is used again soon after it comes back.

    hosts: IP addresses of all ranks.  timeout_s: the longest wait for another rank.
    """

    def __init__(self, hosts: frozenset[str], timeout_s: float) -> None:
        self._hosts, self._timeout_s = hosts, timeout_s
        self._again_at = float("-inf")

    def look(self, waited_s: float, now: float) -> None:
        """Call now and then.  Others make connections at any time, so a long wait looks for them again and again."""
        if waited_s > STALL_S and now >= self._again_at:
            self._again_at = now + SHORTEST_S
            bound_retransmission(self._hosts, self._timeout_s)


def bound_retransmission(hosts: frozenset[str], timeout_s: float) -> None:
    """Shorten the time before TCP sends again, on this process's connections with these IP addresses.

    Leaves connections alone whose owner has set a time limit, and does nothing where Linux is older than 6.15.
    Raises nothing.
    """
    if sys.platform != "linux":
        return
    options = {
        TCP_RTO_MAX_MS: int(1000 * min(max(timeout_s / TRIES, SHORTEST_S), 120.0)),
        socket.TCP_USER_TIMEOUT: int(1000 * GIVE_UP_S),
    }

    def is_ours(connection: socket.socket) -> bool:
        has_limit = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
        return not has_limit and connection.getpeername()[0].removeprefix("::ffff:") in hosts

    with contextlib.suppress(OSError):  # no descriptor is free
        for descriptor in _sockets().values():
            _set(descriptor, options, is_ours)


def _set(descriptor: int, options: Options, is_wanted: Callable[[socket.socket], bool] = lambda _: True) -> None:
    """Set options of a TCP connection if it is wanted; leave other sockets alone."""
    # Another thread may have closed the file, some sockets are not connected, and Linux may lack an option.
    with contextlib.suppress(OSError):
        copy = os.dup(descriptor)
        try:
            # SOCK_NONBLOCK: without it Python would make the socket itself non-blocking if it has a default timeout.
            opened = socket.socket(type=socket.SOCK_STREAM | socket.SOCK_NONBLOCK, fileno=copy)
        except OSError:
            os.close(copy)
            raise
        with opened:
            is_stream = opened.getsockopt(socket.SOL_SOCKET, socket.SO_TYPE) == socket.SOCK_STREAM
            if is_stream and opened.family in (socket.AF_INET, socket.AF_INET6) and is_wanted(opened):
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
