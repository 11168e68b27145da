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

import errno
import hashlib
import hmac
import os
import selectors
import socket
import ssl
import struct
import time
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
WELCOME, SECRET, PROTOCOL, JOB, RESTARTED, EARLY = range(6)
REASONS = {
    SECRET: "the two have different secrets; give all ranks of the job the same",
    PROTOCOL: "it does not speak this protocol; install the same version everywhere, and TLS on all ranks or on none",
    JOB: "the two differ in ranks, number of ranks or number of connections; is another job at this address?",
    RESTARTED: "one of the two was restarted, and what it had sent and received is lost",
    EARLY: "it does not expect this rank yet",
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
                raise ConfigError(f"hybridep.link.tls: {error}; give readable files in PEM format: {self}") from error
            made.append(context)
        made[1].num_tickets = 0  # nothing is resumed by tickets, and they would be the only records after a handshake
        return made[0], made[1]


class Attempt:
    """A connection before its handshake has ended; runs the handshake's steps as bytes come in.

    Args:
        steps: from `dial` or `accept`; None only finds out whether the port takes connections.
        context: for TLS.
        on_end: called with this and with what the other side claims, or with what has gone wrong.
        place: the address to connect `sock` to; None for a connection that was accepted.
        on_connect: called when the other side's system has taken the connection.
    """

    def __init__(
        self, selector: selectors.BaseSelector, sock: socket.socket, steps: Steps | None,
        context: ssl.SSLContext | None, on_end: Callable[["Attempt", Claims | None, Exception | None], None],
        place: tuple[object, ...] | None = None, on_connect: Callable[[], object] = lambda: None,
    ) -> None:  # fmt: skip
        self.began_at = time.monotonic()
        self._selector, self._steps, self._on_end, self._on_connect = selector, steps, on_end, on_connect
        self.dials = self._is_connecting = place is not None
        self._says, self._need = (b"", 0) if steps is None else next(steps)
        self._got, self._refusal = b"", 0
        sock.setblocking(False)
        self.sock: socket.socket = sock
        if context is not None and steps is not None:
            self.sock = context.wrap_socket(sock, server_side=place is None, do_handshake_on_connect=False)
        self._selector.register(self.sock, selectors.EVENT_WRITE, self.on_event)
        if place is not None:
            self._refusal = self.sock.connect_ex(place)

    def on_event(self, _: int) -> None:
        """Go as far as the socket allows."""
        try:
            claims = self._go()
        except (BlockingIOError, ssl.SSLWantReadError):
            self._selector.modify(self.sock, selectors.EVENT_READ, self.on_event)
        except ssl.SSLWantWriteError:
            self._selector.modify(self.sock, selectors.EVENT_WRITE, self.on_event)
        except Refused as error:
            self.end(None, error)
        except OSError as error:
            self.end(None, error if self._is_connecting else ConnectionError(f"{error}; {SAME_TLS}"))
        else:
            self.end(claims, None)

    def end(self, claims: Claims | None, failure: Exception | None) -> None:
        """Hand the connection over, or close it."""
        self._selector.unregister(self.sock)
        if claims is None:
            self.sock.close()
        self._on_end(self, claims, failure)

    def _go(self) -> Claims | None:
        if self._is_connecting:
            number = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if self._refusal != errno.EINPROGRESS:
                number = number or self._refusal
            if number:
                raise OSError(number, os.strerror(number))
            self._is_connecting = False
            self._on_connect()
        if self._steps is None:
            return None
        if isinstance(self.sock, ssl.SSLSocket):
            self.sock.do_handshake()
        while True:
            if self._says and self.sock.send(self._says) < len(self._says):  # a new connection has room for it
                raise ConnectionError("it takes no bytes")
            self._says = b""
            while len(self._got) < self._need:
                if not (part := self.sock.recv(self._need - len(self._got))):
                    raise ConnectionError("it closed the connection in the handshake")
                self._got += part
            got, self._got = self._got, b""
            try:
                self._says, self._need = self._steps.send(got)
            except StopIteration as end:
                return Claims(*end.value)
