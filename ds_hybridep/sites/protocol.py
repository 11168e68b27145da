# SPDX-License-Identifier: Apache-2.0
"""How sites, operators and the meeting point speak: after the handshake of the link, in `Line`s."""

import struct
from typing import NamedTuple

from ds_hybridep.link.trust import Protocol

SITE, OPERATOR = range(2)  # who dials the meeting point


class Dialler(NamedTuple):
    """What one that dials the meeting point says about itself; the meeting point repeats it."""

    side: int


MEETING = Protocol(b"hybridep sites 3\n", Dialler, struct.Struct("!B"))


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT; an IPv6 address is in brackets.  Raises ValueError if it is not that."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or (":" in host and not (host[0] == "[" and host[-1] == "]")):
        raise ValueError(f"{text!r} is not HOST:PORT, such as meet.example.org:29400 or [2001:db8::1]:29400")
    return host.strip("[]"), int(port)
