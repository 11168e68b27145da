# SPDX-License-Identifier: Apache-2.0
"""The connections of one epoch: this rank and its counterparts, which have the same rank in other sites.

A new epoch has new connections, so nothing of an earlier one can be taken for something of this one.

In an exchange, each member sends its packets, in any order and as early as it likes, and then a *verdict*: whether
these packets count.  If the gradients have changed since, the verdict holds all packets anew.  What is under way
decides nothing: `agree` does.
"""

import contextlib
import hashlib
import hmac
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_hybridep.errors import CommunicationError
from ds_hybridep.link import BULK, TLS, URGENT, Address, Handle, Link, LinkChannel
from ds_hybridep.sites.patience import Patience

DIGEST_BYTES = 8  # of a hash of weights
CHUNK_BYTES = 2**24  # of a state
LOOK_S = 1.0  # between looks at how long a wait has lasted


@dataclass
class Counters:
    """What this rank has exchanged with one other site, in bytes, and the seconds it has waited for it."""

    sent_bytes: int = 0
    early_bytes: int = 0  # of sent_bytes: what left before the optimizer step
    received_bytes: int = 0
    waited_s: float = 0.0


class Incoming:
    """What one member sends in an exchange.

    sizes: bytes of its packets.  agreed: what it sends to observers once all members have agreed.
    """

    def __init__(self, channel: LinkChannel, rank: int, sizes: Sequence[int], agreed: Handle | None = None) -> None:
        self._agreed = agreed
        self.packets = torch.empty(sum(sizes), dtype=torch.uint8)  # one after the other
        self._sizes = list(sizes)
        self._parts = [
            channel.receive(rank, into=part, kind=str(index))
            for index, part in enumerate(self.packets.split(self._sizes))
        ]
        self._verdict = channel.receive(rank, max_bytes=1 + len(self.packets), kind="verdict")

    @property
    def handles(self) -> list[Handle]:
        return [*self._parts, self._verdict]

    def is_whole(self) -> bool:
        return all(one.done() and one.failure() is None for one in self.handles)

    def is_agreed(self) -> bool:
        return self._agreed is not None and self._agreed.done() and self._agreed.failure() is None

    def has_failed(self) -> bool:
        waiting = self.handles if self._agreed is None else [*self.handles, self._agreed]
        return any(one.failure() is not None for one in waiting)

    def finish(self) -> int:
        """Wait until `packets` are those that count, and return the bytes that have come.

        Raises CommunicationError if they do not come, or have other sizes.
        """
        views = [one.wait() for one in self._parts]  # fills its place
        if (lengths := [len(view) for view in views]) != self._sizes:
            raise CommunicationError(f"packets of {lengths} bytes came instead of {self._sizes}")
        verdict = self._verdict.wait()
        if (anew := len(verdict) - 1) not in (0, len(self.packets)):
            raise CommunicationError(f"packets of {anew} bytes in all came instead of {len(self.packets)}")
        if verdict[0]:
            self.packets.copy_(torch.frombuffer(bytearray(verdict[1:]), dtype=torch.uint8))
        return sum(self._sizes) + anew


