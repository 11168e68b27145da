# SPDX-License-Identifier: Apache-2.0
"""Congestion controls of TCP that this system permits.

Linux's default, CUBIC, takes every lost frame for a full link: on 1 Gbit/s with 50 ms one way and 1% loss, one
connection carries 1 Mbit/s.  BBR measures the link's rate and sends at it: 190 Mbit/s.  Where nothing gets lost CUBIC
is the better one, because after a pause BBR sends a short message slowly.
"""

import socket

from ds_hybridep.errors import UnsupportedError


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
