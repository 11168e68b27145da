# SPDX-License-Identifier: Apache-2.0
"""The connections of one epoch: this rank and its counterparts, which have the same rank in other sites.

A new epoch has new connections, so nothing of an earlier one can be taken for something of this one.
"""

import contextlib
import hashlib
import hmac
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ds_hybridep.errors import CommunicationError
from ds_hybridep.link import BULK, TLS, URGENT, Address, Handle, Link
from ds_hybridep.sites.patience import Patience

DIGEST_BYTES = 8  # of a hash of weights
CHUNK_BYTES = 2**24  # of a state
LOOK_S = 1.0  # between looks at how long a wait has lasted


@dataclass
class Counters:
    """What this rank has exchanged with one other site, in bytes, and the seconds it has waited for it."""

    sent_bytes: int = 0
    received_bytes: int = 0
    waited_s: float = 0.0


class Crossing:
    """One rank's connections in one epoch.  Made before the epoch is known, because its address must be known first.

    Args:
        names: all sites; the index of a site is its rank on the link.
        rank: of this process in its site.
    """

    def __init__(
        self, names: Sequence[str], site: str, rank: int, secret: bytes, host: str, timeout_s: float,
        counters: Mapping[str, Counters], ports: tuple[int, int] | None = None, tls: TLS | None = None,
    ) -> None:  # fmt: skip
        self._names, self._site, self._rank, self._timeout_s = list(names), site, rank, timeout_s
        self._counters = counters
        self._link = Link(
            self._names.index(site), len(names), secret=hmac.digest(secret, f"rank {rank}".encode(), "sha256"),
            host=host, ports=ports, tls=tls, timeout_s=timeout_s,
        )  # fmt: skip
        self.address: Address = self._link.address
        self.members: list[str] = []
        self.observers: list[str] = []
        self.missed: set[str] = set()  # sites that an exchange did not reach
        self._has_failed = False  # a packet is missing; nothing more is exchanged

    def open(self, epoch: int, members: list[str], observers: list[str], addresses: Mapping[str, Address]) -> None:
        """Connect with the counterparts; those that are not reached are in `missed`."""
        self.members, self.observers = members, observers
        channels = {"gradients": URGENT, "have": URGENT, "state": BULK}
        self._channels = {
            name: self._link.channel(name, range(len(self._names)), generation=epoch, priority=priority)
            for name, priority in channels.items()
        }
        for name in self.others:
            host, port = addresses[name]
            try:
                self._link.connect({self._index(name): (host, port)})
            except CommunicationError:
                if name in members:
                    self._fail(name)

    @property
    def others(self) -> list[str]:
        """The other members, and observers."""
        return [name for name in (*self.members, *self.observers) if name != self._site]

    def swap(self, packet: Tensor) -> list[Tensor]:
        """Send a packet (uint8, on the CPU) to all other sites; return those of all members, in their order.

        Raises CommunicationError if a member's does not come; `missed` then has its name.
        """
        return self._swap("gradients", packet)

    def agree(self, is_complete: bool, wants_change: bool, digest: bytes) -> tuple[bool, bool]:
        """Return whether all members have all packets, and whether a quorum must come before the next exchange.

        wants_change: this site wants one.  digest: DIGEST_BYTES; where digests of weights differ, a quorum is needed.
        """
        ours = torch.tensor([is_complete, wants_change, *digest], dtype=torch.uint8)
        said = torch.stack(self._swap("have", ours))
        is_equal = bool((said[:, 2:] == said[0, 2:]).all())
        return bool(said[:, 0].all()), bool(said[:, 1].any()) or not is_equal

    def _swap(self, channel: str, packet: Tensor) -> list[Tensor]:
        self._check()
        sends, received = [], {self._site: packet}
        waiting = {}
        for name in self.others:
            rank = self._index(name)
            if name in self.members:
                received[name] = torch.empty_like(packet)
                waiting[name] = self._channels[channel].receive(rank, into=received[name])
            if name in self.members or channel == "gradients":
                try:
                    sends.append((name, self._channels[channel].send(rank, packet)))
                    self._counters[name].sent_bytes += packet.nbytes
                except CommunicationError:
                    if name in self.members:
                        self._fail(name)
        for name, handle in waiting.items():
            try:
                view = self._wait(handle, name)
                if len(view) != packet.nbytes:
                    raise CommunicationError(f"a packet of {len(view)} bytes came instead of {packet.nbytes}")
                self._counters[name].received_bytes += packet.nbytes
            except CommunicationError:
                self._fail(name)
        self._check()
        return [received[name] for name in self.members]

    def _wait(self, handle: Handle, name: str) -> memoryview:
        """Return what a site sends; announce it if that takes long."""
        began = time.monotonic()
        with Patience("" if self._rank else f"site '{self._site}' waits for site '{name}'") as patience:
            while not handle.done():
                with contextlib.suppress(CommunicationError):
                    handle.wait(LOOK_S)
                    break
                patience.look()
        self._counters[name].waited_s += time.monotonic() - began
        return handle.wait()

    def _check(self) -> None:
        if self._has_failed:
            raise CommunicationError(f"site '{self._site}' lacks packets; not reached: {sorted(self.missed)}")

    def _fail(self, name: str) -> None:
        """Note that nothing comes of a site any more; one that has left these connections is reached all the same."""
        self._has_failed = True
        peer = self._link.peers.get(self._index(name))
        if peer is None or not peer.has_left:
            self.missed.add(name)

    def send_state(self, name: str, state: bytes) -> None:
        """Start to send a state to a site."""
        rank, channel = self._index(name), self._channels["state"]
        try:
            channel.send(rank, len(state).to_bytes(8, "big") + hashlib.sha256(state).digest())
            for at in range(0, len(state), CHUNK_BYTES):
                channel.send(rank, memoryview(state)[at : at + CHUNK_BYTES])
                self._counters[name].sent_bytes += min(CHUNK_BYTES, len(state) - at)
        except CommunicationError:
            if name in self.members:
                self._fail(name)

    def receive_state(self, name: str) -> bytes:
        """Return the state that a site sends.  Raises CommunicationError if it does not come whole."""
        rank, channel = self._index(name), self._channels["state"]
        head = bytes(self._wait(channel.receive(rank, max_bytes=40), name))
        state = bytearray(int.from_bytes(head[:8], "big"))
        for at in range(0, len(state), CHUNK_BYTES):
            self._wait(channel.receive(rank, into=memoryview(state)[at : at + CHUNK_BYTES]), name)
        if hashlib.sha256(state).digest() != head[8:]:
            raise CommunicationError(f"site '{self._site}': the state that came from '{name}' has another hash")
        self._counters[name].received_bytes += len(state)
        return bytes(state)

    def observe(self, num_bytes: int) -> list[Any]:
        """Start to receive the members' next packets; returns handles in the members' order."""
        places = [torch.empty(num_bytes, dtype=torch.uint8) for _ in self.members]
        return [
            (place, self._channels["gradients"].receive(self._index(name), into=place))
            for name, place in zip(self.members, places, strict=True)
        ]

    def close(self) -> None:
        """End the connections; what was sent still leaves."""
        self._link.close(waits=False)

    def _index(self, name: str) -> int:
        return self._names.index(name)
