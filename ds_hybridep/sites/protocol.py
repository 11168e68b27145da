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

MAGIC = b"hybridep sites 1\n"
NONCE_BYTES, PROOF_BYTES = 32, 32
CHALLENGE_BYTES = len(MAGIC) + NONCE_BYTES
HELLO_BYTES = CHALLENGE_BYTES + PROOF_BYTES
ANSWER_BYTES = 1 + PROOF_BYTES
LENGTH = struct.Struct("!I")
MAX_MESSAGE_BYTES = 2**20


def challenge() -> bytes:
    """Return the first bytes of either side."""
    return MAGIC + os.urandom(NONCE_BYTES)


def prove(secret: bytes, side: str, theirs: bytes, ours: bytes) -> bytes:
    """Return the proof of a side ("site" or "meeting"); the challenge of the meeting point comes first."""
    return hmac.digest(secret, side.encode() + theirs + ours, "sha256")


def pack(message: dict[str, Any]) -> bytes:
    """Return a message as it travels."""
    body = json.dumps(message).encode()
    return LENGTH.pack(len(body)) + body
