# SPDX-License-Identifier: Apache-2.0
"""What a site and the meeting point say to each other: JSON messages over TCP, after both have proved the secret.

    meeting point                          site
        MAGIC, nonce                  ->
                                      <-   MAGIC, nonce, proof("site")
        verdict, proof("meeting")     ->
        4 bytes of length, JSON      <->   4 bytes of length, JSON

A proof is HMAC-SHA256 over both nonces.  Nothing is parsed before it.
"""

import hmac
import json
import os
import struct
from typing import Any

MAGIC = b"hybridep sites 2\n"
NONCE_BYTES, PROOF_BYTES = 32, 32
CHALLENGE_BYTES = len(MAGIC) + NONCE_BYTES
HELLO_BYTES = CHALLENGE_BYTES + PROOF_BYTES
ANSWER_BYTES = 1 + PROOF_BYTES
LENGTH = struct.Struct("!I")
MAX_MESSAGE_BYTES = 2**20


def split_address(text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT; an IPv6 address is in brackets.  Raises ValueError if it is not that."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or (":" in host and not (host[0] == "[" and host[-1] == "]")):
        raise ValueError(f"{text!r} is not HOST:PORT, such as meet.example.org:29400 or [2001:db8::1]:29400")
    return host.strip("[]"), int(port)


def challenge() -> bytes:
    """Return the first bytes of either side."""
    return MAGIC + os.urandom(NONCE_BYTES)


def prove(secret: bytes, side: str, theirs: bytes, ours: bytes) -> bytes:
    """Return the proof of a side ("site", "operator" or "meeting"); the meeting point's challenge comes first."""
    return hmac.digest(secret, side.encode() + theirs + ours, "sha256")


def pack(message: dict[str, Any]) -> bytes:
    """Return a message as it travels."""
    body = json.dumps(message).encode()
    return LENGTH.pack(len(body)) + body
