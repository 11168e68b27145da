# SPDX-License-Identifier: Apache-2.0
"""Who is at the other end: both sides prove that they know a secret before anything else is read.

    accepting side                                dialling side
        magic, nonce                        ->
                                            <-    magic, nonce, claims, proof("dial")
        verdict, claims, proof("accept")    ->

A proof is HMAC-SHA256 over all that both have said so far, the protocol's magic included, so one that was overheard
opens no other connection, and none of another protocol.  All messages have a fixed size.  With `TLS` this happens
inside TLS 1.3; without it, what follows is neither encrypted nor protected against someone who can change packets on
their way.

`dial` and `accept` only say what is sent and read; a door's `Attempt` does it.
"""

import hashlib
import hmac
import os
import ssl
import struct
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ds_hybridep.errors import ConfigError

SAME_TLS = "is TLS configured on both sides or on none?"
LEAST_SECRET_BYTES = 16
_NONCE, _PROOF = 32, hashlib.sha256().digest_size

# Yields what to send and how many bytes to read after it, is sent these bytes, and returns what the other side claims.
Steps = Generator[tuple[bytes, int], bytes, Any]

# The accepting side's verdicts; a protocol may have more, which are proved like a welcome.
WELCOME, SECRET, PROTOCOL = range(3)
REASONS = {
    SECRET: "the two have different secrets; give both the same",
    PROTOCOL: "it does not speak this protocol; install the same version everywhere, and TLS on both sides or on none",
}


class Protocol(NamedTuple):
    """What two sides mean to speak after the handshake.

    magic: the first bytes of both sides, with the version.
    claims, layout: what one side says about itself and this connection, and its bytes.
    reasons: what the accepting side's further verdicts mean.
    """

    magic: bytes
    claims: Callable[..., Any]
    layout: struct.Struct
    reasons: Mapping[int, str] = {}

    def read(self, said: bytes) -> Any:
        """Return claims."""
        return self.claims(*self.layout.unpack(said))


class Refused(Exception):
    """The handshake failed for a reason that both sides know.  verdict: SECRET and PROTOCOL are not proved."""

    def __init__(self, verdict: int, protocol: Protocol) -> None:
        super().__init__({**REASONS, **protocol.reasons}[verdict])
        self.verdict = verdict


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


def dial(secret: bytes, protocol: Protocol, claims: Iterable[Any]) -> Steps:
    """The dialling side's steps; raises Refused."""
    magic, layout = protocol.magic, protocol.layout
    challenge = yield b"", len(magic) + _NONCE
    if not challenge.startswith(magic):
        raise Refused(PROTOCOL, protocol)
    hello = magic + os.urandom(_NONCE) + layout.pack(*claims)
    answer = yield hello + _prove(secret, b"dial", challenge, hello), 1 + layout.size + _PROOF
    said, proof = answer[:-_PROOF], answer[-_PROOF:]
    verdict = said[0]
    if verdict not in REASONS and not hmac.compare_digest(proof, _prove(secret, b"accept", challenge, hello, said)):
        verdict = SECRET
    if verdict != WELCOME:
        raise Refused(verdict, protocol)
    return protocol.read(said[1:])


def accept(secret: bytes, protocol: Protocol, admit: Callable[[Any], tuple[int, Iterable[Any]]]) -> Steps:
    """The accepting side's steps; raises Refused after the other side was told.

    admit: called with what a dialler claims who knows the secret; returns the verdict and this side's claims.
    """
    magic, layout = protocol.magic, protocol.layout
    challenge = magic + os.urandom(_NONCE)
    hello = yield challenge, len(magic) + _NONCE + layout.size + _PROOF
    hello, proof = hello[:-_PROOF], hello[-_PROOF:]
    verdict = WELCOME if hmac.compare_digest(proof, _prove(secret, b"dial", challenge, hello)) else SECRET
    if verdict := verdict if hello.startswith(magic) else PROTOCOL:
        yield bytes([verdict]) + bytes(layout.size + _PROOF), 0
        raise Refused(verdict, protocol)
    theirs = protocol.read(hello[-layout.size :])
    verdict, ours = admit(theirs)
    said = bytes([verdict]) + layout.pack(*ours)
    yield said + _prove(secret, b"accept", challenge, hello, said), 0
    if verdict:
        raise Refused(verdict, protocol)
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
