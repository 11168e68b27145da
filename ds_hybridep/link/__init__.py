# SPDX-License-Identifier: Apache-2.0
"""Framed messages between pairs of ranks over TCP: resumed after resets, authenticated, with heartbeats.

    link = Link(rank, world_size, secret=secret, host="10.0.0.1", timeout_s=60)
    link.connect({0: ("10.0.0.1", 29600), ...})        # each rank's `link.address`, exchanged by the caller
    channel = link.channel("gradients", (0, 1))
    arriving, leaving = channel.receive(1, into=tensor), channel.send(1, other)
    arriving.wait(), leaving.wait()

What was sent is kept until it is acknowledged, and sent again over the next connection if one breaks.  No message asks
the other side first: where a receive waits for it, its bytes are read into that receive's memory.
"""

from ds_hybridep.link.link import Link, LinkChannel
from ds_hybridep.link.messages import BULK, URGENT, Handle
from ds_hybridep.link.options import Address, LinkOptions
from ds_hybridep.link.peer import BLOCKED, FAILED, LEFT, LOST, SILENT_S, Fact, Peer, PeerStatistics, State
from ds_hybridep.link.trust import LEAST_SECRET_BYTES, TLS, read_secret

__all__ = [
    "BLOCKED", "BULK", "FAILED", "LEAST_SECRET_BYTES", "LEFT", "LOST", "SILENT_S", "TLS", "URGENT", "Address", "Fact",
    "Handle", "Link", "LinkChannel", "LinkOptions", "Peer", "PeerStatistics", "State", "read_secret",
]  # fmt: skip
