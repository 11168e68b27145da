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
from pathlib import Path
from typing import NamedTuple

from ds_hybridep.errors import ConfigError

SAME_TLS = "is TLS configured on all ranks or on none?"
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


# The accepting side's verdicts.
WELCOME, SECRET, PROTOCOL, JOB, RESTARTED, EARLY, LARGE = range(7)
REASONS = {
    SECRET: "the two have different secrets; give all ranks of the job the same",
    PROTOCOL: "it does not speak this protocol; install the same version everywhere, and TLS on all ranks or on none",
    JOB: "the two differ in ranks, number of ranks or number of connections; is another job at this address?",
    RESTARTED: "one of the two was restarted, and what it had sent and received is lost",
    EARLY: "it does not expect this rank yet",
    LARGE: "its large packets have not arrived, though small ones do: is the MTU too large somewhere on the way?",
}


def read_secret(path: Path, where: str) -> bytes:
    """Return what a file holds, without space around it; ConfigError, which names the key path `where`."""
    try:
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"{where}: {error}; give a file that this process can read") from error
    if len(secret) < LEAST_SECRET_BYTES:
        raise ConfigError(
            f"{where}: {path} holds {len(secret)} bytes; give at least {LEAST_SECRET_BYTES}, for example the output "
            f"of `openssl rand -hex 32`"
        )
    return secret


class Refused(Exception):
    """The handshake failed for a reason that both sides know; `args` is the verdict."""

    def __str__(self) -> str:
        return REASONS[self.args[0]]


def dial(secret: bytes, claims: Claims) -> Steps:
    """The dialling side's steps; raises Refused."""
    challenge = yield b"", _CHALLENGE
    if not challenge.startswith(MAGIC):
        raise Refused(PROTOCOL)
    hello = MAGIC + os.urandom(_NONCE) + _CLAIMS.pack(*claims)
    answer = yield hello + _prove(secret, b"dial", challenge, hello), _ANSWER
    said, proof = answer[:-_PROOF], answer[-_PROOF:]
    if said[0] in REASONS:
        raise Refused(said[0])
    if not hmac.compare_digest(proof, _prove(secret, b"accept", challenge, hello, said)):
        raise Refused(SECRET)
    return Claims(*_CLAIMS.unpack(said[1:]))


def accept(secret: bytes, admit: Callable[[Claims], tuple[int, Claims]]) -> Steps:
    """The accepting side's steps; raises Refused after the other side was told.

    admit: called with what a dialler claims who knows the secret; returns the verdict and this side's claims.
    """
    challenge = MAGIC + os.urandom(_NONCE)
    hello = yield challenge, _HELLO
    hello, proof = hello[:-_PROOF], hello[-_PROOF:]
    verdict = WELCOME if hmac.compare_digest(proof, _prove(secret, b"dial", challenge, hello)) else SECRET
    if verdict := verdict if hello.startswith(MAGIC) else PROTOCOL:
        yield bytes([verdict]) + bytes(_ANSWER - 1), 0
        raise Refused(verdict)
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
    belongs to the job, so the authority should sign for nobody else.  ConfigError if a file cannot be used.
    """

    certificate: Path | str
    key: Path | str
    authority: Path | str

    def __post_init__(self) -> None:
        self.contexts()

    def contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        """Return the contexts to dial and to accept with."""
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
                raise ConfigError(f"hybridep.link.tls: {error}; give readable files in PEM format: {self}") from error
            made.append(context)
        made[1].num_tickets = 0  # nothing is resumed by tickets, and they would be the only records after a handshake
        return made[0], made[1]
