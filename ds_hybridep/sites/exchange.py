# SPDX-License-Identifier: Apache-2.0
"""The connections of one epoch: this rank and its counterparts, which have the same rank in other sites.

A new epoch has new connections, so nothing of an earlier one can be taken for something of this one.

    member       sends packets, as early as it likes, then a *header*: of which step they are, what they weigh, and
                 whether they are the packets to use (else they follow anew); receives those of all members
    joiner       a site without the state: it sends no packets, receives all, and says that it has them
    all sites    say whether they have everything; members decide by what members say

What is under way decides nothing: `agree` does.  Members never wait for a joiner's first connection.
"""

import contextlib
import hmac
import struct
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ds_hybridep.errors import CommunicationError
from ds_hybridep.link import BULK, TLS, URGENT, Address, Handle, Link, LinkChannel
from ds_hybridep.link.peer import State
from ds_hybridep.sites.fragments import Fragment
from ds_hybridep.sites.patience import Patience

MOST_FRAGMENT_BYTES = 2**34
CONNECT_S = 10.0  # a joiner that is not connected by then is missed
LOOK_S = 1.0  # between looks at how long a wait has lasted
_HEADER = struct.Struct("!QddBB?")
_MOST_HEADER_BYTES = _HEADER.size + 8 * 2 * 255


@dataclass(frozen=True)
class Header:
    """What a member says about its packets.

    step: optimizer steps so far.
    loss_scale: by which its gradients are multiplied.
    weight: how much the packets count in the mean: samples or tokens of the site.
    rates: the learning rates of all parameter groups.
    sketch: of this rank's part of the weights before the step (`StateVector.sketch`), in some exchanges.
    """

    step: int
    loss_scale: float
    weight: float
    rates: tuple[float, ...] = ()
    sketch: tuple[float, ...] = ()

    def pack(self, *, replaces: bool) -> bytes:
        """Return it as it travels.  replaces: packets that were sent before do not count."""
        counts = len(self.rates), len(self.sketch)
        said = _HEADER.pack(self.step, self.loss_scale, self.weight, *counts, replaces)
        return said + struct.pack(f"!{sum(counts)}d", *self.rates, *self.sketch)

    @classmethod
    def unpack(cls, data: memoryview) -> tuple["Header", bool, memoryview]:
        """Return a header, whether it replaces packets, and what follows it."""
        step, loss_scale, weight, num_rates, num_sketch, replaces = _HEADER.unpack_from(data)
        count = num_rates + num_sketch
        numbers = struct.unpack_from(f"!{count}d", data, _HEADER.size)
        header = cls(step, loss_scale, weight, numbers[:num_rates], numbers[num_rates:])
        return header, replaces, data[_HEADER.size + 8 * count :]


@dataclass
class Counters:
    """What this rank has exchanged with one other site, in bytes, and the seconds it has waited for it."""

    sent_bytes: int = 0
    early_bytes: int = 0  # of sent_bytes: what left before the optimizer step
    state_bytes: int = 0  # of sent_bytes: fragments of the state
    received_bytes: int = 0
    waited_s: float = 0.0


class Incoming:
    """What one member sends in an exchange.  sizes: bytes of its packets."""

    def __init__(self, channel: LinkChannel, rank: int, sizes: Sequence[int]) -> None:
        self.packets = torch.empty(sum(sizes), dtype=torch.uint8)  # one after the other
        self._sizes = list(sizes)
        self._parts = [
            channel.receive(rank, into=part, kind=str(index))
            for index, part in enumerate(self.packets.split(self._sizes))
        ]
        most_bytes = _MOST_HEADER_BYTES + len(self.packets)
        self._header = channel.receive(rank, max_bytes=most_bytes, kind="header")

    @property
    def handles(self) -> list[Handle]:
        return [*self._parts, self._header]

    def finish(self) -> tuple[Header, int]:
        """Wait until `packets` are those that count; return their header, and the bytes that have come.

        Raises CommunicationError if they do not come, or have other sizes.
        """
        views = [one.wait() for one in self._parts]  # fills its place
        if (lengths := [len(view) for view in views]) != self._sizes:
            raise CommunicationError(f"packets of {lengths} bytes came instead of {self._sizes}")
        said = self._header.wait()
        header, replaces, anew = Header.unpack(said)
        if len(anew) != (len(self.packets) if replaces else 0):
            raise CommunicationError(f"packets of {len(anew)} bytes in all came instead of {len(self.packets)}")
        if replaces and len(anew):
            self.packets.copy_(torch.frombuffer(bytearray(anew), dtype=torch.uint8))
        return header, sum(self._sizes) + len(said)


