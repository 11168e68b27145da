# SPDX-License-Identifier: Apache-2.0
"""The streams of a device beside the one that training computes in.

    with streams.aside():            in the side stream, after all work queued on the current stream so far
        decode(...)
        done = streams.mark()
    ...
    streams.follow(done)             the current stream waits for the mark; the host does not
    use(...)

Encoding, decoding and sums of migration run in the side stream.  Copies between device and host have two more streams,
one per direction, so that they delay neither computation nor each other.  A CPU has no streams: work runs at once.

The link moves host memory.  One transfer of a device's tensors over it, step by step: who works, what it waits for,
and what it does then:

    start     outbound   the current stream so far    device -> pinned memory
    send      host       those copies                 the link
    receive   host       the link                     pinned memory
    deliver   inbound    the current stream at start  pinned memory -> device
              current    those copies

The inbound copies also wait for the stream that called `start`, which may still use the memory that they fill.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

Mark = Any  # a point in a stream
PeerTensor = tuple[int, Tensor]  # (global rank, contiguous tensor that goes there or comes from there)


class DeviceStreams:
    """Streams of one CUDA device.

    Code that hands a tensor from one stream to another keeps it until the other stream or the host was waited for,
    because freed memory goes back to the stream that it was allocated in.

    api: has the functions of torch.cuda that are used; tests replace it.
    """

    def __init__(self, device: torch.device, api: Any = torch.cuda) -> None:
        self.device, self._api = device, api
        self._side, self.outbound, self.inbound = (self.new_stream() for _ in range(3))

    def new_stream(self) -> Any:
        return self._api.Stream(self.device)

    def choose_device(self) -> None:
        """Let the calling thread use this device; by default a thread makes memory on the first one."""
        self._api.set_device(self.device)

    @contextmanager
    def within(self, stream: Any, *, after: Mark = None) -> Iterator[None]:
        """Run the body's work in `stream`, after the mark `after` and the work that is queued there."""
        if after is not None:
            stream.wait_event(after)
        with self._api.stream(stream):
            yield

    def aside(self) -> AbstractContextManager[None]:
        """Run the body's work in the side stream, after all work queued on the current stream so far."""
        return self.within(self._side, after=self.mark())

    def free_behind_side(self, tensor: Tensor) -> None:
        """Call this before freeing a tensor of another stream that the side stream may still use."""
        if tensor.is_cuda:
            tensor.record_stream(self._side)

    def mark(self, *, is_awaited: bool = False) -> Mark:
        """Mark the point that the current stream has reached.  is_awaited: a thread sleeps until then, not polls."""
        mark = self._api.Event(blocking=is_awaited)
        mark.record(self._api.current_stream(self.device))
        return mark

    def follow(self, mark: Mark) -> None:
        """Make the current stream wait for `mark`.  Does not block."""
        self._api.current_stream(self.device).wait_event(mark)

    def wait_for_side(self) -> None:
        """Make the current stream wait for all work queued on the side stream so far.  Does not block."""
        mark = self._api.Event()
        mark.record(self._side)
        self.follow(mark)

    def pinned_like(self, tensor: Tensor) -> Tensor:
        """Return pinned host memory for a contiguous `tensor`; torch reuses it only after its copies have ended."""
        return torch.empty_like(tensor, device="cpu", pin_memory=True)


class Pinned:
    """Copies of one transfer's tensors in pinned host memory; arguments as in `Channel.start`.

    is_awaited: True if a thread sleeps until the sends have reached the host, False if it polls.
    """

    def __init__(
        self, streams: DeviceStreams, sends: Sequence[PeerTensor], receives: Sequence[PeerTensor], *, is_awaited: bool
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

    def wait(self, _timeout_s: float) -> None:
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
                # `.data`: as with the link's own writes, autograd graphs that saved these tensors must see no change.
                place.data.copy_(copy, non_blocking=True)
            arrived = self._streams.mark()
        self._streams.follow(arrived)
        self.receives, self._places = [], []


@functools.cache
def streams_of(device: torch.device) -> DeviceStreams | None:
    """Return the streams that all layers and transfers of this process share on a device; None for a CPU."""
    return DeviceStreams(device) if device.type == "cuda" else None


def synchronize(device: torch.device) -> None:
    """Block until the current stream is idle; call this before reading a clock."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