class Crossing:
    """One rank's connections in one epoch.  Made before the epoch is known, because its address must be known first.

    Args:
        names: all sites; the index of a site is its rank on the link.
        rank: of this process in its site.
    """

    def __init__(
        self, names: Sequence[str], site: str, rank: int, secret: bytes, *, host: str, timeout_s: float,
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
        self._departed: dict[int, Tensor] = {}  # packets of the next exchange that were sent
        self._incoming: dict[str, Incoming] | None = None  # what members send in it

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

    def begin(self, sizes: Sequence[int]) -> None:
        """Let packets of the next exchange come, which have these bytes; a second call before `swap` does nothing."""
        if self._incoming is None and not self._has_failed:
            self._incoming = {
                name: Incoming(self._channels["gradients"], self._index(name), sizes)
                for name in self.members if name != self._site
            }  # fmt: skip

    def depart(self, index: int, packet: Tensor, *, is_early: bool = True) -> None:
        """Send packet number `index` of the next exchange (uint8, on the CPU; it must not change) to all other sites.

        is_early: before the optimizer step.  Errors come up in `swap`.
        """
        self._departed[index] = packet
        for name in self.others:
            if self._send(name, packet, str(index)) and is_early:
                self._counters[name].early_bytes += packet.nbytes

    def swap(self, packets: Sequence[Tensor]) -> list[Tensor]:
        """Send the packets that have not departed yet; all of them, if one that has departed is another one.

        Returns for each member, in their order, its packets one after the other.

        Raises CommunicationError if a member's do not come; `missed` then has its name.
        """
        self._check()
        self.begin([packet.nbytes for packet in packets])
        replaces = any(packets[index] is not departed for index, departed in self._departed.items())
        for index, packet in enumerate(packets):
            if index not in self._departed:
                self.depart(index, packet, is_early=False)
        ours = torch.cat([torch.empty(0, dtype=torch.uint8), *packets])
        verdict = torch.tensor([replaces], dtype=torch.uint8)
        for name in self.others:
            self._send(name, torch.cat([verdict, ours]) if replaces else verdict, "verdict")
        incoming, self._incoming, self._departed = self._incoming or {}, None, {}
        for name, one in incoming.items():
            try:
                self._wait(one.handles, name)
                self._counters[name].received_bytes += one.finish()
            except CommunicationError:
                self._fail(name)
        self._check()
        return [ours if name == self._site else incoming[name].packets for name in self.members]

    def agree(self, is_complete: bool, wants_change: bool, digest: bytes) -> tuple[bool, bool]:
        """Return whether all members have all packets, and whether a quorum must come before the next exchange.

        wants_change: this site wants one.  digest: DIGEST_BYTES; where digests of weights differ, a quorum is needed.
        """
        ours = torch.tensor([is_complete, wants_change, *digest], dtype=torch.uint8)
        said = torch.stack(self._said(ours))
        is_equal = bool((said[:, 2:] == said[0, 2:]).all())
        if is_agreed := bool(said[:, 0].all()):
            for name in self.observers:
                self._send(name, torch.ones(1, dtype=torch.uint8), channel="have")
        return is_agreed, bool(said[:, 1].any()) or not is_equal

    def _said(self, ours: Tensor) -> list[Tensor]:
        """Tell all other members something short; return what all members say, in their order."""
        self._check()
        said = {name: ours if name == self._site else torch.empty_like(ours) for name in self.members}
        have, others = self._channels["have"], [name for name in self.members if name != self._site]
        waiting = {name: have.receive(self._index(name), into=said[name]) for name in others}
        for name in others:
            self._send(name, ours, channel="have")
        for name, handle in waiting.items():
            try:
                if len(view := self._arrived(handle, name)) != ours.nbytes:
                    raise CommunicationError(f"{len(view)} bytes came instead of {ours.nbytes}")
                self._counters[name].received_bytes += ours.nbytes
            except CommunicationError:
                self._fail(name)
        self._check()
        return list(said.values())

    def _send(self, name: str, packet: Tensor, kind: str = "", channel: str = "gradients") -> bool:
        """Send something of an exchange to a site; False if it is gone."""
        try:
            self._channels[channel].send(self._index(name), packet, kind=kind)
        except CommunicationError:
            if name in self.members:
                self._fail(name)
            return False
        self._counters[name].sent_bytes += packet.nbytes
        return True

    def _wait(self, handles: Sequence[Handle], name: str) -> None:
        """Wait until what a site sends has come or failed; announce it if that takes long."""
        began = time.monotonic()
        with Patience("" if self._rank else f"site '{self._site}' waits for site '{name}'") as patience:
            for handle in handles:
                while not handle.done():
                    with contextlib.suppress(CommunicationError):
                        handle.wait(LOOK_S)
                        break
                    patience.look()
        self._counters[name].waited_s += time.monotonic() - began

    def _arrived(self, handle: Handle, name: str) -> memoryview:
        self._wait([handle], name)
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
        head = bytes(self._arrived(channel.receive(rank, max_bytes=40), name))
        state = bytearray(int.from_bytes(head[:8], "big"))
        for at in range(0, len(state), CHUNK_BYTES):
            self._arrived(channel.receive(rank, into=memoryview(state)[at : at + CHUNK_BYTES]), name)
        if hashlib.sha256(state).digest() != head[8:]:
            raise CommunicationError(f"site '{self._site}': the state that came from '{name}' has another hash")
        self._counters[name].received_bytes += len(state)
        return bytes(state)

    def observe(self, sizes: Sequence[int]) -> dict[str, Incoming]:
        """Start to receive what members send in their next exchange: packets of these bytes, and that they agreed.

        The latter comes to rank 0, as only that rank of a site calls `agree`.
        """
        gradients, have = self._channels["gradients"], self._channels["have"]
        ranks = {name: self._index(name) for name in self.members if name != self._site}
        return {
            name: Incoming(gradients, rank, sizes, None if self._rank else have.receive(rank, max_bytes=1))
            for name, rank in ranks.items()
        }

    def close(self) -> None:
        """End the connections; what was sent still leaves."""
        self._link.close(waits=False)

    def _index(self, name: str) -> int:
        return self._names.index(name)