@dataclass(frozen=True)
class Packet:
    """What one member has sent in an exchange.  data: uint8 on the CPU, of all slices one after the other."""

    header: Header
    data: Tensor


class SiteConnections:
    """One rank's connections in one epoch.  Made before the epoch is known, because its address must be known first.

    Args:
        names: all sites; the index of a site is its rank on the link.
        rank: of this process in its site.
        announced: the host that others connect to; None: `host`.
    """

    def __init__(
        self, names: Sequence[str], site: str, rank: int, secret: bytes, *, host: str, timeout_s: float,
        counters: Mapping[str, Counters], ports: tuple[int, int] | None = None, tls: TLS | None = None,
        announced: str | None = None,
    ) -> None:  # fmt: skip
        self._names, self._site, self._rank, self._timeout_s = list(names), site, rank, timeout_s
        self._counters = counters
        self._link = Link(
            self._names.index(site), len(names), secret=hmac.digest(secret, f"rank {rank}".encode(), "sha256"),
            host=host, ports=ports, tls=tls, timeout_s=timeout_s,
        )  # fmt: skip
        self.address: Address = (announced or host, self._link.address[1])
        self.members: list[str] = []
        self.joiners: list[str] = []
        self.missed: dict[str, str] = {}  # sites that an exchange did not reach, with the cause
        self._has_failed = False  # a packet is missing; nothing more is exchanged
        self._departed: dict[int, Tensor] = {}  # packets of the next exchange that were sent
        self._incoming: dict[str, Incoming] | None = None  # what members send in it
        self._opened_at = 0.0
        self._answers: dict[str, list[Handle]] = {}  # of joiners, in order, that have not come

    def open(self, epoch: int, members: list[str], joiners: list[str], addresses: Mapping[str, Address]) -> None:
        """Connect with the counterparts; those that are not reached are in `missed`.

        A member does not wait for joiners, and a joiner has no connection with other joiners.
        """
        self.members, self.joiners = members, joiners
        self._opened_at = time.monotonic()
        channels = {"gradients": URGENT, "have": URGENT, "state": BULK}
        self._channels = {
            name: self._link.channel(name, range(len(self._names)), generation=epoch, priority=priority)
            for name, priority in channels.items()
        }
        for name in self.others:
            host, port = addresses[name]
            try:
                self._link.connect({self._index(name): (host, port)}, waits=name in members)
            except CommunicationError as error:
                is_own = host in ("localhost", "::1") or host.startswith("127.")
                hint = f"; site '{name}' announces {host}, its own machine: set its sites.host" if is_own else ""
                self._fail(name, f"{error}{hint}")
        self._answers = {name: [] for name in joiners if name != self._site}

    @property
    def is_joiner(self) -> bool:
        return self._site in self.joiners

    @property
    def others(self) -> list[str]:
        """The other sites that this one is connected with."""
        joiners = [] if self.is_joiner else self.joiners
        return [name for name in (*self.members, *joiners) if name != self._site]

    # -- packets ----------------------------------------------------------------------------------------------------

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
            if self._send(name, packet, str(index)) is not None and is_early:
                self._counters[name].early_bytes += packet.nbytes

    def swap(self, packets: Sequence[Tensor], header: Header) -> dict[str, Packet]:
        """Send the packets that have not departed yet; all of them, if one that has departed is another one.

        Returns what each member has sent, in their order.

        Raises CommunicationError if a member's do not come; `missed` then has its name.
        """
        self._check()
        self.begin([packet.nbytes for packet in packets])
        replaces = any(packets[index] is not departed for index, departed in self._departed.items())
        for index, packet in enumerate(packets):
            if index not in self._departed:
                self.depart(index, packet, is_early=False)
        ours = torch.cat([torch.empty(0, dtype=torch.uint8), *packets])
        said = torch.frombuffer(bytearray(header.pack(replaces=replaces)), dtype=torch.uint8)
        for name in self.others:
            self._send(name, torch.cat([said, ours]) if replaces else said, "header")
        self._departed = {}
        return self._received({self._site: Packet(header, ours)})

    def observe(self, sizes: Sequence[int]) -> dict[str, Packet]:
        """As `swap`, for a joiner, which sends nothing.  sizes: bytes of each packet of a member."""
        self._check()
        self.begin(sizes)
        return self._received({})

    def _received(self, found: dict[str, Packet]) -> dict[str, Packet]:
        incoming, self._incoming = self._incoming or {}, None
        for name, one in incoming.items():
            try:
                self._wait(one.handles, name)
                header, num_bytes = one.finish()
                self._counters[name].received_bytes += num_bytes
                found[name] = Packet(header, one.packets)
            except CommunicationError as error:
                self._fail(name, str(error))
        self._check()
        return {name: found[name] for name in self.members}

    # -- agreement --------------------------------------------------------------------------------------------------

    def agree(self, is_complete: bool, wants_change: bool) -> tuple[bool, bool]:
        """Return whether all members have all packets, and whether a quorum must come before the next exchange.

        wants_change: this site wants one.
        """
        self._check()
        ours = torch.tensor([is_complete, wants_change], dtype=torch.uint8)
        have, others = self._channels["have"], [name for name in self.members if name != self._site]
        said = {name: ours if name == self._site else torch.empty_like(ours) for name in self.members}
        waiting = {name: have.receive(self._index(name), into=said[name]) for name in others}
        for name in self.others:
            self._send(name, ours, channel="have")
        for name, handle in waiting.items():
            try:
                if len(view := self._arrived(handle, name)) != ours.nbytes:
                    raise CommunicationError(f"{len(view)} bytes came instead of {ours.nbytes}")
                self._counters[name].received_bytes += ours.nbytes
            except CommunicationError as error:
                self._fail(name, str(error))
        self._check()
        wants = any(bool(one[1]) for one in said.values())
        if not self.is_joiner:
            wants |= any([self._joiner_wants_change(name) for name in list(self._answers)])
        return all(bool(one[0]) for one in said.values()), wants

    def _joiner_wants_change(self, name: str) -> bool:
        """Wait until a joiner has everything so far, unless it is not connected yet."""
        answers, index = self._answers[name], self._index(name)
        try:
            answers.append(self._channels["have"].receive(index, max_bytes=2))
            if (peer := self._link.peers.get(index)) is None or peer.state is State.GONE:
                raise CommunicationError(f"{name} is gone" if peer is None else peer.mail.cause)
            if not peer.is_connected() and not answers[0].done():
                if time.monotonic() - self._opened_at < CONNECT_S:
                    return False  # what is sent meanwhile waits for it
                raise CommunicationError(f"no connection after {CONNECT_S:g} s; last, {peer.last_trouble}")
            views = [bytes(self._arrived(answer, name)) for answer in answers]
        except CommunicationError as error:
            self.missed[name] = str(error)
            self.joiners = [one for one in self.joiners if one != name]
            del self._answers[name]
            return True
        self._answers[name] = []
        return any(view[1] or not view[0] for view in views)

    # -- fragments of the state -------------------------------------------------------------------------------------

    def send_fragment(self, name: str, fragment: Fragment) -> Handle | None:
        """Start to send a fragment to a joiner, or to a member whose weights have drifted; None if it is gone."""
        data = fragment.pack()
        if (sent := self._send(name, data, channel="state")) is not None:
            self._counters[name].state_bytes += data.nbytes
        return sent

    def receive_fragment(self, name: str) -> Fragment:
        """Return the next fragment that a member sends.  Raises CommunicationError if it does not come."""
        handle = self._channels["state"].receive(self._index(name), max_bytes=MOST_FRAGMENT_BYTES)
        try:
            data = self._arrived(handle, name)
        except CommunicationError as error:
            self._fail(name, str(error))
            raise
        self._counters[name].received_bytes += len(data)
        return Fragment.unpack(data)

    # -- the rest ---------------------------------------------------------------------------------------------------

    def _send(self, name: str, packet: Tensor, kind: str = "", channel: str = "gradients") -> Handle | None:
        """Send something of an exchange to a site; None if it is gone."""
        try:
            sent = self._channels[channel].send(self._index(name), packet, kind=kind)
        except CommunicationError as error:
            if name in self.members:
                self._fail(name, str(error))
            return None
        self._counters[name].sent_bytes += packet.nbytes
        return sent

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
            raise CommunicationError(f"site '{self._site}' lacks packets; not reached: {self.missed}")

    def _fail(self, name: str, cause: str) -> None:
        """Note that nothing comes of a site any more; one that has left these connections is reached all the same."""
        self._has_failed = True
        peer = self._link.peers.get(self._index(name))
        if peer is None or not peer.has_left:
            self.missed.setdefault(name, cause)

    def close(self) -> None:
        """End the connections; what was sent still leaves."""
        self._link.close(waits=False)

    def _index(self, name: str) -> int:
        return self._names.index(name)


def weights_of(packets: Mapping[str, Packet], without: Container[str] = ()) -> list[float]:
    """Return what the packets of each member count in a mean, by the largest: all 1 where all count alike.

    without: members whose packets count nothing.
    """
    weights = [0.0 if name in without else one.header.weight for name, one in packets.items()]
    largest = max(weights)
    return [weight / largest if largest else 0.0 for weight in weights]
