# SPDX-License-Identifier: Apache-2.0
"""Tensors of a device on their way through gloo, which moves host memory.

One transfer, step by step: who works, what it waits for, and what it does then:

    start     outbound   the current stream so far    device -> pinned memory
    send      host       those copies                 gloo
    receive   host       gloo                         pinned memory
    deliver   inbound    the current stream at start  pinned memory -> device
              current    those copies

The inbound copies also wait for the stream that called `start`, which may still use the memory that they fill.
"""

from collections.abc import Sequence

from torch import Tensor

from ds_hybridep.transport.streams import DeviceStreams

Part = tuple[int, Tensor]  # (global rank, contiguous tensor that goes there or comes from there)


class Staging:
    """Copies of one transfer's tensors in pinned host memory; arguments as in `Channel.start`.

    is_awaited: True if a thread sleeps until the sends have reached the host, False if it polls.
    """

    def __init__(
        self, streams: DeviceStreams, sends: Sequence[Part], receives: Sequence[Part], *, is_awaited: bool
    ) -> None:
        self._streams = streams
        self._origins, self._places = [tensor for _, tensor in sends], [tensor for _, tensor in receives]
        self._handed_over = streams.mark()
        self.sends = [(rank, streams.pinned_like(tensor)) for rank, tensor in sends]
        self.receives = [(rank, streams.pinned_like(tensor)) for rank, tensor in receives]
        with streams.within(streams.outbound, after=self._handed_over):
            for (_, copy), origin in zip(self.sends, self._origins, strict=True):
                copy.copy_(origin, non_blocking=True)
            self._copied = streams.mark(is_awaited=is_awaited)

    def await_sends(self) -> None:
        """Block until the copies in `sends` are complete; RuntimeError if the device failed."""
        if self._origins:
            self._copied.synchronize()
            self._origins = []

    def release_sends(self) -> None:
        self.sends = []

    def deliver(self) -> None:
        """Queue the copies of what has arrived, and make the current stream wait for them."""
        with self._streams.within(self._streams.inbound, after=self._handed_over):
            for (_, copy), place in zip(self.receives, self._places, strict=True):
                # `.data`: as with gloo's own writes, autograd graphs that saved these tensors must see no change.
                place.data.copy_(copy, non_blocking=True)
            arrived = self._streams.mark()
        self._streams.follow(arrived)
        self.receives, self._places = [], []
