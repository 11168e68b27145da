# SPDX-License-Identifier: Apache-2.0
"""Who is at the other end: both sides prove that they know the job's secret before anything else is read.

    accepting side                                dialling side
        MAGIC, nonce                        ->
                                            <-    MAGIC, nonce, claims, proof("dial")
        verdict, claims, proof("accept")    ->

A proof is HMAC-SHA256 over all that both have said so far, so one that was overheard opens no other connection.
All messages have a fixed size.  With `TLS` this happens inside TLS 1.3; without it, what follows is neither encrypted
nor protected against someone who can change packets on their way.
"""

import hashlib
import hmac
import os
import ssl
import struct
from collections.abc import Callable, Generator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple

from ds_hybridep.errors import ConfigError

MAGIC = b"hybridep link 1\n"
LEAST_SECRET_BYTES = 16
_NONCE, _PROOF = 32, hashlib.sha256().digest_size
_CLAIMS = struct.Struct("!IIIHH16sQ")
_CHALLENGE = len(MAGIC) + _NONCE
_HELLO = len(MAGIC) + _NONCE + _CLAIMS.size + _PROOF
_ANSWER = 1 + _CLAIMS.size + _PROOF

# Yields what to send and how many bytes to read after it, is sent these bytes, and returns what the other side claims.
Steps = Generator[tuple[bytes, int], bytes, "Claims"]


class Claims(NamedTuple):
    """What one side says about itself and this connection."""

    rank: int
    to: int  # rank that it means to talk to
    world_size: int
    lane: int  # which of the pair's connections this is
    num_lanes: int
    instance: bytes  # 16 random bytes of this process
    received: int  # DATA frames that it has got in this lane


class Verdict(IntEnum):
    """The accepting side's answer."""

    WELCOME = 0
    SECRET = 1
    PROTOCOL = 2
    JOB = 3
    RESTARTED = 4
    EARLY = 5


REASONS = {
    Verdict.SECRET: "the two have different secrets; give all ranks of the job the same",
    Verdict.PROTOCOL: "it speaks no or another version of this protocol; "
    "install the same version everywhere, and configure TLS on all ranks or on none",
    Verdict.JOB: "the two differ in ranks, number of ranks or number of connections; is another job at this address?",
    Verdict.RESTARTED: "one of the two was restarted, and what it had sent and received is lost",
    Verdict.EARLY: "it does not expect this rank yet",
}


class Refused(Exception):
    """The handshake failed for a reason that both sides know."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(REASONS[verdict])
        self.verdict = verdict


def dial(secret: bytes, claims: Claims) -> Steps:
    """The dialling side's steps; raises Refused."""
    challenge = yield b"", _CHALLENGE
    if not challenge.startswith(MAGIC):
        raise Refused(Verdict.PROTOCOL)
    hello = MAGIC + os.urandom(_NONCE) + _CLAIMS.pack(*claims)
    answer = yield hello + _prove(secret, b"dial", challenge, hello), _ANSWER
    said, proof = answer[:-_PROOF], answer[-_PROOF:]
    if said[0] in REASONS:
        raise Refused(Verdict(said[0]))
    if not hmac.compare_digest(proof, _prove(secret, b"accept", challenge, hello, said)):
        raise Refused(Verdict.SECRET)
    return Claims(*_CLAIMS.unpack(said[1:]))


def accept(secret: bytes, admit: Callable[[Claims], tuple[Verdict, Claims]]) -> Steps:
    """The accepting side's steps; raises Refused after the other side was told.

    admit: called with what a dialler claims who knows the secret; returns the verdict and this side's claims.
    """
    challenge = MAGIC + os.urandom(_NONCE)
    hello = yield challenge, _HELLO
    hello, proof = hello[:-_PROOF], hello[-_PROOF:]
    nothing = bytes(_CLAIMS.size + _PROOF)
    if not hello.startswith(MAGIC):
        yield bytes([Verdict.PROTOCOL]) + nothing, 0
        raise Refused(Verdict.PROTOCOL)
    if not hmac.compare_digest(proof, _prove(secret, b"dial", challenge, hello)):
        yield bytes([Verdict.SECRET]) + nothing, 0
        raise Refused(Verdict.SECRET)
    theirs = Claims(*_CLAIMS.unpack(hello[-_CLAIMS.size :]))
    verdict, ours = admit(theirs)
    said = bytes([verdict]) + _CLAIMS.pack(*ours)
    yield said + _prove(secret, b"accept", challenge, hello, said), 0
    if verdict:
        raise Refused(verdict)
    return theirs


def _prove(secret: bytes, side: bytes, *said: bytes) -> bytes:
    return hmac.digest(secret, b"".join((side, *said)), "sha256")


@dataclass(frozen=True)
class TLS:
    """Files in PEM format: this rank's certificate and key, and the authority that must have signed the others'.

    Names in certificates are not compared with hosts: whoever has a certificate of this authority and the secret
    belongs to the job, so the authority should sign for nobody else.
    """

    certificate: Path
    key: Path
    authority: Path

    def contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        """Return the contexts to dial and to accept with; ConfigError if a file cannot be used."""
        made = []
        for protocol in (ssl.PROTOCOL_TLS_CLIENT, ssl.PROTOCOL_TLS_SERVER):
            context = ssl.SSLContext(protocol)
            context.check_hostname = False
            context.verify_mode = ssl.CERT_REQUIRED
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            try:
                context.load_cert_chain(self.certificate, self.key)
                context.load_verify_locations(self.authority)
            except OSError as error:  # ssl.SSLError is one
                raise ConfigError(
                    f"link.tls: {error}; give files in PEM format that this process may read: {self}"
                ) from error
            made.append(context)
        made[1].num_tickets = 0  # nothing is resumed by tickets, and they would be the only records after a handshake
        return made[0], made[1]
